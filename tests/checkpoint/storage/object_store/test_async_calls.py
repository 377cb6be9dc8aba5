"""Asynchronous calls that threads wait for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.storage.object_store.async_calls import AsyncCalls, wait_for, wait_or_cancel

WAITS_S = 30.0


@pytest.fixture
def calls() -> Iterator[AsyncCalls]:
    made = AsyncCalls()
    yield made
    made.end()


class Endless:
    """A call that never comes back, and tells what becomes of it."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.given_up = threading.Event()

    async def __call__(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up.set()


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


def test_call_returns_the_result_of_the_coroutine(calls: AsyncCalls) -> None:
    assert wait_or_cancel(calls.start(answer)) == 42
    assert wait_or_cancel(calls.start(answer), CancelToken()) == 42


def test_call_raises_the_exception_of_the_coroutine(calls: AsyncCalls) -> None:
    async def fail() -> None:
        raise TimeoutError("mine")

    for token in (None, CancelToken()):
        with pytest.raises(TimeoutError, match="mine"):
            wait_or_cancel(calls.start(fail), token)


def test_all_calls_run_on_one_loop_and_at_the_same_time(calls: AsyncCalls) -> None:
    async def loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    endless = Endless()
    waiting = calls.start(endless)
    assert wait_or_cancel(calls.start(loop)) is wait_or_cancel(calls.start(loop))
    waiting.cancel()
    assert endless.given_up.wait(WAITS_S)


def test_call_is_cancelled_with_its_token(calls: AsyncCalls) -> None:
    endless, token = Endless(), CancelToken()
    future = calls.start(endless)

    def cancel() -> None:
        endless.began.wait(WAITS_S)
        token.cancel()

    threading.Thread(target=cancel).start()
    with pytest.raises(CheckpointException) as caught:
        wait_or_cancel(future, token)
    assert caught.value.code == "checkpoint_cancelled"
    assert endless.given_up.wait(WAITS_S)


def test_call_is_cancelled_at_the_deadline(calls: AsyncCalls) -> None:
    endless = Endless()
    future = calls.start(endless)
    assert endless.began.wait(WAITS_S)
    with pytest.raises(CheckpointException) as caught:
        wait_or_cancel(future, CancelToken(1.0, iter([0.0, 0.5, 2.0]).__next__))
    assert caught.value.type is ExceptionType.TIMEOUT
    assert endless.given_up.wait(WAITS_S)


def test_a_call_that_is_only_watched_goes_on(calls: AsyncCalls) -> None:
    go = threading.Event()

    async def wait() -> int:
        await asyncio.to_thread(go.wait)
        return 42

    future, token = calls.start(wait), CancelToken()
    token.cancel()
    with pytest.raises(CheckpointException):
        wait_for(future, token)
    go.set()
    assert future.result(WAITS_S) == 42


def test_end_cancels_running_calls_and_ends_the_thread(calls: AsyncCalls) -> None:
    endless, before = Endless(), threading.active_count()
    calls.start(endless)
    assert endless.began.wait(WAITS_S)
    calls.end()
    assert endless.given_up.is_set()
    assert threading.active_count() == before


def test_the_end_waits_for_cleanups(calls: AsyncCalls) -> None:
    began, go = threading.Event(), threading.Event()

    async def clean_up() -> None:
        began.set()
        await asyncio.to_thread(go.wait)

    future = calls.start_cleanup(clean_up)
    assert began.wait(WAITS_S)
    timer = threading.Timer(0.1, go.set)
    timer.start()
    calls.end()
    assert go.is_set()
    assert future.done()
    assert not future.cancelled()


def test_after_the_end_calls_begin_anew(calls: AsyncCalls) -> None:
    calls.end()
    assert wait_or_cancel(calls.start(answer)) == 42
    calls.end()
    calls.end()
    assert wait_or_cancel(calls.start(answer)) == 42


FORKED = """
import os
from obstore.store import MemoryStore
from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.storage.object_store.objects import ObjectStorage
storage = ObjectStorage(MemoryStore(), "memory://test")
{before}
if os.fork() == 0:
    try:
        storage.publish("a", b"x")
        print(storage.read("a", 1))
    except CheckpointException as error:
        print(error.code)
    raise SystemExit
os.wait()
"""


@pytest.mark.parametrize(
    ("before", "said"), [("", "b'x'"), ("storage.publish('before', b'')", "checkpoint_storage_forked")]
)
def test_forked_child_is_refused(before: str, said: str) -> None:
    """Unless nothing was called before."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED.format(before=before)],
        capture_output=True,
        text=True,
        timeout=WAITS_S,
    )
    assert (ran.stdout.strip(), ran.stderr, ran.returncode) == (said, "", 0)


def test_a_process_ends_while_a_call_is_under_way() -> None:
    program = (
        "import asyncio; from forged.checkpoint.storage.object_store.async_calls import ASYNC_CALLS; "
        "ASYNC_CALLS.start(asyncio.Event().wait); print('end')"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=WAITS_S
    )
    assert (ran.stdout, ran.stderr, ran.returncode) == ("end\n", "", 0)
