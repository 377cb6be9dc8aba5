"""A dataset and its division into shards.

Law: the shards are disjoint and contiguous, cover every sample, and differ by at most one sample in size, the earlier
ones being the larger. No table of them exists: where one starts and which one holds a sample are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forged.data.arguments import whole
from forged.data.model import DataShard
from forged.errors import RequestRefused

SAMPLES_MAX = 2**63 - 1
SHARDS_MAX = 1 << 27
"""A plan holds a few bytes for every shard, whether it moves or not."""
SHARDS_DEFAULT_MAX = 1 << 20
"""A dataset of which nobody says in how many shards it lies has one per sample, but no more than so many."""

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Dataset:
    """So many samples in so many shards."""

    samples: int
    shards: int

    def __post_init__(self) -> None:
        samples = _check("total_dataset_size", self.samples, 0, SAMPLES_MAX)
        shards = _check("shards", self.shards, min(samples, 1), min(samples, SHARDS_MAX))
        object.__setattr__(self, "samples", samples)
        object.__setattr__(self, "shards", shards)

    @classmethod
    def of(cls, samples: int, shards: int | None = None) -> Dataset:
        """The dataset with so many shards; one for each sample where nobody says how many, within the limit."""
        known = _check("total_dataset_size", samples, 0, SAMPLES_MAX)
        return cls(known, min(known, SHARDS_DEFAULT_MAX) if shards is None else shards)

    def shard(self, shard_id: int) -> DataShard:
        """One of the shards."""
        if not 0 <= shard_id < self.shards:
            raise IndexError(f"there is no shard {shard_id} among {self.shards}")
        size, larger = divmod(self.samples, self.shards)
        start = shard_id * size + min(shard_id, larger)
        return DataShard(shard_id, start, start + size + (shard_id < larger))

    def bounds(self, ids: npt.ArrayLike) -> tuple[Indices, Indices]:
        """Where each of these shards starts, and where it ends."""
        starts = self._starts(self._within("shard", ids, self.shards))
        return starts, starts + self.sizes(ids)

    def sizes(self, ids: npt.ArrayLike) -> Indices:
        """How many samples each of these shards has."""
        checked = self._within("shard", ids, self.shards)
        if not self.shards:
            return checked
        size, larger = divmod(self.samples, self.shards)
        return size + (checked < larger).astype(np.int64)

    def shard_of(self, samples: npt.ArrayLike) -> Indices:
        """Which shard holds each of these samples."""
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
            raise IndexError(f"not every {what} is one of {count}")
        return numbers.astype(np.int64)


def _check(field: str, value: int, least: int, most: int) -> int:
    found = whole(value)
    if found is None or not least <= found <= most:
        shown = value if isinstance(value, int) and value.bit_length() <= 64 else f"a {type(value).__name__}"
        raise RequestRefused(
            "dataset_invalid",
            f"{field} = {shown} is no size of a dataset",
            f"give a whole number from {least} to {most}",
        )
    return found
