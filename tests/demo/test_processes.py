"""The demo leaves no process behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from forged.demo.processes import nothing_left_behind

WAITS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def test_only_children_started_in_the_block_are_killed() -> None:
    with subprocess.Popen(WAITS) as before:
        with nothing_left_behind():
            since = subprocess.Popen(WAITS)
        assert not Path(f"/proc/{since.pid}").exists()
        assert before.poll() is None
        before.kill()
    # It was waited for already.
    since.wait()
