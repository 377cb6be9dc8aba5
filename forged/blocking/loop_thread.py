"""An event loop in a thread of its own, for scripts without one.

Invariants:
- A signal may interrupt a waiting thread anywhere, and its handler may raise or call the loop itself. So no lock of
  Python code is shared between the threads: the script waits at a queue implemented in C, and the loop gets callbacks.
- An interrupted call is cancelled. A context manager in `holding` is always exited, so that it can clean up.
- Every exception on the loop is raised in the thread that made the call; the loop continues.
- No call waits forever: not if the loop ends meanwhile, and not if a context manager in `holding` ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from copy import copy
from functools import partial
from types import TracebackType
from typing import Any, Generic, NamedTuple, ParamSpec, Self, TypeVar

import anyio
from anyio.abc import TaskGroup

from forged.blocking.async_library import declare_asyncio
from forged.errors import ForgedError, RequestRefused

P = ParamSpec("P")
R = TypeVar("R")

SIGNALS_NOTICED_S = 0.5
"""The longest time until a waiting thread notices a signal that reached another thread, and until the loop notices a
callback whose wake-up was interrupted by a signal."""
EXITS = (SystemExit, KeyboardInterrupt)
"""The exceptions that asyncio raises out of the loop itself."""


class LoopThread:
    """A loop and its thread; a context manager. Several threads may use it.

    A copy of `closed_error` is raised by calls after its end.
    """

    _loop: asyncio.AbstractEventLoop
    _life: asyncio.Task[None]
    _tasks: TaskGroup

    def __init__(self, name: str, closed_error: ForgedError) -> None:
        self._closed_error = closed_error
        self._failure: BaseException | None = None
        """The error that ended the loop; None if it was ended by `__exit__`."""
        self._calls: set[_Call[Any]] = set()
        """The calls that the loop has begun and not finished."""
        self._is_left = False
        """Whether the block has ended; set even if the loop could not be called."""
        self._has_to_end = asyncio.Event()
        self._has_ended = False
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._process = os.getpid()
        # A daemon thread does not keep the process alive if the end of the script is cut short.
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        # The first task of the loop, so that its task group is open for all calls.
        self._life = self._loop.create_task(self._live())
        try:
            self._thread.start()
        except BaseException:
            self._is_left = True
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the loop: cancel pending calls and exit the context managers in `holding`."""
        self._is_left = True
        self._schedule(self._finish)
        if not self.is_own_thread:
            while not self._is_over:
                with contextlib.suppress(queue.Empty):
                    self._end.get(timeout=SIGNALS_NOTICED_S)
            self._thread.join()

    @property
    def is_own_thread(self) -> bool:
        """Whether this is the thread of the loop."""
        return threading.get_ident() == self._thread.ident and not self._has_ended

    def run(self, call: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """Await a call on the loop and return its result."""
        pending: _Call[R] = _Call()
        return self._wait_for(pending, self._begin, pending, partial(call, *args, **kwargs))

    def call(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function on the loop and return its result; in the loop's own thread, call it directly."""
        if self.is_own_thread:
            return call(*args, **kwargs)

        async def called() -> R:
            return call(*args, **kwargs)

        return self.run(called)

    def tell(self, call: Callable[..., object], *arguments: Any) -> None:
        """Schedule a call on the loop without waiting for it."""
        if not self._schedule(call, *arguments):
            raise copy(self._closed_error)

    @contextmanager
    def holding(self, manager: AbstractAsyncContextManager[R]) -> Iterator[R]:
        """Enter a context manager on the loop, and exit it after the block, both in one task.

        If it ends before the block, the loop ends too, and calls raise its error.
        """
        held = _Held()
        value: R = self._wait_for(held, self._begin, held, partial(self._hold, held, manager))
        try:
            yield value
        finally:
            self._wait_for(held, held.give_up)

    # In the calling threads.

    def _wait_for(self, call: _Call[R], start: Callable[..., object], *arguments: Any) -> R:
        """Call `start` on the loop, and wait for the result of the call."""
        if self.is_own_thread:
            raise RequestRefused(
                "loop_waits_for_itself", "the loop's own thread cannot wait for the loop", "call it from another thread"
            )
        try:
            self._schedule(start, *arguments)
            value, error = self._result_of(call)
        except BaseException:
            # An interrupted thread does not wait for the result any more.
            self._schedule(call.give_up)
            raise
        try:
            if error is None:
                return value
            raise error
        finally:
            # The frames of its traceback would refer to it.
            del error

    def _result_of(self, call: _Call[R]) -> _Result[R]:
        while True:
            # Checked before waiting: a call scheduled while the loop ends gets no result.
            is_over = self._is_over
            try:
                # A signal may have reached another thread; Python runs its handler when this one wakes up.
                return call.results.get(timeout=0 if is_over else SIGNALS_NOTICED_S)
            except queue.Empty:
                if is_over:
                    raise self._reason() from None

    def _schedule(self, function: Callable[..., object], *arguments: Any) -> bool:
        """Schedule a call on the loop; false if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            return False
        return True

    @property
    def _is_over(self) -> bool:
        """Whether the loop has ended; true in a forked child."""
        return self._has_ended or os.getpid() != self._process

    def _reason(self) -> BaseException:
        """The error for calls after the end."""
        # Without the traceback, which would refer to the frames of all callers.
        return copy(self._closed_error) if self._failure is None else self._failure.with_traceback(None)

    # In the loop's thread.

    def _run_loop(self) -> None:
        declare_asyncio()
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop):
                while not self._life.done():
                    # Raised by a task whose call gets the exception as its result.
                    with contextlib.suppress(*EXITS):
                        self._loop.run_until_complete(self._life)
        finally:
            self._has_ended = True
            self._end.put(None)

    async def _live(self) -> None:
        async with anyio.create_task_group() as self._tasks:
            while not self._has_to_end.is_set():
                # A thread that was interrupted while it scheduled a call may not have woken the loop.
                with anyio.move_on_after(SIGNALS_NOTICED_S):
                    await self._has_to_end.wait()
                if self._is_left:
                    self._finish()

    def _finish(self, failure: BaseException | None = None) -> None:
        if not self._has_to_end.is_set():
            self._has_to_end.set()
            self._failure = failure
            for call in self._calls:
                call.give_up()

    def _begin(self, call: _Call[Any], function: Callable[[], Awaitable[object]]) -> None:
        if self._has_to_end.is_set():
            call.results.put(_Result(None, self._reason()))
        else:
            self._calls.add(call)
            self._tasks.start_soon(self._do, call, function)

    async def _do(self, call: _Call[Any], function: Callable[[], Awaitable[object]]) -> None:
        with anyio.CancelScope() as call.scope:
            try:
                if call.is_abandoned:
                    raise asyncio.CancelledError
                call.results.put(_Result(await function(), None))
            except BaseException as error:  # noqa: BLE001 - raised in the calling thread
                is_cut_off = self._has_to_end.is_set() and isinstance(error, asyncio.CancelledError)
                call.results.put(_Result(None, self._reason() if is_cut_off else _ungrouped(error)))
            finally:
                self._calls.discard(call)

    async def _hold(self, held: _Held, manager: AbstractAsyncContextManager[object]) -> None:
        failure: BaseException | None = None
        try:
            async with manager as value:
                held.is_entered = True
                held.results.put(_Result(value, None))
                await held.has_to_end.wait()
        except BaseException as error:
            failure = _ungrouped(error)
            raise
        finally:
            if held.has_ended_by_itself:
                self._finish(failure)


class _Result(NamedTuple, Generic[R]):
    """The result or the error of a call."""

    value: R
    error: BaseException | None


class _Call(Generic[R]):
    """A call whose result a thread waits for."""

    def __init__(self) -> None:
        self.results: queue.SimpleQueue[_Result[R]] = queue.SimpleQueue()
        self.scope: anyio.CancelScope | None = None
        self.is_abandoned = False

    def give_up(self) -> None:
        """Cancel the call: its thread no longer waits."""
        self.is_abandoned = True
        if self.scope is not None:
            self.scope.cancel()


class _Held(_Call[Any]):
    """A context manager in `holding`. It has two results: one when it is entered, one when it is exited."""

    def __init__(self) -> None:
        super().__init__()
        self.is_entered = False
        self.has_to_end = asyncio.Event()

    def give_up(self) -> None:
        """Exit it; if it is not entered yet, cancel that."""
        if self.is_entered:
            self.has_to_end.set()
        else:
            super().give_up()

    @property
    def has_ended_by_itself(self) -> bool:
        return self.is_entered and not (self.is_abandoned or self.has_to_end.is_set())


def _ungrouped(error: BaseException) -> BaseException:
    """The exit exception inside a group, as raised by a task; any other error unchanged."""
    exits: BaseException | None = error.subgroup(EXITS) if isinstance(error, BaseExceptionGroup) else None
    while isinstance(exits, BaseExceptionGroup):
        exits = exits.exceptions[0]
    return error if exits is None else exits
