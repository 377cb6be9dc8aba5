"""Real processes with training data: workers and daemon are killed at any moment.

`FORGED_DATA_KILLS` sets the number of kills, `FORGED_SEED` their order; both are printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import numpy as np
import pytest

from forged.client import EARLIEST
from forged.data import DirectoryShardStore
from forged.data.messages import AuditData, DataView, ReadOwners, ShardsLost, ShowData, TransfersPlanned
from forged.data.store.port import Stamp
from forged.data.transfer.bandwidth import RATE_BYTES_MIN
from forged.elastic.messages import RescaleCompleted, RescaleStarted, WorkerFailed, WorkerLeft
from forged.kernel.messages import Fact, Record
from tests.data.transfer_cluster import content_of
from tests.processes import training_cluster
from tests.processes.data_worker_script import BATCH, SAMPLES, SHARD_BYTES, SHARDS, sampler_of
from tests.processes.fork_server import ForkServer
from tests.processes.training_cluster import TrainingCluster, WorkerProcess
from tests.processes.worker_script import JOB

KILLS = int(os.environ.get("FORGED_DATA_KILLS", "4"))
SEED = int(os.environ.get("FORGED_SEED") or SystemRandom().getrandbits(32))


class DataWorkerProcess(WorkerProcess):
    """A worker process that reports its samples, by step and generation."""

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(name, directory)
        self.drawn: dict[tuple[int, int], list[int]] = {}

    def take(self, line: bytes) -> None:
        report = json.loads(line)
        if "drew" in report:
            self.drawn[report["at"], report["world"]] = report["drew"]
        else:
            super().take(line)


class DataCluster(TrainingCluster):
    """Workers with training data, and their daemon."""

    mode = "shared"
    replication = 1
    has_origin = False

    def shard_directory(self, name: str) -> Path:
        return self.directory / "shards" / name

    def store_all_shards(self, name: str) -> None:
        """Store all shards in the directory of this worker."""
        store = DirectoryShardStore(self.shard_directory(name))
        for shard in range(SHARDS):
            data = content_of(shard, SHARD_BYTES)
            with store.receive(shard, Stamp.of(data)) as arriving:
                arriving.write(data)
                arriving.commit()

    async def start(self, *names: str, **options: Any) -> None:
        """Start workers; `shards` names the worker whose directory they take over, `at` the point where they wait.

        With `origin_hangs` the origin blocks, and the worker reports each blocked request.
        """
        for name in names:
            words = {
                "config": self.settings,
                "mode": self.mode,
                "replication": self.replication,
                "has_origin": self.has_origin,
                "origin_hangs": options.get("origin_hangs", False),
                "shards": str(self.shard_directory(options.get("shards", name))),
                "rate_bytes_per_s": options.get("rate_bytes_per_s"),
                "weight": options.get("weight", 1.0),
                "points": [(options["at"], "hold")] if "at" in options else [],
            }
            worker = self.workers[name] = DataWorkerProcess(name, self.directory)
            await self.start_process(
                worker, "data_worker_script", self.endpoint, name, str(self.directory), json.dumps(words)
            )

    async def data_view(self) -> DataView:
        async with self.client() as client:
            return await client.request(ShowData(JOB))

    async def wait_for_fact(self, *types: type[Fact], that: Callable[[Any], bool]) -> Any:
        """Wait for a fact, which may exist already."""
        async with (
            asyncio.timeout(training_cluster.TIMEOUT_S),
            self.client() as client,
            client.facts(*types, since=EARLIEST, jobs=[JOB]) as facts,
        ):
            async for item in facts:
                if isinstance(item, Record) and that(item.fact):
                    return item.fact
        raise AssertionError("the stream of facts ended")

    async def wait_for_planned_transfers(self, joiner: str) -> RescaleStarted:
        """Wait until the transfers for a joiner are planned; returns the attempt."""
        started: RescaleStarted = await self.wait_for_fact(RescaleStarted, that=lambda fact: joiner in fact.added)
        await self.wait_for_fact(TransfersPlanned, that=lambda fact: fact.attempt == started.attempt)
        return started

    async def check_shards(self, directories: dict[str, Path]) -> None:
        """Check that each shard is with its owner, byte for byte, and has all replicas."""
        async with self.client() as client:
            page = await client.request(ReadOwners(JOB))
        owners = [page.workers[place].id for place in np.frombuffer(page.owners, "<i4").tolist()]
        stores = {name: DirectoryShardStore(path) for name, path in directories.items()}
        for shard, owner in enumerate(owners):
            assert stores[owner].path_of(shard).read_bytes() == content_of(shard, SHARD_BYTES)
            copies = sum(store.holds(shard) for store in stores.values())
            assert copies == min(1 + self.replication, len(stores)), f"{copies} copies of shard {shard}"

    async def check_draws(self) -> None:
        """Check that each sample of each finished epoch was drawn once, and that the daemon's audit agrees."""
        worlds = {step.step: step.generation for worker in self.workers.values() for step in worker.steps}
        reference = sampler_of("shared")
        found: list[int] = []
        for step in range(len(worlds)):
            draws = [
                worker.drawn[step, worlds[step]]
                for worker in self.workers.values()
                if isinstance(worker, DataWorkerProcess) and (step, worlds[step]) in worker.drawn
            ]
            drawn = sorted(sample for draw in draws for sample in draw)
            found += drawn
            if self.mode == "shared":
                assert drawn == sorted(reference.batch(0, 1).tolist()), step
                reference.advance()
        epochs = len(found) // SAMPLES
        assert epochs, "no epoch is over"
        for epoch in range(epochs):
            assert sorted(found[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))
            async with self.client() as client:
                audit = await client.request(AuditData(JOB, epoch))
            assert audit.complete, audit


