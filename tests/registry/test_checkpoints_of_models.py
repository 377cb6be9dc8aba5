"""A checkpoint that a model refers to is kept by the catalogue, in a whole daemon."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forged.catalog.messages import (
    AdoptCheckpoints,
    AdoptedCheckpoint,
    CollectCheckpoints,
    CompleteCheckpoint,
    DeleteCheckpoint,
    GcTick,
    ListCheckpoints,
    ShowCheckpoint,
    StartCheckpoint,
)
from forged.daemon import Daemon
from forged.errors import RequestRefused
from forged.jobs.model import CreateJob, RemoveJob
from forged.kernel.messages import Call, Request
from forged.registry.messages import Artifact, DeleteModel, ImportedVersion, ImportModels, RegisterModel, ShowModel
from forged.registry.model import DeploymentState
from tests.client.daemon_runner import DaemonRunner, config_in
from tests.kernel_fixture import OPERATOR
from tests.registry.registry_fixture import JOB, JOB_OPERATOR, MODEL, STRANGER, V1, metadata


class Kept:
    """A daemon, and a job that keeps its newest checkpoint."""

    def __init__(self, daemon: Daemon, folder: Path) -> None:
        self.daemon = daemon
        self.folder = folder

    async def ask(self, request: Request[Any], by: Any = OPERATOR) -> Any:
        return await self.daemon.bus.ask(request, Call(by, "a test"))

    def path(self, step: int) -> str:
        return f"{self.folder}/step-{step:08d}"

    def artifact(self, step: int) -> Artifact:
        return Artifact(self.path(step), f"{step:08x}", job=JOB)

    async def save(self, step: int) -> str:
        started = await self.ask(StartCheckpoint(JOB, "", b"", 2, step, self.path(step), f"{step:08x}"))
        await self.ask(CompleteCheckpoint(JOB, "", b"", started.checkpoint_id, 100, 1.0))
        checkpoint_id: str = started.checkpoint_id
        return checkpoint_id

    async def steps(self) -> list[int]:
        """The steps of the checkpoints after a collection."""
        await self.ask(CollectCheckpoints(JOB))
        return [one.step for one in (await self.ask(ListCheckpoints(JOB))).checkpoints]


@asynccontextmanager
async def kept(tmp_path: Path) -> AsyncIterator[Kept]:
    runner = DaemonRunner(config_in(tmp_path))
    one = Kept(await runner.open(), tmp_path)
    await one.ask(CreateJob(JOB, {"checkpoint_keep": 1}))
    try:
        yield one
    finally:
        await runner.close()


async def test_referenced_checkpoint_is_kept_by_a_collection(tmp_path: Path) -> None:
    async with kept(tmp_path) as one:
        first = await one.save(1)
        await one.ask(RegisterModel(metadata(), artifact=one.artifact(1)))
        for step in (2, 3):
            await one.save(step)
        assert await one.steps() == [3, 1]
        assert (await one.ask(ShowCheckpoint(JOB, first))).retention == f"used by model {MODEL}@1.0.0"
        shown = [meta.holders for meta in (await one.ask(ListCheckpoints(JOB))).checkpoints]
        assert shown == [(), (f"model {MODEL}@1.0.0",)]
        with pytest.raises(RequestRefused) as error:
            await one.ask(DeleteCheckpoint(JOB, first))
        assert (error.value.code, f"{MODEL}@1.0.0" in error.value.message) == ("checkpoint_held", True)
        assert "forgectl models rm" in error.value.fix
        view = await one.ask(ShowModel(MODEL))
        assert (view.artifact.checkpoint_id, view.lineage.step, view.lineage.epoch) == (first, 1, 2)
        assert view.lineage.settings == {"checkpoint_keep": 1}


async def test_referenced_checkpoint_survives_the_removal_of_its_job(tmp_path: Path) -> None:
    async with kept(tmp_path) as one:
        for step in (1, 2):
            await one.save(step)
            if step == 1:
                await one.ask(RegisterModel(metadata(), artifact=one.artifact(1)))
        await one.ask(RemoveJob(JOB))
        await one.daemon.bus.drain()
        assert await one.steps() == [1]
        await one.ask(CreateJob(JOB, {"checkpoint_keep": 1}))
        await one.save(3)
        assert await one.steps() == [3, 1]


async def test_checkpoint_that_is_adopted_later_is_kept_too(tmp_path: Path) -> None:
    async with kept(tmp_path) as one:
        await one.ask(RegisterModel(metadata(), artifact=one.artifact(1)))
        await one.save(5)
        adopted = [AdoptedCheckpoint(one.path(step), f"{step:08x}", 0, step, 100, 0.0) for step in (1, 2)]
        await one.ask(AdoptCheckpoints(JOB, str(one.folder), adopted))
        assert await one.steps() == [5, 1]


async def test_deletion_of_the_version_releases_its_checkpoint(tmp_path: Path) -> None:
    async with kept(tmp_path) as one:
        await one.save(1)
        archived = ImportedVersion(metadata(state=DeploymentState.ARCHIVED), artifact=one.artifact(1))
        await one.ask(ImportModels([archived], "from elsewhere"))
        await one.save(2)
        assert await one.steps() == [2, 1]
        await one.ask(DeleteModel(MODEL, V1))
        await one.daemon.bus.drain()
        assert JOB in one.daemon.catalog.book.collection.due(one.daemon.catalog._now())
        one.daemon.bus.signal(GcTick(), Call(OPERATOR, "a test"))
        assert await one.steps() == [2]


async def test_deletion_of_a_registered_version_releases_its_checkpoint(tmp_path: Path) -> None:
    async with kept(tmp_path) as one:
        await one.save(1)
        await one.ask(RegisterModel(metadata(), artifact=one.artifact(1)))
        await one.save(2)
        assert await one.steps() == [2, 1]
        await one.ask(DeleteModel(MODEL, V1, "a mistake"))
        await one.daemon.bus.drain()
        one.daemon.bus.signal(GcTick(), Call(OPERATOR, "a test"))
        assert await one.steps() == [2]


async def test_tenant_holds_no_checkpoint_of_another_job(tmp_path: Path) -> None:
    async with kept(tmp_path) as one:
        await one.save(1)
        await one.ask(RegisterModel(metadata(model_id="other/net"), artifact=one.artifact(1)), STRANGER)
        await one.save(2)
        assert await one.steps() == [2]
        await one.ask(RegisterModel(metadata(), artifact=one.artifact(2)), JOB_OPERATOR)
        await one.save(3)
        assert await one.steps() == [3, 2]
