"""Boxes: the parts of a global array, and the chunks that they consist of.

Law: chunks are cells of a grid that depends on the global array alone, whoever holds which part of it, so that the same
bytes are the same chunk after any resharding. What a box has of a cell lies in one piece in the box's own C order, and
the cells of a box follow each other there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

CHUNK_BYTES_MIN = 1 << 17
CHUNK_BYTES_MAX = 4 << 20
CHUNKS_WANTED = 64
"""Of a large array there are at least so many, so that little is read in vain for a part of it."""

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A part of a global array: from `offset` on, `shape` along each axis."""

    offset: Shape
    shape: Shape

    @property
    def volume(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def covers(self, other: Box) -> bool:
        """Whether all of the other lies in this one."""
        return all(
            mine <= its and its + size <= mine + room
            for mine, room, its, size in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where it lies in an array that holds `outer`."""
        return tuple(
            slice(mine - its, mine - its + size)
            for mine, size, its in zip(self.offset, self.shape, outer.offset, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """All of an array."""
    return Box((0,) * len(shape), tuple(shape))


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes share; None where that has no element. Boxes without axes share their one element."""
    offset, shape = [], []
    for a_from, a_size, b_from, b_size in zip(a.offset, a.shape, b.offset, b.shape, strict=True):
        start, end = max(a_from, b_from), min(a_from + a_size, b_from + b_size)
        if start >= end:
            return None
        offset.append(start)
        shape.append(end - start)
    return Box(tuple(offset), tuple(shape))


def chunk_bytes(nbytes: int) -> int:
    """About how large the chunks of an array of so many bytes are: a power of two."""
    wanted = nbytes // CHUNKS_WANTED
    return min(max(CHUNK_BYTES_MIN, 1 << max(0, wanted.bit_length() - 1)), CHUNK_BYTES_MAX)


class Grid(NamedTuple):
    """How a global array is cut: one index along each axis before `axis`, `step` along it, all of the others."""

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
    """How many bytes each chunk of a box has, in order; none of a box without elements."""
    if not box.volume:
        return []
    if not box.shape:
        return [itemsize]
    before, behind = math.prod(box.shape[: grid.axis]), math.prod(box.shape[grid.axis + 1 :]) * itemsize
    lengths = [(end - start) * behind for start, end in _cuts(box, grid)]
    return lengths * before


def chunk_count(box: Box, grid: Grid) -> int:
    """How many chunks a box has; told without a look at any of them."""
    if not box.shape or not box.volume:
        return int(box.volume > 0)
    start, step = box.offset[grid.axis], grid.step
    along = -(-(start + box.shape[grid.axis]) // step) - start // step
    return math.prod(box.shape[: grid.axis]) * along


def chunks(box: Box, grid: Grid) -> Iterator[Box]:
    """The chunks of a box, in the order of its bytes."""
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
    """The chunks of a box that have something of what is wanted, with their numbers."""
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
