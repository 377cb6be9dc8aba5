from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from forged.data.audit import epoch_audit as module
from forged.data.audit import service
from forged.data.messages import AuditData, AuditView, ReportUsage, UsageConflict, UsageTaken
from forged.data.sampling.usage import Run
from forged.elastic.messages import RescaleCompleted, RescaleJob
from forged.errors import RequestRefused
from forged.jobs.model import RemoveJob
from forged.kernel.ledger import read_all
from forged.kernel.store.port import Store, Transaction
from tests.data.data_fixture import DataFixture, data_fixture
from tests.elastic.coordinator_playbook import JOB
from tests.elastic.service_fixture import WorkerStub
from tests.faulty_store import FaultyStore
from tests.kernel_fixture import on_virtual_time

SAMPLES = 100
BEARING: dict[str, Any] = {"failure_tolerance_percentage": 100, "min_workers_timeout_ms": None}


async def report(stage: DataFixture, generation: int, begins_at: int, *runs: Run, samples: int = SAMPLES) -> None:
    """A registered worker reports what it has used; without one, worker a joins."""
    if JOB not in stage.service.coordinators:
        await stage.start("a")
    worker_id, member = next(iter(stage.service.coordinators[JOB].members.items()))
    request = ReportUsage(JOB, worker_id, member.incarnation, generation, begins_at, samples, list(runs))
    await stage.kernel.bus.ask(request)


async def report_as(worker: WorkerStub, generation: int, *runs: Run) -> UsageTaken:
    """This worker reports what it has used."""
    return await worker.ask(
        ReportUsage(worker.job, worker.name, worker.incarnation, generation, 0, SAMPLES, list(runs))
    )


def steps(first: int, end: int, *, epoch: int = 0, size: int = 10) -> Run:
    """So many steps, of which each uses what comes next."""
    start = first * size - epoch * SAMPLES
    return Run(first, epoch, start, size, end - first)


async def audit(stage: DataFixture, epoch: int | None = 0) -> AuditView:
    return await stage.kernel.bus.ask(AuditData(JOB, epoch))


async def keys(store: Store) -> list[str]:
    return [entry.key for entry in await read_all(store, service.PREFIX)]


async def refused(act: Any) -> str:
    with pytest.raises(RequestRefused) as error:
        await act
    return error.value.code


@on_virtual_time
async def test_an_epoch_is_complete_when_all_of_it_was_reported() -> None:
    async with data_fixture() as stage:
        await report(stage, 1, 0, steps(0, 9))
        assert ((await audit(stage)).complete, (await audit(stage)).missing) == (False, [(90, 100)])
        await report(stage, 1, 0, steps(9, 10))
        found = await audit(stage)
        assert (found.complete, found.used, found.missing_total, found.epochs) == (True, 100, 0, [0])


@on_virtual_time
async def test_summary_says_in_words_what_the_audit_proves() -> None:
    async with data_fixture() as stage:
        assert stage.audit.summary(JOB, 0) == ""
        await report(stage, 1, 0, steps(0, 9))
        assert stage.audit.summary(JOB, 0) == "epoch 0: 90 of 100 samples were used so far, none more than once"
        await report(stage, 1, 0, steps(9, 10))
        assert stage.audit.summary(JOB, 0) == "epoch 0: all 100 samples were used once"
        await report(stage, 1, 0, Run(10, 0, 0, 10, 1))
        assert stage.audit.summary(JOB, 0) == "epoch 0: 100 of 100 samples were used so far, 10 more than once"


@on_virtual_time
async def test_repeated_usage_report_changes_nothing() -> None:
    async with data_fixture() as stage:
        for _ in range(3):
            await report(stage, 1, 0, steps(0, 6))
        await report(stage, 1, 0, steps(3, 10))
        found = await audit(stage)
        assert (found.complete, found.repeated) == (True, [])


@on_virtual_time
async def test_empty_usage_report_returns_the_known_step() -> None:
    async with data_fixture() as stage:
        await report(stage, 1, 0, steps(0, 6))
        (b,) = await stage.start("b")
        for generation, known_to in ((1, 6), (2, 0)):
            assert (await report_as(b, generation)).known_to == known_to
        assert (await audit(stage)).used == 0, "a world that begins at 0 makes void what was before"


@on_virtual_time
async def test_differing_usage_report_is_a_conflict() -> None:
    async with data_fixture() as stage:
        await report(stage, 1, 0, steps(0, 10))
        (b,) = await stage.start("b")
        await report_as(b, 1, Run(0, 0, 0, 10, 9), Run(8, 0, 90, 10, dropped=True))
        found = await audit(stage)
        assert (found.complete, found.conflicts) == (False, [UsageConflict(8, "b")])


@on_virtual_time
async def test_usage_report_in_the_name_of_another_worker_is_refused() -> None:
    async with data_fixture() as stage:
        a, b = await stage.start("a", "b")
        await report_as(b, 1, steps(0, 10))
        for incarnation in (a.incarnation, b"", bytes(16)):
            other = ReportUsage(JOB, "b", incarnation, 1, 0, SAMPLES, [Run(0, 0, 50, 10)])
            assert await refused(a.ask(other)) == "worker_gone"
        assert (await audit(stage)).complete


