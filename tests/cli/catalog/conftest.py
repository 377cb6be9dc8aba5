"""A real daemon that has checkpoints of the job `run`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forged.checkpoint
from forged.catalog.messages import CompleteCheckpoint, StartCheckpoint
from forged.catalog.model import CheckpointMeta
from forged.cli.forgectl import main
from forged.client import BlockingClient
from tests.client.threaded_daemon import ThreadedDaemon

JOB = "run"
SIZE_BYTES = 1_000


class CatalogueDaemon:
    """A daemon with the job `run`, and `forgectl ckpt` run on it."""

    def __init__(self, daemon: ThreadedDaemon, client: BlockingClient, capsys: pytest.CaptureFixture[str]) -> None:
        self.daemon = daemon
        self.client = client
        self._capsys = capsys

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
        """Run `forgectl ckpt` about a job; returns exit code, output and errors."""
        code = main.main(["--socket", self.daemon.socket, "ckpt", *shlex.split(line), "--job", job])
        said = self._capsys.readouterr()
        return code, said.out, said.err

    def lines(self, line: str) -> list[str]:
        """The output of a successful command."""
        code, out, err = self.run(line)
        assert (code, err) == (0, "")
        return out.splitlines()

    def json(self, line: str) -> Any:
        """The JSON output of a successful command."""
        return json.loads("\n".join(self.lines(f"{line} --json")))


@pytest.fixture
def client(threaded_daemon: ThreadedDaemon) -> Iterator[BlockingClient]:
    with threaded_daemon.client() as client:
        yield client


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
