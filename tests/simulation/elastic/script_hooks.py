"""What simulated scripts do with the hooks of their worlds: they vote, meet by themselves, and die.

Invariants:
- Every draw comes from a generator of its own, so that no other draw of a world depends on it.
- A collective of such a script ends by `world_over` alone, as one of gloo does whose sockets are shut down then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Protocol

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
DEATHS_OF_HUBS = 0.6
"""How many scripts die as rank 0 while their process tells the other ranks that all have voted."""
UNTOLD = 0.5
"""How many of the other ranks are not told any more."""
ABORTED_ENTRIES = 0.05
MEETING = "own"
BEFORE_THE_VOTE = "before it votes"
AFTER_THE_VOTE = "after it has voted"
BEHIND_THE_CHANGE = "when it has changed its state after a vote"
ENTERING = "when it enters a world"
BEFORE_A_MEETING = "before it meets its peers"
TELLING = "while it tells the other ranks that all have voted"
OWN_MOMENTS = BEFORE_A_MEETING, BEFORE_THE_VOTE, AFTER_THE_VOTE, BEHIND_THE_CHANGE, ENTERING
MOMENTS = *OWN_MOMENTS, TELLING


def has_hooks(job: str, seed: str) -> bool:
    """Whether the scripts of a job use the hooks."""
    return Random(f"hooks 10 of {job} in {seed}").random() < JOBS_WITH_HOOKS


def has_meetings(job: str, seed: str) -> bool:
    """Whether the scripts of a job with hooks have a collective of their own in each step."""
    return Random(f"meetings of {job} in {seed}").random() < JOBS_WITH_MEETINGS


class Kill(Protocol):
    """Kills the process of a script."""

    def __call__(self, *, unwritten: float = 0.0) -> None:
        """At so many of its connections just before it writes what is in flight there."""
        ...


class ScriptHooks:
    """The hooks of one script, which aborts and dies while faults are made."""

    def __init__(
        self,
        worker: ElasticWorker,
        simulated: SimulatedWorker,
        oracle: ElasticOracle,
        met: Callable[[str], object],
        kill: Kill,
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
        self._dies_at = self._random.choice(OWN_MOMENTS) if self._random.random() < DEATHS else ""
        self._spared = self._random.randrange(DIES_WITHIN)
        """How often it comes to that moment before it dies."""
        hub_deaths = Random(b"hub deaths " + worker.incarnation)
        self._results_to_tell = hub_deaths.randrange(DIES_WITHIN) if hub_deaths.random() < DEATHS_OF_HUBS else -1
        """How many votes' results it tells before it dies as it tells one; below 0 for all."""
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
        self._may_die_telling()
        self.may_die(AFTER_THE_VOTE)

    def _may_die_telling(self) -> None:
        """Die as rank 0 before some of the other ranks, two at least, are told of the vote."""
        if self._worker.rank != 0 or self._worker.world_size <= 2 or not self._faults_active():
            return
        self._results_to_tell -= 1
        if self._results_to_tell == -1:
            self._met(f"a script dies {TELLING}")
            self._kill(unwritten=UNTOLD)

    def meeting(self) -> AbstractContextManager[None]:
        """Around a collective of the script's own."""
        return self._worker.meeting(MEETING) if self.is_used else nullcontext()

    @property
    def is_released(self) -> bool:
        """Whether the script has been told that its world is over."""
        return self._over >= self._simulated.generation
