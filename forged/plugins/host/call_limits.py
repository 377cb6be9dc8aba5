"""Something that a plugin is doing now, and how long it may go on.

Law: what awaits has a limit in time, of which nothing is spent while the plugin waits for the daemon. When it is over,
or the plugin is left out, the work is cancelled and has a moment to put things in order; after that it is stepped no
further, whatever it still awaits. So whoever waits for a plugin is not kept by work that ignores its cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

GRACE_S = 2.0
"""How long cancelled work has for putting things in order."""


class Turn:
    """The clock of one piece of work, which runs in the task that began it."""

    def __init__(self) -> None:
        self.cancelled = False
        """Whether it was told to stop."""
        self.given_up = False
        """Whether it has gone on for too long all the same, and is to be stepped no further."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._cancellations = 0
        self._interludes = 0
        self._over = False
        self._left_s = 0.0
        self._ends_at = 0.0
        self._timer: asyncio.Handle | None = None

    def begin(self, limit_s: float) -> None:
        """Take time from now on."""
        self._ends_at = self._loop.time() + limit_s
        self._timer = self._loop.call_at(self._ends_at, self._cancel)

    def stop(self) -> None:
        """Have it stop what it does itself; what the daemon does for it goes on."""
        if self._interludes or self.cancelled:
            return
        # Not from within the work itself: a task that cancels itself is cancelled wherever it waits next.
        self._set(self._loop.call_soon(self._cancel))

    def end(self) -> None:
        """It has come to its end: take back what it was cancelled with."""
        self._over = True
        self._set(None)
        for _ in range(self._cancellations):
            assert self._task is not None
            self._task.uncancel()

    @contextmanager
    def interlude(self) -> Iterator[None]:
        """What is done inside the block is the daemon's work, and takes none of the plugin's time."""
        if not self._interludes:
            self._left_s = self._ends_at - self._loop.time()
            self._set(None)
        self._interludes += 1
        try:
            yield
        finally:
            self._interludes -= 1
            if not self._interludes and not self._over:
                self._ends_at = self._loop.time() + self._left_s
                self._set(self._loop.call_at(self._ends_at, self._cancel))

    def _cancel(self) -> None:
        assert self._task is not None
        self.given_up = self.cancelled
        self.cancelled = True
        self._cancellations += 1
        self._task.cancel()
        self._ends_at = self._loop.time() + GRACE_S
        self._timer = None if self.given_up else self._loop.call_at(self._ends_at, self._cancel)

    def _set(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer
