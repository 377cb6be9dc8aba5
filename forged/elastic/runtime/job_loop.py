"""The loop that ticks each job when something is due, and the probes of lost workers.

Invariants:
- What happens by itself, a timeout or a lost connection, waits until the ledger is writable; a request is refused
  until then.
- A bug in one job's coordinator ends that job only: after repeated errors it is aborted, and then left alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup, TaskStatus

from forged.clock import Clock
from forged.elastic.coordinator.job_coordinator import JobCoordinator
from forged.elastic.coordinator.job_state import NEVER
from forged.elastic.model import WorkerId
from forged.elastic.outbox import Moment, Probe
from forged.elastic.runtime.decisions import OWNER, DecisionWriter
from forged.elastic.runtime.job_table import JobTable
from forged.kernel.bus import Bus
from forged.kernel.messages import Decision

R = TypeVar("R")

PROBES_MAX = 256
"""Probes at the same time; further ones wait."""
ERRORS_MAX = 3
"""After so many errors in a row a job is aborted."""

RefusesConnections = Callable[[WorkerId, str], Awaitable[bool]]
"""Whether a worker's peer port refuses connections, given where the daemon saw the worker.

False if it accepts one, if the answer is not known, and if the port is not at that host.
"""


class JobLoop:
    """Drives the coordinators by time, and hands what they produce to the decision writer and the probes."""

    def __init__(self, bus: Bus, clock: Clock, table: JobTable, refuses_connections: RefusesConnections) -> None:
        self._bus = bus
        self._clock = clock
        self._table = table
        self._writer = DecisionWriter(bus, table.stale_keys)
        self._refuses_connections = refuses_connections
        self._errors: dict[str, int] = {}
        """Errors in a row while a job was ticked."""
        self._probing: set[Probe] = set()
        self._probe_slots = anyio.Semaphore(PROBES_MAX)
        self._tasks: TaskGroup | None = None
        self._wake_event = anyio.Event()

    def now(self) -> Moment:
        return Moment(self._clock.wall(), self._clock.monotonic())

    def wake(self) -> None:
        """Compute anew what is due next."""
        self._wake_event.set()

    def forget_errors(self, job: str) -> None:
        """Tick a job again that was left alone after errors; it was reopened, or another one will have its name."""
        self._errors.pop(job, None)

    # After a call on a coordinator.

    def decide(self, coordinator: JobCoordinator, reply: R) -> Decision[R]:
        """The decision for a request's call, with its reply."""
        self._send_probes(coordinator)
        decision = self._writer.decide(coordinator, reply)
        self.wake()
        return decision

    def settle(self, coordinator: JobCoordinator) -> None:
        """Decide the output of a call without a request; while the ledger is read-only it stays in the outbox."""
        self._send_probes(coordinator)
        if self._writer.commit(coordinator):
            self.wake()

    # By time.

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Do what is due, for ever."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            task_status.started()
            while True:
                self._wake_event = anyio.Event()
                await self._sleep()
                if self._bus.ledger.writable_now:
                    self._tick()

    async def _sleep(self) -> None:
        """Sleep until something is due or `wake` is called."""
        await self._bus.ledger.writable()
        due_at = min(map(self._due_at, self._table.coordinators.values()), default=NEVER)
        due_at = -NEVER if self._table.stale_keys else due_at
        with anyio.move_on_after(max(0.0, due_at - self._clock.monotonic())):
            await self._wake_event.wait()

    def _tick(self) -> None:
        now = self.now()
        for coordinator in self._table.coordinators.values():
            has_output = coordinator.outbox and not self._is_abandoned(coordinator)
            is_due = has_output or self._due_at(coordinator) <= now.monotonic
            if is_due and not self._tick_job(coordinator, now):
                return
        if self._table.stale_keys:
            self._bus.ledger.append(Decision(None, writes=self._table.take_stale_keys()), origin=OWNER)

    def _due_at(self, coordinator: JobCoordinator) -> float:
        return NEVER if self._is_abandoned(coordinator) else coordinator.due_at()

    def _is_abandoned(self, coordinator: JobCoordinator) -> bool:
        """Whether the job is no longer ticked, because even aborting it failed."""
        return self._errors.get(coordinator.name, 0) > ERRORS_MAX

    def _tick_job(self, coordinator: JobCoordinator, now: Moment) -> bool:
        """Tick one job; returns false after an error, for which all state is loaded again from the store."""
        errors = self._errors.get(coordinator.name, 0)
        try:
            if errors < ERRORS_MAX:
                coordinator.tick(now)
            elif not coordinator.over:
                reason = f"internal error: the coordinator failed {errors} times in a row; see the daemon's log"
                coordinator.abort(now, reason)
            self.settle(coordinator)
        except Exception as error:  # noqa: BLE001 - a bug in one job must not end the daemon
            self._errors[coordinator.name] = errors + 1
            self._bus.report_service_bug(f"job {coordinator.name} in {OWNER}", error)
            return False
        if errors < ERRORS_MAX:
            self._errors.pop(coordinator.name, None)
        else:
            self._errors[coordinator.name] = ERRORS_MAX + 1
        return True

    # Probes.

    def _send_probes(self, coordinator: JobCoordinator) -> None:
        probes, coordinator.outbox.probes = coordinator.outbox.probes, []
        for probe in probes:
            if self._tasks is not None and probe not in self._probing:
                self._probing.add(probe)
                self._tasks.start_soon(self._probe, coordinator.name, probe)

    async def _probe(self, job: str, probe: Probe) -> None:
        try:
            async with self._probe_slots:
                refused = await self._refuses_connections(probe.worker, probe.seen_at)
        finally:
            self._probing.discard(probe)
        coordinator = self._table.coordinators.get(job)
        if refused and coordinator is not None:
            coordinator.probed(probe.worker.id, probe.incarnation, self.now(), refused=True)
            self.settle(coordinator)
