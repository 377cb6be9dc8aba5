"""The transfers of one worker.

Law: a worker executes those transfers of a plan of which it is the destination, and of two plans only the newer: what
is under way for an older one ends first, and goes on later where it stopped. A shard is asked for where the plan says,
then at others who held a copy before the plan, then at the dataset's origin. Nobody is told to drop anything here: a
shard stays with who had it until the new owner holds it.
"""

from __future__ import annotations

import random as system_random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import anyio
from anyio import CapacityLimiter

from forged.clock import Clock, SystemClock
from forged.data.arguments import whole
from forged.data.columns import NOBODY
from forged.data.model import DataShard, DataTransfer, TransferPace
from forged.data.placement.plan import DataRedistributionPlan
from forged.data.store.calls import CallsWithoutThreads, OriginCalls
from forged.data.store.origin import ORIGIN_TIMEOUT_S, ShardOrigin, check_origin_timeout
from forged.data.store.port import ShardStore
from forged.data.transfer.bandwidth import Bandwidth, Throttle
from forged.data.transfer.execution import Equipment, Visit, execute
from forged.data.transfer.outcome import BadCopy, MovedShard, TransferProgress, TransferReport
from forged.data.transfer.schedule import Source, Wanted
from forged.elastic.config import CONCURRENT_TRANSFERS_MAX
from forged.elastic.model import WorkerId
from forged.errors import ConfigError, Problem, RequestRefused, Unavailable
from forged.retry import RetryPolicy

MOVING = RetryPolicy(attempts=6, delay_s=0.1, exponential=True, delay_max_s=2.0, jitter=0.5)
PROGRESS_INTERVAL_S = 0.5
Connect = Callable[[WorkerId], Awaitable[Visit]]


def _unheard(told: Any) -> None:
    return