@on_virtual_time
async def test_usage_report_of_a_worker_that_has_left_is_refused() -> None:
    async with data_fixture() as stage:
        a, b = await stage.start("a", "b")
        await a.leave()
        assert await refused(report_as(a, 1, steps(0, 10))) == "worker_gone"
        await report_as(b, 1, steps(0, 10))
        assert (await audit(stage)).complete


@on_virtual_time
async def test_samples_used_twice_are_named() -> None:
    async with data_fixture() as stage:
        await report(stage, 1, 0, steps(0, 10), Run(10, 0, 20, 10))
        found = await audit(stage)
        assert (found.complete, found.repeated) == (False, [(20, 30)])


@on_virtual_time
async def test_usage_after_the_start_of_a_later_world_is_void() -> None:
    async with data_fixture() as stage:
        await report(stage, 1, 0, steps(0, 8))
        await report(stage, 2, 5, Run(5, 0, 50, 25, 2))
        found = await audit(stage)
        assert (found.complete, found.used) == (True, 100)


@on_virtual_time
async def test_late_usage_counts_up_to_the_start_of_the_later_world() -> None:
    async with data_fixture() as stage:
        await report(stage, 2, 5, steps(5, 10))
        assert (await audit(stage)).missing == [(0, 50)]
        await report(stage, 1, 0, steps(0, 8))
        assert (await audit(stage)).complete


@on_virtual_time
async def test_new_first_world_voids_earlier_usage_before_its_first_report() -> None:
    """The first of the new world may die before they tell; a daemon that dies knows it no less."""
    store = FaultyStore()
    async with data_fixture(store) as stage:
        (a,) = await stage.form_world("a", **BEARING)
        await report(stage, 1, 0, steps(0, 3))
        await a.leave()
        await stage.start("b")
        await stage.wait(1.0)
        assert (await stage.complete_attempt(0)).step == 0
        assert (await audit(stage)).missing == [(0, 100)]
    async with data_fixture(FaultyStore(store.memory)) as stage:
        assert (await audit(stage)).missing == [(0, 100)]


@on_virtual_time
async def test_background_world_without_the_state_voids_earlier_usage() -> None:
    async with data_fixture() as stage:
        (a,) = await stage.form_world("a", use_synchronous_rescaling=False, **BEARING)
        await report(stage, 1, 0, steps(0, 3))
        (b,) = await stage.start("b")
        await stage.wait(31.0)
        assert stage.facts(RescaleCompleted)[-1].step is None
        assert (await audit(stage)).used == 30, "the trainer resumes"
        await a.leave()
        await stage.wait(1.0)
        await b.stop(stage.attempt, 0, holds_state=False)
        await stage.kernel.settle()
        assert stage.facts(RescaleCompleted)[-1].step == 0
        assert (await audit(stage)).missing == [(0, 100)]
        await report(stage, 1, 0, steps(0, 5))
        assert (await audit(stage)).missing == [(0, 100)], "what is told late of the world before is void as well"


@on_virtual_time
async def test_reports_of_a_void_world_are_ignored() -> None:
    async with data_fixture() as stage:
        (a,) = await stage.form_world("a", **BEARING)
        (b,) = await stage.start("b")
        await a.leave(failed=True)
        await stage.wait(1.0)
        await stage.complete_attempt()
        generation = stage.facts(RescaleCompleted)[-1].delta.generation
        await report(stage, generation - 1, 0, steps(0, 2))
        await stage.kernel.bus.ask(RescaleJob(JOB))
        await b.stop(stage.attempt, 1, holds_state=True)
        await stage.kernel.settle()
        await report(stage, generation, 0, steps(0, 1))
        await report(stage, generation + 1, 1, steps(1, 10))
        found = await audit(stage)
        assert (found.used, found.repeated, found.complete) == (100, [], True)


@on_virtual_time
async def test_the_latest_epoch_is_looked_at_if_none_is_named() -> None:
    async with data_fixture() as stage:
        await report(stage, 1, 0, steps(0, 10), steps(10, 13, epoch=1))
        found = await audit(stage, None)
        assert (found.epoch, found.used, found.epochs) == (1, 30, [0, 1])


@on_virtual_time
async def test_acknowledged_usage_survives_a_daemon_restart() -> None:
    store = FaultyStore()
    async with data_fixture(store) as stage:
        await report(stage, 1, 0, steps(0, 8))
        await report(stage, 2, 5, steps(5, 9))
    async with data_fixture(FaultyStore(store.memory)) as stage:
        assert (await audit(stage)).missing == [(90, 100)]
        await report(stage, 1, 0, steps(0, 8))
        await report(stage, 2, 5, steps(5, 10))
        assert (await audit(stage)).complete


@on_virtual_time
async def test_another_number_of_samples_is_refused() -> None:
    async with data_fixture() as stage:
        await report(stage, 1, 0, steps(0, 8))
        assert await refused(report(stage, 1, 0, steps(8, 9), samples=99)) == "dataset_differs"


