"""The values of a state that are no arrays: steps, rates, names.

Law: each has one name, built like those of arrays. What a document says of a value is shown as it is, or told in words
where neither JSON nor people could take it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.format.tree import Node, unflatten

Key = tuple[str, int | None]
"""A name, and the rank whose value it is where ranks have different ones."""
INTEGER_BITS_MAX = 64


def plain_values(manifest: Manifest) -> dict[Key, Node]:
    """All values that are no arrays, as they are written."""
    found: dict[Key, Node] = {}
    for name, node, rank, is_own in manifest.states.values():
        if is_own or not are_alike(found.setdefault((name, None), node), node):
            found[name, rank] = node
    return found


def are_alike(one: Node, other: Node) -> bool:
    """Whether two values are the same, of the same type; to Python 1 and true are equal."""
    return msgspec.json.encode(one) == msgspec.json.encode(other)


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
