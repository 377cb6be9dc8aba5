from __future__ import annotations

from typing import Any
from unittest.mock import patch

import anyio
import pytest

from forged.auth.model import Principal, Role
from forged.catalog.book.saves import FAILED_KEPT_S, WRITER_GONE_S, WRITING_S_MAX
from forged.catalog.files import file_work
from forged.catalog.files.file_work import TICK_S
from forged.catalog.files.work_queue import WorkQueue
from forged.catalog.messages import (
    CheckpointCollected,
    CheckpointCompacted,
    CheckpointCorrupted,
    CheckpointFailed,
    CheckpointOperationFailed,
    CheckpointProgress,
    CheckpointRepaired,
    CollectCheckpoints,
    Collection,
    CompactCheckpoint,
    CompleteCheckpoint,
    DeleteCheckpoint,
    FailCheckpoint,
    HoldCheckpoint,
    ListCheckpoints,
    ReportCorruptCheckpoint,
    ReportRestore,
    ShowCheckpoint,
)
from forged.catalog.ports import CheckpointLocation
from forged.errors import RequestRefused, Unavailable
from forged.jobs.model import CreateJob
from forged.kernel.messages import Call, Decision
from tests.catalog.catalog_fixture import (
    FOLDER,
    INCARNATION,
    JOB,
    OWN_USER,
    TENANT,
    WORKER,
    Catalog,
    catalog,
    incremental,
    over_days,
)
from tests.catalog.simulated_files import SimulatedCheckpoint, SimulatedFiles
from tests.faulty_store import FaultyStore, full
from tests.kernel_fixture import OPERATOR
from tests.telemetry.recording_log import RecordingLog

SOON_S = 3 * TICK_S


async def save(one: Catalog, files: SimulatedFiles, step: int, by: Principal = OWN_USER, **changes: Any) -> str:
    """A worker writes the checkpoint of a step and reports it."""
    meta = await one.start(step, by=by, **changes)
    path = changes.get("storage_path", f"{FOLDER}/step-{step:08d}")
    files.stored[path] = SimulatedCheckpoint(f"{step:08x}", JOB)
    await one.complete(meta.checkpoint_id)
    return meta.checkpoint_id


def left(files: SimulatedFiles) -> list[str]:
    return [path.rpartition("/")[2] for path in files.stored]


@over_days
async def test_superseded_checkpoints_and_their_files_go_by_themselves() -> None:
    files = SimulatedFiles()
    async with catalog(settings={"checkpoint_keep": 2}, files=files) as one:
        for step in range(1, 6):
            await save(one, files, step)
        await anyio.sleep(SOON_S)
        assert left(files) == ["step-00000004", "step-00000005"]
        assert await one.listed() == {5: "complete", 4: "complete"}
        assert list(one.service.book.table.tombstones()) == []


@over_days
async def test_files_are_deleted_only_after_the_tombstone_is_durable() -> None:
    store, files = FaultyStore(), SimulatedFiles()
    async with catalog(store, files=files) as one:
        first = await save(one, files, 1)
        await one.kernel.settle()
        store.block()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.ask, DeleteCheckpoint(JOB, first), OPERATOR)
            await anyio.sleep(SOON_S)
            assert (left(files), files.calls) == (["step-00000001"], [])
            store.unblock()
        await files.deleted.wait()
        assert left(files) == []


@over_days
async def test_report_of_damage_deletes_no_files_of_a_tombstone_that_is_not_durable() -> None:
    store, files = FaultyStore(), SimulatedFiles()
    async with catalog(store, files=files) as one:
        first = await save(one, files, 1)
        await one.kernel.settle()
        store.block()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.ask, ReportCorruptCheckpoint(JOB, first, "bad bytes"))
            await store.entered.wait()
            tasks.start_soon(one.ask, DeleteCheckpoint(JOB, first), OPERATOR)
            await anyio.sleep(1.0)
            # The commit of the report ends; that of the tombstone, which is in memory already, waits.
            store.unblock()
            store.block()
            await anyio.sleep(SOON_S)
            assert len(one.kernel.facts(CheckpointCorrupted)) == 1
            assert left(files) == ["step-00000001"]
            store.unblock()
        await files.deleted.wait()


@over_days
async def test_tombstone_whose_commit_fails_deletes_nothing() -> None:
    store, files = FaultyStore(), SimulatedFiles()
    async with catalog(store, settings={"checkpoint_keep": 1}, files=files) as one:
        await save(one, files, 1)
        await save(one, files, 2, by=TENANT, storage_path="/x/step-2")
        store.commit_error = full()
        await anyio.sleep(SOON_S)
        assert len(files.stored) == 2
        assert files.calls == []
        store.commit_error = None
        await anyio.sleep(SOON_S)
        assert left(files) == ["step-2"]


