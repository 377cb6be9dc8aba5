"""A daemon's kernel with the model registry on virtual time; jobs and their checkpoints are given by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from forged.auth.model import Principal, Role
from forged.catalog.records import CheckpointRecord
from forged.jobs.model import SettingValue
from forged.kernel.messages import Call, Request
from forged.kernel.store.port import Store
from forged.registry.messages import (
    CanaryAction,
    JournalEntry,
    ModelPolicy,
    ModelRolledBack,
    ModelView,
    ReadModelJournal,
    RecordedValidation,
    RecordValidation,
    RegisterModel,
    ReportCanary,
    RollBackModel,
    SetModelPolicy,
    ShowModel,
    TransitionModel,
)
from forged.registry.model import DeploymentState, ModelMetadata, ModelVersion, ValidationResult
from forged.registry.ports import OriginsPort
from forged.registry.service import RegistryService
from tests.kernel_fixture import OPERATOR, Kernel, running
from tests.simulation.environment.loop import VirtualClock

JOB = "vision"
MODEL = "vision/resnet"
CHECKSUM = "sha256:" + "a" * 64
TENANT = Principal("a trainer", Role.WORKER, frozenset({JOB}))
JOB_OPERATOR = Principal("an operator of one job", Role.OPERATOR, frozenset({JOB}))
VIEWER = Principal("a viewer", Role.VIEWER, frozenset({JOB}))
STRANGER = Principal("a stranger", Role.OPERATOR, frozenset({"other"}))
V1, V2, V3 = ModelVersion(1, 0, 0), ModelVersion(2, 0, 0), ModelVersion(3, 0, 0)
TO_CANARY = (DeploymentState.VALIDATING, DeploymentState.STAGING, DeploymentState.CANARY)


class Registry:
    """The kernel, the registry's service, and what the other services would say."""

    def __init__(self, kernel: Kernel, options: dict[str, Any]) -> None:
        self.kernel = kernel
        self.settings: dict[str, dict[str, SettingValue]] = {JOB: {"min_workers": 2}, "other": {}}
        self.checkpoints: dict[str, CheckpointRecord] = {}
        """By path."""
        self.audits: dict[tuple[str, int], str] = {}
        origins = OriginsPort(
            settings=self.settings.get,
            checkpoint=self._checkpoint,
            audit=lambda job, epoch: self.audits.get((job, epoch), ""),
        )
        self.service = RegistryService(kernel.bus, kernel.clock, origins, **options)
        kernel.ledger.register(self.service)

    @property
    def clock(self) -> VirtualClock:
        assert isinstance(self.kernel.clock, VirtualClock)
        return self.kernel.clock

    def _checkpoint(self, job: str, path: str, save_id: str) -> CheckpointRecord | None:
        found = self.checkpoints.get(path)
        return found if found is not None and found.job == job and save_id in ("", found.save_id) else None

    async def ask(self, request: Request[Any], by: Principal = OPERATOR) -> Any:
        return await self.kernel.bus.ask(request, Call(by, "a test"))

    async def register(self, version: ModelVersion = V1, by: Principal = TENANT, **changes: Any) -> ModelMetadata:
        more = {key: changes.pop(key) for key in ("bump", "artifact", "lineage", "reason") if key in changes}
        registered: ModelMetadata = await self.ask(RegisterModel(metadata(version, **changes), **more), by)
        return registered

    async def validate(
        self, version: ModelVersion = V1, by: Principal = TENANT, *, checksum: str = CHECKSUM, **changes: Any
    ) -> RecordedValidation:
        more = {key: changes.pop(key) for key in ("samples_ms", "environment") if key in changes}
        request = RecordValidation(result(version, **changes), checksum, **more)
        recorded: RecordedValidation = await self.ask(request, by)
        return recorded

    async def promote(self, version: ModelVersion, *states: DeploymentState, **more: Any) -> None:
        for to in states:
            await self.ask(TransitionModel(MODEL, version, to, **more))

    async def serve(self, *versions: ModelVersion) -> None:
        """Register and validate each version and promote it until it serves; the last one serves then."""
        for version in versions:
            await self.make_canary(version)
            await self.promote(version, DeploymentState.PRODUCTION)

    async def make_canary(self, version: ModelVersion) -> None:
        await self.register(version)
        await self.validate(version)
        await self.promote(version, *TO_CANARY)

    async def watch_canary(self, action: CanaryAction) -> None:
        """Let V1 serve and V2 be a canary; the action is what follows if V2 is bad."""
        await self.serve(V1)
        await self.make_canary(V2)
        await self.set_policy(canary=action)

    async def set_policy(self, **changes: Any) -> None:
        await self.ask(SetModelPolicy(MODEL, ModelPolicy(**changes)))

    async def report(self, version: ModelVersion, **changes: Any) -> Any:
        """Report what a version shows in service, and let the registry judge it."""
        measured = await self.ask(ReportCanary(result(version, **changes)), TENANT)
        await self.kernel.settle()
        return measured

    async def roll_back(self, version: ModelVersion | None = None, **more: Any) -> ModelRolledBack:
        done: ModelRolledBack = await self.ask(RollBackModel(MODEL, version, **more))
        return done

    async def show(self, ref: str = "latest", model_id: str = MODEL, by: Principal = OPERATOR) -> ModelView:
        view: ModelView = await self.ask(ShowModel(model_id, ref), by)
        return view

    async def state(self, version: ModelVersion) -> str:
        return (await self.show(str(version))).metadata.state.value

    @property
    def serving(self) -> ModelVersion | None:
        return self.service.state.model(MODEL).serving

    async def journal(self, model_id: str = MODEL, **more: Any) -> list[JournalEntry]:
        """The entries of a model, the newest first, read in pages."""
        entries: list[JournalEntry] = []
        before = 0
        while True:
            page = await self.ask(ReadModelJournal(model_id, before=before, **more))
            entries += page.entries
            if not page.more:
                return entries
            before = entries[-1].number

    async def reload(self) -> None:
        """Load the state from the store, as after a failed commit."""
        await self.kernel.settle()
        await self.service.load(self.kernel.store)


def metadata(version: ModelVersion = V1, **changes: Any) -> ModelMetadata:
    fields: dict[str, Any] = {
        "model_id": MODEL,
        "name": "ResNet",
        "version": version,
        "framework": "pytorch",
        "input_shape": (3, 224, 224),
        "output_shape": (1000,),
        "size_bytes": 100_000_000,
        "checksum": CHECKSUM,
    }
    return ModelMetadata(**fields | changes)


def result(version: ModelVersion = V1, **changes: Any) -> ValidationResult:
    fields: dict[str, Any] = {
        "model_id": MODEL,
        "version": version,
        "passed": True,
        "latency_p50_ms": 5.0,
        "latency_p99_ms": 10.0,
        "accuracy_score": 0.9,
    }
    return ValidationResult(**fields | changes)


@asynccontextmanager
async def registry(
    store: Store | None = None, *, extend: Callable[[Registry], object] = lambda registry: None, **options: Any
) -> AsyncIterator[Registry]:
    """A running registry."""
    made: list[Registry] = []

    def register(kernel: Kernel) -> None:
        made.append(Registry(kernel, options))
        extend(made[0])

    async with running(store, register):
        yield made[0]
