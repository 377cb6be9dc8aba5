"""Workers that stage into slots of a real daemon, and the daemon that saves what they have staged."""

from __future__ import annotations

import asyncio
import errno
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from forged.catalog.messages import (
    CheckpointCompleted,
    EmergencyCheckpointFailed,
    FailCheckpoint,
    StartCheckpoint,
)
from forged.catalog.model import CheckpointState, CheckpointType
from forged.checkpoint import AsyncCheckpoints
from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.local import LocalStorage
from forged.client import ForgedClient
from forged.elastic.messages import EvictWorker, JobAborted, WorkerFailed
from forged.errors import ForgedError, RequestRefused
from forged.host.local_agent import LocalHeldSlots
from forged.host.messages import ListSlots, OpenedSlots, OpenSlots, SaveSlots
from forged.host.model import SavedSlots, SlotContents, SlotOwner, StagedCheckpoint
from forged.host.slot_saves import GIVEN_UP_AFTER, HOLDS_MAX
from forged.jobs.model import RemoveJob
from forged.kernel.messages import Record
from forged.retry import RetryPolicy
from tests.checkpoint.fixtures.plain_reader import same
from tests.checkpoint.fixtures.swapped_links import contents_of, swapped
from tests.client.daemon_runner import DaemonRunner
from tests.host.staging import (
    NAMES,
    ROWS,
    check,
    emergencies,
    facts,
    refused,
    rows,
    slot_files,
    slots,
    start,
    until,
    whole,
)
from tests.telemetry.recording_log import RecordingLog
from tests.worker.trainers import JOB, PATIENCE_S, TrainerGroup, group_at, past, shared_worker


async def test_daemon_saves_what_the_workers_stage(
    group: TrainerGroup, client: ForgedClient, storage: LocalStorage
) -> None:
    staging = await start(group, storage, "save", "save", "save")
    await staging.check_committed()
    page = await slots(client)
    assert {(one.worker_id, one.owner, one.world_size) for one in page.slots} == {
        (name, "present", 2) for name in NAMES
    }
    assert page.used_bytes == sum(one.size_bytes for one in page.slots) > ROWS * 32
    assert listing.unfinished_saves(storage) == {}
    await group.finish(*NAMES)


async def test_failed_worker_leaves_an_emergency_checkpoint(
    group: TrainerGroup, client: ForgedClient, storage: LocalStorage
) -> None:
    staging = await start(group, storage)
    await staging.commit("save")
    await staging.do("keep", "keep")
    await client.request(EvictWorker(JOB, "b", "for the test"))
    [saved] = await emergencies(client, 1)
    step = staging.kept[-1]
    assert (saved.step, saved.worker_id) == (step, "b")
    check(storage, step)
    [failure] = await past(client, WorkerFailed)
    assert failure.worker_id == "b"
    metas = {meta.step: meta for meta in await client.checkpoints(JOB)}
    assert metas[step].checkpoint_type is CheckpointType.EMERGENCY
    assert metas[step].state is CheckpointState.COMPLETE
    assert metas[step].size_bytes == saved.size_bytes
    # What is on disk is needed in memory no more; the survivor keeps its slots.
    page = await until(client, lambda page: len(page.slots) == 2)
    assert {one.worker_id for one in page.slots} == {"a"}
    await group.over("b")
    await group.finish("a")


