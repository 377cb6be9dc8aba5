from __future__ import annotations

from collections import OrderedDict
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.boxes import Box
from forged.checkpoint.format.tree import (
    DEPTH_MAX,
    INTEGER_MAX,
    NAME_CHARS_MAX,
    child_name,
    escape_key,
    flatten,
    renumber_tensors,
    tensor_numbers,
    unescape_key,
    unflatten,
    value_nodes,
)
from forged.checkpoint.model import AXES_MAX, PerRank, ShardedArray
from forged.leaf_types import LeafType
from tests.checkpoint.fixtures.sameness import require_same

KEYS = st.one_of(st.text(max_size=6), st.integers(-INTEGER_MAX + 1, INTEGER_MAX - 1))
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from([np.float32(1.5), np.int8(-3), np.bool_(True), np.str_("é"), np.datetime64("2020-01-01")]),
    st.sampled_from([np.arange(3), np.zeros((2, 0)), np.array(1.5)]),
)
STATES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=4),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=12,
)


def written(node: Any) -> Any:
    """A tree after encoding and decoding."""
    return msgspec.json.decode(msgspec.json.encode(node))


def there_and_back(state: Any) -> Any:
    node, leaves = flatten(state)
    return unflatten(written(node), lambda number: leaves[number].array)


@given(STATES)
def test_flatten_and_unflatten_give_the_same_state(state: Any) -> None:
    require_same(there_and_back(state), state)


@given(STATES)
def test_names_are_unique(state: Any) -> None:
    node, leaves = flatten(state)
    names = [leaf.name for leaf in leaves]
    assert len(set(names)) == len(names)
    assert list(tensor_numbers(node)) == list(range(len(leaves)))


@given(STATES)
def test_renumbering_changes_only_numbers(state: Any) -> None:
    node, leaves = flatten(state)
    numbers = [100 + number for number in range(len(leaves))]
    changed = renumber_tensors(node, numbers)
    assert list(tensor_numbers(changed)) == numbers
    require_same(unflatten(changed, lambda number: leaves[number - 100].array), state)


def test_values_are_named_like_arrays() -> None:
    own = PerRank({"s": (None,)})
    tree, _ = flatten({"a/b": [1, np.zeros(1)], "own": own, 7: {"f": 0.5}})
    assert list(value_nodes(tree)) == [
        ("a~1b/#0", {"v": 1}),
        ("own/s/#0", {"v": None}),
        ("#7/f", {"f": (0.5).hex()}),
    ]
    assert list(value_nodes({"o": 0}, "own")) == [("own", {"o": 0})]


@given(st.text(max_size=8), st.text(max_size=8))
def test_escaping_a_key_is_reversible_and_unique(key: str, other: str) -> None:
    assert unescape_key(escape_key(key)) == key
    assert "/" not in escape_key(key)
    assert (escape_key(key) == escape_key(other)) == (key == other)
    assert not escape_key(key).startswith("#")


def test_names_are_paths() -> None:
    a = np.zeros(1)
    state = {"model": {"layers.0": {"w": a}, 7: a, "#7": a, "a/b": a, "": a}, "list": [a, (a, a)]}
    names = [leaf.name for leaf in flatten(state)[1]]
    assert names == [
        "model/layers.0/w",
        "model/#7",
        "model/~27",
        "model/a~1b",
        "model/~3",
        "list/#0",
        "list/#1/#0",
        "list/#1/#1",
    ]
    assert child_name("list/#1", 0) == "list/#1/#0"
    assert child_name("", "a/b") == "a~1b"


def test_a_single_array_is_a_state() -> None:
    array = np.arange(3)
    node, (leaf,) = flatten(array)
    assert (node, leaf.name, leaf.array) == (0, "", array) or leaf.array is array


def test_any_mapping_becomes_a_dict() -> None:
    assert there_and_back(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}


def test_leaves_record_sharding_and_per_rank() -> None:
    array = np.zeros((2, 3))
    state = {"part": ShardedArray(array, (6, 3), (2, 0)), "own": PerRank({"x": array, "y": [array]}), "copy": array}
    _, leaves = flatten(state)
    assert [(leaf.name, leaf.is_per_rank, leaf.sharded_box, leaf.global_shape) for leaf in leaves] == [
        ("part", False, Box((2, 0), (2, 3)), (6, 3)),
        ("own/x", True, None, (2, 3)),
        ("own/y/#0", True, None, (2, 3)),
        ("copy", False, None, (2, 3)),
    ]


class Tensor:
    """An array of another library."""

    def __init__(self, array: Any) -> None:
        self.array = array


