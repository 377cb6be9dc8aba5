"""Lookups over a manifest for readers: the pieces of each tensor, and where the chunks of each part lie."""

from __future__ import annotations

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


class Columns(NamedTuple):
    """The layout of a part as arrays, for vectorized planning."""

    first_chunks: Integers
    chunk_ends: Integers
    """By piece, the number after its last chunk."""
    memory_offsets: Integers
    file_offsets: Integers


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
        of_pieces = self._lengths(part)
        lengths = np.fromiter(chain.from_iterable(of_pieces), np.int64)
        counts = np.fromiter(map(len, of_pieces), np.int64, len(of_pieces))
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
            lengths = np.insert(lengths, before, sizes if part.stored is None else 0)
            stored = np.insert(stored, before, -sizes)
            digests = np.frombuffer(self.digests, np.uint8).reshape(-1, DIGEST_BYTES)
            self.digests = np.insert(digests, before, 0, axis=0).tobytes()
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

    def _lengths(self, part: Part) -> list[list[int]]:
        """The chunk lengths of each piece."""
        shapes = list(map(self._tensors.shapes.__getitem__, part.tensors))
        dtypes = list(map(self._tensors.dtypes.__getitem__, part.tensors))
        wholes = {kind: _lengths_of(whole(kind[0]), *kind) for kind in set(zip(shapes, dtypes, strict=True))}
        lengths = list(map(wholes.__getitem__, zip(shapes, dtypes, strict=True)))
        parts: dict[tuple[BoxText, Shape, str], list[int]] = {}
        for piece, box in part.partial_boxes.items():
            kind = box, shapes[piece], dtypes[piece]
            if kind not in parts:
                parts[kind] = _lengths_of(*kind)
            lengths[piece] = parts[kind]
        return lengths

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


def _gaps(part: Part, offsets: list[int], edges: Integers) -> Integers:
    """By piece, the unused bytes before it; `edges` are the pieces' offsets if they followed each other."""
    sizes = np.diff(edges)
    starts = np.array(offsets, np.int64)
    ends = np.concatenate([np.array([part.data_offset], np.int64), (starts + sizes)[:-1]])
    gaps: Integers = starts - ends[: starts.size]
    return gaps


def _lengths_of(box: Box, shape: Shape, dtype: str) -> list[int]:
    itemsize = dtype_of(dtype).itemsize
    return chunk_lengths(box, grid_of(shape, itemsize), itemsize)
