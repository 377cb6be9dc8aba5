"""GPU memory on the bus: answers requests, lets them wait, and frees what failed and departed workers had.

Invariants:
- A request in the name of a worker is refused unless its incarnation is that of the registered worker.
- Nothing of the pools is durable: after a restart of the daemon workers register their devices and assert their blocks.
- No allocation is a fact; facts that can come often are limited for each job, and the log counts what was left out.
"""

from __future__ import annotations

from collections.abc import Awaitable

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from forged.clock import Clock
from forged.elastic.messages import JobAborted, JobCompleted, WorkerFailed, WorkerLeft
from forged.jobs.model import JobRemoved
from forged.kernel.bus import Bus
from forged.kernel.messages import Call, Decision, Fact, Nothing, Record
from forged.kernel.store.port import Store
from forged.log import SILENT, Log
from forged.memory.book import refusals
from forged.memory.book.allocation import Allocation
from forged.memory.book.assertion import Assertion
from forged.memory.book.attempt import Attempt
from forged.memory.book.compactions import Compactions
from forged.memory.book.device import Device, Moment, Owner
from forged.memory.book.device_table import DeviceTable, MemoryLimits
from forged.memory.book.questions import MemoryQuestions
from forged.memory.messages import (
    Allocated,
    AllocateMemory,
    AssertBlocks,
    BlockEvicted,
    BlockPage,
    ChangeBlocks,
    CommitMove,
    CompactionPlan,
    DevicePage,
    DeviceView,
    FindFit,
    FitPlace,
    FreeMemory,
    Handle,
    ListBlocks,
    ListDevices,
    MemoryPressure,
    OffsetPlanView,
    OutOfMemory,
    PlanCompaction,
    PlanOffsets,
    RegisterDevice,
)
from forged.memory.pool.eviction import LRU
from forged.memory.ports import EvictionPort, WorkersPort
from forged.rate_limit import RateLimit

OWNER = "memory"
TICK_S = 0.5
"""So often use is measured, and plans and assertions that are due are ended."""
FACTS_PER_S, FACTS_BURST = 1.0, 20.0
"""Of evictions and shortages, for each job."""
TERM_BITS = 32
WAIT_MAX_S = 600.0
"""No request waits longer."""

WorkersRequest = RegisterDevice | PlanOffsets | AllocateMemory | FreeMemory | ChangeBlocks | AssertBlocks | CommitMove


