"""Interrupts plugin code that blocks the event loop, by `SIGALRM`.

Invariants:
- An alarm is set while plugin code runs, including the tasks that a plugin starts. It is not set while the daemon's
  code runs, even if a plugin called it; the plugin's remaining time is kept over such calls and not renewed.
- The alarm raises `PluginBlocked` in the plugin's code. Its caller sees a failure, even if the code swallowed the
  exception and returned. Code that never returns from C, or swallows every interruption, is left to the watchdog.
- A plugin's awaitable that ignores its cancellation is not resumed any more.
- Whatever a plugin raises leaves this module as an `Exception`.
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

REPEAT_S = 0.2
"""The interval at which code that continues after an interruption is interrupted again."""
RETRY_S = 2e-5
"""The delay before the next try, if the alarm hits the guard's own code."""
CALL_COST_MAX_S = 0.001
"""The most that one call of the daemon costs of the plugin's time."""
CANCELLATIONS_MAX = 100
"""How often in a row an awaitable may be cancelled and await again; anyio's scopes cancel each step of a cleanup."""


class PluginBlocked(BaseException):
    """Raised in plugin code; not an `Exception`, so that `except Exception` does not catch it."""


class PluginMisbehaved(Exception):
    """A failure of a plugin that its own exception does not describe."""


class Guard(Protocol):
    """Runs plugin code."""

    def run(self, limit_s: float, function: Callable[..., T], *arguments: Any) -> T:
        """Call a plugin's function; interrupt it after `limit_s`."""
        ...

    def outside(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of the daemon from plugin code, without the limit."""
        ...

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Also guard the tasks that plugins start in this loop."""
        ...


class Unguarded:
    """A guard without alarm, for the simulation and other threads."""

    def run(self, limit_s: float, function: Callable[..., T], *arguments: Any) -> T:
        return _call_contained(function, *arguments)

    def outside(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        return


class AlarmGuard:
    """A guard by `SIGALRM` in the main thread, which runs the event loop."""

    def __init__(self) -> None:
        self._limits: list[float] = []
        """The limits of the nested calls, innermost last; 0 means the daemon's own code."""
        self._interrupted: list[bool] = []
        """Whether each of the nested calls was interrupted."""
        self._armed = False
        self._ends_at = 0.0
        """When the limit of the innermost call ends; more exact than the timer."""
        self._home = threading.get_ident()
        signal.signal(signal.SIGALRM, self._on_alarm)

    def run(self, limit_s: float, function: Callable[..., T], *arguments: Any) -> T:
        too_long = f"blocked the daemon for more than {limit_s:g} s"
        left_s, interrupted = self._enter(limit_s), False
        try:
            result = _call_contained(function, *arguments)
        except PluginBlocked as blocked:
            raise PluginMisbehaved(too_long) from blocked
        finally:
            interrupted = self._leave(left_s)
        if interrupted:
            raise PluginMisbehaved(f"{too_long}, and continued when it was interrupted")
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
            self._leave(REPEAT_S if over else left_s)
            if over:
                self._interrupt()

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.set_task_factory(self._start_task)

    def close(self) -> None:
        """Remove the alarm and its signal handler."""
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _enter(self, limit_s: float) -> float:
        """Begin a nested call; returns the remaining time of the calling code."""
        self._armed = False
        left_s = self._ends_at - monotonic()
        self._limits.append(limit_s)
        self._interrupted.append(False)
        self._set(limit_s)
        return left_s

    def _leave(self, left_s: float) -> bool:
        """End the nested call; returns whether it was interrupted."""
        self._armed = False
        self._limits.pop()
        interrupted = self._interrupted.pop()
        self._set(max(left_s, RETRY_S) if self._limits and self._limits[-1] > 0.0 else 0.0)
        return interrupted

    def _interrupt(self) -> NoReturn:
        self._interrupted[-1] = True
        raise PluginBlocked

    def _set(self, limit_s: float) -> None:
        self._ends_at = monotonic() + limit_s
        signal.setitimer(signal.ITIMER_REAL, limit_s, REPEAT_S if limit_s else 0.0)
        self._armed = limit_s > 0.0

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if not self._armed or frame is None:
            return
        if frame.f_code not in _GUARD_CODE:
            self._interrupt()
        # The guard's own code is running; try again, because plugin code may still be below it.
        signal.setitimer(signal.ITIMER_REAL, RETRY_S, REPEAT_S)

    def _start_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T] | Generator[Any, None, T], **options: Any
    ) -> asyncio.Task[T]:
        limit_s = self._limits[-1] if self._limits else 0.0
        return asyncio.Task(_awaited(guarded(self, limit_s, work)) if limit_s else work, loop=loop, **options)  # type: ignore[arg-type]


_GUARD_CODE = frozenset(
    method.__code__
    for method in (
        AlarmGuard.run,
        AlarmGuard.outside,
        AlarmGuard._enter,
        AlarmGuard._leave,
        AlarmGuard._set,
        AlarmGuard._on_alarm,
    )
)


class Stepped(Awaitable[T]):
    """An awaitable whose steps are called through `call`, until `abandoned` returns true."""

    def __init__(self, call: Callable[..., Any], work: Awaitable[T], abandoned: Callable[[], bool]) -> None:
        self._call = call
        self._work = work
        self._given_up = abandoned

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
                except BaseException as error:  # noqa: BLE001 - passed on to the awaitable
                    sent, advance = error, steps.throw
        except BaseException:
            # The awaitable may not have ended: release what it holds now, not at garbage collection.
            with suppress(Exception):
                call(steps.close)
            raise
        finally:
            # What was raised holds this frame; held by it in limit, the work would wait for the garbage collector.
            sent = cancelled = None


def guarded(
    guard: Guard, limit_s: float, work: Awaitable[T], abandoned: Callable[[], bool] = lambda: False
) -> Awaitable[T]:
    """A plugin's awaitable with each step run by the guard."""
    return Stepped(partial(guard.run, limit_s), work, abandoned)


def outside(guard: Guard, work: Awaitable[T]) -> Awaitable[T]:
    """An awaitable of the daemon for a plugin to await; no alarm is set while it runs."""
    return Stepped(guard.outside, work, lambda: False)


class OutsideLog:
    """The log of a plugin; no alarm is set while it writes."""

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


async def _awaited(work: Awaitable[T]) -> T:
    return await work


def _steps(work: Awaitable[T]) -> Generator[Any, Any, T]:
    if asyncio.iscoroutine(work):
        return work  # type: ignore[return-value]
    return _through(work)


def _through(work: Awaitable[T]) -> Generator[Any, Any, T]:
    """Wrap `__await__`, which may return an iterator without `send` and `close`, in a generator."""
    return (yield from work.__await__())


def _step(advance: Callable[[Any], Any], sent: Any) -> tuple[bool, Any, asyncio.CancelledError | None]:
    """Run one step: whether it ended, the awaited or returned value, and a cancellation.

    `StopIteration` cannot leave a generator, and a guarded function may raise `Exception` only; both are results here.
    """
    try:
        return False, advance(sent), None
    except StopIteration as stop:
        return True, stop.value, None
    except asyncio.CancelledError as cancelled:
        return True, None, cancelled


def _call_contained(function: Callable[..., T], *arguments: Any) -> T:
    try:
        return function(*arguments)
    except (Exception, PluginBlocked):
        raise
    except BaseException as error:
        raise PluginMisbehaved(f"raised {describe(error)}") from error
