"""The transfers of one worker: fetches the shards of which this worker is a plan's destination.

Invariants:
- Of two plans only the newer is executed. The older one ends first; its received bytes stay and are resumed.
- A shard is fetched from the plan's source, then from the other holders before the plan, then from the origin.
- A transfer deletes nothing at its source: a shard stays with its old owner until the new one has verified it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from random import SystemRandom
from typing import Self

import anyio
from anyio import CapacityLimiter

from forged.clock import Clock, SystemClock
from forged.data.columns import NOBODY
from forged.data.model import DataShard, DataTransfer, TransferPace
from forged.data.placement.plan import DataRedistributionPlan
from forged.data.store.origin import ORIGIN_TIMEOUT_S, ShardOrigin, check_origin_timeout
from forged.data.store.port import ShardStore
from forged.data.transfer.bandwidth import Bandwidth, Throttle
from forged.data.transfer.execution import SourceConnection, TransferContext, TransferObserver, execute
from forged.data.transfer.origin_reads import OriginReads, OriginReadsInLoop
from forged.data.transfer.outcome import MovedShard, TransferReport
from forged.data.transfer.schedule import Source, Wanted
from forged.elastic.config import CONCURRENT_TRANSFERS_MAX
from forged.elastic.model import WorkerId
from forged.errors import ConfigError, Problem, RequestRefused, Unavailable
from forged.numbers import as_integer
from forged.retry import RetryPolicy

RETRY = RetryPolicy(attempts=6, delay_s=0.1, exponential=True, delay_max_s=2.0, jitter=0.5)
PROGRESS_INTERVAL_S = 0.5
Connect = Callable[[WorkerId], Awaitable[SourceConnection]]


class DataTransferManager:
    """Moves shards to this worker; `connect` is `Mesh.connect_for_shards`.

    A manager without a worker executes only empty plans until it is bound to one; `ElasticWorker.transfers` is bound to
    its worker.
    `uses_threads=False` is for simulations: the origin is read in the event loop.
    """

    def __init__(
        self,
        max_concurrent_transfers: int = 4,
        *,
        worker: WorkerId | None = None,
        store: ShardStore | None = None,
        connect: Connect | None = None,
        origin: ShardOrigin | None = None,
        origin_timeout_s: float = ORIGIN_TIMEOUT_S,
        use_parallel_data_transfer: bool = True,
        rate_bytes_per_s: float | None = None,
        retry: RetryPolicy = RETRY,
        clock: Clock | None = None,
        random: Callable[[], float] | None = None,
        uses_threads: bool = True,
        observer: TransferObserver | None = None,
        progress_interval_s: float = PROGRESS_INTERVAL_S,
    ) -> None:
        transfers = _check_concurrency(max_concurrent_transfers)
        timeout_s = check_origin_timeout(origin_timeout_s)
        concurrency = transfers if use_parallel_data_transfer else 1
        self.bandwidth = Bandwidth()
        self._make_context = partial(
            TransferContext,
            concurrency=concurrency,
            slots=CapacityLimiter(concurrency),
            retry=retry,
            random=random or SystemRandom().random,
            clock=clock or SystemClock(),
            throttle=Throttle(rate_bytes_per_s),
            bandwidth=self.bandwidth,
            uses_threads=uses_threads,
            origin_reads=OriginReads(timeout_s) if uses_threads else OriginReadsInLoop(timeout_s),
            observer=observer,
            progress_interval_s=progress_interval_s,
        )
        self._worker: WorkerId | None = None
        self._context: TransferContext | None = None
        self._generation = -1
        self._newest = 0
        self._scope: anyio.CancelScope | None = None
        self._one_at_a_time = anyio.Lock()
        if worker is not None and store is not None and connect is not None:
            self.bind(worker, store, connect, origin=origin)
        elif (worker, store, connect) != (None, None, None):
            raise ConfigError(
                "transfers_invalid", "worker, store and connect belong together", "pass all three, or call `bind` later"
            )

    def bind(self, worker: WorkerId, store: ShardStore, connect: Connect, *, origin: ShardOrigin | None = None) -> Self:
        """Move shards to this worker from now on; a manager is bound once. Returns itself."""
        if self._worker is not None:
            raise RequestRefused(
                "manager_bound",
                f"this transfer manager moves the shards of {self._worker} already",
                "make another transfer manager",
            )
        self._worker = worker
        self._context = self._make_context(store=store, connect=connect, origin=origin)
        return self

    @property
    def worker(self) -> WorkerId:
        """The worker to which shards move."""
        if self._worker is None:
            raise _unbound()
        return self._worker

    @property
    def _bound_context(self) -> TransferContext:
        if self._context is None:
            raise _unbound()
        return self._context

    async def execute_plan(self, plan: DataRedistributionPlan, *, generation: int | None = None) -> TransferReport:
        """Fetch the shards of which this worker is the destination; a newer call, or `cancel`, ends this one.

        A plan of an older generation than a previous one is refused. Shards that no source gave are in the report.
        """
        return await self.execute(self._wanted(plan) if plan.transfers else (), generation=generation)

    async def execute(self, wanted: Iterable[Wanted], *, generation: int | None = None) -> TransferReport:
        """Fetch these shards, as for a plan."""
        wanted = list(wanted)
        if not wanted and self._context is None:
            return TransferReport()
        self._fence(generation)
        number = self.cancel()
        async with self._one_at_a_time:
            if number == self._newest:
                with anyio.CancelScope() as scope:
                    self._scope = scope
                    try:
                        return await execute(wanted, self._bound_context)
                    finally:
                        self._scope = None
        raise Unavailable("plan_superseded", "a newer plan, or `cancel`, ended these transfers", "use the newer plan")

    def cancel(self) -> int:
        """End the running plan, keeping the received bytes. Returns the number of the next plan."""
        self._newest += 1
        if self._scope is not None:
            self._scope.cancel()
        return self._newest

    async def transfer_data_shards(
        self, source: Source, destination: WorkerId, shard: DataShard, *, replicas: Sequence[WorkerId] = ()
    ) -> MovedShard | None:
        """Fetch one shard, independent of any plan; None if it is held already."""
        if destination != self.worker:
            raise RequestRefused(
                "not_destination",
                f"{self.worker} fetches shards for itself only, not for {destination}",
                "have the destination fetch it",
            )
        wanted = Wanted(shard, 0, self._sources(source, *replicas))
        report = await execute([wanted], self._bound_context)
        report.require_complete()
        return report.moved[0] if report.moved else None

    def pace(self, bytes_per_sample: float, now: float = 0.0) -> TransferPace | None:
        """What a planner estimates durations with; None before the first transfer."""
        rate = self.bandwidth.bytes_per_s
        return None if rate is None else TransferPace(rate, bytes_per_sample, now)

    def _fence(self, generation: int | None) -> None:
        if generation is None:
            return
        if generation < self._generation:
            raise Unavailable(
                "plan_superseded",
                f"the plan is of generation {generation}, and one of generation {self._generation} was started",
                "use the newer plan",
            )
        self._generation = generation

    def _wanted(self, plan: DataRedistributionPlan) -> Iterator[Wanted]:
        for transfer in plan.for_worker(self.worker):
            holders = _holders_before(plan, transfer)
            yield Wanted(transfer.shard, transfer.priority, self._sources(transfer.source_worker, *holders))

    def _sources(self, *workers: Source) -> tuple[Source, ...]:
        """The sources in the order tried: the other workers, each once, then the origin if there is one."""
        asked = [worker for worker in dict.fromkeys(workers) if worker is not None and worker != self.worker]
        return (*asked, None) if self._bound_context.origin is not None else tuple(asked)


def _check_concurrency(transfers: object) -> int:
    found = as_integer(transfers)
    if found is None or not 1 <= found <= CONCURRENT_TRANSFERS_MAX:
        wanted = f"a whole number from 1 to {CONCURRENT_TRANSFERS_MAX}"
        problem = Problem("max_concurrent_transfers", transfers, wanted)
        raise ConfigError("transfers_invalid", "max_concurrent_transfers is not valid", problems=[problem])
    return found


def _unbound() -> RequestRefused:
    return RequestRefused(
        "manager_unbound",
        "this manager is not bound to a worker",
        "use `ElasticWorker.transfers`, or call `bind`",
    )


def _holders_before(plan: DataRedistributionPlan, transfer: DataTransfer) -> list[WorkerId]:
    shard = transfer.shard.shard_id
    if not 0 <= shard < plan.total_shards:
        # A caller's plan may be wrong.
        return []
    numbers = (int(plan.owners_before[shard]), *map(int, plan.replicas_before[:, shard]))
    return [plan.workers[number] for number in numbers if number != NOBODY]
