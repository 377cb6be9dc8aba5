"""`forgectl ckpt adopt`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forged.cli.catalog import adopt
from tests.cli.catalog.scripted_catalogue import Caught, catalogue
from tests.cli.ckpt.conftest import CheckpointFolder, checkpoint_folder
from tests.cli.scripted_daemon import ScriptedDaemon

__all__ = ["checkpoint_folder"]


def take_all(fields: dict[str, Any]) -> dict[str, Any]:
    return {"adopted": [Path(one["storage_path"]).name for one in fields["checkpoints"]], "known": [], "refused": []}


def sent(daemon: ScriptedDaemon) -> list[dict[str, Any]]:
    return [fields for method, fields in daemon.requests if method == "AdoptCheckpoints"]


def test_what_the_manifests_say_is_sent(tmp_path: Path, capsys: Caught, checkpoint_folder: CheckpointFolder) -> None:
    manifest = checkpoint_folder.save("step-7", created_at=5.0)
    with catalogue(tmp_path, AdoptCheckpoints=take_all) as daemon:
        said = f"job run has adopted 1 checkpoint of {tmp_path}/checkpoints: step-7\n"
        assert daemon.run("ckpt adopt checkpoints --job run", capsys) == (0, said, "")
        [request] = sent(daemon)
    assert request == {
        "job": "run",
        "folder": f"{tmp_path}/checkpoints",
        "dry_run": False,
        "checkpoints": [
            {
                "storage_path": f"{tmp_path}/checkpoints/step-7",
                "save_id": manifest.save_id,
                "epoch": manifest.epoch or 0,
                "step": manifest.step or 0,
                "size_bytes": manifest.size_bytes,
                "created_at": 5.0,
                "metrics": {},
                "job": manifest.job,
            }
        ],
    }


def test_outcomes_of_all_batches_are_shown(
    tmp_path: Path, capsys: Caught, checkpoint_folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        checkpoint_folder.save(f"step-{number}", created_at=float(number))
    checkpoint_folder.save("bad")
    checkpoint_folder.manifest("bad").write_bytes(b"{")
    replies = [
        {"adopted": ["a", "b"], "known": ["c"], "refused": []},
        {"adopted": [], "known": [], "refused": ["step-2: it belongs to job other"]},
    ]
    monkeypatch.setattr(adopt, "BATCH_MAX", 2)
    with catalogue(tmp_path, AdoptCheckpoints=lambda fields: replies[len(fields["checkpoints"]) % 2]) as daemon:
        code, out, err = daemon.run("ckpt adopt checkpoints --job run", capsys)
        names = [[Path(one["storage_path"]).name for one in fields["checkpoints"]] for fields in sent(daemon)]
        reply_code, reply, _ = daemon.run("ckpt adopt checkpoints --job run --json", capsys)
    assert names == [["step-0", "step-1"], ["step-2"]]
    assert (code, err, reply_code) == (1, "", 1)
    assert out.splitlines()[:3] == [
        f"job run has adopted 2 checkpoints of {tmp_path}/checkpoints: a, b",
        "known before: 1 checkpoint: c",
        "refused: step-2: it belongs to job other",
    ]
    assert out.splitlines()[3].startswith("cannot be read: bad: ")
    assert '"unreadable": [{"prefix": "bad"' in reply


def test_note_says_what_the_retention_policy_deletes_of_them(
    tmp_path: Path, capsys: Caught, checkpoint_folder: CheckpointFolder
) -> None:
    for step in (1, 2, 3):
        checkpoint_folder.save(f"step-{step}")
    verdicts = [
        {"checkpoint_id": name, "step": 7, "is_kept": is_kept, "size_bytes": 1_000_000}
        for name, is_kept in (("step-1", False), ("step-2", False), ("step-3", True), ("other", False))
    ]
    page = {"verdicts": verdicts, "more": False}
    with catalogue(tmp_path, AdoptCheckpoints=take_all, ReadRetention=page) as daemon:
        note = daemon.run("ckpt adopt checkpoints --job run", capsys)[1].splitlines()[-1]
    assert note == (
        "note: the retention policy of the job deletes 2 checkpoints of them, 2 MB, within seconds, such as that of "
        "step 7; `forgectl ckpt pin` keeps one, `forgectl jobs change` changes the policy"
    )


def test_dry_run_says_that_nothing_is_changed(
    tmp_path: Path, capsys: Caught, checkpoint_folder: CheckpointFolder
) -> None:
    checkpoint_folder.save("step-7")
    with catalogue(tmp_path, AdoptCheckpoints=take_all) as daemon:
        said = f"job run would adopt 1 checkpoint of {tmp_path}/checkpoints; nothing is changed\n"
        assert daemon.run("ckpt adopt checkpoints --job run --dry-run", capsys) == (0, said, "")
        assert [request["dry_run"] for request in sent(daemon)] == [True]
        assert daemon.json("ckpt adopt checkpoints --job run --dry-run", capsys)["dry_run"] is True


@pytest.mark.parametrize(("is_dry", "parents"), [(False, ["", "a", "b"]), (True, ["", "a", ""])])
def test_parent_of_an_earlier_batch_is_sent_unless_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, is_dry: bool, parents: list[str]
) -> None:
    rows = [{"storage_path": path, "parent_path": parent} for path, parent in (("a", ""), ("b", "a"), ("c", "b"))]
    monkeypatch.setattr(adopt, "BATCH_MAX", 2)
    assert [row["parent_path"] for batch in adopt.batches(rows, is_dry=is_dry) for row in batch] == parents


def test_empty_folder_is_named(tmp_path: Path, capsys: Caught, checkpoint_folder: CheckpointFolder) -> None:
    with catalogue(tmp_path) as daemon:
        code, out, _ = daemon.run("ckpt adopt checkpoints --job run", capsys)
    assert code == 1
    assert out.startswith(f"no checkpoints in {tmp_path}/checkpoints; name the folder that the manifests")


def test_parents_come_before_their_children() -> None:
    found = {
        path: {"created_at": at, "storage_path": path, "parent_path": parent}
        for path, at, parent in (("c", 1.0, "b"), ("b", 2.0, "a"), ("a", 3.0, ""), ("z", 0.0, "gone"))
    }
    names = [one["storage_path"] for one in adopt.parents_first(found)]
    assert sorted(names) == ["a", "b", "c", "z"]
    assert names.index("a") < names.index("b") < names.index("c")


def test_cycle_is_left_to_the_daemon() -> None:
    found = {path: {"created_at": 0.0, "storage_path": path, "parent_path": path} for path in "ba"}
    assert [one["storage_path"] for one in adopt.parents_first(found)] == ["a", "b"]


def test_long_list_of_refusals_is_cut_on_a_terminal(
    tmp_path: Path, capsys: Caught, checkpoint_folder: CheckpointFolder
) -> None:
    checkpoint_folder.save("step-7")
    reply = {"adopted": [], "known": [], "refused": [f"step-{number}: taken" for number in range(20)]}
    with catalogue(tmp_path, AdoptCheckpoints=reply) as daemon:
        whole = daemon.run("ckpt adopt checkpoints --job run", capsys)[1].splitlines()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdout.isatty", lambda: True)
            patch.setenv("NO_COLOR", "1")
            cut = daemon.run("ckpt adopt checkpoints --job run", capsys)[1].splitlines()
    assert len(whole) == 20
    assert (len(cut), cut[-1]) == (12, "and 9 more: --json shows them")
