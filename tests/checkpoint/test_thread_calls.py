"""Blocking calls in threads: from an event loop, and driven without one."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import anyio
import numpy as np
import pytest

import forged.checkpoint
from forged.checkpoint import blocking, thread_calls
from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.ports import CancelToken, WouldBlock
from forged.checkpoint.thread_calls import (
    StorageUnresponsive,
    drive,
    finish_in_thread,
    pause,
    run_in_thread,
    run_read,
    wait_in_thread,
)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short grace periods."""
    monkeypatch.setattr(thread_calls, "RETURN_GRACE_S", 0.1)


# With an event loop.


async def test_run_in_thread_returns_or_raises_the_outcome() -> None:
    assert await run_in_thread(lambda: 5, CancelToken(60)) == 5
    with pytest.raises(TimeoutError, match="its own"):
        await run_in_thread(lambda: (_ for _ in ()).throw(TimeoutError("its own")), CancelToken(60))


async def test_thread_that_checks_its_token_ends_with_its_error() -> None:
    token = CancelToken(0.05)
    with pytest.raises(CheckpointException, match="not finish within") as caught:
        await run_in_thread(lambda: token.wait(60), token)
    assert not isinstance(caught.value, StorageUnresponsive)


async def test_thread_that_does_not_return_is_left_and_reported() -> None:
    released = threading.Event()
    try:
        with pytest.raises(StorageUnresponsive) as caught:
            await asyncio.wait_for(run_in_thread(lambda: released.wait(60), CancelToken(0.05)), 20)
        assert caught.value.type is ExceptionType.TIMEOUT
    finally:
        released.set()


async def test_cancelled_caller_waits_for_its_thread() -> None:
    token, began, ended = CancelToken(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        try:
            token.wait(60)
        finally:
            ended.set()

    task = asyncio.create_task(run_in_thread(work, token))
    await anyio.to_thread.run_sync(began.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_nothing_is_begun_after_it_was_cancelled() -> None:
    token = CancelToken()
    token.cancel()
    with pytest.raises(CheckpointException, match="cancelled"):
        await run_in_thread(lambda: pytest.fail("it ran"), token)


async def test_read_that_need_not_wait_runs_in_the_thread_of_its_caller() -> None:
    def act(token: CancelToken) -> tuple[int, bool]:
        return threading.get_ident(), token.may_block

    assert await run_read(act, CancelToken(60)) == (threading.get_ident(), False)


async def test_read_that_would_wait_is_repeated_in_a_thread() -> None:
    assert await run_read(ident_of_waiting_call, CancelToken(60)) != threading.get_ident()


async def test_read_lets_the_event_loop_run() -> None:
    turns: list[str] = []

    async def call(name: str) -> None:
        for _ in range(2):
            await run_read(lambda token: turns.append(name), CancelToken(60))

    async with anyio.create_task_group() as group:
        group.start_soon(call, "a")
        group.start_soon(call, "b")
    assert turns[0] != turns[1]


def ident_of_waiting_call(token: CancelToken) -> int:
    """The thread of a call that has to wait."""
    if not token.may_block:
        raise WouldBlock
    return threading.get_ident()


# Driven without an event loop.


def driven(act: Callable[[], Any], token: CancelToken | None = None) -> Any:
    return drive(lambda: run_in_thread(act, token or CancelToken(60)))


def threads() -> int:
    """The helper threads that live."""
    return sum(thread.name == "checkpoint-call" for thread in threading.enumerate())


def test_driven_call_returns_or_raises_what_its_thread_does() -> None:
    assert driven(lambda: 5) == 5
    with pytest.raises(TimeoutError, match="its own"):
        driven(lambda: (_ for _ in ()).throw(TimeoutError("its own")))


def test_driven_calls_share_one_thread_that_ends_with_them() -> None:
    async def call() -> list[int]:
        token = CancelToken(60)
        return [await run_in_thread(threading.get_ident, token) for _ in range(3)]

    before = threads()
    [one] = set(drive(call))
    assert one != threading.get_ident()
    assert threads() == before


def test_driven_read_starts_a_thread_only_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drive(lambda: run_read(ident_of_waiting_call, CancelToken(60))) != threading.get_ident()
    monkeypatch.setattr(threading, "Thread", None)
    assert drive(lambda: run_read(lambda token: threading.get_ident(), CancelToken(60))) == threading.get_ident()


def test_read_that_fails_is_repeated_in_a_thread_if_that_may_help() -> None:
    tries: list[bool] = []

    def act(token: CancelToken) -> None:
        tries.append(token.may_block)
        raise CheckpointException("busy", retryable=len(tries) == 1)

    with pytest.raises(CheckpointException, match="busy"):
        drive(lambda: run_read(act, CancelToken(60)))
    assert tries == [False, True]
    with pytest.raises(CheckpointException, match="busy"):
        drive(lambda: run_read(act, CancelToken(60)))
    assert tries == [False, True, False]


def test_pause_of_a_call_that_may_not_wait_is_refused() -> None:
    with pytest.raises(WouldBlock):
        CancelToken(60).nonblocking().wait(0.001)


def test_read_is_not_begun_after_it_was_cancelled() -> None:
    token = CancelToken()
    token.cancel()
    with pytest.raises(CheckpointException, match="cancelled"):
        drive(lambda: run_read(lambda token: pytest.fail("it ran"), token))


def test_driven_call_without_blocking_calls_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Thread", None)

    async def call() -> int:
        return 5

    assert drive(call) == 5


def test_driven_call_sees_the_context_of_its_caller() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    assert driven(variable.get) == 7


def test_driven_thread_that_checks_its_token_ends_with_its_error() -> None:
    token = CancelToken(0.05)
    with pytest.raises(CheckpointException, match="not finish within") as caught:
        driven(lambda: token.wait(60), token)
    assert not isinstance(caught.value, StorageUnresponsive)


def test_driven_thread_that_does_not_return_is_left_and_the_next_call_has_another() -> None:
    released, before = threading.Event(), threads()

    async def call() -> int:
        with pytest.raises(StorageUnresponsive) as caught:
            await run_in_thread(lambda: released.wait(60), CancelToken(0.05))
        assert caught.value.type is ExceptionType.TIMEOUT
        await finish_in_thread(lambda: released.wait(60), 0.01)
        assert await run_in_thread(lambda: 5, CancelToken(60)) == 5
        await finish_in_thread(lambda: released.wait(60), 0.01)
        return 7

    try:
        assert drive(call) == 7
        assert threads() == before + 3
    finally:
        released.set()
    for thread in threading.enumerate():
        if thread.name == "checkpoint-call":
            thread.join(20)
    assert threads() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, TimeoutError])
