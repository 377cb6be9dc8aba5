"""A corrupt chunk is replaced by the same bytes from another copy, or is an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from forged.checkpoint.errors import CheckpointException, storage_error
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.loading.loader import Loaded, load_state
from forged.checkpoint.loading.repair import MANIFESTS_SEARCHED_MAX
from forged.checkpoint.model import CompressionLevel, PerRank, RepairedChunk, ShardedArray
from tests.checkpoint.fixtures.layouts import small_chunks
from tests.checkpoint.fixtures.memory_storage import MemoryReader, MemoryStorage
from tests.checkpoint.fixtures.plain_writer import write_checkpoint

W = np.random.default_rng(0).integers(0, 255, 400_000, np.uint8)
CHUNK = 1 << 17


def damage_chunk(storage: MemoryStorage, manifest: Manifest, part: int, chunk: int) -> None:
    storage.damage(manifest.parts[part].file, manifest.parts[part].data_offset + chunk * CHUNK + 17)


def load(storage: MemoryStorage, manifest: Manifest, *other_manifests: Manifest, into: Any = None) -> Loaded:
    def newest_first() -> Iterator[Manifest]:
        return iter(other_manifests)

    return load_state(storage, manifest, into, rank=0, world_size=manifest.world_size, other_manifests=newest_first)


class TestSameCheckpoint:
    def test_another_ranks_copy_is_used_and_reported(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": W}, {"w": W}], copies=2)
        damage_chunk(storage, manifest, 0, 2)
        loaded = load(storage, manifest)
        assert loaded.state["w"].tobytes() == W.tobytes()
        assert loaded.repaired == (RepairedChunk("w", 0, manifest.parts[0].file, 2, manifest.parts[1].file),)

    def test_given_arrays_are_repaired_too(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": W}, {"w": W}], copies=2)
        damage_chunk(storage, manifest, 0, 0)
        damage_chunk(storage, manifest, 0, 3)
        into = {"w": np.zeros_like(W)}
        assert [one.chunk for one in load(storage, manifest, into=into).repaired] == [0, 3]
        assert into["w"].tobytes() == W.tobytes()

    def test_two_copies_with_different_corrupt_chunks_make_one_good_tensor(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": W}, {"w": W}], copies=2)
        damage_chunk(storage, manifest, 0, 1)
        damage_chunk(storage, manifest, 1, 2)
        assert load(storage, manifest).state["w"].tobytes() == W.tobytes()

    def test_a_chunk_whose_copies_are_all_corrupt_is_an_error(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": W}, {"w": W}], copies=2)
        damage_chunk(storage, manifest, 0, 1)
        damage_chunk(storage, manifest, 1, 1)
        with pytest.raises(CheckpointException, match="chunk 1 of w, written by rank 0"):
            load(storage, manifest)

    def test_a_missing_part_is_read_from_its_copy(self) -> None:
        storage = MemoryStorage()
        state = {"w": W, "small": [np.arange(n) for n in range(5)]}
        manifest = write_checkpoint(storage, "a", [state, state], copies=2)
        del storage.files[manifest.parts[0].file]
        loaded = load(storage, manifest)
        assert loaded.state["w"].tobytes() == W.tobytes()
        assert [one.tolist() for one in loaded.state["small"]] == [list(range(n)) for n in range(5)]

    def test_an_overlapping_part_of_another_rank_is_a_copy(self) -> None:
        storage = MemoryStorage()
        states = [
            {"w": ShardedArray(W[:300_000], W.shape, (0,))},
            {"w": ShardedArray(W[100_000:], W.shape, (100_000,))},
        ]
        manifest = write_checkpoint(storage, "a", states)
        damage_chunk(storage, manifest, 0, 1)
        loaded = load_state(storage, manifest, {"w": np.zeros_like(W)})
        assert loaded.state["w"].tobytes() == W.tobytes()
        assert loaded.repaired[0].source == manifest.parts[1].file

    @pytest.mark.parametrize("level", [CompressionLevel.FAST, CompressionLevel.BALANCED])
    def test_a_compressed_chunk_is_repaired(self, level: CompressionLevel) -> None:
        storage = MemoryStorage()
        w = np.arange(100_000, dtype=np.float32)
        manifest = write_checkpoint(storage, "a", [{"w": w}, {"w": w}], copies=2, level=level)
        part = manifest.parts[0]
        assert part.stored is not None
        assert part.stored[1] > 0
        for offset in range(part.stored[0], part.stored[0] + part.stored[1], 97):
            storage.damage(part.file, offset, 0xFF)
        loaded = load(storage, manifest)
        assert loaded.state["w"].tobytes() == w.tobytes()
        assert [one.chunk for one in loaded.repaired] == [1]

    def test_a_copy_is_read_when_the_disk_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": W}, {"w": W}], copies=2)
        plain = MemoryReader.read_into

        def fail(self: MemoryReader, offset: int, *rooms: memoryview) -> None:
            if self.name == manifest.parts[0].file:
                raise storage_error("the disk fails", self.name, retryable=True)
            plain(self, offset, *rooms)

        monkeypatch.setattr(MemoryReader, "read_into", fail)
        assert load(storage, manifest).state["w"].tobytes() == W.tobytes()


class TestOtherCheckpoints:
    def test_a_chunk_with_the_same_hash_is_taken_from_an_older_checkpoint(self) -> None:
        storage = MemoryStorage()
        old = write_checkpoint(storage, "old", [{"x": np.arange(3), "w": W}])
        new = write_checkpoint(storage, "new", [{"w": W}])
        damage_chunk(storage, new, 0, 2)
        loaded = load(storage, new, new, old)
        assert loaded.state["w"].tobytes() == W.tobytes()
        assert loaded.repaired == (RepairedChunk("w", 0, new.parts[0].file, 2, old.parts[0].file),)

    def test_a_checkpoint_with_other_values_is_not_read(self) -> None:
        storage = MemoryStorage()
        old = write_checkpoint(storage, "old", [{"w": W + 1}])
        new = write_checkpoint(storage, "new", [{"w": W}])
        damage_chunk(storage, new, 0, 2)
        with pytest.raises(CheckpointException, match="chunk 2 of w"):
            load(storage, new, old)
        assert old.parts[0].file not in {name for name, _, _ in storage.reads}

    @pytest.mark.parametrize("other", [{"v": W}, {"w": W.reshape(2, -1)}, {"w": W.view(np.int8)}])
    def test_a_tensor_of_another_name_shape_or_type_is_not_used(self, other: dict[str, Any]) -> None:
        storage = MemoryStorage()
        old = write_checkpoint(storage, "old", [other])
        new = write_checkpoint(storage, "new", [{"w": W}])
        damage_chunk(storage, new, 0, 0)
        with pytest.raises(CheckpointException):
            load(storage, new, old)

    def test_a_per_rank_tensor_is_never_taken_from_another_rank(self) -> None:
        storage = MemoryStorage()
        old = write_checkpoint(storage, "old", [{"w": PerRank(W + 1)}, {"w": PerRank(W)}])
        new = write_checkpoint(storage, "new", [{"w": PerRank(W)}, {"w": PerRank(W + 1)}])
        damage_chunk(storage, new, 0, 0)
        with pytest.raises(CheckpointException):
            load(storage, new, old)

    def test_a_corrupt_copy_leads_to_the_next_checkpoint(self) -> None:
        storage = MemoryStorage()
        manifests = [write_checkpoint(storage, name, [{"w": W}]) for name in ("new", "older", "oldest")]
        damage_chunk(storage, manifests[0], 0, 1)
        damage_chunk(storage, manifests[1], 0, 1)
        assert load(storage, *manifests).repaired[0].source == manifests[2].parts[0].file

    def test_by_default_the_storage_is_searched_newest_first(self) -> None:
        storage = MemoryStorage()
        manifests = [
            write_checkpoint(storage, name, [{"w": W}]) for name in ("oldest", "older", "deleted", "bad", "new")
        ]
        storage.move("deleted.metadata.json", "deleted.deleted.json")
        storage.damage("bad.metadata.json", 5)
        damage_chunk(storage, manifests[-1], 0, 1)
        (repaired,) = load_state(storage, manifests[-1]).repaired
        assert repaired.source == manifests[1].parts[0].file
        storage.delete([manifests[1].parts[0].file])
        (repaired,) = load_state(storage, manifests[-1]).repaired
        assert repaired.source == manifests[0].parts[0].file

    def test_a_failing_search_raises_the_original_error(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": W}])
        damage_chunk(storage, manifest, 0, 1)

        def other_manifests() -> Iterator[Manifest]:
            raise storage_error("no answer", "", retryable=True)

        with pytest.raises(CheckpointException, match="chunk 1 of w"):
            load_state(storage, manifest, other_manifests=other_manifests)

    def test_no_other_checkpoint_is_searched_without_corruption(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": W}])

        def other_manifests() -> Iterator[Manifest]:
            raise AssertionError("searched without corruption")

        assert load_state(storage, manifest, other_manifests=other_manifests).repaired == ()

    def test_a_limited_number_of_checkpoints_is_searched_once(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": W}])
        damage_chunk(storage, manifest, 0, 1)
        asked: list[int] = []
        other = write_checkpoint(storage, "b", [{"w": W + 1}])

        def other_manifests() -> Iterator[Manifest]:
            for number in range(10 * MANIFESTS_SEARCHED_MAX):
                asked.append(number)
                yield other

        with pytest.raises(CheckpointException):
            load_state(storage, manifest, other_manifests=other_manifests)
        assert len(asked) == MANIFESTS_SEARCHED_MAX


def test_partly_wanted_chunks_are_repaired() -> None:
    storage = MemoryStorage()
    full = np.random.default_rng(1).integers(0, 255, (64, 64), np.uint8)
    with small_chunks(256, 1024, 64):
        manifest = write_checkpoint(storage, "a", [{"w": full}, {"w": full}], copies=2)
        part = manifest.parts[0]
        for offset in range(part.data_offset, part.size, 256):
            storage.damage(part.file, offset)
        into = {"w": ShardedArray(np.zeros((64, 5), np.uint8), full.shape, (0, 9))}
        loaded = load_state(storage, manifest, into)
        assert into["w"].local.tobytes() == full[:, 9:14].tobytes()
        assert len(loaded.repaired) == 16
