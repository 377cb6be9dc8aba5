"""Transfers on virtual time, over a network that fails, without threads and files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from random import Random
from typing import Any, BinaryIO

import anyio
import pytest

from forged.data.model import DataShard
from forged.data.store.memory import MemoryShardStore
from forged.data.store.origin import ORIGIN_TIMEOUT_S
from forged.data.transfer.bandwidth import RATE_BYTES_MIN
from forged.data.transfer.manager import DataTransferManager
from forged.data.transfer.outcome import TransferProgress, TransferReport
from forged.data.transfer.schedule import Wanted
from forged.errors import Unavailable
from forged.retry import RetryPolicy
from tests.data.transfer_cluster import Observer, content_of, shard
from tests.simulation.environment.loop import VirtualClock, run
from tests.worker.test_simulated import Cluster

SIZE = 400_000


class DataCluster(Cluster):
    """Workers with shards in memory."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__(size, seed)
        self.stores = [MemoryShardStore() for _ in range(size)]
        for mesh, store in zip(self.meshes, self.stores, strict=True):
            mesh.serve_shards(store)

    def manager(self, number: int, **options: Any) -> DataTransferManager:
        return DataTransferManager(
            worker=self.workers[number],
            store=self.stores[number],
            connect=self.meshes[number].connect_for_shards,
            clock=VirtualClock(asyncio.get_running_loop()),
            random=Random(number).random,
            uses_threads=False,
            **options,
        )


def simulate(size: int, story: Callable[[DataCluster], Awaitable[None]], seed: int = 1) -> list[str]:
    """Live through a story; returns what the network saw."""
    traces: list[list[str]] = []

    async def main() -> None:
        async with AsyncExitStack() as stack:
            cluster = DataCluster(size, seed)
            traces.append(cluster.trace)
            await cluster.open(stack)
            await story(cluster)

    run(main, seed)
    return traces[0]


async def move_five(cluster: DataCluster) -> None:
    for number in range(5):
        cluster.stores[1].put(number, [content_of(number, SIZE)])
    manager = cluster.manager(0)
    moving = (manager.transfer_data_shards(cluster.workers[1], cluster.workers[0], shard(one)) for one in range(5))
    await asyncio.gather(*moving)
    assert cluster.stores[0].held() == cluster.stores[1].held()


def test_shards_move_over_a_simulated_network_the_same_way_each_time() -> None:
    assert simulate(2, move_five, 3) == simulate(2, move_five, 3)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_all_transfers_together_keep_the_rate(concurrency: int) -> None:
    async def story(cluster: DataCluster) -> None:
        for number in range(8):
            cluster.stores[1].put(number, [content_of(number, RATE_BYTES_MIN)])
        manager = cluster.manager(0, rate_bytes_per_s=2 * RATE_BYTES_MIN, max_concurrent_transfers=concurrency)
        began = asyncio.get_running_loop().time()
        moving = (manager.transfer_data_shards(cluster.workers[1], cluster.workers[0], shard(one)) for one in range(8))
        await asyncio.gather(*moving)
        elapsed_s = asyncio.get_running_loop().time() - began
        assert 3.5 < elapsed_s < 6.0

    simulate(2, story)


def test_transfer_progress_reports_the_rate_of_the_link() -> None:
    async def story(cluster: DataCluster) -> None:
        seen: list[TransferProgress] = []
        cluster.stores[1].put(0, [content_of(0, 4 * RATE_BYTES_MIN)])
        manager = cluster.manager(
            0, rate_bytes_per_s=RATE_BYTES_MIN, observer=Observer(progress=seen.append), progress_interval_s=0.5
        )
        await manager.transfer_data_shards(cluster.workers[1], cluster.workers[0], shard(0))
        here = [one.in_transit[0].stored for one in seen if one.in_transit]
        assert len(here) >= 4
        assert here == sorted(here)
        rate = manager.bandwidth.bytes_per_s
        assert rate is not None
        assert 0.7 * RATE_BYTES_MIN < rate < 1.4 * RATE_BYTES_MIN

    simulate(2, story)


@pytest.mark.parametrize("seed", range(20))
def test_a_source_that_is_killed_at_any_moment_is_replaced_by_a_copy(seed: int) -> None:
    source = Random(seed)

    async def story(cluster: DataCluster) -> None:
        for number in range(6):
            for store in cluster.stores[1:]:
                store.put(number, [content_of(number, SIZE)])
        manager = cluster.manager(0)
        moving = [
            asyncio.ensure_future(
                manager.transfer_data_shards(
                    cluster.workers[1], cluster.workers[0], shard(number), replicas=[cluster.workers[2]]
                )
            )
            for number in range(6)
        ]
        await asyncio.sleep(source.random() * 0.2)
        cluster.network.kill(cluster.hosts[1])
        await asyncio.gather(*moving)
        assert cluster.stores[0].held() == cluster.stores[2].held()

    simulate(3, story, seed)


