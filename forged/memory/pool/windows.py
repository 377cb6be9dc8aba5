"""The shortest rows of neighbouring blocks that would make room, each with what it would cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import TypeAlias

from forged.memory.pool.blocks import Block

Window: TypeAlias = tuple[int, int, int, int]
"""The weight of the neighbouring blocks `blocks[first:last]`, `first`, `last`, and the aligned offset of the room."""


def windows(
    blocks: Sequence[Block],
    needed: int,
    alignment: int,
    weigh: Callable[[Block], int | None],
    *,
    improving: bool = False,
) -> Iterator[Window]:
    """From each block on the shortest window; its weight is the sum of those of its blocks.

    `improving` leaves out those that weigh no less than an earlier one.

    `blocks` follow each other without a gap. No window has a block whose weight is None.
    """
    weights = [weigh(block) for block in blocks]
    offsets = [block.offset for block in blocks]
    offsets.append(blocks[-1].offset + blocks[-1].size if blocks else 0)
    count, lowest = len(blocks), alignment - 1
    last = weight = 0
    least: float = inf
    for first in range(count):
        offset = (offsets[first] + lowest) & -alignment
        end = offset + needed
        while last < count and offsets[last] < end:
            added = weights[last]
            if added is None:
                break
            weight += added
            last += 1
        if last == first:
            last += 1
            continue
        if weight < least and offsets[last] >= end and offset < offsets[first + 1]:
            if improving:
                least = weight
            yield weight, first, last, offset
        weight -= weights[first] or 0
