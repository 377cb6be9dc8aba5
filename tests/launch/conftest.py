"""Fixtures of the launches: a daemon in this process, and its client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forged.client import BlockingClient
from tests.client.conftest import threaded_daemon
from tests.client.threaded_daemon import ThreadedDaemon

__all__ = ["client", "endpoint", "threaded_daemon"]


@pytest.fixture
def endpoint(threaded_daemon: ThreadedDaemon) -> str:
    return f"unix://{threaded_daemon.socket}"


@pytest.fixture
def client(threaded_daemon: ThreadedDaemon) -> Iterator[BlockingClient]:
    with threaded_daemon.client() as client:
        yield client
