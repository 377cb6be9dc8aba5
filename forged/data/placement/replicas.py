"""Places the replicas of the shards.

Invariants:
- Every shard has the wanted number of replicas, on different workers other than its owner, if there are enough.
- Each worker has its weighted share of the replicas, rounded down or up, as far as the other rules allow.
- No new replica shares a host with another copy of its shard while there is a host for each copy.
- A replica stays unless its worker has more than its share or no other move makes room. Copies that workers hold
  already are used before any is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from forged.data.columns import NOBODY, Column, Counts, Mask, Places, count, deal, ordinals
from forged.data.permutation import Permutation
from forged.data.placement.shares import Weights, WorkerShares

TRIES = 16
"""How often a misplaced replica is swapped before it is placed anywhere."""
GOLDEN = 0.6180339887498949
"""The stride of the search for swap partners, as a fraction of all; irrational, so that it rarely repeats."""
STEPS_MAX = 1024
"""How many workers, and replicas of each, are moved one by one when the bulk moves leave a surplus."""


def keep_replicas(held: Sequence[Column], owners: Column, hosts: Column, wanted: int) -> Column:
    """The wanted number of rows, filled from the existing copies, those on other hosts first."""
    kept = np.full((wanted, owners.size), NOBODY, np.int32)
    filled = np.zeros(owners.size, np.intp)
    for other_host in (True, False):
        for row in held:
            is_copy = (row != NOBODY) & (row != owners) & (filled < wanted)
            ids = np.flatnonzero(is_copy & ((hosts[row] != hosts[owners]) == other_host))
            kept[filled[ids], ids] = row[ids]
            filled[ids] += 1
    return kept


def place_replicas(
    kept: Column, held: Sequence[Column], owners: Column, hosts: Column, weights: Weights = None
) -> Column:
    """The rows of replicas, complete, with each worker's share."""
    if not kept.size:
        return kept.copy()
    shares = fair_shares(kept, owners, hosts, weights)
    layout = _Layout(kept, owners, hosts)
    for row in held:
        layout.exchange(row, shares)
    layout.release(shares)
    layout.fill(shares)
    layout.level(shares)
    return layout.placed


def has_host_for_each(copies: Column, hosts: Column) -> bool:
    """Whether each of so many replicas can have a host of its own."""
    return len(copies) < np.unique(hosts).size


def fair_shares(kept: Column, owners: Column, hosts: Column, weights: Weights) -> Counts:
    """How many replicas each worker should have: its weighted share, or as many as the rules allow."""
    wanted, shards = kept.shape
    ranks = np.arange(hosts.size, dtype=np.int32)
    groups = hosts if has_host_for_each(kept, hosts) else ranks
    # A worker takes no replica of a shard that its host holds already.
    most = shards - np.bincount(groups[owners], minlength=groups.max() + 1)
    loads, shares = count(kept, hosts.size), np.zeros(hosts.size, np.int64)
    open_ranks = ranks
    while open_ranks.size:
        left = wanted * shards - int(shares.sum())
        full = _overfull(left, open_ranks, groups, most, weights)
        if not full:
            shares[open_ranks] = _divided(left, open_ranks, loads, weights)
            sums = np.bincount(groups, shares, minlength=most.size)
            full = [group for group in set(groups[open_ranks].tolist()) if sums[group] > most[group]]
        if not full:
            break
        for group in full:
            inside = np.flatnonzero(groups == group)
            shares[inside] = _divided(int(most[group]), inside, loads, weights)
        open_ranks = open_ranks[~np.isin(groups[open_ranks], full)]
        shares[open_ranks] = 0
    return shares


def _overfull(total: int, ranks: Column, groups: Column, most: Counts, weights: Weights) -> list[int]:
    """The groups that cannot hold their shares, whichever members get the rounded-up ones."""
    own = [1] * ranks.size if weights is None else [weights[rank] for rank in ranks]
    if not any(own):
        own = [1] * ranks.size
    heft: dict[int, int] = {}
    for group, weight in zip(groups[ranks].tolist(), own, strict=True):
        heft[group] = heft.get(group, 0) + weight
    unit = sum(own)
    return [group for group, weight in heft.items() if total * weight > int(most[group]) * unit]


