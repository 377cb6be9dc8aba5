"""A daemon with slots, and workers at it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forged.checkpoint.storage.local import LocalStorage
from forged.client import ForgedClient
from forged.host.local_agent import LocalHostAgent
from forged.worker import host_slots
from tests.client.daemon_runner import DaemonRunner, config_in
from tests.worker.trainers import PATIENCE_S, TrainerGroup, group_at


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[DaemonRunner]:
    """A running daemon with slots."""
    runner = DaemonRunner(config_in(tmp_path / "daemon"), host=LocalHostAgent(str(tmp_path / "slots"), str(tmp_path)))
    await runner.open()
    yield runner
    await runner.close()


@pytest.fixture
async def group(runner: DaemonRunner) -> AsyncIterator[TrainerGroup]:
    async with group_at(runner.endpoint, min_workers=1) as group:
        yield group


@pytest.fixture
async def client(runner: DaemonRunner) -> AsyncIterator[ForgedClient]:
    async with ForgedClient(runner.endpoint) as client:
        yield client


@pytest.fixture(autouse=True)
def patient_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a worker that has not reached the daemon in two seconds would do without slots."""
    monkeypatch.setattr(host_slots, "CONNECT_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "checkpoints")
