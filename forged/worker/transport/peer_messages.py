"""What workers say to each other.

Law: a peer connection begins with a challenge, and nobody learns anything before the proof: a keyed hash over the
challenge and everything that was said, made for one listener and one direction, so it can be neither replayed, passed
on nor sent back. As in `forged.net.protocol.messages`, a message is an array whose first element says which, and later
versions append. A collective is a call and a value; two ranks do the same thing when their calls are equal.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from forged.elastic.model import WorkerId
from forged.errors import PeerError
from forged.net.protocol.messages import INTEGER_MAX, Count, Message

VERSION_MIN = 1
VERSION_MAX = 1
NONCE_BYTES = 32
PROOF_BYTES = 32
WORLD_DIGEST_BYTES = 16
COLLECTIVE_BYTES_MAX = 64 << 20
"""How much a collective may bring to one rank, or take from it."""
HEAD_BYTES_MAX = 16 << 20
"""How long the description of a state may be."""
PARTS_MAX = 1 << 17
"""Into how many parts a state may be cut."""
OVERHEAD_BYTES = 2 << 20
"""What a message needs besides what it brings."""
MESSAGE_BYTES_MAX = COLLECTIVE_BYTES_MAX + OVERHEAD_BYTES
DIMENSIONS_MAX = 64
CHECKSUM_BYTES = 16
"""What xxh3-128 makes of a shard."""

Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Proof = Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
Checksum = Annotated[bytes, Meta(min_length=CHECKSUM_BYTES, max_length=CHECKSUM_BYTES)]
Shape = Annotated[tuple[Count, ...], Meta(max_length=DIMENSIONS_MAX)]


class Purpose(StrEnum):
    """What a connection is for."""

    MEMBER = "member"
    """To take part in a world."""
    STATE = "state"
    """To fetch the training state."""
    SHARDS = "shards"
    """To fetch training data."""


class Kind(StrEnum):
    """What the members of a world do together."""

    BARRIER = "barrier"
    GATHER = "gather"
    BROADCAST = "broadcast"
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    END_STEP = "end_step"


class Operation(StrEnum):
    """How many arrays become one."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"


class Form(StrEnum):
    """As what a value was given, and is given back."""

    BYTES = "bytes"
    ARRAY = "array"
    SCALAR = "scalar"
    """One of numpy's."""
    NUMBER = "number"
    """One of Python's."""


class Value(msgspec.Struct, frozen=True, array_like=True):
    """Something that a rank gives: bytes as they are, or the elements of an array."""

    form: Form
    data: memoryview
    dtype: str = ""
    shape: Shape = ()


class Call(msgspec.Struct, frozen=True, array_like=True):
    """What a rank does; all ranks of a world must do the same."""

    kind: Kind
    root: Count | None = None
    operation: Operation | None = None
    dtype: str | None = None
    shape: Shape | None = None
    step: Annotated[int, Meta(ge=-INTEGER_MAX, le=INTEGER_MAX)] | None = None

    def __str__(self) -> str:
        parts = [str(self.operation)] if self.operation is not None else []
        parts += [
            f"{name}={value}"
            for name in ("root", "step", "dtype", "shape")
            if (value := getattr(self, name)) is not None
        ]
        return f"{self.kind}({', '.join(parts)})"


class Challenge(Message, frozen=True, array_like=True, tag=0):
    """The first word, by whoever was connected to."""

    version_min: int
    version_max: int
    nonce: Nonce


class Answer(Message, frozen=True, array_like=True, tag=1):
    """Who has connected, to whom, and for what. `number` is a generation (member) or an attempt (state), else 0."""

    version: int
    job: str
    target: str
    worker: str
    incarnation: bytes
    purpose: Purpose
    number: Count
    nonce: Nonce
    rank: Count = 0
    world: bytes = b""
    proof: Proof = bytes(PROOF_BYTES)


class Accepted(Message, frozen=True, array_like=True, tag=2):
    """The listener believes the answer, and proves that it is who was called."""

    incarnation: bytes
    proof: Proof


class Refused(Message, frozen=True, array_like=True, tag=3):
    """The answer is believed, and what it wants is not possible."""

    kind: str
    code: str
    text: str
    fix: str = ""


class Started(Message, frozen=True, array_like=True, tag=4):
    """All members of the world are there."""

    generation: Count


