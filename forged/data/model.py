"""Pieces of training data and their ways, as values.

Law: every value is frozen. A shard is a range of samples, its end not in it. A transfer names the shard, who needs it,
and who has it: a worker, or nobody, and then the dataset's origin does.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from forged.elastic.model import WorkerId

Natural = Annotated[int, msgspec.Meta(ge=0)]


class SourceKind(StrEnum):
    """Where a shard comes from."""

    OWNER = "owner"
    """From the worker that had to train with it."""
    REPLICA = "replica"
    """From a worker that has a further copy."""
    ORIGIN = "origin"
    """From where the dataset lies, as no worker has it."""


class DataShard(msgspec.Struct, frozen=True, order=True):
    """The samples from `start_index` up to, and without, `end_index`."""

    shard_id: Natural
    start_index: Natural
    end_index: Natural

    def __post_init__(self) -> None:
        if self.end_index < self.start_index:
            # A ValueError, because msgspec takes it for its own when this comes over the wire.
            raise ValueError("a shard ends before it starts")

    @property
    def size(self) -> int:
        """How many samples there are."""
        return self.end_index - self.start_index


class DataTransfer(msgspec.Struct, frozen=True):
    """One shard on its way to one worker, before those with a lower priority.

    `estimated_completion_time` is in seconds on the clock of the plan's pace; None: nobody has measured how fast
    transfers are. `source_worker` is None where the source is the dataset's origin.
    """

    source_worker: WorkerId | None
    destination_worker: WorkerId
    shard: DataShard
    priority: int
    estimated_completion_time: float | None = None
    source_kind: SourceKind = SourceKind.OWNER


class TransferPace(msgspec.Struct, frozen=True):
    """How fast transfers were when they were measured: one of them, with as many beside it as are allowed."""

    bytes_per_second: float
    bytes_per_sample: float
    now: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.bytes_per_second < float("inf") or not 0.0 <= self.bytes_per_sample < float("inf"):
            raise ValueError("a pace is a positive number of bytes per second, and of no less than 0 bytes per sample")

    @property
    def seconds_per_sample(self) -> float:
        """How long one sample is on its way."""
        return self.bytes_per_sample / self.bytes_per_second
