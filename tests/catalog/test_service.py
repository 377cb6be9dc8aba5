from __future__ import annotations

from typing import Any

import anyio
import pytest
from msgspec import structs

from forged.auth.model import Principal, Role
from forged.catalog.messages import (
    AdoptCheckpoints,
    AdoptedCheckpoint,
    CheckpointCollected,
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointParentFound,
    CheckpointReinstated,
    CheckpointRepaired,
    CheckpointRestored,
    CheckpointsAbandoned,
    CheckpointsAdopted,
    CheckpointStarted,
    CollectCheckpoints,
    CompleteCheckpoint,
    ConfirmDeleted,
    DeleteCheckpoint,
    HoldCheckpoint,
    ListCheckpoints,
    PinCheckpoint,
    ReadRetention,
    ReinstateCheckpoint,
    ReleaseCheckpoint,
    ReportCorruptCheckpoint,
    ReportRestore,
    ShowCheckpoint,
    UnpinCheckpoint,
)
from forged.elastic.messages import ProgressLost
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.jobs.model import CreateJob, RemoveJob
from forged.kernel.messages import Decision
from tests.catalog.catalog_fixture import (
    FOLDER,
    INCARNATION,
    JOB,
    OWN_USER,
    TENANT,
    WORKER,
    catalog,
    incremental,
)
from tests.catalog.simulated_files import SimulatedCheckpoint, SimulatedFiles
from tests.faulty_store import FaultyStore, full
from tests.kernel_fixture import OPERATOR, on_virtual_time

STRANGER = Principal("a stranger", Role.WORKER, frozenset({"other"}))


async def refused(asked: Any) -> str:
    """The code of the refusal."""
    with pytest.raises(ForgedError) as error:
        await asked
    return error.value.code


@on_virtual_time
async def test_saved_checkpoint_is_listed_and_offered() -> None:
    async with catalog() as one:
        one.steps[JOB] = 130
        meta = await one.start(100, metrics={"loss": 0.5}, reason="every 100 steps")
        assert (meta.state, meta.step, meta.metrics) == ("creating", 100, {"loss": 0.5})
        completed = await one.complete(meta.checkpoint_id, 1000, 2.5)
        assert (completed.meta.state, completed.meta.storage_path) == ("complete", f"{FOLDER}/step-00000100")
        (point,) = (await one.points()).points
        assert (point.meta, point.chain, point.lost_steps) == (completed.meta, [meta.checkpoint_id], 30)
        assert "assumed" in point.estimate.source
        page = await one.ask(ListCheckpoints(JOB))
        assert (page.checkpoints, page.more, page.count, page.size_bytes) == ([completed.meta], False, 1, 1000)
        started, done = one.kernel.facts(CheckpointStarted)[0], one.kernel.facts(CheckpointCompleted)[0]
        assert (started.worker_id, started.reason) == (WORKER, "every 100 steps")
        assert (done.checkpoint_id, done.size_bytes, done.seconds) == (meta.checkpoint_id, 1000, 2.5)


@on_virtual_time
async def test_checkpoint_whose_report_is_late_has_the_time_of_its_save() -> None:
    async with catalog() as one:
        now = one.kernel.clock.wall()
        assert (await one.start(1, age_s=3600.0)).created_at == now - 3600.0
        assert (await one.start(2)).created_at == now
        # A repeated report changes nothing.
        assert (await one.start(2, age_s=5.0)).created_at == now
        assert await refused(one.start(3, age_s=-1.0)) == "checkpoint_argument_invalid"
        assert await refused(one.start(3, age_s=float("nan"))) == "checkpoint_argument_invalid"


@on_virtual_time
async def test_start_and_complete_may_be_repeated() -> None:
    async with catalog() as one:
        first, again = await one.start(1), await one.start(1)
        assert first == again
        assert await one.complete(first.checkpoint_id) == await one.complete(first.checkpoint_id)
        assert (await one.start(1)).state == "complete"
        assert len(one.kernel.facts(CheckpointStarted)) == len(one.kernel.facts(CheckpointCompleted)) == 1


@on_virtual_time
async def test_failed_save_is_not_offered_and_may_complete_late() -> None:
    async with catalog() as one:
        meta = await one.start(5)
        await one.fail(meta.checkpoint_id)
        found = await one.points()
        assert found.points == []
        assert [(e.step, e.reason) for e in found.excluded] == [(5, "its save failed: disk full")]
        await one.complete(meta.checkpoint_id)
        assert [p.meta.step for p in (await one.points()).points] == [5]
        assert [fact.reason for fact in one.kernel.facts(CheckpointFailed)] == ["disk full"]


