"""A daemon without sockets: the test moves the clock and sends the frames of its clients.

`ManualTransport` shows what the daemon does with its transport, and lets the test act as the network.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from forged.config import Config
from forged.daemon import Daemon, Ports
from forged.errors import PeerError
from forged.kernel.store.memory import MemoryStore
from forged.net.protocol.frames import FrameDecoder
from forged.net.transport.port import Address, Peer, ProtocolFactory

T = TypeVar("T")

Message = list[Any]

CLIENT = bytes(range(16))
OPERATOR = Peer("unix", "pid 1", uid=0)
WORKER = Peer("tcp", "127.0.0.1:4000", loopback=True, uid=0)
REMOTE = Peer("tcp", "10.0.0.7:4000")

HELLO, WELCOME, REQUEST, REPLY, FAILURE, CANCEL, SUBSCRIBE, FACTS, GAP = range(9)
CREDIT, UNSUBSCRIBE, ENDED, PING, PONG, BYE, SIGNAL = range(9, 16)

SWIFT_TURNS = 500
TURNS_MAX = 6500
"""Thirty seconds at least: on a busy machine the kernel is late with connections and their ends."""
TURN_PAUSE_S = 0.005


def frame(message: Any) -> bytes:
    """A frame, encoded with the msgpack library."""
    payload: bytes = msgpack.packb(message)
    return struct.pack(">I", len(payload)) + payload


class ManualClock:
    """A clock that the test moves."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class ManualTransport(asyncio.Transport):
    """Records written bytes; after `stop_reading` the peer does not read."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = bytearray()
        self.writes = 0
        self.unread = 0
        self.reading = True
        self.closed = False
        self.aborted = False
        self.gone = False
        self._reads = True
        self._high = 1 << 16

    def stop_reading(self) -> None:
        """The peer stops reading."""
        self._reads = False

    def resume_peer_reading(self) -> None:
        """The peer reads everything and continues."""
        self._reads, was_full, self.unread = True, self.unread > self._high, 0
        if was_full:
            self.protocol.resume_writing()
        if self.closed:
            self._go()

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.written += data
        self.writes += 1
        if self._reads:
            return
        was_full_before, self.unread = self.unread > self._high, self.unread + len(data)
        if not was_full_before and self.unread > self._high:
            self.protocol.pause_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high or self._high

    def get_write_buffer_size(self) -> int:
        return self.unread

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def close(self) -> None:
        self.closed = True
        # As in a real transport, unsent bytes keep the connection open.
        if not self.unread:
            self._go()

    def abort(self) -> None:
        self.closed = self.aborted = True
        self._go()

    def _go(self) -> None:
        if not self.gone:
            self.gone = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


class ManualClient:
    """A client; the test sends its frames."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self.protocol = protocol
        self.transport = ManualTransport(protocol)
        self._decoder = FrameDecoder(1 << 30)
        self._frames: deque[bytes] = deque()
        self._messages: deque[Message] = deque()
        self._seen = 0
        protocol.connection_made(self.transport)

    def send(self, *elements: Any) -> None:
        """Send one message."""
        self.send_bytes(frame(list(elements)))

    def send_bytes(self, data: bytes) -> None:
        """Deliver these bytes in one piece."""
        assert self.transport.reading, "the other end does not read"
        self.protocol.data_received(data)

    def hello(self, client: bytes = CLIENT, token: str | None = None) -> None:
        """Send a hello of version 1."""
        self.send(HELLO, 1, 1, client, "by hand", token)

    def request(self, number: int, method: str, acknowledged: int = 0, **fields: Any) -> None:
        """Send a request."""
        self.send(REQUEST, number, acknowledged, method, fields)

    def heard(self) -> list[Message]:
        """All unread messages."""
        self._read()
        messages, self._messages = list(self._messages), deque()
        return messages

    async def next(self, *kinds: int) -> Message:
        """The next message of one of these kinds (default: any); earlier ones are skipped."""
        async for _ in turns():
            self._read()
            while self._messages:
                message = self._messages.popleft()
                if not kinds or message[0] in kinds:
                    return message
        raise AssertionError(f"no message of {kinds} came")

    async def lost(self) -> None:
        """Wait until the daemon has closed the connection."""
        await until(lambda: self.transport.gone)
        await asyncio.sleep(0)

    def _read(self) -> None:
        written = self.transport.written
        self._decoder.feed(bytes(written[self._seen :]), self._frames)
        self._seen = len(written)
        while self._frames:
            self._messages.append(msgpack.unpackb(self._frames.popleft(), strict_map_key=False))


