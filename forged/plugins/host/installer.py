"""Registers the parts of a plugin on the bus.

Invariants:
- A part is registered like a handler of the daemon, under the plugin's name and its own.
- While the plugin is inactive its parts do nothing: requests are handled as if it were not loaded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from inspect import isawaitable
from typing import Any

from forged.errors import RequestRefused, Unavailable
from forged.kernel.bus import Bus
from forged.kernel.bus.requests import Proceed
from forged.kernel.messages import Call, Decision, Fact, Gap, Record
from forged.plugins.alarm_guard import outside
from forged.plugins.context import Delivering, Listening, Observing, PluginRegistration, Serving, Wrapping
from forged.plugins.facts import check_decision
from forged.plugins.host.call_limits import CallLimit
from forged.plugins.host.calls import PluginCaller, inactive
from forged.plugins.host.plugin import Plugin
from forged.plugins.model import REQUESTS


def check(registration: PluginRegistration, bus: Bus) -> None:
    """Raise `RequestRefused` for a registration that is not possible, before any part is installed."""
    served = [serving.request for serving in registration.serving]
    for serving in registration.serving:
        if served.count(serving.request) > 1:
            reason = f"it serves {serving.request.__name__} more than once"
            raise RequestRefused("served_twice", reason, "register one handler")
        _check_serving(serving, bus)
    for wrapping in registration.wrapping:
        name = wrapping.request.__name__
        _check_not_reserved(wrapping.request)
        if wrapping.request not in bus.requests.routes and wrapping.request not in served:
            raise RequestRefused(
                "nothing_to_wrap", f"{name} has no handler", "serve it, or load the plugin that serves it first"
            )


def _check_serving(serving: Serving, bus: Bus) -> None:
    request, name = serving.request, serving.request.__name__
    _check_not_reserved(request)
    route = bus.requests.routes.get(request)
    if serving.replaces and route is None:
        raise RequestRefused(
            "nothing_to_replace", f"{name} has no handler that could be replaced", "use `serve` instead of `replace`"
        )
    if serving.replaces and bus.requests.is_replaced(request):
        raise RequestRefused(
            "replaced_already",
            f"another plugin replaces the handler of {name} already",
            "disable one of the two plugins",
        )
    if not serving.replaces and route is not None:
        raise RequestRefused("served_already", f"{route.owner} serves {name} already", "wrap or replace it")


def _check_not_reserved(request: type[Any]) -> None:
    if request in REQUESTS:
        reason = f"{request.__name__} manages plugins and cannot be replaced"
        raise RequestRefused("request_reserved", reason, "do not serve, replace or wrap it")


class Installer:
    """Registers one plugin's parts."""

    def __init__(self, bus: Bus, turns: PluginCaller, plugin: Plugin) -> None:
        self._bus = bus
        self._caller = turns
        self._plugin = plugin

    def install(self, registration: PluginRegistration) -> None:
        """Register all parts except periodic actions, commands and stop actions, which the host runs."""
        for observing in registration.observing:
            self._observe(observing)
        for delivering in registration.delivering:
            self._follow(delivering)
        for listening in registration.listening:
            self._listen(listening)
        for serving in registration.serving:
            self._serve(serving)
        for wrapping in registration.wrapping:
            self._wrap(wrapping)

    def _observe(self, observing: Observing) -> None:
        plugin, caller = self._plugin, self._caller
        name = plugin.part(observing.name, f"observes {_names(observing.types)}")

        def observe(record: Record) -> Awaitable[None] | None:
            try:
                result = caller.run(observing.handler, record)
                if isawaitable(result):
                    return rest(result)
                _check_silent(name, result)
            except Unavailable as error:
                caller.log_unavailable(plugin, name, error)
            else:
                plugin.succeeded(name)
            return None

        async def rest(result: Awaitable[Any]) -> None:
            try:
                _check_silent(name, await caller.take(plugin, result, observing.deadline_s))
            except Unavailable as error:
                caller.log_unavailable(plugin, name, error)
            else:
                plugin.succeeded(name)

        mailbox = self._bus.on(
            observing.types,
            observe,
            name=name,
            lossless=False,
            mailbox_max=observing.mailbox_max,
            on_gap=self._gap_teller(observing.on_gap),
        )
        plugin.mailboxes.append(mailbox)
        self._bus.owners[name] = plugin.name

    def _follow(self, delivering: Delivering) -> None:
        plugin, caller = self._plugin, self._caller
        followed = ", ".join(sorted(delivering.names)) or _names(delivering.types)
        name = plugin.part(delivering.name, f"follows {followed}")

        async def give(function: Callable[..., Awaitable[None] | None], given: object) -> None:
            result = caller.run(function, given)
            if isawaitable(result):
                await caller.take(plugin, result, delivering.deadline_s)
            plugin.succeeded(name)

        async def deliver(records: Sequence[Record]) -> None:
            wanted = [record for record in records if not delivering.names or record.type in delivering.names]
            if wanted:
                await give(delivering.deliver, wanted)

        async def tell(gap: Gap) -> None:
            if delivering.on_gap is not None:
                await give(delivering.on_gap, gap)

        follower = self._bus.follow(
            delivering.types,
            deliver,
            name=name,
            jobs=delivering.jobs,
            batch_max=delivering.batch_max,
            on_gap=tell,
        )
        plugin.followers.append(follower)
        delivering.feed.attach(follower)
        self._bus.owners[name] = plugin.name

    def _listen(self, listening: Listening) -> None:
        plugin, caller = self._plugin, self._caller
        name = plugin.part(listening.name, f"listens for {listening.signal.__name__}")

        async def listen(signal: Any, call: Call) -> None:
            if plugin.active:
                await caller.attempt(plugin, name, listening.deadline_s, listening.handler, signal, call)

        self._bus.on_signal(listening.signal, listen, name=name)

    def _serve(self, serving: Serving) -> None:
        plugin, caller, request_type = self._plugin, self._caller, serving.request
        verb = "replaces" if serving.replaces else "serves"
        name = plugin.part(request_type.__name__, f"{verb} {request_type.__name__}")
        original = self._bus.requests.routes.get(request_type)

        def decide(request: Any, call: Call) -> Any:
            result = serving.handler(request, call)
            return later(result) if isawaitable(result) else checked(result)

        async def later(result: Awaitable[Any]) -> Any:
            return checked(await result)

        def checked(result: Any) -> Any:
            if isinstance(result, Decision):
                check_decision(result, own=not serving.replaces)
            return result

        def serve(request: Any, call: Call) -> Any:
            if plugin.active:
                return caller.answer(plugin, name, serving.deadline_s, decide, request, call)
            if original is None:
                raise inactive(plugin)
            return original.handler(request, call)

        register = self._bus.replace if serving.replaces else self._bus.serve
        register(request_type, serve, owner=plugin.name)

    def _wrap(self, wrapping: Wrapping) -> None:
        plugin, caller = self._plugin, self._caller
        name = plugin.part(wrapping.request.__name__, f"wraps {wrapping.request.__name__}")

        async def wrap(request: Any, call: Call, proceed: Proceed) -> Any:
            if not plugin.active:
                if wrapping.required:
                    raise inactive(plugin)
                return await proceed(request)
            limit = CallLimit()

            async def proceed_untimed(request: Any) -> Any:
                with limit.paused():
                    return await proceed(request)

            async def inner(request: Any) -> Any:
                return await outside(caller.guard, proceed_untimed(request))

            async def whole() -> Any:
                return await wrapping.wrapper(request, call, inner)

            return await caller.answer_later(plugin, name, whole(), wrapping.deadline_s, limit)

        self._bus.wrap(wrapping.request, wrap, owner=plugin.name)

    def _gap_teller(self, on_gap: Callable[[Gap], None] | None) -> Callable[[Gap], None] | None:
        return None if on_gap is None else partial(self._caller.run, on_gap)


def _check_silent(name: str, result: object) -> None:
    if isinstance(result, Decision):
        raise TypeError(f"{name} returned a decision; an observer may publish facts or make requests instead")


def _names(types: Iterable[type[Fact]]) -> str:
    names = sorted(fact.__name__ for fact in types)
    return "all facts" if "Fact" in names else ", ".join(names)
