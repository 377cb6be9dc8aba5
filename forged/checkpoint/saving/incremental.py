"""Incremental saves: which chunks of a state are stored already, in the files of earlier checkpoints.

Invariants:
- A chunk is referred to only if the base has the same digest for the same box of the same tensor.
- References name the file that has the chunk, so a restore reads no manifest but that of the checkpoint.
- Unchanged chunks are hashed where they are, and neither copied nor written.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash
from msgspec import UNSET

from forged.checkpoint.errors import CheckpointException, ExceptionType, corrupted
from forged.checkpoint.format.boxes import Box, Grid, Shape, chunk_count, chunks, grid_of, whole
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import (
    DIGEST_BYTES,
    SUFFIX,
    BoxText,
    ChainLink,
    Manifest,
    Part,
    Tensors,
    decode,
    deduplicate_boxes,
    digests_of,
)
from forged.checkpoint.loading.manifest_index import Index, Integers, PartLayout
from forged.checkpoint.loading.read_plan import READ_BYTES_MAX, blocks_of
from forged.checkpoint.ports import CancelToken, Storage
from forged.checkpoint.saving.files.image import ArrayImage, Layout, blank_digests
from forged.checkpoint.saving.files.plan import Share
from forged.checkpoint.storage import listing
from forged.checkpoint.thread_pool import run_all

Array = np.ndarray[Any, Any]
BASE_GONE = "checkpoint_base_deleted"


class Place(NamedTuple):
    """Where a chunk of the base lies."""

    part: int
    chunk: int
    """Its number in the layout of the part."""


Places = tuple[Place, ...]
"""The copies of an unchanged chunk; none for a chunk that has to be written."""


class BaseRows(NamedTuple):
    """The chunks of a tensor that consist of rows, as columns in the order of the rows."""

    tail: tuple[Shape, Shape]
    """Offset and shape of all chunks on the other axes."""
    starts: Integers
    ends: Integers
    stored: Integers
    """By chunk, its part and its number there."""
    digests: np.ndarray[Any, np.dtype[np.uint64]]

    def places(self, edges: Integers, digests: np.ndarray[Any, np.dtype[np.uint64]]) -> Integers:
        """By chunk between edges, the part and the number of the chunk of the same rows and digest; else -1."""
        at = np.minimum(np.searchsorted(self.starts, edges[:-1]), self.starts.size - 1)
        is_same = (self.starts[at] == edges[:-1]) & (self.ends[at] == edges[1:])
        is_same &= np.all(self.digests[at] == digests, axis=1)
        return np.where(is_same[:, None], self.stored[at], -1)


def _tail(box: Box) -> tuple[Shape, Shape]:
    return box.offset[1:], box.shape[1:]


def _row_edges(box: Box, grid: Grid, count: int) -> Integers:
    """The first row of each of the chunks of a box, and the row behind the last one."""
    low = box.offset[0]
    edges = np.arange(low // grid.step, low // grid.step + count + 1) * grid.step
    edges[0], edges[-1] = low, low + box.shape[0]
    return edges


class Base:
    """The checkpoint that a save builds on: its chunks by tensor and box."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._index = Index(manifest)
        self._places: dict[int, dict[Box, list[Place]]] = {}
        self._rows: dict[int, BaseRows | None] = {}

    @property
    def links(self) -> list[ChainLink]:
        """The checkpoints whose files a save may refer to, oldest first."""
        return [*self.manifest.links, ChainLink(self.manifest.prefix, self.manifest.save_id)]

    def layout(self, part: int) -> PartLayout:
        return self._index.layout(part)

    def tensor_like(self, tensors: Tensors, number: int) -> int | None:
        """The base's tensor with the name, rank, type and shape of another manifest's tensor."""
        own = self.manifest.tensors
        other = self._index.tensor_number(tensors.names[number], tensors.ranks.get(number))
        is_alike = other is not None and (
            own.dtypes[other] == tensors.dtypes[number] and tuple(own.shapes[other]) == tuple(tensors.shapes[number])
        )
        return other if is_alike else None

    def places(self, tensor: int, box: Box, digest: bytes) -> Places:
        """The chunks of a tensor with this box and this digest."""
        found = self._places.get(tensor)
        if found is None:
            found = self._places[tensor] = self._places_of(tensor)
        return tuple(place for place in found.get(box, ()) if self.layout(place.part).digest(place.chunk) == digest)

    def _places_of(self, tensor: int) -> dict[Box, list[Place]]:
        found: dict[Box, list[Place]] = {}
        for part, piece in self._index.pieces_of(tensor):
            layout = self.layout(part)
            boxes = chunks(layout.piece_box(piece), layout.grid(piece))
            for chunk, box in enumerate(boxes, layout.first_chunks[piece]):
                found.setdefault(box, []).append(Place(part, chunk))
        return found

    def rows(self, tensor: int) -> BaseRows | None:
        """The chunks of a tensor that are whole rows of the same columns, each stored once; else None."""
        if tensor not in self._rows:
            self._rows[tensor] = self._rows_of(tensor)
        return self._rows[tensor]

    def _rows_of(self, tensor: int) -> BaseRows | None:
        found: list[tuple[Integers, Integers, Integers]] = []
        digests = []
        tails = set()
        for part, piece in self._index.pieces_of(tensor):
            layout = self.layout(part)
            box, numbers = layout.piece_box(piece), layout.chunks_of(piece)
            edges = _row_edges(box, layout.grid(piece), len(numbers))
            stored = np.empty((len(numbers), 2), np.int64)
            stored[:, 0], stored[:, 1] = part, np.arange(numbers.start, numbers.stop)
            found.append((edges[:-1], edges[1:], stored))
            digests.append(np.frombuffer(layout.digests_of(numbers.start, numbers.stop), np.uint64).reshape(-1, 2))
            tails.add(_tail(box))
        if len(tails) != 1:
            return None
        starts, ends, places = map(np.concatenate, zip(*found, strict=True))
        order = np.argsort(starts)
        if np.any(np.diff(starts[order]) == 0):
            return None
        return BaseRows(tails.pop(), starts[order], ends[order], places[order], np.concatenate(digests)[order])

    def require_files(self, storage: Storage, token: CancelToken) -> None:
        """Refuse a base with a file that is missing or has another size."""

        def check(file: tuple[str, int]) -> None:
            name, size = file
            with storage.open(name) as reader:
                if reader.size != size:
                    raise corrupted(f"{name} has {reader.size} bytes, expected {size}", name)

        run_all(check, {(part.file, part.size) for part in self.manifest.parts}, token)


