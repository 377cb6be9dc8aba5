"""Finds versions by what they have: their state, tags, checksum, aliases, checkpoint.

Invariants:
- A search looks only at the versions that have the rarest of the wanted properties, in the order of model and version.
- To add and to remove a property costs O(log n), and a move of memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from forged.registry.model import ModelVersion

Key = tuple[str, ModelVersion]
Property = tuple[str, ...]
"""Such as `("state", "canary")` or `("tag", "owner", "vision")`."""


class VersionIndex:
    """The versions with each property."""

    def __init__(self) -> None:
        self._having: dict[Property, list[Key]] = {}
        """In ascending order."""

    def clear(self) -> None:
        self._having.clear()

    def add(self, key: Key, what: Property) -> None:
        having = self._having.setdefault(what, [])
        # While versions are loaded in order, each one is the last.
        if not having or having[-1] < key:
            having.append(key)
        else:
            insort(having, key)

    def remove(self, key: Key, what: Property) -> None:
        having = self._having[what]
        del having[bisect_left(having, key)]
        if not having:
            del self._having[what]

    def having(self, what: Property) -> Sequence[Key]:
        return self._having.get(what, ())

    def search(self, wanted: Sequence[Property], after: Key | None, most: int) -> tuple[list[Key], Key | None]:
        """The versions after this key that have all these properties, of so many that are looked at; at least one
        property is wanted. Also the key to continue after; None at the end."""
        rarest, *others = sorted(map(self.having, wanted), key=len)
        start = 0 if after is None else bisect_right(rarest, after)
        keys = rarest[start : start + most]
        found = [key for key in keys if all(_contains(other, key) for other in others)]
        return found, keys[-1] if start + most < len(rarest) else None


def _contains(keys: Sequence[Key], key: Key) -> bool:
    place = bisect_left(keys, key)
    return place < len(keys) and keys[place] == key
