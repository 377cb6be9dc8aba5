"""The image of a part: the bytes of its file, taken from the arrays.

Invariants:
- Several threads take blocks; each byte is copied once.
- The thread that takes a block hashes the chunks that begin in it, from memory that is in the processor's cache.
- The arrays must not change meanwhile.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import xxhash

from forged.checkpoint.format.boxes import (
    CHUNK_BYTES_MIN,
    Box,
    Grid,
    Shape,
    chunk_lengths,
    chunks,
    grid_of,
    intersection,
)
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import DIGEST_BYTES, Tensors
from forged.checkpoint.format.safetensors import TensorEntry, encode_header
from forged.checkpoint.ports import BLOCK_BYTES
from forged.checkpoint.saving.files.plan import Share

SMALL_BYTES = 1 << 15
"""Arrays up to this size are joined, several at a time."""

HOT_BYTES = 1 << 19
"""Copied and then hashed at a time, while the processor's cache has the bytes."""

EMPTY_DIGEST = xxhash.xxh3_128_digest(b"")

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Layout:
    """The offsets of a part's pieces and chunks; the same for every save of arrays of the same shapes."""

    header: bytes
    boxes: list[Box]
    grids: dict[int, Grid]
    """For pieces with several chunks."""
    itemsizes: list[int]
    starts: list[int]
    """The offset of each piece in the file, and the end of the last one."""
    first_chunks: list[int]
    """The number of each piece's first chunk, and the number of all chunks."""
    marks: dict[int, list[int]]
    """For pieces with several chunks: the offset of each in the piece, and the end of the last one."""

    @property
    def size(self) -> int:
        return self.starts[-1]

    @property
    def chunks(self) -> int:
        return self.first_chunks[-1]

    def lengths_of(self, place: int) -> list[int]:
        """The lengths of a piece's chunks."""
        if place in self.marks:
            return [end - start for start, end in pairwise(self.marks[place])]
        count = self.first_chunks[place + 1] - self.first_chunks[place]
        return [self.starts[place + 1] - self.starts[place]] * count


def layout_of(tensors: Tensors, share: Share, metadata: dict[str, str], names: Sequence[str] | None = None) -> Layout:
    """The layout of a share's file; `names` are the pieces' names in it if they differ from the manifest."""
    entries, boxes, itemsizes, sizes, counts = [], [], [], [], []
    grids: dict[int, Grid] = {}
    marks: dict[int, list[int]] = {}
    for place, number in enumerate(share.tensors):
        shape, dtype = tuple(tensors.shapes[number]), tensors.dtypes[number]
        itemsize = dtype_of(dtype).itemsize
        box = share.box(place, shape)
        volume = math.prod(box.shape)
        size = volume * itemsize
        if math.prod(shape) * itemsize > CHUNK_BYTES_MIN:
            grids[place] = grid_of(shape, itemsize)
            marks[place] = list(accumulate(chunk_lengths(box, grids[place], itemsize), initial=0))
        boxes.append(box)
        itemsizes.append(itemsize)
        sizes.append(size)
        counts.append(len(marks[place]) - 1 if place in marks else int(volume > 0))
        name = names[place] if names else _entry_name(tensors, number, box, shape)
        entries.append(TensorEntry(name, dtype, box.shape, size))
    header = encode_header(entries, metadata)
    starts = list(accumulate(sizes, initial=len(header)))
    return Layout(header, boxes, grids, itemsizes, starts, list(accumulate(counts, initial=0)), marks)


def _entry_name(tensors: Tensors, number: int, box: Box, shape: Shape) -> str:
    """A piece's name for other tools."""
    name = tensors.names[number]
    if number in tensors.ranks:
        name = f"{name}@{tensors.ranks[number]}"
    if box.shape == shape:
        return name
    ends = ",".join(f"{start}:{start + size}" for start, size in zip(box.offset, box.shape, strict=True))
    return f"{name}[{ends}]"


class PartImage(Protocol):
    """The bytes of a part and the digests of its chunks."""

    layout: Layout
    digests: bytearray
    """Of all chunks whose blocks were taken."""

    @property
    def size(self) -> int: ...

    def chunk(self, place: int, offset: int, length: int) -> Bytes:
        """A chunk, by its offset in a piece."""
        ...


