"""What the disk under a file is asked for, beyond what Python has calls for.

Law: the bytes of a file and its name last separately: the one when the file was synced, the other when its directory
was. Whatever is refused is an `OSError`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

PAGE = 4096
"""What goes past the page cache does so in multiples of it: its length, its place in the file, and in memory."""

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
    """Make the names in a directory durable, as they are now."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def bypass_cache(fd: int, *, on: bool) -> None:
    """Have bytes go past the page cache, or not. Some file systems refuse only the bytes."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


def reserve(fd: int, size: int) -> None:
    """Room on the disk for so many bytes; the file is then so large."""
    # Not `os.posix_fallocate`: where the file system cannot, glibc writes into every block instead.
    _succeed(_libc.fallocate(fd, 0, 0, size))


def begin_write_back(fd: int, offset: int, size: int) -> None:
    """Have what the page cache holds of a file written, and do not wait."""
    _succeed(_libc.sync_file_range(fd, offset, size, _SYNC_FILE_RANGE_WRITE))


def drop_cache(fd: int, offset: int, size: int) -> None:
    """Wait until it is written, and have the page cache forget it."""
    _succeed(_libc.sync_file_range(fd, offset, size, _SYNC_FILE_RANGE_WRITE_AND_WAIT))
    os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)


def is_cached(fd: int, offset: int) -> bool:
    """Whether the page cache has a byte of a file."""
    return _is_resident(fd, offset) if _is_ours(fd) else _is_read_at_once(fd, offset)


def _is_ours(fd: int) -> bool:
    """Whether the system tells us what it has cached of a file; to others it says that it has all."""
    return os.fstat(fd).st_uid == os.geteuid() or os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)


def _is_resident(fd: int, offset: int) -> bool:
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    is_resident = ctypes.create_string_buffer(1)
    try:
        pages = mmap.mmap(fd, offset - start + 1, access=mmap.ACCESS_COPY, offset=start)
    except ValueError as error:
        # The file has become shorter.
        raise OSError(errno.EINVAL, str(error)) from error
    with pages:
        byte = ctypes.c_char.from_buffer(pages)
        try:
            _succeed(_libc.mincore(ctypes.addressof(byte), 1, is_resident))
        finally:
            del byte
    return bool(is_resident.raw[0] & 1)


def _is_read_at_once(fd: int, offset: int) -> bool:
    """The same by a read that does not wait, behind which the kernel may read ahead, unless it was told not to."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


def rename_new(path: str, to: str) -> None:
    """Give a file another name, which nobody has."""
    _succeed(_libc.renameat2(_AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(to), _RENAME_NOREPLACE))


def _succeed(result: int) -> None:
    """What the C library answers, as an error if it is one."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
