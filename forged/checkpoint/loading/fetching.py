"""Fetching: reads chunks from the files of a checkpoint into arrays, and verifies them.

Invariants:
- Every chunk is hashed right after it is read, while it is in the cache; arrays are returned only when all chunks are
  verified.
- Neighbours in a file are read at once: large runs directly into the target arrays, all else into a buffer, from which
  it is copied when it is verified.
- A corrupt chunk is replaced by the repairer's healthy copy, or raises an error that names it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from forged.checkpoint.errors import CheckpointException, ExceptionType, corrupted
from forged.checkpoint.format.boxes import Box, Shape, whole
from forged.checkpoint.format.compression import decompress_into
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.loading.manifest_index import Index, PartLayout, PieceId
from forged.checkpoint.loading.read_plan import (
    READ_BYTES_MAX,
    ChunkBatch,
    ReadPlan,
    Span,
    is_read_directly,
    plan,
    spans_of_reads,
)
from forged.checkpoint.model import RepairedChunk
from forged.checkpoint.ports import CancelToken, Reader, Storage
from forged.checkpoint.storage.listing import MISSING, missing_parent
from forged.checkpoint.thread_pool import THREADS, run_all

SINGLE_THREAD_BYTES_MAX = 16 << 20
SINGLE_THREAD_READS_MAX = 4
"""Up to this many bytes and reads, one thread is faster than several."""
READER_THREADS = THREADS + 1
"""One more than the threads that verify, so that the disk stays busy."""

Array = np.ndarray[Any, Any]
Run = tuple[int, int]
"""Consecutive chunks: the first, and the number after the last."""


class Repairer(Protocol):
    """Finds healthy copies of corrupt chunks."""

    def repair(self, layout: PartLayout, chunk: int, out: memoryview, cause: CheckpointException) -> RepairedChunk:
        """Fill `out` with the chunk's bytes; raise the cause if there is no healthy copy."""
        ...


class Fetched(NamedTuple):
    """The result of `fetch`."""

    arrays: list[Array]
    """By target."""
    repaired: list[RepairedChunk]
    bytes_read: int
    """Bytes read from files, without those read for repairs."""
    bytes_needed: int
    """Bytes of the targets."""


class _ReadJob(NamedTuple):
    """What is read in one go."""

    layout: PartLayout
    first: int
    end: int
    """The number after the last chunk."""
    spans: list[Span] | ChunkBatch


def fetch(
    storage: Storage,
    index: Index,
    wanted: Sequence[int],
    token: CancelToken,
    *,
    boxes: Mapping[int, Box] | None = None,
    into: Mapping[int, Array] | None = None,
    repairer: Repairer | None = None,
    only_piece: PieceId | None = None,
    rank: int = 0,
    threads: int = READER_THREADS,
) -> Fetched:
    """Read the wanted tensors, or boxes of them, into the given arrays or into new ones.

    `boxes` and `into` are by target, the position in `wanted`. An array of `into` is writable and has the shape and
    type of its target. New arrays of one call may share a buffer, but never overlap.
    """
    boxes, into = boxes or {}, into or {}
    strided = [target for target, array in into.items() if not array.flags.c_contiguous]
    gap = storage.gap_bytes_max
    reads = plan(index, wanted, boxes, strided=strided, only_piece=only_piece, rank=rank, gap_bytes_max=gap)
    fetching = _Fetching(storage, index, repairer, _Targets(index, wanted, boxes, into))
    jobs = fetching.jobs(reads)
    is_small = fetching.bytes_read <= SINGLE_THREAD_BYTES_MAX and len(jobs) <= SINGLE_THREAD_READS_MAX
    with fetching:
        run_all(fetching.run, jobs, token, 1 if is_small else threads)
    return Fetched(fetching.targets.all_arrays(), fetching.repaired, fetching.bytes_read, reads.bytes_needed)