@on_virtual_time
async def test_request_in_the_name_of_a_worker_needs_its_incarnation() -> None:
    async with catalog() as one:
        assert await refused(one.start(1, incarnation=b"x" * 16)) == "worker_gone"
        assert await refused(one.start(1, worker_id="", by=TENANT)) == "worker_gone"
        # The daemon itself, and an operator, write checkpoints without a worker.
        assert (await one.start(1, worker_id="", by=OPERATOR)).state == "creating"


@pytest.mark.parametrize("by", [STRANGER, OWN_USER])
@on_virtual_time
async def test_path_that_another_job_has_named_first_stays_free(by: Principal) -> None:
    """Else a tenant could keep the checkpoints of other jobs out of the catalogue: their paths can be guessed."""
    async with catalog(roots=("/ckpt",)) as one:
        await one.ask(CreateJob("other"), OPERATOR)
        one.registered.add(("other", WORKER, INCARNATION))
        same_save, other_save = [await one.start(1, job="other", save_id=it, by=by) for it in ("00000001", "ffffffff")]
        own = await one.save(1, by=TENANT)
        assert own not in {same_save.checkpoint_id, other_save.checkpoint_id}
        assert (await one.start(1, by=TENANT)).checkpoint_id == own
        assert (await one.start(1, job="other", by=by)).checkpoint_id == same_save.checkpoint_id
        assert (await one.listed(), await one.listed("other")) == ({1: "complete"}, {1: "creating"})


@on_virtual_time
async def test_tenant_names_no_checkpoint_of_another_job_by_an_adoption() -> None:
    stranger = Principal("an operator of other", Role.OPERATOR, frozenset({"other"}))
    named = AdoptedCheckpoint(f"{FOLDER}/step-00000001", "00000001", 0, 1, 100, 1e9, job=JOB)
    async with catalog(roots=("/ckpt",)) as one:
        await one.ask(CreateJob("other"), OPERATOR)
        adoption = await one.ask(AdoptCheckpoints("other", FOLDER, [named]), stranger)
        assert len(adoption.adopted) == 1
        assert (await one.start(1)).training_run_id == JOB
        own = await one.save(2)
        assert await refused(one.ask(ShowCheckpoint("other", own), stranger)) == "checkpoint_unknown"


@on_virtual_time
async def test_checkpoint_that_another_job_has_adopted_is_refused() -> None:
    adopted = AdoptedCheckpoint(f"{FOLDER}/step-00000001", "00000001", 0, 1, 100, 1e9, job=JOB)
    async with catalog() as one:
        await one.ask(CreateJob("other"), OPERATOR)
        await one.ask(AdoptCheckpoints("other", FOLDER, [adopted]), OPERATOR)
        assert await refused(one.start(1)) == "checkpoint_path_taken"
        adoption = await one.ask(AdoptCheckpoints(JOB, FOLDER, [adopted]), OPERATOR)
        assert adoption.refused == [f"checkpoint '{FOLDER}/step-00000001' is in the catalogue of another job"]
        # Another save of the name is another checkpoint.
        assert (await one.start(1, save_id="ffffffff")).state == "creating"


@pytest.mark.parametrize(
    "changes",
    [
        {"storage_path": "step-1"},
        {"storage_path": "/ckpt/../etc/step-1"},
        {"storage_path": "/ckpt//step-1"},
        {"storage_path": "/ckpt/step-1/"},
        {"storage_path": "/ckpt/./step-1"},
        {"storage_path": "/ckpt/step\n1"},
        {"storage_path": "http://host/step-1"},
        {"storage_path": "s3://bucket"},
        {"storage_path": "file://host/step-1"},
        {"storage_path": "/" + "x" * 5000},
        {"storage_path": ""},
        {"save_id": "../../x"},
        {"save_id": ""},
        {"save_id": "a" * 100},
        {"parent_path": "elsewhere"},
        {"metrics": {str(number): 1.0 for number in range(100)}},
        {"metrics": {"x" * 1000: 1.0}},
        {"metrics": {"a\0b": 1.0}},
        {"step": -1},
        {"step": 2**64},
        {"epoch": -1},
    ],
    ids=repr,
)
@on_virtual_time
async def test_start_with_invalid_values_is_refused(changes: dict[str, Any]) -> None:
    async with catalog() as one:
        assert await refused(one.start(**{"step": 1} | changes)) == "checkpoint_argument_invalid"
        assert await one.listed() == {}


