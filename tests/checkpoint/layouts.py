"""Strategies for arrays of all types, and for ways to divide them among ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st

from forged.checkpoint.format import boxes
from forged.checkpoint.format.boxes import Box, Shape, whole
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.loading import fetching, read_plan
from forged.checkpoint.saving import image, plan

Array = np.ndarray[Any, Any]

DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", ">f4", ">i2", "<U3", "|S5", "|V3", "|V0"),
    *("<M8[ns]", "<m8[D]", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"),
]
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 17, 40]), max_size=3).map(tuple)


@contextmanager
def small_chunks(chunk_bytes: int, block_bytes: int, small_bytes: int) -> Iterator[None]:
    """Cut small arrays into as many chunks as large ones."""
    with (
        patch.object(boxes, "CHUNK_BYTES_MIN", chunk_bytes),
        patch.object(boxes, "CHUNK_BYTES_MAX", 4 * chunk_bytes),
        patch.object(image, "CHUNK_BYTES_MIN", chunk_bytes),
        patch.object(image, "SMALL_BYTES", small_bytes),
        patch.object(plan, "UNSPLIT_BYTES_MAX", chunk_bytes),
        patch.object(read_plan, "READ_BYTES_MAX", block_bytes),
        patch.object(fetching, "READ_BYTES_MAX", block_bytes),
        patch.object(read_plan, "SMALL_BYTES_MAX", small_bytes),
        patch.object(fetching, "SMALL_BYTES_MAX", small_bytes),
    ):
        yield


def array_of(seed: int, dtype: str, shape: Shape) -> Array:
    """Random bytes as elements of a type, NaN included."""
    kind = dtype_of(dtype)
    size = math.prod(shape) * kind.itemsize
    data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    if kind.kind == "b":
        data &= 1
    if kind.kind == "U":
        data = np.random.default_rng(seed).integers(0x20, 0x7F, size // 4, np.uint32).view(np.uint8)
    return np.ndarray(shape, kind, data.tobytes()).copy() if size else np.ndarray(shape, kind)


def bits(array: Array) -> tuple[str, Shape, bytes]:
    """Everything that distinguishes two arrays bit for bit."""
    return array.dtype.str, array.shape, array.tobytes()


def part_of(array: Array, box: Box) -> Array:
    """A box of an array."""
    where: Any = (*box.within(whole(array.shape)), ...)
    found: Array = array[where]
    return found


@st.composite
def partitions(draw: st.DrawFn, shape: Shape, ranks: int) -> list[Box]:
    """A box per rank, which together cover the array: rows, columns or blocks; some may be empty."""
    axes = [axis for axis in range(len(shape)) if draw(st.booleans())] if shape else []
    counts = [1] * len(shape)
    left = ranks
    for axis in axes:
        counts[axis] = draw(st.integers(1, left))
        left //= counts[axis]
    edges = []
    for size, count in zip(shape, counts, strict=True):
        inner = sorted(draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1)))
        edges.append(list(pairwise([0, *inner, size])))
    cells = [Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell)) for cell in product(*edges)]
    return [cells[rank % len(cells)] for rank in range(ranks)]


def strided(shape: Shape, dtype: np.dtype[Any], how: int) -> Array:
    """An array of that shape: contiguous, transposed, with gaps, or reversed; filled with zeros."""
    match how:
        case 1:
            array: Array = np.ndarray(shape[::-1], dtype).transpose()
        case 2:
            array = np.ndarray(tuple(2 * size for size in shape), dtype)[_every(shape, 2)]
        case 3:
            array = np.ndarray(shape, dtype)[_every(shape, -1)]
        case _:
            array = np.ndarray(shape, dtype)
    if array.size and dtype.itemsize:
        array[...] = np.zeros((), dtype)
    return array


def _every(shape: Shape, step: int) -> Any:
    return (*(slice(None, None, step) for _ in shape), ...)
