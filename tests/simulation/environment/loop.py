"""An asyncio event loop on virtual time: instead of sleeping it jumps to the next timer.

Invariants:
- The same seed gives the same run in every process. The loop reads no clock, starts no thread, opens no socket.
- Objects that asyncio and anyio keep in sets (tasks, futures, cancel scopes) have a hash drawn from the seed instead of
  their address, so the order of cancellation depends on the seed only.
- Timers due at the same moment run in an order drawn from the seed; `call_soon` keeps its order.
- The garbage collector runs at fixed iterations, because finalisers of asynchronous generators schedule work.

A simulated process can be suspended, as by SIGSTOP: its callbacks are held and run in order when it is resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextvars import Context, ContextVar, copy_context
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar, TypeVarTuple, Unpack
from unittest.mock import patch

from anyio._backends import _asyncio as anyio_backend

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STANDSTILL_ITERATIONS_MAX = 100_000
"""Iterations without progress of time before the loop calls it a livelock."""
COLLECT_EVERY_ITERATIONS = 20_000
CANCELLED_TASKS_END_WITHIN_S = 3600.0
EPOCH_S = 1_750_000_000.0
"""The wall time at the start of a simulation."""

REAL_IO = (
    "add_",
    "connect_",
    "create_connection",
    "create_datagram_endpoint",
    "create_server",
    "create_unix_",
    "getaddrinfo",
    "getnameinfo",
    "run_in_executor",
    "sendfile",
    "sock_",
    "start_tls",
    "subprocess_",
)
"""The prefixes of the loop methods that do real I/O, which are refused."""


class SimulationError(Exception):
    """The simulated program uses real I/O, or cannot continue."""


class Deadlock(SimulationError):
    """Tasks wait, and no callback or timer is left."""


class Livelock(SimulationError):
    """Callbacks run endlessly without time passing."""


class Execution:
    """A simulated process: all tasks and callbacks that were started in `context`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.suspended = False
        self.context = copy_context()
        self.context.run(_execution.set, self)
        self._loop = loop
        self._held: list[asyncio.Handle] = []

    def suspend(self) -> None:
        """Hold all its callbacks."""
        self.suspended = True

    def resume(self) -> None:
        """Run the held callbacks and continue."""
        self.suspended = False
        held, self._held = self._held, []
        for handle in held:
            self._loop.call_soon(_run_held, handle, context=self.context.copy())

    def hold(self, handle: asyncio.Handle) -> None:
        """Keep a callback until `resume`."""
        self._held.append(handle)

    def enter(self) -> None:
        """Make the current task, and what it starts, part of this process."""
        _execution.set(self)


_execution: ContextVar[Execution | None] = ContextVar("execution", default=None)


def _run_held(handle: asyncio.Handle) -> None:
    if not handle.cancelled():
        handle._run()


def _holds(handle: asyncio.Handle, context: Context) -> bool:
    """Hold the callback if its process is suspended; returns whether it was held."""
    execution = context.get(_execution)
    if execution is None or not execution.suspended:
        return False
    execution.hold(handle)
    return True


class _Handle(asyncio.Handle):
    """A callback that is held while its process is suspended."""

    __slots__ = ()
    _context: Context

    def _run(self) -> None:
        if not _holds(self, self._context):
            super()._run()


class _Timer(asyncio.TimerHandle):
    """A timer with a random order among timers due at the same moment."""

    __slots__ = ("order_key",)
    _context: Context
    _scheduled: bool
    order_key: float

    def __lt__(self, other: object) -> bool:
        assert isinstance(other, _Timer)
        return (self.when(), self.order_key) < (other.when(), other.order_key)

    def _run(self) -> None:
        if not _holds(self, self._context):
            super()._run()


class _Future(asyncio.Future[Any]):
    def __init__(self, *, loop: VirtualLoop) -> None:
        self._hash = loop.draw_hash()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._hash


class _Task(asyncio.Task[T]):
    def __init__(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        loop: VirtualLoop,
        name: str,
        context: Context | None,
    ) -> None:
        self._hash = loop.draw_hash()
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._hash


def _scope_class(loop: VirtualLoop) -> type[anyio_backend.CancelScope]:
    class Scope(anyio_backend.CancelScope):
        __slots__ = ("_hash",)

        def __init__(self, deadline: float = math.inf, shield: bool = False) -> None:
            super().__init__(deadline, shield)
            self._hash = loop.draw_hash()

        def __hash__(self) -> int:
            return self._hash

    return Scope


