"""A daemon's kernel with jobs and the checkpoint catalogue, on virtual time; its workers are registered by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, ParamSpec

import anyio

from forged.auth.model import Principal, Role
from forged.catalog.messages import (
    CompleteCheckpoint,
    CompletedCheckpoint,
    FailCheckpoint,
    FindRestorePoints,
    ListCheckpoints,
    RestorePoints,
    StartCheckpoint,
)
from forged.catalog.model import CheckpointMeta, CheckpointType
from forged.catalog.ports import JobsPort
from forged.catalog.service import CatalogService
from forged.elastic.messages import ConfirmWorker
from forged.errors import RequestRefused
from forged.jobs.core import JobBook
from forged.jobs.model import ChangeJob, CreateJob, SettingValue, ShowJob
from forged.jobs.service import JobService
from forged.kernel.messages import Call, Nothing, Request
from forged.kernel.store.port import Store
from tests.kernel_fixture import OPERATOR, Kernel, running, task_group
from tests.simulation.environment.loop import run

P = ParamSpec("P")

JOB = "run"
INCARNATION = b"i" * 16
WORKER = "w1"
UID = 1000
TENANT = Principal("a tenant", Role.WORKER, frozenset({JOB}))
OWN_USER = Principal(f"loopback:{UID}", Role.WORKER)
FOLDER = "/ckpt/run"


class Catalog:
    """The kernel, the catalogue's service, and what the other services would say."""

    def __init__(self, kernel: Kernel, defaults: Mapping[str, SettingValue], options: Mapping[str, Any]) -> None:
        self.kernel = kernel
        self.registered: set[tuple[str, str, bytes]] = {(JOB, WORKER, INCARNATION)}
        self.steps: dict[str, int] = {}
        self.jobs = JobService(kernel.bus, kernel.clock, JobBook())
        port = JobsPort(
            settings=self.jobs.settings,
            step=self.steps.get,
            is_registered=lambda job, worker, incarnation: (job, worker, incarnation) in self.registered,
        )
        self.service = CatalogService(kernel.bus, kernel.clock, port, uid=UID, defaults=defaults, **options)
        kernel.ledger.register(self.jobs)
        kernel.ledger.register(self.service)
        kernel.bus.serve(ConfirmWorker, self._confirm, owner="a test")

    def _confirm(self, request: ConfirmWorker, call: Call) -> Nothing:
        if (request.job, request.worker_id, request.incarnation) not in self.registered:
            raise RequestRefused("worker_gone", "it is gone", "")
        return Nothing()

    async def ask(self, request: Request[Any], by: Principal = OWN_USER) -> Any:
        return await self.kernel.bus.ask(request, Call(by, "a test"))

    async def start(self, step: int, *, by: Principal = OWN_USER, **changes: Any) -> CheckpointMeta:
        """A worker starts the checkpoint of a step."""
        meta: CheckpointMeta = await self.ask(start(step, **changes), by)
        return meta

    async def complete(self, checkpoint_id: str, size_bytes: int = 100, seconds: float = 1.0) -> CompletedCheckpoint:
        request = CompleteCheckpoint(JOB, WORKER, INCARNATION, checkpoint_id, size_bytes, seconds)
        completed: CompletedCheckpoint = await self.ask(request)
        return completed

    async def fail(self, checkpoint_id: str, reason: str = "disk full") -> None:
        await self.ask(FailCheckpoint(JOB, WORKER, INCARNATION, checkpoint_id, reason))

    async def save(self, step: int, **changes: Any) -> str:
        """A worker starts and completes the checkpoint of a step; returns its id."""
        checkpoint_id = (await self.start(step, **changes)).checkpoint_id
        await self.complete(checkpoint_id)
        return checkpoint_id

    async def configure(self, settings: Mapping[str, SettingValue]) -> None:
        """Change the job's settings."""
        job = await self.ask(ShowJob(JOB))
        await self.ask(ChangeJob(JOB, dict(settings), job.version), OPERATOR)
        await self.kernel.settle()

    async def points(self, job: str = JOB, **criteria: Any) -> RestorePoints:
        found: RestorePoints = await self.ask(FindRestorePoints(job, **criteria))
        return found

    async def listed(self, job: str = JOB) -> dict[int, str]:
        """The state of each checkpoint of a job, by step; the newest first."""
        page = await self.ask(ListCheckpoints(job))
        return {meta.step: meta.state.value for meta in page.checkpoints}


def start(step: int, **changes: Any) -> StartCheckpoint:
    """The request to start the checkpoint of a step."""
    values: dict[str, Any] = {
        "job": JOB,
        "worker_id": WORKER,
        "incarnation": INCARNATION,
        "epoch": 0,
        "step": step,
        "storage_path": f"{FOLDER}/step-{step:08d}",
        "save_id": f"{step:08x}",
    }
    return StartCheckpoint(**values | changes)


def incremental(parent: int) -> dict[str, Any]:
    """What makes the start of a checkpoint one of an incremental checkpoint."""
    return {
        "checkpoint_type": CheckpointType.INCREMENTAL,
        "parent_path": f"{FOLDER}/step-{parent:08d}",
    }


def over_days(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run a test on its own virtual loop, with a limit of virtual days."""

    @wraps(test)
    def run_it(*args: P.args, **kwargs: P.kwargs) -> None:
        async def within_reason() -> None:
            with anyio.fail_after(30 * 86_400.0):
                await test(*args, **kwargs)

        run(within_reason, test.__name__)

    return run_it


@asynccontextmanager
async def catalog(
    store: Store | None = None,
    *,
    settings: Mapping[str, SettingValue] | None = None,
    defaults: Mapping[str, SettingValue] | None = None,
    extend: Callable[[Catalog], object] = lambda catalog: None,
    **options: Any,
) -> AsyncIterator[Catalog]:
    """A running catalogue with one job, and one worker of it."""
    made: list[Catalog] = []

    def register(kernel: Kernel) -> None:
        made.append(Catalog(kernel, defaults or {}, options))
        extend(made[0])

    async with running(store, register) as kernel, task_group() as tasks:
        await tasks.start(made[0].service.work.run)
        await kernel.bus.ask(CreateJob(JOB, dict(settings or {})))
        yield made[0]