class MemoryService:
    """The devices of all jobs."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        workers: WorkersPort,
        eviction: EvictionPort | None = None,
        *,
        limits: MemoryLimits | None = None,
        default_eviction: str = LRU,
        log: Log = SILENT,
    ) -> None:
        self.table = DeviceTable(limits or MemoryLimits(), eviction or EvictionPort(), default_eviction)
        self._allocation = Allocation(self.table)
        self._assertion = Assertion(self.table)
        self._compactions = Compactions(self.table, self._allocation)
        self._questions = MemoryQuestions(self.table)
        self._bus = bus
        self._clock = clock
        self._workers = workers
        self._log = log
        self._has_begun = False
        self._has_devices = anyio.Event()
        self._fact_limits: dict[str, RateLimit] = {}
        """By job."""
        self._subscribe()

    def _subscribe(self) -> None:
        bus = self._bus
        bus.serve(RegisterDevice, self._register, owner=OWNER)
        bus.serve(PlanOffsets, self._plan_offsets, owner=OWNER)
        bus.serve(AllocateMemory, self._allocate, owner=OWNER)
        bus.serve(FreeMemory, self._free, owner=OWNER)
        bus.serve(ChangeBlocks, self._change, owner=OWNER)
        bus.serve(AssertBlocks, self._assert, owner=OWNER)
        bus.serve(PlanCompaction, self._plan, owner=OWNER)
        bus.serve(CommitMove, self._commit, owner=OWNER)
        bus.serve(ListDevices, self._list_devices, owner=OWNER)
        bus.serve(ListBlocks, self._list_blocks, owner=OWNER)
        bus.serve(FindFit, self._find_fit, owner=OWNER)
        bus.on((WorkerFailed, WorkerLeft, JobAborted, JobCompleted), self._workers_ended, name="memory.owners")
        bus.on(JobRemoved, self._job_removed, name="memory.removal")

    async def load(self, store: Store) -> None:
        """Note which workers are registered at the start; a later call changes nothing, as pools are not stored."""
        if not self._has_begun:
            self._has_begun = True
            self.table.last_epoch = self._bus.ledger.term << TERM_BITS
            self.table.begin(self._workers.registered())

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Measure use, and end plans and assertions that are due, until cancelled."""
        task_status.started()
        while True:
            if not self.table.jobs:
                self._has_devices = anyio.Event()
                await self._has_devices.wait()
            await anyio.sleep(TICK_S)
            self._tick()

    def stop_waiting(self) -> None:
        """End all requests that wait: the daemon stops, and would wait for them."""
        for device in self.table.devices():
            self.table.end_waiting(device, refusals.stopping())

    def _now(self) -> Moment:
        return Moment(self._clock.wall(), self._clock.monotonic())

    # Requests of workers.

    def _owner(self, request: WorkersRequest, call: Call, now: Moment) -> Owner:
        """The worker in whose name the request is; refused unless it is registered."""
        if not self._workers.is_registered(request.job, request.worker_id, request.incarnation):
            self._bus.dispatcher.require_job(request.job)
            raise refusals.worker_gone(request.job, request.worker_id)
        return self.table.owner(request.job, request.worker_id, request.incarnation, call.principal.holder, now)

    def _register(self, request: RegisterDevice, call: Call) -> DeviceView:
        now = self._now()
        device = self.table.register(request, self._owner(request, call, now), now)
        self._has_devices.set()
        self._record_facts()
        return device.view(self.table.eviction_of(request.job), now.monotonic)

    def _plan_offsets(self, request: PlanOffsets, call: Call) -> OffsetPlanView:
        return self.table.plan_offsets(request, self._owner(request, call, self._now())).view()

    def _allocate(self, request: AllocateMemory, call: Call) -> list[Allocated] | Awaitable[list[Allocated]]:
        now = self._now()
        refusals.require_between("wait_s", request.wait_s, 0.0, WAIT_MAX_S)
        attempt = self._allocation.allocate(request, self._owner(request, call, now), now)
        if not attempt.is_done:
            if request.wait_s > 0:
                return self._wait(attempt, now)
            self._allocation.explain(attempt, now)
        self._record_facts()
        return attempt.replies()

    async def _wait(self, attempt: Attempt, now: Moment) -> list[Allocated]:
        ended = anyio.Event()
        attempt.wake = ended.set
        waiting = self._allocation.wait(attempt, now)
        try:
            device = self.table.device(attempt.request.job, attempt.request.device)
            self._compactions.plan_for_waiting(device, now)
            self._record_facts()
            with anyio.move_on_after(attempt.request.wait_s):
                await ended.wait()
        finally:
            self._allocation.end_wait(waiting, self._now())
            self._record_facts()
        if attempt.missing or attempt.error is not None:
            self._allocation.explain(attempt, self._now())
            self._record_facts()
        return attempt.replies()

    def _free(self, request: FreeMemory, call: Call) -> Nothing:
        now = self._now()
        self._allocation.free(request, self._owner(request, call, now), now)
        self._record_facts()
        return Nothing()

    def _change(self, request: ChangeBlocks, call: Call) -> Nothing:
        now = self._now()
        self._allocation.change(request, self._owner(request, call, now), now)
        self._record_facts()
        return Nothing()

    def _assert(self, request: AssertBlocks, call: Call) -> list[Handle]:
        now = self._now()
        handles = self._assertion.assert_blocks(request, self._owner(request, call, now), now)
        self._record_facts()
        return handles

    def _plan(self, request: PlanCompaction, call: Call) -> CompactionPlan:
        plan = self._compactions.plan(request, self._now())
        self._record_facts()
        return plan

    def _commit(self, request: CommitMove, call: Call) -> Handle:
        now = self._now()
        owner = self._owner(request, call, now)
        handle = owner.handle(self._compactions.commit(request, owner, now))
        self._record_facts()
        return handle

    # Questions.

    def _list_devices(self, request: ListDevices, call: Call) -> DevicePage:
        self._bus.dispatcher.require_job(request.job)
        return self._questions.devices(request, self._now())

    def _list_blocks(self, request: ListBlocks, call: Call) -> BlockPage:
        return self._questions.blocks(request)

    def _find_fit(self, request: FindFit, call: Call) -> list[FitPlace]:
        self._bus.dispatcher.require_job(request.job)
        return self._questions.fit(request, self._now())

    # Facts of other services.

    def _workers_ended(self, record: Record) -> None:
        """Workers have failed or left; another process may have a name by now."""
        job, fact = record.job, record.fact
        reason = getattr(fact, "reason", "its job is complete")
        for owner in self._owners_of(record):
            if not self._workers.is_registered(job, owner.worker_id, owner.incarnation):
                self.table.remove_worker(owner, reason, self._now())
        if isinstance(fact, WorkerFailed | WorkerLeft):
            self.table.settle_gone(job, fact.worker_id, self._workers.is_registered, self._now())
        self._record_facts(record.id)

    def _owners_of(self, record: Record) -> list[Owner]:
        """The workers with devices or blocks that a fact is about: one, or all of a job."""
        owners, fact = self.table.owners, record.fact
        if isinstance(fact, WorkerFailed | WorkerLeft):
            owner = owners.get((record.job, fact.worker_id))
            return [] if owner is None else [owner]
        return [one for one in owners.values() if one.job == record.job]

    def _job_removed(self, record: Record) -> None:
        self.table.remove_job(record.job, self._now())
        self._fact_limits.pop(record.job, None)
        self._allocation.forget(record.job)
        self._questions.forget(record.job)
        self._record_facts(record.id)

    # What happens with time.

    def _tick(self) -> None:
        now = self._now()
        for device in list(self.table.devices()):
            self._look_after(device, now)
        self._record_facts()
        for job, limit in self._fact_limits.items():
            left_out = limit.count(now.monotonic)
            if left_out:
                self._log.warning("evictions and shortages of memory were not recorded", job=job, count=left_out)

    def _look_after(self, device: Device, now: Moment) -> None:
        if device.assert_until is not None and now.monotonic >= device.assert_until:
            self.table.settle_device(device, now)
        self._compactions.expire(device, now)
        self._compactions.plan_for_waiting(device, now)
        self._allocation.search_if_due(device, now)
        device.usage.observe(device.held_bytes, now.monotonic)
        crossing = device.level.crossed(device.pressure)
        if crossing is not None:
            seconds = device.forecast(now.monotonic).seconds
            fact = MemoryPressure(device.name, device.pressure, crossing.threshold, crossing.is_rising, seconds)
            self.table.facts.append((device.owner.job, fact))

    # Facts.

    def _record_facts(self, cause: int = 0) -> None:
        """Record the facts that the table has collected."""
        if not self.table.facts:
            return
        facts, self.table.facts = self.table.facts, []
        by_job: dict[str, list[Fact]] = {}
        for job, fact in facts:
            if not isinstance(fact, BlockEvicted | OutOfMemory) or self._admits(job):
                by_job.setdefault(job, []).append(fact)
        for job, found in by_job.items():
            decision = Decision(None, tuple(found), job=job, generation=self._workers.generation(job))
            self._bus.record_later(decision, cause=cause, origin=OWNER)

    def _admits(self, job: str) -> bool:
        now = self._clock.monotonic()
        limit = self._fact_limits.get(job)
        if limit is None:
            limit = self._fact_limits[job] = RateLimit(FACTS_PER_S, FACTS_BURST, now)
        return limit.admits(now)