@on_virtual_time
async def test_catalogue_survives_a_restart() -> None:
    store = FaultyStore()
    async with catalog(store) as one:
        await one.save(1)
        await one.save(2, **incremental(1))
        await one.ask(PinCheckpoint(JOB, await one.save(3)), OPERATOR)
        await one.start(4)
        before = await one.points(), await one.listed()
    async with catalog(store) as one:
        assert (await one.points(), await one.listed()) == before
        assert [len(point.chain) for point in before[0].points] == [1, 2, 1]
        ids = {meta.checkpoint_id for meta in (await one.ask(ListCheckpoints(JOB))).checkpoints}
        assert await one.save(5) not in ids


@on_virtual_time
async def test_commit_that_fails_changes_nothing() -> None:
    store = FaultyStore()
    async with catalog(store) as one:
        meta = await one.start(1)
        store.commit_error = full()
        with pytest.raises(Unavailable):
            await one.complete(meta.checkpoint_id)
        store.commit_error = None
        await one.kernel.ledger.writable()
        assert await one.listed() == {1: "creating"}
        await one.complete(meta.checkpoint_id)
        assert await one.listed() == {1: "complete"}


@on_virtual_time
async def test_policy_of_the_job_decides_what_is_collected() -> None:
    async with catalog() as one:
        ids = [await one.save(step) for step in (1, 2, 3)]
        await one.configure({"checkpoint_keep": 2})
        verdicts = (await one.ask(ReadRetention(JOB))).verdicts
        assert [(v.step, v.is_kept, v.rule) for v in verdicts] == [
            (3, True, "newest"),
            (2, True, "recent"),
            (1, False, "surplus"),
        ]
        collection = await one.ask(CollectCheckpoints(JOB), OPERATOR)
        assert [(v.checkpoint_id, v.rule) for v in collection.collected] == [(ids[0], "surplus")]
        assert collection.regained_bytes == 100
        assert await one.listed() == {3: "complete", 2: "complete"}
        assert [fact.checkpoint_id for fact in one.kernel.facts(CheckpointCollected)] == [ids[0]]
        assert await one.ask(CollectCheckpoints(JOB), OPERATOR) == type(collection)([], 0)


@on_virtual_time
async def test_without_a_policy_nothing_is_collected() -> None:
    async with catalog(settings={"checkpoint_keep_best": 1}) as one:
        for step in range(1, 30):
            await one.save(step)
        assert (await one.ask(CollectCheckpoints(JOB), OPERATOR)).collected == []
        assert all(v.is_kept for v in (await one.ask(ReadRetention(JOB))).verdicts)


@on_virtual_time
async def test_changed_settings_of_the_job_change_the_policy() -> None:
    async with catalog(settings={"checkpoint_keep": 9}, defaults={"checkpoint_keep": 1}) as one:
        for step in (1, 2, 3):
            await one.save(step)
        await one.configure({"checkpoint_keep": 2})
        assert [v.is_kept for v in (await one.ask(ReadRetention(JOB))).verdicts] == [True, True, False]
        await one.configure({})
        assert [v.is_kept for v in (await one.ask(ReadRetention(JOB))).verdicts] == [True, False, False]


@on_virtual_time
async def test_many_checkpoints_are_collected_in_several_decisions() -> None:
    async with catalog() as one:
        for step in range(1, 200):
            await one.save(step)
        await one.configure({"checkpoint_keep": 1})
        collection = await one.ask(CollectCheckpoints(JOB), OPERATOR)
        assert [v.step for v in collection.collected] == list(range(1, 199))
        assert await one.listed() == {199: "complete"}


@on_virtual_time
async def test_files_that_the_daemon_may_not_touch_are_given_to_the_worker() -> None:
    async with catalog(settings={"checkpoint_keep": 1}, roots=("/shared/{job}",)) as one:
        first = await one.start(1, by=TENANT)
        await one.complete(first.checkpoint_id)
        second = await one.start(2, by=TENANT)
        await one.complete(second.checkpoint_id)
        await one.ask(CollectCheckpoints(JOB), OPERATOR)
        shown = await one.ask(ShowCheckpoint(JOB, first.checkpoint_id))
        assert (shown.is_managed, shown.is_kept) == (False, False)
        completed = await one.complete(second.checkpoint_id)
        assert [(d.checkpoint_id, d.save_id) for d in completed.delete] == [(first.checkpoint_id, "00000001")]
        await one.ask(ConfirmDeleted(JOB, WORKER, INCARNATION, [first.checkpoint_id, second.checkpoint_id, "x"]))
        assert (await one.complete(second.checkpoint_id)).delete == []
        assert await refused(one.ask(ShowCheckpoint(JOB, first.checkpoint_id))) == "checkpoint_unknown"
        assert await one.listed() == {2: "complete"}


