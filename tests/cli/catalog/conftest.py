"""A real daemon that has checkpoints of the job `run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forged.checkpoint
from forged.catalog.messages import CompleteCheckpoint, StartCheckpoint
from forged.catalog.model import CheckpointMeta
from forged.client import BlockingClient
from tests.cli.daemon_commands import DaemonCommands
from tests.client.threaded_daemon import ThreadedDaemon

JOB = "run"
SIZE_BYTES = 1_000


class CatalogueDaemon(DaemonCommands):
    """A daemon with the job `run`, and `forgectl ckpt` run on it."""

    group = "ckpt"

    def start(self, step: int, folder: str = "/data/run", **fields: Any) -> CheckpointMeta:
        """The daemon's own user starts a checkpoint."""
        request = StartCheckpoint(JOB, "", b"", 0, step, f"{folder}/step-{step}", f"{step:08x}", **fields)
        meta: CheckpointMeta = self.client.request(request)
        return meta

    def save(self, step: int, **fields: Any) -> str:
        """A complete checkpoint; returns its id."""
        made = self.start(step, **fields).checkpoint_id
        self.client.request(CompleteCheckpoint(JOB, "", b"", made, SIZE_BYTES, 0.5))
        return made

    def run(self, line: str, job: str = JOB) -> tuple[int, str, str]:
        return super().run(f"{line} --job {job}")


@pytest.fixture
def on_daemon(
    threaded_daemon: ThreadedDaemon, client: BlockingClient, capsys: pytest.CaptureFixture[str]
) -> CatalogueDaemon:
    client.create_job(JOB)
    return CatalogueDaemon(threaded_daemon, client, capsys)


@pytest.fixture
def saved_folder(tmp_path: Path) -> Path:
    """A folder with the checkpoints step-1 to step-3."""
    folder = tmp_path / "saved"
    for step in (1, 2, 3):
        forged.checkpoint.save(folder / f"step-{step}", {"w": np.zeros(8)})
    return folder
