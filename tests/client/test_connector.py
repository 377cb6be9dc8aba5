"""Connecting and reconnecting."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from forged.client import connector
from forged.errors import ConfigError, Unavailable
from forged.retry import RetryPolicy
from tests.client.daemon_runner import SOON, DaemonRunner
from tests.client.fake_daemon import FakeConnection, FakeDaemon
from tests.client.test_client import client_of


class CountingRandom(Random):
    """Counts the pauses: each draws once for its jitter."""

    pauses = 0

    def random(self) -> float:
        self.pauses += 1
        return super().random()


class SettableClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


async def welcome_and_drop(connection: FakeConnection) -> None:
    await connection.accept_hello()


class TestPauses:
    async def test_daemon_that_closes_each_connection_is_retried_with_pauses(self, tmp_path: Path) -> None:
        dice = CountingRandom(1)
        async with FakeDaemon(tmp_path / "s", welcome_and_drop) as fake, client_of(fake, source=dice):
            while fake.connections < 6:
                await asyncio.sleep(0.001)
        assert dice.pauses >= 5

    async def test_long_lived_connection_is_reopened_without_a_pause(self, tmp_path: Path) -> None:
        dice, clock = CountingRandom(1), SettableClock()
        leave = asyncio.Event()

        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            await (leave.wait() if fake.connections == 1 else connection.wait_closed())

        async with FakeDaemon(tmp_path / "s", treat) as fake, client_of(fake, source=dice, clock=clock) as client:
            clock.now += 60
            leave.set()
            while fake.connections < 2 or not client.connected:
                await asyncio.sleep(0)
            assert dice.pauses == 0

    async def test_every_endpoint_is_tried_before_a_pause(self, tmp_path: Path) -> None:
        dice = CountingRandom(1)
        async with (
            FakeDaemon(tmp_path / "a", welcome_and_drop) as first,
            FakeDaemon(tmp_path / "b", welcome_and_drop) as second,
            client_of(first, second, source=dice),
        ):
            while dice.pauses < 4:
                await asyncio.sleep(0.001)
            assert min(first.connections, second.connections) >= 4

    async def test_connect_timeout_of_opening_does_not_limit_reconnections(self, tmp_path: Path) -> None:
        async def treat(connection: FakeConnection) -> None:
            if fake.connections > 1:
                await asyncio.sleep(2.5)
            await connection.accept_hello()
            if fake.connections > 1:
                await connection.wait_closed()

        async with FakeDaemon(tmp_path / "s", treat) as fake, client_of(fake, connect_timeout_s=4.0) as client:
            while fake.connections < 2 or not client.connected:
                await asyncio.sleep(0.001)
            assert fake.connections == 2

    async def test_exhausted_retry_policy_ends_the_client(self, runner: DaemonRunner) -> None:
        async with client_of(runner, reconnect=RetryPolicy(attempts=3, delay_s=0.001)) as client:
            await runner.close()
            with pytest.raises(Unavailable, match="cannot connect") as refused:
                await client.status()
            assert refused.value.code == "no_daemon"
            with pytest.raises(Unavailable, match="no daemon on"):
                await client.status()


class TestEnd:
    async def test_config_error_is_not_retried(self, runner: DaemonRunner) -> None:
        endpoint = f"unix:///{'x' * 200}"
        client = client_of(runner)
        with pytest.raises(ConfigError, match="path"):
            await type(client)(endpoint, connect_timeout_s=60, reconnect=SOON).__aenter__()

    async def test_client_closed_while_connecting_leaks_nothing(self, tmp_path: Path) -> None:
        tried = asyncio.Event()

        async def treat(connection: FakeConnection) -> None:
            if fake.connections == 1:
                await connection.accept_hello()
            else:
                tried.set()
                await connection.wait_closed()

        async with FakeDaemon(tmp_path / "s", treat) as fake:
            async with client_of(fake):
                await tried.wait()
            guests = fake.connections
        assert guests == 2

    async def test_daemon_that_does_not_read_does_not_delay_closing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connector, "GOODBYE_TIMEOUT_S", 0.02)
        over = asyncio.Event()

        async def treat(connection: FakeConnection) -> None:
            await connection.accept_hello()
            # With its buffer full, as a process that hangs, it reads no more.
            await over.wait()

        async with FakeDaemon(tmp_path / "s", treat) as fake:
            async with client_of(fake) as client:
                notes = [asyncio.create_task(client.note("a", "x" * 1_000_000)) for _ in range(5)]
                await asyncio.sleep(0.01)
            over.set()
            assert {type(error) for error in await asyncio.gather(*notes, return_exceptions=True)} == {Unavailable}
