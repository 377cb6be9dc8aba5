"""Bytes out of the files of a checkpoint into arrays.

Law: every chunk is hashed right behind its being read, while it is hot, and nobody is told of an array before all of it
was. What can go where it belongs is read there; what cannot is verified before it is copied. A chunk that is wrong is
put right by the mender, or it is an error that names it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from forged.checkpoint.errors import CheckpointException, ExceptionType, corrupted
from forged.checkpoint.format.boxes import Box, Shape, whole
from forged.checkpoint.format.compression import unpack_into
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.loading.read_plan import (
    GAP_BYTES_MAX,
    READ_BYTES_MAX,
    SMALL_BYTES_MAX,
    Copy,
    Index,
    PartLayout,
    Plan,
    Sheaf,
    Span,
    plan,
)
from forged.checkpoint.model import RepairedChunk
from forged.checkpoint.ports import Halt, Reader, Storage
from forged.checkpoint.thread_pool import THREADS, run_all

ALONE_BYTES_MAX = 16 << 20
ALONE_READS_MAX = 4
"""So much, and so often, is read by one thread: others would be in its way."""
READERS = THREADS + 1
"""While some verify what they have read, another one keeps the disk at work."""

Array = np.ndarray[Any, Any]
Run = tuple[int, int]
"""Chunks one behind the other: the first, and the one behind the last."""


class Repairer(Protocol):
    """Who knows of healthy copies."""

    def repair(self, layout: PartLayout, chunk: int, room: memoryview, cause: CheckpointException) -> RepairedChunk:
        """Put the right bytes there; raises the cause if there are none."""
        ...


class Fetched(NamedTuple):
    """What was fetched."""

    arrays: list[Array]
    """By want."""
    repaired: list[RepairedChunk]
    read: int
    """How many bytes were read of files, but for what was read to mend."""
    needed: int
    """How many bytes were wanted."""


class _Job(NamedTuple):
    """What is read at once."""

    layout: PartLayout
    first: int
    end: int
    """The chunk behind the last one."""
    spans: list[Span] | Sheaf
    is_direct: bool = False
    """Whether it goes where it belongs as it is."""


def fetch(
    storage: Storage,
    index: Index,
    wanted: Sequence[int],
    halt: Halt,
    *,
    boxes: Mapping[int, Box] | None = None,
    into: Mapping[int, Array] | None = None,
    repairer: Repairer | None = None,
    only: Copy | None = None,
    rank: int = 0,
    threads: int = READERS,
) -> Fetched:
    """The wanted tensors, or boxes of them, in the given arrays or in new ones.

    `boxes` and `into` are by the place of a want in `wanted`. A room has the shape and the type of what is wanted, and
    may be written. New arrays may share memory with others of the same call, but never overlap.
    """
    boxes, into = boxes or {}, into or {}
    strided = [want for want, room in into.items() if not room.flags.c_contiguous]
    found = plan(index, wanted, boxes, strided=strided, only=only, rank=rank)
    fetching = _Fetching(storage, index, repairer, _Wants(index, wanted, boxes, into))
    jobs = fetching.jobs(found)
    is_little = fetching.read <= ALONE_BYTES_MAX and len(jobs) <= ALONE_READS_MAX
    with fetching:
        run_all(fetching.do, jobs, halt, 1 if is_little else threads)
    return Fetched(fetching.wants.finished(), fetching.repaired, fetching.read, found.needed)


class _Wants:
    """What is wanted, and the arrays for it; made where they have to be."""

    def __init__(
        self, index: Index, wanted: Sequence[int], boxes: Mapping[int, Box], into: Mapping[int, Array]
    ) -> None:
        tensors = index.manifest.tensors
        dtypes = {name: dtype_of(name) for name in set(tensors.dtypes)}
        self.dtypes = [dtypes[tensors.dtypes[tensor]] for tensor in wanted]
        self.shapes: list[Shape] = [tensors.shapes[tensor] for tensor in wanted]
        for want, box in boxes.items():
            self.shapes[want] = box.shape
        self.arrays: list[Array | None] = [None] * len(wanted)
        for want, room in into.items():
            self.arrays[want] = room
        self._boxes = boxes

    def box(self, want: int) -> Box:
        """What is wanted."""
        return self._boxes[want] if want in self._boxes else whole(self.shapes[want])

    def room(self, want: int) -> Array:
        """The array that it goes to."""
        room = self.arrays[want]
        if room is None:
            room = self.arrays[want] = _made(self.shapes[want], self.dtypes[want])
        return room

    def lay_over(self, want: int, buffer: Array, at: int) -> None:
        """Take memory in which it lies already for its array."""
        array: Array = np.ndarray(self.shapes[want], self.dtypes[want], buffer.data, at)
        self.arrays[want] = array if array.flags.aligned else array.copy()

    def finished(self) -> list[Array]:
        """All arrays; those without elements, too."""
        return [self.room(want) if array is None else array for want, array in enumerate(self.arrays)]


class _Fetching:
    """One fetch."""

    def __init__(self, storage: Storage, index: Index, repairer: Repairer | None, wants: _Wants) -> None:
        self.wants = wants
        self.repaired: list[RepairedChunk] = []
        self.read = 0
        self._index = index
        self._repairer = repairer
        self._files = _Files(storage)
        self._buffers = Buffers()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def jobs(self, found: Plan) -> list[_Job]:
        """What is read at once, in the order of the files."""
        jobs: list[_Job] = []
        for number in sorted({*found.spans, *found.sheaves}):
            layout = self._index.layout(number)
            own = list(self._jobs(layout, found.spans.get(number, [])))
            sheaves = found.sheaves.get(number, [])
            own.extend(_Job(layout, sheaf.chunks[0], sheaf.chunks[-1] + 1, sheaf) for sheaf in sheaves)
            own.sort(key=attrgetter("first"))
            jobs += own
        for job in jobs:
            self.read += job.layout.starts[job.end] - job.layout.starts[job.first]
            self._files.expect(job.layout.part.file)
        return jobs

    def _jobs(self, layout: PartLayout, spans: list[Span]) -> Iterator[_Job]:
        memory, starts = layout.memory, layout.starts
        together: list[Span] = []
        for span in spans:
            is_direct = span.at >= 0 and memory[span.end] - memory[span.first] >= SMALL_BYTES_MAX
            if together and (
                is_direct
                or memory[span.end] - memory[together[0].first] > READ_BYTES_MAX
                or starts[span.first] - starts[together[-1].end] > GAP_BYTES_MAX
            ):
                yield _together(layout, together)
                together = []
            self.wants.room(span.want)
            if is_direct:
                yield _Job(layout, span.first, span.end, [span], is_direct=True)
            else:
                together.append(span)
        if together:
            yield _together(layout, together)

    def do(self, job: _Job) -> None:
        """Read, verify, and put where it belongs."""
        if isinstance(job.spans, Sheaf):
            self._do_sheaf(job, job.spans)
        elif job.is_direct:
            self._do_direct(job.layout, job.spans[0])
        else:
            self._do_together(job, job.spans)
        self._files.done(job.layout.part.file)

    def _do_direct(self, layout: PartLayout, span: Span) -> None:
        low = layout.memory[span.first]
        room = bytes_of(self.wants.room(span.want))[span.at : span.at + layout.memory[span.end] - low]
        edges = layout.memory[span.first : span.end + 1]
        slots = [room[start - low : end - low] for start, end in pairwise(edges)]
        self._fill(layout, [(span.first, span.end)], room, slots)

    def _do_together(self, job: _Job, spans: list[Span]) -> None:
        memory = job.layout.memory
        low = memory[job.first]
        size = memory[job.end] - low
        buffer = self._buffers.borrow(size)
        room = buffer.data[:size]
        slots = [room[start - low : stop - low] for start, stop in pairwise(memory[job.first : job.end + 1])]
        self._fill(job.layout, _runs(spans), room, slots)
        for span in spans:
            at = memory[span.first] - low
            array = self.wants.room(span.want)
            if span.at < 0:
                self._cut(span, array, buffer, at)
            else:
                length = memory[span.end] - memory[span.first]
                bytes_of(array)[span.at : span.at + length] = room[at : at + length]
        self._buffers.give_back(buffer)

    def _do_sheaf(self, job: _Job, sheaf: Sheaf) -> None:
        memory, arrays = job.layout.memory, self.wants.arrays
        low = memory[job.first]
        size = memory[job.end] - low
        is_kept = any(arrays[want] is None for want in sheaf.wants)
        buffer = np.empty(size, np.uint8) if is_kept else self._buffers.borrow(size)
        room = buffer.data[:size]
        slots = [room[start - low : stop - low] for start, stop in pairwise(memory[job.first : job.end + 1])]
        self._fill(job.layout, _runs_of(sheaf.chunks), room, slots)
        for want, chunk in zip(sheaf.wants, sheaf.chunks, strict=True):
            array = arrays[want]
            if array is None:
                self.wants.lay_over(want, buffer, memory[chunk] - low)
            else:
                bytes_of(array)[:] = slots[chunk - job.first]
        if not is_kept:
            self._buffers.give_back(buffer)

    def _cut(self, span: Span, array: Array, buffer: Array, at: int) -> None:
        """Copy what is wanted of chunks."""
        assert span.box is not None
        assert span.taken is not None
        if array.itemsize:
            together: Array = np.ndarray(span.box.shape, array.dtype, buffer.data, at)
            array[span.taken.within(self.wants.box(span.want))] = together[span.taken.within(span.box)]

    def _fill(self, layout: PartLayout, runs: list[Run], room: memoryview, slots: list[memoryview]) -> None:
        """Chunks as they are in memory, verified; the room is theirs as a whole, the slots are of one each.

        Of the chunks between the runs, nobody wants anything.
        """
        first = runs[0][0]
        unreadable: frozenset[int] = frozenset()
        try:
            reader = self._files.reader(layout.part.file)
            if layout.part.stored is None:
                reader.read_into(layout.starts[first], room)
            else:
                unreadable = self._unpack(layout, runs, reader, slots)
        except CheckpointException as error:
            if not is_of_storage(error):
                raise
            for low, end in runs:
                for chunk in range(low, end):
                    self._mend(
                        layout, chunk, slots[chunk - first], unreadable_because(self._index, layout, chunk, error)
                    )
            return
        for low, end in runs:
            self._verify(layout, low, slots[low - first : end - first], unreadable)

    def _unpack(self, layout: PartLayout, runs: list[Run], reader: Reader, slots: list[memoryview]) -> frozenset[int]:
        """Read chunks that are compressed; returns those that cannot be unpacked."""
        first, starts = runs[0][0], layout.starts
        low = starts[first]
        size = starts[runs[-1][1]] - low
        buffer = self._buffers.borrow(size)
        data = buffer.data[:size]
        reader.read_into(low, data)
        unreadable = [
            chunk
            for run in runs
            for chunk in range(*run)
            if not unpack_chunk(
                layout, chunk, data[starts[chunk] - low : starts[chunk + 1] - low], slots[chunk - first]
            )
        ]
        self._buffers.give_back(buffer)
        return frozenset(unreadable)

    def _verify(self, layout: PartLayout, first: int, slots: list[memoryview], unreadable: frozenset[int]) -> None:
        end = first + len(slots)
        if not unreadable and b"".join(map(xxhash.xxh3_128_digest, slots)) == layout.digests_of(first, end):
            return
        for chunk, slot in zip(range(first, end), slots, strict=True):
            if chunk in unreadable or xxhash.xxh3_128_digest(slot) != layout.digest(chunk):
                self._mend(layout, chunk, slot, damaged(self._index, layout, chunk))

    def _mend(self, layout: PartLayout, chunk: int, room: memoryview, cause: CheckpointException) -> None:
        if self._repairer is None:
            raise cause
        self.repaired.append(self._repairer.repair(layout, chunk, room, cause))


class Buffers:
    """Memory that was touched before, for those who need some for a moment."""

    def __init__(self) -> None:
        self._spare: list[Array] = []

    def borrow(self, size: int) -> Array:
        """At least so many bytes."""
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = np.empty(READ_BYTES_MAX, np.uint8)
        return buffer if buffer.size >= size else np.empty(size, np.uint8)

    def give_back(self, buffer: Array) -> None:
        """Somebody else may have it."""
        self._spare.append(buffer)


class _Files:
    """The files that are open; each is closed when nothing more is to be read of it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._left: dict[str, int] = {}
        self._open: dict[str, tuple[ExitStack, Reader]] = {}

    def expect(self, file: str) -> None:
        """There is one more thing to be read of it."""
        self._left[file] = self._left.get(file, 0) + 1

    def reader(self, file: str) -> Reader:
        """An open file."""
        with self._lock:
            if file not in self._open:
                stack = ExitStack()
                self._open[file] = stack, stack.enter_context(self._storage.open(file))
            return self._open[file][1]

    def done(self, file: str) -> None:
        """One thing less is to be read of it."""
        with self._lock:
            self._left[file] -= 1
            if not self._left[file] and file in self._open:
                self._open.pop(file)[0].close()

    def close(self) -> None:
        """Close all."""
        with ExitStack() as all_of_them:
            for stack, _ in self._open.values():
                all_of_them.push(stack)
        self._open.clear()


