"""`forgectl ckpt ls` lists checkpoints, unfinished saves and deletions."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from forged.checkpoint.model import CompressionLevel
from tests.cli.ckpt.conftest import STATE, CheckpointFolder


def test_checkpoints_are_listed_newest_last(checkpoint_folder: CheckpointFolder) -> None:
    now = time.time()
    checkpoint_folder.save("b", STATE, STATE, created_at=now - 7200)
    checkpoint_folder.save("a", created_at=now - 90, level=CompressionLevel.FAST)
    output = checkpoint_folder.run("ls")
    assert (output.code, output.err) == (0, "")
    head, older, newer = output.lines
    assert head.split() == ["prefix", "created", "age", "step", "ranks", "layout", "compression", "size", "job"]
    assert older.split()[0] == "b"
    assert "2h00m" in older
    assert newer.split()[0] == "a"
    assert "1m30s" in newer
    assert "fast" in newer


def test_the_default_folder_is_checkpoints(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a")
    assert (
        checkpoint_folder.run("")
        == checkpoint_folder.run("ls")
        == checkpoint_folder.run("ls checkpoints")
        == checkpoint_folder.run("list ./checkpoints/")
    )


def test_checkpoints_in_subfolders_are_listed(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("run-7/step-1")
    result = checkpoint_folder.run_json("ls .")
    assert [row["prefix"] for row in result["checkpoints"]] == ["checkpoints/run-7/step-1"]
    assert checkpoint_folder.run_json("ls checkpoints/run-7")["checkpoints"][0]["prefix"] == "step-1"


def test_json_has_all_fields(checkpoint_folder: CheckpointFolder) -> None:
    manifest = checkpoint_folder.save("a", created_at=5.0)
    assert checkpoint_folder.run_json("ls") == {
        "url": str(checkpoint_folder.folder),
        "checkpoints": [
            {
                "prefix": "a", "created_at": 5.0, "step": None, "epoch": None, "job": None, "world_size": 1,
                "layout": "multi_shard", "compression": "none", "size_bytes": manifest.size_bytes,
                "tensors": 2, "version": "1.0",
                "parent": None,
                "chain": ["a"], "fence": None,
            }
        ],
        "broken": [], "unfinished": [], "half_deleted": [],
    }  # fmt: skip


@pytest.mark.parametrize("where", ["checkpoints", "/nowhere/at/all", "file:///nowhere"])
def test_an_empty_folder_is_named(checkpoint_folder: CheckpointFolder, where: str) -> None:
    output = checkpoint_folder.run(f"ls {where}")
    assert output.code == 0
    assert output.out.startswith("no checkpoints in /")


def test_default_folder_is_listed_if_it_exists(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("step-1")
    assert checkpoint_folder.run("ls") == checkpoint_folder.run("") == checkpoint_folder.run("ls checkpoints")


@pytest.mark.parametrize("line", ["ls", ""])
def test_missing_default_folder_is_refused_with_both_forms(checkpoint_folder: CheckpointFolder, line: str) -> None:
    code, error = checkpoint_folder.run_failing(line)
    assert (code, error["code"]) == (2, "usage_wrong")
    assert error["message"] == "neither a folder nor a job is given, and ./checkpoints does not exist"
    assert error["fix"] == ("name a folder (`forgectl ckpt ls PATH`), or a job (`forgectl ckpt ls --job JOB`)")


def test_an_unreadable_manifest_is_listed_with_the_reason_and_fails(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("good")
    checkpoint_folder.save("bad")
    checkpoint_folder.flip_bit(checkpoint_folder.manifest("bad"), 40)
    output = checkpoint_folder.run("ls")
    assert output.code == 1
    assert "good" in output.lines[1]
    assert output.lines[-1] == "bad cannot be read: bad.metadata.json is corrupt: its checksum differs"
    result = checkpoint_folder.run_json("ls", code=1)
    assert [(row["prefix"], row["code"]) for row in result["broken"]] == [("bad", "checkpoint_manifest_corrupt")]


def test_a_manifest_of_a_later_version_is_reported_as_such(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a")
    text = checkpoint_folder.manifest("a").read_text().replace('"version":"1.0"', '"version":"3.0"')
    body = text.rpartition(',"checksum"')[0].encode()
    import xxhash

    checkpoint_folder.manifest("a").write_bytes(
        body + b',"checksum":"%s"}\n' % xxhash.xxh3_128_hexdigest(body).encode()
    )
    output = checkpoint_folder.run("ls")
    assert output.code == 1
    assert "has version 3.0; this version of forged reads 1 and 2" in output.out


def test_files_without_a_manifest_are_listed_with_a_fix(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a")
    checkpoint_folder.manifest("a").unlink()
    [file] = checkpoint_folder.files("a")
    os.utime(file, (0, time.time() - 7200))
    output = checkpoint_folder.run("ls")
    assert output.code == 0
    assert output.lines[0] == f"no checkpoints in {checkpoint_folder.folder}"
    assert output.lines[2].startswith("a is not a checkpoint (1 file, ")
    assert "written 2h00m ago): a running or a failed save;" in output.lines[2]
    [row] = checkpoint_folder.run_json("ls")["unfinished"]
    assert (row["prefix"], row["files"], row["size_bytes"], row["written_by_save"]) == (
        "a",
        1,
        file.stat().st_size,
        True,
    )


def test_a_model_of_another_tool_is_not_taken_for_a_save(checkpoint_folder: CheckpointFolder) -> None:
    (checkpoint_folder.folder / "llama").mkdir(parents=True)
    (checkpoint_folder.folder / "llama" / "model.safetensors.index.json").write_bytes(b"x")
    output = checkpoint_folder.run("ls")
    assert "llama has no manifest (1 file, 1 B, written moments ago)" in output.out
    assert "or a model of another tool" in output.out
    assert checkpoint_folder.run_json("ls")["unfinished"][0]["written_by_save"] is False


def test_a_partly_deleted_checkpoint_is_listed_separately(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a")
    checkpoint_folder.manifest("a").rename(checkpoint_folder.folder / "a.deleted.json")
    output = checkpoint_folder.run("ls")
    assert output.lines[-1] == "a is partly deleted: `forgectl ckpt rm` finishes the deletion"
    assert checkpoint_folder.run_json("ls")["half_deleted"] == [{"prefix": "a"}]


def test_control_characters_are_escaped(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", {"w": np.zeros(1)})
    (checkpoint_folder.folder / "b\x1b[2J.metadata.json").write_text("{}")
    output = checkpoint_folder.run("ls")
    assert output.code == 1
    assert "\x1b" not in output.out
    assert "b\\x1b[2J cannot be read" in output.out


def test_cells_are_shortened_on_a_narrow_terminal(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a-name-of-some-length-that-nobody-would-give", created_at=time.time() - 5)
    output = checkpoint_folder.run_on_terminal("ls", columns=80)
    assert max(map(len, output.lines)) <= 80
    assert "…" in output.out


def test_an_invalid_url_is_a_config_error(checkpoint_folder: CheckpointFolder) -> None:
    code, error = checkpoint_folder.run_failing("ls ftp://host/x")
    assert (code, error["kind"], error["code"]) == (2, "config", "checkpoint_location_invalid")


def test_parents_are_listed_where_there_are_incremental_checkpoints(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a")
    assert "parent" not in checkpoint_folder.run("ls").out
    checkpoint_folder.save_chain("b", "c", "d")
    output = checkpoint_folder.run("ls")
    place = output.lines[0].split().index("parent") - len(output.lines[0].split())
    assert [line.split()[place] for line in output.lines[1:]] == ["-", "-", "b", "c"]
    chains = {row["prefix"]: row["chain"] for row in checkpoint_folder.run_json("ls")["checkpoints"]}
    assert chains == {"a": ["a"], "b": ["b"], "c": ["b", "c"], "d": ["b", "c", "d"]}


def test_files_of_an_interrupted_compaction_are_listed(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save_chain("a", "b")
    stray = checkpoint_folder.folder / "b" / "0123abcd.4567cdef-00000-of-00001.safetensors"
    stray.write_bytes(b"x")
    output = checkpoint_folder.run("ls")
    assert "b has files that its manifest does not name (1 file, 1 B" in output.out
    assert checkpoint_folder.run("rm checkpoints/b --unfinished --yes").code == 0
    assert not stray.exists()
    assert checkpoint_folder.run("verify checkpoints/b").code == 0
