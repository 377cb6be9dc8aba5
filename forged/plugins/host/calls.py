"""How a plugin's code is called.

Law: whatever a plugin's code does, its caller has an answer or an error in time, and the failure is counted once.
To refuse a request, or to say that the world is at fault, is a plugin's right; to raise anything else, to take too long
or to hold up the loop is a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from inspect import isawaitable
from typing import Any, TypeVar

from forged.errors import ForgedError, Unavailable, describe
from forged.kernel.bus.cancellation import is_cancelled
from forged.log import Log
from forged.plugins.alarm_guard import Guard, PluginMisbehaved, guarded
from forged.plugins.host.call_limits import Turn
from forged.plugins.host.plugin import Plugin, PluginLimits

T = TypeVar("T")

Broken = Callable[[str, BaseException], None]
FellShort = Callable[[Plugin, str, str], None]


class Turns:
    """Calls plugins, one turn at a time and each within its limits."""

    def __init__(self, guard: Guard, limits: PluginLimits, log: Log, fell_short: FellShort, broken: Broken) -> None:
        self.guard = guard
        self.limits = limits
        self._log = log
        self._fell_short = fell_short
        self._broken = broken

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a plugin's function here and now."""
        return self.guard.run(self.limits.block_max_s, function, *arguments)

    async def take(self, plugin: Plugin, work: Awaitable[T], deadline_s: float, turn: Turn | None = None) -> T:
        """Await a plugin's work for as long as it may take; the failures are for the caller to count."""
        turn = turn or Turn()
        try:
            result = await self._stepped(plugin, turn, work, deadline_s)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            if not turn.cancelled:
                raise PluginMisbehaved("was cancelled from within") from error
        else:
            if not turn.cancelled:
                return result
        if not plugin.active:
            raise left_out(plugin)
        insists = ", and went on although it was cancelled" if turn.given_up else ""
        raise PluginMisbehaved(f"took longer than its {deadline_s:g} s{insists}")

    async def _stepped(self, plugin: Plugin, turn: Turn, work: Awaitable[T], deadline_s: float) -> T:
        plugin.turns[turn] = None
        turn.begin(deadline_s)
        try:
            return await guarded(self.guard, self.limits.block_max_s, work, lambda: turn.given_up)
        finally:
            turn.end()
            del plugin.turns[turn]

    async def attempt(
        self, plugin: Plugin, part: str, deadline_s: float, function: Callable[..., Any], *arguments: Any
    ) -> None:
        """Have something done for which nobody waits; a failure is counted and goes no further."""
        try:
            result = self.run(function, *arguments)
            if isawaitable(result):
                await self.take(plugin, result, deadline_s)
        except Unavailable as error:
            self.put_off(plugin, part, error)
        except Exception as error:  # noqa: BLE001 - a plugin's bug must not be the daemon's end
            self._failed(plugin, part, error)
        else:
            plugin.succeeded(part)

    def put_off(self, plugin: Plugin, part: str, error: Unavailable) -> None:
        """Say that something was not done, which is the world's fault."""
        self._log.warning("plugin is unavailable", plugin=plugin.name, part=part, reason=str(error))

    def answer(
        self, plugin: Plugin, part: str, deadline_s: float, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Have something done for somebody who waits for it: the result, or an awaitable of it."""
        result = self._judged(plugin, part, partial(self.run, function, *arguments))
        if isawaitable(result):
            return self.answer_later(plugin, part, result, deadline_s)
        plugin.succeeded(part)
        return result

    async def answer_later(
        self, plugin: Plugin, part: str, work: Awaitable[T], deadline_s: float, turn: Turn | None = None
    ) -> T:
        """The same for work that has begun."""
        try:
            result = await self.take(plugin, work, deadline_s, turn)
        except ForgedError:
            raise
        except Exception as error:
            self._failed(plugin, part, error)
            raise _answered(part, error) from error
        plugin.succeeded(part)
        return result

    def _judged(self, plugin: Plugin, part: str, function: Callable[[], T]) -> T:
        try:
            return function()
        except ForgedError:
            raise
        except Exception as error:
            self._failed(plugin, part, error)
            raise _answered(part, error) from error

    def _failed(self, plugin: Plugin, part: str, error: Exception) -> None:
        if not isinstance(error, PluginMisbehaved | ForgedError):
            self._broken(part, error)
        self._fell_short(plugin, part, describe(error))


def left_out(plugin: Plugin) -> Unavailable:
    """What those are told who need a plugin that takes no part."""
    reason = f"the plugin {plugin.name} is {plugin.state}: {plugin.reason}"
    return Unavailable("plugin_left_out", reason, f"forgectl plugins enable {plugin.name}")


def _answered(part: str, error: Exception) -> ForgedError:
    return ForgedError("plugin_broken", f"{part} failed: {describe(error)}", "see `forgectl plugins`")
