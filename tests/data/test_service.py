from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import anyio
import msgspec
import numpy as np
import pytest

from forged.data.messages import (
    CopiesDiffer,
    CorruptShardFound,
    DatasetDefined,
    DatasetSpec,
    OfferShards,
    PlanData,
    ReadOwners,
    ReadTransfers,
    ReportCorruptShard,
    ReportLostShards,
    ReportShards,
    ShardsLost,
    ShowData,
    ShowTransfers,
    TransfersCompleted,
    TransfersPlanned,
)
from forged.data.ownership import suspect_copies
from forged.data.ownership.attempt import Draft
from forged.data.ownership.ownership import SHARDS_LOST
from forged.elastic.messages import (
    AbortJob,
    AnnounceLeave,
    AttemptProgress,
    DrainWorker,
    EvictWorker,
    JobAborted,
    ReadLeave,
    ReportReady,
    RescaleCompleted,
    RescaleJob,
    RescaleStarted,
    ShowCluster,
    WorkerFailed,
    WorkerJoined,
)
from forged.errors import RequestRefused, Unavailable
from forged.jobs.model import CreateJob, RemoveJob
from forged.kernel.messages import Call, Decision, Record
from forged.kernel.store.port import Transaction
from tests.data.data_fixture import DATASET, DataFixture, data_fixture, keys_in, union
from tests.elastic.coordinator_playbook import JOB
from tests.faulty_store import FaultyStore, full
from tests.kernel_fixture import OPERATOR, on_virtual_time
from tests.telemetry.recording_log import RecordingLog

ALL = frozenset(range(10))


async def formed(stage: DataFixture, **settings: Any) -> None:
    """Two workers that hold five shards each."""
    await stage.come("a", *range(5), min_workers=2, **settings)
    await stage.come("b", *range(5, 10))
    await stage.rescale("a", "b")


def int64(*numbers: int) -> bytes:
    return np.array(numbers, "<i8").tobytes()


async def refused(act: Awaitable[Any]) -> str:
    with pytest.raises(RequestRefused) as error:
        await act
    return error.value.code


def marks(stage: DataFixture, name: str, **others: int) -> bytes:
    """What a worker says that its copies are: 1, but for those shards of which it holds something else."""
    return int64(*(others.get(f"shard_{shard}", 1) for shard in sorted(stage.held[name])))


class TestConflictingCopies:
    COPIED = DatasetSpec(1_000, 10, 1, has_origin=True)

    async def held_twice(self, stage: DataFixture, dataset: DatasetSpec, **settings: Any) -> None:
        """A world of two workers that hold all shards and differ in 3 and 4; a owns the first five."""
        await stage.come("a", *ALL, min_workers=2, **settings)
        await stage.come("b", *ALL)
        await stage.rescale("a", "b", dataset=dataset)

    async def offer_others(self, stage: DataFixture, dataset: DatasetSpec) -> None:
        await stage.stop()
        await stage.offer("a", dataset=dataset, marks=marks(stage, "a"))
        await stage.offer("b", dataset=dataset, marks=marks(stage, "b", shard_3=2, shard_4=3))

    @on_virtual_time
    async def test_are_published_and_the_minority_fetches_the_owners_bytes(self) -> None:
        async with data_fixture() as stage:
            await self.held_twice(stage, self.COPIED)
            owned = sorted(stage.owners()["a"])[:2]
            await stage.kernel.bus.ask(RescaleJob(JOB))
            await stage.stop()
            await stage.offer("a", dataset=self.COPIED, marks=marks(stage, "a"))
            differing = {f"shard_{shard}": 2 for shard in owned}
            await stage.offer("b", dataset=self.COPIED, marks=marks(stage, "b", **differing))
            assert stage.facts(CopiesDiffer) == [CopiesDiffer(2, 2, owned, ["b"])]
            view = await stage.kernel.bus.ask(ShowData(JOB))
            assert (view.differing, view.differing_shards) == (2, owned)
            part = await stage.part("b")
            assert part.shards == part.replaced == int64(*owned)
            assert np.frombuffer(part.sources, "<i4").reshape(2, -1)[:, 0].tolist() == [0, 0]
            assert (await stage.part("a")).shards == b""
            await stage.fetch("a", "b")
            await stage.commit("a", "b")
            await stage.kernel.bus.ask(RescaleJob(JOB))
            await stage.stop()
            for name in "ab":
                await stage.offer(name, dataset=self.COPIED, marks=marks(stage, name))
            assert len(stage.facts(CopiesDiffer)) == 1
            assert (await stage.kernel.bus.ask(ShowData(JOB))).differing == 0

    @on_virtual_time
    async def test_are_published_and_kept_without_an_origin(self) -> None:
        dataset = DatasetSpec(1_000, 10, 1)
        async with data_fixture() as stage:
            await self.held_twice(stage, dataset)
            await stage.kernel.bus.ask(RescaleJob(JOB))
            await self.offer_others(stage, dataset)
            (differ,) = stage.facts(CopiesDiffer)
            assert (differ.count, differ.shards) == (2, [3, 4])
            for name in "ab":
                part = await stage.part(name)
                assert part.shards == part.replaced == b""

    @on_virtual_time
    async def test_stop_training_before_a_worker_drops_its_copy(self) -> None:
        async with data_fixture() as stage:
            await self.held_twice(stage, self.COPIED, use_synchronous_rescaling=False)
            await stage.come("c")
            assert stage.facts(RescaleStarted)[-1].in_background
            await stage.offer("c", dataset=self.COPIED)
            await stage.offer("a", dataset=self.COPIED, marks=marks(stage, "a"))
            await stage.offer("b", dataset=self.COPIED, marks=marks(stage, "b", shard_3=2, shard_4=3))
            await stage.wait(0.1)
            started = stage.facts(RescaleStarted)[-1]
            assert not started.in_background
            assert "workers hold different bytes of 2 shards" in started.reason
            assert stage.facts(CopiesDiffer) == []

    @on_virtual_time
    async def test_are_not_detected_without_marks(self) -> None:
        async with data_fixture() as stage:
            await self.held_twice(stage, self.COPIED)
            await stage.kernel.bus.ask(RescaleJob(JOB))
            await stage.stop()
            await stage.offer("a", dataset=self.COPIED)
            await stage.offer("b", dataset=self.COPIED, marks=marks(stage, "b"))
            assert stage.facts(CopiesDiffer) == []

    @on_virtual_time
    async def test_offer_needs_one_mark_per_shard_or_none(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *ALL)
            await stage.stop()
            assert await refused(stage.offer("a", marks=int64(1))) == "holdings_invalid"
            assert await refused(stage.offer("a", marks=b"1")) == "holdings_invalid"


class TestUnreadableRecords:
    @on_virtual_time
    async def test_are_dropped_and_workers_offer_anew(self) -> None:
        store = FaultyStore()
        async with data_fixture(store) as stage:
            await formed(stage)
            (piece,) = [key for key in await keys_in(store) if "/piece/" in key]
        await store.memory.commit([Transaction(store.memory.revision + 1, {f"data/{piece}": b"?"})])
        async with data_fixture(FaultyStore(store.memory)) as stage:
            assert await refused(stage.kernel.bus.ask(ShowData(JOB))) == "job_without_data"
            stage.held |= {"a": set(range(5)), "b": set(range(5, 10))}
            await stage.come_again("a", "b")
            await stage.kernel.bus.ask(RescaleJob(JOB))
            await stage.rescale("a", "b")
            assert union(stage.owners().values()) == ALL


