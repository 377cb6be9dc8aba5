"""Workers with training data and a real daemon on one loop: what they hold, and which samples their steps take."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pytest

from forged.client import ForgedClient
from forged.data.messages import (
    AuditData,
    AuditView,
    CorruptShardFound,
    DataView,
    ReadOwners,
    ReportUsage,
    ShardsLost,
    ShowData,
    TransfersPlanned,
)
from forged.data.model import Dataset, DataShard
from forged.data.sampling.sampler import ElasticSampler
from forged.data.store.directory import DirectoryShardStore
from forged.data.store.errors import StoreFailed
from forged.data.store.memory import MemoryShardStore
from forged.data.store.origin import FunctionOrigin
from forged.data.store.port import OpenShard, ShardStore, Stamp
from forged.data.training import TrainingData
from forged.data.transfer.manager import DataTransferManager
from forged.elastic.messages import RescaleCompleted, RescaleStarted, ShowCluster, WorkerFailed, WorkerLeft
from forged.errors import RequestRefused
from forged.kernel.messages import Fact, Record
from forged.retry import RetryPolicy
from forged.worker import drain
from forged.worker.data import local_shards, transfer_reports
from forged.worker.data.shard_holder import ShardHolder
from forged.worker.data.transfer_reports import TransferReports
from forged.worker.errors import JobEnded, WorkerEvicted
from forged.worker.registration import Registration
from tests.client.daemon_runner import SOON, DaemonRunner
from tests.data.damage import damage
from tests.data.transfer_cluster import DelayedStore, content_of
from tests.worker.meshes import until
from tests.worker.trainers import JOB, PATIENCE_S, Trainer, TrainerGroup, group_at

SAMPLES, SHARDS, BATCH, SEED = 120, 12, 7, 3
STEPS_PER_EPOCH = -(-SAMPLES // BATCH)
SIZE = 2_000
TRANSFER_POINTS = [(ShardHolder, "_offer"), (ShardHolder, "_read_assigned"), (TransferReports, "send_done")]
USUAL: dict[str, Any] = {"redistribution_type": "incremental", "max_consecutive_failures": 1_000}


@pytest.fixture(params=[True, False], ids=["with a stop", "in the background"], autouse=True)
def _each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with synchronous and with background rescales."""
    monkeypatch.setitem(USUAL, "use_synchronous_rescaling", request.param)


def write(shard: DataShard, file: BinaryIO) -> None:
    file.write(content_of(shard.shard_id, SIZE))


ORIGIN = FunctionOrigin(write)


def filled(*shards: int) -> MemoryShardStore:
    """A store with these shards."""
    store = MemoryShardStore()
    for shard in shards:
        put(store, shard)
    return store


def put(store: ShardStore, shard: int) -> None:
    data = content_of(shard, SIZE)
    with store.receive(shard, Stamp.of(data)) as arriving:
        arriving.write(data)
        arriving.commit()