def test_a_source_that_cannot_be_reached_for_a_while_is_asked_again() -> None:
    async def story(cluster: DataCluster) -> None:
        cluster.stores[1].put(0, [content_of(0, SIZE)])
        cluster.network.partition(["h0"], ["h1"])
        patient = RetryPolicy(attempts=100, delay_s=0.5)
        manager = cluster.manager(0, retry=patient)
        moving = asyncio.ensure_future(manager.transfer_data_shards(cluster.workers[1], cluster.workers[0], shard(0)))
        await asyncio.sleep(20.0)
        assert not moving.done()
        cluster.network.heal()
        await moving

    simulate(2, story)


def test_a_source_that_can_never_be_reached_is_given_up_in_the_end() -> None:
    async def story(cluster: DataCluster) -> None:
        cluster.stores[1].put(0, [content_of(0, SIZE)])
        cluster.network.partition(["h0"], ["h1"])
        with pytest.raises(Unavailable, match="shard 0 "):
            await cluster.manager(0).transfer_data_shards(cluster.workers[1], cluster.workers[0], shard(0))

    simulate(2, story)


class SlowOrigin:
    """It gives a shard in pieces, with so much time before each; what it writes comes of what it returns."""

    def __init__(self, pauses_s: dict[int, list[float]]) -> None:
        self._pauses_s = pauses_s
        self.asked: list[int] = []

    def write_to(self, one: DataShard, file: BinaryIO) -> Any:
        self.asked.append(one.shard_id)
        return self._write(self._pauses_s.get(one.shard_id, [0.0]), file)

    async def _write(self, pauses_s: list[float], file: BinaryIO) -> None:
        for pause_s in pauses_s:
            await anyio.sleep(pause_s)
            file.write(b"piece")


FOR_EVER = [float("inf")]


def brought(
    origin: SlowOrigin, shards: int, *, tries: int = 1, **options: Any
) -> tuple[list[TransferReport], list[float], MemoryShardStore]:
    """What comes of so many tries to have shards from an origin alone, and how long each took."""
    reports, took_s, stores = list[TransferReport](), list[float](), list[MemoryShardStore]()

    async def story(cluster: DataCluster) -> None:
        manager = cluster.manager(0, origin=origin, **options)
        stores.append(cluster.stores[0])
        for _ in range(tries):
            began = asyncio.get_running_loop().time()
            reports.append(await manager.execute([Wanted(shard(one), -one, (None,)) for one in range(shards)]))
            took_s.append(asyncio.get_running_loop().time() - began)

    simulate(1, story)
    return reports, took_s, stores[0]


def test_hanging_origin_read_times_out_and_other_reads_continue() -> None:
    origin = SlowOrigin({1: FOR_EVER})
    (report,), (took_s,), store = brought(origin, 20)
    assert {one.shard_id for one in report.moved} == set(range(20)) - {1}
    (missing,) = report.missing
    assert missing.reason.startswith("the origin sent no byte of it for 600 s")
    assert took_s == pytest.approx(ORIGIN_TIMEOUT_S, abs=0.1)
    assert not store._arriving
    assert origin.asked.count(1) == 1


def test_bytes_begin_the_patience_with_an_origin_anew() -> None:
    (report,), (took_s,), _ = brought(SlowOrigin({0: [599.0] * 10}), 1)
    assert report.is_complete
    assert took_s == pytest.approx(5990.0, abs=0.1)


def test_an_origin_that_stops_in_the_middle_has_failed_a_patience_later() -> None:
    (report,), (took_s,), store = brought(SlowOrigin({0: [2.0, 3.0, *FOR_EVER]}), 1, origin_timeout_s=10.0)
    assert [one.shard_id for one in report.missing] == [0]
    assert took_s == pytest.approx(15.0, abs=0.1)
    assert store.partial(0) is None


def test_an_origin_that_hangs_over_everything_is_given_up_after_one_patience() -> None:
    origin = SlowOrigin(dict.fromkeys(range(100), FOR_EVER))
    reports, took_s, _ = brought(origin, 100, tries=3)
    assert [len(report.missing) for report in reports] == [100] * 3
    assert took_s == pytest.approx([ORIGIN_TIMEOUT_S] * 3, abs=0.1)
    assert {report.missing[0].reason for report in reports} == {reports[0].missing[0].reason}
    assert len(origin.asked) < 20


def test_next_try_reads_shards_on_which_the_origin_hung() -> None:
    origin = SlowOrigin({0: FOR_EVER, 3: FOR_EVER})
    pauses = origin._pauses_s

    async def story(cluster: DataCluster) -> None:
        manager = cluster.manager(0, origin=origin)
        wanted = [Wanted(shard(one), -one, (None,)) for one in range(5)]
        assert not (await manager.execute(wanted)).is_complete
        pauses.clear()
        assert (await manager.execute(wanted)).is_complete
        assert set(cluster.stores[0].held()) == set(range(5))

    simulate(1, story)
