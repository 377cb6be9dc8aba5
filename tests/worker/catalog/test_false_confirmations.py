"""A worker with a token of its job that says untruly that it has deleted files: it harms only what is its job's own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from forged import checkpoint
from forged.auth.model import Role
from forged.catalog.files import file_work
from forged.catalog.messages import (
    AdoptedCheckpoint,
    CompleteCheckpoint,
    ConfirmDeleted,
    ShowCheckpoint,
    StartCheckpoint,
)
from forged.catalog.model import CheckpointMeta
from forged.checkpoint.format.manifest import SUFFIX
from forged.checkpoint.ports import hold
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.local import LocalStorage
from forged.client import ForgedClient
from forged.errors import ForgedError, RequestRefused
from tests.client.daemon_runner import DaemonRunner, config_in
from tests.worker.trainers import JOB, PATIENCE_S, group_at

OTHER = "other"
LIAR = "liar"


def save(folder: Path, step: int) -> AdoptedCheckpoint:
    path = folder / f"step-{step:08d}"
    checkpoint.save(str(path), {"w": np.full(1000, step, np.float32)})
    manifest = listing.read_manifest(LocalStorage(folder), path.name)
    return AdoptedCheckpoint(str(path), manifest.save_id, 0, step, manifest.size_bytes, manifest.created_at)


async def adopted(operator: ForgedClient, job: str, folder: Path) -> dict[int, str]:
    """Two checkpoints that the daemon may touch; their ids by step."""
    saved = [await asyncio.to_thread(save, folder, step) for step in (1, 2)]
    await operator.adopt_checkpoints(job, str(folder), saved)
    return {meta.step: meta.checkpoint_id for meta in await operator.checkpoints(job) if meta.step < 3}


async def is_unknown(operator: ForgedClient, request: ShowCheckpoint) -> bool:
    try:
        await operator.request(request)
    except RequestRefused as error:
        return error.code == "checkpoint_unknown"
    return False


async def until_unknown(operator: ForgedClient, job: str, checkpoint_id: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await is_unknown(operator, ShowCheckpoint(job, checkpoint_id)):
            await asyncio.sleep(0.02)


def prefixes(folder: Path) -> list[str]:
    return listing.prefixes(LocalStorage(folder))


async def test_false_confirmations_forget_only_what_the_own_workers_are_to_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_work, "NOT_DELETED_S", 0.05)
    runner = DaemonRunner(config_in(tmp_path / "daemon", listen=("tcp://127.0.0.1:0",)))
    await runner.open()
    managed, others, own = tmp_path / "managed", tmp_path / "others", tmp_path / "own"
    async with ForgedClient(runner.endpoint) as operator, group_at(runner.endpoint) as group:
        group.start(LIAR)
        await group.world_of(LIAR)
        incarnation = group[LIAR].worker.incarnation
        await operator.create_job(OTHER)
        ids = {job: await adopted(operator, job, folder) for job, folder in ((JOB, managed), (OTHER, others))}
        token = await operator.create_token("tenant", Role.WORKER, jobs=[JOB])
        [address] = runner.daemon.listening
        async with ForgedClient(address, token=token) as tenant:
            saved: list[CheckpointMeta] = []
            for step in (3, 4, 5):
                one = await asyncio.to_thread(save, own, step)
                request = StartCheckpoint(JOB, LIAR, incarnation, 0, step, one.storage_path, one.save_id)
                saved.append(await tenant.request(request))
                ended = CompleteCheckpoint(JOB, LIAR, incarnation, saved[-1].checkpoint_id, one.size_bytes, 1.0)
                await tenant.request(ended)
            with (
                hold(LocalStorage(managed), f"step-00000001{SUFFIX}"),
                hold(LocalStorage(others), f"step-00000001{SUFFIX}"),
            ):
                # The daemon cannot delete the files of these tombstones while they are read.
                for job in (JOB, OTHER):
                    await operator.delete_checkpoint(job, ids[job][1])
                for meta in saved[:2]:
                    await operator.delete_checkpoint(JOB, meta.checkpoint_id)
                every = [*ids[JOB].values(), *ids[OTHER].values(), *(meta.checkpoint_id for meta in saved), "x"]
                await tenant.request(ConfirmDeleted(JOB, LIAR, incarnation, every))
                for job in (JOB, OTHER):
                    assert not await is_unknown(operator, ShowCheckpoint(job, ids[job][1]))
                with pytest.raises(ForgedError):
                    await tenant.request(ConfirmDeleted(OTHER, LIAR, incarnation, every))
                with pytest.raises(ForgedError):
                    await tenant.request(ConfirmDeleted(JOB, LIAR, b"?" * 16, every))
            # The daemon deletes them all the same, and nothing else.
            for job in (JOB, OTHER):
                await until_unknown(operator, job, ids[job][1])
        assert [meta.step for meta in await operator.checkpoints(OTHER)] == [2]
        assert [meta.step for meta in await operator.checkpoints(JOB)] == [5, 2]
        for folder in (managed, others):
            assert prefixes(folder) == ["step-00000002"]
            assert checkpoint.verify(str(folder / "step-00000002")).is_valid
        # Of what the liar has named untruly the files are left, and they are not offered.
        assert prefixes(own) == [f"step-{step:08d}" for step in (3, 4, 5)]
        assert [point.meta.step for point in (await operator.restore_points(JOB)).points] == [5, 2]
        await group.finish(LIAR)
    await runner.close()
