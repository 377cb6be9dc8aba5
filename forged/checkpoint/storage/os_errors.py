"""What it means when an operating system refuses something.

Law: every refusal becomes one error, which names the file, says what to do, and whether the same may be tried again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from forged.checkpoint.errors import CheckpointException, corrupted, storage_error


class ErrorMeaning(NamedTuple):
    """What a number stands for."""

    code: str
    fix: str
    retryable: bool = False


_FULL = ErrorMeaning("checkpoint_disk_full", "make room, for example with `forgectl ckpt rm`")
_DENIED = ErrorMeaning("checkpoint_storage_denied", "see whose the directory is, and who runs this")
_OBSTRUCTED = ErrorMeaning("checkpoint_storage_obstructed", "move away what lies there")
_SCARCE = ErrorMeaning("checkpoint_storage_busy", "raise the limit of open files (ulimit -n)", retryable=True)
_PASSING = ErrorMeaning("checkpoint_storage_busy", "try again", retryable=True)
_BROKEN = ErrorMeaning("checkpoint_storage_io", "see the kernel's log for what the disk says", retryable=True)
_LARGE = ErrorMeaning("checkpoint_storage_limit", "use a file system that takes files of this size (and see ulimit -f)")
_OTHER = ErrorMeaning("checkpoint_storage_failed", "see whether the file system is well")

MEANINGS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: ErrorMeaning("checkpoint_storage_read_only", "mount it for writing, or use another directory"),
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EIO: _BROKEN,
    errno.ENAMETOOLONG: ErrorMeaning("checkpoint_name_long", "use a shorter name"),
    errno.ENOENT: ErrorMeaning("checkpoint_file_missing", "see what there is with `forgectl ckpt ls`"),
    errno.EEXIST: ErrorMeaning("checkpoint_exists", "choose another name"),
    errno.ENOTDIR: _OBSTRUCTED,
    errno.EISDIR: _OBSTRUCTED,
    errno.ELOOP: _OBSTRUCTED,
    errno.ENOTSUP: _OBSTRUCTED,
    errno.ENXIO: _OBSTRUCTED,
    errno.EFBIG: _LARGE,
    errno.EMFILE: _SCARCE,
    errno.ENFILE: _SCARCE,
    errno.ENOMEM: _PASSING,
    errno.EINTR: _PASSING,
    errno.EAGAIN: _PASSING,
    errno.EBUSY: _PASSING,
    errno.ETIMEDOUT: _PASSING,
    errno.ESTALE: _PASSING,
}


class SyncFailed(OSError):
    """A directory could not be synced. Another sync may succeed, and says nothing of what this one was to write."""


def translated(error: OSError, name: str, url: str) -> CheckpointException:
    """What an operating system's error is to those who save and load."""
    meaning = MEANINGS.get(error.errno or 0, _OTHER)
    why = os.strerror(error.errno) if error.errno else str(error)
    is_passing = meaning.retryable and not isinstance(error, SyncFailed)
    return storage_error(
        f"{name or 'the storage'} in {url}: {why}", name, meaning.fix, code=meaning.code, retryable=is_passing
    )


@contextmanager
def errors_translated(name: str, url: str) -> Iterator[None]:
    """What the operating system refuses meanwhile concerns this file."""
    try:
        yield
    except OSError as error:
        raise translated(error, name, url) from error


def disk_full(name: str, url: str, wanted: int, free: int) -> CheckpointException:
    """There is not so much room."""
    missing = f"{wanted - free} are missing" if wanted > free else "its quota does not allow so many"
    return storage_error(
        f"{name} has {wanted} bytes, and {free} are free in {url}: {missing}", name, _FULL.fix, code=_FULL.code
    )


def file_short(name: str, end: int, size: int) -> CheckpointException:
    """A file ends before what was to be read of it does."""
    return corrupted(
        f"{name} has {size} bytes, and {end} are wanted of it",
        name,
        "use another checkpoint",
        code="checkpoint_file_short",
    )


def file_large(name: str, size: int, bytes_max: int) -> CheckpointException:
    """A file is larger than it can rightly be."""
    return corrupted(
        f"{name} has {size} bytes, more than the {bytes_max} that are read of such a file",
        name,
        "use another checkpoint",
        code="checkpoint_file_large",
    )
