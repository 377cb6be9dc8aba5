from __future__ import annotations

import asyncio
import gc
import random
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import suppress
from typing import Any

import anyio
import pytest

from forged.log import Log
from forged.plugins.alarm_guard import (
    CANCELLATIONS_MAX,
    RETRY_S,
    AlarmGuard,
    OutsideLog,
    PluginBlocked,
    PluginMisbehaved,
    Unguarded,
    guarded,
    outside,
)

LIMIT_S = 0.05
"""For code that is to be interrupted."""
AMPLE_S = 0.3
"""For code that is not, even on a machine that has much else to do."""
LONG_S = 60.0


@pytest.fixture
def guard() -> Iterator[AlarmGuard]:
    it = AlarmGuard()
    yield it
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "an alarm was left behind"
    it.close()


def spin() -> None:
    while True:
        pass


def sleep_long() -> None:
    time.sleep(1000)


def read_from_nobody() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.recv(1)


def swallow_once() -> None:
    try:
        spin()
    except BaseException:  # noqa: BLE001 - this is what a bad plugin does
        spin()


def busy(seconds: float) -> None:
    """Use so much of the processor's time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


# Functions.


@pytest.mark.parametrize("block", [spin, sleep_long, read_from_nobody, swallow_once])
def test_code_that_holds_up_the_loop_is_interrupted(guard: AlarmGuard, block: Callable[[], None]) -> None:
    with pytest.raises(PluginMisbehaved, match=r"more than 0\.05 s"):
        guard.run(LIMIT_S, block)


def swallow_and_return() -> None:
    with suppress(BaseException):
        spin()


def test_swallowing_the_interruption_is_a_failure_too(guard: AlarmGuard) -> None:
    with pytest.raises(PluginMisbehaved, match=r"more than 0\.05 s, and continued"):
        guard.run(LIMIT_S, swallow_and_return)
    assert guard.run(LONG_S, len, "abc") == 3


def test_interruption_of_an_inner_plugin_does_not_reach_the_outer_one(guard: AlarmGuard) -> None:
    def inner() -> None:
        with pytest.raises(PluginMisbehaved):
            guard.run(LIMIT_S, swallow_and_return)

    assert guard.run(LONG_S, guard.outside, inner) is None


def test_swallowing_an_interruption_at_the_edge_of_the_daemons_code_is_a_failure_too(guard: AlarmGuard) -> None:
    def call_until_stopped() -> None:
        with suppress(BaseException):
            while True:
                guard.outside(len, "")

    with pytest.raises(PluginMisbehaved):
        guard.run(LIMIT_S, call_until_stopped)


def test_a_function_of_c_is_interrupted_too(guard: AlarmGuard) -> None:
    with pytest.raises(PluginMisbehaved):
        guard.run(LIMIT_S, time.sleep, 1000)


def test_interruption_is_not_caught_by_except_exception(guard: AlarmGuard) -> None:
    def careless() -> None:
        while True:
            with suppress(Exception):
                spin()

    with pytest.raises(PluginMisbehaved):
        guard.run(LIMIT_S, careless)


def test_interruption_has_the_traceback_of_the_plugin(guard: AlarmGuard) -> None:
    with pytest.raises(PluginMisbehaved) as caught:
        guard.run(LIMIT_S, spin)
    names, traceback = [], caught.value.__cause__.__traceback__ if caught.value.__cause__ else None
    while traceback is not None:
        names.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert "spin" in names


def test_a_function_has_its_result_and_its_arguments(guard: AlarmGuard) -> None:
    assert guard.run(LONG_S, divmod, 7, 2) == (3, 1)


def test_exception_of_the_guarded_call_is_raised_unchanged(guard: AlarmGuard) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        guard.run(LONG_S, int, "seven")


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        asyncio.CancelledError(),
        BaseExceptionGroup("x", [SystemExit()]),
    ],
)
def test_nothing_that_a_function_raises_ends_more_than_its_turn(guard: AlarmGuard, error: BaseException) -> None:
    def leave() -> None:
        raise error

    for one in (guard, Unguarded()):
        with pytest.raises(PluginMisbehaved, match=type(error).__name__):
            one.run(LONG_S, leave)


def test_no_alarm_is_set_behind_a_function(guard: AlarmGuard) -> None:
    guard.run(LONG_S, len, "")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with pytest.raises(PluginMisbehaved):
        guard.run(LIMIT_S, spin)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    busy(2 * LIMIT_S)


def test_a_guard_that_is_closed_gives_the_signal_back() -> None:
    AlarmGuard().close()
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


# The daemon's own code within a plugin's.


def test_the_daemons_own_code_is_not_interrupted(guard: AlarmGuard) -> None:
    def call() -> str:
        guard.outside(busy, 1.3 * AMPLE_S)
        return "done"

    assert guard.run(AMPLE_S, call) == "done"


def test_the_plugin_is_interrupted_behind_the_daemons_code(guard: AlarmGuard) -> None:
    def call_and_spin() -> None:
        guard.outside(busy, 2 * LIMIT_S)
        spin()

    with pytest.raises(PluginMisbehaved):
        guard.run(LIMIT_S, call_and_spin)


def test_calling_the_daemon_without_end_gives_no_new_time(guard: AlarmGuard) -> None:
    def call_for_ever() -> None:
        while True:
            guard.outside(len, "")

    with pytest.raises(PluginMisbehaved):
        guard.run(LIMIT_S, call_for_ever)


def test_a_plugin_within_the_daemon_within_a_plugin_has_its_own_limit(guard: AlarmGuard) -> None:
    def inner() -> str:
        with pytest.raises(PluginMisbehaved, match=r"0\.05"):
            guard.run(LIMIT_S, spin)
        return "the outer one goes on"

    assert guard.run(LONG_S, guard.outside, inner) == "the outer one goes on"


def test_the_inner_plugins_time_is_not_the_outer_ones(guard: AlarmGuard) -> None:
    def inner() -> str:
        guard.run(LONG_S, busy, 1.3 * AMPLE_S)
        return "done"

    assert guard.run(AMPLE_S, guard.outside, inner) == "done"


def test_an_exception_leaves_the_daemons_code_as_it_was(guard: AlarmGuard) -> None:
    def call() -> str:
        with pytest.raises(ValueError):
            guard.outside(int, "x")
        return "went on"

    assert guard.run(LONG_S, call) == "went on"


def test_another_thread_may_call_the_daemon_without_touching_the_alarm(guard: AlarmGuard) -> None:
    done: list[int] = []

    def call_from_elsewhere() -> None:
        thread = threading.Thread(target=lambda: done.append(guard.outside(len, "abc")))
        thread.start()
        thread.join()
        spin()

    with pytest.raises(PluginMisbehaved):
        guard.run(LIMIT_S, call_from_elsewhere)
    assert done == [3]


# Alarms at critical moments.


def test_alarm_at_the_end_of_a_run_interrupts_the_plugin_or_nothing(guard: AlarmGuard) -> None:
    """Many short runs with limits near their duration: each ends well or is interrupted, and leaves nothing behind."""
    draws = random.Random(7)
    outcomes = {"done": 0, "interrupted": 0}
    for _ in range(4000):
        work_s = draws.uniform(0.00005, 0.0003)
        try:
            guard.run(work_s * draws.uniform(0.8, 1.2), busy, work_s)
        except PluginMisbehaved:
            outcomes["interrupted"] += 1
        else:
            outcomes["done"] += 1
        assert guard._limits == []
    assert min(outcomes.values()) > 0, outcomes


def test_an_alarm_that_comes_while_another_is_put_off_is_put_off_too(
    guard: AlarmGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow machine the next one comes before the guard is done with the first."""
    log_unavailable: list[float] = []

    def set_and_ring_once(which: int, seconds: float, interval: float = 0.0) -> None:
        log_unavailable.append(seconds)
        if len(log_unavailable) == 1:
            guard._on_alarm(signal.SIGALRM, sys._getframe(1))

    def ring_at_the_guards_own_work() -> None:
        with monkeypatch.context() as patched:
            patched.setattr("signal.setitimer", set_and_ring_once)
            guard._on_alarm(signal.SIGALRM, sys._getframe(2))

    assert guard.run(LONG_S, ring_at_the_guards_own_work) is None
    assert log_unavailable == [RETRY_S, RETRY_S]


