"""What is there, what is not, and what is left of what was."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from forged.checkpoint import DistributedCheckpoint, LoadOptions, SaveOptions
from forged.checkpoint.blocking import BlockingCheckpoint
from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import SUFFIX, TOMBSTONE, Manifest
from forged.checkpoint.model import CheckpointFormat, CompressionLevel
from forged.checkpoint.ports import Storage
from forged.checkpoint.storage import listing
from forged.checkpoint.verification.validator import CheckpointValidator
from tests.checkpoint.fixtures.faulty_storage import FaultyStorage, broken
from tests.checkpoint.fixtures.memory_storage import MemoryStorage

PREFIXES = ("a", "a/1", "a/1/2", "b")
OF_A1 = ("a/1.", "a/1/")
"""How the files of those below `a` begin; the files of `a` itself may begin with `a/1`."""


@pytest.fixture
def storage() -> MemoryStorage:
    """Some checkpoints, one below the other, in all formats."""
    storage = MemoryStorage()
    with BlockingCheckpoint(DistributedCheckpoint(None, storage)) as one:
        for prefix, layout in zip(PREFIXES, [*CheckpointFormat, CheckpointFormat.CONSOLIDATED], strict=True):
            level = CompressionLevel.FAST if prefix == "b" else CompressionLevel.NONE
            one.save({"w": np.ones(3)}, {"m": np.ones(3)}, SaveOptions(prefix, layout, level))
    return storage


def below(storage: MemoryStorage, prefix: str) -> set[str]:
    """The files of one checkpoint."""
    return {prefix + SUFFIX, *listing.files_of(listing.read_manifest(storage, prefix))}


def test_all_that_are_there_are_found(storage: MemoryStorage) -> None:
    assert listing.prefixes(storage) == sorted(PREFIXES)
    assert listing.prefixes(storage, "a/") == ["a/1", "a/1/2"]
    assert [prefix for prefix, found in listing.manifests(storage) if isinstance(found, Manifest)] == sorted(PREFIXES)
    assert set().union(*(below(storage, prefix) for prefix in PREFIXES)) == set(storage.files)


def test_unreadable_manifest_is_listed_with_its_error(storage: MemoryStorage) -> None:
    storage.damage("b" + SUFFIX, 20)
    found = dict(listing.manifests(storage))
    assert isinstance(found["b"], CheckpointException)
    assert found["b"].type is ExceptionType.CORRUPTED_CHECKPOINT
    assert isinstance(found["a"], Manifest)


def test_one_that_is_not_there_says_where_to_look(storage: MemoryStorage) -> None:
    with pytest.raises(CheckpointException) as caught:
        listing.read_manifest(storage, "none")
    assert caught.value.fix == f"`forgectl ckpt ls {storage.url}` lists the checkpoints"


@pytest.mark.parametrize("prefix", PREFIXES)
def test_delete_removes_only_the_files_of_the_checkpoint(storage: MemoryStorage, prefix: str) -> None:
    unrelated = set(storage.files) - below(storage, prefix)
    listing.delete(storage, prefix)
    assert set(storage.files) == unrelated
    assert not listing.checkpoint_exists(storage, prefix)
    with pytest.raises(CheckpointException) as caught:
        listing.delete(storage, prefix)
    assert caught.value.code == "checkpoint_missing"


@pytest.mark.parametrize("after", [False, True])
def test_a_deletion_that_breaks_off_at_any_moment_is_not_seen_and_can_be_finished(
    storage: MemoryStorage, after: bool
) -> None:
    files, number, is_over = dict(storage.files), 0, False
    while not is_over:
        storage.files = dict(files)

        def fault(current: int, what: str, done: bool, at: int = number) -> None:
            if current == at and done == after:
                raise broken()

        faulty = FaultyStorage(storage, fault)
        with suppress(CheckpointException):
            listing.delete(faulty, "a")
        is_over = len(faulty.calls) <= number
        if listing.checkpoint_exists(storage, "a"):
            assert storage.files == files
        else:
            with pytest.raises(CheckpointException, match="checkpoint a does not exist"):
                listing.read_manifest(storage, "a")
        if not is_over and ("a" + TOMBSTONE in storage.files or listing.checkpoint_exists(storage, "a")):
            listing.delete(storage, "a")
        assert {name for name in files if not name.startswith(OF_A1) and name[0] == "a"}.isdisjoint(storage.files)
        assert {name for name in files if name.startswith((*OF_A1, "b"))} <= set(storage.files)
        number += 1
    assert number > 4


def test_a_tombstone_hides_a_manifest_that_stands_beside_it(storage: MemoryStorage) -> None:
    """As where a storage moves by copying, and was interrupted."""
    storage.files["a" + TOMBSTONE] = storage.files["a" + SUFFIX]
    assert "a" not in listing.prefixes(storage)
    assert not listing.checkpoint_exists(storage, "a")
    assert listing.tombstones(storage) == ["a"]
    with pytest.raises(CheckpointException, match="does not exist"):
        listing.read_manifest(storage, "a")
    listing.finish_deletion(storage, "a")
    assert not [name for name in storage.files if name.startswith("a") and not name.startswith(OF_A1)]


def test_unreadable_tombstone_still_allows_deletion_of_its_files(storage: MemoryStorage) -> None:
    unrelated = set(storage.files) - below(storage, "a")
    storage.damage("a" + SUFFIX, 20)
    listing.delete(storage, "a")
    assert set(storage.files) == unrelated


def test_later_save_of_the_name_is_kept_by_an_old_deletion(storage: MemoryStorage) -> None:
    """Its manifest is not what the tombstone says."""
    old = storage.files.pop("b" + SUFFIX)
    storage.files["a" + TOMBSTONE] = storage.files["a" + SUFFIX]
    storage.files["a" + SUFFIX] = storage.files["a" + SUFFIX] + b" "
    listing.finish_deletion(storage, "a")
    assert "a" + SUFFIX in storage.files
    storage.files["b" + SUFFIX] = old


def put(storage: Storage, prefix: str, value: float, layout: CheckpointFormat = CheckpointFormat.CONSOLIDATED) -> None:
    """Save a checkpoint with this in it."""
    with BlockingCheckpoint(DistributedCheckpoint(None, storage)) as one:
        one.save({"w": np.full(10, value)}, options=SaveOptions(prefix, layout))


def require_loaded(storage: MemoryStorage, prefix: str, value: float) -> None:
    """The checkpoint has this in it."""
    with BlockingCheckpoint(DistributedCheckpoint(None, storage)) as one:
        assert one.load(None, options=LoadOptions(prefix)).model_state["w"].tolist() == [value] * 10


def require(storage: MemoryStorage, prefix: str, value: float) -> None:
    """The checkpoint is valid and has these values, read by forged and through its index."""
    require_loaded(storage, prefix, value)
    assert CheckpointValidator(storage).validate_checkpoint(prefix).findings == ()
    index = json.loads(storage.files[f"{prefix}/model.safetensors.index.json"])
    [(name, file)] = index["weight_map"].items()
    assert load(storage.files[f"{prefix}/{file}"])[name].tolist() == [value] * 10


@pytest.mark.parametrize("moment", ["before move", "move", "read", "sync_names", "entries", "delete"])
def test_slow_deletion_keeps_a_new_save_of_the_same_name(moment: str) -> None:
    """Another one finishes the deletion, and saves."""
    storage = MemoryStorage()
    put(storage, "a", 1)
    # The first deletion is that of the index alone, which was looked at right before. The first listing and reading
    # look for checkpoints that use this one, before anything is changed.
    left = 2 if moment in {"delete", "read", "entries"} else 1

    def meanwhile(number: int, what: str, done: bool) -> None:
        nonlocal left
        if what == moment.removeprefix("before ") and done == (moment == "move"):
            left -= 1
            if left == 0:
                listing.delete(storage, "a")
                put(storage, "a", 2)

    listing.delete(FaultyStorage(storage, meanwhile), "a")
    assert left <= 0
    require(storage, "a", 2)


def test_a_deletion_that_is_slow_leaves_the_tombstone_of_another_one_alone() -> None:
    """Another one finishes the deletion, saves, and deletes that, but dies before all of it is gone."""
    storage = MemoryStorage()
    put(storage, "a", 1)
    has_come = False

    def meanwhile(number: int, what: str, done: bool) -> None:
        nonlocal has_come
        if what == "sync_names" and not has_come:
            has_come = True
            listing.delete(storage, "a")
            put(storage, "a", 2)
            with pytest.raises(CheckpointException):
                listing.delete(dying(storage, "delete"), "a")

    listing.delete(FaultyStorage(storage, meanwhile), "a")
    assert listing.tombstones(storage) == ["a"]
    listing.finish_deletion(storage, "a")
    assert storage.files == {}


def test_a_tombstone_that_another_one_removes_meanwhile_is_gone_for_good(storage: MemoryStorage) -> None:
    """The process that removed the file may have died before the removal was durable."""

    def meanwhile(number: int, what: str, done: bool) -> None:
        if what == "entries":
            storage.files.pop("a" + TOMBSTONE, None)

    watched = FaultyStorage(storage, meanwhile)
    listing.delete(watched, "a")
    assert watched.calls[-1] == "delete"
    assert not listing.tombstones(storage)


def dying(storage: MemoryStorage, moment: str, of: int = 1) -> FaultyStorage:
    """The storage of a process that dies before it does this for so many times."""
    left = of

    def fault(number: int, what: str, done: bool) -> None:
        nonlocal left
        left -= what == moment and not done
        if left <= 0:
            raise broken()

    return FaultyStorage(storage, fault)


@pytest.mark.parametrize(
    ("layout", "published"),
    [
        (CheckpointFormat.MULTI_SHARD, 1),
        (CheckpointFormat.SINGLE_FILE, 1),
        (CheckpointFormat.CONSOLIDATED, 1),
        (CheckpointFormat.CONSOLIDATED, 2),
    ],
)
def test_a_save_that_was_killed_does_not_keep_its_name(layout: CheckpointFormat, published: int) -> None:
    storage = MemoryStorage()
    with pytest.raises(CheckpointException):
        put(dying(storage, "publish", published), "a", 1, layout)
    assert [*listing.unfinished_saves(storage)] == ["a"]
    put(storage, "a", 2)
    require(storage, "a", 2)


def test_checkpoint_without_its_index_is_deleted_as_a_whole() -> None:
    storage = MemoryStorage()
    put(dying(storage, "move"), "a", 1)
    assert listing.checkpoint_exists(storage, "a")
    require_loaded(storage, "a", 1)
    result = CheckpointValidator(storage).validate_checkpoint("a")
    assert (result.is_valid, len(result.warnings)) == (True, 1)
    listing.delete(storage, "a")
    assert storage.files == {}


def test_an_index_of_another_save_stays_when_one_is_deleted() -> None:
    storage = MemoryStorage()
    put(storage, "a", 1)
    shown = "a/model.safetensors.index.json"
    index = json.loads(storage.files[shown])
    storage.files[shown] = json.dumps(index | {"weight_map": {"w": "0a1b2c3d.model.safetensors"}}).encode()
    listing.delete(storage, "a")
    assert [*storage.files] == [shown]


@pytest.mark.parametrize("moment", ["open", "move", "read", "sync_names"])
def test_two_deletions_of_one_checkpoint_succeed(storage: MemoryStorage, moment: str) -> None:
    is_first = True

    def meanwhile(number: int, what: str, done: bool) -> None:
        nonlocal is_first
        if what == moment and done == (moment == "open") and is_first:
            is_first = False
            listing.delete(storage, "a")

    listing.delete(FaultyStorage(storage, meanwhile), "a")
    assert not listing.checkpoint_exists(storage, "a")
    assert listing.tombstones(storage) == []


def test_leftovers_of_saves_are_found_and_deleted(storage: MemoryStorage) -> None:
    for prefix in ("a", "b"):
        del storage.files[prefix + SUFFIX]
    mine = ["b/notes.txt", "b/0123.txt", "a.txt", "b/model.safetensors.bak"]
    for name in mine:
        storage.files[name] = b"foreign"
    left = listing.unfinished_saves(storage)
    assert set(left) == {"a", "b"}
    assert all("txt" not in entry.name for entries in left.values() for entry in entries)
    for prefix, entries in left.items():
        assert sorted(listing.delete_unfinished(storage, prefix)) == sorted(entry.name for entry in entries)
    assert listing.unfinished_saves(storage) == {}
    assert all(name in storage.files for name in mine)
    assert listing.prefixes(storage) == ["a/1", "a/1/2"]


@pytest.mark.parametrize(
    "name",
    [
        listing.part_name("p", "0a1b2c3d", 3, 4, is_packed=False),
        listing.part_name("p", "0a1b2c3d", 123_456, 200_000, is_packed=True),
        listing.receipt_name("p", "0a1b2c3d", 3),
        listing.refusal_name("p", "0a1b2c3d", 3),
        "p/0a1b2c3d.model.safetensors",
        "p/0a1b2c3d.model-00001-of-00003.safetensors",
        "p/0a1b2c3d.model.safetensors.index.json",
        "p/model.safetensors.index.json",
        "p/0a1b2c3d.optimizer.packed",
        "p/0a1b2c3d.rank-00002.safetensors",
        "p/0a1b2c3d.rank-00002-00001-of-00003.safetensors",
        "p/rank-00002.safetensors.index.json",
        "p/0a1b2c3d.state.safetensors",
    ],
)
def test_every_file_that_a_save_makes_is_known_as_such(name: str) -> None:
    storage = MemoryStorage()
    storage.files[name] = b""
    assert [entry.name for entry in listing.save_files(storage, "p")] == [name]
    assert [*listing.unfinished_saves(storage)] == ["p"]


def test_manifest_that_is_published_while_the_files_of_its_save_are_deleted_goes_too() -> None:
    """A save that counts as failed may go on."""
    storage, has_come = MemoryStorage(), False
    with BlockingCheckpoint(DistributedCheckpoint(None, storage)) as checkpoint:
        checkpoint.save({"w": np.zeros(9)}, options=SaveOptions("a"))
    save_id = listing.read_manifest(storage, "a").save_id
    data = storage.files.pop(f"a{SUFFIX}")

    def meanwhile(number: int, what: str, done: bool) -> None:
        nonlocal has_come
        if what == "delete" and not done and not has_come:
            has_come = True
            storage.files[f"a{SUFFIX}"] = data

    assert listing.delete_save(FaultyStorage(storage, meanwhile), "a", save_id)
    assert storage.files == {}


def test_committed_checkpoint_is_not_deleted_as_unfinished(storage: MemoryStorage) -> None:
    before = dict(storage.files)
    assert listing.delete_unfinished(storage, "a") == []
    assert storage.files == before


@pytest.mark.parametrize("act", [listing.read_manifest, listing.delete])
@pytest.mark.parametrize("prefix", ["../a", "", "/a", "a\n"])
def test_names_that_are_none_lead_nowhere(storage: MemoryStorage, act: Any, prefix: str) -> None:
    with pytest.raises(CheckpointException) as caught:
        act(storage, prefix)
    assert caught.value.code == "checkpoint_prefix_invalid"


def test_a_storage_that_fails_is_not_one_that_has_nothing(storage: MemoryStorage) -> None:
    def fault(number: int, what: str, done: bool) -> None:
        raise broken()

    failing = FaultyStorage(storage, fault)
    for act in (
        listing.checkpoint_exists,
        listing.read_manifest,
        listing.require_free,
        listing.delete,
        listing.delete_unfinished,
    ):
        with pytest.raises(CheckpointException, match="broken"):
            act(failing, "a")
