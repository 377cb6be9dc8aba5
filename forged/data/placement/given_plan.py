"""Reads a plan that a caller made from values: the transfers, and the shards of each worker afterwards.

Invariants:
- A plan of any content can be read, so that it can be validated; only values of a wrong type are refused.
- What no transfer moves stays: its owner had it before.
- What columns cannot express, such as a shard with two owners, becomes a fault in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from forged.data.columns import NOBODY, Column, Counts
from forged.data.model import KINDS, SHARDS_MAX, Dataset, DataShard, DataTransfer, SourceKind
from forged.elastic.model import WorkerId
from forged.errors import RequestRefused
from forged.numbers import as_integer

V = TypeVar("V")


class GivenPlan(NamedTuple):
    """A caller's plan as the columns of a `DataRedistributionPlan`."""

    dataset: Dataset
    workers: tuple[WorkerId, ...]
    """The workers with assignments, then those that transfers name besides."""
    world_size: int
    owners_before: Column
    replicas_before: Column
    owners: Column
    replicas: Column
    columns: Counts
    """For each transfer its shard, source, kind of source, destination and copy number."""
    transfers: tuple[DataTransfer, ...]
    """The highest priority first."""
    shards: dict[int, DataShard]
    faults: tuple[str, ...]


def read_plan(
    transfers: Iterable[DataTransfer], assignments: Mapping[WorkerId, Iterable[DataShard]], total_shards: int
) -> GivenPlan:
    total = as_integer(total_shards)
    if total is None or not 0 <= total <= SHARDS_MAX:
        raise _invalid(f"total_shards must be a whole number from 0 to {SHARDS_MAX}, got {total_shards!r:.100}")
    given = sorted(_all_of(DataTransfer, "transfers", transfers), key=lambda one: -one.priority)
    assigned = {worker: _all_of(DataShard, f"worker_assignments[{worker}]", ids) for worker, ids in assignments.items()}
    named = [worker for one in given for worker in (one.destination_worker, one.source_worker) if worker is not None]
    workers = tuple(dict.fromkeys((*assigned, *named)))
    owners, shards, faults = _owners(assigned, total)
    dataset = Dataset(max([total, *(shard.end_index for shard in shards.values())]), total)
    moved = [one.shard for one in given]
    return GivenPlan(
        dataset,
        workers,
        len(assigned),
        *_columns(given, workers, owners),
        tuple(given),
        shards,
        (*faults, *_other_samples(shards, dataset), *_other_shards(moved, shards)),
    )


def _owners(
    assigned: Mapping[WorkerId, Sequence[DataShard]], total: int
) -> tuple[Column, dict[int, DataShard], list[str]]:
    """The place of each shard's owner, the assigned shards, and what is wrong with them."""
    owners, known, faults = np.full(total, NOBODY, np.int32), dict[int, DataShard](), list[str]()
    workers = list(assigned)
    for place, (worker, shards) in enumerate(assigned.items()):
        for shard in shards:
            number = shard.shard_id
            if not 0 <= number < total:
                faults.append(f"shard {number} of {worker} must be from 0 to {total - 1}, below total_shards")
            elif number in known:
                faults.append(f"shard {number} is assigned to {workers[owners[number]]} and to {worker}")
            else:
                owners[number], known[number] = place, shard
    return owners, known, faults


def _other_samples(shards: Mapping[int, DataShard], dataset: Dataset) -> Iterator[str]:
    if dataset.shards - 1 not in shards:
        # Without the last shard the size of the dataset is not known.
        return
    for number, shard in shards.items():
        if shard != (expected := dataset.shard(number)):
            yield (
                f"shard {number} has {_samples(shard)}; of {dataset.samples} samples in {dataset.shards} shards "
                f"it has {_samples(expected)}"
            )


def _other_shards(moved: Iterable[DataShard], shards: Mapping[int, DataShard]) -> Iterator[str]:
    for shard in moved:
        known = shards.get(shard.shard_id, shard)
        if shard != known:
            yield f"shard {shard.shard_id} is transferred with {_samples(shard)} and assigned with {_samples(known)}"


def _samples(shard: DataShard) -> str:
    return f"the samples from {shard.start_index} to {shard.end_index}"


def _columns(
    given: Sequence[DataTransfer], workers: Sequence[WorkerId], owners: Column
) -> tuple[Column, Column, Column, Column, Counts]:
    """Owners and replicas before, owners and replicas after, and the transfers. What is not transferred stays."""
    places = {worker: place for place, worker in enumerate(workers)}
    before = owners.copy()
    replicas, replicas_before = _Rows(owners.size), _Rows(owners.size)
    rows = []
    for transfer in given:
        shard, destination = transfer.shard.shard_id, places[transfer.destination_worker]
        source = NOBODY if transfer.source_worker is None else places[transfer.source_worker]
        kind = SourceKind.ORIGIN if source == NOBODY else transfer.source_kind
        copy = 0
        if 0 <= shard < owners.size:
            is_to_owner = owners[shard] == destination
            copy = 0 if is_to_owner else replicas.add(shard, destination)
            if kind is SourceKind.REPLICA:
                replicas_before.add(shard, source)
            if is_to_owner:
                before[shard] = source if kind is SourceKind.OWNER else NOBODY
        else:
            shard = NOBODY
        rows.append((shard, source, KINDS.index(kind), destination, copy))
    columns = np.array(rows, np.int64).reshape(-1, 5).T
    return before, replicas_before.column, owners, replicas.column, columns


class _Rows:
    """Rows of workers, the first one with the first worker of each shard, the next one with its second."""

    def __init__(self, shards: int) -> None:
        self.column: Column = np.empty((0, shards), np.int32)
        self._counts: Counter[int] = Counter()

    def add(self, shard: int, worker: int) -> int:
        """Returns the number of the worker's row, from 1."""
        self._counts[shard] += 1
        if self._counts[shard] > len(self.column):
            self.column = np.concatenate((self.column, np.full((1, self.column.shape[1]), NOBODY, np.int32)))
        self.column[self._counts[shard] - 1, shard] = worker
        return self._counts[shard]


def _all_of(kind: type[V], field: str, values: Iterable[V]) -> list[V]:
    found = list(values)
    for number, value in enumerate(found):
        if not isinstance(value, kind):
            raise _invalid(f"{field}[{number}] must be a {kind.__name__}, got {value!r:.100}")
    return found


def _invalid(message: str) -> RequestRefused:
    return RequestRefused("plan_invalid", message, "see the arguments of DataRedistributionPlan")