def test_an_alarm_at_the_edge_of_the_daemons_code_does_not_hit_it(guard: AlarmGuard) -> None:
    draws = random.Random(8)
    whole = [0, 0]

    def own() -> None:
        whole[0] += 1
        busy(0.00005)
        whole[1] += 1

    def back_and_forth() -> None:
        for _ in range(5):
            busy(0.00002)
            guard.outside(own)

    for _ in range(2000):
        try:
            guard.run(draws.uniform(0.00002, 0.0002), back_and_forth)
        except PluginMisbehaved:
            continue
    assert whole[0] == whole[1] > 1000
    assert guard._limits == []


def test_foreign_alarm_is_ignored(guard: AlarmGuard) -> None:
    signal.raise_signal(signal.SIGALRM)
    assert guard.run(LONG_S, lambda: guard.outside(signal.raise_signal, signal.SIGALRM)) is None


# Coroutines.


async def awaiting(guard: AlarmGuard, work: Awaitable[Any], limit_s: float = LIMIT_S, **more: Any) -> Any:
    return await guarded(guard, limit_s, work, **more)


async def test_a_coroutine_may_take_longer_than_any_of_its_steps(guard: AlarmGuard) -> None:
    async def work() -> str:
        for _ in range(4):
            busy(AMPLE_S / 3)
            await asyncio.sleep(0)
        return "done"

    assert await awaiting(guard, work(), AMPLE_S) == "done"