@pytest.mark.parametrize(
    ("by", "path", "is_managed"),
    [
        (TENANT, "/shared/run/step-1", True),
        (TENANT, "/shared/other/step-1", False),
        (TENANT, "/shared/runner/step-1", False),
        (TENANT, "/elsewhere/step-1", False),
        (OWN_USER, "/elsewhere/step-1", True),
    ],
)
@on_virtual_time
async def test_daemon_touches_what_it_may(by: Any, path: str, is_managed: bool) -> None:
    async with catalog(roots=("/shared/{job}",)) as one:
        meta = await one.start(1, by=by, storage_path=path)
        assert (await one.ask(ShowCheckpoint(JOB, meta.checkpoint_id))).is_managed is is_managed


@on_virtual_time
async def test_pinned_and_held_checkpoints_stay() -> None:
    async with catalog() as one:
        pinned, held, newest = [await one.save(step) for step in (1, 2, 3)]
        await one.configure({"checkpoint_keep": 1})
        await one.ask(PinCheckpoint(JOB, pinned), OPERATOR)
        await one.ask(HoldCheckpoint(JOB, held, "a reader", 60.0))
        assert (await one.ask(CollectCheckpoints(JOB), OPERATOR)).collected == []
        assert await refused(one.ask(DeleteCheckpoint(JOB, pinned), OPERATOR)) == "checkpoint_pinned"
        assert await refused(one.ask(DeleteCheckpoint(JOB, held), OPERATOR)) == "checkpoint_held"
        await one.ask(UnpinCheckpoint(JOB, pinned), OPERATOR)
        await one.ask(ReleaseCheckpoint(JOB, held, "a reader"))
        await one.ask(ReleaseCheckpoint(JOB, held, "nobody"))
        await one.ask(DeleteCheckpoint(JOB, pinned), OPERATOR)
        assert [v.checkpoint_id for v in (await one.ask(CollectCheckpoints(JOB), OPERATOR)).collected] == [held]
        assert await one.listed() == {3: "complete"}
        assert await refused(one.ask(PinCheckpoint("other", newest), OPERATOR)) == "checkpoint_unknown"


@on_virtual_time
async def test_corrupt_parent_excludes_what_builds_on_it() -> None:
    async with catalog() as one:
        parent = await one.save(1)
        child = await one.save(2, **incremental(1))
        assert await refused(one.ask(DeleteCheckpoint(JOB, parent), OPERATOR)) == "checkpoint_parent_needed"
        await one.ask(ReportCorruptCheckpoint(JOB, parent, "bad checksum in part 0"))
        found = await one.points()
        assert found.points == []
        assert [(e.checkpoint_id, e.reason) for e in found.excluded] == [
            (child, f"its chain is broken: {parent} is corrupted"),
            (parent, "it is corrupted: bad checksum in part 0"),
        ]


@on_virtual_time
async def test_restore_abandons_what_lies_beyond_and_is_measured() -> None:
    async with catalog() as one:
        ids = {step: await one.save(step) for step in (1, 2, 3)}
        await one.ask(ReportRestore(JOB, WORKER, INCARNATION, ids[1], 1, 4.0, 10_000_000, ["step 3: damaged"]))
        found = await one.points()
        assert [point.meta.step for point in found.points] == [1]
        assert [(e.step, "abandoned" in e.reason) for e in found.excluded] == [(3, True), (2, True)]
        assert found.points[0].estimate.source == "1 measured restore of this job from local storage"
        (restored,), (gone) = one.kernel.facts(CheckpointRestored), one.kernel.facts(CheckpointsAbandoned)
        assert (restored.step, restored.skipped) == (1, ["step 3: damaged"])
        assert [(fact.step, fact.count, fact.checkpoint_id) for fact in gone] == [(1, 2, ids[1])]


@pytest.mark.parametrize("is_known", [True, False], ids=["with its id", "with its path and save id"])
@on_virtual_time
async def test_restored_checkpoint_that_the_daemon_may_not_read_is_not_corrupted(is_known: bool) -> None:
    """Another worker could not read it, or its files were brought back."""
    async with catalog() as one:
        first, second = [await one.save(step, by=TENANT) for step in (1, 2)]
        await one.ask(ReportCorruptCheckpoint(JOB, first, "part 0 is missing"))
        path, known = f"{FOLDER}/step-00000001", first if is_known else ""
        named = ReportRestore(JOB, WORKER, INCARNATION, known, 1, 4.0, 10, [], path, "00000001")
        await one.ask(named)
        assert [point.meta.checkpoint_id for point in (await one.points()).points] == [first]
        assert [fact.checkpoint_id for fact in one.kernel.facts(CheckpointRepaired)] == [first]
        assert [fact.checkpoint_id for fact in one.kernel.facts(CheckpointRestored)] == [first]
        await one.ask(structs.replace(named, save_id="ffffffff", checkpoint_id=""))
        assert len(one.kernel.facts(CheckpointRestored)) == 1
        assert second in [e.checkpoint_id for e in (await one.points()).excluded]


