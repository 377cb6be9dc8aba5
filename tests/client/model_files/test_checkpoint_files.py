"""A checkpoint as the files of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file

import forged.checkpoint
from forged.checkpoint import DistributedCheckpoint, SaveOptions, ShardedArray, StorageOptions, create_storage
from forged.checkpoint.ports import CancelToken
from forged.client.model_files.checkpoint_files import compare_checkpoint, describe_checkpoint, require_content
from forged.client.model_files.comparison import compare
from forged.client.model_files.pulling import pull
from forged.errors import ForgedError
from forged.registry.messages import ArtifactState
from forged.registry.model import ModelMetadata, ModelVersion
from tests.checkpoint.fixtures.rank_group import SimulatedRank, all_ranks

WEIGHTS = np.arange(100_000, dtype=np.float32)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint."""
    place = tmp_path / "run" / "step-7"
    told = {"metrics": {"loss": 0.5, "flag": True, "text": "x"}}
    forged.checkpoint.save(place, {"model": {"w": WEIGHTS}, "step": 7}, step=7, epoch=1, custom_metadata=told)
    return place


async def save_together(folder: Path, prefix: str, states: list[dict[str, Any]]) -> None:
    """A checkpoint that several ranks save, each with its part."""
    storage = create_storage(StorageOptions("local", {"base_path": str(folder)}))

    async def save(rank: SimulatedRank) -> None:
        options = SaveOptions(prefix, include_rng_state=False)
        await DistributedCheckpoint(rank, storage).save(states[rank.rank], options=options)

    assert await all_ranks(len(states), save) == [None] * len(states)


def damage(place: Path) -> None:
    [file] = place.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_description_names_place_save_size_and_lineage(saved: Path) -> None:
    found = describe_checkpoint(saved, CancelToken())
    assert found.checksum.startswith("forged:")
    assert found.size_bytes == WEIGHTS.nbytes
    assert found.artifact.location == str(saved)
    assert len(found.artifact.save_id) == 8
    assert found.lineage is not None
    assert (found.lineage.step, found.lineage.epoch, found.lineage.metrics) == (7, 1, {"loss": 0.5})
    assert found.lineage.saved_at > 0


def test_damaged_checkpoint_is_refused_unless_it_is_not_verified(saved: Path) -> None:
    checksum = describe_checkpoint(saved, CancelToken()).checksum
    damage(saved)
    with pytest.raises(ForgedError, match="corrupt"):
        describe_checkpoint(saved, CancelToken())
    assert describe_checkpoint(saved, CancelToken(), verify=False).checksum == checksum


def test_untouched_checkpoint_is_sound(saved: Path) -> None:
    checksum = describe_checkpoint(saved, CancelToken()).checksum
    found = compare_checkpoint(str(saved), checksum, CancelToken())
    assert (found.state, found.problem) == (ArtifactState.SOUND, "")
    assert found.bytes_checked >= WEIGHTS.nbytes


def test_changed_byte_is_damage(saved: Path) -> None:
    checksum = describe_checkpoint(saved, CancelToken()).checksum
    damage(saved)
    found = compare_checkpoint(str(saved), checksum, CancelToken())
    assert found.state is ArtifactState.DAMAGED
    assert "corrupt" in found.problem


def test_another_checkpoint_under_the_name_is_damage(saved: Path, tmp_path: Path) -> None:
    checksum = describe_checkpoint(saved, CancelToken()).checksum
    other = tmp_path / "run" / "step-8"
    forged.checkpoint.save(other, {"model": {"w": WEIGHTS + 1}, "step": 7})
    found = compare_checkpoint(str(other), checksum, CancelToken())
    assert found.state is ArtifactState.DAMAGED
    assert "it is another checkpoint" in found.problem
    with pytest.raises(ForgedError, match="another checkpoint was saved there"):
        require_content(str(other), checksum, CancelToken())


def test_deleted_checkpoint_is_missing(saved: Path) -> None:
    checksum = describe_checkpoint(saved, CancelToken()).checksum
    saved.with_name("step-7.metadata.json").unlink()
    assert compare_checkpoint(str(saved), checksum, CancelToken()).state is ArtifactState.MISSING


def test_checkpoint_in_an_object_store_is_named_by_its_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    forged.checkpoint.save("memory://models/step-7", {"w": WEIGHTS})
    found = describe_checkpoint("memory://models/step-7", CancelToken())
    assert found.artifact.location == "memory://models/step-7"
    metadata = ModelMetadata("resnet", "", ModelVersion(1, 0, 0), "", (), (), 0, found.checksum)
    assert compare(metadata, found.artifact, CancelToken()).state is ArtifactState.SOUND
    assert pull(metadata, found.artifact, None, CancelToken()).path == Path("resnet-1.0.0.safetensors")
    missing = replace(found.artifact, location="memory://models/step-8")
    assert compare(metadata, missing, CancelToken()).state is ArtifactState.MISSING


async def test_checkpoint_of_several_ranks_is_one_model(tmp_path: Path) -> None:
    """Its digest covers the parts of all ranks."""
    parts = [ShardedArray(WEIGHTS[start : start + 50_000], WEIGHTS.shape, (start,)) for start in (0, 50_000)]
    await save_together(tmp_path, "sharded", [{"w": part} for part in parts])
    first = describe_checkpoint(tmp_path / "sharded", CancelToken())
    assert first.size_bytes == WEIGHTS.nbytes
    changed = [parts[0], ShardedArray(WEIGHTS[50_000:] + 1, WEIGHTS.shape, (50_000,))]
    await save_together(tmp_path, "changed", [{"w": part} for part in changed])
    assert describe_checkpoint(tmp_path / "changed", CancelToken()).checksum != first.checksum
    metadata = ModelMetadata("resnet", "", ModelVersion(1, 0, 0), "", (), (), 0, first.checksum)
    copied = pull(metadata, first.artifact, tmp_path / "copy.safetensors", CancelToken())
    assert np.array_equal(load_file(copied.path)["w"], WEIGHTS)
