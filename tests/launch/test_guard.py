"""Process groups that a launcher leaves behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forged.launch.guard import guarding, main

DIES_WITHIN_S = 60.0
SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
LAUNCHER = """
import os, subprocess, sys
from pathlib import Path
from forged.launch.guard import guarding
with guarding(Path(sys.argv[1])) as guard:
    held = subprocess.Popen(sys.argv[2:], start_new_session=True, stdout=subprocess.DEVNULL)
    guard.add(held.pid)
    print(held.pid, flush=True)
    sys.stdin.read()
"""


@contextmanager
def a_group() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEPER, start_new_session=True) as process:
        yield process
        process.kill()


def test_groups_that_were_not_removed_are_killed_at_the_end() -> None:
    with a_group() as left, a_group() as removed:
        main([f"{left.pid}\n", f"{removed.pid}\n", f"-{removed.pid}\n"])
        assert left.wait(DIES_WITHIN_S) == -signal.SIGKILL
        assert removed.poll() is None


def test_group_that_has_ended_is_no_error() -> None:
    with a_group() as process:
        process.kill()
        process.wait()
        main([f"{process.pid}\n"])


def test_removing_a_group_kills_what_is_left_of_it() -> None:
    with guarding() as guard, a_group() as process:
        guard.add(process.pid)
        guard.remove(process.pid)
        assert process.wait(DIES_WITHIN_S) == -signal.SIGKILL


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_groups_and_directory_of_a_killed_launcher_are_removed(by: signal.Signals, tmp_path: Path) -> None:
    directory = tmp_path / "temporary"
    directory.mkdir()
    command = [sys.executable, "-c", LAUNCHER, str(directory), *SLEEPER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        held = os.pidfd_open(int(launcher.stdout.readline()))
        try:
            launcher.send_signal(by)
            watch = select.poll()
            watch.register(held, select.POLLIN)
            assert watch.poll(DIES_WITHIN_S * 1000)
        finally:
            os.close(held)
        # The guard has it too: its end is the guard's.
        assert launcher.stderr.read() == b""
    assert not directory.exists()
