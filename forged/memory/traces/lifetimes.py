"""The lifetimes of buffers as columns: which buffers are alive together.

A section is a moment at which no further buffer can be alive: every two buffers that are alive together are so in a
section, so that sections replace times. There are at most as many sections as buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from forged.memory.traces.model import Buffer, Event

Integers = npt.NDArray[Any]
"""int64, or exact Python integers where a sum of sizes is beyond it."""
EXACT_MAX = 2**62


class Lifetimes:
    """The buffers of a trace as columns; a buffer is an index into them."""

    def __init__(self, buffers: Sequence[Buffer], trace: Sequence[Event]) -> None:
        self.total = sum(buffer.size for buffer in buffers)
        dtype = np.int64 if self.total < EXACT_MAX else object
        self.sizes: Integers = np.array([buffer.size for buffer in buffers], dtype)
        self.durations = np.array([float(buffer.upper - buffer.lower) for buffer in buffers])
        self.first, self.last = _sections(buffers, trace)

    def components(self, ids: Integers) -> list[Integers]:
        """The buffers in groups that have no section in common; `ids` are in the order of `first`."""
        ends = np.maximum.accumulate(self.last[ids])
        return np.split(ids, np.flatnonzero(ends[:-1] <= self.first[ids][1:]) + 1)


def _sections(buffers: Sequence[Buffer], trace: Sequence[Event]) -> tuple[Integers, Integers]:
    """The first section of each buffer, and the one after its last."""
    index = {buffer.id: number for number, buffer in enumerate(buffers)}
    first, last = np.zeros(len(buffers), np.int64), np.zeros(len(buffers), np.int64)
    section = 0
    is_new = False
    for event in trace:
        if event.is_allocation:
            first[index[event.buffer.id]] = section
        elif is_new:
            section += 1
        is_new = event.is_allocation
        if not event.is_allocation:
            last[index[event.buffer.id]] = section
    return first, last
