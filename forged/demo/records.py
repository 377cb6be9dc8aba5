"""The records that a worker of the demo writes for the audit, one per line.

Invariants:
- A record is written before its event can have an effect.
- An incomplete line does not count: a worker may be killed at any point.
- Times are of the monotonic clock, which all processes of the machine share.
"""

from __future__ import annotations

import msgspec

NONE = -1


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker is about to join."""

    at: float


class Entered(msgspec.Struct, frozen=True, tag="entered"):
    """The worker is in the world of this generation; `workers` are its members by rank."""

    at: float
    generation: int
    step: int
    rank: int
    workers: list[str]
    learning_rate: float


class Used(msgspec.Struct, frozen=True, tag="used"):
    """The worker is about to use the samples `[first, end)` of the step's batch."""

    at: float
    generation: int
    step: int
    first: int
    end: int


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """The step is committed; `generation` is the one in which this worker used its samples.

    A worker that received the step's result from another one does not know the loss.
    """

    at: float
    generation: int
    step: int
    loss: float | None


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The worker has finished after `steps` steps; `parameters` is the digest of its parameters.

    `read_here` and `read_at_origin` count the samples read from its own directory and from the origin.
    """

    at: float
    steps: int
    parameters: str
    read_here: int = 0
    read_at_origin: int = 0


class CheckpointFailed(msgspec.Struct, frozen=True, tag="unsaved"):
    """A checkpoint was not saved."""

    at: float
    step: int
    why: str


class Resumed(msgspec.Struct, frozen=True, tag="resumed"):
    """The worker begins with a state that was saved after `step` steps."""

    at: float
    step: int


Entry = Ready | Resumed | Entered | Used | Committed | Finished | CheckpointFailed

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Entry).decode


def line_of(entry: Entry) -> bytes:
    """The line for a record."""
    return _encode(entry) + b"\n"


def read(data: bytes) -> tuple[list[Entry], bytes]:
    """The complete records in `data`, and the incomplete last line."""
    *lines, rest = data.split(b"\n")
    return [_decode(line) for line in lines], rest
