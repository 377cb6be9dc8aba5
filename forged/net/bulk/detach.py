"""Detach a connection from the event loop, to use its socket in a thread.

No bytes may be in flight in either direction; the protocol decides which end sends next. A TLS connection stays in the
event loop, and the caller gets one end of a socket pair that is bridged to it.
"""

from __future__ import annotations

import asyncio
import os
import socket

from forged.errors import Unavailable


async def detach(transport: asyncio.Transport) -> socket.socket:
    """Detach a transport; the caller owns the returned socket."""
    try:
        return await _bridge(transport) if transport.get_extra_info("ssl_object") is not None else _duplicate(transport)
    except OSError as error:
        transport.abort()
        reason = f"cannot detach the connection: {error.strerror or error}"
        raise Unavailable("side_not_taken", reason, "retry later") from error


def _duplicate(transport: asyncio.Transport) -> socket.socket:
    if transport.get_write_buffer_size() or transport.is_closing():
        transport.abort()
        raise Unavailable("side_not_free", "the connection has unsent bytes or is closed", "retry")
    original: socket.socket = transport.get_extra_info("socket")
    # The transport closes its descriptor; the duplicate keeps the connection open.
    detached = socket.socket(fileno=os.dup(original.fileno()))
    transport.set_protocol(asyncio.Protocol())
    transport.abort()
    return detached


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
    """Forwards bytes to the opposite transport, with flow control."""

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
