"""`forgectl ckpt compact`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forged.cli.catalog import compact
from tests.cli.catalog.scripted_catalogue import Caught, catalogue, record, view_of

META = record(4, checkpoint_type="incremental")
FULL = record(4)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "POLL_INTERVAL_S", 0)


def failure(checkpoint_id: str, reason: str) -> list[Any]:
    """The record of a failed compaction."""
    fact = {"checkpoint_id": checkpoint_id, "step": 400, "operation": "compacting", "reason": reason}
    return [3, 0.0, "CheckpointOperationFailed", "run", 1, 0, "catalog", fact]


def running(done_bytes: int) -> dict[str, Any]:
    operation = {"operation": "compacting", "done_bytes": done_bytes, "total_bytes": 2_000_000_000}
    return view_of(META, operation=operation)


def followed(directory: Path, capsys: Caught, *views: Any, flags: str = "") -> tuple[int, list[str]]:
    """The exit code and the lines of a command that is shown these views one after the other."""
    waiting = [view_of(META), *views]
    with catalogue(directory, CompactCheckpoint={}, ShowCheckpoint=lambda fields: waiting.pop(0)) as daemon:
        code, out, err = daemon.run(f"ckpt compact ckpt-00000004 --job run --follow {flags}", capsys)
    assert err == ""
    return code, out.splitlines()


def test_compaction_is_started(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, META, CompactCheckpoint={}) as daemon:
        said = "compacting ckpt-00000004 (step 400); `forgectl ckpt show` tells how far it is\n"
        assert daemon.run("ckpt compact @400 --job run", capsys) == (0, said, "")
        assert daemon.requests[-1] == ("CompactCheckpoint", {"job": "run", "checkpoint_id": "ckpt-00000004"})
        assert daemon.json("ckpt compact @400 --job run", capsys) == {}


def test_follow_shows_each_change_until_the_checkpoint_is_full(tmp_path: Path, capsys: Caught) -> None:
    half = running(1_000_000_000)
    assert followed(tmp_path, capsys, running(0), half, half, view_of(FULL)) == (
        0,
        [
            "ckpt-00000004 (step 400): compacting: 0 B of 2 GB (0%)",
            "ckpt-00000004 (step 400): compacting: 1 GB of 2 GB (50%)",
            "ckpt-00000004 (step 400): it is a full checkpoint now, 2.15 GB",
        ],
    )


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ([], "the daemon no longer works on it"),
        ([failure("ckpt-00000004", "no space")], "no space"),
        ([failure("ckpt-00000003", "no space")], "the daemon no longer works on it"),
    ],
)
def test_follow_fails_with_the_reason_if_the_compaction_does(
    tmp_path: Path, capsys: Caught, facts: list[Any], reason: str
) -> None:
    views = [view_of(META), running(0), view_of(META)]
    replies = {"CompactCheckpoint": {}, "ShowCheckpoint": lambda fields: views.pop(0)}
    with catalogue(tmp_path, facts=facts, **replies) as daemon:
        code, out, err = daemon.run("ckpt compact ckpt-00000004 --job run --follow", capsys)
    assert (code, out.splitlines()) == (1, ["ckpt-00000004 (step 400): compacting: 0 B of 2 GB (0%)"])
    assert err == f"forgectl: ckpt-00000004 (step 400) is not compacted: {reason}\n"


def test_follow_prints_the_views_as_json(tmp_path: Path, capsys: Caught) -> None:
    code, lines = followed(tmp_path, capsys, running(0), view_of(FULL), flags="--json")
    assert code == 0
    assert [json.loads(line) for line in lines] == [running(0), view_of(FULL)]
