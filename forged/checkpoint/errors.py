"""What can go wrong with a checkpoint.

Law: every error of this package says which checkpoint it is about, and of which kind it is; what foreign code raises is
translated where it is called.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from forged.errors import ForgedError


class ExceptionType(StrEnum):
    """The kinds of errors."""

    UNKNOWN = "unknown"
    SAVE_FAILED = "save_failed"
    LOAD_FAILED = "load_failed"
    VALIDATION_FAILED = "validation_failed"
    CORRUPTED_CHECKPOINT = "corrupted_checkpoint"
    INCOMPATIBLE_VERSION = "incompatible_version"
    TIMEOUT = "timeout"
    STORAGE_ERROR = "storage_error"


class CheckpointException(ForgedError):
    """A checkpoint could not be saved, loaded or looked at.

    `code` is finer than `type`: `type` says what kind of trouble it is, `code` which one.
    """

    kind = "checkpoint"
    checkpoint_path: str
    type: ExceptionType
    ranks: tuple[int, ...]
    """Those that the message names already."""

    def __init__(
        self,
        message: str,
        checkpoint_path: str = "",
        type: ExceptionType = ExceptionType.UNKNOWN,  # noqa: A002 - the name that its readers know
        *,
        code: str = "",
        fix: str = "",
        retryable: bool = False,
        ranks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(code or f"checkpoint_{type}", message, fix)
        self.checkpoint_path = checkpoint_path
        self.type = type
        self.retryable = retryable
        self.ranks = ranks

    def __reduce__(self) -> tuple[object, ...]:
        return _remade, (
            self.message,
            self.checkpoint_path,
            self.type,
            {"code": self.code, "fix": self.fix, "retryable": self.retryable, "ranks": self.ranks},
        )


def _remade(message: str, path: str, kind: ExceptionType, rest: dict[str, Any]) -> CheckpointException:
    return CheckpointException(message, path, kind, **rest)


def invalid(message: str, fix: str = "", *, code: str = "checkpoint_argument_invalid") -> CheckpointException:
    """The caller's mistake: nothing was touched."""
    return CheckpointException(message, "", ExceptionType.VALIDATION_FAILED, code=code, fix=fix)


def corrupted(message: str, path: str, fix: str = "", *, code: str = "") -> CheckpointException:
    """What lies in the storage is not what was saved."""
    return CheckpointException(message, path, ExceptionType.CORRUPTED_CHECKPOINT, code=code, fix=fix)


def storage_error(
    message: str, path: str, fix: str = "", *, code: str = "", retryable: bool = False
) -> CheckpointException:
    """The storage does not do what it is asked."""
    return CheckpointException(message, path, ExceptionType.STORAGE_ERROR, code=code, fix=fix, retryable=retryable)