class ManualNetwork:
    """The port `forged.net.transport.port.Network`, with one listener."""

    def __init__(self) -> None:
        self._factory: ProtocolFactory | None = None
        self._peers: dict[asyncio.BaseTransport, Peer] = {}
        self.clients: list[ManualClient] = []
        self.peer_of_next = OPERATOR

    def client(self, peer: Peer = OPERATOR) -> ManualClient:
        """Connect a client."""
        self.peer_of_next = peer
        self.clients.append(ManualClient(self.accept()))
        return self.clients[-1]

    def accept(self) -> asyncio.Protocol:
        """Accept a connection without connecting its transport."""
        assert self._factory is not None
        return self._factory()

    async def listen(self, address: Address, factory: ProtocolFactory) -> ManualListener:
        self._factory = factory
        return ManualListener(address)

    async def connect(self, address: Address, factory: ProtocolFactory) -> asyncio.Transport:
        raise PeerError("by_hand", "this network does not connect")

    async def refuses(self, address: Address, seen_at: str) -> bool:
        return False

    def peer(self, transport: asyncio.BaseTransport) -> Peer:
        return self._peers.setdefault(transport, self.peer_of_next)


class ManualListener:
    """A listener at the requested address."""

    def __init__(self, address: Address) -> None:
        self.address = address

    def descriptors(self) -> list[int]:
        return []

    async def close(self) -> None:
        """Nothing to close."""


class ManualDaemon:
    """A daemon with its network and clock."""

    def __init__(self, daemon: Daemon, network: ManualNetwork, clock: ManualClock) -> None:
        self.daemon = daemon
        self.network = network
        self.clock = clock
        self.server = daemon.server

    def client(self, peer: Peer = OPERATOR) -> ManualClient:
        """Connect a client."""
        return self.network.client(peer)

    async def greeted(self, peer: Peer = OPERATOR, client: bytes = CLIENT, token: str | None = None) -> ManualClient:
        """Connect a client and exchange hello and welcome."""
        made = self.client(peer)
        made.hello(client, token)
        await made.next(WELCOME)
        return made

    async def ask(
        self, client: ManualClient, method: str, number: int = 1, acknowledged: int = 0, **fields: Any
    ) -> Any:
        """Send a request and return its reply body."""
        client.request(number, method, acknowledged, **fields)
        answer = await client.next(REPLY, FAILURE)
        assert answer[:2] == [REPLY, number], answer
        return answer[2]

    def sweep(self, seconds: float) -> None:
        """Advance the clock and sweep all sessions."""
        self.clock.now += seconds
        for session in list(self.server.sessions):
            session.sweep(self.clock.now)

    async def serves_new_clients(self) -> None:
        """Fail unless a new client is served."""
        client = await self.greeted(client=os.urandom(16))
        assert await self.ask(client, "PingDaemon") == {}
        client.send(BYE, 1)
        await client.lost()


async def until(true: Callable[[], bool]) -> None:
    """Run the loop until the condition holds."""
    async for _ in turns():
        if true():
            return
    raise AssertionError("the condition never held")


async def turns() -> AsyncIterator[None]:
    """Turns of the loop: many without pause, then some with pauses for timers."""
    for turn in range(TURNS_MAX):
        yield
        await asyncio.sleep(0 if turn < SWIFT_TURNS else TURN_PAUSE_S)


@asynccontextmanager
async def manual_daemon(
    tmp_path: Path, *, extend: Callable[[Daemon], None] = lambda daemon: None, **settings: Any
) -> AsyncIterator[ManualDaemon]:
    """A daemon; the test acts as its clients."""

    async def open_store() -> MemoryStore:
        return MemoryStore("history-1")

    network, clock = ManualNetwork(), ManualClock()
    quiet = Config(data_dir=str(tmp_path), socket=str(tmp_path / "s"), listen=(), drain_timeout_s=0.0)
    config = replace(quiet, **settings)
    running = Daemon.running(config, Ports(clock, network, 1, 0, open_store), extend=extend)
    async with in_one_task(running) as daemon:
        yield ManualDaemon(daemon, network, clock)


@asynccontextmanager
async def in_one_task(context: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Enter and exit a context manager in one task, for fixtures, which use two."""
    entered: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    left = asyncio.Event()

    async def live() -> None:
        async with context as value:
            entered.set_result(value)
            await left.wait()

    task = asyncio.create_task(live())
    either: set[asyncio.Future[Any]] = {task, entered}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    try:
        yield await entered
    finally:
        left.set()
        await task