async def test_a_step_that_holds_up_the_loop_is_interrupted(guard: AlarmGuard) -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        spin()

    with pytest.raises(PluginMisbehaved):
        await awaiting(guard, work())


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_step_that_swallows_its_interruption_is_the_last(guard: AlarmGuard, goes_on: bool) -> None:
    async def work() -> None:
        swallow_and_return()
        if goes_on:
            await asyncio.Event().wait()

    with pytest.raises(PluginMisbehaved):
        await awaiting(guard, work())


async def test_await_that_does_not_suspend_does_not_renew_the_limit(guard: AlarmGuard) -> None:
    class AtOnce:
        def __await__(self) -> Generator[Any, Any, None]:
            yield from ()

    async def work() -> None:
        while True:
            await outside(guard, AtOnce())

    with pytest.raises(PluginMisbehaved):
        await awaiting(guard, work())


async def test_the_daemons_work_that_a_plugin_awaits_is_not_interrupted(guard: AlarmGuard) -> None:
    async def own() -> str:
        busy(1.3 * AMPLE_S)
        await asyncio.sleep(0)
        return "done"

    async def work() -> str:
        return await outside(guard, own())

    assert await awaiting(guard, work(), AMPLE_S) == "done"


async def test_other_tasks_run_between_the_steps_without_an_alarm(guard: AlarmGuard) -> None:
    seen: list[tuple[float, float]] = []

    async def watch() -> None:
        seen.append(signal.getitimer(signal.ITIMER_REAL))

    async def work() -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await awaiting(guard, work(), LONG_S)
    await watching
    assert seen == [(0.0, 0.0)]


class Answer:
    """An awaitable with a plain iterator, without `send` and `throw`."""

    def __await__(self) -> Any:
        return iter([None, None])


class Given:
    def __await__(self) -> Generator[Any, Any, str]:
        yield from asyncio.sleep(0).__await__()
        return "given"


async def test_every_awaitable_can_be_guarded(guard: AlarmGuard) -> None:
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, "brought")
    assert await awaiting(guard, future, LONG_S) == "brought"
    assert await awaiting(guard, asyncio.create_task(asyncio.sleep(0, "slept")), LONG_S) == "slept"
    assert await awaiting(guard, Given(), LONG_S) == "given"
    assert await awaiting(guard, Answer(), LONG_S) is None


@pytest.mark.parametrize("nonsense", [None, 7, "text"])
async def test_non_awaitable_raises_its_own_error(guard: AlarmGuard, nonsense: Any) -> None:
    with pytest.raises((TypeError, AttributeError)):
        await awaiting(guard, nonsense)


