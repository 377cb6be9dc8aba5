"""Where further copies of the shards lie.

Law: every shard has as many further copies as there should be, at workers other than its owner and each other, as far
as there are so many. A copy that is there already stays, so no more are made than are missing. A new one lies on a host
that has none of the shard yet, where there is such a host, and otherwise new ones go to whoever holds the fewest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forged.data.columns import NOBODY, Column, Counts, Places, count, deal
from forged.data.shares import Shares, Weights

TRIES = 4
"""How often what was dealt out is passed on by one where it may not lie, before it is put anywhere else."""


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


def place_replicas(kept: Column, owners: Column, hosts: Column, weights: Weights) -> Column:
    """The rows of copies with nobody missing in them."""
    placed = kept.copy()
    for number, row in enumerate(placed):
        missing = np.flatnonzero(row == NOBODY)
        if missing.size:
            holders = np.concatenate((owners[np.newaxis, missing], placed[:number, missing]))
            row[missing] = _spread(holders, count(placed, hosts.size), hosts, weights)
    return placed


def _spread(holders: Column, loads: Counts, hosts: Column, weights: Weights) -> Column:
    """Somebody for each column who is not among its holders, nor on their hosts if somebody is elsewhere."""
    found = np.full(holders.shape[1], NOBODY, np.int32)
    for groups in (hosts, np.arange(hosts.size, dtype=np.int32)):
        rings = Rings(groups)
        open_ids = np.flatnonzero((found == NOBODY) & (rings.room(groups[holders]) > 0))
        if not open_ids.size:
            continue
        have = loads + count(found, hosts.size)
        shares = Shares.of(int(have.sum()) + open_ids.size, hosts.size, weights).settled()
        offered = deal(np.maximum(shares - have, 0))[: open_ids.size]
        found[open_ids] = _accepted(offered, groups, groups[holders[:, open_ids]], rings)
    return found


def _accepted(offered: Column, groups: Column, taken: Column, rings: Rings) -> Column:
    """Who is offered, passed on while the group is taken; in the end anybody of a group that is not."""
    found = np.full(offered.size, NOBODY, np.int32)
    waiting = np.arange(offered.size)
    for _ in range(TRIES):
        fits = (groups[offered] != taken[:, waiting]).all(axis=0)
        found[waiting[fits]] = offered[fits]
        waiting, offered = waiting[~fits], np.roll(offered[~fits], 1)
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
