"""Calls plugin code with limits.

Invariants:
- Every call returns a result or an error within its limits, and each failure is counted once.
- `RequestRefused` and other `ForgedError`s of a plugin are answers, and `Unavailable` is not a failure. Any other
  exception, a timeout or a blocked event loop is a failure.
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
from forged.plugins.host.call_limits import CallLimit
from forged.plugins.host.plugin import Plugin, PluginLimits

T = TypeVar("T")

ReportException = Callable[[str, BaseException], None]
RecordFailure = Callable[[Plugin, str, str], None]


class PluginCaller:
    """Calls the code of all plugins within their limits."""

    def __init__(
        self, guard: Guard, limits: PluginLimits, log: Log, record_failure: RecordFailure, broken: ReportException
    ) -> None:
        self.guard = guard
        self.limits = limits
        self._log = log
        self._record_failure = record_failure
        self._report_exception = broken

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a plugin's synchronous function."""
        return self.guard.run(self.limits.block_max_s, function, *arguments)

    async def take(self, plugin: Plugin, work: Awaitable[T], deadline_s: float, limit: CallLimit | None = None) -> T:
        """Await plugin code until its deadline; the caller counts the failures."""
        limit = limit or CallLimit()
        try:
            result = await self._stepped(plugin, limit, work, deadline_s)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            if not limit.cancelled:
                raise PluginMisbehaved("cancelled its own task") from error
        else:
            if not limit.cancelled:
                return result
        if not plugin.active:
            raise inactive(plugin)
        insists = ", and ignored its cancellation" if limit.abandoned else ""
        raise PluginMisbehaved(f"took longer than its {deadline_s:g} s{insists}")

    async def _stepped(self, plugin: Plugin, limit: CallLimit, work: Awaitable[T], deadline_s: float) -> T:
        plugin.turns[limit] = None
        limit.begin(deadline_s)
        try:
            return await guarded(self.guard, self.limits.block_max_s, work, lambda: limit.abandoned)
        finally:
            limit.end()
            del plugin.turns[limit]

    async def attempt(
        self, plugin: Plugin, part: str, deadline_s: float, function: Callable[..., Any], *arguments: Any
    ) -> None:
        """Call plugin code whose result nothing needs; failures are counted and not raised."""
        try:
            result = self.run(function, *arguments)
            if isawaitable(result):
                await self.take(plugin, result, deadline_s)
        except Unavailable as error:
            self.log_unavailable(plugin, part, error)
        except Exception as error:  # noqa: BLE001 - a plugin's bug must not stop the daemon
            self._failed(plugin, part, error)
        else:
            plugin.succeeded(part)

    def log_unavailable(self, plugin: Plugin, part: str, error: Unavailable) -> None:
        """Log that a plugin could not work because something outside it failed."""
        self._log.warning("plugin is unavailable", plugin=plugin.name, part=part, reason=str(error))

    def answer(
        self, plugin: Plugin, part: str, deadline_s: float, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Call plugin code for its result: the result, or an awaitable of it."""
        result = self._judged(plugin, part, partial(self.run, function, *arguments))
        if isawaitable(result):
            return self.answer_later(plugin, part, result, deadline_s)
        plugin.succeeded(part)
        return result

    async def answer_later(
        self, plugin: Plugin, part: str, work: Awaitable[T], deadline_s: float, limit: CallLimit | None = None
    ) -> T:
        """Like `answer`, for an awaitable that plugin code has returned."""
        try:
            result = await self.take(plugin, work, deadline_s, limit)
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
            self._report_exception(part, error)
        self._record_failure(plugin, part, describe(error))


def inactive(plugin: Plugin) -> Unavailable:
    """The error for a request that needs an inactive plugin."""
    reason = f"the plugin {plugin.name} is {plugin.state}: {plugin.reason}"
    return Unavailable("plugin_left_out", reason, f"forgectl plugins enable {plugin.name}")


def _answered(part: str, error: Exception) -> ForgedError:
    return ForgedError("plugin_broken", f"{part} failed: {describe(error)}", "see `forgectl plugins`")
