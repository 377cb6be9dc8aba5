"""`forgectl ckpt diff` compares two checkpoints."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from forged.checkpoint.model import PerRank
from tests.cli.ckpt.conftest import STATE, CheckpointFolder

A, B = "checkpoints/a", "checkpoints/b"


def between(
    checkpoint_folder: CheckpointFolder, a: Any, b: Any, flags: str = ""
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The exit code, the JSON rows by name, and the summary."""
    checkpoint_folder.save("a", a)
    checkpoint_folder.save("b", b)
    output = checkpoint_folder.run(f"diff {A} {B} {flags} --json")
    assert output.err == ""
    *rows, last = map(json.loads, output.lines)
    return output.code, {row.get("tensor", row.get("value")): row for row in rows}, last["summary"]


def test_equal_checkpoints_exit_with_0(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", STATE)
    checkpoint_folder.save("b", STATE)
    output = checkpoint_folder.run(f"diff {A} {B}")
    assert (output.code, output.err) == (0, "")
    assert output.out == "2 tensors, all the same; 1 value, all the same\n"


def test_the_same_state_saved_by_other_ranks_is_equal(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", STATE, STATE)
    checkpoint_folder.save("b", STATE)
    assert checkpoint_folder.run(f"diff {A} {B}").code == 0


def test_text_output_shows_the_differences_and_their_size(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save(
        "a", {"same": np.zeros(3), "w": np.zeros(4), "cut": np.zeros((2, 3), np.float32), "x": np.zeros(1)}
    )
    checkpoint_folder.save(
        "b", {"same": np.zeros(3), "w": np.array([0, 3, 0, -4.0]), "cut": np.zeros(6), "y": np.zeros(1)}
    )
    output = checkpoint_folder.run(f"diff {A} {B}")
    assert (output.code, output.err) == (1, "")
    assert [line.split() for line in output.lines] == [
        ["name", "difference", "differing", "max_abs", "norm"],
        ["w", "changed", "2", "of", "4", "4.0", "5.0"],
        ["cut", "float32", "2×3", "→", "float64", "6", "-", "-", "-"],
        ["x", "only", "in", "A", "-", "-", "-"],
        ["y", "only", "in", "B", "-", "-", "-"],
        [],
        [
            "5",
            "tensors:",
            "1",
            "the",
            "same,",
            "1",
            "changed,",
            "1",
            "of",
            "different",
            "shape",
            "or",
            "type,",
            "1",
            "only",
            "in",
            "A,",
            "1",
            "only",
            "in",
            "B",
        ],
    ]


def test_all_lists_equal_tensors_too(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", STATE)
    checkpoint_folder.save("b", STATE)
    output = checkpoint_folder.run(f"diff {A} {B} --all")
    assert [line.split() for line in output.lines[1:3]] == [["model/w", "the", "same"], ["optimizer/m", "the", "same"]]


def test_json_has_a_line_per_tensor_and_a_summary(checkpoint_folder: CheckpointFolder) -> None:
    code, rows, summary = between(
        checkpoint_folder, {"w": np.zeros(4), "v": np.zeros(1)}, {"w": np.ones(4), "v": np.zeros(1)}
    )
    assert code == 1
    assert rows["w"] == {
        "tensor": "w", "rank": None, "kind": "changed", "a": {"dtype": "float64", "shape": [4]},
        "b": {"dtype": "float64", "shape": [4]}, "elements": 4, "differing": 4, "max_abs": 1.0, "norm": 2.0,
        "nan_on_one_side": 0,
    }  # fmt: skip
    assert (rows["v"]["kind"], rows["v"]["differing"]) == ("same", 0)
    assert summary["tensors"] == {"same": 1, "changed": 1, "incompatible": 0, "only_in_a": 0, "only_in_b": 0}


def test_values_are_compared(checkpoint_folder: CheckpointFolder) -> None:
    code, rows, summary = between(
        checkpoint_folder, {"step": 1, "lr": 0.5, "x": None}, {"step": 2, "lr": 0.5, "y": "z"}
    )
    assert code == 1
    assert rows == {
        "step": {"value": "step", "rank": None, "kind": "changed", "a": 1, "b": 2},
        "x": {"value": "x", "rank": None, "kind": "only_in_a", "a": None, "b": None},
        "y": {"value": "y", "rank": None, "kind": "only_in_b", "a": None, "b": "z"},
    }
    assert summary["values"] == {"same": 1, "changed": 1, "incompatible": 0, "only_in_a": 1, "only_in_b": 1}


@pytest.mark.parametrize(("a", "b"), [(1, True), (0, False), (1, 1.0), (0.0, -0.0), ("1", b"1")])
def test_values_of_different_types_differ(checkpoint_folder: CheckpointFolder, a: Any, b: Any) -> None:
    code, rows, _ = between(checkpoint_folder, {"x": [a]}, {"x": [b]})
    assert (code, [row["kind"] for row in rows.values()]) == (1, ["changed"])


def test_a_changed_value_is_shown_with_both_sides(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", {"step": 1})
    checkpoint_folder.save("b", {"step": 2})
    assert "1 → 2" in checkpoint_folder.run(f"diff {A} {B}").out


def test_nan_on_one_side_is_counted(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", {"w": np.zeros(2)})
    checkpoint_folder.save("b", {"w": np.array([0, np.nan])})
    output = checkpoint_folder.run(f"diff {A} {B}")
    assert output.lines[0].split()[-1] == "nan_on_one_side"
    assert output.lines[1].split()[-1] == "1"


def test_per_rank_tensors_are_compared_by_rank(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", *[{"w": PerRank(np.full(1, rank))} for rank in range(2)])
    checkpoint_folder.save("b", *[{"w": PerRank(np.zeros(1, np.int64))} for _ in range(2)])
    output = checkpoint_folder.run(f"diff {A} {B}")
    assert output.lines[1].split()[:3] == ["w", "1", "changed"]
    assert output.lines[-1] == "2 tensors: 1 the same, 1 changed"


class TestPattern:
    def test_only_matching_tensors_are_compared(self, checkpoint_folder: CheckpointFolder) -> None:
        checkpoint_folder.save("a", {"w": np.zeros(2), "v": np.zeros(2), "n": 1})
        checkpoint_folder.save("b", {"w": np.ones(2), "v": np.zeros(2), "n": 2})
        checkpoint_folder.flip_bit(checkpoint_folder.files("b")[0], 4096)
        assert checkpoint_folder.run(f"diff {A} {B} --tensors 'v*'").code == 0
        assert checkpoint_folder.run(f"diff {A} {B} --tensors n").code == 1
        assert checkpoint_folder.run_failing(f"diff {A} {B} --tensors w")[1]["code"] == "checkpoint_chunk_corrupt"

    def test_a_pattern_without_a_match_is_refused(self, checkpoint_folder: CheckpointFolder) -> None:
        checkpoint_folder.save("a")
        checkpoint_folder.save("b")
        code, error = checkpoint_folder.run_failing(f"diff {A} {B} --tensors x")
        assert (code, error["code"]) == (3, "checkpoint_tensor_unknown")


def test_long_lists_are_shortened_on_a_terminal_only(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", {f"w{number}": np.zeros(1) for number in range(100)})
    checkpoint_folder.save("b", {f"w{number}": np.ones(1) for number in range(100)})
    shown = checkpoint_folder.run_on_terminal(f"diff {A} {B}")
    assert "and 61 more differences: --all shows them" in shown.lines
    assert (
        len(checkpoint_folder.run_on_terminal(f"diff {A} {B} --all").lines)
        == len(checkpoint_folder.run(f"diff {A} {B}").lines)
        == 103
    )


def test_control_characters_are_escaped(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", {"w\x1b[2J": np.zeros(1), "v": "\x1b[2J"})
    checkpoint_folder.save("b", {"w\x1b[2J": np.ones(1), "v": "\x9b"})
    assert not {"\x1b", "\x9b"} & set(checkpoint_folder.run(f"diff {A} {B}").out)


@pytest.mark.parametrize("line", [f"diff {A} checkpoints/none", f"diff checkpoints/none {A}"])
def test_a_missing_checkpoint_is_refused(checkpoint_folder: CheckpointFolder, line: str) -> None:
    checkpoint_folder.save("a")
    code, error = checkpoint_folder.run_failing(line)
    assert (code, error["code"]) == (3, "checkpoint_missing")
