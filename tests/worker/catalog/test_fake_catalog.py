"""The worker's side of the catalogue at a fake daemon, which answers what a test wants, or not at all."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import pytest
from anyio import to_thread
from msgspec import structs

from forged.catalog.cadence import Measured
from forged.catalog.messages import (
    CheckpointCadence,
    CollectedFiles,
    CompleteCheckpoint,
    CompletedCheckpoint,
    ConfirmDeleted,
    ExcludedCheckpoint,
    FindRestorePoints,
    HoldCheckpoint,
    ReleaseCheckpoint,
    ReportRestore,
    RestoreEstimate,
    RestorePoint,
    RestorePoints,
    StartCheckpoint,
)
from forged.catalog.model import CheckpointMeta, CheckpointState, CheckpointType
from forged.checkpoint import Checkpoints, save
from forged.checkpoint.ports import CataloguedCheckpoint, ObservedSave, RestoreAdvice, Restored
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.local import LocalStorage
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.messages import WorkerDraining, WorkerFailed, WorkerLeft
from forged.elastic.model import WorkerId
from forged.errors import RequestRefused, Unavailable
from forged.kernel.messages import Nothing
from forged.worker.catalog import worker_catalog
from forged.worker.catalog.worker_catalog import WorkerCatalog
from forged.worker.registration import Registration
from forged.worker.worker_state.progress import TrainingProgress
from forged.worker.worker_state.session_state import SessionState
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.telemetry.recording_log import RecordingLog

PATIENCE_S = 30.0
ESTIMATE = RestoreEstimate(1.0, 1.0, 1.0, "assumed")


class ManualClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    wall = monotonic


@dataclass
class FakeDaemon:
    """Records requests and answers them."""

    heard: list[Any] = field(default_factory=list)
    delete: list[CollectedFiles] = field(default_factory=list)
    points: RestorePoints = field(default_factory=lambda: RestorePoints([], []))
    is_silent: bool = False
    refuses_points: str = ""
    """The code of the refusal of restore points."""
    job: str = "run"
    worker: WorkerId = field(default_factory=lambda: WorkerId("w", "host", 1))
    incarnation: bytes = b"i" * 16

    async def ask(self, request: Any, timeout_s: float) -> Any:
        if self.is_silent:
            raise Unavailable("deadline_exceeded", "no answer")
        return await self.send(request)

    async def send(self, request: Any) -> Any:
        self.heard.append(request)
        match request:
            case StartCheckpoint():
                return meta_of(f"id of {request.step}", request.step)
            case CompleteCheckpoint():
                return CompletedCheckpoint(meta_of(request.checkpoint_id, 0), self.delete)
            case FindRestorePoints() if self.refuses_points:
                raise RequestRefused(self.refuses_points, "no restore points")
            case FindRestorePoints():
                return self.points
        return Nothing()

    def signal(self, signal: Any) -> None:
        self.heard.append(signal)

    def of(self, kind: type[Any]) -> list[Any]:
        return [one for one in self.heard if isinstance(one, kind)]


def meta_of(checkpoint_id: str, step: int) -> CheckpointMeta:
    state, kind = CheckpointState.CREATING, CheckpointType.FULL
    return CheckpointMeta(checkpoint_id, "run", 0, step, kind, state, 0, 0.0, None, {}, "")


@dataclass
class Fixture:
    """A worker's catalogue in a session with the fake daemon."""

    daemon: FakeDaemon = field(default_factory=FakeDaemon)
    clock: ManualClock = field(default_factory=ManualClock)
    log: RecordingLog = field(default_factory=RecordingLog)

    def __post_init__(self) -> None:
        self.catalog = WorkerCatalog(self.clock, self.log)
        self.state = SessionState(self.daemon.worker, TrainingProgress(0.0, 0))
        self.state.follow_settings(ElasticTrainingConfig(leave_timeout_ms=100_000).to_settings())

    @asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            self.catalog.begin_session(cast("Registration", self.daemon), self.state, tasks)
            tasks.start_soon(self.catalog.run)
            yield
            self.catalog.end_session()
            tasks.cancel_scope.cancel()

    async def until(self, true: Callable[[], bool]) -> None:
        with anyio.fail_after(PATIENCE_S):
            while not true():
                await anyio.sleep(0.002)


