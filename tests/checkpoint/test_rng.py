"""Generators go on where they were."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from forged.checkpoint import rng
from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.tree import flatten, unflatten
from forged.checkpoint.model import PerRank


def through_a_checkpoint(state: PerRank) -> Any:
    """The state as it comes back."""
    tree, leaves = flatten(state)
    return unflatten(tree, lambda number: leaves[number].array.copy())


@pytest.fixture(autouse=True)
def unchanged() -> Any:
    """The generators of this process go on as if there had been no test."""
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def draw() -> list[float]:
    """What those of the process draw next; with numbers of which they keep the second of a pair."""
    return [random.random(), random.gauss(), np.random.random(), np.random.standard_normal()]


def test_the_generators_of_the_process_go_on_where_they_were() -> None:
    for _ in range(3):
        state = through_a_checkpoint(rng.capture({}))
        wanted = draw()
        draw()
        rng.restore(state, {})
        assert draw() == wanted


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.random.Generator(np.random.PCG64(1)),
        lambda: np.random.Generator(np.random.Philox(1)),
        lambda: np.random.Generator(np.random.SFC64(1)),
        lambda: np.random.Generator(np.random.MT19937(1)),
        lambda: random.Random(1),
        lambda: np.random.RandomState(1),
    ],
)
def test_those_that_are_registered_too(make: Any) -> None:
    mine = make()
    mine.random()
    state = through_a_checkpoint(rng.capture({"mine": mine}))
    wanted = [mine.random() for _ in range(5)]
    other = make()
    rng.restore(state, {"mine": other})
    assert [other.random() for _ in range(5)] == wanted


class Counter:
    """A generator of another library."""

    def __init__(self) -> None:
        self.count = 0

    def get_state(self) -> Any:
        return {"count": self.count}

    def set_state(self, state: Any) -> None:
        self.count = state["count"]


def test_generator_with_get_and_set_state_can_be_registered() -> None:
    mine = Counter()
    mine.count = 5
    state = through_a_checkpoint(rng.capture({"mine": mine}))
    mine.count = 9
    rng.restore(state, {"mine": mine})
    assert mine.count == 5


def test_object_without_generator_state_is_refused() -> None:
    strange: Any = object()
    with pytest.raises(CheckpointException, match="generator odd is a object"):
        rng.capture({"odd": strange})


def test_it_is_a_ranks_own() -> None:
    assert all(leaf.is_per_rank for leaf in flatten(rng.capture({"mine": np.random.default_rng(0)}))[1])


def test_unregistered_or_unsaved_generator_is_left_unchanged() -> None:
    mine = random.Random(1)
    before = mine.getstate()
    rng.restore(through_a_checkpoint(rng.capture({"other": Counter()})), {"mine": mine})
    rng.restore({}, {"mine": mine})
    assert mine.getstate() == before


@pytest.mark.parametrize(
    "state",
    [
        {"python": {"version": 3, "words": [1, 2], "gauss": None}},
        {"python": {"version": 3}},
        {"python": None},
        {"numpy": {"name": "other", "keys": [1], "position": 0, "has_gauss": 0, "gauss": 0.0}},
        {"registered": {"mine": {"count": {}}}},
        {"registered": {"mine": 5}},
        {"registered": None},
    ],
)
def test_invalid_generator_state_raises_corrupted_checkpoint(state: Any) -> None:
    class Strict(Counter):
        def set_state(self, state: Any) -> None:
            self.count = int(state["count"])

    with pytest.raises(CheckpointException, match="random generators") as caught:
        rng.restore(state, {"mine": Strict()})
    assert caught.value.type is ExceptionType.CORRUPTED_CHECKPOINT