def _divided(total: int, ranks: Places | Column, loads: Counts, weights: Weights) -> Counts:
    """Distribute a number among these, without taking from a worker what it may keep."""
    own = None if weights is None else tuple(weights[rank] for rank in ranks)
    shares = WorkerShares.of(total, ranks.size, own if own is None or any(own) else None)
    return shares.settled(loads[ranks] > shares.least)


class _Layout:
    """Replicas that are being placed. A shard's missing replicas are in its last rows."""

    def __init__(self, kept: Column, owners: Column, hosts: Column) -> None:
        self.placed = kept.copy()
        self._kept = kept
        self._owners = owners
        self._hosts = hosts
        self._ranks = np.arange(hosts.size, dtype=np.int32)
        self._groups = hosts if has_host_for_each(kept, hosts) else self._ranks
        """The groups of workers, of which each may hold at most one copy of a shard."""

    @property
    def loads(self) -> Counts:
        """The number of replicas of each worker."""
        return count(self.placed, self._hosts.size)

    def exchange(self, held: Column, shares: Counts) -> None:
        """Hand over replicas of workers with too many to workers that hold the same shard and may have more."""
        for number, row in enumerate(self.placed):
            loads = self.loads
            surplus, room = np.maximum(loads - shares, 0), np.maximum(shares - loads, 0)
            ids = np.flatnonzero((row != NOBODY) & (held != NOBODY) & (surplus[row] > 0) & (room[held] > 0))
            ids = ids[_fits(held[ids], self._groups, self._groups[self._others(np.full_like(ids, number), ids)])]
            ids = ids[ordinals(row[ids], room.size) < surplus[row[ids]]]
            ids = ids[ordinals(held[ids], room.size) < room[held[ids]]]
            row[ids] = held[ids]

    def release(self, shares: Counts) -> None:
        """Take the surplus from each worker.

        Replicas that most workers with room may hold go first, then those that share a host with another copy; two of
        the same shard go only if there is no other way.
        """
        surplus = np.maximum(self.loads - shares, 0)
        if not surplus.any():
            return
        rows, ids = np.nonzero((self.placed != NOBODY) & (surplus > 0)[self.placed])
        holders = self.placed[rows, ids]
        anyhow = Permutation(self._owners.size).span(0, self._owners.size)[ids]
        turns = (rows + anyhow) % len(self.placed)
        order = np.lexsort((anyhow, turns, ~self._is_crowded(rows, ids), self._barred(rows, ids, shares)))
        chosen = order[ordinals(holders[order], surplus.size) < surplus[holders[order]]]
        self.placed[rows[chosen], ids[chosen]] = NOBODY
        self.placed = np.take_along_axis(self.placed, np.argsort(self.placed == NOBODY, axis=0, kind="stable"), axis=0)

    def _barred(self, rows: Places, ids: Places, shares: Counts) -> Counts:
        """How much of the free room these replicas may not use."""
        room = np.bincount(self._groups, np.maximum(shares - self.loads, 0)).astype(np.int64)
        barred: Counts = room[self._groups[self._others(rows, ids)]].sum(axis=0)
        return barred

    def fill(self, shares: Counts) -> None:
        """Place missing replicas where there is room, on other hosts first."""
        for number, row in enumerate(self.placed):
            for groups in (self._hosts, self._ranks):
                rings, ids = Rings(groups), np.flatnonzero(row == NOBODY)
                ids = ids[rings.room(groups[self._holders(number, ids)]) > 0]
                if ids.size:
                    offered = _mixed(deal(np.maximum(shares - self.loads, 0)))[: ids.size]
                    row[ids] = _accepted(offered, groups, groups[self._holders(number, ids)], rings)

    def level(self, shares: Counts) -> None:
        """Move replicas from workers above their share to workers below it, through other workers where needed."""
        steps = iter(range(STEPS_MAX))
        while (move := self._last_move(shares, steps)) is not None:
            # The worker that gave the replica is short of one now, and one step nearer to the surplus.
            self.placed[move.row, move.shard] = move.towards

    def _last_move(self, shares: Counts, steps: Iterator[int]) -> _Move | None:
        """The last move of a shortest chain from a worker with too many to one with too few."""
        loads = self.loads
        known = dict.fromkeys(np.flatnonzero(loads > shares).tolist())
        queue = deque(known if (loads < shares).any() else ())
        while queue and next(steps, None) is not None:
            for move in self._moves(queue.popleft()):
                if loads[move.towards] < shares[move.towards]:
                    return move
                if move.towards not in known:
                    known[move.towards] = None
                    queue.append(move.towards)
        return None

    def _moves(self, rank: int) -> Iterator[_Move]:
        """One move of a replica of this worker to each worker that may hold it; new replicas first."""
        rows, ids = np.nonzero(self.placed == rank)
        order = np.argsort((self._kept[:, ids] == rank).any(axis=0), kind="stable")[:STEPS_MAX]
        rows, ids = rows[order], ids[order]
        may = np.ones((ids.size, self._hosts.size), np.bool_)
        may[:, rank] = False
        for holders in self._others(rows, ids):
            may &= self._groups != self._groups[holders][:, np.newaxis]
        for towards in np.flatnonzero(may.any(axis=0)).tolist():
            first = int(may[:, towards].argmax())
            yield _Move(int(rows[first]), int(ids[first]), towards)

    def _holders(self, number: int, ids: Places) -> Column:
        """The holders of these shards in the rows before this one."""
        return np.concatenate((self._owners[np.newaxis, ids], self.placed[:number, ids]))

    def _others(self, rows: Places, ids: Places) -> Column:
        """The holders of these shards outside these rows; the owner where there is none."""
        others = self._holders(len(self.placed), ids)
        others[rows + 1, np.arange(ids.size)] = NOBODY
        return np.where(others == NOBODY, others[0], others)

    def _is_crowded(self, rows: Places, ids: Places) -> Mask:
        """Whether another copy is on the same host."""
        return ~_fits(self.placed[rows, ids], self._hosts, self._hosts[self._others(rows, ids)])


