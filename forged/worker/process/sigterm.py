"""SIGTERM drains the workers of this process, unless the script has a handler of its own.

Invariants:
- The handler is installed only while a worker uses it, only where there was none before, and never in a forked child.
- In a process without a registered worker, SIGTERM has its default effect.

This is a handler of Python's `signal`, not of the event loop: a loop learns of signals through a pipe that forked
children share, and would take a child's SIGTERM for its own.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGTERM_REASON = "it received SIGTERM"

_hearing: dict[Callable[[], bool], None] = {}


@contextmanager
def heeding_sigterm(told: Callable[[], bool]) -> Iterator[None]:
    """Inside the block, call `told` at SIGTERM; it returns whether there is a worker to drain.

    No effect outside the main thread, which alone may install handlers.
    """
    if not _is_main() or signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _terminated):
        yield
        return
    _hearing[told] = None
    signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        _hearing.pop(told, None)
        if not _hearing and _is_main() and is_heeded():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_heeded() -> bool:
    """Whether SIGTERM drains workers."""
    return signal.getsignal(signal.SIGTERM) is _terminated


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _terminated(number: int, frame: FrameType | None) -> None:
    if any([told() for told in tuple(_hearing)]):  # noqa: C419 - each worker must be told
        return
    # No worker of this process is registered.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


class _Forking(threading.local):
    """Blocks SIGTERM during a fork: Python discards, in the child, a signal that it has not handled yet."""

    has_blocked = False

    def begin(self) -> None:
        if is_heeded():
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            self.has_blocked = signal.SIGTERM not in before

    def go_on_in_parent(self) -> None:
        if self.has_blocked:
            self.has_blocked = False
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def go_on_in_child(self) -> None:
        _hearing.clear()
        if is_heeded():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.go_on_in_parent()


_forking = _Forking()
os.register_at_fork(
    before=_forking.begin, after_in_parent=_forking.go_on_in_parent, after_in_child=_forking.go_on_in_child
)
