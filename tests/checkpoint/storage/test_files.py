"""The operating system's files, and those in memory that stand in for them: both do the same."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from forged.checkpoint.storage.files import CREATE, READ, UNNAMED, Files, SystemFiles, directory_of
from forged.checkpoint.storage.nofollow_files import NoFollowFiles
from tests.checkpoint.fixtures.memory_files import EMPTY, ROOT, CrashImages, Image, MemoryFiles

PAGE = 4096


class Place(NamedTuple):
    """Some files, and a directory among them."""

    files: Files
    root: str

    def new(self, name: str, data: bytes = b"") -> str:
        """A file that has this."""
        path = f"{self.root}/{name}"
        fd = self.files.open(path, CREATE)
        assert self.files.write(fd, memoryview(data), 0) == len(data)
        self.files.close(fd)
        return path

    def content(self, path: str) -> bytes:
        fd = self.files.open(path, READ)
        data = bytearray(self.files.size(fd))
        assert self.files.read(fd, [memoryview(data)], 0) == len(data)
        self.files.close(fd)
        return bytes(data)


@pytest.fixture(params=["system", "without links", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "memory":
        return Place(MemoryFiles(), ROOT)
    return Place(SystemFiles() if request.param == "system" else NoFollowFiles(), str(tmp_path))


def refused(code: int, act: Callable[[], object]) -> None:
    with pytest.raises(OSError) as caught:
        act()
    assert caught.value.errno == code


def test_read_returns_written_bytes(place: Place) -> None:
    assert place.content(place.new("a", b"hello")) == b"hello"


def test_a_write_beyond_the_end_leaves_zeros_before_it(place: Place) -> None:
    path = f"{place.root}/a"
    fd = place.files.open(path, CREATE)
    place.files.write(fd, memoryview(b"xy"), 3)
    place.files.close(fd)
    assert place.content(path) == b"\0\0\0xy"


def test_a_read_at_the_end_gives_nothing(place: Place) -> None:
    fd = place.files.open(place.new("a", b"hello"), READ)
    room = memoryview(bytearray(8))
    assert (place.files.read(fd, [room], 3), bytes(room[:2]), place.files.read(fd, [room], 5)) == (2, b"lo", 0)
    place.files.close(fd)


def test_memory_of_a_file_outlives_its_descriptor_and_is_read_only(place: Place) -> None:
    fd = place.files.open(place.new("a", b"hello"), READ)
    memory = place.files.map(fd, 5)
    place.files.close(fd)
    assert (bytes(memory), memory.readonly) == (b"hello", True)


def test_an_empty_file_is_empty_memory(place: Place) -> None:
    fd = place.files.open(place.new("a"), READ)
    assert bytes(place.files.map(fd, 0)) == b""
    place.files.close(fd)


def test_a_new_file_replaces_none(place: Place) -> None:
    path = place.new("a", b"old")
    refused(errno.EEXIST, lambda: place.files.open(path, CREATE))
    assert place.content(path) == b"old"


def test_room_that_is_reserved_is_there_and_zero(place: Place) -> None:
    path = f"{place.root}/a"
    fd = place.files.open(path, CREATE)
    place.files.reserve(fd, 2 * PAGE)
    place.files.truncate(fd, PAGE + 1)
    place.files.sync(fd)
    assert place.files.size(fd) == PAGE + 1
    place.files.close(fd)
    assert place.content(path) == bytes(PAGE + 1)


def test_past_the_cache_only_whole_pages_are_taken(place: Place) -> None:
    path = f"{place.root}/a"
    fd = place.files.open(path, CREATE)
    room = memoryview(mmap.mmap(-1, 2 * PAGE))
    room[:PAGE] = b"x" * PAGE
    place.files.bypass_cache(fd, on=True)
    assert place.files.write(fd, room[:PAGE], 0) == PAGE
    refused(errno.EINVAL, lambda: place.files.write(fd, room[1 : PAGE + 1], PAGE))
    refused(errno.EINVAL, lambda: place.files.write(fd, room[:100], PAGE))
    place.files.bypass_cache(fd, on=False)
    assert place.files.write(fd, room[:100], PAGE) == 100
    place.files.close(fd)
    assert place.content(path) == b"x" * (PAGE + 100)


def test_cached_pages_can_be_written_back_and_dropped(place: Place) -> None:
    path = place.new("a", b"x" * PAGE)
    fd = place.files.open(path, READ)
    place.files.begin_write_back(fd, 0, PAGE)
    place.files.drop_cache(fd, 0, PAGE)
    for on in (True, False):
        place.files.read_ahead(fd, on=on)
    place.files.close(fd)
    assert place.content(path) == b"x" * PAGE


def test_buffered_writes_are_in_the_page_cache(place: Place) -> None:
    fd = place.files.open(place.new("a", b"x" * (PAGE + 5)), READ)
    assert all(place.files.is_cached(fd, offset) for offset in (0, PAGE - 1, PAGE, PAGE + 4))
    place.files.close(fd)


def test_only_one_is_alone_with_a_file_until_it_closes_it(place: Place) -> None:
    first, second = (place.files.open(path, READ) for path in [place.new("a")] * 2)
    assert place.files.lock_alone(first)
    assert place.files.lock_alone(first)
    assert not place.files.lock_alone(second)
    place.files.close(first)
    assert place.files.lock_alone(second)
    place.files.close(second)


def test_shared_locks_coexist_and_refuse_an_exclusive_lock(place: Place) -> None:
    first, second, third = (place.files.open(path, READ) for path in [place.new("a")] * 3)
    assert place.files.lock_shared(first)
    assert place.files.lock_shared(second)
    assert not place.files.lock_alone(third)
    place.files.close(first)
    assert not place.files.lock_alone(third)
    place.files.close(second)
    assert place.files.lock_alone(third)
    place.files.close(third)


def test_dropped_pages_are_not_in_the_page_cache(tmp_path: Path) -> None:
    place = Place(SystemFiles(), str(tmp_path))
    path = place.new("a", b"x" * 100 * PAGE)
    fd = place.files.open(path, READ)
    place.files.drop_cache(fd, 0, 100 * PAGE)
    for offset in (0, PAGE, 2 * PAGE - 1, 99 * PAGE):
        assert not place.files.is_cached(fd, offset), "to look at one brings none of them there"
    assert place.files.read(fd, [memoryview(bytearray(1))], 50 * PAGE) == 1
    assert place.files.is_cached(fd, 50 * PAGE)
    place.files.close(fd)


def test_unnamed_file_gets_a_free_name(place: Place) -> None:
    taken = place.new("taken", b"old")
    fd = place.files.open(place.root, UNNAMED)
    place.files.write(fd, memoryview(b"new"), 0)
    assert [found.name for found in place.files.scan(place.root)] == ["taken"]
    refused(errno.EEXIST, lambda: place.files.link_open(fd, taken))
    place.files.link_open(fd, f"{place.root}/named")
    place.files.close(fd)
    assert (place.content(taken), place.content(f"{place.root}/named")) == (b"old", b"new")


def test_link_and_rename_new_replace_no_file(place: Place) -> None:
    a, b = place.new("a", b"a"), place.new("b", b"b")
    refused(errno.EEXIST, lambda: place.files.link(a, b))
    refused(errno.EEXIST, lambda: place.files.rename_new(a, b))
    place.files.link(a, f"{a}2")
    place.files.rename_new(a, f"{a}3")
    assert {found.name for found in place.files.scan(place.root)} == {"a2", "a3", "b"}
    refused(errno.ENOENT, lambda: place.files.rename_new(a, f"{a}4"))


def test_a_rename_replaces(place: Place) -> None:
    a, b = place.new("a", b"a"), place.new("b", b"b")
    place.files.rename(a, b)
    assert place.content(b) == b"a"
    refused(errno.ENOENT, lambda: place.files.rename(a, b))


def test_a_directory_goes_when_it_is_empty(place: Place) -> None:
    directory = f"{place.root}/d"
    place.files.make_directory(directory)
    refused(errno.EEXIST, lambda: place.files.make_directory(directory))
    inside = place.new("d/a")
    refused(errno.ENOTEMPTY, lambda: place.files.remove_directory(directory))
    place.files.unlink(inside)
    place.files.sync_directory(directory)
    place.files.remove_directory(directory)
    refused(errno.ENOENT, lambda: place.files.remove_directory(directory))
    refused(errno.ENOENT, lambda: place.files.sync_directory(directory))
    refused(errno.ENOENT, lambda: place.files.make_directory(f"{directory}/e"))


def test_missing_paths_and_directories_are_refused(place: Place) -> None:
    place.files.make_directory(f"{place.root}/d")
    place.new("a")
    refused(errno.ENOENT, lambda: place.files.open(f"{place.root}/missing", READ))
    refused(errno.ENOENT, lambda: place.files.open(f"{place.root}/missing/a", CREATE))
    refused(errno.ENOENT, lambda: place.files.open(f"{place.root}/missing", UNNAMED))
    refused(errno.ENOTDIR, lambda: place.files.open(f"{place.root}/a/b", CREATE))
    refused(errno.ENOENT, lambda: place.files.unlink(f"{place.root}/missing"))
    refused(errno.ENOENT, lambda: place.files.scan(f"{place.root}/missing"))
    refused(errno.ENOTDIR, lambda: place.files.scan(f"{place.root}/a"))
    refused(errno.ENOENT, lambda: place.files.free_bytes(f"{place.root}/missing"))


def test_a_directory_is_no_file(place: Place) -> None:
    place.files.make_directory(f"{place.root}/d")

    def look() -> None:
        fd = place.files.open(f"{place.root}/d", READ)
        try:
            place.files.size(fd)
        finally:
            place.files.close(fd)

    refused(errno.EISDIR, look)


def test_a_scan_tells_files_from_directories(place: Place) -> None:
    place.new("a", b"hello")
    place.files.make_directory(f"{place.root}/d")
    found = {each.name: (each.is_directory, each.size) for each in place.files.scan(place.root)}
    assert found["a"] == (False, 5)
    assert found["d"][0]


def test_scan_finds_no_links_or_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert SystemFiles().scan(str(tmp_path)) == []


def test_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    fd = SystemFiles().open(str(tmp_path / "pipe"), READ)
    refused(errno.ENOTSUP, lambda: SystemFiles().size(fd))
    SystemFiles().close(fd)


def test_a_path_is_resolved_as_far_as_it_exists(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert SystemFiles().resolve(f"{tmp_path}/link/missing") == f"{tmp_path.resolve()}/real/missing"


def test_free_bytes_are_those_of_anyone(tmp_path: Path) -> None:
    assert 0 < SystemFiles().free_bytes(str(tmp_path)) <= os.statvfs(tmp_path).f_bfree * os.statvfs(tmp_path).f_frsize


def test_the_directory_of_a_path() -> None:
    assert [directory_of(path) for path in ("/a/b", "/a", "/")] == ["/a", "/", "/"]


@pytest.mark.parametrize(
    ("ability", "act"),
    [
        ("unnamed", lambda files: files.open(ROOT, UNNAMED)),
        ("direct", lambda files: files.bypass_cache(files.open(f"{ROOT}/a", CREATE), on=True)),
        ("reserve", lambda files: files.reserve(files.open(f"{ROOT}/a", CREATE), 1)),
    ],
)
def test_memory_files_can_lack_an_ability(ability: str, act: Callable[[Files], object]) -> None:
    refused(errno.EOPNOTSUPP, lambda: act(MemoryFiles(lacking=[ability])))
    act(MemoryFiles())


def test_memory_is_full_when_it_has_no_room() -> None:
    files = MemoryFiles(room=10)
    fd = files.open(f"{ROOT}/a", CREATE)
    refused(errno.ENOSPC, lambda: files.reserve(fd, 11))
    files.write(fd, memoryview(b"123456"), 0)
    refused(errno.ENOSPC, lambda: files.write(fd, memoryview(b"12345"), 6))
    assert files.free_bytes(ROOT) == 4


# Power cuts.


def after_power_cuts(files: MemoryFiles) -> set[tuple[tuple[str, bytes], ...]]:
    """All that may be found now, as files."""
    platter = CrashImages(files)
    for operation in files.operations:
        platter.follow(operation)
    return {tuple(sorted(image.files.items())) for image in platter.crashes(Random(0), 10_000, torn=50)}


def written(files: MemoryFiles, name: str, data: bytes, *, synced: bool) -> None:
    fd = files.open(f"{ROOT}/{name}", CREATE)
    files.write(fd, memoryview(data), 0)
    if synced:
        files.sync(fd)
    files.close(fd)


def test_a_file_that_was_synced_has_its_bytes_if_it_has_its_name() -> None:
    files = MemoryFiles()
    written(files, "a", b"hello", synced=True)
    assert after_power_cuts(files) == {(), ((f"{ROOT}/a", b"hello"),)}
    files.sync_directory(ROOT)
    assert after_power_cuts(files) == {((f"{ROOT}/a", b"hello"),)}


def test_a_file_that_was_not_synced_may_have_any_of_its_sectors() -> None:
    files = MemoryFiles()
    written(files, "a", b"x" * 1024, synced=False)
    files.sync_directory(ROOT)
    found = {data for image in after_power_cuts(files) for _, data in image}
    assert found == {b"", b"x" * 512, b"\0" * 512 + b"x" * 512, b"x" * 1024}


def test_a_rename_that_was_not_synced_may_be_there_half() -> None:
    files = MemoryFiles()
    written(files, "a", b"A", synced=True)
    files.sync_directory(ROOT)
    files.rename(f"{ROOT}/a", f"{ROOT}/b")
    a, b = (f"{ROOT}/a", b"A"), (f"{ROOT}/b", b"A")
    assert after_power_cuts(files) == {(), (a,), (b,), (a, b)}
    files.sync_directory(ROOT)
    assert after_power_cuts(files) == {(b,)}


def test_a_file_is_found_only_where_its_directory_is() -> None:
    files = MemoryFiles()
    files.make_directory(f"{ROOT}/d")
    written(files, "d/a", b"A", synced=True)
    files.sync_directory(f"{ROOT}/d")
    assert after_power_cuts(files) == {(), ((f"{ROOT}/d/a", b"A"),)}
    files.sync_directory(ROOT)
    assert after_power_cuts(files) == {((f"{ROOT}/d/a", b"A"),)}


def test_unsynced_replacement_may_be_undone_by_a_power_cut() -> None:
    files = MemoryFiles(Image({f"{ROOT}/a": b"A"}, EMPTY.directories))
    files.unlink(f"{ROOT}/a")
    written(files, "a", b"B", synced=True)
    assert after_power_cuts(files) == {(), ((f"{ROOT}/a", b"A"),), ((f"{ROOT}/a", b"B"),)}
