"""What the committed steps have used of the dataset, told to the daemon.

Law: the training is worth more than its proof: what the daemon does not take of this is no end of it, and is kept until
it does. One worker tells it soon; the others, who have noted the same, now and then, so that it outlives that one.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from forged.clock import Clock
from forged.data.messages import ReportUsage
from forged.data.usage import Run
from forged.elastic.model import ClusterTopology
from forged.errors import ForgedError
from forged.log import Log
from forged.worker.consumption import Consumption
from forged.worker.place import Place
from forged.worker.registration import Registration

INTERVAL_S = 1.0
"""How often the first rank tells."""
OTHERS_INTERVAL_S = 60.0
"""How often the others do."""


class UsageReport:
    """Tells what one worker has noted at its place in the training."""

    def __init__(
        self,
        place: Place,
        consumption: Consumption,
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
        self._told_of_nothing = 0
        """The newest world of which the daemon knows that there is nothing to use."""

    async def keep_telling(self) -> None:
        """Tell it, for ever."""
        told_at = self._clock.monotonic()
        while True:
            await anyio.sleep(INTERVAL_S)
            now = self._clock.monotonic()
            if self._topology().rank_of(self._line.worker) == 0 or now - told_at >= OTHERS_INTERVAL_S:
                told_at = now
                await self.tell()

    async def tell(self) -> None:
        """Tell what the daemon may not have, if it takes it."""
        try:
            await self._tell()
        except ForgedError as error:
            self._log.warning("the daemon does not take what the steps have used", why=str(error))

    async def _tell(self) -> None:
        for generation, begins_at, runs in list(self._consumption.unspoken()):
            await self._say(generation, begins_at, runs)
            self._consumption.told(generation, runs)
        generation = self._topology().epoch
        if not self._consumption.sampler.total and self._told_of_nothing < generation:
            # No step will ever use any of it, which proves nothing as long as nobody says so.
            await self._say(generation, self._place.step, [])
            self._told_of_nothing = generation

    async def _say(self, generation: int, begins_at: int, runs: list[Run]) -> None:
        line, samples = self._line, self._consumption.sampler.total
        await line.say(ReportUsage(line.job, line.worker.id, generation, begins_at, samples, runs))
