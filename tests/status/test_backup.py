from __future__ import annotations

import os
from pathlib import Path

import pytest

from forged.kernel.bus import Bus
from forged.net.tickets import TicketRegistry
from forged.status.backup import NAME, BackupService, Copy
from tests.net.manual_daemon import ManualClock

UNFINISHED = f"{NAME}.0123abcd.new"


async def copy_nothing(path: Path) -> None:
    """Fails if a backup is made."""


def service_in(directory: Path, copy: Copy | None = copy_nothing) -> BackupService:
    clock = ManualClock()
    return BackupService(Bus(clock), TicketRegistry(clock, os.urandom), copy, directory)


@pytest.mark.parametrize("name", [NAME, UNFINISHED])
def test_leftover_of_an_interrupted_backup_is_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"half a copy")
    service_in(tmp_path).clear()
    assert not list(tmp_path.iterdir())


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    for name in ("forged.sqlite3", "lock", "backup.sqlite3"):
        (tmp_path / name).write_bytes(b"kept")
    service_in(tmp_path).clear()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_daemon_without_files_removes_none(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"other content")
    service_in(tmp_path, copy=None).clear()
    assert (tmp_path / NAME).exists()


def test_failed_removal_does_not_stop_the_clean_up(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    (tmp_path / UNFINISHED).write_bytes(b"half a copy")
    service_in(tmp_path).clear()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