def observed(storage: Any, prefix: str = "step-00000003", step: int = 3) -> ObservedSave:
    return ObservedSave(storage, prefix, "abcd1234", step, 0, {"loss": 0.5}, "why", 2, "")


async def test_saves_are_started_and_completed_once(tmp_path: Path) -> None:
    fixture, one = Fixture(), observed(LocalStorage(tmp_path))
    async with fixture.session():
        fixture.catalog.save_started(one)
        fixture.catalog.save_committed(one, 100, 2.5)
        await fixture.until(lambda: len(fixture.daemon.heard) == 2)
    started, completed = fixture.daemon.heard
    assert (started.step, started.save_id, started.metrics, started.reason, started.keep) == (
        3,
        "abcd1234",
        {"loss": 0.5},
        "why",
        2,
    )
    assert started.storage_path == f"{LocalStorage(tmp_path).url}/step-00000003"
    assert (completed.checkpoint_id, completed.size_bytes, completed.seconds) == ("id of 3", 100, 2.5)


async def test_saves_that_are_reported_after_an_outage_have_their_own_age(tmp_path: Path) -> None:
    fixture, storage = Fixture(), LocalStorage(tmp_path)
    fixture.catalog.save_started(observed(storage))
    fixture.clock.now += 100.0
    fixture.catalog.save_committed(observed(storage, "step-00000006", 6), 100, 30.0)
    fixture.clock.now += 7.0
    async with fixture.session():
        await fixture.until(lambda: len(fixture.daemon.heard) == 3)
    assert [(one.step, one.age_s) for one in fixture.daemon.of(StartCheckpoint)] == [(3, 107.0), (6, 37.0)]


async def test_incremental_save_names_the_path_of_its_parent(tmp_path: Path) -> None:
    fixture, storage = Fixture(), LocalStorage(tmp_path)
    async with fixture.session():
        fixture.catalog.save_started(replace(observed(storage), parent="step-00000002"))
        fixture.catalog.save_committed(replace(observed(storage), parent="step-00000001"), 100, 2.5)
        await fixture.until(lambda: len(fixture.daemon.heard) == 2)
    started, completed = fixture.daemon.heard
    assert started.checkpoint_type is CheckpointType.INCREMENTAL
    assert started.parent_path == f"{storage.url}/step-00000002"
    assert completed.parent_path == f"{storage.url}/step-00000001"


async def test_end_of_a_save_whose_start_was_dropped_starts_it(tmp_path: Path) -> None:
    fixture = Fixture()
    async with fixture.session():
        fixture.catalog.save_failed(observed(LocalStorage(tmp_path)), "broken")
        await fixture.until(lambda: len(fixture.daemon.heard) == 2)
    assert [type(one).__name__ for one in fixture.daemon.heard] == ["StartCheckpoint", "FailCheckpoint"]


async def test_checkpoints_in_the_memory_of_a_process_are_not_reported() -> None:
    class InMemory(MemoryStorage):
        url = "memory://mine"

    fixture, storage = Fixture(), InMemory()
    async with fixture.session():
        fixture.catalog.save_started(observed(storage))
        fixture.catalog.tell_cadence("now and then")
        await fixture.until(lambda: fixture.daemon.heard == [CheckpointCadence("run", "now and then")])


