"""The shortest rows of neighbouring blocks that would make room, each with what it would cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from forged.memory.blocks import Block


class Window(NamedTuple):
    """Neighbouring blocks, `blocks[first:last]`, that have the room together."""

    weight: int
    first: int
    last: int
    offset: int
    """Where the room would begin, aligned."""


def windows(
    blocks: Sequence[Block], needed: int, alignment: int, weigh: Callable[[Block], int | None]
) -> Iterator[Window]:
    """From each block on the shortest window; its weight is the sum of those of its blocks.

    `blocks` follow each other without a gap. No window has a block whose weight is None.
    """
    weights = [weigh(block) for block in blocks]
    last = weight = 0
    for first, block in enumerate(blocks):
        offset = (block.offset + alignment - 1) & -alignment
        end = offset + needed
        while last < len(blocks) and blocks[last].offset < end:
            added = weights[last]
            if added is None:
                break
            weight += added
            last += 1
        if last == first:
            last += 1
            continue
        if offset < block.end and blocks[last - 1].end >= end:
            yield Window(weight, first, last, offset)
        weight -= weights[first] or 0
