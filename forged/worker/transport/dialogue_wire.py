"""A conversation between two workers over a connection that carries messages and bulk bytes.

Invariants:
- A conversation is one coroutine that sends and receives through a `DialogueWire`. Over a socket the wire blocks and
  the coroutine never suspends, so that a thread runs it to its end; over a stream it suspends as usual.
- A message is a frame of at most `DIALOGUE_BYTES_MAX`. A longer, invalid or truncated one ends the connection.
- Bytes that have arrived are handed on even if the connection breaks afterwards.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

import anyio

from forged.errors import PeerError, Unavailable
from forged.net.bulk import movers
from forged.net.protocol.frames import HEADER_BYTES
from forged.net.protocol.messages import Message
from forged.worker.transport import peer_messages
from forged.worker.transport.peer_link import frame_of
from forged.worker.transport.peer_messages import PeerMessage

DIALOGUE_BYTES_MAX = 32 << 10
"""Fits a refusal with texts of the maximal length."""
PIECE_BYTES = 1 << 20
HELD_BACK_S = 1.0
"""How long received bytes may be held back to be handed on together with later ones."""
CHUNK_BYTES = 64 << 10
"""How many bytes a wire without threads moves at once."""

T = TypeVar("T")

_LENGTH = struct.Struct(">I")


class HungUp(Unavailable):
    """The peer has closed the connection between two messages."""

    def __init__(self) -> None:
        super().__init__("peer_hung_up", "the other worker has closed the connection", "connect again")

    def __reduce__(self) -> tuple[type[HungUp], tuple[()]]:
        return HungUp, ()


class DialogueWire(Protocol):
    """What a conversation sends and receives through."""

    async def say(self, message: Message) -> None:
        """Send a message."""
        ...

    async def hear(self, patience_s: float) -> PeerMessage | None:
        """The next message; None if none begins in that time. Raises `HungUp` if the peer has closed the connection."""
        ...

    async def give(self, fd: int, offset: int, count: int, stall_timeout_s: float) -> None:
        """Send a range of a file."""
        ...

    async def take(self, count: int) -> memoryview:
        """Receive some bytes, at least one and at most `count` <= `PIECE_BYTES`; the next call reuses their memory."""
        ...

    async def pause(self, seconds: float) -> None:
        """Wait; return early if the connection is cut."""
        ...


Conversation = Callable[[DialogueWire], Coroutine[Any, Any, T]]


_warm = movers.ThreadBuffer(PIECE_BYTES)


class SocketWire:
    """A wire over a blocking socket, for a thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.settimeout(movers.STALL_TIMEOUT_S)

    async def say(self, message: Message) -> None:
        self._sock.sendall(frame_of(message))

    async def hear(self, patience_s: float) -> PeerMessage | None:
        """The next message, if one begins in time."""
        if not _happens(self._sock, select.POLLIN, patience_s):
            return None
        header = movers.receive(self._sock, HEADER_BYTES)
        if not header:
            raise HungUp
        length = _length_of(header)
        return _word(movers.receive(self._sock, length), length)

    async def give(self, fd: int, offset: int, count: int, stall_timeout_s: float) -> None:
        """Send a range of a file with `sendfile`."""
        movers.send_file(self._sock, fd, offset, count, stall_timeout_s=stall_timeout_s)

    async def take(self, count: int) -> memoryview:
        """Receive into populated, page-aligned memory, and wait up to `HELD_BACK_S` for more bytes after the first."""
        filled = self._sock.recv_into(_warm.buffer[:count])
        if not filled:
            raise cut_off()
        patient_until = time.monotonic() + HELD_BACK_S
        while filled < count and self._has_more(patient_until):
            try:
                size = self._sock.recv_into(_warm.buffer[filled:count])
            except OSError:
                size = 0
            if not size:
                # The next call finds the end; after a kill, what has arrived would have to be sent again.
                break
            filled += size
        return _warm.buffer[:filled]

    def _has_more(self, patient_until: float) -> bool:
        patience_s = patient_until - time.monotonic()
        return patience_s > 0 and _happens(self._sock, select.POLLIN, patience_s)

    async def pause(self, seconds: float) -> None:
        """Wait for the time, or until the socket is shut down."""
        if seconds > 0:
            _happens(self._sock, 0, seconds)


class StreamWire:
    """A wire over a stream, for an event loop without threads."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._header: bytes | None = None

    async def is_called(self, patience_s: float) -> bool:
        """Whether a message, or the end of the connection, arrives in time."""
        if self._header is None:
            with anyio.move_on_after(patience_s):
                self._header = await self._exactly(HEADER_BYTES)
        return self._header is not None

    async def say(self, message: Message) -> None:
        await self._write(frame_of(message), movers.STALL_TIMEOUT_S)

    async def hear(self, patience_s: float) -> PeerMessage | None:
        """The next message, if one begins in time."""
        if not await self.is_called(patience_s):
            return None
        header, self._header = self._header, None
        if not header:
            raise HungUp
        length = _length_of(header)
        return _word(await _in_time(self._exactly(length), movers.STALL_TIMEOUT_S), length)

    async def give(self, fd: int, offset: int, count: int, stall_timeout_s: float) -> None:
        """Send a range of a file."""
        end = offset + count
        while offset < end:
            data = os.pread(fd, min(CHUNK_BYTES, end - offset), offset)
            if not data:
                raise Unavailable(
                    "bulk_source_short", f"the file ended {end - offset} bytes early", "see what truncates it"
                )
            await self._write(data, stall_timeout_s)
            offset += len(data)

    async def take(self, count: int) -> memoryview:
        data = await _in_time(self._reader.read(min(CHUNK_BYTES, count)), movers.STALL_TIMEOUT_S)
        if not data:
            raise cut_off()
        return memoryview(data)

    async def pause(self, seconds: float) -> None:
        if seconds > 0:
            await anyio.sleep(seconds)

    async def _exactly(self, count: int) -> bytes:
        try:
            return await self._reader.readexactly(count)
        except asyncio.IncompleteReadError as error:
            return error.partial
        except OSError as error:
            raise _broken(error) from error

    async def _write(self, data: bytes, stall_timeout_s: float) -> None:
        self._writer.write(data)
        await _in_time(self._writer.drain(), stall_timeout_s)


def cut_off() -> Unavailable:
    """The connection has ended in the middle of a message or a shard."""
    return Unavailable(
        "bulk_truncated",
        "the connection ended in the middle of a transfer",
        "repeat the transfer from the last received byte",
    )


def _length_of(header: bytes | memoryview) -> int:
    if len(header) < HEADER_BYTES:
        raise cut_off()
    (length,) = _LENGTH.unpack(header)
    if not 0 < length <= DIALOGUE_BYTES_MAX:
        raise PeerError(
            "frame_length",
            f"frame length must be 1..{DIALOGUE_BYTES_MAX}, got {length}",
            "run the same forged version on all workers",
        )
    return int(length)


def _word(payload: bytes | memoryview, length: int) -> PeerMessage:
    if len(payload) < length:
        raise cut_off()
    return peer_messages.decode(bytes(payload))


def _happens(sock: socket.socket, event: int, timeout_s: float) -> bool:
    """Whether the event, or the end of the connection, happens in time."""
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


async def _in_time(action: Awaitable[T], timeout_s: float) -> T:
    try:
        with anyio.fail_after(timeout_s):
            return await action
    except OSError as error:
        raise _broken(error) from error


def _broken(error: OSError) -> Unavailable:
    reason = error.strerror or str(error) or "no bytes moved within the timeout"
    return Unavailable(
        "bulk_failed", f"the transfer failed: {reason}", "repeat the transfer from the last received byte"
    )
