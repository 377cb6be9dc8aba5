from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import pytest

from forged.errors import RequestRefused
from forged.kernel.bus.signals import KEYS_MAX, SignalHandler, SignalSlot
from forged.kernel.messages import Call, Signal
from tests.kernel_fixture import Level, call, on_virtual_time, task_group
from tests.simulation.environment.loop import VirtualClock

CALL = call()


class Rain(Signal, frozen=True):
    """A signal without a key."""

    job_field: ClassVar[str | None] = None

    millimetres: int


class Step(Signal, frozen=True):
    """A worker's progress."""

    job: str
    worker: str
    step: int = 0

    @property
    def key(self) -> str:
        return self.worker


class Gauge:
    """A handler that records its signals."""

    def __init__(self, *, open_at_once: bool = True) -> None:
        self.seen: list[Signal] = []
        self.open = asyncio.Event()
        if open_at_once:
            self.open.set()

    async def __call__(self, signal: Signal, _: Call) -> None:
        self.seen.append(signal)
        await self.open.wait()


@asynccontextmanager
async def slot_of(
    handler: SignalHandler, on_bug: Callable[[str, BaseException], None] = lambda owner, error: None
) -> AsyncIterator[SignalSlot]:
    slot = SignalSlot("a handler", handler, VirtualClock(asyncio.get_running_loop()).monotonic, on_bug)
    async with task_group() as tasks:
        tasks.start_soon(slot.run)
        await anyio.lowlevel.checkpoint()
        yield slot


@on_virtual_time
async def test_of_signals_with_one_key_only_the_latest_is_seen() -> None:
    gauge = Gauge()
    async with slot_of(gauge) as slot:
        for height in range(100):
            slot.put(Level("tank", height), CALL)
        await anyio.sleep(1)
        assert gauge.seen == [Level("tank", 99)]
        assert slot.statistics.coalesced == 99


@on_virtual_time
async def test_signals_with_different_keys_do_not_touch_each_other() -> None:
    gauge = Gauge()
    async with slot_of(gauge) as slot:
        for height in range(3):
            slot.put(Level("a", height), CALL)
            slot.put(Level("b", height), CALL)
        slot.put(Rain(1), CALL)
        await anyio.sleep(1)
        assert gauge.seen == [Level("a", 2), Level("b", 2), Rain(1)]


@on_virtual_time
async def test_equal_keys_in_two_jobs_do_not_touch_each_other() -> None:
    gauge = Gauge()
    async with slot_of(gauge) as slot:
        for step in range(3):
            slot.put(Step("a", "w0", step), CALL)
            slot.put(Step("b", "w0", step), CALL)
        await anyio.sleep(1)
        assert gauge.seen == [Step("a", "w0", 2), Step("b", "w0", 2)]


@on_virtual_time
async def test_signal_of_another_client_replaces_none() -> None:
    gauge = Gauge()
    async with slot_of(gauge) as slot:
        for step in range(3):
            slot.put(Step("a", "w0", step), replace(CALL, client=b"one"))
            slot.put(Step("a", "w0", 10 + step), replace(CALL, client=b"other"))
        await anyio.sleep(1)
        assert gauge.seen == [Step("a", "w0", 2), Step("a", "w0", 12)]


@on_virtual_time
async def test_a_slow_handler_sees_fewer_newer_signals() -> None:
    gauge = Gauge(open_at_once=False)
    async with slot_of(gauge) as slot:
        slot.put(Level("tank", 1), CALL)
        await anyio.sleep(1)
        for height in range(2, 50):
            slot.put(Level("tank", height), CALL)
        gauge.open.set()
        await anyio.sleep(1)
        assert gauge.seen == [Level("tank", 1), Level("tank", 49)]


@on_virtual_time
async def test_a_signal_put_by_the_handler_waits_for_its_turn() -> None:
    seen: list[int] = []

    def handler(signal: Level, _: Call) -> None:
        seen.append(signal.height)
        if signal.height < 5:
            slot.put(Level("tank", signal.height + 1), CALL)

    async with slot_of(handler) as slot:
        slot.put(Level("tank", 1), CALL)
        await anyio.sleep(1)
    assert seen == [1, 2, 3, 4, 5]


async def await_something_cancelled(_: Signal, __: Call) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


def raise_error(_: Signal, __: Call) -> None:
    raise ValueError("boom")


def leave(_: Signal, __: Call) -> None:
    raise SystemExit(1)


@pytest.mark.parametrize("failing", [raise_error, leave, await_something_cancelled])
@on_virtual_time
async def test_a_failure_is_counted_and_the_next_signal_comes(failing: Any) -> None:
    async with slot_of(failing) as slot:
        for height in range(3):
            slot.put(Level("tank", height), CALL)
            await anyio.sleep(1)
        assert (slot.statistics.failed, slot.statistics.handled) == (3, 3)


def refuse(_: Signal, __: Call) -> None:
    raise RequestRefused("level_refused", "it is too high")


@pytest.mark.parametrize(("failing", "bugs"), [(raise_error, ["a handler"]), (leave, ["a handler"]), (refuse, [])])
@on_virtual_time
async def test_failure_is_reported_as_a_bug_unless_it_is_an_error_of_forged(
    failing: SignalHandler, bugs: list[str]
) -> None:
    reported: list[str] = []
    async with slot_of(failing, lambda owner, error: reported.append(owner)) as slot:
        slot.put(Level("tank", 1), CALL)
        await anyio.sleep(1)
    assert (reported, slot.statistics.failed) == (bugs, 1)


@on_virtual_time
async def test_how_many_signals_wait_is_bounded_and_the_oldest_go_first() -> None:
    gauge = Gauge()
    async with slot_of(gauge) as slot:
        for number in range(KEYS_MAX + 10):
            slot.put(Level(str(number)), CALL)
        await anyio.sleep(1)
        assert len(gauge.seen) == KEYS_MAX
        assert gauge.seen[0] == Level("10")
        assert slot.statistics.dropped == 10


class Alarm(Signal, frozen=True):
    """A signal of a job, with a key."""

    job: str
    source: str

    @property
    def key(self) -> str:
        return self.source


@on_virtual_time
async def test_flood_of_one_job_drops_no_waiting_signal_of_another_job() -> None:
    gauge = Gauge()
    async with slot_of(gauge) as slot:
        slot.put(Alarm("a", "only"), CALL)
        for number in range(KEYS_MAX + 10):
            slot.put(Alarm("hostile", str(number)), CALL)
        await anyio.sleep(1)
        assert gauge.seen[:2] == [Alarm("a", "only"), Alarm("hostile", "11")]
        assert (len(gauge.seen), slot.statistics.dropped) == (KEYS_MAX, 11)


@on_virtual_time
async def test_handler_gets_the_sender_of_a_signal() -> None:
    callers: list[str] = []
    async with slot_of(lambda _, sent: callers.append(sent.principal.name)) as slot:
        slot.put(Rain(1), CALL)
        await anyio.sleep(1)
    assert callers == ["an operator"]


@on_virtual_time
async def test_handler_that_signals_itself_yields_to_other_tasks() -> None:
    handled = 0
    turns: list[int] = []

    def handle(signal: Signal, _: Call) -> None:
        nonlocal handled
        handled += 1
        if handled < 100:
            slot.put(signal, CALL)

    async with slot_of(handle) as slot:
        slot.put(Step("run", "w0"), CALL)
        while handled < 100:
            await anyio.lowlevel.checkpoint()
            turns.append(handled)
    assert len(set(turns)) == 100
