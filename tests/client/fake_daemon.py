"""A daemon that does what a test tells it, word by word."""

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
    """The client at the other end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def hear(self) -> Any:
        """Its next message."""
        length = int.from_bytes(await self.reader.readexactly(4), "big")
        return decode(await self.reader.readexactly(length))

    def say(self, message: Message) -> None:
        payload = encode(message)
        self.writer.write(len(payload).to_bytes(4, "big") + payload)

    async def greet(self, welcome: Welcome = WELCOME) -> Hello:
        """Take its hello and let it in."""
        hello = await self.hear()
        assert isinstance(hello, Hello)
        self.say(welcome)
        return hello

    async def gone(self) -> None:
        """Wait until it has closed."""
        while await self.reader.read(1 << 16):
            pass


class FakeDaemon:
    """Listens at a path and treats every guest the same way; the connection ends when that does."""

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
    def guests(self) -> int:
        """How many have come."""
        return self._door.entered
