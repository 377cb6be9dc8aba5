"""The world that a worker is in, and what becomes of it.

Law: a step counts when the world says so, to all of it. A collective that was broken off makes the step void, and the
world is lost; what the daemon has not told itself it is told. A world that stops does so behind one and the same step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from forged.elastic.membership.member import COLLECTIVES_PER_WORLD
from forged.elastic.model import ClusterTopology, WorkerStatus
from forged.errors import ForgedError
from forged.worker.collectives.world import CollectiveAborted, World
from forged.worker.errors import StepAborted
from forged.worker.mesh import WorldIncomplete
from forged.worker.process.counters import Counters
from forged.worker.worker_state.job_view import JobView

R = TypeVar("R")


class Trouble(NamedTuple):
    """What the daemon has to be told: a world cannot go on."""

    generation: int
    peer: str
    why: str


class CurrentWorld:
    """One worker's part in the world; `counters` show the pulse how far it has come."""

    def __init__(self, standing: JobView, counters: Counters | None, now: float = 0.0) -> None:
        self.status = WorkerStatus.JOINING
        self.joined_at = self.heartbeat_at = now
        self.topology = ClusterTopology()
        """The world that it has entered last."""
        self.world: World | None = None
        """The one that it is in; None between two of them."""
        self.is_void = False
        """Whether a collective of the present step was broken off."""
        self.is_stepping = False
        """Whether the script is in a step."""
        self.trouble: Trouble | None = None
        self.marks = 0
        """How often it has come to where workers meet."""
        self._meets = False
        self._rest_at = 0
        """The fact for which the world has stopped behind its last step; 0 when it has not."""
        self.counters = counters
        self._standing = standing

    @property
    def meeting(self) -> int | None:
        """Which collective its script waits in for the others; None while it computes."""
        return self.marks if self._meets else None

    @property
    def may_step(self) -> bool:
        """Whether it is in a world that goes on."""
        return self.world is not None and self.world.ending is None and not self.rests

    @property
    def rests(self) -> bool:
        """Whether the world has stopped, and the reason for it holds still, or has not been heard here yet."""
        standing = self._standing
        return self._rest_at > 0 and (standing.heard_at < self._rest_at or standing.stop_wanted > 0)

    @property
    def is_in_trouble(self) -> bool:
        """Whether its world was broken off, and the daemon has yet to be told."""
        return self.trouble is not None or (self.world is not None and self.world.ending is not None)

    # Steps.

    def begin_step(self) -> None:
        """The script does something."""
        self.is_stepping, self.is_void = True, False

    async def together(self, act: Callable[[World], Awaitable[R]]) -> R:
        """Do something with the others, or find that the step is void."""
        world = self.world
        if world is None or self.is_void:
            self.is_void = True
            raise StepAborted("there is no world now")
        self.mark()
        try:
            with self._meeting_others():
                return await act(world)
        except CollectiveAborted as error:
            self.is_void = True
            self.lose(error)
            raise StepAborted(error.message) from error

    async def end_step(self, step: int) -> bool:
        """Tell the others that the step is done, unless it was broken off; returns whether it counts."""
        self.is_stepping = False
        if self.world is None or self.is_void:
            return False
        try:
            with self._meeting_others():
                verdict = await self.world.end_step(step, stop_wanted=self._standing.stop_wanted)
        except CollectiveAborted as error:
            self.lose(error)
            return False
        self._rest_at = verdict.stop_wanted
        return True

    def break_off(self, why: str) -> None:
        """Let the script come out of the collective that it waits in."""
        if self._meets and self.world is not None:
            self.world.abort(why)

    @contextmanager
    def _meeting_others(self) -> Iterator[None]:
        self._meets = True
        try:
            yield
        finally:
            self._meets = False

    def mark(self) -> None:
        """Show that it has come to where workers meet."""
        self.marks += 1
        if self.counters is not None:
            self.counters.marks = self.marks

    # From world to world.

    def come_to(self, topology: ClusterTopology) -> None:
        """Wait where a world meets. Who has come further is compared within a world: nobody brings marks along."""
        self.marks = topology.epoch * COLLECTIVES_PER_WORLD

    def go_by(self, topology: ClusterTopology) -> None:
        """The rank is this worker's place in that world."""
        self.topology = topology
        self.come_to(topology)

    def enter(self, world: World) -> None:
        """All have met."""
        self.world, self._rest_at = world, self._standing.stop_wanted

    def lose(self, error: ForgedError) -> None:
        """The world cannot go on. The daemon is told, unless it has told so itself."""
        world, self.world = self.world, None
        if world is not None and not (self._standing.lost or self._standing.rescaling):
            self.trouble = Trouble(world.generation, peer_of(error), error.message)

    async def leave(self) -> None:
        """Go out of the world in good order."""
        world, self.world = self.world, None
        if world is not None:
            await world.leave()

    async def part(self) -> World | None:
        """Go out of the world for good; returns it if this worker was alone in it, and so keeps it to itself."""
        world = self.world
        if world is None or world.size > 1 or world.ending is not None:
            await self.leave()
            return None
        self.world = None
        return world


def peer_of(error: ForgedError) -> str:
    """Whom a broken world is blamed on; empty for nobody."""
    return error.peer if isinstance(error, CollectiveAborted | WorldIncomplete) else ""
