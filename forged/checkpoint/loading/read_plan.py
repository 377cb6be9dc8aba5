"""The read plan: which chunks of which files are read for the wanted tensors and boxes.

Invariants:
- A chunk is read as a whole, because only a whole chunk can be verified.
- A chunk is read only if a target needs part of it, or if it lies in a small gap between two such chunks.
- Each wanted element comes from exactly one chunk, however many copies there are.
- Elements that no part contains are an error before anything is read.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from forged.checkpoint.errors import CheckpointException, ExceptionType, invalid
from forged.checkpoint.format.boxes import (
    Box,
    Grid,
    chunks_within,
    intersection,
    offset_in,
    subtract,
    whole,
)
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.loading.manifest_index import Columns, Index, Integers, PartLayout, PieceId, rows_of

READ_BYTES_MAX = 8 << 20
"""Largest single read, unless one chunk is larger."""
SMALL_BYTES_MAX = 1 << 16
"""Smaller runs are copied to their targets when they are verified."""

FRAGMENTS_MAX = 1 << 12
"""Limit for the boxes that the still missing rest of one target may fall into."""


Booleans = np.ndarray[Any, np.dtype[np.bool_]]


class Span(NamedTuple):
    """Consecutive chunks of a part that one target needs, each at least in part."""

    first: int
    end: int
    """The number after the last chunk."""
    target: int
    """The position of the tensor in the list of wanted tensors."""
    at: int
    """The byte offset in the target where the chunks go contiguously; -1 if they are copied box by box."""
    box: Box | None = None
    """With at = -1: the box that the chunks cover together."""
    shared: Box | None = None
    """With at = -1: the part of that box that the target needs."""


class ChunkBatch(NamedTuple):
    """Small chunks close together in one file, each of them a whole target, read in one go."""

    chunks: list[int]
    targets: list[int]


class ReadPlan(NamedTuple):
    """What to read, by part number."""

    spans: dict[int, list[Span]]
    batches: dict[int, list[ChunkBatch]]
    bytes_needed: int
    """Bytes of the targets; the plan reads at least as many."""


def plan(
    index: Index,
    wanted: Sequence[int],
    boxes: Mapping[int, Box],
    *,
    strided: Collection[int] = (),
    only_piece: PieceId | None = None,
    rank: int = 0,
    gap_bytes_max: int = 0,
) -> ReadPlan:
    """Plan the reads for some tensors.

    `wanted` are tensor numbers; a target is a position in it. `boxes` gives, by target, the part that is wanted of a
    tensor. The arrays of `strided` targets are not contiguous, so chunks are copied into them. `only_piece` restricts
    the
    plan to one piece. Of several copies, readers with different `rank` choose different ones. Small chunks are read
    together if at most `gap_bytes_max` unwanted bytes lie between them.
    """
    return _Planning(index, boxes, frozenset(strided), only_piece, rank, gap_bytes_max).plan(wanted)


class _Planning:
    def __init__(
        self,
        index: Index,
        boxes: Mapping[int, Box],
        strided: frozenset[int],
        only_piece: PieceId | None,
        rank: int,
        gap_bytes_max: int,
    ) -> None:
        self._index = index
        self._tensors = index.manifest.tensors
        self._boxes = boxes
        self._strided = strided
        self._only_piece = only_piece
        self._rank = rank
        self._gap_bytes_max = gap_bytes_max
        self._spans: dict[int, list[Span]] = {}
        self._batches: dict[int, list[ChunkBatch]] = {}

    def plan(self, wanted: Sequence[int]) -> ReadPlan:
        """The plan, in file order."""
        numbers = np.array(wanted, np.int64)
        is_whole, rows = self._whole_targets(numbers)
        is_planned = is_whole | self._plan_row_pieces(numbers, is_whole)
        for target in np.flatnonzero(~is_planned).tolist():
            self._plan_target(target, wanted[target])
        piece_table = self._index.piece_table
        whole_targets = np.flatnonzero(is_whole)
        parts = piece_table.parts[rows[whole_targets]]
        for number, its in _by_part(parts):
            targets = whole_targets[its]
            self._plan_whole_pieces(self._index.layout(number), targets, piece_table.pieces[rows[targets]])
        for spans in self._spans.values():
            spans.sort()
        return ReadPlan(self._spans, self._batches, self._bytes_needed(wanted))

    def _whole_targets(self, numbers: Integers) -> tuple[Booleans, Integers]:
        """Which targets are whole tensors with only whole pieces; and, for these, the row of one piece."""
        piece_table = self._index.piece_table
        firsts = piece_table.firsts[numbers]
        counts = piece_table.firsts[numbers + 1] - firsts
        is_whole = (counts > 0) & ~piece_table.is_partial[numbers] & (self._only_piece is None)
        is_whole[[*self._boxes, *self._strided]] = False
        rows = np.zeros(numbers.size, np.int64)
        rows[is_whole] = piece_table.order[firsts[is_whole] + self._rank % counts[is_whole]]
        return is_whole, rows

    def _plan_whole_pieces(self, layout: PartLayout, targets: Integers, pieces: Integers) -> None:
        """Plan whole pieces, each for one target."""
        columns = layout.columns
        first, end = columns.first_chunks[pieces], columns.chunk_ends[pieces]
        is_small = (end - first == 1) & (columns.memory_offsets[end] - columns.memory_offsets[first] < SMALL_BYTES_MAX)
        large = targets[~is_small]
        self._add_pieces(layout, pieces[~is_small], large, np.zeros_like(large))
        if is_small.any():
            small, chunks_of_small = targets[is_small], first[is_small]
            order = np.argsort(chunks_of_small, kind="stable")
            self._batches[layout.number] = list(
                _batched(columns, chunks_of_small[order], small[order], self._gap_bytes_max)
            )

    def _plan_piece(self, target: int, layout: PartLayout, piece: int) -> None:
        """Plan a whole piece for a target of the same box."""
        self._add_run(layout, layout.first_chunks[piece], layout.chunk_ends[piece], target, 0)

    def _plan_target(self, target: int, tensor: int) -> None:
        """Plan one target from the pieces that cover it."""
        shape = self._tensors.shapes[tensor]
        wanted = self._boxes[target] if target in self._boxes else whole(shape)
        pieces_with_box = self._index.pieces_with_box(tensor, wanted)
        if pieces_with_box and target not in self._strided and self._only_piece is None:
            number, piece = pieces_with_box[self._rank % len(pieces_with_box)]
            self._plan_piece(target, self._index.layout(number), piece)
            return
        missing = [wanted] if wanted.volume else []
        for piece_id, box in self._distinct_pieces(tensor):
            if not missing:
                return
            left: list[Box] = []
            for one in missing:
                shared = intersection(one, box)
                if shared is None:
                    left.append(one)
                else:
                    self._plan_overlap(target, wanted, piece_id, box, shared)
                    left.extend(subtract(one, shared))
            missing = left
            if len(missing) > FRAGMENTS_MAX:
                raise invalid(
                    f"the saved parts of {self._tensors.names[tensor]} leave more than {FRAGMENTS_MAX} scattered boxes",
                    "load smaller boxes of it",
                    code="checkpoint_parts_scattered",
                )
        if missing:
            raise self._missing(tensor, missing[0])

    def _plan_row_pieces(self, numbers: Integers, is_whole: Booleans) -> Booleans:
        """Plan rows of tensors whose pieces are whole rows that follow each other; returns which targets these are.

        Tensors of incremental checkpoints have many such pieces.
        """
        is_planned = np.zeros(numbers.size, np.bool_)
        low, high = self._wanted_rows(numbers, is_whole)
        targets = np.flatnonzero(high >= 0)
        if not targets.size:
            return is_planned
        found = self._pieces_by_row(targets, numbers)
        is_planned[found.targets] = True
        is_planned[found.targets[self._breaks(found, targets, numbers)]] = False
        low, high = low[found.targets], high[found.targets]
        is_needed = is_planned[found.targets] & (found.starts < high) & (found.ends > low)
        is_inside = (low <= found.starts) & (found.ends <= high)
        inside = np.flatnonzero(is_needed & is_inside)
        for number, its in _by_part(found.parts[inside]):
            its = inside[its]
            ats = (found.starts[its] - low[its]) * found.row_bytes[its]
            self._add_pieces(self._index.layout(number), found.pieces[its], found.targets[its], ats)
        edges = np.flatnonzero(is_needed & ~is_inside)
        for target, number, piece in zip(*(column[edges].tolist() for column in found[:3]), strict=True):
            self._plan_edge(target, number, piece)
        return is_planned

    def _wanted_rows(self, numbers: Integers, is_whole: Booleans) -> Integers:
        """By target, the first row that it needs and the number after the last; -1 if it needs parts of rows."""
        rows = np.full((2, numbers.size), -1, np.int64)
        for target in np.flatnonzero(~is_whole & (self._only_piece is None)).tolist():
            shape = self._tensors.shapes[numbers[target]]
            box = self._boxes[target] if target in self._boxes else whole(shape)
            if shape and box.shape[1:] == shape[1:] and target not in self._strided:
                rows[:, target] = box.offset[0], box.offset[0] + box.shape[0]
        return rows

    def _breaks(self, found: _TargetPieces, targets: Integers, numbers: Integers) -> Booleans:
        """Which pieces are no whole rows, or do not follow the one before, or are the last before missing rows."""
        heights, widths = np.zeros((2, numbers.size), np.int64)
        for target in targets.tolist():
            tensor = numbers[target]
            shape, itemsize = self._tensors.shapes[tensor], dtype_of(self._tensors.dtypes[tensor]).itemsize
            _, heights[target], widths[target] = rows_of(*whole(shape), itemsize)
        is_first = np.diff(found.targets, prepend=-1) > 0
        is_last = np.roll(is_first, -1)
        is_break: Booleans = found.starts != np.where(is_first, 0, np.roll(found.ends, 1))
        is_break |= is_last & (found.ends != heights[found.targets])
        is_break |= found.row_bytes != widths[found.targets]
        return is_break

    def _plan_edge(self, target: int, number: int, piece: int) -> None:
        """Plan a piece of which a target needs some rows."""
        box, wanted = self._index.layout(number).piece_box(piece), self._boxes[target]
        shared = intersection(wanted, box)
        if shared is not None:
            self._plan_overlap(target, wanted, (number, piece), box, shared)

    def _pieces_by_row(self, targets: Integers, numbers: Integers) -> _TargetPieces:
        """The pieces of some targets' tensors, sorted by target and row."""
        piece_table = self._index.piece_table
        firsts = piece_table.firsts[numbers[targets]]
        counts = piece_table.firsts[numbers[targets] + 1] - firsts
        before = np.cumsum(counts) - counts
        table_rows = piece_table.order[np.arange(counts.sum()) + np.repeat(firsts - before, counts)]
        parts, pieces = piece_table.parts[table_rows], piece_table.pieces[table_rows]
        rows = np.zeros((3, parts.size), np.int64)
        for number, its in _by_part(parts):
            rows[:, its] = np.stack(self._index.layout(number).rows)[:, pieces[its]]
        columns = np.stack([np.repeat(targets, counts), parts, pieces, *rows])
        starts, ends, _ = rows
        return _TargetPieces(*columns[:, np.lexsort((ends, starts, columns[0]))])

    def _distinct_pieces(self, tensor: int) -> Iterator[tuple[PieceId, Box]]:
        """One piece for each distinct box of a tensor."""
        if self._only_piece is not None:
            yield self._only_piece, self._index.layout(self._only_piece[0]).piece_box(self._only_piece[1])
            return
        alike: dict[Box, list[PieceId]] = {}
        for number, piece in self._index.pieces_of(tensor):
            alike.setdefault(self._index.layout(number).piece_box(piece), []).append((number, piece))
        for box in sorted(alike):
            pieces_of = alike[box]
            yield pieces_of[self._rank % len(pieces_of)], box

    def _plan_overlap(self, target: int, wanted: Box, piece_id: PieceId, box: Box, shared: Box) -> None:
        """Plan what one piece contributes to a target."""
        number, piece = piece_id
        if shared == box == wanted and target not in self._strided:
            self._plan_piece(target, self._index.layout(number), piece)
            return
        layout = self._index.layout(number)
        at = offset_in(wanted, box) if shared == box and target not in self._strided else None
        if at is not None:
            itemsize = dtype_of(self._tensors.dtypes[layout.part.tensors[piece]]).itemsize
            self._add_run(layout, layout.first_chunks[piece], layout.chunk_ends[piece], target, at * itemsize)
            return
        grid = layout.grid(piece)
        if grid.axis == 0 and box.shape:
            self._plan_rows(layout, piece, grid.step, _Overlap(target, wanted, box, shared))
        else:
            self._plan_chunks(layout, piece, grid, _Overlap(target, wanted, box, shared))

    def _plan_rows(self, layout: PartLayout, piece: int, step: int, overlap: _Overlap) -> None:
        """Plan chunks that are whole rows of the piece."""
        rows = _Rows(step, overlap.box.offset[0], overlap.box.offset[0] + overlap.box.shape[0])
        start, stop = overlap.shared.offset[0], overlap.shared.offset[0] + overlap.shared.shape[0]
        first, end = start // step, (stop - 1) // step + 1
        inner, inner_end = first, first
        if _has_whole_rows(overlap) and overlap.target not in self._strided:
            # The first and last chunk may contain unwanted rows; the chunks between go into the target directly.
            inner = first if rows.start(first) >= start else first + 1
            inner_end = end if rows.start(end) <= stop else end - 1
        zero = layout.first_chunks[piece] - rows.low // step
        if inner < inner_end:
            first_of_all = layout.memory_offsets[zero + inner]
            row = (layout.memory_offsets[zero + inner + 1] - first_of_all) // (
                rows.start(inner + 1) - rows.start(inner)
            )
            at = (rows.start(inner) - overlap.wanted.offset[0]) * row
            self._add_run(layout, zero + inner, zero + inner_end, overlap.target, at)
        else:
            inner = inner_end = first
        for one, other in ((first, inner), (inner_end, end)):
            for low, high in blocks_of(layout.memory_offsets, zero + one, zero + other):
                begin, finish = rows.start(low - zero), rows.start(high - zero)
                box = Box((begin, *overlap.box.offset[1:]), (finish - begin, *overlap.box.shape[1:]))
                self._add_partial(layout, low, high, overlap, box)

    def _plan_chunks(self, layout: PartLayout, piece: int, grid: Grid, overlap: _Overlap) -> None:
        """Plan chunks that are parts of rows, or the whole piece."""
        itemsize = dtype_of(self._tensors.dtypes[layout.part.tensors[piece]]).itemsize
        for before, chunk_box in chunks_within(overlap.box, grid, overlap.shared):
            chunk = layout.first_chunks[piece] + before
            at = offset_in(overlap.wanted, chunk_box) if overlap.shared.covers(chunk_box) else None
            if at is None or overlap.target in self._strided:
                self._add_partial(layout, chunk, chunk + 1, overlap, chunk_box)
            else:
                self._add(layout.number, Span(chunk, chunk + 1, overlap.target, at * itemsize))

    def _add_pieces(self, layout: PartLayout, pieces: Integers, targets: Integers, ats: Integers) -> None:
        """Add pieces that stay contiguous in their targets, in blocks."""
        columns = layout.columns
        first, end = columns.first_chunks[pieces], columns.chunk_ends[pieces]
        is_block = (first < end) & (columns.memory_offsets[end] - columns.memory_offsets[first] <= READ_BYTES_MAX)
        runs = np.stack([first, end, targets, ats])
        if is_block.any():
            self._spans.setdefault(layout.number, []).extend(map(Span, *runs[:, is_block].tolist()))
        for run in runs[:, ~is_block].T.tolist():
            self._add_run(layout, *run)

    def _add_run(self, layout: PartLayout, first: int, end: int, target: int, at: int) -> None:
        """Add consecutive chunks that stay contiguous in the target, in blocks."""
        origin = layout.memory_offsets[first]
        for low, high in blocks_of(layout.memory_offsets, first, end):
            self._add(layout.number, Span(low, high, target, at + layout.memory_offsets[low] - origin))

    def _add_partial(self, layout: PartLayout, first: int, end: int, overlap: _Overlap, box: Box) -> None:
        shared = intersection(box, overlap.shared)
        if shared is not None:
            self._add(layout.number, Span(first, end, overlap.target, -1, box, shared))

    def _add(self, number: int, span: Span) -> None:
        self._spans.setdefault(number, []).append(span)

    def _bytes_needed(self, wanted: Sequence[int]) -> int:
        shapes, dtypes = self._tensors.shapes, self._tensors.dtypes
        kinds = [(shapes[tensor], dtypes[tensor]) for tensor in wanted]
        sizes = {kind: math.prod(kind[0]) * dtype_of(kind[1]).itemsize for kind in set(kinds)}
        bytes_needed = sum(map(sizes.__getitem__, kinds))
        for target, box in self._boxes.items():
            bytes_needed += box.volume * dtype_of(kinds[target][1]).itemsize - sizes[kinds[target]]
        return bytes_needed

    def _missing(self, tensor: int, box: Box) -> CheckpointException:
        return CheckpointException(
            f"checkpoint {self._index.manifest.prefix} lacks {self._tensors.names[tensor]} from {box.offset} on "
            f"with shape {box.shape}",
            self._index.manifest.prefix,
            ExceptionType.CORRUPTED_CHECKPOINT,
            code="checkpoint_incomplete",
            fix="use another checkpoint",
        )


