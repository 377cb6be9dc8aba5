"""Translates errors of the operating system: each names the file, the fix, and whether a retry may help."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from forged.checkpoint.errors import CheckpointException, corrupted, storage_error


class ErrorMeaning(NamedTuple):
    """The code and the fix for an errno."""

    code: str
    fix: str
    retryable: bool = False


_FULL = ErrorMeaning("checkpoint_disk_full", "free space, for example with `forgectl ckpt rm`")
_DENIED = ErrorMeaning(
    "checkpoint_storage_denied", "check the owner and the mode of the directory, and the user of this process"
)
_OBSTRUCTED = ErrorMeaning("checkpoint_storage_obstructed", "move away the file or directory that has this name")
_LINKED = ErrorMeaning("checkpoint_storage_obstructed", "replace the symbolic link by what it leads to")
_SCARCE = ErrorMeaning("checkpoint_storage_busy", "raise the limit of open files (ulimit -n)", retryable=True)
_PASSING = ErrorMeaning("checkpoint_storage_busy", "try again", retryable=True)
_BROKEN = ErrorMeaning("checkpoint_storage_io", "check the kernel's log for errors of the disk", retryable=True)
_LARGE = ErrorMeaning("checkpoint_storage_limit", "use a file system for files of this size, and check ulimit -f")
_OTHER = ErrorMeaning("checkpoint_storage_failed", "check the file system")

MEANINGS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: ErrorMeaning("checkpoint_storage_read_only", "mount it for writing, or use another directory"),
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EIO: _BROKEN,
    errno.ENAMETOOLONG: ErrorMeaning("checkpoint_name_long", "use a shorter name"),
    errno.ENOENT: ErrorMeaning("checkpoint_file_missing", "list the checkpoints with `forgectl ckpt ls`"),
    errno.EEXIST: ErrorMeaning("checkpoint_exists", "choose another name"),
    errno.ENOTDIR: _OBSTRUCTED,
    errno.EISDIR: _OBSTRUCTED,
    errno.ELOOP: _LINKED,
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
    """A directory sync failed. A second sync may succeed without having written what this one lost."""


def translated(error: OSError, name: str, url: str) -> CheckpointException:
    """The checkpoint error for an `OSError`."""
    meaning = MEANINGS.get(error.errno or 0, _OTHER)
    why = os.strerror(error.errno) if error.errno else str(error)
    is_passing = meaning.retryable and not isinstance(error, SyncFailed)
    return storage_error(
        f"{name or 'the storage'} in {url}: {why}", name, meaning.fix, code=meaning.code, retryable=is_passing
    )


@contextmanager
def errors_translated(name: str, url: str) -> Iterator[None]:
    """Translate any `OSError` of the block into an error about this file."""
    try:
        yield
    except OSError as error:
        raise translated(error, name, url) from error


def disk_full(name: str, url: str, wanted: int, free: int) -> CheckpointException:
    """The error for too little free space."""
    missing = f"{wanted - free} too few" if wanted > free else "the quota allows fewer"
    return storage_error(
        f"{name} needs {wanted} bytes, and {url} has {free} free: {missing}", name, _FULL.fix, code=_FULL.code
    )


def file_short(name: str, end: int, size: int) -> CheckpointException:
    """The error for a file that ends before the bytes that were to be read."""
    return corrupted(
        f"{name} has {size} bytes, expected at least {end}",
        name,
        "use another checkpoint",
        code="checkpoint_file_short",
    )


def file_large(name: str, size: int, bytes_max: int) -> CheckpointException:
    """The error for a file larger than any valid one."""
    return corrupted(
        f"{name} has {size} bytes; limit {bytes_max}",
        name,
        "use another checkpoint",
        code="checkpoint_file_large",
    )