@over_days
async def test_deletion_continues_after_a_restart() -> None:
    store, files = FaultyStore(), SimulatedFiles(failing={FOLDER})
    async with catalog(store, settings={"checkpoint_keep": 1}, files=files) as one:
        for step in (1, 2, 3):
            await save(one, files, step)
        await anyio.sleep(SOON_S)
        assert len(one.kernel.facts(CheckpointCollected)) == 2
    files.failing.clear()
    async with catalog(store, files=files) as one:
        await anyio.sleep(SOON_S)
        assert left(files) == ["step-00000003"]
        assert list(one.service.book.table.tombstones()) == []
    async with catalog(store, files=SimulatedFiles()) as one:
        await anyio.sleep(SOON_S)
        assert await one.listed() == {3: "complete"}


@over_days
async def test_storage_that_fails_delays_only_its_own_checkpoints() -> None:
    files = SimulatedFiles(failing={"/broken"})
    async with catalog(settings={"checkpoint_keep": 1}, files=files) as one:
        await save(one, files, 1, storage_path="/broken/step-1")
        await save(one, files, 2)
        await save(one, files, 3)
        await anyio.sleep(SOON_S)
        assert left(files) == ["step-1", "step-00000003"]
        tries = sum(path == "/broken/step-1" for _, path in files.calls)
        await anyio.sleep(3600.0)
        # The pauses grow to ten minutes.
        assert sum(path == "/broken/step-1" for _, path in files.calls) - tries < 20
        files.failing.clear()
        await anyio.sleep(700.0)
        assert left(files) == ["step-00000003"]


@over_days
async def test_checkpoint_whose_files_are_needed_delays_no_other() -> None:
    class Needed(SimulatedFiles):
        async def delete(self, location: CheckpointLocation) -> None:
            if location.path.endswith(("1", "2", "3")):
                raise Unavailable("checkpoint_needed", "another checkpoint uses its files")
            await super().delete(location)

    files = Needed()
    async with catalog(settings={"checkpoint_keep": 1}, files=files) as one:
        for step in range(1, 7):
            await save(one, files, step)
            await anyio.sleep(SOON_S)
        assert left(files) == [f"step-{step:08d}" for step in (1, 2, 3, 6)]


@over_days
async def test_slow_storage_delays_no_other() -> None:
    slow, files = anyio.Event(), SimulatedFiles()

    class Slow(SimulatedFiles):
        async def delete(self, location: CheckpointLocation) -> None:
            if location.path.startswith("/slow"):
                await slow.wait()
            await super().delete(location)

    files = Slow()
    async with catalog(settings={"checkpoint_keep": 1}, files=files) as one:
        await save(one, files, 1, storage_path="/slow/step-1")
        await save(one, files, 2)
        await save(one, files, 3)
        await anyio.sleep(SOON_S)
        assert left(files) == ["step-1", "step-00000003"]
        slow.set()
        await anyio.sleep(SOON_S)
        assert left(files) == ["step-00000003"]


@over_days
async def test_tombstone_in_a_missing_folder_is_kept_for_a_week(monkeypatch: pytest.MonkeyPatch) -> None:
    # A week of ticks takes a minute.
    monkeypatch.setattr(file_work, "MISSING_KEPT_S", 3600.0)
    files = SimulatedFiles(missing={FOLDER})
    async with catalog(settings={"checkpoint_keep": 1}, files=files) as one:
        for step in (1, 2):
            await save(one, files, step)
        await anyio.sleep(SOON_S)
        assert len(list(one.service.book.table.tombstones())) == 1
        await anyio.sleep(file_work.MISSING_KEPT_S / 2)
        assert len(list(one.service.book.table.tombstones())) == 1
        await anyio.sleep(file_work.MISSING_KEPT_S)
        assert list(one.service.book.table.tombstones()) == []


@over_days
async def test_files_of_another_save_stay() -> None:
    files = SimulatedFiles()
    async with catalog(files=files) as one:
        first = await save(one, files, 1)
        files.stored[f"{FOLDER}/step-00000001"] = SimulatedCheckpoint("ffffffff", JOB)
        await one.ask(DeleteCheckpoint(JOB, first), OPERATOR)
        await anyio.sleep(SOON_S)
        assert left(files) == ["step-00000001"]
        assert list(one.service.book.table.tombstones()) == []


