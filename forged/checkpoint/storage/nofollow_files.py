"""The operating system's files, reached without following a symbolic link.

A tenant who owns a directory can replace it by a link between any two system calls. A process with other rights, which
writes or deletes there for the tenant, would do so wherever the link leads.

Invariants:
- Each operation opens the directories of its path one by one, each in the one before, and refuses a link among them.
- The last component of a path is not followed either.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from forged import file_sync
from forged.checkpoint.storage.files import MODE, DirectoryEntry, SystemFiles, entry_of

_REACH = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class NoFollowFiles(SystemFiles):
    """Files of paths without links."""

    def open(self, path: str, flags: int) -> int:
        with _directory_of(path) as (directory, name):
            return os.open(name, flags | os.O_NOFOLLOW, MODE, dir_fd=directory)

    def sync_directory(self, path: str) -> None:
        with _reached(path, _READ) as directory:
            os.fsync(directory)

    def link_open(self, fd: int, path: str) -> None:
        with _directory_of(path) as (directory, name):
            os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=fd, dst_dir_fd=directory, follow_symlinks=True)

    def link(self, path: str, to: str) -> None:
        with _directory_of(path) as (source, name), _directory_of(to) as (target, new_name):
            os.link(name, new_name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)

    def rename(self, path: str, to: str) -> None:
        with _directory_of(path) as (source, name), _directory_of(to) as (target, new_name):
            os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)

    def rename_new(self, path: str, to: str) -> None:
        with _directory_of(path) as (source, name), _directory_of(to) as (target, new_name):
            file_sync.rename_new(name, new_name, source, target)

    def unlink(self, path: str) -> None:
        with _directory_of(path) as (directory, name):
            os.unlink(name, dir_fd=directory)

    def make_directory(self, path: str) -> None:
        with _directory_of(path) as (directory, name):
            os.mkdir(name, dir_fd=directory)

    def remove_directory(self, path: str) -> None:
        with _directory_of(path) as (directory, name):
            os.rmdir(name, dir_fd=directory)

    def scan(self, path: str) -> list[DirectoryEntry]:
        with _reached(path, _READ) as directory, os.scandir(directory) as entries:
            return [found for entry in entries if (found := entry_of(entry)) is not None]

    def resolve(self, path: str) -> str:
        # A path with links is refused when it is used.
        return path

    def free_bytes(self, path: str) -> int:
        with _reached(path, _REACH) as directory:
            status = os.statvfs(directory)
        return status.f_bavail * status.f_frsize


@contextmanager
def _directory_of(path: str) -> Iterator[tuple[int, str]]:
    """The directory of a path, open, and the name in it."""
    parent, _, name = path.rpartition("/")
    with _reached(parent, _REACH) as directory:
        yield directory, name


@contextmanager
def _reached(path: str, flags: int) -> Iterator[int]:
    """A directory, open, with the flags for the last component of its path."""
    names = [name for name in path.split("/") if name]
    directory = os.open("/", _REACH if names else flags)
    try:
        for number, name in enumerate(names, 1):
            inner = _open_in(directory, name, flags if number == len(names) else _REACH)
            os.close(directory)
            directory = inner
        yield directory
    finally:
        os.close(directory)


def _open_in(directory: int, name: str, flags: int) -> int:
    if name in (".", ".."):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    try:
        return os.open(name, flags, dir_fd=directory)
    except NotADirectoryError:
        if stat.S_ISLNK(os.lstat(name, dir_fd=directory).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
        raise
