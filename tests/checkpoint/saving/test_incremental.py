"""Incremental saves: what they write, what they refer to, and what a restore of them gives."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forged.checkpoint.blocking import BlockingCheckpoint
from forged.checkpoint.checkpoint import DistributedCheckpoint
from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.format.boxes import Box, whole
from forged.checkpoint.format.manifest import INCREMENTAL_VERSION, VERSION, Manifest
from forged.checkpoint.loading.fetching import fetch
from forged.checkpoint.loading.manifest_index import Index
from forged.checkpoint.model import CheckpointFormat, CompressionLevel, LoadOptions, SaveOptions, ShardedArray
from forged.checkpoint.ports import CancelToken, Storage
from forged.checkpoint.saving import incremental
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.local import LocalStorage
from forged.checkpoint.verification.validator import CheckpointValidator
from tests.checkpoint.fixtures.faulty_storage import FaultyStorage
from tests.checkpoint.fixtures.layouts import (
    DTYPES,
    SHAPES,
    Array,
    array_of,
    bits,
    part_of,
    partitions,
    small_chunks,
    strided,
)
from tests.checkpoint.fixtures.manifests import boxes_in
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.plain_reader import arrays_in
from tests.checkpoint.fixtures.rank_group import SimulatedRank, all_ranks

CHUNK = 1 << 17
"""The smallest chunk, of which the arrays below have several."""
ROW = CHUNK // 8
"""Elements of a chunk."""


def state_of(rows: int = 16, seed: int = 0) -> dict[str, Any]:
    return {"w": np.random.default_rng(seed).random((rows, ROW)), "b": np.arange(10.0), "step": seed}


def save(storage: Storage, prefix: str, state: Any, base: str | None = None, **options: Any) -> Manifest:
    with BlockingCheckpoint(DistributedCheckpoint(None, storage)) as checkpoint:
        checkpoint.save(state, options=SaveOptions(prefix, base=base, include_rng_state=False, **options))
    return listing.read_manifest(storage, prefix)


def load(storage: Storage, prefix: str) -> Any:
    with BlockingCheckpoint(DistributedCheckpoint(None, storage)) as checkpoint:
        return checkpoint.load(options=LoadOptions(prefix)).model_state


def require_restored(storage: Storage, prefix: str, state: dict[str, Any]) -> None:
    found = load(storage, prefix)
    assert found.keys() == state.keys()
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            assert bits(found[name]) == bits(value)
        else:
            assert found[name] == value
    assert CheckpointValidator(storage).validate_checkpoint(prefix).findings == ()


def chain(manifest: Manifest) -> list[str]:
    return [*(link.prefix for link in manifest.links), manifest.prefix]


# What is written.


def test_only_changed_chunks_are_written() -> None:
    storage, state = MemoryStorage(), state_of()
    full = save(storage, "a", state)
    state["w"][3, 5] += 1
    state["w"][9:11] += 1
    manifest = save(storage, "b", state, "a")
    [own] = manifest.own_parts
    assert own.size - own.data_offset == 3 * CHUNK
    assert manifest.size_bytes < full.size_bytes / 4
    assert chain(manifest) == ["a", "b"]
    require_restored(storage, "b", state)


def test_full_checkpoint_says_nothing_of_chains() -> None:
    storage = MemoryStorage()
    manifest = save(storage, "a", state_of())
    assert manifest.version == VERSION
    assert b'"chain"' not in storage.files["a.metadata.json"]
    assert b'"offsets"' not in storage.files["a.metadata.json"]


def test_unchanged_state_needs_no_file_of_its_own() -> None:
    storage, state = MemoryStorage(), state_of()
    save(storage, "a", state)
    manifest = save(storage, "b", state, "a")
    assert manifest.own_parts == []
    assert manifest.size_bytes == 0
    assert not any(name.startswith("b/") for name in storage.files)
    require_restored(storage, "b", state)


def test_state_without_an_unchanged_chunk_is_a_full_checkpoint() -> None:
    storage = MemoryStorage()
    save(storage, "a", state_of())
    state = {"w": state_of(seed=1)["w"]}
    manifest = save(storage, "b", state, "a")
    assert (manifest.version, manifest.links) == (VERSION, [])
    listing.delete(storage, "a")
    require_restored(storage, "b", state)


def test_chunks_are_read_from_the_files_that_have_them() -> None:
    storage, state = MemoryStorage(), state_of()
    save(storage, "a", state)
    for number, name in enumerate(["b", "c", "d"]):
        state["w"][number] += 1
        save(storage, name, state, chr(ord(name) - 1))
    manifest = listing.read_manifest(storage, "d")
    assert manifest.version == INCREMENTAL_VERSION
    assert chain(manifest) == ["a", "b", "c", "d"]
    storage.reads.clear()
    require = load(storage, "d")
    assert bits(require["w"]) == bits(state["w"])
    spans = sorted((name, offset, offset + length) for name, offset, length in storage.reads)
    assert {name.partition("/")[0] for name, _, _ in spans} == {"a", "b", "c", "d"}
    for (one, _, end), (other, start, _) in pairwise(spans):
        assert one != other or end <= start, "a chunk is read twice"
    assert storage.bytes_read <= state["w"].nbytes + (1 << 16)


def test_checkpoint_whose_chunks_are_all_replaced_leaves_the_chain() -> None:
    """The same rows change at every step: the restore needs the first checkpoint and the last one."""
    storage, state = MemoryStorage(), state_of()
    save(storage, "a", state)
    for name, base in (("b", "a"), ("c", "b"), ("d", "c")):
        state["w"][4] += 1
        state["step"] += 1
        state["b"] += 1
        assert chain(save(storage, name, state, base)) == ["a", name]
    listing.delete(storage, "b")
    listing.delete(storage, "c")
    require_restored(storage, "d", state)


def test_moved_retyped_and_reshaped_tensors_are_written() -> None:
    storage, state = MemoryStorage(), state_of()
    state["other"] = state["w"] + 1
    save(storage, "a", state)
    changed = {
        "moved": state["w"],
        "w": state["w"].astype(np.float32),
        "b": state["b"],
        "other": state["other"].reshape(-1),
        "new": np.zeros(3),
        "none": np.zeros((0, 4)),
    }
    manifest = save(storage, "b", changed, "a")
    assert [
        manifest.tensors.names[number] for part in manifest.parts if part.is_referenced for number in part.tensors
    ] == ["model/b"]
    require_restored(storage, "b", changed)


@pytest.mark.parametrize("levels", [("none", "fast"), ("fast", "none"), ("fast", "fast"), ("maximum", "fast")])
def test_compressed_and_uncompressed_checkpoints_share_chunks(levels: tuple[str, str]) -> None:
    storage, state = MemoryStorage(), {"w": np.zeros((16, ROW)), "v": np.random.default_rng(0).random((4, ROW))}
    for row in range(16):
        state["w"][row] = row
    save(storage, "a", state, compression_level=levels[0])
    state["w"][2] += 1
    state["v"][1] += 1
    manifest = save(storage, "b", state, "a", compression_level=levels[1])
    assert chain(manifest) == ["a", "b"]
    require_restored(storage, "b", state)


@pytest.mark.parametrize("layout", [CheckpointFormat.CONSOLIDATED, CheckpointFormat.SINGLE_FILE])
def test_base_may_have_any_layout_and_an_incremental_checkpoint_may_not(layout: CheckpointFormat) -> None:
    storage, state = MemoryStorage(), state_of()
    save(storage, "a", state, format=layout)
    state["w"][0] += 1
    assert chain(save(storage, "b", state, "a")) == ["a", "b"]
    require_restored(storage, "b", state)
    with pytest.raises(CheckpointException, match=f"cannot have the format {layout}") as caught:
        SaveOptions("c", layout, base="a")
    assert caught.value.code == "checkpoint_argument_invalid"


def test_base_in_another_folder_is_refused() -> None:
    for prefix, base in (("run/b", "a"), ("b", "run/a"), (None, "run/a")):
        with pytest.raises(CheckpointException, match="is in another folder"):
            SaveOptions(prefix, base=base)


def test_chain_in_a_subfolder_is_found_from_above_and_from_within(tmp_path: Path) -> None:
    storage, state = LocalStorage(tmp_path), state_of()
    save(storage, "run/a", state)
    state["w"][0] += 1
    save(storage, "run/b", state, "run/a")
    within = LocalStorage(tmp_path / "run")
    require_restored(within, "b", state)
    assert chain(listing.read_manifest(within, "b")) == ["a", "b"]
    with pytest.raises(CheckpointException, match="a is needed by b"):
        listing.delete(within, "a")
    save(within, "c", state, "b")
    require_restored(LocalStorage(tmp_path.parent), f"{tmp_path.name}/run/c", state)
    with pytest.raises(CheckpointException, match="run/a is needed by run/b, run/c"):
        listing.delete(storage, "run/a")


# When a save is full.


def test_chain_that_would_be_too_long_makes_the_save_full() -> None:
    storage, state = MemoryStorage(), state_of()
    save(storage, "a", state)
    lengths = []
    for number in range(1, 8):
        state["w"][number] += 1
        manifest = save(storage, f"s{number}", state, f"s{number - 1}" if number > 1 else "a", chain_max=3)
        lengths.append(len(chain(manifest)))
        require_restored(storage, f"s{number}", state)
    assert lengths == [2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_chain_of_parents_that_would_be_too_long_makes_the_save_full(is_restarted: bool) -> None:
    """Chunks that change by turns need the last two checkpoints and the root; a catalogue keeps all parents."""
    storage, state = MemoryStorage(), state_of()
    checkpoint = BlockingCheckpoint(DistributedCheckpoint(None, storage))
    parents: dict[str, str | None] = {"s0": None}
    lengths = []
    checkpoint.save(state, options=SaveOptions("s0"))
    for number in range(1, 10):
        state["w"][number % 2] += 1
        if is_restarted:
            checkpoint.close()
            checkpoint = BlockingCheckpoint(DistributedCheckpoint(None, storage))
        checkpoint.save(state, options=SaveOptions(f"s{number}", base=f"s{number - 1}", chain_max=4))
        links = listing.read_manifest(storage, f"s{number}").links
        parents[f"s{number}"] = links[-1].prefix if links else None
        ancestor, length = parents[f"s{number}"], 1
        while ancestor is not None:
            ancestor, length = parents[ancestor], length + 1
        lengths.append(length)
    checkpoint.close()
    assert lengths == [2, 3, 4, 1, 2, 3, 4, 1, 2]


def test_parent_that_is_gone_ends_the_chain_of_parents() -> None:
    storage, state = MemoryStorage(), state_of()
    save(storage, "s0", state)
    for number in range(1, 5):
        if number == 4:
            del storage.files["s1.metadata.json"]
        state["w"][number % 2] += 1
        manifest = save(storage, f"s{number}", state, f"s{number - 1}", chain_max=4)
    assert chain(manifest) == ["s0", "s3", "s4"]


def damage_manifest(storage: MemoryStorage) -> None:
    storage.damage("a.metadata.json", 30)


def lose_manifest(storage: MemoryStorage) -> None:
    del storage.files["a.metadata.json"]


def lose_file(storage: MemoryStorage) -> None:
    del storage.files[next(name for name in storage.files if name.startswith("a/"))]


def cut_file(storage: MemoryStorage) -> None:
    name = next(name for name in storage.files if name.startswith("a/"))
    storage.files[name] = storage.files[name][:-1]


@pytest.mark.parametrize("harm", [damage_manifest, lose_manifest, lose_file, cut_file])
def test_base_that_cannot_be_read_makes_the_save_full(harm: Any) -> None:
    storage, state = MemoryStorage(), state_of()
    save(storage, "a", state)
    harm(storage)
    manifest = save(storage, "b", state, "a")
    assert manifest.links == []
    require_restored(storage, "b", state)


def test_base_that_is_deleted_during_the_save_fails_it() -> None:
    storage, state = MemoryStorage(), state_of()
    save(storage, "a", state)
    state["w"][0] += 1

    def meanwhile(number: int, what: str, done: bool) -> None:
        if what == "publish" and not done:
            listing.delete(storage, "a")

    with pytest.raises(CheckpointException, match="a, which b builds on, was deleted") as caught:
        save(FaultyStorage(storage, meanwhile), "b", state, "a")
    assert (caught.value.code, caught.value.retryable) == ("checkpoint_base_deleted", True)
    assert storage.files == {}


def test_deletion_is_undone_if_a_checkpoint_that_needs_it_is_published_meanwhile() -> None:
    storage, state = MemoryStorage(), state_of()
    save(storage, "a", state)
    state["w"][0] += 1
    files = dict(storage.files)

    def meanwhile(number: int, what: str, done: bool) -> None:
        if what == "move" and not done and "b.metadata.json" not in storage.files:
            save(storage, "b", state, "a")

    with pytest.raises(CheckpointException, match="a is needed by b") as caught:
        listing.delete(FaultyStorage(storage, meanwhile), "a")
    assert caught.value.code == "checkpoint_needed"
    assert files.items() <= storage.files.items()
    require_restored(storage, "b", state)


# Parents that are gone or damaged.


def test_parent_deleted_by_hand_is_named() -> None:
    storage, state = MemoryStorage(), state_of()
    save(storage, "a", state)
    state["w"][0] += 1
    save(storage, "b", state, "a")
    listing.delete(storage, "a", force=True)
    with pytest.raises(CheckpointException, match="checkpoint b needs a: that was deleted") as caught:
        load(storage, "b")
    assert caught.value.code == "checkpoint_parent_missing"
    assert "restore a from a copy" in caught.value.fix
    result = CheckpointValidator(storage).validate_checkpoint("b", deep=False)
    assert [finding.code for finding in result.errors] == ["checkpoint_parent_missing"]


def test_parent_replaced_under_its_name_is_named() -> None:
    storage, state = MemoryStorage(), state_of()
    save(storage, "a", state)
    state["w"][0] += 1
    save(storage, "b", state, "a")
    listing.delete(storage, "a", force=True)
    save(storage, "a", state_of(seed=7))
    with pytest.raises(CheckpointException, match="another one was saved under its name") as caught:
        load(storage, "b")
    assert caught.value.code == "checkpoint_parent_missing"
    listing.delete(storage, "a")


def test_parent_whose_file_is_lost_is_named() -> None:
    storage, state = MemoryStorage(), state_of()
    save(storage, "a", state)
    save(storage, "b", state, "a")
    lose_file(storage)
    with pytest.raises(CheckpointException, match=r"checkpoint b needs a: its file a/\S+ is missing"):
        load(storage, "b")


def test_corrupt_chunk_of_the_parent_is_found_and_repaired_from_another_checkpoint() -> None:
    storage, state = MemoryStorage(), state_of()
    [part] = save(storage, "a", state).parts
    save(storage, "full", state)
    state["w"][0] += 1
    save(storage, "b", state, "a")
    storage.damage(part.file, part.data_offset + 5 * CHUNK + 3)
    result = CheckpointValidator(storage).validate_checkpoint("b")
    assert [(finding.code, finding.file) for finding in result.errors] == [("checkpoint_chunk_corrupt", part.file)]
    assert bits(load(storage, "b")["w"]) == bits(state["w"])
    listing.delete(storage, "full")
    with pytest.raises(CheckpointException, match="is corrupt") as caught:
        load(storage, "b")
    assert caught.value.code == "checkpoint_chunk_corrupt"


# Any changes, ranks and layouts.


@st.composite
def changes(draw: st.DrawFn, arrays: dict[str, Array]) -> dict[str, Array]:
    """The arrays of the next step: elements changed, arrays added, removed, renamed or of another type."""
    new: dict[str, Array] = {}
    for name, array in arrays.items():
        match draw(st.sampled_from(["same", "same", "elements", "all", "gone", "type", "renamed"])):
            case "same":
                new[name] = array
            case "elements":
                new[name] = changed = array.copy()
                data = changed.reshape(-1).view(np.uint8) if changed.nbytes else np.empty(0, np.uint8)
                if data.size and changed.dtype.kind not in "bU":
                    data[draw(st.integers(0, data.size - 1))] ^= 1
            case "all":
                new[name] = array_of(draw(st.integers(100, 200)), _name(array), array.shape)
            case "type":
                new[name] = array_of(draw(st.integers(0, 99)), draw(st.sampled_from(DTYPES)), array.shape)
            case "renamed":
                new[name + "x"] = array
            case _:
                pass
    if draw(st.booleans()):
        new[f"n{len(new)}"] = array_of(draw(st.integers(0, 99)), draw(st.sampled_from(DTYPES)), draw(SHAPES))
    return new


def _name(array: Array) -> str:
    return str(array.dtype.name if array.dtype.name in DTYPES else array.dtype.str)


def part_of_rank(
    arrays: dict[str, Array], layout: dict[str, list[Box] | None], rank: int, how: int
) -> dict[str, Array | ShardedArray]:
    """The state of a rank: whole arrays, or its boxes of them."""
    state: dict[str, Array | ShardedArray] = {}
    for name, array in arrays.items():
        boxes = layout[name]
        source = array if boxes is None else part_of(array, boxes[rank])
        room = strided(source.shape, source.dtype, how)
        if room.itemsize:
            room[...] = source
        state[name] = room if boxes is None else ShardedArray(room, array.shape, boxes[rank].offset)
    return state


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_checkpoint_of_a_chain_of_any_changes_is_restored_bit_for_bit(data: st.DataObject) -> None:
    draw = data.draw
    storage = MemoryStorage()
    arrays: dict[str, Array] = {}
    states: dict[str, dict[str, Array]] = {}
    with (
        small_chunks(draw(st.sampled_from([32, 256])), 1 << 10, draw(st.sampled_from([1, 64]))),
        patch.object(incremental, "READ_BYTES_MAX", 1 << 9),
    ):
        for number in range(draw(st.integers(2, 5))):
            arrays = draw(changes(arrays)) if arrays else {"t": array_of(1, "float32", (40, 17))}
            ranks = draw(st.integers(1, 3))
            layout = {name: draw(st.none() | partitions(array.shape, ranks)) for name, array in arrays.items()}
            level = draw(st.sampled_from([CompressionLevel.NONE, CompressionLevel.FAST]))
            options = SaveOptions(
                f"s{number}",
                compression_level=level,
                copies=draw(st.integers(1, 2)),
                include_rng_state=False,
                base=draw(st.sampled_from([None, *states])),
                chain_max=draw(st.integers(2, 5)),
            )
            asyncio.run(_save(storage, arrays, layout, ranks, draw(st.integers(0, 3)), options, draw(st.booleans())))
            states[f"s{number}"] = arrays
            manifest = listing.read_manifest(storage, f"s{number}")
            assert len(chain(manifest)) <= options.chain_max
        for prefix, saved in states.items():
            manifest = listing.read_manifest(storage, prefix)
            names = [name.removeprefix("model/") for name in manifest.tensors.names]
            for name, array in zip(names, arrays_in(storage, manifest), strict=True):
                assert bits(array) == bits(saved[name])
            assert CheckpointValidator(storage).validate_checkpoint(prefix).findings == ()
            loaded = load(storage, prefix)
            for name, array in saved.items():
                found = loaded[name].local if isinstance(loaded[name], ShardedArray) else loaded[name]
                assert bits(found) == bits(array)
            _require_boxes(storage, manifest, saved, draw)
        _require_exact_refusals(storage, [*states], draw)


def _require_boxes(storage: MemoryStorage, manifest: Manifest, saved: dict[str, Array], draw: Any) -> None:
    """Boxes of some tensors and other tensors as a whole are read in one go, in any number of reads."""
    arrays = [saved[name.removeprefix("model/")] for name in manifest.tensors.names]
    boxes = {number: draw(boxes_in(array.shape)) for number, array in enumerate(arrays) if draw(st.booleans())}
    parts = [part_of(array, boxes.get(number, whole(array.shape))) for number, array in enumerate(arrays)]
    into = {
        number: strided(part.shape, part.dtype, draw(st.integers(0, 3)))
        for number, part in enumerate(parts)
        if draw(st.booleans())
    }
    storage.reads.clear()
    storage.gap_bytes_max = draw(st.sampled_from([0, 40, 1 << 10]))
    fetched = fetch(storage, Index(manifest), range(len(arrays)), CancelToken(), boxes=boxes, into=into)
    for found, part in zip(fetched.arrays, parts, strict=True):
        assert bits(found) == bits(np.ascontiguousarray(part).reshape(part.shape))
    assert fetched.bytes_read == storage.bytes_read


async def _save(
    storage: Storage,
    arrays: dict[str, Array],
    layout: dict[str, list[Box] | None],
    ranks: int,
    how: int,
    options: SaveOptions,
    in_background: bool,
) -> None:
    async def save_rank(rank: SimulatedRank) -> None:
        state = part_of_rank(arrays, layout, rank.rank, how)
        async with DistributedCheckpoint(rank, storage) as checkpoint:
            if in_background:
                handle = await checkpoint.save_async(state, None, options)
                await handle.committed()
            else:
                await checkpoint.save(state, None, options)

    for outcome in await all_ranks(ranks, save_rank):
        assert outcome is None


def _require_exact_refusals(storage: MemoryStorage, prefixes: list[str], draw: Any) -> None:
    """A deletion is refused exactly while a visible checkpoint uses a file of the checkpoint."""
    left = list(prefixes)
    for prefix in draw(st.permutations(prefixes)):
        manifests = [listing.read_manifest(storage, other) for other in left if other != prefix]
        users = [one.prefix for one in manifests if any(part.file.startswith(f"{prefix}/") for part in one.parts)]
        if users:
            with pytest.raises(CheckpointException, match=", ".join(users)) as caught:
                listing.delete(storage, prefix)
            assert caught.value.code == "checkpoint_needed"
        else:
            listing.delete(storage, prefix)
            left.remove(prefix)
        for other in left:
            assert CheckpointValidator(storage).validate_checkpoint(other, CancelToken(60.0)).is_valid
