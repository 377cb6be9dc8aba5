from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.format.consolidated import files_of, indexes_of, names_of, single_file_of
from forged.checkpoint.format.manifest import Tensors

SAVE_ID = "0a1b2c3d"


def tensors_of(*names: str, count: int = 4, ranks: dict[int, int] | None = None) -> Tensors:
    """Tensors with these names, of `count` bytes each."""
    return Tensors(list(names), ["uint8"] * len(names), [(count,)] * len(names), ranks or {})


def test_a_model_is_one_file_with_its_own_names() -> None:
    (file,) = files_of(
        tensors_of("model/encoder/weight", "model/layers.0.bias", "model/blocks/#3/w"), SAVE_ID, is_packed=False
    )
    assert file.name == f"{SAVE_ID}.model.safetensors"
    assert file.names == ["encoder.weight", "layers.0.bias", "blocks.3.w"]
    assert [*indexes_of([file])] == ["model.safetensors.index.json"]


def test_optimizer_rank_and_other_tensors_have_separate_files() -> None:
    tensors = tensors_of("model/w", "optimizer/m/w", "step", "rng/state", "rng/state", ranks={3: 0, 4: 1})
    found = {file.name: (file.tensors, file.names) for file in files_of(tensors, SAVE_ID, is_packed=False)}
    assert found == {
        f"{SAVE_ID}.model.safetensors": ([0], ["w"]),
        f"{SAVE_ID}.optimizer.safetensors": ([1], ["m.w"]),
        f"{SAVE_ID}.state.safetensors": ([2], ["step"]),
        f"{SAVE_ID}.rank-00000.safetensors": ([3], ["rng.state"]),
        f"{SAVE_ID}.rank-00001.safetensors": ([4], ["rng.state"]),
    }


def test_a_state_without_a_model_section_is_the_model() -> None:
    (file,) = files_of(tensors_of("encoder/weight", "head"), SAVE_ID, is_packed=False)
    assert (file.name, file.names) == (f"{SAVE_ID}.model.safetensors", ["encoder.weight", "head"])


def test_a_model_of_one_array_has_a_name() -> None:
    (file,) = files_of(tensors_of("model"), SAVE_ID, is_packed=False)
    assert file.names == ["model"]


def test_large_models_have_several_files_and_an_index() -> None:
    tensors = tensors_of("model/a", "model/b", "model/c", "optimizer/a")
    files = files_of(tensors, SAVE_ID, is_packed=False, file_bytes_max=8)
    assert [(file.name, file.tensors, file.size) for file in files] == [
        (f"{SAVE_ID}.model-00001-of-00002.safetensors", [0, 1], 8),
        (f"{SAVE_ID}.model-00002-of-00002.safetensors", [2], 4),
        (f"{SAVE_ID}.optimizer.safetensors", [3], 4),
    ]
    (name,) = indexes = indexes_of(files)
    assert name == "model.safetensors.index.json"
    assert json.loads(indexes[name]) == {
        "metadata": {"total_size": 12},
        "weight_map": {
            "a": f"{SAVE_ID}.model-00001-of-00002.safetensors",
            "b": f"{SAVE_ID}.model-00001-of-00002.safetensors",
            "c": f"{SAVE_ID}.model-00002-of-00002.safetensors",
        },
    }


def test_a_tensor_above_the_limit_has_its_own_file() -> None:
    files = files_of(tensors_of("model/a", "model/b", "model/c"), SAVE_ID, is_packed=False, file_bytes_max=3)
    assert [file.tensors for file in files] == [[0], [1], [2]]


def test_compressed_files_have_no_index() -> None:
    files = files_of(tensors_of("model/a", "model/b"), SAVE_ID, is_packed=True, file_bytes_max=4)
    assert [file.name for file in files] == [
        f"{SAVE_ID}.model-00001-of-00002.packed",
        f"{SAVE_ID}.model-00002-of-00002.packed",
    ]
    assert indexes_of(files) == {}


def test_no_tensors_give_no_files() -> None:
    assert files_of(tensors_of(), SAVE_ID, is_packed=False) == []


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_byte_is_refused(limit: int) -> None:
    with pytest.raises(CheckpointException):
        files_of(tensors_of("x"), SAVE_ID, is_packed=False, file_bytes_max=limit)


def test_equal_names_are_made_unique() -> None:
    tensors = tensors_of("model/a/b", "model/a.b", "model/a~1b", "model/a/#0", "model/a/~20", "model/~01")
    assert names_of(tensors, range(6), "model") == ["a.b", "a.b (2)", "a/b", "a.0", "a.#0", "~1"]


def test_the_metadata_key_is_no_tensor_name() -> None:
    """Otherwise the file would rename the tensor, and the index would name it wrongly."""
    assert names_of(tensors_of("model/__metadata__"), [0], "model") == ["__metadata__ (2)"]


def test_a_single_file_has_all_tensors_and_names_the_rank_of_per_rank_ones() -> None:
    tensors = tensors_of("model/w", "optimizer/w", "rng/x", "rng/x", "state/w", ranks={2: 0, 3: 1})
    file = single_file_of(tensors, "one.safetensors")
    assert file.tensors == [0, 1, 2, 3, 4]
    assert file.names == ["w", "optimizer.w", "rng.x@0", "rng.x@1", "state.w"]
    assert file.size == 20


KEYS = st.lists(
    st.sampled_from(["model", "optimizer", "state", "a", "b.c", "#0", "~2x", "~01", "a (2)"]), min_size=1, max_size=3
)


@given(
    st.lists(KEYS.map("/".join), unique=True, max_size=12),
    st.integers(1, 40),
    st.data(),
)
def test_every_tensor_is_in_one_file_under_a_unique_name(names: list[str], limit: int, data: st.DataObject) -> None:
    ranks = {number: data.draw(st.integers(0, 2)) for number in range(len(names)) if data.draw(st.booleans())}
    tensors = tensors_of(*names, ranks=ranks)
    files = files_of(tensors, SAVE_ID, is_packed=False, file_bytes_max=limit)
    assert sorted(number for file in files for number in file.tensors) == list(range(len(names)))
    assert len({file.name for file in files}) == len(files)
    sections: dict[str, list[str]] = {}
    for file in files:
        sections.setdefault(file.section, []).extend(file.names)
        assert file.size == 4 * len(file.tensors)
        assert file.size <= limit or len(file.tensors) == 1
    assert all(len(set(some)) == len(some) for some in sections.values())
    whole = single_file_of(tensors, "x")
    assert len(set(whole.names)) == len(names)
