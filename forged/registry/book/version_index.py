"""Finds versions by what they have: their state, tags, checksum, aliases, checkpoint.

Invariants:
- A search looks only at the versions that have the rarest of the wanted properties, in the order of model and version.
- To add and to remove a property moves at most `BLOCK_MAX` keys in memory, however many versions have it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import itemgetter

from forged.registry.model import ModelVersion

Key = tuple[str, ModelVersion]
Property = tuple[str, ...]
"""Such as `("state", "canary")` or `("tag", "owner", "vision")`."""
BLOCK_MAX = 1_000

_first = itemgetter(0)


class SortedKeys:
    """Keys in ascending order, in blocks: in one list of 100,000 an addition would move half of them."""

    __slots__ = ("_blocks", "_size")

    def __init__(self) -> None:
        self._blocks: list[list[Key]] = []
        """None is empty."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: Key) -> bool:
        if not self._blocks:
            return False
        block = self._blocks[self._place(key)]
        place = bisect_left(block, key)
        return place < len(block) and block[place] == key

    def __iter__(self) -> Iterator[Key]:
        return self.after(None)

    def after(self, key: Key | None) -> Iterator[Key]:
        """The keys greater than this one; all for None."""
        if key is None or not self._blocks:
            start, first = 0, 0
        else:
            start = self._place(key)
            first = bisect_right(self._blocks[start], key)
        for block in islice(self._blocks, start, None):
            yield from islice(block, first, None)
            first = 0

    def add(self, key: Key) -> None:
        self._size += 1
        if not self._blocks or self._blocks[-1][-1] < key:
            self._append(key)
            return
        place = self._place(key)
        block = self._blocks[place]
        insort(block, key)
        if len(block) > BLOCK_MAX:
            half = BLOCK_MAX // 2
            self._blocks[place : place + 1] = block[:half], block[half:]

    def _append(self, key: Key) -> None:
        """Add the greatest key: while versions are loaded in order, each one is that."""
        if self._blocks and len(self._blocks[-1]) < BLOCK_MAX:
            self._blocks[-1].append(key)
        else:
            self._blocks.append([key])

    def remove(self, key: Key) -> None:
        place = self._place(key)
        block = self._blocks[place]
        del block[bisect_left(block, key)]
        if not block:
            del self._blocks[place]
        self._size -= 1

    def _place(self, key: Key) -> int:
        """The block that the key is in, or belongs into."""
        return max(bisect_right(self._blocks, key, key=_first) - 1, 0)


NONE = SortedKeys()


class VersionIndex:
    """The versions with each property."""

    def __init__(self) -> None:
        self._having: dict[Property, SortedKeys] = {}

    def clear(self) -> None:
        self._having.clear()

    def add(self, key: Key, what: Property) -> None:
        having = self._having.get(what)
        if having is None:
            having = self._having[what] = SortedKeys()
        having.add(key)

    def remove(self, key: Key, what: Property) -> None:
        having = self._having[what]
        having.remove(key)
        if not having:
            del self._having[what]

    def having(self, what: Property) -> SortedKeys:
        return self._having.get(what, NONE)

    def search(self, wanted: Sequence[Property], after: Key | None, most: int) -> tuple[list[Key], Key | None]:
        """The versions after this key that have all these properties, of so many that are looked at; at least one
        property is wanted. Also the key to continue after; None at the end."""
        rarest, *others = sorted(map(self.having, wanted), key=len)
        keys = list(islice(rarest.after(after), most + 1))
        position = keys[most - 1] if len(keys) > most else None
        del keys[most:]
        return [key for key in keys if all(key in other for other in others)], position
