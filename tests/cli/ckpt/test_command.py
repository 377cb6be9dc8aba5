"""Commands end when they are interrupted, and errors determine the exit code."""

from __future__ import annotations

import errno
import signal
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from forged.checkpoint.errors import CheckpointException, ExceptionType, corrupted, invalid, storage_error
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.storage.listing import missing_checkpoint
from forged.checkpoint.storage.os_errors import translated as os_error
from forged.cli.ckpt.command import checkpoint_command, translated, translated_errors
from forged.cli.process import print_error
from forged.errors import ConfigError, Unavailable
from tests.checkpoint.fixtures.memory_storage import MemoryStorage

LONG_S = 60.0


@contextmanager
def handling(handler: signal.Handlers | None) -> Iterator[None]:
    """Install this interrupt handler for the block."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler if handler is None else handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@checkpoint_command
def wait_in_a_thread(options: Namespace, token: CancelToken) -> int:
    def wait() -> None:
        with suppress(CheckpointException):
            token.wait(LONG_S)
        ended.set()

    ended = threading.Event()
    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        assert ended.wait(LONG_S / 2), "the thread still waits"
        waiting.join()
    return 0


@checkpoint_command
def wait(options: Namespace, token: CancelToken) -> int:
    signal.raise_signal(signal.SIGINT)
    token.wait(options.timeout or LONG_S)
    return 0


def test_an_interrupt_ends_waits_of_other_threads() -> None:
    with handling(None), pytest.raises(KeyboardInterrupt):
        wait_in_a_thread(Namespace(timeout=None))


def test_cancellation_noticed_by_another_thread_is_an_interrupt() -> None:
    @checkpoint_command
    def act(options: Namespace, token: CancelToken) -> int:
        token.cancel()
        token.check()
        return 0

    with handling(None), pytest.raises(KeyboardInterrupt):
        act(Namespace(timeout=None))


def test_ignored_interrupts_stay_ignored() -> None:
    with handling(signal.SIG_IGN), pytest.raises(Unavailable):
        wait(Namespace(timeout=0.01))


def test_the_previous_interrupt_handler_is_restored() -> None:
    with handling(None):
        with pytest.raises(KeyboardInterrupt):
            wait(Namespace(timeout=None))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_checkpoint_errors_become_forgectl_errors() -> None:
    @checkpoint_command
    def act(options: Namespace, token: CancelToken) -> int:
        raise invalid("no")

    with pytest.raises(ConfigError):
        act(Namespace(timeout=None))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (corrupted("x", "x"), 1),
        (storage_error("x", "x"), 1),
        (invalid("x"), 2),
        (os_error(OSError(errno.ENOENT, ""), "x", "y"), 1),
        (os_error(OSError(errno.EACCES, ""), "x", "y"), 2),
        (os_error(OSError(errno.ENOSPC, ""), "x", "y"), 2),
        (os_error(OSError(errno.EROFS, ""), "x", "y"), 2),
        (storage_error("x", "x", code="checkpoint_credentials_missing"), 2),
        (missing_checkpoint(MemoryStorage(), "a"), 3),
        (os_error(OSError(errno.EEXIST, ""), "x", "y"), 3),
        (CheckpointException("x", type=ExceptionType.INCOMPATIBLE_VERSION), 3),
        (CheckpointException("x", type=ExceptionType.TIMEOUT), 4),
        (storage_error("x", "x", retryable=True), 4),
        (os_error(OSError(errno.ETIMEDOUT, ""), "x", "y"), 4),
    ],
)
def test_exit_codes_by_error(error: CheckpointException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert print_error("forgectl", translated(error)) == code
    assert error.message in capsys.readouterr().err


def test_translation_keeps_code_message_and_fix() -> None:
    with pytest.raises(Exception, match="message") as caught, translated_errors():
        raise invalid("message", "fix", code="code")
    assert (caught.value.code, caught.value.message, caught.value.fix) == ("code", "message", "fix")  # type: ignore[attr-defined]
