"""Who is connected over HTTP, and for how long each may keep the daemon waiting.

Law: there are only so many connections, and each has a moment by which it must have asked, or have read its answer, or
it is cut off. When all are taken, the one that has been idle for longest makes room, so that nobody keeps others out by
doing nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

CONNECTIONS_MAX = 256
ASK_TIMEOUT_S = 10.0
"""What the first request may take, from the connection to its last header."""
ANSWER_TIMEOUT_S = 10.0
"""What the answer may take until it has been read."""
IDLE_MAX_S = 90.0
"""How long a connection is kept for the next request: Prometheus asks about once a minute at the slowest."""

_NO_ROOM = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class HttpConnections:
    """The connections of one HTTP server."""

    def __init__(self, connections_max: int = CONNECTIONS_MAX) -> None:
        self._connections_max = connections_max
        self._server: web.Server | None = None
        self._due: dict[RequestHandler, float] = {}
        """When each has to have done what is expected of it."""
        self._arriving: set[RequestHandler] = set()
        """Those who were let in a moment ago: the server does not count them yet."""
        self._served: set[RequestHandler] = set()

    def begin(self, server: web.Server) -> None:
        """Let in visitors of this server from now on."""
        self._server = server

    @property
    def here(self) -> list[RequestHandler]:
        """All who are connected."""
        return [] if self._server is None else self._server.connections

    def enter(self) -> asyncio.BaseProtocol:
        """The protocol of the next connection."""
        assert self._server is not None, "nobody comes before the door is open"
        if not self._has_room():
            return _NoRoom()
        visitor = self._server()
        self._due[visitor] = self._now() + ASK_TIMEOUT_S
        self._arriving.add(visitor)
        asyncio.get_running_loop().call_soon(self._arriving.discard, visitor)
        return visitor

    @contextmanager
    def serving(self, visitor: RequestHandler) -> Iterator[None]:
        """The block gives this one its answer."""
        self._due[visitor] = self._now() + ANSWER_TIMEOUT_S
        self._served.add(visitor)
        try:
            yield
        finally:
            self._served.discard(visitor)
            self._due[visitor] = self._now() + IDLE_MAX_S

    def sweep(self) -> None:
        """Cut off who has taken too long, and forget who has left. To be called about once a second."""
        now = self._now()
        self._due = {visitor: self._due.get(visitor, now + ASK_TIMEOUT_S) for visitor in [*self.here, *self._arriving]}
        for visitor, due in self._due.items():
            if now > due:
                _cut_off(visitor)

    def _has_room(self) -> bool:
        """Whether one more can be let in, if need be in the place of another."""
        if len(self._due) >= self._connections_max:
            here = self._arriving.union(self.here)
            self._due = {visitor: due for visitor, due in self._due.items() if visitor in here}
        return len(self._due) < self._connections_max or self._make_room()

    def _make_room(self) -> bool:
        busy = self._served | self._arriving
        idle = [visitor for visitor in self._due if visitor not in busy]
        if not idle:
            return False
        # Each kind of waiting has its own patience, so the one that is due first is not worse off than the others.
        leaving = min(idle, key=self._due.__getitem__)
        # It goes by and by, when many others may have come; it must not make room for more than one of them.
        del self._due[leaving]
        _cut_off(leaving)
        return True

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class _NoRoom(asyncio.Protocol):
    """Tells one too many, and lets go."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        writing = cast("asyncio.Transport", transport)
        writing.write(_NO_ROOM)
        writing.close()


def _cut_off(visitor: RequestHandler) -> None:
    if isinstance(visitor.transport, asyncio.Transport):
        visitor.transport.abort()