def unpack_chunk(layout: PartLayout, chunk: int, data: memoryview, room: memoryview) -> bool:
    """Put a chunk of a compressed part there as it is in memory; returns whether that could be."""
    if layout.is_packed(chunk):
        try:
            unpack_into(data, layout.itemsize(chunk), room)
        except CheckpointException:
            return False
        return True
    if len(data) != len(room):
        return False
    room[:] = data
    return True


def require_right(index: Index, layout: PartLayout, file: memoryview, run: Run) -> None:
    """Verify chunks of a file that is in memory."""
    starts = layout.starts
    for chunk in range(*run):
        if xxhash.xxh3_128_digest(file[starts[chunk] : starts[chunk + 1]]) != layout.digest(chunk):
            raise damaged(index, layout, chunk)


def where(index: Index, layout: PartLayout, chunk: int) -> str:
    """What a chunk is called in an error."""
    piece = chunk - layout.first_chunks[layout.place_of(chunk)]
    return (
        f"chunk {piece} of {index.manifest.tensors.names[layout.tensor_of(chunk)]}, written by rank "
        f"{layout.part.rank} in {layout.part.file} at byte {layout.starts[chunk]}"
    )


def damaged(index: Index, layout: PartLayout, chunk: int) -> CheckpointException:
    """The error that names a chunk whose bytes are wrong."""
    return corrupted(
        f"{where(index, layout, chunk)}, is damaged: its bytes are not those that were saved",
        layout.part.file,
        "load another checkpoint; `forgectl ckpt verify` shows all that is wrong with this one",
        code="checkpoint_chunk_corrupt",
    )


