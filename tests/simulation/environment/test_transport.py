"""Protocols get the same calls over real sockets and over the simulated network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import pytest

from forged.net.transport.port import Address, Network
from forged.net.transport.sockets import SystemNetwork
from tests.simulation.environment.loop import run
from tests.simulation.environment.network import SimulatedNetwork
from tests.simulation.environment.recording_protocol import RecordingProtocol

LARGE = bytes(range(256)) * 8192


class End(RecordingProtocol):
    """Records its calls; consecutive bytes are joined."""

    def __init__(self, *, keep_open: bool = False) -> None:
        super().__init__(keep_open=keep_open)
        self._news = asyncio.Event()

    async def hears(self, event: object) -> None:
        """Wait for this call."""
        while event not in self.events:
            await self._news.wait()
            self._news.clear()

    async def over(self) -> None:
        """Wait for `connection_lost`."""
        while not (self.events and isinstance(self.events[-1], tuple)):
            await self._news.wait()
            self._news.clear()

    def note(self, event: object) -> None:
        super().note(event)
        self._news.set()

    def data_received(self, data: bytes) -> None:
        before = self.events.pop() if isinstance(self.events[-1], bytes) else b""
        assert isinstance(before, bytes)
        super().data_received(before + data)


class Echo(End):
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.transport.write(data)


class ClosesAtOnce(End):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.write(b"go away")
        self.transport.close()


class AbortsAtOnce(End):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.abort()


class DoesNotRead(End):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()


def keeps_open() -> End:
    return End(keep_open=True)


Conversation = Callable[[End, End], Coroutine[Any, Any, None]]


async def question_and_answer(client: End, _server: End) -> None:
    client.transport.write(b"a ")
    client.transport.writelines([b"b ", bytearray(b"c"), b"", memoryview(b".")])
    await client.hears(b"a b c.")
    client.transport.close()
    client.transport.close()
    client.transport.write(b"ignored")


async def half_close(client: End, server: End) -> None:
    client.transport.write(b"all of it")
    client.transport.write_eof()
    client.transport.write_eof()
    assert client.transport.can_write_eof()
    await server.hears("eof")
    server.transport.write(b"thanks")
    server.transport.close()
    await client.hears("eof")
    client.transport.close()


async def nothing(_client: End, _server: End) -> None:
    """The protocols end the connection."""


async def close_with_much_to_send(client: End, _server: End) -> None:
    client.transport.set_write_buffer_limits(high=10 * len(LARGE))
    client.transport.write(LARGE)
    client.transport.close()
    assert client.transport.is_closing()
    assert not client.transport.is_reading()


async def pressure(client: End, server: End) -> None:
    client.transport.set_write_buffer_limits(high=1000)
    while "pause" not in client.events:
        client.transport.write(LARGE)
    assert client.transport.get_write_buffer_size() > 1000
    await server.hears("made")
    assert not server.transport.is_reading()
    server.transport.resume_reading()
    await client.hears("resume")
    client.transport.close()


async def abort(client: End, server: End) -> None:
    client.transport.write(b"x")
    await server.hears(b"x")
    server.transport.abort()


async def converse(
    network: Network, address: Address, ends: tuple[End, End], conversation: Conversation
) -> list[list[object]]:
    client, server = ends
    listener = await network.listen(address, lambda: server)
    await network.connect(listener.address, lambda: client)
    await conversation(client, server)
    await server.over()
    await client.over()
    await listener.close()
    return [["much" if isinstance(it, bytes) and len(it) >= len(LARGE) else it for it in end.events] for end in ends]


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
@pytest.mark.parametrize(
    ("conversation", "client", "server"),
    [
        (question_and_answer, End, Echo),
        (half_close, End, keeps_open),
        (half_close, keeps_open, keeps_open),
        (nothing, End, ClosesAtOnce),
        (nothing, End, AbortsAtOnce),
        (nothing, ClosesAtOnce, End),
        (nothing, AbortsAtOnce, End),
        (close_with_much_to_send, End, End),
        (pressure, End, DoesNotRead),
        (abort, End, End),
    ],
)
def test_simulated_conversation_has_the_events_of_real_sockets(
    conversation: Conversation, client: Callable[[], End], server: Callable[[], End], scheme: str, tmp_path: Path
) -> None:
    address = Address("unix", path=f"{tmp_path}/s") if scheme == "unix" else Address("tcp", "127.0.0.1", 0)

    async def simulated() -> list[list[object]]:
        network = SimulatedNetwork(asyncio.get_running_loop(), Random(1))
        return await converse(network.host("here"), address, (client(), server()), conversation)

    async def real() -> list[list[object]]:
        return await converse(SystemNetwork(), address, (client(), server()), conversation)

    assert run(simulated, 1) == asyncio.run(real())


def test_suspended_process_receives_all_events_after_it_resumes() -> None:
    async def main() -> tuple[list[object], list[object]]:
        network = SimulatedNetwork(asyncio.get_running_loop(), Random(1))
        server, client = network.host("server"), network.host("client")
        ends = End(), End()
        await server.listen(Address.parse("tcp://server:1"), lambda: ends[0])
        server.execution.suspend()
        transport = await client.connect(Address.parse("tcp://server:1"), lambda: ends[1])
        transport.write(b"one ")
        await asyncio.sleep(5)
        transport.write(b"two")
        await asyncio.sleep(5)
        before = list(ends[0].events)
        server.execution.resume()
        await asyncio.sleep(1)
        return before, ends[0].events

    assert run(main, 1) == ([], ["made", b"one two"])