LEAF_TYPE = LeafType(lambda value: isinstance(value, Tensor), lambda value: value.array, lambda array, _: Tensor(array))


def test_leaf_types_are_saved_as_arrays() -> None:
    array = np.arange(4)
    state = {"w": Tensor(array), "part": ShardedArray(np.zeros(1), (1,), (0,))}
    object.__setattr__(state["part"], "local", Tensor(np.zeros(1)))
    _, leaves = flatten(state, [LEAF_TYPE])
    assert leaves[0].array is array
    assert leaves[1].sharded_box == Box((0,), (1,))


def refused(state: Any) -> CheckpointException:
    with pytest.raises(CheckpointException) as caught:
        flatten(state)
    assert caught.value.type is ExceptionType.VALIDATION_FAILED
    assert caught.value.fix
    return caught.value


def nested(depth: int) -> Any:
    state: Any = np.zeros(1)
    for _ in range(depth):
        state = [state]
    return state


def test_nesting_beyond_the_limit_is_refused() -> None:
    require_same(there_and_back(deep := nested(DEPTH_MAX)), deep)
    refused(nested(DEPTH_MAX + 1))


def test_a_huge_integer_is_refused() -> None:
    assert "100001 bits" in refused(1 << 100_000).message
    require_same(there_and_back(-(1 << 10_000)), -(1 << 10_000))


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["me"] = state
    refused(state)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        range(3),
        lambda: None,
        np.array([object()]),
        np.zeros(1, [("a", "f4")]),
        np.zeros((1,) * (AXES_MAX + 1)),
        {1.5: 1},
        {(1, 2): 1},
        {None: 1},
        {True: 1},
        {INTEGER_MAX: 1},
        {"x" * NAME_CHARS_MAX + "x": np.zeros(1)},
        bytearray(b"x"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_cannot_be_restored_are_refused(value: Any) -> None:
    assert "place" in refused({"place": value}).message or isinstance(value, dict)


@pytest.mark.parametrize(
    "node",
    [
        None,
        "x",
        1.5,
        True,
        [],
        {},
        {"d": {}, "l": []},
        {"d": []},
        {"l": {}},
        {"m": {}},
        {"m": [1]},
        {"m": [["a"]]},
        {"m": [["a", 0, 0]]},
        {"m": [[None, 0]]},
        {"m": [[[1], 0]]},
        {"v": 1.5},
        {"v": []},
        {"v": {}},
        {"i": 5},
        {"i": "zz"},
        {"f": "x"},
        {"f": 1.0},
        {"c": ["1"]},
        {"c": ["1", 2]},
        {"b": "?"},
        {"b": 1},
        {"n": ["float32", "AAAA"]},
        {"n": ["float32", ""]},
        {"n": ["object", "AAAAAAAAAAA="]},
        {"n": ["S0", ""]},
        {"n": [1, 2]},
        {"p": None},
        {"o": 0},
        {"pickle": "gASVDwA="},
    ],
)
def test_a_malformed_tree_is_refused(node: Any) -> None:
    with pytest.raises(CheckpointException) as caught:
        unflatten({"l": [node]}, lambda number: number)
    assert caught.value.type in {ExceptionType.CORRUPTED_CHECKPOINT, ExceptionType.INCOMPATIBLE_VERSION}


@pytest.mark.parametrize("kind", ["l", "t", "p"])
def test_a_tree_that_is_too_deep_is_refused(kind: str) -> None:
    node: Any = 0
    for _ in range(DEPTH_MAX * 3):
        node = {kind: node if kind == "p" else [node]}
    with pytest.raises(CheckpointException):
        unflatten(node, lambda number: number)


@pytest.mark.parametrize(
    "text",
    [
        np.str_(""),
        np.bytes_(b""),
        np.void(b""),
        np.str_("x\0"),
        np.bytes_(b"x\0\0"),
        np.void(b"x\0"),
        np.str_("\udc80"),
    ],
)
def test_numpy_strings_keep_trailing_zeros(text: np.generic) -> None:
    found = there_and_back({"a": text})["a"]
    assert type(found) is type(text)
    assert (found.itemsize, bytes(found.tobytes())) == (text.itemsize, bytes(text.tobytes()))


def test_a_scalar_of_another_length_than_its_type_is_refused() -> None:
    for data in ("", "AAAA", "AAAAAAAA"):
        with pytest.raises(CheckpointException) as refused:
            unflatten({"n": ["float32", data]}, lambda number: None)
        assert refused.value.code == "checkpoint_manifest_malformed"


def test_ml_dtypes_scalars_are_restored() -> None:
    require_same(there_and_back([ml_dtypes.bfloat16(1.5)]), [ml_dtypes.bfloat16(1.5)])