async def test_collected_files_are_deleted_if_they_are_of_that_save(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save(tmp_path / f"step-{number:08d}", {"w": np.zeros(3)}, step=number)
    storage = LocalStorage(tmp_path)
    unfinished = tmp_path / "step-00000009" / "00000000.00000-of-00002.safetensors"
    unfinished.parent.mkdir()
    unfinished.touch()
    ids = [listing.read_manifest(storage, f"step-{number:08d}").save_id for number in (1, 2, 3)]
    url = storage.url
    fixture = Fixture()
    fixture.daemon.delete = [
        CollectedFiles("first", f"{url}/step-00000001", ids[0]),
        # Its name was used again.
        CollectedFiles("second", f"{url}/step-00000002", "00000000"),
        CollectedFiles("unfinished", f"{url}/step-00000009", "00000000"),
        CollectedFiles("gone", f"{url}/step-00000008", "00000000"),
        CollectedFiles("elsewhere", "/elsewhere/step-00000003", ids[2]),
    ]
    async with fixture.session():
        fixture.catalog.save_committed(observed(storage), 1, 1.0)
        await fixture.until(lambda: bool(fixture.daemon.of(ConfirmDeleted)))
    assert fixture.daemon.of(ConfirmDeleted)[0].checkpoint_ids == ["first", "second", "unfinished", "gone"]
    assert not unfinished.exists()
    assert listing.prefixes(storage) == ["step-00000002", "step-00000003"]


async def test_script_may_delete_only_what_the_catalogue_does_not_know(tmp_path: Path) -> None:
    fixture, storage = Fixture(), LocalStorage(tmp_path)
    known, unknown = observed(storage), observed(storage, "step-00000006", 6)
    # Without a daemon it may delete everything.
    assert fixture.catalog.withdraw(known.storage_path, 3)
    async with fixture.session():
        fixture.catalog.save_started(known)
        await fixture.until(lambda: bool(fixture.daemon.of(StartCheckpoint)))
        assert not await to_thread.run_sync(fixture.catalog.withdraw, known.storage_path, 3)
        assert await to_thread.run_sync(fixture.catalog.withdraw, unknown.storage_path, 6)
    # Also when the session is over; then the catalogue may know what this worker has not saved.
    assert not fixture.catalog.withdraw(known.storage_path, 3)
    assert not fixture.catalog.withdraw(unknown.storage_path, 6)
    fixture.catalog.save_started(unknown)
    assert fixture.catalog.withdraw(unknown.storage_path, 6)


async def test_catalogue_is_asked_for_checkpoints_of_earlier_workers() -> None:
    """They may be pinned, and more than one answer names."""
    fixture = Fixture()
    withdraw = fixture.catalog.withdraw
    fixture.daemon.points = RestorePoints(
        [RestorePoint(structs.replace(meta_of("id of 3", 3), storage_path="/c/step-3"), [], ESTIMATE, 0, 0.0, "")],
        [ExcludedCheckpoint("id of 2", 2, "/c/step-2", "it is abandoned", CheckpointState.COMPLETE, abandoned=True)],
    )
    async with fixture.session():
        assert not await to_thread.run_sync(withdraw, "/c/step-3", 3)
        assert not await to_thread.run_sync(withdraw, "/c/step-2", 2)
        assert await to_thread.run_sync(withdraw, "/c/step-1", 1)
        assert [(one.folder, one.max_step) for one in fixture.daemon.of(FindRestorePoints)] == [("/c", 3), ("/c", 1)]
        # A daemon that does not answer may know it, and is not asked each time.
        fixture.daemon.is_silent = True
        assert not await to_thread.run_sync(withdraw, "/c/step-1", 1)
        fixture.daemon.is_silent = False
        assert not await to_thread.run_sync(withdraw, "/c/step-1", 1)
        fixture.clock.now += worker_catalog.ASK_AGAIN_S
        assert await to_thread.run_sync(withdraw, "/c/step-1", 1)


async def test_run_resumes_without_a_catalogue_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = Fixture()
    assert fixture.catalog.find_restore_points("/folder") is None
    async with fixture.session():
        assert await to_thread.run_sync(fixture.catalog.find_restore_points, "/folder") is not None
        fixture.daemon.is_silent = True
        assert await to_thread.run_sync(fixture.catalog.find_restore_points, "/folder") is None
    reasons = [fields["reason"] for fields in fixture.log.of("resuming without the checkpoint catalogue")]
    assert reasons == ["the worker is not connected", "no answer"]


async def test_job_that_does_not_exist_yet_has_no_restore_points() -> None:
    fixture = Fixture()
    async with fixture.session():
        fixture.daemon.refuses_points = "job_unknown"
        assert await to_thread.run_sync(fixture.catalog.find_restore_points, "/folder") == RestoreAdvice([], {})
        fixture.daemon.refuses_points = "not_permitted"
        assert await to_thread.run_sync(fixture.catalog.find_restore_points, "/folder") is None


async def test_call_on_a_blocked_event_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_catalog, "ANSWER_S", 0.05)
    monkeypatch.setattr(worker_catalog, "LOOP_S", 0.05)
    fixture = Fixture()
    async with fixture.session():
        # In the loop's own thread, which waits.
        assert fixture.catalog.find_restore_points("/folder") is None


