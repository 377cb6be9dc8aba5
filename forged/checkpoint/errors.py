"""The errors of checkpoints.

Invariants:
- Every error has a type, and names the checkpoint or file that it is about.
- Errors of libraries are translated where the library is called.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from forged.errors import ForgedError


class ExceptionType(StrEnum):
    """The types of checkpoint errors."""

    UNKNOWN = "unknown"
    SAVE_FAILED = "save_failed"
    LOAD_FAILED = "load_failed"
    VALIDATION_FAILED = "validation_failed"
    CORRUPTED_CHECKPOINT = "corrupted_checkpoint"
    INCOMPATIBLE_VERSION = "incompatible_version"
    TIMEOUT = "timeout"
    STORAGE_ERROR = "storage_error"


class CheckpointException(ForgedError):
    """A checkpoint could not be saved, loaded or read. `code` is finer than `type`."""

    kind = "checkpoint"
    checkpoint_path: str
    type: ExceptionType
    ranks: tuple[int, ...]
    """The ranks that the message names already."""

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
    """An invalid argument. Nothing was changed."""
    return CheckpointException(message, "", ExceptionType.VALIDATION_FAILED, code=code, fix=fix)


def corrupted(message: str, path: str, fix: str = "", *, code: str = "") -> CheckpointException:
    """The stored bytes are not those that were saved."""
    return CheckpointException(message, path, ExceptionType.CORRUPTED_CHECKPOINT, code=code, fix=fix)


def storage_error(
    message: str, path: str, fix: str = "", *, code: str = "", retryable: bool = False
) -> CheckpointException:
    """The storage failed or refused a request."""
    return CheckpointException(message, path, ExceptionType.STORAGE_ERROR, code=code, fix=fix, retryable=retryable)
