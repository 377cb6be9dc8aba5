"""What is read is what the file has, out of the cache, past it, or both ways."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.checkpoint.ports import BLOCK_BYTES, CancelToken
from forged.checkpoint.storage import cache_bypass
from forged.checkpoint.storage.cache_bypass import FileReader
from forged.checkpoint.storage.direct_write import BlockBuffers
from forged.checkpoint.storage.files import READ, ROOMS_MAX, Files, SystemFiles
from forged.checkpoint.storage.rooms import rooms_between
from forged.checkpoint.thread_pool import run_all
from tests.checkpoint.fixtures.faulty_files import Act, failing, with_fault
from tests.checkpoint.fixtures.memory_files import EMPTY, ROOT, Image, MemoryFiles
from tests.checkpoint.fixtures.sources import PAGE, pattern

PATH = f"{ROOT}/a"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are read past the cache, too."""
    monkeypatch.setattr(cache_bypass, "FILE_BYTES_MIN", 1)
    monkeypatch.setattr(cache_bypass, "READ_BYTES_MIN", 1)


def cold(data: bytes, lacking: tuple[str, ...] = ()) -> MemoryFiles:
    """Files with one that is not cached."""
    files = MemoryFiles(Image({PATH: data}, EMPTY.directories), lacking)
    files.is_warm = False
    return files


def read(files: Files, offset: int, length: int, path: str = PATH) -> bytes:
    room = bytearray(length)
    return bytes(room[: read_rooms(files, offset, [memoryview(room)], path)])


def read_rooms(files: Files, offset: int, rooms: list[memoryview], path: str = PATH) -> int:
    fd = files.open(path, READ)
    drained = FileReader(files, fd, path, BlockBuffers(2))
    try:
        return drained.read(offset, rooms)
    finally:
        drained.close()
        files.close(fd)


def watched(files: MemoryFiles) -> tuple[Files, Counter[str]]:
    """The same files, and how often each thing was asked of them."""
    asked: Counter[str] = Counter()

    def count(number: int, name: str, act: Act) -> Any:
        asked[name] += 1
        return act()

    return with_fault(files, count), asked


@pytest.mark.parametrize("offset", [0, 1, PAGE - 1, PAGE, 3 * PAGE + 7])
@pytest.mark.parametrize("length", [0, 1, PAGE, PAGE + 1, 5 * PAGE])
def test_any_part_of_a_cold_file_is_read_as_it_is(offset: int, length: int) -> None:
    data = pattern(8 * PAGE + 5)
    assert read(cold(data), offset, length) == data[offset : offset + length]


@given(st.data(), st.booleans(), st.lists(st.sampled_from([0, 1, 700, PAGE, 3 * PAGE + 5]), max_size=6))
def test_several_rooms_are_filled_by_short_reads_out_of_the_cache_and_past_it(
    data: st.DataObject, is_warm: bool, lengths: list[int]
) -> None:
    content = pattern(9 * PAGE + 5)
    files = cold(content)
    files.is_warm = is_warm

    def short(number: int, name: str, act: Act) -> Any:
        if name != "read":
            return act()
        assert isinstance(act, partial)
        fd, rooms, offset = act.args
        if files._handles[fd].is_direct:
            return min(act(), data.draw(st.sampled_from([PAGE + 512, 1 << 30])))
        return act.func(fd, rooms_between(rooms, 0, data.draw(st.sampled_from([1_999, 1 << 30]))), offset)

    rooms = [memoryview(bytearray(length)) for length in lengths]
    offset = data.draw(st.integers(0, 10 * PAGE))
    done = read_rooms(with_fault(files, short), offset, rooms)
    assert done == len(content[offset : offset + sum(lengths)])
    assert b"".join(rooms)[:done] == content[offset : offset + done]


def test_more_rooms_than_one_read_may_fill_are_filled_by_several() -> None:
    for is_warm in (False, True):
        files = cold(pattern(4 * PAGE))
        files.is_warm = is_warm
        rooms = [memoryview(bytearray(3)) for _ in range(2 * ROOMS_MAX + 1)]
        assert read_rooms(files, 1, rooms) == 3 * len(rooms)
        assert b"".join(rooms) == pattern(4 * PAGE)[1 : 1 + 3 * len(rooms)]


def test_more_than_a_block_is_read_as_it_is() -> None:
    data = pattern(2 * BLOCK_BYTES + 2 * PAGE)
    assert read(cold(data), 5, 2 * BLOCK_BYTES) == data[5 : 2 * BLOCK_BYTES + 5]


def test_where_a_cold_file_ends_the_reading_ends() -> None:
    data = pattern(2 * PAGE + 5)
    for offset in (0, 2 * PAGE + 4, 2 * PAGE + 5, 10 * PAGE):
        assert read(cold(data), offset, 4 * PAGE) == data[offset:]


def test_a_cold_file_goes_past_the_cache_and_a_warm_one_does_not() -> None:
    files = cold(pattern(4 * PAGE))
    for is_warm in (False, True):
        files.is_warm = is_warm
        seen: list[bool] = []

        def look(number: int, name: str, act: Act, seen: list[bool] = seen) -> Any:
            if name == "read":
                assert isinstance(act, partial)
                seen.append(files._handles[act.args[0]].is_direct)
            return act()

        assert read(with_fault(files, look), 0, 4 * PAGE) == pattern(4 * PAGE)
        assert seen == [not is_warm]


