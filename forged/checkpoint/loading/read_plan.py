"""What is to be read of a checkpoint for the boxes that somebody wants.

Law: a chunk is read as a whole, since only then can it be verified, and nothing is read of which nobody wants anything.
Every wanted element comes from one chunk, whoever else has it, too. What nobody has is told before anything is read.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np

from forged.checkpoint.errors import CheckpointException, ExceptionType, corrupted, invalid
from forged.checkpoint.format.boxes import (
    Box,
    Grid,
    Shape,
    chunk_lengths,
    chunks,
    chunks_within,
    grid_of,
    intersection,
    whole,
)
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import DIGEST_BYTES, Manifest, Part, digests_of

READ_BYTES_MAX = 8 << 20
"""So much is read at a time."""
SMALL_BYTES_MAX = 1 << 16
"""Less is read together with its neighbours and copied from there."""
GAP_BYTES_MAX = 1 << 14
"""Over so much that nobody wants it is read rather than asked anew."""

FRAGMENTS_MAX = 1 << 12
"""Into so many boxes may fall what is still wanted of one, while its parts are gathered."""

Copy = tuple[int, int]
"""A piece: the number of its part, and its place there."""


BoxText = tuple[tuple[int, ...], tuple[int, ...]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


class Columns(NamedTuple):
    """What a layout has, for doing much at once."""

    first_chunks: Integers
    memory: Integers
    starts: Integers


class PartLayout:
    """Where the chunks of a part lie, by column."""

    def __init__(self, manifest: Manifest, number: int) -> None:
        part = manifest.parts[number]
        self.number = number
        self.part: Part = part
        self.digests = digests_of(part)
        self._tensors = manifest.tensors
        of_pieces = self._lengths(part)
        lengths = np.fromiter(chain.from_iterable(of_pieces), np.int64)
        counts = np.fromiter(map(len, of_pieces), np.int64, len(of_pieces))
        stored = lengths if part.stored is None else np.abs(np.array(part.stored, np.int64))
        if np.any(stored > lengths):
            raise corrupted(
                f"chunks of {part.file} are larger in the file than in memory",
                part.file,
                "use another checkpoint",
                code="checkpoint_manifest_malformed",
            )
        self.columns = Columns(_summed(counts), _summed(lengths), _summed(stored) + part.data_offset)
        self.first_chunks: list[int] = self.columns.first_chunks.tolist()
        """The number of the first chunk of each piece, and that of all chunks."""
        self.memory: list[int] = self.columns.memory.tolist()
        """Where each chunk would begin if none were compressed, and where the last one would end."""
        self.starts: list[int] = self.columns.starts.tolist()
        """Where each chunk begins in the file, and where the last one ends."""

    def _lengths(self, part: Part) -> list[list[int]]:
        """The lengths of the chunks of each piece."""
        shapes = list(map(self._tensors.shapes.__getitem__, part.tensors))
        dtypes = list(map(self._tensors.dtypes.__getitem__, part.tensors))
        wholes = {kind: _lengths_of(whole(kind[0]), *kind) for kind in set(zip(shapes, dtypes, strict=True))}
        lengths = list(map(wholes.__getitem__, zip(shapes, dtypes, strict=True)))
        parts: dict[tuple[BoxText, Shape, str], list[int]] = {}
        for place, box in part.partial_boxes.items():
            kind = box, shapes[place], dtypes[place]
            if kind not in parts:
                parts[kind] = _lengths_of(*kind)
            lengths[place] = parts[kind]
        return lengths

    @property
    def chunks(self) -> int:
        """How many there are."""
        return len(self.memory) - 1

    def digest(self, chunk: int) -> bytes:
        """What the hash of a chunk has to be."""
        return self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]

    def digests_of(self, first: int, end: int) -> bytes:
        """What the hashes of some chunks have to be, one behind the other."""
        return self.digests[first * DIGEST_BYTES : end * DIGEST_BYTES]

    def itemsize(self, chunk: int) -> int:
        """How many bytes an element of it has."""
        return dtype_of(self._tensors.dtypes[self.tensor_of(chunk)]).itemsize

    def is_packed(self, chunk: int) -> bool:
        """Whether it is compressed."""
        return self.part.stored is not None and self.part.stored[chunk] > 0

    def place_of(self, chunk: int) -> int:
        """In which of the pieces a chunk is."""
        return bisect_right(self.first_chunks, chunk) - 1

    def tensor_of(self, chunk: int) -> int:
        """Of which tensor it is."""
        return self.part.tensors[self.place_of(chunk)]

    def box_of_piece(self, place: int) -> Box:
        """Which part of its tensor a piece is."""
        box = self.part.partial_boxes.get(place)
        return whole(self._tensors.shapes[self.part.tensors[place]]) if box is None else box

    def box_of(self, chunk: int) -> Box:
        """Which part of its tensor a chunk is."""
        place = self.place_of(chunk)
        before = chunk - self.first_chunks[place]
        for number, box in enumerate(chunks(self.box_of_piece(place), self.grid(place))):
            if number == before:
                return box
        raise IndexError(chunk)

    def grid(self, place: int) -> Grid:
        """How the tensor of a piece is cut."""
        tensor = self.part.tensors[place]
        return grid_of(self._tensors.shapes[tensor], dtype_of(self._tensors.dtypes[tensor]).itemsize)


class Span(NamedTuple):
    """Chunks that lie one behind the other in a part, and something of each of which is wanted."""

    first: int
    end: int
    """The number of the chunk behind them."""
    want: int
    """For which of the wanted boxes they are."""
    at: int
    """Where in that box, in its own C order, their bytes go, one behind the other; -1 if they do not."""
    box: Box | None = None
    """What they are together, if they do not."""
    taken: Box | None = None
    """What of that is wanted."""


class Sheaf(NamedTuple):
    """Small chunks that lie close together, each of which is all that is wanted by somebody."""

    chunks: list[int]
    wants: list[int]


class Plan(NamedTuple):
    """What is to be read, by part and in the order of the parts."""

    spans: dict[int, list[Span]]
    sheaves: dict[int, list[Sheaf]]
    needed: int
    """How many bytes are wanted."""


class Holders(NamedTuple):
    """The pieces of all parts, by column, and who has which tensor."""

    parts: Integers
    places: Integers
    order: Integers
    """The pieces in the order of their tensors."""
    firsts: Integers
    """Where in that order those of each tensor begin, and where the last ones end."""
    is_cut: np.ndarray[Any, np.dtype[np.bool_]]
    """By tensor: whether some piece is but a part of it."""


class Index:
    """A manifest as one who reads it needs it: who has what, and where its chunks lie."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._layouts: dict[int, PartLayout] = {}
        self._places: dict[int, dict[tuple[int, Box], list[int]]] = {}

    @cached_property
    def holders(self) -> Holders:
        """Who has what."""
        parts = self.manifest.parts
        tensors: Integers = np.concatenate(
            [np.array([], np.int64), *(np.array(one.tensors, np.int64) for one in parts)]
        )
        sizes = [len(part.tensors) for part in parts]
        is_cut = np.zeros(tensors.size, np.bool_)
        for start, part in zip(accumulate(sizes, initial=0), parts, strict=False):
            is_cut[start : start + len(part.box_of)] = np.array(part.box_of) >= 0
        order = np.argsort(tensors, kind="stable")
        count = len(self.manifest.tensors.names)
        return Holders(
            np.repeat(np.arange(len(parts)), sizes),
            np.concatenate([np.array([], np.int64), *map(np.arange, sizes)]),
            order,
            np.searchsorted(tensors[order], np.arange(count + 1)),
            np.bincount(tensors[is_cut], minlength=count) > 0,
        )

    def exact(self, tensor: int, box: Box) -> list[Copy]:
        """The pieces that have this box of a tensor, where it is not all of it."""
        parts = self._parts_with.get(box, ())
        return [(number, place) for number in parts for place in self._cut_places(number).get((tensor, box), ())]

    @cached_property
    def _parts_with(self) -> dict[Box, list[int]]:
        """By box, the parts that have it of some tensor."""
        found: dict[Box, list[int]] = {}
        for number, part in enumerate(self.manifest.parts):
            for box in part.boxes:
                found.setdefault(Box(*box), []).append(number)
        return found

    def _cut_places(self, number: int) -> dict[tuple[int, Box], list[int]]:
        """By tensor and box, the pieces of a part that are not whole."""
        if number not in self._places:
            part = self.manifest.parts[number]
            found: dict[tuple[int, Box], list[int]] = {}
            for place, box in part.partial_boxes.items():
                found.setdefault((part.tensors[place], box), []).append(place)
            self._places[number] = found
        return self._places[number]

    def copies(self, tensor: int) -> list[Copy]:
        """The pieces of a tensor."""
        holders = self.holders
        rows = holders.order[holders.firsts[tensor] : holders.firsts[tensor + 1]]
        return list(zip(holders.parts[rows].tolist(), holders.places[rows].tolist(), strict=True))

    def layout(self, number: int) -> PartLayout:
        """Where the chunks of a part lie."""
        found = self._layouts.get(number)
        if found is None:
            found = self._layouts.setdefault(number, PartLayout(self.manifest, number))
        return found

    def number_of(self, name: str, owner: int | None) -> int | None:
        """The number of a tensor; `owner` is the rank whose own it is, if it is one's own."""
        return self._numbers.get((name, owner))

    @cached_property
    def _numbers(self) -> dict[tuple[str, int | None], int]:
        tensors = self.manifest.tensors
        return {(name, tensors.ranks.get(number)): number for number, name in enumerate(tensors.names)}


