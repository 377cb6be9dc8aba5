"""Vectorised arithmetic with columns: grouping, counting, dealing out.

Invariants:
- Time and memory are linear in the number of rows.
- Results are deterministic: rows with the same key keep their order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int32]
"""Workers by their place, -1 for none."""
Places = npt.NDArray[np.intp]
"""Row numbers."""
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NOBODY = -1
NARROW_MAX = 1 << 16
"""Up to so many keys numpy uses a radix sort, which is linear."""

COUNTED_AT_ONCE = 1 << 16


def group(keys: Column | Places, bound: int) -> tuple[Places, Places]:
    """The rows sorted by key, and the bounds of each key in them, for keys below `bound`."""
    order = np.argsort(keys.astype(np.uint16) if bound <= NARROW_MAX else keys, kind="stable")
    ends = np.cumsum(np.bincount(keys, minlength=bound))
    return order, np.concatenate((np.zeros(1, np.intp), ends))


def ordinals(keys: Column | Places, bound: int) -> Places:
    """For each row, the number of earlier rows with the same key."""
    order, starts = group(keys, bound)
    counted = np.empty(order.size, np.intp)
    counted[order] = _counted_off(np.diff(starts))
    return counted


def count(column: Column, bound: int) -> Counts:
    """How often each number below `bound` occurs; -1 does not count."""
    counts = np.zeros(bound + 1, np.int64)
    rows = column.reshape(-1)
    # In pieces, because numpy widens its input to 8 bytes, and a piece of that fits into the CPU cache.
    for start in range(0, rows.size, COUNTED_AT_ONCE):
        counts += np.bincount(rows[start : start + COUNTED_AT_ONCE] + 1, minlength=bound + 1)
    return counts[1:]


def deal(counts: Counts) -> Column:
    """Each number as often as `counts` says, evenly interleaved.

    Where counts differ by at most one, these are rounds, and the last round has the numbers with one more.
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
    """0, 1, 2, … up to the first length, then again from 0 up to the next."""
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
