"""A kernel with plugins on virtual time, without listeners."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from forged.kernel.bus.model import HandlerFailed
from forged.kernel.messages import Fact, Request, Signal
from forged.kernel.store.port import Store
from forged.log import SILENT, Log
from forged.plugins.alarm_guard import Guard, Unguarded
from forged.plugins.context import PluginContext
from forged.plugins.host.plugin import Plugin, PluginLimits
from forged.plugins.host.plugin_host import PluginHost, PluginSource
from forged.plugins.model import (
    API_VERSION,
    REQUESTS,
    DisablePlugin,
    EnablePlugin,
    ListPlugins,
    PluginQuarantined,
    PluginState,
    PluginView,
    RunPluginCommand,
)
from tests.kernel_fixture import Kernel, call, running, task_group

FAILURES_MAX = 3
Register = Callable[[PluginContext], Any]


class Said(Fact, frozen=True):
    """A plugin's fact."""

    text: str
    more: Any = None


class Guess(Request[int], frozen=True):
    """A plugin's own request."""

    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None

    number: int = 0


class Vote(Request[str], frozen=True):
    """A plugin's own request that decides."""

    job_field: ClassVar[str | None] = None

    text: str = ""


class Knock(Signal, frozen=True):
    """A plugin's signal."""

    job_field: ClassVar[str | None] = None


@dataclass
class PluginKernel:
    """A running kernel and its plugin host."""

    kernel: Kernel
    host: PluginHost

    def plugin(self, name: str = "one") -> Plugin:
        return self.host.plugins[name]

    def state(self, name: str = "one") -> PluginState:
        return self.plugin(name).state

    async def view(self, name: str = "one") -> PluginView:
        views = await self.kernel.bus.ask(ListPlugins())
        return next(view for view in views if view.name == name)

    async def enable(self, name: str = "one") -> None:
        await self.kernel.bus.ask(EnablePlugin(name), call())

    async def disable(self, name: str = "one") -> None:
        await self.kernel.bus.ask(DisablePlugin(name), call())

    async def run(self, command: str, name: str = "one", **arguments: Any) -> Any:
        return await self.kernel.bus.ask(RunPluginCommand(name, command, arguments), call())

    def quarantines(self) -> list[PluginQuarantined]:
        facts: list[PluginQuarantined] = self.kernel.facts(PluginQuarantined)
        return facts

    def failures(self) -> list[str]:
        return [fact.reason for fact in self.kernel.facts(HandlerFailed)]


@dataclass
class ReportException:
    """Records unexpected exceptions."""

    told: list[tuple[str, BaseException]] = field(default_factory=list)

    def __call__(self, owner: str, error: BaseException) -> None:
        self.told.append((owner, error))


def source(register: Register | None = None, name: str = "one", **attributes: Any) -> PluginSource:
    """The source of a plugin with this `register` function and these module attributes."""
    module = ModuleType(name)
    module.__dict__.update({"API_VERSION": API_VERSION} | attributes)
    if register is not None:
        module.__dict__["register"] = register
    return PluginSource(name, "a test", lambda: module)


def host_of(
    kernel: Kernel,
    *sources: PluginSource,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    guard: Guard | None = None,
    log: Log = SILENT,
    directory: Path = Path("/nowhere"),
    **limits: Any,
) -> PluginHost:
    """A host with these plugins loaded, on a bus that is not sealed yet."""
    host = PluginHost(
        kernel.bus,
        kernel.clock,
        log,
        guard or Unguarded(),
        settings=settings or {},
        directory=directory,
        limits=PluginLimits(**({"failures_max": FAILURES_MAX} | limits)),
    )
    host.load(sources)
    return host


@asynccontextmanager
async def running_plugins(
    *plugins: Register | PluginSource,
    store: Store | None = None,
    register: Callable[[Kernel], object] = lambda kernel: None,
    facts_max: int = 50_000,
    **more: Any,
) -> AsyncIterator[PluginKernel]:
    """A running kernel with plugins "one", "two" and "three" that have these `register` functions."""
    names = iter(("one", "two", "three"))
    sources = [one if isinstance(one, PluginSource) else source(one, next(names)) for one in plugins]
    hosts: list[PluginHost] = []

    def register_all(kernel: Kernel) -> None:
        register(kernel)
        hosts.append(host_of(kernel, *sources, **more))

    async with running(store, register_all, requests=REQUESTS, facts_max=facts_max) as kernel, task_group() as tasks:
        await tasks.start(hosts[0].run)
        yield PluginKernel(kernel, hosts[0])


def on(types: Any, handler: Any, **terms: Any) -> Register:
    """Registers one observer."""
    return lambda context: context.on(types, handler, **({"name": "part"} | terms))


class Contexts:
    """A `register` function that keeps its context."""

    def __init__(self, then: Register = lambda context: None) -> None:
        self._then = then
        self.context: PluginContext

    def __call__(self, context: PluginContext) -> None:
        self.context = context
        self._then(context)
