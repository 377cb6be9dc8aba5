"""What the parts of a worker's session share: its world, its drain flags, and the news that these have changed.

Invariants:
- The parts of a session do not call each other to pass news on: they change this state and call `wake`.
- The drain flags have one writer, `forged.worker.drain`.
- What the script has configured is the same in every session.
- A step counts when all ranks of the world have finished it. A rank that has finished a step for which all ranks have
  voted never repeats it.
- An aborted collective makes the step void, and the world is lost; the daemon is told unless the loss is known from it.
- A world that stops does so after the same step on all ranks.
- `on_world_over` is called once for each world that was entered, at once when no further collective will complete, and
  before the next world is entered.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import NamedTuple

import anyio

from forged.clock import Clock
from forged.data.sampling.sampler import ElasticSampler
from forged.data.training import TrainingData
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.membership.member import COLLECTIVES_PER_WORLD
from forged.elastic.model import RANK_NONE, ClusterTopology, WorkerId, WorkerStatus, WorldOver
from forged.errors import ForgedError, RequestRefused
from forged.jobs.model import SettingValue
from forged.log import Log
from forged.net.transport.port import Network
from forged.worker.collectives.endpoints import Ending
from forged.worker.collectives.world import World
from forged.worker.errors import STEP_VOIDED, CollectiveAborted, StepAborted, WorldIncomplete
from forged.worker.process.counters import Counters
from forged.worker.process.worker_process import WorkerProcess
from forged.worker.transport.bulk_channel import BulkTransport
from forged.worker.transport.peer_tls import PeerTls
from forged.worker.worker_state.job_view import JobView
from forged.worker.worker_state.progress import TrainingProgress
from forged.worker.worker_state.step_clock import StepClock

OUT = (WorkerStatus.LEAVING, WorkerStatus.FAILED)


@dataclass(kw_only=True, slots=True)
class WorkerSpec:
    """A worker's configuration; the sampler may be set until the worker registers."""

    job: str
    settings: dict[str, SettingValue] | None
    """The job settings that the script asks for; None accepts the settings that the job has."""
    attributes: Mapping[str, str]
    local_world_size: int
    group: str
    """The name of the worker's group; empty for a group of one."""
    group_rank: int
    group_size: int
    token: str | None
    data: TrainingData | None
    sampler: ElasticSampler | None
    process: WorkerProcess
    network: Network | None
    peer_tls: PeerTls | None
    carrier: BulkTransport | None
    clock: Clock
    random: Random
    log: Log


class PeerReport(NamedTuple):
    """A world that this worker cannot continue in, as it is reported to the daemon."""

    generation: int
    peer: str
    """The worker that is blamed for it; empty for none."""
    why: str
    step_voided: bool = False
    """Whether a member's script has voided the step, so that no worker is to blame."""

    @classmethod
    def of(cls, generation: int, error: ForgedError, suspect: str = "") -> PeerReport:
        """The report about a world that has ended with this error; `suspect` is blamed where the error names none."""
        return cls(generation, peer_of(error) or suspect, error.message, error.code == STEP_VOIDED)