class ArrayImage:
    """A part over the caller's arrays; a `ports.Source`."""

    def __init__(self, layout: Layout, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """`arrays` are the pieces, in order."""
        self.layout = layout
        self.digests = blank_digests(layout)
        self.arrays = list(arrays)
        self._pieces = [_bytes_of(array, place, layout) for place, array in enumerate(arrays)]

    @property
    def size(self) -> int:
        return self.layout.size

    def block(self, offset: int, room: memoryview) -> memoryview:
        """Copy a block into `room`, and hash the chunks that begin in it."""
        layout = self.layout
        end = min(offset + len(room), layout.size)
        at = offset
        if at < len(layout.header):
            at = min(end, len(layout.header))
            room[: at - offset] = layout.header[offset:at]
        place = bisect_right(layout.starts, at) - 1
        into: Bytes = np.frombuffer(room, np.uint8)
        while at < end:
            if layout.starts[place + 1] - layout.starts[place] <= SMALL_BYTES:
                at, place = self._copy_small(place, at, end, offset, into)
                continue
            piece, start, behind = self._pieces[place], layout.starts[place], layout.starts[place + 1]
            stop = min(end, behind, at + piece.step_bytes)
            piece.copy(at - start, into[at - offset : stop - offset])
            self._hash(place, at - start, stop - start)
            at, place = stop, place + (stop == behind)
        return room[: end - offset]

    def release_arrays(self) -> None:
        """Drop the references to the arrays after their bytes were copied."""
        self.arrays, self._pieces = [], []

    def chunk(self, place: int, offset: int, length: int) -> Bytes:
        """Some contiguous bytes of a piece."""
        return self._pieces[place].run(offset, length)

    def _copy_small(self, place: int, at: int, end: int, offset: int, into: Bytes) -> tuple[int, int]:
        """Copy and hash consecutive small arrays; returns the offset and the number of the next array."""
        starts, first = self.layout.starts, place
        while place < len(self._pieces) and starts[place] < end and starts[place + 1] - starts[place] <= SMALL_BYTES:
            place += 1
        arrays: list[Any] = [piece.all() for piece in self._pieces[first:place]]
        row = b"".join(arrays)
        stop = min(end, starts[place])
        into[at - offset : stop - offset] = np.frombuffer(row, np.uint8)[at - starts[first] : stop - starts[first]]
        self._hash_small(first + (starts[first] < at), place)
        return stop, place

    def _hash_small(self, first: int, behind: int) -> None:
        """Hash small pieces."""
        numbers, marks = self.layout.first_chunks, self.layout.marks
        for place in range(first, behind):
            if place in marks:
                self._hash(place, 0, marks[place][-1])
            elif numbers[place] < numbers[place + 1]:
                self._set_digest(numbers[place], self._pieces[place].all())

    def _hash(self, place: int, low: int, high: int) -> None:
        """Hash the chunks of a piece that begin in this range."""
        piece, number = self._pieces[place], self.layout.first_chunks[place]
        marks = self.layout.marks.get(place)
        if marks is not None:
            for chunk in range(bisect_left(marks, low), bisect_left(marks, high)):
                self._set_digest(number + chunk, piece.run(marks[chunk], marks[chunk + 1] - marks[chunk]))
        elif not low:
            self._set_digest(number, piece.all())

    def _set_digest(self, number: int, chunk: Any) -> None:
        self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES] = xxhash.xxh3_128_digest(chunk)


def blank_digests(layout: Layout) -> bytearray:
    """Memory for a part's digests, filled in for chunks without bytes (strings of length 0), which are in no block."""
    digests = bytearray(DIGEST_BYTES * layout.chunks)
    if 0 in layout.itemsizes:
        for place, itemsize in enumerate(layout.itemsizes):
            if not itemsize:
                first, behind = layout.first_chunks[place : place + 2]
                digests[first * DIGEST_BYTES : behind * DIGEST_BYTES] = EMPTY_DIGEST * (behind - first)
    return digests


class _Contiguous:
    """A C-contiguous array."""

    __slots__ = ("_flat",)
    step_bytes = HOT_BYTES

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._flat: Bytes = array.reshape(-1).view(np.uint8)

    def all(self) -> Bytes:
        return self._flat

    def run(self, offset: int, length: int) -> Bytes:
        return self._flat[offset : offset + length]

    def copy(self, offset: int, into: Bytes) -> None:
        np.copyto(into, self._flat[offset : offset + into.size])


class _Strided:
    """An array that is not contiguous; made contiguous chunk by chunk."""

    __slots__ = ("_array", "_chunks", "_starts")
    step_bytes = BLOCK_BYTES
    """With a smaller step, each chunk would be made contiguous several times."""

    def __init__(self, array: np.ndarray[Any, Any], box: Box, grid: Grid) -> None:
        self._array = array
        self._chunks = [chunk.within(box) for chunk in chunks(box, grid)]
        self._starts = list(accumulate(chunk_lengths(box, grid, array.itemsize), initial=0))

    def all(self) -> Bytes:
        return self.run(0, self._starts[-1])

    def run(self, offset: int, length: int) -> Bytes:
        into = np.empty(length, np.uint8)
        self.copy(offset, into)
        return into

    def copy(self, offset: int, into: Bytes) -> None:
        number, end = bisect_right(self._starts, offset) - 1, offset + into.size
        while number < len(self._chunks) and self._starts[number] < end:
            chunk = np.ascontiguousarray(self._array[self._chunks[number]]).reshape(-1).view(np.uint8)
            start = self._starts[number]
            low, high = max(offset, start), min(end, start + chunk.size)
            into[low - offset : high - offset] = chunk[low - start : high - start]
            number += 1


def _bytes_of(array: np.ndarray[Any, Any], place: int, layout: Layout) -> _Contiguous | _Strided:
    if array.flags.c_contiguous and array.itemsize:
        return _Contiguous(array)
    box = layout.boxes[place]
    grid = layout.grids.get(place) or Grid(0, max(1, box.shape[0] if box.shape else 1))
    return _Strided(array, box, grid)


def blocks(size: int) -> range:
    """The offsets of the blocks of `size` bytes."""
    return range(0, size, BLOCK_BYTES)


def slice_of(array: np.ndarray[Any, Any], held: Box, wanted: Box) -> np.ndarray[Any, Any]:
    """The box of a rank's array that the rank writes."""
    if held == wanted:
        return array
    assert intersection(held, wanted) == wanted
    return array[wanted.within(held)]


def staged_arrays(dtypes: Iterable[str], layout: Layout, view: memoryview) -> Iterator[np.ndarray[Any, Any]]:
    """Views of the pieces of a staged part, by their types."""
    for (start, end), name, box in zip(pairwise(layout.starts), dtypes, layout.boxes, strict=True):
        dtype = dtype_of(name)
        flat = np.frombuffer(view[start:end], np.uint8)
        yield flat.view(dtype).reshape(box.shape) if dtype.itemsize else np.empty(box.shape, dtype)
