"""The values of a state that are no arrays: steps, rates, names.

Law: each has one name, built like those of arrays. What a document says of a value is shown as it is, or told in words
where neither JSON nor people could take it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from forged.checkpoint.manifest import Manifest
from forged.checkpoint.tree import Node, name_under, unflatten

Key = tuple[str, int | None]
"""A name, and the rank whose value it is where ranks have different ones."""
INTEGER_BITS_MAX = 64
CONTAINERS = frozenset("dmltp")


def plain_values(manifest: Manifest) -> dict[Key, Node]:
    """All values that are no arrays, as they are written."""
    found: dict[Key, Node] = {}
    first_ranks: dict[int, int] = {}
    for rank, number in enumerate(manifest.tree_of_rank):
        first_ranks.setdefault(number, rank)
    for number, rank in first_ranks.items():
        for name, node, is_private in _plain(manifest.trees[number], "", is_private=False):
            if is_private or found.setdefault((name, None), node) != node:
                found[name, rank] = node
    return found


def sayable(node: Node) -> Any:
    """A value as JSON, and people, can have it."""
    value = unflatten(node, int)
    if isinstance(value, np.generic):
        value = value.item() if value.dtype.kind in "biufSU" else str(value)
    if isinstance(value, complex):
        return str(value)
    if isinstance(value, int) and value.bit_length() > INTEGER_BITS_MAX:
        return f"an integer of {value.bit_length():,} bits"
    return value


def _plain(node: Node, name: str, *, is_private: bool) -> Iterator[tuple[str, Node, bool]]:
    if isinstance(node, int):
        return
    ((kind, value),) = node.items()
    if kind not in CONTAINERS:
        yield name, node, is_private
        return
    if kind == "p":
        yield from _plain(value, name, is_private=True)
        return
    items = value.items() if kind == "d" else value if kind == "m" else enumerate(value)
    for key, inner in items:
        yield from _plain(inner, name_under(name, key), is_private=is_private)
