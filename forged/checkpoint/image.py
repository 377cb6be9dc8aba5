"""A part of a checkpoint as the file that it will be, before it is one.

Law: bytes are taken from the arrays themselves, block by block, by several threads, and copied once. Every chunk is
hashed by whoever takes the block that it begins in, from the same memory and at the same time. The arrays must not
change meanwhile.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import xxhash

from forged.checkpoint.boxes import CHUNK_BYTES_MIN, Box, Grid, Shape, chunk_lengths, chunks, grid_of, intersection
from forged.checkpoint.dtypes import dtype_of
from forged.checkpoint.manifest import DIGEST_BYTES, Tensors
from forged.checkpoint.plan import Share
from forged.checkpoint.ports import BLOCK_BYTES
from forged.checkpoint.safetensors import Entry, header_of

SMALL_BYTES = 1 << 15
"""So small arrays are joined, several at a time."""

EMPTY_DIGEST = xxhash.xxh3_128_digest(b"")

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the pieces of a part and their chunks lie; the same for every save of arrays of the same shapes."""

    header: bytes
    boxes: list[Box]
    grids: dict[int, Grid]
    """Of the pieces that have several chunks."""
    itemsizes: list[int]
    starts: list[int]
    """Where each piece begins in the file, and where the last one ends."""
    first_chunks: list[int]
    """The number of the first chunk of each piece, and that of all chunks."""
    lengths: dict[int, list[int]]
    """Of the pieces that have several chunks, how long each is."""

    @property
    def size(self) -> int:
        """How large the file is."""
        return self.starts[-1]

    @property
    def chunks(self) -> int:
        """How many there are."""
        return self.first_chunks[-1]

    def lengths_of(self, place: int) -> list[int]:
        """How long each chunk of a piece is."""
        size = self.starts[place + 1] - self.starts[place]
        count = self.first_chunks[place + 1] - self.first_chunks[place]
        return self.lengths.get(place, [size] * count)


def lay_out(tensors: Tensors, share: Share, metadata: dict[str, str], names: Sequence[str] | None = None) -> Layout:
    """How a share lies in its file; `names` is what its pieces are called there, if not as in the manifest."""
    entries, boxes, itemsizes, sizes, counts = [], [], [], [], []
    grids: dict[int, Grid] = {}
    lengths: dict[int, list[int]] = {}
    for place, number in enumerate(share.tensors):
        shape, dtype = tuple(tensors.shapes[number]), tensors.dtypes[number]
        itemsize = dtype_of(dtype).itemsize
        box = share.box(place, shape)
        volume = math.prod(box.shape)
        size = volume * itemsize
        if math.prod(shape) * itemsize > CHUNK_BYTES_MIN:
            grids[place] = grid_of(shape, itemsize)
            lengths[place] = chunk_lengths(box, grids[place], itemsize)
        boxes.append(box)
        itemsizes.append(itemsize)
        sizes.append(size)
        counts.append(len(lengths[place]) if place in lengths else int(volume > 0))
        name = names[place] if names else _entry_name(tensors, number, box, shape)
        entries.append(Entry(name, dtype, box.shape, size))
    header = header_of(entries, metadata)
    starts = list(accumulate(sizes, initial=len(header)))
    return Layout(header, boxes, grids, itemsizes, starts, list(accumulate(counts, initial=0)), lengths)


def _entry_name(tensors: Tensors, number: int, box: Box, shape: Shape) -> str:
    """What a piece is called to other tools."""
    name = tensors.names[number]
    if number in tensors.ranks:
        name = f"{name}@{tensors.ranks[number]}"
    if box.shape == shape:
        return name
    ends = ",".join(f"{start}:{start + size}" for start, size in zip(box.offset, box.shape, strict=True))
    return f"{name}[{ends}]"


class Imaged(Protocol):
    """Whatever gives the bytes of a part."""

    layout: Layout
    digests: bytearray
    """Of all chunks whose blocks were asked for."""

    @property
    def size(self) -> int:
        """How large the file is."""
        ...

    def chunk(self, place: int, offset: int, length: int) -> Bytes:
        """A chunk of a piece, from its offset there."""
        ...


