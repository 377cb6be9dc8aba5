from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import safetensors.numpy

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.format.consolidated import ConsolidatedFile
from forged.checkpoint.format.manifest import Manifest, Part, decode, encode
from forged.checkpoint.loading.fetching import fetch
from forged.checkpoint.loading.manifest_index import Index
from forged.checkpoint.model import CheckpointFormat, CompressionLevel, PerRank, ShardedArray
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.saving.files.assembly import SavedTensors
from forged.checkpoint.saving.files.consolidation import (
    planned_files,
    publish_indexes,
    withdraw_indexes,
    write_file,
    write_indexes,
)
from tests.checkpoint.fixtures.faulty_storage import FaultyStorage, broken
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.plain_writer import write_checkpoint

Array = np.ndarray[Any, Any]
SAVE_ID = "0123abcd"
ROWS = 1200
NEVER = CancelToken()


def whole_state() -> dict[str, Array]:
    """Tensors by name."""
    draw = np.random.default_rng(5)
    return {
        "model/w": draw.standard_normal((ROWS, 300)).astype(np.float32),
        "model/half": draw.standard_normal((ROWS, 7)).astype(ml_dtypes.bfloat16),
        "model/empty": np.empty((0, 3), np.int32),
        "optimizer/m": draw.standard_normal((ROWS, 300)).astype(np.float32),
        "step": np.array(17),
    }


def saved(ranks: int, level: CompressionLevel = CompressionLevel.NONE) -> tuple[MemoryStorage, Manifest]:
    """A checkpoint of so many ranks, each of which has its rows of the matrices."""
    state, states = whole_state(), []
    for rank in range(ranks):
        low, high = rank * ROWS // ranks, (rank + 1) * ROWS // ranks

        def part(name: str, low: int = low, high: int = high) -> ShardedArray:
            return ShardedArray(state[name][low:high], state[name].shape, (low, 0))

        states.append(
            {
                "model": {"w": part("model/w"), "half": part("model/half"), "empty": state["model/empty"]},
                "optimizer": {"m": part("optimizer/m")},
                "step": state["step"],
                "rng": PerRank(np.full(5, rank)),
            }
        )
    storage = MemoryStorage()
    return storage, write_checkpoint(storage, "a", states, level=level)


def write_files(
    storage: MemoryStorage,
    source: Manifest,
    files: list[ConsolidatedFile],
    level: CompressionLevel,
    token: CancelToken = NEVER,
) -> list[Part]:
    tensors = SavedTensors(storage, source, token)
    return [write_file(storage, "a", file, tensors, level, 0, token) for file in files]


def made(
    storage: MemoryStorage,
    source: Manifest,
    layout: CheckpointFormat,
    level: CompressionLevel = CompressionLevel.NONE,
    file_bytes_max: int = 1 << 20,
) -> Manifest:
    """The checkpoint of whole tensors made from the parts."""
    files = planned_files(source.tensors, "a", SAVE_ID, layout, level, file_bytes_max)
    parts = write_files(storage, source, files, level)
    extra = write_indexes(storage, "a", SAVE_ID, files)
    publish_indexes(storage, "a", SAVE_ID, files)
    manifest = msgspec.structs.replace(source, parts=parts, layout=layout, compression=level, extra_files=extra)
    return decode(encode(manifest), manifest.path)


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
@pytest.mark.parametrize("layout", [CheckpointFormat.SINGLE_FILE, CheckpointFormat.CONSOLIDATED])
@pytest.mark.parametrize("ranks", [1, 3])
def test_files_of_whole_tensors_have_the_saved_tensors(
    ranks: int, layout: CheckpointFormat, level: CompressionLevel
) -> None:
    storage, source = saved(ranks)
    manifest = made(storage, source, layout, level)
    state = whole_state()
    tensors = manifest.tensors
    found = fetch(storage, Index(manifest), range(len(tensors.names)), CancelToken()).arrays
    for number, name in enumerate(tensors.names):
        expected = np.full(5, tensors.ranks[number]) if number in tensors.ranks else state[name]
        assert (found[number].dtype, found[number].shape) == (expected.dtype, expected.shape)
        assert found[number].tobytes() == expected.tobytes()
    for part in manifest.parts:
        assert len(storage.files[part.file]) == part.size
    if layout is CheckpointFormat.SINGLE_FILE:
        assert len(manifest.parts) == 1


def test_a_file_that_is_too_large_to_be_kept_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, source = saved(2)
    kept = made(storage, source, CheckpointFormat.CONSOLIDATED, CompressionLevel.FAST)
    before = {part.file: storage.files.pop(part.file) for part in kept.parts}
    monkeypatch.setattr("forged.checkpoint.saving.files.consolidation.KEPT_BYTES_MAX", 0)
    assert made(storage, source, CheckpointFormat.CONSOLIDATED, CompressionLevel.FAST).parts == kept.parts
    assert {file: storage.files[file] for file in before} == before


def test_compressed_parts_become_plain_files() -> None:
    storage, source = saved(2, CompressionLevel.FAST)
    manifest = made(storage, source, CheckpointFormat.CONSOLIDATED, file_bytes_max=1 << 30)
    found = safetensors.numpy.load(storage.files[f"a/{SAVE_ID}.optimizer.safetensors"])
    np.testing.assert_array_equal(found["m"], whole_state()["optimizer/m"])
    assert all(part.stored is None for part in manifest.parts)


