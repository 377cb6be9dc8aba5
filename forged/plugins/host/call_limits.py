"""The time limit of one asynchronous call of a plugin.

Invariants:
- Time that the plugin waits for the daemon does not count.
- At the limit, or when the plugin is deactivated, the call is cancelled. After another `GRACE_S` it is abandoned: not
  resumed any more, so that a call that ignores its cancellation does not delay the daemon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

GRACE_S = 2.0
"""The time that a cancelled call has for its cleanup."""


class CallLimit:
    """The limit of one call; belongs to the task that creates it."""

    def __init__(self) -> None:
        self.cancelled = False
        """Whether the call was cancelled."""
        self.abandoned = False
        """Whether the call ignored its cancellation and must not be resumed."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._cancellations = 0
        self._pauses = 0
        self._over = False
        self._left_s = 0.0
        self._ends_at = 0.0
        self._timer: asyncio.Handle | None = None

    def begin(self, limit_s: float) -> None:
        """Start the limit."""
        self._ends_at = self._loop.time() + limit_s
        self._timer = self._loop.call_at(self._ends_at, self._cancel)

    def stop(self) -> None:
        """Cancel the call, unless the daemon is working for it."""
        if self._pauses or self.cancelled:
            return
        # Later, because a task that cancels itself is cancelled at its next await.
        self._set(self._loop.call_soon(self._cancel))

    def end(self) -> None:
        """End the limit and take back its cancellations."""
        self._over = True
        self._set(None)
        for _ in range(self._cancellations):
            assert self._task is not None
            self._task.uncancel()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside the block, while the daemon works for the plugin."""
        if not self._pauses:
            self._left_s = self._ends_at - self._loop.time()
            self._set(None)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses and not self._over:
                self._ends_at = self._loop.time() + self._left_s
                self._set(self._loop.call_at(self._ends_at, self._cancel))

    def _cancel(self) -> None:
        assert self._task is not None
        self.abandoned = self.cancelled
        self.cancelled = True
        self._cancellations += 1
        self._task.cancel()
        self._ends_at = self._loop.time() + GRACE_S
        self._timer = None if self.abandoned else self._loop.call_at(self._ends_at, self._cancel)

    def _set(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer
