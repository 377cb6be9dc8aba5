"""Emergency checkpoints beside incremental saves, and on a disk that is full."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forged.catalog.messages import CompleteCheckpoint, DeleteCheckpoint, ReportCorruptCheckpoint, StartCheckpoint
from forged.catalog.model import CheckpointMeta, CheckpointState
from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.rank_group import OutcomeUnknown
from forged.checkpoint.saving import receipts
from forged.checkpoint.saving.pipeline import Saver
from forged.checkpoint.saving.rank_save import RankSave
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.local import LocalStorage
from forged.client import ForgedClient
from forged.elastic.messages import EvictWorker
from forged.errors import RequestRefused, Unavailable
from forged.host import slot_saves
from forged.host.local_agent import LocalHeldSlots
from forged.host.messages import SaveSlots
from forged.host.model import SavedSlots
from forged.worker.catalog.worker_catalog import WorkerCatalog
from tests.client.daemon_runner import SOON, DaemonRunner
from tests.host.staging import NAMES, check, emergencies, start, until
from tests.small_disk import fill, small_disk
from tests.worker.trainers import JOB, PATIENCE_S, TrainerGroup

DISK_MIB = 96
UNCHANGED = {"same": np.arange(50)}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_MIB) as disk:
        yield disk


async def catalogued(client: ForgedClient, step: int) -> CheckpointMeta:
    [meta] = [meta for meta in await client.checkpoints(JOB) if meta.step == step]
    return meta


async def test_emergency_checkpoint_after_an_incremental_save_is_full(
    group: TrainerGroup, client: ForgedClient, storage: LocalStorage
) -> None:
    staging = await start(group, storage)
    staging.unchanged = UNCHANGED
    await staging.commit("save")
    await staging.commit("save increment")
    await staging.do("keep")
    full, increment = (listing.read_manifest(storage, handle.prefix) for handle in staging.handles[::2])
    assert [link.prefix for link in increment.links] == [full.prefix]
    await client.request(EvictWorker(JOB, "b", "for the test"))
    [saved] = await emergencies(client, 1)
    step = staging.kept[-1]
    assert saved.step == step
    assert listing.read_manifest(storage, f"step-{step:06d}").links == []
    assert (await catalogued(client, step)).parent_id is None
    await asyncio.to_thread(listing.delete, storage, increment.prefix)
    await asyncio.to_thread(listing.delete, storage, full.prefix)
    check(storage, step)
    await group.over("b")
    await group.finish("a")


async def test_incremental_save_that_a_failure_interrupts_is_saved_in_full(
    group: TrainerGroup, client: ForgedClient, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalogue has been told of an incremental checkpoint of this name."""
    publish, may_publish = Saver.publish, threading.Event()

    def late(saver: Saver, save: RankSave, *arguments: Any) -> None:
        if save.agreement.links:
            may_publish.wait(PATIENCE_S)
        publish(saver, save, *arguments)

    monkeypatch.setattr(Saver, "publish", late)
    staging = await start(group, storage)
    staging.unchanged = UNCHANGED
    await staging.commit("save")
    await staging.do("save increment")
    await client.request(EvictWorker(JOB, "b", "for the test"))
    [saved] = await emergencies(client, 1)
    prefix = staging.handles[-1].prefix
    assert f"step-{saved.step:06d}" == prefix
    assert listing.read_manifest(storage, prefix).links == []
    meta = await catalogued(client, saved.step)
    assert (meta.state, meta.parent_id) == (CheckpointState.COMPLETE, None)
    may_publish.set()
    for handle in staging.handles[2:]:
        with suppress(CheckpointException):
            await handle.committed()
    await asyncio.to_thread(listing.delete, storage, staging.handles[0].prefix)
    check(storage, saved.step)
    await group.over("b")
    await group.finish("a")


async def test_incremental_save_whose_end_was_not_reported_is_what_its_manifest_says(
    group: TrainerGroup, client: ForgedClient, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = await start(group, storage)
    staging.unchanged = UNCHANGED
    await staging.commit("save")
    monkeypatch.setattr(WorkerCatalog, "save_committed", lambda *_: None)
    await staging.commit("save increment")
    manifest = listing.read_manifest(storage, staging.handles[-1].prefix)
    assert manifest.step is not None
    await client.request(EvictWorker(JOB, "b", "for the test"))
    async with asyncio.timeout(PATIENCE_S):
        while (meta := await catalogued(client, manifest.step)).state is not CheckpointState.COMPLETE:
            await asyncio.sleep(0.02)
    parent = await catalogued(client, int(manifest.links[-1].prefix.removeprefix("step-")))
    assert (meta.parent_id, meta.size_bytes) == (parent.checkpoint_id, manifest.size_bytes)
    await group.over("b")
    await group.finish("a")


async def test_slots_are_freed_after_their_save_also_if_the_checkpoint_is_not_offered(
    runner: DaemonRunner,
    group: TrainerGroup,
    client: ForgedClient,
    storage: LocalStorage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that training has gone back behind."""

    async def nothing_offered(job: str) -> None:
        return None

    monkeypatch.setattr(runner.daemon.slots._saves, "durable_step", nothing_offered)
    staging = await start(group, storage, "keep")
    await client.request(EvictWorker(JOB, "b", "for the test"))
    await emergencies(client, 1)
    await until(client, lambda page: {one.owner for one in page.slots} == {"present"})
    check(storage, staging.kept[-1])
    await group.over("b")
    await group.finish("a")


async def test_emergency_checkpoint_is_saved_when_a_full_disk_has_room(
    runner: DaemonRunner,
    group: TrainerGroup,
    client: ForgedClient,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_saves, "RETRYING", SOON)
    storage = LocalStorage(disk / "checkpoints")
    staging = await start(group, storage)
    await staging.commit("save")
    await staging.do("keep")
    files = {entry.name for entry in storage.entries()}
    kept = int(staging.handles[0].prefix.removeprefix("step-"))
    filler = await asyncio.to_thread(fill, disk)
    await client.request(EvictWorker(JOB, "b", "for the test"))
    async with asyncio.timeout(PATIENCE_S):
        rescues = runner.daemon.slots._saves._rescues
        while JOB not in rescues or not rescues[JOB].retry_at:
            await asyncio.sleep(0.02)
    step = staging.kept[-1]
    assert (await catalogued(client, step)).state is CheckpointState.CORRUPTED
    assert {entry.name for entry in storage.entries()} == files
    check(storage, kept)
    await asyncio.to_thread(filler.unlink)
    [saved] = await emergencies(client, 1)
    assert saved.step == step
    assert (await catalogued(client, step)).state is CheckpointState.COMPLETE
    for saved_step in (kept, step):
        check(storage, saved_step)
    await group.over("b")
    await group.finish("a")


@pytest.mark.parametrize("blocks_left", [0, 64])
async def test_save_from_slots_to_a_full_disk_fails_and_the_next_one_succeeds(
    group: TrainerGroup, client: ForgedClient, disk: Path, monkeypatch: pytest.MonkeyPatch, blocks_left: int
) -> None:
    """The ranks tell each other of the failure by files where there is room for them, and else ask the daemon."""
    monkeypatch.setattr(receipts, "POLL_MAX_S", 0.05)
    storage = LocalStorage(disk / "checkpoints")
    staging = await start(group, storage)
    await staging.commit("save")
    files = {entry.name for entry in storage.entries()}
    filler = await asyncio.to_thread(fill, disk, blocks_left)
    await staging.do("save")
    for handle in staging.handles[2:]:
        with pytest.raises(CheckpointException) as caught:
            async with asyncio.timeout(PATIENCE_S):
                await handle.committed()
        assert caught.value.code == "checkpoint_disk_full"
        assert not isinstance(caught.value, OutcomeUnknown)
    await asyncio.to_thread(filler.unlink)
    await staging.commit("save")
    assert files <= {entry.name for entry in storage.entries()}
    assert len(listing.prefixes(storage)) == 2
    for prefix in listing.prefixes(storage):
        check(storage, int(prefix.removeprefix("step-")))
    await group.finish(*NAMES)


async def test_checkpoint_that_is_damaged_on_disk_is_saved_again_from_slots_and_offered(
    group: TrainerGroup, client: ForgedClient, storage: LocalStorage
) -> None:
    staging = await start(group, storage)
    await staging.commit("save")
    prefix = staging.handles[0].prefix
    step = int(prefix.removeprefix("step-"))
    async with asyncio.timeout(PATIENCE_S):
        while (meta := await catalogued(client, step)).state is not CheckpointState.COMPLETE:
            await asyncio.sleep(0.02)
    files = [part.file for part in listing.read_manifest(storage, prefix).parts]
    for file in files:
        await asyncio.to_thread((Path(storage.url) / file).write_bytes, b"damaged")
    await client.request(ReportCorruptCheckpoint(JOB, meta.checkpoint_id, "for the test"))
    await client.request(EvictWorker(JOB, "b", "for the test"))
    async with asyncio.timeout(PATIENCE_S):
        while (await catalogued(client, step)).state is not CheckpointState.COMPLETE:
            await asyncio.sleep(0.02)
    check(storage, step)
    assert [part.file for part in listing.read_manifest(storage, prefix).parts] == files
    assert (await catalogued(client, step)).holders == ()
    await until(client, lambda page: {one.owner for one in page.slots} == {"present"})
    await group.over("b")
    await group.finish("a")


async def test_failed_save_is_not_deleted_while_it_is_saved_again(
    group: TrainerGroup, client: ForgedClient, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_saves, "RETRYING", SOON)
    tries, is_refused, save_in_thread = list[str](), threading.Event(), LocalHeldSlots._save

    def fail_once(held: LocalHeldSlots, *arguments: Any, **options: Any) -> SavedSlots:
        tries.append(held.save_id)
        if len(tries) == 1:
            raise Unavailable("storage_failed", "for the test", "")
        is_refused.wait(PATIENCE_S)
        return save_in_thread(held, *arguments, **options)

    monkeypatch.setattr(LocalHeldSlots, "_save", fail_once)
    staging = await start(group, storage, "keep")
    await client.request(EvictWorker(JOB, "b", "for the test"))
    async with asyncio.timeout(PATIENCE_S):
        while len(tries) < 2:
            await asyncio.sleep(0.02)
    step = staging.kept[-1]
    failed = await catalogued(client, step)
    assert failed.is_failed_save
    with pytest.raises(RequestRefused) as refused:
        await client.request(DeleteCheckpoint(JOB, failed.checkpoint_id))
    assert refused.value.code == "checkpoint_held"
    is_refused.set()
    await emergencies(client, 1)
    meta = await catalogued(client, step)
    assert (meta.checkpoint_id, meta.state) == (failed.checkpoint_id, CheckpointState.COMPLETE)
    check(storage, step)
    await group.over("b")
    await group.finish("a")


async def test_save_that_was_collected_is_not_written_again_when_its_worker_asks_again(
    runner: DaemonRunner, group: TrainerGroup, client: ForgedClient, storage: LocalStorage
) -> None:
    staging = await start(group, storage)
    await staging.commit("save")
    prefix = staging.handles[0].prefix
    save_id = listing.read_manifest(storage, prefix).save_id
    await asyncio.to_thread(listing.delete, storage, prefix)
    runner.daemon.slots._saves.forget_ended()
    again = await client.request(SaveSlots(JOB, "a", group["a"].worker.incarnation, save_id))
    assert again.is_saved
    assert list(storage.entries()) == []
    await group.finish(*NAMES)


async def test_no_emergency_checkpoint_is_saved_where_a_newer_one_is_offered(
    group: TrainerGroup, client: ForgedClient, storage: LocalStorage
) -> None:
    staging = await start(group, storage, "keep")
    step = staging.kept[-1] + 1000
    started = await client.request(StartCheckpoint(JOB, "", b"", 0, step, f"{storage.url}/newer", "00000001"))
    await client.request(CompleteCheckpoint(JOB, "", b"", started.checkpoint_id, 1, 1.0))
    await client.request(EvictWorker(JOB, "b", "for the test"))
    await until(client, lambda page: {one.owner for one in page.slots} == {"present"})
    assert [meta.step for meta in await client.checkpoints(JOB)] == [step]
    assert listing.prefixes(storage) == []
    await group.over("b")
    await group.finish("a")
