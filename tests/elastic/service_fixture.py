"""The elastic service on a kernel without network, on virtual time, with stub workers that use its bus."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio

from forged.elastic.config import require_meant
from forged.elastic.messages import (
    REQUESTS,
    Heartbeat,
    JoinJob,
    JoinReply,
    LeaveJob,
    LeaveReply,
    ReportReady,
    ReportStopped,
    RescaleCompleted,
)
from forged.elastic.model import WorkerId
from forged.elastic.service import ElasticService
from forged.jobs.core import JobBook
from forged.jobs.model import REQUESTS as JOB_REQUESTS
from forged.jobs.model import SettingValue
from forged.jobs.service import JobService, TrainingPort
from forged.kernel.messages import Call, Fact, Nothing, Record, Request
from forged.kernel.store.port import Store
from tests.elastic.coordinator_playbook import JOB, incarnation, worker_of
from tests.kernel_fixture import OPERATOR, Kernel, running

R = TypeVar("R")
F = TypeVar("F", bound=Fact)


class Addresses:
    """The peer ports: those in `dead` refuse connections, all other probes have no result."""

    def __init__(self) -> None:
        self.dead: set[str] = set()
        self.asked: list[str] = []
        self.answers = anyio.Event()
        """Until it is set, no probe has a result."""
        self.answers.set()

    async def is_refused(self, worker: WorkerId, seen_at: str) -> bool:
        self.asked.append(worker.id)
        await self.answers.wait()
        return worker.id in self.dead


class WorkerStub:
    """One worker's requests and signals."""

    def __init__(self, fixture: ServiceFixture, name: str, life: int, job: str) -> None:
        self.fixture = fixture
        self.name = name
        self.job = job
        self.incarnation = incarnation(name, life)
        self.client = job.encode() + self.incarnation
        self._number = 0

    async def ask(self, request: Request[R]) -> R:
        """Send a request as this worker's client, which has had all earlier replies."""
        self._number += 1
        call = Call(
            OPERATOR,
            f"worker at host-{self.name}",
            client=self.client,
            number=self._number,
            acknowledged=self._number - 1,
        )
        return await self.fixture.kernel.bus.ask(request, call)

    async def join(self, settings: dict[str, SettingValue] | None = None, **more: Any) -> JoinReply:
        self.fixture.service.arrived(self.client)
        return await self.ask(JoinJob(self.job, worker_of(self.name), self.incarnation, settings=settings, **more))

    async def leave(self, **more: Any) -> LeaveReply:
        return await self.ask(LeaveJob(self.job, self.name, self.incarnation, **more))

    async def stop(self, attempt: int, step: int = 0, *, holds_state: bool = True, **more: Any) -> Nothing:
        report = ReportStopped(self.job, self.name, self.incarnation, attempt, step, holds_state=holds_state, **more)
        return await self.ask(report)

    async def ready(self, attempt: int) -> Nothing:
        return await self.ask(ReportReady(self.job, self.name, self.incarnation, attempt))

    def beat(self, step: int = 0, *, still: bool = False, interval_s: float = 0.0) -> None:
        """Send a heartbeat, with progress unless `still`."""
        call = Call(OPERATOR, "a test", client=self.client)
        collective_seq = 0 if still else int(self.fixture.kernel.clock.monotonic())
        self.fixture.kernel.bus.signal(
            Heartbeat(self.job, self.name, self.incarnation, step, collective_seq, interval_s), call
        )

    def lose(self) -> None:
        self.fixture.service.connection_lost(self.client)

    def come_back(self) -> None:
        self.fixture.service.arrived(self.client)


