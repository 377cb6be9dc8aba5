"""Loads plugins, runs them and limits what they do.

Invariants:
- A plugin is loaded as a whole or refused as a whole; the daemon starts in both cases.
- A failure of a plugin ends one call at most.
- A plugin that exceeds its limits of time, facts or failures is quarantined as a whole: its observers receive nothing,
  handlers that it replaced are used again, and requests bypass its wrappers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import anyio
import msgspec
from anyio.abc import TaskStatus

from forged.auth.access import authorise
from forged.auth.model import Principal, Role
from forged.clock import Clock
from forged.errors import DESCRIPTION_CHARS_MAX, ConfigError, ForgedError, RequestRefused, describe
from forged.kernel.bus import Bus
from forged.kernel.bus.follower import Follower
from forged.kernel.bus.mailbox import Mailbox
from forged.kernel.messages import Call, Decision, Fact, Nothing, Request
from forged.log import Log
from forged.plugins.alarm_guard import Guard, OutsideLog, outside
from forged.plugins.context import Action, PluginContext, PluginRegistration, Recurring
from forged.plugins.facts import check_facts, check_job_and_generation
from forged.plugins.host.calls import PluginCaller, inactive
from forged.plugins.host.installer import Installer, check
from forged.plugins.host.plugin import Plugin, PluginLimits
from forged.plugins.model import (
    API_VERSION,
    NAME,
    DisablePlugin,
    EnablePlugin,
    ListPlugins,
    PluginDisabled,
    PluginEnabled,
    PluginQuarantined,
    PluginRefused,
    PluginState,
    PluginView,
    RunPluginCommand,
)
from forged.rate_limit import TokenBucket

R = TypeVar("R")

OWNER = "plugins"
ENABLED = "enabled"
"""The key in a plugin's settings that the daemon reads."""
BURST_S = 5.0
"""The burst of facts that a plugin may publish, in seconds of its rate."""
VERSION_CHARS_MAX = 64
STOP_TIMEOUT_S = 2.0
COMMAND_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class PluginSource:
    """Where a plugin comes from; `load` returns its module or raises."""

    name: str
    origin: str
    load: Callable[[], ModuleType]
    version: str = ""


