"""Chunks are read straight into arrays where possible, merged where that is cheaper, and always verified."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from forged.checkpoint.blocking import BlockingCheckpoint
from forged.checkpoint.checkpoint import DistributedCheckpoint
from forged.checkpoint.errors import CheckpointException, ExceptionType, storage_error
from forged.checkpoint.format.boxes import Box
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.loading import read_plan
from forged.checkpoint.loading.fetching import BufferPool, bytes_of, fetch
from forged.checkpoint.loading.loader import load_state
from forged.checkpoint.loading.manifest_index import Index, PartLayout
from forged.checkpoint.loading.read_plan import READ_BYTES_MAX
from forged.checkpoint.model import CompressionLevel, SaveOptions
from forged.checkpoint.ports import CancelToken, Reader
from forged.checkpoint.storage import listing
from tests.checkpoint.fixtures.layouts import DTYPES, Array, array_of, bits, small_chunks
from tests.checkpoint.fixtures.memory_storage import MemoryReader, MemoryStorage
from tests.checkpoint.fixtures.plain_writer import write_checkpoint


class WatchedStorage(MemoryStorage):
    """Records which files are opened and closed."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.closed: list[str] = []

    def open(self, name: str) -> AbstractContextManager[Reader]:
        plain = super().open(name)

        @contextmanager
        def watched() -> Iterator[Reader]:
            self.opened.append(name)
            with plain as reader:
                yield reader
            self.closed.append(name)

        return watched()


CHUNK = 1 << 17
"""The smallest chunk, which is a row of the arrays below."""
ROW = CHUNK // 8


def rows(count: int) -> Array:
    """An array of that many chunks, which can be compressed."""
    return np.random.default_rng(count).integers(0, 9, (count, ROW))


def save(
    storage: MemoryStorage, prefix: str, w: Array, base: str | None, level: CompressionLevel = CompressionLevel.NONE
) -> Manifest:
    options = SaveOptions(prefix, base=base, include_rng_state=False, compression_level=level)
    with BlockingCheckpoint(DistributedCheckpoint(None, storage)) as checkpoint:
        checkpoint.save({"w": w}, options=options)
    return listing.read_manifest(storage, prefix)


def saved_chain(
    storage: MemoryStorage, w: Array, changes: Sequence[range], level: CompressionLevel = CompressionLevel.NONE
) -> Manifest:
    """The last of checkpoints `s0`, `s1` and so on, before each of which, but the first, these rows change."""
    manifest = save(storage, "s0", w, None, level)
    for number, changed in enumerate(changes, 1):
        w[changed] += 1
        manifest = save(storage, f"s{number}", w, f"s{number - 1}", level)
    storage.reads.clear()
    return manifest


def own_layout(manifest: Manifest) -> PartLayout:
    """That of the first file of its own."""
    return Index(manifest).layout(manifest.parts.index(manifest.own_parts[0]))


def reads_of(storage: MemoryStorage) -> Counter[str]:
    """How often the files of each checkpoint were read."""
    return Counter(name.partition("/")[0] for name, _, _ in storage.reads)


def fetch_all(storage: MemoryStorage, manifest: Manifest, **how: Any) -> list[Any]:
    return fetch(storage, Index(manifest), range(len(manifest.tensors.names)), CancelToken(), **how).arrays


