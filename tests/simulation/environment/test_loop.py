from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio._backends import _asyncio as anyio_backend

from tests.simulation.environment.loop import EPOCH_S, Deadlock, Execution, Livelock, SimulationError, VirtualClock, run

Step = Callable[[], Coroutine[Any, Any, None]]


def now() -> float:
    return asyncio.get_running_loop().time()


def test_sleeping_takes_virtual_time_only() -> None:
    async def main() -> float:
        await asyncio.sleep(86_400 * 365)
        await anyio.sleep(0.5)
        return now()

    assert run(main, 1) == 86_400 * 365 + 0.5


def test_timers_fire_in_the_order_of_their_times() -> None:
    async def main() -> list[float]:
        fired: list[float] = []
        async with anyio.create_task_group() as tasks:
            for delay_s in (3.0, 1.0, 2.0):
                tasks.start_soon(wake_after, delay_s, fired)
        return fired

    async def wake_after(delay_s: float, fired: list[float]) -> None:
        await anyio.sleep(delay_s)
        fired.append(now())

    assert run(main, 1) == [1.0, 2.0, 3.0]


async def order_of_simultaneous_timers() -> tuple[int, ...]:
    fired: list[int] = []
    for number in range(4):
        asyncio.get_running_loop().call_later(1, fired.append, number)
    await asyncio.sleep(2)
    return tuple(fired)


def test_the_seed_decides_the_order_of_timers_due_at_one_moment() -> None:
    orders = [run(order_of_simultaneous_timers, seed) for seed in range(50)]
    assert len(set(orders)) > 10
    assert orders == [run(order_of_simultaneous_timers, seed) for seed in range(50)]


def test_call_soon_keeps_its_order_under_every_seed() -> None:
    async def main() -> list[int]:
        called: list[int] = []
        for number in range(20):
            asyncio.get_running_loop().call_soon(called.append, number)
        await asyncio.sleep(1)
        return called

    assert all(run(main, seed) == list(range(20)) for seed in range(10))


async def order_of_cancellation() -> tuple[int, ...]:
    cancelled: list[int] = []

    async def wait_in_scope(number: int) -> None:
        with anyio.CancelScope():
            try:
                await anyio.sleep_forever()
            finally:
                cancelled.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(wait_in_scope, number)
        await anyio.sleep(1)
        tasks.cancel_scope.cancel()
    return tuple(cancelled)


def test_the_seed_decides_the_order_of_cancellation() -> None:
    orders = [run(order_of_cancellation, seed) for seed in range(50)]
    assert len(set(orders)) > 10
    assert orders == [run(order_of_cancellation, seed) for seed in range(50)]


def test_the_seed_decides_the_order_of_a_set_of_futures() -> None:
    async def main() -> list[int]:
        futures = [asyncio.get_running_loop().create_future() for _ in range(6)]
        for future in futures:
            future.set_result(None)
        done, _ = await asyncio.wait(futures)
        return [futures.index(future) for future in done]

    assert len({tuple(run(main, seed)) for seed in range(20)}) > 10
    assert run(main, 3) == run(main, 3)


def test_anyio_deadlines_streams_and_events_work() -> None:
    async def main() -> list[object]:
        send, receive = anyio.create_memory_object_stream[int](1)
        seen: list[object] = []
        asked = anyio.Event()

        async def feed() -> None:
            async with send:
                await asked.wait()
                for number in range(3):
                    await anyio.sleep(1)
                    await send.send(number)

        with anyio.move_on_after(5) as scope:
            await anyio.sleep_forever()
        seen.append((scope.cancelled_caught, now()))
        with pytest.raises(TimeoutError), anyio.fail_after(1):
            await asked.wait()
        async with anyio.create_task_group() as tasks, receive:
            tasks.start_soon(feed)
            asked.set()
            seen += [(number, now()) async for number in receive]
        return seen

    assert run(main, 1) == [(True, 5.0), (0, 7.0), (1, 8.0), (2, 9.0)]


