"""Limits on the number and duration of HTTP connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from forged.net.transport import sockets
from forged.telemetry.http_connections import IDLE_MAX_S, REQUEST_TIMEOUT_S, RESPONSE_TIMEOUT_S, HttpConnections

LINGERING = "/linger"


class PageServer:
    """A server with one page that answers at once and one that waits, on a clock that the test moves."""

    def __init__(self, port: int, connections: HttpConnections) -> None:
        self.connections = connections
        self.port = port
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()
        self.later_s = 0.0

    async def connect(self, host: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(host, 0))

    async def ask(self, writer: asyncio.StreamWriter, path: str = "/") -> None:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
        await writer.drain()

    def sweep_after(self, seconds: float) -> None:
        self.later_s += seconds
        self.connections.sweep()


@asynccontextmanager
async def page_server(monkeypatch: pytest.MonkeyPatch, connections_max: int = 3) -> AsyncIterator[PageServer]:
    # One user of this host has half of them.
    connections = HttpConnections(2 * connections_max - 1)

    @web.middleware
    async def attend(request: web.Request, handler: Any) -> web.StreamResponse:
        with connections.serving(request.protocol):
            response: web.StreamResponse = await handler(request)
            return response

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    async def linger(request: web.Request) -> web.Response:
        server.asked.set()
        await server.answer.wait()
        return web.Response(text="at last")

    application = web.Application(middlewares=[attend])
    application.router.add_get("/", answer)
    application.router.add_get(LINGERING, linger)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    assert runner.server is not None
    connections.begin(runner.server)
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(connections.enter, "127.0.0.1", 0)
    server = PageServer(listener.sockets[0].getsockname()[1], connections)
    monkeypatch.setattr(connections, "_now", lambda: loop.time() + server.later_s)
    try:
        yield server
    finally:
        server.answer.set()
        listener.close()
        await runner.cleanup()


async def answered(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head.split(b"\r\n")[0]


async def is_cut_off(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


async def test_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with page_server(monkeypatch) as server:
        silent, writer = await server.connect()
        slow, slow_writer = await server.connect()
        slow_writer.write(b"GET / HTTP/1.1\r\nX-Slow: ")
        _, swift_writer = swift = await server.connect()
        await server.ask(swift_writer)
        assert await answered(swift[0]) == b"HTTP/1.1 200 OK"
        server.sweep_after(REQUEST_TIMEOUT_S + 1)
        assert await is_cut_off(silent)
        assert await is_cut_off(slow)
        await server.ask(swift_writer)
        await swift[0].readuntil(b"hello")
        for one in (writer, slow_writer, swift_writer):
            one.close()


async def test_idle_connection_after_a_request_is_closed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async with page_server(monkeypatch) as server:
        reader, writer = await server.connect()
        await server.ask(writer)
        await reader.readuntil(b"hello")
        server.sweep_after(IDLE_MAX_S - 1)
        await server.ask(writer)
        await reader.readuntil(b"hello")
        server.sweep_after(IDLE_MAX_S + 1)
        assert await is_cut_off(reader)
        writer.close()


async def test_response_beyond_the_time_limit_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with page_server(monkeypatch) as server:
        reader, writer = await server.connect()
        await server.ask(writer, LINGERING)
        await server.asked.wait()
        server.sweep_after(RESPONSE_TIMEOUT_S + 1)
        assert await is_cut_off(reader)
        writer.close()


async def test_connection_over_the_limit_replaces_the_longest_idle_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with page_server(monkeypatch, connections_max=2) as server:
        first, second = await server.connect(), await server.connect()
        for reader, writer in (first, second):
            await server.ask(writer)
            await reader.readuntil(b"hello")
        third = await server.connect()
        await server.ask(third[1])
        assert await answered(third[0]) == b"HTTP/1.1 200 OK"
        assert await is_cut_off(first[0])
        await server.ask(second[1])
        assert await answered(second[0]) == b"HTTP/1.1 200 OK"
        for _, writer in (first, second, third):
            writer.close()


@pytest.fixture
def by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients on this host count by their address, like those of other hosts."""
    monkeypatch.setattr(sockets, "owner_uid", lambda sock: None)


@pytest.mark.usefixtures("by_address")
async def test_connections_of_one_address_leave_half_of_the_places_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with page_server(monkeypatch, connections_max=2) as server:
        reader, writer = await server.connect()
        crowd = [await server.connect("127.0.0.2") for _ in range(20)]
        assert list(server.connections._sources.values()).count("127.0.0.2") <= 2
        await server.ask(writer)
        assert await answered(reader) == b"HTTP/1.1 200 OK"
        for _, one in (*crowd, (reader, writer)):
            one.close()


@pytest.mark.usefixtures("by_address")
async def test_connection_with_rights_does_not_give_way_to_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    async with page_server(monkeypatch, connections_max=2) as server:
        reader, writer = await server.connect()
        await server.ask(writer)
        await reader.readuntil(b"hello")
        server.connections.trust(server.connections.here[0])
        crowd = [await server.connect(f"127.0.0.{host}") for host in range(2, 12)]
        await server.ask(crowd[-1][1])
        assert await answered(crowd[-1][0]) == b"HTTP/1.1 200 OK"
        await server.ask(writer)
        assert await answered(reader) == b"HTTP/1.1 200 OK"
        for _, one in (*crowd, (reader, writer)):
            one.close()


async def test_simultaneous_connections_stay_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async with page_server(monkeypatch, connections_max=2) as server:
        crowd = await asyncio.gather(*(server.connect() for _ in range(50)))
        reader, writer = await server.connect()
        await server.ask(writer)
        assert await answered(reader) == b"HTTP/1.1 200 OK"
        assert len(server.connections.here) <= 2
        for _, one in (*crowd, (reader, writer)):
            one.close()


async def test_connection_is_refused_while_all_slots_are_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    async with page_server(monkeypatch, connections_max=1) as server:
        reader, writer = await server.connect()
        await server.ask(writer, LINGERING)
        await server.asked.wait()
        refused, refused_writer = await server.connect()
        assert await answered(refused) == b"HTTP/1.1 503 Service Unavailable"
        server.answer.set()
        assert await answered(reader) == b"HTTP/1.1 200 OK"
        for one in (writer, refused_writer):
            one.close()


async def test_closed_connections_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async with page_server(monkeypatch) as server:
        reader, writer = await server.connect()
        await server.ask(writer)
        await reader.readuntil(b"hello")
        writer.write(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert await reader.read() != b""
        writer.close()
        while server.connections.here:
            await asyncio.sleep(0)
        server.sweep_after(0)
        assert server.connections._deadlines == {}
        assert server.connections._sources == {}
