"""Datasets, shards and transfers as immutable values.

Invariants:
- The shards of a dataset are disjoint and contiguous, and cover every sample.
- Their sizes differ by at most one sample; the larger ones come first.
- Bounds are computed, without a table of shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from forged.elastic.model import WorkerId
from forged.errors import RequestRefused
from forged.numbers import as_integer

Natural = Annotated[int, msgspec.Meta(ge=0)]
Indices = npt.NDArray[np.int64]

SAMPLES_MAX = 2**63 - 1
SHARD_ID_MAX = 2**63 - 1
SHARDS_MAX = 1 << 27
"""A plan takes a few bytes for every shard, whether it moves or not."""
SHARDS_DEFAULT_MAX = 1 << 20
"""The default is one shard per sample, up to this limit."""


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


@dataclass(frozen=True, slots=True)
class Dataset:
    """A number of samples in a number of shards."""

    samples: int
    shards: int

    def __post_init__(self) -> None:
        samples = _check("total_dataset_size", self.samples, 0, SAMPLES_MAX)
        shards = _check("shards", self.shards, min(samples, 1), min(samples, SHARDS_MAX))
        object.__setattr__(self, "samples", samples)
        object.__setattr__(self, "shards", shards)

    @classmethod
    def of(cls, samples: int, shards: int | None = None) -> Dataset:
        """The dataset with so many shards; by default one per sample, up to `SHARDS_DEFAULT_MAX`."""
        known = _check("total_dataset_size", samples, 0, SAMPLES_MAX)
        return cls(known, min(known, SHARDS_DEFAULT_MAX) if shards is None else shards)

    def shard(self, shard_id: int) -> DataShard:
        """The shard with this id."""
        if not 0 <= shard_id < self.shards:
            raise IndexError(f"shard_id must be from 0 to {self.shards - 1}, got {shard_id}")
        size, larger = divmod(self.samples, self.shards)
        start = shard_id * size + min(shard_id, larger)
        return DataShard(shard_id, start, start + size + (shard_id < larger))

    def bounds(self, ids: npt.ArrayLike) -> tuple[Indices, Indices]:
        """The start and the end of each of these shards."""
        starts = self._starts(self._within("shard", ids, self.shards))
        return starts, starts + self.sizes(ids)

    def sizes(self, ids: npt.ArrayLike) -> Indices:
        """The number of samples in each of these shards."""
        checked = self._within("shard", ids, self.shards)
        if not self.shards:
            return checked
        size, larger = divmod(self.samples, self.shards)
        return size + (checked < larger).astype(np.int64)

    def shard_of(self, samples: npt.ArrayLike) -> Indices:
        """The shard of each of these samples."""
        checked = self._within("sample", samples, self.samples)
        if not self.shards:
            return checked
        size, larger = divmod(self.samples, self.shards)
        in_larger = larger * (size + 1)
        after = (checked - in_larger) // size + larger
        return np.where(checked < in_larger, checked // (size + 1), after)

    def _starts(self, ids: Indices) -> Indices:
        if not self.shards:
            return ids
        size, larger = divmod(self.samples, self.shards)
        return ids * size + np.minimum(ids, larger)

    @staticmethod
    def _within(what: str, given: npt.ArrayLike, count: int) -> Indices:
        numbers = np.asarray(given)
        if not numbers.size:
            return np.zeros(numbers.shape, np.int64)
        if numbers.dtype.kind not in "iu" or numbers.min() < 0 or numbers.max() >= count:
            raise IndexError(f"each {what} must be a whole number from 0 to {count - 1}")
        return numbers.astype(np.int64)


class SourceKind(StrEnum):
    """Where a shard comes from."""

    OWNER = "owner"
    """The worker that owned it."""
    REPLICA = "replica"
    """A worker that holds a replica."""
    ORIGIN = "origin"
    """The dataset itself, as no worker holds it."""


KINDS = tuple(SourceKind)
"""Columns have indices into these."""


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

    @classmethod
    def average(cls, rates: Iterable[float], bytes_per_sample: float) -> TransferPace | None:
        """The pace with the average rate; None where no rate was measured."""
        known = [rate for rate in rates if 0.0 < rate < math.inf]
        if not (known and bytes_per_sample):
            return None
        return cls(sum(rate / len(known) for rate in known), bytes_per_sample)

    @property
    def seconds_per_sample(self) -> float:
        """The transfer time of one sample."""
        return self.bytes_per_sample / self.bytes_per_second


def _check(field: str, value: int, least: int, most: int) -> int:
    found = as_integer(value)
    if found is None or not least <= found <= most:
        shown = value if isinstance(value, int) and value.bit_length() <= 64 else f"a {type(value).__name__}"
        raise RequestRefused(
            "dataset_invalid",
            f"{field} must be a whole number from {least} to {most}, got {shown}",
            "check the numbers of samples and shards of the dataset",
        )
    return found


def check_shard(shard: object) -> int:
    """The shard id as an int; refused where a restart would not recognise the file named after it."""
    number = as_integer(shard)
    if number is None or not 0 <= number <= SHARD_ID_MAX:
        raise RequestRefused(
            "shard_invalid", f"shard must be a whole number from 0 to {SHARD_ID_MAX}, got {shard!r:.100}", "pass its id"
        )
    return number
