"""Requests: each type has one handler, found before anybody asks.

Law: which handler answers is settled when the bus is sealed; a type with no handler, or with two, is refused then. A
wrapper sees the request before and the reply after the handler, outermost first, and may refuse, change or answer by
itself. What a decision changes is remembered innermost, so a repeated request runs the wrappers again and the handler
once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from forged.errors import ConfigError, Problem
from forged.kernel.bus.statistics import HandlerStatistics
from forged.kernel.messages import Call, Request

RequestHandler = Callable[[Any, Call], Any]
"""Takes a request and its call; returns the reply, a `Decision`, or an awaitable of either.

One that awaits may be cancelled at each `await`, so it changes state behind the last one only.
"""
Proceed = Callable[[Any], Awaitable[Any]]
Wrapper = Callable[[Any, Call, Proceed], Awaitable[Any]]


@dataclass(slots=True)
class Route:
    """How one type of request is answered, and by whom."""

    request: type[Request[Any]]
    owner: str
    handler: RequestHandler
    wrappers: list[tuple[str, Wrapper]] = field(default_factory=list)
    statistics: HandlerStatistics = field(default_factory=HandlerStatistics)
    in_flight: int = 0
    """How many are awaiting something."""


class RequestTable:
    """The routes, and what was wrong about them."""

    def __init__(self) -> None:
        self.routes: dict[type[Request[Any]], Route] = {}
        self._wrappers: list[tuple[str, type[Request[Any]], Wrapper]] = []
        self._problems: list[Problem] = []
        self._replacements: dict[type[Request[Any]], Route] = {}

    def serve(self, request: type[Request[Any]], handler: RequestHandler, owner: str) -> None:
        """Answer a type of request that nobody else answers."""
        other = self.routes.get(request)
        if other is not None:
            wanted = f"one handler; {other.owner} answers it already, so wrap or replace that one"
            self._problems.append(Problem(request.__name__, owner, wanted))
            return
        self.routes[request] = Route(request, owner, handler)

    def replace(self, request: type[Request[Any]], handler: RequestHandler, owner: str) -> None:
        """Answer in the place of whoever does; only one may."""
        other = self._replacements.get(request)
        if other is not None:
            wanted = f"one replacement; {other.owner} replaces it already"
            self._problems.append(Problem(request.__name__, owner, wanted))
            return
        self._replacements[request] = Route(request, owner, handler)

    def is_replaced(self, request: type[Request[Any]]) -> bool:
        """Whether somebody answers it in the place of its handler."""
        return request in self._replacements

    def wrap(self, request: type[Request[Any]], wrapper: Wrapper, owner: str) -> None:
        """See a type of request before its handler and the reply after it."""
        self._wrappers.append((owner, request, wrapper))

    def seal(self, expected: Iterable[type[Request[Any]]]) -> None:
        """Settle the routes, or raise one error that names all that is wrong."""
        for request in expected:
            if request not in self.routes:
                self._problems.append(Problem(request.__name__, None, "a handler; none serves it"))
        for request, route in self._replacements.items():
            if request in self.routes:
                self.routes[request] = route
            else:
                wanted = "a handler to replace; there is none, so serve it"
                self._problems.append(Problem(request.__name__, route.owner, wanted))
        for owner, request, wrapper in self._wrappers:
            if request in self.routes:
                self.routes[request].wrappers.append((owner, wrapper))
            else:
                self._problems.append(Problem(request.__name__, owner, "a handler to wrap; there is none"))
        if self._problems:
            raise ConfigError(
                "requests_unsettled",
                "every type of request needs exactly one handler",
                "change or remove the plugins named below",
                self._problems,
            )


def chain(route: Route, call: Call, innermost: Proceed) -> Proceed:
    """The wrappers of a route around its handler, the one that was added last outermost."""
    proceed = innermost
    for _, wrapper in route.wrappers:
        proceed = _wrapped(wrapper, call, proceed)
    return proceed


def _wrapped(wrapper: Wrapper, call: Call, inner: Proceed) -> Proceed:
    async def proceed(request: Any) -> Any:
        return await wrapper(request, call, inner)

    return proceed
