"""A plugin's code may not keep the daemon's loop to itself.

Law: while a plugin's code runs, an alarm is set; while the daemon's own code runs, it is not, also where a plugin has
called it. The time that is left is not given anew when the daemon's code returns, so a plugin that calls it without end
is interrupted too; and so are the tasks that a plugin starts. When the alarm goes off, the plugin's code is interrupted
where it is, in a loop of its own or in a call that blocks, and what called it sees a failure like any other, also when
the code swallowed the interruption and came back. Only code that never comes back from C, or that swallows every
interruption, cannot be interrupted this way; that is what the watchdog is for. Work that goes on awaiting although it
was cancelled is stepped no further.

What a plugin raises leaves here as an `Exception`, whatever it was, so that nothing it does can end more than its turn.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any, NoReturn, Protocol, TypeVar

from forged.errors import describe
from forged.log import Log

T = TypeVar("T")

AGAIN_S = 0.2
"""How soon code that goes on after an interruption is interrupted again."""
SOON_S = 2e-5
"""How soon it is tried again to interrupt code that was just being left or entered."""
CALL_COST_MAX_S = 0.001
"""What calling the daemon takes of a plugin's time at most, whatever the daemon does then."""
CANCELLATIONS_MAX = 100
"""How often in a row work may be cancelled and await something else, as each step of a cleanup is in anyio's scopes."""


class PluginBlocked(BaseException):
    """Raised in the middle of a plugin's code, past its `except Exception`."""


class PluginMisbehaved(Exception):
    """What a plugin did that no exception of its own describes."""


class Guard(Protocol):
    """Runs code on behalf of plugins."""

    def run(self, limit_s: float, function: Callable[..., T], *arguments: Any) -> T:
        """Call a plugin's function, for no longer than that."""
        ...

    def outside(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call the daemon's own function from within a plugin's."""
        ...

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Guard the tasks, too, that plugins start in this loop."""
        ...


class Unguarded:
    """For where there is no alarm: other threads, and the simulation."""

    def run(self, limit_s: float, function: Callable[..., T], *arguments: Any) -> T:
        return _contained(function, *arguments)

    def outside(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        return


class AlarmGuard:
    """The guard of a process: `SIGALRM` in its main thread, which is the one that runs the loop."""

    def __init__(self) -> None:
        self._limits: list[float] = []
        """Of whose code is running, innermost last; 0 is the daemon's own."""
        self._interrupted: list[bool] = []
        """Whether each of them was, whatever it made of it."""
        self._armed = False
        self._ends_at = 0.0
        """When the time of whose code is running is over; the timer itself knows it less exactly."""
        self._home = threading.get_ident()
        signal.signal(signal.SIGALRM, self._ring)

    def run(self, limit_s: float, function: Callable[..., T], *arguments: Any) -> T:
        too_long = f"kept the daemon waiting for more than {limit_s:g} s"
        left_s, interrupted = self._enter(limit_s), False
        try:
            result = _contained(function, *arguments)
        except PluginBlocked as blocked:
            raise PluginMisbehaved(too_long) from blocked
        finally:
            interrupted = self._leave(left_s)
        if interrupted:
            raise PluginMisbehaved(f"{too_long}, and went on when it was interrupted")
        return result

    def outside(self, function: Callable[..., T], *arguments: Any) -> T:
        if not self._limits or threading.get_ident() != self._home:
            return function(*arguments)
        began = monotonic()
        left_s = self._enter(0.0)
        try:
            return function(*arguments)
        finally:
            left_s -= min(monotonic() - began, CALL_COST_MAX_S)
            over = left_s <= 0.0 and self._limits[-2] > 0.0
            self._leave(AGAIN_S if over else left_s)
            if over:
                self._interrupt()

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.set_task_factory(self._start_task)

    def close(self) -> None:
        """Set no alarms any more."""
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _enter(self, limit_s: float) -> float:
        """Let somebody else's code run; returns how much time is left to whose code ran until now."""
        self._armed = False
        left_s = self._ends_at - monotonic()
        self._limits.append(limit_s)
        self._interrupted.append(False)
        self._set(limit_s)
        return left_s

    def _leave(self, left_s: float) -> bool:
        """Let the one before go on; returns whether this one was interrupted."""
        self._armed = False
        self._limits.pop()
        interrupted = self._interrupted.pop()
        self._set(max(left_s, SOON_S) if self._limits and self._limits[-1] > 0.0 else 0.0)
        return interrupted

    def _interrupt(self) -> NoReturn:
        self._interrupted[-1] = True
        raise PluginBlocked

    def _set(self, limit_s: float) -> None:
        self._ends_at = monotonic() + limit_s
        signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S if limit_s else 0.0)
        self._armed = limit_s > 0.0

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if not self._armed or frame is None:
            return
        if frame.f_code not in _GUARDS_OWN:
            self._interrupt()
        # The guard itself is at work, between two codes: if the plugin's is still there then, it is its turn soon.
        signal.setitimer(signal.ITIMER_REAL, SOON_S, AGAIN_S)

    def _start_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T] | Generator[Any, None, T], **options: Any
    ) -> asyncio.Task[T]:
        limit_s = self._limits[-1] if self._limits else 0.0
        return asyncio.Task(_whole(guarded(self, limit_s, work)) if limit_s else work, loop=loop, **options)  # type: ignore[arg-type]


