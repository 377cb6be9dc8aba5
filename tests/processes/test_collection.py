"""A daemon that is killed while it deletes checkpoints: what is kept stays whole, and nothing else is left."""

from __future__ import annotations

import random
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from forged import checkpoint
from forged.catalog.messages import AdoptedCheckpoint
from forged.checkpoint.format.manifest import SUFFIX
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.locations import root_at
from forged.client import BlockingClient
from forged.errors import ForgedError
from tests.processes.daemon import DaemonProcess

JOB = "run"
KEPT = 3
ROUNDS = 4
SAVES = 12
PARTS = 8
PATIENCE_S = 60.0


def save(folder: Path, step: int) -> AdoptedCheckpoint:
    """Save the checkpoint of a step, with some more files of the save, so that a deletion takes longer."""
    path = folder / f"step-{step:08d}"
    checkpoint.save(str(path), {"w": np.full(1000, step, np.float32)})
    manifest = listing.read_manifest(root_at(folder), path.name)
    for number in range(PARTS):
        (path / f"{manifest.save_id}.{number:05d}.receipt").write_bytes(b"x")
    return AdoptedCheckpoint(str(path), manifest.save_id, 0, step, manifest.size_bytes, manifest.created_at)


def are_gone(client: BlockingClient) -> bool:
    """Whether the files of all tombstones are gone."""
    return not client.restore_points(JOB).excluded


def kill_soon(daemon: DaemonProcess, client: BlockingClient, delay_s: float, *, is_after_reply: bool) -> None:
    """Collect, and kill the daemon so long after the request, or after the reply, when files are being deleted."""
    timer = threading.Timer(delay_s, daemon.process.kill)
    try:
        if is_after_reply:
            client.collect_checkpoints(JOB)
        timer.start()
        client.collect_checkpoints(JOB)
        daemon.process.wait()
    except ForgedError:
        daemon.process.wait()
    finally:
        timer.join()


@pytest.mark.parametrize("seed", [1, 2])
def test_daemon_killed_while_it_collects_keeps_what_is_kept_and_leaves_nothing_else(tmp_path: Path, seed: int) -> None:
    delays, folder, step = random.Random(seed), tmp_path / "checkpoints", 0
    settings = {"checkpoint_keep": KEPT}
    for number in range(ROUNDS):
        with DaemonProcess(tmp_path) as daemon, daemon.client(timeout_s=PATIENCE_S) as client:
            client.create_job(JOB, settings)
            adopted = [save(folder, step := step + 1) for _ in range(SAVES)]
            assert len(client.adopt_checkpoints(JOB, str(folder), adopted).adopted) == SAVES
            kill_soon(daemon, client, delays.uniform(0.0, 0.15), is_after_reply=number % 2 == 0)
    with DaemonProcess(tmp_path) as daemon, daemon.client() as client:
        client.collect_checkpoints(JOB)
        deadline = time.monotonic() + PATIENCE_S
        while not are_gone(client):
            assert time.monotonic() < deadline
        kept = [point.meta.step for point in client.restore_points(JOB).points]
    assert kept == [step, step - 1, step - 2]
    names = {f"step-{one:08d}" for one in kept}
    assert {path.name.removesuffix(SUFFIX) for path in folder.iterdir()} == names
    for name in names:
        assert checkpoint.verify(str(folder / name)).is_valid
    shutil.rmtree(folder)
