"""The messages of the protocol, as docs/protocol.md describes them.

Law: a message is a msgpack array whose first element says which. Later versions append elements; a reader ignores those
it does not know and takes the default for those that are missing. What a request, a reply or a fact says is a map of
its fields and stays encoded until its type is known.
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
"""Not a number is no time either: the event loop could not sort it."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """The base of all messages."""


class Hello(Message, frozen=True, array_like=True, tag=0):
    """The first word, by whoever connects. `ticket` makes it a side connection for what the ticket was given for."""

    version_min: int
    version_max: int
    client: bytes
    agent: str = ""
    token: str | None = None
    ticket: bytes | None = None
    offset: Count = 0


class Welcome(Message, frozen=True, array_like=True, tag=1):
    """The answer to a hello that is accepted, with what holds on this connection."""

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
    """Do this. `acknowledged` says that all answers up to that number have arrived.

    `waiting`, when it is said, names the numbers before this one that decide and still wait: all others are done with.
    """

    number: Number
    acknowledged: Count
    method: str
    body: Raw
    timeout_s: Seconds | None = None
    fence: Fence | None = None
    waiting: tuple[Number, ...] | None = None


class Reply(Message, frozen=True, array_like=True, tag=3):
    """It is done."""

    number: Number
    body: Raw


class ReplyOut(Message, frozen=True, array_like=True, tag=3):
    """A reply as it is sent, encoded together with what it says."""

    number: Number
    body: Any


class Failure(Message, frozen=True, array_like=True, tag=4):
    """It is not done; number 0 means that the connection is over."""

    number: Count
    kind: str
    code: str
    text: str
    fix: str = ""


class Cancel(Message, frozen=True, array_like=True, tag=5):
    """The answer is no longer wanted."""

    number: Number


class Subscribe(Message, frozen=True, array_like=True, tag=6):
    """Send facts with ids greater than `since` as they become durable: None means from now on, -1 all that are kept.

    `history` is the one that `since` belongs to; in another one the position means nothing.
    """

    stream: Number
    since: Position | None
    history: str
    types: tuple[str, ...]
    jobs: tuple[str, ...]
    credit: Credits


class Facts(Message, frozen=True, array_like=True, tag=7):
    """Facts of a stream, in order; everything up to `upto` has been looked through."""

    stream: Number
    upto: Count
    records: tuple[Raw, ...]


class GapMessage(Message, frozen=True, array_like=True, tag=8):
    """Facts of a stream that can no longer be had."""

    stream: Number
    first: Count
    last: Count
    reason: str


class Credit(Message, frozen=True, array_like=True, tag=9):
    """The receiver of a stream takes so many facts more."""

    stream: Number
    facts: Credits


class Unsubscribe(Message, frozen=True, array_like=True, tag=10):
    """A stream is no longer wanted."""

    stream: Number


class Ended(Message, frozen=True, array_like=True, tag=11):
    """A stream is over, by the sender's will."""

    stream: Number
    kind: str
    code: str
    text: str
    fix: str = ""


class Ping(Message, frozen=True, array_like=True, tag=12):
    """Are you there?"""

    nonce: int


class Pong(Message, frozen=True, array_like=True, tag=13):
    """I am."""

    nonce: int


class Bye(Message, frozen=True, array_like=True, tag=14):
    """The sender closes in good order; `acknowledged` as in a request."""

    acknowledged: Count
    reason: str = ""


class SignalMessage(Message, frozen=True, array_like=True, tag=15):
    """Something that was so a moment ago; there is no answer."""

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
    """The message in a frame's payload, or `PeerError`."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise PeerError(
            "message_invalid", f"not a message of this protocol: {error}", "see docs/protocol.md"
        ) from error


def decode_body(body: Raw, wanted: Any) -> Any:
    """What a request, reply or signal says, as the type that it must have. Raises `msgspec.ValidationError`."""
    decoder = _body_decoders.get(wanted)
    if decoder is None:
        decoder = _body_decoders[wanted] = msgspec.msgpack.Decoder(wanted)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        # A body that was skipped while its message was read may still be no msgpack, or text that is no text.
        raise msgspec.ValidationError(str(error)) from error


def failure(number: int, error: ForgedError) -> Failure:
    """An error as it travels."""
    return Failure(number, *_told(error))


def ending(stream: int, error: ForgedError) -> Ended:
    """An error that ends a stream, as it travels."""
    return Ended(stream, *_told(error))


def _told(error: ForgedError) -> tuple[str, str, str, str]:
    # What it says may repeat what the peer said, at any length.
    return error.kind, error.code, error.message[:TEXT_CHARS_MAX], error.fix[:TEXT_CHARS_MAX]
