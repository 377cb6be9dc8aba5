"""Validates a plan.

The checks read the plan's columns alone, however they were made. A problem names the shard and the worker; of many
problems of one kind the first ones are named and the rest counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forged.data.columns import NOBODY, Column, Counts, Mask, Places
from forged.data.model import KINDS, SourceKind
from forged.data.placement.plan import DataRedistributionPlan
from forged.data.placement.shares import WorkerShares
from forged.elastic.model import ClusterTopology, WorkerId

NAMED_MAX = 10


@dataclass(frozen=True, slots=True)
class RedistributionReport:
    """What is wrong with a plan."""

    errors: tuple[str, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Whether the plan has no problem."""
        return not self.errors


def examine(
    topology: ClusterTopology, plan: DataRedistributionPlan, replication: int, draining: Collection[WorkerId] = ()
) -> RedistributionReport:
    """All problems of a plan for this topology. Workers in `draining` are outside the topology and alive."""
    wanted = min(replication, max(0, topology.world_size - 1))
    shape = (
        (plan.given.faults[:NAMED_MAX] if plan.given else ())
        or tuple(_wrong_shape(plan))
        or tuple(_wrong_workers(topology, plan, draining))
        or tuple(_wrong_numbers(plan))
    )
    if shape:
        # Without valid places and shards no other check is meaningful.
        return RedistributionReport(shape)
    checks = (_unbalanced(plan), _wrong_replicas(plan, wanted), _wrong_transfers(plan), _wrong_sources(plan))
    return RedistributionReport(tuple(error for check in checks for error in check))


def _wrong_shape(plan: DataRedistributionPlan) -> Iterator[str]:
    shards = plan.total_shards
    for name in ("owners", "owners_before"):
        if getattr(plan, name).shape != (shards,):
            yield f"{name} has {getattr(plan, name).size} rows for {shards} shards"
    for name in ("replicas", "replicas_before"):
        if getattr(plan, name).ndim != 2 or getattr(plan, name).shape[1] != shards:
            yield f"{name} must have {shards} shards per row"
    columns = vars(plan.columns)
    if len({column.shape for column in columns.values()}) != 1 or plan.columns.shards.ndim != 1:
        shapes = ", ".join(f"{name} {column.shape}" for name, column in columns.items())
        yield f"the columns of the transfers differ in length: {shapes}"
    for name in ("owners", "owners_before", "replicas", "replicas_before"):
        if getattr(plan, name).dtype.kind not in "iu":
            yield f"{name} must contain whole numbers, not {getattr(plan, name).dtype}"
    for name, column in columns.items():
        if column.dtype.kind not in "iu":
            yield f"{name} of the transfers must contain whole numbers, not {column.dtype}"


def _wrong_workers(
    topology: ClusterTopology, plan: DataRedistributionPlan, draining: Collection[WorkerId]
) -> Iterator[str]:
    planned = dict.fromkeys(plan.workers[: max(0, plan.world_size)])
    if len(planned) != plan.world_size:
        yield f"there are {len(planned)} workers for a world of {plan.world_size}"
    yield from (f"{one} gets shards and is not in the topology" for one in planned if one not in topology)
    yield from (f"{one} is in the topology and not in the plan" for one in topology.workers if one not in planned)
    if len(set(plan.workers)) != len(plan.workers):
        yield "a worker is in the plan twice"
        return
    ranks = enumerate(zip(planned, topology.workers, strict=False))
    for rank, (one, other) in ranks:
        if plan.given is None and one != other and one in topology:
            yield f"{one} has rank {rank} in the plan, and {other} in the topology"
    alive = {*topology.workers, *draining}
    for one in plan.workers[plan.world_size :]:
        if one not in alive:
            yield f"{one} serves shards and is neither in the topology nor draining"
    weights = (1,) * plan.world_size if plan.weights is None else plan.weights
    if len(weights) != plan.world_size or any(weight < 0 for weight in weights) or sum(weights) < min(1, len(weights)):
        yield f"the weights {plan.weights} are not those of {plan.world_size} workers"


def _wrong_numbers(plan: DataRedistributionPlan) -> Iterator[str]:
    world, known, columns = plan.world_size, len(plan.workers), plan.columns

    def beyond(column: npt.NDArray[np.integer], least: int, most: int) -> Mask:
        return np.asarray((column < least) | (column >= most))

    yield from _named(np.flatnonzero(beyond(plan.owners, 0, world)), lambda shard: f"shard {shard} has no owner")
    for name, column, most in (
        ("owners_before", plan.owners_before, known),
        ("replicas_before", plan.replicas_before, known),
        ("replicas", plan.replicas, world),
        ("sources", columns.sources, known),
    ):
        if beyond(column, NOBODY, most).any():
            yield f"{name} has a rank that no worker has"
    rows = beyond(columns.shards, 0, plan.total_shards) | beyond(columns.destinations, 0, world)
    rows |= beyond(columns.copies, 0, plan.replicas.shape[0] + 1) | beyond(columns.kinds, 0, len(KINDS))
    yield from _named(
        np.flatnonzero(rows), lambda row: f"transfer {row} has no valid shard, destination, copy or kind of source"
    )


