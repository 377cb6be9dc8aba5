"""The messages between workers.

Invariants:
- Both ends prove that they know the job's key before either says anything else: first the listener, then the dialler.
  A proof is a keyed hash over the nonces of both ends, the names and the direction, so it cannot be replayed or
  reflected, nor used for another listener. Each proof after the first covers the whole answer, its generation included.
- An incarnation, by which the daemon knows a worker, is in no message; peers see an id that is derived from it one-way.
- As in `forged.net.protocol.messages`, a message is an array whose first element is its type; later versions append.
- A collective is a call and a value. Ranks take part in the same collective when their calls are equal.
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

VERSION_MIN = 2
VERSION_MAX = 2
NONCE_BYTES = 32
PROOF_BYTES = 32
SESSION_ID_BYTES = 16
WORLD_DIGEST_BYTES = 16
COLLECTIVE_BYTES_MAX = 64 << 20
"""The bytes that a collective may bring to one rank, or take from it."""
HEAD_BYTES_MAX = 16 << 20
"""The size of the head that describes a state."""
PARTS_MAX = 1 << 17
"""The number of parts of a state."""
OVERHEAD_BYTES = 2 << 20
"""The size of a message without its payload."""
MESSAGE_BYTES_MAX = COLLECTIVE_BYTES_MAX + OVERHEAD_BYTES
STORE_CALLS_MAX = 32
"""How many calls of the store of its world a member has unanswered."""
DIMENSIONS_MAX = 64
CHECKSUM_BYTES = 16
"""The size of a shard's xxh3-128."""

Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Proof = Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
Checksum = Annotated[bytes, Meta(min_length=CHECKSUM_BYTES, max_length=CHECKSUM_BYTES)]
Shape = Annotated[tuple[Count, ...], Meta(max_length=DIMENSIONS_MAX)]


class Purpose(StrEnum):
    """The purpose of a connection."""

    MEMBER = "member"
    """To be a member of a world."""
    STATE = "state"
    """To fetch the training state."""
    SHARDS = "shards"
    """To fetch shards."""


class Kind(StrEnum):
    """The collectives."""

    BARRIER = "barrier"
    GATHER = "gather"
    BROADCAST = "broadcast"
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    END_STEP = "end_step"
    COMMIT = "commit"
    """The vote after which the scripts change their states."""


class Operation(StrEnum):
    """The reductions."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"


class Form(StrEnum):
    """The kind of object that a value was made of, and becomes again."""

    BYTES = "bytes"
    ARRAY = "array"
    SCALAR = "scalar"
    """A numpy scalar."""
    NUMBER = "number"
    """A Python number."""


class Value(msgspec.Struct, frozen=True, array_like=True):
    """A value of a collective: bytes, or the elements of an array."""

    form: Form
    data: memoryview
    dtype: str = ""
    shape: Shape = ()


class CollectiveCall(msgspec.Struct, frozen=True, array_like=True):
    """A collective as a rank calls it; all ranks of a world must call the same."""

    kind: Kind
    root: Count | None = None
    operation: Operation | None = None
    dtype: str | None = None
    shape: Shape | None = None
    step: Annotated[int, Meta(ge=-INTEGER_MAX, le=INTEGER_MAX)] | None = None

    def brings(self, rank: int) -> bool:
        """Whether a rank has to bring a value."""
        if self.kind is Kind.BROADCAST:
            return rank == self.root
        return self.kind in (Kind.GATHER, Kind.ALL_GATHER, Kind.ALL_REDUCE)

    def receives(self, rank: int) -> bool:
        """Whether a rank receives the values, or only learns that all ranks have called."""
        if self.kind is Kind.GATHER:
            return rank == self.root
        return rank != self.root

    def values_due(self, rank: int, size: int) -> int:
        """How many values a rank receives."""
        if not self.receives(rank) or self.kind in (Kind.BARRIER, Kind.END_STEP, Kind.COMMIT):
            return 0
        return 1 if self.kind in (Kind.BROADCAST, Kind.ALL_REDUCE) else size

    def __str__(self) -> str:
        parts = [str(self.operation)] if self.operation is not None else []
        parts += [
            f"{name}={value}"
            for name in ("root", "step", "dtype", "shape")
            if (value := getattr(self, name)) is not None
        ]
        return f"{self.kind}({', '.join(parts)})"


class Challenge(Message, frozen=True, array_like=True, tag=0):
    """The listener's proof, and its nonce."""

    version_min: int
    version_max: int
    nonce: Nonce
    proof: Proof = bytes(PROOF_BYTES)