@over_days
async def test_tenant_has_no_file_of_another_job_deleted_by_naming_it() -> None:
    """Both jobs save beneath one root, and the tenant knows the victim's paths and save ids."""
    files = SimulatedFiles()
    async with catalog(files=files, roots=("/ckpt",)) as one:
        await one.ask(CreateJob("hostile"), OPERATOR)
        one.registered.add(("hostile", WORKER, INCARNATION))
        tenant = Principal("hostile", Role.OPERATOR, frozenset({"hostile"}))
        await save(one, files, 1, by=TENANT)
        # The second one is being written.
        await one.start(2, by=TENANT)
        files.stored[f"{FOLDER}/step-00000002"] = SimulatedCheckpoint("00000002", JOB, is_whole=False)
        for step in (1, 2):
            claimed = await one.start(step, job="hostile", by=tenant)
            await one.ask(FailCheckpoint("hostile", WORKER, INCARNATION, claimed.checkpoint_id, "so I say"), tenant)
            await one.ask(DeleteCheckpoint("hostile", claimed.checkpoint_id), tenant)
        await anyio.sleep(SOON_S)
        assert left(files) == ["step-00000001", "step-00000002"]
        assert await one.listed() == {2: "creating", 1: "complete"}
        assert await one.listed("hostile") == {}


@over_days
async def test_victims_files_are_deleted_although_a_tenant_names_them() -> None:
    files = SimulatedFiles()
    async with catalog(files=files, roots=("/ckpt",)) as one:
        await one.ask(CreateJob("hostile"), OPERATOR)
        one.registered.add(("hostile", WORKER, INCARNATION))
        tenant = Principal("hostile", Role.WORKER, frozenset({"hostile"}))
        claimed = await one.start(1, job="hostile", by=tenant)
        await one.ask(CompleteCheckpoint("hostile", WORKER, INCARNATION, claimed.checkpoint_id, 1, 1.0), tenant)
        first = await save(one, files, 1, by=TENANT)
        await one.ask(DeleteCheckpoint(JOB, first), OPERATOR)
        await anyio.sleep(SOON_S)
        assert left(files) == []


@over_days
async def test_checkpoint_whose_writer_is_gone_is_completed_if_it_is_there() -> None:
    files = SimulatedFiles()
    async with catalog(files=files) as one:
        await one.start(1)
        files.stored[f"{FOLDER}/step-00000001"] = SimulatedCheckpoint("00000001", JOB, 77)
        await one.start(2)
        one.registered.clear()
        await anyio.sleep(WRITER_GONE_S / 2)
        assert await one.listed() == {2: "creating", 1: "creating"}
        await anyio.sleep(WRITER_GONE_S)
        assert await one.listed() == {2: "corrupted", 1: "complete"}
        (meta,) = [one for one in (await one.ask(ListCheckpoints(JOB))).checkpoints if one.step == 1]
        assert meta.size_bytes == 77
        assert "worker w1, which was saving it, is gone" in one.kernel.facts(CheckpointFailed)[0].reason


@over_days
async def test_checkpoint_whose_writer_is_gone_builds_on_what_its_manifest_says() -> None:
    files = SimulatedFiles()
    async with catalog(files=files) as one:
        first = await save(one, files, 1)
        await save(one, files, 2)
        for step, parent_path in ((3, f"{FOLDER}/step-00000001"), (4, ""), (5, f"{FOLDER}/step-00000005")):
            await one.start(step, **incremental(2))
            path = f"{FOLDER}/step-{step:08d}"
            files.stored[path] = SimulatedCheckpoint(f"{step:08x}", JOB, parent_path=parent_path)
        one.registered.clear()
        await anyio.sleep(WRITER_GONE_S + SOON_S)
        found = {meta.step: meta.parent_id for meta in (await one.ask(ListCheckpoints(JOB))).checkpoints}
        assert (found[3], found[4]) == (first, None)
        assert await one.listed() == dict.fromkeys((5, 4, 3, 2, 1), "complete")


@over_days
async def test_base_of_a_save_whose_writer_is_gone_goes_when_the_save_has_failed() -> None:
    files = SimulatedFiles()
    async with catalog(settings={"checkpoint_keep": 1}, files=files) as one:
        await save(one, files, 1)
        await one.start(2, **incremental(1))
        files.stored[f"{FOLDER}/step-00000002"] = SimulatedCheckpoint("00000002", JOB, is_whole=False)
        await save(one, files, 3)
        await anyio.sleep(WRITER_GONE_S)
        assert await one.listed() == {3: "complete", 2: "creating", 1: "complete"}
        one.registered.clear()
        await anyio.sleep(WRITER_GONE_S + FAILED_KEPT_S + SOON_S)
        assert (left(files), await one.listed()) == (["step-00000003"], {3: "complete"})