async def test_restarted_worker_resumes_from_memory_that_is_newer_than_the_disk(
    runner: DaemonRunner, group: TrainerGroup, client: ForgedClient, storage: LocalStorage
) -> None:
    staging = await start(group, storage, "keep")
    # A file stands where the directory should be, so nothing can be saved.
    await asyncio.to_thread(Path(storage.url).touch)
    for name in NAMES:
        await client.request(EvictWorker(JOB, name, "for the test"))
    await until(client, lambda page: {one.owner for one in page.slots} == {"failed"})
    await group.over(*NAMES)
    step, state = staging.kept[-1], {"rows": rows(0, 1, 0), "step": 0}
    worker = shared_worker("c", job=JOB)
    async with worker.session(runner.endpoint):
        assert await AsyncCheckpoints(storage.url, ranks=worker).resume(state) == step == worker.step
    assert state["step"] == step
    assert same(np.asarray(state["rows"].local), whole(step))  # type: ignore[attr-defined]
    [failed] = await facts(client, EmergencyCheckpointFailed, 1)
    assert failed.step == step
    assert "checkpoints" in failed.reason
    # The directory is there again, and the emergency checkpoint is saved.
    await asyncio.to_thread(Path(storage.url).unlink)
    await emergencies(client, 1)
    check(storage, step)


async def test_restarted_daemon_finds_slots_and_goes_on(
    runner: DaemonRunner, group: TrainerGroup, storage: LocalStorage
) -> None:
    staging = await start(group, storage, "keep")
    await runner.close()
    stray = next(Path(runner.config.data_dir).parent.glob("slots/*")) / f"{'0' * 32}.slot"
    stray.touch(mode=0o600)
    await runner.open()
    async with ForgedClient(runner.endpoint) as client:
        await until(client, lambda page: len(page.slots) == 4)
        await group.until(lambda: all(trainer.worker._session is not None for trainer in (group["a"], group["b"])))
        await staging.commit("save")
        assert not stray.exists()
    await group.finish(*NAMES)


async def test_save_waits_for_a_daemon_that_is_away(
    runner: DaemonRunner, group: TrainerGroup, storage: LocalStorage
) -> None:
    staging = await start(group, storage)
    await staging.commit("save")
    await runner.close()
    await staging.do("save")
    assert not any(handle.is_committed for handle in staging.handles[2:])
    await runner.open()
    await staging.check_committed()
    await group.finish(*NAMES)