class _TargetPieces(NamedTuple):
    """Pieces and the targets that need them, by column."""

    targets: Integers
    parts: Integers
    pieces: Integers
    starts: Integers
    ends: Integers
    row_bytes: Integers


class _Overlap(NamedTuple):
    """A target, and what one piece contributes to it."""

    target: int
    wanted: Box
    box: Box
    """The box of the piece."""
    shared: Box


class _Rows(NamedTuple):
    """How the grid cuts rows into chunks: after every `step`-th row of the whole array."""

    step: int
    low: int
    high: int

    def start(self, cell: int) -> int:
        """The first row of a chunk."""
        return min(max(self.low, cell * self.step), self.high)


def _by_part(parts: Integers) -> Iterator[tuple[int, Integers]]:
    """Of a column of part numbers, each number and its places."""
    order = np.argsort(parts, kind="stable")
    numbers, firsts = np.unique(parts[order], return_index=True)
    yield from zip(numbers.tolist(), np.split(order, firsts[1:]), strict=False)


def _has_whole_rows(overlap: _Overlap) -> bool:
    """Whether the piece's rows are whole rows of the wanted box."""
    wanted, box, shared = overlap.wanted, overlap.box, overlap.shared
    return (
        wanted.shape[1:] == box.shape[1:] == shared.shape[1:]
        and wanted.offset[1:] == box.offset[1:] == shared.offset[1:]
    )