@over_days
async def test_checkpoint_that_takes_too_long_counts_as_failed_and_may_complete_late() -> None:
    files = SimulatedFiles()
    async with catalog(files=files) as one:
        meta = await one.start(1)
        files.stored[f"{FOLDER}/step-00000001"] = SimulatedCheckpoint("00000001", JOB, is_whole=False)
        await anyio.sleep(WRITING_S_MAX + SOON_S)
        assert await one.listed() == {1: "corrupted"}
        # Its writer lives: nothing is deleted while it may be written.
        await anyio.sleep(3 * FAILED_KEPT_S)
        assert left(files) == ["step-00000001"]
        await one.complete(meta.checkpoint_id)
        assert await one.listed() == {1: "complete"}


@over_days
async def test_no_file_of_a_failed_save_survives_the_sweep() -> None:
    files = SimulatedFiles()
    async with catalog(files=files) as one:
        other = b"o" * 16
        one.registered.add((JOB, "w2", other))
        reported = await one.start(1)
        await one.start(2, worker_id="w2", incarnation=other)
        for step in (1, 2):
            files.stored[f"{FOLDER}/step-{step:08d}"] = SimulatedCheckpoint(f"{step:08x}", JOB, is_whole=False)
        await one.fail(reported.checkpoint_id)
        one.registered.remove((JOB, "w2", other))
        await anyio.sleep(FAILED_KEPT_S / 2)
        assert await one.listed() == {2: "corrupted", 1: "corrupted"}
        assert len(files.stored) == 2
        await anyio.sleep(FAILED_KEPT_S)
        assert (files.stored, await one.listed()) == ({}, {})
        assert {fact.rule for fact in one.kernel.facts(CheckpointCollected)} == {"failed"}


@over_days
async def test_files_of_a_failed_save_that_is_tried_again_are_not_deleted() -> None:
    files = SimulatedFiles()
    async with catalog(files=files) as one:
        meta = await one.start(1)
        await one.fail(meta.checkpoint_id)
        files.stored[f"{FOLDER}/step-00000001"] = SimulatedCheckpoint("00000001", JOB, is_whole=False)
        for _ in range(3):
            await anyio.sleep(FAILED_KEPT_S / 2)
            assert (await one.start(1)).checkpoint_id == meta.checkpoint_id
        await one.complete(meta.checkpoint_id)
        await anyio.sleep(FAILED_KEPT_S + SOON_S)
        assert (await one.listed(), left(files)) == ({1: "complete"}, ["step-00000001"])


@over_days
async def test_failed_save_that_begins_again_while_its_files_are_looked_for_is_not_swept() -> None:
    files = SimulatedFiles()
    async with catalog(files=files) as one:
        meta = await one.start(1)
        await one.fail(meta.checkpoint_id)
        files.delay_s = 4 * TICK_S
        await anyio.sleep(FAILED_KEPT_S + 2 * TICK_S)
        assert files.calls == [("find", f"{FOLDER}/step-00000001")]
        await one.start(1)
        await anyio.sleep(FAILED_KEPT_S / 2)
        assert await one.listed() == {1: "corrupted"}
        files.stored[f"{FOLDER}/step-00000001"] = SimulatedCheckpoint("00000001", JOB)
        await one.complete(meta.checkpoint_id)
        assert (await one.listed(), left(files)) == ({1: "complete"}, ["step-00000001"])


@over_days
async def test_failed_save_whose_manifest_appears_is_completed_by_the_sweep() -> None:
    files = SimulatedFiles()
    async with catalog(files=files) as one:
        meta = await one.start(1)
        await one.fail(meta.checkpoint_id)
        files.stored[f"{FOLDER}/step-00000001"] = SimulatedCheckpoint("00000001", JOB)
        await anyio.sleep(FAILED_KEPT_S + SOON_S)
        assert (await one.listed(), left(files)) == ({1: "complete"}, ["step-00000001"])


@over_days
async def test_failed_save_that_the_daemon_may_not_touch_is_given_to_a_worker() -> None:
    files = SimulatedFiles()
    async with catalog(files=files) as one:
        meta = await one.start(1, by=TENANT)
        await one.fail(meta.checkpoint_id)
        await anyio.sleep(FAILED_KEPT_S + SOON_S)
        completed = await one.complete((await one.start(2, by=TENANT)).checkpoint_id)
        assert [one.checkpoint_id for one in completed.delete] == [meta.checkpoint_id]
        assert files.calls == []


@over_days
async def test_hold_ends_by_itself() -> None:
    files = SimulatedFiles()
    async with catalog(settings={"checkpoint_keep": 1}, files=files) as one:
        held = await save(one, files, 1)
        await one.ask(HoldCheckpoint(JOB, held, "a reader", 300.0))
        await save(one, files, 2)
        await anyio.sleep(200.0)
        await one.ask(HoldCheckpoint(JOB, held, "a reader", 300.0))
        await anyio.sleep(200.0)
        assert len(files.stored) == 2
        await anyio.sleep(150.0)
        assert left(files) == ["step-00000002"]


