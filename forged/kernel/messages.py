"""The message types of the bus: facts, requests, signals; and the decisions that handlers return.

Invariants:
- A fact is in the past tense and is durable before any handler or client receives it.
- A request has exactly one handler and one reply.
- A signal may be lost and is never journalled.
- Messages are frozen values. The class name is the message's name on the bus, on the wire and in the store.
- The reply, facts and writes of a decision become durable together or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar, get_args

import msgspec

from forged.auth.model import Principal, Role
from forged.errors import PeerError

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

ANY_JOB = "*"

FACTS: dict[str, type[Fact]] = {}
REQUESTS: dict[str, type[Request[Any]]] = {}
SIGNALS: dict[str, type[Signal]] = {}


def _register(table: dict[str, type[Any]], cls: type[Any]) -> None:
    other = table.get(cls.__name__)
    if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"{cls.__name__} is defined in {other.__module__} already; give one of them another name")
    table[cls.__name__] = cls


class Fact(msgspec.Struct, frozen=True):
    """The base of all facts. `level` is the level at which the daemon logs it."""

    level: ClassVar[str] = "info"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _register(FACTS, cls)


class UnknownFact(msgspec.Struct, frozen=True):
    """A fact of a type that is not defined in this process: from a plugin or a newer daemon."""

    type: str
    fields: dict[str, Any]


class Fence(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The daemon's term and the job's generation that the sender knows; a smaller fence is outdated."""

    term: int
    generation: int


class Request(msgspec.Struct, Generic[R_co], frozen=True):
    """The base of all requests; one handler answers each type with an `R_co`.

    `needs` is the role that the caller must have. `decides` is true for a request that changes state: its reply is
    remembered, and a repeated request gets that reply. `job_field` names the field with the job that the request
    concerns: None means the whole daemon; with `ANY_JOB` the handler checks the caller's jobs itself.
    """

    needs: ClassVar[Role] = Role.OPERATOR
    decides: ClassVar[bool] = True
    job_field: ClassVar[str | None] = "job"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _register(REQUESTS, cls)

    @classmethod
    def reply_type(cls) -> Any:
        """The type between the brackets of `Request[...]`."""
        return _reply_type(cls)


@cache
def _reply_type(cls: type[Request[Any]]) -> Any:
    for base in getattr(cls, "__orig_bases__", ()):
        if (arguments := get_args(base)) and not isinstance(arguments[0], TypeVar):
            return arguments[0]
    raise TypeError(f"{cls.__name__} must name its reply type: class {cls.__name__}(Request[Answer])")


class Signal(msgspec.Struct, frozen=True):
    """The base of all signals; of one client only the latest per job and key is delivered.

    `needs` and `job_field` are as for requests. Clients may send a signal only if `external` is true.
    """

    needs: ClassVar[Role] = Role.WORKER
    job_field: ClassVar[str | None] = "job"
    external: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _register(SIGNALS, cls)

    @property
    def key(self) -> str:
        """The signal's subject within its job; a client's later signal with the same key replaces this one."""
        return ""

    @property
    def about(self) -> str | None:
        """The job that the signal concerns; None if it has no job field."""
        field = self.job_field
        return None if field is None or field == ANY_JOB else getattr(self, field)


class Nothing(msgspec.Struct, frozen=True):
    """The reply of a request that returns no data."""


class Ticket(msgspec.Struct, frozen=True):
    """A one-time permission to open a side connection, and the number of bytes that it will carry."""

    ticket: bytes
    size: int


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """A fact's record as stored and sent: an array, so that later versions can append elements."""

    id: int
    at: float
    type: str
    job: str
    generation: int
    cause: int
    origin: str
    body: msgspec.Raw


