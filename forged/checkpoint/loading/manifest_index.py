"""Lookups over a manifest for readers: the pieces of each tensor, and where the chunks of each part lie."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET

from forged.checkpoint.errors import corrupted
from forged.checkpoint.format.boxes import Box, Grid, Shape, chunk_lengths, chunks, grid_of, whole
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import DIGEST_BYTES, Manifest, Part, digests_of

PieceId = tuple[int, int]
"""A piece: the number of its part and its position there."""


BoxText = tuple[tuple[int, ...], tuple[int, ...]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
Column = np.ndarray[Any, np.dtype[Any]]


class Columns(NamedTuple):
    """The layout of a part as arrays, for vectorized planning."""

    first_chunks: Integers
    chunk_ends: Integers
    """By piece, the number after its last chunk."""
    memory_offsets: Integers
    file_offsets: Integers


class PieceRows(NamedTuple):
    """By piece, the rows of its tensor that it covers, at least in part."""

    starts: Integers
    ends: Integers
    """The number after the last row."""
    row_bytes: Integers
    """What the piece has of each row."""


class PartLayout:
    """Where the chunks of one part lie, by column.

    In a file of an earlier checkpoint, the unused bytes before a piece count as one more chunk, which is in no piece.
    """

    def __init__(self, manifest: Manifest, number: int) -> None:
        part = manifest.parts[number]
        self.number = number
        self.part: Part = part
        self.digests = digests_of(part)
        self._tensors = manifest.tensors
        kinds, kind_of = manifest.tensor_kinds
        used, self._kind_of = np.unique(
            np.fromiter(map(kind_of.__getitem__, part.tensors), np.int64), return_inverse=True
        )
        self._kinds = [kinds[number] for number in used.tolist()]
        """The shapes and types of its tensors; by piece, `_kind_of` has the number of its own."""
        lengths, counts = self._partial_lengths() if part.box_of else self._whole_lengths()
        stored = lengths if part.stored is None else np.array(part.stored, np.int64)
        if np.any(np.abs(stored) > lengths):
            raise corrupted(
                f"chunks of {part.file} are larger in the file than in memory",
                part.file,
                "use another checkpoint",
                code="checkpoint_manifest_malformed",
            )
        edges = _offsets(counts)
        firsts, ends = edges[:-1], edges[1:]
        if part.offsets is not UNSET:
            gaps = _gaps(part, part.offsets, _offsets(np.abs(stored))[edges])
            before, sizes = firsts[gaps > 0], gaps[gaps > 0]
            places = before + np.arange(before.size)
            lengths = _inserted(lengths, places, sizes if part.stored is None else 0)
            stored = _inserted(stored, places, -sizes)
            digests = np.frombuffer(self.digests, f"V{DIGEST_BYTES}")
            self.digests = _inserted(digests, places, bytes(DIGEST_BYTES)).tobytes()
            shift = np.cumsum(gaps > 0)
            firsts, ends = firsts + shift, ends + shift
        self._stored: list[int] = [] if part.stored is None else stored.tolist()
        first_chunks = np.append(firsts, lengths.size)
        self.columns = Columns(first_chunks, ends, _offsets(lengths), _offsets(np.abs(stored)) + part.data_offset)
        self.first_chunks: list[int] = first_chunks.tolist()
        """The number of the first chunk of each piece; last, the number of all chunks."""
        self.chunk_ends: list[int] = ends.tolist()
        """The number after the last chunk of each piece."""
        self.memory_offsets: list[int] = self.columns.memory_offsets.tolist()
        """Where each chunk would begin if none were compressed, and where the last one would end."""
        self.file_offsets: list[int] = self.columns.file_offsets.tolist()
        """Where each chunk begins in the file, and where the last one ends."""

    def _whole_lengths(self) -> tuple[Integers, Integers]:
        """The lengths of all chunks, and the number of chunks of each piece, if all pieces are whole tensors."""
        kinds, of_pieces = self._kinds, self._kind_of
        wholes = [_lengths_of(whole(kind[0]), *kind) for kind in kinds]
        found = list(map(wholes.__getitem__, of_pieces.tolist()))
        lengths = np.fromiter(chain.from_iterable(found), np.int64)
        return lengths, np.fromiter(map(len, found), np.int64, len(found))

    def _partial_lengths(self) -> tuple[Integers, Integers]:
        """The same, if some pieces are parts of tensors."""
        kinds, of_pieces = self._kinds, self._kind_of
        steps: Integers = np.array([_rows_per_chunk(*kind) for kind in kinds], np.int64)[of_pieces]
        starts, ends, row_bytes = self.rows
        by_rows = (steps > 0) & (starts < ends) & (row_bytes > 0)
        steps[steps == 0] = 1
        counts = np.where(by_rows, (ends - 1) // steps - starts // steps + 1, 0)
        others = {
            piece: _lengths_of(self.piece_box(piece), *kinds[of_pieces[piece]])
            for piece in np.flatnonzero(~by_rows).tolist()
        }
        for piece, lengths_of_piece in others.items():
            counts[piece] = len(lengths_of_piece)
        edges = _offsets(counts)
        lengths = np.repeat(steps * row_bytes, counts)
        lengths[edges[:-1][by_rows]] -= (starts % steps * row_bytes)[by_rows]
        lengths[edges[1:][by_rows] - 1] -= (-ends % steps * row_bytes)[by_rows]
        for piece, lengths_of_piece in others.items():
            lengths[edges[piece] : edges[piece + 1]] = lengths_of_piece
        return lengths, counts

    @cached_property
    def rows(self) -> PieceRows:
        """The rows of each piece. A tensor without axes is a row."""
        kinds, of_pieces = self._kinds, self._kind_of
        itemsizes = [dtype_of(name).itemsize for _, name in kinds]
        wholes = [rows_of(*whole(shape), size) for (shape, _), size in zip(kinds, itemsizes, strict=True)]
        found: Integers = np.array(wholes, np.int64).reshape(-1, 3)[of_pieces]
        if self.part.box_of:
            numbers = np.array(self.part.box_of, np.int64)
            is_partial = numbers >= 0
            boxes: Integers = np.array([rows_of(*box, 1) for box in self.part.boxes], np.int64).reshape(-1, 3)
            found[is_partial] = boxes[numbers[is_partial]]
            found[is_partial, 2] *= np.array(itemsizes, np.int64)[of_pieces[is_partial]]
        return PieceRows(*found.T)

    def runs(self) -> Iterator[tuple[int, int]]:
        """The runs of chunks without unused bytes between them: the first, and the number after the last."""
        first, end = 0, 0
        for start, stop in zip(self.first_chunks, self.chunk_ends, strict=False):
            if start > end:
                if first < end:
                    yield first, end
                first = start
            end = stop
        if first < end:
            yield first, end

    def chunks_of(self, piece: int) -> range:
        """The numbers of a piece's chunks."""
        return range(self.first_chunks[piece], self.chunk_ends[piece])

    def digest(self, chunk: int) -> bytes:
        """The expected hash of a chunk."""
        return self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]

    def digests_of(self, first: int, end: int) -> bytes:
        """The expected hashes of consecutive chunks, concatenated."""
        return self.digests[first * DIGEST_BYTES : end * DIGEST_BYTES]

    def itemsize(self, chunk: int) -> int:
        """Bytes per element of the chunk's tensor."""
        return dtype_of(self._tensors.dtypes[self.tensor_of(chunk)]).itemsize

    def is_compressed(self, chunk: int) -> bool:
        return bool(self._stored) and self._stored[chunk] > 0

    def stored_of(self, first: int, end: int) -> list[int]:
        """By chunk, its bytes in the file, as in the manifest; empty for an uncompressed part."""
        return self._stored[first:end]

    def piece_of(self, chunk: int) -> int:
        """The position of the piece that contains a chunk."""
        return bisect_right(self.first_chunks, chunk) - 1

    def tensor_of(self, chunk: int) -> int:
        """The number of the tensor that a chunk belongs to."""
        return self.part.tensors[self.piece_of(chunk)]

    def piece_box(self, piece: int) -> Box:
        """The box of its tensor that a piece covers."""
        box = self.part.partial_boxes.get(piece)
        return whole(self._tensors.shapes[self.part.tensors[piece]]) if box is None else box

    def chunk_box(self, chunk: int) -> Box:
        """The box of its tensor that a chunk covers."""
        piece = self.piece_of(chunk)
        before = chunk - self.first_chunks[piece]
        for number, box in enumerate(chunks(self.piece_box(piece), self.grid(piece))):
            if number == before:
                return box
        raise IndexError(chunk)

    def grid(self, piece: int) -> Grid:
        """The chunk grid of a piece's tensor."""
        tensor = self.part.tensors[piece]
        return grid_of(self._tensors.shapes[tensor], dtype_of(self._tensors.dtypes[tensor]).itemsize)


