"""Log messages that tell the operator of a script what its worker waits for.

Invariants:
- A short wait is not logged; a long one is logged with its reason, after pauses that grow.
"""

from __future__ import annotations

import anyio
from anyio.abc import TaskGroup

from forged.log import Log
from forged.worker.daemon_link.registration import Registration, log_pauses


class WaitReporter:
    """Logs how long one worker has waited, and what the daemon names as the reason."""

    def __init__(self, registration: Registration, tasks: TaskGroup, log: Log) -> None:
        self._registration = registration
        self._tasks = tasks
        self._log = log
        self._scope: anyio.CancelScope | None = None

    def begin(self) -> None:
        """The worker waits. No effect where it has waited already."""
        if self._scope is None:
            self._scope = anyio.CancelScope()
            self._tasks.start_soon(self._report, self._scope)

    def end(self) -> None:
        """The worker waits no more. No effect where it has not waited."""
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.cancel()

    async def _report(self, scope: anyio.CancelScope) -> None:
        began_at = anyio.current_time()
        with scope:
            for pause_s in log_pauses():
                await anyio.sleep(pause_s)
                why = await self._registration.why_waiting()
                self._log.warning("this worker is waiting", for_s=round(anyio.current_time() - began_at), reason=why)