class Answer(Message, frozen=True, array_like=True, tag=1):
    """Which worker connects, to which, and for what. `number` is a generation (member), an attempt (state), or 0."""

    version: int
    job: str
    target: str
    worker: str
    session_id: bytes
    purpose: Purpose
    number: Count
    rank: Count = 0
    world: bytes = b""
    proof: Proof = bytes(PROOF_BYTES)


class Accepted(Message, frozen=True, array_like=True, tag=2):
    """The listener accepts the answer."""

    proof: Proof


class Refused(Message, frozen=True, array_like=True, tag=3):
    """The peer is proven, and its purpose is refused."""

    kind: str
    code: str
    text: str
    fix: str = ""


class Started(Message, frozen=True, array_like=True, tag=4):
    """All members of the world are connected."""

    generation: Count


class Contribution(Message, frozen=True, array_like=True, tag=5):
    """A member's call of the collective of that number. `stop_wanted` is used by `end_step` only."""

    number: Count
    call: CollectiveCall
    value: Value | None = None
    stop_wanted: Count = 0


class Result(Message, frozen=True, array_like=True, tag=6):
    """The result of a collective for one member."""

    number: Count
    values: tuple[Value, ...] = ()
    stop_wanted: Count = 0


class Aborted(Message, frozen=True, array_like=True, tag=7):
    """The world has been aborted."""

    code: str
    reason: str
    peer: str = ""
    fix: str = ""


class Left(Message, frozen=True, array_like=True, tag=8):
    """The sender leaves the world."""


class StateOffer(Message, frozen=True, array_like=True, tag=9):
    """The state that can be fetched."""

    head: bytes
    sizes: tuple[Count, ...]


class StateWanted(Message, frozen=True, array_like=True, tag=10):
    """Requests the parts from this one on."""

    part: Count


class StateReady(Message, frozen=True, array_like=True, tag=11):
    """The connection carries parts only, once the fetcher has asked for them."""


class ShardsReady(Message, frozen=True, array_like=True, tag=12):
    """The peer may request shards from now on, one after the other; the bytes of each follow."""


class ShardWanted(Message, frozen=True, array_like=True, tag=13):
    """Requests a shard: from `offset` on if its size and checksum are these, else from its beginning."""

    shard: Count
    offset: Count = 0
    size: Count = 0
    checksum: Checksum = bytes(CHECKSUM_BYTES)


class ShardComing(Message, frozen=True, array_like=True, tag=14):
    """Announces a shard's size and checksum; its bytes from `offset` on follow."""

    shard: Count
    size: Count
    checksum: Checksum
    offset: Count = 0


class ShardSent(Message, frozen=True, array_like=True, tag=15):
    """Ends a shard's bytes, which are valid only if the shard has not changed meanwhile."""

    has_changed: bool


class StoreAction(StrEnum):
    """What a rank does with a value of its world."""

    SET = "set"
    GET = "get"
    ADD = "add"
    DELETE = "delete"
    FORGET = "forget"
    """To wait no longer for the `get` of the same number."""


class StoreCall(Message, frozen=True, array_like=True, tag=17):
    """A member's call of the store of its world; `waits`: the answer comes once the key is set."""

    number: Count
    action: StoreAction
    key: str
    value: bytes = b""
    delta: Annotated[int, Meta(ge=-INTEGER_MAX, le=INTEGER_MAX)] = 0
    waits: bool = False