def test_asyncio_deadlines_groups_and_locks_work() -> None:
    async def main() -> tuple[list[int], float]:
        lock = asyncio.Lock()
        done: list[int] = []

        async def work(number: int) -> None:
            async with lock:
                await asyncio.sleep(1)
                done.append(number)

        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(work(number))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.get_running_loop().create_future(), 2)
        return done, now()

    assert run(main, 1) == ([0, 1, 2], 12.0)


async def wait_for_nobody() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("wait", [wait_for_nobody, anyio.sleep_forever])
def test_wait_that_cannot_end_raises_deadlock_with_the_waiter(wait: Step) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, name="the waiter")

    with pytest.raises(Deadlock, match=r"the waiter: .*(wait_for_nobody > Event.wait|sleep)"):
        run(main, 1)


def test_spinning_without_progress_of_time_is_a_livelock() -> None:
    async def main() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    with pytest.raises(Livelock, match="main"):
        run(main, 1)


def test_any_progress_of_time_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulation.environment.loop.STANDSTILL_ITERATIONS_MAX", 10)

    async def main() -> None:
        for _ in range(100):
            await asyncio.sleep(1e-6)

    run(main, 1)


def test_a_timer_at_the_end_of_time_does_not_hide_a_deadlock() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_at(math.inf, print)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(main, 1)


async def use_executor() -> None:
    await asyncio.to_thread(print)


async def use_anyio_thread() -> None:
    await anyio.to_thread.run_sync(print)


async def use_socket() -> None:
    await asyncio.open_connection("127.0.0.1", 9)


async def use_unix_server() -> None:
    await asyncio.start_unix_server(print, Path("/tmp/never"))


async def use_names() -> None:
    await asyncio.get_running_loop().getaddrinfo("localhost", 9)


async def use_process() -> None:
    await asyncio.create_subprocess_exec("true")


async def use_thread() -> None:
    threading.Thread(target=print).start()


@pytest.mark.parametrize(
    "use", [use_executor, use_anyio_thread, use_socket, use_unix_server, use_names, use_process, use_thread]
)
def test_real_io_is_refused(use: Step) -> None:
    with pytest.raises(SimulationError, match="real I/O"):
        run(use, 1)


def test_callbacks_from_another_thread_are_refused() -> None:
    refused: list[Exception] = []

    def intrude() -> None:
        loop = loops.get()
        try:
            loop.call_soon_threadsafe(print)
        except SimulationError as error:
            refused.append(error)
        finally:
            done.set()

    async def main() -> None:
        loops.put(asyncio.get_running_loop())
        done.wait()

    loops: queue.Queue[asyncio.AbstractEventLoop] = queue.Queue()
    done = threading.Event()
    intruder = threading.Thread(target=intrude)
    intruder.start()
    run(main, 1)
    intruder.join()
    assert len(refused) == 1


def test_the_error_of_main_is_raised_as_it_is() -> None:
    async def main() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(main, 1)


def test_the_error_of_a_callback_stops_the_run_at_once() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, fail)
        await asyncio.sleep(1000)

    def fail() -> None:
        raise KeyError(now())

    with pytest.raises(ExceptionGroup) as raised:
        run(main, 1)
    assert repr(raised.value.exceptions) == "(KeyError(1.0),)"


def test_error_of_an_unawaited_task_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("unseen")

    async def main() -> None:
        kept = asyncio.get_running_loop().create_task(fail())
        await asyncio.sleep(1)
        kept.get_name()

    with pytest.raises(ExceptionGroup) as raised:
        run(main, 1)
    assert isinstance(raised.value.exceptions[0], ValueError)


def fail_now() -> None:
    raise KeyError("as main ends")


@pytest.mark.parametrize("failing", [False, True])
def test_left_over_tasks_are_cancelled_and_may_take_their_time(failing: bool) -> None:
    ended: list[float] = []

    async def linger() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(10)
            ended.append(now())

    async def main() -> None:
        tasks.append(asyncio.get_running_loop().create_task(linger()))
        await asyncio.sleep(1)
        if failing:
            asyncio.get_running_loop().call_soon(fail_now)
            await asyncio.sleep(0)

    tasks: list[object] = []
    with pytest.raises(ExceptionGroup) if failing else contextlib.nullcontext():
        run(main, 1)
    assert ended == [11]


def test_a_task_that_ignores_cancellation_is_an_error() -> None:
    async def ignore() -> None:
        while True:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        tasks.append(asyncio.get_running_loop().create_task(ignore()))
        await asyncio.sleep(1)

    tasks: list[asyncio.Task[None]] = []
    with pytest.raises(ExceptionGroup) as raised:
        run(main, 1)
    assert "ignores cancellation" in str(raised.value.exceptions[0])
    tasks[0]._log_destroy_pending = False  # type: ignore[attr-defined]  # it was left pending on purpose


def test_anyio_threads_and_the_collector_are_as_before_after_a_run() -> None:
    before = anyio_backend.CancelScope, threading.Thread.start, gc.isenabled()

    async def main() -> None:
        assert not gc.isenabled()
        raise KeyError

    with pytest.raises(KeyError):
        run(main, 1)
    assert (anyio_backend.CancelScope, threading.Thread.start, gc.isenabled()) == before


def test_generator_finalisation_is_deterministic() -> None:
    async def generate(ended: list[float]) -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            ended.append(now())

    async def main() -> list[float]:
        ended: list[float] = []
        generator = generate(ended)
        cycle: list[object] = [generator]
        cycle.append(cycle)
        await anext(generator)
        del generator, cycle
        for _ in range(25_000):
            await asyncio.sleep(0.001)
        return ended

    first = run(main, 1)
    ballast = [[number] for number in range(10_000)]
    assert run(main, 1) == first
    assert first[0] < 25, "before the end of the run"
    del ballast


def test_a_clock_has_its_own_start_and_its_own_error() -> None:
    async def main() -> tuple[float, float, float, float]:
        clock = VirtualClock(asyncio.get_running_loop(), offset_s=100, skew_s=-7)
        await asyncio.sleep(3)
        before = clock.wall(), clock.monotonic()
        clock.jump(-3600)
        return *before, clock.wall(), clock.monotonic()

    assert run(main, 1) == (EPOCH_S - 4, 103, EPOCH_S - 3604, 103)


async def tick(execution: Execution, heard: list[float]) -> None:
    execution.enter()
    while True:
        await asyncio.sleep(1.0)
        heard.append(now())


def test_suspended_execution_pauses_while_others_run() -> None:
    async def main() -> tuple[list[float], list[float]]:
        execution, other = (Execution(asyncio.get_running_loop()) for _ in range(2))
        heard: tuple[list[float], list[float]] = ([], [])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tick, execution, heard[0])
            tasks.start_soon(tick, other, heard[1])
            await asyncio.sleep(1.5)
            execution.suspend()
            await asyncio.sleep(3.0)
            execution.resume()
            await asyncio.sleep(1.2)
            tasks.cancel_scope.cancel()
        return heard

    assert run(main, 1) == ([1.0, 4.5, 5.5], [1.0, 2.0, 3.0, 4.0, 5.0])


def test_timers_due_while_suspended_run_in_order_unless_cancelled() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        execution, done = Execution(loop), list[str]()
        execution.suspend()
        for number, name in enumerate("abc"):
            timer = loop.call_later(3 - number, done.append, name, context=execution.context.copy())
            if name == "b":
                loop.call_later(2.5, timer.cancel)
        await asyncio.sleep(5.0)
        assert done == []
        execution.resume()
        await asyncio.sleep(0.1)
        return done

    assert run(main, 1) == ["c", "a"]
