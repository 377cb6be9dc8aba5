"""SIGTERM: the step is finished and the worker leaves, where the script has not its own idea of it.

Law: the handler is ours only while a worker hears it, only where there was none before, and never in a forked child,
where nobody could finish a step. Where no worker is waited for, the process ends as it would have without us.

It is a handler of Python's and none of the event loop's: a loop hears of signals through a pipe that forked children
share, and would take the end of a child for its own.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGTERM_REASON = "it was told to end, by SIGTERM"

_hearing: dict[Callable[[], bool], None] = {}


@contextmanager
def heeding_sigterm(told: Callable[[], bool]) -> Iterator[None]:
    """Call `told` at SIGTERM, in the main thread; it returns whether there is a worker that leaves.

    Nothing happens in another thread than the main one, which alone may handle signals.
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
    """Whether SIGTERM comes to workers."""
    return signal.getsignal(signal.SIGTERM) is _terminated


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _terminated(number: int, frame: FrameType | None) -> None:
    if any([told() for told in tuple(_hearing)]):  # noqa: C419 - all of them are told
        return
    # Nobody waits for a worker of this process, so there is no step to be finished first.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


class _Forking(threading.local):
    """SIGTERM while a thread forks: it waits, because Python forgets in the child what came before it had looked."""

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
