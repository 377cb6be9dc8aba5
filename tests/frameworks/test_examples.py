"""The examples of the page about frameworks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.threaded_daemon import ThreadedDaemon

ROOT = Path(__file__).parents[2]
PATIENCE_S = 200.0


@pytest.mark.parametrize("example", ["hf_trainer", "lightning_ddp"])
def test_example_trains_to_its_end_and_keeps_checkpoints(example: str, tmp_path: Path) -> None:
    daemon = ThreadedDaemon(tmp_path)
    try:
        command = [sys.executable, f"examples/{example}.py", daemon.runner.endpoint, str(tmp_path / "checkpoints")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    finally:
        daemon.close()
    assert done.returncode == 0, done.stderr
    assert "trained 60 steps" in done.stdout
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*.json"))
    assert kept == [f"step-{step:08}.metadata.json" for step in (40, 60)]
