"""Asynchronous calls from threads, on an event loop in a thread of its own.

Invariants:
- A waiting thread returns as soon as its token is cancelled or has timed out.
- The loop starts with the first call and ends with the process. A forked child cannot use it.
- The end of the process waits for cleanups, and cancels all other calls.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from forged.checkpoint.errors import storage_error
from forged.checkpoint.ports import CancelToken

T = TypeVar("T")

POLL_S = 0.05
"""How often a waiting thread checks its token."""
JOIN_S = 5.0
CLEANUPS_S = 5.0
"""How long the end of the process waits for cleanups."""


class AsyncCalls:
    """An event loop in a thread, for calls from other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._stop: asyncio.Event | None = None
        self._cleanups: set[Future[None]] = set()

    def start(self, call: Callable[[], Awaitable[T]]) -> Future[T]:
        """Start a call on the loop."""
        loop = self._running_loop()
        return asyncio.run_coroutine_threadsafe(_awaited(call), loop)

    def start_cleanup(self, call: Callable[[], Awaitable[None]]) -> Future[None]:
        """Start a call that the end of the process waits for."""
        future = self.start(call)
        self._cleanups.add(future)
        future.add_done_callback(self._cleanups.discard)
        return future

    def wait_for_cleanups(self, timeout_s: float) -> None:
        """Wait until all cleanups have ended, or for `timeout_s`."""
        wait(list(self._cleanups), timeout_s)

    def end(self) -> None:
        """Wait for cleanups, cancel all other calls, and end the thread."""
        with self._lock:
            loop, thread, stop = self._loop, self._thread, self._stop
            self._loop = None
        if loop is None or thread is None or stop is None or self._pid != os.getpid():
            return
        self.wait_for_cleanups(CLEANUPS_S)
        loop.call_soon_threadsafe(stop.set)
        thread.join(JOIN_S)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = self._started()
            if self._pid != os.getpid():
                raise storage_error(
                    "an object store cannot be used in a forked process whose parent has used one",
                    "",
                    "start the process with multiprocessing's `spawn` or `forkserver`",
                    code="checkpoint_storage_forked",
                )
            return self._loop

    def _started(self) -> asyncio.AbstractEventLoop:
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(started)), name="checkpoint-calls", daemon=True
        )
        self._thread.start()
        return started.result()

    async def _live(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        self._stop = asyncio.Event()
        started.set_result(asyncio.get_running_loop())
        await self._stop.wait()


def wait_for(future: Future[T], token: CancelToken | None = None) -> T:
    """Wait for a call until the token stops the wait; the call goes on."""
    while True:
        if token is not None:
            token.check()
        try:
            return future.result(None if token is None else POLL_S)
        except TimeoutError:
            if token is None or future.done():
                raise


def wait_or_cancel(future: Future[T], token: CancelToken | None = None) -> T:
    """Wait for a call; cancel it when the token stops the wait."""
    try:
        return wait_for(future, token)
    except BaseException:
        future.cancel()
        raise


async def _awaited(call: Callable[[], Awaitable[T]]) -> T:
    return await call()


ASYNC_CALLS = AsyncCalls()
"""The loop of this process."""
atexit.register(ASYNC_CALLS.end)
