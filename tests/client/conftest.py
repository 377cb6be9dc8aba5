"""Fixtures of the client tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.client.daemon_runner import DaemonRunner, config_in
from tests.client.proxy import Proxy
from tests.client.threaded_daemon import ThreadedDaemon


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[DaemonRunner]:
    """A running daemon."""
    runner = DaemonRunner(config_in(tmp_path))
    await runner.open()
    yield runner
    await runner.close()


@pytest.fixture
async def proxy(runner: DaemonRunner, tmp_path: Path) -> AsyncIterator[Proxy]:
    """A proxy to the same daemon."""
    proxy = Proxy(tmp_path / "proxy.sock", runner.config.socket)
    yield proxy
    await proxy.close()


@pytest.fixture
def threaded_daemon(tmp_path: Path) -> Iterator[ThreadedDaemon]:
    """A running daemon for a test without a loop."""
    threaded_daemon = ThreadedDaemon(tmp_path)
    yield threaded_daemon
    threaded_daemon.close()
