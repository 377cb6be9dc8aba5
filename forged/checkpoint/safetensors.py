"""The safetensors format: a header that says what follows, and the arrays without anything between them.

Law: what this writes, the `safetensors` library opens; what it reads is checked in every number before anything is
allocated for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from forged.checkpoint.boxes import Shape
from forged.checkpoint.dtypes import RAW, safetensors_name

PAGE = 4096
PLACE_BYTES = 8
METADATA = "__metadata__"


class Entry(NamedTuple):
    """An array in a file."""

    name: str
    dtype: str
    """As a manifest calls it."""
    shape: Shape
    nbytes: int


def header_of(entries: Iterable[Entry], metadata: dict[str, str]) -> bytes:
    """What stands before the arrays, which lie in this order; it ends at the end of a page."""
    said: dict[str, object] = {METADATA: metadata} if metadata else {}
    offset = 0
    for name, dtype, shape, nbytes in entries:
        known = safetensors_name(dtype)
        said[_unused(name, said)] = {
            "dtype": known or RAW,
            "shape": shape if known else (nbytes,),
            "data_offsets": (offset, offset + nbytes),
        }
        offset += nbytes
    text = msgspec.json.encode(said)
    room = math.ceil((PLACE_BYTES + len(text)) / PAGE) * PAGE - PLACE_BYTES
    return room.to_bytes(PLACE_BYTES, "little") + text.ljust(room)


def _unused(name: str, said: dict[str, object]) -> str:
    """A name that no other array in the file has."""
    found, number = name, 2
    while found in said:
        found, number = f"{name} ({number})", number + 1
    return found
