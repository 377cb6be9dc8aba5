"""A webhook receiver that records deliveries and answers as the test says."""

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
RawHandler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Judge = Callable[[Body], int | web.Response | Awaitable[web.Response]]


@dataclass(frozen=True)
class Delivery:
    """One received POST request, and the status of the response."""

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


class WebhookReceiver:
    """Records all deliveries; `judge` returns the status or response for a body."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.judge: Judge = lambda body: 200
        self.url = ""
        self._posted = asyncio.Event()

    @property
    def accepted_ids(self) -> list[int]:
        """The ids of the accepted facts, in the order of arrival."""
        return [one for delivery in self.deliveries if delivery.status == 200 for one in delivery.ids]

    async def until(self, enough: Callable[[], bool]) -> None:
        """Wait until the condition on the deliveries holds."""
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
async def listening(
    receiver: WebhookReceiver, *, port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[WebhookReceiver]:
    """Listen inside the block; port 0 means any free port."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/hook", receiver.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls)
        await site.start()
        address: tuple[str, int] = runner.addresses[0]
        receiver.url = f"{'https' if tls else 'http'}://127.0.0.1:{address[1]}/hook"
        yield receiver
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw_server(handle: RawHandler) -> AsyncIterator[str]:
    """A server that reads one request and lets `handle` write the response; yields the URL."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            await handle(reader, writer)
        except asyncio.CancelledError:
            pass  # the end of the test
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
