"""What simulated scripts do with the hooks of their worlds: they vote, meet by themselves, and die.

Invariants:
- Every draw comes from a generator of its own, so that no other draw of a world depends on it.
- A collective of such a script ends by `world_over` alone, as one of gloo does whose sockets are shut down then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from random import Random

from forged.elastic.model import ClusterTopology, WorldOver
from forged.worker.errors import StepAborted
from forged.worker.worker import ElasticWorker
from tests.simulation.elastic.oracle import ElasticOracle
from tests.simulation.elastic.truth import SimulatedWorker

JOBS_WITH_HOOKS = 0.5
JOBS_WITH_MEETINGS = 0.6
"""Of those, how many have a collective of their own in each step."""
DEATHS = 0.5
"""How many scripts die at one of the moments, ..."""
DIES_WITHIN = 4
"""... at one of so many times that they come to it."""
ABORTED_ENTRIES = 0.05
MEETING = "own"
BEFORE_THE_VOTE = "before it votes"
AFTER_THE_VOTE = "after it has voted"
BEHIND_THE_CHANGE = "when it has changed its state after a vote"
ENTERING = "when it enters a world"
BEFORE_A_MEETING = "before it meets its peers"
MOMENTS = BEFORE_A_MEETING, BEFORE_THE_VOTE, AFTER_THE_VOTE, BEHIND_THE_CHANGE, ENTERING


def has_hooks(job: str, seed: str) -> bool:
    """Whether the scripts of a job use the hooks."""
    return Random(f"hooks 10 of {job} in {seed}").random() < JOBS_WITH_HOOKS


def has_meetings(job: str, seed: str) -> bool:
    """Whether the scripts of a job with hooks have a collective of their own in each step."""
    return Random(f"meetings of {job} in {seed}").random() < JOBS_WITH_MEETINGS


class ScriptHooks:
    """The hooks of one script, which aborts and dies while faults are made."""

    def __init__(
        self,
        worker: ElasticWorker,
        simulated: SimulatedWorker,
        oracle: ElasticOracle,
        met: Callable[[str], object],
        kill: Callable[[], object],
        faults_active: Callable[[], bool],
        *,
        is_used: bool,
    ) -> None:
        self.is_used = is_used
        self._worker = worker
        self._simulated = simulated
        self._oracle = oracle
        self._met = met
        self._kill = kill
        self._faults_active = faults_active
        self._random = Random(b"hooks " + worker.incarnation)
        self._dies_at = self._random.choice(MOMENTS) if self._random.random() < DEATHS else ""
        self._spared = self._random.randrange(DIES_WITHIN)
        """How often it comes to that moment before it dies."""
        self._over = 0
        """The generation of the newest world that is over."""
        worker.world_over.subscribe(self._is_over)
        worker.world_entered.subscribe(self._enter)

    def _is_over(self, over: WorldOver) -> None:
        self._over = over.generation
        if self._simulated.alive:
            self._oracle.world_over(self._simulated, over.generation)

    async def _enter(self, topology: ClusterTopology) -> None:
        if self._simulated.alive:
            self._oracle.enters_steps(self._simulated, topology.generation)
        if not self.is_used:
            return
        self.may_die(ENTERING)
        if self._faults_active() and self._random.random() < ABORTED_ENTRIES:
            self._met("a script aborts the entry into a world")
            raise StepAborted("no port is free")
        await self._worker.barrier()

    def may_die(self, moment: str) -> None:
        """Die if it is time, as kill -9 does; the caller does not come further than to its next wait."""
        if not (self.is_used and self._faults_active() and moment == self._dies_at):
            return
        self._spared -= 1
        if self._spared < 0:
            self._met(f"a script dies {moment}")
            self._kill()

    async def vote(self) -> None:
        """Vote for the step, if scripts of this job do."""
        if not self.is_used:
            return
        self.may_die(BEFORE_THE_VOTE)
        if self._simulated.alive:
            self._oracle.votes(self._simulated)
        await self._worker.commit_step()
        if self._simulated.alive:
            self._oracle.has_voted(self._simulated)
        self.may_die(AFTER_THE_VOTE)

    def meeting(self) -> AbstractContextManager[None]:
        """Around a collective of the script's own."""
        return self._worker.meeting(MEETING) if self.is_used else nullcontext()

    @property
    def is_released(self) -> bool:
        """Whether the script has been told that its world is over."""
        return self._over >= self._simulated.generation