async def test_plugin_may_start_tasks(guard: AlarmGuard) -> None:
    async def square(number: int) -> int:
        await asyncio.sleep(0)
        return number * number

    async def work() -> list[int]:
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(square(3))
        async with anyio.create_task_group() as group:
            group.start_soon(square, 1)
        return [first.result(), *await asyncio.gather(square(4), square(5))]

    guard.watch(asyncio.get_running_loop())
    assert await awaiting(guard, work(), LONG_S) == [9, 16, 25]


async def spin_later() -> None:
    await asyncio.sleep(0)
    spin()


async def leave_later() -> None:
    await asyncio.sleep(0)
    sys.exit(1)


@pytest.mark.parametrize("child", [spin_later, leave_later])
async def test_a_task_that_a_plugin_starts_is_guarded_too(guard: AlarmGuard, child: Callable[[], Any]) -> None:
    async def with_a_group() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(child())

    async def with_anyio() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child)

    async def gathered() -> None:
        await asyncio.gather(child())

    guard.watch(asyncio.get_running_loop())
    for work in (with_a_group, with_anyio, gathered):
        with pytest.raises((PluginMisbehaved, ExceptionGroup)):
            await awaiting(guard, work())


async def test_a_task_that_the_daemon_starts_for_a_plugin_is_not_guarded(guard: AlarmGuard) -> None:
    async def own() -> str:
        busy(1.3 * AMPLE_S)
        return "done"

    async def start() -> str:
        return await asyncio.create_task(own())

    async def work() -> str:
        return await outside(guard, start())

    guard.watch(asyncio.get_running_loop())
    assert await awaiting(guard, work(), AMPLE_S) == "done"
    assert await asyncio.create_task(own()) == "done"


async def test_plugin_cancel_scopes_and_timeouts_fire_under_guard(guard: AlarmGuard) -> None:
    async def work() -> str:
        with anyio.move_on_after(0.001) as scope:
            await anyio.sleep_forever()
        assert scope.cancelled_caught
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await anyio.sleep_forever()
        with pytest.raises(TimeoutError), anyio.fail_after(0.001):
            await anyio.sleep_forever()
        return "went on"

    assert await awaiting(guard, work(), LONG_S) == "went on"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_plugin_timeouts_work_any_number_of_times(guard: AlarmGuard) -> None:
    async def work() -> int:
        done = 0
        for _ in range(2 * CANCELLATIONS_MAX):
            with anyio.move_on_after(0):
                await anyio.sleep_forever()
            await asyncio.sleep(0)
            done += 1
        return done

    assert await awaiting(guard, work(), LONG_S) == 2 * CANCELLATIONS_MAX


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
async def test_nothing_that_a_coroutine_raises_ends_more_than_its_turn(guard: AlarmGuard, error: BaseException) -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise error

    with pytest.raises(PluginMisbehaved, match=type(error).__name__):
        await awaiting(guard, work(), LONG_S)


async def test_a_stop_iteration_is_a_failure_and_no_result(guard: AlarmGuard) -> None:
    async def work() -> None:
        raise StopIteration("result")

    with pytest.raises(RuntimeError):
        await awaiting(guard, work(), LONG_S)
    with pytest.raises(StopIteration):
        guard.run(LONG_S, next, iter(()))


# Being cancelled.


async def test_a_cancellation_reaches_the_work_and_comes_back(guard: AlarmGuard) -> None:
    tidied: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            tidied.append("whole")

    task = asyncio.create_task(awaiting(guard, work(), LONG_S))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tidied == ["whole"]


async def test_work_that_awaits_something_cancelled_raises_that(guard: AlarmGuard) -> None:
    async def work() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.cancel)
        await future

    with pytest.raises(asyncio.CancelledError):
        await awaiting(guard, work(), LONG_S)


STUBBORN_MAX = 100_000


