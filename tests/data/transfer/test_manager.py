from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

import numpy as np
import pytest

from forged.clock import SystemClock
from forged.data.model import DataShard, DataTransfer
from forged.data.placement.plan import DataRedistributionPlan
from forged.data.placement.planner import DataRedistributor
from forged.data.store.directory import DirectoryShardStore
from forged.data.store.errors import ShardCorrupt, StoreFailed
from forged.data.store.memory import MemoryShardStore
from forged.data.store.origin import FunctionOrigin
from forged.data.store.port import ArrivingShard, FlowControl, PartialShard, ShardStore, Stamp
from forged.data.transfer.bandwidth import RATE_BYTES_MIN
from forged.data.transfer.execution import SourceConnection
from forged.data.transfer.manager import DataTransferManager
from forged.data.transfer.origin_reads import ABANDONED_PER_SHARD_MAX
from forged.data.transfer.outcome import BadCopy, TransferProgress, TransferReport
from forged.data.transfer.schedule import Wanted
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import ClusterTopology, WorkerId
from forged.errors import ConfigError, ForgedError, RequestRefused, Unavailable
from forged.net.bulk import movers
from forged.retry import RetryPolicy
from forged.worker.data import shard_connections as shards
from forged.worker.data import shard_protocol
from forged.worker.transport.bulk_channel import BulkTransport, LoopBulkTransport, SocketBulkTransport
from forged.worker.transport.peer_link import PEER_LIMITS
from tests.data.damage import damage
from tests.data.topology_changes import redistributor, spread
from tests.data.transfer_cluster import (
    FAST_RETRY,
    BlockedStore,
    DelayedStore,
    Observer,
    TamperingProxy,
    TransferCluster,
    content_of,
    cut_after,
    flip_once,
    open_cluster,
    open_descriptors,
    shard,
)
from tests.worker.meshes import PATIENCE_S, until

SIZE = 300_000
HANDSHAKE_BYTES_MAX = 3000
"""An offset in a connection behind the handshake, inside the bytes of the first shard."""

CARRIERS: list[Callable[[], BulkTransport]] = [SocketBulkTransport, LoopBulkTransport]


class AdvancedClock(SystemClock):
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def put(store: ShardStore, *numbers: int, size: int = SIZE) -> None:
    for number in numbers:
        store.put(number, [content_of(number, size)])


def write_bytes(one: DataShard, file: BinaryIO) -> None:
    file.write(content_of(one.shard_id, SIZE))


def bytes_of(store: ShardStore, number: int) -> bytes:
    with store.open(number) as opened:
        return os.pread(opened.fd, opened.stamp.size, 0)


def directories(place: Path) -> Callable[[int], ShardStore]:
    return lambda number: DirectoryShardStore(place / f"w{number}")


def plan_for(
    cluster: TransferCluster, numbers: int, held: dict[int, list[int]], copies: dict[int, list[int]]
) -> DataRedistributionPlan:
    """A plan that moves all shards to the first worker; `held` and `copies` are the other workers' shards."""
    redistributor = DataRedistributor(ElasticTrainingConfig())
    others = cluster.workers[1:]
    return redistributor.calculate_plan(
        ClusterTopology(tuple(others)),
        ClusterTopology((cluster.fetcher,)),
        numbers,
        shards=numbers,
        current={cluster.workers[number]: shards for number, shards in held.items()},
        replicas={cluster.workers[number]: shards for number, shards in copies.items()},
        draining=others,
    )


async def code_of(action: Any) -> str:
    with pytest.raises(ForgedError) as raised:
        await action
    return raised.value.code


# Transfers that succeed.


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_plan_moves_every_shard_assigned_to_the_worker(
    carrier: Callable[[], BulkTransport], tmp_path: Path
) -> None:
    async with open_cluster(3, directories(tmp_path), carrier=carrier()) as cluster:
        put(cluster.stores[1], 0, 2, 4)
        put(cluster.stores[2], 1, 3)
        report = await cluster.manager().execute_plan(plan_for(cluster, 5, {1: [0, 2, 4], 2: [1, 3]}, {}))
        assert report.is_complete
        assert report.bytes == 5 * SIZE
        assert {(one.shard_id, one.source) for one in report.moved} == {
            (number, cluster.workers[1 + number % 2]) for number in range(5)
        }
        assert cluster.store.held() == {**cluster.stores[1].held(), **cluster.stores[2].held()}
        assert all(bytes_of(cluster.store, number) == content_of(number, SIZE) for number in range(5))


async def test_plan_moves_no_shards_of_other_destinations() -> None:
    async with open_cluster(3) as cluster:
        put(cluster.stores[2], 0, 1)
        redistributor = DataRedistributor(ElasticTrainingConfig())
        old, new = ClusterTopology((cluster.workers[2],)), ClusterTopology((cluster.workers[0], cluster.workers[1]))
        plan = redistributor.calculate_plan(old, new, 2, shards=2, draining=[cluster.workers[2]])
        report = await cluster.manager().execute_plan(plan)
        assert [one.shard_id for one in report.moved] == list(plan.worker_assignments.ids(cluster.fetcher))
        assert (
            await code_of(cluster.manager().transfer_data_shards(cluster.workers[2], cluster.workers[1], shard(0)))
            == "not_destination"
        )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 4),
        ({"max_concurrent_transfers": 3}, 3),
        ({"max_concurrent_transfers": np.int64(3)}, 3),
        ({"max_concurrent_transfers": 3, "use_parallel_data_transfer": False}, 1),
    ],
)
async def test_concurrent_transfers_reach_the_configured_maximum(options: dict[str, Any], expected: int) -> None:
    most: list[int] = []

    def watch(progress: TransferProgress) -> None:
        most.append(len(progress.in_transit))

    gate = threading.Event()
    stores = [MemoryShardStore(), GatedStore(gate)]
    async with open_cluster(2, lambda number: stores[number]) as cluster:
        put(cluster.stores[1], *range(6))
        manager = cluster.manager(observer=Observer(progress=watch), progress_interval_s=0.001, **options)
        moving = asyncio.ensure_future(manager.execute_plan(plan_for(cluster, 6, {1: list(range(6))}, {})))
        await until(lambda: max(most, default=0) == expected)
        gate.set()
        assert len((await moving).moved) == 6
    assert max(most) == expected


