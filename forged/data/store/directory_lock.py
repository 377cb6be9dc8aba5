"""Locks a shard directory to one process and one dataset.

Two workers that shared a directory would drop each other's shards, and shards of two datasets have the same numbers. An
empty file in the directory names the dataset.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forged.data.model import Dataset
from forged.errors import ConfigError
from forged.file_sync import sync_directory

LOCK = "lock"
FILE_MODE = 0o640

_DATASET_NAME = re.compile(r"dataset-([0-9]{1,19})\.([0-9]{1,19})\Z")
_locks: dict[tuple[int, tuple[int, int]], int] = {}
"""The lock files by process and inode. They stay open: closing any descriptor of a file releases its lock."""


def lock_directory(directory: Path, dataset: Dataset, *, is_empty: bool) -> None:
    """Lock the directory until this process ends. The dataset may differ from the last one only if it is empty."""
    with usable(directory):
        _lock(directory)
        name = f"dataset-{dataset.samples}.{dataset.shards}"
        others = [
            found for path in directory.iterdir() if (found := _DATASET_NAME.match(path.name)) and path.name != name
        ]
        if others and not is_empty:
            raise ConfigError(
                "shard_directory_differs",
                f"{directory} holds a dataset of {others[0][1]} samples in {others[0][2]} shards, not one of "
                f"{dataset.samples} samples in {dataset.shards}",
                "use another directory for this dataset, or empty this one",
            )
        for other in others:
            (directory / other[0]).unlink()
        (directory / name).touch(FILE_MODE)
        sync_directory(directory)


def is_locked(directory: Path) -> bool:
    """Whether this process, or the one that it was forked from, has locked the directory that is there now."""
    try:
        return _inode(os.lstat(directory / LOCK)) in {inode for _, inode in _locks}
    except OSError:
        return False


def _lock(directory: Path) -> None:
    path = directory / LOCK
    with suppress(FileNotFoundError):
        if (os.getpid(), _inode(os.lstat(path))) in _locks:
            return
    _close_deleted()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE)
    try:
        # A POSIX lock is not inherited: a forked data loader that outlives a killed worker does not hold it.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(
            "shard_directory_in_use",
            f"another process uses the shard directory {directory}",
            "use one directory per worker",
        ) from None
    except BaseException:
        os.close(fd)
        raise
    _locks[os.getpid(), _inode(os.fstat(fd))] = fd


def _close_deleted() -> None:
    """Close the lock files of directories that were deleted."""
    for owner, fd in list(_locks.items()):
        if not os.fstat(fd).st_nlink:
            os.close(_locks.pop(owner))


def _inode(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


@contextmanager
def usable(directory: Path) -> Iterator[None]:
    """Translate the system's errors."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            "shard_directory_unusable",
            f"shard directory {directory} is not usable: {error.strerror or error}",
            "use a directory that this process can read and write",
        ) from error
