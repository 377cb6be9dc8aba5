"""The asynchronous client.

Invariants:
- A client outlives its connections. A pending request is sent again with the same number, so it takes effect once;
  streams continue at their position.
- Only a reply, a refusal or the deadline ends a request.
- The number of pending requests is limited; further requests wait.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from copy import copy
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup

from forged.client.bulk import BulkMethods
from forged.client.connection import Link
from forged.client.connector import Connector
from forged.client.memory_methods import MemoryMethods
from forged.client.model_methods import ModelMethods
from forged.client.owner_task import OwnerTask
from forged.client.served_requests import ServedRequests
from forged.client.stream import FactStream
from forged.clock import Clock, SystemClock
from forged.errors import ForgedError, NotLeader, RequestRefused, Unavailable
from forged.ids import new_client_id
from forged.kernel.messages import Fact, Fence, Gap, Record, Request, Signal, Ticket
from forged.net.bulk import side_connection
from forged.net.protocol.calls import TIMEOUT_S, OutgoingCalls
from forged.net.protocol.messages import (
    Cancel,
    Credit,
    Ended,
    Facts,
    Failure,
    GapMessage,
    Reply,
    RequestMessage,
    SignalMessage,
    Unsubscribe,
    encode,
    failure,
)
from forged.net.transport.connection import ConnectionLimits
from forged.net.transport.port import Address, Network
from forged.net.transport.tls import client_context
from forged.paths import client_endpoints
from forged.retry import RECONNECTING, RetryPolicy

R = TypeVar("R")

CONNECT_TIMEOUT_S = 10.0
REQUESTS_WAITING_MAX = 1000
"""Below the 1024 at which a daemon stops reading, so that it still receives cancellations."""
REQUEST_HEAD_BYTES_MAX = 512
"""The room in a frame for everything but the request's own fields."""
EARLIEST = -1
"""As `since`: all facts that the daemon still keeps."""

NOT_OPEN = RequestRefused("client_not_open", "the client is not open", "use it inside `async with ForgedClient(...)`")
CLOSED = Unavailable("client_closed", "the client was closed", "open a new one")


