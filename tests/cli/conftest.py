"""Fixtures of the command tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forged.client import BlockingClient
from tests.client.conftest import threaded_daemon
from tests.client.threaded_daemon import ThreadedDaemon

__all__ = ["client", "threaded_daemon"]


@pytest.fixture
def client(threaded_daemon: ThreadedDaemon) -> Iterator[BlockingClient]:
    with threaded_daemon.client() as client:
        yield client