class DataTransferManager:
    """Moves shards to this worker; `connect` is `Mesh.visit_shards`. Callbacks are called in the event loop.

    Without a worker it moves nothing until it is bound to one; `ElasticWorker.transfers` is that worker's.
    `uses_threads=False` is for simulations: the origin is asked within the event loop.
    """

    def __init__(
        self,
        worker: WorkerId | None = None,
        store: ShardStore | None = None,
        connect: Connect | None = None,
        *,
        origin: ShardOrigin | None = None,
        origin_timeout_s: float = ORIGIN_TIMEOUT_S,
        max_concurrent_transfers: int = 4,
        use_parallel_data_transfer: bool = True,
        rate_bytes_per_s: float | None = None,
        retry: RetryPolicy = MOVING,
        clock: Clock | None = None,
        random: Callable[[], float] = system_random.random,
        uses_threads: bool = True,
        progress: Callable[[TransferProgress], None] = _unheard,
        progress_interval_s: float = PROGRESS_INTERVAL_S,
        bad_copy: Callable[[BadCopy], None] = _unheard,
    ) -> None:
        at_once = _check_concurrency(max_concurrent_transfers)
        patience_s = check_origin_timeout(origin_timeout_s)
        concurrency = at_once if use_parallel_data_transfer else 1
        self.bandwidth = Bandwidth()

        def equip(store: ShardStore, connect: Connect, origin: ShardOrigin | None) -> Equipment:
            return Equipment(
                store=store,
                connect=connect,
                origin=origin,
                concurrency=concurrency,
                slots=CapacityLimiter(concurrency),
                retry=retry,
                random=random,
                clock=clock or SystemClock(),
                throttle=Throttle(rate_bytes_per_s),
                bandwidth=self.bandwidth,
                uses_threads=uses_threads,
                calls=OriginCalls(patience_s) if uses_threads else CallsWithoutThreads(patience_s),
                progress=progress,
                progress_interval_s=progress_interval_s,
                bad_copy=bad_copy,
            )

        self._equip = equip
        self._worker: WorkerId | None = None
        self._equipped: Equipment | None = None
        self._generation = -1
        self._newest = 0
        self._scope: anyio.CancelScope | None = None
        self._turn = anyio.Lock()
        if worker is not None and store is not None and connect is not None:
            self.bind(worker, store, connect, origin=origin)

    def bind(self, worker: WorkerId, store: ShardStore, connect: Connect, *, origin: ShardOrigin | None = None) -> Self:
        """Move shards to this worker from now on, once and for all; returns itself."""
        if self._worker is not None:
            raise RequestRefused("manager_bound", f"these transfers are those of {self._worker}", "make another")
        self._worker, self._equipped = worker, self._equip(store, connect, origin)
        return self

    @property
    def worker(self) -> WorkerId:
        """The worker to which shards move."""
        if self._worker is None:
            raise _unbound()
        return self._worker

    @property
    def _equipment(self) -> Equipment:
        if self._equipped is None:
            raise _unbound()
        return self._equipped

    async def execute_plan(self, plan: DataRedistributionPlan, *, generation: int | None = None) -> TransferReport:
        """Move to this worker what the plan gives it; a newer call, or `cancel`, ends this one.

        A plan of an older generation than one before is refused. Shards that cannot be had are in the report.
        """
        return await self.execute(self._wanted(plan), generation=generation)

    async def execute(self, wanted: Iterable[Wanted], *, generation: int | None = None) -> TransferReport:
        """Move these shards to this worker, as for a plan."""
        self._fence(generation)
        number = self.cancel()
        async with self._turn:
            if number == self._newest:
                with anyio.CancelScope() as scope:
                    self._scope = scope
                    try:
                        return await execute(wanted, self._equipment)
                    finally:
                        self._scope = None
        raise Unavailable("plan_superseded", "a newer plan, or nobody, needs these transfers", "follow the newer one")

    def cancel(self) -> int:
        """End what is under way for a plan; what has arrived is kept. Returns the number of the next."""
        self._newest += 1
        if self._scope is not None:
            self._scope.cancel()
        return self._newest

    async def transfer_data_shards(
        self, source: Source, destination: WorkerId, shard: DataShard, *, replicas: Sequence[WorkerId] = ()
    ) -> MovedShard | None:
        """Move one shard to this worker, besides any plan; None if it was here already."""
        if destination != self.worker:
            raise RequestRefused(
                "not_destination", f"{self.worker} moves no shards to {destination}", "ask the destination to fetch it"
            )
        wanted = Wanted(shard, 0, self._sources(source, *replicas))
        report = await execute([wanted], self._equipment)
        report.require_complete()
        return report.moved[0] if report.moved else None

    def pace(self, bytes_per_sample: float, now: float = 0.0) -> TransferPace | None:
        """What planners estimate with; None before anything was moved."""
        rate = self.bandwidth.overall_bytes_per_s
        return None if rate is None else TransferPace(rate, bytes_per_sample, now)

    def _fence(self, generation: int | None) -> None:
        if generation is None:
            return
        if generation < self._generation:
            raise Unavailable(
                "plan_superseded",
                f"a plan of generation {self._generation} was begun, and this is one of {generation}",
                "follow the newer one",
            )
        self._generation = generation

    def _wanted(self, plan: DataRedistributionPlan) -> Iterator[Wanted]:
        for transfer in plan.for_worker(self.worker):
            holders = _holders_before(plan, transfer)
            yield Wanted(transfer.shard, transfer.priority, self._sources(transfer.source_worker, *holders))

    def _sources(self, *workers: Source) -> tuple[Source, ...]:
        """Each of them once, and the origin last; this worker has what it has."""
        asked = [worker for worker in dict.fromkeys(workers) if worker is not None and worker != self.worker]
        return (*asked, None) if self._equipment.origin is not None else tuple(asked)


def _check_concurrency(transfers: object) -> int:
    found = whole(transfers)
    if found is None or not 1 <= found <= CONCURRENT_TRANSFERS_MAX:
        wanted = f"a whole number from 1 to {CONCURRENT_TRANSFERS_MAX}"
        problem = Problem("max_concurrent_transfers", transfers, wanted)
        raise ConfigError("transfers_invalid", "the transfers are not set up rightly", problems=[problem])
    return found


def _unbound() -> RequestRefused:
    return RequestRefused(
        "manager_unbound",
        "the transfers are those of no worker, so nobody knows where shards are to go and from whom they come",
        "use a worker's own, `ElasticWorker.transfers`, or bind them to one",
    )


def _holders_before(plan: DataRedistributionPlan, transfer: DataTransfer) -> list[WorkerId]:
    shard = transfer.shard.shard_id
    numbers = (int(plan.owners_before[shard]), *map(int, plan.replicas_before[:, shard]))
    return [plan.workers[number] for number in numbers if number != NOBODY]