class _Targets:
    """The targets and their arrays, which are made when they are needed."""

    def __init__(
        self, index: Index, wanted: Sequence[int], boxes: Mapping[int, Box], into: Mapping[int, Array]
    ) -> None:
        tensors = index.manifest.tensors
        dtypes = {name: dtype_of(name) for name in set(tensors.dtypes)}
        self.dtypes = [dtypes[tensors.dtypes[tensor]] for tensor in wanted]
        self.shapes: list[Shape] = [tensors.shapes[tensor] for tensor in wanted]
        for target, box in boxes.items():
            self.shapes[target] = box.shape
        self.arrays: list[Array | None] = [None] * len(wanted)
        for target, given in into.items():
            self.arrays[target] = given
        self._boxes = boxes
        self._memory: dict[int, memoryview] = {}

    def box(self, target: int) -> Box:
        """The wanted box of a target's tensor."""
        return self._boxes[target] if target in self._boxes else whole(self.shapes[target])

    def array(self, target: int) -> Array:
        """The array of a target."""
        array = self.arrays[target]
        if array is None:
            array = self.arrays[target] = _new_array(self.shapes[target], self.dtypes[target])
        return array

    def bytes_of(self, target: int) -> memoryview:
        """The memory of a target's array."""
        memory = self._memory.get(target)
        if memory is None:
            memory = self._memory[target] = bytes_of(self.array(target))
        return memory

    def use_buffer(self, target: int, buffer: Array, at: int) -> None:
        """Take the bytes in the buffer as the target's array."""
        array: Array = np.ndarray(self.shapes[target], self.dtypes[target], buffer.data, at)
        self.arrays[target] = array if array.flags.aligned else array.copy()

    def all_arrays(self) -> list[Array]:
        """All arrays, including empty ones."""
        return [self.array(target) if array is None else array for target, array in enumerate(self.arrays)]


