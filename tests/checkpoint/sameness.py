"""Comparison of states bit for bit."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from forged.checkpoint.model import PerRank, ShardedArray


def require_same(found: Any, expected: Any) -> None:
    """Require equal types, key order and bits. An expected `PerRank` value is loaded without the wrapper."""
    while isinstance(expected, PerRank):
        expected = expected.value
    assert type(found) is type(expected)
    match expected:
        case dict():
            assert [(type(key), key) for key in found] == [(type(key), key) for key in expected]
            for key, value in expected.items():
                require_same(found[key], value)
        case list() | tuple():
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                require_same(one, other)
        case ShardedArray():
            assert (found.global_shape, found.offset) == (expected.global_shape, expected.offset)
            require_same(found.local, expected.local)
        case np.ndarray() | np.generic():
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert found.tobytes() == expected.tobytes()
        case float():
            assert struct.pack("<d", found) == struct.pack("<d", expected) or (
                math.isnan(found) and math.isnan(expected)
            )
        case complex():
            require_same([found.real, found.imag], [expected.real, expected.imag])
        case _:
            assert found == expected
