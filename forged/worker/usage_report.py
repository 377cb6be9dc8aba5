"""What the committed steps have used of the dataset, told to the daemon.

Law: the training is worth more than its proof: what the daemon does not take of this is no end of it, and is kept until
it does. One worker tells it soon. The others, who have noted the same, ask now and then what is known, and tell what is
not; some of them, in turns, tell all the same, so that it is found out if they have noted something else.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from forged.clock import Clock
from forged.data.messages import ReportUsage, UsageTaken
from forged.data.sampling.usage import Run
from forged.elastic.model import ClusterTopology
from forged.errors import ForgedError
from forged.log import Log
from forged.worker.daemon.registration import Registration
from forged.worker.data.sample_usage import SampleUsage
from forged.worker.worker_state.progress import TrainingProgress

INTERVAL_S = 1.0
"""How often the first rank tells."""
OTHERS_INTERVAL_S = 60.0
"""How often the others do."""
COMPARED_MAX = 50
"""About so many of them tell each time what is known already: in a large world that is most of what is told at all."""


class UsageReport:
    """Tells what one worker has noted at its place in the training."""

    def __init__(
        self,
        place: TrainingProgress,
        consumption: SampleUsage,
        topology: Callable[[], ClusterTopology],
        line: Registration,
        clock: Clock,
        log: Log,
    ) -> None:
        self._place = place
        self._consumption = consumption
        self._topology = topology
        self._line = line
        self._clock = clock
        self._log = log
        self._turns = 0
        """How often it was this worker's turn, as one of the others."""
        self._told_of_nothing = 0
        """The newest world of which the daemon knows that there is nothing to use."""

    async def keep_telling(self) -> None:
        """Tell it, for ever."""
        told_at = self._clock.monotonic()
        while True:
            await anyio.sleep(INTERVAL_S)
            now, topology = self._clock.monotonic(), self._topology()
            rank = topology.rank_of(self._line.worker)
            if rank == 0 or now - told_at >= OTHERS_INTERVAL_S:
                told_at, self._turns = now, self._turns + 1
                rounds = max(1, -(-topology.world_size // COMPARED_MAX))
                await self.tell(is_compared=rank == 0 or (rank + self._turns) % rounds == 0)

    async def tell(self, *, is_compared: bool = True) -> None:
        """Tell what the daemon may not have, if it takes it; unless it `is_compared`, without what it has."""
        try:
            if not is_compared:
                await self._forget_known()
            await self._tell()
        except ForgedError as error:
            self._log.warning("the daemon does not take what the steps have used", why=str(error))

    async def _forget_known(self) -> None:
        for generation, begins_at in self._consumption.worlds():
            taken = await self._say(generation, begins_at, [])
            self._consumption.known(generation, taken.known_to)

    async def _tell(self) -> None:
        for generation, begins_at, runs in list(self._consumption.unspoken()):
            await self._say(generation, begins_at, runs)
            self._consumption.known(generation, max(run.end_step for run in runs))
        generation = self._topology().epoch
        if not self._consumption.sampler.total and self._told_of_nothing < generation:
            # No step will ever use any of it, which proves nothing as long as nobody says so.
            await self._say(generation, self._place.step, [])
            self._told_of_nothing = generation

    async def _say(self, generation: int, begins_at: int, runs: list[Run]) -> UsageTaken:
        line, samples = self._line, self._consumption.sampler.total
        return await line.say(ReportUsage(line.job, line.worker.id, generation, begins_at, samples, runs))
