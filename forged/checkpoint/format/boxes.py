"""Boxes, the parts of a global array, and chunks, the cells of a grid that they consist of.

Invariants:
- The grid depends only on the shape and element size of the global array, so the same bytes form the same chunk after
  any resharding.
- A box's part of a cell is contiguous in the box's C order, and the cells of a box follow each other there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

CHUNK_BYTES_MIN = 1 << 17
CHUNK_BYTES_MAX = 4 << 20
CHUNKS_PER_ARRAY = 64
"""Large arrays have at least so many chunks, so that reading a part reads little more than the part."""

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A part of a global array: `shape` elements along each axis, starting at `offset`."""

    offset: Shape
    shape: Shape

    @property
    def volume(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def covers(self, other: Box) -> bool:
        """Whether the other box lies within this one."""
        return all(
            start <= other_start and other_start + size <= start + length
            for start, length, other_start, size in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index of this box in an array that holds the box `outer`."""
        return tuple(
            slice(start - outer_start, start - outer_start + size)
            for start, size, outer_start in zip(self.offset, self.shape, outer.offset, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """The box of an entire array."""
    return Box((0,) * len(shape), tuple(shape))


def intersection(a: Box, b: Box) -> Box | None:
    """The common box; None if it has no elements. Boxes without axes share their one element."""
    offset, shape = [], []
    for a_from, a_size, b_from, b_size in zip(a.offset, a.shape, b.offset, b.shape, strict=True):
        start, end = max(a_from, b_from), min(a_from + a_size, b_from + b_size)
        if start >= end:
            return None
        offset.append(start)
        shape.append(end - start)
    return Box(tuple(offset), tuple(shape))


def offset_in(outer: Box, inner: Box) -> int | None:
    """How many elements of `outer`, in C order, precede those of `inner`; None if these are not contiguous."""
    at, stride, is_full = 0, 1, True
    for axis in reversed(range(len(outer.shape))):
        if not is_full and inner.shape[axis] != 1:
            return None
        is_full = is_full and inner.shape[axis] == outer.shape[axis]
        at += (inner.offset[axis] - outer.offset[axis]) * stride
        stride *= outer.shape[axis]
    return at


def subtract(box: Box, hole: Box) -> Iterator[Box]:
    """The rest of a box without a part of it, as boxes."""
    offset, shape = list(box.offset), list(box.shape)
    for axis, (start, size) in enumerate(zip(hole.offset, hole.shape, strict=True)):
        for low, high in ((offset[axis], start), (start + size, offset[axis] + shape[axis])):
            if low < high:
                yield Box((*offset[:axis], low, *offset[axis + 1 :]), (*shape[:axis], high - low, *shape[axis + 1 :]))
        offset[axis], shape[axis] = start, size


def chunk_bytes(nbytes: int) -> int:
    """The approximate chunk size for an array of `nbytes`, a power of two."""
    wanted = nbytes // CHUNKS_PER_ARRAY
    return min(max(CHUNK_BYTES_MIN, 1 << max(0, wanted.bit_length() - 1)), CHUNK_BYTES_MAX)


class Grid(NamedTuple):
    """How an array is cut into cells: one index on each axis before `axis`, `step` on it, all on the axes after it."""

    axis: int
    step: int

    def __repr__(self) -> str:
        return f"Grid(axis={self.axis}, step={self.step})"


def grid_of(shape: Shape, itemsize: int) -> Grid:
    """The grid of a global array."""
    limit = chunk_bytes(math.prod(shape) * itemsize)
    row = math.prod(shape) * itemsize
    for axis, size in enumerate(shape):
        row = row // size if size else 0
        if row <= limit or axis == len(shape) - 1:
            return Grid(axis, max(1, min(size, limit // row)) if row else max(1, size))
    return Grid(0, 1)


def chunk_lengths(box: Box, grid: Grid, itemsize: int) -> list[int]:
    """The bytes of each chunk of a box, in order; empty for a box without elements."""
    if not box.volume:
        return []
    if not box.shape:
        return [itemsize]
    before, behind = math.prod(box.shape[: grid.axis]), math.prod(box.shape[grid.axis + 1 :]) * itemsize
    lengths = [(end - start) * behind for start, end in _cuts(box, grid)]
    return lengths * before


def chunk_count(box: Box, grid: Grid) -> int:
    """The number of chunks of a box, computed without listing them."""
    if not box.shape or not box.volume:
        return int(box.volume > 0)
    start, step = box.offset[grid.axis], grid.step
    along = -(-(start + box.shape[grid.axis]) // step) - start // step
    return math.prod(box.shape[: grid.axis]) * along


def chunks(box: Box, grid: Grid) -> Iterator[Box]:
    """The chunks of a box, in byte order."""
    if not box.volume:
        return
    if not box.shape:
        yield box
        return
    axis = grid.axis
    cuts = list(_cuts(box, grid))
    tail_offset, tail_shape = box.offset[axis + 1 :], box.shape[axis + 1 :]
    ranges = [range(start, start + size) for start, size in zip(box.offset[:axis], box.shape[:axis], strict=True)]
    ones = (1,) * axis
    for indices in product(*ranges):
        for start, end in cuts:
            yield Box((*indices, start, *tail_offset), (*ones, end - start, *tail_shape))


def chunks_within(box: Box, grid: Grid, wanted: Box) -> Iterator[tuple[int, Box]]:
    """The chunks of a box that overlap `wanted`, with their numbers."""
    if grid.axis or not box.shape:
        for number, chunk in enumerate(chunks(box, grid)):
            if intersection(chunk, wanted) is not None:
                yield number, chunk
        return
    shared = intersection(box, wanted)
    if shared is None:
        return
    step, origin = grid.step, box.offset[0] // grid.step
    first, last = shared.offset[0] // step, (shared.offset[0] + shared.shape[0] - 1) // step
    low, high = box.offset[0], box.offset[0] + box.shape[0]
    for cell in range(first, last + 1):
        start, end = max(low, cell * step), min(high, (cell + 1) * step)
        yield cell - origin, Box((start, *box.offset[1:]), (end - start, *box.shape[1:]))


def _cuts(box: Box, grid: Grid) -> Iterator[tuple[int, int]]:
    """Where the grid cuts a box along its axis."""
    start, end = box.offset[grid.axis], box.offset[grid.axis] + box.shape[grid.axis]
    while start < end:
        stop = min(end, (start // grid.step + 1) * grid.step)
        yield start, stop
        start = stop