class _Move(NamedTuple):
    row: int
    shard: int
    towards: int


def _fits(who: Column, groups: Column, taken: Column) -> Mask:
    """Whether each worker is in none of the taken groups."""
    return np.asarray((groups[who] != taken).all(axis=0))


def _mixed(offered: Column) -> Column:
    """Shuffle, so that the replicas of one owner's shards spread over many workers, which can all serve them."""
    return offered[Permutation(offered.size).span(0, offered.size)]


def _accepted(offered: Column, groups: Column, taken: Column, rings: Rings) -> Column:
    """The offered workers; where a worker's group is taken, another offered one or any worker of a free group."""
    found = offered.copy()
    waiting = np.flatnonzero(~_fits(found, groups, taken))
    for number in range(1, TRIES + 1):
        found[waiting] = np.roll(found[waiting], 1)
        waiting = waiting[~_fits(found[waiting], groups, taken[:, waiting])]
        if not waiting.size:
            return found
        others = (waiting + int(number * found.size * GOLDEN)) % found.size
        swaps = _fits(found[others], groups, taken[:, waiting]) & _fits(found[waiting], groups, taken[:, others])
        swaps &= ~np.isin(others, waiting)
        ours, theirs = waiting[swaps], others[swaps]
        found[ours], found[theirs] = found[theirs], found[ours]
        waiting = waiting[~swaps]
    found[waiting] = rings.elsewhere(taken[:, waiting], waiting)
    return found


class Rings:
    """Workers in a ring, grouped, so that one step skips a group."""

    def __init__(self, groups: Column) -> None:
        self._ring = np.argsort(groups, kind="stable").astype(np.int32)
        self._sizes = np.bincount(groups)
        self._starts = np.cumsum(self._sizes) - self._sizes

    def room(self, taken: Column) -> Places:
        """The number of workers outside the taken groups, for each column."""
        left: Places = self._ring.size - self._skips(np.sort(taken, axis=0)).sum(axis=0)
        return left

    def elsewhere(self, taken: Column, turns: Places) -> Column:
        """For each column, a worker whose group is not in `taken`; different `turns` give different workers."""
        groups = np.sort(taken, axis=0)
        skips = self._skips(groups)
        places = turns % (self._ring.size - skips.sum(axis=0))
        for group, skip in zip(groups, skips, strict=True):
            places += np.where(places >= self._starts[group], skip, 0)
        found: Column = self._ring[places]
        return found

    def _skips(self, groups: Column) -> Places:
        """The size of each group, once per column; the groups of a column ascend."""
        skips: Places = self._sizes[groups]
        skips[1:][groups[1:] == groups[:-1]] = 0
        return skips
