"""Reports that training stands still at one worker because the daemon is away.

A worker stands still when its world is over and it has no connection to the daemon, which alone commits the next world.

Invariants:
- The beginning is reported at once, the end when the connection is back or the worker does not train on, each in one
  line of the log and one call of the hook. A world that trains on without the daemon is no standstill.
- Each standstill is reported to the daemon once, when it is back.
- A hook that raises is logged; the session goes on.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from anyio.abc import TaskGroup

from forged.clock import Clock
from forged.elastic.model import Standstill
from forged.errors import ForgedError, describe
from forged.log import Log
from forged.worker.events import RescaleHooks
from forged.worker.registration import Registration
from forged.worker.worker_state.session_state import SessionState

RESCALING = "the job is rescaling"


class StandstillReporter:
    """Reports the standstills of one worker."""

    def __init__(
        self,
        state: SessionState,
        registration: Registration,
        hooks: RescaleHooks,
        tasks: TaskGroup,
        clock: Clock,
        log: Log,
    ) -> None:
        self._state = state
        self._registration = registration
        self._hooks = hooks
        self._tasks = tasks
        self._clock = clock
        self._log = log
        self._away_since: float | None = None
        """When the connection was lost, by the wall clock; None while there is one."""
        self._standstill: Standstill | None = None
        """The present one."""
        self._began_at = 0.0
        """When it began, by the monotonic clock."""

    async def run(self) -> None:
        """Watch the worker's world and connection, for ever."""
        while True:
            self._look()
            await self._state.wait_for_change()

    def _look(self) -> None:
        if self._registration.is_connected:
            self._away_since = None
        elif self._away_since is None:
            self._away_since = self._clock.wall()
        if self._away_since is not None and self._state.has_no_world:
            if self._standstill is None:
                self._begin(self._away_since)
        elif self._standstill is not None:
            self._end(self._standstill)

    def _begin(self, away_since: float) -> None:
        view, loss = self._state.view, self._state.current_world.loss
        peer = (loss.peer if loss is not None else "") or view.lost
        reason = loss.why if loss is not None else RESCALING
        self._began_at = self._clock.monotonic()
        self._standstill = Standstill(view.topology.generation, peer, reason, self._clock.wall(), away_since)
        self._log.warning(
            "training stands still until the daemon is back, and then continues; no committed step is lost",
            **({"lost_peer": peer} if peer else {}),
            daemon_away_since=_readable(away_since),
            reason=reason,
        )
        self._call_hook(self._standstill)

    def _end(self, standstill: Standstill) -> None:
        lasted_s = self._clock.monotonic() - self._began_at
        self._standstill = None
        is_back = self._away_since is None
        self._log.warning(
            "the standstill is over",
            lasted_s=round(lasted_s, 1),
            reason="the daemon is back" if is_back else "this worker no longer waits for it",
        )
        self._call_hook(msgspec.structs.replace(standstill, lasted_s=lasted_s))
        self._tasks.start_soon(self._report, standstill, lasted_s)

    def _call_hook(self, standstill: Standstill) -> None:
        try:
            self._hooks.on_standstill(standstill)
        except Exception as error:  # noqa: BLE001 - the script may override the method
            # A report must not end the session, and with it the training that it reports about.
            self._log.error("`on_standstill` failed", reason=describe(error))

    async def _report(self, standstill: Standstill, lasted_s: float) -> None:
        try:
            await self._registration.report_standstill(standstill.generation, standstill.peer, lasted_s)
        except ForgedError as error:
            self._log.info("the daemon has not recorded the standstill", reason=str(error))


def _readable(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds")
