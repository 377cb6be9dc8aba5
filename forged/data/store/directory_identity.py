"""What a directory of shards is for.

Law: it is one process's, and of one dataset. Two workers that shared a directory would drop what the other is to hold,
and shards of another dataset have the same numbers. An empty file says of which dataset they are, by its name.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forged.data.dataset import Dataset
from forged.errors import ConfigError
from forged.file_sync import sync_directory

LOCK = "lock"
FILE_MODE = 0o640

_OF = re.compile(r"dataset-([0-9]{1,19})\.([0-9]{1,19})\Z")
_ours: dict[tuple[int, int, int], int] = {}
"""The locks of this process, which it keeps: closing any descriptor of the file would release it."""


def dedicate(directory: Path, dataset: Dataset, *, is_empty: bool) -> None:
    """Let the directory be this process's until it ends, and of the dataset; of another than before if it is empty."""
    with usable(directory):
        _lock(directory)
        name = f"dataset-{dataset.samples}.{dataset.shards}"
        others = [found for path in directory.iterdir() if (found := _OF.match(path.name)) and path.name != name]
        if others and not is_empty:
            raise ConfigError(
                "shard_directory_differs",
                f"{directory} holds shards of {others[0][1]} samples in {others[0][2]} shards, and not of "
                f"{dataset.samples} in {dataset.shards}",
                "give each dataset a directory of its own, or empty this one",
            )
        for other in others:
            (directory / other[0]).unlink()
        (directory / name).touch(FILE_MODE)
        sync_directory(directory)


def _lock(directory: Path) -> None:
    path = directory / LOCK
    with suppress(FileNotFoundError):
        if _identity(os.lstat(path)) in _ours:
            return
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE)
    try:
        # Of this kind no forked child has a part, such as one that loads data for a worker that was killed.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(
            "shard_directory_in_use",
            f"another process keeps its shards in {directory}",
            "give each worker a directory of its own",
        ) from None
    except BaseException:
        os.close(fd)
        raise
    _ours[_identity(os.fstat(fd))] = fd


def _identity(about: os.stat_result) -> tuple[int, int, int]:
    return os.getpid(), about.st_dev, about.st_ino


@contextmanager
def usable(directory: Path) -> Iterator[None]:
    """Translate what the system refuses."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            "shard_directory_unusable",
            f"{directory} cannot hold shards: {error.strerror or error}",
            "give a directory that this process can read and write",
        ) from error
