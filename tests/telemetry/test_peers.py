"""Connections and refusals in the daemon's log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from forged.config import Config
from forged.daemon import Daemon, Ports
from forged.kernel.store.memory import MemoryStore
from forged.net.server import DISCONNECTS_LOGGED_PER_S_MAX, SWEEP_INTERVAL_S
from tests.kernel_fixture import on_virtual_time
from tests.net.manual_daemon import (
    BYE,
    CLIENT,
    HELLO,
    OPERATOR,
    REMOTE,
    WORKER,
    ManualClient,
    ManualClock,
    ManualDaemon,
    ManualNetwork,
    until,
)
from tests.telemetry.recording_log import RecordingLog


@asynccontextmanager
async def a_daemon(log: RecordingLog) -> AsyncIterator[ManualDaemon]:
    async def open_store() -> MemoryStore:
        return MemoryStore("h")

    network, clock = ManualNetwork(), ManualClock()
    config = Config(socket="s", listen=(), drain_timeout_s=0.0)
    async with Daemon.running(config, Ports(clock, network, 1, 0, open_store, log=log)) as daemon:
        yield ManualDaemon(daemon, network, clock)


@on_virtual_time
async def test_connection_is_logged_at_start_and_end_with_its_principal() -> None:
    log = RecordingLog()
    async with a_daemon(log) as here:
        client = await here.greeted()
        client.send(BYE, 0)
        await client.lost()
        [opened], [ended] = log.of("connection opened"), log.of("connection ended")
    assert opened == {"peer": OPERATOR.address, "transport": "unix"}
    assert ended["client"] == CLIENT.hex()
    assert ended["principal"] == "unix:0"
    assert log.levels("connection opened") == log.levels("connection ended") == {"debug"}
    assert log.of("a peer was disconnected") == []


def speak_another_protocol(client: ManualClient) -> None:
    client.send_bytes(b"GET / HTTP/1.1\r\n\r\n")


def speak_a_later_version(client: ManualClient) -> None:
    client.send(HELLO, 7, 9, CLIENT, "from the future", None)


def bring_a_wrong_token(client: ManualClient) -> None:
    client.hello(token="forged_nonsense")


@pytest.mark.parametrize("misbehave", [speak_another_protocol, speak_a_later_version, bring_a_wrong_token])
def test_refused_peer_is_logged_with_the_reason(misbehave: Callable[[ManualClient], None]) -> None:
    log = RecordingLog()

    @on_virtual_time
    async def meet() -> None:
        async with a_daemon(log) as here:
            client = here.client(WORKER)
            misbehave(client)
            await client.lost()

    meet()
    [told] = log.of("a peer was disconnected")
    assert told["peer"] == WORKER.address
    assert told["code"]
    assert told["reason"]
    assert log.levels("a peer was disconnected") == {"warning"}
    assert log.of("connection ended")[0]["code"] == told["code"]


@on_virtual_time
async def test_protocol_error_after_the_hello_is_logged_with_the_principal() -> None:
    log = RecordingLog()
    async with a_daemon(log) as here:
        client = await here.greeted()
        client.send(HELLO, 1, 1, CLIENT, "again", None)
        await client.lost()
        [told] = log.of("a peer was disconnected")
    assert told["code"] == "message_unexpected"
    assert told["client"] == CLIENT.hex()


@on_virtual_time
async def test_refusals_over_the_rate_are_counted() -> None:
    log = RecordingLog()
    async with a_daemon(log) as here:
        for _ in range(100):
            client = here.client(REMOTE)
            client.hello()
            await client.lost()
        assert len(log.of("a peer was disconnected")) == DISCONNECTS_LOGGED_PER_S_MAX
        here.clock.now += 10 * SWEEP_INTERVAL_S
        await until(lambda: bool(log.of("more peers were disconnected")))
        assert log.of("more peers were disconnected") == [{"times": 90}]