@asynccontextmanager
async def data_cluster_on(
    fork_server: ForkServer,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    mode: str = "shared",
    has_origin: bool = False,
    **settings: Any,
) -> AsyncIterator[DataCluster]:
    monkeypatch.setattr(training_cluster, "TrainingCluster", DataCluster)
    settings = {"redistribution_type": "incremental", **settings}
    async with training_cluster.cluster_on(fork_server, directory, **settings) as cluster:
        assert isinstance(cluster, DataCluster)
        cluster.mode, cluster.has_origin = mode, has_origin
        yield cluster


@pytest.mark.parametrize("synchronous", [True, False], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("mode", ["shared", "sharded"])
async def test_deaths_at_random_moments_lose_no_shard_and_no_sample(
    mode: str, synchronous: bool, fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"FORGED_DATA_KILLS={KILLS} FORGED_SEED={SEED}")
    random = Random(SEED)
    async with data_cluster_on(
        fork_server, tmp_path, monkeypatch, mode=mode, use_synchronous_rescaling=synchronous
    ) as cluster:
        places = {f"w{number}": f"w{number}" for number in range(3)}
        cluster.store_all_shards("w0")
        await cluster.start_together("w0")
        await cluster.start("w1", "w2")
        await cluster.wait_for_world(*places)
        for number in range(3, 3 + KILLS):
            await cluster.wait_for_steps(*places, steps=random.randrange(8))
            await asyncio.sleep(random.random() * 0.01)
            is_daemon_away = random.random() < 0.4
            if is_daemon_away:
                await cluster.daemon.kill()
            victim = random.choice(list(places))
            cluster[victim].kill()
            await cluster.wait_until_killed(victim)
            place = places.pop(victim)
            if is_daemon_away:
                await cluster.daemon.start()
            if random.random() < 0.5:
                await cluster.wait_for_world(*places)
            name = f"w{number}"
            # Some come with what another has left behind.
            places[name] = place if random.random() < 0.5 else name
            await cluster.start(name, shards=places[name])
            await cluster.wait_for_world(*places)
        assert await cluster.facts(ShardsLost) == []
        await cluster.wait_for_steps(*places, steps=SAMPLES // BATCH + 1)
        await cluster.finish(*places)
        await cluster.check_shards({name: cluster.shard_directory(place) for name, place in places.items()})
        await cluster.check_draws()


@pytest.mark.parametrize("mode", ["shared", "sharded"])
async def test_training_continues_while_a_joiner_fetches_slowly(
    mode: str, fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with data_cluster_on(
        fork_server, tmp_path, monkeypatch, mode=mode, use_synchronous_rescaling=False
    ) as cluster:
        cluster.store_all_shards("a")
        await cluster.start_together("a")
        await cluster.start("b")
        await cluster.wait_for_world("a", "b")
        generation = cluster["a"].steps[-1].generation
        cluster.arm()
        await cluster.start("c", rate_bytes_per_s=RATE_BYTES_MIN, at="having the state")
        assert (await cluster.wait_for_planned_transfers("c")).in_background
        await cluster.wait_for_steps("a", "b", steps=10)
        await cluster.until(lambda: cluster["c"].held == 1)
        await cluster.wait_for_steps("a", "b", steps=SAMPLES // BATCH + 1)
        assert {cluster[name].steps[-1].generation for name in "ab"} == {generation}
        cluster["c"].release()
        await cluster.wait_for_world("a", "b", "c")
        (moved,) = [fact for fact in await cluster.facts(RescaleCompleted) if "c" in fact.added]
        assert moved.step is None
        await cluster.wait_for_steps("a", "b", "c", steps=SAMPLES // BATCH + 1)
        await cluster.finish("a", "b", "c")
        await cluster.check_shards({name: cluster.shard_directory(name) for name in "abc"})
        await cluster.check_draws()


@pytest.mark.parametrize("victim", ["a", "b", "c"], ids=["hub", "member", "joiner"])
async def test_death_during_background_transfers_loses_no_shard_and_no_sample(
    victim: str, fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with data_cluster_on(
        fork_server, tmp_path, monkeypatch, mode="sharded", use_synchronous_rescaling=False
    ) as cluster:
        cluster.store_all_shards("a")
        await cluster.start_together("a")
        await cluster.start("b")
        await cluster.wait_for_world("a", "b")
        cluster.arm()
        await cluster.start("c", rate_bytes_per_s=RATE_BYTES_MIN, at="having the state")
        moving = await cluster.wait_for_planned_transfers("c")
        cluster[victim].kill()
        await cluster.wait_until_killed(victim)
        behind = await cluster.wait_for_fact(RescaleStarted, that=lambda fact: fact.attempt == moving.attempt + 1)
        assert (moving.in_background, behind.in_background) == (True, victim == "c")
        survivors = [name for name in "abc" if name != victim]
        for name in survivors:
            # The joiner must not have its data earlier.
            cluster[name].release()
        await cluster.wait_for_world(*survivors)
        assert await cluster.facts(ShardsLost) == []
        await cluster.wait_for_steps(*survivors, steps=SAMPLES // BATCH + 1)
        await cluster.finish(*survivors)
        await cluster.check_shards({name: cluster.shard_directory(name) for name in survivors})
        await cluster.check_draws()


@pytest.mark.parametrize("synchronous", [True, False], ids=["synchronous", "asynchronous"])
async def test_drained_worker_hands_over_its_only_copies(
    synchronous: bool, fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with data_cluster_on(fork_server, tmp_path, monkeypatch, use_synchronous_rescaling=synchronous) as cluster:
        cluster.replication = 0
        cluster.store_all_shards("a")
        await cluster.start_together("a")
        await cluster.start("b", "c")
        await cluster.wait_for_world("a", "b", "c")
        cluster["a"].kill(signal.SIGTERM)
        await cluster.until(lambda: cluster["a"].code is not None)
        assert cluster["a"].code == 0, cluster["a"].output
        await cluster.wait_for_world("b", "c")
        assert await cluster.facts(ShardsLost) == []
        assert {fact.totals.from_origin for fact in await cluster.facts(TransfersPlanned)} == {0}
        await cluster.wait_for_steps("b", "c", steps=SAMPLES // BATCH + 1)
        await cluster.finish("b", "c")
        await cluster.check_shards({name: cluster.shard_directory(name) for name in "bc"})
        await cluster.check_draws()


@pytest.mark.parametrize("mode", ["shared", "sharded"])
async def test_weights_of_the_present_workers_set_their_shares(
    mode: str, fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with data_cluster_on(fork_server, tmp_path, monkeypatch, mode=mode) as cluster:

        async def owned() -> dict[str, int]:
            async with asyncio.timeout(training_cluster.TIMEOUT_S):
                # The daemon hears of its own commit a moment later.
                while (data_view := await cluster.data_view()).generation < cluster["a"].steps[-1].generation:
                    pass
            return {one.worker_id: one.owned for one in data_view.workers}

        cluster.store_all_shards("a")
        await cluster.start_together("a")
        await cluster.start("b", weight=3.0)
        await cluster.wait_for_world("a", "b")
        assert await owned() == {"a": 10, "b": 30}
        await cluster.daemon.kill()
        await cluster.daemon.start()
        assert await owned() == {"a": 10, "b": 30}
        cluster["b"].kill()
        await cluster.wait_until_killed("b")
        await cluster.start("c", shards="b", weight=0.25)
        await cluster.wait_for_world("a", "c")
        assert await owned() == {"a": 32, "c": 8}
        await cluster.wait_for_steps("a", "c", steps=SAMPLES // BATCH + 1)
        await cluster.finish("a", "c")
        await cluster.check_shards({"a": cluster.shard_directory("a"), "c": cluster.shard_directory("b")})
        await cluster.check_draws()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("names", ["a", "ab"], ids=["alone", "two"])
async def test_drained_worker_ends_while_its_origin_hangs(
    names: str, number: signal.Signals, fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with data_cluster_on(fork_server, tmp_path, monkeypatch, has_origin=True, min_workers=len(names)) as cluster:
        await cluster.start(*names, origin_hangs=True)
        await cluster.until(lambda: all(cluster[name].held for name in names))
        for name in names:
            cluster[name].kill(number)
        await cluster.until(lambda: all(cluster[name].code is not None for name in names))
        codes = {name: cluster[name].code for name in names}
        assert set(codes.values()) == {0 if number == signal.SIGTERM else -signal.SIGINT}, await cluster.describe()
        assert await cluster.facts(WorkerFailed) == []
        assert {fact.worker_id for fact in await cluster.facts(WorkerLeft)} == set(names)
