"""How bulk bytes travel over a connection that carries nothing else: the parts of a state, or what is talked about.

Law: the bytes go straight from the memory of one worker into that of another, each part followed by its checksum, and
a part counts when its checksum was found right. The fetcher speaks first, when its own end no longer reads into a
buffer, and last, so that the source knows that all has arrived. A channel that was cut sends nothing more.

`SocketBulkTransport` moves them with blocking sockets in threads. `LoopBulkTransport` does the same within the event
loop, for networks without sockets, which are those of simulations.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

import anyio
import xxhash
from anyio import CapacityLimiter

from forged.errors import Unavailable
from forged.net.bulk import movers
from forged.net.bulk.detach import detach
from forged.worker.transport.dialogue_wire import Conversation, SocketWire, StreamWire, in_one_go, receive

GO = b"\x01"
DONE = b"\x02"
CHECKSUM_BYTES = 16
TOGETHER_BYTES = 64 << 10
"""A part of so many bytes is sent in one call with its checksum: copying it costs less than another call."""
CHUNK_BYTES = 64 << 10
THREADS_MAX = 8
"""How many states are moved at once by one worker."""

T = TypeVar("T")
Parts = Sequence[memoryview]
Verified = Callable[[], None]
"""Told of every part that has arrived and is right, in the thread that moves them."""


class BulkChannel(Protocol):
    """A connection that carries parts."""

    received: int
    """How many bytes of parts have been taken."""

    async def give(self, parts: Parts) -> None:
        """Send the parts, as soon as the other end is ready for them."""
        ...

    async def take(self, parts: Parts, verified: Verified) -> None:
        """Fill the parts with what the other end sends."""
        ...

    async def converse(self, conversation: Conversation[T], turns: CapacityLimiter) -> T:
        """Have a conversation, in its turn among those that take threads."""
        ...

    async def is_called(self, patience_s: float) -> bool:
        """Whether the other end says something, or hangs up, in that time."""
        ...

    def descriptor(self) -> int | None:
        """The file descriptor of the socket, where there is one."""
        ...

    def cut(self) -> None:
        """Let not a byte more pass, from now on."""
        ...

    def close(self) -> None:
        """Be done with it."""
        ...


class BulkTransport(Protocol):
    """Makes channels of connections."""

    async def open(self, transport: asyncio.Transport) -> BulkChannel:
        """Take a connection over whose protocol has nothing more to say."""
        ...


class SocketBulkTransport:
    """Blocking sockets in threads."""

    def __init__(self, threads_max: int = THREADS_MAX) -> None:
        self._threads_max = threads_max
        self._limiter: CapacityLimiter | None = None

    async def open(self, transport: asyncio.Transport) -> SocketChannel:
        """Take the socket from under the event loop."""
        if self._limiter is None:
            self._limiter = CapacityLimiter(self._threads_max)
        return SocketChannel(await detach(transport), self._limiter)


class SocketChannel:
    """A socket of its own."""

    def __init__(self, sock: socket.socket, limiter: CapacityLimiter) -> None:
        self.received = 0
        self._sock = sock
        self._limiter = limiter

    async def give(self, parts: Parts) -> None:
        """Send the parts from a thread."""
        await movers.run(partial(_give, parts), self._sock, limiter=self._limiter)

    async def take(self, parts: Parts, verified: Verified) -> None:
        """Receive the parts in a thread."""
        await movers.run(partial(_take, parts, verified, self._count), self._sock, limiter=self._limiter)

    def _count(self, size: int) -> None:
        self.received += size

    async def converse(self, conversation: Conversation[T], turns: CapacityLimiter) -> T:
        """Have it in a thread."""
        return await movers.run(lambda sock: in_one_go(conversation(SocketWire(sock))), self._sock, limiter=turns)

    async def is_called(self, patience_s: float) -> bool:
        """Wait without a thread."""
        with anyio.move_on_after(patience_s):
            await anyio.wait_readable(self._sock)
            return True
        return False

    def descriptor(self) -> int | None:
        """The socket's."""
        return self._sock.fileno()

    def cut(self) -> None:
        """Shut the connection down, also under the thread that uses it."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back."""
        self._sock.close()


class LoopBulkTransport:
    """Streams in the event loop."""

    async def open(self, transport: asyncio.Transport) -> LoopChannel:
        """Read the connection as a stream."""
        return LoopChannel(transport)