@pytest.mark.parametrize(("file_bytes_max", "files"), [(1 << 30, 1), (1 << 17, 2)])
def test_other_tools_find_all_of_a_model_by_its_index(file_bytes_max: int, files: int) -> None:
    storage, source = saved(3)
    manifest = made(storage, source, CheckpointFormat.CONSOLIDATED, file_bytes_max=file_bytes_max)
    (index,) = manifest.extra_files
    assert index == "a/model.safetensors.index.json"
    said = json.loads(storage.files[index])
    assert set(said["weight_map"]) == {"w", "half", "empty"}
    assert len(set(said["weight_map"].values())) == files
    assert len(storage.files[index]) == manifest.extra_files[index]
    state = whole_state()
    for name, file in said["weight_map"].items():
        entries = dict(safetensors.deserialize(storage.files[f"a/{file}"]))  # type: ignore[no-untyped-call]
        assert bytes(entries[name]["data"]) == state[f"model/{name}"].tobytes()


def test_transformers_finds_the_format_that_it_looks_for() -> None:
    storage, source = saved(1)
    made(storage, source, CheckpointFormat.CONSOLIDATED, file_bytes_max=1 << 30)
    (model,) = (name for name in storage.files if name.endswith(".model.safetensors"))
    header = storage.files[model]
    length = int.from_bytes(header[:8], "little")
    assert json.loads(header[8 : 8 + length])["__metadata__"]["format"] == "pt"


def test_index_replaces_that_of_another_save_and_is_withdrawn_by_its_own() -> None:
    storage, source = saved(1)
    shown = "a/model.safetensors.index.json"
    mine, foreign = (
        planned_files(source.tensors, "a", save_id, CheckpointFormat.CONSOLIDATED, CompressionLevel.NONE)
        for save_id in (SAVE_ID, "fedcba98")
    )
    before = set(storage.files)
    write_indexes(storage, "a", SAVE_ID, mine)
    assert set(storage.files) - before == {f"a/{SAVE_ID}.model.safetensors.index.json"}
    publish_indexes(storage, "a", SAVE_ID, mine)
    assert set(storage.files) - before == {shown}
    write_indexes(storage, "a", "fedcba98", foreign)
    publish_indexes(storage, "a", "fedcba98", foreign)
    withdraw_indexes(storage, "a", SAVE_ID, mine)
    assert b"fedcba98.model.safetensors" in storage.files[shown]
    withdraw_indexes(storage, "a", "fedcba98", foreign)
    assert set(storage.files) == before


@pytest.mark.parametrize("found", [b"", b"{}", b'{"weight_map": {"w": "model-00001-of-00002.safetensors"}}'])
def test_index_of_a_foreign_model_is_not_replaced(found: bytes) -> None:
    storage, source = saved(1)
    storage.files["a/model.safetensors.index.json"] = found
    before = dict(storage.files)
    files = planned_files(source.tensors, "a", SAVE_ID, CheckpointFormat.CONSOLIDATED, CompressionLevel.NONE)
    with pytest.raises(CheckpointException) as caught:
        write_indexes(storage, "a", SAVE_ID, files)
    assert caught.value.code == "checkpoint_index_foreign"
    assert storage.files == before


def test_an_index_that_cannot_be_written_leaves_nothing() -> None:
    storage, source = saved(1)
    before = set(storage.files)
    files = planned_files(source.tensors, "a", SAVE_ID, CheckpointFormat.CONSOLIDATED, CompressionLevel.NONE)

    def fault(number: int, what: str, done: bool) -> None:
        if done and what == "publish":
            raise broken()

    with pytest.raises(CheckpointException):
        write_indexes(FaultyStorage(storage, fault), "a", SAVE_ID, files)
    assert set(storage.files) == before


def test_a_layout_of_parts_has_no_files_of_whole_tensors() -> None:
    _, source = saved(1)
    with pytest.raises(CheckpointException):
        planned_files(source.tensors, "a", SAVE_ID, CheckpointFormat.MULTI_SHARD, CompressionLevel.NONE)


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
def test_a_part_that_is_damaged_is_named_and_nothing_is_made_of_it(level: CompressionLevel) -> None:
    storage, source = saved(2)
    before = set(storage.files)
    bad = source.parts[1]
    storage.damage(bad.file, bad.size - 1)
    files = planned_files(source.tensors, "a", SAVE_ID, CheckpointFormat.SINGLE_FILE, level)
    with pytest.raises(CheckpointException) as caught:
        write_files(storage, source, files, level)
    assert caught.value.checkpoint_path == bad.file
    assert set(storage.files) == before


def test_cancelled_token_stops_writing() -> None:
    storage, source = saved(2)
    token = CancelToken()
    token.cancel()
    files = planned_files(source.tensors, "a", SAVE_ID, CheckpointFormat.SINGLE_FILE, CompressionLevel.NONE)
    with pytest.raises(CheckpointException) as caught:
        write_files(storage, source, files, CompressionLevel.NONE, token)
    assert caught.value.code == "checkpoint_cancelled"
