"""The world that a worker trains in, and the worker's current step in it.

Invariants:
- A step counts when all ranks of the world have finished it.
- An aborted collective makes the step void, and the world is lost; the daemon is told unless the loss is known from it.
- A world that stops does so after the same step on all ranks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from forged.elastic.membership.member import COLLECTIVES_PER_WORLD
from forged.elastic.model import RANK_NONE, ClusterTopology, WorkerId, WorkerStatus
from forged.errors import ForgedError
from forged.worker.collectives.world import CollectiveAborted, World
from forged.worker.errors import StepAborted, WorldIncomplete
from forged.worker.process.counters import Counters
from forged.worker.worker_state.job_view import JobView

R = TypeVar("R")

OUT = (WorkerStatus.LEAVING, WorkerStatus.FAILED)


class PeerReport(NamedTuple):
    """A world that this worker cannot continue in, as it is reported to the daemon."""

    generation: int
    peer: str
    """The worker that is blamed for it; empty for none."""
    why: str


class CurrentWorld:
    """One worker's part in its world. `counters` make its marks visible to the pulse."""

    def __init__(self, view: JobView, counters: Counters | None, now: float = 0.0) -> None:
        self.status = WorkerStatus.JOINING
        self.joined_at = self.heartbeat_at = now
        self.topology = ClusterTopology()
        """The world that was entered last."""
        self.world: World | None = None
        """The world that the worker is in; None between two worlds."""
        self.is_void = False
        """Whether a collective of the present step was aborted."""
        self.is_stepping = False
        """Whether the script is inside a step."""
        self.peer_report: PeerReport | None = None
        self.marks = 0
        """How often the worker has come to a point where the workers of a world meet."""
        self._is_meeting = False
        self._stopped_by = 0
        """The id of the fact for which the world has stopped after its last step; 0 when it has not."""
        self.counters = counters
        self._view = view

    @property
    def meeting(self) -> int | None:
        """The mark of the collective in which the script waits; None while the script computes."""
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
        self.is_stepping, self.is_void = True, False

    async def together(self, act: Callable[[World], Awaitable[R]]) -> R:
        """Run a collective, or raise `StepAborted`."""
        world = self.world
        if world is None or self.is_void:
            self.is_void = True
            raise StepAborted("there is no world now")
        self.mark()
        try:
            with self._meeting():
                return await act(world)
        except CollectiveAborted as error:
            self.is_void = True
            self.lose(error)
            raise StepAborted(error.message) from error

    async def end_step(self, step: int) -> bool:
        """Tell the other ranks that the step is finished, unless it is void; returns whether it is committed."""
        self.is_stepping = False
        if self.world is None or self.is_void:
            return False
        try:
            with self._meeting():
                verdict = await self.world.end_step(step, stop_wanted=self._view.stop_wanted)
        except CollectiveAborted as error:
            self.lose(error)
            return False
        self._stopped_by = verdict.stop_wanted
        return True

    def abort_collective(self, why: str) -> None:
        """Abort the collective that the script waits in, if there is one."""
        if self._is_meeting and self.world is not None:
            self.world.abort(why)

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        self._is_meeting = True
        try:
            yield
        finally:
            self._is_meeting = False

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
        self.world, self._stopped_by = world, self._view.stop_wanted

    def lose(self, error: ForgedError) -> None:
        """The world cannot continue. Report it, unless the daemon has said so itself."""
        world, self.world = self.world, None
        if world is not None and not (self._view.lost or self._view.rescaling):
            self.peer_report = PeerReport(world.generation, peer_of(error), error.message)

    async def leave(self) -> None:
        world, self.world = self.world, None
        if world is not None:
            await world.leave()

    async def leave_for_good(self) -> World | None:
        """Leave before the script saves; returns the world if this worker was alone in it and keeps its use."""
        world = self.world
        if world is None or world.size > 1 or world.ending is not None:
            await self.leave()
            return None
        self.world = None
        return world


def peer_of(error: ForgedError) -> str:
    """The worker that is blamed for a broken world; empty for none."""
    return error.peer if isinstance(error, CollectiveAborted | WorldIncomplete) else ""