class StoreAnswer(Message, frozen=True, array_like=True, tag=18):
    """The hub's answer to the call of that number; with a code if it was refused."""

    number: Count
    value: bytes | None = None
    number_in: int = 0
    """The sum after an addition; after a deletion, whether the key was set."""
    code: str = ""
    text: str = ""
    fix: str = ""


class PeerHello(Message, frozen=True, array_like=True, tag=16):
    """The first message, from the dialler, which says nothing before the listener has proven that it knows the key."""

    nonce: Nonce


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
    | PeerHello
    | StoreCall
    | StoreAnswer
)

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)


def decode(payload: bytes) -> PeerMessage:
    """Decode a frame's payload, or raise `PeerError`. Values refer to the payload's memory."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise PeerError(
            "message_invalid", f"invalid message from a peer: {error}", "run the same forged version on all workers"
        ) from error


def mesh_key(peer_key: bytes, job: str) -> bytes:
    """The key of the proofs between a job's workers, derived from the secret that the daemon gives them."""
    return hmac.digest(peer_key, encode(("forged mesh key", job)), "sha256")


def session_id_of(incarnation: bytes) -> bytes:
    """An id that tells a worker's sessions apart and does not reveal its incarnation."""
    return hashlib.blake2b(incarnation, digest_size=SESSION_ID_BYTES, person=b"forged session").digest()


def challenge_to(hello: PeerHello, nonce: bytes, key: bytes, job: str, worker: str) -> Challenge:
    """The challenge of this listener to a dialler, with its proof."""
    challenge = Challenge(VERSION_MIN, VERSION_MAX, nonce)
    return msgspec.structs.replace(challenge, proof=_challenge_proof(challenge, hello, key, job, worker))


def is_challenge_proven(challenge: Challenge, hello: PeerHello, key: bytes, job: str, worker: str) -> bool:
    """Whether the sender of the challenge knows the key, is this worker of this job, and has read this hello."""
    return hmac.compare_digest(challenge.proof, _challenge_proof(challenge, hello, key, job, worker))


def nonces_of(hello: PeerHello, challenge: Challenge) -> bytes:
    """The nonces of both ends."""
    return hello.nonce + challenge.nonce


def answered(answer: Answer, key: bytes, nonces: bytes) -> Answer:
    """The answer with its proof."""
    return msgspec.structs.replace(answer, proof=_proof(key, "answer", nonces, answer))


def is_proven(answer: Answer, key: bytes, nonces: bytes) -> bool:
    """Whether the sender of the answer knows the key, and has answered this challenge."""
    return hmac.compare_digest(answer.proof, _proof(key, "answer", nonces, answer))


def accepted(answer: Answer, key: bytes, nonces: bytes) -> Accepted:
    """The listener's acceptance of an answer."""
    return Accepted(_proof(key, "accepted", nonces, answer))


def is_accepted(message: Accepted, answer: Answer, key: bytes, nonces: bytes) -> bool:
    """Whether the listener has accepted this answer."""
    return hmac.compare_digest(message.proof, _proof(key, "accepted", nonces, answer))


def _challenge_proof(challenge: Challenge, hello: PeerHello, key: bytes, job: str, worker: str) -> bytes:
    versions = challenge.version_min, challenge.version_max
    said = encode(("challenge", nonces_of(hello, challenge), versions, job, worker))
    return hmac.digest(key, said, "sha256")


def _proof(key: bytes, direction: str, nonces: bytes, answer: Answer) -> bytes:
    # msgpack delimits the fields, so that no field can pass for a part of its neighbour.
    said = encode((direction, nonces, msgspec.structs.replace(answer, proof=bytes(PROOF_BYTES))))
    return hmac.digest(key, said, "sha256")


def digest_of(workers: Iterable[WorkerId]) -> bytes:
    """Equal at two ends for the same workers in the same rank order."""
    names = encode([str(worker) for worker in workers])
    return hashlib.blake2b(names, digest_size=WORLD_DIGEST_BYTES).digest()
