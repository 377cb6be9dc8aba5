"""The token of an operation that may take any time, and is given up only when it does nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from math import inf

import anyio

from forged.checkpoint.ports import CancelToken

TOLD_EVERY_S = 1.0


class WatchedToken(CancelToken):
    """Ends a scope when no thread has checked the token for a time. Threads check it between two blocks."""

    def __init__(self, idle_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__(None, monotonic)
        self.timeout_s = idle_s
        self._idle_s = idle_s
        self._told_at = -inf
        self._at_work: Callable[[float], None] = lambda pause_s: None

    def watch(self, scope: anyio.CancelScope) -> None:
        """Cancel a scope of the running event loop when the operation does nothing."""
        # Scripts without an event loop do not import it.
        import asyncio

        loop = asyncio.get_running_loop()

        def extend(pause_s: float) -> None:
            scope.deadline = loop.time() + self._idle_s + pause_s

        def at_work(pause_s: float) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(extend, pause_s)

        extend(0.0)
        self._at_work = at_work

    def check(self) -> None:
        super().check()
        self._tell(0.0)

    def wait(self, seconds: float) -> None:
        # The operation pauses by intent.
        self._tell(seconds)
        super().wait(seconds)

    def _tell(self, pause_s: float) -> None:
        now = self._monotonic()
        if pause_s >= TOLD_EVERY_S or now - self._told_at >= TOLD_EVERY_S:
            self._told_at = now
            self._at_work(pause_s)