class TestADataset:
    @on_virtual_time
    async def test_is_defined_once_by_the_first_offer(self) -> None:
        async with data_fixture() as stage:
            await formed(stage)
            assert stage.facts(DatasetDefined) == [DatasetDefined(DATASET)]
            await stage.kernel.bus.ask(RescaleJob(JOB))
            await stage.rescale("a", "b")
            assert len(stage.facts(DatasetDefined)) == 1

    @on_virtual_time
    async def test_that_differs_is_refused(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", min_workers=2)
            await stage.come("b")
            await stage.stop()
            await stage.offer("a")
            assert await refused(stage.offer("b", dataset=DatasetSpec(1_000, 11))) == "dataset_differs"

    @on_virtual_time
    async def test_that_is_invalid_is_refused_and_defines_nothing(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a")
            await stage.stop()
            for dataset in (DatasetSpec(10, 11), DatasetSpec(2**62, 2**60)):
                assert await refused(stage.offer("a", dataset=dataset)) == "dataset_invalid"
            assert await refused(stage.offer("a", dataset=DatasetSpec(10, 10, 17))) == "replication_invalid"
            assert stage.facts(DatasetDefined) == []
            await stage.offer("a")
            assert stage.facts(DatasetDefined) == [DatasetDefined(DATASET)]

    @on_virtual_time
    async def test_is_kept_even_if_its_first_offer_is_refused(self) -> None:
        store = FaultyStore()
        async with data_fixture(store) as stage:
            await stage.come("a")
            await stage.stop()
            for held in (b"1234567", np.array([10], "<i8").tobytes(), np.array([-1], "<i8").tobytes()):
                assert await refused(stage.offer("a", held=held)) == "holdings_invalid"
            known = JOB in stage.data.jobs
            assert known == (await keys_in(store) == [f"{JOB}/dataset"]) == bool(stage.facts(DatasetDefined))

    @on_virtual_time
    async def test_of_a_job_without_data_is_refused(self) -> None:
        async with data_fixture() as stage:
            await stage.kernel.bus.ask(CreateJob("other"))
            for request in (ShowData("other"), ShowTransfers("other"), PlanData("other", ["a"]), ReadOwners("other")):
                assert await refused(stage.kernel.bus.ask(request)) == "job_without_data"

    @on_virtual_time
    async def test_of_an_unknown_job_is_refused(self) -> None:
        async with data_fixture() as stage:
            for request in (ShowData("other"), ShowTransfers("other"), PlanData("other", ["a"]), ReadOwners("other")):
                assert await refused(stage.kernel.bus.ask(request)) == "job_unknown"


OTHER = DatasetSpec(1_200, 12, has_origin=True)


async def given_up(stage: DataFixture, *names: str) -> None:
    """All workers have left before the first world."""
    for name in names:
        await stage.workers[name].leave()
        del stage.held[name]
    await stage.wait(1.0)


class TestDatasetBeforeTheFirstWorld:
    """A script with a wrong dataset is restarted with another one."""

    @on_virtual_time
    async def test_may_be_replaced_when_its_workers_are_gone(self) -> None:
        store = FaultyStore()
        async with data_fixture(store) as stage:
            await stage.come("a", *range(8))
            await stage.offer_all()
            assert stage.last(ShardsLost).generation == 0
            await given_up(stage, "a")
            await stage.come("b")
            await stage.rescale("b", dataset=OTHER)
            assert stage.owners() == {"b": set(range(12))}
            assert stage.facts(DatasetDefined) == [DatasetDefined(DATASET), DatasetDefined(OTHER)]
            assert stage.last(DatasetDefined).cause == stage.records(WorkerJoined)[-1].id
            assert (await stage.kernel.bus.ask(ShowData(JOB))).dataset == OTHER
            attempt = stage.facts(RescaleCompleted)[-1].attempt
            assert await keys_in(store) == [f"{JOB}/dataset", f"{JOB}/holders/{attempt}", f"{JOB}/piece/{attempt}/0/0"]

    @on_virtual_time
    async def test_is_final_once_a_world_has_used_it(self) -> None:
        async with data_fixture() as stage:
            await formed(stage)
            await given_up(stage, "a", "b")
            await stage.come("a", life=2)
            await stage.come("c")
            await stage.stop()
            assert await refused(stage.offer("c", dataset=OTHER)) == "dataset_differs"
            assert stage.facts(DatasetDefined) == [DatasetDefined(DATASET)]

    @on_virtual_time
    async def test_is_not_replaced_by_an_invalid_one(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(8))
            await stage.offer_all()
            await given_up(stage, "a")
            await stage.come("b")
            await stage.stop()
            assert await refused(stage.offer("b", dataset=DatasetSpec(10, 11))) == "dataset_invalid"
            assert stage.data.jobs[JOB].dataset == DATASET

    @on_virtual_time
    async def test_is_final_within_its_attempt(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(8), min_workers=2)
            await stage.come("z")
            await stage.offer_all()
            await given_up(stage, "a", "z")
            await stage.come("b", *range(10))
            await stage.come("c")
            await stage.stop()
            await stage.offer("b", dataset=OTHER)
            assert await refused(stage.offer("c")) == "dataset_differs"
            assert stage.facts(DatasetDefined)[-1] == DatasetDefined(OTHER)
            await stage.offer("c", dataset=OTHER)
            await stage.fetch("b", "c")
            await stage.commit("b", "c")
            assert stage.owners() == stage.held

    @on_virtual_time
    async def test_is_deleted_with_its_plans_when_replaced(self) -> None:
        """A daemon that is killed in between knows the newer one, and a plan of that only."""
        store = FaultyStore()
        async with data_fixture(store) as stage:
            await stage.come("a", *range(10), min_workers=2)
            await stage.come("z")
            await stage.offer_all()
            await given_up(stage, "a", "z")
        again = FaultyStore(store.memory)
        assert f"{JOB}/holders/1" in await keys_in(again)
        async with data_fixture(again) as stage:
            await stage.come("b")
            await stage.come("c")
            await stage.stop()
            await stage.offer("b", dataset=OTHER)
        assert await keys_in(again) == [f"{JOB}/dataset"]
        async with data_fixture(FaultyStore(again.memory)) as stage:
            assert stage.data.jobs[JOB].dataset == OTHER
            stage.held = {"b": set(), "c": set()}
            await stage.come_again("b", "c")
            await stage.rescale("b", "c", dataset=OTHER)
            assert stage.owners() == stage.held

    @on_virtual_time
    async def test_keeps_suspect_copies_when_the_next_has_the_same_shards(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(10), min_workers=2)
            await stage.come("b")
            await stage.offer_all()
            await stage.report_corrupt("b", "a", 3)
            await given_up(stage, "a", "b")
            await stage.come("a", *range(10), life=2)
            await stage.come("b", life=2)
            await stage.stop()
            copied = DatasetSpec(1_000, 10, 1)
            assert (await stage.offer("a", dataset=copied)).suspect == int64(3)
            assert not (await stage.offer("a", dataset=copied, verified=int64(3))).suspect

    @on_virtual_time
    async def test_drops_suspect_copies_when_the_next_has_other_shards(self) -> None:
        store = FaultyStore()
        async with data_fixture(store) as stage:
            await stage.come("a", *range(10), min_workers=2)
            await stage.come("b")
            await stage.offer_all()
            await stage.report_corrupt("b", "a", 3)
            assert [key for key in await keys_in(store) if "suspect" in key] == [f"{JOB}/suspect/a/3"]
            await given_up(stage, "a", "b")
            await stage.come("a", *range(10), life=2)
            await stage.come("b", life=2)
            await stage.stop()
            assert not (await stage.offer("a", dataset=OTHER)).suspect
            assert not [key for key in await keys_in(store) if "suspect" in key]


class TestAPlan:
    @on_virtual_time
    async def test_is_made_when_all_members_have_offered(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(10), min_workers=2)
            await stage.come("b")
            await stage.stop()
            await stage.offer("a")
            assert await refused(stage.part("a")) == "plan_pending"
            assert stage.facts(TransfersPlanned) == []
            shown = await stage.kernel.bus.ask(ShowTransfers(JOB))
            assert (shown.running, shown.waiting_for, shown.planned) == (True, ["b"], False)
            await stage.offer("b")
            assert (await stage.kernel.bus.ask(ShowTransfers(JOB))).planned
            (planned,) = stage.facts(TransfersPlanned)
            assert (planned.attempt, planned.totals.transfers, planned.totals.from_owners) == (1, 5, 5)

    @on_virtual_time
    async def test_takes_effect_with_the_commit(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(10), min_workers=2)
            await stage.come("b")
            await stage.offer_all()
            await stage.fetch("a", "b")
            assert (await stage.kernel.bus.ask(ShowData(JOB))).generation == 0
            await stage.commit("a", "b")
            shown = await stage.kernel.bus.ask(ShowData(JOB))
            assert [(one.worker_id, one.owned, one.samples) for one in shown.workers] == [("a", 5, 500), ("b", 5, 500)]
            assert shown.generation == 1
            assert stage.owners() == stage.held
            page = await stage.kernel.bus.ask(ReadOwners(JOB))
            assert (page.generation, page.more, len(page.owners)) == (1, False, 40)

    @on_virtual_time
    async def test_completes_once_when_all_members_have_finished(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(10), min_workers=2)
            await stage.come("b")
            await stage.offer_all()
            await stage.fetch("a")
            assert stage.facts(TransfersCompleted) == []
            await stage.fetch("b", "b", "a")
            (completed,) = stage.facts(TransfersCompleted)
            assert (completed.attempt, completed.transfers, completed.bytes) == (1, 5, 500)
            shown = await stage.kernel.bus.ask(ShowTransfers(JOB))
            assert (shown.running, shown.done, shown.bytes) == (False, 5, 500)

    @on_virtual_time
    async def test_of_a_newer_attempt_supersedes_the_older(self) -> None:
        async with data_fixture() as stage:
            await formed(stage)
            await stage.kernel.bus.ask(RescaleJob(JOB))
            await stage.offer_all()
            old = stage.attempt
            await stage.kernel.bus.ask(RescaleJob(JOB))
            assert stage.attempt == old + 1
            assert await refused(stage.offer("a", attempt=old)) == "attempt_over"
            await stage.stop()
            await stage.offer("a")
            for said in (stage.part("a", old), stage.workers["a"].ask(ReportShards(JOB, "a", b"", old))):
                assert await refused(said) == "attempt_over"
            await stage.offer("b")
            await stage.fetch("a", "b")
            assert (await stage.commit("a", "b")).attempt == old + 1

    @on_virtual_time
    async def test_is_for_members_with_data_only(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(10), min_workers=2)
            await stage.worker("b").join()
            await stage.wait(0.1)
            await stage.stop()
            await stage.offer("a")
            await stage.fetch("a")
            await stage.workers["a"].ready(1)
            await stage.workers["b"].ready(1)
            await stage.kernel.settle()
            assert stage.owners() == {"a": ALL}
            assert stage.facts(RescaleCompleted)[-1].delta.generation == 1

    @on_virtual_time
    async def test_is_made_when_the_last_offer_is_repeated(self) -> None:
        """The client abandoned its request before the plan was made."""
        async with data_fixture() as stage:
            await stage.come("a", *range(10))
            await stage.stop()
            offer = OfferShards(JOB, "a", stage.workers["a"].incarnation, 1, DATASET)
            ownership = stage.data._defined(offer, await stage.data._members(offer))
            ownership.begin(1, (stage.service.coordinators[JOB].members["a"].worker,), (), 0.0)
            assert ownership.offer(ownership.member("a"), np.arange(10), False, 0, 0.0)
            await stage.offer("a")
            assert len(stage.facts(TransfersPlanned)) == 1
            await stage.offer("a")
            assert len(stage.facts(TransfersPlanned)) == 1

    @on_virtual_time
    async def test_waits_for_all_parts_of_an_offer(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a")
            await stage.stop()
            await stage.offer("a", held=np.arange(6, dtype="<i8").tobytes(), more=True)
            assert stage.facts(TransfersPlanned) == []
            await stage.offer("a", held=np.arange(5, 10, dtype="<i8").tobytes())
            assert stage.facts(TransfersPlanned)[0].totals.transfers == 0

    @on_virtual_time
    async def test_preview_changes_nothing(self) -> None:
        async with data_fixture() as stage:
            await formed(stage)
            before = len(stage.records())
            totals = await stage.kernel.bus.ask(PlanData(JOB, ["a", "b", "c"]))
            assert (totals.transfers, totals.from_owners) == (3, 3)
            assert len(stage.records()) == before

    @on_virtual_time
    async def test_gives_shares_by_weight_and_shows_the_weights(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(10), min_workers=2)
            await stage.come("b")
            await stage.stop()
            await stage.offer("a", weight=1.0)
            await stage.offer("b", weight=4.0)
            await stage.fetch("a", "b")
            await stage.commit("a", "b")
            shown = await stage.kernel.bus.ask(ShowData(JOB))
            assert [(one.worker_id, one.owned, one.weight) for one in shown.workers] == [("a", 2, 1.0), ("b", 8, 4.0)]

    @on_virtual_time
    async def test_is_made_after_an_offer_with_an_invalid_weight(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(10), min_workers=2)
            await stage.come("b")
            await stage.stop()
            await stage.offer("a")
            for weight in (0.0, -1.0, float("nan"), float("inf")):
                assert await refused(stage.offer("b", weight=weight)) == "weight_invalid"
            assert stage.facts(TransfersPlanned) == []
            await stage.offer("b")
            assert len(stage.facts(TransfersPlanned)) == 1

    @on_virtual_time
    async def test_and_views_are_computed_outside_the_event_loop(self) -> None:
        done: list[object] = []

        async def elsewhere(act: Callable[[], Any]) -> Any:
            await anyio.sleep(1)
            done.append(act())
            return done[-1]

        async with data_fixture() as stage:
            stage.data._computations._compute = elsewhere
            await formed(stage)
            answers = [await stage.kernel.bus.ask(said) for said in (ShowData(JOB), PlanData(JOB, ["a", "b", "c"]))]
            assert isinstance(done[0], Draft)
            assert done[1:] == answers


class TestCausesOfDataFacts:
    @on_virtual_time
    async def test_follow_from_the_rescale_and_are_in_its_story(self) -> None:
        async with data_fixture() as stage:
            await formed(stage)
            await stage.come("c")
            started = stage.last(RescaleStarted)
            await stage.offer_all()
            await stage.fetch("a", "b", "c")
            await stage.commit("a", "b", "c")
            found = [stage.last(kind) for kind in (TransfersPlanned, TransfersCompleted)]
            assert [(record.cause, record.generation) for record in found] == [(started.id, 1)] * 2
            story = [record.type for record in stage.kernel.journal.story(started.id)]
            assert {"TransfersPlanned", "TransfersCompleted"} <= set(story)

    @on_virtual_time
    async def test_bad_copy_follows_from_the_rescale_in_which_it_was_found(self) -> None:
        async with data_fixture() as stage:
            await formed(stage)
            await stage.come("c")
            started = stage.last(RescaleStarted)
            await stage.offer_all()
            await stage.report_corrupt("c", "a", 3)
            found = stage.last(CorruptShardFound)
            assert (found.cause, found.generation) == (started.id, 1)

    @on_virtual_time
    async def test_dataset_follows_from_the_first_join(self) -> None:
        async with data_fixture() as stage:
            await formed(stage)
            assert stage.last(DatasetDefined).cause == stage.records(WorkerJoined)[0].id

    @on_virtual_time
    async def test_lost_shards_follow_from_the_rescale(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(8))
            await stage.stop()
            await stage.offer("a")
            lost = stage.last(ShardsLost)
            assert (lost.cause, lost.generation) == (stage.last(RescaleStarted).id, 0)

    @on_virtual_time
    async def test_bad_copy_found_by_a_script_has_no_cause(self) -> None:
        async with data_fixture() as stage:
            await formed(stage)
            await stage.report_corrupt("b", "a", 3)
            found = stage.last(CorruptShardFound)
            assert (found.cause, found.generation) == (0, 1)


class TestProgress:
    @on_virtual_time
    async def test_is_shown_by_worker_as_signalled(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(10), min_workers=2)
            await stage.come("b")
            await stage.offer_all()
            b = stage.workers["b"]
            for attempt, data in ((1, 300), (0, 900)):
                said = AttemptProgress(JOB, "b", b.incarnation, attempt, 5_000, shards=data // 100, data_bytes=data)
                stage.kernel.bus.signal(said, Call(OPERATOR, "a test", client=b.client))
                await stage.wait(0.1)
            shown = await stage.kernel.bus.ask(ShowTransfers(JOB))
            told = {one.worker_id: (one.done, one.transfers, one.bytes) for one in shown.workers}
            assert told == {"a": (0, 0, 0), "b": (3, 5, 300)}
            assert (shown.done, shown.bytes) == (3, 300)

    @on_virtual_time
    async def test_bad_copy_is_published(self) -> None:
        async with data_fixture() as stage:
            await formed(stage)
            await stage.report_corrupt("b", "a", 3)
            assert stage.facts(CorruptShardFound) == [CorruptShardFound("a", 3, "b")]

    @on_virtual_time
    async def test_bad_copy_is_published_once_per_attempt(self) -> None:
        async with data_fixture() as stage:
            await formed(stage)
            for source, shard in (("a", 3), ("a", 3), ("a", 4)):
                await stage.report_corrupt("b", source, shard)
            assert [fact.shard for fact in stage.facts(CorruptShardFound)] == [3, 4]
            await stage.kernel.bus.ask(RescaleJob(JOB))
            await stage.offer_all()
            await stage.report_corrupt("b", "a", 3)
            assert [fact.shard for fact in stage.facts(CorruptShardFound)] == [3, 4, 3]
            assert await refused(stage.report_corrupt("b", "a", 10)) == "shard_invalid"

    @on_virtual_time
    async def test_attempt_restarts_for_a_suspect_copy_that_the_plan_uses(self) -> None:
        dataset = DatasetSpec(1_000, 10, 1)
        async with data_fixture() as stage:
            await stage.come("a", *range(10), min_workers=2)
            await stage.come("b")
            await stage.offer_all(dataset)
            await stage.report_corrupt("b", "a", 3)
            await stage.report_corrupt("b", "a", 4)
            await stage.fetch("a")
            await stage.workers["a"].ready(1)
            assert await refused(stage.fetch("b")) == "attempt_over"
            await stage.wait(0.1)
            assert stage.attempt == 2
            reason = "the copy of shard 3 at a is suspect, and 1 other; a, b joined"
            assert stage.facts(RescaleStarted)[-1].reason == reason
            assert stage.facts(TransfersCompleted) == []
            assert stage.facts(RescaleCompleted) == []
            await stage.stop()
            await stage.offer("b", dataset=dataset)
            # It may be another process than the one that was told.
            assert (await stage.offer("a", dataset=dataset)).suspect == int64(3, 4)
            assert (await stage.offer("a", dataset=dataset, verified=int64(4))).suspect == int64(3)
            assert len(stage.facts(TransfersPlanned)) == 1
            stage.held["a"] -= {3}
            assert not (await stage.offer("a", dataset=dataset, verified=int64(3))).suspect
            await stage.fetch("a", "b")
            await stage.commit("a", "b")
            assert stage.held["a"] == stage.held["b"] == set(range(10))

    @on_virtual_time
    async def test_attempt_continues_with_a_suspect_copy_that_the_plan_does_not_use(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(10), min_workers=2)
            await stage.come("b")
            await stage.offer_all()
            moved = np.frombuffer((await stage.part("b")).shards, "<i8").tolist()
            await stage.report_corrupt("b", "a", moved[0])
            await stage.fetch("a", "b")
            await stage.commit("a", "b")
            assert [fact.attempt for fact in stage.facts(RescaleCompleted)] == [1]

    @on_virtual_time
    async def test_background_offer_with_a_suspect_copy_stops_training(self) -> None:
        async with data_fixture() as stage:
            await formed(stage, use_synchronous_rescaling=False)
            await stage.report_corrupt("b", "a", 3)
            await stage.come("c")
            assert stage.facts(RescaleStarted)[-1].in_background
            await stage.offer("b")
            # The second time it comes before anything was done about the first.
            codes: list[str] = []

            async def offer() -> None:
                codes.append(await refused(stage.offer("a", 2)))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(offer)
                tasks.start_soon(offer)
            assert codes == ["attempt_over"] * 2
            await stage.wait(0.1)
            started = stage.facts(RescaleStarted)[-1]
            assert (started.attempt, started.in_background) == (3, False)
            assert started.reason == "a has to verify suspect copies; c joined"
            await stage.stop()
            assert (await stage.offer("a")).suspect == int64(3)
            for name in "abc":
                await stage.offer(name, verified=int64(3) if name == "a" else b"")
            await stage.fetch("a", "b", "c")
            await stage.commit("a", "b", "c")
            assert stage.facts(WorkerFailed) == []

    @on_virtual_time
    async def test_suspect_copy_that_is_gone_stops_no_training(self) -> None:
        store = FaultyStore()
        async with data_fixture(store) as stage:
            await stage.come("a", *range(10), min_workers=2, use_synchronous_rescaling=False)
            await stage.come("b")
            await stage.offer_all()
            moved = np.frombuffer((await stage.part("b")).shards, "<i8").tolist()
            await stage.report_corrupt("b", "a", moved[0])
            await stage.fetch("a", "b")
            await stage.commit("a", "b")
            assert moved[0] not in stage.held["a"]
            assert f"{JOB}/suspect/a/{moved[0]}" in await keys_in(store)
            await stage.come("c")
            for name in "abc":
                assert not (await stage.offer(name)).suspect
            assert not [key for key in await keys_in(store) if "suspect" in key]
            await stage.fetch("a", "b", "c")
            await stage.commit("a", "b", "c")
            assert [fact.in_background for fact in stage.facts(RescaleStarted)] == [False, True]

    @on_virtual_time
    async def test_too_many_suspect_copies_are_logged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(suspect_copies, "SUSPECTS_MAX", 1)
        log = RecordingLog()
        async with data_fixture() as stage:
            stage.data._log = log
            await formed(stage)
            for shard in (3, 4):
                await stage.report_corrupt("b", "a", shard)
            assert [fact.shard for fact in stage.facts(CorruptShardFound)] == [3, 4]
            said = "too many suspect copies; some are trusted again"
            assert log.lines == [("warning", said, {"job": JOB, "copies": 1})]

    @on_virtual_time
    async def test_bad_copy_of_an_invalid_worker_name_is_refused(self) -> None:
        async with data_fixture() as stage:
            await formed(stage)
            assert await refused(stage.report_corrupt("b", "a/b", 3)) == "name_invalid"
            assert stage.facts(CorruptShardFound) == []

    @on_virtual_time
    async def test_attempt_restarts_when_only_bad_copies_are_found(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(10), min_workers=2)
            await stage.come("b")
            await stage.offer_all()
            await stage.workers["b"].ask(ReportShards(JOB, "b", stage.workers["b"].incarnation, 1, missing=1))
            await stage.wait(0.1)
            assert stage.attempt == 2
            assert "b found only bad copies of 1 shard" in stage.facts(RescaleStarted)[-1].reason
            assert (
                await refused(
                    stage.workers["b"].ask(ReportShards(JOB, "b", stage.workers["b"].incarnation, 1, missing=1))
                )
                == "attempt_over"
            )

    async def test_report_with_another_incarnation_does_not_count(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(10), min_workers=2)
            await stage.come("b")
            await stage.offer_all()
            forged_report = ReportShards(JOB, "b", stage.workers["a"].incarnation, 1, missing=1)
            assert await refused(stage.workers["a"].ask(forged_report)) == "attempt_over"
            await stage.wait(0.1)
            assert stage.attempt == 1

    async def test_transfers_are_read_and_bad_copies_reported_in_ones_own_name_only(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(10), min_workers=2)
            await stage.come("b")
            await stage.offer_all()
            a, b = stage.workers["a"], stage.workers["b"]
            for incarnation in (a.incarnation, b"", bytes(16)):
                assert await refused(a.ask(ReadTransfers(JOB, "b", incarnation, stage.attempt))) == "attempt_over"
                assert await refused(a.ask(ReportCorruptShard(JOB, "b", incarnation, "a", 3))) == "worker_gone"
            assert await b.ask(ReadTransfers(JOB, "b", b.incarnation, stage.attempt)) == await stage.part("b")
            assert stage.facts(CorruptShardFound) == []


async def doubted_by_b(stage: DataFixture, dataset: DatasetSpec, **settings: Any) -> None:
    """Form a world of a and b, in which b reports a's copy of shard 3 as bad."""
    await stage.come("a", *range(10), min_workers=1, **settings)
    await stage.rescale("a", dataset=dataset)
    await stage.come("b")
    await stage.rescale("a", "b", dataset=dataset)
    await stage.report_corrupt("b", "a", 3)


class TestADaemonThatIsKilled:
    async def _again(self, store: FaultyStore) -> FaultyStore:
        return FaultyStore(store.memory)

    @pytest.mark.parametrize("stops", [True, False])
    @on_virtual_time
    async def test_remembers_suspect_copies(self, stops: bool) -> None:
        store = FaultyStore()
        async with data_fixture(store) as stage:
            await formed(stage, use_synchronous_rescaling=stops)
            for shard in (3, 4):
                await stage.report_corrupt("b", "a", shard)
            held = stage.held
        store = await self._again(store)
        async with data_fixture(store) as stage:
            stage.held = held
            await stage.come_again("a", "b")
            await stage.come("c")
            if not stops:
                assert await refused(stage.offer("a")) == "attempt_over"
                await stage.wait(0.1)
            await stage.stop()
            assert (await stage.offer("a")).suspect == int64(3, 4)
            assert (await stage.offer("a", verified=int64(3))).suspect == int64(4)
            assert [key for key in await keys_in(store) if "suspect" in key] == [f"{JOB}/suspect/a/4"]
            assert not (await stage.offer("a", verified=int64(4))).suspect
            assert not [key for key in await keys_in(store) if "suspect" in key]

    @on_virtual_time
    async def test_remembers_suspect_copies_of_an_absent_worker(self) -> None:
        dataset = DatasetSpec(1_000, 10, 1)
        store = FaultyStore()
        async with data_fixture(store) as stage:
            await doubted_by_b(stage, dataset)
            await stage.kernel.bus.ask(EvictWorker(JOB, "a"))
            await stage.wait(0.1)
            await stage.rescale("b", dataset=dataset)
        async with data_fixture(await self._again(store)) as stage:
            stage.held = {"b": set(ALL)}
            await stage.come_again("b")
            await stage.come("a", *ALL, life=2)
            await stage.stop()
            assert (await stage.offer("a", dataset=dataset)).suspect == int64(3)

    @on_virtual_time
    @pytest.mark.parametrize("stops", [True, False])
    async def test_has_a_replacement_verify_a_suspect_copy_once(self, stops: bool) -> None:
        """No stop is needed, because the worker does not train yet."""
        dataset = DatasetSpec(1_000, 10, 1)
        async with data_fixture() as stage:
            await doubted_by_b(stage, dataset, use_synchronous_rescaling=stops)
            await stage.kernel.bus.ask(EvictWorker(JOB, "a"))
            await stage.wait(0.1)
            await stage.rescale("b", dataset=dataset)
            await stage.come("c", *ALL)
            if stops:
                await stage.stop()
            assert stage.facts(RescaleStarted)[-1].in_background is not stops
            assert not (await stage.offer("b", dataset=dataset)).suspect, "b is where it was"
            assert (await stage.offer("c", dataset=dataset)).suspect == int64(3)
            assert not (await stage.offer("c", dataset=dataset, verified=int64(3))).suspect

    @on_virtual_time
    async def test_has_an_immediate_replacement_verify_a_suspect_copy(self) -> None:
        """The failed worker is still in the committed world."""
        dataset = DatasetSpec(1_000, 10, 1)
        async with data_fixture() as stage:
            await doubted_by_b(stage, dataset)
            await stage.come("c", *ALL)
            await stage.kernel.bus.ask(EvictWorker(JOB, "a"))
            await stage.wait(0.2)
            await stage.stop()
            attempt = stage.service.coordinators[JOB].attempt
            assert attempt is not None
            assert set(attempt.target) == {"b", "c"}
            assert not (await stage.offer("b", dataset=dataset)).suspect
            assert (await stage.offer("c", dataset=dataset)).suspect == int64(3)

    @on_virtual_time
    async def test_before_the_plan_is_stored_restarts_the_attempt(self) -> None:
        store = FaultyStore()
        async with data_fixture(store) as stage:
            await stage.come("a", *range(10), min_workers=2)
            await stage.come("b")
            await stage.stop()
            await stage.offer("a")
        async with data_fixture(await self._again(store)) as stage:
            stage.held = {"a": set(ALL), "b": set()}
            await stage.come_again("a", "b")
            assert await refused(stage.offer("b", attempt=1)) == "attempt_over"
            assert stage.attempt == 2
            await stage.rescale("a", "b")
            assert stage.owners() == stage.held

    @on_virtual_time
    async def test_deletes_a_plan_without_commit(self) -> None:
        store = FaultyStore()
        async with data_fixture(store) as stage:
            await stage.come("a", *range(10), min_workers=2)
            await stage.come("b")
            await stage.offer_all()
            held = stage.held
        again = await self._again(store)
        assert f"{JOB}/holders/1" in await keys_in(again)
        async with data_fixture(again) as stage:
            stage.held = held
            assert stage.data.jobs[JOB].assignment.generation == 0
            await stage.come_again("a", "b")
            await stage.rescale("a", "b")
            assert stage.owners() == stage.held
            assert await keys_in(again) == [f"{JOB}/dataset", f"{JOB}/holders/2", f"{JOB}/piece/2/0/0"]

    @on_virtual_time
    async def test_remembers_the_weights(self) -> None:
        store = FaultyStore()
        async with data_fixture(store) as stage:
            await stage.come("a", *range(10), min_workers=2)
            await stage.come("b")
            await stage.stop()
            await stage.offer("a", weight=4.0)
            await stage.offer("b")
            await stage.fetch("a", "b")
            await stage.commit("a", "b")
        async with data_fixture(await self._again(store)) as stage:
            shown = await stage.kernel.bus.ask(ShowData(JOB))
            assert [(one.worker_id, one.owned, one.weight) for one in shown.workers] == [("a", 8, 4.0), ("b", 2, 1.0)]
            assert (await stage.kernel.bus.ask(PlanData(JOB, ["a", "b"]))).transfers == 0

    @pytest.mark.parametrize("is_durable", [True, False], ids=["behind the commit", "before it"])
    def test_restart_at_the_commit_adopts_the_committed_assignment(self, is_durable: bool) -> None:
        @on_virtual_time
        async def test() -> None:
            store = FaultyStore()
            async with data_fixture(store) as stage:
                await formed(stage)
                before = stage.owners()
                await stage.kernel.bus.ask(RescaleJob(JOB))
                stage.held = {"a": set(ALL), "b": set()}
                await stage.offer_all()
                await stage.fetch("a", "b")
                planned = stage.data._store._planned[JOB][2]
                await stage.workers["a"].ready(2)
                store.dies = "after" if is_durable else "before"
                # The answer never comes: the process is killed while the commit is written.
                store.entered.clear()
                stage.kernel.bus.submit(
                    ReportReady(JOB, "b", stage.workers["b"].incarnation, 2), Call(OPERATOR, "a test")
                )
                await store.entered.wait()
                await anyio.sleep(1)
            async with data_fixture(await self._again(store)) as stage:
                await stage.kernel.settle()
                assignment = stage.data.jobs[JOB].assignment
                if is_durable:
                    assert assignment.generation == 2
                    assert (assignment.owners == planned.owners).all()
                    assert await keys_in(store.memory) == [
                        f"{JOB}/dataset",
                        f"{JOB}/holders/2",
                        f"{JOB}/piece/2/0/0",
                    ]
                else:
                    assert (assignment.generation, stage.owners()) == (1, before)

        test()

    @on_virtual_time
    async def test_while_it_deletes_a_job_completes_the_deletion(self) -> None:
        store = FaultyStore()
        async with data_fixture(store) as stage:
            await formed(stage)
            held = stage.held
            pieces = ["piece/1/0/0", "piece/7/0/0", "piece/7/1/0"]
            stray = {f"data/{JOB}/{piece}": b"\0" * 20 for piece in pieces[1:]}
            stage.kernel.ledger.append(Decision(None, writes={**stray, "data/gone/holders/3": b"", "data/gone/x": b""}))
            await stage.kernel.settle()
        again = await self._again(store)
        async with data_fixture(again) as stage:
            stage.held = held
            await stage.come_again("a", "b")
            await stage.kernel.bus.ask(RescaleJob(JOB))
            await stage.rescale("a", "b")
            assert await keys_in(again) == [f"{JOB}/dataset", f"{JOB}/holders/2", f"{JOB}/piece/2/0/0"]


class TestAFullDisk:
    @on_virtual_time
    async def test_while_the_plan_is_stored_fails_only_the_attempt(self) -> None:
        store = FaultyStore()
        async with data_fixture(store) as stage:
            await formed(stage)
            await stage.kernel.bus.ask(RescaleJob(JOB))
            await stage.stop()
            await stage.offer("a")
            store.commit_error = full()
            with pytest.raises(Unavailable):
                await stage.offer("b")
            store.commit_error = None
            await stage.wait(10.0)
            assert stage.owners() == stage.held
            await stage.rescale("a", "b")
            assert stage.owners() == stage.held
            assert stage.facts(RescaleCompleted)[-1].delta.generation == 2


class TestAJobThatIsRemoved:
    @on_virtual_time
    async def test_leaves_nothing(self) -> None:
        store = FaultyStore()
        async with data_fixture(store) as stage:
            await formed(stage)
            await stage.kernel.bus.ask(RescaleJob(JOB))
            await stage.offer_all()
            await stage.report_corrupt("b", "a", 3)
            assert len(await keys_in(store)) == 6
            await stage.kernel.bus.ask(AbortJob(JOB))
            for name in "ab":
                await stage.workers[name].leave()
            await stage.kernel.bus.ask(RemoveJob(JOB))
            await stage.kernel.settle()
            assert await keys_in(store) == []
            assert await refused(stage.kernel.bus.ask(ShowData(JOB))) == "job_unknown"
            await stage.come("a", life=2)
            await stage.rescale("a", dataset=DatasetSpec(70, 7, 0, True))
            assert stage.owners() == {"a": set(range(7))}


class TestBackgroundRescale:
    @on_virtual_time
    async def test_plan_is_made_and_committed_during_training(self) -> None:
        async with data_fixture() as stage:
            await formed(stage, use_synchronous_rescaling=False)
            await stage.come("c")
            assert stage.facts(RescaleStarted)[-1].in_background
            for name in "abc":
                await stage.offer(name)
            await stage.fetch("a", "b", "c")
            assert stage.owners() == {"a": set(range(5)), "b": set(range(5, 10))}
            completed = await stage.commit("a", "b", "c")
            assert completed.step is None
            assert stage.owners() == stage.held
            assert sorted(map(len, stage.held.values())) == [3, 3, 4]

    @on_virtual_time
    async def test_lost_shards_stop_training_and_are_published(self) -> None:
        async with data_fixture() as stage:
            await formed(stage, use_synchronous_rescaling=False)
            stage.held["a"] -= {0}
            await stage.kernel.bus.ask(RescaleJob(JOB))
            for name in "ab":
                await stage.offer(name)
            await stage.kernel.settle()
            *_, behind, ahead = stage.facts(RescaleStarted)
            assert (behind.in_background, ahead.in_background) == (True, False)
            assert ahead.reason.endswith("no worker has 1 shard")
            assert stage.facts(ShardsLost) == []
            await stage.offer_all()
            assert stage.facts(ShardsLost) == [ShardsLost(ahead.attempt, 1, [0])]
            await stage.wait(5.0)
            assert stage.facts(RescaleStarted)[-1] == ahead

    @on_virtual_time
    async def test_lost_shards_abort_the_job_by_policy(self) -> None:
        async with data_fixture() as stage:
            await formed(stage, use_synchronous_rescaling=False, lost_data_policy="abort")
            stage.held["a"] -= {0}
            await stage.kernel.bus.ask(RescaleJob(JOB))
            for name in "ab":
                await stage.offer(name)
            await stage.kernel.settle()
            await stage.offer_all()
            await stage.kernel.settle()
            assert [fact.reason for fact in stage.facts(JobAborted)] == ["1 shard lost: 0"]


class TestLostShards:
    @on_virtual_time
    async def test_are_published_and_the_job_waits(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(8), rescale_silence_ms=500)
            await stage.stop()
            await stage.offer("a")
            assert stage.facts(ShardsLost) == [ShardsLost(1, 2, [8, 9])]
            with pytest.raises(RequestRefused) as error:
                await stage.part("a")
            assert (error.value.code, error.value.message) == (SHARDS_LOST, "no worker has 2 shards: 8, 9")
            shown = await stage.kernel.bus.ask(ShowTransfers(JOB))
            assert (shown.running, shown.waiting_for, shown.lost, shown.lost_shards) == (True, [], 2, [8, 9])

    @on_virtual_time
    async def test_name_the_workers_that_held_them_last(self) -> None:
        async with data_fixture() as stage:
            await formed(stage, failure_tolerance_percentage=100, min_workers_timeout_ms=None)
            await stage.workers["b"].leave()
            await stage.come("c")
            await stage.offer_all()
            lost = stage.facts(ShardsLost)[-1]
            assert (lost.shards, lost.last_held_by) == ([5, 6, 7, 8, 9], ["b"])
            with pytest.raises(RequestRefused) as error:
                await stage.part("a")
            assert error.value.message == "no worker has 5 shards: 5, 6, 7, 8, 9; last held by b"
            transfers = await stage.kernel.bus.ask(ShowTransfers(JOB))
            shown = await stage.kernel.bus.ask(ShowData(JOB))
            assert transfers.last_held_by == shown.last_held_by == ["b"]
            assert (shown.lost, shown.lost_shards) == (5, [5, 6, 7, 8, 9])

    @on_virtual_time
    async def test_are_not_waited_for_after_an_abort(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(8), lost_data_policy="abort")
            await stage.stop()
            await stage.offer("a")
            await stage.kernel.settle()
            shown = await stage.kernel.bus.ask(ShowTransfers(JOB))
            assert (shown.running, shown.aborted, shown.lost) == (False, True, 2)

    @on_virtual_time
    async def test_are_waited_for_without_timeout_by_members_that_offered(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(8), rescale_silence_ms=500)
            await stage.stop()
            await stage.offer("a")
            for _ in range(60):
                stage.says_it_waits("a")
                await stage.wait(1.0)
            assert stage.facts(WorkerFailed) == []
            assert stage.attempt == 1

    @on_virtual_time
    async def test_do_not_protect_a_member_that_has_not_offered(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(8), min_workers=2, rescale_silence_ms=500)
            await stage.come("b")
            await stage.stop()
            await stage.offer("a")
            for _ in range(4):
                stage.says_it_waits("a")
                await stage.wait(0.5)
            assert [fact.worker_id for fact in stage.facts(WorkerFailed)] == ["b"]

    @on_virtual_time
    async def test_do_not_protect_a_member_that_stopped_waiting(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(10), min_workers=2, rescale_silence_ms=500)
            await stage.come("b")
            await stage.offer_all()
            stage.says_it_waits("a", "b")
            await stage.wait(0.4)
            worker = stage.workers["b"]
            said = AttemptProgress(JOB, "b", worker.incarnation, 1, 0)
            stage.kernel.bus.signal(said, Call(OPERATOR, "a test", client=worker.client))
            await stage.wait(1.0)
            assert [fact.worker_id for fact in stage.facts(WorkerFailed)] == ["b"]

    @on_virtual_time
    async def test_that_a_joiner_holds_let_the_job_continue(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(8))
            await stage.stop()
            await stage.offer("a")
            await stage.come("b", 8, 9)
            assert stage.attempt == 2
            assert "may hold lost shards" in stage.facts(RescaleStarted)[-1].reason
            await stage.rescale("a", "b")
            assert union(stage.owners().values()) == ALL
            assert stage.owners() == stage.held

    @on_virtual_time
    async def test_that_an_earlier_joiner_holds_let_the_job_continue(self) -> None:
        async with data_fixture() as stage:
            await formed(stage)
            await stage.workers["b"].leave(failed=True)
            await stage.come("b2", min_workers=2)
            await stage.stop()
            await stage.offer("a")
            await stage.come("c", *range(5, 10))
            assert stage.attempt == 2
            await stage.offer("b2")
            await stage.wait(0.1)
            assert stage.attempt == 3
            await stage.rescale("a", "b2", "c")
            assert union(stage.owners().values()) == ALL

    @on_virtual_time
    async def test_do_not_restart_the_attempt_for_workers_outside_a_full_world(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(8), max_workers=1)
            await stage.stop()
            await stage.come("b", 8, 9)
            await stage.offer("a")
            await stage.wait(5.0)
            assert len(stage.facts(RescaleStarted)) == 1

    @on_virtual_time
    async def test_report_how_many_waiting_workers_were_not_asked(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(8), max_workers=1)
            await stage.come("b", 8, 9)
            await stage.stop()
            await stage.offer("a")
            reason = "1 waiting worker was not asked, because the world is full"
            assert stage.facts(ShardsLost) == [ShardsLost(1, 2, [8, 9], reason)]
            assert (await stage.kernel.bus.ask(ShowTransfers(JOB))).lost_because == reason
            assert (await stage.kernel.bus.ask(ShowCluster(JOB))).stall_report.endswith(
                "; 1 worker waits until another leaves: max_workers is 1"
            )

    @on_virtual_time
    async def test_that_the_replacement_of_an_evicted_worker_holds_are_found(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(8), max_workers=1)
            await stage.stop()
            await stage.offer("a")
            await stage.come("b", *ALL)
            assert stage.attempt == 2
            await stage.offer_all()
            assert stage.facts(ShardsLost)[-1].reason.startswith("1 waiting worker was not asked")
            await stage.kernel.bus.ask(EvictWorker(JOB, "a"))
            await stage.wait(0.1)
            await stage.rescale("b")
            assert stage.owners() == {"b": ALL}

    @on_virtual_time
    async def test_restart_the_attempt_once_for_several_joiners(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(8))
            await stage.stop()
            await stage.offer("a")
            for name in "bc":
                stage.held[name] = {8, 9}
            async with anyio.create_task_group() as tasks:
                for name in "bc":
                    tasks.start_soon(partial(stage.worker(name).join, None, with_data=True))
            await stage.wait(0.1)
            assert stage.attempt == 2

    @on_virtual_time
    async def test_abort_the_job_by_policy(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(8), lost_data_policy="abort")
            await stage.stop()
            await stage.offer("a")
            await stage.kernel.settle()
            (aborted,) = stage.facts(JobAborted)
            assert aborted.reason == "2 shards lost: 8, 9"
            assert stage.facts(ShardsLost) == [ShardsLost(1, 2, [8, 9])]

    @on_virtual_time
    async def test_are_none_with_an_origin(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a")
            dataset = DatasetSpec(1_000, 10, 0, True)
            await stage.rescale("a", dataset=dataset)
            assert stage.owners() == {"a": ALL}
            assert stage.facts(TransfersPlanned)[0].totals.from_origin == 10


class TestShardsTheOriginRefuses:
    WITH_ORIGIN = DatasetSpec(1_000, 10, 0, True)

    async def partial(self, stage: DataFixture, **settings: Any) -> None:
        """Two workers without shards."""
        await stage.come("a", min_workers=2, **settings)
        await stage.come("b")
        await stage.offer_all(self.WITH_ORIGIN)

    async def say(self, stage: DataFixture, name: str, *shards: int, certain: bool = False, **more: Any) -> None:
        worker = stage.workers[name]
        said = ReportLostShards(JOB, name, worker.incarnation, stage.attempt, len(shards), list(shards), "no file")
        await worker.ask(msgspec.structs.replace(said, certain=certain, **more))
        await stage.kernel.settle()

    @on_virtual_time
    async def test_are_published_with_the_reporting_worker_and_the_job_waits(self) -> None:
        async with data_fixture() as stage:
            await self.partial(stage)
            await self.say(stage, "b", 1, 3, certain=True)
            await self.say(stage, "b", 1, 3, certain=True)
            assert stage.facts(ShardsLost) == [ShardsLost(1, 2, [1, 3], "b: no file")]
            shown = await stage.kernel.bus.ask(ShowTransfers(JOB))
            assert (shown.running, shown.lost, shown.lost_shards, shown.lost_because) == (True, 2, [1, 3], "b: no file")
            assert (stage.attempt, stage.facts(JobAborted)) == (1, [])

    @on_virtual_time
    async def test_are_no_longer_lost_when_the_member_finishes(self) -> None:
        async with data_fixture() as stage:
            await self.partial(stage)
            await self.say(stage, "b", 1, 3)
            await stage.fetch("a", "b")
            assert (await stage.kernel.bus.ask(ShowTransfers(JOB))).lost == 0
            await stage.commit("a", "b")
            assert stage.owners() == stage.held

    @on_virtual_time
    async def test_are_fetched_from_a_member_that_got_them(self) -> None:
        dataset = DatasetSpec(1_000, 10, 1, True)
        async with data_fixture() as stage:
            await stage.come("a", min_workers=2, lost_data_policy="abort")
            await stage.come("b")
            await stage.offer_all(dataset)
            await stage.fetch("a")
            await self.say(stage, "b", 1, 3, certain=True)
            assert (stage.facts(ShardsLost), stage.facts(JobAborted)) == ([], [])
            assert stage.attempt == 2
            await stage.offer_all(dataset)
            assert stage.facts(TransfersPlanned)[-1].totals.from_origin == 0

    @on_virtual_time
    async def test_are_looked_for_at_a_joiner(self) -> None:
        async with data_fixture() as stage:
            await self.partial(stage)
            await self.say(stage, "b", 1, 3)
            await stage.come("c", 1, 3)
            assert stage.attempt == 2
            assert "may hold lost shards" in stage.facts(RescaleStarted)[-1].reason
            await stage.rescale("a", "b", "c", dataset=self.WITH_ORIGIN)
            assert union(stage.owners().values()) == ALL

    @on_virtual_time
    async def test_are_looked_for_at_an_earlier_joiner(self) -> None:
        async with data_fixture() as stage:
            await self.partial(stage)
            await stage.come("c", 1, 3)
            assert stage.attempt == 1
            await self.say(stage, "b", 1, 3, certain=True)
            assert stage.attempt == 2

    @on_virtual_time
    async def test_abort_the_job_by_policy_when_certain(self) -> None:
        async with data_fixture() as stage:
            await self.partial(stage, lost_data_policy="abort")
            await self.say(stage, "b", 1, 3)
            assert stage.facts(JobAborted) == []
            await self.say(stage, "b", 1, 3, certain=True)
            (aborted,) = stage.facts(JobAborted)
            assert aborted.reason == "2 shards lost: 1, 3 (b: no file)"
            assert len(stage.facts(ShardsLost)) == 1

    @on_virtual_time
    async def test_stop_training_in_a_background_rescale(self) -> None:
        async with data_fixture() as stage:
            await self.partial(stage, use_synchronous_rescaling=False)
            await stage.fetch("a", "b")
            await stage.commit("a", "b")
            stage.held["b"].clear()
            await stage.kernel.bus.ask(RescaleJob(JOB))
            assert stage.facts(RescaleStarted)[-1].in_background
            for name in "ab":
                await stage.offer(name, dataset=self.WITH_ORIGIN)
            await self.say(stage, "b", 5)
            assert stage.facts(ShardsLost) == []
            assert (stage.attempt, stage.facts(RescaleStarted)[-1].in_background) == (3, False)
            await stage.offer_all(self.WITH_ORIGIN)
            await self.say(stage, "b", 5)
            assert stage.facts(ShardsLost) == [ShardsLost(3, 1, [5], "b: no file")]

    @on_virtual_time
    async def test_report_is_refused_from_non_members_and_for_unknown_shards(self) -> None:
        async with data_fixture() as stage:
            await self.partial(stage)
            assert await refused(self.say(stage, "b", 10)) == "shard_invalid"
            assert await refused(self.say(stage, "b", 1, attempt=7)) == "attempt_over"
            assert await refused(self.say(stage, "b", 1, incarnation=b"another")) == "attempt_over"
            assert stage.facts(ShardsLost) == []


class TestCommittedPlanBeforeItsFactArrives:
    @on_virtual_time
    async def test_is_kept_when_the_next_plan_is_made(self) -> None:
        """The commit is heard of later than the offers to the next attempt are."""
        store = FaultyStore()
        async with data_fixture(store) as stage:
            await formed(stage)
            await stage.kernel.bus.ask(RescaleJob(JOB))
            await stage.offer_all()
            await stage.fetch("a", "b")
            late: list[Record] = []
            commits = stage.kernel.bus.mailboxes["data.commits"]
            with patch.object(commits, "put", late.extend):
                await stage.commit("a", "b")
                await stage.kernel.bus.ask(RescaleJob(JOB))
                await stage.offer_all()
            assert sorted(stage.data._store._planned[JOB]) == [2, 3]
            commits.put(late)
            await stage.kernel.settle()
            assert stage.data.jobs[JOB].assignment.generation == 2
            assert sorted(stage.data._store._planned[JOB]) == [3]
            assert stage.owners() == stage.held

    @on_virtual_time
    async def test_is_deleted_when_a_later_plan_is_committed(self) -> None:
        store = FaultyStore()
        async with data_fixture(store) as stage:
            await formed(stage)
            stage.data._store._newest_commit[JOB] = 0
            for _ in range(3):
                await stage.kernel.bus.ask(RescaleJob(JOB))
                await stage.offer_all()
            assert sorted(stage.data._store._planned[JOB]) == [2, 3, 4]
            await stage.fetch("a", "b")
            await stage.commit("a", "b")
            assert await keys_in(store) == [f"{JOB}/dataset", f"{JOB}/holders/4", f"{JOB}/piece/4/0/0"]


class TestDrainingWorker:
    @on_virtual_time
    async def test_draining_worker_hands_over_shards_that_only_it_holds(self) -> None:
        async with data_fixture() as stage:
            await formed(stage)
            await stage.kernel.bus.ask(DrainWorker(JOB, "b"))
            assert stage.attempt == 2
            await stage.offer_all()
            assert [(await stage.part(name)).is_released for name in "ab"] == [False, True]
            await stage.fetch("a", "b")
            assert stage.facts(TransfersCompleted)[-1].transfers == 5
            await stage.commit("a", "b")
            assert stage.owners() == {"a": ALL}
            assert stage.held == {"a": set(ALL), "b": set()}

    @on_virtual_time
    async def test_last_of_two_draining_workers_takes_over_all_shards(self) -> None:
        async with data_fixture() as stage:
            await formed(stage)
            a, b = stage.workers["a"], stage.workers["b"]
            for one in (a, b):
                await one.ask(AnnounceLeave(JOB, one.name, one.incarnation, "the night"))
            assert stage.attempt == 2, "where all are to go, no other is wanted"
            await stage.offer_all()
            assert [(await stage.part(name)).is_released for name in "ab"] == [True, False]
            await stage.fetch("a", "b")
            await stage.commit("a", "b")
            assert stage.owners() == {"b": ALL}
            for one in (a, b):
                assert (await one.ask(ReadLeave(JOB, one.name, one.incarnation))).may_leave
            assert not stage.attempt

    @on_virtual_time
    async def test_that_was_drained_while_joining_gets_nothing(self) -> None:
        async with data_fixture() as stage:
            await stage.come("a", *range(10))
            await stage.rescale("a")
            await stage.come("b")
            assert stage.attempt == 2
            await stage.offer_all()
            await stage.kernel.bus.ask(DrainWorker(JOB, "b"))
            assert stage.attempt == 3
            await stage.rescale("a")
            assert stage.owners() == {"a": ALL}


class TestTwoJobs:
    @on_virtual_time
    async def test_are_independent(self) -> None:
        async with data_fixture() as stage:
            await formed(stage)
            before = stage.owners()
            await stage.come("z", job="other")
            worker = stage.workers["z"]
            await worker.stop(1)
            await worker.ask(OfferShards("other", "z", worker.incarnation, 1, DatasetSpec(7, 7, 2, True)))
            assert stage.data.jobs["other"].dataset.shards == 7
            assert stage.owners() == before