def _batched(columns: Columns, chunks_of_them: Integers, targets: Integers, gap_bytes_max: int) -> Iterator[ChunkBatch]:
    """Group small chunks, given in file order, into batches of close neighbours."""
    low, high = columns.memory_offsets[chunks_of_them], columns.memory_offsets[chunks_of_them + 1]
    gaps = columns.file_offsets[chunks_of_them[1:]] - columns.file_offsets[chunks_of_them[:-1] + 1]
    for start, stop in _reads_of(low, high, gaps > gap_bytes_max):
        yield ChunkBatch(chunks_of_them[start:stop].tolist(), targets[start:stop].tolist())


def spans_of_reads(layout: PartLayout, spans: list[Span], gap_bytes_max: int) -> Iterator[list[Span]]:
    """Group the spans of a part, in file order, into those that are read together.

    At most `gap_bytes_max` unwanted bytes lie between two of them. The chunks of a direct span are in no other span of
    its group, because they are read to one place.
    """
    if not spans:
        return
    memory_offsets, file_offsets = layout.columns.memory_offsets, layout.columns.file_offsets
    first: Integers = np.array([span.first for span in spans], np.int64)
    end: Integers = np.array([span.end for span in spans], np.int64)
    is_placed = np.array([span.at >= 0 for span in spans], np.bool_)
    is_direct = is_placed & (memory_offsets[end] - memory_offsets[first] >= SMALL_BYTES_MAX)
    ends = np.maximum.accumulate(end)
    ends_of_direct = np.maximum.accumulate(np.where(is_direct, end, 0))
    is_shared = first[1:] < np.where(is_direct[1:], ends[:-1], ends_of_direct[:-1])
    gaps = file_offsets[first[1:]] - file_offsets[ends[:-1]]
    for start, stop in _reads_of(memory_offsets[first], memory_offsets[ends], is_shared | (gaps > gap_bytes_max)):
        yield spans[start:stop]