@over_days
async def test_hold_begins_anew_after_a_restart() -> None:
    store, files = FaultyStore(), SimulatedFiles()
    async with catalog(store, settings={"checkpoint_keep": 1}, files=files) as one:
        held = await save(one, files, 1)
        await one.ask(HoldCheckpoint(JOB, held, "a reader", 300.0))
        await save(one, files, 2)
        await anyio.sleep(250.0)
    async with catalog(store, files=files) as one:
        await anyio.sleep(250.0)
        assert len(files.stored) == 2
        await anyio.sleep(100.0)
        assert left(files) == ["step-00000002"]


@over_days
async def test_scrub_verifies_the_oldest_first_and_marks_damage() -> None:
    files = SimulatedFiles()
    async with catalog(files=files, scrub_bytes_per_s=10) as one:
        for step in (1, 2, 3):
            await save(one, files, step)
        files.stored[f"{FOLDER}/step-00000002"].is_damaged = True
        await anyio.sleep(120.0)
        verified = [path.rpartition("/")[2] for operation, path in files.calls if operation == "verify"]
        assert verified[:3] == ["step-00000001", "step-00000002", "step-00000003"]
        assert await one.listed() == {3: "complete", 2: "corrupted", 1: "complete"}
        assert [fact.reason for fact in one.kernel.facts(CheckpointCorrupted)] == ["bad bytes"]
        calls = len(files.calls)
        await anyio.sleep(3600.0)
        assert len(files.calls) <= calls + 1, "a verified checkpoint is verified again after a day"


@over_days
async def test_scrub_does_not_take_a_missing_storage_for_damage() -> None:
    files = SimulatedFiles()
    async with catalog(files=files, scrub_bytes_per_s=1000) as one:
        await save(one, files, 1)
        files.missing.add(FOLDER)
        await anyio.sleep(3600.0)
        assert await one.listed() == {1: "complete"}
        files.missing.clear()
        await anyio.sleep(3600.0)
        (meta,) = (await one.ask(ListCheckpoints(JOB))).checkpoints
        assert meta.verified_at is not None


@over_days
async def test_sound_checkpoint_that_was_reported_as_corrupt_is_offered_again() -> None:
    files = SimulatedFiles()
    async with catalog(files=files) as one:
        sound, bad = await save(one, files, 1), await save(one, files, 2)
        files.stored[f"{FOLDER}/step-00000002"].is_damaged = True
        for checkpoint_id in (sound, bad):
            await one.ask(ReportCorruptCheckpoint(JOB, checkpoint_id, "a checksum differs"))
        assert (await one.points()).points == []
        await anyio.sleep(SOON_S)
        assert [point.meta.step for point in (await one.points()).points] == [1]
        assert [fact.checkpoint_id for fact in one.kernel.facts(CheckpointRepaired)] == [sound]


@over_days
async def test_damaged_checkpoint_with_a_healthy_copy_is_repaired() -> None:
    files = SimulatedFiles()
    async with catalog(files=files, scrub_bytes_per_s=100) as one:
        repairable, lost = await save(one, files, 1), await save(one, files, 2)
        for step in (1, 2):
            files.stored[f"{FOLDER}/step-{step:08d}"].is_damaged = True
        files.stored[f"{FOLDER}/step-00000001"].has_copy = True
        await anyio.sleep(200.0)
        assert await one.listed() == {2: "corrupted", 1: "complete"}
        assert {fact.checkpoint_id for fact in one.kernel.facts(CheckpointCorrupted)} == {repairable, lost}
        assert [fact.checkpoint_id for fact in one.kernel.facts(CheckpointRepaired)] == [repairable]


@over_days
async def test_corrupted_checkpoint_from_which_a_job_is_restored_is_verified_again() -> None:
    """An operator has brought its files back."""
    files = SimulatedFiles()
    async with catalog(files=files, scrub_bytes_per_s=100) as one:
        first = await save(one, files, 1)
        stored = files.stored[f"{FOLDER}/step-00000001"]
        stored.is_damaged = True
        await anyio.sleep(200.0)
        assert await one.listed() == {1: "corrupted"}
        stored.is_damaged = False
        await one.ask(ReportRestore(JOB, WORKER, INCARNATION, first, 1, 1.0, 10))
        await anyio.sleep(200.0)
        assert await one.listed() == {1: "complete"}