def plan(
    index: Index,
    wanted: Sequence[int],
    boxes: Mapping[int, Box],
    *,
    strided: Collection[int] = (),
    only: Copy | None = None,
    rank: int = 0,
) -> Plan:
    """What is to be read.

    `wanted` are tensors; `boxes` are those of the wants, by place, that are not for the whole tensor.
    The wants in `strided` are for arrays whose elements lie apart. `only` is the one piece to be read from. Of several
    copies every reader takes another one; `rank` is which reader this is.
    """
    return _Planning(index, boxes, frozenset(strided), only, rank).plan(wanted)


class _Planning:
    def __init__(
        self, index: Index, boxes: Mapping[int, Box], strided: frozenset[int], only: Copy | None, rank: int
    ) -> None:
        self._index = index
        self._tensors = index.manifest.tensors
        self._boxes = boxes
        self._strided = strided
        self._only = only
        self._rank = rank
        self._spans: dict[int, list[Span]] = {}
        self._sheaves: dict[int, list[Sheaf]] = {}

    def plan(self, wanted: Sequence[int]) -> Plan:
        """The plan, in the order of the files."""
        numbers = np.array(wanted, np.int64)
        is_plain, rows = self._plain(numbers)
        for want in np.flatnonzero(~is_plain).tolist():
            self._take(want, wanted[want])
        holders = self._index.holders
        plain = np.flatnonzero(is_plain)
        parts = holders.parts[rows[plain]]
        for number in np.unique(parts).tolist():
            wants = plain[parts == number]
            self._take_pieces(self._index.layout(number), wants, holders.places[rows[wants]])
        for spans in self._spans.values():
            spans.sort()
        return Plan(self._spans, self._sheaves, self._needed(wanted))

    def _plain(self, numbers: Integers) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], Integers]:
        """Which wants are for whole tensors of which all pieces have all, and the row of one of these."""
        holders = self._index.holders
        firsts = holders.firsts[numbers]
        counts = holders.firsts[numbers + 1] - firsts
        is_plain = (counts > 0) & ~holders.is_cut[numbers] & (self._only is None)
        is_plain[[*self._boxes, *self._strided]] = False
        rows = np.zeros(numbers.size, np.int64)
        rows[is_plain] = holders.order[firsts[is_plain] + self._rank % counts[is_plain]]
        return is_plain, rows

    def _take_pieces(self, layout: PartLayout, wants: Integers, places: Integers) -> None:
        """All of some pieces, each for a want of the same box."""
        columns = layout.columns
        first, end = columns.first_chunks[places], columns.first_chunks[places + 1]
        is_small = (end - first == 1) & (columns.memory[end] - columns.memory[first] < SMALL_BYTES_MAX)
        for want, place in zip(wants[~is_small].tolist(), places[~is_small].tolist(), strict=True):
            self._take_piece(want, layout, place)
        if is_small.any():
            small, chunks_of_small = wants[is_small], first[is_small]
            order = np.argsort(chunks_of_small, kind="stable")
            self._sheaves[layout.number] = list(_bound(columns, chunks_of_small[order], small[order]))

    def _take_piece(self, want: int, layout: PartLayout, place: int) -> None:
        """All of a piece, for a want of the same box."""
        self._add_run(layout, layout.first_chunks[place], layout.first_chunks[place + 1], want, 0)

    def _take(self, want: int, tensor: int) -> None:
        """What is wanted, from whoever has it."""
        shape = self._tensors.shapes[tensor]
        wanted = self._boxes[want] if want in self._boxes else whole(shape)
        exact = self._index.exact(tensor, wanted)
        if exact and want not in self._strided and self._only is None:
            number, place = exact[self._rank % len(exact)]
            self._take_piece(want, self._index.layout(number), place)
            return
        missing = [wanted] if wanted.volume else []
        for copy, box in self._copies(tensor):
            if not missing:
                return
            left: list[Box] = []
            for one in missing:
                taken = intersection(one, box)
                if taken is None:
                    left.append(one)
                else:
                    self._take_part(want, wanted, copy, box, taken)
                    left.extend(without(one, taken))
            missing = left
            if len(missing) > FRAGMENTS_MAX:
                raise invalid(
                    f"{self._tensors.names[tensor]} is in more than {FRAGMENTS_MAX} scattered parts",
                    "load smaller boxes of it",
                    code="checkpoint_parts_scattered",
                )
        if missing:
            raise self._nobody_has(tensor, missing[0])

    def _copies(self, tensor: int) -> Iterator[tuple[Copy, Box]]:
        """One piece for each box that there is of a tensor."""
        if self._only is not None:
            yield self._only, self._index.layout(self._only[0]).box_of_piece(self._only[1])
            return
        alike: dict[Box, list[Copy]] = {}
        for number, place in self._index.copies(tensor):
            alike.setdefault(self._index.layout(number).box_of_piece(place), []).append((number, place))
        for box in sorted(alike):
            copies = alike[box]
            yield copies[self._rank % len(copies)], box

    def _take_part(self, want: int, wanted: Box, copy: Copy, box: Box, taken: Box) -> None:
        """What is taken of one piece."""
        number, place = copy
        if taken == box == wanted and want not in self._strided:
            self._take_piece(want, self._index.layout(number), place)
            return
        layout = self._index.layout(number)
        grid = layout.grid(place)
        if grid.axis == 0 and box.shape:
            self._take_rows(layout, place, grid.step, _Taking(want, wanted, box, taken))
        else:
            self._take_chunks(layout, place, grid, _Taking(want, wanted, box, taken))

    def _take_rows(self, layout: PartLayout, place: int, step: int, taking: _Taking) -> None:
        """Chunks are rows, and so are those that lie one behind the other."""
        rows = _Rows(step, taking.box.offset[0], taking.box.offset[0] + taking.box.shape[0])
        start, stop = taking.taken.offset[0], taking.taken.offset[0] + taking.taken.shape[0]
        first, end = start // step, (stop - 1) // step + 1
        inner, inner_end = first, first
        if _is_flat(taking) and taking.want not in self._strided:
            # Of a chunk at an end there may be rows that nobody wants; all others go where they belong as they are.
            inner = first if rows.start(first) >= start else first + 1
            inner_end = end if rows.start(end) <= stop else end - 1
        zero = layout.first_chunks[place] - rows.low // step
        if inner < inner_end:
            first_of_all = layout.memory[zero + inner]
            row = (layout.memory[zero + inner + 1] - first_of_all) // (rows.start(inner + 1) - rows.start(inner))
            at = (rows.start(inner) - taking.wanted.offset[0]) * row
            self._add_run(layout, zero + inner, zero + inner_end, taking.want, at)
        else:
            inner = inner_end = first
        for one, other in ((first, inner), (inner_end, end)):
            for low, high in blocks_of(layout.memory, zero + one, zero + other):
                begin, finish = rows.start(low - zero), rows.start(high - zero)
                box = Box((begin, *taking.box.offset[1:]), (finish - begin, *taking.box.shape[1:]))
                self._add_cut(layout, low, high, taking, box)

    def _take_chunks(self, layout: PartLayout, place: int, grid: Grid, taking: _Taking) -> None:
        """Chunks are parts of rows, or all there is."""
        itemsize = dtype_of(self._tensors.dtypes[layout.part.tensors[place]]).itemsize
        for before, chunk_box in chunks_within(taking.box, grid, taking.taken):
            chunk = layout.first_chunks[place] + before
            at = offset_in(taking.wanted, chunk_box) if taking.taken.covers(chunk_box) else None
            if at is None or taking.want in self._strided:
                self._add_cut(layout, chunk, chunk + 1, taking, chunk_box)
            else:
                self._add(layout.number, Span(chunk, chunk + 1, taking.want, at * itemsize))

    def _add_run(self, layout: PartLayout, first: int, end: int, want: int, at: int) -> None:
        """Chunks whose bytes stay together, in blocks."""
        origin = layout.memory[first]
        for low, high in blocks_of(layout.memory, first, end):
            self._add(layout.number, Span(low, high, want, at + layout.memory[low] - origin))

    def _add_cut(self, layout: PartLayout, first: int, end: int, taking: _Taking, box: Box) -> None:
        taken = intersection(box, taking.taken)
        if taken is not None:
            self._add(layout.number, Span(first, end, taking.want, -1, box, taken))

    def _add(self, number: int, span: Span) -> None:
        self._spans.setdefault(number, []).append(span)

    def _needed(self, wanted: Sequence[int]) -> int:
        """How many bytes are wanted."""
        shapes, dtypes = self._tensors.shapes, self._tensors.dtypes
        kinds = [(shapes[tensor], dtypes[tensor]) for tensor in wanted]
        sizes = {kind: math.prod(kind[0]) * dtype_of(kind[1]).itemsize for kind in set(kinds)}
        needed = sum(map(sizes.__getitem__, kinds))
        for want, box in self._boxes.items():
            needed += box.volume * dtype_of(kinds[want][1]).itemsize - sizes[kinds[want]]
        return needed

    def _nobody_has(self, tensor: int, box: Box) -> CheckpointException:
        return CheckpointException(
            f"nothing in the checkpoint {self._index.manifest.prefix} has {self._tensors.names[tensor]} from "
            f"{box.offset} on with shape {box.shape}",
            self._index.manifest.prefix,
            ExceptionType.CORRUPTED_CHECKPOINT,
            code="checkpoint_incomplete",
            fix="use another checkpoint",
        )


