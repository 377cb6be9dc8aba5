"""Arithmetic with columns: grouping, counting off and dealing out, without a loop over their rows.

Law: time and memory grow with the number of rows and not faster, and what comes out depends on what went in alone: rows
with the same key keep their order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int32]
"""Workers by their number, -1 for nobody."""
Places = npt.NDArray[np.intp]
"""Where rows are."""
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NOBODY = -1
NARROW_MAX = 1 << 16
"""Up to so many keys numpy sorts by radix, in a time that grows as the number of rows does."""

COUNTED_AT_ONCE = 1 << 16


def group(keys: Column | Places, bound: int) -> tuple[Places, Places]:
    """The rows of key 0, then those of key 1, to `bound`; and where in them each key starts, and the last one ends."""
    order = np.argsort(keys.astype(np.uint16) if bound <= NARROW_MAX else keys, kind="stable")
    ends = np.cumsum(np.bincount(keys, minlength=bound))
    return order, np.concatenate((np.zeros(1, np.intp), ends))


def ordinals(keys: Column | Places, bound: int) -> Places:
    """For each row, how many before it have the same key."""
    order, starts = group(keys, bound)
    counted = np.empty(order.size, np.intp)
    counted[order] = _counted_off(np.diff(starts))
    return counted


def count(column: Column, bound: int) -> Counts:
    """How often each number below `bound` is there; who is nobody is not counted."""
    counts = np.zeros(bound + 1, np.int64)
    rows = column.reshape(-1)
    # Piece by piece, because numpy widens what it counts to 8 bytes: that then stays in the processor's cache.
    for start in range(0, rows.size, COUNTED_AT_ONCE):
        counts += np.bincount(rows[start : start + COUNTED_AT_ONCE] + 1, minlength=bound + 1)
    return counts[1:]


def deal(counts: Counts) -> Column:
    """Each number as often as `counts` says, dealt in turns: whose count is twice as high is there twice as often.

    Where counts differ by one at most these are rounds, and the last one is of those who have one more.
    """
    takers = np.flatnonzero(counts).astype(np.int32)
    if not takers.size:
        return takers
    often = counts[takers]
    fewest = int(often.min())
    if often.max() - fewest <= 1:
        dealt = np.empty(int(often.sum()), np.int32)
        rounds = fewest * takers.size
        dealt[:rounds].reshape(fewest, takers.size)[:] = takers
        dealt[rounds:] = takers[often > fewest]
        return dealt
    due = (2 * _counted_off(often) + 1) * (NARROW_MAX // 2) // np.repeat(often, often)
    return np.repeat(takers, often)[np.argsort(due.astype(np.uint16), kind="stable")]


def _counted_off(lengths: Counts | Places) -> Places:
    """0, 1, 2... up to the first length, then from 0 to the next."""
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