@over_days
async def test_checkpoint_that_a_job_has_read_from_copies_is_repaired() -> None:
    files = SimulatedFiles()
    async with catalog(files=files) as one:
        first = await save(one, files, 1)
        stored = files.stored[f"{FOLDER}/step-00000001"]
        stored.is_damaged = stored.has_copy = True
        await one.ask(ReportRestore(JOB, WORKER, INCARNATION, first, 1, 1.0, 10, repaired_chunks=3))
        await anyio.sleep(200.0)
        assert (stored.is_damaged, await one.listed()) == (False, {1: "complete"})
        assert [fact.checkpoint_id for fact in one.kernel.facts(CheckpointRepaired)] == [first]


@over_days
async def test_progress_of_a_verification_is_shown() -> None:
    files, seen = SimulatedFiles(), list[CheckpointProgress]()

    def watch(one: Catalog) -> None:
        one.kernel.bus.on_signal(CheckpointProgress, lambda signal, call: seen.append(signal), name="a test")

    async with catalog(files=files, scrub_bytes_per_s=1, extend=watch) as one:
        checkpoint_id = await save(one, files, 1)
        await anyio.sleep(100.0)
        operation = (await one.ask(ShowCheckpoint(JOB, checkpoint_id))).operation
        assert (operation.operation, operation.total_bytes) == ("verifying", 100)
        await anyio.sleep(200.0)
        assert (await one.ask(ShowCheckpoint(JOB, checkpoint_id))).operation is None
        assert seen[0].job == JOB


@over_days
async def test_plugin_may_replace_the_collection() -> None:
    files, asked = SimulatedFiles(), list[str]()

    def collect(request: CollectCheckpoints, call: Call) -> Decision[Collection]:
        asked.append(request.job)
        return Decision(Collection([], 0))

    def replace(one: Catalog) -> None:
        one.kernel.bus.replace(CollectCheckpoints, collect, owner="a plugin")

    async with catalog(settings={"checkpoint_keep": 1}, files=files, extend=replace) as one:
        for step in (1, 2):
            await save(one, files, step)
        await anyio.sleep(SOON_S)
        assert (set(asked), len(files.stored)) == ({JOB}, 2)


@over_days
async def test_nothing_goes_while_the_clock_is_behind() -> None:
    files = SimulatedFiles()
    async with catalog(settings={"checkpoint_keep": 1}, files=files) as one:
        await one.configure({})
        one.kernel.clock.jump(1e6)
        for step in (1, 2):
            await save(one, files, step)
        one.kernel.clock.jump(-1e6)
        await one.configure({"checkpoint_keep": 1})
        await anyio.sleep(SOON_S)
        assert len(files.stored) == 2
        one.kernel.clock.jump(1e6)
        await anyio.sleep(SOON_S)
        assert left(files) == ["step-00000002"]


@pytest.mark.parametrize("dies", ["before", "after"])
@over_days
async def test_daemon_that_dies_while_it_deletes_deletes_what_was_to_go_only(dies: str) -> None:
    for number in range(1, 30):
        store, files = FaultyStore(), SimulatedFiles(delay_s=0.5)
        async with catalog(store, settings={"checkpoint_keep": 2}, files=files) as one:
            for step in range(1, 7):
                await save(one, files, step)
            await one.kernel.ledger.flush()
            store.dies = dies if number % 2 else ""
            await anyio.sleep(number * 0.11)
        store.dies = ""
        async with catalog(store, files=files) as one:
            await anyio.sleep(SOON_S)
            assert left(files) == ["step-00000005", "step-00000006"], number
            assert await one.listed() == {6: "complete", 5: "complete"}


@over_days
async def test_incremental_checkpoint_is_compacted_and_its_parent_may_go() -> None:
    files = SimulatedFiles()
    async with catalog(files=files) as one:
        await save(one, files, 1)
        child = await save(one, files, 2, **incremental(1))
        await one.configure({"checkpoint_keep": 1})
        await one.ask(CompactCheckpoint(JOB, child), OPERATOR)
        operation = (await one.ask(ShowCheckpoint(JOB, child))).operation
        assert (operation.operation, operation.done_bytes) == ("compacting", 0)
        await one.ask(CompactCheckpoint(JOB, child), OPERATOR)
        await anyio.sleep(SOON_S)
        shown = await one.ask(ShowCheckpoint(JOB, child))
        assert (shown.meta.checkpoint_type, shown.meta.size_bytes, shown.chain) == ("full", 1000, [child])
        assert (shown.operation, left(files)) == (None, ["step-00000002"])
        assert [fact.size_bytes for fact in one.kernel.facts(CheckpointCompacted)] == [1000]
        assert (await one.ask(ListCheckpoints(JOB))).size_bytes == 1000


