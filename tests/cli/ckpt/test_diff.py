"""`forgectl ckpt diff`: what is different."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from forged.checkpoint.model import PerRank
from tests.cli.ckpt.conftest import STATE, Shelf

A, B = "checkpoints/a", "checkpoints/b"


def between(shelf: Shelf, a: Any, b: Any, flags: str = "") -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The exit code, what programs are told by name, and the summary."""
    shelf.put("a", a)
    shelf.put("b", b)
    said = shelf.run(f"diff {A} {B} {flags} --json")
    assert said.err == ""
    *rows, last = map(json.loads, said.lines)
    return said.code, {row.get("tensor", row.get("value")): row for row in rows}, last["summary"]


def test_two_that_are_equal_exit_with_0(shelf: Shelf) -> None:
    shelf.put("a", STATE)
    shelf.put("b", STATE)
    said = shelf.run(f"diff {A} {B}")
    assert (said.code, said.err) == (0, "")
    assert said.out == "2 tensors, the same in both; 1 value, the same in both\n"


def test_a_checkpoint_is_equal_to_itself_however_many_ranks_have_saved_it(shelf: Shelf) -> None:
    shelf.put("a", STATE, STATE)
    shelf.put("b", STATE)
    assert shelf.run(f"diff {A} {B}").code == 0


def test_people_are_told_what_differs_and_how_much(shelf: Shelf) -> None:
    shelf.put("a", {"same": np.zeros(3), "w": np.zeros(4), "cut": np.zeros((2, 3), np.float32), "x": np.zeros(1)})
    shelf.put("b", {"same": np.zeros(3), "w": np.array([0, 3, 0, -4.0]), "cut": np.zeros(6), "y": np.zeros(1)})
    said = shelf.run(f"diff {A} {B}")
    assert (said.code, said.err) == (1, "")
    assert [line.split() for line in said.lines] == [
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
            "another",
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


def test_the_same_are_told_when_all_are_asked_for(shelf: Shelf) -> None:
    shelf.put("a", STATE)
    shelf.put("b", STATE)
    said = shelf.run(f"diff {A} {B} --all")
    assert [line.split() for line in said.lines[1:3]] == [["model/w", "the", "same"], ["optimizer/m", "the", "same"]]


def test_programs_are_told_a_line_for_each_tensor_and_a_summary(shelf: Shelf) -> None:
    code, rows, summary = between(shelf, {"w": np.zeros(4), "v": np.zeros(1)}, {"w": np.ones(4), "v": np.zeros(1)})
    assert code == 1
    assert rows["w"] == {
        "tensor": "w", "rank": None, "kind": "changed", "a": {"dtype": "float64", "shape": [4]},
        "b": {"dtype": "float64", "shape": [4]}, "elements": 4, "differing": 4, "max_abs": 1.0, "norm": 2.0,
        "nan_on_one_side": 0,
    }  # fmt: skip
    assert (rows["v"]["kind"], rows["v"]["differing"]) == ("same", 0)
    assert summary["tensors"] == {"same": 1, "changed": 1, "incompatible": 0, "only_in_a": 0, "only_in_b": 0}


def test_values_that_are_no_arrays_count_too(shelf: Shelf) -> None:
    code, rows, summary = between(shelf, {"step": 1, "lr": 0.5, "x": None}, {"step": 2, "lr": 0.5, "y": "z"})
    assert code == 1
    assert rows == {
        "step": {"value": "step", "rank": None, "kind": "changed", "a": 1, "b": 2},
        "x": {"value": "x", "rank": None, "kind": "only_in_a", "a": None, "b": None},
        "y": {"value": "y", "rank": None, "kind": "only_in_b", "a": None, "b": "z"},
    }
    assert summary["values"] == {"same": 1, "changed": 1, "incompatible": 0, "only_in_a": 1, "only_in_b": 1}


@pytest.mark.parametrize(("a", "b"), [(1, True), (0, False), (1, 1.0), (0.0, -0.0), ("1", b"1")])
def test_values_that_python_takes_for_equal_are_not_the_same(shelf: Shelf, a: Any, b: Any) -> None:
    code, rows, _ = between(shelf, {"x": [a]}, {"x": [b]})
    assert (code, [row["kind"] for row in rows.values()]) == (1, ["changed"])


def test_a_value_is_told_as_it_was_and_as_it_is(shelf: Shelf) -> None:
    shelf.put("a", {"step": 1})
    shelf.put("b", {"step": 2})
    assert "1 → 2" in shelf.run(f"diff {A} {B}").out


def test_what_is_no_number_on_one_side_is_counted(shelf: Shelf) -> None:
    shelf.put("a", {"w": np.zeros(2)})
    shelf.put("b", {"w": np.array([0, np.nan])})
    said = shelf.run(f"diff {A} {B}")
    assert said.lines[0].split()[-1] == "nan_on_one_side"
    assert said.lines[1].split()[-1] == "1"


def test_what_ranks_have_for_themselves_is_compared_rank_by_rank(shelf: Shelf) -> None:
    shelf.put("a", *[{"w": PerRank(np.full(1, rank))} for rank in range(2)])
    shelf.put("b", *[{"w": PerRank(np.zeros(1, np.int64))} for _ in range(2)])
    said = shelf.run(f"diff {A} {B}")
    assert said.lines[1].split()[:3] == ["w", "1", "changed"]
    assert said.lines[-1] == "2 tensors: 1 the same, 1 changed"


class TestSome:
    def test_only_those_are_compared_and_read(self, shelf: Shelf) -> None:
        shelf.put("a", {"w": np.zeros(2), "v": np.zeros(2), "n": 1})
        shelf.put("b", {"w": np.ones(2), "v": np.zeros(2), "n": 2})
        shelf.damage(shelf.files("b")[0], 4096)
        assert shelf.run(f"diff {A} {B} --tensors 'v*'").code == 0
        assert shelf.run(f"diff {A} {B} --tensors n").code == 1
        assert shelf.failed(f"diff {A} {B} --tensors w")[1]["code"] == "checkpoint_chunk_corrupt"

    def test_a_pattern_for_which_there_is_nothing_is_refused(self, shelf: Shelf) -> None:
        shelf.put("a")
        shelf.put("b")
        code, error = shelf.failed(f"diff {A} {B} --tensors x")
        assert (code, error["code"]) == (3, "checkpoint_tensor_unknown")


def test_long_lists_are_cut_on_a_terminal_and_nowhere_else(shelf: Shelf) -> None:
    shelf.put("a", {f"w{number}": np.zeros(1) for number in range(100)})
    shelf.put("b", {f"w{number}": np.ones(1) for number in range(100)})
    shown = shelf.on_a_terminal(f"diff {A} {B}")
    assert "and 61 more differences: --all shows them" in shown.lines
    assert len(shelf.on_a_terminal(f"diff {A} {B} --all").lines) == len(shelf.run(f"diff {A} {B}").lines) == 103


def test_names_and_values_bring_nothing_that_a_terminal_would_obey(shelf: Shelf) -> None:
    shelf.put("a", {"w\x1b[2J": np.zeros(1), "v": "\x1b[2J"})
    shelf.put("b", {"w\x1b[2J": np.ones(1), "v": "\x9b"})
    assert not {"\x1b", "\x9b"} & set(shelf.run(f"diff {A} {B}").out)


@pytest.mark.parametrize("line", [f"diff {A} checkpoints/none", f"diff checkpoints/none {A}"])
def test_one_that_is_not_there_is_refused(shelf: Shelf, line: str) -> None:
    shelf.put("a")
    code, error = shelf.failed(line)
    assert (code, error["code"]) == (3, "checkpoint_missing")
