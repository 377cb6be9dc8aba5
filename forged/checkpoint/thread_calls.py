"""Blocking calls in threads, with a deadline: from an event loop, or from a script without one.

A script's call that no other rank takes part in is driven without an event loop: it waits in the script's own thread
for one helper thread. That takes a fraction of the time that an event loop and its threads take to start. A load of a
few MiB that are in memory takes less time than a thread takes to start, so it runs in the thread of its caller.

Invariants:
- What runs in the caller's thread waits for nothing: it reads only what is in memory.
- A thread that does not return by its deadline is left alone.
- A driven call awaits nothing but the functions of this module.
- No thread outlives the call that started it, unless it was left alone.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import anyio
from anyio import lowlevel, to_thread

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.ports import CancelToken, WouldBlock
from forged.checkpoint.watched_token import WatchedToken

T = TypeVar("T")

RETURN_GRACE_S = 2.0
"""A blocking call that has not returned this long after the deadline is left alone."""
WAKE_INTERVAL_S = 0.2
"""The longest delay before an interrupt is handled."""


class StorageUnresponsive(CheckpointException):
    """A blocking call to the storage did not return, and may still take effect."""


async def run_in_thread(act: Callable[[], T], token: CancelToken) -> T:
    """Run a blocking call in a thread until the operation's deadline; with a `WatchedToken` until it does nothing.

    A cancelled caller cancels the token and waits for the thread. A thread that does not return is left alone.
    """
    if (helper := _driven.helper) is not None:
        return helper.run_for_operation(act, token)
    began, ended = threading.Event(), threading.Event()

    def run() -> T:
        began.set()
        try:
            token.check()
            return act()
        finally:
            ended.set()

    remaining_s = token.remaining_s()
    try:
        with anyio.move_on_after(None if remaining_s is None else remaining_s + RETURN_GRACE_S) as scope:
            if isinstance(token, WatchedToken):
                token.watch(scope)
            return await to_thread.run_sync(run, abandon_on_cancel=True)
        raise _unresponsive(token)
    except anyio.get_cancelled_exc_class():
        token.cancel()
        if began.is_set():
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(ended.wait, RETURN_GRACE_S)
        raise


async def run_read(act: Callable[[CancelToken], T], token: CancelToken) -> T:
    """Run a call that only reads, with a token to pass on: in this thread if it need not wait, else in another."""
    token.check()
    if _driven.helper is None:
        await lowlevel.checkpoint()
    try:
        return act(token.nonblocking())
    except WouldBlock:
        pass
    except CheckpointException as error:
        if not error.retryable:
            raise
    return await run_in_thread(partial(act, token), token)


async def wait_in_thread(act: Callable[[], T]) -> T:
    """Run a blocking call that only waits; a cancelled caller leaves its thread alone."""
    if (helper := _driven.helper) is not None:
        return helper.run_for_operation(act, CancelToken())
    return await to_thread.run_sync(act, abandon_on_cancel=True)


async def finish_in_thread(act: Callable[[], object], seconds: float) -> None:
    """Run a blocking call even if the caller is cancelled; leave it alone after so many seconds."""
    if (helper := _driven.helper) is not None:
        helper.run(act, seconds)
        return
    with anyio.move_on_after(seconds, shield=True):
        await to_thread.run_sync(act, abandon_on_cancel=True)


async def pause(seconds: float, token: CancelToken) -> None:
    """Sleep; raise if the operation is cancelled or its deadline has passed."""
    token.check()
    if _driven.helper is not None:
        token.wait(seconds)
    else:
        await anyio.sleep(seconds)


def drive(call: Callable[[], Awaitable[T]]) -> T:
    """Run an async call to its end without an event loop; also in a thread that runs one, which waits meanwhile."""
    helper = _HelperThread()
    before, _driven.helper = _driven.helper, helper
    coroutine = _coroutine(call)
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    except BaseException:
        if helper.interrupt is not None:
            raise helper.interrupt from None
        raise
    finally:
        _driven.helper = before
        coroutine.close()
        helper.close()
    raise RuntimeError("a driven call waits for an event loop")


async def _coroutine(call: Callable[[], Awaitable[T]]) -> T:
    return await call()


class _Driven(threading.local):
    helper: _HelperThread | None = None
    """The thread for the blocking calls of the call that this thread drives; None while it drives none."""


_driven = _Driven()


class _Late(Exception):
    """A task has not ended in time."""


class _Task:
    """A blocking call for the helper thread."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.has_begun = self.has_ended = self.has_failed = False
        self._act = act
        self._outcome: Any = None
        self._context = contextvars.copy_context()
        self._ended = threading.Lock()
        self._ended.acquire()

    def run(self) -> None:
        self.has_begun = True
        try:
            self._outcome = self._context.run(self._act)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self._outcome, self.has_failed = error, True
        self.has_ended = True
        self._ended.release()

    def wait(self, seconds: float | None) -> bool:
        """Whether the call has ended within the time. Wakes periodically, for signals that come just before a wait."""
        while seconds is None or seconds > WAKE_INTERVAL_S:
            if self._ended.acquire(timeout=WAKE_INTERVAL_S):
                return True
            seconds = None if seconds is None else seconds - WAKE_INTERVAL_S
        return self._ended.acquire(timeout=max(0.0, seconds))

    def result(self) -> Any:
        """What the call has returned; raises its error."""
        outcome, self._outcome = self._outcome, None
        if not self.has_failed:
            return outcome
        try:
            raise outcome
        finally:
            del outcome  # It refers to this frame.


class _HelperThread:
    """The thread for the blocking calls of one driven call; started when it is needed."""

    def __init__(self) -> None:
        self.interrupt: BaseException | None = None
        """What a signal handler has raised during a wait."""
        self._thread: threading.Thread | None = None
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._last: _Task | None = None

    def run_for_operation(self, act: Callable[[], T], token: CancelToken) -> T:
        """Run a call until the operation's deadline; an interrupt cancels the operation and waits for the thread."""

        def checked() -> T:
            token.check()
            return act()

        remaining_s = token.remaining_s()
        try:
            return self._result(checked, None if remaining_s is None else remaining_s + RETURN_GRACE_S)
        except _Late:
            raise _unresponsive(token) from None
        except BaseException as error:
            task = self._last
            if task is not None and not task.has_failed:
                self.interrupt = error
                token.cancel()
                if task.has_begun:
                    task.wait(RETURN_GRACE_S)
            raise

    def run(self, act: Callable[[], T], seconds: float | None = None) -> T | None:
        """Run a call; None if it does not end within the time."""
        try:
            return self._result(act, seconds)
        except _Late:
            return None

    def close(self) -> None:
        """End the thread, or leave it alone if its call does not return."""
        if self._thread is None:
            return
        self._tasks.put(None)
        if self._last is None or self._last.has_ended:
            self._thread.join()

    def _result(self, act: Callable[[], T], seconds: float | None) -> T:
        if self._last is not None and not self._last.has_ended:
            # Its call does not return.
            self._tasks.put(None)
            self._thread, self._tasks = None, SimpleQueue()
        task = self._last = _Task(act)
        self._tasks.put(task)
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._tasks,), name="checkpoint-call", daemon=True)
            self._thread.start()
        if not task.wait(seconds):
            raise _Late
        result: T = task.result()
        return result


def _work(tasks: SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()


def _unresponsive(token: CancelToken) -> StorageUnresponsive:
    return StorageUnresponsive(
        f"the storage did not respond within {token.timeout_s} s",
        type=ExceptionType.TIMEOUT,
        fix="check that the storage can be reached, or set a larger timeout",
    )