async def test_hold_is_renewed_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_catalog, "HOLD_S", 0.03)
    fixture, end = Fixture(), threading.Event()

    def read() -> None:
        with fixture.catalog.hold("ckpt-1"):
            end.wait(PATIENCE_S)

    async with fixture.session(), anyio.create_task_group() as tasks:
        tasks.start_soon(to_thread.run_sync, read)
        await fixture.until(lambda: len(fixture.daemon.of(HoldCheckpoint)) >= 3)
        assert fixture.daemon.of(ReleaseCheckpoint) == []
        end.set()
        await fixture.until(lambda: len(fixture.daemon.of(ReleaseCheckpoint)) == 1)
    assert {(one.checkpoint_id, one.holder) for one in fixture.daemon.of(HoldCheckpoint)} == {("ckpt-1", "w")}


async def test_checkpoint_is_read_without_a_hold_if_there_is_no_answer() -> None:
    fixture = Fixture()
    fixture.daemon.is_silent = True

    def read() -> bool:
        with fixture.catalog.hold("ckpt-1"):
            return True

    async with fixture.session():
        assert await to_thread.run_sync(read)
    assert fixture.daemon.heard == []


@pytest.mark.parametrize(("rank", "step", "expected"), [(0, 6, ["ckpt-1"]), (0, 9, [""]), (1, 6, [])])
async def test_rank_zero_of_the_first_world_reports_the_restore(rank: int, step: int, expected: list[str]) -> None:
    """If the world has another step than this worker has restored, its state is another worker's."""
    fixture = Fixture()
    point = CataloguedCheckpoint("ckpt-1", "step-00000006", 6, 10, "the newest")
    async with fixture.session():
        restored = Restored(point, 6, 1.5, 10, ["step-00000009: it is corrupt"], "/c/step-00000006", "abcd1234", 2)
        fixture.catalog.report_restore(restored)
        fixture.catalog.enter_world(rank, step)
        fixture.catalog.report_restore(Restored(point, 6, 1.5, 10, []))
        # A later world is no restore.
        fixture.catalog.enter_world(0, step)
        await fixture.catalog.deliver()
    reports = fixture.daemon.of(ReportRestore)
    assert [report.checkpoint_id for report in reports] == expected
    files = ("/c/step-00000006", "abcd1234", 2) if expected == ["ckpt-1"] else ("", "", 0)
    assert all((one.storage_path, one.save_id, one.repaired_chunks) == files for one in reports)
    assert all(report.step == step and report.skipped == ["step-00000009: it is corrupt"] for report in reports)


async def test_failures_and_drains_are_measured() -> None:
    fixture = Fixture()
    assert fixture.catalog.measured() == Measured()
    async with fixture.session():
        fixture.clock.now += 60.0
        for news in (WorkerFailed("a", 1, "killed"), WorkerDraining("b", "SIGTERM"), WorkerDraining("c", "SIGTERM")):
            fixture.catalog.hear(news)
        fixture.clock.now += 30.0
        assert fixture.catalog.measured() == Measured(failures=1, observed_s=90.0, drain_notice_s=70.0)
        fixture.catalog.hear(WorkerFailed("b", 0, "killed"))
        fixture.catalog.hear(WorkerLeft("c", "drained"))
        assert fixture.catalog.measured() == Measured(failures=2, observed_s=90.0)


def test_checkpoints_alone_have_no_catalogue(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.aio._context.catalog is None
