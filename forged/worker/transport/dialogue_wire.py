"""A conversation between two workers over a connection that also carries bulk bytes.

Law: a conversation is written once, as a coroutine that speaks through a `Wire`. Over a socket the wire blocks and the
coroutine never suspends, so that a thread runs it in one go; over a stream it suspends as others do. Words are frames
of at most `WORD_BYTES_MAX`; what is longer, no word, or cut off is an error, and then the connection is of no more use.
Bytes that have arrived are handed on also when the connection breaks behind them, so that none is lost.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import select
import socket
import struct
import threading
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

WORD_BYTES_MAX = 32 << 10
"""A refusal with texts of the greatest length fits."""
PIECE_BYTES = 1 << 20
HELD_BACK_S = 1.0
"""So long bytes may wait for others to be handed on together; over a slow connection they come bit by bit."""
CHUNK_BYTES = 64 << 10
"""What a wire without threads moves at once."""

T = TypeVar("T")
Absorb = Callable[[memoryview], None]
"""Takes bytes that have arrived; their memory is used again afterwards."""

_LENGTH = struct.Struct(">I")


class HungUp(Unavailable):
    """The other end has gone, between two words."""

    def __init__(self) -> None:
        super().__init__("peer_hung_up", "the other worker has hung up", "connect again")

    def __reduce__(self) -> tuple[type[HungUp], tuple[()]]:
        return HungUp, ()


class Wire(Protocol):
    """What a conversation speaks through."""

    async def say(self, message: Message) -> None:
        """Send a word."""
        ...

    async def hear(self, patience_s: float) -> PeerMessage | None:
        """The next word; None if none begins in that time. `HungUp` if none will ever come."""
        ...

    async def give(self, fd: int, offset: int, count: int, stall_timeout_s: float) -> None:
        """Send so many bytes of a file."""
        ...

    async def take(self, count: int, absorb: Absorb) -> None:
        """Receive so many bytes, at most `PIECE_BYTES`."""
        ...

    async def pause(self, seconds: float) -> None:
        """Wait; less long when the connection is cut meanwhile."""
        ...


Conversation = Callable[[Wire], Coroutine[Any, Any, T]]


def in_one_go(conversation: Coroutine[Any, Any, T]) -> T:
    """What a conversation over a blocking wire comes to."""
    try:
        conversation.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    conversation.close()
    raise RuntimeError("a conversation over a blocking wire has suspended")


class _WarmMemory(threading.local):
    """A buffer for each thread, touched when it is made."""

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self.buffer = memoryview(mmap.mmap(-1, PIECE_BYTES, flags=flags))


_warm = _WarmMemory()


class SocketWire:
    """A blocking socket, for a thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.settimeout(movers.STALL_TIMEOUT_S)

    async def say(self, message: Message) -> None:
        """Send a word."""
        self._sock.sendall(frame_of(message))

    async def hear(self, patience_s: float) -> PeerMessage | None:
        """The next word, if one begins in time."""
        if not _happens(self._sock, select.POLLIN, patience_s):
            return None
        header = receive(self._sock, HEADER_BYTES)
        if not header:
            raise HungUp
        length = _length_of(header)
        return _word(receive(self._sock, length), length)

    async def give(self, fd: int, offset: int, count: int, stall_timeout_s: float) -> None:
        """Send so many bytes of a file, which pass through no memory of this process."""
        movers.send_file(self._sock, fd, offset, count, stall_timeout_s=stall_timeout_s)

    async def take(self, count: int, absorb: Absorb) -> None:
        """Receive so many bytes into warm memory that begins at a page, and hand on all at once if they come soon."""
        while count:
            count -= self._fill(count, absorb)

    def _fill(self, count: int, absorb: Absorb) -> int:
        """Receive for `HELD_BACK_S` at most behind the first of them; returns how many bytes were handed on."""
        filled, patient_until = 0, math.inf
        try:
            # A peer that stands still keeps what it has sent from nobody: after a kill it would have to come again.
            while filled < count and (not filled or self._has_more(patient_until)):
                size = self._sock.recv_into(_warm.buffer[filled:count])
                if not size:
                    raise cut_off()
                if not filled:
                    patient_until = time.monotonic() + HELD_BACK_S
                filled += size
        finally:
            if filled:
                absorb(_warm.buffer[:filled])
        return filled

    def _has_more(self, patient_until: float) -> bool:
        patience_s = patient_until - time.monotonic()
        return patience_s > 0 and _happens(self._sock, select.POLLIN, patience_s)

    async def pause(self, seconds: float) -> None:
        """Wait for the time to pass, or for the socket to be shut down."""
        if seconds > 0:
            _happens(self._sock, 0, seconds)


class StreamWire:
    """A stream, for an event loop without threads."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._header: bytes | None = None

    async def is_called(self, patience_s: float) -> bool:
        """Whether a word, or the end of the connection, comes in time."""
        if self._header is None:
            with anyio.move_on_after(patience_s):
                self._header = await self._exactly(HEADER_BYTES)
        return self._header is not None

    async def say(self, message: Message) -> None:
        """Send a word."""
        await self._write(frame_of(message), movers.STALL_TIMEOUT_S)

    async def hear(self, patience_s: float) -> PeerMessage | None:
        """The next word, if one begins in time."""
        if not await self.is_called(patience_s):
            return None
        header, self._header = self._header, None
        if not header:
            raise HungUp
        length = _length_of(header)
        return _word(await _in_time(self._exactly(length), movers.STALL_TIMEOUT_S), length)

    async def give(self, fd: int, offset: int, count: int, stall_timeout_s: float) -> None:
        """Send so many bytes of a file."""
        end = offset + count
        while offset < end:
            data = os.pread(fd, min(CHUNK_BYTES, end - offset), offset)
            if not data:
                raise Unavailable("bulk_source_short", f"the file ended {end - offset} bytes early", "see who cuts it")
            await self._write(data, stall_timeout_s)
            offset += len(data)

    async def take(self, count: int, absorb: Absorb) -> None:
        """Receive so many bytes."""
        while count:
            data = await _in_time(self._reader.read(min(CHUNK_BYTES, count)), movers.STALL_TIMEOUT_S)
            if not data:
                raise cut_off()
            absorb(memoryview(data))
            count -= len(data)

    async def pause(self, seconds: float) -> None:
        """Wait."""
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


def receive(sock: socket.socket, count: int) -> memoryview:
    """So many bytes, or fewer if the connection ends before."""
    data = memoryview(bytearray(count))
    filled = 0
    while filled < count:
        size = sock.recv_into(data[filled:])
        if not size:
            break
        filled += size
    return data[:filled]


def cut_off() -> Unavailable:
    """The connection has ended where something had to follow."""
    return Unavailable("bulk_truncated", "the connection ended in the middle", "go on from there")


def _length_of(header: bytes | memoryview) -> int:
    if len(header) < HEADER_BYTES:
        raise cut_off()
    (length,) = _LENGTH.unpack(header)
    if not 0 < length <= WORD_BYTES_MAX:
        raise PeerError(
            "frame_length",
            f"a word of {length} bytes is announced, outside 1..{WORD_BYTES_MAX}",
            "see the peer's version",
        )
    return int(length)


def _word(payload: bytes | memoryview, length: int) -> PeerMessage:
    if len(payload) < length:
        raise cut_off()
    return peer_messages.decode(bytes(payload))


def _happens(sock: socket.socket, event: int, timeout_s: float) -> bool:
    """Whether the event, or the end of the connection, comes in time."""
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
    reason = error.strerror or str(error) or "nothing moved for too long"
    return Unavailable("bulk_failed", f"the bytes cannot be moved: {reason}", "go on from there")
