from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.format.boxes import CHUNK_BYTES_MIN, Box, chunks, grid_of, whole
from forged.checkpoint.format.manifest import Manifest, Tensors
from forged.checkpoint.model import CompressionLevel, ShardedArray
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.saving.files.assembly import Assembly, SavedTensors
from forged.checkpoint.saving.files.image import Layout, layout_of
from forged.checkpoint.saving.files.plan import Share
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.plain_writer import write_checkpoint

Array = np.ndarray[Any, Any]
DTYPES = [
    np.dtype(np.uint8),
    np.dtype(np.float32),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype("S3"),
    np.dtype(np.complex128),
]
ROOM = CHUNK_BYTES_MIN // 2


def filled(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Array:
    """An array in which no two chunks are alike."""
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(1, 120, size, np.uint8)
    return np.frombuffer(data.tobytes(), dtype).reshape(shape)


def bytes_of(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def assembly_of(
    storage: MemoryStorage, manifest: Manifest, share: Share | None = None
) -> tuple[Assembly, Share, Layout]:
    """All tensors of a checkpoint, one behind the other."""
    share = share or Share(list(range(len(manifest.tensors.names))), {})
    layout = layout_of(manifest.tensors, share, {})
    return Assembly(layout, share, SavedTensors(storage, manifest, CancelToken())), share, layout


def made(assembly: Assembly, room_bytes: int, order: Sequence[int] | None = None) -> bytes:
    """The whole file, from blocks that are asked for in some order."""
    data = bytearray(assembly.size)
    offsets = list(range(0, assembly.size, room_bytes))
    for number in order or range(len(offsets)):
        offset = offsets[number]
        room = memoryview(bytearray(min(room_bytes, assembly.size - offset)))
        data[offset : offset + len(room)] = assembly.block(offset, room)
    return bytes(data)


def expected(arrays: Sequence[Array], share: Share) -> tuple[bytes, bytes]:
    """The bytes behind the header, and the digests of all chunks."""
    data, digests = b"", b""
    for place, tensor in enumerate(share.tensors):
        array = arrays[tensor]
        box = Box(*share.boxes[place]) if place in share.boxes else whole(array.shape)
        for chunk in chunks(box, grid_of(array.shape, array.itemsize)):
            plain = bytes_of(array[chunk.within(whole(array.shape))])
            data += plain
            digests += xxhash.xxh3_128_digest(plain)
    return data, digests


SIZES = st.sampled_from([0, 1, 3, 500, 700])
ARRAYS = st.lists(
    st.tuples(st.lists(SIZES, max_size=2).map(tuple), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(ARRAYS, st.sampled_from([4096, ROOM, ROOM * 3, 1 << 23]), st.sampled_from(list(CompressionLevel)[:2]), st.data())
def test_a_file_has_the_tensors_and_the_digests_of_their_chunks(
    kinds: list[tuple[tuple[int, ...], Any]], room_bytes: int, level: CompressionLevel, data: st.DataObject
) -> None:
    arrays = [filled(shape, dtype, number) for number, (shape, dtype) in enumerate(kinds)]
    storage = MemoryStorage()
    manifest = write_checkpoint(storage, "a", [{"model": list(arrays)}], level=level)
    assembly, share, layout = assembly_of(storage, manifest)
    order = data.draw(st.permutations(range(-(-assembly.size // room_bytes)))) if room_bytes >= ROOM else None
    body, digests = expected(arrays, share)
    assert made(assembly, room_bytes, order) == layout.header + body
    assert assembly.digests == digests


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(0, 1), st.sampled_from(DTYPES), st.integers(1, 900), st.data())
def test_parts_that_ranks_had_are_put_together(
    ranks: int, axis: int, dtype: Any, columns: int, data: st.DataObject
) -> None:
    array = filled((500, columns), dtype)
    edges = sorted([0, array.shape[axis], *(data.draw(st.integers(0, array.shape[axis])) for _ in range(ranks - 1))])
    states = []
    for start, stop in pairwise(edges):
        offset = (start, 0) if axis == 0 else (0, start)
        local = array[start:stop] if axis == 0 else array[:, start:stop]
        states.append({"model": {"w": ShardedArray(local, array.shape, offset), "step": np.arange(3)}})
    storage = MemoryStorage()
    manifest = write_checkpoint(storage, "a", states)
    assembly, share, layout = assembly_of(storage, manifest)
    order = [array, np.arange(3)] if manifest.tensors.names[0] == "model/w" else [np.arange(3), array]
    body, digests = expected(order, share)
    assert made(assembly, ROOM) == layout.header + body
    assert assembly.digests == digests


def test_boxes_of_tensors_can_be_pieces_too() -> None:
    array = filled((700, 300), np.dtype(np.float32))
    storage = MemoryStorage()
    manifest = write_checkpoint(storage, "a", [{"w": array}])
    share = Share([0, 0, 0], {0: ((0, 0), (350, 300)), 1: ((350, 20), (350, 100)), 2: ((100, 0), (0, 300))})
    assembly, share, layout = assembly_of(storage, manifest, share)
    body, digests = expected([array], share)
    assert made(assembly, ROOM) == layout.header + body
    assert assembly.digests == digests


def saved(*arrays: Array) -> tuple[MemoryStorage, Manifest]:
    storage = MemoryStorage()
    return storage, write_checkpoint(storage, "a", [{"model": list(arrays)}])


def test_every_chunk_is_read_once_though_blocks_end_in_the_middle_of_it() -> None:
    array = filled((1000, 500), np.dtype(np.float32))
    storage, manifest = saved(array)
    assembly, _, _ = assembly_of(storage, manifest)
    made(assembly, 3 * CHUNK_BYTES_MIN // 2)
    assert storage.bytes_read == array.nbytes


def test_threads_that_want_the_same_chunk_read_it_once() -> None:
    array = filled((1000, 500), np.dtype(np.float32))
    storage, manifest = saved(array)
    assembly, share, layout = assembly_of(storage, manifest)
    room_bytes = 3 * CHUNK_BYTES_MIN // 2

    def block(offset: int) -> bytes:
        return bytes(assembly.block(offset, memoryview(bytearray(room_bytes))))

    with ThreadPoolExecutor(4) as pool:
        found = b"".join(pool.map(block, range(0, assembly.size, room_bytes)))
    body, digests = expected([array], share)
    assert found == layout.header + body
    assert assembly.digests == digests
    assert storage.bytes_read == array.nbytes


def test_a_block_may_be_asked_for_again() -> None:
    array = filled((1000, 500), np.dtype(np.float32))
    storage, manifest = saved(array)
    assembly, share, layout = assembly_of(storage, manifest)
    first = made(assembly, ROOM)
    assert made(assembly, ROOM) == made(assembly, 1 << 23) == first == layout.header + expected([array], share)[0]


def test_assembly_serves_single_chunks_to_the_compressor() -> None:
    array = filled((1000, 500), np.dtype(np.float32))
    storage, manifest = saved(array, array[0])
    assembly, share, layout = assembly_of(storage, manifest)
    found = b""
    for place in range(2):
        offset = 0
        for length in layout.lengths_of(place):
            found += bytes(assembly.chunk(place, offset, length).data)
            offset += length
    body, digests = expected([array, array[0]], share)
    assert found == body
    assert assembly.digests == digests


def test_damaged_chunk_is_not_assembled_into_a_file() -> None:
    storage, manifest = saved(filled((1000, 500), np.dtype(np.float32)))
    part = manifest.parts[0]
    storage.damage(part.file, part.data_offset + 5 * CHUNK_BYTES_MIN)
    assembly, _, _ = assembly_of(storage, manifest)
    with pytest.raises(CheckpointException) as caught:
        made(assembly, ROOM)
    assert caught.value.code == "checkpoint_chunk_corrupt"
    assert "model/#0" in caught.value.message


class Stubborn:
    """A source that fails once while other threads wait for its bytes."""

    def __init__(self, tensors: Tensors, waits: threading.Event) -> None:
        self.tensors = tensors
        self.calls = 0
        self._waits = waits

    def fetch(self, wanted: Sequence[int], boxes: Mapping[int, Box], rooms: Mapping[int, Array]) -> None:
        self.calls += 1
        if self.calls == 1:
            self._waits.wait(30)
            raise CheckpointException("it is not there", code="gone")
        for room in rooms.values():
            room[...] = 7


def test_failed_chunk_raises_at_all_waiters_and_can_be_retried() -> None:
    tensors = Tensors(["w"], ["uint8"], [(CHUNK_BYTES_MIN,)])
    layout = layout_of(tensors, share := Share([0], {}), {})
    waits = threading.Event()
    origin = Stubborn(tensors, waits)
    assembly = Assembly(layout, share, origin)

    def block(offset: int) -> bytes:
        return bytes(assembly.block(offset, memoryview(bytearray(ROOM))))

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(block, offset) for offset in (0, ROOM)]
        waits.set()
        errors = [call.exception() for call in calls]
    assert any(isinstance(error, CheckpointException) and error.code == "gone" for error in errors)
    assert block(ROOM) == bytes([7]) * ROOM


@pytest.mark.parametrize("threads", [1, 2])
def test_sequential_runs_read_every_chunk_once(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forged.checkpoint.saving.files.assembly.BLOCK_BYTES", 3 * CHUNK_BYTES_MIN // 2)
    arrays = [filled((500, 500), np.dtype(np.float32), 1), filled((7,), np.dtype(np.uint8), 2)] * 3
    storage, manifest = saved(*arrays)
    assembly, share, layout = assembly_of(storage, manifest)

    def run(offset: int) -> bytes:
        return bytes(assembly.run(offset, min(10_000, assembly.size - offset)).data)

    offsets = range(0, assembly.size, 10_000)
    found = b""
    with ThreadPoolExecutor(threads) as pool:
        # A thread that the system delays for several blocks would find its block dropped, and read it again.
        for place in range(0, len(offsets), threads):
            found += b"".join(pool.map(run, offsets[place : place + threads]))
    body, digests = expected(arrays, share)
    assert found == layout.header + body
    assert assembly.digests == digests
    assert storage.bytes_read == sum(array.nbytes for array in arrays)


def test_a_run_of_nothing_is_nothing() -> None:
    storage, manifest = saved(np.zeros(4))
    assembly, _, _ = assembly_of(storage, manifest)
    assert assembly.run(4100, 0).size == 0


def test_a_block_that_could_not_be_made_is_made_when_it_is_asked_for_again() -> None:
    tensors = Tensors(["w"], ["uint8"], [(100,)])
    waits = threading.Event()
    waits.set()
    assembly = Assembly(layout_of(tensors, share := Share([0], {}), {}), share, Stubborn(tensors, waits))
    with pytest.raises(CheckpointException):
        assembly.chunk(0, 0, 100)
    assert bytes(assembly.chunk(0, 0, 100).data) == bytes([7]) * 100