class TestReads:
    def test_large_tensors_are_read_straight_into_the_given_arrays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        storage = MemoryStorage()
        w = np.random.default_rng(0).integers(0, 255, 3 * READ_BYTES_MAX, np.uint8)
        manifest = write_checkpoint(storage, "a", [{"w": w}])
        array = np.zeros_like(w)
        inside: list[bool] = []
        plain = MemoryReader.read_into

        def read_into(self: MemoryReader, offset: int, *rooms: memoryview) -> None:
            inside.extend(np.shares_memory(np.frombuffer(room, np.uint8), array) for room in rooms)
            plain(self, offset, *rooms)

        monkeypatch.setattr(MemoryReader, "read_into", read_into)
        fetch_all(storage, manifest, into={0: array})
        assert bits(array) == bits(w)
        assert inside == [True] * len(inside)
        assert max(length for _, _, length in storage.reads) <= READ_BYTES_MAX

    def test_small_neighbours_are_read_at_once(self) -> None:
        storage = MemoryStorage()
        small = [np.full(100, number) for number in range(500)]
        manifest = write_checkpoint(storage, "a", [small])
        assert list(map(bits, fetch_all(storage, manifest))) == list(map(bits, small))
        assert len(storage.reads) == 1

    def test_new_arrays_do_not_overlap(self) -> None:
        storage = MemoryStorage()
        arrays = [array_of(seed, dtype, (3,)) for seed, dtype in enumerate(DTYPES)]
        made = fetch_all(storage, write_checkpoint(storage, "a", [arrays]))
        for array in made:
            array[...] = np.zeros((), array.dtype)
        assert all(not any(array.tobytes().strip(b"\0 ")) for array in made)
        assert all(array.flags.aligned and array.flags.writeable and array.flags.c_contiguous for array in made)

    def test_the_bytes_that_were_read_are_counted(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": np.arange(300_000), "s": np.arange(3)}])
        fetched = fetch(storage, Index(manifest), [0], CancelToken())
        assert fetched.bytes_read == fetched.bytes_needed == storage.bytes_read == 2_400_000


class TestScatteredReads:
    """Neighbours in a file that go to different places are read at once."""

    def test_changed_chunks_are_read_at_once_straight_into_the_given_array(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage, w = MemoryStorage(), rows(64)
        manifest = saved_chain(storage, w, [range(1, 64, 4), range(2, 64, 4)])
        array = np.zeros_like(w)
        inside: list[bool] = []
        plain = MemoryReader.read_into

        def read_into(self: MemoryReader, offset: int, *rooms: memoryview) -> None:
            inside.extend(np.shares_memory(np.frombuffer(room, np.uint8), array) for room in rooms)
            plain(self, offset, *rooms)

        monkeypatch.setattr(MemoryReader, "read_into", read_into)
        fetch_all(storage, manifest, into={0: array})
        assert bits(array) == bits(w)
        assert inside == [True] * (16 + 16 + 17)
        assert reads_of(storage) == {"s0": 17, "s1": 1, "s2": 1}
        assert storage.bytes_read == w.nbytes

    def test_gaps_are_read_through_as_far_as_the_storage_says(self) -> None:
        storage, w = MemoryStorage(), rows(64)
        manifest = saved_chain(storage, w, [range(1, 64, 4)])
        storage.gap_bytes_max = CHUNK
        assert bits(fetch_all(storage, manifest)[0]) == bits(w)
        assert reads_of(storage) == {"s0": 1, "s1": 1}
        storage.reads.clear()
        storage.gap_bytes_max = CHUNK - 1
        assert bits(fetch_all(storage, manifest)[0]) == bits(w)
        assert reads_of(storage) == {"s0": 17, "s1": 1}

    def test_reads_are_no_larger_than_a_block(self, monkeypatch: pytest.MonkeyPatch) -> None:
        storage, w = MemoryStorage(), rows(64)
        manifest = saved_chain(storage, w, [range(0, 64, 2)])
        monkeypatch.setattr(read_plan, "READ_BYTES_MAX", 5 * CHUNK)
        assert bits(fetch_all(storage, manifest)[0]) == bits(w)
        assert reads_of(storage)["s1"] == 7
        assert max(length for _, _, length in storage.reads) == 5 * CHUNK

    def test_large_and_copied_chunks_are_read_at_once(self) -> None:
        storage = MemoryStorage()
        state = [rows(3), np.arange(99), rows(2)]
        manifest = write_checkpoint(storage, "a", [state])
        strided = np.zeros((99, 2), np.int64)[:, 1]
        arrays = fetch_all(storage, manifest, into={1: strided})
        assert list(map(bits, arrays)) == list(map(bits, state))
        assert len(storage.reads) == 1

    def test_chunk_that_two_targets_need_is_right_in_both(self) -> None:
        storage, w = MemoryStorage(), rows(4)
        index = Index(write_checkpoint(storage, "a", [{"w": w}]))
        low, high = Box((0, 0), (3, ROW)), Box((1, 0), (3, ROW))
        fetched = fetch(storage, index, [0, 0, 0], CancelToken(), boxes={0: low, 1: high})
        assert list(map(bits, fetched.arrays)) == list(map(bits, [w[:3], w[1:], w]))

    @pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
    def test_one_corrupt_chunk_is_repaired_and_the_rest_is_used(self, level: CompressionLevel) -> None:
        storage, w = MemoryStorage(), rows(16)
        manifest = saved_chain(storage, w, [range(1, 16, 4)], level)
        other = save(storage, "other", w, None, level)
        layout = own_layout(manifest)
        for offset in range(layout.file_offsets[2], layout.file_offsets[3], 7):
            storage.damage(layout.part.file, offset, 0xFF)
        array = np.zeros_like(w)
        loaded = load_state(storage, manifest, {"model": {"w": array}}, sections=["model"])
        assert bits(array) == bits(w)
        assert [(one.chunk, one.source) for one in loaded.repaired] == [(0, other.parts[0].file)]
        listing.delete(storage, "other")
        with pytest.raises(CheckpointException, match="written by rank 0 in s1/"):
            fetch_all(storage, manifest)

    @pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
    def test_only_the_chunk_that_cannot_be_read_is_repaired(
        self, level: CompressionLevel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage, w = MemoryStorage(), rows(16)
        manifest = saved_chain(storage, w, [range(1, 16, 4)], level)
        save(storage, "other", w, None, level)
        layout = own_layout(manifest)
        bad = layout.file_offsets[2] + 5
        plain = MemoryReader.read_into

        def read_into(self: MemoryReader, offset: int, *rooms: memoryview) -> None:
            if self.name == layout.part.file and offset <= bad < offset + sum(map(len, rooms)):
                raise storage_error("the disk fails", self.name, retryable=True)
            plain(self, offset, *rooms)

        monkeypatch.setattr(MemoryReader, "read_into", read_into)
        array = np.zeros_like(w)
        loaded = load_state(storage, manifest, {"model": {"w": array}}, sections=["model"])
        assert bits(array) == bits(w)
        assert len(loaded.repaired) == 1


class TestFiles:
    def test_every_file_is_opened_once_and_closed(self) -> None:
        storage = WatchedStorage()
        states = [{f"w{rank}": np.arange(100_000), f"s{rank}": np.arange(2)} for rank in range(3)]
        manifest = write_checkpoint(storage, "a", states)
        fetch_all(storage, manifest)
        assert sorted(storage.opened) == sorted(storage.closed) == sorted(part.file for part in manifest.parts)

    def test_a_file_is_closed_after_its_last_read(self) -> None:
        storage = WatchedStorage()
        manifest = write_checkpoint(storage, "a", [{f"w{rank}": np.arange(100)} for rank in range(3)])
        at_opening: list[int] = []
        plain = storage.open

        def opening(name: str) -> AbstractContextManager[Reader]:
            at_opening.append(len(storage.opened) - len(storage.closed))
            return plain(name)

        storage.open = opening  # type: ignore[method-assign]
        fetch_all(storage, manifest)
        assert at_opening == [0, 0, 0]

    def test_files_are_closed_when_a_read_fails(self) -> None:
        storage = WatchedStorage()
        manifest = write_checkpoint(storage, "a", [{"w": np.arange(100_000)}])
        storage.damage(manifest.parts[0].file, manifest.parts[0].size - 1)
        threads = threading.active_count()
        with pytest.raises(CheckpointException):
            fetch_all(storage, manifest)
        assert storage.opened == [manifest.parts[0].file]
        assert threading.active_count() == threads

    def test_several_threads_read_a_large_tensor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        storage = MemoryStorage()
        w = np.random.default_rng(0).integers(0, 255, 5 * READ_BYTES_MAX, np.uint8)
        manifest = write_checkpoint(storage, "a", [{"w": w}])
        both = threading.Barrier(2, timeout=60)
        plain, seen = MemoryReader.read_into, set[int]()

        def read_into(self: MemoryReader, offset: int, *rooms: memoryview) -> None:
            if threading.get_ident() not in seen:
                seen.add(threading.get_ident())
                both.wait()
            plain(self, offset, *rooms)

        monkeypatch.setattr(MemoryReader, "read_into", read_into)
        assert bits(fetch_all(storage, manifest, threads=2)[0]) == bits(w)
        assert len(seen) == 2


class TestFailure:
    def test_no_byte_of_a_corrupt_small_chunk_reaches_the_given_array(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": np.arange(1_000)}])
        storage.damage(manifest.parts[0].file, manifest.parts[0].data_offset)
        array = np.full(1_000, 7)
        with pytest.raises(CheckpointException):
            fetch_all(storage, manifest, into={0: array})
        assert (array == 7).all()

    def test_an_uncompressed_chunk_of_another_length_is_corrupt(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": np.arange(10)}], level=CompressionLevel.FAST)
        part = manifest.parts[0]
        assert part.stored == [-80]
        short = msgspec.structs.replace(part, stored=[-79], size=79)
        with pytest.raises(CheckpointException) as caught:
            fetch_all(storage, msgspec.structs.replace(manifest, parts=[short]))
        assert caught.value.code == "checkpoint_chunk_corrupt"

    def test_corruption_in_an_unwanted_gap_is_ignored(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [[np.full(4, number) for number in range(3)]])
        storage.damage(manifest.parts[0].file, manifest.parts[0].data_offset + 33)
        fetched = fetch(storage, Index(manifest), [0, 2], CancelToken())
        assert [array.tolist() for array in fetched.arrays] == [[0] * 4, [2] * 4]
        assert fetched.bytes_read == 96

    def test_lack_of_memory_is_a_typed_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": np.arange(100_000)}])

        def no_memory(*_: object) -> None:
            raise MemoryError("no")

        monkeypatch.setattr(np, "ndarray", no_memory)
        with pytest.raises(CheckpointException) as caught:
            fetch_all(storage, manifest)
        assert (caught.value.type, caught.value.code) == (ExceptionType.LOAD_FAILED, "checkpoint_memory_short")


class TestParts:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(), (3,), (2, 2), (0, 2)])
    def test_bytes_of_gives_writable_memory_for_every_type(self, dtype: str, shape: tuple[int, ...]) -> None:
        array = array_of(0, dtype, shape)
        memory = bytes_of(array)
        assert len(memory) == array.nbytes
        memory[:] = bytes(array.nbytes)
        assert not any(array.tobytes())

    def test_buffers_are_reused_and_large_enough(self) -> None:
        buffers = BufferPool()
        one = buffers.borrow(10)
        buffers.return_buffer(one)
        assert buffers.borrow(READ_BYTES_MAX) is one
        assert buffers.borrow(READ_BYTES_MAX + 1).size == READ_BYTES_MAX + 1


def test_partial_and_whole_chunks_of_one_file_are_read_together() -> None:
    storage = MemoryStorage()
    full = np.random.default_rng(0).integers(0, 255, (100, 10), np.uint8)
    with small_chunks(30, 90, 31):
        manifest = write_checkpoint(storage, "a", [{"w": full, "s": np.arange(3)}])
        index = Index(manifest)
        for first in range(0, 60, 7):
            box = index.layout(0).piece_box(0)._replace(offset=(first, 0), shape=(31, 10))
            fetched = fetch(storage, index, [0, 1], CancelToken(), boxes={0: box})
            assert bits(fetched.arrays[0]) == bits(full[first : first + 31])
            assert fetched.arrays[1].tolist() == [0, 1, 2]
