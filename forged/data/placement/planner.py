"""Plans which shards move when the workers change.

Invariants:
- A plan depends on its arguments alone.
- Every worker owns its weighted share, rounded down or up.
- The incremental plan moves the minimum: a shard moves only if its owner is gone or owns more than its share.
- The full reshuffle deals all shards in rounds over the new ranks.
- A shard comes from a copy on the destination's host, else from any copy, else from the origin. Equally good copies
  take turns, so that the load is even.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forged.data.columns import NOBODY, Column, Counts, Mask, Places, count, deal, group, ordinals
from forged.data.model import KINDS, Dataset, SourceKind, TransferPace
from forged.data.placement.holdings import Held, HeldCopies, Roster, read_owners, read_replicas
from forged.data.placement.plan import Assignments, ColumnPlan, DataRedistributionPlan, Kinds, TransferColumns
from forged.data.placement.replicas import keep_replicas, place_replicas
from forged.data.placement.shares import Weights, WorkerShares, read_weights
from forged.data.placement.validation import RedistributionReport, examine
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import ClusterTopology, RedistributionType, WorkerId
from forged.errors import RequestRefused
from forged.numbers import as_integer

REPLICATION_MAX = 16
WINDOW_MIN = 1 << 16


class DataRedistributor:
    """Plans with a job's settings; `replication` is the number of replicas of each shard."""

    def __init__(self, config: ElasticTrainingConfig, *, replication: int = 0) -> None:
        config.validate()
        self._config = config
        self._replication = check_replication(replication)

    def calculate_plan(
        self,
        old: ClusterTopology,
        new: ClusterTopology,
        total_dataset_size: int,
        *,
        shards: int | None = None,
        current: Held | None = None,
        replicas: HeldCopies | None = None,
        weights: Mapping[WorkerId, float] | None = None,
        draining: Collection[WorkerId] = (),
        pace: TransferPace | None = None,
    ) -> DataRedistributionPlan:
        """The assignment of shards in the new topology, and the transfers that it needs.

        - `shards`: by default one per sample, up to `SHARDS_DEFAULT_MAX`.
        - `current` and `replicas`: the current holders, as ranks of the old topology by shard (-1 for none), or as the
          shards of each of its workers. By default the shards are dealt in rounds over the old ranks. The
          `worker_assignments` and `replica_assignments` of a plan can be passed to the next one, with this plan's new
          topology as the old one.
        - `weights`: the relative share of the data that each worker should hold; 1 for a worker that is not named.
        - `draining`: workers that leave and serve their shards until then. Other workers that leave are gone.
        - `pace`: the measured pace, for estimates.

        A worker is the same in both topologies if its id and its address are; after a restart at another address it
        holds nothing.
        """
        dataset = Dataset.of(total_dataset_size, shards)
        if dataset.shards and not new.world_size:
            raise RequestRefused(
                "topology_empty", f"no worker can hold the {dataset.shards} shards", "wait until a worker has joined"
            )
        for name, given in (("current", current), ("replicas", replicas)):
            if isinstance(given, Assignments) and given.dataset != dataset:
                raise _of_other_dataset(name, given.dataset, dataset)
        roster = Roster.of(old, new, draining)
        before = read_owners(roster, dataset.shards, current)
        copies = read_replicas(roster, before, replicas)
        share = read_weights(weights, new.workers)
        owners, moving = self._owners(roster, before, copies, share)
        placed = self._replicas(roster, before, copies, owners, share)
        return ColumnPlan(
            dataset=dataset,
            workers=roster.workers,
            world_size=roster.world,
            owners_before=before,
            replicas_before=copies,
            owners=owners,
            replicas=placed,
            columns=_transfers(roster, before, copies, [(owners, moving), *_placed(placed)]),
            weights=share,
            pace=pace,
            lanes=self._config.transfers_at_once,
        )

    def validate_redistribution(
        self, topology: ClusterTopology, plan: DataRedistributionPlan, *, draining: Collection[WorkerId] = ()
    ) -> bool:
        """Whether the plan is valid for this topology. Of workers outside it, only `draining` ones may be sources."""
        return self.examine_redistribution(topology, plan, draining=draining).is_valid

    def examine_redistribution(
        self, topology: ClusterTopology, plan: DataRedistributionPlan, *, draining: Collection[WorkerId] = ()
    ) -> RedistributionReport:
        """The report that says what is wrong with the plan."""
        return examine(topology, plan, self._replication, draining)

    def _owners(self, roster: Roster, before: Column, copies: Column, weights: Weights) -> tuple[Column, Places]:
        """The owner of each shard, and the shards that get another owner."""
        if not before.size:
            return before.copy(), np.empty(0, np.intp)
        shares = WorkerShares.of(before.size, roster.world, weights)
        if self._config.redistribution_type == RedistributionType.FULL_RESHUFFLE:
            owners = deal(shares.settled())
            return owners, np.flatnonzero(before != owners)
        return _least_moved(roster, before, copies, shares)

    def _replicas(self, roster: Roster, before: Column, copies: Column, owners: Column, weights: Weights) -> Column:
        """The replicas of each shard."""
        wanted = min(self._replication, max(0, roster.world - 1))
        if not wanted:
            return np.empty((0, owners.size), np.int32)
        hosts = roster.hosts[: roster.world]
        held = [np.where(row < roster.world, row, NOBODY) for row in (before, *copies)]
        return place_replicas(keep_replicas(held, owners, hosts, wanted), held, owners, hosts, weights)


