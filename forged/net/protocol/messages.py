"""The messages of the wire protocol (docs/protocol.md).

Invariants:
- A message is a msgpack array; its first element is the message type.
- Later versions append elements. A reader ignores unknown elements and uses defaults for missing ones.
- The fields of a request, reply or fact are a map that stays encoded until its type is known.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from forged.errors import ForgedError, PeerError
from forged.kernel.messages import Fence

VERSION_MIN = 1
VERSION_MAX = 1
INTEGER_MAX = 2**63 - 1
CREDIT_MAX = 1 << 16
TEXT_CHARS_MAX = 4096

Number = Annotated[int, Meta(ge=1, le=INTEGER_MAX)]
Count = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]
Position = Annotated[int, Meta(ge=-1, le=INTEGER_MAX)]
Credits = Annotated[int, Meta(ge=0, le=CREDIT_MAX)]
Seconds = Annotated[float, Meta(ge=0)]
"""NaN is refused: the event loop could not sort it."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """The base of all messages."""


class Hello(Message, frozen=True, array_like=True, tag=0):
    """The first message of a connection, sent by the connecting end. With `ticket` it opens a side connection."""

    version_min: int
    version_max: int
    client: bytes
    agent: str = ""
    token: str | None = None
    ticket: bytes | None = None
    offset: Count = 0


class Welcome(Message, frozen=True, array_like=True, tag=1):
    """The reply to an accepted hello, with the parameters of the connection."""

    version: int
    agent: str
    principal: str
    role: str
    history: str
    latest: int
    term: int
    frame_bytes_max: int
    in_flight_max: int
    size: int = 0


class RequestMessage(Message, frozen=True, array_like=True, tag=2):
    """A request. All replies up to `acknowledged` have arrived.

    `waiting`, if present, lists the earlier deciding requests that still wait: all other requests are acknowledged.
    """

    number: Number
    acknowledged: Count
    method: str
    body: Raw
    timeout_s: Seconds | None = None
    fence: Fence | None = None
    waiting: tuple[Number, ...] | None = None


class Reply(Message, frozen=True, array_like=True, tag=3):
    """The reply to a request."""

    number: Number
    body: Raw


class ReplyOut(Message, frozen=True, array_like=True, tag=3):
    """A reply whose body is encoded together with the message."""

    number: Number
    body: Any


class Failure(Message, frozen=True, array_like=True, tag=4):
    """The failure of a request; number 0: of the connection, which is closed."""

    number: Count
    kind: str
    code: str
    text: str
    fix: str = ""


class Cancel(Message, frozen=True, array_like=True, tag=5):
    """The reply is no longer wanted."""

    number: Number


class Subscribe(Message, frozen=True, array_like=True, tag=6):
    """Subscribe to durable facts with ids greater than `since`; None: from now on, -1: from the oldest kept fact.

    `history` is the history in which `since` was received; in another history the position is invalid.
    """

    stream: Number
    since: Position | None
    history: str
    types: tuple[str, ...]
    jobs: tuple[str, ...]
    credit: Credits


class Facts(Message, frozen=True, array_like=True, tag=7):
    """Facts of a stream, in id order; every fact up to `upto` was sent or filtered out."""

    stream: Number
    upto: Count
    records: tuple[Raw, ...]


class GapMessage(Message, frozen=True, array_like=True, tag=8):
    """Ids of a stream whose facts have been dropped from the journal."""

    stream: Number
    first: Count
    last: Count
    reason: str


class Credit(Message, frozen=True, array_like=True, tag=9):
    """Additional credit: the number of further facts that the receiver takes."""

    stream: Number
    facts: Credits


class Unsubscribe(Message, frozen=True, array_like=True, tag=10):
    """Ends a stream, sent by the receiver."""

    stream: Number


class Ended(Message, frozen=True, array_like=True, tag=11):
    """Ends a stream, sent by the sender, with the error."""

    stream: Number
    kind: str
    code: str
    text: str
    fix: str = ""


class Ping(Message, frozen=True, array_like=True, tag=12):
    """A liveness check; the peer answers with a pong."""

    nonce: int


class Pong(Message, frozen=True, array_like=True, tag=13):
    """The answer to a ping, with its nonce."""

    nonce: int


class Bye(Message, frozen=True, array_like=True, tag=14):
    """The sender closes the connection; `acknowledged` as in a request."""

    acknowledged: Count
    reason: str = ""


class SignalMessage(Message, frozen=True, array_like=True, tag=15):
    """A signal; there is no reply."""

    name: str
    body: Raw


AnyMessage = (
    Hello
    | Welcome
    | RequestMessage
    | Reply
    | Failure
    | Cancel
    | Subscribe
    | Facts
    | GapMessage
    | Credit
    | Unsubscribe
    | Ended
    | Ping
    | Pong
    | Bye
    | SignalMessage
)

encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(AnyMessage)
_body_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def decode(payload: bytes) -> Any:
    """Decode a payload; raises `PeerError` if it is no valid message."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise PeerError("message_invalid", f"invalid message: {error}", "see docs/protocol.md") from error


def decode_body(body: Raw, wanted: Any) -> Any:
    """Decode the fields of a request, reply or signal. Raises `msgspec.ValidationError`."""
    decoder = _body_decoders.get(wanted)
    if decoder is None:
        decoder = _body_decoders[wanted] = msgspec.msgpack.Decoder(wanted)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        # The body was skipped while its message was decoded, so it may be invalid msgpack or UTF-8.
        raise msgspec.ValidationError(str(error)) from error


def failure(number: int, error: ForgedError) -> Failure:
    """The failure message of an error."""
    return Failure(number, *_fields(error))


def ending(stream: int, error: ForgedError) -> Ended:
    """The message that ends a stream with an error."""
    return Ended(stream, *_fields(error))


def _fields(error: ForgedError) -> tuple[str, str, str, str]:
    # The text may quote peer input of any length.
    return error.kind, error.code, error.message[:TEXT_CHARS_MAX], error.fix[:TEXT_CHARS_MAX]
