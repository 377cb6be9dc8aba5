from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forged.checkpoint.blocking import BlockingCheckpoint
from forged.checkpoint.checkpoint import DistributedCheckpoint
from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.model import CompressionLevel, SaveOptions
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.storage.local import LocalStorage
from forged.checkpoint.verification import repairing
from forged.checkpoint.verification.repairing import repair

ROWS = np.random.default_rng(3).random((8, 1 << 17))
"""Several chunks."""


def saved(folder: Path, *names: str, level: CompressionLevel = CompressionLevel.NONE) -> Path:
    """Save the rows under these names; returns the file of the first one."""
    with BlockingCheckpoint(DistributedCheckpoint(None, LocalStorage(folder))) as saves:
        for name in names:
            saves.save({"w": ROWS}, options=SaveOptions(name, compression_level=level, include_rng_state=False))
    (part,) = (folder / names[0]).iterdir()
    return part


def damage(part: Path, *places: int) -> bytes:
    """Change bytes of a file; returns what it had."""
    before = part.read_bytes()
    data = bytearray(before)
    for place in places:
        data[place] ^= 1
    part.write_bytes(data)
    return before


def test_corrupt_chunks_of_several_places_are_replaced(tmp_path: Path) -> None:
    part = saved(tmp_path, "a", "b")
    before = damage(part, -1, -3_000_000, -6_000_000)
    found = repair(LocalStorage(tmp_path), "a", CancelToken())
    assert len(found) == 3
    assert {one.tensor for one in found} == {"model/w"}
    assert part.read_bytes() == before
    assert repair(LocalStorage(tmp_path), "a", CancelToken()) == []


def test_file_with_one_chunk_without_a_copy_is_not_changed(tmp_path: Path) -> None:
    part, other = saved(tmp_path, "a", "b"), tmp_path / "b"
    damage(next(other.iterdir()), -1)
    damage(part, -1, -3_000_000)
    now = part.read_bytes()
    with pytest.raises(CheckpointException, match="w"):
        repair(LocalStorage(tmp_path), "a", CancelToken())
    assert part.read_bytes() == now
    assert list(part.parent.iterdir()) == [part]


def test_compressed_files_are_left_alone(tmp_path: Path) -> None:
    part = saved(tmp_path, "a", "b", level=CompressionLevel.FAST)
    damage(part, -1)
    now = part.read_bytes()
    assert repair(LocalStorage(tmp_path), "a", CancelToken()) == []
    assert part.read_bytes() == now


def test_interrupted_repair_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = saved(tmp_path, "a", "b")
    damage(part, -1)
    now = part.read_bytes()

    def fail(storage: LocalStorage, name: str, to: str) -> None:
        raise CheckpointException("no space", code="checkpoint_storage_full")

    monkeypatch.setattr(LocalStorage, "move", fail)
    with pytest.raises(CheckpointException, match="no space"):
        repair(LocalStorage(tmp_path), "a", CancelToken())
    assert part.read_bytes() == now
    assert list(part.parent.iterdir()) == [part]


def test_too_much_damage_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = saved(tmp_path, "a", "b")
    damage(part, -1)
    monkeypatch.setattr(repairing, "CORRUPT_BYTES_MAX", 1)
    with pytest.raises(CheckpointException):
        repair(LocalStorage(tmp_path), "a", CancelToken())
