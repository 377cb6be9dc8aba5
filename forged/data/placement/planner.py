"""What moves when the workers change.

Law: a plan follows from its arguments alone. It leaves every worker with its weighted share, rounded down or up. The
incremental one moves no more shards than that takes: one goes only from a worker that has more than its share, or whose
owner is gone. The full reshuffle deals all of them out in rounds over the new ranks, wherever they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from forged.data.arguments import whole
from forged.data.columns import NOBODY, Column, Counts, Places, count, deal, group, ordinals
from forged.data.dataset import Dataset
from forged.data.model import TransferPace
from forged.data.placement.holdings import Held, HeldCopies, Roster, read_owners, read_replicas
from forged.data.placement.plan import DataRedistributionPlan, TransferColumns
from forged.data.placement.replicas import keep_replicas, place_replicas
from forged.data.placement.shares import Shares, Weights, read_weights
from forged.data.placement.sources import choose_sources
from forged.data.placement.validation import RedistributionReport, examine
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import ClusterTopology, RedistributionType, WorkerId
from forged.errors import RequestRefused

REPLICATION_MAX = 16
WINDOW_MIN = 1 << 16


class DataRedistributor:
    """Plans for jobs with these settings; `replication` is how many further copies of each shard there should be."""

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
        leaving: Collection[WorkerId] = (),
        pace: TransferPace | None = None,
    ) -> DataRedistributionPlan:
        """Who holds which shard in the new topology, and what must travel for it.

        - `shards`: one for each sample where it is None, up to `SHARDS_DEFAULT_MAX`.
        - `current` and `replicas`: who holds what now, as ranks of the old topology by shard (-1: nobody), or as the
          shards of each of its workers. Where `current` is None, the old ranks hold them as dealt out in rounds. The
          `owners` and `replicas` of a plan can be given to the next one, with this one's new topology as the old one.
        - `weights`: how much of the data each worker should hold, in proportion; 1 for who is not named.
        - `leaving`: who goes, and yet serves what it holds until it has gone. Who else goes is gone.
        - `pace`: what was measured, for estimates.

        A worker is the same in both topologies when its id and its address are: one that came back elsewhere has
        nothing.
        """
        dataset = Dataset.of(total_dataset_size, shards)
        if dataset.shards and not new.world_size:
            raise RequestRefused(
                "topology_empty", f"nobody is there to hold {dataset.shards} shards", "wait until a worker has joined"
            )
        roster = Roster.of(old, new, leaving)
        before = read_owners(roster, dataset.shards, current)
        copies = read_replicas(roster, before, replicas)
        share = read_weights(weights, new.workers)
        owners, moving = self._owners(roster, before, copies, share)
        placed = self._replicas(roster, before, copies, owners, share)
        return DataRedistributionPlan(
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
        self, topology: ClusterTopology, plan: DataRedistributionPlan, *, leaving: Collection[WorkerId] = ()
    ) -> bool:
        """Whether the plan holds what plans promise, for this topology and those who are leaving, who alone may serve
        what they hold without being in it."""
        return self.examine_redistribution(topology, plan, leaving=leaving).is_valid

    def examine_redistribution(
        self, topology: ClusterTopology, plan: DataRedistributionPlan, *, leaving: Collection[WorkerId] = ()
    ) -> RedistributionReport:
        """What is wrong with the plan, in words."""
        return examine(topology, plan, self._replication, leaving)

    def _owners(self, roster: Roster, before: Column, copies: Column, weights: Weights) -> tuple[Column, Places]:
        """Who owns each shard, and which ones get another owner."""
        if not before.size:
            return before.copy(), np.empty(0, np.intp)
        shares = Shares.of(before.size, roster.world, weights)
        if self._config.redistribution_type == RedistributionType.FULL_RESHUFFLE:
            owners = deal(shares.settled())
            return owners, np.flatnonzero(before != owners)
        return _least_moved(roster, before, copies, shares)

    def _replicas(self, roster: Roster, before: Column, copies: Column, owners: Column, weights: Weights) -> Column:
        """The further copies that there should be."""
        wanted = min(self._replication, max(0, roster.world - 1))
        hosts = roster.hosts[: roster.world]
        held = [np.where(row < roster.world, row, NOBODY) for row in (before, *copies)] if wanted else []
        return place_replicas(keep_replicas(held, owners, hosts, wanted), held, owners, hosts, weights)


def check_replication(replication: object) -> int:
    """Refuse what is no number of further copies that there may be."""
    found = whole(replication)
    if found is None or not 0 <= found <= REPLICATION_MAX:
        raise RequestRefused(
            "replication_invalid",
            "replication is no number of further copies",
            f"give a whole number from 0 to {REPLICATION_MAX}",
        )
    return found


def _least_moved(roster: Roster, before: Column, copies: Column, shares: Shares) -> tuple[Column, Places]:
    held = count(before, len(roster.workers))[: roster.world]
    targets = shares.settled(held > shares.least)
    surplus = np.maximum(held - targets, 0)
    moving = _moving(before, surplus, roster.world)
    owners = before.copy()
    owners[moving] = _receivers(roster, before[moving], copies[:, moving], np.maximum(targets - held, 0))
    return owners, moving


def _moving(owners: Column, surplus: Counts, world: int) -> Places:
    """The shards that must move: those whose owner is gone or goes, and the latest of who has too many."""
    # As unsigned numbers nobody is beyond the world as well.
    orphans = np.flatnonzero(owners.view(np.uint32) >= world)
    if not surplus.any():
        return orphans
    spared = _latest(owners, surplus)
    return np.sort(np.concatenate((orphans, spared))) if orphans.size else spared


def _latest(owners: Column, surplus: Counts) -> Places:
    """As many shards of each worker as it has too many, the latest ones, in their order.

    They are looked for in windows from the end, each larger than the last, until all are found: mostly few shards must
    be looked at, and never one of them twice.
    """
    bound = surplus.size
    missing = surplus.copy()
    found: list[Places] = []
    high, width = owners.size, max(WINDOW_MIN, 2 * int(surplus.sum()))
    while missing.any():
        low = max(0, high - width)
        window = owners[low:high]
        # The last place is where nobody, as an unsigned number, and who is beyond the world look.
        is_wanted = np.append(missing > 0, False)
        candidates = np.flatnonzero(np.take(is_wanted, window.view(np.uint32), mode="clip"))[::-1]
        workers = window[candidates]
        chosen = ordinals(workers, bound) < missing[workers]
        missing -= np.bincount(workers[chosen], minlength=bound)
        found.append(low + candidates[chosen][::-1])
        high, width = low, 2 * width
    return np.concatenate(found[::-1])


def _receivers(roster: Roster, owners: Column, copies: Column, places: Counts) -> Column:
    """Who gets each of the shards that move: who has a copy; else who is on the host of one; else anybody in turn."""
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
    """Give a receiver with the wanted key to those who have none yet, the earlier ones first, while places last."""
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
    """Each row of further copies, and all shards: who has one already is sent none."""
    return ((row, np.arange(row.size)) for row in replicas)


def _transfers(
    roster: Roster, before: Column, copies: Column, needed: Sequence[tuple[Column, Places]]
) -> TransferColumns:
    """The transfers of the owners, then those of each further copy, each in the order of the shards."""
    parts = [_part(roster, before, copies, row, ids, number) for number, (row, ids) in enumerate(needed)]
    if len(parts) == 1:
        return parts[0]
    return TransferColumns(*map(np.concatenate, zip(*(vars(part).values() for part in parts), strict=True)))


def _part(
    roster: Roster, before: Column, copies: Column, destinations: Column, ids: Places, copy: int
) -> TransferColumns:
    """The transfers by which these shards come to their destinations, without those that are there already."""
    # Who becomes the owner was not the owner before.
    for row in (before, *copies) if copy else copies:
        ids = ids[row[ids] != destinations[ids]]
    held = np.empty((copies.shape[0] + 1, ids.size), np.int32)
    held[0], held[1:] = before[ids], copies[:, ids]
    towards = destinations[ids]
    sources = choose_sources(held, towards, roster.hosts)
    return TransferColumns(ids, sources.workers, sources.kinds, towards, np.full(ids.size, copy, np.uint8))
