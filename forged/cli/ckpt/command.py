"""The frame of a `forgectl ckpt` command: timeout, interrupts and errors.

Invariants:
- An interrupt stops every thread of the command at once.
- A checkpoint error becomes one kind of `forgectl` error, and so one exit code, here and nowhere else.
"""

from __future__ import annotations

import atexit
import signal
import sys
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import NoReturn

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.ports import CancelToken
from forged.cli.forgectl.parser import Act, Options
from forged.cli.process import stop_remarking
from forged.errors import ConfigError, ForgedError, RequestRefused, Unavailable

CANCELLED = "checkpoint_cancelled"
CONFIG_CODES = frozenset(
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
"""Problems that the operator fixes on this host or in the storage."""
REFUSED_CODES = frozenset({"checkpoint_exists", "checkpoint_missing", "checkpoint_needed", "checkpoint_tensor_unknown"})


def checkpoint_command(act: Callable[[Options, CancelToken], int]) -> Act:
    """Run a command with its timeout, end it on an interrupt, and translate its errors."""

    @wraps(act)
    def command(options: Options) -> int:
        token = CancelToken(options.timeout)
        with _silent_exit(), _interruptible(token), translated_errors():
            return act(options, token)

    return command


@contextmanager
def _silent_exit() -> Iterator[None]:
    """After a failure, let abandoned object-store requests end silently with the process."""
    try:
        yield
    except BaseException:
        if "obstore" in sys.modules:
            # Its threads outlive the interpreter, and print a traceback when a response arrives then.
            atexit.register(stop_remarking)
        raise


@contextmanager
def _interruptible(token: CancelToken) -> Iterator[None]:
    """On an interrupt, cancel other threads too; Python interrupts only the main thread."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        # In another thread, because the interrupted code may hold the lock that cancelling takes.
        start_new_thread(token.cancel, ())
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        # The parent process ignores interrupts or handles them itself.
        yield
        return
    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise checkpoint errors as errors of `forgectl`."""
    try:
        yield
    except CheckpointException as error:
        if error.code == CANCELLED:
            # Another thread noticed the cancellation before the interrupted one.
            raise KeyboardInterrupt from error
        raise translated(error) from error


def translated(error: CheckpointException) -> ForgedError:
    """The same error as one of the kinds that determine the exit code."""
    if error.retryable or error.type is ExceptionType.TIMEOUT:
        return Unavailable(error.code, error.message, error.fix)
    if error.code in REFUSED_CODES or error.type is ExceptionType.INCOMPATIBLE_VERSION:
        return RequestRefused(error.code, error.message, error.fix)
    if error.code in CONFIG_CODES or error.type is ExceptionType.VALIDATION_FAILED:
        return ConfigError(error.code, error.message, error.fix)
    return error
