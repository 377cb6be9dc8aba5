"""How a draining worker leaves in good order.

The flow, from the daemon's `WorkerDraining`, SIGTERM or the script's `drain` to the leave report:

1. `begin_if_told` records the drain with the daemon, which forms a world without this worker, and asks whether the
   worker may leave. The worker trains on until it may, or until it has waited for as long as the settings allow.
2. `start_leaving`, after the last step: the script saves while the worker still gives its state and shards away.
3. `finish_leaving` asks the daemon to release the worker. A worker that is needed after all goes back to 1.

Invariants:
- A worker leaves its world when the next one is committed without it, or when no world can be formed. The daemon
  decides that, and again at the moment of leaving; a worker that is needed then stays.
- No wait is endless: without a daemon, or with no taker for what only this worker holds, it leaves after a grace. Its
  own script may take any time for a step; a collective that other ranks do not join is aborted after that grace.
- A worker that has trained its last step takes no state any more, and gives what other workers ask for.
- A worker whose script was interrupted while it saved tells the subscribers of `leaving` again. One that the daemon
  kept tells them again only after further steps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from forged.elastic.messages import (
    JobWaiting,
    RescaleAborted,
    RescaleCompleted,
    RescaleStarted,
    RescaleSynchronising,
    WorkerDraining,
    WorkerFailed,
    WorkerLeft,
)
from forged.errors import ForgedError, describe
from forged.kernel.messages import Fact, Gap, UnknownFact
from forged.log import Log
from forged.retry import Random
from forged.worker.collectives.world import World
from forged.worker.data.usage_report import UsageReport
from forged.worker.mesh import Mesh
from forged.worker.registration import HeartbeatSender, Registration
from forged.worker.rescaler import Rescaler
from forged.worker.worker_state.session_state import SessionState

LOOK_INTERVAL_S = 0.5
"""How often the drain looks for takers, and at its timeouts."""
QUESTION_INTERVAL_S = 3.0
"""How often, about, a worker that is kept asks again: nearly every change arrives as a fact before."""
NEVER = -1

MAY_NEED_WORKER = (RescaleStarted, RescaleCompleted)
"""Facts after which the other workers may need this one."""
MAY_RELEASE_WORKER = (RescaleSynchronising, RescaleAborted, JobWaiting, WorkerDraining, WorkerFailed, WorkerLeft)
"""Facts after which they may not need it any more."""


class Leaving(NamedTuple):
    """The last step is done: the subscribers of `leaving` are to be told, and the worker leaves then."""

    reason: str
    is_news: bool
    """Whether the subscribers have not been told of this step yet."""


class Drain:
    """One worker's drain."""

    def __init__(
        self,
        state: SessionState,
        registration: Registration,
        mesh: Mesh,
        heartbeat: HeartbeatSender,
        usage: UsageReport,
        tasks: TaskGroup,
        random: Random,
        log: Log,
    ) -> None:
        self._state = state
        self._flags = state.drain
        self._registration = registration
        self._mesh = mesh
        self._heartbeat = heartbeat
        self._usage = usage
        self._tasks = tasks
        self._random = random
        self._log = log
        self._is_begun = False
        self._is_announced = False
        """Whether the daemon has recorded that this worker drains."""
        self._changed = anyio.Event()
        """The daemon's last answer may not hold any more."""
        self._leave_request: anyio.CancelScope | None = None
        # The timeouts.
        self._unwanted_s = 0.0
        """For how long no worker has taken anything that could have."""
        self._meeting_s = 0.0
        """For how long the script has waited in one and the same collective."""
        self._aborted_because = ""
        """Why the drain has aborted a step; the worker then leaves at the end of the step."""
        self._overdue_because = ""
        # Leaving.
        self.own_world: World | None = None
        """The last world of a worker that was alone in it: its script may use collectives while it saves."""
        self._step = self._told_at = NEVER
        """Steps applied when the worker was to leave last, and when its subscribers were last told to the end."""
        self._serving: tuple[anyio.CancelScope, anyio.Event] | None = None
        """The task that gives state and shards away, and the event of its end."""

    @property
    def reason(self) -> str:
        """Why the worker drains; with the timeout, for one that leaves though it is needed."""
        wish = self._state.view.draining or ""
        return f"{wish}; {self._overdue_because}" if self._overdue_because and self._state.is_needed else wish

    # 1. May the worker leave?

    def begin_if_told(self) -> None:
        """Begin once the worker is told to drain and knows the job's settings."""
        wish = self._state.view.draining
        if wish is None or self._is_begun or not self._state.has_config or self._tasks.cancel_scope.cancel_called:
            return
        self._is_begun = True
        self._tasks.start_soon(self._ask, wish)
        self._tasks.start_soon(self._limit_waiting)

    def hear(self, news: Fact | UnknownFact | Gap) -> None:
        """Ask the daemon again after a fact that may change whether the other workers need this one."""
        if isinstance(news, (Gap, *MAY_NEED_WORKER)):
            self._reconsider(is_needed_anew=True)
        elif isinstance(news, MAY_RELEASE_WORKER):
            self._reconsider(is_needed_anew=False)

    def _reconsider(self, *, is_needed_anew: bool) -> None:
        # Many workers may leave one after the other: one that may leave already does not ask at each of them.
        self._unwanted_s = 0.0
        self._flags.may_leave = self._flags.may_leave and not is_needed_anew
        if not self._flags.may_leave:
            self._ask_again()

    def _ask_again(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _ask(self, wish: str) -> None:
        """Record the drain, and ask whether the worker may leave, for as long as the session lasts."""
        question: Callable[[], Awaitable[bool]] = partial(self._registration.announce_leave, wish)
        while True:
            changed = self._changed
            if self._state.is_needed or not self._is_announced:
                may_leave = await self._answer_to(question)
                self._is_announced, question = True, self._registration.may_leave
                # The fact of a change that the answer does not know yet has arrived before the answer.
                if changed.is_set():
                    continue
                self._flags.may_leave = may_leave
                self._state.wake()
            with anyio.move_on_after(None if self._flags.may_leave else self._pause_s()):
                await changed.wait()

    async def _answer_to(self, question: Callable[[], Awaitable[bool]]) -> bool:
        try:
            return await question()
        except ForgedError as error:
            self._log.warning(
                "the daemon refused to say whether this worker may leave; it leaves now", reason=str(error)
            )
            return True

    def _pause_s(self) -> float:
        """Differs between workers: many may have been told to drain at once."""
        return QUESTION_INTERVAL_S * (0.5 + self._random())

    async def _limit_waiting(self) -> None:
        """Mark the worker as overdue after its timeouts, and unmark it when another worker takes over after all."""
        no_daemon_s = 0.0
        while True:
            self._overdue_because = self._exceeded_timeout(no_daemon_s)
            if bool(self._overdue_because) != self._flags.is_overdue:
                self._toggle_overdue()
            if self._aborted_because:
                why = f"{self._state.worker.id} leaves without waiting further: {self._aborted_because}"
                self._state.current_world.abort_collective(why)
            meeting = self._state.current_world.meeting
            await anyio.sleep(LOOK_INTERVAL_S)
            # A daemon that cannot write counts as absent: it records no drain and forms no world.
            has_daemon = self._registration.is_connected and self._is_announced and self._leave_request is None
            no_daemon_s = 0.0 if has_daemon else no_daemon_s + LOOK_INTERVAL_S
            has_given = self._mesh.has_given()
            is_wanted = has_given or self._holds_up_world()
            self._unwanted_s = 0.0 if is_wanted else self._unwanted_s + LOOK_INTERVAL_S
            is_stuck = meeting is not None and meeting == self._state.current_world.meeting and not has_given
            self._meeting_s = self._meeting_s + LOOK_INTERVAL_S if is_stuck else 0.0

    def _holds_up_world(self) -> bool:
        """Whether the other workers have yet to stop, so that no worker can take anything; false in a collective."""
        view, current_world = self._state.view, self._state.current_world
        if current_world.meeting is not None:
            return False
        is_stopping = view.is_attempt_running and view.synchronising is None and not view.background_attempt
        return is_stopping or (current_world.is_stepping and view.stop_wanted > 0)

    def _exceeded_timeout(self, no_daemon_s: float) -> str:
        """The wait that has exceeded its timeout, as the reason to leave; empty if there is none."""
        config = self._state.config
        if _exceeds(self._meeting_s, config.leave_timeout_s):
            self._aborted_because = f"the other ranks did not join a collective for {config.leave_timeout_s:g} s"
        if self._aborted_because:
            return self._aborted_because
        if _exceeds(no_daemon_s, config.reconnect_grace_s):
            lack = "the daemon recorded nothing" if self._registration.is_connected else "there was no daemon"
            return f"{lack} for {config.reconnect_grace_s:g} s"
        if _exceeds(self._unwanted_s, config.leave_timeout_s):
            return f"no worker has taken over its state or shards for {config.leave_timeout_s:g} s"
        return ""

    def _toggle_overdue(self) -> None:
        self._flags.is_overdue = not self._flags.is_overdue
        if self._flags.is_overdue:
            if self._leave_request is not None:
                self._leave_request.cancel()
            if self._state.is_needed:
                self._log.warning(
                    "this worker leaves with state or shards that other workers may need", reason=self._overdue_because
                )
            self._state.wake()

    # 2. The script saves.

    async def start_leaving(self, rescaler: Rescaler) -> Leaving:
        """Leave the world after the last step; again for a script that was interrupted while it saved."""
        if not self._flags.is_leaving:
            await self._stop_serving()
            self._flags.is_leaving, self.own_world = True, None
            self._heartbeat.beat_now()
            self.own_world = await self._state.current_world.leave_for_good()
        if self._serving is None:
            self._serving = anyio.CancelScope(), anyio.Event()
            self._tasks.start_soon(self._serve, rescaler, *self._serving)
        self._step = self._state.progress.steps_applied
        return Leaving(self.reason, self._step != self._told_at)

    async def _serve(self, rescaler: Rescaler, scope: anyio.CancelScope, ended: anyio.Event) -> None:
        """Take part in rescales, giving state and shards, until the worker has left or trains again."""
        view = self._state.view
        try:
            with scope:
                while view.end is None and view.completed is None:
                    if self._state.is_leave_due:
                        await self._state.wait_for_change()
                    else:
                        await rescaler.advance(takes_state=False)
        except Exception as error:  # noqa: BLE001 - packing calls the script's own state
            self._log.warning(
                "this worker can no longer give its state or shards to other workers", reason=describe(error)
            )
        finally:
            ended.set()

    async def _stop_serving(self) -> None:
        if self._serving is not None:
            scope, ended = self._serving
            scope.cancel()
            await ended.wait()
            self._serving = None

    # 3. The daemon releases the worker, or keeps it.

    async def finish_leaving(self) -> bool:
        """Leave, now that the script has saved; false if the daemon keeps the worker, which then trains on."""
        self._told_at = self._step
        if await self._is_released():
            await self._stop_serving()
            return True
        await self.cancel_leaving()
        return False

    async def cancel_leaving(self) -> None:
        """Take part again as before. No effect for a worker that is not leaving."""
        was_leaving, self._flags.is_leaving = self._flags.is_leaving, False
        await self._stop_serving()
        if was_leaving:
            self._heartbeat.beat_now()

    async def _is_released(self) -> bool:
        if self._flags.is_overdue:
            return True
        try:
            with anyio.CancelScope() as self._leave_request:
                self._flags.may_leave = await self._answer_to(self._leave_if_it_may)
                self._flags.is_kept = not self._flags.may_leave
        finally:
            self._leave_request = None
        if not self._flags.may_leave:
            self._ask_again()
        return self._flags.may_leave or self._flags.is_overdue

    async def _leave_if_it_may(self) -> bool:
        await self._usage.tell()
        return await self._registration.leave_if_it_may(self.reason, self._state.progress.step)


def _exceeds(seconds: float, limit_s: float) -> bool:
    return 0.0 < seconds >= limit_s
