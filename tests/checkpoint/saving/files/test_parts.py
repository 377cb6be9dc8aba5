"""One rank's part of a save, as a file."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.boxes import Box
from forged.checkpoint.format.manifest import Part, digests_of
from forged.checkpoint.format.tree import Leaf, flatten
from forged.checkpoint.model import CompressionLevel, PerRank, ShardedArray
from forged.checkpoint.ports import BLOCK_BYTES, CancelToken
from forged.checkpoint.saving.files import parts
from forged.checkpoint.saving.files.plan import Description, SavePlan, plan
from forged.checkpoint.saving.files.staging import StagingMemory
from forged.checkpoint.storage.local import LocalStorage
from tests.checkpoint.fixtures.faulty_storage import FaultyStorage, on
from tests.checkpoint.fixtures.memory_storage import MemoryStorage

NEVER = CancelToken()
FILE = "a/12345678.00000-of-00001.safetensors"


def world(*states: Any) -> tuple[SavePlan, list[list[Leaf]]]:
    """What ranks with these states write."""
    leaves = [flatten(state)[1] for state in states]
    return plan([Description.of(mine) for mine in leaves]), leaves


def written(storage: Any, state: Any, level: CompressionLevel = CompressionLevel.NONE, *, staged: bool = False) -> Part:
    made, (leaves,) = world(state)
    image = parts.image_of(made, 0, leaves)
    source = StagingMemory().stage(image, NEVER) if staged else None
    if level is CompressionLevel.NONE:
        return parts.write_uncompressed(storage, FILE, 0, made.shares[0], image, source or image, NEVER)
    packed = parts.CompressedPart(image, source, level, NEVER)
    return parts.write_compressed(storage, FILE, 0, made.shares[0], packed, NEVER)


STATE = {"a": np.arange(BLOCK_BYTES // 4, dtype=np.int64), "b": np.zeros((3, 0)), "c": np.array(5), "d": np.ones(9)}


def test_safetensors_opens_it(tmp_path: Path) -> None:
    part = written(LocalStorage(tmp_path), STATE)
    found = load_file(tmp_path / part.file)
    assert set(found) == set(STATE)
    assert all((found[name] == STATE[name]).all() and found[name].shape == STATE[name].shape for name in STATE)


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
def test_it_is_the_same_whether_it_was_staged(level: CompressionLevel) -> None:
    direct, staged = MemoryStorage(), MemoryStorage()
    assert written(direct, STATE, level) == written(staged, STATE, level, staged=True)
    assert direct.files == staged.files


def test_receipt_describes_the_written_part() -> None:
    storage = MemoryStorage()
    part = written(storage, STATE)
    data = storage.files[FILE]
    assert (part.file, part.rank, part.size, part.stored) == (FILE, 0, len(data), None)
    assert base64.b64decode(part.header) == xxhash.xxh3_128_digest(data[: part.data_offset])
    assert digests_of(part)[-16:] == xxhash.xxh3_128_digest(np.ones(9).tobytes())


def test_chunks_that_do_not_become_smaller_are_kept_as_they_are() -> None:
    storage, noise = MemoryStorage(), np.frombuffer(np.random.default_rng(0).bytes(1 << 20), np.uint8)
    part = written(storage, {"noise": noise, "zeros": np.zeros(1 << 20)}, CompressionLevel.FAST)
    assert part.stored is not None
    assert part.data_offset == 0
    assert min(part.stored) < 0 < max(part.stored)
    assert storage.files[FILE].startswith(noise[:1000].tobytes())
    assert sum(map(abs, part.stored)) == part.size == len(storage.files[FILE])


def test_there_may_be_nothing_to_compress() -> None:
    storage = MemoryStorage()
    part = written(storage, {"empty": np.zeros((0, 2))}, CompressionLevel.MAXIMUM)
    assert (part.size, part.stored, storage.files[FILE]) == (0, [], b"")


def test_compressed_part_can_be_read_in_any_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made, (leaves,) = world({"w": np.arange(400_000), "v": np.arange(3)})
    packed = parts.CompressedPart(parts.image_of(made, 0, leaves), None, CompressionLevel.FAST, NEVER)
    room = memoryview(bytearray(packed.size))
    whole = bytes(packed.block(0, room))
    for step in (1000, 4096, packed.size - 1):
        found = [bytes(packed.block(at, memoryview(bytearray(step)))) for at in range(0, packed.size, step)]
        assert b"".join(found) == whole


def test_uncached_compressed_blocks_equal_cached_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "RUN_BYTES", 1 << 18)
    noise = np.frombuffer(np.random.default_rng(0).bytes(1 << 20), np.uint8)
    made, (leaves,) = world({"w": np.arange(400_000), "none": np.zeros((0, 3)), "noise": noise, "v": np.arange(3)})
    image = parts.image_of(made, 0, leaves)
    kept = parts.CompressedPart(image, None, CompressionLevel.FAST, NEVER)
    again = parts.CompressedPart(image, None, CompressionLevel.FAST, NEVER, keeps=False)
    assert (again.size, again.stored, again.digests) == (kept.size, kept.stored, kept.digests)
    whole = bytes(kept.block(0, memoryview(bytearray(kept.size))))
    for step in (5000, 1 << 18, kept.size):
        for offsets in (range(0, kept.size, step), reversed(range(0, kept.size, step))):
            for at in offsets:
                assert bytes(again.block(at, memoryview(bytearray(step)))) == whole[at : at + step]


def test_arrays_changed_during_second_compression_are_refused() -> None:
    array = np.arange(40_000)
    made, (leaves,) = world({"w": array})
    packed = parts.CompressedPart(parts.image_of(made, 0, leaves), None, CompressionLevel.FAST, NEVER, keeps=False)
    array[:] = np.random.default_rng(0).integers(0, 1 << 60, array.size)
    with pytest.raises(CheckpointException) as caught:
        packed.block(0, memoryview(bytearray(packed.size)))
    assert caught.value.code == "checkpoint_state_changed"


def test_cancelled_token_stops_compression() -> None:
    made, (leaves,) = world({"w": np.arange(4000)})
    stopped = CancelToken()
    stopped.cancel()
    with pytest.raises(CheckpointException, match="cancelled"):
        parts.CompressedPart(parts.image_of(made, 0, leaves), None, CompressionLevel.FAST, stopped)


def test_the_parts_of_several_ranks_are_called_after_where_they_lie() -> None:
    rows = [ShardedArray(np.arange(6).reshape(2, 3), (4, 3), (2 * rank, 0)) for rank in range(2)]
    made, leaves = world(*({"w": rows[rank], "r": PerRank(np.zeros(1))} for rank in range(2)))
    names = []
    for rank in range(2):
        header = parts.image_of(made, rank, leaves[rank]).layout.header
        names.append(set(json.loads(header[8:])) - {"__metadata__"})
    assert names == [{"w[0:2,0:3]", "r@0"}, {"w[2:4,0:3]", "r@1"}]


def test_keys_that_look_like_parts_do_not_make_two_arrays_one(tmp_path: Path) -> None:
    state = {"r": PerRank(np.zeros(1)), "r@0": np.ones(1)}
    part = written(LocalStorage(tmp_path), state)
    assert sorted(array[0] for array in load_file(tmp_path / part.file).values()) == [0, 1]


def test_rank_writes_its_share_of_a_replicated_array() -> None:
    copied = np.arange(1_000_000)
    made, leaves = world({"w": copied}, {"w": copied})
    pieces = [Box(*share.boxes[0]) for share in made.shares]
    data = []
    for rank in range(2):
        image = parts.image_of(made, rank, leaves[rank])
        storage = MemoryStorage()
        part = parts.write_uncompressed(storage, FILE, rank, made.shares[rank], image, image, NEVER)
        data.append(storage.files[FILE][part.data_offset :])
    assert pieces[0].shape[0] + pieces[1].shape[0] == 1_000_000
    assert b"".join(data) == copied.tobytes()


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
def test_a_part_whose_name_is_not_durable_is_not_there(level: CompressionLevel) -> None:
    storage = MemoryStorage()
    with pytest.raises(CheckpointException, match="broken"):
        written(FaultyStorage(storage, on("sync_names", after=True)), STATE, level)
    assert storage.files == {}


def test_first_error_is_raised_when_deletion_fails_too() -> None:
    storage = MemoryStorage()
    other = CheckpointException("another error", type=ExceptionType.STORAGE_ERROR)

    def fault(number: int, what: str, done: bool) -> None:
        if what in {"sync_names", "delete"}:
            raise other if what == "delete" else CheckpointException("the first")

    with pytest.raises(CheckpointException, match="the first"):
        written(FaultyStorage(storage, fault), STATE)


def test_a_file_that_is_there_is_not_touched() -> None:
    storage = MemoryStorage()
    storage.publish(FILE, b"foreign")
    with pytest.raises(CheckpointException) as caught:
        written(storage, STATE)
    assert (caught.value.code, storage.files) == ("checkpoint_exists", {FILE: b"foreign"})


@pytest.mark.parametrize(("room", "is_enough"), [(None, True), (STATE["a"].nbytes, False), (1 << 30, True)])
def test_the_room_is_looked_at_first(room: int | None, is_enough: bool) -> None:
    storage = MemoryStorage()
    storage.room = room
    watched = FaultyStorage(storage)
    if is_enough:
        written(watched, STATE)
    else:
        with pytest.raises(CheckpointException) as caught:
            written(watched, STATE)
        assert (caught.value.code, caught.value.type) == ("checkpoint_disk_full", ExceptionType.STORAGE_ERROR)
    assert ("write" in watched.calls) == is_enough
