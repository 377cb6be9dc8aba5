"""The states of all ranks, told in frames and what is each one's own."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forged.checkpoint.format.states import States, Value, merge_per_rank, split_per_rank
from forged.checkpoint.format.tree import flatten, frame_content, tensor_numbers, unflatten
from forged.checkpoint.model import PerRank
from tests.checkpoint.format.test_tree import KEYS, PLAIN, written
from tests.checkpoint.sameness import require_same

WITH_OWN = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=4),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        inner.map(PerRank),
    ),
    max_leaves=12,
)


@given(WITH_OWN)
def test_a_frame_with_its_own_is_the_tree_that_was_taken_apart(state: Any) -> None:
    tree, leaves = flatten(state)
    frame, own = written(split_per_rank(tree))
    assert merge_per_rank(frame, own) == tree
    require_same(unflatten(merge_per_rank(frame, own), lambda number: leaves[number].array), state)


@given(WITH_OWN)
def test_a_frame_has_what_is_nobodys_and_a_place_for_each_that_is_a_ranks_own(state: Any) -> None:
    tree, leaves = flatten(state)
    frame, own = split_per_rank(tree)
    numbers, places = frame_content(frame)
    assert [place.number for place in places] == list(range(len(own)))
    assert numbers == [number for number, leaf in enumerate(leaves) if not leaf.is_per_rank]
    of_own = [
        number for node, place in zip(own, places, strict=True) for number in tensor_numbers(node, place.depth + 1)
    ]
    assert of_own == [number for number, leaf in enumerate(leaves) if leaf.is_per_rank]


def states_of(*states: Any) -> States:
    return States.of(flatten(state)[0] for state in states)


def test_ranks_that_differ_in_their_own_share_a_frame() -> None:
    states = states_of(*({"w": np.zeros(1), "rng": PerRank({"seed": rank})} for rank in range(3)))
    assert states.frames == [{"d": {"w": 0, "rng": {"o": 0}}}]
    assert states.frame_of_rank == [0, 0, 0]
    assert states.own == [[{"d": {"seed": {"v": rank}}}] for rank in range(3)]
    assert states.tree(2) == {"d": {"w": 0, "rng": {"p": {"d": {"seed": {"v": 2}}}}}}


def test_what_python_takes_for_equal_is_not_one_frame() -> None:
    states = states_of({"x": 1}, {"x": True}, {"x": 1}, {"x": 1.0}, {"a": 0, "b": 0}, {"b": 0, "a": 0})
    assert states.frame_of_rank == [0, 1, 0, 2, 3, 4]
    assert [type(unflatten(states.tree(rank), int)["x"]) for rank in range(4)] == [int, bool, int, float]
    assert list(unflatten(states.tree(5), int)) == ["b", "a"]


def test_the_frames_of_others_are_those_that_a_rank_does_not_have() -> None:
    states = states_of({"x": 1}, {"y": 1}, {"x": 1})
    assert states.other_frames(0) == states.other_frames(2) == [states.frame(1)]
    assert states.other_frames(1) == [states.frame(0)]


def test_the_tree_of_a_rank_is_put_together_once() -> None:
    states = states_of({"own": PerRank(0)}, {"own": PerRank(1)})
    assert states.tree(1) is states.tree(1)
    assert states == states_of({"own": PerRank(0)}, {"own": PerRank(1)})


def test_values_are_told_once_for_each_frame_and_for_each_rank_that_has_its_own() -> None:
    states = states_of(*({"step": 7, "own": [PerRank({"a": rank, "w": np.zeros(1)})]} for rank in range(2)))
    assert list(states.values()) == [
        Value("step", {"v": 7}, 0, is_own=False),
        Value("own/#0/a", {"v": 0}, 0, is_own=True),
        Value("own/#0/a", {"v": 1}, 1, is_own=True),
    ]


def test_a_rank_alone_may_have_nothing_but_its_own() -> None:
    states = states_of(PerRank(5))
    assert (states.frames, states.own) == ([{"o": 0}], [[{"v": 5}]])
    assert unflatten(states.tree(0), int) == 5
    assert list(states.values()) == [Value("", {"v": 5}, 0, is_own=True)]