def check_replication(replication: object) -> int:
    """The number of replicas as an int, if it is allowed."""
    found = as_integer(replication)
    if found is None or not 0 <= found <= REPLICATION_MAX:
        raise RequestRefused(
            "replication_invalid",
            f"replication must be a whole number from 0 to {REPLICATION_MAX}, got {replication!r:.100}",
            "use fewer replicas than there are workers",
        )
    return found


def _of_other_dataset(field: str, given: Dataset, dataset: Dataset) -> RequestRefused:
    return RequestRefused(
        "holdings_invalid",
        f"{field} assigns {given.samples} samples in {given.shards} shards, not {dataset.samples} in {dataset.shards}",
        "pass the assignments of a plan for the same dataset",
    )


def _least_moved(roster: Roster, before: Column, copies: Column, shares: WorkerShares) -> tuple[Column, Places]:
    held = count(before, len(roster.workers))[: roster.world]
    targets = shares.settled(held > shares.least)
    surplus = np.maximum(held - targets, 0)
    moving = _moving(before, surplus, roster.world)
    owners = before.copy()
    owners[moving] = _receivers(roster, before[moving], copies[:, moving], np.maximum(targets - held, 0))
    return owners, moving


def _moving(owners: Column, surplus: Counts, world: int) -> Places:
    """The shards that must move: those whose owner leaves or is gone, and the last ones of workers with too many."""
    # As unsigned numbers -1 is beyond the world, too.
    orphans = np.flatnonzero(owners.view(np.uint32) >= world)
    if not surplus.any():
        return orphans
    spared = _latest(owners, surplus)
    return np.sort(np.concatenate((orphans, spared))) if orphans.size else spared


def _latest(owners: Column, surplus: Counts) -> Places:
    """The last shards of each worker that owns too many, in order.

    They are searched in growing windows from the end, because few shards have to be read in most cases.
    """
    bound = surplus.size
    missing = surplus.copy()
    found: list[Places] = []
    high, width = owners.size, max(WINDOW_MIN, 2 * int(surplus.sum()))
    while missing.any():
        low = max(0, high - width)
        window = owners[low:high]
        # Index -1 and workers beyond the world read the last element.
        is_wanted = np.append(missing > 0, False)
        candidates = np.flatnonzero(np.take(is_wanted, window.view(np.uint32), mode="clip"))[::-1]
        workers = window[candidates]
        chosen = ordinals(workers, bound) < missing[workers]
        missing -= np.bincount(workers[chosen], minlength=bound)
        found.append(low + candidates[chosen][::-1])
        high, width = low, 2 * width
    return np.concatenate(found[::-1])


def _receivers(roster: Roster, owners: Column, copies: Column, places: Counts) -> Column:
    """The new owner of each moving shard: a worker with a copy, else one on the same host, else any in turn."""
    held = [row for row in (owners, *copies) if (row != NOBODY).any()]
    if not held:
        return deal(places)
    receivers = np.full(owners.size, NOBODY, np.int32)
    ranks = np.arange(roster.world, dtype=np.int32)
    for row in copies:
        _seat(receivers, np.where(row < roster.world, row, NOBODY), ranks, places)
    hosts = roster.hosts
    for row in held:
        _seat(receivers, np.where(row != NOBODY, hosts[row], NOBODY), hosts[: roster.world], places)
    receivers[receivers == NOBODY] = deal(places)
    return receivers