class VirtualLoop(asyncio.BaseEventLoop):
    """The virtual loop; use `run` unless a test is about the loop itself."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._selector = SimpleNamespace(select=self._jump)
        self._random = random
        self._now_s = 0.0
        self._iterations = 0
        self._standstill_iterations = 0
        self._tasks_made = 0
        self._unseen: list[Exception] = []
        self._finishing = False
        self._home = threading.get_ident()
        self.set_exception_handler(self._record)
        for name in filter(lambda name: name.startswith(REAL_IO), dir(self)):
            setattr(self, name, partial(_refuse, f"loop.{name}"))

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._now_s

    def draw_hash(self) -> int:
        """A random hash for an object that is kept in sets."""
        return self._random.getrandbits(60)

    def _call_soon(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As in asyncio, with the order of `_Timer`."""
        timer = _Timer(when, callback, args, self, context)
        timer.order_key = self._random.random()
        timer._scheduled = True
        heapq.heappush(self._scheduled, timer)
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        """A future with a random hash."""
        return _Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        """A task with a random hash and a name that is unique in this loop."""
        self._tasks_made += 1
        return _Task(coro, loop=self, name=str(name or f"task-{self._tasks_made}"), context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """`call_soon` from the loop's thread; other threads are refused."""
        if threading.get_ident() != self._home:
            _refuse("call_soon_threadsafe from another thread")
        return self.call_soon(callback, *args, context=context)

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no I/O events."""

    def _jump(self, timeout: float | None) -> list[Any]:
        """Replace `select`: jump to the next timer."""
        if self._unseen and not self._finishing:
            raise ExceptionGroup("unretrieved errors", self._take_unseen())
        self._iterations += 1
        if self._iterations % COLLECT_EVERY_ITERATIONS == 0:
            gc.collect()
        if timeout == 0:
            self._stand_still()
        elif timeout is None or self._scheduled[0].when() == math.inf:
            raise Deadlock(f"at {self._now_s:.6f} s nothing is ready or scheduled:\n{self._waiting()}")
        else:
            self._now_s = self._scheduled[0].when()
            self._clock_resolution = math.ulp(self._now_s)  # exactly the timers due now fire, at any magnitude
            self._standstill_iterations = 0
        return []

    def _stand_still(self) -> None:
        self._standstill_iterations += 1
        if self._standstill_iterations > STANDSTILL_ITERATIONS_MAX:
            raise Livelock(f"time stands still at {self._now_s:.6f} s:\n{self._waiting()}")

    def _waiting(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        return "\n".join(f"  {task.get_name()}: {_where(task)}" for task in tasks)

    def _record(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        message = context["message"]
        error = context.get("exception")
        if not isinstance(error, Exception):
            error = SimulationError(f"{message}: {error!r}" if error else message)
        subjects = [context[key] for key in ("task", "future", "protocol", "handle") if key in context]
        error.add_note(f"{message}: {subjects}")
        self._unseen.append(error)

    def _take_unseen(self) -> list[Exception]:
        unseen, self._unseen = self._unseen, []
        return unseen

    def finish(self) -> list[Exception]:
        """Cancel all tasks, close, and return the unretrieved errors."""
        self._finishing = True
        self._standstill_iterations = 0
        gc.collect()
        self.call_soon(self.stop)
        self.run_forever()  # one iteration for the callbacks that were ready when the run ended
        try:
            self.run_until_complete(self._end_tasks())
            self.run_until_complete(self.shutdown_asyncgens())
        finally:
            self.close()
        gc.collect()
        return self._take_unseen()

    async def _end_tasks(self) -> None:
        tasks = sorted(asyncio.all_tasks(self) - {asyncio.current_task(self)}, key=hash)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCELLED_TASKS_END_WITHIN_S)
        for task in tasks:
            if not task.done():
                self._unseen.append(SimulationError(f"{task.get_name()} ignores cancellation in {_where(task)}"))


def _refuse(what: str, *_args: object, **_options: object) -> NoReturn:
    raise SimulationError(f"{what} does real I/O, which a simulation must not")


def _where(task: asyncio.Task[Any]) -> str:
    """The functions in which a task waits, outermost first."""
    names = []
    awaited: Any = task.get_coro()
    while hasattr(awaited, "cr_code"):
        names.append(awaited.cr_code.co_qualname)
        awaited = awaited.cr_await
    return " > ".join(names)


@contextlib.contextmanager
def _collector_held() -> Iterator[None]:
    """Disable automatic garbage collection, whose moments depend on the heap."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _no_threads() -> Iterator[None]:
    """Refuse to start threads: virtual time would jump past their work."""
    home, start = threading.get_ident(), threading.Thread.start

    def refuse_here(thread: threading.Thread) -> None:
        if threading.get_ident() == home:
            _refuse(f"thread {thread.name}")
        start(thread)

    with patch.object(threading.Thread, "start", refuse_here):
        yield


def run(main: Callable[[], Awaitable[T]], seed: object) -> T:
    """Run `main` on a new virtual loop and return its result.

    Remaining tasks are cancelled. Raises the error of `main`, or an `ExceptionGroup` of unretrieved errors of tasks,
    callbacks and protocols.
    """
    loop = VirtualLoop(Random(f"loop {seed}"))
    scopes = patch.object(anyio_backend, "CancelScope", _scope_class(loop))
    with _collector_held(), _no_threads(), scopes:
        try:
            result = loop.run_until_complete(main())
        except BaseException as error:
            for unseen in loop.finish():
                error.add_note(f"unretrieved error: {unseen!r}")
            raise
        if unseen_errors := loop.finish():
            raise ExceptionGroup("unretrieved errors", unseen_errors)
        return result


class VirtualClock:
    """The clocks of one simulated host."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, offset_s: float = 0.0, skew_s: float = 0.0) -> None:
        self._loop = loop
        self._offset_s = offset_s
        self._skew_s = skew_s

    def wall(self) -> float:
        """Seconds since 1970, with the host's clock error."""
        return EPOCH_S + self._loop.time() + self._skew_s

    def monotonic(self) -> float:
        """Seconds with the host's arbitrary offset."""
        return self._loop.time() + self._offset_s

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back."""
        self._skew_s += seconds
