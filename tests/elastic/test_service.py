"""The coordinator on the bus, with a store that may fail and a daemon that may die."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from forged.auth.model import Principal, Role
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.coordinator.job_coordinator import JobCoordinator
from forged.elastic.coordinator.records import PREFIX
from forged.elastic.failure_detector.detector import CONFIRM_S
from forged.elastic.messages import (
    AbortJob,
    AnnounceLeave,
    ClusterView,
    ControlReply,
    DrainWorker,
    EvictWorker,
    JobAborted,
    JobCompleted,
    JobReopened,
    JobWaiting,
    JoinJob,
    LeaveReply,
    ListClusters,
    ListWorkers,
    PauseJob,
    PlanRescale,
    Pulse,
    ReadLeave,
    ReadTopology,
    ReopenJob,
    ReportDeath,
    ReportStandstill,
    ReportUnreachablePeer,
    RescaleAborted,
    RescaleCompleted,
    RescaleJob,
    RescaleStarted,
    RescaleSynchronising,
    ResumeJob,
    ShowCluster,
    ShowWorker,
    WorkerFailed,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerStoodStill,
)
from forged.elastic.outbox import Moment
from forged.elastic.phases import Phase
from forged.elastic.request_checks import ATTRIBUTES_MAX, STANDSTILL_S_MAX
from forged.elastic.runtime.decisions import DECISION_ITEMS_MAX
from forged.elastic.runtime.job_loop import ERRORS_MAX, PROBES_MAX
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.jobs.model import ChangeJob, CreateJob, ListJobs, RemoveJob, SettingValue, ShowJob
from forged.kernel.ledger import read_all
from forged.kernel.messages import Call, Fence, Nothing
from forged.kernel.store.port import OPERATIONS_MAX, PAGE_ENTRIES_MAX, Entry, Store
from tests.elastic.coordinator_playbook import JOB, incarnation, worker_of
from tests.elastic.service_fixture import ServiceFixture, WorkerStub, service_fixture
from tests.faulty_store import FaultyStore, full
from tests.kernel_fixture import OPERATOR, on_virtual_time

PATIENT = {"failure_tolerance_percentage": 100, "max_consecutive_failures": 100_000}
SOON: dict[str, SettingValue] = {"stability_window_ms": 100}


async def keys(store: Store) -> list[str]:
    return [entry.key for entry in await read_all(store, PREFIX)]


def world(fixture: ServiceFixture) -> list[str]:
    return [worker.id for worker in fixture.service.coordinators[JOB].membership.topology.workers]


# What follows from what.


@on_virtual_time
async def test_the_first_world_follows_from_its_first_worker() -> None:
    async with service_fixture() as fixture:
        await fixture.form_world("a", "b")
        assert fixture.told() == [
            "WorkerJoined",
            "WorkerJoined",
            "RescaleStarted",
            "RescaleSynchronising",
            "RescaleCompleted",
        ]
        assert fixture.cause(RescaleStarted) == "WorkerJoined a"
        assert fixture.cause(RescaleSynchronising) == "RescaleStarted 1"
        assert fixture.cause(RescaleCompleted) == "RescaleStarted 1"


@on_virtual_time
async def test_a_rescale_follows_from_the_failure_that_made_it_necessary() -> None:
    async with service_fixture() as fixture:
        _, b, c, _ = await fixture.form_world("a", "b", "c", "d", **PATIENT)
        await c.ask(ReportDeath(JOB, "c", c.incarnation))
        await b.leave(failed=True)
        await fixture.wait(0.1)
        assert fixture.cause(RescaleStarted) == "WorkerFailed c"


@on_virtual_time
async def test_a_rescale_follows_from_the_first_word_that_a_worker_drains() -> None:
    async with service_fixture() as fixture:
        _, b, c = await fixture.form_world("a", "b", "c", **PATIENT)
        await b.ask(AnnounceLeave(JOB, "b", b.incarnation, "the night"))
        await c.ask(AnnounceLeave(JOB, "c", c.incarnation, "the night"))
        await fixture.wait(0.1)
        assert fixture.cause(RescaleStarted) == "WorkerDraining b"
        assert fixture.facts(RescaleStarted)[-1].draining == ["b", "c"]


@on_virtual_time
async def test_restarted_attempt_is_caused_by_the_leave_that_aborted_it() -> None:
    async with service_fixture() as fixture:
        _, b, c, _ = await fixture.form_world("a", "b", "c", "d", **PATIENT)
        await c.leave(failed=True)
        await fixture.wait(0.1)
        await b.leave(reason="lunch")
        await fixture.wait(0.1)
        assert fixture.cause(RescaleAborted) == fixture.cause(RescaleStarted) == "WorkerLeft b"
        assert fixture.facts(RescaleStarted)[-1].attempt == 3


@on_virtual_time
async def test_a_failure_behind_a_report_is_the_cause_and_the_report_the_first_reason() -> None:
    async with service_fixture() as fixture:
        a, b, _ = await fixture.form_world("a", "b", "c", **PATIENT)
        await a.ask(ReportUnreachablePeer(JOB, "a", a.incarnation, 1, "", "no answer"))
        await b.leave(failed=True)
        await fixture.wait(0.1)
        assert fixture.cause(RescaleStarted) == "WorkerFailed b"
        assert fixture.facts(RescaleStarted)[-1].reason.startswith("b failed")


@on_virtual_time
async def test_a_window_that_is_cut_short_is_followed_by_a_rescale_with_its_cause() -> None:
    async with service_fixture() as fixture:
        await fixture.start("a", "b", max_workers=2)
        assert fixture.told() == ["WorkerJoined", "WorkerJoined", "RescaleStarted"]
        assert fixture.cause(RescaleStarted) == "WorkerJoined a"


@on_virtual_time
async def test_worker_that_joined_during_a_rescale_is_the_cause_of_the_next_one() -> None:
    async with service_fixture() as fixture:
        await fixture.form_world("a")
        await fixture.kernel.bus.ask(RescaleJob(JOB))
        await fixture.start("b")
        await fixture.complete_attempt()
        assert world(fixture) == ["a"]
        await fixture.wait(31.0)
        assert fixture.cause(RescaleStarted) == "WorkerJoined b"


@on_virtual_time
async def test_of_several_failures_the_end_follows_from_the_one_that_is_too_many() -> None:
    async with service_fixture() as fixture:
        a, b, _ = await fixture.form_world("a", "b", "c")
        await a.leave(failed=True)
        await b.leave(failed=True)
        await fixture.kernel.settle()
        assert fixture.told()[-3:] == ["WorkerFailed", "WorkerFailed", "JobAborted"]
        assert fixture.cause(JobAborted) == "WorkerFailed b"


@on_virtual_time
async def test_the_end_that_an_operator_wishes_follows_from_nothing_that_happened_before() -> None:
    async with service_fixture() as fixture:
        crew = await fixture.form_world("a", "b", min_workers=2)
        await crew[1].leave(failed=True)
        await fixture.wait(1.0)
        await crew[0].ask(AbortJob(JOB))
        (waiting,), (aborted,) = fixture.records(JobWaiting), fixture.records(JobAborted)
        assert (waiting.cause > 0, aborted.cause) == (True, 0)


@on_virtual_time
async def test_end_of_a_job_has_its_cause() -> None:
    async with service_fixture() as fixture:
        a, _ = await fixture.form_world("a", "b", max_consecutive_failures=1)
        await a.leave(failed=True)
        await fixture.kernel.settle()
        assert fixture.told()[-2:] == ["WorkerFailed", "JobAborted"]
        assert fixture.cause(JobAborted) == "WorkerFailed a"
    async with service_fixture() as fixture:
        a, b = await fixture.form_world("a", "b")
        await a.leave(done=True, step=9)
        await b.leave(done=True, step=9)
        await fixture.kernel.settle()
        assert fixture.cause(JobCompleted) == "WorkerLeft b"


@on_virtual_time
async def test_a_job_that_waits_follows_from_the_failure() -> None:
    async with service_fixture() as fixture:
        a, _ = await fixture.form_world("a", "b", min_workers=2)
        await a.leave(reason="lunch")
        await fixture.wait(0.1)
        assert fixture.cause(JobWaiting) == "WorkerLeft a"


@on_virtual_time
async def test_every_fact_is_marked_with_job_and_generation_and_lies_behind_its_cause() -> None:
    async with service_fixture() as fixture:
        a, _ = await fixture.form_world("a", "b")
        await a.leave(failed=True)
        await fixture.wait(0.1)
        await fixture.complete_attempt()
        records = [record for record in fixture.records() if record.type != "JobCreated"]
        assert {record.job for record in records} == {JOB}
        assert [record.generation for record in records] == sorted(record.generation for record in records)
        assert fixture.last(RescaleCompleted).generation == 2
        assert all(record.cause < record.id for record in records)
        assert all(one.id < next_one.id for one, next_one in pairwise(records))


# Many at once.


@on_virtual_time
async def test_thousand_failures_at_once_are_published_and_deleted() -> None:
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        names = [f"w{number:04}" for number in range(1_000)]
        await fixture.form_world(*names, **PATIENT)
        assert len(world(fixture)) == 1_000
        store.batches.clear()
        fixture.silent.update(names)
        await fixture.wait(12.0)
        assert [fact.worker_id for fact in fixture.facts(WorkerFailed)] == names
        assert fixture.told()[-1] == "JobWaiting"
        assert fixture.cause(JobWaiting) == "WorkerFailed w0000"
        assert not [key for key in await keys(store) if "/member/" in key]
        transactions = [transaction for batch in store.batches for transaction in batch]
        sizes = [len(transaction.puts) + len(transaction.deletes) for transaction in transactions]
        assert max(sizes) < OPERATIONS_MAX
        assert len(transactions) >= 1_000 / DECISION_ITEMS_MAX


@on_virtual_time
async def test_a_large_decision_tells_of_a_world_in_the_transaction_that_keeps_it() -> None:
    """Without synchronising, a hundred failures and the world without them are one decision."""
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        names = [f"w{number:03}" for number in range(200)]
        settings = {"use_synchronous_rescaling": False, "failure_window_ms": 0, **PATIENT}
        await fixture.form_world(*names, **settings)
        fixture.silent.update(names[100:])
        store.batches.clear()
        await fixture.wait(12.0)
        assert world(fixture) == names[:100]
        puts = [transaction.puts for batch in store.batches for transaction in batch]
        telling = [put for put in puts if any(b"RescaleCompleted" in value for value in put.values())]
        assert len(telling) == 1
        assert {f"{PREFIX}{JOB}/world", f"{PREFIX}{JOB}/cluster"} <= telling[0].keys()


# A store that fails.


async def fill(store: FaultyStore, crew: WorkerStub) -> None:
    """Let there be no space left, and the daemon find out."""
    store.commit_error = full()
    with pytest.raises(Unavailable):
        await crew.ask(PauseJob(JOB))


@on_virtual_time
async def test_inputs_during_a_store_failure_are_decided_afterwards() -> None:
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        a, b, c = await fixture.form_world("a", "b", "c", **PATIENT)
        await fill(store, a)
        with pytest.raises(Unavailable):
            await a.ask(ReportUnreachablePeer(JOB, "a", a.incarnation, 1))
        fixture.addresses.dead.add("b")
        b.lose()
        c.lose()
        await fixture.wait(5.0)
        c.come_back()
        assert fixture.told()[-1] == "RescaleCompleted"
        assert (await a.ask(ShowCluster(JOB))).paused is False
        store.commit_error = None
        await fixture.wait(3.0)
        assert [fact.worker_id for fact in fixture.facts(WorkerFailed)] == ["b"]
        await fixture.complete_attempt(5)
        assert world(fixture) == ["a", "c"]


@on_virtual_time
async def test_stall_report_names_the_store_failure() -> None:
    store, why = FaultyStore(), "the daemon cannot write, so no rescale can start: "
    why += "the store cannot write: no space left (make room)"
    async with service_fixture(store) as fixture:
        (a, _) = await fixture.form_world("a", "b")
        await fill(store, a)
        assert (await a.ask(ShowCluster(JOB))).stall_report == why
        assert [view.stall_report for view in (await a.ask(ListClusters())).clusters] == [why]
        store.commit_error = None
        await fixture.wait(3.0)
        assert (await a.ask(ShowCluster(JOB))).stall_report == ""


@on_virtual_time
async def test_no_worker_is_failed_for_the_time_in_which_nothing_could_be_written() -> None:
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        (a, _) = await fixture.form_world("a", "b")
        await fill(store, a)
        await fixture.wait(600.0)
        store.commit_error = None
        await fixture.wait(60.0)
        assert not fixture.records(WorkerFailed, WorkerLost)
        assert world(fixture) == ["a", "b"]


@on_virtual_time
async def test_failed_store_commit_publishes_nothing_and_restarts_the_rescale() -> None:
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        a, b = await fixture.start("a", "b")
        await fixture.wait(31.0)
        await a.stop(1, holds_state=False)
        await b.stop(1, holds_state=False)
        store.commit_error = full()
        with pytest.raises(Unavailable):
            await b.ready(1)
        assert not fixture.records(RescaleCompleted)
        assert fixture.service.generation(JOB) == 0
        store.commit_error = None
        await fixture.wait(3.0)
        with pytest.raises((RequestRefused, Unavailable)):
            await b.ready(1)
        started = fixture.facts(RescaleStarted)[-1]
        assert started.attempt == 2
        await fixture.complete_attempt()
        assert [record.generation for record in fixture.records(RescaleCompleted)] == [1]


@on_virtual_time
async def test_a_worker_that_joined_into_a_failing_store_has_not_joined() -> None:
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        await fixture.form_world("a")
        store.commit_error = full()
        with pytest.raises(Unavailable):
            await fixture.start("b")
        store.commit_error = None
        await fixture.wait(2.0)
        assert list(fixture.service.coordinators[JOB].members) == ["a"]
        await fixture.workers["b"].join()
        assert list(fixture.service.coordinators[JOB].members) == ["a", "b"]


# A daemon that dies.


@on_virtual_time
async def test_workers_come_back_to_another_daemon_without_a_rescale() -> None:
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        crew = await fixture.form_world("a", "b")
        key = (await crew[0].join()).peer_key
    async with service_fixture(store) as other:
        await other.wait(3.0)
        for worker in crew:
            worker.fixture = other
            worker.come_back()
            other.workers[worker.name] = worker
        await other.wait(60.0)
        assert other.records(RescaleStarted)[-1].id < other.records(RescaleCompleted)[-1].id
        assert len(other.records(RescaleCompleted)) == 1
        assert not other.records(WorkerFailed, WorkerLost)
        joined = await crew[1].join()
        assert (joined.generation, joined.peer_key, joined.topology.world_size) == (1, key, 2)


@on_virtual_time
async def test_worker_that_is_there_before_the_state_is_read_is_connected() -> None:
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        crew = await fixture.form_world("a", "b")
        fixture.kernel.ledger.reload(Unavailable("reloading", "a test", ""))
        await fixture.wait(60.0)
        assert all(member.connected for member in fixture.service.coordinators[JOB].members.values())
        assert not fixture.records(WorkerFailed, WorkerLost)
        assert len(crew) == 2


@on_virtual_time
async def test_a_daemon_that_died_over_a_rescale_completes_it_under_another_number() -> None:
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        crew = await fixture.start("a", "b")
        await fixture.wait(31.0)
        await crew[0].stop(1, holds_state=False)
    async with service_fixture(store) as other:
        for worker in crew:
            worker.fixture = other
            worker.come_back()
            other.workers[worker.name] = worker
        await other.wait(1.0)
        with pytest.raises(RequestRefused):
            await crew[1].stop(1, holds_state=False)
        completed = await other.complete_attempt()
        assert (completed.attempt, completed.delta.generation) == (2, 1)


@on_virtual_time
async def test_acknowledged_peer_report_is_kept_by_the_next_daemon() -> None:
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        crew = await fixture.form_world("a", "b")
        await crew[0].ask(ReportUnreachablePeer(JOB, "a", crew[0].incarnation, 1, "b", "no answer"))
    async with service_fixture(store) as other:
        for worker in crew:
            worker.fixture = other
            worker.come_back()
            other.workers[worker.name] = worker
        await other.wait(1.0)
        assert other.facts(RescaleStarted)[-1].reason == "a cannot continue: no answer"


# Connections.


@on_virtual_time
async def test_lost_connection_and_return_are_published() -> None:
    async with service_fixture() as fixture:
        a, _ = await fixture.form_world("a", "b")
        a.lose()
        await fixture.wait(3.0)
        a.come_back()
        await fixture.wait(60.0)
        assert fixture.told()[-2:] == ["WorkerLost", "WorkerReturned"]


@on_virtual_time
async def test_the_client_of_one_that_left_has_nothing_to_do_with_worker_that_comes_under_its_id() -> None:
    async with service_fixture() as fixture:
        (old,) = await fixture.start("a")
        await old.leave()
        new = fixture.worker("a", life=2)
        await new.join()
        old.lose()
        await fixture.wait(20.0)
        assert "WorkerLost" not in fixture.told()
        assert fixture.service.coordinators[JOB].members["a"].connected
        new.lose()
        await fixture.wait(2.0)
        assert fixture.told()[-1] == "WorkerLost"


@on_virtual_time
async def test_a_client_that_speaks_for_several_workers_loses_all_of_them() -> None:
    async with service_fixture() as fixture:
        a, b = fixture.worker("a"), fixture.worker("b", job="other")
        await a.join()
        b.client = a.client
        b._number = 10
        await b.join()
        a.lose()
        assert not fixture.service.coordinators[JOB].members["a"].connected
        assert not fixture.service.coordinators["other"].members["b"].connected
        a.come_back()
        assert fixture.service.coordinators["other"].members["b"].connected


@on_virtual_time
async def test_worker_with_a_refusing_address_fails_after_the_probe() -> None:
    async with service_fixture() as fixture:
        a, b = await fixture.form_world("a", "b")
        fixture.addresses.dead.add("b")
        b.lose()
        await fixture.wait(0.3)
        failed = fixture.facts(WorkerFailed)[-1]
        assert failed == WorkerFailed("b", 1, "host-b:7000 refuses connections")
        assert a.name in world(fixture)


@on_virtual_time
async def test_an_address_that_does_not_answer_is_asked_once_at_a_time() -> None:
    async with service_fixture() as fixture:
        _, b = await fixture.form_world("a", "b", reconnect_grace_ms=60_000)
        fixture.addresses.answers = anyio.Event()
        b.lose()
        await fixture.wait(20.0)
        assert fixture.addresses.asked == ["b"]
        fixture.addresses.answers.set()
        await fixture.wait(5.0)
        assert len(fixture.addresses.asked) >= 4


@on_virtual_time
async def test_only_so_many_addresses_are_asked_at_once() -> None:
    async with service_fixture() as fixture:
        names = [f"w{number}" for number in range(PROBES_MAX + 50)]
        crew = await fixture.start(*names)
        fixture.addresses.answers = anyio.Event()
        for worker in crew:
            worker.lose()
        await fixture.wait(5.0)
        assert len(fixture.addresses.asked) == PROBES_MAX
        fixture.addresses.answers.set()
        await fixture.wait(2.0)
        assert set(fixture.addresses.asked) == set(names)


@on_virtual_time
async def test_probe_result_for_an_earlier_incarnation_is_ignored() -> None:
    async with service_fixture() as fixture:
        (a,) = await fixture.start("a")
        fixture.addresses.answers = anyio.Event()
        fixture.addresses.dead.add("a")
        a.lose()
        await anyio.sleep(0.1)
        await a.leave()
        await fixture.worker("a", life=2).join()
        fixture.addresses.answers.set()
        await fixture.wait(2.0)
        assert not fixture.records(WorkerFailed)


@on_virtual_time
async def test_worker_that_is_gone_before_it_has_joined_is_lost_and_looked_for() -> None:
    async with service_fixture() as fixture:
        for name in ("a", "b"):
            # The first of them waits until its job is created; the second is known by then.
            worker = fixture.worker(name)
            fixture.service.arrived(worker.client)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(worker.ask, JoinJob(JOB, worker_of(name), worker.incarnation, settings=SOON))
                await anyio.lowlevel.checkpoint()
                worker.lose()
            assert not fixture.service.coordinators[JOB].members[name].connected
        await fixture.wait(1.0)
        assert fixture.addresses.asked[:2] == ["a", "b"]
        assert "RescaleStarted" not in fixture.told(), "no worker is there to take part"
        fixture.workers["b"].come_back()
        await fixture.wait(1.0)
        assert fixture.facts(RescaleStarted)[-1].added == ["b"]
        with pytest.raises(Unavailable, match="may still be alive"):
            await fixture.worker("a", life=2).join()


@on_virtual_time
async def test_worker_that_goes_while_it_registers_again_has_not_come_back() -> None:
    async with service_fixture() as fixture:
        (a,) = await fixture.start("a", stability_window_ms=100)
        a.lose()
        a.fixture.service.arrived(a.client)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(a.ask, JoinJob(JOB, worker_of("a"), a.incarnation, settings=SOON))
            await anyio.lowlevel.checkpoint()
            a.lose()
        assert not fixture.service.coordinators[JOB].members["a"].connected


# Jobs.


@on_virtual_time
async def test_the_first_worker_creates_the_job_and_other_workers_need_not_know_its_settings() -> None:
    async with service_fixture() as fixture:
        await fixture.start("a", min_workers=3)
        assert (await fixture.kernel.bus.ask(ShowJob(JOB))).settings == {"min_workers": 3}
        assert (await fixture.worker("b").join()).settings == {"min_workers": 3}
        assert (await fixture.worker("c").join({"min_workers": 3})).settings == {"min_workers": 3}
        with pytest.raises(RequestRefused) as error:
            await fixture.worker("d").join({"min_workers": 4})
        assert error.value.code == "job_differs"
        assert "d" not in fixture.service.coordinators[JOB].members


@on_virtual_time
async def test_a_job_that_was_there_before_is_trained_as_it_says() -> None:
    async with service_fixture() as fixture:
        await fixture.kernel.bus.ask(CreateJob(JOB, {"max_workers": 1, "dataset": "mine"}))
        await fixture.start("a")
        assert fixture.told()[-1] == "RescaleStarted"


@on_virtual_time
async def test_invalid_settings_create_no_job() -> None:
    async with service_fixture() as fixture:
        with pytest.raises(RequestRefused) as error:
            await fixture.start("a", min_workers=0, max_workers=-1)
        assert all(text in error.value.message for text in ("min_workers must be ", "max_workers must be "))
        with pytest.raises(RequestRefused):
            await fixture.kernel.bus.ask(ShowJob(JOB))
        assert fixture.service.coordinators == {}


@on_virtual_time
async def test_changed_settings_hold_at_once_and_after_a_restart() -> None:
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        await fixture.form_world("a", "b")
        await fixture.start("c")
        job = await fixture.kernel.bus.ask(ShowJob(JOB))
        await fixture.kernel.bus.ask(ChangeJob(JOB, {"max_workers": 3}, job.version))
        await fixture.wait(1.0)
        assert fixture.told()[-1] == "RescaleStarted"
    async with service_fixture(store) as other:
        assert other.service.coordinators[JOB].config.max_workers == 3


class SlowStore(FaultyStore):
    """A store whose reads may take long."""

    read_s = 0.0

    async def list(self, prefix: str, *, after: str = "", limit: int = PAGE_ENTRIES_MAX) -> Sequence[Entry]:
        await anyio.sleep(self.read_s)
        return await super().list(prefix, after=after, limit=limit)


@on_virtual_time
async def test_workers_have_their_whole_reconnect_grace_after_a_slow_load() -> None:
    store = SlowStore()
    async with service_fixture(store) as fixture:
        await fixture.form_world("a", "b")
    store.read_s = 20.0
    async with service_fixture(store) as other:
        await anyio.sleep(14.0)
        assert not other.facts(WorkerFailed)
        await anyio.sleep(2.0)
        assert [fact.worker_id for fact in other.facts(WorkerFailed)] == ["a", "b"]


@on_virtual_time
async def test_settings_that_were_changed_hold_also_for_worker_that_brings_those_that_the_job_was_created_with() -> (
    None
):
    async with service_fixture() as fixture:
        settings: dict[str, SettingValue] = {"max_workers": 3}
        (a,) = await fixture.start("a", **settings)
        job = await fixture.kernel.bus.ask(ShowJob(JOB))
        changed: dict[str, SettingValue] = {"max_workers": 4}
        await fixture.kernel.bus.ask(ChangeJob(JOB, changed, job.version))
        assert (await a.join(settings, rejoin=True)).settings == changed, "it wants to know what it has missed"
        assert (await a.join({"max_workers": 9}, rejoin=True)).settings == changed
        await fixture.wait(0.1)
        assert (await fixture.worker("b").join(settings)).settings == changed
        with pytest.raises(RequestRefused) as error:
            await fixture.worker("c").join({"max_workers": 9})
        assert error.value.code == "job_differs"


@on_virtual_time
async def test_shorter_timeout_fails_no_worker_that_has_not_received_it() -> None:
    """Every worker is heard each second; the job gets a timeout of 400 ms."""
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        a, b = await fixture.form_world("a", "b")
        job = await fixture.kernel.bus.ask(ShowJob(JOB))
        await fixture.kernel.bus.ask(ChangeJob(JOB, {"worker_heartbeat_timeout_ms": 400}, job.version))
        await fixture.wait(8.0)
        assert fixture.facts(WorkerFailed) == []
    async with service_fixture(store) as other:
        for worker in (a, b):
            worker.fixture = other
            worker.come_back()
        other.workers = {"a": a, "b": b}
        await other.wait(8.0)
        assert other.facts(WorkerFailed) == []
        a.beat(interval_s=0.1)
        await anyio.sleep(2.0)
        (failed,) = other.facts(WorkerFailed)
        assert failed.worker_id == "a", "it has heard of it, and is silent"


@on_virtual_time
async def test_settings_that_cannot_be_trained_with_are_refused_any_worker_that_asks_and_change_nothing() -> None:
    async with service_fixture() as fixture:
        await fixture.form_world("a")
        wrong: dict[str, SettingValue] = {"min_workers": 0, "max_workers": "foo", "stall_timeout": 5, "mine": None}
        for request in (ChangeJob(JOB, wrong, 1), CreateJob("another", wrong)):
            with pytest.raises(RequestRefused) as error:
                await fixture.kernel.bus.ask(request)
            assert error.value.code == "elastic_config_invalid"
            said = ("min_workers must be ", "max_workers must be ", "did you mean `stall_timeout_ms`?")
            assert all(text in error.value.message for text in said)
            assert "mine" not in error.value.message
        await fixture.wait(1.0)
        assert fixture.told()[-1] == "RescaleCompleted"
        assert (await fixture.kernel.bus.ask(ShowJob(JOB))).version == 1
        assert [job.name for job in (await fixture.kernel.bus.ask(ListJobs())).jobs] == [JOB]
        assert fixture.service.coordinators[JOB].config == ElasticTrainingConfig()


@on_virtual_time
async def test_joining_a_job_with_invalid_stored_settings_is_refused() -> None:
    """A plugin that answers in the place of the daemon may let anything in."""
    async with service_fixture() as fixture:
        fixture.jobs.book.create(CreateJob(JOB, {"min_workers": 0}), "a plugin", 0.0, 1)
        with pytest.raises(RequestRefused, match="min_workers must be "):
            await fixture.start("a")
        assert fixture.told() == []
        assert fixture.service.coordinators == {}


@on_virtual_time
async def test_a_job_that_a_worker_trains_is_removed_when_it_is_over_or_by_force() -> None:
    async with service_fixture() as fixture:
        await fixture.form_world("a", "b")
        with pytest.raises(RequestRefused) as error:
            await fixture.kernel.bus.ask(RemoveJob(JOB))
        assert error.value.code == "job_in_use"
        assert "has 2 workers" in error.value.message
        await fixture.kernel.bus.ask(AbortJob(JOB))
        await fixture.kernel.bus.ask(RemoveJob(JOB))
        await fixture.kernel.settle()
        assert fixture.told()[-1] == "JobRemoved"


@on_virtual_time
async def test_a_job_that_is_not_there_is_said_not_to_be_there() -> None:
    async with service_fixture() as fixture:
        for request in (PauseJob("nojob"), RescaleJob("nojob"), PlanRescale("nojob", 2), ShowCluster("nojob")):
            with pytest.raises(RequestRefused) as error:
                await fixture.kernel.bus.ask(request)
            assert error.value.code == "job_unknown"


@on_virtual_time
async def test_the_clusters_of_all_jobs_that_a_worker_may_see_are_listed_by_name() -> None:
    async with service_fixture() as fixture:
        for job in ("b", "a", "c"):
            await fixture.worker(job, job=job).join()
        page = await fixture.kernel.bus.ask(ListClusters(limit=2))
        assert ([view.job for view in page.clusters], page.more) == (["a", "b"], True)
        assert (page.clusters[0].phase, page.clusters[0].joining) == (Phase.FORMING, 1)
        of_c = Call(Principal("which sees c", Role.VIEWER, frozenset({"c"})), "a test")
        assert [view.job for view in (await fixture.kernel.bus.ask(ListClusters(), of_c)).clusters] == ["c"]


@on_virtual_time
async def test_drain_reply_has_remarks_on_unexpected_consequences() -> None:
    async with service_fixture() as fixture:
        await fixture.form_world("a", "b", min_workers=2)
        told = await fixture.kernel.bus.ask(DrainWorker(JOB, "b"))
        assert told.remarks == ["training will stop: 1 worker left, min_workers is 2"]


@on_virtual_time
async def test_whether_a_worker_may_go_is_read_and_needs_no_room_on_the_disk() -> None:
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        a, b = await fixture.form_world("a", "b")
        assert not (await a.ask(AnnounceLeave(JOB, "a", a.incarnation, "the night"))).may_leave, "b has yet to stop"
        assert (await b.ask(AnnounceLeave(JOB, "b", b.incarnation, "the night"))).may_leave, "no worker is to stay"
        revision = fixture.kernel.ledger.revision
        store.commit_error = full()
        assert (await a.ask(ReadLeave(JOB, "a", a.incarnation))).may_leave
        assert (await a.ask(ReadLeave(JOB, "a", incarnation("a", 2)))).may_leave, "it is no worker"
        assert fixture.kernel.ledger.revision == revision


@on_virtual_time
async def test_worker_that_is_needed_in_the_moment_of_going_stays() -> None:
    async with service_fixture() as fixture:
        (a,) = await fixture.form_world("a")
        await fixture.kernel.bus.ask(DrainWorker(JOB, "a"))
        await fixture.start("b")
        assert await a.leave(if_permitted=True) == LeaveReply(may_leave=False)
        assert "WorkerLeft" not in fixture.told()
        assert await a.leave() == LeaveReply(may_leave=True)
        assert fixture.told()[-1] == "WorkerLeft"


@on_virtual_time
async def test_nothing_is_left_of_a_job_that_was_removed() -> None:
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        await fixture.form_world(*[f"w{number}" for number in range(100)])
        assert len(await keys(store)) == 102
        await fixture.kernel.bus.ask(RemoveJob(JOB, force=True))
        await fixture.wait(1.0)
        assert await keys(store) == []
        assert (fixture.service.coordinators, fixture.service.workers) == ({}, 0)
        with pytest.raises(RequestRefused) as error:
            await fixture.kernel.bus.ask(ShowCluster(JOB))
        assert error.value.code == "job_unknown"


@on_virtual_time
async def test_leftover_records_of_a_removed_job_are_deleted_after_a_restart() -> None:
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        await fixture.form_world(*[f"w{number}" for number in range(100)])
        await fixture.kernel.bus.ask(RemoveJob(JOB, force=True))
        store.dies = "after"
        await anyio.sleep(1.0)
    assert 0 < len(await keys(store)) < 102
    store.dies = ""
    async with service_fixture(store) as other:
        await other.wait(1.0)
        assert await keys(store) == []
        assert other.service.coordinators == {}


@on_virtual_time
async def test_a_job_that_is_made_again_at_once_keeps_its_workers() -> None:
    """Also while what was left of the one before is still being deleted."""
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        crew = await fixture.start(*[f"w{number:04}" for number in range(600)])
        await fixture.kernel.bus.ask(RemoveJob(JOB, force=True))
        while JOB in fixture.service.coordinators:
            await anyio.lowlevel.checkpoint()
        async with anyio.create_task_group() as tasks:
            for worker in crew[:300]:
                tasks.start_soon(worker.join)
        await fixture.wait(5.0)
        assert len([key for key in await keys(store) if "/member/" in key]) == 300
        assert fixture.service.workers == 300


@on_virtual_time
async def test_worker_that_held_the_fence_of_a_removed_job_is_below_that_of_the_next() -> None:
    async with service_fixture() as fixture:
        (a,) = await fixture.form_world("a")
        before = (await a.join()).fence
        await fixture.kernel.bus.ask(RemoveJob(JOB, force=True))
        await fixture.wait(1.0)
        assert (await fixture.worker("a", life=2).join()).fence > before


@on_virtual_time
async def test_a_commit_raises_the_fence_and_worker_that_holds_an_older_one_is_refused() -> None:
    async with service_fixture() as fixture:
        (a,) = await fixture.form_world("a")
        first = (await a.join()).fence
        await fixture.kernel.bus.ask(RescaleJob(JOB))
        await fixture.complete_attempt()
        second = (await a.join()).fence
        assert second == Fence(first.term, first.generation + 1)
        for fence, fits in ((first, False), (second, True)):
            call = Call(OPERATOR, "a test", fence=fence)
            if fits:
                await fixture.kernel.bus.ask(ReadTopology(JOB), call)
            else:
                with pytest.raises(RequestRefused) as error:
                    await fixture.kernel.bus.ask(ReadTopology(JOB), call)
                assert error.value.code == "fenced"


@on_virtual_time
async def test_worker_that_registers_again_learns_where_the_job_is() -> None:
    async with service_fixture() as fixture:
        a, b = await fixture.form_world("a", "b")
        (c,) = await fixture.start("c")
        at_first = await c.join()
        assert (at_first.generation, at_first.is_member, at_first.attempt) == (1, False, 0)
        assert (at_first.synchronising, at_first.drain_reason, at_first.topology.world_size) == (None, None, 2)
        await fixture.kernel.bus.ask(RescaleJob(JOB))
        assert ((await a.join()).attempt, (await a.join()).synchronising) == (2, None)
        await a.stop(2, 5)
        await b.stop(2, 5)
        await c.stop(2, holds_state=False)
        assert (await c.join()).synchronising == RescaleSynchronising(2, worker_of("a"), 5, 1)
        await c.ready(2)
        await fixture.kernel.bus.ask(PauseJob(JOB))
        await fixture.kernel.bus.ask(DrainWorker(JOB, "c", "maintenance"))
        at_last = await c.join()
        assert (at_last.generation, at_last.is_member, at_last.attempt) == (2, True, 0)
        assert (at_last.paused, at_last.drain_reason, at_last.state.current_step) == (True, "maintenance", 5)


@on_virtual_time
async def test_joiner_during_an_attempt_gets_no_attempt_number() -> None:
    async with service_fixture() as fixture:
        a, b = await fixture.form_world("a", "b")
        await fixture.kernel.bus.ask(RescaleJob(JOB))
        (c,) = await fixture.start("c")
        assert ((await a.join()).attempt, (await c.join()).attempt) == (2, 0)
        await a.stop(2, 5)
        await b.stop(2, 4)
        assert (await b.join()).synchronising is not None
        told = await c.join()
        assert (told.attempt, told.synchronising, told.in_background) == (0, None, False)


@on_virtual_time
async def test_repeated_join_reply_says_whether_the_attempt_is_in_background() -> None:
    async with service_fixture() as fixture:
        a = fixture.worker("a")
        await a.join({"use_synchronous_rescaling": False, "stability_window_ms": 0}, with_data=True)
        await fixture.wait(0.1)
        assert ((await a.join()).attempt, (await a.join()).in_background) == (1, False)
        await a.stop(1, holds_state=False)
        await a.ready(1)
        assert not (await a.join()).in_background
        await fixture.kernel.bus.ask(RescaleJob(JOB))
        assert ((await a.join()).attempt, (await a.join()).in_background) == (2, True)
        await fixture.kernel.bus.ask(RescaleJob(JOB, synchronous=True))
        assert ((await a.join()).attempt, (await a.join()).in_background) == (3, False)


@on_virtual_time
async def test_jobs_have_nothing_to_do_with_each_other() -> None:
    async with service_fixture() as fixture:
        await fixture.form_world("a", "b")
        other = fixture.worker("a", job="other")
        assert (await other.join()).generation == 0
        await other.leave(failed=True)
        await fixture.wait(1.0)
        assert world(fixture) == ["a", "b"]
        assert fixture.service.coordinators[JOB].failure_budget.in_world == 0
        keys_of_jobs = {coordinator.key for coordinator in fixture.service.coordinators.values()}
        assert len(keys_of_jobs) == 2


# What is refused.


@on_virtual_time
async def test_invalid_join_requests_are_refused() -> None:
    async with service_fixture() as fixture:
        cases: list[tuple[JoinJob, str]] = [
            (JoinJob(JOB, worker_of("a"), b"short"), "incarnation_invalid"),
            (JoinJob(JOB, worker_of("a/b"), incarnation("a")), "name_invalid"),
            (JoinJob(JOB, worker_of("a", port=70_000), incarnation("a")), "worker_id_invalid"),
            (
                JoinJob(
                    JOB, worker_of("a"), incarnation("a"), attributes={str(n): "" for n in range(ATTRIBUTES_MAX + 1)}
                ),
                "attributes_invalid",
            ),
            (JoinJob(JOB, worker_of("a"), incarnation("a"), attributes={"k": "v" * 10_000}), "attributes_invalid"),
            (JoinJob("no/job", worker_of("a"), incarnation("a")), "name_invalid"),
        ]
        for request, code in cases:
            with pytest.raises(RequestRefused) as error:
                await fixture.kernel.bus.ask(request)
            assert error.value.code == code
        assert fixture.service.coordinators == {}
        assert fixture.told(without=()) == []


@pytest.mark.parametrize(
    "more",
    [
        {"step": -1},
        {"step": 2**60},
        {"epoch": -1},
        {"learning_rate": math.nan},
        {"learning_rate": math.inf},
        {"learning_rate": -0.1},
        {"learning_rate": 1e300},
        {"global_batch_size": -1},
        {"global_batch_size": 2**62},
    ],
    ids=str,
)
def test_a_stop_where_no_training_can_be_is_refused_and_counts_for_nothing(more: dict[str, Any]) -> None:
    @on_virtual_time
    async def book() -> None:
        async with service_fixture() as fixture:
            (a,) = await fixture.start("a", scale_batch_with_world=True)
            await fixture.wait(31.0)
            with pytest.raises(RequestRefused) as error:
                await a.stop(1, **({"step": 0} | more))
            assert error.value.code == "stop_invalid"
            assert next(iter(more)) in error.value.message
            await a.stop(1, 0, learning_rate=0.1, global_batch_size=8)
            assert fixture.service.generation(JOB) == 1

    book()


@pytest.mark.parametrize(
    ("for_s", "peer", "code"),
    [
        (-1.0, "b", "standstill_invalid"),
        (math.nan, "b", "standstill_invalid"),
        (math.inf, "b", "standstill_invalid"),
        (STANDSTILL_S_MAX + 1, "b", "standstill_invalid"),
        (1.0, "b" * 1000, "name_invalid"),
        (1.0, "\n", "name_invalid"),
    ],
)
def test_standstill_that_cannot_have_been_is_refused(for_s: float, peer: str, code: str) -> None:
    @on_virtual_time
    async def book() -> None:
        async with service_fixture() as fixture:
            a, _ = await fixture.form_world("a", "b")
            with pytest.raises(RequestRefused) as error:
                await a.ask(ReportStandstill(JOB, "a", a.incarnation, 1, for_s, peer))
            assert error.value.code == code
            assert fixture.facts(WorkerStoodStill) == []

    book()


@on_virtual_time
async def test_standstill_reported_to_the_next_daemon_is_in_the_jobs_history() -> None:
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        crew = await fixture.form_world("a", "b")
    async with service_fixture(store) as other:
        crew[0].fixture = other
        crew[0].come_back()
        await crew[0].ask(ReportStandstill(JOB, "a", crew[0].incarnation, 1, 7.77, "b"))
        record = other.last(WorkerStoodStill)
        assert record.fact == WorkerStoodStill("a", 1, "b", 7.8)
        assert (record.job, record.generation) == (JOB, 1)


COMMON: dict[str, dict[str, SettingValue]] = {"dataset": {"samples": 100}, "sampler": {"seed": 7}}


@on_virtual_time
@pytest.mark.parametrize(
    ("common", "code"),
    [
        ({"sampler": COMMON["sampler"]}, "dataset_missing"),
        ({**COMMON, "dataset": {"samples": 101}}, "dataset_differs"),
        ({**COMMON, "sampler": {"seed": 8}}, "sampler_differs"),
    ],
)
async def test_worker_with_another_shared_config_is_refused(
    common: dict[str, dict[str, SettingValue]], code: str
) -> None:
    async with service_fixture() as fixture:
        await fixture.worker("a").join({}, shared_config=COMMON)
        with pytest.raises(RequestRefused) as error:
            await fixture.worker("b").join(shared_config=common)
        assert error.value.code == code
        assert list(fixture.service.coordinators[JOB].members) == ["a"]


@on_virtual_time
async def test_worker_with_another_shared_config_is_refused_after_a_restart_too() -> None:
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        await fixture.worker("a").join({}, shared_config=COMMON)
    async with service_fixture(store) as fixture:
        with pytest.raises(RequestRefused) as error:
            await fixture.worker("b").join(shared_config={})
        assert error.value.code == "dataset_missing"


@on_virtual_time
async def test_shared_config_that_no_worker_trained_with_binds_no_worker() -> None:
    """A worker with a wrong setup is started anew."""
    async with service_fixture() as fixture:
        a = fixture.worker("a")
        await a.join({}, shared_config={})
        await a.leave()
        await fixture.worker("b").join(shared_config=COMMON)
        with pytest.raises(RequestRefused) as error:
            await fixture.worker("c").join(shared_config={})
        assert error.value.code == "dataset_missing"


@on_virtual_time
async def test_shared_config_of_past_training_binds_new_workers() -> None:
    async with service_fixture() as fixture:
        a = fixture.worker("a")
        await a.join({"stability_window_ms": 0}, shared_config=COMMON)
        await fixture.wait(0.1)
        await a.stop(1, 0, holds_state=False)
        await fixture.wait(0.1)
        assert fixture.service.generation(JOB) == 1
        await a.leave()
        with pytest.raises(RequestRefused) as error:
            await fixture.worker("b").join(shared_config={})
        assert error.value.code == "dataset_missing"


@on_virtual_time
async def test_too_large_shared_config_is_refused() -> None:
    async with service_fixture() as fixture:
        with pytest.raises(RequestRefused) as error:
            await fixture.worker("a").join({}, shared_config={"dataset": {"name": "x" * 10_000}})
        assert error.value.code == "shared_config_invalid"
        assert JOB not in fixture.service.coordinators


@on_virtual_time
async def test_a_job_without_workers_is_not_trained() -> None:
    async with service_fixture() as fixture:
        await fixture.kernel.bus.ask(CreateJob(JOB))
        for request in (
            ListWorkers(JOB),
            ShowWorker(JOB, "a"),
            ShowCluster(JOB),
            PlanRescale(JOB, 2),
            ReadTopology(JOB),
            DrainWorker(JOB, "a"),
            EvictWorker(JOB, "a"),
            PauseJob(JOB),
            ResumeJob(JOB),
            AbortJob(JOB),
            ReopenJob(JOB),
            RescaleJob(JOB),
            ReportUnreachablePeer(JOB, "a", incarnation("a"), 0),
            ReportStandstill(JOB, "a", incarnation("a"), 0, 1.0),
        ):
            with pytest.raises(RequestRefused) as error:
                await fixture.kernel.bus.ask(request)
            assert error.value.code == "job_untrained"


@on_virtual_time
async def test_going_from_a_job_that_is_not_there_is_no_error() -> None:
    async with service_fixture() as fixture:
        a = fixture.worker("a")
        assert await a.leave() == LeaveReply(may_leave=True)
        assert await a.leave(if_permitted=True) == LeaveReply(may_leave=True)
        assert await a.leave(failed=True) == LeaveReply(may_leave=True)
        assert await a.ask(ReportDeath(JOB, "a", a.incarnation)) == Nothing()
        a.beat()
        fixture.kernel.bus.signal(Pulse(JOB, "a", a.incarnation), Call(OPERATOR, "a test"))
        await fixture.wait(1.0)
        assert fixture.told() == []


# What operators see and want.


@on_virtual_time
async def test_workers_are_listed_by_id_in_pages() -> None:
    async with service_fixture() as fixture:
        await fixture.form_world("c", "a", "b")
        page = await fixture.kernel.bus.ask(ListWorkers(JOB, limit=2))
        assert ([view.id for view in page.workers], page.more) == (["a", "b"], True)
        page = await fixture.kernel.bus.ask(ListWorkers(JOB, after="b"))
        assert ([(view.id, view.rank) for view in page.workers], page.more) == ([("c", 0)], False)


@on_virtual_time
async def test_operator_requests_take_effect() -> None:
    async with service_fixture() as fixture:
        await fixture.form_world("a", "b", "c", **PATIENT)
        ask = fixture.kernel.bus.ask
        await ask(PauseJob(JOB, "lunch"))
        view: ClusterView = await ask(ShowCluster(JOB))
        assert (view.paused, view.phase, view.generation, view.world_size) == (True, Phase.RUNNING, 1, 3)
        await ask(ResumeJob(JOB))
        assert not (await ask(ShowCluster(JOB))).paused
        await ask(DrainWorker(JOB, "b"))
        assert (await ask(ShowWorker(JOB, "b"))).status == "leaving"
        await ask(EvictWorker(JOB, "c"))
        await fixture.wait(0.1)
        assert (await ask(PlanRescale(JOB, 4))).new_world_size == 4
        await fixture.complete_attempt()
        assert (await ask(ReadTopology(JOB))).world_size == 1, "neither the draining nor the evicted worker is in it"
        await ask(AbortJob(JOB, "enough"))
        assert (await ask(ShowCluster(JOB))).phase is Phase.ABORTED
        assert fixture.told()[-2:] == ["RescaleCompleted", "JobAborted"]


@on_virtual_time
async def test_control_reply_states_whether_the_job_changed() -> None:
    async with service_fixture() as fixture:
        await fixture.start("a", min_workers=2, min_workers_timeout_ms=None)
        ask, waits = fixture.kernel.bus.ask, "1 worker waits for 1 more to join: min_workers is 2"
        paused = f"paused: night (until `forgectl jobs resume {JOB}`)"
        assert await ask(RescaleJob(JOB)) == ControlReply(False, "", waits)
        assert await ask(ResumeJob(JOB)) == ControlReply(False, "", waits)
        assert await ask(PauseJob(JOB, "night")) == ControlReply(True, "", f"{paused}; {waits}")
        assert await ask(PauseJob(JOB, "again")) == ControlReply(False, "night", f"{paused}; {waits}")
        assert await ask(ResumeJob(JOB)) == ControlReply(True, "", waits)
        await fixture.worker("b").join()
        awaited = "attempt 1 waits for a, b to enter the step loop"
        begins = f"{awaited} (0 s so far, a, b will fail in 15 s if nothing changes)"
        assert await ask(RescaleJob(JOB)) == ControlReply(True, "", begins)
        assert await ask(AbortJob(JOB, "enough")) == ControlReply(True)
        assert await ask(AbortJob(JOB, "too much")) == ControlReply(False, "enough")
        missing = "no worker is connected, 2 must join: min_workers is 2"
        assert await ask(ReopenJob(JOB, "spare hosts")) == ControlReply(True, "", missing)


@on_virtual_time
async def test_reopening_is_recorded_with_operator_and_reason() -> None:
    async with service_fixture() as fixture:
        await fixture.form_world("a", "b")
        await fixture.kernel.bus.ask(AbortJob(JOB, "enough"))
        operator = Call(OPERATOR, "alice at host-1")
        await fixture.kernel.bus.ask(ReopenJob(JOB, "spare hosts"), operator)
        record = fixture.last(JobReopened)
        assert (record.fact, record.origin) == (JobReopened("spare hosts", 0), "alice at host-1")
        # An old process learns that it is no longer one of the job's.
        with pytest.raises(RequestRefused) as refused:
            await fixture.workers["a"].join(rejoin=True)
        assert refused.value.code == "worker_gone"
        assert (await fixture.worker("a", life=2).join()).phase is Phase.FORMING
        assert len(fixture.facts(WorkerJoined)) == 3


@on_virtual_time
async def test_heartbeat_progress_ends_a_reported_stall() -> None:
    async with service_fixture() as fixture:
        a, b = await fixture.form_world("a", "b", stall_timeout_ms=5_000)
        for _ in range(6):
            await anyio.sleep(1.0)
            a.beat(still=True)
            b.beat(still=True)
        await anyio.sleep(0.5)
        assert fixture.told()[-1] == "WorkerStalled"
        a.beat(step=12)
        b.beat(step=12)
        await anyio.sleep(0.1)
        assert fixture.told()[-1] == "WorkerRecovered"
        assert (await fixture.kernel.bus.ask(ShowCluster(JOB))).state.current_step == 12
        call = Call(OPERATOR, "a test")
        fixture.kernel.bus.signal(Pulse(JOB, "a", a.incarnation, 7.5, 13), call)
        await anyio.sleep(0.1)
        view = await fixture.kernel.bus.ask(ShowWorker(JOB, "a"))
        assert (view.cpu_s, view.step) == (7.5, 13)


@on_virtual_time
async def test_a_job_with_nothing_to_do_lets_the_daemon_sleep() -> None:
    """The loop calls a livelock what spins without letting time pass."""
    async with service_fixture() as fixture:
        await fixture.start("a", "b", "spare", max_workers=2)
        await fixture.complete_attempt()
        await fixture.wait(2_000.0)
        assert fixture.told()[-1] == "RescaleCompleted"


@on_virtual_time
async def test_a_repeated_request_is_answered_as_before_and_happens_once() -> None:
    async with service_fixture() as fixture:
        (a,) = await fixture.form_world("a")
        call = Call(OPERATOR, "a test", client=a.client, number=50, acknowledged=49)
        leave = RescaleJob(JOB, "once")
        assert await fixture.kernel.bus.ask(leave, call) == await fixture.kernel.bus.ask(leave, call)
        assert [fact.reason for fact in fixture.facts(RescaleStarted)][1:] == ["once"]


@on_virtual_time
async def test_worker_that_is_refused_has_changed_nothing() -> None:
    store = FaultyStore()
    async with service_fixture(store) as fixture:
        await fixture.form_world("a")
        twin = fixture.worker("a", life=2)
        before = store.revision
        with pytest.raises(ForgedError) as error:
            await twin.join()
        assert error.value.code == "worker_exists"
        await fixture.kernel.settle()
        assert store.revision == before
        assert isinstance(fixture.workers["a"], WorkerStub)
        assert not fixture.records(WorkerLeft)
        assert len(fixture.records(WorkerJoined)) == 1


# A mistake in the code.


@on_virtual_time
async def test_repeated_coordinator_failure_aborts_only_its_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    tick = JobCoordinator.tick

    def breaks(coordinator: JobCoordinator, now: Moment) -> None:
        if coordinator.name == JOB and not coordinator.over:
            raise ZeroDivisionError("no")
        tick(coordinator, now)

    async with service_fixture() as fixture:
        await fixture.form_world("a")
        other = fixture.worker("o", job="other")
        await other.join()
        fixture.kernel.bus.on_handler_bug = lambda owner, error: told.append(f"{owner}: {error}")
        monkeypatch.setattr(JobCoordinator, "tick", breaks)
        await fixture.wait(40.0)
        assert told == [f"job {JOB} in elastic: no"] * ERRORS_MAX
        assert fixture.service.coordinators[JOB].phase is Phase.ABORTED
        reason = fixture.service.coordinators[JOB].reason
        assert reason.startswith("internal error: the coordinator failed 3 times in a row")
        assert fixture.service.coordinators["other"].phase is Phase.RESCALING
        monkeypatch.setattr(JobCoordinator, "tick", tick)
        await fixture.kernel.bus.ask(ReopenJob(JOB))
        await fixture.start("b")
        await fixture.wait(31.0)
        assert fixture.service.coordinators[JOB].phase is Phase.RESCALING, "a reopened job is ticked again"


@on_virtual_time
async def test_coordinator_is_reloaded_from_the_store_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    breaks = [True]
    tick = JobCoordinator.tick

    def breaks_once(coordinator: JobCoordinator, now: Moment) -> None:
        if breaks and coordinator.members.get("b"):
            breaks.clear()
            coordinator.membership.world.clear()
            raise ZeroDivisionError("no")
        tick(coordinator, now)

    async with service_fixture() as fixture:
        await fixture.form_world("a")
        monkeypatch.setattr(JobCoordinator, "tick", breaks_once)
        b = fixture.worker("b")
        await b.join()
        await fixture.wait(31.0)
        await fixture.complete_attempt()
        assert (breaks, world(fixture)) == ([], ["a", "b"])


@on_virtual_time
async def test_coordinator_failure_in_a_finished_job_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def breaks(coordinator: JobCoordinator, now: Moment) -> None:
        raise ZeroDivisionError("no")

    async with service_fixture() as fixture:
        (a,) = await fixture.form_world("a")
        await a.leave(done=True, step=9)
        fixture.kernel.bus.on_handler_bug = lambda owner, error: told.append(owner)
        monkeypatch.setattr(JobCoordinator, "tick", breaks)
        monkeypatch.setattr(JobCoordinator, "due_at", lambda coordinator: 0.0)
        fixture.service._loop.wake()
        await fixture.wait(60.0)
        assert len(told) == ERRORS_MAX
        assert fixture.service.coordinators[JOB].phase is Phase.COMPLETED


@on_virtual_time
async def test_suspected_worker_is_judged_as_soon_as_the_report_counts() -> None:
    async with service_fixture() as fixture:
        a, b, _ = await fixture.form_world("a", "b", "c")
        await a.ask(ReportUnreachablePeer(JOB, "a", a.incarnation, 1, "b", "no answer"))
        began_at = fixture.kernel.clock.monotonic()
        fixture.service.connection_lost(b.client)
        while not fixture.facts(WorkerFailed):
            await anyio.sleep(0.01)
        assert fixture.kernel.clock.monotonic() - began_at < CONFIRM_S + 0.05
