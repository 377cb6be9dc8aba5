"""Fixtures of the worker's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from forged.client import ForgedClient
from tests.client.conftest import runner, threaded_daemon
from tests.client.daemon_runner import SOON, DaemonRunner
from tests.worker.trainers import TrainerGroup, group_at

__all__ = ["runner", "threaded_daemon"]


@pytest.fixture
async def group(runner: DaemonRunner) -> AsyncIterator[TrainerGroup]:
    """Trainers of one job at the daemon."""
    async with group_at(runner.endpoint) as group:
        yield group


@pytest.fixture
async def client(runner: DaemonRunner) -> AsyncIterator[ForgedClient]:
    """An operator."""
    async with ForgedClient(runner.endpoint, reconnect=SOON) as client:
        yield client