@on_virtual_time
async def test_incremental_checkpoint_is_estimated_like_the_full_one_of_its_chain() -> None:
    async with catalog() as one:
        for number, (step, size_bytes) in enumerate(((1, 1000), (2, 10), (3, 10))):
            made = await one.start(step, **(incremental(step - 1) if number else {}))
            await one.complete(made.checkpoint_id, size_bytes)
        await one.ask(ReportRestore(JOB, WORKER, INCARNATION, made.checkpoint_id, 3, 4.0, 10, []))
        found = await one.points()
        assert [round(point.estimate.expected_s, 2) for point in found.points] == [4.0, 4.0, 4.0]


@on_virtual_time
async def test_restore_abandons_what_lies_beyond_after_the_clock_went_back() -> None:
    async with catalog() as one:
        for step in (1, 2, 3):
            await one.save(step)
        one.kernel.clock.jump(-3600.0)
        await one.ask(ReportRestore(JOB, WORKER, INCARNATION, "", 1, 4.0, 10_000_000))
        assert [point.meta.step for point in (await one.points()).points] == [1]


@on_virtual_time
async def test_reinstated_checkpoint_is_offered_again() -> None:
    store = FaultyStore()
    async with catalog(store) as one:
        ids = {step: await one.save(step) for step in (1, 2, 3)}
        await one.ask(ReportRestore(JOB, WORKER, INCARNATION, ids[1], 1, 4.0, 10))
        for step in (1, 99):
            assert await refused(one.ask(ReinstateCheckpoint(JOB, ids.get(step, "none")), OPERATOR)) == (
                "checkpoint_not_abandoned" if step == 1 else "checkpoint_unknown"
            )
        meta = await one.ask(ReinstateCheckpoint(JOB, ids[3], "the  evaluation\nwas wrong"), OPERATOR)
        assert (meta.step, meta.abandoned) == (3, False)
        [fact] = one.kernel.facts(CheckpointReinstated)
        assert (fact.checkpoint_id, fact.step, fact.reason) == (ids[3], 3, "the evaluation was wrong")
    async with catalog(store) as one:
        assert [point.meta.step for point in (await one.points()).points] == [3, 1]
        await one.ask(ReportRestore(JOB, WORKER, INCARNATION, ids[1], 1, 4.0, 10))
        assert [point.meta.step for point in (await one.points()).points] == [1]


@on_virtual_time
async def test_checkpoint_that_is_being_written_is_not_deleted() -> None:
    async with catalog() as one:
        meta = await one.start(1)
        assert await refused(one.ask(DeleteCheckpoint(JOB, meta.checkpoint_id), OPERATOR)) == (
            "checkpoint_transition_refused"
        )
        await one.fail(meta.checkpoint_id)
        await one.ask(DeleteCheckpoint(JOB, meta.checkpoint_id), OPERATOR)
        assert await one.listed() == {}


@on_virtual_time
async def test_lost_progress_abandons_what_lies_beyond() -> None:
    async with catalog() as one:
        for step in (1, 2, 3):
            await one.save(step)
        decision = Decision(None, (ProgressLost(1, 2, "all workers failed"),), job=JOB)
        await one.kernel.ledger.append(decision).wait()
        await one.kernel.settle()
        assert [point.meta.step for point in (await one.points()).points] == [2, 1]
        # What is saved after that is offered, also at a later step.
        await one.save(4)
        assert [point.meta.step for point in (await one.points()).points] == [4, 2, 1]


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
@on_virtual_time
async def test_lost_progress_abandons_what_was_recorded_before_it_although_the_clock_jumps(jump_s: float) -> None:
    lost = Decision(None, (ProgressLost(1, 2, "all workers failed"),), job=JOB)
    async with catalog() as one:
        for step in (1, 2, 3):
            await one.save(step)
        one.kernel.clock.jump(jump_s)
        pending = one.kernel.ledger.append(lost)
        one.kernel.clock.jump(-jump_s)
        # Recorded after the fact, and before the catalogue has received it.
        await one.start(4)
        await pending.wait()
        await one.kernel.settle()
        assert [point.meta.step for point in (await one.points()).points] == [2, 1]
        assert {e.step: "abandoned" in e.reason for e in (await one.points()).excluded} == {4: False, 3: True}


