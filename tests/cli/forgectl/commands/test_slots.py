"""`forgectl slots`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.scripted_daemon import ScriptedDaemon, scripted_daemon

SLOT = {
    "slot_id": "0" * 32, "job": "run", "worker_id": "a", "size_bytes": 1 << 30, "storage_path": "/ckpt",
    "owner": "failed", "save_id": "0123abcd", "step": 40, "rank": 0, "world_size": 2,
}  # fmt: skip
PAGE = {"slots": [SLOT], "more": False, "used_bytes": 1 << 30, "limit_bytes": 1 << 36}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with scripted_daemon(tmp_path, {"ListSlots": PAGE}) as daemon:
        yield daemon


def test_slots_are_listed(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    header, row = daemon.run("slots --job run", capsys)[1].splitlines()
    assert {"worker_id", "owner", "size", "step"} <= set(header.split())
    assert {"a", "failed", "40"} <= set(row.split())
    assert "1.07 GB" in row


def test_json_has_the_whole_page(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert daemon.json("slots", capsys) == PAGE