class TrainingCluster:
    """Workers with data, and the samples that their steps have drawn."""

    def __init__(self, group: TrainerGroup, runner: DaemonRunner, *, is_sharded: bool = False, **terms: Any) -> None:
        self.group = group
        self.runner = runner
        self.is_sharded = is_sharded
        self.terms: dict[str, Any] = {"origin": ORIGIN, "replication": 0, **terms}
        self.stores: dict[str, Any] = {}
        self.drawn: dict[int, dict[int, dict[str, Any]]] = {}
        """By step, generation and worker."""

    def sampler(self) -> ElasticSampler:
        more: dict[str, Any] = {"mode": "sharded", "dataset": Dataset.of(SAMPLES, SHARDS)} if self.is_sharded else {}
        return ElasticSampler(SAMPLES, BATCH, SEED, **more)

    def start(self, *names: str, store: ShardStore | None = None, **terms: Any) -> None:
        for name in names:
            self.stores[name] = store or self.stores.get(name) or MemoryShardStore()
            data = TrainingData(SAMPLES, SHARDS, self.stores[name], **{**self.terms, **terms})
            (trainer,) = self.group.make(name, data=data, sampler=self.sampler())
            trainer.before_step = partial(self._draw, trainer)
            self.group.start(name)

    async def _draw(self, trainer: Trainer, step: int) -> None:
        worker = trainer.worker
        batch = self.drawn.setdefault(step, {}).setdefault(worker.generation, {})
        batch[trainer.name] = worker.batch()

    def client(self) -> ForgedClient:
        return ForgedClient(self.runner.endpoint, reconnect=SOON)

    async def facts(self, *types: type[Fact]) -> list[Any]:
        async with self.client() as client:
            return [item.fact async for item in client.past_facts(*types, jobs=[JOB]) if isinstance(item, Record)]

    async def shown(self) -> DataView:
        async with self.client() as client:
            return await client.request(ShowData(JOB))

    async def audit(self, epoch: int) -> AuditView:
        async with self.client() as client:
            return await client.request(AuditData(JOB, epoch))

    async def check_holdings(self, *names: str) -> None:
        """Every shard is held by its owner, whole, and by as many others as there should be; and nothing else is."""
        async with self.client() as client:
            page = await client.request(ReadOwners(JOB))
        owners = [page.workers[place].id for place in np.frombuffer(page.owners, "<i4").tolist()]
        assert set(owners) <= set(names)
        for shard, owner in enumerate(owners):
            assert self.stores[owner].read(shard) == content_of(shard, SIZE)
        copies = [sum(self.stores[name].holds(shard) for name in names) for shard in range(SHARDS)]
        assert copies == [min(1 + self.terms["replication"], len(names))] * SHARDS
        assert [self.group[owner].worker.should_handle_shard(shard, SHARDS) for shard, owner in enumerate(owners)] == [
            True
        ] * SHARDS
        mine = [
            sum(self.group[name].worker.should_handle_shard(shard, SHARDS) for name in names) for shard in range(SHARDS)
        ]
        assert mine == [1] * SHARDS

    async def finish(self, *names: str, steps: int = 40) -> None:
        """Train to the end, and see that each sample of each epoch was used once."""
        await self.group.finish(*names, steps=steps)
        self.check_draws()
        for epoch in range(self.group.total * BATCH // (SAMPLES + BATCH)):
            audit = await self.audit(epoch)
            assert audit.complete, audit

    def check_draws(self) -> None:
        """What counts of the draws is each sample of an epoch once; and in shared mode, what one alone would draw."""
        reference = self.sampler() if not self.is_sharded else None
        found: list[int] = []
        for step in range(self.group.total):
            draws = self.drawn[step][max(self.drawn[step])].values()
            drawn = sorted(np.concatenate(list(draws)).tolist())
            found += drawn
            if reference is not None:
                assert drawn == sorted(reference.batch(0, 1).tolist()), step
                reference.advance()
        for epoch in range(len(found) // SAMPLES):
            assert sorted(found[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES)), epoch


@asynccontextmanager
async def training_cluster(
    runner: DaemonRunner, *, settings: dict[str, Any] | None = None, **terms: Any
) -> AsyncIterator[TrainingCluster]:
    """The workers that are to train."""
    async with group_at(runner.endpoint, **(USUAL | (settings or {}))) as group:
        yield TrainingCluster(group, runner, **terms)


@asynccontextmanager
async def held_at(owner: type[Any], method: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[asyncio.Event]:
    """The first call of a method waits until the block is left; the event tells that it has come."""
    original, reached, leave = getattr(owner, method), asyncio.Event(), asyncio.Event()

    async def held(*arguments: Any, **options: Any) -> Any:
        if not reached.is_set():
            reached.set()
            await leave.wait()
        return await original(*arguments, **options)

    monkeypatch.setattr(owner, method, held)
    try:
        yield reached
    finally:
        leave.set()
        monkeypatch.setattr(owner, method, original)


async def soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await event.wait()


def wait_briefly_for_daemon(trainer: Trainer) -> None:
    """Shorten this worker's wait for an absent daemon. The daemon's own wait, for its workers, stays long."""
    state = trainer.worker._state
    state.follow_settings({**state.view.settings, "reconnect_grace_ms": 500})


class TestAWorld:
    @pytest.mark.parametrize("replication", [0, 1, 2])
    async def test_holds_each_shard_as_often_as_it_should_through_all_changes(
        self, runner: DaemonRunner, replication: int
    ) -> None:
        async with training_cluster(runner, replication=replication) as cluster, cluster.client() as client:
            cluster.start("a", "b", "c")
            await cluster.group.world_of("a", "b", "c")
            await cluster.check_holdings("a", "b", "c")
            cluster.start("d")
            await cluster.group.world_of("a", "b", "c", "d")
            await cluster.check_holdings("a", "b", "c", "d")
            await client.evict_worker(JOB, "b")
            await cluster.group.world_of("a", "c", "d")
            await cluster.check_holdings("a", "c", "d")
            await client.drain_worker(JOB, "a")
            await cluster.group.world_of("c", "d")
            await cluster.check_holdings("c", "d")
            await cluster.finish("c", "d")

    async def test_joiner_that_holds_shards_enters_the_world_without_transfers(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner, origin=None) as cluster:
            cluster.start("a", store=filled(*range(6)))
            cluster.start("b", store=filled(*range(6, 12)))
            await cluster.group.world_of("a", "b")
            await cluster.check_holdings("a", "b")
            totals = (await cluster.facts(TransfersPlanned))[-1].totals
            assert (totals.transfers, totals.from_origin) == (0, 0)
            await cluster.finish("a", "b")

    async def test_join_moves_the_minimum_of_shards(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner) as cluster:
            cluster.start("a", "b", "c")
            await cluster.group.world_of("a", "b", "c")
            cluster.start("d")
            await cluster.group.world_of("a", "b", "c", "d")
            totals = (await cluster.facts(TransfersPlanned))[-1].totals
            assert (totals.shards, totals.from_owners, totals.from_origin) == (3, 3, 0)

    async def test_weight_of_a_returning_worker_may_change(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner, replication=0) as cluster, cluster.client() as client:

            async def held() -> dict[str, tuple[int, float]]:
                return {one.worker_id: (one.owned, one.weight) for one in (await cluster.shown()).workers}

            cluster.start("a")
            cluster.start("b", weight=3)
            await cluster.group.world_of("a", "b")
            await cluster.check_holdings("a", "b")
            assert await held() == {"a": (3, 1.0), "b": (9, 3.0)}
            await runner.close()
            await runner.open()
            assert await held() == {"a": (3, 1.0), "b": (9, 3.0)}
            assert (await client.plan_data(JOB, ["a", "b"])).transfers == 0
            await client.drain_worker(JOB, "b")
            await cluster.group.over("b")
            await cluster.group.world_of("a")
            cluster.start("b", weight=0.5)
            await cluster.group.world_of("a", "b")
            await cluster.check_holdings("a", "b")
            assert await held() == {"a": (8, 1.0), "b": (4, 0.5)}
            await cluster.finish("a", "b")

    async def test_without_data_goes_by_the_remainder(self, runner: DaemonRunner) -> None:
        async with group_at(runner.endpoint) as group:
            group.start("a", "b")
            await group.world_of("a", "b")
            for name in "ab":
                worker = group[name].worker
                assert [worker.should_handle_shard(n, 4) for n in range(4)] == [n % 2 == worker.rank for n in range(4)]

    async def test_other_shard_count_uses_the_modulo_rule(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner) as cluster:
            cluster.start("a", "b")
            await cluster.group.world_of("a", "b")
            worker = cluster.group["a"].worker
            assert [worker.should_handle_shard(n, 5) for n in range(5)] == [n % 2 == worker.rank for n in range(5)]
            assert not worker.should_handle_shard(SHARDS, SHARDS)

    @pytest.mark.parametrize("first", ["with", "without"])
    async def test_worker_with_and_without_data_are_not_in_one_world(self, runner: DaemonRunner, first: str) -> None:
        async with training_cluster(runner) as cluster:
            made = {"with": TrainingData(SAMPLES, SHARDS, MemoryShardStore(), origin=ORIGIN), "without": None}
            cluster.group.make("a", data=made[first])
            cluster.group.make("b", data=made["without" if first == "with" else "with"])
            cluster.group.start("a")
            await cluster.group.world_of("a")
            cluster.group.start("b")
            (error,) = await cluster.group.over("b")
            assert getattr(error, "code", error) == ("dataset_missing" if first == "with" else "dataset_differs")
            await cluster.group.world_of("a")

    async def test_worker_with_another_dataset_is_refused_while_training_continues(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner) as cluster:
            cluster.start("a")
            await cluster.group.world_of("a")
            cluster.start("b", replication=1)
            (error,) = await cluster.group.over("b")
            assert getattr(error, "code", error) == "dataset_differs"
            assert "replication is 0 in the job, 1 in this worker" in str(error)
            assert len(await cluster.facts(RescaleStarted)) == 1

    async def test_joiner_with_an_origin_is_accepted_while_shards_are_lost(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner, origin=None) as cluster, cluster.client() as client:
            cluster.start("a")
            async with client.facts(ShardsLost, since=0, jobs=[JOB]) as told, asyncio.timeout(PATIENCE_S):
                await anext(told)
            await client.evict_worker(JOB, "a")
            await cluster.group.over("a")
            cluster.start("b", origin=ORIGIN)
            await cluster.group.world_of("b")
            await cluster.check_holdings("b")

    async def test_of_two_jobs_at_once_keeps_them_apart(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner) as cluster:
            cluster.start("a", "b")
            store = MemoryShardStore()
            data = TrainingData(50, 5, store, origin=ORIGIN)
            cluster.group.make("z", job="other", data=data)
            cluster.group.start("z")
            await cluster.group.world_of("a", "b")
            await cluster.group.world_of("z")
            assert set(store.held()) == set(range(5))
            await cluster.check_holdings("a", "b")


class TestSampling:
    @pytest.mark.parametrize("with_data", [False, True])
    async def test_worker_with_another_sampler_is_refused(self, runner: DaemonRunner, with_data: bool) -> None:
        async with training_cluster(runner) as cluster:
            for name, drop_last in (("a", False), ("b", True)):
                data = TrainingData(SAMPLES, SHARDS, MemoryShardStore(), origin=ORIGIN) if with_data else None
                cluster.group.make(name, data=data, sampler=ElasticSampler(SAMPLES, BATCH, SEED, drop_last=drop_last))
            cluster.group.start("a")
            await cluster.group.until(lambda: cluster.group["a"].worker.is_registered)
            cluster.group.start("b")
            (error,) = await cluster.group.over("b")
            assert getattr(error, "code", error) == "sampler_differs"
            assert "drop_last is False in the job, True in this worker" in str(error)

    @pytest.mark.parametrize("is_sharded", [False, True], ids=["shared", "sharded"])
    async def test_each_sample_is_used_once_across_joins_and_failures(
        self, runner: DaemonRunner, is_sharded: bool
    ) -> None:
        async with (
            training_cluster(runner, is_sharded=is_sharded, replication=1) as cluster,
            cluster.client() as client,
        ):
            living = ["w0", "w1", "w2"]
            cluster.start(*living)
            await cluster.group.world_of(*living)
            for number in range(3, 9):
                evicted = living.pop(number % len(living))
                await client.evict_worker(JOB, evicted)
                living.append(f"w{number}")
                cluster.start(living[-1])
                await cluster.group.world_of(*living, steps=1 + number % 4)
            await cluster.check_holdings(*living)
            await cluster.finish(*living)

    async def test_sharded_mode_draws_only_from_held_shards(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner, is_sharded=True) as cluster:
            cluster.start("a", "b")
            await cluster.group.world_of("a", "b")
            dataset = Dataset.of(SAMPLES, SHARDS)
            for name in "ab":
                worker = cluster.group[name].worker
                held = set(cluster.stores[name].held())
                drawn = _drawn_by(cluster, name, worker.generation)
                assert set(dataset.shard_of(sorted(drawn)).tolist()) <= held

    @pytest.mark.parametrize("is_sharded", [False, True], ids=["shared", "sharded"])
    async def test_sampler_agrees_with_the_state_after_an_undecided_step(
        self, runner: DaemonRunner, is_sharded: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with (
            training_cluster(runner, is_sharded=is_sharded, replication=1) as cluster,
            cluster.client() as client,
        ):
            cluster.start("a", "b", "c")
            await cluster.group.world_of("a", "b", "c")
            killed = cluster.group["c"].worker
            finish, stopped = killed.finish_step, asyncio.Event()

            async def never() -> bool:
                stopped.set()
                await asyncio.Event().wait()
                return await finish()

            # The other workers have finished the step, and wait for one that never reports it.
            monkeypatch.setattr(killed, "finish_step", never)
            await soon(stopped)
            await client.evict_worker(JOB, "c")
            await cluster.group.world_of("a", "b")
            await cluster.finish("a", "b")

    async def test_survivor_reports_usage_of_members_that_died_unreported(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        send = Registration.send

        async def keep_quiet(line: Registration, request: Any) -> Any:
            if isinstance(request, ReportUsage) and line.worker.id in "ab":
                raise RequestRefused("usage_full", "not now")
            return await send(line, request)

        monkeypatch.setattr(Registration, "send", keep_quiet)
        async with training_cluster(runner) as cluster, cluster.client() as client:
            cluster.start("a", "b")
            await cluster.group.world_of("a", "b", steps=5)
            cluster.start("c")
            await cluster.group.world_of("a", "b", "c")
            for name in "ab":
                await client.evict_worker(JOB, name)
            await cluster.group.world_of("c")
            await cluster.finish("c")

    async def test_of_no_samples_is_proven_to_have_used_them(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner) as cluster:
            cluster.group.make("a", sampler=ElasticSampler(0, BATCH))
            cluster.group.start("a")
            await cluster.group.world_of("a")
            await cluster.group.finish("a")
            audit = await cluster.audit(0)
            assert (audit.samples, audit.used, audit.complete) == (0, 0, True)

    async def test_tells_the_epoch_with_the_step_of_which_it_is(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner) as cluster, cluster.client() as client:
            cluster.start("a", "b", "c")
            await cluster.group.world_of("a", "b", "c")
            for name in "cb":
                await cluster.group.more_steps("a", steps=STEPS_PER_EPOCH)
                await client.evict_worker(JOB, name)
                await cluster.group.world_of(*("ab" if name == "c" else "a"))
            commits = [fact for fact in await cluster.facts(RescaleCompleted) if fact.step]
            assert [fact.epoch for fact in commits] == [fact.step // STEPS_PER_EPOCH for fact in commits]
            assert commits[-1].epoch >= 2
            worker = cluster.group["a"].worker
            assert worker.sampler is not None
            assert worker.epoch == worker.sampler.epoch

    async def test_takes_a_whole_epoch_where_the_world_grows_beyond_it(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner, settings={"scale_batch_with_world": True}) as cluster:
            for name in "ab":
                cluster.group.make(name, sampler=ElasticSampler(20, 12, SEED, drop_last=True))
            cluster.group.start("a")
            await cluster.group.world_of("a")
            cluster.group.start("b")
            await cluster.group.world_of("a", "b")
            for name in "ab":
                worker = cluster.group[name].worker
                assert worker.sampler is not None
                assert (worker.global_batch_size, worker.sampler.global_batch) == (24, 20)
                assert sorted(np.concatenate([worker.sampler.batch(rank, 2) for rank in (0, 1)])) == list(range(20))
            await cluster.group.finish("a", "b")
            epoch = max((await cluster.audit(0)).epochs)
            audit = await cluster.audit(epoch)
            assert (audit.used, audit.dropped, audit.complete) == (20, 0, True)


def _drawn_by(cluster: TrainingCluster, name: str, generation: int) -> set[int]:
    worlds = [by_world[generation] for by_world in cluster.drawn.values() if generation in by_world]
    return {sample for world in worlds if name in world for sample in world[name].tolist()}


class TestWhoIsToGo:
    async def test_draining_worker_hands_over_its_only_copies_before_it_leaves(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner, origin=None) as cluster:
            cluster.start("a", store=filled(*range(SHARDS)))
            cluster.start("b")
            await cluster.group.world_of("a", "b")
            await cluster.check_holdings("a", "b")
            cluster.group["a"].worker.drain("the spot price")
            assert await cluster.group.over("a") == [None]
            await cluster.group.world_of("b")
            await cluster.check_holdings("b")
            assert [fact.worker_id for fact in await cluster.facts(WorkerLeft)] == ["a"]
            assert await cluster.facts(ShardsLost) == []
            await cluster.finish("b")

    async def test_single_draining_worker_leaves_and_keeps_its_shards(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner) as cluster, cluster.client() as client:
            cluster.start("a")
            await cluster.group.world_of("a")
            await client.drain_worker(JOB, "a")
            assert await cluster.group.over("a") == [None]
            assert set(cluster.stores["a"].held()) == set(range(SHARDS))

    async def test_workers_that_all_drain_leave_together(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner) as cluster:
            cluster.start("a", "b", "c")
            await cluster.group.world_of("a", "b", "c")
            for name in "abc":
                cluster.group[name].worker.drain("the night")
            assert await cluster.group.over("a", "b", "c") == [None] * 3
            assert await cluster.facts(WorkerFailed) == []

    async def test_while_it_joins_goes_at_once(self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        async with training_cluster(runner) as cluster:
            cluster.start("a")
            await cluster.group.world_of("a")
            async with held_at(ShardHolder, "_try", monkeypatch) as reached:
                cluster.start("b")
                await soon(reached)
                cluster.group["b"].worker.drain("a change of mind")
                cluster.group["b"].member.state.wake()
            await cluster.group.over("b")
            await cluster.group.world_of("a")
            await cluster.check_holdings("a")

    async def test_drain_without_a_daemon_waits_until_the_state_can_be_taken_over(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner, origin=None) as cluster:
            cluster.start("a", store=filled(*range(SHARDS)))
            cluster.start("b")
            await cluster.group.world_of("a", "b")
            await runner.close()
            cluster.group["a"].worker.drain("the spot price")
            await cluster.group.more_steps("a", "b", steps=20)
            await runner.open()
            assert await cluster.group.over("a") == [None]
            await cluster.group.world_of("b")
            await cluster.check_holdings("b")

    async def test_does_not_wait_for_a_daemon_that_stays_away(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(drain, "LOOK_INTERVAL_S", 0.05)
        async with training_cluster(runner, origin=None) as cluster:
            cluster.start("a", store=filled(*range(SHARDS)))
            cluster.start("b")
            await cluster.group.world_of("a", "b")
            await runner.close()
            wait_briefly_for_daemon(cluster.group["a"])
            cluster.group["a"].worker.drain("the spot price")
            assert await cluster.group.over("a") == [None]
            await runner.open()
            assert set(cluster.stores["a"].held()) == set(range(SHARDS)) - set(cluster.stores["b"].held())

    @pytest.mark.parametrize("daemon", ["there", "away"])
    async def test_drain_does_not_wait_forever_for_lost_shards(
        self, daemon: str, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(drain, "LOOK_INTERVAL_S", 0.05)
        settings = {"leave_timeout_ms": 1_000 if daemon == "there" else None}
        async with training_cluster(runner, origin=None, settings=settings) as cluster, cluster.client() as client:
            cluster.start("a", store=filled(*range(SHARDS)))
            cluster.start("b")
            await cluster.group.world_of("a", "b")
            await client.evict_worker(JOB, "a")
            async with client.facts(ShardsLost, since=0, jobs=[JOB]) as told, asyncio.timeout(PATIENCE_S):
                await anext(told)
            if daemon == "away":
                await runner.close()
                wait_briefly_for_daemon(cluster.group["b"])
            cluster.group["b"].worker.drain("the spot price")
            assert await cluster.group.over("b") == [None]
            if daemon == "there":
                (left,) = await cluster.facts(WorkerLeft)
                assert left.reason == "the spot price; no worker has taken over its state or shards for 1 s"


class TestTheBackground:
    """In a background rescale, training continues while data moves."""

    @pytest.fixture(autouse=True)
    def _each_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(USUAL, "use_synchronous_rescaling", False)

    @pytest.mark.parametrize("is_sharded", [False, True], ids=["shared", "sharded"])
    async def test_has_steps_in_it_of_the_world_before_with_its_owners(
        self, runner: DaemonRunner, is_sharded: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with training_cluster(runner, is_sharded=is_sharded) as cluster:
            cluster.start("a", "b")
            await cluster.group.world_of("a", "b")
            generation = cluster.group["a"].worker.generation
            held = {name: set(cluster.stores[name].held()) for name in "ab"}
            async with held_at(TransferReports, "send_done", monkeypatch) as reached:
                cluster.start("c")
                await soon(reached)
                # More than an epoch, in which nothing is drawn that is not owned.
                await cluster.group.more_steps("a", "b", steps=SAMPLES // BATCH + 5)
                assert {cluster.group[name].worker.generation for name in "ab"} == {generation}
                assert {name: set(cluster.stores[name].held()) for name in "ab"} == held
                for name in "ab":
                    worker = cluster.group[name].worker
                    assert {n for n in range(SHARDS) if worker.should_handle_shard(n, SHARDS)} == held[name]
                    assert not worker.is_rescaling
            await cluster.group.world_of("a", "b", "c")
            await cluster.check_holdings("a", "b", "c")
            assert [fact.in_background for fact in await cluster.facts(RescaleStarted)][-1]
            await cluster.finish("a", "b", "c")

    async def test_draining_worker_trains_during_a_background_rescale(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with training_cluster(runner, origin=None) as cluster:
            cluster.start("a", store=filled(*range(SHARDS)))
            cluster.start("b")
            await cluster.group.world_of("a", "b")
            await until(lambda: runner.daemon.elastic.coordinators[JOB].membership.state_holders == {"a", "b"})
            async with held_at(TransferReports, "send_done", monkeypatch) as reached:
                cluster.group["a"].worker.drain("the spot price")
                await soon(reached)
                await cluster.group.more_steps("a", "b", steps=10)
            assert await cluster.group.over("a") == [None]
            await cluster.group.world_of("b")
            await cluster.check_holdings("b")
            await cluster.finish("b")

    async def test_background_rescale_restarts_without_an_evicted_joiner(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with training_cluster(runner) as cluster, cluster.client() as client:
            cluster.start("a", "b")
            await cluster.group.world_of("a", "b")
            async with held_at(TransferReports, "send_done", monkeypatch) as reached:
                cluster.start("c")
                await soon(reached)
                await client.evict_worker(JOB, "c")
                await cluster.group.more_steps("a", "b")
            await cluster.group.world_of("a", "b")
            await cluster.check_holdings("a", "b")
            attempts = await cluster.facts(RescaleStarted)
            assert [fact.in_background for fact in attempts if not fact.added][-1]
            assert all(fact.step is None for fact in (await cluster.facts(RescaleCompleted))[-1:])

    async def test_gives_way_to_a_stop_when_one_of_the_world_is_gone(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with training_cluster(runner, replication=1) as cluster, cluster.client() as client:
            cluster.start("a", "b")
            await cluster.group.world_of("a", "b")
            async with held_at(TransferReports, "send_done", monkeypatch) as reached:
                cluster.start("c")
                await soon(reached)
                await client.evict_worker(JOB, "b")
            await cluster.group.world_of("a", "c")
            await cluster.check_holdings("a", "c")
            assert not (await cluster.facts(RescaleStarted))[-1].in_background
            await cluster.finish("a", "c")

    async def test_is_under_way_again_before_a_long_step_has_let_a_worker_into_the_last_world(
        self, runner: DaemonRunner
    ) -> None:
        async with training_cluster(runner) as cluster:
            cluster.start("a", "b")
            await cluster.group.world_of("a", "b")
            leave = asyncio.Event()

            async def long(step: int) -> None:
                await leave.wait()

            cluster.group["a"].before_exchange = long
            async with cluster.client() as client, client.facts(RescaleCompleted, jobs=[JOB]) as facts:
                for name in ("c", "d"):
                    cluster.start(name)
                    item = await asyncio.wait_for(anext(facts), PATIENCE_S)
                    assert isinstance(item, Record)
                    assert isinstance(item.fact, RescaleCompleted)
                    assert item.fact.added == [name]
            assert set(cluster.stores["a"].held()) == {
                n for n in range(SHARDS) if cluster.group["a"].worker.should_handle_shard(n, SHARDS)
            }
            leave.set()
            await cluster.group.world_of("a", "b", "c", "d")
            await cluster.check_holdings("a", "b", "c", "d")
            await cluster.finish("a", "b", "c", "d")

    async def test_broken_store_ends_the_script_of_its_worker(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with training_cluster(runner) as cluster:
            cluster.start("a")
            await cluster.group.world_of("a")

            def held() -> dict[int, Stamp]:
                raise OSError("the disk is gone")

            monkeypatch.setattr(cluster.stores["a"], "held", held)
            cluster.start("b")
            (error,) = await cluster.group.over("a")
            assert isinstance(error, OSError)
            await cluster.group.world_of("b")

    async def test_goes_on_over_a_daemon_that_comes_back(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with training_cluster(runner) as cluster:
            cluster.start("a", "b")
            await cluster.group.world_of("a", "b")
            async with held_at(TransferReports, "send_done", monkeypatch) as reached:
                cluster.start("c")
                await soon(reached)
                await runner.close()
                await cluster.group.more_steps("a", "b", steps=10)
            await runner.open()
            await cluster.group.world_of("a", "b", "c")
            await cluster.check_holdings("a", "b", "c")
            await cluster.finish("a", "b", "c")


class TestCopies:
    async def test_that_are_bad_are_found_and_replaced_from_elsewhere(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner, origin=None, replication=1) as cluster, cluster.client() as client:
            for name in "ab":
                cluster.start(name, store=filled(*range(SHARDS)))
            await cluster.group.world_of("a", "b")
            for shard in range(SHARDS):
                damage(cluster.stores["a"], shard, b"!" * SIZE)
            cluster.start("c")
            await cluster.group.world_of("a", "b", "c")
            found = await cluster.facts(CorruptShardFound)
            assert found
            assert {(fact.worker_id, fact.found_by) for fact in found} == {("a", "c")}
            assert all(
                cluster.stores["c"].read(shard) == content_of(shard, SIZE) for shard in cluster.stores["c"].held()
            )
            await client.evict_worker(JOB, "a")
            await cluster.group.world_of("b", "c")
            await cluster.check_holdings("b", "c")

    async def test_corrupt_shards_of_their_owner_are_fetched_again_before_training(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner, replication=1) as cluster:
            cluster.start("a")
            await cluster.group.world_of("a")
            for shard in (0, 7):
                damage(cluster.stores["a"], shard, b"!" * SIZE)
            cluster.start("b")
            await cluster.group.world_of("a", "b")
            await cluster.check_holdings("a", "b")
            for name in "ab":
                assert all(cluster.stores[name].read(shard) == content_of(shard, SIZE) for shard in range(SHARDS))
            found = await cluster.facts(CorruptShardFound)
            assert {(fact.worker_id, fact.shard) for fact in found} == {("a", 0), ("a", 7)}
            reasons = [fact.reason for fact in await cluster.facts(RescaleStarted)]
            assert reasons[-1] == "the copy of shard 0 at a is suspect, and 1 other; b joined"
            assert await cluster.facts(WorkerFailed) == []

    async def test_slow_verification_of_suspects_does_not_prevent_training(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        look = local_shards._is_intact

        def slow(opened: OpenShard) -> Generator[bool, None, bool]:
            is_intact = yield from look(opened)
            time.sleep(0.2)
            return is_intact

        monkeypatch.setattr(local_shards, "_is_intact", slow)
        async with training_cluster(runner, replication=1, settings={"rescale_silence_ms": 1_000}) as cluster:
            cluster.start("a")
            await cluster.group.world_of("a")
            for shard in range(SHARDS):
                damage(cluster.stores["a"], shard, b"!" * SIZE)
            cluster.start("b")
            await cluster.group.world_of("a", "b")
            assert len(await cluster.facts(CorruptShardFound)) == SHARDS
            assert await cluster.facts(WorkerFailed) == []

    async def test_corrupt_last_copies_are_reported_lost_and_training_waits(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner, origin=None) as cluster, cluster.client() as client:
            cluster.start("a", store=filled(*range(SHARDS)))
            await cluster.group.world_of("a")
            damage(cluster.stores["a"], 11, b"!" * SIZE)
            damage(cluster.stores["a"], 10, b"!" * SIZE)
            async with client.facts(ShardsLost, jobs=[JOB]) as facts:
                cluster.start("b")
                item = await asyncio.wait_for(anext(facts), PATIENCE_S)
            assert isinstance(item, Record)
            assert isinstance(item.fact, ShardsLost)
            assert set(item.fact.shards) <= {10, 11}
            assert not set(item.fact.shards) & set(cluster.stores["a"].held())
            # A worker that holds them lets the job continue.
            cluster.start("c", store=filled(10, 11))
            await cluster.group.world_of("a", "b", "c")
            await cluster.check_holdings("a", "b", "c")
            assert await cluster.facts(WorkerFailed) == []

    async def test_lost_shards_are_awaited_beyond_the_rescale_silence(self, runner: DaemonRunner) -> None:
        async with (
            training_cluster(runner, origin=None, settings={"rescale_silence_ms": 1_000}) as cluster,
            cluster.client() as client,
        ):
            async with client.facts(ShardsLost, jobs=[JOB]) as facts:
                cluster.start("a", store=filled(*range(10)))
                item = await asyncio.wait_for(anext(facts), PATIENCE_S)
            assert isinstance(item, Record)
            assert item.fact == ShardsLost(1, 2, [10, 11])
            await asyncio.sleep(2.5)
            cluster.start("b", store=filled(10, 11))
            await cluster.group.world_of("a", "b")
            await cluster.check_holdings("a", "b")
            assert await cluster.facts(WorkerFailed) == []


async def standing(client: ForgedClient) -> str:
    return (await client.request(ShowCluster(JOB))).stall_report


class RefusingOrigin:
    """An origin that refuses shard 3 until it is repaired."""

    def __init__(self) -> None:
        self.is_repaired = False
        self.asked = 0

    def write_to(self, shard: DataShard, file: BinaryIO) -> None:
        if shard.shard_id == 3 and not self.is_repaired:
            self.asked += 1
            raise RequestRefused("shard_not_at_origin", "there is no shard-3", "put it there")
        write(shard, file)


class TestAShardThatTheOriginDoesNotGive:
    async def test_origin_failure_is_reported_and_awaited_beyond_the_rescale_silence(
        self, runner: DaemonRunner
    ) -> None:
        origin = RefusingOrigin()
        async with (
            training_cluster(
                runner, origin=origin, settings={"rescale_silence_ms": 1_000, "min_workers": 2}
            ) as cluster,
            cluster.client() as client,
        ):
            async with client.facts(ShardsLost, jobs=[JOB]) as facts:
                cluster.start("a", "b")
                item = await asyncio.wait_for(anext(facts), PATIENCE_S)
            assert isinstance(item, Record)
            lost = item.fact
            assert isinstance(lost, ShardsLost)
            assert (lost.count, lost.shards) == (1, [3])
            assert lost.reason[1:] == ": shard 3: there is no shard-3 (put it there)"
            await asyncio.sleep(2.5)
            shown = await client.request(ShowCluster(JOB))
            assert (
                f"{lost.reason[0]}: cannot fetch shard 3 (the origin: there is no shard-3 (put it there))"
                in shown.stall_report
            )
            assert 2 <= origin.asked < 10
            origin.is_repaired = True
            await cluster.group.world_of("a", "b")
            await cluster.check_holdings("a", "b")
            assert await cluster.facts(WorkerFailed) == []
            assert len(await cluster.facts(ShardsLost)) == 1

    async def test_hanging_origin_is_reported_and_awaited_beyond_the_rescale_silence(
        self, runner: DaemonRunner
    ) -> None:
        gate = threading.Event()

        def hang(shard: DataShard, file: BinaryIO) -> None:
            assert shard.shard_id != 3 or gate.wait(PATIENCE_S)
            write(shard, file)

        terms: dict[str, Any] = {"origin": FunctionOrigin(hang), "origin_timeout_s": 3.0}
        async with (
            training_cluster(runner, settings={"rescale_silence_ms": 1_000, "min_workers": 2}, **terms) as cluster,
            cluster.client() as client,
        ):
            async with client.facts(ShardsLost, jobs=[JOB]) as facts:
                cluster.start("a", "b")
                item = await asyncio.wait_for(anext(facts), PATIENCE_S)
            assert isinstance(item, Record)
            assert isinstance(item.fact, ShardsLost)
            assert (item.fact.count, item.fact.shards) == (1, [3])
            assert item.fact.reason[1:].startswith(": shard 3: the origin sent no byte of it for 3 s")
            gate.set()
            await cluster.group.world_of("a", "b")
            await cluster.check_holdings("a", "b")
            assert await cluster.facts(WorkerFailed) == []

    async def test_because_it_hangs_is_shown_long_before_it_is_given_up(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(transfer_reports, "ORIGIN_SILENCE_REPORTED_S", 0.01)
        gate = threading.Event()

        def hang(shard: DataShard, file: BinaryIO) -> None:
            assert shard.shard_id != 3 or gate.wait(PATIENCE_S)
            write(shard, file)

        async with training_cluster(runner, origin=FunctionOrigin(hang)) as cluster, cluster.client() as client:
            async with client.facts(RescaleStarted, jobs=[JOB]) as facts:
                cluster.start("a")
                await asyncio.wait_for(anext(facts), PATIENCE_S)
            async with asyncio.timeout(PATIENCE_S):
                while "a: the origin has sent no byte of shard 3 for " not in await standing(client):
                    await asyncio.sleep(0.01)
            gate.set()
            await cluster.group.world_of("a")
            assert await standing(client) == ""
            await cluster.check_holdings("a")

    async def test_cancelled_origin_read_is_retried_before_training(self, runner: DaemonRunner) -> None:
        calls = iter(range(100))

        async def cancelled() -> None:
            raise asyncio.CancelledError

        def write_at_last(shard: DataShard, file: BinaryIO) -> None:
            if next(calls) < SHARDS:
                asyncio.run(cancelled())
            write(shard, file)

        async with training_cluster(runner, origin=FunctionOrigin(write_at_last)) as cluster:
            cluster.start("a")
            await cluster.group.world_of("a")
            await cluster.check_holdings("a")

    async def test_shard_lost_at_the_origin_is_taken_from_a_joiner(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner, origin=RefusingOrigin()) as cluster, cluster.client() as client:
            async with client.facts(ShardsLost, jobs=[JOB]) as facts:
                cluster.start("a")
                await asyncio.wait_for(anext(facts), PATIENCE_S)
            cluster.start("b", store=filled(3))
            await cluster.group.world_of("a", "b")
            await cluster.check_holdings("a", "b")

    async def test_ends_the_job_where_that_is_its_policy(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner, origin=RefusingOrigin(), settings={"lost_data_policy": "abort"}) as cluster:
            cluster.start("a")
            (error,) = await cluster.group.over("a")
            assert isinstance(error, JobEnded)
            assert "a: shard 3: there is no shard-3" in error.message


class TestFailedTransfers:
    async def test_failed_origin_read_is_retried(self, runner: DaemonRunner) -> None:
        failures = iter(range(5))

        def moody(shard: DataShard, file: BinaryIO) -> None:
            if next(failures, None) is not None:
                raise OSError("the bucket is not there")
            write(shard, file)

        async with training_cluster(runner, origin=FunctionOrigin(moody)) as cluster:
            cluster.start("a", "b")
            await cluster.group.world_of("a", "b")
            await cluster.check_holdings("a", "b")

    async def test_worker_with_a_full_store_leaves_the_world_and_training_continues(self, runner: DaemonRunner) -> None:
        async with training_cluster(runner, settings={"rescale_silence_ms": 500}) as cluster:
            cluster.start("a")
            await cluster.group.world_of("a")
            cluster.start("b", store=MemoryShardStore(bytes_max=SIZE))
            (error,) = await cluster.group.over("b")
            assert isinstance(error, WorkerEvicted)
            await cluster.group.world_of("a")
            await cluster.check_holdings("a")

    async def test_worker_whose_store_hangs_is_evicted(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(transfer_reports, "STORING_MAX_S", 0.01)
        async with training_cluster(runner, settings={"rescale_silence_ms": 1_000}) as cluster:
            store = DelayedStore()
            cluster.start("a", store=store)
            (error,) = await cluster.group.over("a")
            assert isinstance(error, WorkerEvicted)
            store.gate.set()
            (failed,) = await cluster.facts(WorkerFailed)
            assert failed.reason == "no answer in attempt 1 within 1 s"
            assert await cluster.facts(ShardsLost) == []

    async def test_full_worker_with_only_copies_stays_and_new_shards_go_elsewhere(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        swift = RetryPolicy(attempts=2, delay_s=0.01)
        monkeypatch.setitem(cast("dict[str, Any]", DataTransferManager.__init__.__kwdefaults__), "retry", swift)
        settings = {"rescale_silence_ms": 1_000}
        async with training_cluster(runner, origin=None, settings=settings) as cluster, cluster.client() as client:
            cluster.start("a", store=filled(*range(SHARDS)))
            cluster.start("b", "c")
            await cluster.group.world_of("a", "b", "c")
            await cluster.group.until(lambda: len(cluster.stores["a"].held()) == 4)
            cluster.stores["a"]._bytes_max = 4 * SIZE
            await client.drain_worker(JOB, "b")
            assert await cluster.group.over("b") == [None]
            await cluster.group.world_of("a", "c")
            await cluster.check_holdings("a", "c")
            assert [len(cluster.stores[name].held()) for name in "ac"] == [4, 8]
            assert await cluster.facts(WorkerFailed, ShardsLost) == []
            reasons = [fact.reason for fact in await cluster.facts(RescaleStarted)]
            assert any("a cannot store 2 assigned shards: free space on its disk" in why for why in reasons)

    async def test_full_store_is_the_reason_of_the_eviction(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        swift = RetryPolicy(attempts=2, delay_s=0.01)
        monkeypatch.setitem(cast("dict[str, Any]", DataTransferManager.__init__.__kwdefaults__), "retry", swift)
        async with training_cluster(runner, settings={"rescale_silence_ms": 1_000}) as cluster:
            cluster.start("a")
            await cluster.group.world_of("a")
            cluster.start("b", store=MemoryShardStore(bytes_max=SIZE))
            await cluster.group.over("b")
            (failed,) = await cluster.facts(WorkerFailed)
            assert failed.worker_id == "b"
            assert failed.reason.startswith("no answer in attempt 2 within 1 s (")
            assert "bytes received): cannot store " in failed.reason
            assert "no space" in failed.reason
            assert await cluster.facts(ShardsLost) == []

    async def test_of_a_store_count_over_attempts_and_daemon_restarts(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        swift = RetryPolicy(attempts=2, delay_s=0.01)
        monkeypatch.setitem(cast("dict[str, Any]", DataTransferManager.__init__.__kwdefaults__), "retry", swift)
        tries: list[int] = []
        store_failed = TransferReports.store_failed

        def fail(reports: TransferReports) -> None:
            tries.append(reports._attempt)
            store_failed(reports)

        monkeypatch.setattr(TransferReports, "store_failed", fail)
        async with training_cluster(runner, settings={"rescale_silence_ms": 6_000}) as cluster:
            cluster.start("a")
            await cluster.group.world_of("a")
            cluster.start("b", store=MemoryShardStore(bytes_max=SIZE // 2))
            async with asyncio.timeout(PATIENCE_S):
                for attempt in count(2):
                    while tries.count(attempt) < 2 and not await cluster.facts(WorkerFailed):
                        await asyncio.sleep(0.01)
                    if failures := await cluster.facts(WorkerFailed):
                        break
                    if attempt == 2:
                        await runner.close()
                        await runner.open()
                    else:
                        async with cluster.client() as client:
                            await client.rescale_job(JOB)
            assert [failed.worker_id for failed in failures] == ["b"]
            assert "in several attempts: cannot store" in failures[0].reason
            await cluster.group.over("b")

    @pytest.mark.parametrize("origin", [None, ORIGIN])
    async def test_with_a_deleted_shard_directory_is_repaired_by_the_next_rescale(
        self, runner: DaemonRunner, tmp_path: Path, origin: FunctionOrigin | None
    ) -> None:
        replication = 1 if origin is None else 0
        async with training_cluster(runner, origin=origin, replication=replication) as cluster:
            stores = {name: DirectoryShardStore(tmp_path / name) for name in "abc"}
            for name in "ab":
                for shard in range(SHARDS):
                    put(stores[name], shard)
                cluster.start(name, store=stores[name])
            await cluster.group.world_of("a", "b")
            shutil.rmtree(tmp_path / "a")
            cluster.start("c", store=stores["c"])
            await cluster.group.world_of("a", "b", "c")
            assert await cluster.facts(WorkerFailed) == []
            copies = [sum(store.holds(shard) for store in stores.values()) for shard in range(SHARDS)]
            assert copies == [1 + replication] * SHARDS
            for name, store in stores.items():
                for shard in store.held():
                    assert store.path_of(shard).read_bytes() == content_of(shard, SIZE), (name, shard)
                assert len(store.held()) >= SHARDS // 3

    @pytest.mark.parametrize(("owner", "point"), TRANSFER_POINTS)
    async def test_with_the_daemon_while_data_moves_is_got_over(
        self, runner: DaemonRunner, owner: type, point: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with training_cluster(runner, origin=None) as cluster:
            cluster.start("a", store=filled(*range(SHARDS)))
            await cluster.group.world_of("a")
            async with held_at(owner, point, monkeypatch) as reached:
                cluster.start("b")
                await soon(reached)
                await runner.close()
            await runner.open()
            await cluster.group.world_of("a", "b")
            await cluster.check_holdings("a", "b")
            await cluster.finish("a", "b")

    @pytest.mark.parametrize(("owner", "point"), TRANSFER_POINTS)
    async def test_with_a_newer_attempt_while_data_moves_is_none(
        self, runner: DaemonRunner, owner: type, point: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with training_cluster(runner, origin=None) as cluster, cluster.client() as client:
            cluster.start("a", store=filled(*range(SHARDS)))
            await cluster.group.world_of("a")
            async with held_at(owner, point, monkeypatch) as reached:
                cluster.start("b")
                await soon(reached)
                await client.rescale_job(JOB)
            await cluster.group.world_of("a", "b")
            await cluster.check_holdings("a", "b")
            assert (await cluster.facts(RescaleCompleted))[-1].attempt >= 3

    async def test_failed_drop_of_moved_shards_does_not_stop_training(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with training_cluster(runner) as cluster:
            cluster.start("a")
            await cluster.group.world_of("a")

            def fail(shard: int) -> None:
                raise StoreFailed("store_failed", "the disk is read-only", "mount it again")

            monkeypatch.setattr(cluster.stores["a"], "drop", fail)
            cluster.start("b")
            await cluster.group.world_of("a", "b")
            assert len(cluster.stores["a"].held()) == SHARDS
