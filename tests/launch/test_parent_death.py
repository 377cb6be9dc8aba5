from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from forged.launch import parent_death

HOLDER = """
import os, subprocess, sys
from forged.launch import parent_death
held = subprocess.Popen(parent_death.command(os.getpid(), ["sleep", "1000"]))
while os.path.basename(os.readlink(f"/proc/{held.pid}/exe")).startswith("python"):
    pass
print(held.pid, flush=True)
sys.stdin.read()
"""
DIES_WITHIN_S = 30.0


def test_a_command_is_run_as_it_is_written() -> None:
    words = parent_death.command(os.getpid(), ["printf", "%s", "a b; $HOME"])
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a b; $HOME", "")


def test_a_command_dies_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        held = os.pidfd_open(int(holder.stdout.readline()))
        try:
            holder.send_signal(signal.SIGKILL)
            watch = select.poll()
            watch.register(held, select.POLLIN)
            assert watch.poll(DIES_WITHIN_S * 1000)
        finally:
            os.close(held)


def test_a_command_is_not_run_if_its_parent_has_died() -> None:
    done = subprocess.run(parent_death.command(os.getppid(), ["echo", "here"]), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
