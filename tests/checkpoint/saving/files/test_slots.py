"""Saves that are staged into slots, and checkpoints that are saved from slots alone."""

from __future__ import annotations

import asyncio
import copy
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from forged.checkpoint.checkpoint import DistributedCheckpoint
from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.format.slot import HEADER_BYTES, PART_OFFSET, SlotHeader, SlotState
from forged.checkpoint.model import CheckpointFormat, CompressionLevel, SaveOptions
from forged.checkpoint.ports import BLOCK_BYTES, CancelToken
from forged.checkpoint.rank_group import SingleProcess
from forged.checkpoint.saving.files.slots import SlotContent
from forged.checkpoint.saving.pipeline import Saver
from forged.checkpoint.saving.rank_save import RankSave, RunInfo
from forged.checkpoint.saving.slot_saver import save_slots
from forged.checkpoint.storage import listing, slot_files
from forged.checkpoint.storage.local import LocalStorage
from tests.checkpoint.fixtures.faulty_storage import FaultyStorage
from tests.checkpoint.fixtures.plain_reader import same, state_of
from tests.checkpoint.fixtures.rank_group import SimulatedRank, SimulatedRanks
from tests.checkpoint.fixtures.slot_host import SlotHost, opened, sets_in

NEVER = CancelToken()


def state(version: int) -> dict[str, Any]:
    """Several blocks, chunks across the ends of blocks, and small arrays."""
    large = np.arange(BLOCK_BYTES // 4 * 2 + 12_345, dtype=np.float32) + version
    return {"large": large, "small": np.full(3, version), "none": np.zeros(0), "step": version, "text": "a" * version}


class Alone(SingleProcess):
    """One rank whose host has slots."""

    def __init__(self, slots: SlotHost) -> None:
        self.slots = slots
        self.step = 0
        self.generation = 1


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "checkpoints")


@pytest.fixture
def host(tmp_path: Path, storage: LocalStorage) -> SlotHost:
    (tmp_path / "slots").mkdir()
    return SlotHost(tmp_path / "slots", storage)


def headers(host: SlotHost) -> list[SlotHeader | SlotState]:
    return [opened(path).header() for path in sorted(host._directory.glob("*.slot"))]


async def test_host_saves_what_was_staged(host: SlotHost, storage: LocalStorage) -> None:
    async with DistributedCheckpoint(Alone(host), storage) as checkpoint:
        for version in (1, 2, 3):
            handle = await checkpoint.save_async(state(version), options=SaveOptions(f"v{version}", step=version))
            await handle.committed()
    assert len(host.persisted) == 3
    assert len(host.sizes) == 1
    for version in (1, 2, 3):
        assert same(state_of(storage, f"v{version}")["model"], state(version))
        manifest = listing.read_manifest(storage, f"v{version}")
        assert (manifest.step, manifest.world_size) == (version, 1)
        assert manifest.fence is not None


async def test_ranks_write_while_their_host_does_not_answer(host: SlotHost, storage: LocalStorage) -> None:
    host.is_away = True
    async with DistributedCheckpoint(Alone(host), storage) as checkpoint:
        for version in (1, 2, 3, 4):
            await checkpoint.save_async(state(version), options=SaveOptions(f"v{version}", step=version))
    for version in (1, 2, 3, 4):
        assert same(state_of(storage, f"v{version}")["model"], state(version))
    assert len(host.persisted) == 4


async def test_host_that_is_known_to_be_away_is_not_asked(host: SlotHost, storage: LocalStorage) -> None:
    host.is_present = False
    async with DistributedCheckpoint(Alone(host), storage) as checkpoint:
        await checkpoint.save_async(state(1), options=SaveOptions("v1", step=1))
    assert same(state_of(storage, "v1")["model"], state(1))
    assert not host.persisted