class PieceTable(NamedTuple):
    """The pieces of all parts as columns, and which of them hold which tensor."""

    parts: Integers
    pieces: Integers
    order: Integers
    """The rows sorted by tensor."""
    firsts: Integers
    """By tensor, where its rows begin in `order`; last, where they end."""
    is_partial: np.ndarray[Any, np.dtype[np.bool_]]
    """By tensor, whether some piece covers only a part of it."""


class Index:
    """Lookups over a manifest for readers: the pieces of each tensor and the layouts of the parts."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._layouts: dict[int, PartLayout] = {}
        self._places: dict[int, dict[tuple[int, Box], list[int]]] = {}

    @cached_property
    def piece_table(self) -> PieceTable:
        parts = self.manifest.parts
        tensors: Integers = np.concatenate(
            [np.array([], np.int64), *(np.array(one.tensors, np.int64) for one in parts)]
        )
        sizes = [len(part.tensors) for part in parts]
        is_partial = np.zeros(tensors.size, np.bool_)
        for start, part in zip(accumulate(sizes, initial=0), parts, strict=False):
            is_partial[start : start + len(part.box_of)] = np.array(part.box_of) >= 0
        order = np.argsort(tensors, kind="stable")
        count = len(self.manifest.tensors.names)
        return PieceTable(
            np.repeat(np.arange(len(parts)), sizes),
            np.concatenate([np.array([], np.int64), *map(np.arange, sizes)]),
            order,
            np.searchsorted(tensors[order], np.arange(count + 1)),
            np.bincount(tensors[is_partial], minlength=count) > 0,
        )

    def pieces_with_box(self, tensor: int, box: Box) -> list[PieceId]:
        """The pieces that cover exactly this box of a tensor, where that is not the whole tensor."""
        parts = self._parts_with_box.get(box, ())
        return [(number, piece) for number in parts for piece in self._partial_pieces(number).get((tensor, box), ())]

    @cached_property
    def _parts_with_box(self) -> dict[Box, list[int]]:
        """By box, the parts that have this box of some tensor."""
        found: dict[Box, list[int]] = {}
        for number, part in enumerate(self.manifest.parts):
            for box in part.boxes:
                found.setdefault(Box(*box), []).append(number)
        return found

    def _partial_pieces(self, number: int) -> dict[tuple[int, Box], list[int]]:
        """By tensor and box, the partial pieces of a part."""
        if number not in self._places:
            part = self.manifest.parts[number]
            found: dict[tuple[int, Box], list[int]] = {}
            for piece, box in part.partial_boxes.items():
                found.setdefault((part.tensors[piece], box), []).append(piece)
            self._places[number] = found
        return self._places[number]

    def pieces_of(self, tensor: int) -> list[PieceId]:
        """All pieces of a tensor."""
        piece_table = self.piece_table
        rows = piece_table.order[piece_table.firsts[tensor] : piece_table.firsts[tensor + 1]]
        return list(zip(piece_table.parts[rows].tolist(), piece_table.pieces[rows].tolist(), strict=True))

    def layout(self, number: int) -> PartLayout:
        """The layout of a part, computed once."""
        found = self._layouts.get(number)
        if found is None:
            found = self._layouts.setdefault(number, PartLayout(self.manifest, number))
        return found

    def tensor_number(self, name: str, owner: int | None) -> int | None:
        """The number of a tensor; `owner` is its rank if it is a per-rank tensor."""
        return self._numbers.get((name, owner))

    @cached_property
    def _numbers(self) -> dict[tuple[str, int | None], int]:
        tensors = self.manifest.tensors
        return {(name, tensors.ranks.get(number)): number for number, name in enumerate(tensors.names)}


def _offsets(column: Integers) -> Integers:
    """Cumulative offsets: where each begins, and where the last one ends."""
    found = np.zeros(column.size + 1, np.int64)
    np.cumsum(column, out=found[1:])
    return found


def _inserted(column: Column, places: Integers, values: Any) -> Column:
    """The column with values inserted so that they have these places; like `np.insert`, but faster."""
    found: Column = np.empty(column.size + places.size, column.dtype)
    is_new = np.zeros(found.size, np.bool_)
    is_new[places] = True
    found[is_new], found[~is_new] = values, column
    return found


def _gaps(part: Part, offsets: list[int], edges: Integers) -> Integers:
    """By piece, the unused bytes before it; `edges` are the pieces' offsets if they followed each other."""
    sizes = np.diff(edges)
    starts = np.array(offsets, np.int64)
    ends = np.concatenate([np.array([part.data_offset], np.int64), (starts + sizes)[:-1]])
    gaps: Integers = starts - ends[: starts.size]
    return gaps


def rows_of(offset: Shape, shape: Shape, itemsize: int) -> tuple[int, int, int]:
    """The first row of a box, the number after the last one, and the bytes of each."""
    if not shape:
        return 0, 1, itemsize
    return offset[0], offset[0] + shape[0], math.prod(shape[1:]) * itemsize


def _rows_per_chunk(shape: Shape, dtype: str) -> int:
    """The step of a grid that cuts a tensor into rows; 0 for another grid."""
    grid = grid_of(shape, dtype_of(dtype).itemsize)
    return 0 if grid.axis or not shape else grid.step


def _lengths_of(box: Box, shape: Shape, dtype: str) -> list[int]:
    itemsize = dtype_of(dtype).itemsize
    return chunk_lengths(box, grid_of(shape, itemsize), itemsize)
