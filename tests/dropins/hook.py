"""A receiver of posted facts."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

SECRET = b"a secret between two"

Body = dict[str, Any]
Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Judge = Callable[[Body], int | web.Response | Awaitable[web.Response]]


@dataclass(frozen=True)
class Delivery:
    """What was posted once, and the status that it was answered with."""

    headers: Mapping[str, str]
    raw: bytes
    status: int

    @property
    def body(self) -> Body:
        body: Body = json.loads(self.raw)
        return body

    @property
    def ids(self) -> list[int]:
        return [fact["id"] for fact in self.body["facts"]]

    @property
    def signed(self) -> bool:
        parts = dict(part.split("=", 1) for part in self.headers["Forged-Signature"].split(","))
        signed = hmac.new(SECRET, parts["t"].encode() + b"." + self.raw, hashlib.sha256).hexdigest()
        return hmac.compare_digest(signed, parts["v1"])


class Hook:
    """A receiver that judges as it is told, and remembers everything."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.judge: Judge = lambda body: 200
        self.url = ""
        self._posted = asyncio.Event()

    @property
    def taken(self) -> list[int]:
        """The ids of the facts that were accepted, in the order in which they came."""
        return [one for delivery in self.deliveries if delivery.status == 200 for one in delivery.ids]

    async def until(self, enough: Callable[[], bool]) -> None:
        """Wait until what was posted is enough."""
        while not enough():
            self._posted.clear()
            await self._posted.wait()

    async def answer(self, request: web.Request) -> web.Response:
        raw = await request.read()
        judged = self.judge(json.loads(raw))
        if isinstance(judged, int):
            judged = web.Response(status=judged)
        elif not isinstance(judged, web.Response):
            judged = await judged
        self.deliveries.append(Delivery(dict(request.headers), raw, judged.status))
        self._posted.set()
        return judged


@asynccontextmanager
async def hooked(hook: Hook, *, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[Hook]:
    """Have it listen inside the block, on any port unless one is given."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/hook", hook.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls)
        await site.start()
        address: tuple[str, int] = runner.addresses[0]
        hook.url = f"{'https' if tls else 'http'}://127.0.0.1:{address[1]}/hook"
        yield hook
    finally:
        await runner.cleanup()


@asynccontextmanager
async def speaking(speak: Speak) -> AsyncIterator[str]:
    """A server that says whatever it likes; yields the URL."""
    talks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            await speak(reader, writer)
        except asyncio.CancelledError:
            pass  # the end of the test
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    finally:
        server.close()
        for task in talks:
            task.cancel()
        await asyncio.gather(*talks, return_exceptions=True)
