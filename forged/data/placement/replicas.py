"""Where further copies of the shards lie.

Law: every shard has as many further copies as there should be, at workers other than its owner and each other, as far
as there are so many. Each worker has its weighted share of them, rounded down or up, as far as there is so much that it
may have: of no shard is there another copy at its owner, nor, where there is a host for each copy, a new one beside
another. A copy that is there stays, unless its worker has more than its share or nothing else would make room; what
others hold already is taken before anything is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from forged.data.columns import NOBODY, Column, Counts, Mask, Places, count, deal, ordinals
from forged.data.permutation import Permutation
from forged.data.placement.shares import Shares, Weights

TRIES = 16
"""How often who may not lie where it was put changes places with others, before it is put anywhere else."""
GOLDEN = 0.6180339887498949
"""Of all there are, others are looked for so far away: however often, hardly ever in the same place."""
LOOKED_AT_MAX = 1024
"""So many workers, and copies of each, are looked at one by one where some have more than they should and others less,
all the same."""


def keep_replicas(held: Sequence[Column], owners: Column, hosts: Column, wanted: int) -> Column:
    """The first rows of copies, as many as are wanted, filled from those that are there: first from other hosts."""
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
    """The rows of copies with nobody missing in them, and as many with each worker as it should have."""
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
    """Whether each of so many copies can have a host for itself, beside that of the owner."""
    return len(copies) < np.unique(hosts).size


def fair_shares(kept: Column, owners: Column, hosts: Column, weights: Weights) -> Counts:
    """How many copies each worker should have: its weighted share, unless there are not so many that it may have."""
    wanted, shards = kept.shape
    ranks = np.arange(hosts.size, dtype=np.int32)
    groups = hosts if has_host_for_each(kept, hosts) else ranks
    # Of a shard that lies on a host already none has another one.
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
    """Which of their groups may not have what is theirs, whoever of them gets what is rounded up."""
    own = [1] * ranks.size if weights is None else [weights[rank] for rank in ranks]
    if not any(own):
        own = [1] * ranks.size
    heft: dict[int, int] = {}
    for group, weight in zip(groups[ranks].tolist(), own, strict=True):
        heft[group] = heft.get(group, 0) + weight
    unit = sum(own)
    return [group for group, weight in heft.items() if total * weight > int(most[group]) * unit]


def _divided(total: int, ranks: Places | Column, loads: Counts, weights: Weights) -> Counts:
    """So many among these, where nobody gives away what it may keep."""
    own = None if weights is None else tuple(weights[rank] for rank in ranks)
    shares = Shares.of(total, ranks.size, own if own is None or any(own) else None)
    return shares.settled(loads[ranks] > shares.least)


class _Layout:
    """Copies that are being put in their places. Those of a shard that are missing are in its last rows."""

    def __init__(self, kept: Column, owners: Column, hosts: Column) -> None:
        self.placed = kept.copy()
        self._kept = kept
        self._owners = owners
        self._hosts = hosts
        self._ranks = np.arange(hosts.size, dtype=np.int32)
        self._groups = hosts if has_host_for_each(kept, hosts) else self._ranks
        """Of which a shard is to have one copy in each at most."""

    @property
    def loads(self) -> Counts:
        """How many copies each worker has."""
        return count(self.placed, self._hosts.size)

    def exchange(self, held: Column, shares: Counts) -> None:
        """Of who has too many let others who hold the same keep it, as far as they may have more."""
        for number, row in enumerate(self.placed):
            loads = self.loads
            surplus, room = np.maximum(loads - shares, 0), np.maximum(shares - loads, 0)
            ids = np.flatnonzero((row != NOBODY) & (held != NOBODY) & (surplus[row] > 0) & (room[held] > 0))
            ids = ids[_fits(held[ids], self._groups, self._groups[self._others(np.full_like(ids, number), ids)])]
            ids = ids[ordinals(row[ids], room.size) < surplus[row[ids]]]
            ids = ids[ordinals(held[ids], room.size) < room[held[ids]]]
            row[ids] = held[ids]

    def release(self, shares: Counts) -> None:
        """Take from each worker what it has too many: first what may go to most of those who have room, then what lies
        beside another copy on a host, and no two of the same shard if that can be helped."""
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
        """How much of the room there is is where none of these copies may go."""
        room = np.bincount(self._groups, np.maximum(shares - self.loads, 0)).astype(np.int64)
        barred: Counts = room[self._groups[self._others(rows, ids)]].sum(axis=0)
        return barred

    def fill(self, shares: Counts) -> None:
        """Put missing copies where there is room, on other hosts first."""
        for number, row in enumerate(self.placed):
            for groups in (self._hosts, self._ranks):
                rings, ids = Rings(groups), np.flatnonzero(row == NOBODY)
                ids = ids[rings.room(groups[self._holders(number, ids)]) > 0]
                if ids.size:
                    offered = _mixed(deal(np.maximum(shares - self.loads, 0)))[: ids.size]
                    row[ids] = _accepted(offered, groups, groups[self._holders(number, ids)], rings)

    def level(self, shares: Counts) -> None:
        """Move copies from who has more than its share to who has less, over others where it must be."""
        patience = iter(range(LOOKED_AT_MAX))
        while (move := self._last_move(shares, patience)) is not None:
            # Whose copy it was is short of one now, and nearer to who has too many.
            self.placed[move.row, move.shard] = move.towards

    def _last_move(self, shares: Counts, patience: Iterator[int]) -> _Move | None:
        """Of the fewest moves that lead from who has too many to who has too few, the one at the end."""
        loads = self.loads
        known = dict.fromkeys(np.flatnonzero(loads > shares).tolist())
        queue = deque(known if (loads < shares).any() else ())
        while queue and next(patience, None) is not None:
            for move in self._moves(queue.popleft()):
                if loads[move.towards] < shares[move.towards]:
                    return move
                if move.towards not in known:
                    known[move.towards] = None
                    queue.append(move.towards)
        return None

    def _moves(self, rank: int) -> Iterator[_Move]:
        """To each other worker that may have one of this one's copies; one that is new here, if there is one."""
        rows, ids = np.nonzero(self.placed == rank)
        order = np.argsort((self._kept[:, ids] == rank).any(axis=0), kind="stable")[:LOOKED_AT_MAX]
        rows, ids = rows[order], ids[order]
        may = np.ones((ids.size, self._hosts.size), np.bool_)
        may[:, rank] = False
        for holders in self._others(rows, ids):
            may &= self._groups != self._groups[holders][:, np.newaxis]
        for towards in np.flatnonzero(may.any(axis=0)).tolist():
            first = int(may[:, towards].argmax())
            yield _Move(int(rows[first]), int(ids[first]), towards)

    def _holders(self, number: int, ids: Places) -> Column:
        """Who has these shards, as far as they are in the rows before this one."""
        return np.concatenate((self._owners[np.newaxis, ids], self.placed[:number, ids]))

    def _others(self, rows: Places, ids: Places) -> Column:
        """Who has these shards besides the copies in these rows; the owner again where nobody does."""
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
    """Whether each of them is in none of the groups that are taken."""
    return np.asarray((groups[who] != taken).all(axis=0))


