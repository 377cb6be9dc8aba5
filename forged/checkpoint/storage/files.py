"""The file operations of a local storage: the port `Files`, and its implementation on the operating system.

Invariants:
- One method is one operation. A refusal is an `OSError`.
- No decisions are made here. All methods are thread-safe.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from forged import file_sync
from forged.checkpoint.ports import WouldBlock

READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""`O_NONBLOCK`, because opening a pipe would wait for its writer."""
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
UNNAMED = os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC
MODE = 0o666
GAP_BYTES_MAX = 1 << 14
"""To read so many bytes takes about as long as another read."""
ROOMS_MAX = os.sysconf("SC_IOV_MAX")
"""How many pieces of memory one read fills at most."""
CACHED_BYTES_MAX = 4 << 20
"""Larger files are not read without waiting, because to copy and to verify them takes longer than to start a thread."""


class DirectoryEntry(NamedTuple):
    """An entry of a directory."""

    name: str
    is_directory: bool
    size: int
    modified_at: float


class Files(Protocol):
    """File operations. Paths are absolute."""

    def open(self, path: str, flags: int) -> int:
        """Returns a descriptor."""
        ...

    def close(self, fd: int) -> None: ...

    def size(self, fd: int) -> int:
        """The size of a regular file; an error for anything else."""
        ...

    def bypass_cache(self, fd: int, *, on: bool) -> None:
        """Turn direct I/O on or off. With direct I/O, offset, length and memory are multiples of a page."""
        ...

    def reserve(self, fd: int, size: int) -> None:
        """Allocate disk space; the file then has this size."""
        ...

    def truncate(self, fd: int, size: int) -> None: ...

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Returns how many bytes were written."""
        ...

    def read(self, fd: int, rooms: Sequence[memoryview], offset: int) -> int:
        """Fill up to `ROOMS_MAX` rooms, one after another; returns how many bytes were read, 0 at the end."""
        ...

    def map(self, fd: int, size: int) -> memoryview:
        """The file as read-only memory, valid after the descriptor is closed."""
        ...

    def read_ahead(self, fd: int, *, on: bool) -> None:
        """Turn the kernel's read-ahead on or off."""
        ...

    def is_cached(self, fd: int, offset: int) -> bool:
        """Whether the page cache has this byte of the file; an error where the system cannot tell."""
        ...

    def lock_alone(self, fd: int) -> bool:
        """Lock the file until it is closed; False if another descriptor has locked it."""
        ...

    def lock_shared(self, fd: int) -> bool:
        """Lock the file, as others may, until it is closed; False if another descriptor has it alone."""
        ...

    def begin_write_back(self, fd: int, offset: int, size: int) -> None:
        """Start write-back of a range without waiting."""
        ...

    def drop_cache(self, fd: int, offset: int, size: int) -> None:
        """Wait for write-back of a range, and drop it from the page cache."""
        ...

    def sync(self, fd: int) -> None:
        """Make the bytes and the size of a file durable."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""
        ...

    def link_open(self, fd: int, path: str) -> None:
        """Give an unnamed file a name that is free."""
        ...

    def link(self, path: str, to: str) -> None:
        """Give a file a further name that is free."""
        ...

    def rename(self, path: str, to: str) -> None:
        """Rename a file, over an existing one."""
        ...

    def rename_new(self, path: str, to: str) -> None:
        """Rename a file to a name that is free."""
        ...

    def unlink(self, path: str) -> None: ...

    def make_directory(self, path: str) -> None: ...

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        ...

    def scan(self, path: str) -> list[DirectoryEntry]:
        """The files and directories in a directory, without links and special files."""
        ...

    def resolve(self, path: str) -> str:
        """The path with links followed as far as it exists."""
        ...

    def free_bytes(self, path: str) -> int:
        """Bytes that an unprivileged process may still write there."""
        ...


class SystemFiles:
    """The operating system's files."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags, MODE)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.ENOTSUP, "not a regular file")
        return status.st_size

    def bypass_cache(self, fd: int, *, on: bool) -> None:
        file_sync.bypass_cache(fd, on=on)

    def reserve(self, fd: int, size: int) -> None:
        file_sync.reserve(fd, size)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def read(self, fd: int, rooms: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, rooms, offset)

    def map(self, fd: int, size: int) -> memoryview:
        return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ) if size else b"")

    def read_ahead(self, fd: int, *, on: bool) -> None:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL if on else os.POSIX_FADV_RANDOM)

    def is_cached(self, fd: int, offset: int) -> bool:
        return file_sync.is_cached(fd, offset)

    def lock_alone(self, fd: int) -> bool:
        return _is_locked(fd, fcntl.LOCK_EX)

    def lock_shared(self, fd: int) -> bool:
        return _is_locked(fd, fcntl.LOCK_SH)

    def begin_write_back(self, fd: int, offset: int, size: int) -> None:
        file_sync.begin_write_back(fd, offset, size)

    def drop_cache(self, fd: int, offset: int, size: int) -> None:
        file_sync.drop_cache(fd, offset, size)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_directory(self, path: str) -> None:
        file_sync.sync_directory(Path(path))

    def link_open(self, fd: int, path: str) -> None:
        # The absolute path makes the directory irrelevant, but Python follows the link only with one.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)

    def link(self, path: str, to: str) -> None:
        os.link(path, to)

    def rename(self, path: str, to: str) -> None:
        Path(path).rename(to)

    def rename_new(self, path: str, to: str) -> None:
        file_sync.rename_new(path, to)

    def unlink(self, path: str) -> None:
        Path(path).unlink()

    def make_directory(self, path: str) -> None:
        Path(path).mkdir()

    def remove_directory(self, path: str) -> None:
        Path(path).rmdir()

    def scan(self, path: str) -> list[DirectoryEntry]:
        with os.scandir(path) as entries:
            return [found for entry in entries if (found := entry_of(entry)) is not None]

    def resolve(self, path: str) -> str:
        return os.path.realpath(path)

    def free_bytes(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize


class CachedFiles(SystemFiles):
    """Reads of small files of local disks that the kernel has in memory; everything else raises `WouldBlock`."""

    def open(self, path: str, flags: int) -> int:
        if flags != READ:
            raise WouldBlock
        try:
            return file_sync.open_cached(path, flags)
        except FileNotFoundError:
            raise
        except OSError:
            raise WouldBlock from None

    def size(self, fd: int) -> int:
        size = super().size(fd)
        if size > CACHED_BYTES_MAX:
            raise WouldBlock
        return size

    def read(self, fd: int, rooms: Sequence[memoryview], offset: int) -> int:
        try:
            return os.preadv(fd, rooms, offset, os.RWF_NOWAIT)
        except OSError:
            raise WouldBlock from None

    def resolve(self, path: str) -> str:
        # `open` refuses links.
        return path

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise WouldBlock

    bypass_cache = reserve = truncate = write = map = is_cached = begin_write_back = drop_cache = _refuse
    sync = sync_directory = link_open = link = rename = rename_new = unlink = _refuse
    make_directory = remove_directory = scan = free_bytes = _refuse


def _is_locked(fd: int, kind: int) -> bool:
    """Lock a file if that needs no waiting; whether it was locked."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def entry_of(entry: os.DirEntry[str]) -> DirectoryEntry | None:
    """The entry; None if it is neither file nor directory, or was removed meanwhile."""
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    is_directory = stat.S_ISDIR(status.st_mode)
    if not is_directory and not stat.S_ISREG(status.st_mode):
        return None
    return DirectoryEntry(entry.name, is_directory, status.st_size, status.st_mtime)


def directory_of(path: str) -> str:
    """The parent of an absolute path."""
    return path.rpartition("/")[0] or "/"
