"""Shards and transfers as immutable values."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from forged.elastic.model import WorkerId

Natural = Annotated[int, msgspec.Meta(ge=0)]


class SourceKind(StrEnum):
    """Where a shard comes from."""

    OWNER = "owner"
    """The worker that owned it."""
    REPLICA = "replica"
    """A worker that holds a replica."""
    ORIGIN = "origin"
    """The dataset itself, as no worker holds it."""


class DataShard(msgspec.Struct, frozen=True, order=True):
    """The samples from `start_index` up to `end_index`, exclusive."""

    shard_id: Natural
    start_index: Natural
    end_index: Natural

    def __post_init__(self) -> None:
        if self.end_index < self.start_index:
            # msgspec turns a ValueError into a validation error of the message.
            raise ValueError(f"end_index must be >= start_index {self.start_index}, got {self.end_index}")

    @property
    def size(self) -> int:
        """The number of samples."""
        return self.end_index - self.start_index


class DataTransfer(msgspec.Struct, frozen=True):
    """The movement of one shard to one worker; transfers with a higher priority start first.

    `estimated_completion_time` is in seconds on the clock of the plan's pace, None without a measured pace.
    `source_worker` is None where the source is the dataset's origin.
    """

    source_worker: WorkerId | None
    destination_worker: WorkerId
    shard: DataShard
    priority: int
    estimated_completion_time: float | None = None
    source_kind: SourceKind = SourceKind.OWNER


class TransferPace(msgspec.Struct, frozen=True):
    """The measured rate of one transfer among its concurrent ones."""

    bytes_per_second: float
    bytes_per_sample: float
    now: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.bytes_per_second < float("inf") or not 0.0 <= self.bytes_per_sample < float("inf"):
            raise ValueError(
                "bytes_per_second must be finite and > 0, and bytes_per_sample finite and >= 0, "
                f"got {self.bytes_per_second} and {self.bytes_per_sample}"
            )

    @property
    def seconds_per_sample(self) -> float:
        """The transfer time of one sample."""
        return self.bytes_per_sample / self.bytes_per_second
