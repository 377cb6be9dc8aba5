"""A checkpoint that is looked at is read no further than one looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.loading.lazy_view import CheckpointView, TensorInfo, view
from forged.checkpoint.model import CompressionLevel, PerRank, ShardedArray
from forged.checkpoint.storage.listing import read_manifest
from forged.checkpoint.storage.local import LocalStorage
from tests.checkpoint.layouts import array_of, bits, small_chunks
from tests.checkpoint.shelves import MemoryStorage
from tests.checkpoint.writer import write_checkpoint

W = np.random.default_rng(0).normal(size=(400, 300)).astype(np.float32)


def saved(storage: Any, **how: Any) -> CheckpointView:
    states = [
        {"w": W, "step": 3, "b": array_of(1, "bfloat16", (4, 5)), "s": np.array(2.5), "rng": PerRank(np.full(2, rank))}
        for rank in range(2)
    ]
    return CheckpointView(storage, write_checkpoint(storage, "a", states, **how), rank=1)


def saved_view(storage: MemoryStorage) -> CheckpointView:
    """What was saved there before."""
    return CheckpointView(storage, read_manifest(storage, "a"), rank=0)


class TestLooking:
    def test_nothing_is_read_to_tell_what_there_is(self) -> None:
        storage = MemoryStorage()
        seen = saved(storage)
        assert list(seen) == ["w", "b", "s", "rng"]
        assert len(seen) == 4
        assert "w" in seen
        assert "v" not in seen
        assert seen.info("w") == TensorInfo("w", np.dtype(np.float32), (400, 300), None)
        assert seen.info("w").nbytes == W.nbytes
        assert seen.info("rng").rank == 1
        assert seen.outline()["step"] == 3
        assert seen.outline()["b"].shape == (4, 5)
        assert storage.reads == []

    def test_a_tensor_is_read_when_it_is_asked_for(self) -> None:
        storage = MemoryStorage()
        seen = saved(storage)
        assert bits(seen["w"]) == bits(W)
        assert storage.bytes_read == W.nbytes
        assert seen["rng"].tolist() == [1, 1]
        assert bits(seen["s"]) == bits(np.array(2.5))

    def test_a_rank_that_was_not_there_is_refused(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": W}])
        with pytest.raises(CheckpointException):
            CheckpointView(storage, manifest, rank=1)

    def test_a_name_that_nobody_has_is_a_key_error(self) -> None:
        with pytest.raises(KeyError):
            saved(MemoryStorage())["v"]

    def test_a_box_reads_the_chunks_that_it_lies_in(self) -> None:
        storage = MemoryStorage()
        seen = saved(storage)
        assert bits(seen.box("w", (3, 5), (7, 11))) == bits(W[3:10, 5:16])
        assert storage.bytes_read <= 1 << 17
        assert bits(seen.box("s", (), ())) == bits(np.array(2.5))
        assert seen.box("w", (400, 0), (0, 300)).shape == (0, 300)

    @pytest.mark.parametrize("box", [((0,), (1,)), ((0, 0), (401, 1)), ((-1, 0), (1, 1)), ((0, 0), (-1, 1))])
    def test_a_box_outside_of_the_tensor_is_refused(self, box: Any) -> None:
        with pytest.raises(CheckpointException) as caught:
            saved(MemoryStorage()).box("w", *box)
        assert caught.value.code == "checkpoint_box_invalid"


class TestMapped:
    @pytest.fixture
    def storage(self, tmp_path: Path) -> LocalStorage:
        return LocalStorage(tmp_path)

    def test_a_mapped_array_is_the_file_itself_and_cannot_be_written(self, storage: LocalStorage) -> None:
        with saved(storage) as seen:
            mapped = seen.mapped("w")
            assert bits(mapped) == bits(W)
            assert not mapped.flags.owndata
            assert not mapped.flags.writeable
            assert bits(seen.mapped("b")) == bits(array_of(1, "bfloat16", (4, 5)))
        assert bits(mapped) == bits(W), "it outlives the view"

    def test_it_is_verified_when_it_is_first_handed_out(self) -> None:
        storage = MemoryStorage()
        seen = saved(storage)
        part = seen.manifest.parts[0]
        storage.damage(part.file, part.data_offset + 100)
        with pytest.raises(CheckpointException) as caught:
            seen.mapped("w")
        assert caught.value.code == "checkpoint_chunk_corrupt"

    def test_a_copy_is_handed_out_where_one_is_bad(self) -> None:
        storage = MemoryStorage()
        seen = saved(storage, copies=2)
        part = seen.manifest.parts[0]
        storage.damage(part.file, part.data_offset + 100)
        for _ in range(2):
            assert bits(seen.mapped("w")) == bits(W)
        del storage.files[part.file]
        assert bits(saved_view(storage).mapped("w")) == bits(W)

    def test_what_cannot_be_mapped_is_read(self) -> None:
        packed = saved(MemoryStorage(), level=CompressionLevel.FAST)
        assert bits(packed.mapped("w")) == bits(W)
        assert bits(saved(MemoryStorage(maps=False)).mapped("w")) == bits(W)
        storage = MemoryStorage()
        halves = [{"w": ShardedArray(W[at : at + 200], W.shape, (at, 0)), "e": np.zeros((0, 2))} for at in (0, 200)]
        seen = CheckpointView(storage, write_checkpoint(storage, "a", halves))
        assert bits(seen.mapped("w")) == bits(W)
        assert seen.mapped("e").shape == (0, 2)

    def test_a_file_that_is_short_is_not_mapped_but_an_error(self, storage: LocalStorage, tmp_path: Path) -> None:
        with saved(storage) as seen:
            file = tmp_path / seen.manifest.parts[0].file
            file.write_bytes(file.read_bytes()[: -W.nbytes])
            with pytest.raises(CheckpointException):
                seen.mapped("w")


def test_a_view_opens_a_path(tmp_path: Path) -> None:
    saved(LocalStorage(tmp_path))
    with view(tmp_path / "a", rank=0) as seen:
        assert seen["rng"].tolist() == [0, 0]


def test_boxes_of_small_chunks_are_right_wherever_they_are_cut() -> None:
    storage = MemoryStorage()
    with small_chunks(64, 256, 32):
        seen = saved(storage)
        for top in range(0, 400, 37):
            for left in range(0, 300, 41):
                assert bits(seen.box("w", (top, left), (3, 9))[:3]) == bits(W[top : top + 3, left : left + 9])