class BaseReader:
    """Reads bases, and keeps the last one: most saves build on a manifest that was read before."""

    def __init__(self) -> None:
        self._last: tuple[str, bytes, Base] | None = None
        self._ancestries: dict[str, int] = {}
        """By save id, for the base that was counted last and the checkpoints of its chain."""

    def read(self, storage: Storage, prefix: str) -> Base:
        """The base of this name as it is now."""
        path = prefix + SUFFIX
        data = listing.read_manifest_data(storage, prefix)
        digest = xxhash.xxh3_128_digest(data)
        if self._last is not None and self._last[:2] == (path, digest):
            return self._last[2]
        base = Base(decode(data, path))
        self._last = path, digest, base
        return base

    def ancestry(self, storage: Storage, base: Base, most: int) -> int:
        """How many checkpoints lead from the base, by the parent of each, to a full one; counts no further than `most`.

        All of them are kept, because each needs its parent. The chain of the base may be shorter: chunks that change by
        turns have left the files of the checkpoints in the middle. A checkpoint that is gone ends the count.
        """
        path, end = [base.links[-1].save_id], 0
        links = base.manifest.links
        while links and len(path) < most:
            parent = links[-1]
            if parent.save_id in self._ancestries:
                end = self._ancestries[parent.save_id]
                break
            try:
                links = listing.read_manifest(storage, parent.prefix).links
            except CheckpointException:
                break
            path.append(parent.save_id)
        counted = self._ancestries | {save_id: end + place for place, save_id in enumerate(reversed(path), 1)}
        ids = {link.save_id for link in base.links}
        self._ancestries = {save_id: count for save_id, count in counted.items() if save_id in ids}
        return end + len(path)


class Reduced(NamedTuple):
    """What is left of a share to write, and references to the rest."""

    share: Share
    arrays: list[Array]
    """By piece of the share."""
    references: list[Part]


def reduce_share(
    layout: Layout,
    pieces: Sequence[Array],
    digests: bytes | bytearray,
    share: Share,
    tensors: Tensors,
    base: Base,
) -> Reduced:
    """Divide a share with these arrays and digests into changed pieces and references to unchanged chunks."""
    left, arrays = Share([], {}), list[Array]()
    used: dict[int, list[_Used]] = {}
    for place, number in enumerate(share.tensors):
        box, shape = layout.boxes[place], tuple(tensors.shapes[number])
        its_digests = digests[layout.first_chunks[place] * DIGEST_BYTES : layout.first_chunks[place + 1] * DIGEST_BYTES]
        other = base.tensor_like(tensors, number)
        for run in _runs(box, layout.grids.get(place), bytes(its_digests), base, other):
            box_text = None if run.box == whole(shape) else run.box
            if not run.places:
                if box_text is not None:
                    left.boxes[len(left.tensors)] = box_text
                left.tensors.append(number)
                array = pieces[place]
                arrays.append(array if run.box == box else array[run.box.within(box)])
            for part, chunk in run.places:
                used.setdefault(part, []).append(_used_of(base.layout(part), chunk, run.chunks, number, box_text))
    references = [_part_of(base.manifest.parts[part], its) for part, its in sorted(used.items())]
    return Reduced(left, arrays, references)


