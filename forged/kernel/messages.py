"""What travels on the bus: facts, requests and signals, and what a decision is.

Law: a fact says in the past tense what has become true and is durable before anybody hears it. A request asks one
handler for one reply. A signal may be lost and is never recorded. All three are frozen values with a name, their
class's, that is the same on the bus, on the wire and in the store. A decision holds all that follows from one message:
the reply, the facts and the writes, which become durable together or not at all.
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
    """Something that has become true. `level` is how much it matters to whoever reads the log."""

    level: ClassVar[str] = "info"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _register(FACTS, cls)


class UnknownFact(msgspec.Struct, frozen=True):
    """A fact of a type that this process does not know: a plugin's, or a newer daemon's."""

    type: str
    fields: dict[str, Any]


class Fence(msgspec.Struct, frozen=True, array_like=True, order=True):
    """How far its holder has followed the leadership and the rescales of a job; the lesser of two is out of date."""

    term: int
    generation: int


class Request(msgspec.Struct, Generic[R_co], frozen=True):
    """Something that exactly one handler does, and answers with an `R_co`.

    `needs` is the role that a caller must hold. `decides` tells that it changes state, so that its reply is remembered
    and a repeated request is answered, not repeated. `job_field` names the field that holds the job it is about; None
    says that it is about the daemon as a whole, `ANY_JOB` that its handler looks at the caller's jobs itself.
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
    raise TypeError(f"{cls.__name__} must say what it answers: class {cls.__name__}(Request[Answer])")


class Signal(msgspec.Struct, frozen=True):
    """Something that was so a moment ago; only the latest per job and key counts.

    `needs` and `job_field` are as for requests. `external` tells that clients may send it, not only the daemon's parts.
    """

    needs: ClassVar[Role] = Role.WORKER
    job_field: ClassVar[str | None] = "job"
    external: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _register(SIGNALS, cls)

    @property
    def key(self) -> str:
        """What in its job the signal is about; a later one with the same key takes its place."""
        return ""

    @property
    def about(self) -> str | None:
        """The job that it is about; None where no field of its own says so."""
        field = self.job_field
        return None if field is None or field == ANY_JOB else getattr(self, field)


class Nothing(msgspec.Struct, frozen=True):
    """The answer of a request that only had to be done."""


class Ticket(msgspec.Struct, frozen=True):
    """The right to one side connection, and how many bytes travel over it."""

    ticket: bytes
    size: int


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """A fact's record as it is stored and sent: an array, so that later versions may append to it."""

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
    """A fact with its place in history: when, why, in which job and generation. Decoded no sooner than it is looked at.

    `cause` is the id of the fact that led to it (0 for none) and `origin` who or what acted, in words.
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
        """Put a new fact into its place in history."""
        head = _Head(fact_id, at, type(fact).__name__, job, generation, cause, origin, msgspec.Raw(_encode(fact)))
        return cls(head, _encode(head), fact)

    @classmethod
    def read(cls, data: bytes | memoryview | msgspec.Raw) -> Record:
        """Read a record that was stored or sent."""
        whole = bytes(data)
        try:
            return cls(_decode_head(whole), whole)
        except _UNREADABLE as error:
            raise _invalid(error) from error

    @property
    def fact(self) -> Fact | UnknownFact:
        """The fact itself; an `UnknownFact` where its type is not known here or has other fields."""
        if self._fact is None:
            self._fact = _decode_fact(self.type, self._body)
        return self._fact

    def fields(self) -> dict[str, Any]:
        """All of it as plain values, for people and programs that print it."""
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
            pass  # a newer daemon's fact of the same name: shown as it is, rather than lost
        else:
            return fact
    return UnknownFact(name, _plain(body))


def _plain(body: msgspec.Raw) -> dict[str, Any]:
    try:
        return _decode_map(body)
    except _UNREADABLE as error:
        raise _invalid(error) from error


def _invalid(error: Exception) -> PeerError:
    return PeerError("record_invalid", f"a fact's record cannot be read: {error}")


@dataclass(frozen=True, slots=True)
class Decision(Generic[R]):
    """What follows from one message: the caller's reply, the facts that are now true, and the keys that say so.

    `writes` maps keys to their new values, None to delete. `cause` is the id of the fact that led to it, where the one
    who decides knows better than whoever asked.
    """

    reply: R
    facts: tuple[Fact, ...] = ()
    writes: Mapping[str, bytes | None] = field(default_factory=dict)
    job: str = ""
    generation: int = 0
    cause: int = 0


@dataclass(frozen=True, slots=True)
class Gap:
    """Facts that a reader missed for good: ids from `first` to `last`, as far as they concerned it, and why."""

    first: int
    last: int
    reason: str


@dataclass(slots=True)
class Call:
    """Who asks, why, by when, and as which of its requests."""

    principal: Principal
    origin: str
    cause: int = 0
    client: bytes = b""
    number: int = 0
    acknowledged: int = 0
    digest: int = 0
    timeout_s: float | None = None
    fence: Fence | None = None