@over_days
async def test_parents_of_a_compacted_checkpoint_stay_while_it_is_read() -> None:
    files = SimulatedFiles()
    async with catalog(files=files) as one:
        await save(one, files, 1)
        child = await save(one, files, 2, **incremental(1))
        grandchild = await save(one, files, 3, **incremental(2))
        await one.configure({"checkpoint_keep": 1})
        # The reader has read the manifests, and reads the files of the parents last.
        await one.ask(HoldCheckpoint(JOB, grandchild, "a reader", 500.0))
        await one.ask(CompactCheckpoint(JOB, child), OPERATOR)
        await anyio.sleep(450.0)
        assert len(left(files)) == 3
        await anyio.sleep(200.0)
        assert left(files) == ["step-00000002", "step-00000003"]


@over_days
async def test_deletion_of_a_checkpoint_waits_for_its_compaction() -> None:
    files = SimulatedFiles()
    async with catalog(files=files) as one:
        await save(one, files, 1)
        child = await save(one, files, 2, **incremental(1))
        await one.ask(CompactCheckpoint(JOB, child), OPERATOR)
        await anyio.sleep(0.5)
        await one.ask(DeleteCheckpoint(JOB, child), OPERATOR)
        await anyio.sleep(0.4)
        assert [operation for operation, _ in files.calls] == ["compact"]
        await anyio.sleep(SOON_S)
        assert (left(files), await one.listed()) == (["step-00000001"], {1: "complete"})


@over_days
async def test_compaction_continues_after_a_restart() -> None:
    store, files = FaultyStore(), SimulatedFiles()
    async with catalog(store, files=SimulatedFiles(failing={FOLDER})) as one:
        await save(one, files, 1)
        child = await save(one, files, 2, **incremental(1))
        await one.ask(CompactCheckpoint(JOB, child), OPERATOR)
        await anyio.sleep(1.0)
    async with catalog(store, files=files) as one:
        await anyio.sleep(SOON_S)
        assert (await one.ask(ShowCheckpoint(JOB, child))).meta.checkpoint_type == "full"
    async with catalog(store, files=SimulatedFiles()) as one:
        assert (await one.ask(ShowCheckpoint(JOB, child))).chain == [child]


@pytest.mark.parametrize("is_hopeless", [True, False])
@over_days
async def test_compaction_that_fails_is_told(is_hopeless: bool) -> None:
    files = SimulatedFiles()
    async with catalog(files=files) as one:
        await save(one, files, 1)
        child = await save(one, files, 2, **incremental(1))
        files.stored[f"{FOLDER}/step-00000002"].is_damaged = is_hopeless
        if not is_hopeless:
            files.failing.add(FOLDER)
        await one.ask(CompactCheckpoint(JOB, child), OPERATOR)
        await anyio.sleep(600.0)
        (failed,) = one.kernel.facts(CheckpointOperationFailed)
        assert (failed.checkpoint_id, failed.operation) == (child, "compacting")
        assert sum(operation == "compact" for operation, _ in files.calls) == (1 if is_hopeless else 5)
        shown = await one.ask(ShowCheckpoint(JOB, child))
        assert (shown.operation, shown.meta.checkpoint_type) == (None, "incremental")


@over_days
async def test_checkpoint_that_cannot_be_compacted_is_refused() -> None:
    files = SimulatedFiles()
    async with catalog(files=files) as one:
        parent = await save(one, files, 1)
        child = await save(one, files, 2, TENANT, **incremental(1))
        await one.ask(CompactCheckpoint(JOB, parent), OPERATOR)
        with pytest.raises(RequestRefused, match="may not touch"):
            await one.ask(CompactCheckpoint(JOB, child), OPERATOR)
        await one.ask(ReportCorruptCheckpoint(JOB, parent, "bad"))
        with pytest.raises(RequestRefused, match="cannot be compacted"):
            await one.ask(CompactCheckpoint(JOB, child), OPERATOR)
        assert "compact" not in {operation for operation, _ in files.calls}


@over_days
async def test_chain_that_is_too_long_is_compacted_by_itself() -> None:
    files = SimulatedFiles()
    async with catalog(settings={"checkpoint_chain_max": 3}, files=files) as one:
        await save(one, files, 1)
        ids = [await save(one, files, step, **incremental(step - 1)) for step in range(2, 7)]
        await anyio.sleep(600.0)
        lengths = [len((await one.ask(ShowCheckpoint(JOB, one_id))).chain) for one_id in ids]
        assert max(lengths) <= 3
        assert await one.listed() == dict.fromkeys(range(6, 0, -1), "complete")


