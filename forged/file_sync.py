"""File-system calls that Python lacks: sync, cache control, preallocation, exclusive rename.

A file's content is durable after the file was synced, its name after the directory was synced. All functions raise
`OSError`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

PAGE = 4096
"""The alignment of direct I/O: of the length, the file offset and the memory address."""

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2
_SYNC_FILE_RANGE_WRITE_AND_WAIT = 7

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_libc.renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)


def sync_directory(directory: Path) -> None:
    """Make the entries of a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Make a directory and its parents durably, where they are missing."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_directory(made.parent)


def bypass_cache(fd: int, *, on: bool) -> None:
    """Switch direct I/O on or off. Some file systems fail only at the later write."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


def reserve(fd: int, size: int) -> None:
    """Allocate disk space and set the file size."""
    # Not `os.posix_fallocate`: without file-system support glibc emulates it by writing every block.
    _check(_libc.fallocate(fd, 0, 0, size))


def begin_write_back(fd: int, offset: int, size: int) -> None:
    """Start writing cached pages of a file, without waiting."""
    _check(_libc.sync_file_range(fd, offset, size, _SYNC_FILE_RANGE_WRITE))


def drop_cache(fd: int, offset: int, size: int) -> None:
    """Wait until the range is written, and drop it from the page cache."""
    _check(_libc.sync_file_range(fd, offset, size, _SYNC_FILE_RANGE_WRITE_AND_WAIT))
    os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)


def is_cached(fd: int, offset: int) -> bool:
    """Whether the page cache holds this byte of a file."""
    return _is_resident(fd, offset) if _may_query_cache(fd) else _reads_without_waiting(fd, offset)


def _may_query_cache(fd: int) -> bool:
    """Whether `mincore` is accurate for this file; without owner or write access it reports all as cached."""
    return os.fstat(fd).st_uid == os.geteuid() or os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)


def _is_resident(fd: int, offset: int) -> bool:
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    is_resident = ctypes.create_string_buffer(1)
    try:
        pages = mmap.mmap(fd, offset - start + 1, access=mmap.ACCESS_COPY, offset=start)
    except ValueError as error:
        # The file was truncated.
        raise OSError(errno.EINVAL, str(error)) from error
    with pages:
        byte = ctypes.c_char.from_buffer(pages)
        try:
            _check(_libc.mincore(ctypes.addressof(byte), 1, is_resident))
        finally:
            del byte
    return bool(is_resident.raw[0] & 1)


def _reads_without_waiting(fd: int, offset: int) -> bool:
    """Test by a non-blocking read, after which the kernel may read ahead."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


def rename_new(path: str, to: str) -> None:
    """Rename a file; fails if the new name exists."""
    _check(_libc.renameat2(_AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(to), _RENAME_NOREPLACE))


def _check(result: int) -> None:
    """Raise `OSError` for a failed call of the C library."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
