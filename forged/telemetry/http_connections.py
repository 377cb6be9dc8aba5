"""The HTTP server's connections and their deadlines.

Invariants:
- At most `CONNECTIONS_MAX` connections are open, and half of them of one address, or of one user of this host. Beyond
  that a new connection replaces an idle one of the same address, or of the address with most.
- A connection whose request had the rights of monitoring, an operator's too, is replaced only by its own address.
- Each connection has a deadline for its next request or for reading its response, and is aborted after it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from forged.net.transport.sockets import tcp_peer

CONNECTIONS_MAX = 256
"""There is no reserve for operators: `forgectl` uses the Unix socket, and health checks come from this host."""
REQUEST_TIMEOUT_S = 10.0
"""Seconds from the connection to the last header of its first request."""
RESPONSE_TIMEOUT_S = 10.0
"""Seconds until a response has been produced and read."""
IDLE_MAX_S = 90.0
"""How long an idle connection is kept: Prometheus usually scrapes once a minute or more often."""

_NO_ROOM = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class HttpConnections:
    """The connections of one HTTP server."""

    def __init__(self, connections_max: int = CONNECTIONS_MAX) -> None:
        self._connections_max = connections_max
        self._server: web.Server | None = None
        self._deadlines: dict[RequestHandler, float] = {}
        """The deadline of each open connection."""
        self._sources: dict[RequestHandler, str] = {}
        """The address or user of each connection."""
        self._served: set[RequestHandler] = set()
        self._trusted: set[RequestHandler] = set()

    def begin(self, server: web.Server) -> None:
        """Accept connections for this server."""
        self._server = server

    @property
    def here(self) -> list[RequestHandler]:
        return [] if self._server is None else self._server.connections

    def enter(self) -> asyncio.BaseProtocol:
        """The protocol of a new connection, until its peer is known."""
        return _Arrival(self)

    def admit(self, source: str) -> RequestHandler | None:
        """The protocol of a connection from this address or user; None if there is no room."""
        assert self._server is not None, "begin comes before enter"
        if not self._has_room(source):
            return None
        connection = self._server()
        self._deadlines[connection] = self._now() + REQUEST_TIMEOUT_S
        self._sources[connection] = source
        return connection

    def trust(self, connection: RequestHandler) -> None:
        """The connection's request had the rights of monitoring."""
        self._trusted.add(connection)

    @contextmanager
    def serving(self, connection: RequestHandler) -> Iterator[None]:
        """The block produces and sends the response of this connection."""
        self._deadlines[connection] = self._now() + RESPONSE_TIMEOUT_S
        self._served.add(connection)
        try:
            yield
        finally:
            self._served.discard(connection)
            self._deadlines[connection] = self._now() + IDLE_MAX_S

    def sweep(self) -> None:
        """Abort connections past their deadline and forget closed ones. Call it about once a second."""
        now = self._now()
        self._forget_closed()
        for connection, due in self._deadlines.items():
            if now > due:
                _cut_off(connection)

    def _forget_closed(self) -> None:
        here = set(self.here)
        self._deadlines = {connection: due for connection, due in self._deadlines.items() if connection in here}
        self._sources = {connection: source for connection, source in self._sources.items() if connection in here}
        self._trusted &= here

    def _has_room(self, source: str) -> bool:
        """Whether another connection of this source fits, after closing an idle one if necessary."""
        if not self._fits(source):
            self._forget_closed()
        return self._fits(source) or self._make_room(source)

    def _fits(self, source: str) -> bool:
        within_half = self._of(source) < (self._connections_max + 1) // 2
        return within_half and len(self._sources) < self._connections_max

    def _of(self, source: str) -> int:
        return sum(other == source for other in self._sources.values())

    def _make_room(self, source: str) -> bool:
        own = self._idle(lambda connection: self._sources[connection] == source)
        others = self._idle(lambda connection: connection not in self._trusted)
        counts = Counter(self._sources.values())
        if others and counts[source] < (self._connections_max + 1) // 2:
            # Deadlines differ by what the connection waits for, so the earliest deadline is a fair choice.
            leaving = min(others, key=lambda each: (-counts[self._sources[each]], self._deadlines[each]))
        elif own:
            leaving = min(own, key=self._deadlines.__getitem__)
        else:
            return False
        # An aborted connection closes later; forgotten now, it makes room for one new connection only.
        del self._sources[leaving]
        _cut_off(leaving)
        return True

    def _idle(self, matches: Callable[[RequestHandler], bool]) -> list[RequestHandler]:
        return [each for each in self._sources if each not in self._served and matches(each)]

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class _Arrival(asyncio.Protocol):
    """A new connection: hands it over, or answers with status 503 and closes it."""

    def __init__(self, connections: HttpConnections) -> None:
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = cast("asyncio.Transport", transport)
        peer = tcp_peer(made.get_extra_info("socket"), made.get_extra_info("peername"))
        connection = self._connections.admit(peer.source)
        if connection is None:
            made.write(_NO_ROOM)
            made.close()
            return
        made.set_protocol(connection)
        connection.connection_made(made)


def _cut_off(connection: RequestHandler) -> None:
    if isinstance(connection.transport, asyncio.Transport):
        connection.transport.abort()
