"""Where requests are done.

Law: a request is authorised, then wrapped, then recalled if it was answered before, then handled; its reply waits for
the revision that it rests on. A handler that returns without awaiting costs no task. Whoever sends a request again
while it is being done gets the same reply.
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

ROUTE_IN_FLIGHT_MAX = 1024
"""How many requests of one type may await something, so that a handler that hangs does not keep the others out."""

_Key = tuple[bytes, int]


@dataclass(frozen=True, slots=True)
class _Running:
    """A request whose handler, or a wrapper of it, is awaiting something."""

    pending: Pending
    scope: anyio.CancelScope
    digest: int


class RequestDispatcher:
    """Takes requests from the edges and from the daemon's own parts."""

    def __init__(self, table: RequestTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._ledger: Ledger | None = None
        self._tasks: TaskGroup | None = None
        self._running: dict[_Key, _Running] = {}
        self.fence_of: Callable[[str], Fence | None] = lambda job: None
        """How far a job is; requests that carry an older fence are refused."""
        self.on_handler_bug: Callable[[str, BaseException], None] = lambda owner, error: None
        """Told who raised what it should not have."""
        self.in_flight = 0
        """Requests whose handlers are awaiting something."""

    def require_job(self, job: str) -> None:
        """Refuse what is said or asked about a job that is not there."""
        if self.fence_of(job) is None:
            raise RequestRefused("job_unknown", f"there is no job {job[:80]!r}", "see `forgectl jobs ls`")

    def open(self, ledger: Ledger) -> None:
        """Requests may come from now on."""
        self._ledger = ledger

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep the handlers that await something, for ever."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            task_status.started()
            await anyio.sleep_forever()

    def submit(self, request: Request[Any], call: Call) -> Pending:
        """Have a request done; the pending reply is done when it is, or has failed."""
        route = self._table.routes.get(type(request))
        if route is None:
            return _failed(_unknown(type(request).__name__))
        try:
            self._admit(request, call)
            running = self._running.get((call.client, call.number)) if call.client else None
            if running is not None:
                return _joined(running, call)
            if route.in_flight >= ROUTE_IN_FLIGHT_MAX:
                raise _busy(route)
            if route.wrappers:
                return self._spawn(route, chain(route, call, self._innermost(route, call))(request), call)
            begun = self._begin(route, request, call)
            return begun if isinstance(begun, Pending) else self._spawn(route, begun, call)
        except ForgedError as error:
            route.statistics.failed += 1
            return _failed(error)

    def cancel(self, client: bytes, number: int) -> None:
        """Stop a request that is still awaiting something; what it has decided stays decided."""
        running = self._running.get((client, number))
        if running is not None:
            running.scope.cancel()

    def _admit(self, request: Request[Any], call: Call) -> None:
        field, principal = request.job_field, call.principal
        if field == ANY_JOB:
            # Whoever is bound to jobs has the role in some job at least; the handler looks at which.
            if not principal.role.covers(request.needs):
                authorise(principal, request.needs, None)
            return
        authorise(principal, request.needs, getattr(request, field) if field else None)

    def _check_fence(self, request: Request[Any], call: Call) -> None:
        """Refuse whoever has not followed the job; asked again after a handler has awaited something."""
        field = request.job_field
        if call.fence is None or field is None or field == ANY_JOB:
            return
        job = getattr(request, field)
        current = self.fence_of(job)
        if current is not None and call.fence < current:
            raise RequestRefused(
                "fenced",
                f"job {job} is at term {current.term}, generation {current.generation}; the caller at"
                f" {call.fence.term}, {call.fence.generation}",
                "attach again and go on from the present generation",
            )

    def _innermost(self, route: Route, call: Call) -> Any:
        async def proceed(request: Request[Any]) -> Any:
            begun = self._begin(route, request, call)
            return await (begun.wait() if isinstance(begun, Pending) else begun)

        return proceed

    def _begin(self, route: Route, request: Request[Any], call: Call) -> Pending | Awaitable[Any]:
        """Recall the answer, or run the handler; what is left to await is returned."""
        ledger = self._ledger
        assert ledger is not None, "the bus is sealed before it is used"
        remembered = request.decides and call.client != b""
        if request.decides:
            if remembered and (known := ledger.recall(call)) is not None:
                return known if isinstance(known, Pending) else _recalled(type(request), known)
            ledger.require_writable()
        else:
            ledger.require_sound()
        # After recalling: what was done is answered, however far the job has gone since.
        self._check_fence(request, call)
        started = self._clock.monotonic()
        result = self._handle(route, request, call)
        if isinstance(result, Awaitable):
            return self._later(route, request, result, call, remembered)
        route.statistics.latency.observe(self._clock.monotonic() - started)
        return self._conclude(route, result, call, remembered)

    def _handle(self, route: Route, request: Request[Any], call: Call) -> Any:
        try:
            return route.handler(request, call)
        except ForgedError:
            raise
        except (Exception, SystemExit) as error:
            raise self._broken(route, error) from error

    def _conclude(self, route: Route, result: Any, call: Call, remembered: bool) -> Pending:
        assert self._ledger is not None
        if not isinstance(result, Decision):
            return self._ledger.settled(result)
        if not (result.facts or result.writes or remembered):
            return self._ledger.settled(result.reply)
        if not route.request.decides:
            self._taint()
            error = TypeError("it decides, and its `decides` says that it does not")
            raise self._mistake(route, route.owner, error)
        return self._ledger.append(result, cause=call.cause, origin=call.origin, call=call if remembered else None)

    async def _later(
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
            raise self._broken(route, error) from error
        except (Exception, SystemExit) as error:
            raise self._broken(route, error) from error
        route.statistics.latency.observe(self._clock.monotonic() - started)
        self._check_meanwhile(route, request, call, reloads)
        return await self._conclude(route, value, call, remembered).wait()

    def _check_meanwhile(self, route: Route, request: Request[Any], call: Call, reloads: int) -> None:
        """Refuse what rests on a state that has been taken back, or on a generation that is over."""
        assert self._ledger is not None
        try:
            if self._ledger.reloads != reloads:
                raise Unavailable("reloading", "state was read anew from the store in between", "try again")
            self._check_fence(request, call)
        except ForgedError:
            if route.request.decides:
                self._taint()
            raise

    def _spawn(self, route: Route, work: Awaitable[Any], call: Call) -> Pending:
        """Await the work in a task of its own, under the caller's deadline."""
        assert self._tasks is not None, "the bus runs before handlers may await"
        pending = Pending(0)
        scope = anyio.CancelScope()
        key = (call.client, call.number)
        if call.client:
            self._running[key] = _Running(pending, scope, call.digest)
        self.in_flight += 1
        route.in_flight += 1
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
                    "deadline_exceeded", f"not done within {call.timeout_s} s; whether it was is unknown", "ask again"
                )
        except ForgedError as raised:
            error = raised
        except asyncio.CancelledError as raised:
            if is_cancelled():
                raise
            error = self._mistake(route, _wrappers(route), raised)
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - a wrapper's bug must not be the daemon's end
            error = self._mistake(route, _wrappers(route), raised)
        finally:
            self._finished(route, call, pending, error)

    def _finished(self, route: Route, call: Call, pending: Pending, error: ForgedError | None) -> None:
        self.in_flight -= 1
        route.in_flight -= 1
        key = (call.client, call.number)
        running = self._running.get(key)
        if running is not None and running.pending is pending:
            del self._running[key]
        if error is not None:
            route.statistics.failed += 1
        pending.resolve(error)

    def _broken(self, route: Route, error: BaseException) -> ForgedError:
        """A handler raised what it should not have; what it did to its state before is undone."""
        if route.request.decides:
            self._taint()
        return self._mistake(route, route.owner, error)

    def _mistake(self, route: Route, owner: str, error: BaseException) -> ForgedError:
        name = route.request.__name__
        self.on_handler_bug(f"{name} in {owner}", error)
        return ForgedError("handler_broken", f"{name} failed in {owner}: {describe(error)}", "report it as a bug")

    def _taint(self) -> None:
        assert self._ledger is not None
        self._ledger.reload(Unavailable("reloading", "state is being read anew from the store", "try again"))


def _joined(running: _Running, call: Call) -> Pending:
    """The reply to the same request that is being done already."""
    if running.digest != call.digest:
        raise reused(call.number)
    return running.pending


def _wrappers(route: Route) -> str:
    return ", ".join(owner for owner, _ in route.wrappers) or route.owner


def _busy(route: Route) -> Unavailable:
    waiting = f"{route.in_flight} requests of type {route.request.__name__} have begun and not ended"
    return Unavailable("busy", waiting, "try again later; see `forgectl handlers`")


def _recalled(request: type[Request[Any]], encoded: bytes) -> Pending:
    pending = Pending(0, msgspec.msgpack.decode(encoded, type=request.reply_type()), encoded)
    pending.resolve()
    return pending


def _failed(error: ForgedError) -> Pending:
    pending = Pending(0)
    pending.resolve(error)
    return pending


def _unknown(name: str) -> RequestRefused:
    return RequestRefused("request_unknown", f"nobody here answers {name}", "compare the versions of both ends")
