"""Saves that go on while training does: in order, at most two at a time, and none that fails in silence."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forged.checkpoint import thread_calls
from forged.checkpoint.checkpoint import DistributedCheckpoint
from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import SUFFIX
from forged.checkpoint.model import CheckpointFormat, CompressionLevel, LoadOptions, SaveOptions, ShardedArray, WhenBusy
from forged.checkpoint.ports import Storage
from forged.checkpoint.rank_group import OutcomeUnknown
from forged.checkpoint.saving import background, receipts
from forged.checkpoint.saving.background import SaveHandle
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.fault_handler import FaultToleranceHandler
from forged.checkpoint.storage.local import LocalStorage
from forged.elastic.model import WorkerId
from forged.retry import RetryPolicy
from tests.checkpoint.fixtures.faulty_storage import FaultyStorage, at, broken, on
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.plain_reader import same, state_of
from tests.checkpoint.fixtures.unreliable_ranks import RankFault, UnreliableRank, fail, group, hang
from tests.small_disk import fill, small_disk

ONCE = RetryPolicy(attempts=1)
PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short grace periods."""
    monkeypatch.setattr(thread_calls, "RETURN_GRACE_S", 0.2)
    monkeypatch.setattr(background, "OUTCOME_GRACE_S", 0.5)
    monkeypatch.setattr(receipts, "POLL_MAX_S", 0.05)


class Gate:
    """Holds what comes to it until it is opened."""

    def __init__(self, *names: str, after: bool = False) -> None:
        self._names = names
        self._after = after
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, number: int, what: str, done: bool) -> None:
        if what in self._names and done == self._after:
            self.reached.set()
            assert self.open.wait(PATIENCE_S)


def checkpoint(storage: Storage, coordinator: Any = None, **settings: Any) -> DistributedCheckpoint:
    return DistributedCheckpoint(coordinator, storage, FaultToleranceHandler(storage, ONCE), **settings)


@asynccontextmanager
async def held(*names: str) -> AsyncIterator[tuple[MemoryStorage, Gate, DistributedCheckpoint]]:
    """One process whose storage waits at some operations until the block ends."""
    storage, gate = MemoryStorage(), Gate(*names)
    one = checkpoint(FaultyStorage(storage, gate))
    try:
        yield storage, gate, one
    finally:
        gate.open.set()
    await one.close()


def named(prefix: str, **settings: Any) -> SaveOptions:
    return SaveOptions(prefix, include_rng_state=False, **settings)


def state(number: int) -> dict[str, Any]:
    return {"w": np.arange(1000) + number, "number": number}


async def reached(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.reached.wait, PATIENCE_S)


# One process.


async def test_staged_state_is_saved_although_the_arrays_change() -> None:
    async with held("write") as (storage, gate, one):
        mine = state(1)
        handle = await one.save_async(mine, options=named("a"))
        mine["w"] += 100
        await reached(gate)
        assert handle.staged
        assert (handle.prefix, handle.is_durable, handle.is_committed, handle.is_done) == ("a", False, False, False)
        gate.open.set()
        assert await handle.committed() == "a"
        assert (handle.is_durable, handle.is_committed, handle.is_done) == (True, True, True)
        assert same(state_of(storage, "a"), {"model": state(1)})


@pytest.mark.parametrize("layout", list(CheckpointFormat))
@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
async def test_arrays_that_were_staged_are_let_go(layout: CheckpointFormat, level: CompressionLevel) -> None:
    """A script that makes new ones at every step does not have them in memory twice."""
    async with held("write") as (storage, gate, one):
        array = np.arange(1000)
        there = weakref.ref(array)
        await one.save_async({"w": array}, options=named("a", format=layout, compression_level=level))
        await reached(gate)
        del array
        assert there() is None
    assert same(state_of(storage, "a"), {"model": {"w": np.arange(1000)}})


async def test_durable_comes_before_committed() -> None:
    async with held("publish") as (storage, gate, one):
        handle = await one.save_async(state(1), options=named("a"))
        await handle.durable()
        await reached(gate)
        assert (handle.is_durable, handle.is_committed) == (True, False)
        assert not listing.checkpoint_exists(storage, "a")


