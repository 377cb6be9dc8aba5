"""The store contract on the simulated disk, with faults and crashes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import ChainMap
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from random import Random

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forged.kernel.store.memory import MemoryStore
from forged.kernel.store.port import Compacted, Store, StoreUnavailable, Transaction
from tests.kernel.store.test_contract import (
    TRANSACTIONS,
    OpenStore,
    TestClosing,
    TestExpectations,
    TestFencing,
    TestLimits,
    TestLists,
    TestRevisions,
    TestWatches,
    outcomes,
)
from tests.simulation.environment.disk import GOOD, DiskFaults, SimulatedDisk
from tests.simulation.environment.loop import run
from tests.simulation.environment.store import LogStore

__all__ = [
    "TestClosing",
    "TestExpectations",
    "TestFencing",
    "TestLimits",
    "TestLists",
    "TestRevisions",
    "TestWatches",
]

IMMEDIATE = DiskFaults(sync_s=(0, 0))


@pytest.fixture
async def open_store() -> AsyncIterator[OpenStore]:
    opened: list[Store] = []

    async def open_one(changes_max: int = 1000, changes_bytes_max: int = 1 << 20) -> Store:
        disk = SimulatedDisk(Random(1), IMMEDIATE)
        store = await LogStore.open(disk, Random(1), changes_max=changes_max, changes_bytes_max=changes_bytes_max)
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        await store.close()


@pytest.fixture
async def store(open_store: OpenStore) -> Store:
    return await open_store()


@given(batches=st.lists(st.lists(TRANSACTIONS, max_size=4), max_size=6))
@settings(deadline=None)
def test_it_shows_the_same_as_a_store_in_memory(batches: Sequence[Sequence[Transaction]]) -> None:
    async def both() -> None:
        store = await LogStore.open(SimulatedDisk(Random(1)), Random(1))
        assert await outcomes(store, batches) == await outcomes(MemoryStore("a history"), batches)

    run(both, 1)


Content = tuple[int, dict[str, bytes]]


async def content(store: Store) -> Content:
    return store.revision, {entry.key: entry.value for entry in await store.list("")}


def content_of(transactions: Sequence[Transaction]) -> Content:
    written = ChainMap(*(dict(transaction.puts) for transaction in reversed(transactions)))
    return transactions[-1].revision if transactions else 0, dict(written)


class Writer:
    """Commits batches, and knows which a crash must or may keep."""

    def __init__(self, random: Random) -> None:
        self.committed: list[Transaction] = []
        self.doubtful: list[list[Transaction]] = []
        """The failed batches since the last success; at most one may reappear after a crash."""
        self._random = random

    async def write(self, store: Store) -> None:
        revisions = range(store.revision + 1, store.revision + 1 + self._random.randint(1, 3))
        batch = [Transaction(revision, {f"{revision % 3}": self._random.randbytes(50)}) for revision in revisions]
        self.doubtful.append(batch)
        await store.commit(batch)
        self.committed += batch
        self.doubtful.clear()

    async def write_on(self, store: Store) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):
                await self.write(store)
            assert await content(store) == content_of(self.committed)
            await anyio.sleep(self._random.uniform(0, 0.01))

    async def reconcile(self, store: Store) -> None:
        found = await content(store)
        possible = [self.committed, *(self.committed + batch for batch in self.doubtful)]
        self.committed = next(transactions for transactions in possible if content_of(transactions) == found)
        self.doubtful.clear()


def test_a_reopened_store_is_the_same_with_the_same_history() -> None:
    async def main() -> None:
        disk = SimulatedDisk(Random(1))
        first = await LogStore.open(disk, Random(1))
        await first.commit([Transaction(1, {"a": b"1", "b": b"1"}), Transaction(2, {"a": b"2"})])
        await first.commit([Transaction(3, deletes=["b"])])
        await first.close()
        second = await LogStore.open(disk.kill(), Random(2))
        assert second.history == first.history
        assert await content(second) == (3, {"a": b"2"})
        assert (await LogStore.open(SimulatedDisk(Random(1)), Random(2))).history != first.history

    run(main, 1)


def test_the_changes_before_opening_are_forgotten() -> None:
    async def main() -> None:
        disk = SimulatedDisk(Random(1))
        await (await LogStore.open(disk, Random(1))).commit([Transaction(1, {"a": b""})])
        with pytest.raises(Compacted):
            await anext((await LogStore.open(disk.kill(), Random(1))).watch("", 0))

    run(main, 1)


BAD = DiskFaults(append_fails=0.1, sync_fails=0.2)


@pytest.mark.parametrize(("faults", "doubtful_max"), [(GOOD, 1), (BAD, 100)])
@pytest.mark.parametrize("seed", range(100))
def test_crash_keeps_committed_batches_and_at_most_one_more(seed: int, faults: DiskFaults, doubtful_max: int) -> None:
    random = Random(seed)
    writer = Writer(random)

    async def main() -> None:
        disk = SimulatedDisk(random)
        for _ in range(5):
            store = await LogStore.open(disk, random)
            await writer.reconcile(store)
            disk.faults = faults
            with anyio.move_on_after(random.uniform(0, 0.2)):
                await writer.write_on(store)
            assert len(writer.doubtful) <= doubtful_max
            disk.faults = GOOD
            disk = disk.crash() if random.random() < 0.5 else disk.kill()

    run(main, seed)


def test_a_crash_while_a_store_is_opened_or_made_leaves_one_that_opens() -> None:
    async def main() -> None:
        disk = SimulatedDisk(random)
        for _ in range(10):
            with anyio.move_on_after(random.uniform(0, 0.02)):
                await LogStore.open(disk, random)
            disk = disk.crash()
        store = await LogStore.open(disk, random)
        assert await content(store) == (0, {})

    for seed in range(50):
        random = Random(seed)
        run(main, seed)


def test_a_full_disk_refuses_a_commit_and_takes_the_next_that_fits() -> None:
    async def main() -> None:
        disk = SimulatedDisk(Random(1))
        store = await LogStore.open(disk, Random(1))
        await store.commit([Transaction(1, {"a": b"1"})])
        disk.capacity_bytes = disk.used_bytes + 100
        for _ in range(3):
            with pytest.raises(StoreUnavailable) as raised:
                await store.commit([Transaction(2, {"a": bytes(1000)})])
            assert raised.value.code == "store_full"
        assert await content(store) == (1, {"a": b"1"})
        await store.commit([Transaction(2, {"a": b"2"})])
        assert await content(await LogStore.open(disk.crash(), Random(1))) == (2, {"a": b"2"})

    run(main, 1)


@pytest.mark.parametrize("faults", [DiskFaults(append_fails=1), DiskFaults(sync_fails=1)])
def test_a_failing_disk_refuses_a_commit_and_takes_the_next_once_it_works_again(faults: DiskFaults) -> None:
    async def main() -> None:
        disk = SimulatedDisk(Random(1))
        store = await LogStore.open(disk, Random(1))
        disk.faults = faults
        with pytest.raises(StoreUnavailable) as raised:
            await store.commit([Transaction(1, {"a": b"refused"})])
        assert raised.value.code == "store_failed"
        assert await content(store) == (0, {})
        disk.faults = GOOD
        await store.commit([Transaction(1, {"b": b"taken"})])
        assert await content(await LogStore.open(disk.crash(), Random(1))) == (1, {"b": b"taken"})

    run(main, 1)


def test_a_disk_that_cannot_be_read_or_written_cannot_be_opened() -> None:
    async def main() -> None:
        with pytest.raises(StoreUnavailable):
            await LogStore.open(SimulatedDisk(Random(1), DiskFaults(sync_fails=1)), Random(1))

    run(main, 1)


def test_reads_are_durable_and_concurrent_commits_apply_in_order() -> None:
    async def main() -> None:
        store = await LogStore.open(SimulatedDisk(Random(1)), Random(1))
        async with asyncio.TaskGroup() as tasks:
            for revision in (1, 2, 3):
                tasks.create_task(store.commit([Transaction(revision, {"a": b"%d" % revision})]))
            await asyncio.sleep(0)
            assert await content(store) == (0, {})
        assert await content(store) == (3, {"a": b"3"})

    run(main, 1)


async def with_anyio(commit: Awaitable[object]) -> None:
    with anyio.fail_after(1):
        await commit


async def with_asyncio(commit: Awaitable[object]) -> None:
    async with asyncio.timeout(1):
        await commit


@pytest.mark.parametrize("give_up_on", [with_anyio, with_asyncio])
def test_cancelled_log_store_commit_is_applied_whole(
    give_up_on: Callable[[Awaitable[object]], Awaitable[None]],
) -> None:
    async def main() -> None:
        disk = SimulatedDisk(Random(1))
        store = await LogStore.open(disk, Random(1))
        disk.faults = DiskFaults(sync_s=(2, 2))
        with pytest.raises(TimeoutError):
            await give_up_on(store.commit([Transaction(1, {"a": b"1"})]))
        assert await content(store) == (0, {})
        await asyncio.sleep(2)
        assert await content(store) == (1, {"a": b"1"})

    run(main, 1)