def _mixed(offered: Column) -> Column:
    """The same in another order, so that the copies of what one worker owns lie with many, who can all give them."""
    return offered[Permutation(offered.size).span(0, offered.size)]


def _accepted(offered: Column, groups: Column, taken: Column, rings: Rings) -> Column:
    """Who is offered, exchanged with others where the group is taken; in the end anybody of a group that is not."""
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
    """Workers in a ring, those of a group beside each other, so that to skip a group is to step over it."""

    def __init__(self, groups: Column) -> None:
        self._ring = np.argsort(groups, kind="stable").astype(np.int32)
        self._sizes = np.bincount(groups)
        self._starts = np.cumsum(self._sizes) - self._sizes

    def room(self, taken: Column) -> Places:
        """How many workers are in none of the groups that are taken, for each column."""
        left: Places = self._ring.size - self._skips(np.sort(taken, axis=0)).sum(axis=0)
        return left

    def elsewhere(self, taken: Column, turns: Places) -> Column:
        """A worker of a group that is not taken, another one for another turn."""
        groups = np.sort(taken, axis=0)
        skips = self._skips(groups)
        places = turns % (self._ring.size - skips.sum(axis=0))
        for group, skip in zip(groups, skips, strict=True):
            places += np.where(places >= self._starts[group], skip, 0)
        found: Column = self._ring[places]
        return found

    def _skips(self, groups: Column) -> Places:
        """How many workers each group is, once per column; the groups of a column ascend."""
        skips: Places = self._sizes[groups]
        skips[1:][groups[1:] == groups[:-1]] = 0
        return skips
