"""A transfer plan: the assignment of shards to workers, and the transfers that it needs.

Invariants:
- A plan consists of immutable columns, whether the planner or a caller made it.
- Every shard has exactly one owner, also a shard that stays.
- Single shards and transfers are views: made when they are read, and not kept.
- Transfers are sorted by priority: owners before replicas, and earlier shards first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

from forged.data.columns import NOBODY, Column, Counts, Places, count, group, ordinals
from forged.data.model import KINDS, Dataset, DataShard, DataTransfer, SourceKind, TransferPace
from forged.data.placement.given_plan import GivenPlan, read_plan
from forged.data.placement.shares import Weights
from forged.elastic.model import WorkerId
from forged.errors import RequestRefused

V = TypeVar("V")

Times = npt.NDArray[np.float64]
Kinds = npt.NDArray[np.uint8]
"""Indices into `KINDS`."""

BOUND_MIN = 1 << 16
"""Up to so many queues are counted by their number, however few of them are used."""


@dataclass(frozen=True, slots=True, eq=False)
class View(Sequence[V], Generic[V]):
    """`read(row)` for each row; a slice of a view is a view. It equals a sequence of the same values."""

    rows: Places
    read: Callable[[int], V]
    __hash__ = None  # type: ignore[assignment]

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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return f"<{len(self)} values>"


@dataclass(frozen=True, eq=False)
class Assignments(Mapping[WorkerId, View[DataShard]]):
    """The shards of each worker, in order. `holders` has one row of workers for each copy."""

    dataset: Dataset
    workers: tuple[WorkerId, ...]
    holders: Column
    known: Mapping[int, DataShard] = field(default_factory=dict)
    """Shards as a caller gave them; others are those of the dataset."""

    def __getitem__(self, worker: WorkerId) -> View[DataShard]:
        return View(self.ids(worker), self._shard)

    def _shard(self, shard_id: int) -> DataShard:
        return self.known.get(shard_id) or self.dataset.shard(shard_id)

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


@dataclass(frozen=True, eq=False)
class TransferColumns:
    """For each transfer: shard, source or -1, kind of source, destination, and copy number."""

    shards: Places
    sources: Column
    kinds: Kinds
    destinations: Column
    copies: npt.NDArray[np.uint8]
    """0 if the destination becomes the owner, else the number of the replica."""

    def __post_init__(self) -> None:
        for column in vars(self).values():
            column.setflags(write=False)


@dataclass(frozen=True, eq=False, repr=False, init=False)
class DataRedistributionPlan:
    """The owners and replicas before and after, as places in `workers`, and the transfers between."""

    dataset: Dataset
    workers: tuple[WorkerId, ...]
    """The new topology by rank, then the workers that leave and still serve."""
    world_size: int
    owners_before: Column
    replicas_before: Column
    """One row for each replica, -1 where there is none."""
    owners: Column
    replicas: Column
    columns: TransferColumns
    weights: Weights = None
    pace: TransferPace | None = None
    lanes: int = 1
    """How many transfers a worker receives at once."""
    given: GivenPlan | None = None
    """What a caller made the plan from, whose workers are in no order of rank; None for a plan of the planner."""
    _numbers: dict[WorkerId, int] = field(init=False)

    def __init__(
        self,
        transfers: Iterable[DataTransfer] = (),
        worker_assignments: Mapping[WorkerId, Iterable[DataShard]] | None = None,
        total_shards: int = 0,
    ) -> None:
        """A plan of the caller's own: the shards that each worker owns afterwards, and the transfers to that end.

        `DataRedistributor.validate_redistribution` says whether it is consistent.
        """
        given = read_plan(transfers, worker_assignments or {}, total_shards)
        plan = ColumnPlan(
            given.dataset,
            given.workers,
            given.world_size,
            given.owners_before,
            given.replicas_before,
            given.owners,
            given.replicas,
            TransferColumns(*(column.copy() for column in given.columns)),
            given=given,
        )
        vars(self).update(vars(plan))

    def __post_init__(self) -> None:
        for column in (self.owners_before, self.replicas_before, self.owners, self.replicas):
            column.setflags(write=False)
        object.__setattr__(self, "_numbers", {worker: number for number, worker in enumerate(self.workers)})

    def __repr__(self) -> str:
        return (
            f"DataRedistributionPlan({self.total_shards} shards, {self.world_size} workers, {self.moved} moved, "
            f"{len(self.transfers)} transfers)"
        )

    @property
    def total_shards(self) -> int:
        """The number of shards, whether they move or not."""
        return self.dataset.shards

    @property
    def _given_shards(self) -> Mapping[int, DataShard]:
        return {} if self.given is None else self.given.shards

    @cached_property
    def worker_assignments(self) -> Assignments:
        """The shards that each worker of the new topology owns, also those that stay."""
        return Assignments(self.dataset, self.workers[: self.world_size], self.owners[np.newaxis], self._given_shards)

    @cached_property
    def replica_assignments(self) -> Assignments:
        """The shards of which each worker of the new topology holds a replica."""
        return Assignments(self.dataset, self.workers[: self.world_size], self.replicas, self._given_shards)

    @cached_property
    def copy_assignments(self) -> Assignments:
        """The shards that each worker of the new topology holds, as owner or replica."""
        if not len(self.replicas):
            return self.worker_assignments
        holders = np.concatenate((self.owners[np.newaxis], self.replicas))
        return Assignments(self.dataset, self.workers[: self.world_size], holders, self._given_shards)

    @property
    def transfers(self) -> View[DataTransfer]:
        """All transfers, the highest priority first."""
        return View(np.arange(self.columns.shards.size), self._transfer)

    def for_worker(self, worker: WorkerId) -> View[DataTransfer]:
        """The transfers to this worker, the highest priority first."""
        number = self._numbers.get(worker, NOBODY)
        order, starts = self._by_destination
        mine = order[starts[number] : starts[number + 1]] if number != NOBODY else order[:0]
        return View(mine, self._transfer)

    @cached_property
    def moved(self) -> int:
        """How many shards get another owner, including owners that already hold a replica and need no transfer."""
        return int(np.count_nonzero(self.owners != self.owners_before))

    @cached_property
    def priorities(self) -> Counts:
        """Earlier shards have higher priorities, and any owner's transfer a higher one than a replica's."""
        if self.given is not None:
            return np.array([transfer.priority for transfer in self.given.transfers], np.int64)
        first = (1 - self.columns.copies.astype(np.int64)) * self.total_shards
        return first - self.columns.shards

    def transfer_count(self, kind: SourceKind) -> int:
        """The number of transfers with this kind of source."""
        return int(np.count_nonzero(self.columns.kinds == KINDS.index(kind)))

    def bytes_to_move(
        self,
        bytes_per_sample: float | None = None,
        *,
        sizes: Sequence[int] | npt.NDArray[np.integer] | None = None,
        kind: SourceKind | None = None,
    ) -> int:
        """The bytes of all transfers, or of one kind; needs `bytes_per_sample` or the size of each shard."""
        shards = self.columns.shards
        if kind is not None:
            shards = shards[self.columns.kinds == KINDS.index(kind)]
        if bytes_per_sample is not None and sizes is None:
            return round(int(self.dataset.sizes(shards).sum()) * bytes_per_sample)
        if bytes_per_sample is not None or sizes is None or len(sizes) != self.total_shards:
            raise RequestRefused(
                "sizes_invalid",
                "shard sizes are unknown",
                "pass bytes_per_sample, or the size of each shard",
            )
        return int(np.asarray(sizes, np.int64)[shards].sum())

    @cached_property
    def completion_times(self) -> Times | None:
        """The estimated completion of each transfer; None without a measured pace.

        Each worker receives its transfers in order, `lanes` at once, and serves as many at once, so a worker whose
        shards many need is a bottleneck. The measured pace already includes other load on a worker.
        """
        if self.pace is None:
            return None
        columns = self.columns
        samples = self.dataset.sizes(columns.shards)
        lane = columns.destinations.astype(np.int64) * self.lanes
        lane += ordinals(columns.destinations, len(self.workers)) % self.lanes
        taken = _waited(lane, len(self.workers) * self.lanes, samples)
        given = _waited(columns.sources + 1, len(self.workers) + 1, samples)
        # The origin is assumed to serve any number of workers at the same rate.
        given[columns.sources == NOBODY] = 0
        return np.maximum(taken, given / self.lanes) * self.pace.seconds_per_sample + np.float64(self.pace.now)

    @property
    def estimated_seconds(self) -> float | None:
        """The estimated duration of all transfers; None without a measured pace."""
        if self.pace is None or self.completion_times is None:
            return None
        return float(self.completion_times.max(initial=self.pace.now) - self.pace.now)

    @cached_property
    def _by_destination(self) -> tuple[Places, Places]:
        return group(self.columns.destinations, len(self.workers))

    def _transfer(self, row: int) -> DataTransfer:
        if self.given is not None:
            return self.given.transfers[row]
        columns, times = self.columns, self.completion_times
        source = int(columns.sources[row])
        return DataTransfer(
            source_worker=None if source == NOBODY else self.workers[source],
            destination_worker=self.workers[columns.destinations[row]],
            shard=self.dataset.shard(int(columns.shards[row])),
            priority=int(self.priorities[row]),
            estimated_completion_time=None if times is None else float(times[row]),
            source_kind=KINDS[columns.kinds[row]],
        )


def _waited(queues: Places | Column, bound: int, samples: Counts) -> Counts:
    """For each row, the samples that have passed through its queue when it has; a queue is sequential."""
    if bound > max(samples.size, BOUND_MIN):
        queues = np.unique(queues, return_inverse=True)[1]
        bound = int(queues.max(initial=-1)) + 1
    order, starts = group(queues, bound)
    through = np.concatenate((np.zeros(1, np.int64), np.cumsum(samples[order])))
    waited = np.empty(order.size, np.int64)
    waited[order] = through[1:] - np.repeat(through[starts[:-1]], np.diff(starts))
    return waited


@dataclass(frozen=True, eq=False, repr=False)
class ColumnPlan(DataRedistributionPlan):
    """A plan that is made from its columns."""
