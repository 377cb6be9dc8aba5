"""Loading gives the saved state bit for bit, however it was divided among ranks when it was saved and when it is
loaded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forged.checkpoint.blocking import BlockingCheckpoint
from forged.checkpoint.checkpoint import DistributedCheckpoint
from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import TOMBSTONE
from forged.checkpoint.loading.loader import Loaded, load_state
from forged.checkpoint.model import (
    CompressionLevel,
    LoadOptions,
    PerRank,
    ReshardingStrategy,
    SaveOptions,
    ShardedArray,
)
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.storage import listing
from forged.leaf_types import LeafType
from tests.checkpoint.fixtures.layouts import DTYPES, SHAPES, array_of, bits, part_of, partitions, small_chunks, strided
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.plain_writer import write_checkpoint

Array = np.ndarray[Any, Any]
THOROUGH = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def load_at_all(storage: MemoryStorage, manifest: Any, world_size: int, **options: Any) -> list[Loaded]:
    return [
        load_state(storage, manifest, rank=rank, world_size=world_size, options=LoadOptions(**options))
        for rank in range(world_size)
    ]


class TestAnyLayout:
    @THOROUGH
    @given(data=st.data())
    def test_any_parts_load_into_any_other_parts_bit_for_bit(self, data: st.DataObject) -> None:
        draw = data.draw
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
        saving, loading = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        chunk_bytes = draw(st.sampled_from([16, 64, 1 << 17]))
        with small_chunks(chunk_bytes, 4 * chunk_bytes, draw(st.sampled_from([1, 48, 1 << 16]))):
            full = array_of(draw(st.integers(0, 9)), dtype, shape)
            saved = draw(partitions(shape, saving))
            storage = MemoryStorage()
            states = [{"w": ShardedArray(part_of(full, box), shape, box.offset)} for box in saved]
            manifest = write_checkpoint(storage, "a", states, copies=draw(st.integers(1, 2)))
            for rank, box in enumerate(draw(partitions(shape, loading))):
                array = strided(box.shape, full.dtype, draw(st.integers(0, 3)))
                into = {"w": ShardedArray(array, shape, box.offset)}
                loaded = load_state(storage, manifest, into, rank=rank, world_size=loading)
                assert loaded.state["w"] is into["w"]
                assert bits(array) == bits(part_of(full, box))

    @THOROUGH
    @given(data=st.data())
    def test_rank_loads_its_own_state_with_the_same_world_size(self, data: st.DataObject) -> None:
        draw = data.draw
        kinds = draw(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=8))
        ranks = draw(st.integers(1, 3))
        chunk_bytes, small_bytes = draw(st.sampled_from([16, 64, 1 << 17])), draw(st.sampled_from([1, 48, 1 << 16]))
        with small_chunks(chunk_bytes, 4 * chunk_bytes, small_bytes):
            arrays = [array_of(seed, *kind) for seed, kind in enumerate(kinds)]
            states: list[Any] = [
                {"model": list(arrays), "rng": PerRank({"words": np.arange(rank, rank + 3)})} for rank in range(ranks)
            ]
            storage = MemoryStorage()
            manifest = write_checkpoint(storage, "a", states)
            for rank, loaded in enumerate(load_at_all(storage, manifest, ranks)):
                assert list(map(bits, loaded.state["model"])) == list(map(bits, arrays))
                assert loaded.state["rng"]["words"].tolist() == [rank, rank + 1, rank + 2]
                if chunk_bytes == 1 << 17 and small_bytes == 1 << 16:
                    assert loaded.bytes_read == loaded.bytes_needed
                assert all(array.flags.aligned and array.flags.writeable for array in loaded.state["model"])

    @pytest.mark.parametrize("level", [CompressionLevel.FAST, CompressionLevel.MAXIMUM])
    def test_compressed_parts_load_into_whole_and_sharded_arrays(self, level: CompressionLevel) -> None:
        full = np.random.default_rng(0).normal(size=(400, 300)).astype(dtype_of("bfloat16"))
        small = [np.full(5_000, number, np.int64) for number in range(6)]
        storage = MemoryStorage()
        states = [
            {"w": ShardedArray(full[rank * 100 : rank * 100 + 100], full.shape, (rank * 100, 0)), "small": small}
            for rank in range(4)
        ]
        with small_chunks(1 << 14, 1 << 16, 1 << 13):
            manifest = write_checkpoint(storage, "a", states, level=level)
            assert any(size > 0 for part in manifest.parts for size in part.stored or ())
            assert manifest.size_bytes < full.nbytes + sum(one.nbytes for one in small)
            into: dict[str, Any] = {"w": np.zeros_like(full), "small": [np.zeros_like(one) for one in small]}
            load_state(storage, manifest, into)
            assert bits(into["w"]) == bits(full)
            assert list(map(bits, into["small"])) == list(map(bits, small))
            columns = ShardedArray(np.zeros((400, 7), full.dtype), full.shape, (0, 100))
            load_state(storage, manifest, {"w": columns}, options=LoadOptions(only=("w",)))
            assert bits(columns.local) == bits(full[:, 100:107])
            assert list(map(bits, load_state(storage, manifest).state["small"])) == list(map(bits, small))


class TestResharding:
    def saved(self) -> tuple[MemoryStorage, Any, Array]:
        full = np.random.default_rng(0).normal(size=(2_048, 256)).astype(np.float32)
        storage = MemoryStorage()
        states = [
            {
                "model": {
                    "rows": ShardedArray(full[rank * 512 : rank * 512 + 512], full.shape, (rank * 512, 0)),
                    "columns": ShardedArray(full[:, rank * 64 : rank * 64 + 64], full.shape, (0, rank * 64)),
                    "same": full[0],
                    f"layer{rank}": {"bias": np.full(3, rank), "depth": rank},
                },
                "rng": PerRank({"words": np.full(2, rank), "gauss": None}),
            }
            for rank in range(4)
        ]
        return storage, write_checkpoint(storage, "a", states), full

    @pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7])
    def test_parallel_slices_along_the_saved_axis_and_repeats_the_rest(self, world_size: int) -> None:
        storage, manifest, full = self.saved()
        loaded = [one.state["model"] for one in load_at_all(storage, manifest, world_size)]
        assert bits(np.concatenate([one["rows"].local for one in loaded])) == bits(full)
        assert bits(np.concatenate([one["columns"].local for one in loaded], axis=1)) == bits(full)
        assert {one["rows"].global_shape for one in loaded} == {full.shape}
        sizes = [len(one["rows"].local) for one in loaded]
        assert max(sizes) - min(sizes) <= 1
        assert all(bits(one["same"]) == bits(full[0]) for one in loaded)

    @pytest.mark.parametrize("world_size", [1, 2, 3, 6])
    def test_all_ranks_load_values_of_single_ranks_with_another_world_size(self, world_size: int) -> None:
        storage, manifest, _ = self.saved()
        for one in load_at_all(storage, manifest, world_size):
            assert [one.state["model"][f"layer{rank}"]["bias"].tolist() for rank in range(4)] == [
                [n] * 3 for n in range(4)
            ]
            assert [one.state["model"][f"layer{rank}"]["depth"] for rank in range(4)] == [0, 1, 2, 3]

    def test_a_per_rank_value_goes_to_its_rank_only(self) -> None:
        storage, manifest, _ = self.saved()
        loaded = load_at_all(storage, manifest, 6)
        assert [one.state["rng"]["words"][0] for one in loaded[:4]] == [0, 1, 2, 3]
        assert all("rng" not in one.state for one in loaded[4:])
        assert [one.missing for one in loaded] == [(), (), (), (), ("rng/words",), ("rng/words",)]

    def test_simple_gives_whole_tensors_in_turn(self) -> None:
        storage, manifest, full = self.saved()
        loaded = load_at_all(storage, manifest, 3, resharding_strategy=ReshardingStrategy.SIMPLE)
        arrays = [
            {name: one for name, one in each.state["model"].items() if isinstance(one, np.ndarray)} for each in loaded
        ]
        assert [sorted(each) for each in arrays] == [["columns", "same"], [], ["rows"]]
        assert bits(arrays[2]["rows"]) == bits(arrays[0]["columns"]) == bits(full)
        biases = [
            name
            for each in loaded
            for name, one in each.state["model"].items()
            if "bias" in (one if isinstance(one, dict) else {})
        ]
        assert sorted(biases) == [f"layer{rank}" for rank in range(4)]

    def test_little_more_is_read_than_is_needed(self) -> None:
        rows = 8 * 2_621
        full = np.random.default_rng(0).integers(0, 255, (rows, 512), np.uint8)
        storage = MemoryStorage()
        edges = [rows * rank // 4 for rank in range(5)]
        states = [
            {"w": ShardedArray(full[edges[rank] : edges[rank + 1]], full.shape, (edges[rank], 0))} for rank in range(4)
        ]
        manifest = write_checkpoint(storage, "a", states)
        loaded = load_at_all(storage, manifest, 3)
        read, needed = sum(one.bytes_read for one in loaded), sum(one.bytes_needed for one in loaded)
        assert needed == full.nbytes
        assert read == storage.bytes_read
        assert read / needed <= 1.05


class TestGivenState:
    def saved(self) -> tuple[MemoryStorage, Any]:
        storage = MemoryStorage()
        state = {
            "model": {"w": np.arange(6.0).reshape(2, 3), "b": np.arange(3), "rate": 0.5, "names": ["x", ("y", 1)]},
            "optimizer": {0: {"m": np.ones(4, np.float32)}, "groups": [np.zeros(2), np.ones(2)]},
            "rng": PerRank({"words": np.arange(4)}),
        }
        return storage, write_checkpoint(storage, "a", [state])

    def state(self) -> dict[str, Any]:
        return {
            "model": {"w": np.zeros((2, 3)), "b": np.zeros(3, int), "rate": 0.1, "names": []},
            "optimizer": {0: {"m": np.zeros(4, np.float32)}, "groups": [np.ones(2), np.zeros(2)]},
            "rng": {"words": np.zeros(4, int)},
        }

    def test_arrays_are_filled_and_values_come_from_the_checkpoint(self) -> None:
        storage, manifest = self.saved()
        into = self.state()
        loaded = load_state(storage, manifest, into)
        assert loaded.state["model"]["w"] is into["model"]["w"]
        assert into["model"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert loaded.state["model"]["rate"] == 0.5
        assert loaded.state["model"]["names"] == ["x", ("y", 1)]
        assert loaded.state["optimizer"]["groups"][1] is into["optimizer"]["groups"][1]
        assert list(loaded.state["optimizer"]) == [0, "groups"]
        assert (loaded.missing, loaded.unexpected, loaded.mismatched) == ((), (), ())

    def test_sections_that_the_state_lacks_load_into_new_arrays(self) -> None:
        storage, manifest = self.saved()
        into = {"model": self.state()["model"]}
        loaded = load_state(storage, manifest, into, sections={"model", "rng"})
        assert list(loaded.state) == ["model", "rng"]
        backwards = load_state(storage, manifest, {"rng": self.state()["rng"]}, sections={"model", "rng"})
        assert list(backwards.state) == ["model", "rng"]
        assert loaded.state["rng"]["words"].tolist() == [0, 1, 2, 3]
        assert into["model"]["b"].tolist() == [0, 1, 2]

    def test_sections_can_be_excluded(self) -> None:
        storage, manifest = self.saved()
        options = LoadOptions(load_optimizer=False, load_rng_state=False)
        assert list(load_state(storage, manifest, options=options).state) == ["model"]
        into = self.state()
        assert list(load_state(storage, manifest, into, options=options).state) == ["model"]
        assert into["rng"]["words"].tolist() == [0, 0, 0, 0]

    def test_all_differences_are_reported_before_anything_is_read(self) -> None:
        storage, manifest = self.saved()
        into = self.state()
        into["model"] |= {"w": np.zeros((3, 2)), "b": np.zeros(3, np.float32), "extra": np.zeros(1)}
        del into["optimizer"]["groups"]
        before = into["optimizer"][0]["m"].copy()
        with pytest.raises(CheckpointException) as caught:
            load_state(storage, manifest, into)
        assert caught.value.code == "checkpoint_state_differs"
        for difference in (
            "model/w is float64 (2, 3) in the checkpoint and float64 (3, 2) in the state",
            "model/b is int64 (3,) in the checkpoint and float32 (3,) in the state",
            "model/extra is not in the checkpoint",
            "optimizer/groups/#0 is not in the state",
            "optimizer/groups/#1 is not in the state",
        ):
            assert difference in caught.value.message
        assert bits(into["optimizer"][0]["m"]) == bits(before)
        assert storage.reads == []

    def test_a_limited_number_of_differences_is_shown(self) -> None:
        storage, manifest = self.saved()
        into = self.state()
        into["model"] |= {f"extra{number}": np.zeros(1) for number in range(100)}
        with pytest.raises(CheckpointException, match="and 76 more"):
            load_state(storage, manifest, into)

    def test_without_strict_mode_matches_load_and_the_rest_is_reported(self) -> None:
        storage, manifest = self.saved()
        into = self.state()
        into["model"] |= {"w": np.zeros((3, 2)), "extra": np.full(1, 7)}
        del into["optimizer"]["groups"]
        loaded = load_state(storage, manifest, into, options=LoadOptions(strict_mode=False))
        assert loaded.missing == ("model/extra",)
        assert loaded.mismatched == ("model/w",)
        assert loaded.unexpected == ("optimizer/groups/#0", "optimizer/groups/#1")
        assert loaded.state["model"]["w"] is into["model"]["w"]
        assert into["model"]["w"].tolist() == [[0, 0]] * 3
        assert into["model"]["b"].tolist() == [0, 1, 2]
        assert loaded.state["model"]["extra"].tolist() == [7]

    def test_a_value_in_place_of_an_array_is_a_difference(self) -> None:
        storage, manifest = self.saved()
        into = self.state()
        into["model"] |= {"w": None, "rate": np.zeros(1), "names": {"x": np.zeros(1)}}
        loaded = load_state(storage, manifest, into, options=LoadOptions(strict_mode=False))
        assert loaded.unexpected == ("model/w",)
        assert loaded.missing == ("model/rate", "model/names/x")
        assert loaded.state["model"]["w"] is None

    def test_lists_of_other_lengths_are_reported_by_item(self) -> None:
        storage, manifest = self.saved()
        into = self.state()
        into["optimizer"]["groups"] = [np.ones(2)]
        loose = LoadOptions(strict_mode=False)
        assert load_state(storage, manifest, into, options=loose).unexpected == ("optimizer/groups/#1",)
        into["optimizer"]["groups"] = [np.ones(2)] * 3
        loaded = load_state(
            storage,
            manifest,
            {**into, "optimizer": {**into["optimizer"], "groups": [np.ones(2) for _ in range(3)]}},
            options=loose,
        )
        assert loaded.missing == ("optimizer/groups/#2",)

    def test_only_the_named_tensors_are_loaded(self) -> None:
        storage, manifest = self.saved()
        into = self.state()
        loaded = load_state(storage, manifest, into, options=LoadOptions(only=("model/*", "optimizer/#0/m")))
        assert into["model"]["b"].tolist() == [0, 1, 2]
        assert into["optimizer"][0]["m"].tolist() == [1] * 4
        assert into["optimizer"]["groups"][1].tolist() == [0, 0]
        assert (loaded.missing, loaded.unexpected) == ((), ())
        fresh = load_state(storage, manifest, options=LoadOptions(only=("model/w",)))
        assert sorted(fresh.state["model"]) == ["names", "rate", "w"]
        assert fresh.bytes_needed == 48

    def test_a_pattern_that_names_nothing_is_refused(self) -> None:
        storage, manifest = self.saved()
        with pytest.raises(CheckpointException) as caught:
            load_state(storage, manifest, options=LoadOptions(only=("model/v",)))
        assert caught.value.code == "checkpoint_tensor_unknown"

    def test_a_layer_of_another_rank_is_found(self) -> None:
        storage = MemoryStorage()
        states = [{"model": {f"layer{rank}": {"w": np.full(2, rank), "depth": rank}}} for rank in range(2)]
        manifest = write_checkpoint(storage, "a", states)
        into: dict[str, Any] = {
            "model": {"layer0": {"w": np.full(2, 9), "depth": -1}, "layer1": {"w": np.full(2, 9), "depth": -1}}
        }
        loaded = load_state(storage, manifest, into, rank=0, world_size=2)
        assert into["model"]["layer1"]["w"].tolist() == [1, 1]
        assert loaded.state["model"]["layer1"]["depth"] == 1

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_per_rank_values_of_another_rank_are_not_taken(self, world_size: int) -> None:
        storage = MemoryStorage()
        extra = {"own": PerRank({"c": np.ones(3), "seed": 5}), "b": np.ones(2)}
        manifest = write_checkpoint(storage, "a", [{"w": np.ones(1), "extra": extra}, {"w": np.ones(1)}])
        own, common = np.zeros(3), np.zeros(2)
        into = {"w": np.zeros(1), "extra": {"own": PerRank({"c": own, "seed": 6}), "b": common}}
        options = LoadOptions(strict_mode=False)
        loaded = load_state(storage, manifest, into, rank=1, world_size=world_size, options=options)
        assert loaded.missing == ("extra/own/c",)
        assert (own.tolist(), common.tolist()) == ([0, 0, 0], [1, 1])
        assert loaded.state["extra"]["own"]["seed"] == 6

    def test_a_rank_beyond_the_saved_world_keeps_its_per_rank_values(self) -> None:
        storage, manifest = self.saved()
        into = self.state()
        words = np.full(4, 9)
        into["rng"] = PerRank({"words": words})
        loaded = load_state(storage, manifest, into, rank=1, world_size=2)
        assert loaded.missing == ("rng/words",)
        assert words.tolist() == [9] * 4

    def test_a_read_only_array_is_refused_before_anything_is_read(self) -> None:
        storage, manifest = self.saved()
        into = self.state()
        into["model"]["w"].flags.writeable = False
        with pytest.raises(CheckpointException) as caught:
            load_state(storage, manifest, into)
        assert caught.value.code == "checkpoint_array_readonly"
        assert storage.reads == []

    def test_a_masked_array_is_refused(self) -> None:
        storage, manifest = self.saved()
        into = self.state()
        masked = np.ma.masked_array(np.zeros((2, 3)), mask=True)
        into["model"]["w"] = masked
        with pytest.raises(CheckpointException, match="model/w of the state is a masked array") as caught:
            load_state(storage, manifest, into)
        assert caught.value.type is ExceptionType.VALIDATION_FAILED
        assert storage.reads == []
        load_state(storage, manifest, into, options=LoadOptions(only=("optimizer/*",)))
        assert masked.mask.all()
        assert not masked.data.any()


class TestCheckpointRemovedDuringLoad:
    """The checkpoint is deleted or replaced after its manifest is read and before its files are."""

    def saved(self) -> tuple[MemoryStorage, Any]:
        storage = MemoryStorage()
        self.save(storage, np.arange(5))
        return storage, listing.read_manifest(storage, "a")

    def save(self, storage: MemoryStorage, array: Array) -> None:
        options = SaveOptions("a", include_rng_state=False)
        BlockingCheckpoint(DistributedCheckpoint(None, storage)).save({"w": array}, options=options)

    def error(self, storage: MemoryStorage, manifest: Any) -> CheckpointException:
        with pytest.raises(CheckpointException) as caught:
            load_state(storage, manifest, {"model": {"w": np.zeros(5, int)}})
        return caught.value

    def test_a_deleted_checkpoint_is_reported_as_deleted(self) -> None:
        storage, manifest = self.saved()
        listing.delete(storage, "a")
        error = self.error(storage, manifest)
        assert (error.code, error.type, error.retryable) == ("checkpoint_deleted", ExceptionType.LOAD_FAILED, True)
        assert "a was deleted during the load" in error.message

    def test_a_checkpoint_under_deletion_is_reported_as_deleted(self) -> None:
        storage, manifest = self.saved()
        storage.move(manifest.path, "a" + TOMBSTONE)
        del storage.files[manifest.parts[0].file]
        assert self.error(storage, manifest).code == "checkpoint_deleted"

    def test_a_replaced_checkpoint_is_reported_as_replaced(self) -> None:
        storage, manifest = self.saved()
        listing.delete(storage, "a")
        self.save(storage, np.arange(5) + 1)
        error = self.error(storage, manifest)
        assert (error.code, error.retryable) == ("checkpoint_replaced", True)
        assert "a was replaced during the load" in error.message

    def test_a_missing_file_is_reported(self) -> None:
        storage, manifest = self.saved()
        del storage.files[manifest.parts[0].file]
        error = self.error(storage, manifest)
        assert (error.code, error.retryable) == ("checkpoint_file_missing", False)
        storage.damage(manifest.path, 100)
        assert self.error(storage, manifest).code == "checkpoint_file_missing"


class TestSharedMemory:
    def test_two_names_of_one_array_load_if_their_values_are_equal(self) -> None:
        storage = MemoryStorage()
        tied = np.arange(5.0)
        manifest = write_checkpoint(storage, "a", [{"embed": tied, "head": tied, "other": np.ones(2)}])
        array = np.zeros(5)
        into: dict[str, Any] = {"embed": array, "head": array, "other": np.zeros(2)}
        loaded = load_state(storage, manifest, into)
        assert loaded.state["embed"] is loaded.state["head"] is array
        assert array.tolist() == tied.tolist()

    def test_views_of_one_buffer_without_overlap_load_in_place(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"x": np.arange(5), "y": np.arange(5, 10)}])
        flat = np.zeros(10, int)
        load_state(storage, manifest, {"x": flat[:5], "y": flat[5:]})
        assert flat.tolist() == list(range(10))
        interleaved = np.zeros(10, int)
        load_state(storage, manifest, {"x": interleaved[::2], "y": interleaved[1::2]})
        assert interleaved[::2].tolist() == list(range(5))

    def test_overlapping_arrays_with_different_values_are_an_error(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"x": np.arange(5), "y": np.arange(5, 10)}])
        flat = np.zeros(8, int)
        with pytest.raises(CheckpointException) as caught:
            load_state(storage, manifest, {"x": flat[:5], "y": flat[3:]})
        assert caught.value.code == "checkpoint_arrays_shared"
        assert "overwritten" in caught.value.message

    @pytest.mark.parametrize("stride", [0, 4])
    def test_an_array_that_overlaps_itself_loads_only_equal_elements(self, stride: int) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"x": np.arange(4.0), "y": np.zeros(4)}])
        overlapping: Any = np.ndarray((4,), np.float64, bytearray(b"\1" * 40), 0, (stride,))
        load_state(storage, manifest, {"y": overlapping}, options=LoadOptions("a", only=("y",)))
        assert overlapping.tolist() == [0.0] * 4
        with pytest.raises(CheckpointException) as caught:
            load_state(storage, manifest, {"x": overlapping}, options=LoadOptions("a", only=("x",)))
        assert caught.value.code == "checkpoint_arrays_shared"


class Handle:
    """An array type of another library."""

    def __init__(self, data: Any, label: str = "") -> None:
        self.data = data
        self.label = label
        self.shape = np.shape(data)


HANDLES = LeafType(
    lambda value: isinstance(value, Handle),
    lambda handle: handle.data,
    lambda array, handle: Handle(array, "" if handle is None else handle.label),
)


class TestLeafTypes:
    def test_a_leaf_of_a_custom_type_is_filled_and_converted(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": [Handle(np.arange(3))]}], leaf_types=[HANDLES])
        current = Handle(np.zeros(3, int), "mine")
        loaded = load_state(storage, manifest, {"w": [current]}, leaf_types=[HANDLES])
        assert loaded.state["w"][0] is not current
        assert loaded.state["w"][0].data is current.data
        assert loaded.state["w"][0].label == "mine"
        assert current.data.tolist() == [0, 1, 2]

    def test_the_local_part_of_a_sharded_array_may_be_of_a_custom_type(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": np.arange(6)}])
        current = ShardedArray(Handle(np.zeros(2, int), "mine"), (6,), (3,))
        loaded = load_state(storage, manifest, {"w": current}, leaf_types=[HANDLES])
        assert loaded.state["w"].offset == (3,)
        assert loaded.state["w"].local.label == "mine"
        assert current.local.data.tolist() == [3, 4]


class TestFailure:
    def test_a_corrupt_chunk_is_named_with_tensor_rank_file_and_chunk(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"small": np.arange(10), "w": np.arange(100_000)}])
        part = manifest.parts[0]
        storage.damage(part.file, part.data_offset + 80 + (3 << 17) + 5)
        into = {"small": np.zeros(10, int), "w": np.zeros(100_000, int)}
        with pytest.raises(CheckpointException) as caught:
            load_state(storage, manifest, into)
        error = caught.value
        assert error.code == "checkpoint_chunk_corrupt"
        assert "chunk 3 of w, written by rank 0 in a/00000000.00000-of-00001.safetensors" in error.message
        assert "partly overwritten" in error.message

    @pytest.mark.parametrize("cut", [1, 50_000, None])
    def test_a_truncated_or_missing_file_is_named(self, cut: int | None) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": np.arange(100_000)}])
        file = manifest.parts[0].file
        if cut is None:
            del storage.files[file]
        else:
            storage.files[file] = storage.files[file][:-cut]
        with pytest.raises(CheckpointException, match=file):
            load_state(storage, manifest)

    def test_cancellation_stops_the_load(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": np.arange(100_000)}])
        token = CancelToken()
        token.cancel()
        with pytest.raises(CheckpointException) as caught:
            load_state(storage, manifest, token=token)
        assert caught.value.code == "checkpoint_cancelled"

    def test_a_rank_outside_the_world_is_refused(self) -> None:
        storage = MemoryStorage()
        manifest = write_checkpoint(storage, "a", [{"w": np.arange(3)}])
        with pytest.raises(CheckpointException):
            load_state(storage, manifest, rank=2, world_size=2)
