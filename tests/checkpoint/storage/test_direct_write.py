"""A new file has exactly the bytes of its source, with any capabilities and failures of the file system."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.ports import BLOCK_BYTES, ByteSource, CancelToken
from forged.checkpoint.storage.direct_write import BlockBuffers, FileWriter, retry_interrupted, write_whole
from forged.checkpoint.storage.files import CREATE, READ, Files, SystemFiles
from tests.checkpoint.fixtures.faulty_files import Act, failing, taking_at_most, with_fault
from tests.checkpoint.fixtures.memory_files import ROOT, MemoryFiles
from tests.checkpoint.fixtures.sources import PAGE, SIZES, CopiedSource, MemorySource, pattern

WAIT_S = 30.0


def filled(
    files: Files, source: ByteSource, path: str = f"{ROOT}/a", threads: int = 2, rooms: BlockBuffers | None = None
) -> None:
    fd = files.open(path, CREATE)
    try:
        filling = FileWriter(files, fd, source, rooms or BlockBuffers(2))
        filling.reserve(1 << 40)
        filling.run(CancelToken(), threads)
    finally:
        files.close(fd)


def content(files: MemoryFiles) -> bytes:
    return files.image.files[f"{ROOT}/a"]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "lie", [CopiedSource, MemorySource, lambda data: MemorySource(data, 1)], ids=["given", "at a page", "elsewhere"]
)
@pytest.mark.parametrize("lacking", [(), ("direct",), ("direct", "reserve")], ids=["direct", "cached", "unreserved"])
@pytest.mark.parametrize("size", SIZES)
def test_written_file_equals_its_source(
    size: int, lacking: tuple[str, ...], lie: Callable[[bytes], ByteSource], threads: int
) -> None:
    files, data = MemoryFiles(lacking=lacking), pattern(size)
    filled(files, lie(data), threads=threads)
    assert content(files) == data
    assert files.operations[-1].kind == "sync"


@pytest.mark.parametrize("size", SIZES)
def test_written_real_file_equals_its_source(size: int, tmp_path: Path) -> None:
    path, data = tmp_path / "a", pattern(size)
    filled(SystemFiles(), CopiedSource(data), str(path))
    assert path.read_bytes() == data


@pytest.mark.parametrize("size", SIZES)
def test_a_real_file_has_it_through_the_cache_too(size: int, tmp_path: Path) -> None:
    path, data = tmp_path / "a", pattern(size)
    filled(with_fault(SystemFiles(), failing("bypass_cache", errno.EINVAL)), CopiedSource(data), str(path))
    assert path.read_bytes() == data


def test_page_aligned_source_is_not_copied() -> None:
    seen: list[memoryview] = []

    class Watching(MemorySource):
        def block(self, offset: int, room: memoryview) -> memoryview:
            seen.append(room)
            return super().block(offset, room)

    filled(MemoryFiles(), Watching(pattern(2 * PAGE)))
    assert not any(np.frombuffer(room, np.uint8).any() for room in seen)


def test_late_refusal_of_direct_io_falls_back_to_the_cache() -> None:
    files, data = MemoryFiles(), pattern(BLOCK_BYTES + PAGE + 3)
    is_direct = False

    def fault(number: int, name: str, act: Act) -> Any:
        nonlocal is_direct
        if name == "bypass_cache":
            is_direct = act.keywords["on"]  # type: ignore[attr-defined]
        if name == "write" and is_direct:
            raise OSError(errno.EINVAL, "no")
        return act()

    filled(with_fault(files, fault), CopiedSource(data))
    assert content(files) == data


@pytest.mark.parametrize("lacking", [(), ("direct",)], ids=["direct", "cached"])
@pytest.mark.parametrize("count", [PAGE, PAGE + 7, 3 * PAGE + 1])
def test_short_write_is_continued(count: int, lacking: tuple[str, ...]) -> None:
    files, data = MemoryFiles(lacking=lacking), pattern(9 * PAGE + 5)
    shortened = with_fault(files, taking_at_most(count // PAGE * PAGE if not lacking else count))
    filled(shortened, CopiedSource(data))
    assert content(files) == data


@pytest.mark.parametrize("lacking", [(), ("direct",)], ids=["direct", "cached"])
def test_repeated_empty_writes_are_an_error(lacking: tuple[str, ...]) -> None:
    files = with_fault(MemoryFiles(lacking=lacking), taking_at_most(0))
    with pytest.raises(OSError, match="accepts no more bytes"):
        filled(files, CopiedSource(pattern(PAGE)))


@pytest.mark.parametrize("operation", ["write", "sync", "reserve"])
def test_a_signal_in_between_does_no_harm(operation: str) -> None:
    files, data = MemoryFiles(), pattern(PAGE + 5)
    filled(with_fault(files, failing(operation, errno.EINTR, times=3)), CopiedSource(data))
    assert content(files) == data


def test_signals_without_end_are_an_error() -> None:
    with pytest.raises(InterruptedError):
        retry_interrupted(with_fault(MemoryFiles(), failing("sync", errno.EINTR)).sync, 1)


@pytest.mark.parametrize("operation", ["begin_write_back", "drop_cache"])
def test_optional_system_calls_may_be_missing(operation: str) -> None:
    files, data = MemoryFiles(lacking=["direct"]), pattern(10 * BLOCK_BYTES)
    filled(with_fault(files, failing(operation, errno.ENOSYS)), CopiedSource(data), threads=1)
    assert content(files) == data


@pytest.mark.parametrize("operation", ["begin_write_back", "drop_cache"])
def test_lost_bytes_of_write_back_are_an_error(operation: str) -> None:
    files = MemoryFiles(lacking=["direct"])
    with pytest.raises(OSError, match="Input/output"):
        filled(with_fault(files, failing(operation, errno.EIO)), CopiedSource(pattern(10 * BLOCK_BYTES)), threads=1)


def test_through_the_cache_no_more_waits_there_than_a_few_blocks() -> None:
    asked: Counter[str] = Counter()

    def count(number: int, name: str, act: Act) -> Any:
        asked[name] += 1
        return act()

    filled(with_fault(MemoryFiles(lacking=["direct"]), count), CopiedSource(pattern(10 * BLOCK_BYTES)), threads=1)
    assert (asked["begin_write_back"], asked["drop_cache"]) == (10, 2)


@pytest.mark.parametrize("lacking", [(), ("reserve",)], ids=["reserved", "counted"])
def test_too_little_space_is_reported_before_writing(lacking: tuple[str, ...]) -> None:
    files = MemoryFiles(room=PAGE, lacking=lacking)
    fd = files.open(f"{ROOT}/a", CREATE)
    with pytest.raises(OSError) as caught:
        FileWriter(files, fd, CopiedSource(pattern(PAGE + 1)), BlockBuffers(1)).reserve(files.free_bytes(ROOT))
    assert caught.value.errno == errno.ENOSPC
    assert [operation.kind for operation in files.operations] == ["name"]


def test_cancelled_token_stops_before_the_next_block() -> None:
    files, token = MemoryFiles(), CancelToken()

    class Halting(CopiedSource):
        def block(self, offset: int, room: memoryview) -> memoryview:
            token.cancel()
            return super().block(offset, room)

    fd = files.open(f"{ROOT}/a", CREATE)
    with pytest.raises(CheckpointException, match="cancelled"):
        FileWriter(files, fd, Halting(pattern(3 * BLOCK_BYTES)), BlockBuffers(1)).run(token, 1)
    assert [operation.kind for operation in files.operations] == ["name", "write"]


def test_blocks_are_taken_while_as_many_as_were_asked_for_are_written() -> None:
    """No write ends before as many blocks have been taken besides."""
    all_taken, under_way, at_once = threading.Event(), list[int](), list[int]()

    class Asked(CopiedSource):
        taken = 0

        def block(self, offset: int, room: memoryview) -> memoryview:
            self.taken += 1
            if self.taken == 4:
                all_taken.set()
            return super().block(offset, room)

    class Slow(MemoryFiles):
        def write(self, fd: int, data: memoryview, offset: int) -> int:
            under_way.append(offset)
            at_once.append(len(under_way))
            assert all_taken.wait(WAIT_S)
            done = super().write(fd, data, offset)
            under_way.remove(offset)
            return done

    files, data = Slow(), pattern(5 * BLOCK_BYTES)
    filled(files, Asked(data), threads=2)
    assert content(files) == data
    assert max(at_once) <= 2


def test_buffers_are_reused_up_to_the_limit() -> None:
    rooms = BlockBuffers(1)
    with rooms.buffer() as first, rooms.buffer() as second:
        assert first is not second
    with rooms.buffer() as again:
        assert again is first or again is second
    with rooms.buffer() as once_more, rooms.buffer() as new:
        assert once_more is again
        assert new is not first
        assert new is not second


def test_a_room_begins_at_a_page_and_has_a_block() -> None:
    with BlockBuffers(1).buffer() as room:
        assert len(room) == BLOCK_BYTES
        assert np.frombuffer(room, np.uint8).ctypes.data % PAGE == 0


def test_a_small_file_is_written_whole_and_synced() -> None:
    files = MemoryFiles()
    fd = files.open(f"{ROOT}/a", CREATE)
    write_whole(files, fd, memoryview(b"hello"))
    files.close(fd)
    assert content(files) == b"hello"
    assert files.operations[-1].kind == "sync"
    reader = files.open(f"{ROOT}/a", READ)
    assert files.size(reader) == 5
