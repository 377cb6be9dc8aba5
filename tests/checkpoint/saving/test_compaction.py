"""Compaction: an incremental checkpoint becomes a full one, whatever interrupts it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forged.checkpoint
from forged.checkpoint.checkpoint import DistributedCheckpoint
from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.format.manifest import VERSION
from forged.checkpoint.loading.loader import load_state
from forged.checkpoint.model import CompressionLevel, SaveOptions
from forged.checkpoint.ports import CancelToken, Storage
from forged.checkpoint.saving.compaction import make_full
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.local import LocalStorage
from forged.checkpoint.verification.validator import CheckpointValidator
from tests.checkpoint.fixtures.faulty_storage import FaultyStorage, broken
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.plain_reader import same, state_of

ROW = 1 << 14
"""Elements of a chunk."""
NAMES = ["a", "b", "c"]


def state_at(number: int) -> dict[str, Any]:
    """Up to this step, a row has changed at each step."""
    rows = np.random.default_rng(7).random((8, ROW))
    for row in range(number + 1):
        rows[row] = row
    return {"w": rows, "b": np.arange(3) * number, "step": number}


STATES = [state_at(number) for number in range(3)]


async def chain_in(storage: Storage, level: CompressionLevel = CompressionLevel.NONE) -> None:
    """A chain of three: `c` uses files of `a` and `b`."""
    async with DistributedCheckpoint(None, storage) as checkpoint:
        for number, state in enumerate(STATES):
            base = NAMES[number - 1] if number else None
            options = SaveOptions(NAMES[number], compression_level=level, base=base, include_rng_state=False)
            await checkpoint.save(state, options=options)


def require_restored(storage: Storage, names: list[str]) -> None:
    for name in names:
        assert same(state_of(storage, name)["model"], STATES[NAMES.index(name)])
        assert CheckpointValidator(storage).validate_checkpoint(name).findings == ()


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
async def test_compacted_checkpoint_is_full_and_needs_no_other(level: CompressionLevel) -> None:
    storage, told = MemoryStorage(), list[tuple[int, int]]()
    await chain_in(storage, level)
    assert [link.prefix for link in listing.read_manifest(storage, "c").links] == ["a", "b"]
    before = listing.read_manifest(storage, "c")
    manifest = make_full(storage, "c", CancelToken(), lambda done, total: told.append((done, total)))
    assert manifest == listing.read_manifest(storage, "c")
    assert (manifest.version, manifest.links, manifest.save_id) == (VERSION, [], before.save_id)
    assert told
    assert told[-1][0] == told[-1][1]
    listing.delete(storage, "b")
    listing.delete(storage, "a")
    require_restored(storage, ["c"])
    listing.delete(storage, "c")
    assert storage.files == {}


async def test_compaction_of_a_full_checkpoint_changes_nothing() -> None:
    storage = MemoryStorage()
    await chain_in(storage)
    files = dict(storage.files)
    assert make_full(storage, "a", CancelToken()) == listing.read_manifest(storage, "a")
    assert storage.files == files


async def test_children_of_a_compacted_checkpoint_stay_restorable() -> None:
    storage = MemoryStorage()
    await chain_in(storage)
    make_full(storage, "b", CancelToken())
    require_restored(storage, NAMES)
    with pytest.raises(CheckpointException, match="a is needed by c"):
        listing.delete(storage, "a")
    with pytest.raises(CheckpointException, match="b is needed by c"):
        listing.delete(storage, "b")


@pytest.mark.parametrize("after", [False, True])
async def test_interrupted_compaction_leaves_a_checkpoint_and_files_that_can_be_swept(after: bool) -> None:
    """Broken off before or after each operation of the storage, as by a process that dies."""
    storage = MemoryStorage()
    await chain_in(storage)
    files = dict(storage.files)
    number, is_over = 0, False
    while not is_over:
        storage.files = dict(files)
        calls = 0

        def fault(current: int, what: str, done: bool, at: int = number) -> None:
            nonlocal calls
            calls = max(calls, current)
            if current > at or (current == at and done == after):
                raise broken()

        with suppress(CheckpointException):
            make_full(FaultyStorage(storage, fault), "c", CancelToken())
        is_over = calls < number
        require_restored(storage, NAMES)
        unfinished = listing.unfinished_saves(storage)
        listing.delete_unfinished(storage, "c")
        assert unfinished.keys() <= {"c"}
        require_restored(storage, NAMES)
        named = {name for prefix in NAMES for name in listing.files_of(listing.read_manifest(storage, prefix))}
        assert storage.files.keys() == named | {f"{name}.metadata.json" for name in NAMES}
        number += 1
    assert number > 8


async def test_failed_compaction_deletes_its_files() -> None:
    storage = MemoryStorage()
    await chain_in(storage)
    files = dict(storage.files)

    def fault(number: int, what: str, done: bool) -> None:
        if what == "publish" and not done:
            raise broken()

    with pytest.raises(CheckpointException, match="it is broken"):
        make_full(FaultyStorage(storage, fault), "c", CancelToken())
    assert storage.files == files


async def test_cancelled_compaction_leaves_no_file() -> None:
    storage, token = MemoryStorage(), CancelToken()
    await chain_in(storage)
    files = dict(storage.files)
    with pytest.raises(CheckpointException) as caught:
        make_full(storage, "c", token, lambda done, total: token.cancel())
    assert caught.value.code == "checkpoint_cancelled"
    assert storage.files == files


@pytest.mark.parametrize("moment", ["write", "publish", "move"])
async def test_checkpoint_deleted_during_its_compaction_stays_deleted(moment: str) -> None:
    storage = MemoryStorage()
    await chain_in(storage)
    has_come = False

    def meanwhile(number: int, what: str, done: bool) -> None:
        nonlocal has_come
        if what == moment and not done and not has_come:
            has_come = True
            listing.delete(storage, "c")

    with pytest.raises(CheckpointException) as caught:
        make_full(FaultyStorage(storage, meanwhile), "c", CancelToken())
    assert caught.value.code in {"checkpoint_missing", "checkpoint_file_missing"}
    assert listing.prefixes(storage) == ["a", "b"]
    assert not any(name.startswith("c") for name in storage.files)
    require_restored(storage, ["a", "b"])


async def test_deletion_during_a_compaction_deletes_the_full_checkpoint() -> None:
    storage, compacted = MemoryStorage(), MemoryStorage()
    await chain_in(storage)
    compacted.files = dict(storage.files)
    make_full(compacted, "c", CancelToken())

    def meanwhile(number: int, what: str, done: bool) -> None:
        if what == "sync_names" and not done:
            storage.files["c.metadata.json"] = compacted.files["c.metadata.json"]

    listing.delete(FaultyStorage(storage, meanwhile), "c")
    assert listing.prefixes(storage) == ["a", "b"]
    assert listing.tombstones(storage) == []


async def test_second_compaction_at_the_same_time_gives_way() -> None:
    storage = MemoryStorage()
    await chain_in(storage)
    has_come = False

    def meanwhile(number: int, what: str, done: bool) -> None:
        nonlocal has_come
        if what == "publish" and not done and not has_come:
            has_come = True
            make_full(storage, "c", CancelToken())

    with pytest.raises(CheckpointException, match="was changed during its compaction") as caught:
        make_full(FaultyStorage(storage, meanwhile), "c", CancelToken())
    assert caught.value.retryable
    assert listing.unfinished_saves(storage) == {}
    require_restored(storage, NAMES)


async def test_load_that_began_before_the_compaction_ends_well() -> None:
    """Its chain is deleted under it, and the chunks are read from the new files instead."""
    storage = MemoryStorage()
    await chain_in(storage)
    manifest = listing.read_manifest(storage, "c")

    def meanwhile(number: int, what: str, done: bool) -> None:
        if what == "open" and not done and "a.metadata.json" in storage.files:
            make_full(storage, "c", CancelToken())
            for name in ("b", "a"):
                listing.delete(storage, name)

    into: dict[str, Any] = {"w": np.zeros((8, ROW)), "b": np.zeros(3, np.int64), "step": 0}
    load_state(FaultyStorage(storage, meanwhile), manifest, {"model": into})
    assert into["w"].tobytes() == STATES[2]["w"].tobytes()


async def test_chunk_damaged_in_a_parent_is_not_copied() -> None:
    storage = MemoryStorage()
    await chain_in(storage)
    files = dict(storage.files)
    [part] = [part for part in listing.read_manifest(storage, "c").parts if part.file.startswith("a/")]
    assert isinstance(part.offsets, list)
    storage.damage(part.file, part.offsets[-1] + 5)
    damaged = storage.files[part.file]
    with pytest.raises(CheckpointException) as caught:
        make_full(storage, "c", CancelToken())
    assert caught.value.code == "checkpoint_chunk_corrupt"
    assert storage.files == files | {part.file: damaged}


@pytest.mark.parametrize("find", [str, Path])
async def test_compact_takes_a_path_and_returns_the_summary(tmp_path: Path, find: Callable[[Path], Any]) -> None:
    storage = LocalStorage(tmp_path)
    await chain_in(storage)
    info = forged.checkpoint.compact(find(tmp_path / "c"))
    assert (info.prefix, info.parent, info.chain) == ("c", None, ("c",))
    require_restored(storage, NAMES)
