from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path

import pytest

from forged import file_sync
from forged.file_sync import KNOWN_S, PAGE, Mounts, bypass_cache, mount_of, sync_directory

MOUNT_LINES = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n23 22 0:5 / /mnt/a\\040b rw - nfs server:/a rw\n"


def test_sync_directory_syncs_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[os.stat_result] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd)))
    sync_directory(tmp_path)
    (found,) = synced
    assert stat.S_ISDIR(found.st_mode)
    assert found.st_ino == tmp_path.stat().st_ino


def test_syncing_a_path_that_is_no_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        sync_directory(tmp_path / "file")


def test_cached_files_of_a_disk_are_opened_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"hello")
    fd = open_cached_or_skip(tmp_path / "file")
    try:
        assert os.read(fd, 10) == b"hello"
    finally:
        os.close(fd)
    with pytest.raises(FileNotFoundError):
        (tmp_path / "missing").open()
    with pytest.raises(FileNotFoundError):
        file_sync.open_cached(str(tmp_path / "missing"), os.O_RDONLY)


def test_links_are_not_opened_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory/file").touch()
    os.close(open_cached_or_skip(tmp_path / "directory/file"))
    (tmp_path / "link").symlink_to("directory")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        file_sync.open_cached(str(tmp_path / "link/file"), os.O_RDONLY)


def test_files_that_are_not_on_a_disk_are_not_opened_without_waiting() -> None:
    before = open_descriptors()
    for path in ("/proc/version", "/proc/self/maps"):
        with pytest.raises(OSError, match=r"\["):
            file_sync.open_cached(path, os.O_RDONLY)
    assert open_descriptors() == before


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def open_cached_or_skip(path: Path) -> int:
    """Open a file; skip the test if it is not on a disk, or the kernel is too old."""
    try:
        return file_sync.open_cached(str(path), os.O_RDONLY)
    except OSError as error:
        if error.errno in {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EPERM}:
            pytest.skip(f"{path}: {error}")
        raise


def test_direct_writes_are_whole_pages(tmp_path: Path) -> None:
    memory = memoryview(mmap.mmap(-1, PAGE))
    memory[:] = bytes(range(256)) * (PAGE // 256)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        bypass_cache(fd, on=True)
        assert os.pwrite(fd, memory, 0) == PAGE
        with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
            os.pwrite(fd, memory[1:100], 1)
        bypass_cache(fd, on=False)
        assert os.pwrite(fd, b"more", PAGE) == 4
    finally:
        os.close(fd)
    assert (tmp_path / "file").read_bytes() == bytes(memory) + b"more"


def test_room_is_reserved_as_a_size(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file_sync.reserve(file.fileno(), 10_000)
    assert (tmp_path / "file").stat().st_size == 10_000


def test_existing_name_is_not_overwritten(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("one")
    file_sync.rename_new(str(one), str(other))
    one.write_text("again")
    with pytest.raises(FileExistsError):
        file_sync.rename_new(str(one), str(other))
    assert other.read_text() == "one"


def test_the_cache_is_written_and_forgotten(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        file.write(b"data")
        file_sync.begin_write_back(file.fileno(), 0, 4)
        file_sync.drop_cache(file.fileno(), 0, 4)
        assert os.pread(file.fileno(), 4, 0) == b"data"


def test_path_that_is_no_file_is_refused() -> None:
    outlet, inlet = os.pipe()
    try:
        with pytest.raises(OSError, match=os.strerror(errno.ESPIPE)):
            file_sync.begin_write_back(inlet, 0, 1)
    finally:
        os.close(outlet)
        os.close(inlet)


@pytest.mark.parametrize("is_ours", [True, False])
def test_cached_bytes_are_reported_to_owners_and_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_ours: bool
) -> None:
    """`mincore` reports everything as cached to other users, so the test read is used."""
    monkeypatch.setattr(file_sync, "_may_query_cache", lambda fd: is_ours)
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        file.write(bytes(10 * PAGE))
        assert file_sync.is_cached(file.fileno(), 5 * PAGE)
        file_sync.drop_cache(file.fileno(), 0, 10 * PAGE)
        assert not file_sync.is_cached(file.fileno(), 5 * PAGE)


def test_cache_query_beyond_the_end_of_a_file_is_an_error(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        file.write(bytes(PAGE))
        with pytest.raises(OSError, match="greater than file size"):
            file_sync.is_cached(file.fileno(), 5 * PAGE)


def test_a_file_may_query_cache_if_we_own_it_or_may_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "file").open("wb") as file:
        assert file_sync._may_query_cache(file.fileno())
        monkeypatch.setattr(os, "geteuid", lambda: os.fstat(file.fileno()).st_uid + 1)
        for may_write in (True, False):
            monkeypatch.setattr(os, "access", lambda path, mode, effective_ids, may=may_write: may)
            assert file_sync._may_query_cache(file.fileno()) == may_write


def test_path_lies_in_the_innermost_mount() -> None:
    points = ["/", "/ckpt", "/ckpt/nfs", "/ckpt/nfs2"]
    assert mount_of("/ckpt/nfs/run/a", points) == "/ckpt/nfs"
    assert mount_of("/ckpt/nfs3/run/a", points) == "/ckpt"
    assert mount_of("/home/run/a", points) == "/"
    assert mount_of("/home/run/a", []) == "/"


def test_list_is_read_again_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_sync, "MOUNTINFO", tmp_path / "mountinfo")
    now = [0.0]
    found = Mounts(lambda: now[0])
    assert found.of("/mnt/a b/run") == "/"
    (tmp_path / "mountinfo").write_text(MOUNT_LINES)
    assert found.of("/mnt/a b/run") == "/"
    now[0] = KNOWN_S
    assert found.of("/mnt/a b/run") == "/mnt/a b"