class Contribution(Message, frozen=True, array_like=True, tag=5):
    """What a member brings to the collective of that number. `stop_wanted` counts in `end_step` only."""

    number: Count
    call: Call
    value: Value | None = None
    stop_wanted: Count = 0


class Result(Message, frozen=True, array_like=True, tag=6):
    """What all have brought together, for one member. `stop_by` names those who want a stop."""

    number: Count
    values: tuple[Value, ...] = ()
    stop_wanted: Count = 0
    stop_by: tuple[str, ...] = ()


class Aborted(Message, frozen=True, array_like=True, tag=7):
    """The world is over."""

    code: str
    reason: str
    peer: str = ""
    fix: str = ""


class Left(Message, frozen=True, array_like=True, tag=8):
    """The sender leaves the world in good order."""


class StateOffer(Message, frozen=True, array_like=True, tag=9):
    """What there is to fetch."""

    head: bytes
    sizes: tuple[Count, ...]


class StateWanted(Message, frozen=True, array_like=True, tag=10):
    """Send the parts from this one on."""

    part: Count


class StateReady(Message, frozen=True, array_like=True, tag=11):
    """From now on the connection carries nothing but bytes, as soon as the fetcher says so."""


class ShardsReady(Message, frozen=True, array_like=True, tag=12):
    """From now on whoever came may want shards, one after the other, and each is followed by its bytes."""


class ShardWanted(Message, frozen=True, array_like=True, tag=13):
    """Send this shard from `offset` on if its size and checksum are these, else from its beginning."""

    shard: Count
    offset: Count = 0
    size: Count = 0
    checksum: Checksum = bytes(CHECKSUM_BYTES)


class ShardComing(Message, frozen=True, array_like=True, tag=14):
    """Which shard comes, how long it is and what its checksum must be; its bytes from `offset` on follow."""

    shard: Count
    size: Count
    checksum: Checksum
    offset: Count = 0


class ShardSent(Message, frozen=True, array_like=True, tag=15):
    """That were all its bytes, which count only if nobody has changed the shard meanwhile."""

    has_changed: bool


PeerMessage = (
    Challenge
    | Answer
    | Accepted
    | Refused
    | Started
    | Contribution
    | Result
    | Aborted
    | Left
    | StateOffer
    | StateWanted
    | StateReady
    | ShardsReady
    | ShardWanted
    | ShardComing
    | ShardSent
)

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)


def decode(payload: bytes) -> PeerMessage:
    """The message in a frame's payload, or `PeerError`. Values refer to the payload's memory."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise PeerError(
            "message_invalid", f"not a message between workers: {error}", "see the peer's version"
        ) from error


def answered(answer: Answer, key: bytes, challenge: bytes) -> Answer:
    """The answer with its proof."""
    return msgspec.structs.replace(answer, proof=_proof(key, "answer", challenge, answer))


def is_proven(answer: Answer, key: bytes, challenge: bytes) -> bool:
    """Whether the answer was given by somebody who has the key, to this challenge."""
    return hmac.compare_digest(answer.proof, _proof(key, "answer", challenge, answer))


def accepted(answer: Answer, key: bytes, challenge: bytes, incarnation: bytes) -> Accepted:
    """The listener's proof, over the answer that it accepts."""
    return Accepted(incarnation, _proof(key, "accepted", challenge, answer, incarnation))


def is_accepted(message: Accepted, answer: Answer, key: bytes, challenge: bytes) -> bool:
    """Whether the listener has the key, too."""
    expected = _proof(key, "accepted", challenge, answer, message.incarnation)
    return hmac.compare_digest(message.proof, expected)


def _proof(key: bytes, direction: str, challenge: bytes, answer: Answer, incarnation: bytes = b"") -> bytes:
    # An array of msgpack reads in one way only, so no field can pass for a part of its neighbour.
    said = encode((direction, challenge, msgspec.structs.replace(answer, proof=bytes(PROOF_BYTES)), incarnation))
    return hmac.digest(key, said, "sha256")


def digest_of(workers: Iterable[WorkerId]) -> bytes:
    """Tells whether two ends mean the same world: the same workers under the same ranks."""
    names = encode([str(worker) for worker in workers])
    return hashlib.blake2b(names, digest_size=WORLD_DIGEST_BYTES).digest()
