"""webhook and event_log in a kernel without network, with a virtual clock for retry pauses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio

from forged.auth.model import Principal, Role
from forged.kernel.messages import Call, Decision, Fact
from forged.kernel.store.port import Store
from forged.plugins.alarm_guard import Unguarded
from forged.plugins.host.plugin import PluginLimits
from forged.plugins.host.plugin_host import PluginHost, PluginSource
from forged.plugins.model import PluginView, RunPluginCommand
from tests.faulty_store import FaultyStore
from tests.kernel_fixture import Kernel, running, task_group
from tests.net.manual_daemon import ManualClock

WAIT_S = 30.0
"""Timeout of a test, in real seconds."""
TOGETHER = 50
"""Facts in one decision."""
VIEWER = Principal("a viewer", Role.VIEWER)


class Blob(Fact, frozen=True):
    """A fact with an arbitrary value."""

    value: Any


class Rare(Fact, frozen=True):
    """A fact of a second type."""

    number: int


@dataclass
class RecordingLog:
    """A log that records its events."""

    events: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    bound: dict[str, Any] = field(default_factory=dict)

    def hears(self, level: str, /) -> bool:
        return True

    def debug(self, event: str, **fields: Any) -> None:
        self.events.append(("debug", event, self.bound | fields))

    def info(self, event: str, **fields: Any) -> None:
        self.events.append(("info", event, self.bound | fields))

    def warning(self, event: str, **fields: Any) -> None:
        self.events.append(("warning", event, self.bound | fields))

    def error(self, event: str, **fields: Any) -> None:
        self.events.append(("error", event, self.bound | fields))

    def bind(self, **fields: Any) -> RecordingLog:
        return RecordingLog(self.events, self.bound | fields)

    def said(self, level: str) -> list[str]:
        return [event for at, event, _ in self.events if at == level]


class LoadedPlugin:
    """One plugin with its host, log and clock; `pauses` are the pauses between delivery attempts."""

    def __init__(self, kernel: Kernel, name: str, module: ModuleType, settings: Mapping[str, Any], place: Path) -> None:
        self.kernel = kernel
        self.name = name
        self.clock = ManualClock()
        self.log = RecordingLog()
        self.pauses: list[float] = []
        self.on_pause: Callable[[], object] = lambda: None
        """Called at the end of each pause."""
        self.host = PluginHost(
            kernel.bus,
            self.clock,
            self.log,
            Unguarded(),
            settings={name: settings},
            directory=place / "plugins",
            limits=PluginLimits(),
        )
        self.host.load([PluginSource(name, "a test", lambda: module)])
        for follower in kernel.bus.followers.values():
            follower._sleep = self._pause
            follower._now = self.clock.monotonic

    @property
    def view(self) -> PluginView:
        [view] = self.host.views
        return view

    @property
    def follower(self) -> Any:
        [follower] = self.kernel.bus.followers.values()
        return follower

    async def publish(self, *facts: Fact, job: str = "") -> list[int]:
        """Commit facts; returns their ids."""
        ids: list[int] = []
        for start in range(0, len(facts), TOGETHER):
            some = facts[start : start + TOGETHER]
            pending = self.kernel.ledger.append(Decision(None, some, job=job), origin="a test")
            ids += range(pending.revision - len(some) + 1, pending.revision + 1)
            await pending.wait()
        return ids

    async def run(self, command: str, principal: Principal | None = None) -> Any:
        """Run a command of the plugin; returns the result."""
        call = Call(principal or Principal("an operator", Role.OPERATOR), "a test")
        return await self.kernel.bus.ask(RunPluginCommand(self.name, command), call)

    async def caught_up(self) -> None:
        """Wait until all committed facts are delivered."""
        while not self.follower.idle:
            await asyncio.sleep(0)

    async def stalled(self) -> str:
        """Wait until a delivery fails; returns the reason."""
        while self.follower.waiting_for is None:
            await asyncio.sleep(0)
        return str(self.follower.waiting_for)

    async def _pause(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.clock.now += pause_s
        await asyncio.sleep(0)
        self.on_pause()


@asynccontextmanager
async def running_plugin(
    name: str,
    module: ModuleType,
    settings: Mapping[str, Any],
    place: Path,
    *,
    store: Store | None = None,
    facts_max: int = 50_000,
) -> AsyncIterator[LoadedPlugin]:
    """A running kernel with this plugin; at the end of the block the plugin is stopped and the kernel is killed."""
    loaded: list[LoadedPlugin] = []
    with anyio.fail_after(WAIT_S):
        async with (
            running(
                store or FaultyStore(),
                lambda kernel: loaded.append(LoadedPlugin(kernel, name, module, settings, place)),
                facts_max=facts_max,
            ) as kernel,
            task_group() as tasks,
        ):
            [plugin] = loaded
            await tasks.start(plugin.host.run)
            assert kernel is plugin.kernel
            try:
                yield plugin
            finally:
                await plugin.host.stop()


def refusal(name: str, module: ModuleType, settings: Mapping[str, Any], place: Path) -> str:
    """Why the host refuses the plugin with these settings; empty if it loads."""

    async def load() -> str:
        kernel = Kernel(FaultyStore())
        plugin = LoadedPlugin(kernel, name, module, settings, place)
        return "" if plugin.view.state == "active" else f"{plugin.view.reason}"

    return asyncio.run(load())