class CurrentWorld:
    """One worker's part in its world. `counters` make its marks visible to the pulse."""

    def __init__(
        self,
        view: JobView,
        counters: Counters | None,
        now: float = 0.0,
        changed: Callable[[], object] = lambda: None,
        on_over: Callable[[WorldOver], object] = lambda over: None,
        step_clock: StepClock | None = None,
    ) -> None:
        """`changed` is called whenever the worker is no longer in a world, `on_over` when its world is over."""
        self.status = WorkerStatus.JOINING
        self.joined_at = self.heartbeat_at = now
        self.topology = ClusterTopology()
        """The world that was entered last."""
        self.world: World | None = None
        """The world that the worker is in; None between two worlds."""
        self.over: WorldOver | None = None
        """Why no further collective of the world that was entered last will complete; None while they may."""
        self.is_entry_due = False
        """Whether the script has not been told yet that the worker has entered its world."""
        self.is_void = False
        """Whether a collective of the present step was aborted."""
        self.is_stepping = False
        """Whether the script is inside a step."""
        self.is_committed = False
        """Whether all ranks have voted for the present step."""
        self.meeting_name = ""
        """The meeting that the script is in; empty for none."""
        self.peer_report: PeerReport | None = None
        self.loss: PeerReport | None = None
        """How the last world was lost; None in a world, and after one that has ended for a rescale."""
        self.marks = 0
        """How often the worker has come to a point where the workers of a world meet."""
        self._is_meeting = False
        self._meeting_turn = threading.Lock()
        """Taken without waiting only, so that a signal handler finds no deadlock."""
        self._stopped_by = 0
        """The id of the fact for which the world has stopped after its last step; 0 when it has not."""
        self.counters = counters
        self.step_clock = step_clock or StepClock(lambda: 0.0)
        """Measures the time in steps and between them."""
        self._view = view
        self._changed = changed
        self._on_over = on_over
        self._entered = 0
        """The generation of the world that was entered last; 0 before the first."""

    @property
    def meeting(self) -> int | None:
        """The number of the collective in which the script waits; None while the script computes."""
        return self.marks if self._is_meeting else None

    @property
    def may_step(self) -> bool:
        """Whether the worker is in a world that continues."""
        return self.world is not None and self.world.ending is None and not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Whether the world has stopped, and the reason still holds or has not arrived here as a fact yet."""
        view = self._view
        return self._stopped_by > 0 and (view.newest_fact_id < self._stopped_by or view.stop_wanted > 0)

    # Steps.

    def activate(self, worker: WorkerId) -> None:
        """The worker trains, unless it is in no world or has left."""
        if self.topology.rank_of(worker) != RANK_NONE and self.status not in OUT:
            self.status = WorkerStatus.ACTIVE

    def begin_step(self) -> None:
        self.is_stepping, self.is_void, self.is_committed = True, False, False

    @contextmanager
    def collective(self) -> Iterator[World]:
        """Run a collective of the world inside the block, or raise `StepAborted`."""
        if self.is_committed:
            raise RequestRefused(
                "step_committed",
                "a collective was called after the step was committed, where its failure could not abort the step",
                "call it before the commit, or after the step",
            )
        world = self.world
        if world is None or self.is_void:
            self.is_void = True
            raise StepAborted("this worker is in no world at present")
        self.mark()
        try:
            with self._meeting():
                yield world
        except CollectiveAborted as error:
            self.is_void = True
            self.lose(error)
            raise StepAborted(error.message) from error

    async def commit_step(self, step: int) -> None:
        """Vote for the step, and wait until all ranks have; from then on the script changes its state."""
        with self.collective() as world:
            await world.commit(step)
        self.is_committed = True

    @contextmanager
    def named_meeting(self, name: str) -> Iterator[None]:
        """Collectives that are not the library's, inside the block; raises `StepAborted` if the world is over already.

        Any thread may call it: what it changes is read between two collectives only.
        """
        if not self._meeting_turn.acquire(blocking=False):
            raise RequestRefused(
                "meeting_nested",
                f"meeting {name!r} was begun within meeting {self.meeting_name!r}",
                "end a meeting before the next one begins",
            )
        try:
            if self.world is None or self.is_void or self.over is not None:
                raise StepAborted("no world" if self.over is None else self.over.reason)
            self.mark()
            self.meeting_name = name
            with self._meeting():
                yield
        finally:
            self.meeting_name = ""
            self._meeting_turn.release()

    def void_step(self, why: str) -> None:
        """The present step does not count, at any rank of the world, which ends with it."""
        self.is_void = True
        if self.world is not None:
            self.world.void(why)

    async def end_step(self, step: int) -> bool:
        """Tell the other ranks that the step is finished, unless it is void; returns whether it is committed."""
        self.is_stepping = self.is_committed = False
        if self.world is None or self.is_void:
            return False
        try:
            with self._meeting():
                stop_wanted = await self.world.end_step(step, stop_wanted=self._view.stop_wanted)
        except CollectiveAborted as error:
            self.lose(error)
            return False
        self._stopped_by = stop_wanted
        return True

    def abort_collective(self, why: str) -> None:
        """Abort the collective that the script waits in, if there is one; alone in a world it waits for no rank."""
        if self._is_meeting and self.world is not None and self.world.size > 1:
            self.world.abort(why)

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        before, self._is_meeting = self._is_meeting, True
        is_measured = self.step_clock.begin_meeting()
        try:
            yield
        finally:
            self._is_meeting = before
            if is_measured:
                self.step_clock.end_meeting()

    def mark(self) -> None:
        """Count that the worker has come to a point where the workers of a world meet."""
        self.marks += 1
        if self.counters is not None:
            self.counters.marks = self.marks

    # From world to world.

    def come_to(self, topology: ClusterTopology) -> None:
        """Count from this world's first mark: the daemon compares marks within a world only."""
        self.marks = topology.generation * COLLECTIVES_PER_WORLD

    def take_rank(self, topology: ClusterTopology) -> None:
        """The worker's rank is its position in this world from now on."""
        self.topology = topology
        self.come_to(topology)

    def enter(self, world: World) -> None:
        self.world, self.loss, self._stopped_by = world, None, self._view.stop_wanted
        self._entered, self.over, self.is_entry_due = world.generation, None, True
        world.watch(partial(self._ended, world.generation))

    def _ended(self, generation: int, ending: Ending) -> None:
        if generation == self._entered:
            self.be_over(ending.reason, ending.peer, is_orderly=ending.is_departure)

    def be_over(self, reason: str, peer: str = "", *, is_orderly: bool = False) -> None:
        """No further collective of the world that was entered last will complete; the first reason counts."""
        if self._entered and self.over is None:
            peer, is_orderly = peer or self._view.lost, is_orderly and not self.is_stepping
            self.over = WorldOver(self._entered, reason, peer, is_orderly)
            self._on_over(self.over)

    def lose(self, error: ForgedError) -> None:
        """The world cannot continue. Report it, unless the daemon has said so itself."""
        world, self.world = self.world, None
        if world is not None:
            self.loss = PeerReport.of(world.generation, error)
            if not (self._view.lost or self._view.rescaling):
                self.peer_report = self.loss
            self._changed()

    def fail_to_enter(self, generation: int, error: ForgedError, suspect: str) -> None:
        """The members of a committed world have not met. Report it."""
        self.loss = self.peer_report = PeerReport.of(generation, error, suspect)

    async def leave(self) -> None:
        world, self.world = self.world, None
        if world is not None:
            self._changed()
            await world.leave()

    async def leave_for_good(self) -> World | None:
        """Leave before the script saves; returns the world if this worker was alone in it and keeps its use."""
        world = self.world
        if world is None or world.size > 1 or world.ending is not None:
            await self.leave()
            return None
        self.world = None
        self.be_over("this worker leaves", is_orderly=True)
        return world