class _Taking(NamedTuple):
    """A want, and what a piece gives for it."""

    want: int
    wanted: Box
    box: Box
    """That of the piece."""
    taken: Box


class _Rows(NamedTuple):
    """How rows are cut into chunks: after every `step`-th one, counted from the first row of the whole array."""

    step: int
    low: int
    high: int

    def start(self, cell: int) -> int:
        """The first row of a chunk."""
        return min(max(self.low, cell * self.step), self.high)


def _is_flat(taking: _Taking) -> bool:
    """Whether rows of the piece are rows of what is wanted."""
    wanted, box, taken = taking.wanted, taking.box, taking.taken
    return (
        wanted.shape[1:] == box.shape[1:] == taken.shape[1:] and wanted.offset[1:] == box.offset[1:] == taken.offset[1:]
    )


def offset_in(outer: Box, inner: Box) -> int | None:
    """How many elements of `outer`, in its C order, come before those of `inner`; None if these do not lie together."""
    at, stride, is_full = 0, 1, True
    for axis in reversed(range(len(outer.shape))):
        if not is_full and inner.shape[axis] != 1:
            return None
        is_full = is_full and inner.shape[axis] == outer.shape[axis]
        at += (inner.offset[axis] - outer.offset[axis]) * stride
        stride *= outer.shape[axis]
    return at