def merged(parts: Iterable[Part], tensors: Tensors) -> list[Part]:
    """The references of all ranks, file by file; what several ranks refer to is named once."""
    of_file: dict[str, list[Part]] = {}
    for part in parts:
        of_file.setdefault(part.file, []).append(part)
    found: list[Part] = []
    for same in of_file.values():
        if len(same) == 1:
            found += same
        else:
            pieces = sorted({piece for part in same for piece in _pieces_of(part, tensors)}, key=_order)
            found += [_part_of(same[0], lane) for lane in _without_overlap(pieces)]
    return found


def used_links(links: Sequence[ChainLink], parts: Collection[Part]) -> list[ChainLink]:
    """Those of the checkpoints that referenced files belong to."""
    return [link for link in links if any(part.is_referenced and link.has_file(part.file) for part in parts)]


def require_links(storage: Storage, manifest: Manifest) -> None:
    """Refuse a new manifest that refers to a checkpoint that was deleted meanwhile.

    A deletion looks for such manifests after it has begun, so one of the two notices the other.
    """
    for link in manifest.links:
        file = next(part.file for part in manifest.parts if link.has_file(part.file))
        if not (listing.checkpoint_exists(storage, link.prefix) and listing.file_exists(storage, file)):
            raise CheckpointException(
                f"{link.prefix}, which {manifest.prefix} builds on, was deleted during the save",
                manifest.prefix,
                ExceptionType.SAVE_FAILED,
                code=BASE_GONE,
                fix="save again; the save is then full",
                retryable=True,
            )


def chunk_digests(image: ArrayImage, token: CancelToken) -> bytearray:
    """The digests of all chunks, computed where the bytes are."""
    layout, digests = image.layout, blank_digests(image.layout)

    def digest(work: _Work) -> None:
        for place in work.places:
            marks = layout.marks.get(place, [0, layout.starts[place + 1] - layout.starts[place]])
            for chunk in range(work.first, work.end or len(marks) - 1):
                at = (layout.first_chunks[place] + chunk) * DIGEST_BYTES
                data = image.chunk(place, marks[chunk], marks[chunk + 1] - marks[chunk])
                digests[at : at + DIGEST_BYTES] = xxhash.xxh3_128_digest(data.data)

    run_all(digest, _work(layout), token)
    return digests


class _Work(NamedTuple):
    """Chunks for one thread: all of several pieces, or some of one."""

    places: range
    first: int = 0
    end: int = 0
    """The number after the last chunk; 0 for all of each piece."""


def _work(layout: Layout) -> Iterator[_Work]:
    """The chunks of a part in portions of about `READ_BYTES_MAX`."""
    start = 0
    for place in range(len(layout.boxes)):
        marks = layout.marks.get(place)
        if marks is not None and marks[-1] > READ_BYTES_MAX:
            if start < place:
                yield _Work(range(start, place))
            for first, end in blocks_of(marks, 0, len(marks) - 1):
                yield _Work(range(place, place + 1), first, end)
            start = place + 1
        elif layout.starts[place + 1] - layout.starts[start] > READ_BYTES_MAX:
            yield _Work(range(start, place + 1))
            start = place + 1
    if start < len(layout.boxes):
        yield _Work(range(start, len(layout.boxes)))


class _ChunkRun(NamedTuple):
    """Chunks of a piece that are written, or lie in the same files, together."""

    box: Box
    chunks: int
    places: Places
    """The places of the first chunk; none if the chunks are written."""


def _runs(box: Box, grid: Grid | None, digests: bytes, base: Base, tensor: int | None) -> Iterator[_ChunkRun]:
    """Divide a piece with these digests; `tensor` is the base's tensor like it, if there is one."""
    count = len(digests) // DIGEST_BYTES
    if tensor is None or not count:
        if count:
            yield _ChunkRun(box, count, ())
        return
    rows = base.rows(tensor) if grid is not None and grid.axis == 0 else None
    if grid is None or rows is None or rows.tail != _tail(box):
        yield from _runs_by_box(box, grid, digests, base, tensor)
        return
    edges = _row_edges(box, grid, count)
    places = rows.places(edges, np.frombuffer(digests, np.uint64).reshape(-1, 2))
    is_same = places[:, 0] >= 0
    joins = np.where(is_same[:-1], np.all(places[1:] - places[:-1] == (0, 1), axis=1), ~is_same[1:])
    for start, end in pairwise([0, *(np.flatnonzero(~joins) + 1).tolist(), count]):
        low, high = int(edges[start]), int(edges[end])
        first: Places = (Place(*places[start].tolist()),) if is_same[start] else ()
        yield _ChunkRun(Box((low, *box.offset[1:]), (high - low, *box.shape[1:])), end - start, first)