@on_virtual_time
async def test_restore_points_are_limited_to_a_folder() -> None:
    async with catalog() as one:
        await one.save(1)
        await one.save(2, storage_path="/elsewhere/step-2")
        await one.start(3, storage_path="/elsewhere/step-3")
        assert [p.meta.step for p in (await one.points(folder=FOLDER)).points] == [1]
        elsewhere = await one.points(folder="/elsewhere")
        assert [p.meta.step for p in elsewhere.points] == [2]
        assert [(e.step, e.storage_path) for e in elsewhere.excluded] == [(3, "/elsewhere/step-3")]
        assert await refused(one.points("no such job")) == "job_unknown"


@on_virtual_time
async def test_removed_job_loses_its_records_except_what_is_kept() -> None:
    async with catalog(settings={"checkpoint_keep": 5}) as one:
        await one.save(1)
        child = await one.save(2, **incremental(1))
        await one.save(3)
        await one.ask(PinCheckpoint(JOB, child), OPERATOR)
        await one.ask(RemoveJob(JOB), OPERATOR)
        await one.kernel.settle()
        assert await one.listed() == {2: "complete", 1: "complete"}
        assert [point.meta.step for point in (await one.points()).points] == [2, 1]
        assert one.kernel.facts(CheckpointCollected) == []
        assert (await one.ask(CollectCheckpoints(JOB), OPERATOR)).collected == []
        assert await refused(one.start(4)) == "job_unknown"


@on_virtual_time
async def test_existing_checkpoints_are_adopted() -> None:
    async with catalog() as one:
        adopted = [
            AdoptedCheckpoint("/old/a", "aaaaaaaa", 0, 1, 100, 1e9),
            AdoptedCheckpoint("/old/b", "bbbbbbbb", 0, 2, 10, 2e9, "/old/a"),
            AdoptedCheckpoint("/old/c", "cccccccc", 0, 3, 10, 2e9, "/old/missing"),
            AdoptedCheckpoint("../c", "cccccccc", 0, 3, 10, 2e9),
        ]
        adoption = await one.ask(AdoptCheckpoints(JOB, "/old", adopted), OPERATOR)
        assert (len(adoption.adopted), adoption.known, len(adoption.refused)) == (2, [], 2)
        assert [len(point.chain) for point in (await one.points()).points] == [2, 1]
        again = await one.ask(AdoptCheckpoints(JOB, "/old", adopted[:2]), OPERATOR)
        assert (again.adopted, again.known) == ([], adoption.adopted)
        assert await refused(one.ask(AdoptCheckpoints("none", "/old", []), OPERATOR)) == "job_unknown"
        many = [adopted[0]] * 1001
        assert await refused(one.ask(AdoptCheckpoints(JOB, "/old", many), OPERATOR)) == "checkpoint_argument_invalid"


@on_virtual_time
async def test_adoption_gives_known_checkpoints_the_parents_that_it_adds() -> None:
    """The records of earlier saves were forgotten with their job; its next save builds on one of them."""
    store, old = FaultyStore(), f"{FOLDER}/step-00000001"
    adopted = [
        AdoptedCheckpoint(old, "aaaaaaaa", 0, 1, 100, 1e9, job=JOB),
        AdoptedCheckpoint(f"{FOLDER}/step-00000002", "00000002", 0, 2, 10, 2e9, old, job=JOB),
    ]
    async with catalog(store) as one:
        child = await one.save(2, **incremental(1))
        assert [point.chain for point in (await one.points()).points] == [[child]]
        await one.ask(AdoptCheckpoints(JOB, FOLDER, adopted, dry_run=True), OPERATOR)
        assert [point.chain for point in (await one.points()).points] == [[child]]
        adoption = await one.ask(AdoptCheckpoints(JOB, FOLDER, adopted), OPERATOR)
        assert adoption.known == [child]
        [parent] = adoption.adopted
        assert [fact.parent_id for fact in one.kernel.facts(CheckpointParentFound)] == [parent]
        assert [fact.count for fact in one.kernel.facts(CheckpointsAdopted)] == [1]
        again = await one.ask(AdoptCheckpoints(JOB, FOLDER, adopted), OPERATOR)
        assert (again.adopted, len(one.kernel.facts(CheckpointParentFound))) == ([], 1)
    async with catalog(store) as one:
        assert [point.chain for point in (await one.points()).points] == [[parent, child], [parent]]
        assert await refused(one.ask(DeleteCheckpoint(JOB, parent), OPERATOR)) == "checkpoint_parent_needed"


@on_virtual_time
async def test_tenant_that_fills_the_catalogue_is_refused_and_leaves_room_for_others() -> None:
    async with catalog(bytes_max=1 << 20) as one:

        async def fill() -> None:
            for step in range(10_000):
                await one.start(step, by=TENANT)

        with pytest.raises(RequestRefused, match="catalogue bytes: a tenant") as error:
            await fill()
        assert error.value.code == "catalogue_full"
        assert (await one.start(10_000, worker_id="", by=OPERATOR)).state == "creating"


