"""Lazy sequences over columns: values are made when they are read, and not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

from forged.data.columns import NOBODY, Column, Places, count, group
from forged.data.dataset import Dataset
from forged.data.model import DataShard
from forged.elastic.model import WorkerId

V = TypeVar("V")


@dataclass(frozen=True, slots=True, eq=False)
class View(Sequence[V], Generic[V]):
    """`read(row)` for each row; a slice of a view is a view."""

    rows: Places
    read: Callable[[int], V]

    def __len__(self) -> int:
        return self.rows.size

    @overload
    def __getitem__(self, index: int) -> V: ...
    @overload
    def __getitem__(self, index: slice) -> View[V]: ...
    def __getitem__(self, index: int | slice) -> V | View[V]:
        if isinstance(index, slice):
            return View(self.rows[index], self.read)
        return self.read(int(self.rows[index]))

    def __iter__(self) -> Iterator[V]:
        return (self.read(int(row)) for row in self.rows)

    def __repr__(self) -> str:
        return f"<{len(self)} values>"


@dataclass(frozen=True, eq=False)
class Assignments(Mapping[WorkerId, View[DataShard]]):
    """The shards of each worker, in order. `holders` has one row of workers for each copy."""

    dataset: Dataset
    workers: tuple[WorkerId, ...]
    holders: Column

    def __getitem__(self, worker: WorkerId) -> View[DataShard]:
        return View(self.ids(worker), self.dataset.shard)

    def __iter__(self) -> Iterator[WorkerId]:
        return iter(self.workers)

    def __len__(self) -> int:
        return len(self.workers)

    def ids(self, worker: WorkerId) -> Places:
        """The ids of the worker's shards."""
        number = self._numbers[worker]
        shards, starts = self._grouped
        return shards[starts[number] : starts[number + 1]]

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """The number of shards of each worker, by rank."""
        return count(self.holders, len(self.workers))

    @cached_property
    def _numbers(self) -> dict[WorkerId, int]:
        return {worker: number for number, worker in enumerate(self.workers)}

    @cached_property
    def _grouped(self) -> tuple[Places, Places]:
        """The shards grouped by worker, and where each worker's group starts."""
        by_shard = self.holders.T.ravel()
        held = np.flatnonzero(by_shard != NOBODY)
        order, starts = group(by_shard[held], len(self.workers))
        return held[order] // max(1, self.holders.shape[0]), starts