class Stubborn:
    """Continues to await after every exception until it is closed."""

    def __init__(self, swallowed: type[BaseException] = asyncio.CancelledError) -> None:
        self.swallowed = swallowed
        self.cancelled = 0
        self.closed = False

    async def __call__(self) -> None:
        try:
            # Not for ever: where there is no loop any more, nothing waits, and what is thrown away would never end.
            while self.cancelled < STUBBORN_MAX:
                try:
                    await asyncio.Event().wait()
                except self.swallowed as error:
                    self.cancelled += 1
                    if isinstance(error, GeneratorExit):
                        # Once is enough; where it is thrown away again, that would be some other test's concern.
                        self.swallowed = asyncio.CancelledError
        finally:
            self.closed = True


async def test_abandoned_work_that_ignores_its_cancellation_is_not_stepped_again(guard: AlarmGuard) -> None:
    stubborn, abandoned = Stubborn(), False
    task = asyncio.create_task(awaiting(guard, stubborn(), LONG_S, abandoned=lambda: abandoned))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (stubborn.cancelled, stubborn.closed) == (3, False)
    abandoned = True
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stubborn.closed


async def test_work_in_a_cancelled_scope_does_not_keep_the_loop_busy_for_ever(guard: AlarmGuard) -> None:
    """A scope of anyio's cancels again at every step, for as long as there are any."""
    stubborn = Stubborn()
    with anyio.move_on_after(0.001) as scope:
        await awaiting(guard, stubborn(), LONG_S)
    assert scope.cancelled_caught
    assert stubborn.cancelled == CANCELLATIONS_MAX


async def test_work_that_ignores_its_close_is_abandoned(guard: AlarmGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    with anyio.move_on_after(0.001) as scope:
        await awaiting(guard, Stubborn(BaseException)(), LONG_S)
    assert scope.cancelled_caught
    gc.collect()
    assert all(isinstance(error.exc_value, RuntimeError) for error in errors)


async def test_work_that_was_cancelled_does_not_wait_for_the_garbage_collector(guard: AlarmGuard) -> None:
    stubborn = Stubborn()
    alive = weakref.ref(stubborn)
    gc.disable()
    try:
        with anyio.move_on_after(0.001):
            await awaiting(guard, stubborn(), LONG_S)
        del stubborn
        assert alive() is None
    finally:
        gc.enable()


async def test_interrupted_work_runs_its_finally_blocks(guard: AlarmGuard) -> None:
    released: list[str] = []

    async def work() -> None:
        try:
            spin()
        finally:
            released.append("it")

    with pytest.raises(PluginMisbehaved):
        await awaiting(guard, work())
    assert released == ["it"]


def test_closed_work_runs_its_finally_blocks(guard: AlarmGuard) -> None:
    released: list[str] = []

    async def work() -> None:
        try:
            await Given()
            await asyncio.Event().wait()
        finally:
            released.append("it")

    steps = awaiting(guard, work())
    steps.send(None)
    steps.close()
    assert released == ["it"]


# The log.


class Slow:
    """A log that takes its time."""

    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.bound: dict[str, Any] = {}

    def hears(self, level: str, /) -> bool:
        return level != "debug"

    def debug(self, event: str, **fields: Any) -> None:
        busy(1.3 * AMPLE_S)
        self.said.append((event, self.bound | fields))

    info = warning = error = debug

    def bind(self, **fields: Any) -> Log:
        self.bound = self.bound | fields
        return self


def test_writing_to_the_log_is_not_interrupted(guard: AlarmGuard) -> None:
    slow = Slow()
    log = OutsideLog(guard, slow).bind(plugin="x")

    def say() -> bool:
        for write in (log.debug, log.info, log.warning, log.error):
            write("something", number=1)
        return log.hears("info")

    assert guard.run(AMPLE_S, say)
    assert slow.said == [("something", {"plugin": "x", "number": 1})] * 4


def test_without_a_guard_everything_is_called_as_it_is() -> None:
    unguarded = Unguarded()
    assert unguarded.run(0.0, len, "abc") == unguarded.outside(len, "abc") == 3
    with pytest.raises(ValueError):
        unguarded.run(0.0, int, "x")


def test_an_interruption_is_no_exception() -> None:
    assert not issubclass(PluginBlocked, Exception)