_GUARDS_OWN = frozenset(
    method.__code__
    for method in (
        AlarmGuard.run,
        AlarmGuard.outside,
        AlarmGuard._enter,
        AlarmGuard._leave,
        AlarmGuard._set,
        AlarmGuard._ring,
    )
)


class Stepped(Awaitable[T]):
    """An awaitable each step of which is called through `call`, until `given_up`."""

    def __init__(self, call: Callable[..., Any], work: Awaitable[T], given_up: Callable[[], bool]) -> None:
        self._call = call
        self._work = work
        self._given_up = given_up

    def __await__(self) -> Generator[Any, Any, T]:
        call = self._call
        steps = _steps(self._work)
        advance: Callable[[Any], Any] = steps.send
        sent: Any = None
        cancelled: asyncio.CancelledError | None = None
        cancellations = 0
        try:
            while True:
                done, value, cancelled = call(_step, advance, sent)
                if cancelled is not None:
                    raise cancelled
                if done:
                    return value  # type: ignore[no-any-return]
                try:
                    sent, advance = (yield value), steps.send
                    cancellations = 0
                except asyncio.CancelledError as error:
                    cancellations += 1
                    if cancellations > CANCELLATIONS_MAX or self._given_up():
                        raise
                    sent, advance = error, steps.throw
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001 - what it awaits has failed, which is the work's to see
                    sent, advance = error, steps.throw
        except BaseException:
            # It may not have come to its end: what it holds is let go now, and not whenever it is collected.
            with suppress(Exception):
                call(steps.close)
            raise
        finally:
            # What was raised holds this frame; held by it in turn, the work would wait for the garbage collector.
            sent = cancelled = None


def guarded(
    guard: Guard, limit_s: float, work: Awaitable[T], given_up: Callable[[], bool] = lambda: False
) -> Awaitable[T]:
    """An awaitable of a plugin, each step of which the guard runs."""
    return Stepped(partial(guard.run, limit_s), work, given_up)


def outside(guard: Guard, work: Awaitable[T]) -> Awaitable[T]:
    """The daemon's own work that a plugin awaits: no alarm is set while it runs."""
    return Stepped(guard.outside, work, lambda: False)


class OutsideLog:
    """The daemon's log, as plugins are given it: no alarm is set while it is written to."""

    def __init__(self, guard: Guard, log: Log) -> None:
        self._guard = guard
        self._log = log

    def hears(self, level: str, /) -> bool:
        return self._guard.outside(self._log.hears, level)

    def debug(self, event: str, **fields: Any) -> None:
        self._guard.outside(partial(self._log.debug, event, **fields))

    def info(self, event: str, **fields: Any) -> None:
        self._guard.outside(partial(self._log.info, event, **fields))

    def warning(self, event: str, **fields: Any) -> None:
        self._guard.outside(partial(self._log.warning, event, **fields))

    def error(self, event: str, **fields: Any) -> None:
        self._guard.outside(partial(self._log.error, event, **fields))

    def bind(self, **fields: Any) -> Log:
        return OutsideLog(self._guard, self._log.bind(**fields))


async def _whole(work: Awaitable[T]) -> T:
    return await work


def _steps(work: Awaitable[T]) -> Generator[Any, Any, T]:
    if asyncio.iscoroutine(work):
        return work  # type: ignore[return-value]
    return _through(work)


def _through(work: Awaitable[T]) -> Generator[Any, Any, T]:
    """What an awaitable may give is any iterator: this can be sent to and closed as well."""
    return (yield from work.__await__())


def _step(advance: Callable[[Any], Any], sent: Any) -> tuple[bool, Any, asyncio.CancelledError | None]:
    """Whether it has come to its end, what it waits for or has brought, and whether it was cancelled.

    A `StopIteration` cannot leave a generator, and a cancellation is nothing that a plain function may raise: so both
    are results here.
    """
    try:
        return False, advance(sent), None
    except StopIteration as stop:
        return True, stop.value, None
    except asyncio.CancelledError as cancelled:
        return True, None, cancelled


def _contained(function: Callable[..., T], *arguments: Any) -> T:
    try:
        return function(*arguments)
    except (Exception, PluginBlocked):
        raise
    except BaseException as error:
        raise PluginMisbehaved(f"raised {describe(error)}") from error
