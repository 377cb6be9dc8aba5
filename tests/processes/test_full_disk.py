"""A daemon on a disk that is really full: reads work, and writes work again once there is space."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.daemon import DaemonProcess
from tests.small_disk import fill, small_disk

DISK_MIB = 4
TRIES_MAX = 300


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    with small_disk(tmp_path / "disk", DISK_MIB) as disk:
        yield disk


def forgectl(daemon: DaemonProcess, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "forged.cli.forgectl.main", "--socket", str(daemon.socket), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def write_until_refused(daemon: DaemonProcess) -> tuple[int, str, str]:
    """What the first write says for which there is no space: files have some room inside."""
    for number in range(2000):
        answer = forgectl(daemon, "note", "a", f"{number} {'x' * 4000}")
        if answer[0]:
            return answer
    raise AssertionError("the disk is not full")


def write_until_done(daemon: DaemonProcess) -> None:
    """The daemon tries the disk from time to time; a writer that is refused in between may go on trying."""
    for _ in range(TRIES_MAX):
        if forgectl(daemon, "note", "a", "there is space again")[0] == 0:
            return
    raise AssertionError("the daemon does not find that there is space")


def assert_reads_work(daemon: DaemonProcess) -> None:
    assert forgectl(daemon, "jobs", "show", "a")[0] == 0
    assert "no space left" in forgectl(daemon, "status")[1]
    assert "JobCreated" in forgectl(daemon, "events")[1]


def test_full_disk_refuses_only_writes_until_there_is_space(disk: Path) -> None:
    with DaemonProcess(disk) as daemon:
        assert forgectl(daemon, "jobs", "create", "a")[0] == 0
        filler = fill(disk)
        code, _, error = write_until_refused(daemon)
        assert code == 4
        assert "No space" in error or "full" in error
        assert_reads_work(daemon)
        filler.unlink()
        write_until_done(daemon)
        assert "there is space again" in forgectl(daemon, "events")[1]


def test_daemon_started_on_a_full_disk_reads_and_recovers_without_a_restart(disk: Path) -> None:
    with DaemonProcess(disk) as daemon:
        assert forgectl(daemon, "jobs", "create", "a")[0] == 0
        filler = fill(disk)
        assert write_until_refused(daemon)[0] == 4
    with DaemonProcess(disk) as again:
        assert "is ready" in again.output
        assert write_until_refused(again)[0] == 4
        assert_reads_work(again)
        filler.unlink()
        write_until_done(again)
        assert "there is space again" in forgectl(again, "events")[1]
