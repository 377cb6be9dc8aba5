"""The example of the page about torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.client.threaded_daemon import ThreadedDaemon

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0


def test_example_trains_to_its_end_and_keeps_checkpoints(tmp_path: Path) -> None:
    daemon = ThreadedDaemon(tmp_path)
    try:
        command = [sys.executable, "examples/torch_ddp.py", daemon.runner.endpoint, str(tmp_path / "checkpoints")]
        # Several processes share the machine, and each would take all of its cores.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    finally:
        daemon.close()
    assert done.returncode == 0, done.stderr
    assert "step 250: loss" in done.stdout
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*.json"))
    assert kept == [f"step-{step:08}.metadata.json" for step in (200, 250, 300)]
