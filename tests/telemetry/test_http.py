"""Health, readiness and metrics of a real daemon over HTTP."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp.web_protocol import RequestHandler
from prometheus_client.parser import text_string_to_metric_families

from forged.auth.model import Role
from forged.client import ForgedClient
from forged.clock import SystemClock
from forged.config import Config
from forged.daemon import Daemon, Ports
from forged.errors import ConfigError, Unavailable
from forged.kernel.store.memory import MemoryStore
from forged.net.transport.sockets import SystemNetwork
from forged.status.model import PingDaemon
from forged.telemetry import http, http_connections
from forged.telemetry.exposition import EXPOSITION_AGE_MAX_S, Exposition
from forged.telemetry.http_connections import HttpConnections

SCRAPERS = 100
LARGE_BYTES = 64 << 20
BIG_REQUEST = b"GET /metrics HTTP/1.1\r\nHost: here\r\n"


@asynccontextmanager
async def watched(tmp_path: Path, *, own: str = "worker", http: str = "127.0.0.1:0") -> AsyncIterator[Daemon]:
    async def open_store() -> MemoryStore:
        return MemoryStore("test")

    config = Config(
        data_dir=str(tmp_path), socket=str(tmp_path / "s"), listen=(), http=http, own_user_loopback_role=own
    )
    ports = Ports(SystemClock(), SystemNetwork(), os.getpid(), os.getuid(), open_store)
    async with Daemon.running(config, ports) as daemon:
        yield daemon


async def get(daemon: Daemon, path: str, token: str | None = None, scheme: str = "Bearer") -> tuple[int, str]:
    headers = {} if token is None else {"Authorization": f"{scheme} {token}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"{daemon.http}{path}", headers=headers) as answer,
    ):
        return answer.status, await answer.text()


async def test_working_daemon_is_healthy_and_ready(tmp_path: Path) -> None:
    async with watched(tmp_path) as daemon:
        assert await get(daemon, "/healthz") == (200, '{"healthy": true}')
        assert await get(daemon, "/readyz") == (200, '{"ready": true}')


async def test_status_shows_the_http_address(tmp_path: Path) -> None:
    async with watched(tmp_path) as daemon, ForgedClient(f"unix://{tmp_path}/s") as client:
        assert (await client.status()).http == daemon.http


async def test_a_store_that_takes_no_writes_is_healthy_but_not_ready(tmp_path: Path) -> None:
    async with watched(tmp_path) as daemon:
        daemon.ledger.read_only = Unavailable("store_full", "there is no space left", "make room")
        assert (await get(daemon, "/healthz"))[0] == 200
        status, text = await get(daemon, "/readyz")
        assert status == 503
        assert "store_full" in text


async def test_metrics_are_prometheus_text_with_current_counts(tmp_path: Path) -> None:
    async with watched(tmp_path) as daemon, ForgedClient(f"unix://{tmp_path}/s") as client:
        for name in ("one", "two"):
            await client.create_job(name)
        status, text = await get(daemon, "/metrics")
        assert status == 200
        samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        created = (("handler", "CreateJob"), ("kind", "request"))
        assert samples["forged_handler_seconds_bucket", (*created, ("le", "+Inf"))] == 2
        assert samples["forged_connections", ()] == 1
        assert samples["forged_decisions_total", ()] >= 3
        assert samples["forged_store_writable", ()] == 1
        assert samples["forged_checkpoints", (("state", "complete"),)] == 0
        assert samples["forged_slot_bytes", ()] == 0


async def test_metrics_need_rights_and_accept_a_token(tmp_path: Path) -> None:
    async with watched(tmp_path, own="none") as daemon, ForgedClient(f"unix://{tmp_path}/s") as client:
        status, text = await get(daemon, "/metrics")
        assert status == 401
        assert "token_required" in text
        token = await client.create_token("prometheus", Role.VIEWER)
        assert (await get(daemon, "/metrics", token))[0] == 200
        assert (await get(daemon, "/metrics", token[:-1]))[0] == 401


async def test_health_and_readiness_need_no_rights_on_loopback(tmp_path: Path) -> None:
    async with watched(tmp_path, own="none") as daemon:
        for path in ("/healthz", "/readyz"):
            assert (await get(daemon, path))[0] == 200
            assert (await get(daemon, path, "nonsense"))[0] == 200


async def test_health_needs_rights_for_remote_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_is_loopback", lambda remote: False)
    async with watched(tmp_path) as daemon:
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await get(daemon, path))[0] == 401


async def test_refusal_explains_the_authorization_header(tmp_path: Path) -> None:
    async with watched(tmp_path, own="none") as daemon:
        _, text = await get(daemon, "/metrics")
        assert "send `Authorization: Bearer TOKEN`" in text
        assert "forgectl tokens create NAME --role viewer" in text


async def test_token_with_insufficient_role_is_forbidden(tmp_path: Path) -> None:
    async with watched(tmp_path) as daemon, ForgedClient(f"unix://{tmp_path}/s") as client:
        bound = await client.create_token("of-a-job", Role.OPERATOR, jobs=["a"])
        status, text = await get(daemon, "/metrics", bound)
        assert status == 403
        assert "forbidden" in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7434", "EVIL.example.", "127.0.0.1.evil.example"])
@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
async def test_request_for_a_foreign_host_is_refused(tmp_path: Path, path: str, host: str) -> None:
    async with watched(tmp_path) as daemon:
        answer = await raw(daemon, f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 421 ")
        assert b"host_foreign" in answer
        assert b"forged_" not in answer


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:7434", "[::1]:7434", "localhost", "forged", ""])
async def test_address_or_single_name_in_the_host_header_is_accepted(tmp_path: Path, host: str) -> None:
    async with watched(tmp_path) as daemon:
        answer = await raw(daemon, f"GET /healthz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 200 ")


async def test_request_with_a_token_may_name_any_host(tmp_path: Path) -> None:
    async with watched(tmp_path) as daemon, ForgedClient(f"unix://{tmp_path}/s") as client:
        token = await client.create_token("prometheus", Role.VIEWER)
        head = f"Host: forged.example:7434\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n"
        assert (await raw(daemon, f"GET /metrics HTTP/1.1\r\n{head}\r\n".encode())).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_bearer_is_case_insensitive(tmp_path: Path, scheme: str) -> None:
    async with watched(tmp_path, own="none") as daemon, ForgedClient(f"unix://{tmp_path}/s") as client:
        token = await client.create_token("prometheus", Role.VIEWER)
        assert (await get(daemon, "/metrics", token, scheme))[0] == 200


async def test_port_in_use_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with watched(tmp_path) as daemon:
        assert daemon.http is not None
        with pytest.raises(ConfigError) as refused:
            async with watched(tmp_path / "other", http=daemon.http.removeprefix("http://")):
                pass
    assert refused.value.code == "http_address"


async def test_missing_local_address_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"192\.0\.2\.1") as refused:
        async with watched(tmp_path, http="192.0.2.1:0"):
            """It does not come to this."""
    assert refused.value.code == "http_address_not_available"


async def test_stopping_daemon_is_not_ready(tmp_path: Path) -> None:
    async with watched(tmp_path) as daemon:
        daemon.server.stop_admitting()
        status, text = await get(daemon, "/readyz")
        assert status == 503
        assert "stopping" in text


async def test_hundred_concurrent_scrapes_are_served_without_delaying_requests(tmp_path: Path) -> None:
    async with watched(tmp_path) as daemon:
        pings = 0
        scraped = asyncio.Event()

        async def work() -> None:
            nonlocal pings
            while not scraped.is_set():
                await daemon.bus.ask(PingDaemon())
                pings += 1
                await asyncio.sleep(0)

        working = asyncio.create_task(work())
        connector = aiohttp.TCPConnector(limit=SCRAPERS)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def scrape() -> str:
                async with session.get(f"{daemon.http}/metrics") as answer:
                    assert answer.status == 200
                    return await answer.text()

            before, began = pings, asyncio.get_running_loop().time()
            texts = [text for _ in range(3) for text in await asyncio.gather(*(scrape() for _ in range(SCRAPERS)))]
            during = pings - before
            made_at_most = 2 + int((asyncio.get_running_loop().time() - began) / EXPOSITION_AGE_MAX_S)
        scraped.set()
        await working
        assert during > SCRAPERS
        assert len(texts) == 3 * SCRAPERS
        for text in set(texts):
            assert "forged_decisions" in {family.name for family in text_string_to_metric_families(text)}
        assert len(set(texts)) <= made_at_most


async def raw(daemon: Daemon, request: bytes) -> bytes:
    """The response to these bytes, until the server closes the connection."""
    assert daemon.http is not None
    host, _, port = daemon.http.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/metrics", 200),
        ("HEAD", "/healthz", 200),
        ("GET", "/", 404),
        ("GET", "/metrics/", 404),
        ("GET", "/../etc/passwd", 404),
        ("POST", "/metrics", 405),
        ("DELETE", "/healthz", 405),
        ("PUT", "/readyz", 405),
    ],
)
async def test_unknown_paths_and_write_methods_are_refused(tmp_path: Path, method: str, path: str, status: int) -> None:
    async with watched(tmp_path) as daemon:
        request = f"{method} {path} HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        head, _, body = (await raw(daemon, request.encode())).partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode())
        assert method != "HEAD" or body == b""


@pytest.mark.parametrize(
    "request_bytes",
    [
        BIG_REQUEST + b"X-Huge: " + b"x" * (1 << 20) + b"\r\n\r\n",
        BIG_REQUEST + b"X-Many: x\r\n" * 10_000 + b"\r\n",
        b"GET /" + b"x" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00 this is TLS",
        b"GET /metrics HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"\x00" * 1000 + b"\r\n\r\n",
    ],
    ids=["huge header", "many headers", "huge path", "tls", "negative length", "zeros"],
)
async def test_malformed_request_is_refused_and_other_clients_are_served(
    tmp_path: Path, request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(tmp_path) as daemon:
        answer = await raw(daemon, request_bytes)
        assert answer == b"" or answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
        assert (await get(daemon, "/healthz"))[0] == 200
    assert [record for record in caplog.records if record.exc_info] == []


async def test_client_that_does_not_read_the_response_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    later_s = 0.0
    swept = asyncio.Event()
    cut_off = http_connections._cut_off

    def note(connection: RequestHandler) -> None:
        cut_off(connection)
        swept.set()

    monkeypatch.setattr(http_connections, "_cut_off", note)
    monkeypatch.setattr(HttpConnections, "_now", lambda _: loop.time() + later_s)
    monkeypatch.setattr(http, "SWEEP_INTERVAL_S", 0.01)
    monkeypatch.setattr(Exposition, "text", lambda _: large())
    async with watched(tmp_path) as daemon:
        assert daemon.http is not None
        host, _, port = daemon.http.removeprefix("http://").rpartition(":")
        with socket.socket() as sleepy:
            sleepy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sleepy.setblocking(False)
            await loop.sock_connect(sleepy, (host, int(port)))
            await loop.sock_sendall(sleepy, BIG_REQUEST + b"\r\n")
            assert await loop.sock_recv(sleepy, 1) == b"H"
            later_s = 3600.0
            await swept.wait()
            read = 1
            while part := await loop.sock_recv(sleepy, 1 << 20):
                read += len(part)
            assert read < LARGE_BYTES
        assert (await get(daemon, "/healthz"))[0] == 200


async def large() -> bytes:
    return b"#" * LARGE_BYTES
