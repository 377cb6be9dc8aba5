"""What a local storage asks of the operating system.

Law: one method is one thing asked, and says with an `OSError` that it was refused, whatever the library of the platform
makes of it. Nothing is decided here. All of it may be called from several threads.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from pathlib import Path
from typing import NamedTuple, Protocol

from forged import file_sync

READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""`O_NONBLOCK`: a pipe that lies there must not keep whoever opens it."""
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
UNNAMED = os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC
MODE = 0o666


class DirectoryEntry(NamedTuple):
    """What lies in a directory."""

    name: str
    is_directory: bool
    size: int
    modified_at: float


class Files(Protocol):
    """The operating system's files. Paths are absolute."""

    def open(self, path: str, flags: int) -> int:
        """A descriptor."""
        ...

    def close(self, fd: int) -> None:
        """Give it back."""
        ...

    def size(self, fd: int) -> int:
        """How many bytes a file has; an error if it is no regular file."""
        ...

    def bypass_cache(self, fd: int, *, on: bool) -> None:
        """Have bytes go past the page cache, or not: whole blocks then, from memory that begins at one."""
        ...

    def reserve(self, fd: int, size: int) -> None:
        """Room on the disk for so many bytes; the file is then so large."""
        ...

    def truncate(self, fd: int, size: int) -> None:
        """Cut it off there."""
        ...

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """How much of it was written."""
        ...

    def read(self, fd: int, room: memoryview, offset: int) -> int:
        """How much was read; nothing at the end."""
        ...

    def map(self, fd: int, size: int) -> memoryview:
        """The file as memory that can only be read; it stays when the descriptor is closed."""
        ...

    def read_ahead(self, fd: int, *, on: bool) -> None:
        """It will be read from one end to the other; or nothing is to be read into the page cache but what is asked."""
        ...

    def is_cached(self, fd: int, offset: int) -> bool:
        """Whether the page cache has a byte of it, which it must have; an error where nobody can tell."""
        ...

    def lock_alone(self, fd: int) -> bool:
        """Whether nobody else has it open so, here or in another process; until it is closed."""
        ...

    def begin_write_back(self, fd: int, offset: int, size: int) -> None:
        """Have what the page cache holds of it written, and do not wait."""
        ...

    def drop_cache(self, fd: int, offset: int, size: int) -> None:
        """Wait until it is written, and have the page cache forget it."""
        ...

    def sync(self, fd: int) -> None:
        """Make the bytes of a file durable, and its size."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable, as they are now."""
        ...

    def link_open(self, fd: int, path: str) -> None:
        """Give an unnamed file a name that nobody has."""
        ...

    def link(self, path: str, to: str) -> None:
        """Give a file one more name, which nobody has."""
        ...

    def rename(self, path: str, to: str) -> None:
        """Give it another name, in place of whoever has that."""
        ...

    def rename_new(self, path: str, to: str) -> None:
        """Give it another name, which nobody has."""
        ...

    def unlink(self, path: str) -> None:
        """Take a file's name away."""
        ...

    def make_directory(self, path: str) -> None:
        """A new one."""
        ...

    def remove_directory(self, path: str) -> None:
        """One that is empty."""
        ...

    def scan(self, path: str) -> list[DirectoryEntry]:
        """The files and directories in one; links and whatever else there may be are left out."""
        ...

    def resolve(self, path: str) -> str:
        """Where a path leads when all links are followed, so far as it exists."""
        ...

    def free_bytes(self, path: str) -> int:
        """How much anyone may still write there."""
        ...


class SystemFiles:
    """The real ones."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags, MODE)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.ENOTSUP, "it is no file")
        return status.st_size

    def bypass_cache(self, fd: int, *, on: bool) -> None:
        file_sync.bypass_cache(fd, on=on)

    def reserve(self, fd: int, size: int) -> None:
        file_sync.reserve(fd, size)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def read(self, fd: int, room: memoryview, offset: int) -> int:
        return os.preadv(fd, [room], offset)

    def map(self, fd: int, size: int) -> memoryview:
        return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ) if size else b"")

    def read_ahead(self, fd: int, *, on: bool) -> None:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL if on else os.POSIX_FADV_RANDOM)

    def is_cached(self, fd: int, offset: int) -> bool:
        return file_sync.is_cached(fd, offset)

    def lock_alone(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def begin_write_back(self, fd: int, offset: int, size: int) -> None:
        file_sync.begin_write_back(fd, offset, size)

    def drop_cache(self, fd: int, offset: int, size: int) -> None:
        file_sync.drop_cache(fd, offset, size)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_directory(self, path: str) -> None:
        file_sync.sync_directory(Path(path))

    def link_open(self, fd: int, path: str) -> None:
        # A path that is absolute leaves the directory out of account; but only with one does Python follow the link.
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
            return [found for entry in entries if (found := _looked_at(entry)) is not None]

    def resolve(self, path: str) -> str:
        return os.path.realpath(path)

    def free_bytes(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize


def _looked_at(entry: os.DirEntry[str]) -> DirectoryEntry | None:
    """What an entry is; nothing if it is neither file nor directory, or has gone meanwhile."""
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    is_directory = stat.S_ISDIR(status.st_mode)
    if not is_directory and not stat.S_ISREG(status.st_mode):
        return None
    return DirectoryEntry(entry.name, is_directory, status.st_size, status.st_mtime)


def directory_of(path: str) -> str:
    """The directory that an absolute path is in."""
    return path.rpartition("/")[0] or "/"