async def test_worker_of_another_user_gets_its_slots_as_descriptors(
    group: TrainerGroup, client: ForgedClient, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(opened: OpenedSlots) -> list[Any]:
        raise PermissionError(errno.EACCES, "Permission denied", opened.paths[0])

    monkeypatch.setattr("forged.worker.host_slots._mapped", denied)
    staging = await start(group, storage, "save")
    await staging.check_committed()
    assert len((await slots(client)).slots) == 4
    await group.finish(*NAMES)


async def test_worker_that_cannot_reach_its_slots_gives_them_back(
    group: TrainerGroup, client: ForgedClient, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(opened: OpenedSlots) -> list[Any]:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", opened.paths[0])

    monkeypatch.setattr("forged.worker.host_slots._mapped", missing)
    staging = await start(group, storage, "save")
    await staging.check_committed()
    page = await slots(client)
    assert (page.slots, page.used_bytes) == ([], 0)
    await group.finish(*NAMES)


async def test_untrusted_workers_write_by_themselves_outside_of_the_roots(
    runner: DaemonRunner, group: TrainerGroup, client: ForgedClient, storage: LocalStorage, tmp_path: Path
) -> None:
    """As for workers of other users: their slots are read, not mapped, and only beneath the roots."""
    runner.daemon.slots._port = replace(runner.daemon.slots._port, is_trusted=lambda principal: False)
    staging = await start(group, storage)
    await staging.commit("save")
    [own] = {group[name].worker.incarnation for name in NAMES[:1]}
    save_id = listing.read_manifest(storage, staging.handles[0].prefix).save_id
    assert await refused(client, SaveSlots(JOB, "a", own, save_id)) == "slots_storage_denied"
    runner.daemon.catalog.book.table.roots = (str(tmp_path),)
    await asyncio.to_thread(listing.delete, storage, staging.handles[0].prefix)
    assert (await client.request(SaveSlots(JOB, "a", own, save_id))).size_bytes > ROWS * 32
    check(storage, int(staging.handles[0].prefix.removeprefix("step-")))
    await group.finish(*NAMES)


async def test_nothing_is_saved_where_a_swapped_link_leads(
    runner: DaemonRunner, group: TrainerGroup, client: ForgedClient, storage: LocalStorage, tmp_path: Path
) -> None:
    """A worker of another user owns its folder beneath the root, and replaces it by a link to one of the daemon's."""
    service, victim = runner.daemon.slots, tmp_path / "victim"
    service._port = replace(service._port, is_trusted=lambda principal: False)
    runner.daemon.catalog.book.table.roots = (str(tmp_path),)
    await asyncio.to_thread(victim.mkdir)
    await asyncio.to_thread(Path(storage.url).mkdir)
    await start(group, storage, "keep")
    save_id = next(one.save_id for one in (await slots(client)).slots if one.save_id)
    incarnation = group["a"].worker.incarnation
    with swapped(Path(storage.url), victim):
        for _ in range(20):
            with suppress(ForgedError):
                while not (await client.request(SaveSlots(JOB, "a", incarnation, save_id))).is_saved:
                    pass
    assert contents_of(victim) == {}
    await group.finish(*NAMES)


@pytest.mark.parametrize(
    "where", ["forged.checkpoint.storage.slot_files.encode", "forged.checkpoint.saving.publication.encode"]
)
async def test_slots_of_a_hostile_worker_do_not_end_the_daemon(
    group: TrainerGroup, client: ForgedClient, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A manifest that is nested as deeply as can be decoded cannot be encoded."""
    calls = []

    def encode(manifest: Manifest) -> bytes:
        calls.append(manifest)
        raise RecursionError("maximum recursion depth exceeded")

    await start(group, storage, "keep")
    monkeypatch.setattr(where, encode)
    await client.request(EvictWorker(JOB, "b", "for the test"))
    async with asyncio.timeout(PATIENCE_S):
        while len(calls) < 2:
            await asyncio.sleep(0.02)
    assert {one.owner for one in (await slots(client)).slots} == {"present", "failed"}
    await group.over("b")
    await group.finish("a")


async def test_emergency_checkpoint_of_untrusted_workers_is_touched_only_beneath_the_roots(
    runner: DaemonRunner, group: TrainerGroup, client: ForgedClient, storage: LocalStorage, tmp_path: Path
) -> None:
    service, book = runner.daemon.slots, runner.daemon.catalog.book
    service._port = replace(service._port, is_trusted=lambda principal: False)
    book.table.roots = (str(tmp_path),)
    await start(group, storage, "keep")
    await client.request(EvictWorker(JOB, "b", "for the test"))
    [saved] = await emergencies(client, 1)
    record = book.table.records[saved.checkpoint_id]
    assert not record.is_trusted
    assert book.table.location(record).root == str(tmp_path)
    await group.over("b")
    await group.finish("a")


async def test_emergency_checkpoint_waits_until_what_its_last_try_has_left_is_deleted(
    runner: DaemonRunner, group: TrainerGroup, client: ForgedClient, storage: LocalStorage
) -> None:
    """The deletion of the files would not stop at those of the next try."""
    book = runner.daemon.catalog.book
    staging = await start(group, storage, "keep")
    save_id = next(one.save_id for one in (await slots(client)).slots if one.save_id)
    step = staging.kept[-1]
    started = await client.request(
        StartCheckpoint(JOB, "", b"", 0, step, f"{storage.url}/step-{step:06d}", save_id, CheckpointType.EMERGENCY)
    )
    await asyncio.to_thread(Path(storage.url).mkdir)
    # No file is touched meanwhile.
    delete, runner.daemon.catalog.work.delete = runner.daemon.catalog.work.delete, lambda record: None  # type: ignore[method-assign]
    await client.request(FailCheckpoint(JOB, "", b"", started.checkpoint_id, "for the test"))
    runner.daemon.ledger.append(book.collection.sweep(started.checkpoint_id))
    await client.request(EvictWorker(JOB, "b", "for the test"))
    service = runner.daemon.slots
    async with asyncio.timeout(PATIENCE_S):
        while JOB not in service._saves._rescues or not service._saves._rescues[JOB].retry_at:
            await asyncio.sleep(0.02)
    assert listing.prefixes(storage) == []
    delete(book.table.records[started.checkpoint_id])
    [saved] = await emergencies(client, 1)
    assert saved.checkpoint_id != started.checkpoint_id
    check(storage, step)
    await group.over("b")
    await group.finish("a")


async def test_one_save_of_slots_runs_at_a_time(
    runner: DaemonRunner,
    group: TrainerGroup,
    client: ForgedClient,
    storage: LocalStorage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second one would replace the files that the manifest of the first one names."""
    running = [0, 0]
    save_in_thread = LocalHeldSlots._save

    def counting(held: LocalHeldSlots, *arguments: Any, **options: Any) -> SavedSlots:
        running[:] = running[0] + 1, max(running[1], running[0] + 1)
        try:
            return save_in_thread(held, *arguments, **options)
        finally:
            running[0] -= 1

    monkeypatch.setattr(LocalHeldSlots, "_save", counting)
    staging = await start(group, storage, "keep")
    save_id = next(one.save_id for one in (await slots(client)).slots if one.save_id)
    incarnations = {name: group[name].worker.incarnation for name in NAMES}
    await client.request(EvictWorker(JOB, "b", "for the test"))
    asked = [SaveSlots(JOB, name, incarnation, save_id) for name, incarnation in incarnations.items()]
    await asyncio.gather(*(client.request(request) for request in asked * 3))
    await until(client, lambda page: len(page.slots) == 2)
    assert running == [0, 1]
    check(storage, staging.kept[-1])
    await group.over("b")
    await group.finish("a")


async def test_only_the_rank_that_begins_a_save_begins_it_again(
    group: TrainerGroup, client: ForgedClient, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, save_in_thread = list[str](), LocalHeldSlots._save

    def fail_once(held: LocalHeldSlots, *arguments: Any, **options: Any) -> SavedSlots:
        tries.append(held.save_id)
        if len(tries) == 1:
            raise RequestRefused("disk_full", "for the test", "")
        return save_in_thread(held, *arguments, **options)

    monkeypatch.setattr(LocalHeldSlots, "_save", fail_once)
    staging = await start(group, storage, "keep")
    save_id = next(one.save_id for one in (await slots(client)).slots if one.save_id)
    begin, ask = (SaveSlots(JOB, name, group[name].worker.incarnation, save_id, begins=name == "a") for name in NAMES)
    assert not (await client.request(ask)).is_saved
    assert tries == []
    assert await refused(client, begin) == "disk_full"
    for _ in range(2):
        assert await refused(client, ask) == "disk_full"
    assert tries == [save_id]
    async with asyncio.timeout(PATIENCE_S):
        while not (await client.request(begin)).is_saved:
            pass
    assert (await client.request(ask)).is_saved
    assert tries == [save_id] * 2
    check(storage, staging.kept[-1])
    await group.finish(*NAMES)


async def test_slots_of_a_worker_that_fails_during_a_look_are_kept(
    runner: DaemonRunner,
    group: TrainerGroup,
    client: ForgedClient,
    storage: LocalStorage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = runner.daemon.slots
    staging = await start(group, storage, "keep")

    async def read_before_the_save_was_staged(slot_ids: list[str]) -> list[SlotContents]:
        monkeypatch.undo()
        service.table.end(JOB, SlotOwner.FAILED, 1.0, 0, lambda record: record.worker_id == "b")
        return []

    monkeypatch.setattr(service._agent, "read", read_before_the_save_was_staged)
    await service._look_after(JOB)
    service._changed.set()
    [saved] = await emergencies(client, 1)
    assert saved.step == staging.kept[-1]
    await group.finish(*NAMES)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_slots_whose_worker_goes_while_they_are_made_are_deleted(
    runner: DaemonRunner,
    group: TrainerGroup,
    client: ForgedClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_cancelled: bool,
) -> None:
    service = runner.daemon.slots
    begun, is_gone, made = asyncio.Event(), asyncio.Event(), asyncio.Event()
    make = service._agent.make

    async def make_late(slot_ids: list[str], size_bytes: int) -> list[str]:
        begun.set()
        with anyio.CancelScope(shield=True):
            await is_gone.wait()
            paths = await make(slot_ids, size_bytes)
        made.set()
        await asyncio.sleep(0)
        return paths

    monkeypatch.setattr(service._agent, "make", make_late)
    group.start(*NAMES)
    await group.world_of(*NAMES)
    incarnation = group["b"].worker.incarnation
    request = OpenSlots(JOB, "b", incarnation, 1 << 20, str(tmp_path))
    opening = asyncio.create_task(client.request(request, timeout_s=0.5 if is_cancelled else PATIENCE_S))
    await begun.wait()
    if is_cancelled:
        with pytest.raises(ForgedError):
            await opening
    else:
        await client.request(EvictWorker(JOB, "b", "for the test"))
        await until(client, lambda page: not page.slots)
    is_gone.set()
    await made.wait()
    if not is_cancelled:
        with pytest.raises(RequestRefused, match="worker b is gone"):
            await opening
        await group.over("b")
    await until(client, lambda page: not page.slots and not slot_files(tmp_path))
    await group.finish(*(NAMES if is_cancelled else ("a",)))


async def test_save_that_counts_as_failed_is_complete_as_soon_as_the_daemon_has_saved_it(
    group: TrainerGroup, client: ForgedClient, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, save_in_thread = threading.Event(), threading.Event(), LocalHeldSlots._save

    def save_late(held: LocalHeldSlots, *arguments: Any, **options: Any) -> SavedSlots:
        begun.set()
        goes_on.wait(PATIENCE_S)
        return save_in_thread(held, *arguments, **options)

    monkeypatch.setattr(LocalHeldSlots, "_save", save_late)
    staging = await start(group, storage, "save")
    await asyncio.to_thread(begun.wait, PATIENCE_S)
    # The workers wait no longer, and do not know how it ends.
    for handle in staging.handles:
        handle.cancel()
        with pytest.raises(CheckpointException):
            await handle.committed()
    [started] = await client.checkpoints(JOB)
    await client.request(FailCheckpoint(JOB, "", b"", started.checkpoint_id, "it took too long"))
    goes_on.set()
    [completed] = await facts(client, CheckpointCompleted, 1)
    assert (completed.checkpoint_id, completed.parent_id) == (started.checkpoint_id, None)
    check(storage, started.step)
    await group.finish(*NAMES)


async def test_damaged_slots_are_given_up_and_the_save_before_is_saved(
    runner: DaemonRunner,
    group: TrainerGroup,
    client: ForgedClient,
    storage: LocalStorage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, tries = runner.daemon.slots._agent, list[int]()
    hold = agent.hold
    monkeypatch.setattr("forged.host.slot_saves.RETRYING", RetryPolicy(attempts=None, delay_s=0.01))
    monkeypatch.setattr("forged.host.service.LOOK_AFTER_S", 0.02)
    staging = await start(group, storage, "keep", "keep")
    damaged = staging.kept[-1]

    async def hold_healthy(staged: StagedCheckpoint, *, is_trusted: bool) -> Any:
        tries.append(staged.step)
        return None if staged.step == damaged else await hold(staged, is_trusted=is_trusted)

    monkeypatch.setattr(agent, "hold", hold_healthy)
    await client.request(EvictWorker(JOB, "b", "for the test"))
    [saved] = await emergencies(client, 1)
    assert saved.step == staging.kept[0] < damaged
    [failed] = await past(client, EmergencyCheckpointFailed)
    assert (failed.step, failed.worker_id) == (damaged, "b")
    # Nothing is tried any more, and the slots of the failed worker are freed.
    page = await until(client, lambda page: len(page.slots) == 2)
    assert {one.worker_id for one in page.slots} == {"a"}
    assert tries.count(damaged) == GIVEN_UP_AFTER * HOLDS_MAX
    await group.over("b")
    await group.finish("a")


async def test_emergency_checkpoint_that_the_daemon_may_not_write_is_told_once(
    runner: DaemonRunner,
    group: TrainerGroup,
    client: ForgedClient,
    storage: LocalStorage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = runner.daemon.slots
    service._port = replace(service._port, is_trusted=lambda principal: False)
    staging = await start(group, storage, "keep")
    monkeypatch.setattr("forged.host.service.LOOK_AFTER_S", 0.02)
    looks, look_after = list[str](), service._look_after

    async def look(job: str) -> None:
        await look_after(job)
        looks.append(job)

    monkeypatch.setattr(service, "_look_after", look)
    await client.request(EvictWorker(JOB, "b", "for the test"))
    await facts(client, EmergencyCheckpointFailed, 1)
    seen = len(looks)
    async with asyncio.timeout(PATIENCE_S):
        while len(looks) < seen + 3:
            await asyncio.sleep(0.02)
    [failed] = await past(client, EmergencyCheckpointFailed)
    assert (failed.step, failed.worker_id) == (staging.kept[-1], "b")
    assert f"may not write to {storage.url}" in failed.reason
    # What is in memory can be resumed from, and is kept.
    assert {one.owner for one in (await slots(client)).slots} == {"present", "failed"}
    await group.over("b")
    await group.finish("a")


async def test_warning_is_logged_again_when_its_cause_comes_back(
    runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, log = runner.daemon.slots, RecordingLog()
    monkeypatch.setattr(service, "_log", log)
    is_failing = [True]

    async def look_after(job: str) -> None:
        if is_failing[0]:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(service, "_look_after", look_after)
    for is_failing[0], warnings in ((True, 1), (True, 1), (False, 1), (True, 2)):
        await service._look_after_one(JOB)
        assert len(log.of("could not look after slots")) == warnings


async def test_only_slots_of_the_page_are_read(
    runner: DaemonRunner,
    group: TrainerGroup,
    client: ForgedClient,
    storage: LocalStorage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await start(group, storage, "keep")
    agent, asked = runner.daemon.slots._agent, list[list[str]]()
    read = agent.read

    async def counted_read(slot_ids: list[str]) -> list[SlotContents]:
        asked.append(slot_ids)
        return await read(slot_ids)

    whole = await slots(client)
    monkeypatch.setattr(agent, "read", counted_read)
    pages = [await client.request(ListSlots(limit=3))]
    pages.append(await client.request(ListSlots(after=pages[0].slots[-1].slot_id)))
    assert ([page.more for page in pages], [len(ids) for ids in asked]) == ([True, False], [3, 1])
    assert [one for page in pages for one in page.slots] == whole.slots
    assert sum(one.step is not None for one in whole.slots) == 2
    await group.finish(*NAMES)


async def test_save_on_a_file_system_that_hangs_is_given_up_and_tried_again_when_it_answers(
    group: TrainerGroup, client: ForgedClient, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, answers, save_in_thread = list[str](), threading.Event(), LocalHeldSlots._save

    def hang(held: LocalHeldSlots, storage_path: str, token: Any, **options: Any) -> SavedSlots:
        begun.append(storage_path)
        answers.wait(PATIENCE_S)
        return save_in_thread(held, storage_path, token, **options)

    monkeypatch.setattr(LocalHeldSlots, "_save", hang)
    monkeypatch.setattr("forged.host.local_agent.SAVE_IDLE_S", 0.05)
    staging = await start(group, storage, "keep")
    save_id = next(one.save_id for one in (await slots(client)).slots if one.save_id)
    request = SaveSlots(JOB, "a", group["a"].worker.incarnation, save_id)
    code = ""
    async with asyncio.timeout(PATIENCE_S):
        while code != "slots_storage_hangs":
            try:
                await client.request(request)
            except ForgedError as error:
                code = error.code
    # A second try would write files of the same names.
    assert len(begun) == 1
    # The thread that hangs keeps its slots, and ends when the file system answers.
    monkeypatch.setattr("forged.host.local_agent.SAVE_IDLE_S", PATIENCE_S)
    answers.set()
    async with asyncio.timeout(PATIENCE_S):
        is_saved = False
        while not is_saved:
            with suppress(ForgedError):
                is_saved = (await client.request(request)).is_saved
    check(storage, staging.kept[-1])
    await group.finish(*NAMES)


async def test_slots_that_were_opened_after_the_job_was_reopened_do_not_end_with_it(
    runner: DaemonRunner, group: TrainerGroup, client: ForgedClient, storage: LocalStorage
) -> None:
    """The fact that the job was aborted is handled late."""
    service = runner.daemon.slots
    await start(group, storage, "keep")
    opened_after = {slot.opened_after for slot in service.table.records.values()}
    aborted = partial(Record.of, JobAborted("for the test", 1), at=1.0, job=JOB)
    service._ended(aborted(fact_id=min(opened_after)))
    assert {slot.owner for slot in service.table.records.values()} == {SlotOwner.PRESENT}
    service._ended(aborted(fact_id=max(opened_after) + 1))
    assert {slot.owner for slot in service.table.records.values()} == {SlotOwner.FAILED}
    await group.finish(*NAMES)


async def test_removed_job_frees_its_slots(
    group: TrainerGroup, client: ForgedClient, storage: LocalStorage, tmp_path: Path
) -> None:
    await start(group, storage, "keep")
    await client.request(RemoveJob(JOB, force=True))
    await until(client, lambda page: not page.slots and not page.used_bytes)
    assert slot_files(tmp_path) == []
    await group.over(*NAMES)


async def test_requests_of_others_are_refused(
    group: TrainerGroup, client: ForgedClient, storage: LocalStorage, tmp_path: Path
) -> None:
    await start(group, storage, "keep")
    own = group["a"].worker
    where = str(tmp_path)
    assert await refused(client, OpenSlots("other", "a", own.incarnation, 1 << 20, where)) == "job_unknown"
    assert await refused(client, OpenSlots(JOB, "a", b"0" * 16, 1 << 20, where)) == "worker_gone"
    assert await refused(client, OpenSlots(JOB, "a", own.incarnation, 1, where)) == "slot_size_invalid"
    for path in ("", "relative", "/a/../b", "s3://bucket", "/" + "x" * 5000):
        assert await refused(client, OpenSlots(JOB, "a", own.incarnation, 1 << 20, path)) == "slot_storage_invalid"
    assert await refused(client, OpenSlots(JOB, "a", own.incarnation, 1 << 50, where)) == "slots_full"
    assert await refused(client, SaveSlots(JOB, "a", b"0" * 16, "00000000")) == "slots_unknown"
    assert await refused(client, SaveSlots(JOB, "a", own.incarnation, "00000000")) == "slots_incomplete"
    await group.finish(*NAMES)


async def test_daemon_without_room_lets_workers_use_their_own_memory(
    runner: DaemonRunner, storage: LocalStorage
) -> None:
    await runner.reopen(slot_bytes_max=1 << 20)
    async with group_at(runner.endpoint, min_workers=1) as group, ForgedClient(runner.endpoint) as client:
        staging = await start(group, storage)
        staging.wanted = ["save", "keep"]
        await group.until(lambda: not staging.wanted and len(staging.handles) == 2)
        for handle in staging.handles:
            await handle.committed()
        assert staging.kept == []
        assert (await slots(client)).slots == []
        await group.finish(*NAMES)
