"""A view reads only what is accessed."""

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
from tests.checkpoint.fixtures.layouts import array_of, bits, small_chunks
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.plain_writer import write_checkpoint

W = np.random.default_rng(0).normal(size=(400, 300)).astype(np.float32)


def saved(storage: Any, **how: Any) -> CheckpointView:
    states = [
        {"w": W, "step": 3, "b": array_of(1, "bfloat16", (4, 5)), "s": np.array(2.5), "rng": PerRank(np.full(2, rank))}
        for rank in range(2)
    ]
    return CheckpointView(storage, write_checkpoint(storage, "a", states, **how), rank=1)


def saved_view(storage: MemoryStorage) -> CheckpointView:
    """A view of the checkpoint saved before."""
    return CheckpointView(storage, read_manifest(storage, "a"), rank=0)


class TestReading:
    def test_names_and_infos_need_no_read(self) -> None:
        storage = MemoryStorage()
        opened = saved(storage)
        assert list(opened) == ["w", "b", "s", "rng"]
        assert len(opened) == 4
        assert "w" in opened
        assert "v" not in opened
        assert opened.info("w") == TensorInfo("w", np.dtype(np.float32), (400, 300), None)
        assert opened.info("w").nbytes == W.nbytes
        assert opened.info("rng").rank == 1
        assert storage.reads == []

    def test_a_tensor_is_read_on_access(self) -> None:
        storage = MemoryStorage()
        opened = saved(storage)
        assert bits(opened["w"]) == bits(W)
        assert storage.bytes_read == W.nbytes
        assert opened["rng"].tolist() == [1, 1]
        assert bits(opened["s"]) == bits(np.array(2.5))

    def test_a_rank_beyond_the_saved_world_is_refused(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": W}])
        with pytest.raises(CheckpointException):
            CheckpointView(storage, manifest, rank=1)

    def test_an_unknown_name_is_a_key_error(self) -> None:
        with pytest.raises(KeyError):
            saved(MemoryStorage())["v"]

    def test_a_box_reads_only_the_chunks_it_touches(self) -> None:
        storage = MemoryStorage()
        opened = saved(storage)
        assert bits(opened.box("w", (3, 5), (7, 11))) == bits(W[3:10, 5:16])
        assert storage.bytes_read <= 1 << 17
        assert bits(opened.box("s", (), ())) == bits(np.array(2.5))
        assert opened.box("w", (400, 0), (0, 300)).shape == (0, 300)

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
        with saved(storage) as opened:
            mapped = opened.mapped("w")
            assert bits(mapped) == bits(W)
            assert not mapped.flags.owndata
            assert not mapped.flags.writeable
            assert bits(opened.mapped("b")) == bits(array_of(1, "bfloat16", (4, 5)))
        assert bits(mapped) == bits(W), "a mapped array stays valid after its view is closed"

    def test_a_mapped_array_is_verified_first(self) -> None:
        storage = MemoryStorage()
        opened = saved(storage)
        part = opened.manifest.parts[0]
        storage.damage(part.file, part.data_offset + 100)
        with pytest.raises(CheckpointException) as caught:
            opened.mapped("w")
        assert caught.value.code == "checkpoint_chunk_corrupt"

    def test_another_copy_is_mapped_when_one_is_corrupt(self) -> None:
        storage = MemoryStorage()
        opened = saved(storage, copies=2)
        part = opened.manifest.parts[0]
        storage.damage(part.file, part.data_offset + 100)
        for _ in range(2):
            assert bits(opened.mapped("w")) == bits(W)
        del storage.files[part.file]
        assert bits(saved_view(storage).mapped("w")) == bits(W)

    def test_a_tensor_that_cannot_be_mapped_is_read(self) -> None:
        packed = saved(MemoryStorage(), level=CompressionLevel.FAST)
        assert bits(packed.mapped("w")) == bits(W)
        assert bits(saved(MemoryStorage(maps=False)).mapped("w")) == bits(W)
        storage = MemoryStorage()
        halves = [{"w": ShardedArray(W[at : at + 200], W.shape, (at, 0)), "e": np.zeros((0, 2))} for at in (0, 200)]
        opened = CheckpointView(storage, write_checkpoint(storage, "a", halves))
        assert bits(opened.mapped("w")) == bits(W)
        assert opened.mapped("e").shape == (0, 2)

    def test_a_truncated_file_is_an_error(self, storage: LocalStorage, tmp_path: Path) -> None:
        with saved(storage) as opened:
            file = tmp_path / opened.manifest.parts[0].file
            file.write_bytes(file.read_bytes()[: -W.nbytes])
            with pytest.raises(CheckpointException):
                opened.mapped("w")


def test_a_view_opens_a_path(tmp_path: Path) -> None:
    saved(LocalStorage(tmp_path))
    with view(tmp_path / "a", rank=0) as opened:
        assert opened["rng"].tolist() == [0, 0]


def test_boxes_across_chunk_edges_are_right() -> None:
    storage = MemoryStorage()
    with small_chunks(64, 256, 32):
        opened = saved(storage)
        for top in range(0, 400, 37):
            for left in range(0, 300, 41):
                assert bits(opened.box("w", (top, left), (3, 9))[:3]) == bits(W[top : top + 3, left : left + 9])
