"""`forgectl ckpt show` shows the contents of a checkpoint."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from forged.checkpoint.format.manifest import Manifest, ManifestFence, encode
from forged.checkpoint.model import PerRank
from tests.cli.ckpt.conftest import STATE, CheckpointFolder


def changed(checkpoint_folder: CheckpointFolder, manifest: Manifest, **fields: Any) -> None:
    """Change members of the manifest."""
    checkpoint_folder.manifest(manifest.prefix).write_bytes(encode(msgspec.structs.replace(manifest, **fields)))


def test_text_shows_the_contents(checkpoint_folder: CheckpointFolder) -> None:
    manifest = checkpoint_folder.save("a", STATE)
    changed(checkpoint_folder, manifest, job="run", step=7, custom={"loss": 0.5}, fence=ManifestFence(2, 3))
    output = checkpoint_folder.run("show checkpoints/a")
    assert (output.code, output.err) == (0, "")
    about = dict(line.split(None, 1) for line in output.lines[:9])
    assert about["prefix"] == "a"
    assert (about["job"], about["step"], about["ranks"]) == ("run", "7", "1")
    assert about["layout"] == "multi_shard, compression none, version 1.0"
    assert about["custom"] == "{loss=0.5}"
    assert "fence" not in about
    paragraphs = [[line.split() for line in part.splitlines()] for part in output.out.split("\n\n")[1:]]
    assert [part[0] for part in paragraphs] == [
        ["file", "rank", "pieces", "size"],
        ["section", "tensors", "size"],
        ["name", "dtype", "shape", "size", "pieces"],
        ["name", "value"],
    ]
    assert ["model/w", "float32", "3×4", "48", "B", "1"] in paragraphs[2]
    assert paragraphs[1][1:] == [["model", "1", "48", "B"], ["optimizer", "1", "40", "B"]]
    assert paragraphs[3][1:] == [["step", "7"]]


def test_json_has_all_fields(checkpoint_folder: CheckpointFolder) -> None:
    manifest = checkpoint_folder.save(
        "a", *[{"w": np.zeros((2, 3), ml_dtypes.bfloat16), "own": PerRank(r)} for r in range(2)]
    )
    changed(checkpoint_folder, manifest, custom={"x": [1]}, fence=ManifestFence(2, 3), job="run", step=9)
    result = checkpoint_folder.run_json("show checkpoints/a")
    assert (result["world_size"], result["job"], result["step"]) == (2, "run", 9)
    assert result["fence"] == {"term": 2, "generation": 3}
    assert result["custom"] == {"x": [1]}
    assert result["tensors"] == [
        {"name": "w", "rank": None, "dtype": "bfloat16", "shape": [2, 3], "size_bytes": 12, "pieces": 1}
    ]
    assert result["values"] == [{"name": "own", "rank": 0, "value": 0}, {"name": "own", "rank": 1, "value": 1}]
    assert [(row["rank"], row["pieces"]) for row in result["files"]] == [(0, 1), (1, 0)]
    assert sum(row["size_bytes"] for row in result["files"]) == result["size_bytes"]


def test_copies_are_counted_among_the_pieces(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", STATE, STATE, copies=2)
    assert {row["pieces"] for row in checkpoint_folder.run_json("show checkpoints/a")["tensors"]} == {2}


def test_per_rank_tensors_are_listed_with_the_rank(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", *[{"w": PerRank(np.zeros(1)), "all": np.zeros(1)} for _ in range(2)])
    output = checkpoint_folder.run("show checkpoints/a")
    assert [line.split()[:2] for line in output.out.split("\n\n")[3].splitlines()] == [
        ["name", "rank"], ["w", "0"], ["all", "-"], ["w", "1"],
    ]  # fmt: skip


@pytest.mark.parametrize(("pattern", "names"), [("model/w", {"model/w"}), ("*/m", {"optimizer/m"}), ("*", None)])
def test_tensors_are_selected_by_pattern(
    checkpoint_folder: CheckpointFolder, pattern: str, names: set[str] | None
) -> None:
    checkpoint_folder.save("a")
    result = checkpoint_folder.run_json(f"show checkpoints/a --tensors '{pattern}'")
    assert {row["name"] for row in result["tensors"]} == (names or {"model/w", "optimizer/m"})


def test_a_pattern_without_a_match_is_refused(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a")
    code, error = checkpoint_folder.run_failing("show checkpoints/a --tensors nothing")
    assert (code, error["code"]) == (3, "checkpoint_tensor_unknown")


class TestLongLists:
    @pytest.fixture(autouse=True)
    def _many(self, checkpoint_folder: CheckpointFolder) -> None:
        checkpoint_folder.save("a", {f"w{number}": np.zeros(1) for number in range(100)})

    def test_are_shortened_on_a_terminal(self, checkpoint_folder: CheckpointFolder) -> None:
        output = checkpoint_folder.run_on_terminal("show checkpoints/a")
        assert output.lines[-1] == "and 61 more tensors: --all shows them"
        assert "w38 " in output.out
        assert "w39 " not in output.out

    def test_are_complete_with_all(self, checkpoint_folder: CheckpointFolder) -> None:
        output = checkpoint_folder.run_on_terminal("show checkpoints/a --all")
        assert "more tensors" not in output.out
        assert "w99 " in output.out

    def test_are_complete_in_a_pipe(self, checkpoint_folder: CheckpointFolder) -> None:
        assert "w99 " in checkpoint_folder.run("show checkpoints/a").out


def test_control_characters_are_escaped(checkpoint_folder: CheckpointFolder) -> None:
    state = {"w\x1b[2J": np.zeros(1), "v\x9b31m": "text\x1b]0;x\x07", "n\n": 1}
    manifest = checkpoint_folder.save("a", state)
    changed(checkpoint_folder, manifest, custom={"k\x1b[2J": "v\x1b[2J", "many": {"\x1b": ["\x1b"]}}, job="j\x1b[2J")
    output = checkpoint_folder.run("show checkpoints/a")
    assert output.code == 0
    assert not {"\x1b", "\x9b", "\x07"} & set(output.out)


@pytest.mark.parametrize("custom", [{"x": float("nan")}, {"x": 10**30}, {"x": None}, {"x": [[[{}]]]}])
def test_any_custom_metadata_is_shown(checkpoint_folder: CheckpointFolder, custom: dict[str, Any]) -> None:
    changed(checkpoint_folder, checkpoint_folder.save("a"), custom=custom)
    assert checkpoint_folder.run("show checkpoints/a").code == 0
    assert "custom" in checkpoint_folder.run_json("show checkpoints/a")


def test_a_huge_tensor_is_shown_without_reading_it(checkpoint_folder: CheckpointFolder) -> None:
    manifest = checkpoint_folder.save("a", {"w": np.zeros(1)})
    tensors = msgspec.structs.replace(manifest.tensors, shapes=[(1 << 50,)])
    part = msgspec.structs.replace(manifest.parts[0], tensors=[], digests="", size=manifest.parts[0].data_offset)
    changed(checkpoint_folder, manifest, tensors=tensors, parts=[part])
    assert "9,007.2 TB" in checkpoint_folder.run("show checkpoints/a").out


def test_the_manifests_file_name_is_accepted(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a")
    assert checkpoint_folder.run("show checkpoints/a.metadata.json") == checkpoint_folder.run("show checkpoints/a")


@pytest.mark.parametrize(
    ("where", "code", "of"),
    [
        ("checkpoints/none", 3, "checkpoint_missing"),
        ("checkpoints/a!b", 2, "checkpoint_prefix_invalid"),
        ("s3://bucket", 2, "checkpoint_location_invalid"),
        ("''", 2, "checkpoint_location_invalid"),
        ("file://elsewhere/x", 2, "checkpoint_location_invalid"),
    ],
)
def test_a_missing_checkpoint_has_an_exit_code_and_error_code(
    checkpoint_folder: CheckpointFolder, where: str, code: int, of: str
) -> None:
    assert checkpoint_folder.run_failing(f"show {where}")[0] == code
    assert checkpoint_folder.run_failing(f"show {where}")[1]["code"] == of


def test_a_corrupt_manifest_fails(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a")
    checkpoint_folder.flip_bit(checkpoint_folder.manifest("a"), 10)
    code, error = checkpoint_folder.run_failing("show checkpoints/a")
    assert (code, error["kind"], error["code"]) == (1, "checkpoint", "checkpoint_manifest_corrupt")


def test_chain_and_the_files_of_earlier_checkpoints_are_shown(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save_chain("a", "b", "c")
    output = checkpoint_folder.run("show checkpoints/c")
    about = dict(line.split(None, 1) for line in output.lines[:8])
    assert (about["parent"], about["chain"]) == ("b", "a ← b ← c")
    assert about["size"].endswith("in 1 file")
    files = checkpoint_folder.run_json("show checkpoints/c")["files"]
    assert [row.get("of_checkpoint") for row in files] == [None, "b", "a"]
