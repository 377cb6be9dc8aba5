"""Workers, their daemon, and both together are killed while states are staged and saved: the last one is not lost.

`FORGED_SLOT_LIVES` says how often each of them dies, `FORGED_SEED` when; both are printed.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import pytest

from forged.catalog.messages import EmergencyCheckpointSaved
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.local import LocalStorage
from tests.checkpoint.fixtures.plain_reader import state_of
from tests.processes.fork_server import ForkServer
from tests.processes.staging_script import CHECKPOINTS
from tests.processes.training_cluster import TIMEOUT_S, TrainingCluster, WorkerProcess, cluster_on

LIVES = int(os.environ.get("FORGED_SLOT_LIVES", "4"))
SEED = int(os.environ.get("FORGED_SEED") or SystemRandom().getrandbits(32))
TURNS_MAX = 3_000_000
NEVER = 1 << 40
NAMES = ("a", "b")


class StagingWorker(WorkerProcess):
    """A worker that stages, and what it has said."""

    staged: int = -1
    saved: int = -1
    lost: int = 0

    def take(self, line: bytes) -> None:
        found = json.loads(line)
        self.staged = found.get("staged", self.staged)
        self.saved = max(self.saved, found.get("saved", self.saved))
        self.lost += "lost" in found


class StagingCluster:
    """Workers that stage, and their daemon."""

    def __init__(self, cluster: TrainingCluster, save_every: int) -> None:
        self.cluster = cluster
        self.workers: dict[str, StagingWorker] = {}
        self.storage = LocalStorage(cluster.directory / CHECKPOINTS)
        self._options = {"config": cluster.settings, "save_every": save_every}

    async def start(self, *names: str) -> None:
        for name in names:
            worker = StagingWorker(name, self.cluster.directory)
            self.workers[name] = self.cluster.workers[name] = worker
            words = (self.cluster.endpoint, name, str(self.cluster.directory), json.dumps(self._options))
            await self.cluster.start_process(worker, "staging_script", *words)

    @property
    def staged(self) -> int:
        """The last step that all workers have staged."""
        return min(worker.staged for worker in self.workers.values())

    async def more(self, steps: int = 2) -> None:
        """Wait until all workers have staged some more steps together."""
        goal = self.staged + steps
        await self.cluster.until(lambda: self.staged >= goal)

    async def kill(self, *names: str) -> None:
        for name in names:
            self.workers[name].kill()
        await self.cluster.wait_until_killed(*names)

    def newest(self) -> int:
        """The step of the newest checkpoint on disk, all of which is right; -1 without one."""
        steps = [-1]
        for prefix in listing.prefixes(self.storage):
            state = state_of(self.storage, prefix)["model"]
            assert (state["bulk"] == state["step"]).all(), f"{prefix} is not what was staged"
            assert prefix == f"step-{state['step']:08d}"
            steps.append(state["step"])
        return max(steps)

    async def until_on_disk(self, step: int) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while (newest := await asyncio.to_thread(self.newest)) < step:
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"step {newest} is on disk, not {step}: {await self.cluster.describe()}") from None


@pytest.fixture
async def cluster(fork_server: ForkServer, tmp_path: Path) -> AsyncIterator[TrainingCluster]:
    settings: dict[str, Any] = {"reconnect_grace_ms": 1000, "min_workers": 1}
    async with cluster_on(fork_server, tmp_path, **settings) as cluster:
        yield cluster


def turns(random: Random) -> None:
    """Let what runs elsewhere get to any point."""
    for _ in range(random.randrange(TURNS_MAX)):
        pass


async def test_killed_worker_leaves_the_last_step_that_all_have_staged(cluster: TrainingCluster) -> None:
    print(f"FORGED_SLOT_LIVES={LIVES} FORGED_SEED={SEED}")
    random, staging = Random(SEED), StagingCluster(cluster, save_every=NEVER)
    await staging.start(*NAMES)
    for life in range(LIVES):
        await staging.more()
        turns(random)
        staged = staging.staged
        victim = random.choice(NAMES)
        await staging.kill(victim)
        await staging.until_on_disk(staged)
        saved = await cluster.facts(EmergencyCheckpointSaved)
        assert saved[-1].step >= staged
        assert len(saved) <= life + 1
        await staging.start(victim)
    await staging.more()
    await staging.kill(*NAMES)


async def test_killed_daemon_saves_what_was_asked_of_it(cluster: TrainingCluster) -> None:
    print(f"FORGED_SLOT_LIVES={LIVES} FORGED_SEED={SEED}")
    random, staging = Random(SEED), StagingCluster(cluster, save_every=1)
    await staging.start(*NAMES)
    for _ in range(LIVES):
        await staging.more(1)
        turns(random)
        await cluster.daemon.kill()
        turns(random)
        await cluster.daemon.start()
    staged = staging.staged
    await staging.until_on_disk(staged)
    assert [worker.lost for worker in staging.workers.values()] == [0, 0]
    await staging.kill(*NAMES)


async def test_workers_and_daemon_killed_together_leave_the_last_step(cluster: TrainingCluster) -> None:
    print(f"FORGED_SLOT_LIVES={LIVES} FORGED_SEED={SEED}")
    random, staging = Random(SEED), StagingCluster(cluster, save_every=3)
    for _ in range(LIVES):
        await staging.start(*NAMES)
        await staging.more()
        turns(random)
        staged = staging.staged
        for worker in staging.workers.values():
            worker.kill()
        await cluster.daemon.kill()
        await cluster.wait_until_killed(*NAMES)
        await cluster.daemon.start()
        await staging.until_on_disk(staged)
