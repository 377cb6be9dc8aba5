"""What a worker sends to the daemon: requests and signals, heartbeats among them, and questions about a long wait.

Invariants:
- A request that other workers wait for is repeated until the daemon has answered, however long it is away.
- A report that comes too late for its attempt is dropped; every other refusal is raised.
- Everything carries the worker's incarnation, so that it is not taken for another worker of the same name.
- Each heartbeat tells when the next one is due, so that a worker with older settings is not taken for silent. A shorter
  interval takes effect at once.
- A wait of less than `LOGGED_AFTER_S` is not logged; a longer one is logged with its reason, after pauses that grow.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from random import Random
from typing import Any, TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup

from forged.client.client import ForgedClient
from forged.clock import Clock
from forged.data.training import common_of
from forged.elastic.messages import (
    AnnounceLeave,
    AttemptProgress,
    ClusterView,
    Heartbeat,
    JoinJob,
    JoinReply,
    LeaveJob,
    ReadLeave,
    ReportReady,
    ReportStandstill,
    ReportStopped,
    ReportUnreachablePeer,
    ShowCluster,
)
from forged.elastic.model import WorkerId
from forged.elastic.rescale.attempt import StopReport
from forged.errors import ForgedError, RequestRefused
from forged.kernel.messages import Request, Signal
from forged.log import Log
from forged.retry import RetryPolicy
from forged.worker.worker_state.session_state import SessionState, WorkerSpec

R = TypeVar("R")

PERSEVERING = RetryPolicy(attempts=None, delay_s=0.05, exponential=True, delay_max_s=1.0, jitter=0.5)
LEAVE_TIMEOUT_S = 2.0
"""How long a leave is reported even if the worker is cancelled."""
LOGGED_AFTER_S = 2.0
"""How long something is waited for before that is logged as a warning."""
LOG_PAUSE_S_MAX = 600.0
ANSWER_TIMEOUT_S = 5.0
"""How long the daemon may take to say what the job waits for."""
NO_ANSWER_ENDS = "the worker tries again until it answers"


def log_pauses() -> Iterator[float]:
    """The seconds before the first warning about a wait, and from each warning to the next."""
    pause_s = LOGGED_AFTER_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LOG_PAUSE_S_MAX)


class Registration:
    """One worker's requests to the daemon."""

    def __init__(
        self, client: ForgedClient, job: str, worker: WorkerId, incarnation: bytes, source: Random, log: Log
    ) -> None:
        self._client = client
        self.job = job
        self.worker = worker
        self.incarnation = incarnation
        self._random = source
        self._log = log

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to a daemon."""
        return self._client.connected

    # Joining.

    async def join(self, spec: WorkerSpec, *, again: bool = False) -> JoinReply:
        """Become a worker of the job; with `again`, join once more to make up for missed facts."""
        return await self.send(
            JoinJob(
                self.job,
                self.worker,
                self.incarnation,
                os.getpid(),
                spec.local_world_size,
                attributes=dict(spec.attributes),
                # An operator may have changed the settings since the first time.
                settings=None if again else spec.settings,
                rejoin=again,
                with_data=spec.data is not None,
                shared_config=common_of(spec.data, spec.sampler),
                group=spec.group,
                group_rank=spec.group_rank,
                group_size=spec.group_size,
            )
        )

    # Rescaling.

    async def stopped(self, attempt: int, stop: StopReport) -> bool:
        """Send the stop report; false if it comes too late."""
        return await self._report(
            ReportStopped(
                self.job,
                self.worker.id,
                self.incarnation,
                attempt,
                stop.step,
                stop.epoch,
                stop.learning_rate,
                stop.global_batch_size,
                stop.holds_state,
                stop.finished,
                stop.is_stale,
            )
        )

    async def ready(self, attempt: int) -> bool:
        """Report that this worker has the state and its shards; false if the report comes too late."""
        return await self._report(ReportReady(self.job, self.worker.id, self.incarnation, attempt))

    async def report_unreachable_peer(self, generation: int, peer: str, why: str, step_voided: bool = False) -> None:
        """Report that this worker cannot continue in its world."""
        await self.send(
            ReportUnreachablePeer(self.job, self.worker.id, self.incarnation, generation, peer, why, step_voided)
        )

    async def report_standstill(self, generation: int, peer: str, for_s: float) -> None:
        """Report that this worker has stood still without a daemon."""
        await self.send(ReportStandstill(self.job, self.worker.id, self.incarnation, generation, for_s, peer))

    def receiving(self, attempt: int, received: int, *, problem: str, unreachable_peer: str) -> None:
        """Signal how much of the state has arrived, which worker is out of reach, and why."""
        progress = AttemptProgress(self.job, self.worker.id, self.incarnation, attempt, received)
        self._client.signal(msgspec.structs.replace(progress, problem=problem, unreachable_peer=unreachable_peer))

    # Living and waiting.

    def beat(
        self,
        step: int,
        marks: int,
        interval_s: float,
        *,
        last_step_done: bool = False,
        is_done: bool = False,
        meeting: str = "",
    ) -> None:
        """Signal a heartbeat; the next one is due in `interval_s`."""
        who = self.job, self.worker.id, self.incarnation
        self._client.signal(Heartbeat(*who, step, marks, interval_s, last_step_done, is_done, meeting))

    async def why_waiting(self) -> str:
        """What the job waits for, in the daemon's words. Asked once, and briefly: a wait without a daemon is logged."""
        if not self.is_connected:
            return f"no connection to the daemon: {self._client.last_failures or 'it was lost'}; {NO_ANSWER_ENDS}"
        try:
            shown = await self._client.request(ShowCluster(self.job), timeout_s=ANSWER_TIMEOUT_S)
        except ForgedError as error:
            return f"the daemon does not answer: {error.message}; {NO_ANSWER_ENDS}"
        return shown.stall_report or (
            f"job {self.job} is {shown.phase}; the wait ends when the daemon has taken this worker into a world"
        )

    async def show_cluster(self) -> ClusterView:
        """How the job is, or how it ended."""
        return await self.send(ShowCluster(self.job))

    # Leaving.

    async def announce_leave(self, reason: str) -> bool:
        """Record that this worker drains, so that a world without it is formed; tells whether it may leave at once."""
        leave = await self.send(AnnounceLeave(self.job, self.worker.id, self.incarnation, reason))
        return leave.may_leave

    async def may_leave(self) -> bool:
        """Whether this worker may leave by now; the daemon only reads."""
        leave = await self.send(ReadLeave(self.job, self.worker.id, self.incarnation))
        return leave.may_leave

    async def leave_if_it_may(self, reason: str, step: int) -> bool:
        """Leave, unless the other workers need this one; tells whether it has left."""
        leave = await self.send(
            LeaveJob(self.job, self.worker.id, self.incarnation, reason, step=step, if_permitted=True)
        )
        return leave.may_leave

    async def leave(self, reason: str, step: int, timeout_s: float, *, done: bool, failed: bool) -> bool:
        """Leave, if the daemon answers in time; a cancelled worker tries for `LEAVE_TIMEOUT_S`.

        Returns whether the daemon has answered.
        """
        is_said = False
        request = LeaveJob(self.job, self.worker.id, self.incarnation, reason, done, failed, step)
        with anyio.move_on_after(timeout_s) as scope:
            # A cancelled worker tries all the same, for a moment.
            with anyio.move_on_after(min(timeout_s, LEAVE_TIMEOUT_S), shield=True) as moment:
                is_said = await self._leave(request)
            if moment.cancelled_caught:
                is_said = await self._leave(request)
        if scope.cancelled_caught:
            # The rest of a timeout is no round number.
            why = f"the daemon did not answer within {round(timeout_s, 2):g} s"
            self._log.warning("the daemon did not acknowledge this worker's leave", reason=why)
        return is_said

    async def _leave(self, request: LeaveJob) -> bool:
        try:
            await self.send(request)
        except ForgedError as error:
            self._log.warning("the daemon did not acknowledge this worker's leave", reason=str(error))
            return isinstance(error, RequestRefused)
        return True

    # Sending.

    async def _report(self, request: Request[Any]) -> bool:
        try:
            await self.send(request)
        except RequestRefused as error:
            if error.code != "attempt_over":
                raise
            self._log.info("the daemon needs this report no more, because the attempt is over", reason=error.message)
            return False
        return True

    async def ask(self, request: Request[R], timeout_s: float) -> R:
        """Send a request, and wait for the answer for so long."""
        return await self._client.request(request, timeout_s=timeout_s)

    def signal(self, signal: Signal) -> None:
        """Send a signal, which may be lost."""
        self._client.signal(signal)

    async def send(self, request: Request[R]) -> R:
        """Send a request, and repeat it until the daemon has answered."""
        return await persevere(lambda: self._client.request(request), self._random, self._log)


async def persevere(act: Callable[[], Awaitable[R]], source: Random, log: Log) -> R:
    """Repeat an action until it succeeds; an error that no repetition would change is raised."""
    began_at, pauses, delays = anyio.current_time(), log_pauses(), PERSEVERING.delays(source.random)
    due_s = next(pauses)
    while True:
        try:
            return await act()
        except ForgedError as error:
            if not error.retryable or error.code == "client_closed":
                raise
            tried_s = anyio.current_time() - began_at
            if tried_s < due_s:
                log.info("retrying a request to the daemon", reason=str(error))
            else:
                log.warning("still retrying a request to the daemon", for_s=round(tried_s), reason=str(error))
                due_s = tried_s + next(pauses)
        await anyio.sleep(next(delays))


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
            is_done=state.is_done,
            meeting=current_world.meeting_name,
        )
        current_world.heartbeat_at = self._clock.wall()

    def follow_settings(self) -> None:
        """Beat at once if the settings name another interval than the present one."""
        if self._state.config.heartbeat_interval_s != self._interval_s:
            self._changed.set()


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
