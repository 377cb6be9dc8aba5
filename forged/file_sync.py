"""What Python lacks for files: sync, cache control, preallocation, exclusive rename, opening without waiting, mounts.

A file's content is durable after the file was synced, its name after the directory was synced. The functions raise
`OSError`; `Mounts` asks no file system, because one may hang: it goes by the kernel's list.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from pathlib import Path

PAGE = 4096
"""The alignment of direct I/O: of the length, the file offset and the memory address."""
MOUNTINFO = Path("/proc/self/mountinfo")
KNOWN_S = 10.0
"""How long the list is taken for the present one."""

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2
_SYNC_FILE_RANGE_WRITE_AND_WAIT = 7
_OPENAT2 = 437
"""The system call, which has the same number on all architectures."""
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_CACHED = 0x20
_AT_EMPTY_PATH = 0x1000
_AT_STATX_DONT_SYNC = 0x4000
_STATX_BYTES = 256
_STATX_DEVICE_AT = 0x88

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_libc.statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)
_libc.syscall.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)
_libc.syscall.restype = ctypes.c_long
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


def open_cached(path: str, flags: int) -> int:
    """Open a file of a local disk without waiting; an error if the kernel does not have the whole path in memory.

    Links and other file systems are refused: to open a file of a network file system may ask its server.
    """
    probe = _open_cached(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not _is_on_disk(probe):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    finally:
        os.close(probe)
    return _open_cached(path, flags)


def _open_cached(path: str, flags: int) -> int:
    how = struct.pack("QQQ", flags, 0, _RESOLVE_CACHED | _RESOLVE_NO_SYMLINKS)
    fd: int = _libc.syscall(_OPENAT2, _AT_FDCWD, os.fsencode(path), how, len(how))
    if fd < 0:
        _check(fd)
    return fd


def _is_on_disk(fd: int) -> bool:
    """Whether a file lies on a block device, by what the kernel remembers: a server is not asked."""
    status = ctypes.create_string_buffer(_STATX_BYTES)
    _check(_libc.statx(fd, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, 0, status))
    # File systems without a block device have the major number 0.
    return bool(struct.unpack_from("I", status, _STATX_DEVICE_AT)[0])


def rename_new(path: str, to: str, source: int = _AT_FDCWD, target: int = _AT_FDCWD) -> None:
    """Rename a file; fails if the new name exists. Relative paths begin at `source` and `target`, open directories."""
    _check(_libc.renameat2(source, os.fsencode(path), target, os.fsencode(to), _RENAME_NOREPLACE))


def _check(result: int) -> None:
    """Raise `OSError` for a failed call of the C library."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class Mounts:
    """The mount points of this host."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._points: list[str] = []
        self._known_until = -inf

    def of(self, path: str) -> str:
        """The mount point that an absolute path lies in."""
        now = self._monotonic()
        if now >= self._known_until:
            self._points, self._known_until = _mount_points(), now + KNOWN_S
        return mount_of(path, self._points)


def mount_of(path: str, mounts: Iterable[str]) -> str:
    """The longest of the mount points that an absolute path lies in."""
    return max((one for one in mounts if path.startswith(f"{one.rstrip('/')}/")), key=len, default="/")


def _mount_points() -> list[str]:
    with suppress(OSError):
        lines = MOUNTINFO.read_text(errors="surrogateescape").splitlines()
        return [re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split(" ", 5)[4]) for line in lines]
    return []