def without(box: Box, hole: Box) -> Iterator[Box]:
    """What is left of a box without a part of it, in boxes."""
    offset, shape = list(box.offset), list(box.shape)
    for axis, (start, size) in enumerate(zip(hole.offset, hole.shape, strict=True)):
        for low, high in ((offset[axis], start), (start + size, offset[axis] + shape[axis])):
            if low < high:
                yield Box((*offset[:axis], low, *offset[axis + 1 :]), (*shape[:axis], high - low, *shape[axis + 1 :]))
        offset[axis], shape[axis] = start, size


def _bound(columns: Columns, chunks_of_them: Integers, wants: Integers) -> Iterator[Sheaf]:
    """Small chunks, in the order of the file, bound together as far as they are close and fit in a block."""
    low, high = columns.memory[chunks_of_them], columns.memory[chunks_of_them + 1]
    gaps = columns.starts[chunks_of_them[1:]] - columns.starts[chunks_of_them[:-1] + 1]
    ends = [*(np.flatnonzero(gaps > GAP_BYTES_MAX) + 1).tolist(), chunks_of_them.size]
    start = 0
    for end in ends:
        while start < end:
            stop = min(end, max(start + 1, int(np.searchsorted(high, low[start] + READ_BYTES_MAX, "right"))))
            yield Sheaf(chunks_of_them[start:stop].tolist(), wants[start:stop].tolist())
            start = stop


def _summed(column: Integers) -> Integers:
    """Where each begins if one stands behind the other, and where the last one ends."""
    found = np.zeros(column.size + 1, np.int64)
    np.cumsum(column, out=found[1:])
    return found


def blocks_of(memory: Sequence[int], first: int, end: int) -> Iterator[tuple[int, int]]:
    """Chunks in blocks: as many as `READ_BYTES_MAX` has room for, and one at least."""
    while first < end:
        stop = min(end, max(first + 1, bisect_right(memory, memory[first] + READ_BYTES_MAX, first, end + 1) - 1))
        yield first, stop
        first = stop


def _lengths_of(box: Box, shape: Shape, dtype: str) -> list[int]:
    itemsize = dtype_of(dtype).itemsize
    return chunk_lengths(box, grid_of(shape, itemsize), itemsize)