class GatedStore(MemoryShardStore):
    """Blocks each open until the gate is set."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self._gate = gate

    def open(self, shard: int) -> Any:
        assert self._gate.wait(PATIENCE_S)
        return super().open(shard)


async def test_sequential_transfers_use_one_connection_in_priority_order() -> None:
    async with open_cluster(2) as cluster:
        put(cluster.stores[1], *range(20), size=10)
        before = cluster.meshes[1].counts.accepted
        manager = cluster.manager(use_parallel_data_transfer=False)
        report = await manager.execute_plan(plan_for(cluster, 20, {1: list(range(20))}, {}))
        assert [one.shard_id for one in report.moved] == list(range(20))
        assert cluster.meshes[1].counts.accepted == before + 1


@pytest.mark.parametrize("size", [0, 1])
async def test_shards_of_zero_and_one_bytes_are_moved(size: int, tmp_path: Path) -> None:
    async with open_cluster(2, directories(tmp_path)) as cluster:
        put(cluster.stores[1], 0, size=size)
        moved = await cluster.move(cluster.manager(), 0, 1)
        assert moved is not None
        assert (moved.size, moved.resumed_from) == (size, 0)
        assert bytes_of(cluster.store, 0) == content_of(0, size)


async def test_ten_thousand_small_shards_move() -> None:
    async with open_cluster(2) as cluster:
        put(cluster.stores[1], *range(10_000), size=3)
        report = await cluster.manager().execute_plan(plan_for(cluster, 10_000, {1: list(range(10_000))}, {}))
        assert len(report.moved) == 10_000
        assert cluster.store.held() == cluster.stores[1].held()


async def test_shard_already_held_is_kept() -> None:
    async with open_cluster(2) as cluster:
        put(cluster.stores[1], 0, 1)
        put(cluster.store, 1)
        manager = cluster.manager()
        report = await manager.execute_plan(plan_for(cluster, 2, {1: [0, 1]}, {}))
        assert [one.shard_id for one in report.moved] == [0]
        assert report.kept == (1,)
        assert await cluster.move(manager, 1, 1) is None


async def test_unbound_manager_is_refused_with_a_fix() -> None:
    async with open_cluster(2) as cluster:
        manager = DataTransferManager(max_concurrent_transfers=4)
        plan = plan_for(cluster, 2, {1: [0, 1]}, {})
        for moving in (
            manager.execute_plan(plan),
            manager.transfer_data_shards(cluster.workers[1], cluster.fetcher, shard(0)),
        ):
            with pytest.raises(RequestRefused) as error:
                await moving
            assert error.value.code == "manager_unbound"
            assert "ElasticWorker.transfers" in error.value.fix


async def test_bound_manager_moves_shards_to_its_worker() -> None:
    async with open_cluster(2) as cluster:
        put(cluster.stores[1], 0, 1)
        manager = DataTransferManager(max_concurrent_transfers=4)
        assert manager.bind(cluster.fetcher, cluster.store, cluster.meshes[0].connect_for_shards) is manager
        report = await manager.execute_plan(plan_for(cluster, 2, {1: [0, 1]}, {}))
        assert sorted(one.shard_id for one in report.moved) == [0, 1]
        with pytest.raises(RequestRefused) as error:
            manager.bind(cluster.workers[1], cluster.stores[1], cluster.meshes[1].connect_for_shards)
        assert error.value.code == "manager_bound"


@pytest.mark.parametrize("number", [0, -1, 65, 2.5, True, None, "4"])
def test_number_of_concurrent_transfers_is_the_first_argument(number: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        DataTransferManager(number)
    assert "max_concurrent_transfers" in str(raised.value)


async def test_manager_moves_as_many_shards_at_once_as_its_first_argument_says() -> None:
    most: list[int] = []
    gate = threading.Event()
    stores = [MemoryShardStore(), GatedStore(gate)]
    async with open_cluster(2, lambda number: stores[number]) as cluster:
        put(cluster.stores[1], *range(6))
        observer = Observer(progress=lambda progress: most.append(len(progress.in_transit)))
        manager = DataTransferManager(3, observer=observer, progress_interval_s=0.001)
        manager.bind(cluster.fetcher, cluster.store, cluster.meshes[0].connect_for_shards)
        moving = asyncio.ensure_future(manager.execute_plan(plan_for(cluster, 6, {1: list(range(6))}, {})))
        await until(lambda: max(most, default=0) == 3)
        gate.set()
        assert len((await moving).moved) == 6
    assert max(most) == 3


def test_worker_without_a_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="worker, store and connect belong together"):
        DataTransferManager(worker=WorkerId("a", "h", 1))


@pytest.mark.parametrize("plan", [DataRedistributionPlan(), redistributor().calculate_plan(spread(0), spread(0), 8)])
async def test_unbound_manager_executes_an_empty_plan(plan: DataRedistributionPlan) -> None:
    assert await DataTransferManager().execute_plan(plan) == TransferReport()


async def test_plan_of_a_caller_is_executed() -> None:
    async with open_cluster(2) as cluster:
        put(cluster.stores[1], 0, 1)
        shards = [shard(0), shard(1)]
        transfers = [DataTransfer(cluster.workers[1], cluster.fetcher, one, 2 - one.shard_id) for one in shards]
        plan = DataRedistributionPlan(transfers, {cluster.fetcher: shards}, 2)
        report = await cluster.manager().execute_plan(plan)
        assert sorted(one.shard_id for one in report.moved) == [0, 1]


async def test_empty_plan_completes_at_once() -> None:
    async with open_cluster(2) as cluster:
        report = await cluster.manager().execute_plan(plan_for(cluster, 0, {}, {}))
        assert report.is_complete
        assert report.moved == ()


async def test_progress_is_monotonic_and_ends_complete() -> None:
    seen: list[TransferProgress] = []
    async with open_cluster(2) as cluster:
        put(cluster.stores[1], *range(5))
        manager = cluster.manager(observer=Observer(progress=seen.append), progress_interval_s=0.001)
        await manager.execute_plan(plan_for(cluster, 5, {1: list(range(5))}, {}))
    assert [one.done for one in seen] == sorted(one.done for one in seen)
    assert (seen[-1].done, seen[-1].total, seen[-1].missing) == (5, 5, 0)
    assert seen[-1].bytes_moved == 5 * SIZE
    assert seen[-1].in_transit == ()


async def test_measured_bandwidth_becomes_the_pace_of_plans() -> None:
    async with open_cluster(2) as cluster:
        put(cluster.stores[1], 0)
        manager = cluster.manager()
        assert manager.pace(100.0) is None
        await cluster.move(manager, 0, 1)
        pace = manager.pace(100.0, now=5.0)
        assert pace is not None
        assert pace.bytes_per_second == manager.bandwidth.bytes_per_s
        assert (pace.bytes_per_sample, pace.now) == (100.0, 5.0)


async def test_rate_limited_plan_completes() -> None:
    async with open_cluster(2) as cluster:
        put(cluster.stores[1], 0, 1)
        manager = cluster.manager(rate_bytes_per_s=50 * RATE_BYTES_MIN)
        assert (await manager.execute_plan(plan_for(cluster, 2, {1: [0, 1]}, {}))).is_complete


@pytest.mark.parametrize("count", [0, 65, 2.5, True, "x", None])
async def test_invalid_max_concurrent_transfers_is_refused(count: object) -> None:
    async with open_cluster(1) as cluster:
        with pytest.raises(ConfigError, match=r"max_concurrent_transfers must be a whole number from 1 to 64, got "):
            cluster.manager(max_concurrent_transfers=count)


async def test_transfers_leak_no_descriptors(tmp_path: Path) -> None:
    async with open_cluster(3, directories(tmp_path)) as cluster:
        put(cluster.stores[1], 0, 1, 2)
        manager = cluster.manager()
        await cluster.move(manager, 0, 1)
        await until(lambda: [len(mesh.descriptors()) for mesh in cluster.meshes] == [1, 1, 1])
        before = open_descriptors()
        for _ in range(5):
            await manager.execute_plan(plan_for(cluster, 3, {1: [0, 1, 2]}, {}))
            assert await code_of(cluster.move(manager, 9, 1, 2)) == "shards_missing"
            for number in range(3):
                cluster.store.drop(number)
        await until(lambda: open_descriptors() <= before)


# Sources that fail.


async def test_shard_missing_at_its_owner_comes_from_a_copy() -> None:
    async with open_cluster(3) as cluster:
        put(cluster.stores[2], 0)
        report = await cluster.manager().execute_plan(plan_for(cluster, 1, {1: [0]}, {2: [0]}))
        assert [one.source for one in report.moved] == [cluster.workers[2]]
        assert report.bad_copies == ()


async def test_shard_that_no_worker_holds_comes_from_the_origin() -> None:
    def write(one: DataShard, file: BinaryIO) -> None:
        file.write(content_of(one.shard_id, SIZE))

    async with open_cluster(3) as cluster:
        manager = cluster.manager(origin=FunctionOrigin(write))
        report = await manager.execute_plan(plan_for(cluster, 2, {1: [0]}, {2: [0]}))
        assert {one.shard_id: one.source for one in report.moved} == {0: None, 1: None}
        assert bytes_of(cluster.store, 0) == content_of(0, SIZE)


async def test_missing_shard_is_reported_with_all_tried_sources() -> None:
    async with open_cluster(3) as cluster:
        put(cluster.stores[1], 1)
        report = await cluster.manager().execute_plan(plan_for(cluster, 2, {1: [0, 1]}, {2: [0]}))
        assert [one.shard_id for one in report.moved] == [1]
        (missing,) = report.missing
        assert missing.shard_id == 0
        assert [failure.source for failure in missing.failures] == [cluster.workers[1], cluster.workers[2]]
        with pytest.raises(Unavailable, match="shard 0 "):
            report.require_complete()


async def test_shard_of_a_dead_source_comes_from_a_copy() -> None:
    async with open_cluster(2) as cluster:
        put(cluster.stores[1], 0, 1)
        dead = WorkerId("w9", "127.0.0.1", 1)
        manager = cluster.manager()
        assert (await cluster.move(manager, 0, dead, 1)) is not None
        with pytest.raises(Unavailable, match="shard 7 "):
            await cluster.move(manager, 7, dead)


async def test_worker_without_a_store_refuses_shards() -> None:
    async with open_cluster(2) as cluster:
        cluster.meshes[1].serve_shards(None)
        with pytest.raises(Unavailable, match=r"shard 0 .*it is not held"):
            await cluster.move(cluster.manager(), 0, 1)


@pytest.mark.parametrize("percent", range(101))
async def test_interrupted_transfer_resumes_at_its_offset(percent: int, tmp_path: Path) -> None:
    """A copy sends the rest when the source accepts no further connection."""
    async with open_cluster(3, directories(tmp_path)) as cluster:
        put(cluster.stores[1], 0)
        put(cluster.stores[2], 0)
        proxy = TamperingProxy(cluster.workers[1])
        cut_at = HANDSHAKE_BYTES_MAX + percent * SIZE // 100

        def cut_for_good(at: int, data: bytes) -> bytes:
            return b"" if len(proxy.passed) > 1 else cut_after(cut_at)(at, data)

        proxy.tamper = cut_for_good
        async with proxy.open() as proxied:
            moved = await cluster.move(cluster.manager(), 0, proxied, 2)
        assert moved is not None
        passed_bytes = proxy.passed[0]
        if moved.source == proxied:
            assert passed_bytes > SIZE
        else:
            assert moved.resumed_from > 0
            assert passed_bytes - HANDSHAKE_BYTES_MAX < moved.resumed_from <= passed_bytes
        assert bytes_of(cluster.store, 0) == content_of(0, SIZE)


async def test_transfer_that_progresses_on_each_broken_connection_completes() -> None:
    async with open_cluster(2) as cluster:
        put(cluster.stores[1], 0)
        proxy = TamperingProxy(cluster.workers[1])
        proxy.tamper = cut_after(SIZE // 8)
        async with proxy.open() as proxied:
            moved = await cluster.move(cluster.manager(), 0, proxied)
        assert moved is not None
        assert len(proxy.passed) > 8
        assert sum(proxy.passed) < SIZE + len(proxy.passed) * HANDSHAKE_BYTES_MAX
        assert bytes_of(cluster.store, 0) == content_of(0, SIZE)


@pytest.mark.parametrize("at_byte", [HANDSHAKE_BYTES_MAX, SIZE // 2, SIZE])
async def test_byte_flipped_in_transit_is_detected_and_another_source_is_used(at_byte: int) -> None:
    bad: list[BadCopy] = []
    async with open_cluster(3) as cluster:
        put(cluster.stores[1], 0)
        put(cluster.stores[2], 0)
        proxy = TamperingProxy(cluster.workers[1])
        proxy.tamper = flip_once(at_byte)
        async with proxy.open() as proxied:
            moved = await cluster.move(cluster.manager(observer=Observer(bad_copy=bad.append)), 0, proxied, 2)
        assert moved is not None
        assert (moved.source, moved.resumed_from) == (cluster.workers[2], 0)
        assert [(one.shard_id, one.source, one.code) for one in bad] == [(0, proxied, "shard_corrupt")]
        assert bytes_of(cluster.store, 0) == content_of(0, SIZE)


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the wait for announced bytes that never come."""
    monkeypatch.setattr(movers, "STALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(shard_protocol, "TURN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(shards, "ANSWER_TIMEOUT_S", 0.3)


@pytest.mark.usefixtures("short_timeouts")
@pytest.mark.parametrize("step", range(8))
async def test_byte_flipped_anywhere_never_stores_a_wrong_shard(step: int) -> None:
    size = 500
    limits = replace(PEER_LIMITS, hello_timeout_s=0.3)
    async with open_cluster(2, limits=limits) as cluster:
        put(cluster.stores[1], 0, size=size)
        proxy = TamperingProxy(cluster.workers[1])
        async with proxy.open() as proxied:
            await cluster.move(cluster.manager(), 0, proxied)
            total = proxy.passed[0]
            for at_byte in range(step, total, 8):
                cluster.store.drop(0)
                proxy.tamper = flip_once(at_byte)
                # A changed proof or refusal may be a refusal; but a wrong shard is never held.
                with suppress(Unavailable):
                    await cluster.move(cluster.manager(), 0, proxied)
                assert not cluster.store.holds(0) or bytes_of(cluster.store, 0) == content_of(0, size)


async def test_copy_corrupt_on_its_source_disk_is_reported(tmp_path: Path) -> None:
    bad: list[BadCopy] = []
    async with open_cluster(3, directories(tmp_path)) as cluster:
        put(cluster.stores[1], 0)
        put(cluster.stores[2], 0)
        damaged_store = cluster.stores[1]
        assert isinstance(damaged_store, DirectoryShardStore)
        with damaged_store.path_of(0).open("r+b") as file:
            file.seek(SIZE // 2)
            file.write(b"damaged")
        moved = await cluster.move(cluster.manager(observer=Observer(bad_copy=bad.append)), 0, 1, 2)
        assert moved is not None
        assert moved.source == cluster.workers[2]
        assert [(one.shard_id, one.source, one.code) for one in bad] == [(0, cluster.workers[1], "shard_corrupt")]


async def test_shard_with_two_corrupt_copies_is_missing_and_nothing_is_held() -> None:
    async with open_cluster(3) as cluster:
        for store in cluster.stores[1:]:
            put(store, 0)
            assert isinstance(store, MemoryShardStore)
            damage(store, 0, content_of(9, SIZE))
        report = await cluster.manager().execute_plan(plan_for(cluster, 1, {1: [0]}, {2: [0]}))
        assert [one.shard_id for one in report.missing] == [0]
        assert {one.source for one in report.bad_copies} == set(cluster.workers[1:])
        assert not cluster.store.held()
        assert cluster.store.partial(0) is None


async def test_truncated_copy_is_reported_and_another_source_is_used(tmp_path: Path) -> None:
    bad: list[BadCopy] = []
    async with open_cluster(3, directories(tmp_path)) as cluster:
        put(cluster.stores[1], 0)
        put(cluster.stores[2], 0)
        short = cluster.stores[1]
        assert isinstance(short, DirectoryShardStore)
        os.truncate(short.path_of(0), SIZE - 1)
        moved = await cluster.move(cluster.manager(observer=Observer(bad_copy=bad.append)), 0, 1, 2)
        assert moved is not None
        assert moved.source == cluster.workers[2]
        assert [(one.source, one.code) for one in bad] == [(cluster.workers[1], "shard_damaged")]
        assert not short.holds(0)


class TamperedStore(DirectoryShardStore):
    """Calls a function with the file when it is opened."""

    def __init__(self, path: Path, tamper: Callable[[Path], None]) -> None:
        super().__init__(path)
        self._tamper = tamper

    def open(self, shard: int) -> Any:
        opened = super().open(shard)
        self._tamper(self.path_of(shard))
        return opened


def rewrite(path: Path) -> None:
    path.write_bytes(content_of(0, SIZE))
    os.utime(path, ns=(0, 0))


@pytest.mark.parametrize(
    ("tamper", "codes"), [(rewrite, {"shard_changed"}), (lambda path: os.truncate(path, SIZE // 2), {"shard_damaged"})]
)
async def test_file_changed_while_sent_is_rejected(
    tamper: Callable[[Path], None], codes: set[str], tmp_path: Path
) -> None:
    bad: list[BadCopy] = []
    stores = [MemoryShardStore(), TamperedStore(tmp_path, tamper), MemoryShardStore()]
    async with open_cluster(3, lambda number: stores[number]) as cluster:
        put(cluster.stores[1], 0)
        put(cluster.stores[2], 0)
        moved = await cluster.move(cluster.manager(observer=Observer(bad_copy=bad.append)), 0, 1, 2)
        assert moved is not None
        assert moved.source == cluster.workers[2]
        assert {one.code for one in bad} == codes
        assert bytes_of(cluster.store, 0) == content_of(0, SIZE)


async def test_resumed_shard_with_a_wrong_prefix_is_refetched_without_a_bad_copy_report() -> None:
    bad: list[BadCopy] = []
    async with open_cluster(2) as cluster:
        put(cluster.stores[1], 0)
        with cluster.store.receive(0, Stamp.of(content_of(0, SIZE))) as arriving:
            arriving.write(b"\0" * 1000)
        moved = await cluster.move(cluster.manager(observer=Observer(bad_copy=bad.append)), 0, 1)
        assert moved is not None
        assert moved.resumed_from == 0
        assert bad == []
        assert bytes_of(cluster.store, 0) == content_of(0, SIZE)


async def test_partial_shard_of_other_content_is_not_resumed() -> None:
    async with open_cluster(2) as cluster:
        put(cluster.stores[1], 0)
        with cluster.store.receive(0, Stamp.of(b"other")) as arriving:
            arriving.write(b"oth")
        moved = await cluster.move(cluster.manager(), 0, 1)
        assert moved is not None
        assert moved.resumed_from == 0


# This worker fails.


async def test_full_disk_blames_no_source_and_smaller_shards_arrive() -> None:
    stores = [MemoryShardStore(bytes_max=SIZE + 100), MemoryShardStore()]
    async with open_cluster(2, lambda number: stores[number]) as cluster:
        put(cluster.stores[1], 0, size=SIZE + 101)
        put(cluster.stores[1], 1)
        manager = cluster.manager(use_parallel_data_transfer=False)
        report = await manager.execute_plan(plan_for(cluster, 2, {1: [0, 1]}, {}))
        assert [one.shard_id for one in report.moved] == [1]
        (missing,) = report.missing
        assert missing.shard_id == 0
        assert all("no space" in failure.reason for failure in missing.failures)
        assert report.bad_copies == ()


async def test_disk_full_during_a_transfer_is_reported_and_smaller_shards_arrive(small_disk: Path) -> None:
    stores = [DirectoryShardStore(small_disk), MemoryShardStore()]
    async with open_cluster(2, lambda number: stores[number]) as cluster:
        put(cluster.stores[1], 0, size=2 << 20)
        put(cluster.stores[1], 1, 2)
        report = await cluster.manager().execute_plan(plan_for(cluster, 3, {1: [0, 1, 2]}, {}))
        assert [one.shard_id for one in report.missing] == [0]
        assert {one.shard_id for one in report.moved} == {1, 2}
    assert len(list(small_disk.iterdir())) == 2  # noqa: ASYNC240


async def test_error_of_a_custom_store_is_reported_and_other_shards_move() -> None:
    class Strange(MemoryShardStore):
        def receive(self, shard: int, stamp: Stamp | None, offset: int = 0) -> ArrivingShard:
            if shard == 0:
                raise ZeroDivisionError("strange")
            return super().receive(shard, stamp, offset)

    stores = [Strange(), MemoryShardStore()]
    async with open_cluster(2, lambda number: stores[number]) as cluster:
        put(cluster.stores[1], 0, 1)
        report = await cluster.manager().execute_plan(plan_for(cluster, 2, {1: [0, 1]}, {}))
        assert [one.shard_id for one in report.moved] == [1]
        assert "strange" in str(report.missing[0])


AWAY = StoreFailed("shard_store_failed", "the disk is away for a moment", "check the disk of this host")
LOST = Unavailable("peer_lost", "it is gone", "ask again")


class FailingQueryStore(MemoryShardStore):
    """A store whose queries fail some times, and that records the calling threads."""

    def __init__(self, error: Exception | None = None, *, times: int = 0, of: str = "partial") -> None:
        super().__init__()
        self.error, self.times, self.of = error, times, of
        self.querying_threads: set[int] = set()

    def partial(self, shard: int) -> PartialShard | None:
        self._record_query("partial")
        return super().partial(shard)

    def holds(self, shard: int) -> bool:
        self._record_query("holds")
        return super().holds(shard)

    def _record_query(self, what: str) -> None:
        self.querying_threads.add(threading.get_ident())
        if self.error is not None and what == self.of and self.times:
            self.times -= 1
            raise self.error


class InterruptedSource:
    """A source that fails after some bytes of a shard `times` times, and then sends all of it."""

    def __init__(self, times: int = 1, error: Exception = LOST) -> None:
        self.times, self.error = times, error

    async def fetch(self, shard: int, store: ShardStore, flow: FlowControl) -> Stamp:
        data = content_of(shard, SIZE)
        flow.started(0, SIZE)
        with store.receive(shard, Stamp.of(data)) as arriving:
            arriving.write(data[:100])
            flow.received(100)
            if self.times:
                self.times -= 1
                raise self.error
            arriving.write(data[100:])
            return arriving.commit()

    def close(self) -> None:
        pass

    def manager(self, store: ShardStore, **options: Any) -> DataTransferManager:
        async def connect(worker: WorkerId) -> SourceConnection:
            return self

        return DataTransferManager(
            worker=WorkerId("a", "h", 1), store=store, connect=connect, retry=FAST_RETRY, **options
        )


FROM_B = Wanted(shard(0), 0, (WorkerId("b", "h", 2),))


@pytest.mark.parametrize("of", ["partial", "holds"])
@pytest.mark.parametrize("error", [AWAY, ZeroDivisionError("strange")], ids=["refused", "strange"])
async def test_store_query_that_fails_temporarily_is_retried(error: Exception, of: str) -> None:
    source, store = InterruptedSource(), FailingQueryStore(error, times=2, of=of)
    report = await source.manager(store).execute([FROM_B])
    assert report.is_complete
    assert bytes_of(store, 0) == content_of(0, SIZE)


@pytest.mark.parametrize("of", ["partial", "holds"])
async def test_store_query_that_always_fails_is_the_workers_own_fault(of: str) -> None:
    source, store = InterruptedSource(1_000), FailingQueryStore(AWAY, times=1_000, of=of)
    (missing,) = (await source.manager(store).execute([FROM_B])).missing
    assert missing.is_own_fault
    assert "the disk is away" in missing.reason


async def test_bad_copy_is_reported_while_store_queries_fail() -> None:
    source, store = InterruptedSource(1, ShardCorrupt(0, is_whole=True)), FailingQueryStore(AWAY, times=2, of="holds")
    reported: list[BadCopy] = []
    report = await source.manager(store, observer=Observer(bad_copy=reported.append)).execute([FROM_B])
    assert (report.is_complete, [copy.shard_id for copy in reported]) == (True, [0])


async def test_held_shard_is_kept_after_a_failed_store_query() -> None:
    source, store = InterruptedSource(), FailingQueryStore(AWAY, times=1, of="holds")
    put(store, 0)
    report = await source.manager(store).execute([FROM_B])
    assert (report.kept, report.moved) == ((0,), ())


@pytest.mark.parametrize("uses_threads", [True, False])
async def test_store_is_queried_outside_the_event_loop_thread_when_threads_are_used(uses_threads: bool) -> None:
    source, store = InterruptedSource(), FailingQueryStore()
    assert (await source.manager(store, uses_threads=uses_threads).execute([FROM_B])).is_complete
    assert (threading.get_ident() in store.querying_threads) != uses_threads


@pytest.mark.parametrize("raised", [asyncio.CancelledError(), SystemExit(3)])
async def test_origin_that_raises_cancellation_or_exit_fails_only_its_shard(raised: BaseException) -> None:
    def write(one: DataShard, file: BinaryIO) -> None:
        if one.shard_id == 0:
            raise raised
        file.write(content_of(one.shard_id, SIZE))

    async with open_cluster(3) as cluster:
        report = await cluster.manager(origin=FunctionOrigin(write)).execute_plan(
            plan_for(cluster, 2, {1: [0]}, {2: [0]})
        )
        assert [one.shard_id for one in report.moved] == [1]
        assert [one.shard_id for one in report.missing] == [0]
        assert type(raised).__name__ in report.missing[0].reason


async def test_store_that_raises_cancellation_is_the_workers_own_fault() -> None:
    class Strange(MemoryShardStore):
        def receive(self, shard: int, stamp: Stamp | None, offset: int = 0) -> ArrivingShard:
            raise asyncio.CancelledError

    stores: list[ShardStore] = [Strange(), MemoryShardStore()]
    async with open_cluster(2, lambda number: stores[number]) as cluster:
        manager = cluster.manager(origin=FunctionOrigin(lambda one, file: None))
        report = await manager.execute([Wanted(shard(0), 0, (None,))])
        assert report.missing[0].is_own_fault
        assert "cannot be stored: CancelledError" in report.missing[0].reason


async def test_cancellation_raised_by_a_source_is_no_report() -> None:
    async def connect(worker: WorkerId) -> SourceConnection:
        raise asyncio.CancelledError

    manager = DataTransferManager(worker=WorkerId("a", "h", 1), store=MemoryShardStore(), connect=connect)
    with pytest.raises(Unavailable, match="before all shards arrived") as raised:
        await manager.execute([Wanted(shard(0), 0, (WorkerId("b", "h", 2),))])
    assert raised.value.code == "transfers_broken_off"


# Plans that are superseded.


def plan_through(cluster: TransferCluster, proxy: TamperingProxy) -> DataRedistributionPlan:
    """A plan for one shard that the proxy holds back."""
    proxy.hold_at = SIZE // 2
    proxied = proxy.worker
    return DataRedistributor(ElasticTrainingConfig()).calculate_plan(
        ClusterTopology((proxied,)), ClusterTopology((cluster.fetcher,)), 1, shards=1, draining=[proxied]
    )


@asynccontextmanager
async def half_way() -> AsyncIterator[
    tuple[TransferCluster, TamperingProxy, DataTransferManager, asyncio.Future[TransferReport]]
]:
    """A running plan whose only shard is held by the proxy."""
    async with open_cluster(2) as cluster:
        put(cluster.stores[1], 0)
        proxy = TamperingProxy(cluster.workers[1])
        async with proxy.open():
            manager = cluster.manager()
            moving = asyncio.ensure_future(manager.execute_plan(plan_through(cluster, proxy)))
            await proxy.held.wait()
            yield cluster, proxy, manager, moving
            proxy.gate.set()


async def test_newer_plan_ends_the_older_one_and_keeps_received_bytes() -> None:
    async with half_way() as (cluster, _, manager, moving):
        store: Any = cluster.store
        await until(lambda: store.partial(0) is not None or bool(store._arriving))
        report = await manager.execute_plan(plan_for(cluster, 1, {1: [0]}, {}))
        assert await code_of(moving) == "plan_superseded"
        (moved,) = report.moved
        assert 0 < moved.resumed_from <= SIZE // 2
        assert bytes_of(cluster.store, 0) == content_of(0, SIZE)
        await until(lambda: len(cluster.meshes[0].descriptors()) == 1)


async def test_cancelled_plan_closes_connections_and_keeps_received_bytes() -> None:
    async with half_way() as (cluster, _, manager, moving):
        manager.cancel()
        assert await code_of(moving) == "plan_superseded"
        assert len(cluster.meshes[0].descriptors()) == 1
        begun = cluster.store.partial(0)
        assert begun is not None
        assert begun.offset <= SIZE // 2


async def test_a_cancelled_task_ends_its_threads() -> None:
    async with half_way() as (cluster, _, _, moving):
        moving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await moving
        assert len(cluster.meshes[0].descriptors()) == 1
        assert not cluster.store.holds(0)


async def test_cut_connections_are_reopened() -> None:
    async with half_way() as (cluster, proxy, _, moving):
        connections = cluster.meshes[0]._shard_connections
        assert connections is not None
        connections.cut()
        proxy.gate.set()
        report = await moving
        assert report.moved[0].size == SIZE
        assert len(proxy.passed) == 2


async def test_plan_of_an_older_generation_is_refused() -> None:
    async with open_cluster(2) as cluster:
        put(cluster.stores[1], 0)
        manager = cluster.manager()
        plan = plan_for(cluster, 1, {1: [0]}, {})
        await manager.execute_plan(plan, generation=5)
        assert await code_of(manager.execute_plan(plan, generation=4)) == "plan_superseded"
        await manager.execute_plan(plan, generation=5)


async def test_last_of_many_concurrent_plans_is_executed() -> None:
    async with open_cluster(2) as cluster:
        put(cluster.stores[1], *range(5))
        manager = cluster.manager()
        plan = plan_for(cluster, 5, {1: list(range(5))}, {})
        outcomes = await asyncio.gather(*(manager.execute_plan(plan) for _ in range(4)), return_exceptions=True)
        assert [isinstance(outcome, Unavailable) for outcome in outcomes] == [True, True, True, False]
        assert len(cluster.store.held()) == 5


async def test_hanging_origin_does_not_delay_cancellation() -> None:
    gate, asked = threading.Event(), threading.Event()

    def hang(one: DataShard, file: BinaryIO) -> None:
        asked.set()
        assert gate.wait(PATIENCE_S)
        file.write(b"late")

    async with open_cluster(1) as cluster:
        manager = cluster.manager(origin=FunctionOrigin(hang))
        moving = asyncio.ensure_future(manager.execute_plan(plan_for(cluster, 1, {}, {})))
        await until(asked.is_set)
        manager.cancel()
        assert await code_of(moving) == "plan_superseded"
        gate.set()
        store = cluster.store
        assert isinstance(store, MemoryShardStore)
        await until(lambda: not store._arriving)
        assert not store.holds(0)


async def test_hanging_origin_is_reported_and_retried_while_other_shards_move() -> None:
    gate, asked, clock = threading.Event(), list[int](), AdvancedClock()

    def hang(one: DataShard, file: BinaryIO) -> None:
        asked.append(one.shard_id)
        if asked.count(1) == 1 and one.shard_id == 1:
            assert gate.wait(PATIENCE_S)
        file.write(content_of(one.shard_id, SIZE))

    async with open_cluster(1) as cluster:
        manager = cluster.manager(origin=FunctionOrigin(hang), origin_timeout_s=0.02, clock=clock)
        moving = asyncio.ensure_future(manager.execute_plan(plan_for(cluster, 3, {}, {})))
        await until(lambda: cluster.store.holds(0) and cluster.store.holds(2) and 1 in asked)
        clock.now += 0.03
        report = await moving
        assert {one.shard_id for one in report.moved} == {0, 2}
        (missing,) = report.missing
        assert missing.reason.startswith("the origin sent no byte of it for 0.02 s")
        assert (missing.has_no_holder, missing.is_own_fault, missing.is_refused) == (True, False, False)
        again = await manager.execute_plan(plan_for(cluster, 3, {}, {}))
        assert [one.shard_id for one in again.moved] == [1]
        gate.set()
        assert bytes_of(cluster.store, 1) == content_of(1, SIZE)


async def test_progress_reports_origin_silence_except_while_the_store_works() -> None:
    gate, asked, clock = threading.Event(), threading.Event(), AdvancedClock()
    reported = list[TransferProgress]()

    def hang(one: DataShard, file: BinaryIO) -> None:
        asked.set()
        assert gate.wait(PATIENCE_S)
        file.write(b"bytes")

    def silences() -> list[float | None]:
        return [one.origin_silent_s for one in reported[-1].in_transit] if reported else []

    store = DelayedStore()
    async with open_cluster(1, lambda number: store) as cluster:
        origin = FunctionOrigin(hang)
        manager = cluster.manager(
            origin=origin, clock=clock, observer=Observer(progress=reported.append), progress_interval_s=0.001
        )
        moving = asyncio.ensure_future(manager.execute_plan(plan_for(cluster, 1, {}, {})))
        await until(asked.is_set)
        clock.now += 42.0
        await until(lambda: silences() == [42.0])
        gate.set()
        await until(store.reached.is_set)
        clock.now += 42.0
        await until(lambda: silences() == [None])
        store.gate.set()
        assert (await moving).is_complete


async def test_origin_read_says_whether_an_unreachable_worker_may_hold_the_shard() -> None:
    gate, asked = threading.Event(), threading.Event()
    reported: list[TransferProgress] = []

    def hang(one: DataShard, file: BinaryIO) -> None:
        asked.set()
        assert gate.wait(PATIENCE_S)
        write_bytes(one, file)

    async def connect(worker: WorkerId) -> SourceConnection:
        raise Unavailable("peer_gone", f"{worker} is not there", "")

    manager = DataTransferManager(
        worker=WorkerId("a", "h", 1),
        store=MemoryShardStore(),
        connect=connect,
        origin=FunctionOrigin(hang),
        retry=RetryPolicy(attempts=1),
        observer=Observer(progress=reported.append),
        progress_interval_s=0.001,
    )
    moving = asyncio.ensure_future(manager.execute([Wanted(shard(0), 0, (WorkerId("b", "h", 2), None))]))
    await until(asked.is_set)
    reported.clear()
    await until(lambda: bool(reported))
    assert [(one.source, one.may_be_at_a_worker) for one in reported[-1].in_transit] == [(None, True)]
    gate.set()
    assert (await moving).is_complete


async def test_store_that_hangs_during_an_origin_read_is_the_workers_own_fault() -> None:
    clock, store = AdvancedClock(), BlockedStore()
    async with open_cluster(1, lambda number: store) as cluster:
        origin, once = FunctionOrigin(write_bytes), RetryPolicy(attempts=1)
        manager = cluster.manager(origin=origin, origin_timeout_s=0.02, clock=clock, retry=once)
        plan = plan_for(cluster, 1, {}, {})
        for number in range(ABANDONED_PER_SHARD_MAX):
            moving = asyncio.ensure_future(manager.execute_plan(plan))
            await until(lambda number=number: store.reached > number)  # type: ignore[misc]
            manager.cancel()
            assert await code_of(moving) == "plan_superseded"
        clock.now += 0.03
        (missing,) = (await manager.execute_plan(plan)).missing
        assert (missing.is_own_fault, missing.has_no_holder) == (True, False)
        assert "3 earlier reads still hang in the shard store" in missing.reason
        store.gate.set()
        await until(lambda: not manager._bound_context.origin_reads._abandoned)
        assert (await manager.execute_plan(plan)).is_complete


async def test_invalid_origin_timeout_is_refused() -> None:
    async with open_cluster(1) as cluster:
        with pytest.raises(ForgedError, match=r"origin_timeout_s must be .*, got 0"):
            cluster.manager(origin_timeout_s=0)


@pytest.mark.parametrize("seed", range(5))
async def test_workers_that_fetch_from_each_other_receive_all_shards(seed: int) -> None:
    source = Random(seed)
    async with open_cluster(4) as cluster:
        for number in range(40):
            put(source.choice(cluster.stores), number, size=source.randrange(200_000))
        holders = {
            number: cluster.workers[place] for place, store in enumerate(cluster.stores) for number in store.held()
        }

        async def fetch_all(place: int) -> None:
            manager = DataTransferManager(
                worker=cluster.workers[place],
                store=cluster.stores[place],
                connect=cluster.meshes[place].connect_for_shards,
            )
            for number in source.sample(range(40), 40):
                await manager.transfer_data_shards(holders[number], cluster.workers[place], shard(number))

        await asyncio.gather(*(fetch_all(place) for place in range(4)))
        assert all(len(store.held()) == 40 for store in cluster.stores)
