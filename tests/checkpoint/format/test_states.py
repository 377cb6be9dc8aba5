"""Frames and per-rank values of states."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forged.checkpoint.format.states import PlainValue, States, merge_per_rank, split_per_rank
from forged.checkpoint.format.tree import flatten, frame_content, tensor_numbers, unflatten
from forged.checkpoint.model import PerRank
from tests.checkpoint.fixtures.sameness import require_same
from tests.checkpoint.format.test_tree import KEYS, PLAIN, written

STATES_WITH_PER_RANK = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=4),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        inner.map(PerRank),
    ),
    max_leaves=12,
)


@given(STATES_WITH_PER_RANK)
def test_split_and_merge_give_the_same_tree(state: Any) -> None:
    tree, leaves = flatten(state)
    frame, own = written(split_per_rank(tree))
    assert merge_per_rank(frame, own) == tree
    require_same(unflatten(merge_per_rank(frame, own), lambda number: leaves[number].array), state)


@given(STATES_WITH_PER_RANK)
def test_a_frame_has_the_common_values_and_a_place_per_per_rank_value(state: Any) -> None:
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


def test_ranks_with_different_per_rank_values_share_a_frame() -> None:
    states = states_of(*({"w": np.zeros(1), "rng": PerRank({"seed": rank})} for rank in range(3)))
    assert states.frames == [{"d": {"w": 0, "rng": {"o": 0}}}]
    assert states.frame_of_rank == [0, 0, 0]
    assert states.own == [[{"d": {"seed": {"v": rank}}}] for rank in range(3)]
    assert states.tree(2) == {"d": {"w": 0, "rng": {"p": {"d": {"seed": {"v": 2}}}}}}


def test_frames_with_1_and_true_differ() -> None:
    states = states_of({"x": 1}, {"x": True}, {"x": 1}, {"x": 1.0}, {"a": 0, "b": 0}, {"b": 0, "a": 0})
    assert states.frame_of_rank == [0, 1, 0, 2, 3, 4]
    assert [type(unflatten(states.tree(rank), int)["x"]) for rank in range(4)] == [int, bool, int, float]
    assert list(unflatten(states.tree(5), int)) == ["b", "a"]


def test_other_frames_excludes_the_ranks_own_frame() -> None:
    states = states_of({"x": 1}, {"y": 1}, {"x": 1})
    assert states.other_frames(0) == states.other_frames(2) == [states.frame(1)]
    assert states.other_frames(1) == [states.frame(0)]


def test_the_tree_of_a_rank_is_built_once() -> None:
    states = states_of({"own": PerRank(0)}, {"own": PerRank(1)})
    assert states.tree(1) is states.tree(1)
    assert states == states_of({"own": PerRank(0)}, {"own": PerRank(1)})


def test_values_are_listed_once_per_frame_and_once_per_rank_value() -> None:
    states = states_of(*({"step": 7, "own": [PerRank({"a": rank, "w": np.zeros(1)})]} for rank in range(2)))
    assert list(states.values()) == [
        PlainValue("step", {"v": 7}, 0, is_own=False),
        PlainValue("own/#0/a", {"v": 0}, 0, is_own=True),
        PlainValue("own/#0/a", {"v": 1}, 1, is_own=True),
    ]


def test_a_state_may_be_a_single_per_rank_value() -> None:
    states = states_of(PerRank(5))
    assert (states.frames, states.own) == ([{"o": 0}], [[{"v": 5}]])
    assert unflatten(states.tree(0), int) == 5
    assert list(states.values()) == [PlainValue("", {"v": 5}, 0, is_own=True)]