class LoopChannel:
    """A stream."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.received = 0
        loop = asyncio.get_running_loop()
        self._reader = asyncio.StreamReader(CHUNK_BYTES, loop)
        protocol = asyncio.StreamReaderProtocol(self._reader, loop=loop)
        self._transport = transport
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        self._writer = asyncio.StreamWriter(transport, protocol, self._reader, loop)
        self._wire = StreamWire(self._reader, self._writer)
        transport.resume_reading()

    async def give(self, parts: Parts) -> None:
        """Send the parts."""
        await self._read(len(GO))
        for part in parts:
            for start in range(0, part.nbytes, CHUNK_BYTES):
                await self._write(bytes(part[start : start + CHUNK_BYTES]))
            await self._write(checksum_of(part))
        await self._read(len(DONE))

    async def take(self, parts: Parts, verified: Verified) -> None:
        """Receive the parts."""
        await self._write(GO)
        for part in parts:
            for start in range(0, part.nbytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, part.nbytes - start)
                part[start : start + size] = await self._read(size)
                self.received += size
            _check(await self._read(CHECKSUM_BYTES), checksum_of(part))
            verified()
        await self._write(DONE)
        self._writer.close()

    async def converse(self, conversation: Conversation[T], turns: CapacityLimiter) -> T:
        """Have it here."""
        async with turns:
            return await conversation(self._wire)

    async def is_called(self, patience_s: float) -> bool:
        """Wait for the next word."""
        return await self._wire.is_called(patience_s)

    def descriptor(self) -> int | None:
        """It has none."""
        return None

    def cut(self) -> None:
        """Drop the connection."""
        self._transport.abort()

    def close(self) -> None:
        """Hang up, when what was sent has left."""
        self._transport.close()

    async def _read(self, count: int) -> bytes:
        try:
            with anyio.fail_after(movers.STALL_TIMEOUT_S):
                return await self._reader.readexactly(count)
        except asyncio.IncompleteReadError:
            raise _truncated() from None
        except OSError as error:
            raise _broken(error) from error

    async def _write(self, data: bytes) -> None:
        try:
            with anyio.fail_after(movers.STALL_TIMEOUT_S):
                self._writer.write(data)
                await self._writer.drain()
        except OSError as error:
            raise _broken(error) from error


def checksum_of(part: memoryview) -> bytes:
    """What tells whether a part is what was sent."""
    return xxhash.xxh3_128_digest(part)


def _give(parts: Parts, sock: socket.socket) -> None:
    sock.settimeout(movers.STALL_TIMEOUT_S)
    _exactly(sock, len(GO))
    for part in parts:
        if part.nbytes <= TOGETHER_BYTES:
            sock.sendall(b"".join((part, checksum_of(part))))
            continue
        hashing = _Hashing(part)
        movers.send_buffer(sock, part, progress=hashing.upto)
        sock.sendall(hashing.digest())
    _exactly(sock, len(DONE))


def _take(parts: Parts, verified: Verified, count: Callable[[int], None], sock: socket.socket) -> None:
    sock.settimeout(movers.STALL_TIMEOUT_S)
    sock.sendall(GO)
    for part in parts:
        if part.nbytes <= TOGETHER_BYTES:
            received = _exactly(sock, part.nbytes + CHECKSUM_BYTES)
            part[:] = received[: part.nbytes]
            _check(received[part.nbytes :], checksum_of(part))
            count(part.nbytes)
        else:
            hashing = _Hashing(part, count)
            movers.receive_into_buffer(sock, part, progress=hashing.upto)
            _check(_exactly(sock, CHECKSUM_BYTES), hashing.digest())
        verified()
    sock.sendall(DONE)
    # The source hangs up when it has read that; who hangs up first might take it away.
    with suppress(OSError):
        sock.recv(1)


class _Hashing:
    """The checksum of a part on its way, taken while what has just moved is in the processor's cache."""

    def __init__(self, part: memoryview, count: Callable[[int], None] = lambda size: None) -> None:
        self._part = part
        self._count = count
        self._hash = xxhash.xxh3_128()
        self._hashed = 0
        self.digest = self._hash.digest

    def upto(self, moved: int) -> None:
        """So many bytes have moved."""
        self._hash.update(self._part[self._hashed : moved])
        self._count(moved - self._hashed)
        self._hashed = moved


def _exactly(sock: socket.socket, count: int) -> memoryview:
    data = receive(sock, count)
    if len(data) < count:
        raise _truncated()
    return data


def _check(announced: bytes | memoryview, found: bytes) -> None:
    if announced != found:
        raise Unavailable("state_corrupt", "a part of the state is not what was sent", "fetch it again")


def _truncated() -> Unavailable:
    return Unavailable("state_truncated", "the connection ended before the whole state had passed", "fetch the rest")


def _broken(error: OSError) -> Unavailable:
    reason = error.strerror or str(error) or "nothing moved for too long"
    return Unavailable("state_broken_off", f"the state cannot be moved: {reason}", "fetch the rest")
