from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.export.external_files import open_index, open_safetensors, tree_for_names
from forged.checkpoint.format.boxes import Box
from forged.checkpoint.format.tree import DEPTH_MAX, flatten, unflatten
from forged.checkpoint.ports import CancelToken
from tests.checkpoint.fixtures.memory_storage import MemoryStorage


def built(names: list[str]) -> Any:
    """The state for these names, with each array's number in its place."""
    return unflatten(tree_for_names(names), lambda number: number)


def test_names_with_slashes_are_nested_dicts() -> None:
    assert built(["model/a", "model/b/c", "step"]) == {"model": {"a": 0, "b": {"c": 1}}, "step": 2}


def test_keys_numbered_from_0_are_lists() -> None:
    assert built(["#0/w", "#1/w", "#2"]) == [{"w": 0}, {"w": 1}, 2]


@pytest.mark.parametrize("names", [["a/#1", "a/#0"], ["a/#0", "a/#2"], ["a/#-3"], ["a/#0", "a/b"]])
def test_other_numbers_are_integer_keys(names: list[str]) -> None:
    (inner,) = built(names).values()
    keys = [name.removeprefix("a/") for name in names]
    assert list(inner) == [int(key[1:]) if key.startswith("#") else key for key in keys]


@pytest.mark.parametrize(
    "names",
    [
        ["a", "a/b"],
        ["a/b", "a"],
        ["a/b/c", "a/b"],
        ["a~1b", "c", "x/a~b", "x/a~0b"],
        ["x/#5", "x/~25"],
        ["/".join("x" * (DEPTH_MAX + 1))],
    ],
)
def test_names_that_form_no_tree_are_plain_keys(names: list[str]) -> None:
    assert built(names) == {name: number for number, name in enumerate(names)}


def test_no_names_give_an_empty_dict() -> None:
    assert built([]) == {}


PARTS = st.lists(st.sampled_from(["a", "b", "#0", "#1", "#01", "#x", "~0", "~2", "~23", "", "#-1"]), min_size=1)


@given(st.lists(PARTS.map("/".join), unique=True, max_size=8))
def test_any_names_appear_once_in_the_tree(names: list[str]) -> None:
    found: list[int] = []
    unflatten(tree_for_names(names), found.append)
    assert sorted(found) == list(range(len(names)))


KEYS = st.one_of(st.text(max_size=4), st.integers(-5, 5))
STATES = st.recursive(
    st.just(np.zeros(1)),
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, min_size=1, max_size=3), st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
).filter(lambda state: isinstance(state, dict | list))


@given(STATES)
def test_a_tree_has_the_names_it_was_built_from(state: Any) -> None:
    """So converting to an archive and back keeps all names."""
    _, leaves = flatten(state)
    names = [leaf.name for leaf in leaves]
    _, again = flatten(unflatten(tree_for_names(names), lambda number: np.full(1, number)))
    assert {leaf.name: int(leaf.array[0]) for leaf in again} == {name: number for number, name in enumerate(names)}


def storage_of(index: Any, **files: dict[str, np.ndarray[Any, Any]]) -> MemoryStorage:
    storage = MemoryStorage()
    storage.publish(
        "hf/model.safetensors.index.json", index if isinstance(index, bytes) else json.dumps(index).encode()
    )
    for name, arrays in files.items():
        storage.publish(f"hf/{name}.safetensors", safetensors.numpy.save(arrays))
    return storage


def opened(storage: MemoryStorage) -> list[str]:
    with open_index(storage, "hf/model.safetensors.index.json", CancelToken()) as foreign:
        return foreign.tensors.names


A, B = np.zeros(3), np.ones(4)


def test_an_index_opens_all_arrays_of_all_files() -> None:
    storage = storage_of({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}, a={"x": A}, b={"y": B})
    with open_index(storage, "hf/model.safetensors.index.json", CancelToken()) as foreign:
        assert foreign.tensors.names == ["model/x", "model/y"]
        all_of_it, part = np.zeros(4), np.zeros(2)
        foreign.fetch([1, 1], {1: Box((1,), (2,))}, {0: all_of_it, 1: part})
        assert (all_of_it.tolist(), part.tolist()) == ([1, 1, 1, 1], [1, 1])


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 100_000,
        {"weight_map": []},
        {"weight_map": {"x": 1}},
        {"weight_map": {"x": "../a.safetensors"}},
        {"weight_map": {"x": "/etc/a.safetensors"}},
        {"weight_map": {"x": "b/a.safetensors"}},
        {"weight_map": {"x": ".a.safetensors"}},
        {"weight_map": {"x": "..\\a.safetensors"}},
        {"weight_map": {"x": "a.bin"}},
        {"weight_map": {"x": ""}},
        {"weight_map": {"x": "c.safetensors"}},
        {"weight_map": {"x": "a.safetensors", "z": "a.safetensors"}},
        {"weight_map": {"x": "b.safetensors"}},
        {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"}},
    ],
)
def test_an_inconsistent_index_is_refused(index: Any) -> None:
    storage = storage_of(index, a={"x": A}, b={"y": B})
    with pytest.raises(CheckpointException):
        opened(storage)


def test_an_array_in_two_files_is_refused() -> None:
    storage = storage_of({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}, a={"x": A}, b={"x": B, "y": B})
    with pytest.raises(CheckpointException):
        opened(storage)


def test_a_name_that_manifests_refuse_is_refused() -> None:
    storage = MemoryStorage()
    storage.publish("x.safetensors", safetensors.numpy.save({"x" * 2000: A}))
    with pytest.raises(CheckpointException), open_safetensors(storage, "x.safetensors", CancelToken()):
        pass