class _Fetching:
    """The execution of one plan."""

    def __init__(self, storage: Storage, index: Index, repairer: Repairer | None, targets: _Targets) -> None:
        self.targets = targets
        self.repaired: list[RepairedChunk] = []
        self.bytes_read = 0
        self._storage = storage
        self._index = index
        self._repairer = repairer
        self._files = _OpenFiles(storage)
        self._buffers = BufferPool()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def jobs(self, reads: ReadPlan) -> list[_ReadJob]:
        """The reads, in file order."""
        jobs: list[_ReadJob] = []
        for target in {span.target for spans in reads.spans.values() for span in spans}:
            self.targets.array(target)
        for number in sorted({*reads.spans, *reads.batches}):
            layout = self._index.layout(number)
            groups = spans_of_reads(layout, reads.spans.get(number, []), self._storage.gap_bytes_max)
            jobs_of_part = [_merged(layout, spans) for spans in groups]
            batches = reads.batches.get(number, [])
            jobs_of_part.extend(_ReadJob(layout, batch.chunks[0], batch.chunks[-1] + 1, batch) for batch in batches)
            jobs_of_part.sort(key=attrgetter("first"))
            jobs += jobs_of_part
        for job in jobs:
            self.bytes_read += job.layout.file_offsets[job.end] - job.layout.file_offsets[job.first]
            self._files.add_job(job.layout.part.file)
        return jobs

    def run(self, job: _ReadJob) -> None:
        """Read, verify and place the chunks of one job."""
        if isinstance(job.spans, ChunkBatch):
            self._read_batch(job, job.spans)
        else:
            self._read_spans(job, job.spans)
        self._files.job_done(job.layout.part.file)

    def _read_spans(self, job: _ReadJob, spans: list[Span]) -> None:
        """Read the chunks of direct spans into the targets' arrays.

        All others are read into a buffer, from which the needed bytes are copied.
        """
        memory_offsets = job.layout.memory_offsets
        low = memory_offsets[job.first]
        size = memory_offsets[job.end] - low
        direct = [span for span in spans if is_read_directly(job.layout, span)]
        is_all_direct = size == sum(memory_offsets[span.end] - memory_offsets[span.first] for span in direct)
        # A buffer that is freed unused lets the allocator give memory back that the next arrays touch again.
        buffer = np.empty(0, np.uint8) if is_all_direct else self._buffers.borrow(size)
        rooms, slots = self._rooms(job, direct, buffer.data)
        self._read_verified(job.layout, _runs(spans), rooms, slots)
        for span in spans if len(direct) < len(spans) else ():
            at = memory_offsets[span.first] - low
            array = self.targets.array(span.target)
            if span.at < 0:
                self._copy_box(span, array, buffer, at)
            elif not is_read_directly(job.layout, span):
                length = memory_offsets[span.end] - memory_offsets[span.first]
                bytes_of(array)[span.at : span.at + length] = buffer.data[at : at + length]
        if not is_all_direct:
            self._buffers.return_buffer(buffer)

    def _rooms(
        self, job: _ReadJob, direct: list[Span], buffer: memoryview
    ) -> tuple[list[memoryview], list[memoryview]]:
        """The memory that a job's bytes are read into: as a whole, and chunk by chunk.

        A chunk that is in no direct span has its place in the buffer, as if all were read there.
        """
        edges = job.layout.memory_offsets
        low = edges[job.first]
        rooms: list[memoryview] = []
        slots: list[memoryview] = []
        done = job.first
        for span in direct:
            if done < span.first:
                rooms.append(buffer[edges[done] - low : edges[span.first] - low])
                slots += _slots(rooms[-1], edges, done, span.first)
            memory = self.targets.bytes_of(span.target)
            rooms.append(memory[span.at : span.at + edges[span.end] - edges[span.first]])
            slots += _slots(rooms[-1], edges, span.first, span.end)
            done = span.end
        if done < job.end:
            rooms.append(buffer[edges[done] - low : edges[job.end] - low])
            slots += _slots(rooms[-1], edges, done, job.end)
        return rooms, slots

    def _read_batch(self, job: _ReadJob, batch: ChunkBatch) -> None:
        """Read whole small targets at once; new arrays stay in the buffer that was read into."""
        memory_offsets, arrays = job.layout.memory_offsets, self.targets.arrays
        low = memory_offsets[job.first]
        size = memory_offsets[job.end] - low
        is_kept = any(arrays[target] is None for target in batch.targets)
        buffer = np.empty(size, np.uint8) if is_kept else self._buffers.borrow(size)
        out = buffer.data[:size]
        slots = _slots(out, memory_offsets, job.first, job.end)
        self._read_verified(job.layout, _runs_of(batch.chunks), [out], slots)
        for target, chunk in zip(batch.targets, batch.chunks, strict=True):
            array = arrays[target]
            if array is None:
                self.targets.use_buffer(target, buffer, memory_offsets[chunk] - low)
            else:
                bytes_of(array)[:] = slots[chunk - job.first]
        if not is_kept:
            self._buffers.return_buffer(buffer)

    def _copy_box(self, span: Span, array: Array, buffer: Array, at: int) -> None:
        """Copy the needed part of partly wanted chunks."""
        assert span.box is not None
        assert span.shared is not None
        if array.itemsize:
            merged: Array = np.ndarray(span.box.shape, array.dtype, buffer.data, at)
            array[span.shared.within(self.targets.box(span.target))] = merged[span.shared.within(span.box)]

    def _read_verified(
        self, layout: PartLayout, runs: list[Run], rooms: list[memoryview], slots: list[memoryview]
    ) -> None:
        """Read chunks, decompress them and verify them; repair those that fail.

        `rooms` receive the chunks as a whole; `slots` are the chunks one by one. Chunks between the runs are not
        verified.
        """
        first = runs[0][0]
        unreadable: frozenset[int] = frozenset()
        try:
            reader = self._files.reader(layout.part.file)
            if layout.part.stored is None:
                reader.read_into(layout.file_offsets[first], *rooms)
            else:
                unreadable = self._read_compressed(layout, runs, reader, slots)
        except CheckpointException as error:
            if not is_storage_failure(error):
                raise
            self._read_again(layout, runs, slots, error, is_scattered=len(rooms) > 1)
            return
        for low, end in runs:
            self._verify(layout, low, slots[low - first : end - first], unreadable)

    def _read_again(
        self,
        layout: PartLayout,
        runs: list[Run],
        slots: list[memoryview],
        error: CheckpointException,
        *,
        is_scattered: bool,
    ) -> None:
        """Repair chunks that could not be read; those for several places are read one by one before."""
        chunks = [chunk for run in runs for chunk in range(*run)]
        is_missing = error.code == MISSING
        is_parent = layout.part.is_referenced and is_missing
        gone = missing_parent(self._storage, self._index.manifest) if is_parent else None
        for chunk in chunks:
            slot = slots[chunk - chunks[0]]
            if is_scattered and not is_missing:
                self._read_verified(layout, [(chunk, chunk + 1)], [slot], [slot])
            else:
                self._repair(layout, chunk, slot, gone or unreadable_chunk(self._index, layout, chunk, error))

    def _read_compressed(
        self, layout: PartLayout, runs: list[Run], reader: Reader, slots: list[memoryview]
    ) -> frozenset[int]:
        """Read and decompress chunks; returns those that cannot be decompressed."""
        first, file_offsets = runs[0][0], layout.file_offsets
        low = file_offsets[first]
        size = file_offsets[runs[-1][1]] - low
        buffer = self._buffers.borrow(size)
        data = buffer.data[:size]
        reader.read_into(low, data)
        unreadable = [
            chunk
            for run in runs
            for chunk in range(*run)
            if not decompress_chunk(
                layout, chunk, data[file_offsets[chunk] - low : file_offsets[chunk + 1] - low], slots[chunk - first]
            )
        ]
        self._buffers.return_buffer(buffer)
        return frozenset(unreadable)

    def _verify(self, layout: PartLayout, first: int, slots: list[memoryview], unreadable: frozenset[int]) -> None:
        """Compare the digests of chunks with the manifest; repair those that differ."""
        end = first + len(slots)
        if not unreadable and b"".join(map(xxhash.xxh3_128_digest, slots)) == layout.digests_of(first, end):
            return
        for chunk, slot in zip(range(first, end), slots, strict=True):
            if chunk in unreadable or xxhash.xxh3_128_digest(slot) != layout.digest(chunk):
                self._repair(layout, chunk, slot, corrupt_chunk(self._index, layout, chunk))

    def _repair(self, layout: PartLayout, chunk: int, out: memoryview, cause: CheckpointException) -> None:
        if self._repairer is None:
            raise cause
        self.repaired.append(self._repairer.repair(layout, chunk, out, cause))


