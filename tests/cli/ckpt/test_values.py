"""Values of a state that are not arrays, by name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.format.tree import flatten
from forged.checkpoint.model import PerRank
from forged.cli.ckpt.values import displayable, plain_values
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.plain_writer import write_checkpoint


def saved(*states: Any) -> Manifest:
    return write_checkpoint(MemoryStorage(), "a", states)


def output(manifest: Manifest) -> dict[tuple[str, int | None], Any]:
    return {key: displayable(node) for key, node in plain_values(manifest).items()}


def test_values_are_named_like_arrays() -> None:
    state = {"step": 1, "a/b": {"c": [True, None]}, 3: ("x", np.zeros(2)), "w": np.zeros(1)}
    assert output(saved(state)) == {
        ("step", None): 1, ("a~1b/c/#0", None): True, ("a~1b/c/#1", None): None, ("#3/#0", None): "x",
    }  # fmt: skip


def test_per_rank_values_have_the_rank() -> None:
    states = [{"own": PerRank(rank), "step": 5} for rank in range(2)]
    assert output(saved(*states)) == {("own", 0): 0, ("own", 1): 1, ("step", None): 5}


def test_differing_common_values_are_listed_by_rank() -> None:
    assert output(saved({"lr": 1}, {"lr": 1}, {"lr": 2})) == {("lr", None): 1, ("lr", 2): 2}


@pytest.mark.parametrize(
    ("value", "summary"),
    [
        (1.5, 1.5),
        (1 + 2j, "(1+2j)"),
        (b"\0", b"\0"),
        (np.float32(0.5), 0.5),
        (np.datetime64("2020-01-01"), "2020-01-01"),
        (np.complex64(1j), "1j"),
        (10**1000, "an integer of 3,322 bits"),
    ],
)
def test_values_are_displayable_and_fit_json(value: Any, summary: Any) -> None:
    tree, _ = flatten(value)
    assert displayable(tree) == summary
    assert json.dumps(displayable(tree), default=bytes.hex)


def test_a_huge_integer_is_described() -> None:
    assert displayable({"i": f"0x{'f' * 100_000}"}) == "an integer of 400,000 bits"
