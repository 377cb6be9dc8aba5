from __future__ import annotations

import errno
import pickle

import pytest

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.storage.os_errors import (
    MEANINGS,
    SyncFailed,
    disk_full,
    errors_translated,
    file_large,
    file_short,
    translated,
)


@pytest.mark.parametrize(
    ("number", "code", "retryable"),
    [
        (errno.ENOSPC, "checkpoint_disk_full", False),
        (errno.EDQUOT, "checkpoint_disk_full", False),
        (errno.EROFS, "checkpoint_storage_read_only", False),
        (errno.EACCES, "checkpoint_storage_denied", False),
        (errno.EIO, "checkpoint_storage_io", True),
        (errno.EINTR, "checkpoint_storage_busy", True),
        (errno.ETIMEDOUT, "checkpoint_storage_busy", True),
        (errno.EMFILE, "checkpoint_storage_busy", True),
        (errno.ENAMETOOLONG, "checkpoint_name_long", False),
        (errno.ENOENT, "checkpoint_file_missing", False),
        (errno.EEXIST, "checkpoint_exists", False),
        (errno.EISDIR, "checkpoint_storage_obstructed", False),
        (errno.EFBIG, "checkpoint_storage_limit", False),
        (errno.EXDEV, "checkpoint_storage_failed", False),
    ],
)
def test_a_refusal_has_a_code_and_says_whether_to_try_again(number: int, code: str, retryable: bool) -> None:
    with pytest.raises(CheckpointException) as caught, errors_translated("run/a", "/disk"):
        raise OSError(number, "no")
    error = caught.value
    assert (error.code, error.retryable, error.type) == (code, retryable, ExceptionType.STORAGE_ERROR)
    assert error.checkpoint_path == "run/a"
    assert "run/a in /disk" in error.message
    assert error.fix


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT])
def test_a_directory_that_could_not_be_synced_is_not_synced_again(number: int) -> None:
    plain, failed = translated(OSError(number, "no"), "a", "/disk"), translated(SyncFailed(number, "no"), "a", "/disk")
    assert (plain.retryable, failed.retryable) == (True, False)
    assert (failed.code, failed.message, failed.fix) == (plain.code, plain.message, plain.fix)


def test_every_error_has_a_fix_and_can_be_pickled() -> None:
    for number in MEANINGS:
        error = translated(OSError(number, "no"), "a", "/disk")
        again = pickle.loads(pickle.dumps(error))
        assert (again.code, again.fix, again.retryable) == (error.code, error.fix, error.retryable)
        assert error.fix


def test_an_error_without_a_number_keeps_its_words() -> None:
    error = translated(OSError("cannot do that"), "", "/disk")
    assert (error.code, error.message) == ("checkpoint_storage_failed", "the storage in /disk: cannot do that")


def test_other_exceptions_are_not_translated() -> None:
    with pytest.raises(ValueError, match="mine"), errors_translated("a", "/disk"):
        raise ValueError("mine")


def test_a_full_disk_says_how_much_is_missing() -> None:
    assert "90 too few" in disk_full("a", "/disk", 100, 10).message
    assert "quota" in disk_full("a", "/disk", 100, 1000).message


def test_a_file_that_is_too_short_or_too_large_is_corrupt() -> None:
    for error in (file_short("a", 10, 5), file_large("a", 10, 5)):
        assert error.type is ExceptionType.CORRUPTED_CHECKPOINT
        assert "10" in error.message
        assert "5" in error.message
