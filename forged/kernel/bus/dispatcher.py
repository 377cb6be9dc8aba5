"""The request dispatcher: authorises requests, deduplicates them, and runs their handlers.

The order: authorisation, wrappers, remembered reply, fence, handler, and then the reply waits until its revision is
durable.

Invariants:
- A request that is sent again while it is in flight gets the same reply.
- A handler that does not await costs no task.
- After a handler awaited, the fence is checked again, and a reload of state in between fails the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from forged.auth.access import authorise
from forged.clock import Clock
from forged.errors import ForgedError, RequestRefused, Unavailable, describe
from forged.kernel.bus.cancellation import is_cancelled
from forged.kernel.bus.requests import RequestTable, Route, chain
from forged.kernel.ledger import Ledger
from forged.kernel.messages import ANY_JOB, Call, Decision, Fence, Request
from forged.kernel.pending import Pending
from forged.kernel.replies import reused

_Key = tuple[bytes, int]


@dataclass(frozen=True, slots=True)
class _Running:
    """A request in flight: its handler or a wrapper is awaiting."""

    pending: Pending
    scope: anyio.CancelScope
    digest: int


class RequestDispatcher:
    """Executes requests of clients and of the daemon's services."""

    def __init__(self, table: RequestTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._ledger: Ledger | None = None
        self._tasks: TaskGroup | None = None
        self._running: dict[_Key, _Running] = {}
        self.fence_of: Callable[[str], Fence | None] = lambda job: None
        """Returns a job's current fence, None for an unknown job; requests with an older fence are refused."""
        self.on_handler_bug: Callable[[str, BaseException], None] = lambda owner, error: None
        """Called when a handler or wrapper raises something other than `ForgedError`."""
        self.in_flight = 0
        """Requests with a handler or wrapper that is awaiting."""

    def require_job(self, job: str) -> None:
        """Raise `job_unknown` unless the job exists."""
        if self.fence_of(job) is None:
            raise RequestRefused("job_unknown", f"there is no job {job[:80]!r}", "see `forgectl jobs ls`")

    def open(self, ledger: Ledger) -> None:
        """Accept requests from now on."""
        self._ledger = ledger

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Hold the tasks of async handlers until cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            task_status.started()
            await anyio.sleep_forever()

    def submit(self, request: Request[Any], call: Call) -> Pending:
        """Execute a request; the pending reply is resolved when it is durable or has failed."""
        route = self._table.routes.get(type(request))
        if route is None:
            return _failed(_unknown(type(request).__name__))
        try:
            self._authorise(request, call)
            running = self._running.get((call.client, call.number)) if call.client else None
            if running is not None:
                return _joined(running, call)
            if route.in_flight.used and not route.in_flight.fits(call.principal.holder):
                raise _busy(route, call)
            if route.wrappers:
                return self._spawn(route, chain(route, call, self._innermost(route, call))(request), call)
            begun = self._begin(route, request, call)
            return begun if isinstance(begun, Pending) else self._spawn(route, begun, call)
        except ForgedError as error:
            route.statistics.failed += 1
            return _failed(error)

    def cancel(self, client: bytes, number: int) -> None:
        """Cancel a request in flight; a decision that it has made stays."""
        running = self._running.get((client, number))
        if running is not None:
            running.scope.cancel()

    def _authorise(self, request: Request[Any], call: Call) -> None:
        field, principal = request.job_field, call.principal
        if field == ANY_JOB:
            # A principal with a list of jobs has the role in each of them; the handler checks which.
            if not principal.role.covers(request.needs):
                authorise(principal, request.needs, None)
            return
        authorise(principal, request.needs, getattr(request, field) if field else None)

    def _check_fence(self, request: Request[Any], call: Call) -> None:
        """Refuse an outdated fence; called again after a handler has awaited."""
        field = request.job_field
        if call.fence is None or field is None or field == ANY_JOB:
            return
        job = getattr(request, field)
        current = self.fence_of(job)
        if current is not None and call.fence < current:
            raise RequestRefused(
                "fenced",
                f"job {job} is at term {current.term}, generation {current.generation}; the request was sent at"
                f" term {call.fence.term}, generation {call.fence.generation}",
                "join again and continue with the current generation",
            )

    def _innermost(self, route: Route, call: Call) -> Any:
        async def proceed(request: Request[Any]) -> Any:
            begun = self._begin(route, request, call)
            return await (begun.wait() if isinstance(begun, Pending) else begun)

        return proceed

    def _begin(self, route: Route, request: Request[Any], call: Call) -> Pending | Awaitable[Any]:
        """Return the remembered reply, or run the handler; an async handler is returned as an awaitable."""
        ledger = self._ledger
        assert ledger is not None, "the bus is sealed before it is used"
        remembered = request.decides and call.client != b""
        if request.decides:
            if remembered and (known := ledger.recall(call)) is not None:
                return known if isinstance(known, Pending) else _remembered_reply(type(request), known)
            ledger.require_writable()
        else:
            ledger.require_readable()
        # After the remembered reply: a request that was executed is answered also if its fence is outdated by now.
        self._check_fence(request, call)
        started = self._clock.monotonic()
        result = self._handle(route, request, call)
        if isinstance(result, Awaitable):
            return self._finish_async(route, request, result, call, remembered)
        route.statistics.latency.observe(self._clock.monotonic() - started)
        return self._conclude(route, result, call, remembered)

    def _handle(self, route: Route, request: Request[Any], call: Call) -> Any:
        try:
            return route.handler(request, call)
        except ForgedError:
            raise
        except (Exception, SystemExit) as error:
            raise self._handler_bug(route, error) from error

    def _conclude(self, route: Route, result: Any, call: Call, remembered: bool) -> Pending:
        assert self._ledger is not None
        if not isinstance(result, Decision):
            return self._ledger.settled(result)
        if not (result.facts or result.writes or remembered):
            return self._ledger.settled(result.reply)
        if not route.request.decides:
            self._reload()
            error = TypeError("the handler returned a decision, but the request type has decides = False")
            raise self._bug(route, route.owner, error)
        return self._ledger.append(result, cause=call.cause, origin=call.origin, call=call if remembered else None)

    async def _finish_async(
        self, route: Route, request: Request[Any], result: Awaitable[Any], call: Call, remembered: bool
    ) -> Any:
        assert self._ledger is not None
        started, reloads = self._clock.monotonic(), self._ledger.reloads
        try:
            value = await result
        except ForgedError:
            raise
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise self._handler_bug(route, error) from error
        except (Exception, SystemExit) as error:
            raise self._handler_bug(route, error) from error
        route.statistics.latency.observe(self._clock.monotonic() - started)
        self._check_meanwhile(route, request, call, reloads)
        return await self._conclude(route, value, call, remembered).wait()

    def _check_meanwhile(self, route: Route, request: Request[Any], call: Call, reloads: int) -> None:
        """Fail a request if state was reloaded, or its fence became outdated, while its handler awaited."""
        assert self._ledger is not None
        try:
            if self._ledger.reloads != reloads:
                raise Unavailable("reloading", "state was reloaded from the store in between", "try again")
            self._check_fence(request, call)
        except ForgedError:
            if route.request.decides:
                self._reload()
            raise

    def _spawn(self, route: Route, work: Awaitable[Any], call: Call) -> Pending:
        """Await the work in a task of its own, with the caller's timeout."""
        assert self._tasks is not None, "the bus runs before handlers may await"
        pending = Pending(0)
        scope = anyio.CancelScope()
        key = (call.client, call.number)
        if call.client:
            self._running[key] = _Running(pending, scope, call.digest)
        self.in_flight += 1
        route.in_flight.charge(call.principal.holder, 1)
        self._tasks.start_soon(self._await, route, work, call, pending, scope)
        return pending

    async def _await(
        self, route: Route, work: Awaitable[Any], call: Call, pending: Pending, scope: anyio.CancelScope
    ) -> None:
        error: ForgedError | None = Unavailable("cancelled", "the request was cancelled", "")
        try:
            with scope, anyio.move_on_after(call.timeout_s) as deadline:
                pending.reply = await work
                error = None
            if deadline.cancelled_caught:
                error = Unavailable(
                    "deadline_exceeded",
                    f"no result within {call.timeout_s} s; the request may have been executed",
                    "send it again",
                )
        except ForgedError as raised:
            error = raised
        except asyncio.CancelledError as raised:
            if is_cancelled():
                raise
            error = self._bug(route, _wrappers(route), raised)
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - a wrapper's bug must not end the daemon
            error = self._bug(route, _wrappers(route), raised)
        finally:
            self._finished(route, call, pending, error)

    def _finished(self, route: Route, call: Call, pending: Pending, error: ForgedError | None) -> None:
        self.in_flight -= 1
        route.in_flight.give_back(call.principal.holder)
        key = (call.client, call.number)
        running = self._running.get(key)
        if running is not None and running.pending is pending:
            del self._running[key]
        if error is not None:
            route.statistics.failed += 1
        pending.resolve(error)

    def _handler_bug(self, route: Route, error: BaseException) -> ForgedError:
        """The error of a handler that raised a bug; state is reloaded, since the handler may have changed it."""
        if route.request.decides:
            self._reload()
        return self._bug(route, route.owner, error)

    def _bug(self, route: Route, owner: str, error: BaseException) -> ForgedError:
        name = route.request.__name__
        self.on_handler_bug(f"{name} in {owner}", error)
        return ForgedError("handler_broken", f"{name} failed in {owner}: {describe(error)}", "report this bug")

    def _reload(self) -> None:
        assert self._ledger is not None
        self._ledger.reload(Unavailable("reloading", "state is being reloaded from the store", "try again"))


def _joined(running: _Running, call: Call) -> Pending:
    """The pending reply of the same request that is in flight already."""
    if running.digest != call.digest:
        raise reused(call.number)
    return running.pending


def _wrappers(route: Route) -> str:
    return ", ".join(owner for owner, _ in route.wrappers) or route.owner


def _busy(route: Route, call: Call) -> Unavailable:
    waiting = f"{route.request.__name__}: {route.in_flight.shortage(call.principal.holder)}"
    return Unavailable("busy", waiting, "try again later; see `forgectl handlers`")


def _remembered_reply(request: type[Request[Any]], encoded: bytes) -> Pending:
    pending = Pending(0, msgspec.msgpack.decode(encoded, type=request.reply_type()), encoded)
    pending.resolve()
    return pending


def _failed(error: ForgedError) -> Pending:
    pending = Pending(0)
    pending.resolve(error)
    return pending


def _unknown(name: str) -> RequestRefused:
    return RequestRefused(
        "request_unknown", f"this daemon has no handler for request {name}", "compare the versions of both ends"
    )
