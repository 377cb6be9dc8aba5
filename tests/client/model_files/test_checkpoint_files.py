"""A checkpoint as the files of a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import forged.checkpoint
from forged.checkpoint.ports import CancelToken
from forged.client.model_files.checkpoint_files import compare_checkpoint, describe_checkpoint, require_content
from forged.errors import ForgedError
from forged.registry.messages import ArtifactState

WEIGHTS = np.arange(100_000, dtype=np.float32)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint."""
    place = tmp_path / "run" / "step-7"
    told = {"metrics": {"loss": 0.5, "flag": True, "text": "x"}}
    forged.checkpoint.save(place, {"model": {"w": WEIGHTS}, "step": 7}, step=7, epoch=1, custom_metadata=told)
    return place


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
