"""Plans the offsets of a known trace: the lowest packing of several orders, then a search within the capacity."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from forged.memory.traces import greedy
from forged.memory.traces.errors import (
    FitUnknown,
    TraceDoesNotFit,
    fit_unknown,
    no_packing,
    peak_beyond_capacity,
    too_large,
)
from forged.memory.traces.lifetimes import Integers, Lifetimes
from forged.memory.traces.model import Buffer, Packing, checked_capacity, events, peak_of
from forged.memory.traces.search import Outcome, PackingSearch

NODES_MAX = 1_000_000
"""About half a minute of one core."""
PLANNED_MAX = 100_000
SEARCHED_MAX = 2_000
"""Buffers that are searched together: a search needs memory for the square of their number."""


def plan(buffers: Iterable[Buffer], capacity: int | None = None, nodes_max: int = NODES_MAX) -> Packing:
    """A packing within the capacity; without one the lowest that is found.

    `nodes_max` bounds the search. The same buffers have the same packing. Refused with `TraceDoesNotFit` if it is
    proven that none fits, and with `FitUnknown` if none was found.
    """
    given = list(buffers)
    trace = events(given)
    peak = peak_of(trace)
    if capacity is not None and peak > checked_capacity(capacity):
        raise peak_beyond_capacity(peak, capacity)
    if len(given) > PLANNED_MAX:
        raise too_large("buffers", "buffers", PLANNED_MAX)
    if not given:
        return Packing({}, 0, 0)
    lifetimes = Lifetimes(given, trace)
    wanted = peak if capacity is None else capacity
    offsets, height = _lowest(lifetimes, peak)
    if height > wanted:
        try:
            offsets = _searched(lifetimes, wanted, peak, height, nodes_max)
        except (FitUnknown, TraceDoesNotFit):
            if capacity is not None:
                raise
        height = int((offsets + lifetimes.sizes).max())
    return Packing({buffer.id: int(offset) for buffer, offset in zip(given, offsets, strict=True)}, height, peak)


def _lowest(lifetimes: Lifetimes, peak: int) -> tuple[Integers, int]:
    """The lowest packing of several orders, and its height."""
    best, lowest = None, 0
    for offsets in greedy.packings(lifetimes):
        height = int((offsets + lifetimes.sizes).max())
        if best is None or height < lowest:
            best, lowest = offsets, height
        if lowest == peak:
            break
    assert best is not None
    return best, lowest


def _searched(lifetimes: Lifetimes, capacity: int, peak: int, height: int, nodes_max: int) -> Integers:
    offsets = np.zeros_like(lifetimes.sizes)
    left = nodes_max
    for ids in lifetimes.components(np.argsort(lifetimes.first, kind="stable")):
        if len(ids) > SEARCHED_MAX:
            raise fit_unknown(capacity, height, nodes_max - left)
        search = PackingSearch(lifetimes, ids, capacity)
        outcome = search.run(left)
        left -= search.nodes
        if outcome is Outcome.IMPOSSIBLE:
            raise no_packing(peak, capacity)
        if outcome is Outcome.UNKNOWN:
            raise fit_unknown(capacity, height, nodes_max)
        offsets[ids] = search.offsets
    return offsets