def _unbalanced(plan: DataRedistributionPlan) -> Iterator[str]:
    if not plan.world_size:
        return
    shares = WorkerShares.of(plan.total_shards, plan.world_size, plan.weights)
    held = np.bincount(plan.owners, minlength=plan.world_size)
    least, most = shares.least, shares.most
    yield from _named(
        np.flatnonzero((held < least) | (held > most)),
        lambda rank: f"{plan.workers[rank]} has {held[rank]} shards; its share is {_between(least, most, rank)}",
    )


def _between(least: Counts, most: Counts, rank: int) -> str:
    return f"{least[rank]}" if least[rank] == most[rank] else f"{least[rank]} or {most[rank]}"


def _wrong_replicas(plan: DataRedistributionPlan, wanted: int) -> Iterator[str]:
    if plan.replicas.shape[0] != wanted:
        yield f"{plan.replicas.shape[0]} replicas of each shard are planned; {wanted} are wanted"
    for number, row in enumerate(plan.replicas):
        yield from _wrong_copy(plan, number, row)


def _wrong_copy(plan: DataRedistributionPlan, number: int, row: Column) -> Iterator[str]:
    yield from _named(np.flatnonzero(row == NOBODY), lambda shard: f"shard {shard} has no replica {number + 1}")
    again = np.zeros(row.size, np.bool_)
    for earlier in (plan.owners, *plan.replicas[:number]):
        again |= (row == earlier) & (row != NOBODY)
    yield from _named(np.flatnonzero(again), lambda shard: f"{plan.workers[row[shard]]} has shard {shard} twice")


def _wrong_transfers(plan: DataRedistributionPlan) -> Iterator[str]:
    for number, row in enumerate((plan.owners, *plan.replicas)):
        yield from _wrong_ways(plan, number, row)
    steps = np.diff(plan.priorities)
    yield from _named(np.flatnonzero(steps > 0), lambda at: f"transfer {at + 1} is due before transfer {at}")


def _wrong_ways(plan: DataRedistributionPlan, number: int, row: Column) -> Iterator[str]:
    """A copy must be transferred exactly once to each worker that needs it and does not hold it."""
    mine = np.flatnonzero(plan.columns.copies == number)
    shards, destinations = plan.columns.shards[mine], plan.columns.destinations[mine]
    needed = (row != NOBODY) & ~_has(plan, np.arange(row.size), row)
    times = np.bincount(shards, minlength=row.size)
    yield from _named(
        np.flatnonzero(needed & (times == 0)),
        lambda shard: f"shard {shard} is not transferred to {plan.workers[row[shard]]}, which needs it",
    )
    yield from _named(np.flatnonzero(~needed & (times > 0)), lambda shard: f"shard {shard} is transferred without need")
    yield from _named(
        np.flatnonzero(times > 1), lambda shard: f"shard {shard} is transferred more than once as one copy"
    )
    yield from _named(
        np.flatnonzero(destinations != row[shards]),
        lambda at: f"shard {shards[at]} is transferred to {plan.workers[destinations[at]]}, which does not keep it",
    )


def _wrong_sources(plan: DataRedistributionPlan) -> Iterator[str]:
    columns = plan.columns
    origin = columns.kinds == KINDS.index(SourceKind.ORIGIN)
    owner = columns.kinds == KINDS.index(SourceKind.OWNER)
    is_owner = plan.owners_before[columns.shards] == columns.sources
    rows = np.where(origin, columns.sources != NOBODY, columns.sources == NOBODY)
    yield from _named(
        np.flatnonzero(rows | (owner & ~is_owner) | (~origin & ~_has(plan, columns.shards, columns.sources))),
        lambda row: f"shard {columns.shards[row]} comes from {_source(plan, row)}, which does not have it",
    )
    held = (plan.owners_before != NOBODY) | (plan.replicas_before != NOBODY).any(axis=0)
    yield from _named(
        np.flatnonzero(origin & held[columns.shards]),
        lambda row: f"shard {columns.shards[row]} comes from the origin although a worker has it",
    )


def _has(plan: DataRedistributionPlan, shards: Places, workers: Column) -> Mask:
    """Whether each worker holds the shard before the transfers."""
    has = np.asarray(plan.owners_before[shards] == workers)
    for row in plan.replicas_before:
        has |= row[shards] == workers
    return has


def _source(plan: DataRedistributionPlan, row: int) -> str:
    source = int(plan.columns.sources[row])
    return "no worker" if source == NOBODY else str(plan.workers[source])


def _named(found: Places, say: Callable[[int], str]) -> Iterable[str]:
    named = [say(int(place)) for place in found[:NAMED_MAX]]
    return [*named, f"and {found.size - NAMED_MAX} more like it"] if found.size > NAMED_MAX else named