class PluginHost:
    """Owns all plugins of a daemon."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        log: Log,
        guard: Guard,
        *,
        settings: Mapping[str, Mapping[str, Any]],
        directory: Path,
        limits: PluginLimits,
    ) -> None:
        self.plugins: dict[str, Plugin] = {}
        self._bus = bus
        self._clock = clock
        self._log = log
        self._guard = guard
        self._caller = PluginCaller(guard, limits, log, self._record_failure, self._report_exception)
        self._settings = settings
        self._directory = directory
        self._recurring: list[tuple[Plugin, Recurring]] = []
        self._stopping: list[tuple[Plugin, Action]] = []
        bus.on_failure.append(self._handler_failed)
        bus.serve(ListPlugins, lambda *_: self.views, owner=OWNER)
        bus.serve(EnablePlugin, self._enable, owner=OWNER)
        bus.serve(DisablePlugin, self._disable, owner=OWNER)
        bus.serve(RunPluginCommand, self._run_command, owner=OWNER)

    @property
    def views(self) -> list[PluginView]:
        """Views of all plugins, by name."""
        return [self.plugins[name].view for name in sorted(self.plugins)]

    @property
    def history(self) -> str:
        """The id of the history that fact ids belong to."""
        return self._bus.ledger.store.history

    @property
    def refused(self) -> list[Plugin]:
        return [plugin for plugin in self.plugins.values() if plugin.state is PluginState.REFUSED]

    def set_limits(self, limits: PluginLimits) -> None:
        self._caller.limits = limits
        for plugin in self.plugins.values():
            plugin.fact_limit.resize(limits.facts_per_s_max, _burst(limits))

    # Loading, before the bus is sealed.

    def load(self, sources: Iterable[PluginSource]) -> None:
        """Load the plugins; a plugin that fails is refused with a reason."""
        for source in sources:
            if source.name in self.plugins:
                self._ignore_duplicate(source)
            else:
                self._load(source)
        for name in self._settings:
            if name not in self.plugins:
                self._refuse(name, "the settings", "no plugin of this name was found")

    def _load(self, source: PluginSource) -> None:
        settings = dict(self._settings.get(source.name, {}))
        if not settings.pop(ENABLED, True):
            self._add(source.name, source.origin, PluginState.DISABLED, "enabled = false in the settings")
            return
        try:
            self._register(source, settings)
        except ForgedError as error:
            problems = error.problems if isinstance(error, ConfigError) else ()
            reason = "; ".join([ForgedError.__str__(error), *map(str, problems)])
            self._refuse(source.name, source.origin, reason).problems = problems
        except Exception as error:  # noqa: BLE001 - the daemon starts without the plugin
            self._bus.on_handler_bug(source.name, error)
            self._refuse(source.name, source.origin, describe(error))

    def _register(self, source: PluginSource, settings: Mapping[str, Any]) -> None:
        if not NAME.fullmatch(source.name):
            raise ConfigError("plugin_name", f"plugin name must match {NAME.pattern}, got {source.name!r}")
        log = OutsideLog(self._guard, self._log.bind(plugin=source.name))
        directory = self._directory / source.name
        context = PluginContext(source.name, settings, directory, self, self._clock, log)
        version = self._guard.run(self._caller.limits.load_timeout_s, _registered, source, context)
        context.close()
        check(context.registration, self._bus)
        plugin = self._add(source.name, source.origin, PluginState.ACTIVE, None)
        plugin.version = version
        self._install(plugin, context.registration)

    def _install(self, plugin: Plugin, registration: PluginRegistration) -> None:
        Installer(self._bus, self._caller, plugin).install(registration)
        for recurring in registration.recurring:
            plugin.part(recurring.name, f"every {recurring.interval_s:g} s")
            self._recurring.append((plugin, recurring))
        plugin.commands = registration.commands
        plugin.loaded = True
        self._stopping += ((plugin, action) for action in registration.stopping)

    def _ignore_duplicate(self, source: PluginSource) -> None:
        plugin = self.plugins[source.name]
        self._log.warning("second plugin of the same name ignored", plugin=source.name, origin=source.origin)
        plugin.reason = plugin.reason or f"{source.origin} has a plugin of the same name, which is ignored"

    def _refuse(self, name: str, origin: str, reason: str) -> Plugin:
        self._log.error("plugin refused", plugin=name, origin=origin, reason=reason)
        return self._add(name, origin, PluginState.REFUSED, _storable(reason))

    def _add(self, name: str, origin: str, state: PluginState, reason: str | None) -> Plugin:
        plugin = Plugin(name, "", origin, self._fact_limit(), state, reason)
        self.plugins[name] = plugin
        return plugin

    def _fact_limit(self) -> TokenBucket:
        limits = self._caller.limits
        return TokenBucket(limits.facts_per_s_max, _burst(limits), self._clock.monotonic())

    # Running.

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run the periodic actions of plugins. The ledger must have started."""
        self._guard.watch(asyncio.get_running_loop())
        for plugin in self.refused:
            self._record(PluginRefused(plugin.name, plugin.reason or ""))
        async with anyio.create_task_group() as tasks:
            for plugin, recurring in self._recurring:
                tasks.start_soon(self._recur, plugin, recurring)
            task_status.started()
            await anyio.sleep_forever()

    async def stop(self) -> None:
        """Run the stop actions of all loaded plugins, including inactive ones."""
        async with anyio.create_task_group() as tasks:
            for plugin, action in self._stopping:
                tasks.start_soon(self._caller.attempt, plugin, f"{plugin.name}/stop", STOP_TIMEOUT_S, action)

    async def _recur(self, plugin: Plugin, recurring: Recurring) -> None:
        name = f"{plugin.name}/{recurring.name}"
        while True:
            await anyio.sleep(recurring.interval_s)
            await plugin.wait_until_active()
            await self._caller.attempt(plugin, name, recurring.deadline_s, recurring.action)

    # Failures.

    def _handler_failed(self, handler: Mailbox | Follower, reason: str) -> None:
        plugin = self.plugins.get(self._bus.owners.get(handler.name, ""))
        if plugin is not None:
            self._record_failure(plugin, handler.name, reason)

    def _record_failure(self, plugin: Plugin, part: str, reason: str) -> None:
        failures = plugin.record_failure(part, reason, self._clock.monotonic())
        if plugin.active and failures >= self._caller.limits.failures_max:
            plugin.deactivate(PluginState.QUARANTINED, f"{part}: {reason}")
            self._record(PluginQuarantined(plugin.name, part, failures, reason))

    def _report_exception(self, part: str, error: BaseException) -> None:
        self._bus.on_handler_bug(part, error)

    def _record(self, fact: Fact, origin: str = OWNER) -> None:
        self._bus.record_later(Decision(None, (fact,)), origin=origin)

    # Requests.

    def _enable(self, request: EnablePlugin, call: Call) -> Nothing:
        plugin = self._find(request.plugin)
        if plugin.active:
            return Nothing()
        if not plugin.loaded:
            reason = f"{plugin.name} is not loaded: {plugin.reason}"
            raise RequestRefused("plugin_not_loaded", reason, "fix it and restart the daemon")
        plugin.activate()
        self._record(PluginEnabled(plugin.name), call.origin)
        return Nothing()

    def _disable(self, request: DisablePlugin, call: Call) -> Nothing:
        plugin = self._find(request.plugin)
        if plugin.state in (PluginState.ACTIVE, PluginState.QUARANTINED):
            plugin.deactivate(PluginState.DISABLED, f"disabled by {call.principal.name}")
            self._record(PluginDisabled(plugin.name), call.origin)
        return Nothing()

    def _run_command(self, request: RunPluginCommand, call: Call) -> Any:
        plugin = self._find(request.plugin)
        command = plugin.commands.get(request.command)
        if command is None:
            known = f"it has {', '.join(plugin.commands)}" if plugin.commands else "it has none"
            raise RequestRefused("command_unknown", f"{plugin.name} has no command {request.command}", known)
        authorise(call.principal, command.needs, None)
        if not plugin.active:
            raise inactive(plugin)

        async def obey() -> Any:
            result = command.action(request.arguments)
            return _plain(await result if isawaitable(result) else result)

        return self._caller.answer(plugin, f"{plugin.name}/{command.name}", COMMAND_TIMEOUT_S, obey)

    def _find(self, name: str) -> Plugin:
        plugin = self.plugins.get(name)
        if plugin is None:
            raise RequestRefused("plugin_unknown", f"there is no plugin {name}", "see `forgectl plugins`")
        return plugin

    # Calls from plugins.

    async def publish(self, plugin: str, facts: Sequence[Fact], job: str, cause: int) -> None:
        await outside(self._guard, self._publish(self.plugins[plugin], facts, job, cause))

    async def _publish(self, plugin: Plugin, facts: Sequence[Fact], job: str, cause: int) -> None:
        self._admit(plugin, cause)
        ledger = self._bus.ledger
        ledger.require_writable()
        check_facts(facts, own=True)
        check_job_and_generation(job)
        if not facts:
            return
        part = f"{plugin.name}/publish"
        if not plugin.fact_limit.take(len(facts), self._clock.monotonic()):
            reason = f"more than {self._caller.limits.facts_per_s_max:g} facts per second"
            self._record_failure(plugin, part, reason)
            raise RequestRefused("plugin_storm", f"{plugin.name} publishes {reason}", "see plugin_facts_per_s_max")
        plugin.reset_failures(part)
        plugin.published += len(facts)
        decision = Decision(None, tuple(facts), job=job)
        await ledger.append(decision, cause=cause, origin=f"plugin {plugin.name}").wait()

    async def ask(self, plugin: str, request: Request[R], timeout_s: float | None, cause: int) -> R:
        return await outside(self._guard, self._ask(self.plugins[plugin], request, timeout_s, cause))

    async def _ask(self, plugin: Plugin, request: Request[R], timeout_s: float | None, cause: int) -> R:
        self._admit(plugin, cause)
        principal = Principal(f"plugin:{plugin.name}", Role.OPERATOR)
        return await self._bus.ask(request, Call(principal, f"plugin {plugin.name}", cause=cause, timeout_s=timeout_s))

    def _admit(self, plugin: Plugin, cause: int) -> None:
        if not plugin.active:
            raise inactive(plugin)
        if type(cause) is not int or not 0 <= cause <= self._bus.ledger.journal.last:
            raise RequestRefused("cause_unknown", f"cause must be the id of a fact or 0, got {cause!r}")


