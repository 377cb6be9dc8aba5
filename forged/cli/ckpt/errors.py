"""What went wrong with a checkpoint, as the rest of `forgectl` tells of errors.

Law: every error of a checkpoint becomes one kind of error, and so one exit code, here and nowhere else: the caller's to
mend, refused as things are, passing, or else a failure, such as damage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.errors import ConfigError, ForgedError, RequestRefused, Unavailable

CANCELLED = "checkpoint_cancelled"
TO_BE_MENDED = frozenset(
    {
        "checkpoint_bucket_missing",
        "checkpoint_credentials_missing",
        "checkpoint_disk_full",
        "checkpoint_dtype_missing",
        "checkpoint_name_long",
        "checkpoint_storage_denied",
        "checkpoint_storage_limit",
        "checkpoint_storage_missing",
        "checkpoint_storage_obstructed",
        "checkpoint_storage_read_only",
    }
)
"""Things on this side, besides what is wrong with the command line."""
AS_THINGS_ARE = frozenset({"checkpoint_exists", "checkpoint_missing", "checkpoint_tensor_unknown"})


@contextmanager
def told() -> Iterator[None]:
    """What goes wrong with a checkpoint meanwhile is told as any error of `forgectl`."""
    try:
        yield
    except CheckpointException as error:
        if error.code == CANCELLED:
            # Another thread was faster to notice than the one that was interrupted.
            raise KeyboardInterrupt from error
        raise translated(error) from error


def translated(error: CheckpointException) -> ForgedError:
    """The same error, of the kind that says who can do something about it."""
    if error.retryable or error.type is ExceptionType.TIMEOUT:
        return Unavailable(error.code, error.message, error.fix)
    if error.code in AS_THINGS_ARE or error.type is ExceptionType.INCOMPATIBLE_VERSION:
        return RequestRefused(error.code, error.message, error.fix)
    if error.code in TO_BE_MENDED or error.type is ExceptionType.VALIDATION_FAILED:
        return ConfigError(error.code, error.message, error.fix)
    return error
