"""Health, readiness and metrics, asked over HTTP from a real daemon."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forged.auth.model import Role
from forged.client import ForgedClient
from forged.clock import SystemClock
from forged.config import Config
from forged.daemon import Daemon, Ports
from forged.errors import ConfigError, Unavailable
from forged.net.sockets import SystemNetwork
from forged.store.memory import MemoryStore
from forged.telemetry import http


@asynccontextmanager
async def watched(tmp_path: Path, *, anonymous: str = "worker", http: str = "127.0.0.1:0") -> AsyncIterator[Daemon]:
    async def open_store() -> MemoryStore:
        return MemoryStore("test")

    config = Config(
        data_dir=str(tmp_path), socket=str(tmp_path / "s"), listen=(), http=http, anonymous_loopback_role=anonymous
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


async def test_a_daemon_that_works_is_healthy_and_ready(tmp_path: Path) -> None:
    async with watched(tmp_path) as daemon:
        assert await get(daemon, "/healthz") == (200, '{"healthy": true}')
        assert await get(daemon, "/readyz") == (200, '{"ready": true}')


async def test_status_tells_where_http_is_served(tmp_path: Path) -> None:
    async with watched(tmp_path) as daemon, ForgedClient(f"unix://{tmp_path}/s") as client:
        assert (await client.status()).http == daemon.http


async def test_a_store_that_takes_no_writes_is_healthy_but_not_ready(tmp_path: Path) -> None:
    async with watched(tmp_path) as daemon:
        daemon.ledger.read_only = Unavailable("store_full", "there is no space left", "make room")
        assert (await get(daemon, "/healthz"))[0] == 200
        status, text = await get(daemon, "/readyz")
        assert status == 503
        assert "store_full" in text


async def test_the_metrics_are_prometheus_text_and_count_what_happened(tmp_path: Path) -> None:
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


async def test_somebody_without_rights_is_refused_and_a_token_is_accepted(tmp_path: Path) -> None:
    async with watched(tmp_path, anonymous="none") as daemon, ForgedClient(f"unix://{tmp_path}/s") as client:
        status, text = await get(daemon, "/metrics")
        assert status == 401
        assert "token_required" in text
        token = await client.create_token("prometheus", Role.VIEWER)
        assert (await get(daemon, "/metrics", token))[0] == 200
        assert (await get(daemon, "/metrics", token[:-1]))[0] == 401


async def test_health_and_readiness_are_told_to_this_host_without_rights(tmp_path: Path) -> None:
    async with watched(tmp_path, anonymous="none") as daemon:
        for path in ("/healthz", "/readyz"):
            assert (await get(daemon, path))[0] == 200
            assert (await get(daemon, path, "nonsense"))[0] == 200


async def test_who_asks_from_elsewhere_needs_rights_for_health_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_is_loopback", lambda remote: False)
    async with watched(tmp_path) as daemon:
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await get(daemon, path))[0] == 401


async def test_a_refusal_tells_how_to_show_a_token(tmp_path: Path) -> None:
    async with watched(tmp_path, anonymous="none") as daemon:
        _, text = await get(daemon, "/metrics")
        assert "send `Authorization: Bearer TOKEN`" in text
        assert "forgectl tokens create NAME --role viewer" in text


async def test_a_token_that_does_not_reach_is_forbidden(tmp_path: Path) -> None:
    async with watched(tmp_path) as daemon, ForgedClient(f"unix://{tmp_path}/s") as client:
        bound = await client.create_token("of-a-job", Role.OPERATOR, jobs=["a"])
        status, text = await get(daemon, "/metrics", bound)
        assert status == 403
        assert "forbidden" in text


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_bearer_is_understood_in_any_case(tmp_path: Path, scheme: str) -> None:
    async with watched(tmp_path, anonymous="none") as daemon, ForgedClient(f"unix://{tmp_path}/s") as client:
        token = await client.create_token("prometheus", Role.VIEWER)
        assert (await get(daemon, "/metrics", token, scheme))[0] == 200


async def test_a_port_in_use_is_the_operators_error(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with watched(tmp_path) as daemon:
        assert daemon.http is not None
        with pytest.raises(ConfigError) as refused:
            async with watched(tmp_path / "other", http=daemon.http.removeprefix("http://")):
                pass
    assert refused.value.code == "http_address"


async def test_a_daemon_that_stops_is_not_ready(tmp_path: Path) -> None:
    async with watched(tmp_path) as daemon:
        daemon.server.stop_admitting()
        status, text = await get(daemon, "/readyz")
        assert status == 503
        assert "stopping" in text
