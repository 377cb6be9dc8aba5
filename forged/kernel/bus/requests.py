"""The table of request handlers and wrappers.

Invariants:
- Every request type has exactly one handler when the bus is sealed; otherwise the daemon does not start.
- Wrappers run around the handler, the last added outermost, and may refuse, change or answer a request.
- The reply is remembered inside the wrappers: a repeated request runs the wrappers again, but not the handler.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from forged.errors import ConfigError, Problem
from forged.kernel.bus.statistics import HandlerStatistics
from forged.kernel.messages import Call, Request
from forged.shares import Shares

IN_FLIGHT_MAX = 1024
"""The maximum number of requests of one type in flight, so that a hanging handler does not block other types."""
IN_FLIGHT_RESERVE = 64
IN_FLIGHT_EACH_MAX = 512
"""How many of them the principals of one job may have."""
IN_FLIGHT = (IN_FLIGHT_MAX, IN_FLIGHT_RESERVE, IN_FLIGHT_EACH_MAX)

RequestHandler = Callable[[Any, Call], Any]
"""Takes a request and its call; returns the reply, a `Decision`, or an awaitable of either.

An async handler may be cancelled at each `await`, so it must change state only after its last `await`.
"""
Proceed = Callable[[Any], Awaitable[Any]]
Wrapper = Callable[[Any, Call, Proceed], Awaitable[Any]]


@dataclass(slots=True)
class Route:
    """The handler and wrappers of one request type."""

    request: type[Request[Any]]
    owner: str
    handler: RequestHandler
    wrappers: list[tuple[str, Wrapper]] = field(default_factory=list)
    statistics: HandlerStatistics = field(default_factory=HandlerStatistics)
    in_flight: Shares = field(default_factory=lambda: Shares("requests of this type", *IN_FLIGHT))
    """Requests of this type with a handler or wrapper that is awaiting, by principal."""


class RequestTable:
    """All routes, and the problems found while they were registered."""

    def __init__(self) -> None:
        self.routes: dict[type[Request[Any]], Route] = {}
        self._wrappers: list[tuple[str, type[Request[Any]], Wrapper]] = []
        self._problems: list[Problem] = []
        self._replacements: dict[type[Request[Any]], Route] = {}

    def serve(self, request: type[Request[Any]], handler: RequestHandler, owner: str) -> None:
        """Register the handler of a request type."""
        other = self.routes.get(request)
        if other is not None:
            text = f"{owner} serves {request.__name__}, which {other.owner} serves already; use `wrap` or `replace`"
            self._problems.append(Problem(request.__name__, owner, text=text))
            return
        self.routes[request] = Route(request, owner, handler)

    def replace(self, request: type[Request[Any]], handler: RequestHandler, owner: str) -> None:
        """Register a handler that replaces the built-in one; at most one replacement per type."""
        other = self._replacements.get(request)
        if other is not None:
            text = f"{owner} replaces the handler of {request.__name__}, which {other.owner} replaces already"
            self._problems.append(Problem(request.__name__, owner, text=text))
            return
        self._replacements[request] = Route(request, owner, handler)

    def is_replaced(self, request: type[Request[Any]]) -> bool:
        """Whether a replacement is registered."""
        return request in self._replacements

    def wrap(self, request: type[Request[Any]], wrapper: Wrapper, owner: str) -> None:
        """Register a wrapper of a request type."""
        self._wrappers.append((owner, request, wrapper))

    def seal(self, expected: Iterable[type[Request[Any]]]) -> None:
        """Complete the routes, or raise one `ConfigError` with all problems."""
        for request in expected:
            if request not in self.routes:
                self._problems.append(Problem(request.__name__, None, text=f"{request.__name__} has no handler"))
        for request, route in self._replacements.items():
            if request in self.routes:
                self.routes[request] = route
            else:
                text = f"{route.owner} replaces the handler of {request.__name__}, which has none; use serve"
                self._problems.append(Problem(request.__name__, route.owner, text=text))
        for owner, request, wrapper in self._wrappers:
            if request in self.routes:
                self.routes[request].wrappers.append((owner, wrapper))
            else:
                text = f"{owner} wraps the handler of {request.__name__}, which has none"
                self._problems.append(Problem(request.__name__, owner, text=text))
        if self._problems:
            raise ConfigError(
                "requests_unsettled",
                "every type of request needs exactly one handler",
                "change or remove the plugins named below",
                self._problems,
            )


def chain(route: Route, call: Call, innermost: Proceed) -> Proceed:
    """The innermost callable inside the route's wrappers; the last added wrapper is outermost."""
    proceed = innermost
    for _, wrapper in route.wrappers:
        proceed = _wrapped(wrapper, call, proceed)
    return proceed


def _wrapped(wrapper: Wrapper, call: Call, inner: Proceed) -> Proceed:
    async def proceed(request: Any) -> Any:
        return await wrapper(request, call, inner)

    return proceed