class Image:
    """A part over the arrays of the caller; a `ports.Source`."""

    def __init__(self, layout: Layout, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """`arrays` are those of the pieces, in order."""
        self.layout = layout
        self.digests = bytearray(DIGEST_BYTES * layout.chunks)
        self.arrays = list(arrays)
        self._pieces = [_bytes_of(array, place, layout) for place, array in enumerate(arrays)]
        if 0 in layout.itemsizes:
            self._hash_empty()

    @property
    def size(self) -> int:
        return self.layout.size

    def block(self, offset: int, room: memoryview) -> memoryview:
        """Copy a block, and hash the chunks that begin in it."""
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
            start, stop = layout.starts[place], min(end, layout.starts[place + 1])
            self._pieces[place].copy(at - start, into[at - offset : stop - offset])
            at, place = stop, place + 1
        self._hash(offset, end)
        return room[: end - offset]

    def chunk(self, place: int, offset: int, length: int) -> Bytes:
        """Some bytes of a piece, in one run."""
        return self._pieces[place].run(offset, length)

    def _copy_small(self, place: int, at: int, end: int, offset: int, into: Bytes) -> tuple[int, int]:
        """Copy a row of small arrays; returns where the next begins, and which it is."""
        starts, first = self.layout.starts, place
        while place < len(self._pieces) and starts[place] < end and starts[place + 1] - starts[place] <= SMALL_BYTES:
            place += 1
        arrays: list[Any] = [piece.all() for piece in self._pieces[first:place]]
        row = b"".join(arrays)
        stop = min(end, starts[place])
        into[at - offset : stop - offset] = np.frombuffer(row, np.uint8)[at - starts[first] : stop - starts[first]]
        return stop, place

    def _hash(self, offset: int, end: int) -> None:
        """Hash the chunks that begin between these."""
        layout, digests = self.layout, self.digests
        starts, first_chunks = layout.starts, layout.first_chunks
        digest: Callable[[Any], bytes] = xxhash.xxh3_128_digest
        place = max(0, bisect_right(starts, offset) - 1)
        while place < len(self._pieces) and starts[place] < end:
            number, piece = first_chunks[place], self._pieces[place]
            if place not in layout.lengths:
                if starts[place] >= offset and first_chunks[place + 1] > number:
                    digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES] = digest(piece.all())
            else:
                at = starts[place]
                for length in layout.lengths[place]:
                    if offset <= at < end:
                        found = digest(piece.run(at - starts[place], length))
                        digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES] = found
                    at, number = at + length, number + 1
            place += 1

    def _hash_empty(self) -> None:
        """Hash the chunks without a byte, such as those of strings of no length; they are in no block."""
        for place, itemsize in enumerate(self.layout.itemsizes):
            if not itemsize:
                first, behind = self.layout.first_chunks[place : place + 2]
                self.digests[first * DIGEST_BYTES : behind * DIGEST_BYTES] = EMPTY_DIGEST * (behind - first)


class _Contiguous:
    """An array whose bytes lie in their order."""

    __slots__ = ("_flat",)

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._flat: Bytes = array.reshape(-1).view(np.uint8)

    def all(self) -> Bytes:
        """All bytes."""
        return self._flat

    def run(self, offset: int, length: int) -> Bytes:
        """Some of them."""
        return self._flat[offset : offset + length]

    def copy(self, offset: int, into: Bytes) -> None:
        """Put some of them somewhere."""
        np.copyto(into, self._flat[offset : offset + into.size])


class _Strided:
    """An array whose elements lie apart; brought together chunk by chunk."""

    __slots__ = ("_array", "_chunks", "_starts")

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
    """Where the blocks of so many bytes begin."""
    return range(0, size, BLOCK_BYTES)


def cut_out(array: np.ndarray[Any, Any], held: Box, wanted: Box) -> np.ndarray[Any, Any]:
    """The part of a rank's array that it writes."""
    if held == wanted:
        return array
    assert intersection(held, wanted) == wanted
    return array[wanted.within(held)]
