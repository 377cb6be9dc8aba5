"""A command ends when it is interrupted, whatever its threads wait for."""

from __future__ import annotations

import signal
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from forged.checkpoint.errors import CheckpointException, invalid
from forged.checkpoint.ports import CancelToken
from forged.cli.ckpt.interruptible import acting
from forged.errors import ConfigError, Unavailable

LONG_S = 60.0


@contextmanager
def handling(handler: signal.Handlers | None) -> Iterator[None]:
    """What was done about interrupts before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler if handler is None else handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@acting
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
        assert ended.wait(LONG_S / 2), "the thread waits on"
        waiting.join()
    return 0


@acting
def wait(options: Namespace, token: CancelToken) -> int:
    signal.raise_signal(signal.SIGINT)
    token.wait(options.timeout or LONG_S)
    return 0


def test_an_interrupt_ends_what_other_threads_wait_for() -> None:
    with handling(None), pytest.raises(KeyboardInterrupt):
        wait_in_a_thread(Namespace(timeout=None))


def test_a_thread_that_notices_first_changes_nothing() -> None:
    @acting
    def act(options: Namespace, token: CancelToken) -> int:
        token.cancel()
        token.check()
        return 0

    with handling(None), pytest.raises(KeyboardInterrupt):
        act(Namespace(timeout=None))


def test_who_wanted_no_interrupts_gets_none() -> None:
    with handling(signal.SIG_IGN), pytest.raises(Unavailable):
        wait(Namespace(timeout=0.01))


def test_interrupts_mean_afterwards_what_they_meant_before() -> None:
    with handling(None):
        with pytest.raises(KeyboardInterrupt):
            wait(Namespace(timeout=None))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_goes_wrong_is_told_as_any_error() -> None:
    @acting
    def act(options: Namespace, token: CancelToken) -> int:
        raise invalid("no")

    with pytest.raises(ConfigError):
        act(Namespace(timeout=None))
