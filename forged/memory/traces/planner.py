"""Plans the offsets of a known trace: the lowest packing of several orders, then a search within the capacity."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from forged.memory.functions import align_up, is_power_of_two
from forged.memory.model import PlannedBlock
from forged.memory.traces import greedy
from forged.memory.traces.errors import (
    FitUnknown,
    TraceDoesNotFit,
    argument_invalid,
    fit_unknown,
    no_packing,
    peak_beyond_capacity,
    too_large,
)
from forged.memory.traces.lifetimes import Integers, Lifetimes
from forged.memory.traces.model import Buffer, Packing, checked_capacity, events, is_integer, peak_of
from forged.memory.traces.search import Outcome, PackingSearch

NODES_MAX = 1_000_000
"""About half a minute of one core."""
PLANNED_MAX = 100_000
SEARCHED_MAX = 2_000
"""Buffers that are searched together: a search needs memory for the square of their number."""


def plan(
    buffers: Iterable[Buffer], capacity: int | None = None, nodes_max: int = NODES_MAX, alignment: int = 1
) -> Packing:
    """A packing within the capacity; without one the lowest that is found.

    Sizes are rounded up to the alignment, a power of two, and offsets are multiples of it, so that a pool can serve
    them. `nodes_max` bounds the search. The same buffers have the same packing. Refused with `TraceDoesNotFit` if it is
    proven that none fits, and with `FitUnknown` if none was found.
    """
    if not is_integer(alignment) or not is_power_of_two(alignment):
        raise argument_invalid("alignment", alignment, "a power of two")
    # Every offset is a sum of sizes.
    given = [Buffer(one.id, one.lower, one.upper, align_up(one.size, alignment)) for one in buffers]
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


def planned_blocks(buffers: Iterable[Buffer], packing: Packing) -> list[PlannedBlock]:
    """The packing as a device's plan of offsets. The block of a buffer has the buffer's id as its name.

    Of ids with the same text, such as 1 and "1", there can be one.
    """
    found = {f"{one.id}": PlannedBlock(f"{one.id}", packing.offsets[one.id], one.size) for one in buffers}
    if len(found) < len(packing.offsets):
        raise argument_invalid("buffers", len(packing.offsets), "buffers whose ids are different texts")
    return list(found.values())


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
