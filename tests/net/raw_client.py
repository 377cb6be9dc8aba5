"""A client made of a socket and msgpack, and a daemon on real sockets."""

from __future__ import annotations

import asyncio
import os
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack

from forged.clock import SystemClock
from forged.config import Config
from forged.daemon import Daemon, Ports
from forged.kernel.store.memory import MemoryStore
from forged.net.transport.port import Address
from forged.net.transport.sockets import SystemNetwork
from forged.net.transport.tcp import Liveness
from tests.net.manual_daemon import FAILURE, HELLO, PING, REPLY, REQUEST, WELCOME, Message, frame, in_one_task

WAIT_MAX_S = 20.0


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    @asynccontextmanager
    async def connected(cls, endpoint: str) -> AsyncIterator[RawClient]:
        """Connect without a hello."""
        address = Address.parse(endpoint)
        if address.scheme == "unix":
            streams = await asyncio.open_unix_connection(address.path)
        else:
            streams = await asyncio.open_connection(address.host, address.port)
        client = cls(*streams)
        try:
            yield client
        finally:
            client._writer.transport.abort()

    @classmethod
    @asynccontextmanager
    async def greeted(cls, endpoint: str, token: str | None = None) -> AsyncIterator[RawClient]:
        """Connect and exchange hello and welcome."""
        async with cls.connected(endpoint) as client:
            await client.hello(token)
            assert (await client.receive())[0] == WELCOME
            yield client

    async def hello(self, token: str | None = None) -> None:
        await self.send(HELLO, 1, 1, os.urandom(16), "raw", token)

    async def send(self, *elements: Any) -> None:
        await self.send_bytes(frame(list(elements)))

    async def send_bytes(self, data: bytes) -> None:
        """Send, and wait until the write buffer has room."""
        self.write(data)
        await self._writer.drain()

    def write(self, data: bytes) -> None:
        """Send without waiting."""
        self._writer.write(data)

    def stop_reading(self) -> None:
        """Stop reading, so that the buffers fill up."""
        transport = self._writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()

    def read_again(self) -> None:
        transport = self._writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.resume_reading()

    async def receive(self) -> Message:
        """The next message except pings."""
        async with asyncio.timeout(WAIT_MAX_S):
            while True:
                (length,) = struct.unpack(">I", await self._reader.readexactly(4))
                payload = await self._reader.readexactly(length)
                message: Message = msgpack.unpackb(payload, strict_map_key=False)
                if message[0] != PING:
                    return message

    async def request(self, number: int, method: str, /, **fields: Any) -> Any:
        """The reply to a request, or its error code."""
        await self.send(REQUEST, number, number - 1, method, fields)
        answer = await self.receive()
        assert answer[0] in (REPLY, FAILURE)
        assert answer[1] == number
        return answer[2] if answer[0] == REPLY else answer[3]

    async def final_error_code(self) -> str:
        """The code of the failure that ends the connection; empty without one."""
        code = ""
        try:
            while True:
                message = await self.receive()
                if message[:2] == [FAILURE, 0]:
                    code = message[3]
        except (asyncio.IncompleteReadError, ConnectionError):
            return code


class AdjustableClock(SystemClock):
    """The system clock with an adjustable wall time."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.ahead_s


class RealDaemon:
    """A daemon on a Unix socket and a TCP port."""

    def __init__(self, daemon: Daemon, clock: AdjustableClock) -> None:
        self.daemon = daemon
        self.clock = clock
        self.unix = f"unix://{daemon.config.socket}"
        (self.tcp,) = daemon.listening

    @property
    def sessions(self) -> int:
        return len(self.daemon.server.sessions)

    async def serves_new_clients(self) -> None:
        """Fail unless new clients are served on both addresses."""
        for endpoint in (self.unix, self.tcp):
            if endpoint.startswith("tls"):
                continue
            async with RawClient.greeted(endpoint) as client:
                assert await client.request(1, "PingDaemon") == {}


@asynccontextmanager
async def real_daemon(
    directory: Path,
    *,
    extend: Callable[[Daemon], None] = lambda daemon: None,
    tls: ssl.SSLContext | None = None,
    **settings: Any,
) -> AsyncIterator[RealDaemon]:
    """A daemon on real sockets with its state in memory; with `tls` its port uses TLS."""

    async def open_store() -> MemoryStore:
        return MemoryStore("history-1")

    listen = "tcp://127.0.0.1:0" if tls is None else "tls://127.0.0.1:0"
    config = Config(data_dir=str(directory), socket=str(directory / "s"), listen=(listen,))
    # Without user timeout: the daemon, not the kernel, must disconnect peers that do not read.
    network = SystemNetwork(tls_server=tls, liveness=Liveness(user_timeout_s=0))
    clock = AdjustableClock()
    ports = Ports(clock, network, os.getpid(), os.getuid(), open_store)
    async with in_one_task(Daemon.running(replace(config, **settings), ports, extend=extend)) as daemon:
        yield RealDaemon(daemon, clock)
