"""The worker's heartbeats.

Invariants:
- Each heartbeat tells when the next one is due, so that a worker with older settings is not taken for silent.
- A shorter interval takes effect at once.
"""

from __future__ import annotations

import anyio

from forged.clock import Clock
from forged.worker.daemon_link.registration import Registration
from forged.worker.worker_state.session_state import SessionState


class HeartbeatSender:
    """Sends one worker's heartbeats at the interval that the job's settings name."""

    def __init__(self, state: SessionState, registration: Registration, clock: Clock) -> None:
        self._state = state
        self._registration = registration
        self._clock = clock
        self._interval_s = 0.0
        self._changed = anyio.Event()

    async def run(self) -> None:
        while True:
            self._changed = anyio.Event()
            self._interval_s = self._state.config.heartbeat_interval_s
            self.beat_now()
            with anyio.move_on_after(self._interval_s):
                await self._changed.wait()

    def beat_now(self) -> None:
        """Send one at once: something in it has changed."""
        state, current_world = self._state, self._state.current_world
        self._registration.beat(
            state.progress.step,
            current_world.marks,
            state.config.heartbeat_interval_s,
            last_step_done=state.drain.is_leaving,
        )
        current_world.heartbeat_at = self._clock.wall()

    def follow_settings(self) -> None:
        """Beat at once if the settings name another interval than the present one."""
        if self._state.config.heartbeat_interval_s != self._interval_s:
            self._changed.set()
