"""The digest of a checkpoint's content."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forged.checkpoint
from forged.checkpoint import Checkpoints, CompressionLevel, ConversionOptions
from forged.checkpoint.format.content_digest import content_digest, tensor_bytes
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.storage.listing import read_manifest
from forged.checkpoint.storage.locations import storage_at

WEIGHTS = np.arange(500_000, dtype=np.float32)


def state(**changes: Any) -> dict[str, Any]:
    return {"model": {"w": WEIGHTS, "b": np.zeros(3)}, "step": 7} | changes


def manifest_at(place: Path) -> Manifest:
    return read_manifest(*storage_at(place))


def digest_of(place: Path, saved: dict[str, Any], **options: Any) -> str:
    forged.checkpoint.save(place, saved, **options)
    return content_digest(manifest_at(place))


def test_digest_is_of_the_content_and_not_of_the_save(tmp_path: Path) -> None:
    first = digest_of(tmp_path / "a", state(), step=7)
    assert len(first) == 64
    assert digest_of(tmp_path / "b", state(), step=8) == first
    assert tensor_bytes(manifest_at(tmp_path / "a")) == WEIGHTS.nbytes + 24


@pytest.mark.parametrize(
    "changed",
    [
        state(model={"w": WEIGHTS + 1, "b": np.zeros(3)}),
        state(model={"w": WEIGHTS.reshape(2, -1), "b": np.zeros(3)}),
        state(model={"w": WEIGHTS.view(np.int32), "b": np.zeros(3)}),
        state(model={"v": WEIGHTS, "b": np.zeros(3)}),
        state(step=8),
        state(more=1),
    ],
)
def test_digest_differs_with_each_change_of_the_content(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert digest_of(tmp_path / "a", state()) != digest_of(tmp_path / "b", changed)


def test_digest_survives_a_move_and_compression(tmp_path: Path) -> None:
    first = digest_of(tmp_path / "a", state())
    forged.checkpoint.convert(tmp_path / "a", tmp_path / "b", ConversionOptions(compression=CompressionLevel.FAST))
    assert content_digest(manifest_at(tmp_path / "b")) == first
    (tmp_path / "moved").mkdir()
    for path in ("a", "a.metadata.json"):
        shutil.move(tmp_path / path, tmp_path / "moved" / path)
    assert content_digest(manifest_at(tmp_path / "moved" / "a")) == first


def test_digest_survives_compaction(tmp_path: Path) -> None:
    changed = WEIGHTS.copy()
    with Checkpoints(tmp_path, every=1, incremental=True) as checkpoints:
        for step in (1, 2, 3):
            changed[step * 100_000] += 1
            checkpoints.save(step, state(model={"w": changed, "b": np.zeros(3)}))
    latest = forged.checkpoint.latest(tmp_path)
    assert latest is not None
    before = manifest_at(tmp_path / latest.prefix)
    assert before.links, "it uses files of earlier checkpoints"
    forged.checkpoint.compact(tmp_path / latest.prefix)
    after = manifest_at(tmp_path / latest.prefix)
    assert not after.links
    assert content_digest(after) == content_digest(before)
