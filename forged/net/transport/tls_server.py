"""A TLS server with a limit on handshakes in progress, shared out by the address of the peer, or its user on this host.

Invariants:
- A handshake needs 256 KiB, so at most `handshakes_max` are in progress, and half of them of one address. Further
  connections wait without that memory, at most `WAITING_MAX` and half of them of one address; beyond that they are
  closed.
- A free place goes to the waiting address with the fewest handshakes.
- While connections wait, the oldest handshake of the address with most of them is closed once it is older than
  `HANDSHAKE_MIN_S`, so silent peers only delay others. Without waiting connections a handshake has its full timeout.

asyncio's servers accept without limit, so this server accepts connections itself.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from forged.net.transport.port import ProtocolFactory
from forged.shares import Holder, Shares

if TYPE_CHECKING:
    import ssl

HANDSHAKE_MIN_S = 1.0
"""The time that a handshake has while connections wait; most take milliseconds."""
WAITING_MAX = 256
"""The maximum number of accepted connections that wait for their handshake."""
ACCEPTED_PER_TURN = 64
ACCEPT_RETRY_S = 1.0
"""The pause after `accept` failed, for example without free file descriptors."""


SourceOf = Callable[[socket.socket, Any], str]
"""Names the user or address of a connection, from its socket and the address of its peer."""


class TlsLimits(NamedTuple):
    """The limits of a TLS server."""

    handshakes_max: int
    handshake_timeout_s: float
    shutdown_timeout_s: float


class _Handshake(NamedTuple):
    sock: socket.socket
    at: float


class TlsServer:
    """Serves one listening socket, which it owns, like `asyncio.Server`."""

    def __init__(
        self,
        sock: socket.socket,
        factory: ProtocolFactory,
        context: ssl.SSLContext,
        backlog: int,
        limits: TlsLimits,
        source_of: SourceOf,
    ) -> None:
        sock.settimeout(0)
        self._sock = sock
        self._factory = factory
        self._context = context
        self._backlog = backlog
        self._limits = limits
        self._source_of = source_of
        self._loop = asyncio.get_running_loop()
        self._places = Shares("TLS handshakes", limits.handshakes_max, 0, _half(limits.handshakes_max))
        self._handshakes: dict[Holder, dict[asyncio.Task[None], _Handshake]] = {}
        """Those of each address in order of their start."""
        self._waiting_places = Shares("connections that wait for a TLS handshake", WAITING_MAX, 0, _half(WAITING_MAX))
        self._waiting: dict[Holder, deque[socket.socket]] = {}
        """Oldest first."""
        self._room_timer: asyncio.TimerHandle | None = None

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The listening socket, until it is closed."""
        return () if self._closed else (self._sock,)

    async def start_serving(self) -> None:
        """Start accepting."""
        self._sock.listen(self._backlog)
        self._resume()

    def close(self) -> None:
        """Stop accepting, and close the connections that wait. Other connections and handshakes continue."""
        if not self._closed:
            self._pause()
            self._sock.close()
            for holder in list(self._waiting):
                while holder in self._waiting:
                    self._next_waiting(holder).close()
            self._make_room()

    @property
    def _closed(self) -> bool:
        return self._sock.fileno() < 0

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock, self._accept)

    def _pause(self) -> None:
        self._loop.remove_reader(self._sock)

    def _accept(self) -> None:
        """Called when a connection waits."""
        for _ in range(ACCEPTED_PER_TURN):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                self._pause_after(error)
                break
            source = self._source_of(sock, address)
            self._admit(sock, Holder(source, source))
        self._make_room()

    def _admit(self, sock: socket.socket, holder: Holder) -> None:
        """Begin the handshake, or let the connection wait, or close it if too many of its address wait."""
        if holder not in self._waiting and self._places.fits(holder):
            self._begin(sock, holder)
            return
        if not self._waiting_places.fits(holder):
            crowded = self._waiting_places.to_displace(holder)
            if crowded is None:
                sock.close()
                return
            self._next_waiting(crowded).close()
        self._waiting_places.charge(holder, 1)
        self._waiting.setdefault(holder, deque()).append(sock)

    def _begin(self, sock: socket.socket, holder: Holder) -> None:
        # A task of its own, as in asyncio's servers: it ends with its handshake, within the timeout.
        task = self._loop.create_task(self._shake_hands(sock))
        self._places.charge(holder, 1)
        self._handshakes.setdefault(holder, {})[task] = _Handshake(sock, self._loop.time())
        task.add_done_callback(partial(self._ended, holder))

    def _next_waiting(self, holder: Holder) -> socket.socket:
        """Take the oldest waiting connection of the address."""
        waiting = self._waiting[holder]
        sock = waiting.popleft()
        self._waiting_places.give_back(holder)
        if not waiting:
            del self._waiting[holder]
        return sock

    def _make_room(self) -> None:
        """While connections wait, let the oldest handshake of the address with most of them end."""
        if self._room_timer is not None:
            self._room_timer.cancel()
            self._room_timer = None
        if self._waiting and self._handshakes:
            oldest = next(iter(max(self._handshakes.values(), key=len).values()))
            self._room_timer = self._loop.call_at(oldest.at + HANDSHAKE_MIN_S, _shut_down, oldest)

    def _pause_after(self, error: OSError) -> None:
        self._loop.call_exception_handler({"message": "accept failed", "exception": error})
        self._pause()
        self._loop.call_later(ACCEPT_RETRY_S, self._resume)

    async def _shake_hands(self, sock: socket.socket) -> None:
        protocol = self._factory()
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                sock,
                ssl=self._context,
                ssl_handshake_timeout=self._limits.handshake_timeout_s,
                ssl_shutdown_timeout=self._limits.shutdown_timeout_s,
            )
        except OSError as error:
            # Break the reference cycle through the traceback, which would keep the handshake's memory.
            error.__traceback__ = None
            # asyncio does not report a handshake that failed.
            protocol.connection_lost(error)

    def _ended(self, holder: Holder, task: asyncio.Task[None]) -> None:
        del self._handshakes[holder][task]
        if not self._handshakes[holder]:
            del self._handshakes[holder]
        self._places.give_back(holder)
        while waiting := [each for each in self._waiting if self._places.fits(each)]:
            fewest = min(waiting, key=self._places.of)
            self._begin(self._next_waiting(fewest), fewest)
        self._make_room()


def _half(limit: int) -> int:
    return (limit + 1) // 2


def _shut_down(handshake: _Handshake) -> None:
    """Shut the socket down, as the peer could. If the handshake has just finished, the connection closes normally."""
    with suppress(OSError):
        handshake.sock.shutdown(socket.SHUT_RDWR)
