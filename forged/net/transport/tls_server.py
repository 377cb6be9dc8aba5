"""A TLS server with a limit on handshakes in progress.

Invariants:
- A handshake needs 256 KiB, so at most `handshakes_max` are in progress; further connections wait in the kernel's
  queue.
- While connections wait, the oldest handshake is closed once it is older than `HANDSHAKE_MIN_S`, so silent peers do not
  block the queue. Without waiting connections a handshake has its full timeout.

asyncio's servers accept without limit, so this server accepts connections itself.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from forged.net.transport.port import ProtocolFactory

if TYPE_CHECKING:
    import ssl

HANDSHAKE_MIN_S = 1.0
"""The time that a handshake has while connections wait; most take milliseconds."""
ACCEPT_RETRY_S = 1.0
"""The pause after `accept` failed, for example without free file descriptors."""


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
        self, sock: socket.socket, factory: ProtocolFactory, context: ssl.SSLContext, backlog: int, limits: TlsLimits
    ) -> None:
        sock.settimeout(0)
        self._sock = sock
        self._factory = factory
        self._context = context
        self._backlog = backlog
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[None], _Handshake] = {}
        """In order of their start."""
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
        """Stop accepting. Existing connections and handshakes continue."""
        if not self._closed:
            self._pause()
            self._sock.close()

    @property
    def _closed(self) -> bool:
        return self._sock.fileno() < 0

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock, self._accept)

    def _pause(self) -> None:
        self._loop.remove_reader(self._sock)
        if self._room_timer is not None:
            self._room_timer.cancel()

    def _accept(self) -> None:
        """Called when a connection waits."""
        room = self._limits.handshakes_max - len(self._handshakes)
        if not room:
            self._wait_for_room()
        for _ in range(room):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause_after(error)
                return
            # A task of its own, as in asyncio's servers: it ends with its handshake, within the timeout.
            task = self._loop.create_task(self._shake_hands(sock))
            self._handshakes[task] = _Handshake(sock, self._loop.time())
            task.add_done_callback(self._ended)

    def _wait_for_room(self) -> None:
        self._pause()
        oldest = next(iter(self._handshakes.values()))
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

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._handshakes[task]
        if self._room_timer is not None:
            self._room_timer.cancel()
            self._room_timer = None
        self._resume()


def _shut_down(handshake: _Handshake) -> None:
    """Shut the socket down, as the peer could. If the handshake has just finished, the connection closes normally."""
    with suppress(OSError):
        handshake.sock.shutdown(socket.SHUT_RDWR)