def test_signal_handler_that_raises_cancels_the_driven_call_and_waits_for_its_thread(
    error: type[BaseException],
) -> None:
    token, ended = CancelToken(), threading.Event()

    def work() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        try:
            token.wait(60)
        finally:
            ended.set()

    async def call() -> None:
        try:
            await run_in_thread(work, token)
        except Exception as wrapped:
            raise CheckpointException("wrapped, as a step wraps errors") from wrapped

    def handle(number: int, frame: FrameType | None) -> None:
        raise error

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(error):
            drive(call)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended.is_set()


def test_nothing_is_begun_by_a_driven_call_after_it_was_cancelled() -> None:
    token = CancelToken()
    token.cancel()
    with pytest.raises(CheckpointException, match="cancelled"):
        driven(lambda: pytest.fail("it ran"), token)


def test_driven_waits_and_pauses_need_no_event_loop() -> None:
    async def call() -> int:
        await pause(0.001, CancelToken(60))
        with pytest.raises(CheckpointException, match="not finish within"):
            await pause(60, CancelToken(0.01))
        return await wait_in_thread(lambda: 5)

    assert drive(call) == 5


def test_driven_calls_nest() -> None:
    async def outer() -> tuple[int, int]:
        first = drive(lambda: run_in_thread(threading.get_ident, CancelToken(60)))
        return first, await run_in_thread(threading.get_ident, CancelToken(60))

    first, second = drive(outer)
    assert first != second or threads() == 0


async def test_driven_call_works_in_a_thread_with_an_event_loop() -> None:
    assert driven(lambda: 5) == 5


def test_driven_call_that_awaits_an_event_loop_is_a_bug() -> None:
    class Endless:
        def __await__(self) -> Any:
            yield

    async def call() -> None:
        await Endless()

    with pytest.raises(RuntimeError, match="waits for an event loop"):
        drive(call)


# What a call of a script costs.


def test_save_and_load_of_one_process_start_no_event_loop(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("an event loop was started")

    monkeypatch.setattr(asyncio, "new_event_loop", refuse)
    monkeypatch.setattr(asyncio.runners.Runner, "run", refuse)
    forged.checkpoint.save(tmp_path / "a", {"w": np.ones(3)})
    assert (forged.checkpoint.load(tmp_path / "a")["w"] == 1).all()
    with forged.checkpoint.Checkpoints(tmp_path, keep=1, in_background=True) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": np.full(3, step)})
    state = {"w": np.zeros(3, np.int64)}
    with forged.checkpoint.Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.resume(state) == 3
        checkpoints.save(4, state)


def test_result_of_a_call_is_not_formatted() -> None:
    """Asyncio formats its main task, with the result, when it restores the handler of SIGINT."""

    class Result:
        def __repr__(self) -> str:
            raise AssertionError("a state was formatted")

    async def call() -> Result:
        return Result()

    assert isinstance(blocking.run(call), Result)


def test_first_calls_do_not_import_masked_arrays(tmp_path: Any) -> None:
    script = (
        "import sys, numpy as np, forged.checkpoint as c\n"
        "state = {'a': np.ones(3), 'b': [np.zeros((400, 400)), np.ones(5)]}\n"
        "c.save(sys.argv[1], state); c.load(sys.argv[1]); c.load(sys.argv[1], state)\n"
        "assert 'numpy.ma' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "a")], check=True)
