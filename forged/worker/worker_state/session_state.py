"""What the parts of a worker's session share, and how they learn that it has changed.

Invariants:
- The parts of a session do not call each other to pass news on: they change this state and call `wake`.
- The drain flags have one writer, `forged.worker.drain`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import anyio

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.membership.member import pulse_interval_s
from forged.elastic.model import WorkerId
from forged.jobs.model import SettingValue
from forged.worker.process.counters import Counters
from forged.worker.worker_state.current_world import CurrentWorld
from forged.worker.worker_state.job_view import JobView
from forged.worker.worker_state.progress import TrainingProgress


@dataclass(slots=True)
class DrainFlags:
    """How far a worker's drain is."""

    is_leaving: bool = False
    """The worker has trained its last step; its script may be saving something."""
    may_leave: bool = False
    """The daemon's last answer: nothing needs this worker."""
    is_kept: bool = False
    """The daemon refused the worker's last attempt to leave."""
    is_overdue: bool = False
    """The worker has waited for as long as the job's settings allow."""


class SessionState:
    """The state of one worker in one session. The training progress outlives the session."""

    def __init__(
        self, worker: WorkerId, progress: TrainingProgress, counters: Counters | None = None, now: float = 0.0
    ) -> None:
        self.worker = worker
        """Has the port at which peers reach the worker once its mesh is open."""
        self.view = JobView(worker.id)
        self.current_world = CurrentWorld(self.view, counters, now)
        self.progress = progress
        self.drain = DrainFlags()
        self._config: ElasticTrainingConfig | None = None
        self._changed = asyncio.Event()
        self._action: tuple[anyio.CancelScope, Callable[[], bool]] | None = None

    # The job's settings.

    @property
    def has_config(self) -> bool:
        """Whether the daemon has told the job's settings yet."""
        return self._config is not None

    @property
    def config(self) -> ElasticTrainingConfig:
        """The newest settings of the job."""
        assert self._config is not None
        return self._config

    def follow_settings(self, settings: Mapping[str, SettingValue]) -> None:
        """Go by these settings from now on; the pulse reads its interval from the counters."""
        self._config = ElasticTrainingConfig.from_settings(settings)
        if self.progress.counters is not None:
            self.progress.counters.pulse_interval_s = pulse_interval_s(self._config)

    # Draining.

    @property
    def is_leave_due(self) -> bool:
        """Whether the worker is draining and nothing keeps it."""
        return self.view.draining is not None and (self.drain.is_overdue or not self.is_needed)

    @property
    def is_needed(self) -> bool:
        """Whether the other workers may need this one, as far as the daemon has said."""
        return (self.drain.is_kept or self._is_bound) and not self.drain.may_leave

    @property
    def _is_bound(self) -> bool:
        """Whether the worker is in the committed world, has yet to cross into it, or leaves by a running attempt."""
        view = self.view
        takes_part = view.is_attempt_running and view.leaves
        return takes_part or self.worker in view.topology or view.committed is not None

    # Changes.

    def fail(self, error: Exception) -> None:
        """Training cannot continue here; the script gets the error at its next step boundary."""
        self.view.end = error
        self.wake()

    def wake(self) -> None:
        """Tell the script's task that something has changed; cancel its action if that is no longer wanted."""
        self._changed.set()
        if self._action is not None:
            scope, is_wanted = self._action
            if not is_wanted():
                scope.cancel()

    async def wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def run_while(self, is_wanted: Callable[[], bool], act: Callable[[], Awaitable[object]]) -> None:
        """Do something for as long as it is wanted, which is looked at now and at each `wake`."""
        if not is_wanted():
            # A change that came before this call wakes nothing any more.
            return
        with anyio.CancelScope() as scope:
            self._action = scope, is_wanted
            try:
                await act()
            finally:
                self._action = None