class ForgedClient(BulkMethods, ModelMethods, MemoryMethods):
    """The client of a daemon, or of one of several daemons; an asynchronous context manager.

    Endpoints are `unix:///path`, `tcp://host:port` or `tls://host:port`; the default is `$FORGED_ENDPOINT`, else the
    socket `$FORGED_SOCKET`, else the default socket of this user. `token` defaults to `$FORGED_TOKEN`; an empty one
    means none. Entering waits for the first connection. `network` replaces the way to connect, such as
    `SystemNetwork(tls_client=...)` for other certificates.
    """

    def __init__(
        self,
        *endpoints: str,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        reconnect: RetryPolicy = RECONNECTING,
        network: Network | None = None,
        clock: Clock | None = None,
        source: random.Random | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        endpoints = endpoints or client_endpoints(os.environ, os.getuid())
        self.endpoints = tuple(map(Address.parse, endpoints))
        self.timeout_s = timeout_s
        clock, source = clock or SystemClock(), source or random.SystemRandom()
        super().__init__(clock, source)
        self.token = (token if token is not None else os.environ.get("FORGED_TOKEN")) or None
        """The token of this client, which helper connections of the same caller use too."""
        self._limits = limits or ConnectionLimits()
        self._client = new_client_id(source.getrandbits)
        self._calls = OutgoingCalls(self._clock)
        self._pending = 0
        self._waiting_for_slot: deque[asyncio.Future[None]] = deque()
        self._streams: dict[int, FactStream] = {}
        self._stream_number = 0
        self._served = ServedRequests()
        self.connection_listeners: list[Callable[[], object]] = []
        """Called after each connection is made, and after it is lost."""
        self._end: ForgedError | None = NOT_OPEN
        self._tasks: TaskGroup | None = None
        self._owner = OwnerTask(self._running())
        self._network = network if network is not None else _system_network(self.endpoints)
        self._connector = Connector(
            self.endpoints,
            self._network,
            clock,
            source,
            reconnect,
            connect_timeout_s,
            make_link=self._make_link,
            connected=self._resume,
            disconnected=self._disconnected,
            ended=self._finish,
        )

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise RequestRefused("client_reopened", "a client can be opened only once", "create another client")
        await self._owner.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self._owner.close()

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._link is not None and not self._link.lost

    @property
    def endpoint(self) -> str | None:
        """The endpoint of the current connection."""
        return str(self._link.address) if self._link is not None else None

    def descriptors(self) -> list[int]:
        """The file descriptors of its connection, which forked children must close."""
        descriptor = None if self._link is None else self._link.descriptor()
        return [] if descriptor is None else [descriptor]

    # What the daemon does.

    async def request(self, request: Request[R], *, timeout_s: float | None = None, fence: Fence | None = None) -> R:
        """Send a request and return its reply. It takes effect once, even if the connection breaks."""
        left_s = self.timeout_s if timeout_s is None else timeout_s
        if self._pending >= REQUESTS_WAITING_MAX:
            left_s = await self._wait_for_slot(left_s)
        self._pending += 1
        try:
            return await self._ask(request, left_s, fence)
        finally:
            self._pending -= 1
            if self._waiting_for_slot:
                self._admit_next()

    def signal(self, signal: Signal) -> None:
        """Send a signal; dropped without a connection or while the daemon does not read."""
        if self._link is not None and not self._link.write_paused:
            self._link.send(SignalMessage(type(signal).__name__, msgspec.Raw(encode(signal))))

    def facts(
        self,
        *types: type[Fact] | str,
        since: int | None = None,
        jobs: Iterable[str] = (),
        until: int | None = None,
    ) -> FactStream:
        """A stream of facts with ids greater than `since` (None: new facts only; `EARLIEST`: all that are kept).

        Use it as `async with client.facts(...) as stream: async for record in stream: ...`. It also yields `Gap`s.
        """
        self._stream_number += 1
        names = tuple(one if isinstance(one, str) else one.__name__ for one in types)
        wanted = () if "Fact" in names else names
        return FactStream(
            self._stream_number,
            since,
            wanted,
            tuple(jobs),
            until=until,
            opened=self._open_stream,
            closed=self._close_stream,
            grant=self._grant,
        )

    async def past_facts(
        self, *types: type[Fact] | str, since: int = EARLIEST, jobs: Iterable[str] = ()
    ) -> AsyncIterator[Record | Gap]:
        """All facts up to now."""
        latest = (await self.status()).last_fact
        async with self.facts(*types, since=since, jobs=jobs, until=latest) as stream:
            async for item in stream:
                yield item

    def serve(self, request: type[Request[R]], handler: Callable[[Any], Awaitable[R]]) -> None:
        """Answer requests of this type that come from the daemon."""
        self._served.serve(request, handler)

    # Side connections.

    async def _use(self, ticket: Ticket, offer: side_connection.BulkTransfer, offset: int = 0) -> None:
        link = self._link
        if link is None:
            raise Unavailable(
                "connection_lost",
                "no connection to a daemon for a side connection",
                "try again",
            )
        await side_connection.transfer_with_ticket(
            self._network, self._clock, self._limits, link.address, self._client, ticket, offer, offset, self.token
        )

    # Opening and closing.

    @property
    def _link(self) -> Link | None:
        return self._connector.link

    def _make_link(self, address: Address) -> Link:
        return Link(self, self._clock, self._limits, address, self._client, self.token)

    def _resume(self, link: Link) -> None:
        """Send pending requests again and resume the streams."""
        for number in self._calls.unanswered():
            self._send(link, number)
        for stream in list(self._streams.values()):
            self._subscribe(link, stream)
        self._tell_connection()

    def _disconnected(self) -> None:
        self._tell_connection()

    def _tell_connection(self) -> None:
        for listener in list(self.connection_listeners):
            listener()

    def _finish(self, error: ForgedError) -> None:
        """Fail all pending requests and streams."""
        self._end = error
        self._calls.fail_all(error)
        for stream in list(self._streams.values()):
            stream.fail(error)

    @property
    def last_failures(self) -> str:
        """Why there is no connection, in words; empty if unknown."""
        return self._connector.last_failures

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Keep a connection inside the block, which begins with the first one."""
        failure: ForgedError | None = None
        async with anyio.create_task_group() as self._tasks:
            self._end = None
            self._tasks.start_soon(self._connector.run)
            try:
                await self._connector.first()
                yield
            except ForgedError as error:
                # Raised below: the task group would wrap it in an exception group.
                failure = error
            finally:
                with anyio.CancelScope(shield=True):
                    self._connector.finish(CLOSED)
                    await self._connector.leave(self._calls.acknowledged)
                self._tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    # Requests.

    async def _ask(self, request: Request[R], timeout_s: float, fence: Fence | None) -> R:
        if self._end is not None:
            raise copy(self._end)
        number, answer = self._calls.open(request, timeout_s, fence)
        if self._link is not None:
            self._send(self._link, number)
        try:
            reply: R = await answer
        except BaseException as error:
            if self._calls.abandon(number) and self._link is not None:
                self._link.send(Cancel(number))
            if isinstance(error, Unavailable) and error.code == "deadline_exceeded" and self.last_failures:
                raise Unavailable(error.code, f"{error.message}: {self.last_failures}", error.fix) from None
            raise
        return reply

    async def _wait_for_slot(self, timeout_s: float) -> float:
        """Wait until fewer requests are pending; returns the remaining time."""
        deadline = self._clock.monotonic() + timeout_s
        with anyio.move_on_after(timeout_s) as scope:
            while self._pending >= REQUESTS_WAITING_MAX:
                slot = asyncio.get_running_loop().create_future()
                self._waiting_for_slot.append(slot)
                try:
                    await slot
                except BaseException:
                    # This request was admitted and is cancelled: admit the next one.
                    if slot.done() and not slot.cancelled():
                        self._admit_next()
                    raise
        if scope.cancelled_caught:
            raise Unavailable(
                "congested",
                f"{REQUESTS_WAITING_MAX} requests are pending; this one was not sent",
                "send fewer requests at once",
            )
        return deadline - self._clock.monotonic()

    def _admit_next(self) -> None:
        while self._waiting_for_slot:
            slot = self._waiting_for_slot.popleft()
            if not slot.done():
                slot.set_result(None)
                return

    def _send(self, link: Link, number: int) -> None:
        message = self._calls.message(number)
        frame_bytes_max = link.limits.frame_bytes_max
        if len(message.body) + REQUEST_HEAD_BYTES_MAX <= frame_bytes_max:
            link.send(message)
        else:
            # The daemon would close the connection each time it is sent.
            text = f"{message.method} does not fit into a frame of {frame_bytes_max} bytes"
            fix = "send large data over a side connection"
            self._calls.outcome(failure(number, RequestRefused("request_too_large", text, fix)))

    # Messages of the link.

    def on_outcome(self, link: Link, message: Reply | Failure) -> None:
        if type(message) is Failure and message.code == _NOT_LEADER and len(self.endpoints) > 1:
            # The request had no effect here; it is sent again to another endpoint.
            link.close(NotLeader(message.code, message.text, message.fix))
        else:
            self._calls.outcome(message)

    def on_stream(self, message: Facts | GapMessage | Ended) -> None:
        stream = self._streams.get(message.stream)
        if stream is None:
            return
        if type(message) is Ended:
            del self._streams[message.stream]
        stream.take(message)

    def on_request(self, link: Link, message: RequestMessage) -> None:
        assert self._tasks is not None
        self._tasks.start_soon(self._served.answer, link, message)

    def on_cancel(self, link: Link, message: Cancel) -> None:
        self._served.cancel(link, message)

    # Streams.

    def _open_stream(self, stream: FactStream) -> None:
        if self._end is not None:
            raise copy(self._end)
        self._streams[stream.number] = stream
        if self._link is not None:
            self._subscribe(self._link, stream)

    def _subscribe(self, link: Link, stream: FactStream) -> None:
        try:
            link.send(stream.subscribe(link.welcome.result().history))
        except ForgedError as error:
            # The subscribed names do not fit into a frame.
            del self._streams[stream.number]
            stream.fail(error)

    def _close_stream(self, stream: FactStream) -> None:
        if self._streams.pop(stream.number, None) is not None and self._link is not None:
            self._link.send(Unsubscribe(stream.number))

    def _grant(self, credit: Credit) -> None:
        if self._link is not None:
            self._link.send(credit)


_NOT_LEADER = "not_leader"


def _system_network(endpoints: Iterable[Address]) -> Network:
    """The machine's network; for TLS with what `$FORGED_CA`, `$FORGED_CERTIFICATE` and `$FORGED_KEY` name."""
    from forged.net.transport.sockets import SystemNetwork

    if not any(address.scheme == "tls" for address in endpoints):
        return SystemNetwork()
    names = ("FORGED_CA", "FORGED_CERTIFICATE", "FORGED_KEY")
    return SystemNetwork(tls_client=client_context(*(os.environ.get(name) or None for name in names)))
