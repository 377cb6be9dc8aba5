"""An event loop in a thread of its own, for scripts that have none.

Law: whoever waits here may be interrupted anywhere, by a signal whose handler raises or asks for something itself. So
nothing that both threads need is locked by Python code: the script waits at a queue that is written in C, and the loop
is told by a callback. What is interrupted is cancelled; only what is held is left as ever, so that it can say goodbye.
What fails on the loop, whatever it is, fails in who has asked for it, and the loop goes on. Nobody waits for what does
not come any more: neither when the loop ends in that moment, nor when what is held has come to an end by itself.
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

from forged.errors import ForgedError, RequestRefused

P = ParamSpec("P")
R = TypeVar("R")

SIGNALS_NOTICED_S = 0.5
"""How long a signal may go unnoticed that has reached another thread than the one that waits, and how long the loop may
not notice what it was told by who was interrupted by one."""
ENDS = (SystemExit, KeyboardInterrupt)
"""What asyncio lets out of the loop itself."""


class LoopThread:
    """A loop, and its thread; a context manager. Several threads may use it.

    `over` is raised, as a copy, to who asks for something when it has ended.
    """

    _loop: asyncio.AbstractEventLoop
    _life: asyncio.Task[None]
    _tasks: TaskGroup

    def __init__(self, name: str, over: ForgedError) -> None:
        self._over = over
        self._failure: BaseException | None = None
        """What has ended it, if it was not ended by who has begun it."""
        self._asked: set[_Asked[Any]] = set()
        """What is done on the loop."""
        self._is_left = False
        """Whether the block has ended, which is known here also if the loop could not be told."""
        self._has_to_end = asyncio.Event()
        self._has_ended = False
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._process = os.getpid()
        # Where the end of the script is cut short, neither it nor those that anyio starts there keep the process.
        self._thread = threading.Thread(target=self._turn, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        # Comes first on the loop, so that all others find its group open.
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
        """End it. What is still asked for is cancelled, and what is held is left."""
        self._is_left = True
        self._has_reached(self._finish)
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
        """Have something awaited on the loop, and wait for it."""
        asked: _Asked[R] = _Asked()
        return self._ask(asked, self._begin, asked, partial(call, *args, **kwargs))

    def call(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Have something called on the loop, and wait for it; in the thread of the loop, call it."""
        if self.is_own_thread:
            return call(*args, **kwargs)

        async def called() -> R:
            return call(*args, **kwargs)

        return self.run(called)

    def tell(self, call: Callable[..., object], *arguments: Any) -> None:
        """Have something called on the loop soon, and do not wait for it."""
        if not self._has_reached(call, *arguments):
            raise copy(self._over)

    @contextmanager
    def holding(self, manager: AbstractAsyncContextManager[R]) -> Iterator[R]:
        """Enter something on the loop, and leave it behind the block, in one and the same task.

        If it comes to an end before, the loop ends with it, and whoever asks for something is told why.
        """
        held = _Held()
        value: R = self._ask(held, self._begin, held, partial(self._hold, held, manager))
        try:
            yield value
        finally:
            self._ask(held, held.give_up)

    # In the script's threads.

    def _ask(self, asked: _Asked[R], tell: Callable[..., object], *arguments: Any) -> R:
        """Tell the loop what to do, and wait for the answer."""
        if self.is_own_thread:
            raise RequestRefused(
                "loop_waits_for_itself", "the loop's own thread would wait for the loop", "ask in another thread"
            )
        try:
            self._has_reached(tell, *arguments)
            value, error = self._answer_to(asked)
        except BaseException:
            # Whoever is interrupted does not come back for it.
            self._has_reached(asked.give_up)
            raise
        try:
            if error is None:
                return value
            raise error
        finally:
            # It would hold itself, by the frames in its trace.
            del error

    def _answer_to(self, asked: _Asked[R]) -> _Answer[R]:
        while True:
            # What has come to the loop when it was about to end is neither done nor refused.
            is_over = self._is_over
            try:
                # A signal may have reached another thread; Python attends to it when this one wakes up.
                return asked.answers.get(timeout=0 if is_over else SIGNALS_NOTICED_S)
            except queue.Empty:
                if is_over:
                    raise self._reason() from None

    def _has_reached(self, call: Callable[..., object], *arguments: Any) -> bool:
        """Have something called on the loop; false when there is none any more."""
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            return False
        return True

    @property
    def _is_over(self) -> bool:
        """Whether nothing more comes from the loop. A forked child has none."""
        return self._has_ended or os.getpid() != self._process

    def _reason(self) -> BaseException:
        """Why nothing is to be had here any more."""
        # Many may meet it, whose frames it would keep.
        return copy(self._over) if self._failure is None else self._failure.with_traceback(None)

    # In the thread of the loop.

    def _turn(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop):
                while not self._life.done():
                    # Whoever waits for the task that it comes from is told.
                    with contextlib.suppress(*ENDS):
                        self._loop.run_until_complete(self._life)
        finally:
            self._has_ended = True
            self._end.put(None)

    async def _live(self) -> None:
        async with anyio.create_task_group() as self._tasks:
            while not self._has_to_end.is_set():
                # Whoever was interrupted when about to tell the loop something may not have come to wake it up.
                with anyio.move_on_after(SIGNALS_NOTICED_S):
                    await self._has_to_end.wait()
                if self._is_left:
                    self._finish()

    def _finish(self, failure: BaseException | None = None) -> None:
        if not self._has_to_end.is_set():
            self._has_to_end.set()
            self._failure = failure
            for asked in self._asked:
                asked.give_up()

    def _begin(self, asked: _Asked[Any], call: Callable[[], Awaitable[object]]) -> None:
        if self._has_to_end.is_set():
            asked.answers.put(_Answer(None, self._reason()))
        else:
            self._asked.add(asked)
            self._tasks.start_soon(self._do, asked, call)

    async def _do(self, asked: _Asked[Any], call: Callable[[], Awaitable[object]]) -> None:
        with anyio.CancelScope() as asked.scope:
            try:
                if asked.is_unwanted:
                    raise asyncio.CancelledError
                asked.answers.put(_Answer(await call(), None))
            except BaseException as error:  # noqa: BLE001 - raised in who has asked
                is_cut_off = self._has_to_end.is_set() and isinstance(error, asyncio.CancelledError)
                asked.answers.put(_Answer(None, self._reason() if is_cut_off else _ungrouped(error)))
            finally:
                self._asked.discard(asked)

    async def _hold(self, held: _Held, manager: AbstractAsyncContextManager[object]) -> None:
        failure: BaseException | None = None
        try:
            async with manager as value:
                held.is_entered = True
                held.answers.put(_Answer(value, None))
                await held.has_to_end.wait()
        except BaseException as error:
            failure = _ungrouped(error)
            raise
        finally:
            if held.has_ended_by_itself:
                self._finish(failure)


