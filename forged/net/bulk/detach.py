"""Taking a connection away from the event loop.

Law: whoever detaches a connection gets a plain socket over which the same bytes travel, to use in a thread. Nothing may
be under way in either direction: the ends agree by their protocol on who speaks next. A plain connection is detached
for real; one with TLS goes on in the event loop, behind a pair of sockets.
"""

from __future__ import annotations

import asyncio
import os
import socket

from forged.errors import Unavailable


async def detach(transport: asyncio.Transport) -> socket.socket:
    """The socket of a transport whose protocol has nothing more to say; the caller owns it."""
    try:
        return await _bridge(transport) if transport.get_extra_info("ssl_object") is not None else _taken(transport)
    except OSError as error:
        transport.abort()
        reason = f"the connection cannot be taken over: {error.strerror or error}"
        raise Unavailable("side_not_taken", reason, "ask again later") from error


def _taken(transport: asyncio.Transport) -> socket.socket:
    if transport.get_write_buffer_size() or transport.is_closing():
        transport.abort()
        raise Unavailable("side_not_free", "the connection was still being written to, or is lost", "ask again")
    lent: socket.socket = transport.get_extra_info("socket")
    # The loop closes its own descriptor; as there is another, the connection itself stays.
    taken = socket.socket(fileno=os.dup(lent.fileno()))
    transport.set_protocol(asyncio.Protocol())
    transport.abort()
    return taken


async def _bridge(secured: asyncio.Transport) -> socket.socket:
    inner, outer = socket.socketpair()
    loop = asyncio.get_running_loop()
    far, near = _BridgeEnd(), _BridgeEnd()
    inner.settimeout(0)
    try:
        transport, _ = await loop.create_connection(lambda: near, sock=inner)
    except BaseException:
        inner.close()
        outer.close()
        raise
    far.opposite, near.opposite = transport, secured
    secured.set_protocol(far)
    secured.resume_reading()
    return outer


class _BridgeEnd(asyncio.Protocol):
    """Passes on what arrives, and slows down whom the other side cannot follow."""

    opposite: asyncio.Transport

    def data_received(self, data: bytes) -> None:
        self.opposite.write(data)

    def pause_writing(self) -> None:
        self.opposite.pause_reading()

    def resume_writing(self) -> None:
        if not self.opposite.is_closing():
            self.opposite.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self.opposite.close()
        else:
            self.opposite.abort()
