"""Real processes that save: workers and daemon are killed, and the catalogue tells what is there."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from forged.catalog.book import saves
from forged.catalog.files import file_work
from forged.catalog.messages import CheckpointCorrupted, CheckpointFailed, CheckpointRestored, CheckpointsAbandoned
from forged.catalog.model import CheckpointMeta, CheckpointState
from forged.checkpoint import load
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.local import LocalStorage
from forged.elastic.messages import JobAborted, JobReopened, RescaleCompleted
from tests.checkpoint.test_run_checkpoints import flip_byte
from tests.client.conftest import threaded_daemon
from tests.client.threaded_daemon import ThreadedDaemon
from tests.processes.checkpoint_worker_script import EVERY, FOLDER
from tests.processes.fork_server import ForkServer
from tests.processes.training_cluster import FAST_SETTINGS, TIMEOUT_S, TrainingCluster, WorkerProcess, cluster_on
from tests.processes.worker_script import JOB, STOP_FILE
from tests.worker.catalog.test_worker_catalog import until
from tests.worker.test_blocking import past
from tests.worker.trainers import advance

__all__ = ["threaded_daemon"]

SCRIPT = "checkpoint_worker_script"
COMPLETE, CREATING, CORRUPTED = CheckpointState.COMPLETE, CheckpointState.CREATING, CheckpointState.CORRUPTED


class SavingWorker(WorkerProcess):
    """A worker that reports the step from which it resumes."""

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(name, directory)
        self.resumed: int | None = None

    def take(self, line: bytes) -> None:
        self.resumed = json.loads(line).get("resumed", self.resumed)
        super().take(line)


class SavingCluster:
    """Workers that save, and their daemon."""

    def __init__(self, cluster: TrainingCluster) -> None:
        self.cluster = cluster
        self.folder = cluster.directory / FOLDER
        self.workers: dict[str, SavingWorker] = {}

    async def start(self, *names: str, hold: int = 0, in_background: bool = False, **settings: Any) -> None:
        config = FAST_SETTINGS | settings
        options = json.dumps({"hold": hold, "in_background": in_background, "config": config})
        for name in names:
            worker = self.workers[name] = SavingWorker(name, self.cluster.directory)
            self.cluster.workers[name] = worker
            words = (self.cluster.endpoint, name, str(self.cluster.directory), options)
            await self.cluster.start_process(worker, SCRIPT, *words)

    async def known(self) -> list[CheckpointMeta]:
        async with self.cluster.client() as client:
            return await client.checkpoints(JOB)

    async def until(self, true: Callable[[list[CheckpointMeta]], bool]) -> list[CheckpointMeta]:
        """Wait until something holds for the catalogue's checkpoints."""
        async with asyncio.timeout(TIMEOUT_S), self.cluster.client() as client:
            while not true(found := await client.checkpoints(JOB)):
                await asyncio.sleep(0.02)
        return found

    async def end(self, *names: str) -> None:
        """Kill workers."""
        for name in names:
            self.workers[name].kill()
        await self.cluster.wait_until_killed(*names)


@pytest.fixture
async def saving(fork_server: ForkServer, tmp_path: Path) -> AsyncIterator[SavingCluster]:
    async with cluster_on(fork_server, tmp_path) as cluster:
        yield SavingCluster(cluster)


def has(step: int, state: CheckpointState) -> Callable[[list[CheckpointMeta]], bool]:
    return lambda found: any((meta.step, meta.state) == (step, state) for meta in found)


@pytest.mark.parametrize("in_background", [False, True])
async def test_save_during_which_the_daemon_is_killed_is_catalogued_afterwards(
    saving: SavingCluster, in_background: bool
) -> None:
    await saving.start("a", "b", hold=EVERY, in_background=in_background, min_workers=2)
    workers = [saving.workers[name] for name in "ab"]
    await saving.cluster.until(lambda: sum(worker.held for worker in workers) == 1)
    await saving.until(has(EVERY, CREATING))
    await saving.cluster.daemon.kill()
    for worker in workers:
        worker.release()
    # Training and saving go on meanwhile.
    await saving.cluster.until(lambda: all(worker.steps[-1].step > 5 * EVERY for worker in workers))
    await saving.cluster.daemon.start()
    found = await saving.until(has(4 * EVERY, COMPLETE))
    assert all(has(step, COMPLETE)(found) for step in range(EVERY, 4 * EVERY, EVERY))
    manifest = listing.read_manifest(LocalStorage(saving.folder), f"step-{EVERY:08d}")
    assert manifest.size_bytes in {meta.size_bytes for meta in found if meta.step == EVERY}
    await saving.end("a", "b")