class _Answer(NamedTuple, Generic[R]):
    """What has come of something."""

    value: R
    error: BaseException | None


class _Asked(Generic[R]):
    """Something that somebody waits for."""

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[_Answer[R]] = queue.SimpleQueue()
        self.scope: anyio.CancelScope | None = None
        self.is_unwanted = False

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        self.is_unwanted = True
        if self.scope is not None:
            self.scope.cancel()


class _Held(_Asked[Any]):
    """Something that is entered, and then left. It is answered twice: when the one is done, and when the other is."""

    def __init__(self) -> None:
        super().__init__()
        self.is_entered = False
        self.has_to_end = asyncio.Event()

    def give_up(self) -> None:
        """Leave it; if it has not been entered yet, do not."""
        if self.is_entered:
            self.has_to_end.set()
        else:
            super().give_up()

    @property
    def has_ended_by_itself(self) -> bool:
        return self.is_entered and not (self.is_unwanted or self.has_to_end.is_set())


def _ungrouped(error: BaseException) -> BaseException:
    """What is to end the script, though it comes in a group, as from a task; else the error as it is."""
    ends: BaseException | None = error.subgroup(ENDS) if isinstance(error, BaseExceptionGroup) else None
    while isinstance(ends, BaseExceptionGroup):
        ends = ends.exceptions[0]
    return error if ends is None else ends
