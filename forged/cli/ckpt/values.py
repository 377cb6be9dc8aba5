"""The values of a state that are not arrays: steps, rates, names.

Invariants:
- Values are named like arrays.
- A value is shown as the manifest states it, or described where JSON cannot hold it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.format.tree import Node, unflatten

Key = tuple[str, int | None]
"""A name, and the rank if ranks have different values."""
INTEGER_BITS_MAX = 64


def plain_values(manifest: Manifest) -> dict[Key, Node]:
    """All values that are not arrays, as tree nodes."""
    found: dict[Key, Node] = {}
    for name, node, rank, is_own in manifest.states.values():
        if is_own or not are_equal(found.setdefault((name, None), node), node):
            found[name, rank] = node
    return found


def are_equal(one: Node, other: Node) -> bool:
    """Whether two values are equal in value and type; 1 and True are equal in Python."""
    return msgspec.json.encode(one) == msgspec.json.encode(other)


def displayable(node: Node) -> Any:
    """The value for JSON and text output."""
    value = unflatten(node, int)
    if isinstance(value, np.generic):
        value = value.item() if value.dtype.kind in "biufSU" else str(value)
    if isinstance(value, complex):
        return str(value)
    if isinstance(value, int) and value.bit_length() > INTEGER_BITS_MAX:
        return f"an integer of {value.bit_length():,} bits"
    return value
