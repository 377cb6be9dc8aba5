"""A plugin in a daemon without listeners, with a virtual clock for its pauses."""

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
"""Real seconds after which a test has waited in vain."""
TOGETHER = 50
"""Facts in one decision."""
VIEWER = Principal("a viewer", Role.VIEWER)


class Blob(Fact, frozen=True):
    """Whatever a plugin may put on record."""

    value: Any


class Rare(Fact, frozen=True):
    """Something of another type."""

    number: int


@dataclass
class RecordingLog:
    """A log that is kept."""

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


class House:
    """The plugin, what it is plugged into, and how long its follower has rested."""

    def __init__(self, kernel: Kernel, name: str, module: ModuleType, settings: Mapping[str, Any], place: Path) -> None:
        self.kernel = kernel
        self.name = name
        self.clock = ManualClock()
        self.log = RecordingLog()
        self.naps: list[float] = []
        self.on_nap: Callable[[], object] = lambda: None
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
            follower._sleep = self._nap
            follower._now = self.clock.monotonic

    @property
    def view(self) -> PluginView:
        [view] = self.host.views
        return view

    @property
    def follower(self) -> Any:
        [follower] = self.kernel.bus.followers.values()
        return follower

    async def say(self, *facts: Fact, job: str = "") -> list[int]:
        """Put facts on record; returns their ids."""
        ids: list[int] = []
        for start in range(0, len(facts), TOGETHER):
            some = facts[start : start + TOGETHER]
            pending = self.kernel.ledger.append(Decision(None, some, job=job), origin="a test")
            ids += range(pending.revision - len(some) + 1, pending.revision + 1)
            await pending.wait()
        return ids

    async def run(self, command: str, principal: Principal | None = None) -> Any:
        """What one of its commands answers."""
        call = Call(principal or Principal("an operator", Role.OPERATOR), "a test")
        return await self.kernel.bus.ask(RunPluginCommand(self.name, command), call)

    async def caught_up(self) -> None:
        """Wait until everything was delivered that is on record."""
        while not self.follower.idle:
            await asyncio.sleep(0)

    async def stalled(self) -> str:
        """Wait until it cannot go on; returns why."""
        while self.follower.waiting_for is None:
            await asyncio.sleep(0)
        return str(self.follower.waiting_for)

    async def _nap(self, pause_s: float) -> None:
        self.naps.append(pause_s)
        self.clock.now += pause_s
        await asyncio.sleep(0)
        self.on_nap()


@asynccontextmanager
async def plugged(
    name: str,
    module: ModuleType,
    settings: Mapping[str, Any],
    place: Path,
    *,
    store: Store | None = None,
    facts_max: int = 50_000,
) -> AsyncIterator[House]:
    """A house with this plugin in it, killed at the end of the block, but for what the plugin does at its stop."""
    houses: list[House] = []
    with anyio.fail_after(WAIT_S):
        async with (
            running(
                store or FaultyStore(),
                lambda kernel: houses.append(House(kernel, name, module, settings, place)),
                facts_max=facts_max,
            ) as kernel,
            task_group() as tasks,
        ):
            [house] = houses
            await tasks.start(house.host.run)
            assert kernel is house.kernel
            try:
                yield house
            finally:
                await house.host.stop()


def refusal(name: str, module: ModuleType, settings: Mapping[str, Any], place: Path) -> str:
    """Why a plugin is not taken in with these settings; empty if it is."""

    async def load() -> str:
        kernel = Kernel(FaultyStore())
        house = House(kernel, name, module, settings, place)
        return "" if house.view.state == "active" else f"{house.view.reason}"

    return asyncio.run(load())
