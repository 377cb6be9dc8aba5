"""How a command acts: for as long as it may, and until somebody interrupts it.

Law: who interrupts a command stops all that it is waiting for, in every thread, and is not kept waiting. What goes
wrong with a checkpoint is told as any error of `forgectl`.
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

from forged.checkpoint.ports import CancelToken
from forged.cli.ckpt.errors import told
from forged.cli.forgectl.parser import Act, Options
from forged.cli.process import stop_remarking


def acting(act: Callable[[Options, CancelToken], int]) -> Act:
    """The command that does this."""

    @wraps(act)
    def acted(options: Options) -> int:
        token = CancelToken(options.timeout)
        with _forsaking(), _interruptible(token), told():
            return act(options, token)

    return acted


@contextmanager
def _forsaking() -> Iterator[None]:
    """What was asked of an object store, and not waited for, ends with the process, and without a word."""
    try:
        yield
    except BaseException:
        if "obstore" in sys.modules:
            # Its threads outlive the interpreter, and print a page about that when an answer comes.
            atexit.register(stop_remarking)
        raise


@contextmanager
def _interruptible(token: CancelToken) -> Iterator[None]:
    """An interrupt stops other threads, too, which Python tells nothing of it."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        # In a thread of its own: the lock that it takes may be held by what was interrupted.
        start_new_thread(token.cancel, ())
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        # Whoever has started us wants no interrupt, or wants it for something else.
        yield
        return
    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