def is_read_directly(layout: PartLayout, span: Span) -> bool:
    """Whether the chunks of a span are read into the target's array, and not copied there."""
    return span.at >= 0 and layout.memory_offsets[span.end] - layout.memory_offsets[span.first] >= SMALL_BYTES_MAX


def _reads_of(low: Integers, high: Integers, breaks: Booleans) -> Iterator[tuple[int, int]]:
    """Group neighbours from `low` to `high` into reads of at most `READ_BYTES_MAX`, each of at least one of them.

    `breaks`: by neighbour but the first, whether a new read begins there.
    """
    lows, highs, start = low.tolist(), high.tolist(), 0
    for end in [*(np.flatnonzero(breaks) + 1).tolist(), low.size]:
        while start < end:
            stop = bisect_right(highs, lows[start] + READ_BYTES_MAX, start + 1, end)
            yield start, stop
            start = stop


def blocks_of(memory_offsets: Sequence[int], first: int, end: int) -> Iterator[tuple[int, int]]:
    """Group consecutive chunks into blocks of at most `READ_BYTES_MAX`, each of at least one chunk."""
    while first < end:
        stop = min(
            end,
            max(first + 1, bisect_right(memory_offsets, memory_offsets[first] + READ_BYTES_MAX, first, end + 1) - 1),
        )
        yield first, stop
        first = stop