_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(_Head).decode
_decode_map = msgspec.msgpack.Decoder(dict[str, Any]).decode
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Record:
    """A fact with its id, time, job, generation, cause and origin. The fact itself is decoded on first access.

    `cause` is the id of the causing fact (0: none). `origin` is text that names the principal or handler that acted.
    """

    __slots__ = ("_body", "_fact", "at", "cause", "data", "generation", "id", "job", "origin", "type")

    def __init__(self, head: _Head, data: bytes, fact: Fact | UnknownFact | None = None) -> None:
        self.id = head.id
        self.at = head.at
        self.type = head.type
        self.job = head.job
        self.generation = head.generation
        self.cause = head.cause
        self.origin = head.origin
        self.data = data
        self._body = head.body
        self._fact = fact

    @classmethod
    def of(
        cls,
        fact: Fact,
        *,
        fact_id: int,
        at: float,
        job: str = "",
        generation: int = 0,
        cause: int = 0,
        origin: str = "",
    ) -> Record:
        """Make the record of a new fact."""
        head = _Head(fact_id, at, type(fact).__name__, job, generation, cause, origin, msgspec.Raw(_encode(fact)))
        return cls(head, _encode(head), fact)

    @classmethod
    def read(cls, data: bytes | memoryview | msgspec.Raw) -> Record:
        """Decode a stored or received record; raises `PeerError` if it is invalid."""
        whole = bytes(data)
        try:
            return cls(_decode_head(whole), whole)
        except _UNREADABLE as error:
            raise _invalid(error) from error

    @property
    def fact(self) -> Fact | UnknownFact:
        """The decoded fact; an `UnknownFact` if its type is unknown here or has other fields."""
        if self._fact is None:
            self._fact = _decode_fact(self.type, self._body)
        return self._fact

    def fields(self) -> dict[str, Any]:
        """The record and its fact as plain values, for printing."""
        names = ("id", "at", "type", "job", "generation", "cause", "origin")
        return {name: getattr(self, name) for name in names} | {"fact": _plain(self._body)}

    def __repr__(self) -> str:
        return f"Record({self.id}, {self.fact!r}, job={self.job!r}, cause={self.cause}, origin={self.origin!r})"


def _decode_fact(name: str, body: msgspec.Raw) -> Fact | UnknownFact:
    cls = FACTS.get(name)
    if cls is not None:
        decoder = _decoders.get(name)
        if decoder is None or decoder.type is not cls:
            decoder = _decoders[name] = msgspec.msgpack.Decoder(cls)
        try:
            fact: Fact = decoder.decode(body)
        except (msgspec.ValidationError, UnicodeDecodeError):
            pass  # a newer daemon's fact of the same name: its plain fields are returned
        else:
            return fact
    return UnknownFact(name, _plain(body))


def _plain(body: msgspec.Raw) -> dict[str, Any]:
    try:
        return _decode_map(body)
    except _UNREADABLE as error:
        raise _invalid(error) from error


def _invalid(error: Exception) -> PeerError:
    return PeerError("record_invalid", f"invalid fact record: {error}")


@dataclass(frozen=True, slots=True)
class Decision(Generic[R]):
    """The result of one message: the caller's reply, new facts, and writes to the store.

    `writes` maps keys to new values; None deletes a key. `cause`, if set, replaces the cause of the call.
    """

    reply: R
    facts: tuple[Fact, ...] = ()
    writes: Mapping[str, bytes | None] = field(default_factory=dict)
    job: str = ""
    generation: int = 0
    cause: int = 0


@dataclass(frozen=True, slots=True)
class Gap:
    """Facts that a reader will not receive: ids `first` to `last`, as far as they match its filter, and the reason."""

    first: int
    last: int
    reason: str


@dataclass(slots=True)
class Call:
    """The circumstances of a request: principal, cause, deadline, request number and fence."""

    principal: Principal
    origin: str
    cause: int = 0
    client: bytes = b""
    number: int = 0
    acknowledged: int = 0
    digest: int = 0
    timeout_s: float | None = None
    fence: Fence | None = None
