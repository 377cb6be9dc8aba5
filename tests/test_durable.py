from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from forged.durable import sync_directory


def test_it_is_the_directory_that_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[os.stat_result] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd)))
    sync_directory(tmp_path)
    (found,) = synced
    assert stat.S_ISDIR(found.st_mode)
    assert found.st_ino == tmp_path.stat().st_ino


def test_what_is_no_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        sync_directory(tmp_path / "file")
