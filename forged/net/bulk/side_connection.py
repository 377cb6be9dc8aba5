"""Side connections: carry bulk bytes or file descriptors, opened with a ticket.

The flow: a request is answered with a ticket; the client opens a second connection with the ticket in its hello; after
the welcome that connection carries only bulk bytes. At the end the receiver sends the number of received bytes.

Invariants:
- Bulk bytes never travel in messages.
- A ticket is valid for one connection and `TICKET_TTL_S`.
- After the welcome the connecting end sends `GO` from the thread that moves the bytes. The other end sends nothing
  before that, so that no event loop reads bulk bytes.
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
"""Moves bytes over a socket in a thread, from an offset on."""


@dataclass(frozen=True, slots=True)
class BulkTransfer:
    """What one end of a side connection does. `close` is called once, after the use or expiry of the ticket."""

    size: int
    move: Mover
    close: Callable[[], None] = lambda: None


def file_sender(fd: int, size: int, *, close: Callable[[], None] | None = None) -> BulkTransfer:
    """Send the first `size` bytes of an open file; `close` defaults to closing it."""

    def move(sock: socket.socket, offset: int) -> None:
        _send(sock, partial(movers.send_file, sock, fd, offset, size - offset), size - offset)

    return BulkTransfer(size, move, close or partial(os.close, fd))


def buffer_sender(view: memoryview) -> BulkTransfer:
    """Send bytes from memory."""
    data = view.cast("B")

    def move(sock: socket.socket, offset: int) -> None:
        _send(sock, partial(movers.send_buffer, sock, data[offset:]), len(data) - offset)

    return BulkTransfer(len(data), move)


def file_receiver(fd: int, size: int, *, close: Callable[[], None] | None = None) -> BulkTransfer:
    """Receive `size` bytes into an open file."""

    def move(sock: socket.socket, offset: int) -> None:
        _receive(sock, partial(movers.receive_into_file, sock, fd, offset, size - offset), size - offset)

    return BulkTransfer(size, move, close or partial(os.close, fd))


def buffer_receiver(view: memoryview) -> BulkTransfer:
    """Receive bytes into memory."""
    data = view.cast("B")

    def move(sock: socket.socket, offset: int) -> None:
        _receive(sock, partial(movers.receive_into_buffer, sock, data[offset:]), len(data) - offset)

    return BulkTransfer(len(data), move)


def descriptor_sender(fds: list[int], *, close: Callable[[], None] = lambda: None) -> BulkTransfer:
    """Send copies of file descriptors to a peer on this host."""

    def move(sock: socket.socket, offset: int) -> None:
        _send(sock, partial(descriptors.send_descriptors, sock, fds), len(fds))

    return BulkTransfer(len(fds), move, close)


async def transfer_with_ticket(
    network: Network,
    clock: Clock,
    limits: ConnectionLimits,
    address: Address,
    client: bytes,
    ticket: Ticket,
    transfer: BulkTransfer,
    offset: int = 0,
    token: str | None = None,
) -> None:
    """The connecting end: open a side connection with the ticket and move its bytes.

    `token` is the one with which the ticket was requested.
    """
    link: _SideLink | None = None

    def make() -> _SideLink:
        nonlocal link
        hello = Hello(VERSION_MIN, VERSION_MAX, client, _AGENT, token, ticket.ticket, offset)
        link = _SideLink(clock, limits, hello)
        return link

    try:
        with anyio.fail_after(CONNECT_TIMEOUT_S):
            await network.connect(address, make)
            assert link is not None
            welcome = await link.welcome
    except TimeoutError as error:
        if link is not None:
            link.abort()
        raise Unavailable(
            "connect_timeout",
            f"{address} did not accept the connection for bulk data within {CONNECT_TIMEOUT_S:g} s",
            "request a new ticket",
        ) from error
    transport = link.hand_over()
    if welcome.size != transfer.size:
        transport.abort()
        raise RequestRefused(
            "size_differs",
            f"the ticket is for {welcome.size} bytes, but this end expects {transfer.size}",
            "use the ticket's size",
        )
    with await detach(transport) as sock:
        await movers.run(partial(_send_go_and_move, transfer, offset), sock)


_AGENT = f"forged-python/{VERSION}"


class _SideLink(Connection):
    """The connecting end, until its welcome has arrived."""

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
            self.welcome.exception()  # retrieve it, so that asyncio does not report it


def descriptor_receiver(count: int, received: list[int]) -> BulkTransfer:
    """Receive `count` file descriptors into `received`; the caller must close them."""

    def move(sock: socket.socket, offset: int) -> None:
        _receive(sock, lambda: received.extend(descriptors.receive_descriptors(sock, descriptors_max=count)), count)

    return BulkTransfer(count, move)


def _send_go_and_move(transfer: BulkTransfer, offset: int, sock: socket.socket) -> None:
    sock.settimeout(movers.STALL_TIMEOUT_S)
    with _translated():
        sock.sendall(GO)
    transfer.move(sock, offset)


def move_after_go(transfer: BulkTransfer, offset: int, sock: socket.socket) -> None:
    """The accepting end: wait for `GO`, then move the bytes."""
    sock.settimeout(movers.STALL_TIMEOUT_S)
    if _read(sock, len(GO)) == GO:
        transfer.move(sock, offset)


def _send(sock: socket.socket, send: Callable[[], None], count: int) -> None:
    send()
    received = RECEIVED.unpack(_read(sock, RECEIVED.size))[0]
    if received != count:
        raise Unavailable("bulk_truncated", f"the peer received {received} of {count} bytes", "transfer again")


def _receive(sock: socket.socket, receive: Callable[[], object], count: int) -> None:
    receive()
    with _translated():
        sock.sendall(RECEIVED.pack(count))
    # The sender closes after reading the count; closing here first could discard it.
    with suppress(OSError):
        sock.recv(1)


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    with _translated():
        while len(data) < count:
            piece = sock.recv(count - len(data))
            if not piece:
                raise Unavailable(
                    "bulk_truncated", "the connection ended before all bytes were received", "transfer again"
                )
            data += piece
    return data


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable("bulk_failed", f"the side connection failed: {error}", "transfer again") from error
