"""How a worker comes by its training data: while all have stopped, or while training goes on.

Law: it takes part in one attempt at a time, and in the next when nothing is under way here for the one before; what has
arrived is kept. What does not work now may work a moment later; what is wrong with the script or its store does not,
and ends the training here. Which shards are this worker's changes when it goes over into another world, and not before.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup

from forged.data.messages import CorruptShardFound, TransfersPlanned
from forged.data.sampling.sampler import ElasticSampler, SamplingMode
from forged.errors import ForgedError
from forged.kernel.messages import Fact, UnknownFact
from forged.log import Log
from forged.worker.daemon.registration import Registration
from forged.worker.data.shard_holder import ShardHolder
from forged.worker.errors import passes
from forged.worker.worker_state.job_view import Commit

OVER = "attempt_over"


class DataProvider:
    """Sees to the training data of one worker. `fail` is told what ends the training here."""

    def __init__(
        self,
        custodian: ShardHolder,
        sampler: ElasticSampler | None,
        line: Registration,
        tasks: TaskGroup,
        fail: Callable[[Exception], None],
        log: Log,
    ) -> None:
        self.custodian = custodian
        self._sampler = sampler
        self._line = line
        self._tasks = tasks
        self._fail = fail
        self._log = log
        self._turn = anyio.Lock()
        self._followed = 0
        """The attempt whose data comes while training goes on; 0 for none."""
        self._scope = anyio.CancelScope()

    def hear(self, fact: Fact | UnknownFact) -> None:
        """Take what is said about the data."""
        if isinstance(fact, TransfersPlanned):
            self.custodian.hear_of_plan(fact.attempt)
        elif isinstance(fact, CorruptShardFound) and fact.worker_id == self._line.worker.id:
            self.custodian.doubt(fact.shard)

    def follow(self, attempt: int) -> None:
        """Take part in this attempt while training goes on, and no longer in another one; 0 for none."""
        if attempt == self._followed:
            return
        self._followed = attempt
        self._scope.cancel()
        if attempt:
            self._scope = anyio.CancelScope()
            self._tasks.start_soon(self._take_beside, attempt, self._scope)

    async def _take_beside(self, attempt: int, scope: anyio.CancelScope) -> None:
        with scope:
            try:
                await self.take(attempt, beside=True)
            except Exception as error:  # noqa: BLE001 - also what a store of somebody else's raises
                self._fail(error)

    async def take(self, attempt: int, *, beside: bool = False) -> None:
        """Hold the training data that this worker has to hold, and say so; or find that the attempt is over."""
        async with self._turn:
            while True:
                try:
                    await self.custodian.take_part(attempt, beside=beside)
                    await self._line.ready(attempt)
                    return
                except ForgedError as error:
                    if error.code == OVER:
                        self._log.info("an attempt was over before all of its data was here", why=error.message)
                        return
                    if not passes(error):
                        raise
                    self._log.warning("training data could not be fetched", why=str(error))
                    why = error.message
                await self.custodian.rest(why)

    async def settle(self, commit: Commit) -> None:
        """Hold what the commit says, and nothing else; and know what others hold."""
        await self.custodian.settle(commit.attempt, commit.topology)
        if self._sampler is not None and self._sampler.mode is SamplingMode.SHARDED:
            owners = await self.custodian.owners(commit.topology)
            self._sampler.reassign(owners, commit.topology.world_size)
