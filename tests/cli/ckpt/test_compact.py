"""`forgectl ckpt compact PATH` makes a full checkpoint of an incremental one."""

from __future__ import annotations

from tests.cli.ckpt.conftest import CheckpointFolder


def test_incremental_checkpoint_becomes_full(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save_chain("a", "b", "c")
    output = checkpoint_folder.run("compact checkpoints/c")
    assert (output.code, output.err) == (0, "")
    assert output.out.startswith("c: it is a full checkpoint now, 5")
    for prefix in ("b", "a"):
        assert checkpoint_folder.run(f"rm checkpoints/{prefix} --yes").code == 0
    assert checkpoint_folder.run("verify checkpoints/c").code == 0
    assert checkpoint_folder.run("compact checkpoints/c").lines == ["c is a full checkpoint already"]


def test_json_is_the_row_of_the_checkpoint(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save_chain("a", "b")
    row = checkpoint_folder.run_json("compact checkpoints/b")
    assert (row["prefix"], row["parent"], row["chain"], row["version"]) == ("b", None, ["b"], "1.0")
    assert 2 * (1 << 17) <= row["written_bytes"] < row["size_bytes"]


def test_missing_parent_is_named(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save_chain("a", "b")
    checkpoint_folder.run("rm checkpoints/a --yes --force")
    _, error = checkpoint_folder.run_failing("compact checkpoints/b")
    assert error["code"] == "checkpoint_parent_missing"


def test_follow_needs_a_job(checkpoint_folder: CheckpointFolder) -> None:
    code, error = checkpoint_folder.run_failing("compact checkpoints/b --follow")
    assert (code, error["code"]) == (2, "usage_wrong")