@on_virtual_time
async def test_pages_list_each_checkpoint_once() -> None:
    async with catalog() as one:
        for step in range(1, 12):
            await one.save(step)
        found: list[int] = []
        after, more = "", True
        while more:
            page = await one.ask(ListCheckpoints(JOB, after, 4))
            verdicts = (await one.ask(ReadRetention(JOB, after, 4))).verdicts
            assert [v.checkpoint_id for v in verdicts] == [meta.checkpoint_id for meta in page.checkpoints]
            found += [meta.step for meta in page.checkpoints]
            after, more = page.checkpoints[-1].checkpoint_id, page.more
        assert found == list(range(11, 0, -1))


@on_virtual_time
async def test_worker_that_has_left_may_complete_what_it_started() -> None:
    store = FaultyStore()
    async with catalog(store) as one:
        meta, other = await one.start(1), await one.start(2, worker_id="", by=OPERATOR)
    async with catalog(store) as one:
        one.registered.clear()
        assert await refused(one.complete(other.checkpoint_id)) == "worker_gone"
        await one.complete(meta.checkpoint_id)
        await one.fail(meta.checkpoint_id)
        assert await one.listed() == {2: "creating", 1: "complete"}


@on_virtual_time
async def test_script_says_how_many_are_kept_if_no_setting_does() -> None:
    store = FaultyStore()
    async with catalog(store) as one:
        for step in (1, 2, 3):
            await one.save(step, keep=2)
        await one.kernel.settle()
        assert await one.listed() == {3: "complete", 2: "complete"}
        await one.configure({"checkpoint_max_age_s": 1e6})
        assert [v.is_kept for v in (await one.ask(ReadRetention(JOB))).verdicts] == [True, True]
        await one.save(4, keep=1)
    async with catalog(store) as one:
        await one.configure({"checkpoint_keep": 3})
        assert [v.is_kept for v in (await one.ask(ReadRetention(JOB))).verdicts] == [True, True, True]
        await one.configure({})
        assert [v.is_kept for v in (await one.ask(ReadRetention(JOB))).verdicts] == [True, False, False]


@on_virtual_time
async def test_dry_run_of_an_adoption_changes_nothing() -> None:
    async with catalog() as one:
        adopted = [
            AdoptedCheckpoint("/old/a", "aaaaaaaa", 0, 1, 100, 1e9),
            AdoptedCheckpoint("/old/b", "bbbbbbbb", 0, 2, 10, 2e9, "/old/a"),
            AdoptedCheckpoint("b", "bbbbbbbb", 0, 2, 10, 2e9),
        ]
        adoption = await one.ask(AdoptCheckpoints(JOB, "/old", adopted, dry_run=True), OPERATOR)
        assert (len(adoption.adopted), len(adoption.refused)) == (2, 1)
        assert (await one.listed(), (await one.points()).points) == ({}, [])
        adoption = await one.ask(AdoptCheckpoints(JOB, "/old", adopted), OPERATOR)
        assert (len(adoption.adopted), len(adoption.refused)) == (2, 1)


@on_virtual_time
async def test_deleted_checkpoint_is_excluded_while_its_files_may_be_there() -> None:
    async with catalog() as one:
        await one.ask(DeleteCheckpoint(JOB, await one.save(1, by=TENANT)), OPERATOR)
        (excluded,) = (await one.points(folder=FOLDER)).excluded
        assert (excluded.state, excluded.reason) == ("deleted", "it is deleted")
        assert (await one.points(folder="/ckpt/ru")).excluded == []


@on_virtual_time
async def test_daemon_that_was_superseded_deletes_nothing() -> None:
    store, files = FaultyStore(), SimulatedFiles()
    path = f"{FOLDER}/step-00000001"
    async with catalog(store, files=files) as old:
        checkpoint_id = await old.save(1)
        files.stored[path] = SimulatedCheckpoint("00000001", JOB)
        async with catalog(FaultyStore(store.memory), files=files) as new:
            assert await refused(old.ask(DeleteCheckpoint(JOB, checkpoint_id), OPERATOR)) == "not_leader"
            await anyio.sleep(60.0)
            assert (list(files.stored), await new.listed()) == ([path], {1: "complete"})
            await new.ask(DeleteCheckpoint(JOB, checkpoint_id), OPERATOR)
            await anyio.sleep(60.0)
            assert files.stored == {}