async def test_workers_pass_over_a_corrupt_checkpoint_and_training_goes_back(saving: SavingCluster) -> None:
    await saving.start("a", "b", min_workers=2)
    await saving.until(lambda found: sum(meta.state is COMPLETE for meta in found) >= 3)
    await saving.end("a", "b")
    newest = max(int(name.removeprefix("step-")) for name in listing.prefixes(LocalStorage(saving.folder)))
    flip_byte(saving.folder, f"step-{newest:08d}")
    await saving.start("c", "d", min_workers=2)
    await saving.cluster.until(lambda: all(saving.workers[name].steps for name in "cd"))
    assert {saving.workers[name].resumed for name in "cd"} == {newest - EVERY}

    # Facts stay: the record itself is replaced as soon as the step is saved again.
    async with asyncio.timeout(TIMEOUT_S):
        while not await saving.cluster.facts(CheckpointsAbandoned):
            await asyncio.sleep(0.02)
    assert newest in [fact.step for fact in await saving.cluster.facts(CheckpointCorrupted)]
    (restored,) = await saving.cluster.facts(CheckpointRestored)
    assert restored.step == newest - EVERY
    assert restored.skipped[0].startswith(f"step-{newest:08d}: ")
    assert [fact.step for fact in await saving.cluster.facts(CheckpointsAbandoned)]
    # The steps are repeated, and saved again.
    await saving.until(has(newest, COMPLETE))
    async with saving.cluster.client() as client:
        best = (await client.restore_points(JOB)).points[0].meta
    assert best.step >= newest
    assert not best.abandoned
    await saving.end("c", "d")


async def test_reopened_job_resumes_after_all_workers_were_killed(saving: SavingCluster) -> None:
    settings: dict[str, Any] = {"min_workers": 2, "failure_tolerance_percentage": 20}
    await saving.start("a", "b", **settings)
    await saving.until(lambda found: sum(meta.state is COMPLETE for meta in found) >= 3)
    async with saving.cluster.client() as client, client.facts(JobAborted, jobs=[JOB]) as facts:
        await saving.end("a", "b")
        await asyncio.wait_for(anext(facts), TIMEOUT_S)
        await saving.start("c", **settings)
        await saving.cluster.until(lambda: saving.workers["c"].code is not None)
        assert "`forgectl jobs reopen run`" in saving.workers["c"].output
        before = {meta.checkpoint_id: meta for meta in await saving.known() if meta.state is COMPLETE}
        newest = max(meta.step for meta in before.values())
        await client.reopen_job(JOB, "spare hosts")
    await saving.start("a", "b", **settings)
    await saving.cluster.until(lambda: all(saving.workers[name].steps for name in "ab"))
    assert {saving.workers[name].resumed for name in "ab"} == {newest}
    after = await saving.until(has(newest + 2 * EVERY, COMPLETE))
    kept = {meta.checkpoint_id: meta for meta in after if meta.checkpoint_id in before}
    assert {name: (meta.step, meta.state, meta.abandoned) for name, meta in kept.items()} == {
        name: (meta.step, COMPLETE, False) for name, meta in before.items()
    }
    # The workers compare their states with those of an uninterrupted run before each step, and here is the last one.
    (saving.cluster.directory / STOP_FILE).touch()
    await saving.cluster.until(lambda: all(saving.workers[name].code is not None for name in "ab"))
    (finished,) = {saving.workers[name].finished for name in "ab"}
    assert finished is not None
    last = max((meta for meta in await saving.known() if meta.state is COMPLETE), key=lambda meta: meta.step)
    assert last.step > finished - 2 * EVERY
    assert load(last.storage_path)["model"]["chain"].tolist() == [reduce(advance, range(last.step), 0)]
    (reopened,) = await saving.cluster.facts(JobReopened)
    assert reopened.reason == "spare hosts"
    assert [fact.delta.generation for fact in await saving.cluster.facts(RescaleCompleted)] == [1, 2]


async def test_next_worker_resumes_after_a_worker_was_killed_in_a_save(saving: SavingCluster) -> None:
    await saving.start("a", hold=2 * EVERY)
    await saving.cluster.until(lambda: saving.workers["a"].held == 1)
    await saving.until(has(2 * EVERY, CREATING))
    await saving.end("a")
    await saving.start("b")
    await saving.cluster.until(lambda: bool(saving.workers["b"].steps))
    assert saving.workers["b"].resumed == EVERY
    # The step is saved again, under the name that is free.
    await saving.until(has(2 * EVERY, COMPLETE))
    await saving.end("b")


def test_save_whose_worker_was_killed_has_failed(
    threaded_daemon: ThreadedDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "WRITER_GONE_S", 0.1)
    monkeypatch.setattr(file_work, "TICK_S", 0.05)
    options = json.dumps({"hold": EVERY, "in_background": False, "config": FAST_SETTINGS})
    words = (threaded_daemon.runner.endpoint, "a", str(tmp_path), options)
    command = (sys.executable, "-m", f"tests.processes.{SCRIPT}", *words)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            if "held" in json.loads(line):
                break
        with threaded_daemon.client() as client:
            until(lambda: [meta.state for meta in client.checkpoints(JOB)] == [CREATING])
            worker.send_signal(signal.SIGKILL)
            until(lambda: len(past(client, CheckpointFailed)) == 1)
            (failed,) = client.checkpoints(JOB)
            assert failed.state is CORRUPTED
            assert client.restore_points(JOB).points == []