def _seat(receivers: Column, wanted: Column, keys: Column, places: Counts) -> None:
    """Match rows without a receiver to receivers with the wanted key, earlier rows first, while there are any."""
    bound = int(max(keys.max(initial=-1), wanted.max(initial=-1))) + 1
    room = np.zeros(bound + 1, np.int64)
    np.add.at(room, keys, places)
    open_ids = np.flatnonzero((receivers == NOBODY) & (room[wanted] > 0))
    if not open_ids.size:
        return
    offered = deal(places)
    order, starts = group(keys[offered], bound)
    turn = ordinals(wanted[open_ids], bound)
    seated = turn < room[wanted[open_ids]]
    ids = open_ids[seated]
    receivers[ids] = offered[order[starts[wanted[ids]] + turn[seated]]]
    places -= np.bincount(receivers[ids], minlength=places.size)


def _placed(replicas: Column) -> Iterator[tuple[Column, Places]]:
    """Each row of replicas with all shards; a worker that already holds a copy is sent none."""
    return ((row, np.arange(row.size)) for row in replicas)


def _transfers(
    roster: Roster, before: Column, copies: Column, needed: Sequence[tuple[Column, Places]]
) -> TransferColumns:
    """The transfers of the owners, then those of each replica, each in the order of the shards."""
    parts = [_part(roster, before, copies, row, ids, number) for number, (row, ids) in enumerate(needed)]
    if len(parts) == 1:
        return parts[0]
    return TransferColumns(*map(np.concatenate, zip(*(vars(part).values() for part in parts), strict=True)))


def _part(
    roster: Roster, before: Column, copies: Column, destinations: Column, ids: Places, copy: int
) -> TransferColumns:
    """The transfers of these shards to destinations that do not hold them yet."""
    # A new owner was not the owner before.
    for row in (before, *copies) if copy else copies:
        ids = ids[row[ids] != destinations[ids]]
    held = np.empty((copies.shape[0] + 1, ids.size), np.int32)
    held[0], held[1:] = before[ids], copies[:, ids]
    towards = destinations[ids]
    sources = choose_sources(held, towards, roster.hosts)
    return TransferColumns(ids, sources.workers, sources.kinds, towards, np.full(ids.size, copy, np.uint8))


@dataclass(frozen=True, slots=True)
class Sources:
    """For each transfer the source, -1 for the origin, and its kind."""

    workers: Column
    kinds: Kinds


def choose_sources(copies: Column, destinations: Column, hosts: Column) -> Sources:
    """The source of each transfer; `copies` has a row for the owners, then one for each replica."""
    transfers = destinations.size
    sources = Sources(
        np.full(transfers, NOBODY, np.int32), np.full(transfers, KINDS.index(SourceKind.ORIGIN), np.uint8)
    )
    found = np.flatnonzero((copies != NOBODY).any(axis=0))
    if found.size:
        row = _rows(copies[:, found], destinations[found], hosts)
        sources.workers[found] = copies[row, found]
        sources.kinds[found] = np.where(row == 0, KINDS.index(SourceKind.OWNER), KINDS.index(SourceKind.REPLICA))
    return sources


def _rows(copies: Column, destinations: Column, hosts: Column) -> Places:
    """The chosen row in each column; every column has a copy."""
    there = copies != NOBODY
    near = there & (hosts[copies] == hosts[destinations])
    good = np.where(near.any(axis=0), near, there)
    return _nth(good, _turns(good, copies, hosts.size))


def _turns(good: Mask, copies: Column, workers: int) -> Places:
    """Which of the good copies is next, in turns among the transfers with the same first good copy."""
    turns = np.zeros(good.shape[1], np.intp)
    choices = good.sum(axis=0)
    several = np.flatnonzero(choices > 1)
    first = copies[good[:, several].argmax(axis=0), several]
    turns[several] = ordinals(first, workers) % choices[several]
    return turns


def _nth(good: Mask, turns: Places) -> Places:
    rows: Places = (good & (good.cumsum(axis=0) == turns + 1)).argmax(axis=0)
    return rows