class BufferPool:
    """Reusable buffers: memory that was touched before is faster."""

    def __init__(self) -> None:
        self._spare: list[Array] = []

    def borrow(self, size: int) -> Array:
        """A buffer of at least this size."""
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = np.empty(READ_BYTES_MAX, np.uint8)
        return buffer if buffer.size >= size else np.empty(size, np.uint8)

    def return_buffer(self, buffer: Array) -> None:
        self._spare.append(buffer)


class _OpenFiles:
    """The open files; each is closed after its last job."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._left: dict[str, int] = {}
        self._open: dict[str, tuple[ExitStack, Reader]] = {}

    def add_job(self, file: str) -> None:
        """Count a job that reads this file."""
        self._left[file] = self._left.get(file, 0) + 1

    def reader(self, file: str) -> Reader:
        """The open file."""
        with self._lock:
            if file not in self._open:
                stack = ExitStack()
                self._open[file] = stack, stack.enter_context(self._storage.open(file))
            return self._open[file][1]

    def job_done(self, file: str) -> None:
        """Count a finished job; close the file after the last one."""
        with self._lock:
            self._left[file] -= 1
            if not self._left[file] and file in self._open:
                self._open.pop(file)[0].close()

    def close(self) -> None:
        with ExitStack() as all_of_them:
            for stack, _ in self._open.values():
                all_of_them.push(stack)
        self._open.clear()


def decompress_chunk(layout: PartLayout, chunk: int, data: memoryview, out: memoryview) -> bool:
    """Decompress a chunk of a compressed part into `out`; return whether that succeeded."""
    if layout.is_compressed(chunk):
        try:
            decompress_into(data, layout.itemsize(chunk), out)
        except CheckpointException:
            return False
        return True
    if len(data) != len(out):
        return False
    out[:] = data
    return True


def verify_chunks(index: Index, layout: PartLayout, file: memoryview, run: Run) -> None:
    """Verify chunks of a file that is mapped into memory."""
    file_offsets = layout.file_offsets
    for chunk in range(*run):
        if xxhash.xxh3_128_digest(file[file_offsets[chunk] : file_offsets[chunk + 1]]) != layout.digest(chunk):
            raise corrupt_chunk(index, layout, chunk)


def chunk_name(index: Index, layout: PartLayout, chunk: int) -> str:
    """A chunk's description in errors."""
    piece = chunk - layout.first_chunks[layout.piece_of(chunk)]
    return (
        f"chunk {piece} of {index.manifest.tensors.names[layout.tensor_of(chunk)]}, written by rank "
        f"{layout.part.rank} in {layout.part.file} at byte {layout.file_offsets[chunk]}"
    )


def corrupt_chunk(index: Index, layout: PartLayout, chunk: int) -> CheckpointException:
    """The error for a chunk whose checksum differs."""
    return corrupted(
        f"{chunk_name(index, layout, chunk)}, is corrupt: its checksum differs",
        layout.part.file,
        "load another checkpoint; `forgectl ckpt verify` lists all corrupt chunks of this one",
        code="checkpoint_chunk_corrupt",
    )


def unreadable_chunk(index: Index, layout: PartLayout, chunk: int, error: CheckpointException) -> CheckpointException:
    """The error for a chunk that cannot be read."""
    return CheckpointException(
        f"{chunk_name(index, layout, chunk)}, cannot be read: {error.message}",
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
        # The buffer protocol does not know types such as bfloat16 and datetime64.
        return array.reshape(-1).view(np.uint8).data


def is_storage_failure(error: CheckpointException) -> bool:
    """Whether another file may have the same bytes."""
    return error.type in {ExceptionType.CORRUPTED_CHECKPOINT, ExceptionType.STORAGE_ERROR}


def _new_array(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """A new, uninitialized array."""
    try:
        return np.ndarray(shape, dtype)
    except MemoryError as error:
        raise CheckpointException(
            f"not enough memory for an array of shape {shape} and type {dtype}: {error}",
            type=ExceptionType.LOAD_FAILED,
            code="checkpoint_memory_short",
            fix="load fewer tensors, or parts of them",
        ) from None


def _merged(layout: PartLayout, spans: list[Span]) -> _ReadJob:
    return _ReadJob(layout, spans[0].first, max(map(attrgetter("end"), spans)), spans)


def _slots(memory: memoryview, edges: list[int], first: int, end: int) -> list[memoryview]:
    """The chunks of some memory that holds those from `first` to `end`."""
    if end == first + 1:
        return [memory]
    low = edges[first]
    return [memory[start - low : stop - low] for start, stop in pairwise(edges[first : end + 1])]


def _runs(spans: Sequence[Span]) -> list[Run]:
    """The runs of chunks that some spans cover."""
    runs: list[Run] = []
    low, high = spans[0].first, spans[0].end
    for span in spans:
        if span.first > high:
            runs.append((low, high))
            low = span.first
        high = max(high, span.end)
    return [*runs, (low, high)]


def _runs_of(chunks: Sequence[int]) -> list[Run]:
    """The runs that some chunks form."""
    if chunks[-1] - chunks[0] == len(chunks) - 1:
        return [(chunks[0], chunks[-1] + 1)]
    breaks = [piece for piece, (one, other) in enumerate(pairwise(chunks), 1) if other != one + 1]
    return [(chunks[start], chunks[end - 1] + 1) for start, end in pairwise([0, *breaks, len(chunks)])]
