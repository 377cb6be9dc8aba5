"""The holes of a pool by size: lists of a range of sizes each, and a bitmap of those that are not empty.

Invariants:
- Each hole is in the list of its size, in the order of size, then offset.
- A bit of the bitmap is set if the list of that number is not empty.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice

from forged.memory.functions import fits
from forged.memory.pool.blocks import Block, SizeList

DIGITS = 6
"""A list has the sizes that agree in their first binary digits, one and so many more."""

PASSED_MAX = 1000
"""So many holes are passed over because the aligned block would end behind them."""


class FreeLists:
    """Finds the smallest hole that fits without looking at the others."""

    def __init__(self, total: int) -> None:
        self._shift = total.bit_length()
        self._lists: dict[int, SizeList] = {}
        self._bitmap = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, hole: Block) -> None:
        size = hole.size
        # The number of its list, as `list_number` says: a call would be a tenth of the time of this one.
        dropped = size.bit_length() - DIGITS - 1
        number = size if dropped <= 0 else (dropped << DIGITS) + (size >> dropped)
        found = self._lists.get(number)
        if found is None:
            found = self._lists[number] = SizeList(number, 1 << number, [], [])
        hole.key = key = size << self._shift | hole.offset
        keys = found.keys
        if keys:
            at = bisect_left(keys, key)
            keys.insert(at, key)
            found.holes.insert(at, hole)
        else:
            keys.append(key)
            found.holes.append(hole)
            self._bitmap |= found.bit
        self._count += 1
        hole.free_list = found

    def remove(self, hole: Block) -> None:
        """Take out a hole; its size and offset must be as they were when it was added."""
        found = hole.free_list
        assert found is not None
        keys = found.keys
        at = bisect_left(keys, hole.key)
        del keys[at], found.holes[at]
        if not keys:
            self._bitmap ^= found.bit
        self._count -= 1
        hole.free_list = None

    def take(self, needed: int, alignment: int) -> Block | None:
        """Remove and return the best fit."""
        dropped = needed.bit_length() - DIGITS - 1
        number = needed if dropped <= 0 else (dropped << DIGITS) + (needed >> dropped)
        found = self._lists.get(number)
        if found is None or (at := bisect_left(found.keys, needed << self._shift)) == len(found.keys):
            above = self._bitmap >> (number + 1)
            if not above:
                return None
            at, found = 0, self._lists[number + (above & -above).bit_length()]
        hole = found.holes[at]
        if hole.offset & (alignment - 1):
            best = self.best_fit(needed, alignment)
            if best is not None:
                self.remove(best)
            return best
        # The most frequent case, without a second search: an aligned hole fits whenever its size does.
        del found.keys[at], found.holes[at]
        if not found.keys:
            self._bitmap ^= found.bit
        self._count -= 1
        hole.free_list = None
        return hole

    def best_fit(self, needed: int, alignment: int) -> Block | None:
        """The smallest hole with room at an aligned offset; of equals the one with the lowest offset.

        After `PASSED_MAX` holes with room at other offsets only those are looked at that have room at any offset.
        """
        for hole in islice(self.from_size(needed), PASSED_MAX):
            if fits(hole.offset, hole.size, needed, alignment):
                return hole
        return next(self.from_size(needed + alignment - 1), None)

    def from_size(self, size: int) -> Iterator[Block]:
        """The holes of at least this size, the smallest first."""
        number = list_number(size)
        found = self._lists.get(number)
        if found is not None:
            for at in range(bisect_left(found.keys, size << self._shift), len(found.holes)):
                yield found.holes[at]
        above = self._bitmap >> (number + 1)
        while above:
            step = (above & -above).bit_length()
            number += step
            above >>= step
            yield from self._lists[number].holes

    def largest_first(self) -> Iterator[Block]:
        remaining = self._bitmap
        while remaining:
            number = remaining.bit_length() - 1
            remaining ^= 1 << number
            yield from reversed(self._lists[number].holes)

    def largest_size(self) -> int:
        return self._lists[self._bitmap.bit_length() - 1].holes[-1].size if self._bitmap else 0


def list_number(size: int) -> int:
    """Larger sizes never have smaller numbers; the sizes of a number differ by less than one part in 2**DIGITS."""
    dropped = size.bit_length() - DIGITS - 1
    return size if dropped <= 0 else (dropped << DIGITS) + (size >> dropped)
