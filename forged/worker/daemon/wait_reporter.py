"""Telling whoever runs a script that its worker waits, and for what.

Law: what passes in a moment is not told; what lasts is told with its reason, and again after pauses that grow.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import anyio
from anyio.abc import TaskGroup

from forged.log import Log

TOLD_AFTER_S = 10.0
"""How long it waits before that is told for the first time."""
PAUSE_S_MAX = 600.0


def pauses() -> Iterator[float]:
    """How long nothing is told: at first, and then from each time to the next."""
    pause_s = TOLD_AFTER_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, PAUSE_S_MAX)


class WaitReporter:
    """Watches one worker's waiting; `ask` tells in words what stands still, and why."""

    def __init__(self, ask: Callable[[], Awaitable[str]], tasks: TaskGroup, log: Log) -> None:
        self._ask = ask
        self._tasks = tasks
        self._log = log
        self._scope: anyio.CancelScope | None = None

    def begin(self) -> None:
        """It waits, or still does."""
        if self._scope is None:
            self._scope = anyio.CancelScope()
            self._tasks.start_soon(self._tell, self._scope)

    def end(self) -> None:
        """It waits no more."""
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.cancel()

    async def _tell(self, scope: anyio.CancelScope) -> None:
        began_at = anyio.current_time()
        with scope:
            for pause_s in pauses():
                await anyio.sleep(pause_s)
                why = await self._ask()
                self._log.warning("this worker waits", for_s=round(anyio.current_time() - began_at), why=why)
