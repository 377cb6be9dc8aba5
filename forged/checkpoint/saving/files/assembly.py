"""A file assembled block by block from tensors of a checkpoint or of memory.

Invariants:
- Bytes of a checkpoint are verified, and every chunk is hashed as it is put into the file.
- Memory holds only the blocks in progress and the chunks that cross a block's end; these are fetched once.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from forged.checkpoint.format.boxes import Box, chunks, whole
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import DIGEST_BYTES, Manifest, Tensors
from forged.checkpoint.loading.fetching import fetch
from forged.checkpoint.loading.manifest_index import Index
from forged.checkpoint.loading.repair import CopyRepairer
from forged.checkpoint.model import RepairedChunk
from forged.checkpoint.ports import BLOCK_BYTES, CancelToken, Storage
from forged.checkpoint.progress import ByteCount, Progress
from forged.checkpoint.saving.files.image import ArrayImage, Layout, blank_digests, staged_arrays
from forged.checkpoint.saving.files.plan import Share
from forged.checkpoint.saving.files.staging import StagedPart
from forged.checkpoint.thread_pool import THREADS

BLOCKS_KEPT_MAX = 2 * THREADS
"""Two for each thread, because a run of bytes may cross from one block into the next."""

Array = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class TensorSource(Protocol):
    """Tensors by number; thread-safe."""

    @property
    def tensors(self) -> Tensors:
        """The table of all tensors."""
        ...

    def fetch(self, wanted: Sequence[int], boxes: Mapping[int, Box], out: Mapping[int, Array]) -> None:
        """Fill `out[place]` with tensor `wanted[place]`, or with its box `boxes[place]`."""
        ...


class SavedTensors:
    """The tensors of a checkpoint, whose manifest need not be published yet."""

    def __init__(self, storage: Storage, manifest: Manifest, token: CancelToken) -> None:
        self.repaired: list[RepairedChunk] = []
        """Corrupt chunks that were replaced by a healthy copy."""
        self._storage = storage
        self._index = Index(manifest)
        self._token = token
        self._repairer = CopyRepairer(storage, self._index, token)

    @property
    def tensors(self) -> Tensors:
        return self._index.manifest.tensors

    def fetch(self, wanted: Sequence[int], boxes: Mapping[int, Box], out: Mapping[int, Array]) -> None:
        fetched = fetch(
            self._storage,
            self._index,
            wanted,
            self._token,
            boxes=boxes,
            into=out,
            repairer=self._repairer,
            threads=1,
        )
        self.repaired += fetched.repaired


class MemoryTensors:
    """The whole tensors of a single rank, in its arrays or staged."""

    def __init__(self, tensors: Tensors, image: ArrayImage, staged: StagedPart | None) -> None:
        self._tensors = tensors
        self._arrays = (
            image.arrays if staged is None else list(staged_arrays(tensors.dtypes, image.layout, staged.view()))
        )

    @property
    def tensors(self) -> Tensors:
        return self._tensors

    def fetch(self, wanted: Sequence[int], boxes: Mapping[int, Box], out: Mapping[int, Array]) -> None:
        for place, number in enumerate(wanted):
            array = self._arrays[number]
            box = boxes.get(place)
            np.copyto(out[place], array if box is None else array[box.within(whole(array.shape))])


class CountedTensors:
    """A tensor source that reports how much was read from it."""

    def __init__(self, origin: TensorSource, progress: Progress | None, total: int) -> None:
        self._origin = origin
        self._bytes = ByteCount(total, progress)

    @property
    def tensors(self) -> Tensors:
        return self._origin.tensors

    def fetch(self, wanted: Sequence[int], boxes: Mapping[int, Box], out: Mapping[int, Array]) -> None:
        self._origin.fetch(wanted, boxes, out)
        # An evicted block is read and counted again.
        self._bytes.add(sum(array.nbytes for array in out.values()))

    def finish(self) -> None:
        """Report completion."""
        self._bytes.finish()


def bytes_of_share(tensors: Tensors, share: Share) -> int:
    """The uncompressed bytes of a share."""
    return sum(
        share.box(place, tuple(tensors.shapes[tensor])).volume * dtype_of(tensors.dtypes[tensor]).itemsize
        for place, tensor in enumerate(share.tensors)
    )


class _Run(NamedTuple):
    """Consecutive chunks of a piece that lie completely in one block."""

    place: int
    first: int
    end: int


class _Chunks(NamedTuple):
    """The chunks of a piece."""

    boxes: list[Box]
    starts: list[int]
    """The offset of each in the piece, and the end of the last one."""


class Assembly:
    """A part over a tensor source; a `ports.Source` and a `PartImage`."""

    def __init__(self, layout: Layout, share: Share, source: TensorSource) -> None:
        self.layout = layout
        self.digests = blank_digests(layout)
        self._source = source
        self._tensors = share.tensors
        self._dtypes = [dtype_of(source.tensors.dtypes[tensor]) for tensor in share.tensors]
        self._lock = threading.Lock()
        self._shared: dict[tuple[int, int], Future[Bytes]] = {}
        """Chunks that cross a block's end, kept from their first use to their second."""
        self._blocks: OrderedDict[int, Future[Bytes]] = OrderedDict()
        """The blocks that `run` used last."""
        self._cut: dict[int, _Chunks] = {}

    @property
    def size(self) -> int:
        return self.layout.size

    def block(self, offset: int, buffer: memoryview) -> memoryview:
        end = min(offset + len(buffer), self.size)
        into: Bytes = np.frombuffer(buffer, np.uint8)[: end - offset]
        header = self.layout.header
        if offset < len(header):
            ours = header[offset:end]
            into[: len(ours)] = np.frombuffer(ours, np.uint8)
        runs: list[_Run] = []
        for place in self._places(offset, end):
            self._copy_crossing(place, offset, end, into, runs)
        self._fill(runs, offset, into)
        return buffer[: end - offset]

    def chunk(self, place: int, offset: int, length: int) -> Bytes:
        return self.run(self.layout.starts[place] + offset, length)

    def run(self, offset: int, length: int) -> Bytes:
        """Some bytes of the file. Cheap in sequential order, because the last blocks are kept."""
        end = offset + length
        found = []
        for start in range(offset // BLOCK_BYTES * BLOCK_BYTES, end, BLOCK_BYTES):
            block = self._cached_block(start)
            found.append(block[max(0, offset - start) : end - start])
        return found[0] if len(found) == 1 else np.concatenate([*found, np.empty(0, np.uint8)])

    def _cached_block(self, start: int) -> Bytes:
        """A block of the file, from the last blocks if it is among them."""
        with self._lock:
            future = self._blocks.get(start)
            if is_first := future is None:
                future = self._blocks[start] = Future()
            self._blocks.move_to_end(start)
            if len(self._blocks) > BLOCKS_KEPT_MAX:
                self._blocks.popitem(last=False)
        if not is_first:
            return future.result()
        block: Bytes = np.empty(min(BLOCK_BYTES, self.size - start), np.uint8)
        try:
            self.block(start, block.data)
        except BaseException as error:
            with self._lock:
                self._blocks.pop(start, None)
            future.set_exception(error)
            raise
        future.set_result(block)
        return block

    def _places(self, offset: int, end: int) -> range:
        """The pieces with a byte in this range."""
        starts = self.layout.starts
        first = max(0, bisect_right(starts, offset) - 1)
        return range(first, min(bisect_left(starts, end), len(self._tensors)))

    def _copy_crossing(self, place: int, offset: int, end: int, into: Bytes, runs: list[_Run]) -> None:
        """Copy the chunks that cross an end of the block; append the others to `runs`."""
        start = self.layout.starts[place]
        if offset <= start and self.layout.starts[place + 1] <= end:
            count = self.layout.first_chunks[place + 1] - self.layout.first_chunks[place]
            runs.append(_Run(place, 0, count))
            return
        starts = self._chunks(place).starts
        first, last = bisect_left(starts, offset - start), bisect_right(starts, end - start) - 1
        if first < last:
            runs.append(_Run(place, first, last))
        over = {bisect_right(starts, offset - start) - 1, last} if offset > start else {last}
        for chunk in over:
            if 0 <= chunk < len(starts) - 1 and not first <= chunk < last:
                low, high = max(offset, start + starts[chunk]), min(end, start + starts[chunk + 1])
                if low < high:
                    data = self._shared_chunk(place, chunk)
                    at = low - start - starts[chunk]
                    into[low - offset : high - offset] = data[at : at + high - low]

    def _fill(self, runs: list[_Run], offset: int, into: Bytes) -> None:
        """Fetch and hash the chunks that lie completely in the block."""
        wanted: list[int] = []
        boxes: dict[int, Box] = {}
        buffers: dict[int, Array] = {}
        for run in runs:
            for box, start, stop in self._boxes(run):
                dtype = self._dtypes[run.place]
                if stop > start:
                    boxes[len(wanted)] = box
                    buffers[len(wanted)] = into[start - offset : stop - offset].view(dtype).reshape(box.shape)
                    wanted.append(self._tensors[run.place])
        if wanted:
            self._source.fetch(wanted, boxes, buffers)
        for run in runs:
            self._hash(run, offset, into)

    def _boxes(self, run: _Run) -> list[tuple[Box, int, int]]:
        """The boxes to fetch for a run, each with its start and end in the file."""
        start = self.layout.starts[run.place]
        whole = self.layout.boxes[run.place]
        if not run.first and self.layout.first_chunks[run.place] + run.end == self.layout.first_chunks[run.place + 1]:
            return [(whole, start, self.layout.starts[run.place + 1])]
        cut = self._chunks(run.place)
        some = cut.boxes[run.first : run.end]
        if self.layout.grids[run.place].axis == 0:
            rows = some[-1].offset[0] + some[-1].shape[0] - some[0].offset[0]
            together = Box(some[0].offset, (rows, *whole.shape[1:]))
            return [(together, start + cut.starts[run.first], start + cut.starts[run.end])]
        return [
            (box, start + low, start + high)
            for box, low, high in zip(
                some, cut.starts[run.first : run.end], cut.starts[run.first + 1 : run.end + 1], strict=True
            )
        ]

    def _hash(self, run: _Run, offset: int, into: Bytes) -> None:
        at = self.layout.starts[run.place] - offset
        edges = self._chunks(run.place).starts[run.first : run.end + 1]
        for number, (low, high) in enumerate(pairwise(edges), self.layout.first_chunks[run.place] + run.first):
            self._set_digest(number, into[at + low : at + high])

    def _set_digest(self, number: int, data: Bytes) -> None:
        self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES] = xxhash.xxh3_128_digest(data.data)

    def _shared_chunk(self, place: int, chunk: int) -> Bytes:
        """A chunk that two blocks share: the first caller fetches it, the second gets the same bytes."""
        key = place, chunk
        with self._lock:
            future = self._shared.pop(key, None)
            if is_first := future is None:
                future = self._shared[key] = Future()
        if not is_first:
            return future.result()
        try:
            data = self._fetch_chunk(place, chunk)
        except BaseException as error:
            with self._lock:
                self._shared.pop(key, None)
            future.set_exception(error)
            raise
        future.set_result(data)
        return data

    def _fetch_chunk(self, place: int, chunk: int) -> Bytes:
        """Fetch a chunk into new memory, and hash it."""
        box = self._chunks(place).boxes[chunk]
        buffer: Array = np.empty(box.shape, self._dtypes[place])
        self._source.fetch([self._tensors[place]], {0: box}, {0: buffer})
        data: Bytes = buffer.reshape(-1).view(np.uint8)
        self._set_digest(self.layout.first_chunks[place] + chunk, data)
        return data

    def _chunks(self, place: int) -> _Chunks:
        found = self._cut.get(place)
        if found is None:
            box, grid = self.layout.boxes[place], self.layout.grids.get(place)
            boxes = list(chunks(box, grid)) if grid is not None else [box]
            starts = list(accumulate(self.layout.lengths_of(place), initial=0))
            found = _Chunks(boxes, starts)
            if grid is not None:
                self._cut[place] = found
        return found