class HungFiles(SimulatedFiles):
    """Files of which some never answer, until the test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = anyio.Event()

    async def _reach(self, operation: str, location: CheckpointLocation) -> None:
        if location.path.startswith("/hung"):
            self.calls.append((operation, location.path))
            await self.answers.wait()
        await super()._reach(operation, location)


def compacted(files: SimulatedFiles) -> list[str]:
    return [path for operation, path in files.calls if operation == "compact"]


@over_days
async def test_storage_that_hangs_delays_no_verification_of_another() -> None:
    files = HungFiles()
    async with catalog(files=files, scrub_bytes_per_s=1000) as one:
        await save(one, files, 1, storage_path="/hung/step-1")
        suspect = await save(one, files, 2, storage_path="/hung/step-2")
        await save(one, files, 3)
        await one.ask(ReportCorruptCheckpoint(JOB, suspect, "a checksum differs"))
        await anyio.sleep(120.0)
        verified = {meta.step for meta in (await one.ask(ListCheckpoints(JOB))).checkpoints if meta.verified_at}
        assert verified == {3}
        assert [path for _, path in files.calls if path.startswith("/hung")] == ["/hung/step-2"]
        files.answers.set()
        await anyio.sleep(120.0)
        verified = {meta.step for meta in (await one.ask(ListCheckpoints(JOB))).checkpoints if meta.verified_at}
        assert verified == {1, 2, 3}


@over_days
async def test_storage_that_hangs_delays_no_compaction_of_another() -> None:
    files = HungFiles()
    async with catalog(files=files) as one:
        for folder, step in (("/hung", 1), ("/ckpt", 3)):
            parent = f"{folder}/step-{step}"
            await save(one, files, step, storage_path=parent)
            changes = incremental(step) | {"parent_path": parent, "storage_path": f"{folder}/step-{step + 1}"}
            child = await save(one, files, step + 1, **changes)
            await one.ask(CompactCheckpoint(JOB, child), OPERATOR)
        await anyio.sleep(SOON_S)
        assert [fact.step for fact in one.kernel.facts(CheckpointCompacted)] == [4]
        files.answers.set()
        await anyio.sleep(SOON_S)
        assert [fact.step for fact in one.kernel.facts(CheckpointCompacted)] == [4, 2]


@over_days
async def test_storage_that_does_not_answer_is_told_once_and_tried_at_growing_intervals() -> None:
    files, log = SimulatedFiles(hanging={"/hung"}), RecordingLog()
    async with catalog(settings={"checkpoint_keep": 1}, files=files, scrub_bytes_per_s=1000, log=log) as one:
        for step in range(1, 9):
            await save(one, files, step, storage_path=f"/hung/{step}/step-{step}")
        await save(one, files, 9)
        await anyio.sleep(86_400.0)
        (told,) = log.of("a storage of checkpoints does not answer; trying again at growing intervals")
        assert (told["storage"], told["path"].startswith("/hung/")) == ("/hung", True)
        # A pause grows to ten minutes.
        assert 100 < sum(path.startswith("/hung") for _, path in files.calls) < 400
        assert (await one.ask(ListCheckpoints(JOB))).checkpoints[0].verified_at is not None
        files.hanging.clear()
        await anyio.sleep(1200.0)
        assert left(files) == ["step-00000009"]


@over_days
async def test_compaction_of_a_checkpoint_that_is_read_waits_behind_the_others() -> None:
    files = SimulatedFiles()
    async with catalog(files=files) as one:
        await save(one, files, 1)
        read = await save(one, files, 2, **incremental(1))
        await save(one, files, 3)
        other = await save(one, files, 4, **incremental(3))
        await one.ask(HoldCheckpoint(JOB, read, "a reader", 3600.0))
        for child in (read, other):
            await one.ask(CompactCheckpoint(JOB, child), OPERATOR)
        await anyio.sleep(5.0)
        assert [fact.step for fact in one.kernel.facts(CheckpointCompacted)] == [4]
        await anyio.sleep(3700.0)
        assert [fact.step for fact in one.kernel.facts(CheckpointCompacted)] == [4, 2]
        assert compacted(files)[:2] == [f"{FOLDER}/step-00000002", f"{FOLDER}/step-00000004"]


@over_days
async def test_work_is_looked_for_when_some_comes_ends_or_falls_due() -> None:
    files, looks = SimulatedFiles(delay_s=1.0), 0
    begin, folders = WorkQueue.begin, 50

    def counted(queue: WorkQueue, now: float) -> list[str]:
        nonlocal looks
        looks += 1
        return begin(queue, now)

    async with catalog(files=files) as one:
        for step in range(1, folders + 2):
            await save(one, files, step, storage_path=f"/disk{step % 5}/{step}/step")
        with patch.object(WorkQueue, "begin", counted):
            await one.configure({"checkpoint_keep": 1})
            await anyio.sleep(SOON_S)
        assert len(files.stored) == 1
    queues, ticks = 3, 3
    assert looks <= queues * (2 * folders + ticks)