def _runs_by_box(box: Box, grid: Grid | None, digests: bytes, base: Base, tensor: int) -> Iterator[_ChunkRun]:
    """The same, chunk by chunk: for any grid, and copies."""
    cells = [box] if grid is None else list(chunks(box, grid))
    places = [
        base.places(tensor, cell, digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES])
        for number, cell in enumerate(cells)
    ]
    joins = [_follows(one, other) for one, other in pairwise(places)]
    if all(joins):
        yield _ChunkRun(box, len(cells), places[0])
        return
    axis, start = grid.axis if grid is not None else 0, 0
    for end in range(1, len(cells) + 1):
        first, last = cells[start], cells[end - 1]
        if end == len(cells) or not joins[end - 1] or cells[end].offset[:axis] != first.offset[:axis]:
            length = last.offset[axis] + last.shape[axis] - first.offset[axis]
            joined = Box(first.offset, (*first.shape[:axis], length, *first.shape[axis + 1 :]))
            yield _ChunkRun(joined, end - start, places[start])
            start = end


def _follows(one: Places, other: Places) -> bool:
    """Whether the second chunk is stored right behind the first one, or both have to be written."""
    return len(one) == len(other) and all(
        a.part == b.part and a.chunk + 1 == b.chunk for a, b in zip(one, other, strict=True)
    )


class _Used(NamedTuple):
    """A piece in a file of an earlier checkpoint."""

    offset: int
    end: int
    """The offset of the first byte behind it."""
    tensor: int
    box: BoxText | None
    """Its box; None for the whole tensor."""
    digests: bytes
    stored: tuple[int, ...]
    """The bytes of its chunks in a compressed file."""


def _order(piece: _Used) -> tuple[int, int, int]:
    return piece.offset, piece.end, piece.tensor


def _used_of(layout: PartLayout, first: int, count: int, tensor: int, box: Box | None) -> _Used:
    """Consecutive chunks of a part, as a piece of another manifest's tensor."""
    end = first + count
    return _Used(
        layout.file_offsets[first],
        layout.file_offsets[end],
        tensor,
        box,
        layout.digests_of(first, end),
        tuple(layout.stored_of(first, end)),
    )


def _part_of(part: Part, pieces: Sequence[_Used]) -> Part:
    """The manifest's entry for some pieces of a file; `part` is another entry for the same file."""
    pieces = sorted(pieces, key=_order)
    boxes, box_of = deduplicate_boxes(
        {place: piece.box for place, piece in enumerate(pieces) if piece.box is not None}, len(pieces)
    )
    return Part(
        file=part.file,
        rank=part.rank,
        size=part.size,
        data_offset=part.data_offset,
        tensors=[piece.tensor for piece in pieces],
        boxes=boxes,
        box_of=box_of,
        digests=base64.b64encode(b"".join(piece.digests for piece in pieces)).decode(),
        header=part.header,
        stored=None if part.stored is None else [size for piece in pieces for size in piece.stored],
        offsets=[piece.offset for piece in pieces],
    )


def _pieces_of(part: Part, tensors: Tensors) -> Iterator[_Used]:
    """The pieces of a reference."""
    digests, chunk = digests_of(part), 0
    assert part.offsets is not UNSET
    for place, (tensor, offset) in enumerate(zip(part.tensors, part.offsets, strict=True)):
        shape, itemsize = tuple(tensors.shapes[tensor]), dtype_of(tensors.dtypes[tensor]).itemsize
        partial_box = part.partial_boxes.get(place)
        box = whole(shape) if partial_box is None else partial_box
        end = chunk + chunk_count(box, grid_of(shape, itemsize))
        stored = () if part.stored is None else tuple(part.stored[chunk:end])
        size = math.prod(box.shape) * itemsize if part.stored is None else sum(map(abs, stored))
        its_digests = digests[chunk * DIGEST_BYTES : end * DIGEST_BYTES]
        yield _Used(offset, offset + size, tensor, partial_box, its_digests, stored)
        chunk = end


def _without_overlap(pieces: Sequence[_Used]) -> list[list[_Used]]:
    """Divide pieces in ascending order into lists without overlaps; ranks may hold overlapping boxes."""
    lanes: list[list[_Used]] = []
    for piece in pieces:
        lane = next((lane for lane in lanes if lane[-1].end <= piece.offset), None)
        if lane is None:
            lanes.append([piece])
        else:
            lane.append(piece)
    return lanes