async def test_saves_are_written_one_after_the_other_in_their_order() -> None:
    storage = MemoryStorage()
    watched, published = FaultyStorage(storage), list[str]()

    def watching(number: int, what: str, done: bool) -> None:
        if what == "publish" and done:
            published.extend(prefix for prefix in listing.prefixes(storage) if prefix not in published)

    one = checkpoint(FaultyStorage(watched, watching))
    for number in range(6):
        await one.save_async(state(number), options=named(f"c{9 - number}"))
    await one.close()
    assert published == [f"c{9 - number}" for number in range(6)]
    writes = [what for what in watched.calls if what in {"write", "publish"}]
    assert writes == ["write", "publish"] * 6
    for number in range(6):
        assert same(state_of(storage, f"c{9 - number}"), {"model": state(number)})


async def test_one_is_written_and_one_staged_and_a_third_waits() -> None:
    async with held("write") as (_, gate, one):
        handles = [await one.save_async(state(n), options=named(f"c{n}")) for n in range(2)]
        third = asyncio.create_task(one.save_async(state(2), options=named("c2")))
        await reached(gate)
        await asyncio.wait({third}, timeout=0.05)
        assert not third.done()
        gate.open.set()
        assert await (await third).committed() == "c2"
        assert all(handle.is_committed for handle in handles)


async def test_a_third_is_refused_where_that_is_wanted_and_may_come_later() -> None:
    async with held("write") as (storage, gate, one):
        for n in range(2):
            await one.save_async(state(n), options=named(f"c{n}"))
        with pytest.raises(CheckpointException) as caught:
            await one.save_async(state(2), options=named("c2", when_busy=WhenBusy.REFUSE))
        assert (caught.value.code, caught.value.retryable) == ("checkpoint_busy", True)
        gate.open.set()
        handle = await one.save_async(state(3), options=named("c3"))
        assert await handle.committed() == "c3"
        assert listing.prefixes(storage) == ["c0", "c1", "c3"]


async def test_third_save_that_times_out_keeps_no_slot() -> None:
    async with held("write") as (storage, gate, one):
        for n in range(2):
            await one.save_async(state(n), options=named(f"c{n}"))
        with pytest.raises(CheckpointException) as caught:
            await one.save_async(state(2), options=named("c2", timeout=0.05))
        assert caught.value.type is ExceptionType.TIMEOUT
        gate.open.set()
        for n in range(3, 6):
            await one.save_async(state(n), options=named(f"c{n}"))
    assert listing.prefixes(storage) == ["c0", "c1", "c3", "c4", "c5"]


async def test_cancelled_waiting_save_keeps_no_slot() -> None:
    async with held("write") as (storage, gate, one):
        for n in range(2):
            await one.save_async(state(n), options=named(f"c{n}"))
        for n in range(2, 5):
            third = asyncio.create_task(one.save_async(state(n), options=named(f"c{n}")))
            await asyncio.sleep(0)
            third.cancel()
            with pytest.raises(asyncio.CancelledError):
                await third
        gate.open.set()
        for n in range(5, 8):
            await one.save_async(state(n), options=named(f"c{n}"))
    assert listing.prefixes(storage) == ["c0", "c1", "c5", "c6", "c7"]


async def test_a_save_that_waits_for_its_end_comes_after_those_in_the_background() -> None:
    async with held("write") as (storage, gate, one):
        await one.save_async(state(1), options=named("a"))
        await reached(gate)
        then = asyncio.create_task(one.save(state(2), options=named("b")))
        await asyncio.wait({then}, timeout=0.05)
        assert not then.done()
        gate.open.set()
        assert await then == "b"
        assert listing.prefixes(storage) == ["a", "b"]