def unreadable_because(index: Index, layout: PartLayout, chunk: int, error: CheckpointException) -> CheckpointException:
    """The error that names a chunk that cannot be read."""
    return CheckpointException(
        f"{where(index, layout, chunk)}, cannot be read: {error.message}",
        layout.part.file,
        error.type,
        code=error.code,
        fix=error.fix,
        retryable=error.retryable,
    )


def bytes_of(array: Array) -> memoryview:
    """The memory of a contiguous array."""
    if not array.nbytes:
        return memoryview(bytearray())
    try:
        return array.data.cast("B")
    except (TypeError, ValueError, NotImplementedError):
        # Types of which Python's buffers know nothing.
        return array.reshape(-1).view(np.uint8).data


def is_of_storage(error: CheckpointException) -> bool:
    """Whether another file may do where this one does not."""
    return error.type in {ExceptionType.CORRUPTED_CHECKPOINT, ExceptionType.STORAGE_ERROR}


def _made(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """A new array; nothing is written to it yet."""
    try:
        return np.ndarray(shape, dtype)
    except MemoryError as error:
        raise CheckpointException(
            f"there is no memory for an array of shape {shape} of {dtype}: {error}",
            type=ExceptionType.LOAD_FAILED,
            code="checkpoint_memory_short",
            fix="load fewer tensors, or parts of them",
        ) from None


def _together(layout: PartLayout, spans: list[Span]) -> _Job:
    return _Job(layout, spans[0].first, max(span.end for span in spans), spans)


def _runs(spans: Sequence[Span]) -> list[Run]:
    """The chunks of some spans."""
    runs: list[Run] = []
    low, high = spans[0].first, spans[0].end
    for span in spans:
        if span.first > high:
            runs.append((low, high))
            low = span.first
        high = max(high, span.end)
    return [*runs, (low, high)]


def _runs_of(chunks: Sequence[int]) -> list[Run]:
    """The same of some chunks."""
    if chunks[-1] - chunks[0] == len(chunks) - 1:
        return [(chunks[0], chunks[-1] + 1)]
    breaks = [place for place, (one, other) in enumerate(pairwise(chunks), 1) if other != one + 1]
    return [(chunks[start], chunks[end - 1] + 1) for start, end in pairwise([0, *breaks, len(chunks)])]