def peer_of(error: ForgedError) -> str:
    """The worker that is blamed for a broken world; empty for none."""
    return error.peer if isinstance(error, CollectiveAborted | WorldIncomplete) else ""


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
        self,
        worker: WorkerId,
        progress: TrainingProgress,
        counters: Counters | None = None,
        now: float = 0.0,
        on_world_over: Callable[[WorldOver], object] = lambda over: None,
        step_clock: StepClock | None = None,
    ) -> None:
        self.worker = worker
        """Has the port at which peers reach the worker once its mesh is open."""
        self.view = JobView(worker.id)
        self.current_world = CurrentWorld(self.view, counters, now, self.wake, on_world_over, step_clock)
        self.progress = progress
        self.drain = DrainFlags()
        self.is_done = False
        """Whether the script has made its last step, and the world has ended before this worker could leave."""
        self._config: ElasticTrainingConfig | None = None
        self._changed = asyncio.Event()
        self._action: tuple[anyio.CancelScope, Callable[[], bool] | None] | None = None

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
            self.progress.counters.pulse_interval_s = self._config.pulse_interval_s

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

    @property
    def has_no_world(self) -> bool:
        """Whether this worker's world is over, and all that it needs to train on is the commit of another one."""
        current_world, view = self.current_world, self.view
        if self.worker not in view.topology or current_world.status in OUT:
            return False
        is_due = not (view.paused or view.waiting) and self.is_wanted(None)
        return is_due and current_world.world is None and view.committed is None

    # Changes.

    def fail(self, error: Exception) -> None:
        """Training cannot continue here; the script gets the error at its next step boundary."""
        self.view.end = error
        self.wake()

    def wake(self) -> None:
        """Tell the script's task that something has changed; cancel its action if that is no longer wanted."""
        if self.view.end is not None:
            self.current_world.be_over(str(self.view.end))
        elif self.view.completed is not None:
            self.current_world.be_over("the training is complete", is_orderly=True)
        self._changed.set()
        if self._action is not None:
            scope, still = self._action
            if not self.is_wanted(still):
                scope.cancel()

    async def wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def is_wanted(self, still: Callable[[], bool] | None) -> bool:
        """Whether training continues, the worker does not leave, and `still` holds."""
        view = self.view
        is_over = view.end is not None or view.completed is not None or self.is_leave_due
        return not is_over and (still is None or still())

    @contextmanager
    def acting(self, still: Callable[[], bool] | None) -> Iterator[None]:
        """Cancel the block at the first `wake` at which it is not wanted any more."""
        with anyio.CancelScope() as scope:
            self._action = scope, still
            try:
                yield
            finally:
                self._action = None
