"""Side connections: how bulk bytes and file descriptors travel.

Law: bulk bytes never pass through messages. Whoever asked for something large is answered with a ticket, opens a second
connection with the ticket in its hello, and after the welcome that connection carries bytes and nothing else. A ticket
is good for one connection and a short time. The receiver says how much it has, so the sender knows.

After the welcome the end that connected sends `GO` from the thread that moves the bytes; until then the other end sends
nothing, so that no byte of the bulk is swallowed by an event loop on the way.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import anyio

from forged.clock import Clock
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.kernel.messages import Ticket
from forged.net.bulk import descriptors, movers
from forged.net.bulk.detach import detach
from forged.net.protocol.messages import VERSION_MAX, VERSION_MIN, Hello, Welcome
from forged.net.transport.connection import Connection, ConnectionLimits
from forged.net.transport.port import Address, Network
from forged.version import VERSION

GO = b"\x01"
RECEIVED = struct.Struct(">Q")
CONNECT_TIMEOUT_S = 10.0

Mover = Callable[[socket.socket, int], None]
"""Moves bytes over a socket, in a thread, from an offset on."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a ticket is for. `close` is called once, when it was used or has expired."""

    size: int
    move: Mover
    close: Callable[[], None] = lambda: None


def offer_file(fd: int, size: int, *, close: Callable[[], None] | None = None) -> Offer:
    """Send the first `size` bytes of an open file; it is closed afterwards unless `close` says otherwise."""

    def move(sock: socket.socket, offset: int) -> None:
        _give(sock, partial(movers.send_file, sock, fd, offset, size - offset), size - offset)

    return Offer(size, move, close or partial(os.close, fd))


def offer_buffer(view: memoryview) -> Offer:
    """Send bytes from memory."""
    data = view.cast("B")

    def move(sock: socket.socket, offset: int) -> None:
        _give(sock, partial(movers.send_buffer, sock, data[offset:]), len(data) - offset)

    return Offer(len(data), move)


def want_file(fd: int, size: int, *, close: Callable[[], None] | None = None) -> Offer:
    """Receive `size` bytes into an open file."""

    def move(sock: socket.socket, offset: int) -> None:
        _take(sock, partial(movers.receive_into_file, sock, fd, offset, size - offset), size - offset)

    return Offer(size, move, close or partial(os.close, fd))


def want_buffer(view: memoryview) -> Offer:
    """Receive bytes into memory."""
    data = view.cast("B")

    def move(sock: socket.socket, offset: int) -> None:
        _take(sock, partial(movers.receive_into_buffer, sock, data[offset:]), len(data) - offset)

    return Offer(len(data), move)


def offer_descriptors(fds: list[int], *, close: Callable[[], None] = lambda: None) -> Offer:
    """Hand copies of file descriptors to a peer on this host."""

    def move(sock: socket.socket, offset: int) -> None:
        _give(sock, partial(descriptors.send_descriptors_blocking, sock, fds), len(fds))

    return Offer(len(fds), move, close)


async def use(
    network: Network,
    clock: Clock,
    limits: ConnectionLimits,
    address: Address,
    client: bytes,
    ticket: Ticket,
    offer: Offer,
    offset: int = 0,
) -> None:
    """The end that connects: present the ticket and move the bytes that it is for."""
    link: _SideLink | None = None

    def make() -> _SideLink:
        nonlocal link
        link = _SideLink(clock, limits, Hello(VERSION_MIN, VERSION_MAX, client, _AGENT, None, ticket.ticket, offset))
        return link

    try:
        with anyio.fail_after(CONNECT_TIMEOUT_S):
            await network.connect(address, make)
            assert link is not None
            welcome = await link.welcome
    except TimeoutError as error:
        if link is not None:
            link.abort()
        raise Unavailable("connect_timeout", f"{address} did not answer the ticket", "ask for a new one") from error
    transport = link.hand_over()
    if welcome.size != offer.size:
        transport.abort()
        raise RequestRefused("size_differs", f"{welcome.size} bytes travel, not {offer.size}", "make room for as many")
    with await detach(transport) as sock:
        await movers.run(partial(_tell_and_move, offer, offset), sock)


_AGENT = f"forged-python/{VERSION}"


class _SideLink(Connection):
    """The connecting end, until its welcome has come."""

    def __init__(self, clock: Clock, limits: ConnectionLimits, hello: Hello) -> None:
        super().__init__(clock, limits)
        self.welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._hello = hello

    def opened(self) -> None:
        self.established()
        self.send(self._hello)

    def received(self, message: object) -> None:
        if isinstance(message, Welcome) and not self.welcome.done():
            assert self._transport is not None
            self._transport.pause_reading()
            self.welcome.set_result(message)

    def ended(self, error: ForgedError) -> None:
        if not self.welcome.done():
            self.welcome.set_exception(error)
            self.welcome.exception()  # looked at, so that nobody is told it was never retrieved


def want_descriptors(count: int, taken: list[int]) -> Offer:
    """Receive so many file descriptors into `taken`; they are the caller's to close."""

    def move(sock: socket.socket, offset: int) -> None:
        _take(sock, lambda: taken.extend(descriptors.receive_descriptors_blocking(sock, descriptors_max=count)), count)

    return Offer(count, move)


def _tell_and_move(offer: Offer, offset: int, sock: socket.socket) -> None:
    sock.settimeout(movers.STALL_TIMEOUT_S)
    with _translated():
        sock.sendall(GO)
    offer.move(sock, offset)


def move_when_told(offer: Offer, offset: int, sock: socket.socket) -> None:
    """The end that was connected to: wait for the other, then move the bytes."""
    sock.settimeout(movers.STALL_TIMEOUT_S)
    if _read(sock, len(GO)) == GO:
        offer.move(sock, offset)


def _give(sock: socket.socket, send: Callable[[], None], count: int) -> None:
    send()
    received = RECEIVED.unpack(_read(sock, RECEIVED.size))[0]
    if received != count:
        raise Unavailable("bulk_truncated", f"the other end has {received} of {count} bytes", "move them again")


def _take(sock: socket.socket, receive: Callable[[], object], count: int) -> None:
    receive()
    with _translated():
        sock.sendall(RECEIVED.pack(count))
    # The sender hangs up when it has read that; who hangs up first might take it away.
    with suppress(OSError):
        sock.recv(1)


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    with _translated():
        while len(data) < count:
            piece = sock.recv(count - len(data))
            if not piece:
                raise Unavailable("bulk_truncated", "the connection ended before all was received", "move it again")
            data += piece
    return data


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable("bulk_failed", f"the side connection broke: {error}", "move it again") from error