def _registered(source: PluginSource, context: PluginContext) -> str:
    """Load a plugin and call its `register`; returns its version."""
    module = source.load()
    outcome = _entry(module)(context)
    if isawaitable(outcome):
        if asyncio.iscoroutine(outcome):
            outcome.close()
        raise TypeError("register must be a plain function, not a coroutine function")
    return _storable(source.version or str(getattr(module, "__version__", "")))[:VERSION_CHARS_MAX]


def _burst(limits: PluginLimits) -> float:
    return max(1.0, limits.facts_per_s_max * BURST_S)


def _entry(module: ModuleType) -> Callable[[PluginContext], Any]:
    version = getattr(module, "API_VERSION", None)
    if version != API_VERSION:
        said = "does not define API_VERSION" if version is None else f"has API_VERSION = {version!r}"
        reason = f"it {said}; this daemon supports {API_VERSION}"
        raise ConfigError("plugin_api", reason, f"port it and set API_VERSION = {API_VERSION}")
    register = getattr(module, "register", None)
    if not callable(register):
        raise ConfigError("plugin_register", "it has no register function", "define register(context)")
    return register  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """The result of a command as values that can be encoded."""
    plain = msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=str)
    msgspec.msgpack.encode(plain)
    return plain


def _storable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()[:DESCRIPTION_CHARS_MAX]
