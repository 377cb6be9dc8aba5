"""A daemon whose messages are written by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from forged.net.protocol.messages import Hello, Message, Welcome, decode, encode
from tests.client.unix_listener import UnixListener

WELCOME = Welcome(
    version=1,
    agent="a fake",
    principal="somebody",
    role="operator",
    history="this history",
    latest=0,
    term=1,
    frame_bytes_max=4 << 20,
    in_flight_max=1024,
)


class FakeConnection:
    """A connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def receive(self) -> Any:
        """The next message."""
        length = int.from_bytes(await self.reader.readexactly(4), "big")
        return decode(await self.reader.readexactly(length))

    def send(self, message: Message) -> None:
        payload = encode(message)
        self.writer.write(len(payload).to_bytes(4, "big") + payload)

    async def accept_hello(self, welcome: Welcome = WELCOME) -> Hello:
        """Receive the hello and send the welcome."""
        hello = await self.receive()
        assert isinstance(hello, Hello)
        self.send(welcome)
        return hello

    async def wait_closed(self) -> None:
        """Wait until the client has closed."""
        while await self.reader.read(1 << 16):
            pass


class FakeDaemon:
    """Listens on a Unix socket and runs the same handler for each connection."""

    def __init__(self, path: Path, treat: Callable[[FakeConnection], Awaitable[None]]) -> None:
        self.endpoint = f"unix://{path}"
        self._path = path
        self._treat = treat

    async def __aenter__(self) -> Self:
        self._door = UnixListener(self._path, lambda reader, writer: self._treat(FakeConnection(reader, writer)))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._door.close()

    @property
    def connections(self) -> int:
        """The number of accepted connections."""
        return self._door.accepted