async def test_save_that_both_host_and_ranks_have_written_is_one_checkpoint(
    host: SlotHost, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host comes back just before the root publishes."""
    host.is_away = True
    publish = Saver.publish

    def late(saver: Saver, save: RankSave, *arguments: Any) -> None:
        save_slots(storage, sets_in(host._directory)[0][0], NEVER)
        publish(saver, save, *arguments)

    monkeypatch.setattr(Saver, "publish", late)
    async with DistributedCheckpoint(Alone(host), storage) as checkpoint:
        handle = await checkpoint.save_async(state(1), options=SaveOptions("v1", step=1))
        await handle.committed()
    assert same(state_of(storage, "v1")["model"], state(1))
    manifest = listing.read_manifest(storage, "v1")
    assert {entry.name for entry in storage.entries("v1/")} == {part.file for part in manifest.parts}


async def test_host_does_not_replace_what_the_ranks_have_published(host: SlotHost, storage: LocalStorage) -> None:
    host.is_away = True
    async with DistributedCheckpoint(Alone(host), storage) as checkpoint:
        await checkpoint.save_async(state(1), options=SaveOptions("v1", step=1))
    before = sorted(entry.name for entry in storage.entries())
    assert not save_slots(storage, sets_in(host._directory)[0][0], NEVER)
    assert sorted(entry.name for entry in storage.entries()) == before


async def test_saves_take_turns_and_the_last_one_is_never_overwritten(host: SlotHost, storage: LocalStorage) -> None:
    async with DistributedCheckpoint(Alone(host), storage) as checkpoint:
        seen = []
        for version in (1, 2, 3):
            await (await checkpoint.save_async(state(version), options=SaveOptions(f"v{version}"))).committed()
            seen.append([one.sequence if isinstance(one, SlotHeader) else 0 for one in headers(host)])
    assert seen == [[1, 0], [1, 2], [3, 2]]


async def test_last_state_is_not_overwritten_while_the_host_reads_the_one_before(
    host: SlotHost, storage: LocalStorage
) -> None:
    async with DistributedCheckpoint(Alone(host), storage) as checkpoint:
        assert await checkpoint.keep_in_memory(state(1), options=SaveOptions("v1"))
        [read] = [
            file for path in host._directory.glob("*.slot") if isinstance((file := opened(path)).header(), SlotHeader)
        ]
        assert read.lock()
        assert await checkpoint.keep_in_memory(state(2), options=SaveOptions("v2"))
        assert not await checkpoint.keep_in_memory(state(3), options=SaveOptions("v3"))
        await (await checkpoint.save_async(state(4), options=SaveOptions("v4"))).committed()
        assert [slots.manifest.prefix for slots, _ in sets_in(host._directory)] == ["v2", "v1"]
        read.close()
        assert await checkpoint.keep_in_memory(state(5), options=SaveOptions("v5"))
    assert same(state_of(storage, "v4")["model"], state(4))


class UntoldRank(SimulatedRank):
    """A rank that loses its connection to the root while it receives an answer."""

    answers_left = math.inf

    async def broadcast(self, value: Any, root: int = 0) -> Any:
        answer = await super().broadcast(value, root)
        self.answers_left -= 1
        if not self.answers_left:
            raise ConnectionError("rank 0 is gone")
        return answer


def whole_saves(host: SlotHost) -> set[tuple[str, int]]:
    """The names and world sizes of the saves of which the slots of all ranks are whole."""
    ranks: dict[tuple[str, int], set[int]] = {}
    for path in host._directory.glob("*.slot"):
        file = opened(path)
        header = file.header()
        if isinstance(header, SlotHeader):
            ranks.setdefault((file.frame(header).prefix, header.world_size), set()).add(header.rank)
    return {(prefix, size) for (prefix, size), present in ranks.items() if len(present) == size}


async def test_survivors_keep_one_save_if_the_root_dies_while_it_tells_that_all_have_staged(
    host: SlotHost, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = SimulatedRanks(3)
    ranks = [UntoldRank(world, rank) for rank in range(3)]
    for rank in ranks:
        rank.slots = SlotHost(host._directory, storage, rank.rank)
    checkpoints = [DistributedCheckpoint(rank, storage) for rank in ranks]

    async def keep(version: int) -> list[bool | BaseException]:
        options = SaveOptions(f"v{version}")
        kept = (one.keep_in_memory({"a": np.full(10, version)}, options=options) for one in checkpoints)
        return await asyncio.gather(*kept, return_exceptions=True)

    assert await keep(1) == [True, True, True]
    # The first one is what to save, the second one that all have staged.
    ranks[2].answers_left = 2
    [_, told, untold] = await keep(2)
    assert told is True
    assert isinstance(untold, CheckpointException)
    assert ("v2", 3) in whole_saves(host)
    smaller = SimulatedRanks(2)
    for number, rank in enumerate(ranks[1:]):
        rank.join(smaller, number)
    del checkpoints[0]
    with monkeypatch.context() as patch:
        patch.setattr("forged.checkpoint.saving.files.slots.encode_header", lambda header: 1 / 0)
        assert all(isinstance(one, CheckpointException) for one in await keep(3))
        assert whole_saves(host) == {("v2", 3)}
    assert await keep(4) == [True, True]
    assert whole_saves(host) == {("v2", 3), ("v4", 2)}


async def test_failed_staging_leaves_the_save_before_it(
    host: SlotHost, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with DistributedCheckpoint(Alone(host), storage) as checkpoint:
        await (await checkpoint.save_async(state(1), options=SaveOptions("v1"))).committed()
        for name in ("v2", "v3"):
            with monkeypatch.context() as patch:
                patch.setattr("forged.checkpoint.saving.files.slots.encode_header", lambda header: 1 / 0)
                with pytest.raises(CheckpointException):
                    await checkpoint.save_async(state(2), options=SaveOptions(name))
            [(_, header)] = sets_in(host._directory)
            assert header.sequence == 1
        await (await checkpoint.save_async(state(4), options=SaveOptions("v4"))).committed()
    assert same(state_of(storage, "v4")["model"], state(4))


async def test_larger_state_gets_larger_slots(host: SlotHost, storage: LocalStorage) -> None:
    async with DistributedCheckpoint(Alone(host), storage) as checkpoint:
        await (await checkpoint.save_async({"a": np.ones(10)}, options=SaveOptions("small"))).committed()
        await (await checkpoint.save_async(state(1), options=SaveOptions("large"))).committed()
    assert len(host.sizes) == 2
    assert same(state_of(storage, "large")["model"], state(1))


async def test_slots_of_another_session_are_not_used(host: SlotHost, storage: LocalStorage) -> None:
    async with DistributedCheckpoint(Alone(host), storage) as checkpoint:
        await (await checkpoint.save_async(state(1), options=SaveOptions("a"))).committed()
        host.owner = b"another"
        await (await checkpoint.save_async(state(2), options=SaveOptions("b"))).committed()
        host.owner, host.refuses = b"a third one", True
        await (await checkpoint.save_async(state(3), options=SaveOptions("c"))).committed()
    assert len(host.sizes) == 2
    assert len(host.persisted) == 2
    assert same(state_of(storage, "c")["model"], state(3))


@pytest.mark.parametrize(
    "options", [{"format": "consolidated"}, {"compression_level": "fast"}, {"format": "single_file"}]
)
async def test_checkpoint_that_differs_from_its_parts_is_written_by_the_ranks(
    host: SlotHost, storage: LocalStorage, options: dict[str, Any]
) -> None:
    async with DistributedCheckpoint(Alone(host), storage) as checkpoint:
        await (await checkpoint.save_async(state(1), options=SaveOptions("a", **options))).committed()
        is_plain = options.get("format") == "single_file"
        assert bool(host.persisted) == is_plain
    manifest = listing.read_manifest(storage, "a")
    assert same(state_of(storage, "a")["model"], state(1))
    [(slots, _)] = sets_in(host._directory)
    assert slots.manifest.compression is CompressionLevel.NONE
    if not is_plain:
        assert slots.manifest.layout is CheckpointFormat.MULTI_SHARD
        assert manifest.save_id == slots.manifest.save_id
        listing.delete(storage, "a")
        assert save_slots(storage, slots, NEVER)
        assert same(state_of(storage, "a")["model"], state(1))


async def test_host_that_cannot_write_the_storage_leaves_it_to_the_ranks(tmp_path: Path, storage: LocalStorage) -> None:
    host = SlotHost(tmp_path, storage, persists=False)
    async with DistributedCheckpoint(Alone(host), storage) as checkpoint:
        await (await checkpoint.save_async(state(1), options=SaveOptions("a"))).committed()
    assert host.persisted == []
    assert same(state_of(storage, "a")["model"], state(1))
    assert len(sets_in(tmp_path)) == 1


async def staged(host: SlotHost, storage: LocalStorage) -> None:
    async with DistributedCheckpoint(Alone(host), storage) as checkpoint:
        await (await checkpoint.save_async(state(1), options=SaveOptions("a"))).committed()
    listing.delete(storage, "a")


async def test_save_from_slots_is_repeated_after_an_interruption(host: SlotHost, storage: LocalStorage) -> None:
    await staged(host, storage)
    [(slots, _)] = sets_in(host._directory)
    torn = Path(storage.url) / slots.manifest.parts[0].file
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b"torn")
    assert save_slots(storage, slots, NEVER)
    assert not save_slots(storage, slots, NEVER)
    assert same(state_of(storage, "a")["model"], state(1))


async def test_save_whose_files_are_deleted_before_it_is_published_is_withdrawn(
    host: SlotHost, storage: LocalStorage
) -> None:
    """As those of an earlier try, which has failed."""
    await staged(host, storage)
    [(slots, header)] = sets_in(host._directory)

    def meanwhile(number: int, what: str, done: bool) -> None:
        if what == "publish" and not done:
            assert listing.delete_save(storage, "a", header.save_id)

    with pytest.raises(CheckpointException, match="were deleted while it was saved") as refused:
        save_slots(FaultyStorage(storage, meanwhile), slots, NEVER)
    assert refused.value.retryable
    assert list(storage.entries()) == []
    assert save_slots(storage, slots, NEVER)
    assert same(state_of(storage, "a")["model"], state(1))


async def test_save_under_a_name_that_is_taken_is_refused(host: SlotHost, storage: LocalStorage) -> None:
    await staged(host, storage)
    async with DistributedCheckpoint(None, storage) as checkpoint:
        await checkpoint.save({"other": 1}, options=SaveOptions("a"))
    [(slots, _)] = sets_in(host._directory)
    with pytest.raises(CheckpointException) as refused:
        save_slots(storage, slots, NEVER)
    assert refused.value.code == "checkpoint_exists"
    assert state_of(storage, "a")["model"] == {"other": 1}


@pytest.mark.parametrize("place", [PART_OFFSET + BLOCK_BYTES - 1, PART_OFFSET + BLOCK_BYTES, -1, "header", "short"])
async def test_slot_that_changes_is_not_saved(host: SlotHost, storage: LocalStorage, place: Any) -> None:
    await staged(host, storage)
    [path] = [path for path in host._directory.glob("*.slot") if isinstance(opened(path).header(), SlotHeader)]
    [(slots, header)] = sets_in(host._directory)
    with path.open("r+b") as file:
        if place == "header":
            file.write(bytes(HEADER_BYTES))
        elif place == "short":
            os.truncate(path, PART_OFFSET + BLOCK_BYTES)
        else:
            file.seek(place if place >= 0 else PART_OFFSET + header.part_bytes - 1)
            [byte] = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
    with pytest.raises(CheckpointException) as refused:
        save_slots(storage, slots, NEVER)
    assert refused.value.code == "checkpoint_slot_torn"
    assert listing.prefixes(storage) == []
    assert listing.unfinished_saves(storage) == {}


@pytest.mark.parametrize("offset", [0, 8, 100])
async def test_slot_with_a_damaged_lead_is_not_taken(host: SlotHost, storage: LocalStorage, offset: int) -> None:
    await staged(host, storage)
    for path in host._directory.glob("*.slot"):
        with path.open("r+b") as file:
            file.seek(PART_OFFSET + offset)
            file.write(b"?")
    with pytest.raises(CheckpointException) as refused:
        sets_in(host._directory)
    assert refused.value.code == "checkpoint_slot_torn"


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
async def test_incremental_save_is_staged_whole_and_writes_only_what_changed(
    host: SlotHost, storage: LocalStorage, level: CompressionLevel
) -> None:
    """The host can save the whole state from the slots if the ranks die; otherwise the ranks write the changes."""
    one = state(1)
    async with DistributedCheckpoint(Alone(host), storage) as checkpoint:
        base = None
        for version in (1, 2, 3):
            one["large"][version * 100_000] += 1
            expected = copy.deepcopy(one)
            options = SaveOptions(f"v{version}", compression_level=level, base=base)
            handle = await checkpoint.save_async(one, options=options)
            one["small"] += 1
            await handle.committed()
            manifest = listing.read_manifest(storage, f"v{version}")
            assert len(manifest.links) == version - 1
            assert same(state_of(storage, f"v{version}")["model"], expected)
            newest, _ = sets_in(host._directory)[0]
            assert newest.manifest.save_id == manifest.save_id
            assert newest.manifest.links == []
            base = f"v{version}"
    assert len(host.persisted) == (level is CompressionLevel.NONE)


@pytest.mark.parametrize(
    "changes",
    [
        {"file": "a/ffffffff.00000-of-00001.safetensors"},
        {"file": "b/other"},
        {"offsets": [0, 0, 0]},
        {"stored": [1]},
        {"rank": 1},
        {"size": 10},
        {"tensors": [99]},
    ],
)
async def test_slot_of_a_hostile_writer_names_no_file_but_its_own(
    host: SlotHost, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    content_of = Saver._slot_content

    def hostile(saver: Saver, save: RankSave, run: RunInfo) -> SlotContent:
        content = content_of(saver, save, run)
        part = replace(content.frame.part, **changes)
        return content._replace(frame=replace(content.frame, part=part))

    monkeypatch.setattr(Saver, "_slot_content", hostile)
    async with DistributedCheckpoint(Alone(host), storage) as checkpoint:
        assert await checkpoint.keep_in_memory(state(1), options=SaveOptions("a"))
    with pytest.raises(CheckpointException):
        sets_in(host._directory)
    assert [name for name, _ in listing.manifests(storage)] == []


async def test_more_contents_than_a_manifest_can_have_are_not_read(
    host: SlotHost, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with DistributedCheckpoint(Alone(host), storage) as checkpoint:
        assert await checkpoint.keep_in_memory(state(1), options=SaveOptions("a"))
    [(_, header)] = sets_in(host._directory)
    monkeypatch.setattr(slot_files, "CONTENT_BYTES_MAX", header.content_bytes - 1)
    monkeypatch.setattr(slot_files.SlotFile, "frame", None)
    with pytest.raises(CheckpointException, match="rank 0"):
        sets_in(host._directory)
