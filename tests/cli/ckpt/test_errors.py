"""Which errors of checkpoints exit with which code."""

from __future__ import annotations

import errno

import pytest

from forged.checkpoint.errors import CheckpointException, ExceptionType, corrupted, invalid, storage_error
from forged.checkpoint.storage.listing import missing_checkpoint
from forged.checkpoint.storage.os_errors import translated as of_system
from forged.cli.ckpt.errors import told, translated
from forged.cli.process import complain
from tests.checkpoint.memory_storage import MemoryStorage


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (corrupted("x", "x"), 1),
        (storage_error("x", "x"), 1),
        (invalid("x"), 2),
        (of_system(OSError(errno.ENOENT, ""), "x", "y"), 1),
        (of_system(OSError(errno.EACCES, ""), "x", "y"), 2),
        (of_system(OSError(errno.ENOSPC, ""), "x", "y"), 2),
        (of_system(OSError(errno.EROFS, ""), "x", "y"), 2),
        (storage_error("x", "x", code="checkpoint_credentials_missing"), 2),
        (missing_checkpoint(MemoryStorage(), "a"), 3),
        (of_system(OSError(errno.EEXIST, ""), "x", "y"), 3),
        (CheckpointException("x", type=ExceptionType.INCOMPATIBLE_VERSION), 3),
        (CheckpointException("x", type=ExceptionType.TIMEOUT), 4),
        (storage_error("x", "x", retryable=True), 4),
        (of_system(OSError(errno.ETIMEDOUT, ""), "x", "y"), 4),
    ],
)
def test_the_exit_code_says_who_can_do_something(
    error: CheckpointException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complain("forgectl", translated(error)) == code
    assert error.message in capsys.readouterr().err


def test_code_message_and_fix_stay_as_they_are() -> None:
    with pytest.raises(Exception, match="message") as caught, told():
        raise invalid("message", "fix", code="code")
    assert (caught.value.code, caught.value.message, caught.value.fix) == ("code", "message", "fix")  # type: ignore[attr-defined]