@on_virtual_time
async def test_invalid_usage_is_refused_as_a_whole() -> None:
    async with data_fixture() as stage:
        assert await refused(report(stage, 1, 0, Run(0, 0, 95, 10))) == "usage_invalid"
        assert await refused(audit(stage)) == "usage_none"
        await report(stage, 1, 0, steps(0, 10, size=5), samples=50)
        assert (await audit(stage)).complete


@on_virtual_time
async def test_of_a_job_that_is_removed_nothing_is_left() -> None:
    store = FaultyStore()
    async with data_fixture(store) as stage:
        await report(stage, 1, 0, steps(0, 8))
        assert await keys(store) == ["usage/run/0"]
        await stage.kernel.bus.ask(RemoveJob(JOB, force=True))
        await stage.kernel.settle()
        assert await keys(store) == []
        assert await refused(audit(stage)) == "job_unknown"


@on_virtual_time
async def test_usage_report_of_a_removed_job_is_refused_and_leaves_no_records() -> None:
    store = FaultyStore()
    async with data_fixture(store) as stage:
        (a,) = await stage.start("a")
        await stage.kernel.bus.ask(RemoveJob(JOB, force=True))
        await stage.kernel.settle()
        assert await refused(report_as(a, 7, steps(0, 5))) == "job_unknown"
        assert await keys(store) == []
        await stage.start("b")
        await report(stage, 1, 0, steps(0, 10))
        assert (await audit(stage)).complete


BROKEN_LOGS: dict[str, Callable[[bytes], dict[str, bytes]]] = {
    "no log": lambda chunk: {"0": b"\xc1"},
    "cut off": lambda chunk: {"0": chunk[:-1]},
    "its beginning gone": lambda chunk: {"1": chunk},
    "a strange key": lambda chunk: {"0": chunk, "x": chunk},
}


@on_virtual_time
@pytest.mark.parametrize("broken", BROKEN_LOGS)
async def test_unreadable_usage_log_fails_only_the_audits_of_its_job(broken: str) -> None:
    store = FaultyStore()
    async with data_fixture(store) as stage:
        other = stage.worker("z", job="other")
        await other.join()
        await report_as(other, 1, steps(0, 10))
        await report(stage, 1, 0, steps(0, 8))
    (chunk,) = [entry.value for entry in await read_all(store.memory, "usage/run/")]
    found = {f"usage/run/{number}": value for number, value in BROKEN_LOGS[broken](chunk).items()}
    gone = [] if "usage/run/0" in found else ["usage/run/0"]
    await store.memory.commit([Transaction(store.memory.revision + 1, found, gone)])
    async with data_fixture(FaultyStore(store.memory)) as stage:
        assert (await stage.kernel.bus.ask(AuditData("other", 0))).complete
        assert await refused(audit(stage)) == "usage_unreadable"
        await report(stage, 1, 0, steps(8, 10))
        assert {entry.key: entry.value for entry in await read_all(store.memory, "usage/run/")} == found
        await stage.kernel.bus.ask(RemoveJob(JOB, force=True))
        await stage.kernel.settle()
        assert await keys(store.memory) == ["usage/other/0"]
        await stage.start("b")
        await report(stage, 1, 0, steps(0, 10))
        assert (await audit(stage)).complete


@on_virtual_time
async def test_many_rows_are_settled_and_prove_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ROWS_MAX", 20)
    async with data_fixture() as stage:
        order = [*range(0, 100, 2), *range(1, 100, 2)]
        for step, position in enumerate(order):
            await report(stage, 1, 0, Run(step, 0, position, 1))
        assert stage.audit.logs[JOB].rows <= 21 + 50
        assert (await audit(stage)).complete
        await report(stage, 2, 100, Run(100, 1, 0, 1))
        assert (await audit(stage)).complete


@on_virtual_time
async def test_of_more_rows_than_can_be_kept_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "CHUNKS_MAX", 1)
    monkeypatch.setattr(module, "PARTS_BYTES_MAX", 900)
    store = FaultyStore()
    async with data_fixture(store) as stage:
        await stage.form_world("a", **BEARING)
        for epoch in range(3):
            first = 10 * epoch
            # Each step goes on elsewhere than where the one before has ended.
            await report(stage, 1, 0, *(Run(first + step, epoch, 90 - 10 * step, 10) for step in range(10)))
        assert [(await audit(stage, epoch)).forgotten for epoch in range(3)] == [True, True, False]
        assert (await audit(stage, 2)).complete
    async with data_fixture(FaultyStore(store.memory)) as stage:
        assert (await audit(stage, 2)).complete
        assert (await audit(stage, 0)).missing_total == SAMPLES


@on_virtual_time
async def test_repeated_usage_report_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FaultyStore()
    async with data_fixture(store) as stage:
        await report(stage, 1, 0, steps(0, 6))
        encoded = 0
        log = stage.audit.logs[JOB]
        encode = log.encode

        def counted() -> list[bytes]:
            nonlocal encoded
            encoded += 1
            return encode()

        monkeypatch.setattr(log, "encode", counted)
        await report(stage, 1, 0, steps(0, 6))
        assert encoded == 0
        await report(stage, 1, 0, steps(6, 10))
        assert encoded == 1
