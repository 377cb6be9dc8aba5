"""The HTTP server's connections and their deadlines.

Invariants:
- At most `CONNECTIONS_MAX` connections are open. At the limit a new connection replaces the idle one whose deadline is
  next, so that idle clients cannot lock out other clients.
- Each connection has a deadline for its next request or for reading its response, and is aborted after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

CONNECTIONS_MAX = 256
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
        self._accepted: set[RequestHandler] = set()
        """Connections that were just accepted and are not in `server.connections` yet."""
        self._served: set[RequestHandler] = set()

    def begin(self, server: web.Server) -> None:
        """Accept connections for this server."""
        self._server = server

    @property
    def here(self) -> list[RequestHandler]:
        return [] if self._server is None else self._server.connections

    def enter(self) -> asyncio.BaseProtocol:
        """The protocol of a new connection."""
        assert self._server is not None, "begin comes before enter"
        if not self._has_room():
            return _NoRoom()
        connection = self._server()
        self._deadlines[connection] = self._now() + REQUEST_TIMEOUT_S
        self._accepted.add(connection)
        asyncio.get_running_loop().call_soon(self._accepted.discard, connection)
        return connection

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
        self._deadlines = {
            connection: self._deadlines.get(connection, now + REQUEST_TIMEOUT_S)
            for connection in [*self.here, *self._accepted]
        }
        for connection, due in self._deadlines.items():
            if now > due:
                _cut_off(connection)

    def _has_room(self) -> bool:
        """Whether another connection fits, after closing an idle one if necessary."""
        if len(self._deadlines) >= self._connections_max:
            here = self._accepted.union(self.here)
            self._deadlines = {connection: due for connection, due in self._deadlines.items() if connection in here}
        return len(self._deadlines) < self._connections_max or self._make_room()

    def _make_room(self) -> bool:
        busy = self._served | self._accepted
        idle = [connection for connection in self._deadlines if connection not in busy]
        if not idle:
            return False
        # Deadlines differ by what the connection waits for, so the earliest deadline is a fair choice.
        leaving = min(idle, key=self._deadlines.__getitem__)
        # An aborted connection closes later; forgotten now, it makes room for one new connection only.
        del self._deadlines[leaving]
        _cut_off(leaving)
        return True

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class _NoRoom(asyncio.Protocol):
    """Answers a connection beyond the limit with status 503 and closes it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        writing = cast("asyncio.Transport", transport)
        writing.write(_NO_ROOM)
        writing.close()


def _cut_off(connection: RequestHandler) -> None:
    if isinstance(connection.transport, asyncio.Transport):
        connection.transport.abort()
