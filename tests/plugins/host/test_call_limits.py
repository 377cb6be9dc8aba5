from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import anyio
import pytest

from forged.plugins.alarm_guard import Unguarded, guarded
from forged.plugins.host.call_limits import GRACE_S, CallLimit
from tests.kernel_fixture import on_virtual_time, task_group


class LimitedWork:
    """A work_item of work under a limit, and how it went."""

    def __init__(self, work: Callable[[CallLimit], Awaitable[object]], limit_s: float = 1.0) -> None:
        self.work = work
        self.limit_s = limit_s
        self.limit: CallLimit
        self.outcome = ""
        self.cancelling = 0
        self.took_s = 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self.limit = limit = CallLimit()
        began = loop.time()
        limit.begin(self.limit_s)
        try:
            await guarded(Unguarded(), math.inf, self.work(limit), lambda: limit.abandoned)
            self.outcome = "done"
        except asyncio.CancelledError:
            self.outcome = "cancelled"
        finally:
            limit.end()
        task = asyncio.current_task()
        assert task is not None
        self.cancelling, self.took_s = task.cancelling(), loop.time() - began


async def hang(_: CallLimit) -> None:
    await asyncio.Event().wait()


async def go_on(_: CallLimit) -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


@on_virtual_time
async def test_work_within_its_time_is_left_alone() -> None:
    work_item = LimitedWork(lambda _: anyio.sleep(0.9))
    await work_item.run()
    assert (work_item.outcome, work_item.limit.cancelled, work_item.cancelling) == ("done", False, 0)


@on_virtual_time
async def test_work_over_its_time_is_cancelled_and_leaves_nothing_of_that_behind() -> None:
    work_item = LimitedWork(hang)
    await work_item.run()
    assert (work_item.outcome, work_item.limit.cancelled, work_item.limit.abandoned) == ("cancelled", True, False)
    assert (work_item.cancelling, work_item.took_s) == (0, 1.0)
    await anyio.sleep(10)


@on_virtual_time
async def test_cancelled_work_may_put_things_in_order() -> None:
    tidied: list[float] = []

    async def tidy(_: CallLimit) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await anyio.sleep(GRACE_S - 0.1)
            tidied.append(anyio.current_time())

    work_item = LimitedWork(tidy)
    await work_item.run()
    assert (work_item.outcome, tidied) == ("cancelled", [1.0 + GRACE_S - 0.1])


@on_virtual_time
async def test_work_that_ignores_its_cancellation_is_abandoned() -> None:
    work_item = LimitedWork(go_on)
    await work_item.run()
    assert (work_item.outcome, work_item.limit.abandoned, work_item.cancelling) == ("cancelled", True, 0)
    assert work_item.took_s == pytest.approx(1.0 + GRACE_S)


@on_virtual_time
async def test_work_can_be_stopped_before_its_time_is_over() -> None:
    work_item = LimitedWork(hang, 100.0)
    async with task_group() as tasks:
        tasks.start_soon(work_item.run)
        await anyio.sleep(1)
        work_item.limit.stop()
        work_item.limit.stop()
        await anyio.sleep(1)
    assert (work_item.outcome, work_item.took_s) == ("cancelled", 1.0)


@on_virtual_time
async def test_work_that_stops_itself_is_stopped_where_it_waits_and_no_later() -> None:
    async def stop(limit: CallLimit) -> None:
        limit.stop()

    work_item = LimitedWork(stop)
    await work_item.run()
    assert work_item.outcome == "done"
    # The limit does not apply to later work of the task.
    await anyio.sleep(1)

    async def stop_and_wait(limit: CallLimit) -> None:
        limit.stop()
        await asyncio.Event().wait()

    work_item = LimitedWork(stop_and_wait, 100.0)
    await work_item.run()
    assert (work_item.outcome, work_item.took_s) == ("cancelled", 0.0)


@pytest.mark.parametrize(("behind_s", "outcome"), [(0.4, "done"), (0.6, "cancelled")])
@on_virtual_time
async def test_an_interlude_takes_none_of_the_time(behind_s: float, outcome: str) -> None:
    async def work(limit: CallLimit) -> None:
        await anyio.sleep(0.5)
        with limit.paused():
            await anyio.sleep(100)
        await anyio.sleep(behind_s)

    work_item = LimitedWork(work)
    await work_item.run()
    assert work_item.outcome == outcome


@on_virtual_time
async def test_interludes_that_overlap_are_one() -> None:
    async def wait(limit: CallLimit, seconds: float) -> None:
        with limit.paused():
            await anyio.sleep(seconds)

    async def work(limit: CallLimit) -> None:
        await asyncio.gather(wait(limit, 5), wait(limit, 10))
        await hang(limit)

    work_item = LimitedWork(work)
    await work_item.run()
    assert (work_item.outcome, work_item.took_s) == ("cancelled", 11.0)


@on_virtual_time
async def test_paused_limit_does_not_stop_the_daemons_work() -> None:
    done: list[str] = []

    async def work(limit: CallLimit) -> None:
        with limit.paused():
            await anyio.sleep(10)
            done.append("it")

    work_item = LimitedWork(work)
    async with task_group() as tasks:
        tasks.start_soon(work_item.run)
        await anyio.sleep(1)
        work_item.limit.stop()
        await anyio.sleep(20)
    assert (work_item.outcome, done) == ("done", ["it"])


@on_virtual_time
async def test_interlude_that_outlives_its_turn_cancels_no_task() -> None:
    async def outlive(limit: CallLimit) -> None:
        with limit.paused():
            await anyio.sleep(5)

    async def work(limit: CallLimit) -> None:
        tasks.append(asyncio.create_task(outlive(limit)))
        await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    work_item = LimitedWork(work)
    await work_item.run()
    await anyio.sleep(100)
    assert (work_item.outcome, tasks[0].done()) == ("done", True)


@on_virtual_time
async def test_an_end_from_outside_is_not_taken_for_the_turn_s_own() -> None:
    work_item = LimitedWork(hang, 100.0)
    with anyio.move_on_after(1) as scope:
        await work_item.run()
    assert scope.cancel_called
    assert (work_item.limit.cancelled, work_item.outcome) == (False, "cancelled")
