"""The daemon in an environment with sniffio."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.blocking.test_loop_thread import SNIFFIO

PATIENCE_S = 60
COMMANDS = "forged.cli.forged", "forged.cli.forgectl.main"


def test_daemon_answers_requests_that_take_time_where_sniffio_is_installed(tmp_path: Path) -> None:
    (tmp_path / "sniffio.py").write_text(SNIFFIO)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"}
    daemon, ctl = ([sys.executable, "-m", module, "--socket", str(tmp_path / "socket")] for module in COMMANDS)
    daemon.insert(3, "run")
    command = [*daemon, "--data-dir", str(tmp_path / "data")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert b"ready" in process.stdout.readline()
            asked = [*ctl, "workers", "stack", "w1", "--job", "run"]
            done = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
            assert "there is no job 'run'" in done.stderr
        finally:
            process.terminate()
