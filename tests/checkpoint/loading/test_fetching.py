"""Chunks are read straight into arrays where possible, merged where that is cheaper, and always verified."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.loading.fetching import BufferPool, bytes_of, fetch
from forged.checkpoint.loading.manifest_index import Index
from forged.checkpoint.loading.read_plan import READ_BYTES_MAX
from forged.checkpoint.model import CompressionLevel
from forged.checkpoint.ports import CancelToken, Reader
from tests.checkpoint.fixtures.layouts import DTYPES, array_of, bits, small_chunks
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
