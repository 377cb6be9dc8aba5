"""Several pieces of memory, rooms, that are filled one after another by one read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def rooms_between(rooms: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """The memory from byte `start` to byte `end`, counted over all rooms."""
    found: list[memoryview] = []
    for room in rooms:
        low, high = max(start, 0), min(end, len(room))
        if low < high:
            found.append(room[low:high])
        start, end = start - len(room), end - len(room)
    return found


def fill(rooms: Sequence[memoryview], data: memoryview) -> None:
    """Copy as many bytes as the rooms have together."""
    done = 0
    for room in rooms:
        copy_bytes(data[done : done + len(room)], room)
        done += len(room)


def copy_bytes(source: memoryview, into: memoryview) -> None:
    """Copy without holding the GIL, which slice assignment would hold."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
