"""`forgectl ckpt show`: what a checkpoint is."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from forged.checkpoint.format.manifest import Fence, Manifest, encode
from forged.checkpoint.model import PerRank
from tests.cli.ckpt.conftest import STATE, Shelf


def changed(shelf: Shelf, manifest: Manifest, **fields: Any) -> None:
    """Let it say something else."""
    shelf.manifest(manifest.prefix).write_bytes(encode(msgspec.structs.replace(manifest, **fields)))


def test_people_are_told_what_it_is_and_what_is_in_it(shelf: Shelf) -> None:
    manifest = shelf.put("a", STATE)
    changed(shelf, manifest, job="run", step=7, custom={"loss": 0.5}, fence=Fence(2, 3))
    said = shelf.run("show checkpoints/a")
    assert (said.code, said.err) == (0, "")
    about = dict(line.split(None, 1) for line in said.lines[:9])
    assert about["prefix"] == "a"
    assert (about["job"], about["step"], about["ranks"]) == ("run", "7", "1")
    assert about["layout"] == "multi_shard, compression none, version 1.0"
    assert about["custom"] == "{loss=0.5}"
    assert "fence" not in about
    paragraphs = [[line.split() for line in part.splitlines()] for part in said.out.split("\n\n")[1:]]
    assert [part[0] for part in paragraphs] == [
        ["file", "rank", "pieces", "size"],
        ["section", "tensors", "size"],
        ["name", "dtype", "shape", "size", "pieces"],
        ["name", "value"],
    ]
    assert ["model/w", "float32", "3×4", "48", "B", "1"] in paragraphs[2]
    assert paragraphs[1][1:] == [["model", "1", "48", "B"], ["optimizer", "1", "40", "B"]]
    assert paragraphs[3][1:] == [["step", "7"]]


def test_programs_are_told_all_of_it(shelf: Shelf) -> None:
    manifest = shelf.put("a", *[{"w": np.zeros((2, 3), ml_dtypes.bfloat16), "own": PerRank(r)} for r in range(2)])
    changed(shelf, manifest, custom={"x": [1]}, fence=Fence(2, 3), job="run", step=9)
    told = shelf.told("show checkpoints/a")
    assert (told["world_size"], told["job"], told["step"]) == (2, "run", 9)
    assert told["fence"] == {"term": 2, "generation": 3}
    assert told["custom"] == {"x": [1]}
    assert told["tensors"] == [
        {"name": "w", "rank": None, "dtype": "bfloat16", "shape": [2, 3], "size_bytes": 12, "pieces": 1}
    ]
    assert told["values"] == [{"name": "own", "rank": 0, "value": 0}, {"name": "own", "rank": 1, "value": 1}]
    assert [(row["rank"], row["pieces"]) for row in told["files"]] == [(0, 1), (1, 0)]
    assert sum(row["size_bytes"] for row in told["files"]) == told["size_bytes"]


def test_copies_are_counted_among_the_pieces(shelf: Shelf) -> None:
    shelf.put("a", STATE, STATE, copies=2)
    assert {row["pieces"] for row in shelf.told("show checkpoints/a")["tensors"]} == {2}


def test_tensors_of_ranks_are_told_with_the_rank(shelf: Shelf) -> None:
    shelf.put("a", *[{"w": PerRank(np.zeros(1)), "all": np.zeros(1)} for _ in range(2)])
    said = shelf.run("show checkpoints/a")
    assert [line.split()[:2] for line in said.out.split("\n\n")[3].splitlines()] == [
        ["name", "rank"], ["w", "0"], ["all", "-"], ["w", "1"],
    ]  # fmt: skip


@pytest.mark.parametrize(("pattern", "names"), [("model/w", {"model/w"}), ("*/m", {"optimizer/m"}), ("*", None)])
def test_tensors_can_be_chosen(shelf: Shelf, pattern: str, names: set[str] | None) -> None:
    shelf.put("a")
    told = shelf.told(f"show checkpoints/a --tensors '{pattern}'")
    assert {row["name"] for row in told["tensors"]} == (names or {"model/w", "optimizer/m"})


def test_a_pattern_for_which_there_is_nothing_is_refused(shelf: Shelf) -> None:
    shelf.put("a")
    code, error = shelf.failed("show checkpoints/a --tensors nothing")
    assert (code, error["code"]) == (3, "checkpoint_tensor_unknown")


class TestLongLists:
    @pytest.fixture(autouse=True)
    def _many(self, shelf: Shelf) -> None:
        shelf.put("a", {f"w{number}": np.zeros(1) for number in range(100)})

    def test_they_are_cut_on_a_terminal(self, shelf: Shelf) -> None:
        said = shelf.on_a_terminal("show checkpoints/a")
        assert said.lines[-1] == "and 61 more tensors: --all shows them"
        assert "w38 " in said.out
        assert "w39 " not in said.out

    def test_they_are_whole_when_all_is_asked_for(self, shelf: Shelf) -> None:
        said = shelf.on_a_terminal("show checkpoints/a --all")
        assert "more tensors" not in said.out
        assert "w99 " in said.out

    def test_they_are_whole_in_a_pipe(self, shelf: Shelf) -> None:
        assert "w99 " in shelf.run("show checkpoints/a").out


def test_nothing_in_it_is_obeyed_by_a_terminal(shelf: Shelf) -> None:
    state = {"w\x1b[2J": np.zeros(1), "v\x9b31m": "text\x1b]0;x\x07", "n\n": 1}
    manifest = shelf.put("a", state)
    changed(shelf, manifest, custom={"k\x1b[2J": "v\x1b[2J", "many": {"\x1b": ["\x1b"]}}, job="j\x1b[2J")
    said = shelf.run("show checkpoints/a")
    assert said.code == 0
    assert not {"\x1b", "\x9b", "\x07"} & set(said.out)


@pytest.mark.parametrize("custom", [{"x": float("nan")}, {"x": 10**30}, {"x": None}, {"x": [[[{}]]]}])
def test_whatever_was_added_can_be_shown(shelf: Shelf, custom: dict[str, Any]) -> None:
    changed(shelf, shelf.put("a"), custom=custom)
    assert shelf.run("show checkpoints/a").code == 0
    assert "custom" in shelf.told("show checkpoints/a")


def test_an_array_that_would_fill_the_world_is_shown_without_being_read(shelf: Shelf) -> None:
    manifest = shelf.put("a", {"w": np.zeros(1)})
    tensors = msgspec.structs.replace(manifest.tensors, shapes=[(1 << 50,)])
    part = msgspec.structs.replace(manifest.parts[0], tensors=[], digests="", size=manifest.parts[0].data_offset)
    changed(shelf, manifest, tensors=tensors, parts=[part])
    assert "9,007.2 TB" in shelf.run("show checkpoints/a").out


def test_the_name_may_be_that_of_the_manifest(shelf: Shelf) -> None:
    shelf.put("a")
    assert shelf.run("show checkpoints/a.metadata.json") == shelf.run("show checkpoints/a")


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
def test_what_is_not_there_is_told_with_its_kind(shelf: Shelf, where: str, code: int, of: str) -> None:
    assert shelf.failed(f"show {where}")[0] == code
    assert shelf.failed(f"show {where}")[1]["code"] == of


def test_a_damaged_manifest_fails(shelf: Shelf) -> None:
    shelf.put("a")
    shelf.damage(shelf.manifest("a"), 10)
    code, error = shelf.failed("show checkpoints/a")
    assert (code, error["kind"], error["code"]) == (1, "checkpoint", "checkpoint_manifest_corrupt")
