"""The holes of a pool by size: lists of a range of sizes each, and a bitmap of those that are not empty.

Invariants:
- Each hole is in the list of its size, in the order of size, then offset.
- A bit of the bitmap is set if the list of that number is not empty.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from forged.memory.blocks import Block
from forged.memory.functions import fits

DIGITS = 6
"""A list has the sizes that agree in their first binary digits, one and so many more."""


class FreeLists:
    """Finds the smallest hole that fits without looking at the others."""

    def __init__(self, total: int) -> None:
        # A hole is one integer in its list, size and offset: they compare much faster than tuples.
        self._shift = total.bit_length()
        self._mask = (1 << self._shift) - 1
        self._lists: dict[int, list[int]] = {}
        self._bitmap = 0
        self._holes: dict[int, Block] = {}

    def __len__(self) -> int:
        return len(self._holes)

    def add(self, hole: Block) -> None:
        size = hole.size
        number = list_number(size)
        keys = self._lists.get(number)
        if keys:
            insort(keys, size << self._shift | hole.offset)
        else:
            self._lists[number] = [size << self._shift | hole.offset]
            self._bitmap |= 1 << number
        self._holes[hole.offset] = hole
        hole.is_hole = True

    def remove(self, hole: Block) -> None:
        size = hole.size
        number = list_number(size)
        keys = self._lists[number]
        if len(keys) > 1:
            del keys[bisect_left(keys, size << self._shift | hole.offset)]
        else:
            del self._lists[number]
            self._bitmap ^= 1 << number
        del self._holes[hole.offset]
        hole.is_hole = False

    def best_fit(self, needed: int, alignment: int) -> Block | None:
        """The smallest hole with room at an aligned offset; of equals the one with the lowest offset."""
        lowest = alignment - 1
        keys = self._lists.get(list_number(needed))
        if keys:
            at = bisect_left(keys, needed << self._shift)
            if at < len(keys) and not keys[at] & self._mask & lowest:
                # The most frequent case, without an iterator: an aligned hole fits whenever its size does.
                return self._holes[keys[at] & self._mask]
        for hole in self.from_size(needed):
            if fits(hole.offset, hole.size, needed, alignment):
                return hole
        return None

    def from_size(self, size: int) -> Iterator[Block]:
        """The holes of at least this size, the smallest first."""
        number = list_number(size)
        keys = self._lists.get(number)
        if keys:
            for at in range(bisect_left(keys, size << self._shift), len(keys)):
                yield self._holes[keys[at] & self._mask]
        above = self._bitmap >> (number + 1)
        while above:
            step = (above & -above).bit_length()
            number += step
            above >>= step
            for key in self._lists[number]:
                yield self._holes[key & self._mask]

    def largest_first(self) -> Iterator[Block]:
        remaining = self._bitmap
        while remaining:
            number = remaining.bit_length() - 1
            remaining ^= 1 << number
            for key in reversed(self._lists[number]):
                yield self._holes[key & self._mask]

    def largest_size(self) -> int:
        return self._lists[self._bitmap.bit_length() - 1][-1] >> self._shift if self._bitmap else 0


def list_number(size: int) -> int:
    """Larger sizes never have smaller numbers; a number has at most one part in 2**DIGITS of its sizes."""
    dropped = size.bit_length() - DIGITS - 1
    return size if dropped <= 0 else (dropped << DIGITS) + (size >> dropped)