@pytest.mark.parametrize("lacking", ["direct", "lock_alone", "is_cached"])
def test_read_works_without_file_system_abilities(lacking: str) -> None:
    files = cold(pattern(4 * PAGE), (lacking,))
    assert read(files, 3, 3 * PAGE) == pattern(4 * PAGE)[3 : 3 * PAGE + 3]
    assert files.descriptors == 0


def test_second_reader_reads_through_the_cache() -> None:
    files = cold(pattern(4 * PAGE))
    other = files.open(PATH, READ)
    assert files.lock_alone(other)
    counted, asked = watched(files)
    assert read(counted, 0, 4 * PAGE) == pattern(4 * PAGE)
    assert (asked["bypass_cache"], asked["read_ahead"]) == (0, 1)


def test_small_files_and_small_reads_go_through_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    files = cold(pattern(4 * PAGE))
    for name in ("FILE_BYTES_MIN", "READ_BYTES_MIN"):
        with monkeypatch.context() as patch:
            patch.setattr(cache_bypass, name, 1 << 30)
            counted, asked = watched(files)
            assert read(counted, 0, 4 * PAGE) == pattern(4 * PAGE)
            assert asked["is_cached"] == 0


def test_a_file_system_may_say_late_that_it_reads_nothing_past_the_cache() -> None:
    files = cold(pattern(4 * PAGE))

    def fault(number: int, name: str, act: Act) -> Any:
        if name == "read":
            assert isinstance(act, partial)
            if files._handles[act.args[0]].is_direct:
                raise OSError(errno.EINVAL, "no")
        return act()

    assert read(with_fault(files, fault), 5, 3 * PAGE) == pattern(4 * PAGE)[5 : 3 * PAGE + 5]
    assert files.descriptors == 0


def test_short_reads_past_the_cache_are_gone_on_with() -> None:
    files = cold(pattern(9 * PAGE))

    def fault(number: int, name: str, act: Act) -> Any:
        if name != "read":
            return act()
        assert isinstance(act, partial)
        fd, room, offset = act.args
        return min(act.func(fd, room, offset), PAGE + 512)

    assert read(with_fault(files, fault), 7, 8 * PAGE) == pattern(9 * PAGE)[7 : 8 * PAGE + 7]


def test_failed_read_raises_and_leaves_no_open_descriptor() -> None:
    files = cold(pattern(4 * PAGE))
    with pytest.raises(OSError, match="Input/output"):
        read(with_fault(files, failing("read", errno.EIO)), 0, PAGE)
    assert files.descriptors == 0


@pytest.fixture
def real(tmp_path: Path) -> Callable[[], tuple[str, bytes]]:
    """A real file that the page cache has not."""
    path, data = tmp_path / "a", Random(0).randbytes(3 * BLOCK_BYTES + 1234)
    path.write_bytes(data)
    files = SystemFiles()

    def chilled() -> tuple[str, bytes]:
        fd = files.open(str(path), READ)
        files.drop_cache(fd, 0, len(data))
        files.close(fd)
        return str(path), data

    return chilled


def test_a_real_cold_file_is_read_as_it_is(real: Callable[[], tuple[str, bytes]]) -> None:
    path, data = real()
    for offset, length in [(0, len(data)), (777, len(data) - 777), (len(data) - 5, 100), (PAGE, BLOCK_BYTES)]:
        real()
        assert read(SystemFiles(), offset, length, path) == data[offset : offset + length]


def test_a_small_read_does_not_make_a_cold_file_look_warm(real: Callable[[], tuple[str, bytes]]) -> None:
    path, data = real()
    files = SystemFiles()
    fd = files.open(path, READ)
    drained = FileReader(files, fd, path, BlockBuffers(2))
    room = memoryview(bytearray(PAGE))
    assert drained.read(0, [room]) == PAGE
    assert not any(files.is_cached(fd, offset) for offset in range(PAGE, len(data), PAGE))
    drained.close()
    files.close(fd)


def test_where_a_file_has_become_shorter_meanwhile_the_reading_ends(real: Callable[[], tuple[str, bytes]]) -> None:
    path, data = real()
    files = SystemFiles()
    fd = files.open(path, READ)
    drained = FileReader(files, fd, path, BlockBuffers(2))
    os.truncate(path, PAGE + 5)
    room = memoryview(bytearray(len(data)))
    assert drained.read(0, [room]) == PAGE + 5
    assert room[: PAGE + 5] == data[: PAGE + 5]
    drained.close()
    files.close(fd)


def test_advice_that_is_refused_is_done_without() -> None:
    files = cold(pattern(4 * PAGE))
    assert read(with_fault(files, failing("read_ahead", errno.EINVAL)), 3, PAGE) == pattern(4 * PAGE)[3 : PAGE + 3]
    assert files.descriptors == 0


def test_several_threads_read_one_file(real: Callable[[], tuple[str, bytes]]) -> None:
    path, data = real()
    fd = SystemFiles().open(path, READ)
    drained = FileReader(SystemFiles(), fd, path, BlockBuffers(2))
    room, threads = memoryview(bytearray(len(data))), set()

    def act(offset: int) -> None:
        threads.add(threading.get_ident())
        end = min(offset + 1_000_003, len(data))
        assert drained.read(offset, [room[offset:end]]) == end - offset

    run_all(act, range(0, len(data), 1_000_003), CancelToken(), 4)
    drained.close()
    SystemFiles().close(fd)
    assert bytes(room) == data
