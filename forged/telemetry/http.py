"""The daemon's read-only HTTP server: health, readiness and metrics.

Invariants:
- `/healthz` and `/readyz` need no token on the loopback interface. `/metrics`, and every path from another host, needs
  the viewer role for all jobs: by a token, or by the role of loopback clients.
- A request without a token must name this server, so that a web page of a domain that resolves to this host gets
  nothing.
- Healthy means that the bus answers a request; ready means that the store accepts decisions.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

import anyio
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from prometheus_client.registry import Collector

from forged.auth.access import authorise
from forged.auth.model import Principal, Role
from forged.errors import ConfigError, ForgedError, RequestRefused, Unavailable
from forged.kernel.bus import Bus
from forged.kernel.ledger import Ledger
from forged.net.server import Server
from forged.net.transport import tcp
from forged.net.transport.port import Address, Peer
from forged.net.transport.socket_owner import owner_uid
from forged.plugins.model import PluginView
from forged.status.model import PingDaemon
from forged.telemetry.exposition import Exposition
from forged.telemetry.http_connections import HttpConnections
from forged.telemetry.metrics import DaemonCollector

HEALTH_TIMEOUT_S = 2.0
SWEEP_INTERVAL_S = 1.0
BACKLOG = 128
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BEARER = "bearer "
LOOPBACK_WITHOUT_TOKEN = ("/healthz", "/readyz")
HOST_CHARS_SHOWN_MAX = 80
STATUS = {"forbidden": 403, "host_foreign": 421}
"""The status of refusals by code; 401 for the rest."""
HOW_TO_AUTHENTICATE = "send `Authorization: Bearer TOKEN`; `forgectl tokens create NAME --role viewer` makes the token"

Identify = Callable[[Peer, str | None], Principal]


class HttpServer:
    """Answers `/healthz`, `/readyz` and `/metrics`."""

    def __init__(
        self,
        bus: Bus,
        ledger: Ledger,
        server: Server,
        identify: Identify,
        log_lines_lost: Callable[[], int] = lambda: 0,
        plugins: Callable[[], Iterable[PluginView]] = tuple,
        further: Sequence[Collector] = (),
    ) -> None:
        self._bus = bus
        self._ledger = ledger
        self._identify = identify
        self._server = server
        self._own_names = {socket.gethostname().lower()}
        self._connections = HttpConnections()
        self._exposition = Exposition(DaemonCollector(bus, ledger, server, log_lines_lost, plugins, further), _now)

    @asynccontextmanager
    async def open(self, address: Address) -> AsyncIterator[Address]:
        """Serve inside the block; yields the address with the actual port."""
        self._own_names.add(address.host.lower())
        runner = web.AppRunner(self._application(), access_log=None, logger=_logger())
        await runner.setup()
        try:
            assert runner.server is not None
            self._connections.begin(runner.server)
            servers = await self._listen(address)
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._look_after_visitors)
                    host, port, *_ = servers[0].sockets[0].getsockname()
                    yield Address("tcp", host=host, port=port)
                    tasks.cancel_scope.cancel()
            finally:
                for server in servers:
                    server.close()
        finally:
            await runner.cleanup()

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._send_response, self._authorise])
        application.router.add_get("/healthz", self._health)
        application.router.add_get("/readyz", self._readiness)
        application.router.add_get("/metrics", self._metrics)
        return application

    async def _listen(self, address: Address) -> list[asyncio.Server]:
        loop = asyncio.get_running_loop()
        try:
            sockets = await tcp.bind(address, BACKLOG)
        except OSError as error:
            raise _not_listening(address, error) from error
        return [await loop.create_server(self._connections.enter, sock=sock, backlog=BACKLOG) for sock in sockets]

    async def _look_after_visitors(self) -> None:
        while True:
            await anyio.sleep(SWEEP_INTERVAL_S)
            self._connections.sweep()

    @web.middleware
    async def _send_response(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Send the response under a deadline."""
        if request.transport is not None:
            # `write_eof` then returns when all bytes are sent, so that the deadline covers clients that do not read.
            request.transport.set_write_buffer_limits(0)
        with self._connections.serving(request.protocol):
            response = await handler(request)
            with suppress(ConnectionError):
                await response.prepare(request)
                await response.write_eof()
            return response

    @web.middleware
    async def _authorise(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check_rights(request)
        except RequestRefused as error:
            status = STATUS.get(error.code, 401)
            return web.json_response(
                {"code": error.code, "error": f"{error.message} ({HOW_TO_AUTHENTICATE})"}, status=status
            )
        return await handler(request)

    def _check_rights(self, request: web.Request) -> None:
        remote = request.remote or ""
        loopback = _is_loopback(remote)
        header = request.headers.get("Authorization", "")
        token = header[len(BEARER) :].strip() if header.lower().startswith(BEARER) else None
        if token is None:
            self._require_own_name(request)
        if loopback and request.path in LOOPBACK_WITHOUT_TOKEN:
            return
        uid = owner_uid(request.get_extra_info("socket")) if loopback and token is None else None
        principal = self._identify(Peer("tcp", remote, loopback=loopback, uid=uid), token)
        authorise(principal, Role.VIEWER, None)
        self._connections.trust(request.protocol)

    def _require_own_name(self, request: web.Request) -> None:
        """Refuse a request for a domain that is not this host's: its sender has only resolved the domain to this host.

        An address, and a name without a dot, cannot be the domain of a web page.
        """
        name = _host_name(request.headers.get("Host", ""))
        if "." in name and not _is_address(name) and name not in self._own_names:
            raise RequestRefused(
                "host_foreign",
                f"the Host header names {name[:HOST_CHARS_SHOWN_MAX]!r}, which is not this server",
                "use an address of this host, or send a token",
            )

    async def _health(self, request: web.Request) -> web.Response:
        try:
            with anyio.fail_after(HEALTH_TIMEOUT_S):
                await self._bus.ask(PingDaemon())
        except TimeoutError:
            return web.json_response({"healthy": False, "reason": f"no answer in {HEALTH_TIMEOUT_S} s"}, status=503)
        except ForgedError as error:
            return web.json_response({"healthy": False, "reason": str(error)}, status=503)
        return web.json_response({"healthy": True})

    async def _readiness(self, request: web.Request) -> web.Response:
        try:
            if self._server.stopping:
                raise Unavailable("stopping", "the daemon is stopping", "try again when it has restarted")
            self._ledger.require_writable()
        except ForgedError as error:
            return web.json_response({"ready": False, "code": error.code, "reason": str(error)}, status=503)
        return web.json_response({"ready": True})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=await self._exposition.text(), headers={"Content-Type": METRICS_TYPE})


def _not_listening(address: Address, error: OSError) -> ForgedError:
    reason = f"http = {address}: {error.strerror}"
    if error.errno == errno.EADDRNOTAVAIL:
        # Retryable: while a machine boots, a daemon may start before its network addresses exist.
        return Unavailable("http_address_not_available", reason, "name an address of this machine")
    return ConfigError("http_address", reason, "name another")


def _now() -> float:
    return asyncio.get_running_loop().time()


def _logger() -> logging.Logger:
    logger = logging.getLogger(__name__)
    logger.addFilter(_is_server_error)
    return logger


def _is_server_error(record: logging.LogRecord) -> bool:
    """Malformed requests are answered with status 400; any client can send them, so they are not logged."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


def _host_name(header: str) -> str:
    """The name or address in a Host header, without port and brackets."""
    with suppress(ValueError):
        return (urlsplit(f"//{header}").hostname or "").rstrip(".")
    return header


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(remote: str) -> bool:
    try:
        return ip_address(remote).is_loopback
    except ValueError:
        return False
