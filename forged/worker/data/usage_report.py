"""Reports to the daemon about the samples that committed steps have used.

Invariants:
- A report that the daemon refuses does not end training; the notes are kept until the daemon has them.
- Rank 0 reports soon. The other ranks, which have noted the same, ask now and then what the daemon knows and report
  the rest; in turns some of them report everything, so that a difference between ranks is found.
"""

from __future__ import annotations

import anyio

from forged.clock import Clock
from forged.data.messages import ReportUsage, UsageTaken
from forged.data.sampling.usage import Run
from forged.errors import ForgedError
from forged.log import Log
from forged.worker.data.sample_usage import SampleUsage
from forged.worker.registration import Registration
from forged.worker.worker_state.session_state import SessionState

INTERVAL_S = 1.0
"""How often rank 0 reports."""
OTHERS_INTERVAL_S = 60.0
"""How often the other ranks do."""
COMPARED_MAX = 50
"""About so many ranks report each time what the daemon knows already: most of the reports of a large world."""


class UsageReport:
    """Reports what one worker has noted."""

    def __init__(self, state: SessionState, registration: Registration, clock: Clock, log: Log) -> None:
        self._state = state
        self._registration = registration
        self._clock = clock
        self._log = log
        self._turns = 0
        """How often this worker has reported as a rank other than 0."""
        self._reported_empty = 0
        """The newest generation of which the daemon knows that it has nothing to use."""

    @property
    def _usage(self) -> SampleUsage:
        usage = self._state.progress.usage
        assert usage is not None
        return usage

    async def run(self) -> None:
        """Report for ever; ends at once for a worker without a sampler."""
        if self._state.progress.usage is None:
            return
        told_at = self._clock.monotonic()
        while True:
            await anyio.sleep(INTERVAL_S)
            now, topology = self._clock.monotonic(), self._state.current_world.topology
            rank = topology.rank_of(self._registration.worker)
            if rank == 0 or now - told_at >= OTHERS_INTERVAL_S:
                told_at, self._turns = now, self._turns + 1
                rounds = max(1, -(-topology.world_size // COMPARED_MAX))
                await self.tell(is_compared=rank == 0 or (rank + self._turns) % rounds == 0)

    async def tell(self, *, is_compared: bool = True) -> None:
        """Report the notes, if there is a sampler; unless `is_compared`, without those that the daemon has."""
        if self._state.progress.usage is None:
            return
        try:
            if not is_compared:
                await self._forget_known()
            await self._tell()
        except ForgedError as error:
            self._log.warning("the daemon refused a report of used samples", reason=str(error))

    async def _forget_known(self) -> None:
        for generation, begins_at in self._usage.worlds():
            taken = await self._report(generation, begins_at, [])
            self._usage.known(generation, taken.known_to)

    async def _tell(self) -> None:
        for generation, begins_at, runs in list(self._usage.unreported()):
            await self._report(generation, begins_at, runs)
            self._usage.known(generation, max(run.end_step for run in runs))
        generation = self._state.current_world.topology.generation
        if not self._usage.sampler.total and self._reported_empty < generation:
            # An empty dataset leaves no notes, and the audit needs one report per world.
            await self._report(generation, self._state.progress.step, [])
            self._reported_empty = generation

    async def _report(self, generation: int, begins_at: int, runs: list[Run]) -> UsageTaken:
        registration, samples = self._registration, self._usage.sampler.total
        who = registration.job, registration.worker.id, registration.incarnation
        return await registration.send(ReportUsage(*who, generation, begins_at, samples, runs))
