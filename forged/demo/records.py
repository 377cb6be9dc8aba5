"""What a worker of the demonstration writes about itself, line by line, for the audit.

Law: a line is written before what it tells of can have an effect, and is complete or does not count: a worker may be
killed at any point of it. Times are of the clock that all processes of this machine share.
"""

from __future__ import annotations

import msgspec

NONE = -1


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """It is about to ask for a place in the world."""

    at: float


class Entered(msgspec.Struct, frozen=True, tag="entered"):
    """It is in the world of this generation; `workers` are its members by rank."""

    at: float
    generation: int
    step: int
    rank: int
    workers: list[str]
    learning_rate: float


class Used(msgspec.Struct, frozen=True, tag="used"):
    """It is about to use these samples of the step's batch: from `first` to below `end`."""

    at: float
    generation: int
    step: int
    first: int
    end: int


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """The step counts; `generation` is that in which this worker used its samples.

    Who took the step's outcome from another does not know the loss.
    """

    at: float
    generation: int
    step: int
    loss: float | None


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """It is done, behind so many steps; `parameters` is the digest of what it has learnt.

    Of the samples that it has used, so many lay in its own directory, and so many came from the origin.
    """

    at: float
    steps: int
    parameters: str
    read_here: int = 0
    read_at_origin: int = 0


class Unsaved(msgspec.Struct, frozen=True, tag="unsaved"):
    """A checkpoint came to nothing."""

    at: float
    step: int
    why: str


Entry = Ready | Entered | Used | Committed | Finished | Unsaved

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Entry).decode


def line_of(entry: Entry) -> bytes:
    """The entry as it is written."""
    return _encode(entry) + b"\n"


def read(data: bytes) -> tuple[list[Entry], bytes]:
    """The entries in what was read, and the beginning of a line that has not been written to its end."""
    *lines, rest = data.split(b"\n")
    return [_decode(line) for line in lines], rest
