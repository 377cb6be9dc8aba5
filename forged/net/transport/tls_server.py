"""Doors that speak TLS, and the handshakes under way at them.

Law: strangers who connect and do not go on cost a bounded amount of memory, and time at this door alone. A handshake
holds a quarter of a megabyte, so only so many are under way at once; others wait in the system's queue, where they cost
the daemon nothing. While somebody waits, whoever has been at it for longest is sent away once it has had `FAIR_S`; so
the queue moves on however silent its members are, and a handshake that gets on is not cut short for it.

asyncio's own servers accept whoever comes and cannot be told to wait, so these accept by themselves.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from forged.net.transport.port import ProtocolFactory

if TYPE_CHECKING:
    import ssl

FAIR_S = 1.0
"""How long a handshake may take while others wait; most take milliseconds."""
ACCEPT_AGAIN_S = 1.0
"""How long to leave the queue alone when the system cannot give another connection."""


class TlsLimits(NamedTuple):
    """What a door allows those who enter."""

    handshakes_max: int
    handshake_timeout_s: float
    shutdown_timeout_s: float


class _Arrival(NamedTuple):
    sock: socket.socket
    at: float


class TlsServer:
    """Serves one listening socket, as an `asyncio.Server` does; the socket is its own."""

    def __init__(
        self, sock: socket.socket, factory: ProtocolFactory, context: ssl.SSLContext, backlog: int, limits: TlsLimits
    ) -> None:
        sock.settimeout(0)
        self._sock = sock
        self._factory = factory
        self._context = context
        self._backlog = backlog
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[asyncio.Task[None], _Arrival] = {}
        """The oldest first."""
        self._makes_room: asyncio.TimerHandle | None = None

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """What it listens on, until it is closed."""
        return () if self._closed else (self._sock,)

    async def start_serving(self) -> None:
        """Accept from now on."""
        self._sock.listen(self._backlog)
        self._go_on()

    def close(self) -> None:
        """Accept no more. Connections that were made stay, and handshakes under way go on."""
        if not self._closed:
            self._pause()
            self._sock.close()

    @property
    def _closed(self) -> bool:
        return self._sock.fileno() < 0

    def _go_on(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock, self._accept)

    def _pause(self) -> None:
        self._loop.remove_reader(self._sock)
        if self._makes_room is not None:
            self._makes_room.cancel()

    def _accept(self) -> None:
        """Called when somebody waits."""
        room = self._limits.handshakes_max - len(self._under_way)
        if not room:
            self._wait_for_room()
        for _ in range(room):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._rest(error)
                return
            # A task of its own, as asyncio's servers start them: it ends with its handshake, within its time limit.
            task = self._loop.create_task(self._lead_in(sock))
            self._under_way[task] = _Arrival(sock, self._loop.time())
            task.add_done_callback(self._ended)

    def _wait_for_room(self) -> None:
        self._pause()
        oldest = next(iter(self._under_way.values()))
        self._makes_room = self._loop.call_at(oldest.at + FAIR_S, _hang_up, oldest)

    def _rest(self, error: OSError) -> None:
        self._loop.call_exception_handler({"message": "no connection can be accepted", "exception": error})
        self._pause()
        self._loop.call_later(ACCEPT_AGAIN_S, self._go_on)

    async def _lead_in(self, sock: socket.socket) -> None:
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
            # Its frames hold all of the handshake, and it is held by what they hold: that would be collected some time.
            error.__traceback__ = None
            # asyncio tells nobody of a connection that has never been made.
            protocol.connection_lost(error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._under_way[task]
        if self._makes_room is not None:
            self._makes_room.cancel()
            self._makes_room = None
        self._go_on()


def _hang_up(arrival: _Arrival) -> None:
    """End a handshake as its peer could. Should it have come about just now, the connection ends in good order."""
    with suppress(OSError):
        arrival.sock.shutdown(socket.SHUT_RDWR)