@on_virtual_time
async def test_checkpoint_builds_on_what_its_manifest_says_at_the_end() -> None:
    async with catalog() as one:
        first, second = await one.save(1), await one.save(2, **incremental(1))
        third = await one.start(3, **incremental(2))
        ended = CompleteCheckpoint(JOB, WORKER, INCARNATION, third.checkpoint_id, 5, 1.0, f"{FOLDER}/step-00000001")
        assert (await one.ask(ended)).meta.parent_id == first
        full = await one.start(4, **incremental(2))
        ended = CompleteCheckpoint(JOB, WORKER, INCARNATION, full.checkpoint_id, 5, 1.0, "")
        assert (await one.ask(ended)).meta.checkpoint_type == "full"
        chains = [point.chain for point in (await one.points()).points]
        assert chains == [[full.checkpoint_id], [first, third.checkpoint_id], [first, second], [first]]
        await one.ask(DeleteCheckpoint(JOB, second), OPERATOR)


@on_virtual_time
async def test_deletion_of_what_a_later_checkpoint_builds_on_is_taken_back() -> None:
    """The files of a deleted checkpoint are there until a worker has deleted them, and a save may use them."""
    store = FaultyStore()
    async with catalog(store) as one:
        first, second = await one.save(1, by=TENANT), await one.save(2, by=TENANT, **incremental(1))
        for checkpoint_id in (second, first):
            await one.ask(DeleteCheckpoint(JOB, checkpoint_id), OPERATOR)
        third = await one.start(3, by=TENANT, **incremental(2))
        completed = await one.complete(third.checkpoint_id)
        assert completed.delete == []
        [point, *_] = (await one.points()).points
        assert point.chain == [first, second, third.checkpoint_id]
        await one.ask(ConfirmDeleted(JOB, WORKER, INCARNATION, [first, second]))
    async with catalog(store) as one:
        assert await one.listed() == {3: "complete", 2: "complete", 1: "complete"}
        [point, *_] = (await one.points()).points
        assert point.chain == [first, second, third.checkpoint_id]


@on_virtual_time
async def test_all_that_builds_on_a_checkpoint_whose_deletion_is_taken_back_is_offered() -> None:
    async with catalog() as one:
        await one.ask(DeleteCheckpoint(JOB, await one.save(1, by=TENANT)), OPERATOR)
        second, third = [await one.start(step, by=TENANT, **incremental(1)) for step in (2, 3)]
        path = f"{FOLDER}/step-00000004"
        adopted = AdoptedCheckpoint(path, "00000004", 0, 4, 10, 1e9, f"{FOLDER}/step-00000001", job=JOB)
        await one.ask(AdoptCheckpoints(JOB, FOLDER, [adopted], dry_run=True), OPERATOR)
        assert (await one.points()).points == []
        await one.complete(second.checkpoint_id)
        await one.complete(third.checkpoint_id)
        await one.ask(AdoptCheckpoints(JOB, FOLDER, [adopted]), OPERATOR)
        assert [point.meta.step for point in (await one.points()).points] == [4, 3, 2, 1]


@on_virtual_time
async def test_checkpoint_builds_on_no_failed_save_that_was_deleted() -> None:
    """The name was used again, by a save that the catalogue does not know."""
    async with catalog() as one:
        failed = await one.start(1, by=TENANT)
        await one.fail(failed.checkpoint_id)
        await one.ask(DeleteCheckpoint(JOB, failed.checkpoint_id), OPERATOR)
        await one.save(2, by=TENANT, **incremental(1))
        assert [point.chain[:-1] for point in (await one.points()).points] == [[]]
        assert (await one.ask(ShowCheckpoint(JOB, failed.checkpoint_id))).meta.state == "deleted"


@on_virtual_time
async def test_adopted_checkpoint_keeps_the_files_of_a_deleted_one() -> None:
    async with catalog() as one:
        await one.ask(DeleteCheckpoint(JOB, await one.save(1, by=TENANT)), OPERATOR)
        path = f"{FOLDER}/step-00000002"
        adopted = AdoptedCheckpoint(path, "00000002", 0, 2, 10, 1e9, f"{FOLDER}/step-00000001", job=JOB)
        await one.ask(AdoptCheckpoints(JOB, FOLDER, [adopted]), OPERATOR)
        assert [point.meta.step for point in (await one.points()).points] == [2, 1]


@on_virtual_time
async def test_checkpoint_that_would_build_on_itself_is_refused() -> None:
    async with catalog() as one:
        first = await one.start(1)
        await one.start(2, **incremental(1))
        for path in (f"{FOLDER}/step-00000001", f"{FOLDER}/step-00000002"):
            ended = CompleteCheckpoint(JOB, WORKER, INCARNATION, first.checkpoint_id, 5, 1.0, path)
            assert await refused(one.ask(ended)) == "checkpoint_chain_cyclic"
        assert await one.listed() == {2: "creating", 1: "creating"}
