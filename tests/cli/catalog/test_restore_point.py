"""`forgectl ckpt restore-point`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forged.cli.catalog.ls import SHOWN_MAX
from tests.cli.catalog.scripted_catalogue import ESTIMATE, Caught, catalogue, on_terminal, record

BEST = {
    "meta": record(4, checkpoint_type="incremental"),
    "chain": ["ckpt-00000003", "ckpt-00000004"],
    "estimate": ESTIMATE,
    "lost_steps": 30,
    "lost_s": 72.0,
    "reason": "the newest that can be restored",
}
NEXT = BEST | {
    "meta": record(3), "chain": ["ckpt-00000003"], "lost_steps": 130, "lost_s": 300.0, "reason": "the next newest",
}  # fmt: skip
EXCLUDED = [{"checkpoint_id": "ckpt-00000005", "step": 500, "storage_path": "/x", "reason": "it is being written"}]
REPLY = {"points": [BEST, NEXT], "excluded": EXCLUDED}


def test_best_point_and_the_alternatives_are_shown(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, FindRestorePoints=REPLY) as daemon:
        code, out, err = daemon.run("ckpt restore-point --job run", capsys)
        assert daemon.requests == [("FindRestorePoints", {"job": "run"})]
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "restore  ckpt-00000004 (step 400)",
        "path     /data/run/step-400",
        "why      the newest that can be restored",
        "takes    2.5 s (2 s to 4 s; 7 restores of this job)",
        "reads    ckpt-00000003 → ckpt-00000004",
        "loses    30 steps, 1m12s of training",
        "",
        "if it cannot be read, in this order:",
        "id             step  type  size     chain  restore  lost_steps  reason",
        "ckpt-00000003   300  full  2.15 GB      1    2.5 s         130  the next newest",
        "",
        "not offered:",
        "  ckpt-00000005 (step 500): it is being written",
    ]


def test_criteria_are_sent(tmp_path: Path, capsys: Caught) -> None:
    line = "ckpt restore-point --job run --max-step 1200 --max-epoch 0 --folder s3://b/r --prefer-full"
    with catalogue(tmp_path, FindRestorePoints=REPLY) as daemon:
        assert daemon.json(line, capsys) == REPLY
        wanted = {"job": "run", "max_step": 1200, "max_epoch": 0, "folder": "s3://b/r", "prefer_full": True}
        assert daemon.requests == [("FindRestorePoints", wanted)]


@pytest.mark.parametrize(
    ("criteria", "said"),
    [("", "job run has no checkpoint to restore from"), ("--max-step 1", "job run has no checkpoint that matches")],
)
def test_no_restore_point_fails_with_the_reasons(tmp_path: Path, capsys: Caught, criteria: str, said: str) -> None:
    with catalogue(tmp_path, FindRestorePoints={"points": [], "excluded": EXCLUDED}) as daemon:
        code, out, _ = daemon.run(f"ckpt restore-point --job run {criteria}", capsys)
    assert code == 1
    assert out.splitlines() == [said, "", "not offered:", "  ckpt-00000005 (step 500): it is being written"]


def test_nothing_lost_is_said(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, FindRestorePoints={"points": [BEST | {"lost_steps": 0}], "excluded": []}) as daemon:
        assert "loses    no committed step\n" in daemon.run("ckpt restore-point --job run", capsys)[1]


@pytest.mark.parametrize("columns", [80, 120])
def test_long_list_is_cut_on_a_terminal(tmp_path: Path, capsys: Caught, columns: int) -> None:
    points = [BEST | {"meta": record(number)} for number in range(100, 0, -1)]
    with catalogue(tmp_path, FindRestorePoints={"points": points, "excluded": []}) as daemon:
        lines = on_terminal(daemon, "ckpt restore-point --job run", capsys, columns)
        whole = on_terminal(daemon, "ckpt restore-point --job run --all", capsys, columns)
    assert max(map(len, lines)) <= columns
    assert lines[-1] == f"and {100 - SHOWN_MAX} more checkpoints: --all shows them"
    assert whole[-1].startswith("ckpt-00000001 ")


@pytest.mark.parametrize("point", [{}, {"meta": 7, "chain": 7, "estimate": 7, "lost_steps": "x", "lost_s": "x"}])
def test_points_of_other_versions_are_shown(tmp_path: Path, capsys: Caught, point: dict[str, Any]) -> None:
    with catalogue(tmp_path, FindRestorePoints={"points": [point, point], "excluded": [{}]}) as daemon:
        code, out, err = daemon.run("ckpt restore-point --job run", capsys)
    assert (code, err) == (0, "")
    assert out.startswith("restore  - (step -)\n")