class ServiceFixture:
    """A kernel with the elastic and job services, and their workers."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.addresses = Addresses()
        self.workers: dict[str, WorkerStub] = {}
        self.silent: set[str] = set()
        self._keys = 0
        service: list[ElasticService] = []
        training = TrainingPort(
            generation=lambda job: service[0].generation(job),
            workers=lambda job: service[0].workers_at_work(job),
            require=require_meant,
        )
        self.jobs = JobService(kernel.bus, kernel.clock, JobBook(), training)
        self.service = ElasticService(kernel.bus, kernel.clock, self.addresses.is_refused, self._token_bytes)
        service.append(self.service)
        kernel.ledger.register(self.jobs)
        kernel.ledger.register(self.service)

    def _token_bytes(self, size: int) -> bytes:
        self._keys += 1
        return bytes([self._keys]) * size

    def worker(self, name: str, life: int = 1, job: str = JOB) -> WorkerStub:
        self.workers[name] = WorkerStub(self, name, life, job)
        return self.workers[name]

    async def start(self, *names: str, **settings: SettingValue) -> list[WorkerStub]:
        """Join these workers; the first creates the job with these settings."""
        started = []
        for name in names:
            started.append(self.worker(name))
            await started[-1].join(settings if settings and len(started) == 1 else None)
        return started

    async def wait(self, seconds: float) -> None:
        """Let time pass; every worker that is not silent sends a heartbeat each second."""
        end = self.kernel.clock.monotonic() + seconds
        while (left := end - self.kernel.clock.monotonic()) > 0:
            for name, worker in self.workers.items():
                if name not in self.silent:
                    worker.beat()
            await anyio.sleep(min(left, 1.0))
        await self.kernel.settle()

    async def complete_attempt(self, step: int = 0) -> RescaleCompleted:
        """All members of the current attempt answer."""
        attempt = self.service.coordinators[JOB].attempt
        assert attempt is not None
        for name in attempt.members:
            await self.workers[name].stop(attempt.number, step, holds_state=name not in attempt.added)
        for name in attempt.waiting_for:
            await self.workers[name].ready(attempt.number)
        await self.kernel.settle()
        return self.facts(RescaleCompleted)[-1]

    async def form_world(self, *names: str, **settings: SettingValue) -> list[WorkerStub]:
        """Make these workers the first world."""
        workers = await self.start(*names, **settings)
        await self.wait(31.0)
        await self.complete_attempt()
        return workers

    def records(self, *kinds: type[Fact]) -> list[Record]:
        wanted = {kind.__name__ for kind in kinds}
        records = self.kernel.journal.after(0, len(self.kernel.journal))
        return [record for record in records if not wanted or record.type in wanted]

    def facts(self, kind: type[F]) -> list[F]:
        facts = (record.fact for record in self.records(kind))
        return [fact for fact in facts if isinstance(fact, kind)]

    def last(self, kind: type[Fact]) -> Record:
        return self.records(kind)[-1]

    def told(self, *, without: Iterable[str] = ("JobCreated",)) -> list[str]:
        """The types of all facts, oldest first."""
        return [record.type for record in self.records() if record.type not in without]

    def cause(self, kind: type[Fact]) -> str:
        """The cause of the newest fact of this kind, in short."""
        by_id = {record.id: record for record in self.records()}
        found = by_id.get(self.last(kind).cause)
        if found is None:
            return ""
        fact = found.fact
        about = getattr(fact, "worker_id", None) or getattr(getattr(fact, "worker", None), "id", None)
        return f"{found.type} {about or getattr(fact, 'attempt', '')}".strip()


@asynccontextmanager
async def service_fixture(store: Store | None = None) -> AsyncIterator[ServiceFixture]:
    """A running service inside the block; at its end it is gone as after a crash."""
    made: list[ServiceFixture] = []
    async with running(store, lambda kernel: made.append(ServiceFixture(kernel)), requests=(*JOB_REQUESTS, *REQUESTS)):
        (fixture,) = made
        async with anyio.create_task_group() as tasks:
            await tasks.start(fixture.service.run)
            yield fixture
            assert not tasks.cancel_scope.cancel_called
            tasks.cancel_scope.cancel()
