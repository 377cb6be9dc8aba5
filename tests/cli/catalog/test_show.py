"""`forgectl ckpt show`, `estimate`, `pin` and `unpin` with `--job`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forged.cli.catalog import show
from tests.cli.catalog.scripted_catalogue import ESTIMATE, Caught, catalogue, record, view_of

META = record(4, checkpoint_type="incremental", metrics={"loss": 0.25, "accuracy": 0.5}, holders=["w0"], pinned=True)


def shown(directory: Path, capsys: Caught, view: Any) -> dict[str, str]:
    """The fields that are shown, by name."""
    with catalogue(directory, ShowCheckpoint=view) as daemon:
        code, out, err = daemon.run("ckpt show ckpt-00000004 --job run", capsys)
    assert (code, err) == (0, "")
    return {line[:11].strip(): line[11:].strip() for line in out.splitlines()}


def test_all_that_is_known_is_shown(tmp_path: Path, capsys: Caught) -> None:
    chain = ["ckpt-00000001", "ckpt-00000003", "ckpt-00000004"]
    fields = shown(tmp_path, capsys, view_of(META, chain=chain, children=["ckpt-00000005"]))
    assert fields.pop("created").endswith(" (3d00h ago)")
    assert fields == {
        "id": "ckpt-00000004",
        "job": "run",
        "step": "400",
        "epoch": "0",
        "type": "incremental",
        "state": "complete, pinned, held",
        "path": "/data/run/step-400",
        "size": "2.15 GB",
        "verified": "never",
        "metrics": "loss 0.25, accuracy 0.5",
        "held by": "w0",
        "builds on": "ckpt-00000001 → ckpt-00000003",
        "needed by": "ckpt-00000005",
        "restore": "2.5 s (2 s to 4 s; 7 restores of this job)",
        "retention": "kept: the newest restorable checkpoint",
        "files": "read and deleted by the daemon",
    }


@pytest.mark.parametrize(
    ("length", "text"), [(1, "c0"), (5, "c0 → c1 → c2 → c3 → c4"), (14, "c0 → 11 more → c12 → c13")]
)
def test_middle_of_a_long_chain_is_only_counted(length: int, text: str) -> None:
    assert show.chain_text([f"c{number}" for number in range(length)]) == text


def test_what_is_wrong_is_shown(tmp_path: Path, capsys: Caught) -> None:
    view = view_of(META, is_restorable=False, is_managed=False, is_kept=False, retention="too old", estimate=None)
    fields = shown(tmp_path, capsys, view)
    assert fields["restore"] == "cannot be restored"
    assert fields["retention"] == "goes at the next collection: too old"
    assert fields["files"] == "outside `checkpoint_roots`: workers delete them"


def test_operation_is_shown_with_its_progress(tmp_path: Path, capsys: Caught) -> None:
    operation = {"operation": "compacting", "done_bytes": 500_000_000, "total_bytes": 2_000_000_000}
    fields = shown(tmp_path, capsys, view_of(META, operation=operation))
    assert fields["in progress"] == "compacting: 500 MB of 2 GB (25%)"


@pytest.mark.parametrize(
    "view",
    [
        {},
        {"meta": {}},
        {"meta": 7, "chain": 7, "estimate": 7},
        {"meta": {"verified_at": "x", "metrics": {"a": "\x1b"}}},
    ],
)
def test_views_of_other_versions_are_shown(tmp_path: Path, capsys: Caught, view: Any) -> None:
    with catalogue(tmp_path, ShowCheckpoint=view | {"later": "\x1b[2J"}) as daemon:
        code, out, err = daemon.run("ckpt show x --job run", capsys)
    assert (code, err) == (0, "")
    assert "later" in out
    assert "\x1b" not in out


def test_json_is_the_reply(tmp_path: Path, capsys: Caught) -> None:
    view = view_of(META)
    with catalogue(tmp_path, META) as daemon:
        assert daemon.json("ckpt show ckpt-00000004 --job run", capsys) == view


class TestEstimate:
    def test_estimate_has_interval_and_source(self, tmp_path: Path, capsys: Caught) -> None:
        with catalogue(tmp_path, META) as daemon:
            assert daemon.run("ckpt estimate @400 --job run", capsys) == (
                0, "ckpt-00000004 (step 400): a restore takes 2.5 s (2 s to 4 s; 7 restores of this job)\n", "",
            )  # fmt: skip
            reply = {"checkpoint_id": "ckpt-00000004", "step": 400, "estimate": ESTIMATE}
            assert daemon.json("ckpt estimate @400 --job run", capsys) == reply

    def test_checkpoint_that_cannot_be_restored_has_none(self, tmp_path: Path, capsys: Caught) -> None:
        view = view_of(META, is_restorable=False, estimate=None)
        with catalogue(tmp_path, ShowCheckpoint=view) as daemon:
            code, out, _ = daemon.run("ckpt estimate ckpt-00000004 --job run", capsys)
        assert (code, out) == (1, "ckpt-00000004 (step 400): cannot be restored\n")


class TestChange:
    @pytest.mark.parametrize(
        ("verb", "method", "said"),
        [
            ("pin", "PinCheckpoint", "pinned ckpt-00000004 (step 400): no collection deletes it"),
            ("reinstate", "ReinstateCheckpoint", "reinstated ckpt-00000004 (step 400); `forgectl ckpt restore-point` "),
            ("unpin", "UnpinCheckpoint", "unpinned ckpt-00000004 (step 400); `forgectl ckpt gc --dry-run` shows"),
        ],
    )
    def test_found_checkpoint_is_changed(
        self, tmp_path: Path, capsys: Caught, verb: str, method: str, said: str
    ) -> None:
        with catalogue(tmp_path, META, **{method: META}) as daemon:
            code, out, err = daemon.run(f"ckpt {verb} @400 --job run", capsys)
            assert (code, err) == (0, "")
            assert out.startswith(said)
            assert daemon.requests[-1] == (method, {"job": "run", "checkpoint_id": "ckpt-00000004"})
            assert daemon.json(f"ckpt {verb} @400 --job run", capsys) == META

    def test_reason_is_sent(self, tmp_path: Path, capsys: Caught) -> None:
        with catalogue(tmp_path, META, ReinstateCheckpoint=META) as daemon:
            assert daemon.run("ckpt reinstate @400 --job run --reason evaluated", capsys)[0] == 0
            fields = {"job": "run", "checkpoint_id": "ckpt-00000004", "reason": "evaluated"}
            assert daemon.requests[-1] == ("ReinstateCheckpoint", fields)
