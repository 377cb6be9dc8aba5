"""Bulk bytes between two workers: the parts of a state, or shards, over a connection that carries nothing else.

Invariants:
- The bytes go from the memory of one worker straight into that of the other. A checksum follows each part, and a part
  counts when its checksum matches.
- The fetcher sends the first byte, when its end no longer reads into a buffer, and the last one, so that the source
  knows that all parts have arrived.
- A channel that was cut sends nothing more.

`SocketBulkTransport` uses blocking sockets in threads. `LoopBulkTransport` does the same in the event loop, for the
simulation's network, which has no sockets.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import anyio
import xxhash
from anyio import CapacityLimiter

from forged.errors import Unavailable
from forged.net.bulk import movers
from forged.net.bulk.detach import detach
from forged.worker.transport.dialogue_wire import Conversation, SocketWire, StreamWire

GO = b"\x01"
DONE = b"\x02"
CHECKSUM_BYTES = 16
TOGETHER_BYTES = 64 << 10
"""A part up to this size is sent in one call with its checksum: copying it costs less than another call."""
CHUNK_BYTES = 64 << 10
THREADS_MAX = 8
"""How many states one worker moves at once."""

T = TypeVar("T")
Parts = Sequence[memoryview]


class VerifiedParts:
    """How many parts have arrived and match their checksums; counted in the thread that moves the parts."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        """Another part is verified."""
        self.count += 1


class BulkChannel(Protocol):
    """A connection that carries parts."""

    received: int
    """The bytes of parts that have arrived."""

    async def give(self, parts: Parts) -> None:
        """Send the parts, as soon as the peer is ready for them."""
        ...

    async def take(self, parts: Parts, verified: VerifiedParts) -> None:
        """Receive into the parts."""
        ...

    async def converse(self, conversation: Conversation[T], turns: CapacityLimiter) -> T:
        """Run a conversation, within the limit of threads."""
        ...

    async def is_called(self, patience_s: float) -> bool:
        """Whether the peer sends something, or closes the connection, in that time."""
        ...

    def descriptor(self) -> int | None:
        """The file descriptor of the socket, where there is one."""
        ...

    def cut(self) -> None:
        """Stop all traffic at once."""
        ...

    def close(self) -> None: ...


class BulkTransport(Protocol):
    """Makes channels from connections."""

    async def open(self, transport: asyncio.Transport) -> BulkChannel:
        """Take over a connection whose protocol is done."""
        ...


class SocketBulkTransport:
    """Blocking sockets in threads."""

    def __init__(self, threads_max: int = THREADS_MAX) -> None:
        self._threads_max = threads_max
        self._limiter: CapacityLimiter | None = None

    async def open(self, transport: asyncio.Transport) -> SocketChannel:
        """Detach the socket from the event loop."""
        if self._limiter is None:
            self._limiter = CapacityLimiter(self._threads_max)
        return SocketChannel(await detach(transport), self._limiter)


class SocketChannel:
    """A channel over a blocking socket."""

    def __init__(self, sock: socket.socket, limiter: CapacityLimiter) -> None:
        self.received = 0
        self._sock = sock
        self._limiter = limiter

    async def give(self, parts: Parts) -> None:
        """Send the parts from a thread."""
        await movers.run(partial(_give, parts), self._sock, limiter=self._limiter)

    async def take(self, parts: Parts, verified: VerifiedParts) -> None:
        """Receive the parts in a thread."""
        await movers.run(partial(_take, parts, verified, self._count), self._sock, limiter=self._limiter)

    def _count(self, size: int) -> None:
        self.received += size

    async def converse(self, conversation: Conversation[T], turns: CapacityLimiter) -> T:
        """Run it in a thread."""
        return await movers.run(lambda sock: run_blocking(conversation(SocketWire(sock))), self._sock, limiter=turns)

    async def is_called(self, patience_s: float) -> bool:
        """Wait without a thread."""
        with anyio.move_on_after(patience_s):
            await anyio.wait_readable(self._sock)
            return True
        return False

    def descriptor(self) -> int | None:
        """The file descriptor of the socket."""
        return self._sock.fileno()

    def cut(self) -> None:
        """Shut the connection down, also while a thread uses it."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


class LoopBulkTransport:
    """Streams in the event loop."""

    async def open(self, transport: asyncio.Transport) -> LoopChannel:
        return LoopChannel(transport)


class LoopChannel:
    """A channel over a stream."""

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
        await self._read(len(GO))
        for part in parts:
            for start in range(0, part.nbytes, CHUNK_BYTES):
                await self._write(bytes(part[start : start + CHUNK_BYTES]))
            await self._write(checksum_of(part))
        await self._read(len(DONE))

    async def take(self, parts: Parts, verified: VerifiedParts) -> None:
        await self._write(GO)
        for part in parts:
            for start in range(0, part.nbytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, part.nbytes - start)
                part[start : start + size] = await self._read(size)
                self.received += size
            _check(await self._read(CHECKSUM_BYTES), checksum_of(part))
            verified.add()
        await self._write(DONE)
        self._writer.close()

    async def converse(self, conversation: Conversation[T], turns: CapacityLimiter) -> T:
        """Run it in the event loop."""
        async with turns:
            return await conversation(self._wire)

    async def is_called(self, patience_s: float) -> bool:
        """Wait for the next message."""
        return await self._wire.is_called(patience_s)

    def descriptor(self) -> int | None:
        """None: a stream of the simulation has no descriptor."""
        return None

    def cut(self) -> None:
        self._transport.abort()

    def close(self) -> None:
        """Close, once all has been sent."""
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


def run_blocking(conversation: Coroutine[Any, Any, T]) -> T:
    """Run a conversation over a blocking wire to its end."""
    try:
        conversation.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    conversation.close()
    raise RuntimeError("a conversation over a blocking wire has suspended")


def checksum_of(part: memoryview) -> bytes:
    """The checksum that follows a part."""
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


def _take(parts: Parts, verified: VerifiedParts, count: Callable[[int], None], sock: socket.socket) -> None:
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
        verified.add()
    sock.sendall(DONE)
    # The source closes after it has read DONE; closing first here might discard DONE.
    with suppress(OSError):
        sock.recv(1)


class _Hashing:
    """The checksum of a part, computed while the bytes that have just moved are in the processor's cache."""

    def __init__(self, part: memoryview, count: Callable[[int], None] = lambda size: None) -> None:
        self._part = part
        self._count = count
        self._hash = xxhash.xxh3_128()
        self._hashed = 0
        self.digest = self._hash.digest

    def upto(self, moved: int) -> None:
        """Add the bytes up to this offset."""
        self._hash.update(self._part[self._hashed : moved])
        self._count(moved - self._hashed)
        self._hashed = moved


def _exactly(sock: socket.socket, count: int) -> memoryview:
    data = movers.receive(sock, count)
    if len(data) < count:
        raise _truncated()
    return data


def _check(announced: bytes | memoryview, found: bytes) -> None:
    if announced != found:
        raise Unavailable("state_corrupt", "the checksum of a received part does not match", "fetch it again")


def _truncated() -> Unavailable:
    return Unavailable(
        "state_truncated",
        "the connection ended before the whole state had arrived",
        "repeat the transfer; received parts are kept",
    )


def _broken(error: OSError) -> Unavailable:
    reason = error.strerror or str(error) or "no bytes moved within the timeout"
    return Unavailable(
        "state_broken_off", f"the state cannot be moved: {reason}", "repeat the transfer; received parts are kept"
    )