async def test_the_memory_is_given_back_before_it_is_said_to_be_over(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    one = checkpoint(storage)
    for number in range(4):
        await (await one.save_async(state(number), options=named(f"c{number}"))).committed()
        assert len(one._staging._free) == 1
    await one.close()
    assert one._staging._free == []


@pytest.mark.parametrize("layout", list(CheckpointFormat))
@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
async def test_every_format_can_be_saved_in_the_background(layout: CheckpointFormat, level: CompressionLevel) -> None:
    storage = MemoryStorage()
    async with checkpoint(storage) as one:
        mine = state(1)
        await one.save_async(mine, options=named("a", format=layout, compression_level=level))
        mine["w"][:] = 0
    assert same(state_of(storage, "a"), {"model": state(1)})


# What goes wrong.


async def test_a_failure_is_raised_at_the_next_call_and_only_once() -> None:
    storage = MemoryStorage()
    faulty = FaultyStorage(storage, on("write"))
    one = checkpoint(faulty)
    await one.save_async(state(1), options=named("a"))
    await asyncio.to_thread(one._background.close)  # type: ignore[union-attr]
    with pytest.raises(CheckpointException) as caught:
        await one.save_async(state(2), options=named("b"))
    assert (caught.value.code, caught.value.checkpoint_path) == ("broken", "b")
    faulty._fault = on()
    assert await one.save(state(3), options=named("c")) == "c"
    await one.close()
    assert listing.prefixes(storage) == ["c"]


CALLS: dict[str, Callable[[DistributedCheckpoint], Awaitable[Any]]] = {
    "save": lambda one: one.save(state(2), options=named("b")),
    "save_async": lambda one: one.save_async(state(2), options=named("b")),
    "prepare": lambda one: one.prepare(state(2)),
    "load": lambda one: one.load(options=LoadOptions("before")),
    "list_checkpoints": lambda one: one.list_checkpoints(),
    "delete_checkpoint": lambda one: one.delete_checkpoint("before"),
    "close": lambda one: one.close(),
}


@pytest.mark.parametrize("call", CALLS)
async def test_next_call_raises_failure_of_background_save(call: str) -> None:
    storage = MemoryStorage()
    faulty = FaultyStorage(storage)
    one = checkpoint(faulty)
    await one.save(state(0), options=named("before"))
    faulty._fault = on("write")
    await one.save_async(state(1), options=named("a"))
    await asyncio.to_thread(one._background.close)  # type: ignore[union-attr]
    with pytest.raises(CheckpointException, match="it is broken"):
        await CALLS[call](one)
    faulty._fault = on()
    await CALLS[call](one)
    await one.close()


async def test_failure_is_not_raised_again_after_the_handle_raised_it() -> None:
    storage = MemoryStorage()
    one = checkpoint(FaultyStorage(storage, on("write")))
    handle = await one.save_async(state(1), options=named("a"))
    for ask in (handle.committed, handle.durable, handle.committed):
        with pytest.raises(CheckpointException, match="broken"):
            await ask()
    with pytest.raises(CheckpointException, match="broken"):
        handle.result()
    await one.list_checkpoints()
    await one.close()
    assert (handle.is_done, handle.is_committed, handle.is_durable) == (True, False, False)


async def test_close_reports_all_failed_saves() -> None:
    gate = Gate("write")
    storage = MemoryStorage()

    def fault(number: int, what: str, done: bool) -> None:
        gate(number, what, done)
        on("write")(number, what, done)

    one = checkpoint(FaultyStorage(storage, fault))
    for prefix in ("a", "b"):
        await one.save_async(state(1), options=named(prefix))
    gate.open.set()
    with pytest.raises(CheckpointException) as caught:
        await one.close()
    assert caught.value.checkpoint_path == "a"
    assert len(caught.value.__notes__) == 1
    await one.close()


@pytest.mark.parametrize("error", [ValueError("foreign"), MemoryError(), KeyboardInterrupt(), OSError(5, "io")])
async def test_foreign_errors_arrive_as_errors_of_this_checkpoint(error: BaseException) -> None:
    one = checkpoint(FaultyStorage(MemoryStorage(), on("write", error=lambda: error)))
    handle = await one.save_async(state(1), options=named("a"))
    with pytest.raises(CheckpointException) as caught:
        await handle.committed()
    assert (caught.value.type, caught.value.checkpoint_path) == (ExceptionType.SAVE_FAILED, "a")
    assert caught.value.__cause__ is error
    await one.close()


@pytest.mark.parametrize("names", [("write",), ("sync_names",), ("publish",)])
@pytest.mark.parametrize("after", [False, True])
async def test_a_save_that_fails_leaves_nothing(names: tuple[str, ...], after: bool) -> None:
    storage = MemoryStorage()
    one = checkpoint(FaultyStorage(storage, on(*names, after=after)))
    handle = await one.save_async(state(1), options=named("a"))
    with pytest.raises(CheckpointException):
        await handle.committed()
    await one.close()
    assert storage.files == {}


async def test_parts_of_an_irrevocable_manifest_are_kept() -> None:
    storage = MemoryStorage()

    def fault(number: int, what: str, done: bool) -> None:
        if what in {"publish", "delete"} and done == (what == "publish"):
            raise broken()

    one = checkpoint(FaultyStorage(storage, fault))
    handle = await one.save_async(state(1), options=named("a"))
    with pytest.raises(OutcomeUnknown):
        await handle.committed()
    await one.close()
    assert same(state_of(storage, "a"), {"model": state(1)})


async def test_the_place_of_a_save_that_failed_is_free() -> None:
    storage = MemoryStorage()
    faulty = FaultyStorage(storage)
    one = checkpoint(faulty)
    for number in range(5):
        faulty._fault = on("write")
        handle = await one.save_async(state(number), options=named(f"c{number}"))
        with pytest.raises(CheckpointException):
            await handle.committed()
    faulty._fault = on()
    await one.save_async(state(9), options=named("last"))
    await one.close()
    assert listing.prefixes(storage) == ["last"]


async def test_invalid_state_keeps_no_slot() -> None:
    class Broken:
        def state_dict(self) -> Any:
            raise ZeroDivisionError("in the model")

        def load_state_dict(self, state: Any) -> None: ...

    storage = MemoryStorage()
    one = checkpoint(storage)
    for _ in range(4):
        with pytest.raises(CheckpointException, match="in the model") as caught:
            await one.save_async(Broken(), options=named("a"))
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    await one.save_async(state(1), options=named("a"))
    await one.close()
    assert listing.prefixes(storage) == ["a"]


async def test_a_save_can_be_given_up() -> None:
    async with held("write") as (storage, gate, one):
        handle = await one.save_async(state(1), options=named("a"))
        await reached(gate)
        handle.cancel()
        gate.open.set()
        with pytest.raises(CheckpointException) as caught:
            await handle.committed()
        assert caught.value.code == "checkpoint_cancelled"
        assert storage.files == {}


async def test_committed_save_cannot_be_cancelled() -> None:
    async with checkpoint(MemoryStorage()) as one:
        handle = await one.save_async(state(1), options=named("a"))
        await handle.committed()
        handle.cancel()
        assert handle.result() == "a"


async def test_asking_for_a_result_may_take_no_longer_than_one_wants() -> None:
    async with held("write") as (storage, gate, one):
        handle = await one.save_async(state(1), options=named("a"))
        with pytest.raises(CheckpointException, match="the save continues") as caught:
            await asyncio.to_thread(handle.result, 0.01)
        assert caught.value.type is ExceptionType.TIMEOUT
        gate.open.set()
        assert await asyncio.to_thread(handle.result) == "a"
        assert listing.prefixes(storage) == ["a"]


async def test_time_runs_out_for_a_save_that_waits_for_the_one_before_it() -> None:
    async with held("write") as (storage, gate, one):
        await one.save_async(state(1), options=named("a"))
        await reached(gate)
        second = await one.save_async(state(2), options=named("b"))
        second.token.shorten(0.01)
        with pytest.raises(CheckpointException) as caught:
            await second.committed()
        assert caught.value.type is ExceptionType.TIMEOUT
        gate.open.set()
    assert listing.prefixes(storage) == ["a"]


async def test_save_waits_for_the_first_after_the_second_was_cancelled() -> None:
    async with held("write") as (storage, gate, one):
        first = await one.save_async(state(1), options=named("a"))
        await reached(gate)
        for prefix in ("b", "c"):
            later = await one.save_async(state(2), options=named(prefix))
            later.cancel()
            assert getattr(await told(later), "code", "") == "checkpoint_cancelled"
        assert not first.is_done
        closing = asyncio.create_task(one.close())
        await asyncio.sleep(0)
        gate.open.set()
        await closing
        assert first.is_committed
        assert listing.prefixes(storage) == ["a"]


async def test_close_waits_for_the_save_and_allows_later_saves() -> None:
    async with held("write") as (storage, gate, one):
        await one.save_async(state(1), options=named("a"))
        closing = asyncio.create_task(one.close())
        await reached(gate)
        await asyncio.wait({closing}, timeout=0.05)
        assert not closing.done()
        gate.open.set()
        await closing
        await one.save_async(state(2), options=named("b"))
    assert listing.prefixes(storage) == ["a", "b"]


# Several ranks.


def part_of(rank: int, size: int, number: int) -> dict[str, Any]:
    """A rank's part of a state."""
    return {"w": ShardedArray(np.arange(10) + 10 * rank + number, (10 * size,), (10 * rank,)), "number": number}


def all_of(size: int, number: int) -> dict[str, Any]:
    return {"model": {"w": np.arange(10 * size) + number, "number": number}}


async def in_group(
    size: int,
    act: Callable[[DistributedCheckpoint, int], Awaitable[Any]],
    storages: Callable[[int], Storage],
    faults: dict[int, dict[int, RankFault]] | None = None,
) -> list[Any]:
    async def member(one: UnreliableRank) -> Any:
        mine = checkpoint(storages(one.rank), one)
        try:
            return await act(mine, one.rank)
        finally:
            if mine._background is not None:
                await asyncio.to_thread(mine._background.close)

    return await asyncio.wait_for(group(size, member, faults), 60)


async def told(handle: SaveHandle) -> str | BaseException:
    """What became of a save."""
    try:
        return await handle.committed()
    except CheckpointException as error:
        return error


@pytest.mark.parametrize("size", [2, 4])
async def test_ranks_save_in_the_background_without_meeting_again(size: int) -> None:
    storage = MemoryStorage()

    async def act(one: DistributedCheckpoint, rank: int) -> list[Any]:
        handles = [await one.save_async(part_of(rank, size, n), options=named(f"c{n}")) for n in range(4)]
        return [await told(handle) for handle in handles]

    assert await in_group(size, act, lambda rank: storage) == [["c0", "c1", "c2", "c3"]] * size
    for n in range(4):
        assert same(state_of(storage, f"c{n}"), all_of(size, n))
    named_files = {part.file for n in range(4) for part in listing.read_manifest(storage, f"c{n}").parts}
    assert set(storage.files) == named_files | {f"c{n}{SUFFIX}" for n in range(4)}


@pytest.mark.parametrize("faulty", [0, 1, 3])
@pytest.mark.parametrize("names", [("write",), ("sync_names",)])
async def test_failure_of_one_rank_is_raised_at_all_ranks_at_their_next_call(
    faulty: int, names: tuple[str, ...]
) -> None:
    storage = MemoryStorage()
    storages = {rank: FaultyStorage(storage, on(*names) if rank == faulty else on()) for rank in range(4)}

    async def act(one: DistributedCheckpoint, rank: int) -> list[Any]:
        first = await told(await one.save_async(part_of(rank, 4, 1), options=named("a")))
        second = await one.save_async(part_of(rank, 4, 2), options=named("b"))
        storages[faulty]._fault = on()
        return [first, await told(second), await one.save(part_of(rank, 4, 3), options=named("c"))]

    outcomes = await in_group(4, act, storages.__getitem__)
    for first, second, third in outcomes:
        assert isinstance(first, CheckpointException)
        assert not isinstance(first, OutcomeUnknown)
        assert (first.code, first.checkpoint_path) == ("broken", "a")
        assert isinstance(second, str | CheckpointException)
        assert third == "c"
    assert not any(name.startswith("a") for name in storage.files)


async def test_unseen_failure_is_raised_at_all_ranks_by_their_next_call() -> None:
    storage = MemoryStorage()
    storages = {rank: FaultyStorage(storage, on("write") if rank == 1 else on()) for rank in range(3)}

    async def act(one: DistributedCheckpoint, rank: int) -> Any:
        handle = await one.save_async(part_of(rank, 3, 1), options=named("a"))
        while not handle.is_done:
            await asyncio.sleep(0.01)
        with pytest.raises(CheckpointException, match="it is broken"):
            await one.save(part_of(rank, 3, 2), options=named("b"))
        storages[1]._fault = on()
        return await one.save(part_of(rank, 3, 3), options=named("c"))

    outcomes = await in_group(3, act, storages.__getitem__)
    assert outcomes == ["c"] * 3
    assert listing.prefixes(storage) == ["c"]


async def test_rank_without_free_slot_refuses_for_all_ranks() -> None:
    storage, gate = MemoryStorage(), Gate("write")
    storages: dict[int, Storage] = {0: storage, 1: FaultyStorage(storage, gate)}

    async def act(one: DistributedCheckpoint, rank: int) -> Any:
        handles = [await one.save_async(part_of(rank, 2, n), options=named(f"c{n}")) for n in range(2)]
        with pytest.raises(CheckpointException) as caught:
            await one.save_async(part_of(rank, 2, 2), options=named("c2", when_busy=WhenBusy.REFUSE))
        assert caught.value.code == "checkpoint_busy"
        gate.open.set()
        return [await told(handle) for handle in handles]

    assert await in_group(2, act, storages.__getitem__) == [["c0", "c1"]] * 2


@pytest.mark.parametrize("faulty", [0, 2])
async def test_staging_failure_of_one_rank_is_raised_at_all_ranks(faulty: int) -> None:
    storage = MemoryStorage()

    async def act(one: DistributedCheckpoint, rank: int) -> Any:
        if rank == faulty:
            one._staging.stage = fail_to_stage  # type: ignore[method-assign, assignment]
        for _ in range(3):
            with pytest.raises(CheckpointException) as caught:
                await one.save_async(part_of(rank, 3, 1), options=named("a"))
            assert (caught.value.code, caught.value.message[:7]) == ("checkpoint_memory", f"rank {faulty}:")
        assert len(one._staging._free) == (rank != faulty)

    def fail_to_stage(*_: Any) -> Any:
        raise MemoryError

    assert await in_group(3, act, lambda rank: storage) == [None] * 3
    assert storage.files == {}


@pytest.mark.parametrize("faulty", [0, 2])
async def test_a_rank_that_dies_while_writing_is_not_waited_for_for_ever(faulty: int) -> None:
    """The failed save leaves neither receipts nor refusals."""
    storage, gate = MemoryStorage(), Gate("write")
    storages: dict[int, Storage] = dict.fromkeys(range(3), storage)
    storages[faulty] = FaultyStorage(storage, gate)

    async def act(one: DistributedCheckpoint, rank: int) -> Any:
        handle = await one.save_async(part_of(rank, 3, 1), options=named("a", timeout=1.0))
        if rank == faulty:
            return None
        try:
            return await told(handle)
        finally:
            gate.open.set()

    outcomes = await in_group(3, act, storages.__getitem__)
    outcomes.pop(faulty)
    assert all(isinstance(one, CheckpointException) and one.type is ExceptionType.TIMEOUT for one in outcomes)
    assert not listing.checkpoint_exists(storage, "a")
    listing.delete_unfinished(storage, "a")
    assert storage.files == {}


async def test_root_that_fails_on_a_full_disk_can_tell_the_rank_that_has_written(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        storage, has_written = LocalStorage(disk / "checkpoints"), threading.Event()

        def fill_before_writing(number: int, what: str, done: bool) -> None:
            if what == "write" and not done:
                assert has_written.wait(PATIENCE_S)
                fill(disk)

        def note_receipt(number: int, what: str, done: bool) -> None:
            if what == "publish" and done:
                has_written.set()

        storages = [FaultyStorage(storage, fault) for fault in (fill_before_writing, note_receipt)]

        async def act(one: DistributedCheckpoint, rank: int) -> Any:
            return await told(await one.save_async(part_of(rank, 2, 1), options=named("a")))

        outcomes = await in_group(2, act, storages.__getitem__)
        assert [getattr(one, "code", one) for one in outcomes] == ["checkpoint_disk_full"] * 2
        assert [entry.name for entry in storage.entries()] == []


@pytest.mark.parametrize("call", [7, 8])
async def test_rank_lost_while_staging_is_reported(call: int) -> None:
    storage = MemoryStorage()

    async def act(one: DistributedCheckpoint, rank: int) -> Any:
        return await told(await one.save_async(part_of(rank, 3, 1), options=named("a", timeout=0.3)))

    for fault in (hang, fail(ConnectionResetError())):
        outcomes = await in_group(3, act, lambda rank: storage, {1: {call: fault}})
        assert all(isinstance(one, CheckpointException) for one in outcomes), outcomes
        assert not listing.checkpoint_exists(storage, "a")
        listing.delete_unfinished(storage, "a")


def workers(*names: str) -> SimpleNamespace:
    """A topology of workers called so; a digit behind a name is where that worker is reached."""
    return SimpleNamespace(workers=tuple(WorkerId(name[0], "host", int(name[1:] or 1)) for name in names))


@pytest.mark.parametrize("then", ["ac", ("a", "b2", "c")], ids=["gone", "come back under its name"])
async def test_a_rank_that_is_known_to_be_gone_is_not_waited_for_as_long_as_the_living(
    monkeypatch: pytest.MonkeyPatch, then: Sequence[str]
) -> None:
    monkeypatch.setattr(receipts, "GONE_S", 0.1)
    storage, gate = MemoryStorage(), Gate("write")
    storages: dict[int, Storage] = {0: storage, 1: FaultyStorage(storage, gate), 2: storage}

    async def member(one: UnreliableRank) -> Any:
        worker: Any = one
        worker.current_topology = workers(*"abc")
        mine = checkpoint(storages[one.rank], worker)
        handle = await mine.save_async(part_of(one.rank, 3, 1), options=named("a"))
        if one.rank == 1:
            return None
        worker.current_topology = workers(*then)
        outcome = await told(handle)
        gate.open.set()
        return outcome

    outcomes = await asyncio.wait_for(group(3, member), 60)
    assert [type(one) for one in outcomes] == [CheckpointException, type(None), CheckpointException]
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, CheckpointException)
        assert (outcome.code, outcome.type, outcome.retryable) == (
            "checkpoint_rank_gone",
            ExceptionType.SAVE_FAILED,
            True,
        )
        assert outcome.message.startswith("rank 1 (b@host:1) left")
        assert outcome.ranks == (1,)
    assert not listing.checkpoint_exists(storage, "a")


async def test_ranks_that_join_meanwhile_take_no_time_from_those_that_save() -> None:
    storage, gate = MemoryStorage(), Gate("write")
    storages: dict[int, Storage] = {0: storage, 1: FaultyStorage(storage, gate)}

    async def member(one: UnreliableRank) -> Any:
        worker: Any = one
        worker.current_topology = workers(*"ab")
        mine = checkpoint(storages[one.rank], worker)
        handle = await mine.save_async(part_of(one.rank, 2, 1), options=named("a"))
        worker.current_topology = workers(*"cba")
        gate.open.set()
        return await told(handle)

    assert await asyncio.wait_for(group(2, member), 60) == ["a", "a"]


async def test_another_save_of_that_name_is_not_taken_for_this_one() -> None:
    """It is published while this one is being written, and this one has come to nothing."""
    storage, gate = MemoryStorage(), Gate("write")
    storages: dict[int, Storage] = {0: FaultyStorage(storage, gate), 1: storage}

    async def act(one: DistributedCheckpoint, rank: int) -> Any:
        handle = await one.save_async(part_of(rank, 2, 1), options=named("a"))
        if rank == 0:
            await reached(gate)
            await checkpoint(storage).save(state(9), options=named("a"))
            gate.open.set()
        return await told(handle)

    outcomes = await in_group(2, act, storages.__getitem__)
    assert [one.code for one in outcomes] == ["checkpoint_exists"] * 2
    assert same(state_of(storage, "a"), {"model": state(9)})
    (part,) = listing.read_manifest(storage, "a").parts
    assert set(storage.files) == {part.file, "a" + SUFFIX}


async def test_no_rank_deletes_files_when_the_root_does_not_know_the_outcome() -> None:
    storage = MemoryStorage()

    def fault(number: int, what: str, done: bool) -> None:
        if what == "delete" or (what == "publish" and done and listing.checkpoint_exists(storage, "a")):
            raise broken()

    async def act(one: DistributedCheckpoint, rank: int) -> Any:
        return await told(await one.save_async(part_of(rank, 3, 1), options=named("a", timeout=10.0)))

    first, *rest = await in_group(3, act, lambda rank: FaultyStorage(storage, fault) if rank == 0 else storage)
    assert isinstance(first, OutcomeUnknown)
    assert all(one == "a" or isinstance(one, CheckpointException) for one in rest)
    assert same(state_of(storage, "a"), all_of(3, 1))


async def test_receipts_that_cannot_be_read_are_an_error_at_all() -> None:
    storage = MemoryStorage()

    class Garbling(MemoryStorage):
        def publish(self, name: str, data: bytes) -> None:
            storage.publish(name, b"{}" if name.endswith(".receipt") else data)

    garbling = Garbling()
    garbling.files = storage.files

    async def act(one: DistributedCheckpoint, rank: int) -> Any:
        return await told(await one.save_async(part_of(rank, 2, 1), options=named("a")))

    outcomes = await in_group(2, act, lambda rank: garbling if rank else storage)
    assert all(isinstance(one, CheckpointException) for one in outcomes)
    assert storage.files == {}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("faulty", [0, 1, 2])
async def test_storage_failure_at_any_step_leaves_only_whole_checkpoints(faulty: int, after: bool) -> None:
    """Every save ends, and no rank reports a checkpoint that does not exist."""
    for number in range(14):
        storage = MemoryStorage()
        storages = {
            rank: FaultyStorage(storage, at(number, after=after) if rank == faulty else on()) for rank in range(3)
        }

        async def act(one: DistributedCheckpoint, rank: int) -> Any:
            try:
                handle = await one.save_async(part_of(rank, 3, 1), options=named("a", timeout=0.5))
            except CheckpointException as error:
                return error
            return await told(handle)

        outcomes = await in_group(3, act, storages.__getitem__)
        assert all(one == "a" or isinstance(one, CheckpointException) for one in outcomes), outcomes
        if "a" in outcomes:
            assert listing.checkpoint_exists(storage, "a")
        if listing.checkpoint_exists(storage, "a"):
            assert all(one == "a" or isinstance(one, OutcomeUnknown) for one in outcomes), outcomes
            assert same(state_of(storage, "a"), all_of(3, 1))
        else:
            listing.delete_unfinished(storage, "a")
            assert storage.files == {}


# The end of the interpreter.

SCRIPT = """
import sys, numpy as np, threading
from forged.checkpoint import DistributedCheckpoint, BlockingCheckpoint, SaveOptions
from forged.checkpoint.storage.local import LocalStorage

class Late(LocalStorage):
    '''Writes when the interpreter has begun to end.'''
    def write(self, name, source, halt):
        threading.main_thread().join()
        super().write(name, source, halt)

one = BlockingCheckpoint(DistributedCheckpoint(None, Late(sys.argv[1])))
for number in range(2):
    level = "fast" if number else "none"
    one.save_async({"w": np.arange(3_000_000) + number}, options=SaveOptions(f"c{number}", compression_level=level))
"""


def test_saves_that_are_under_way_when_the_interpreter_ends_are_finished(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    storage = LocalStorage(tmp_path)
    for number in range(2):
        assert same(state_of(storage, f"c{number}")["model"], {"w": np.arange(3_000_000) + number})


def test_interrupted_script_finishes_its_saves(tmp_path: Path) -> None:
    script = SCRIPT + "\nraise KeyboardInterrupt"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert "KeyboardInterrupt" in done.stderr
    assert listing.prefixes(LocalStorage(tmp_path)) == ["c0", "c1"]


FAILING = """
import os, sys, threading, numpy as np
from forged.checkpoint import BlockingCheckpoint, CheckpointException, DistributedCheckpoint, SaveOptions
from forged.checkpoint.storage.local import LocalStorage

begun = threading.Event()

class Full(LocalStorage):
    def free_bytes(self):
        assert begun.wait(60)
        return 0

def begin(*prefixes):
    one = BlockingCheckpoint(DistributedCheckpoint(None, Full(sys.argv[1])))
    handles = [one.save_async({"w": np.ones(10)}, options=SaveOptions(prefix)) for prefix in prefixes]
    begun.set()
    return handles, one
"""
ENDS = {
    "one": ("handles, one = begin('a', 'b')", ["a", "b"]),
    "the handle was collected": ("begin('a')", ["a"]),
    "the script fails": ("handles, one = begin('a')\n1 / 0", ["a"]),
    "a handle was asked": (
        "handles, one = begin('a', 'b')\ntry: handles[1].result()\nexcept CheckpointException: pass\n",
        ["a"],
    ),
    "closed": ("handles, one = begin('a')\ntry: one.close()\nexcept CheckpointException: pass", []),
    "a fork ends too": (
        "handles, one = begin('a')\n"
        "[thread.join() for thread in threading.enumerate() if thread.name == 'checkpoint-save']\n"
        "child = os.fork()\n"
        "if child: os.waitpid(child, 0)\n",
        ["a"],
    ),
    "nowhere to say it": ("handles, one = begin('a')\nsys.stderr = None", []),
    "closed stderr": ("handles, one = begin('a')\nsys.stderr.close()", []),
}


@pytest.mark.parametrize(("end", "prefixes"), ENDS.values(), ids=ENDS)
def test_unseen_failures_are_printed_to_stderr_at_exit(tmp_path: Path, end: str, prefixes: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILING + end, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("forged: ")]
    assert [line.split(" was not saved: ")[0] for line in sorted(lines)] == [
        f"forged: checkpoint {prefix}" for prefix in prefixes
    ]
    assert done.stdout == ""
    assert all("bytes" in line and line.endswith(")") for line in lines), "the reason and the fix are told, too"
