"""Saves by one or several ranks: a rank may die, hang or disagree, and the storage may fail at any step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from itertools import count, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forged.checkpoint import thread_calls
from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import SUFFIX, TOMBSTONE
from forged.checkpoint.loading.loader import load_state
from forged.checkpoint.model import CheckpointFormat, CompressionLevel, PerRank, SaveOptions, ShardedArray
from forged.checkpoint.ports import ByteSource, CancelToken, Storage
from forged.checkpoint.rank_group import OutcomeUnknown, RankGroup, SingleProcess
from forged.checkpoint.saving.files import parts
from forged.checkpoint.saving.pipeline import SaveContext, Saver, save_state
from forged.checkpoint.saving.rank_save import RunInfo
from forged.checkpoint.storage import listing
from forged.checkpoint.verification.validator import CheckpointValidator
from forged.log import SILENT
from tests.checkpoint.fixtures.faulty_storage import Fault, FaultyStorage, at, broken, on
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.plain_reader import same, state_of
from tests.checkpoint.fixtures.unreliable_ranks import (
    RankFault,
    UnreliableRank,
    after_event,
    answer_with,
    die,
    fail,
    group,
    hang,
)

NAMED = SaveOptions("run/1")
ROWS = 40_000
"""Enough for what all ranks have to be cut among them."""
SOON_S = 0.2
LATE_S = 10.0

WISH, TERMS, DESCRIPTION, PLAN, LAID, AGREED, PART, VERDICT = range(1, 9)
"""The calls of a first save."""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short grace periods."""
    monkeypatch.setattr(thread_calls, "RETURN_GRACE_S", 0.2)


def state_at(rank: int, world_size: int) -> dict[str, Any]:
    """A state with what all have, what each has a part of, and what each has for itself."""
    whole = np.arange(ROWS * 16, dtype=np.float32).reshape(ROWS, 16)
    cuts = [ROWS * n // world_size for n in range(world_size + 1)]
    return {
        "model": {
            "copied": whole,
            "rows": ShardedArray(whole[cuts[rank] : cuts[rank + 1]], whole.shape, (cuts[rank], 0)),
            "odd": [np.zeros((0, 3)), np.array(5), whole[:100, ::3].T],
        },
        "step": 7,
        "rng": PerRank({"words": np.arange(5) + rank}),
    }


def saved_at(rank: int) -> dict[str, Any]:
    """What a plain reader finds of it."""
    whole = np.arange(ROWS * 16, dtype=np.float32).reshape(ROWS, 16)
    model = {"copied": whole, "rows": whole, "odd": [np.zeros((0, 3)), np.array(5), whole[:100, ::3].T]}
    return {"model": model, "step": 7, "rng": {"words": np.arange(5) + rank}}


async def save(
    storages: Callable[[int], Storage],
    world_size: int,
    faults: Mapping[int, Mapping[int, RankFault]] | None = None,
    timeout_s: float = 60.0,
    options: Callable[[int], SaveOptions] = lambda rank: NAMED,
    state: Callable[[int, int], Any] = state_at,
) -> list[Any]:
    """Have all ranks save; what each of them returns or raises."""

    async def act(member: UnreliableRank) -> str:
        token = CancelToken(timeout_s)
        ranks = RankGroup(member, token, ExceptionType.SAVE_FAILED)
        rank = member.rank
        return await save_state(storages(rank), ranks, state(rank, world_size), options(rank), token)

    return await asyncio.wait_for(group(world_size, act, faults), 60)


def check_saved(storage: Storage, world_size: int, prefix: str = "run/1") -> None:
    for rank in range(world_size):
        assert same(state_of(storage, prefix, rank), saved_at(rank))


def check_failed(outcomes: list[Any], storage: MemoryStorage) -> list[CheckpointException]:
    """All ranks report the error and no file is left; or the outcome is unknown and the checkpoint is whole."""
    failed = [one for one in outcomes if not isinstance(one, asyncio.CancelledError)]
    assert all(isinstance(one, CheckpointException) for one in failed), failed
    if listing.checkpoint_exists(storage, "run/1"):
        assert all(isinstance(one, OutcomeUnknown) for one in failed), failed
        check_saved(storage, len(outcomes))
    elif not any(isinstance(one, OutcomeUnknown) for one in failed):
        assert storage.files == {}
    assert all(one.checkpoint_path in {"run/1", ""} for one in failed)
    return failed


# That it is saved.


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
async def test_saved_checkpoint_has_the_state_of_each_rank(world_size: int) -> None:
    storage = MemoryStorage()
    assert await save(lambda rank: storage, world_size) == ["run/1"] * world_size
    check_saved(storage, world_size)
    manifest = listing.read_manifest(storage, "run/1")
    assert sorted(storage.files) == sorted([*(part.file for part in manifest.parts), "run/1" + SUFFIX])
    assert len(manifest.parts) == world_size
    assert len(manifest.states.frames) == 1
    assert [len(own) for own in manifest.states.own] == [1] * world_size


async def test_ranks_share_a_frame_however_much_each_has_for_itself() -> None:
    def at(rank: int, _: int) -> Any:
        own = {f"w{number}": np.arange(3) + number for number in range(rank)}
        return {"rng": PerRank({**own, "seed": rank}), "model": {"w": np.ones(5)}, "epoch": 1 if rank < 3 else True}

    storage = MemoryStorage()
    await save(lambda rank: storage, 4, state=at)
    manifest = listing.read_manifest(storage, "run/1")
    assert manifest.states.frame_of_rank == [0, 0, 0, 1]
    for rank in range(4):
        state = at(rank, 4)
        assert same(state_of(storage, "run/1", rank), {**state, "rng": state["rng"].value})


def compressible(rank: int, world_size: int) -> dict[str, Any]:
    """Bytes that repeat from the second thousand on, and numbers whose high bytes change slowly."""
    noise = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    return {"repeated": np.tile(noise, 200), "slow": np.arange(200_000, dtype=np.float32)}


async def size_of_save(options: SaveOptions) -> int:
    storage = MemoryStorage()
    await save(lambda rank: storage, 1, options=lambda rank: options, state=compressible)
    assert same(state_of(storage, "run/1"), compressible(0, 1))
    return listing.read_manifest(storage, "run/1").size_bytes


async def test_each_level_of_compression_needs_fewer_bytes_than_the_one_before() -> None:
    none, fast, balanced, maximum = [
        await size_of_save(SaveOptions("run/1", compression_level=level)) for level in CompressionLevel
    ]
    assert await size_of_save(NAMED) == none > 1_000_000 > fast > balanced > maximum


PARTS = [f"{rank:05d}-of-00003.safetensors" for rank in range(3)]
TENSORS = ["model.safetensors", *(f"rank-{rank:05d}.safetensors" for rank in range(3))]


@pytest.mark.parametrize(
    ("options", "files"),
    [
        (NAMED, PARTS),
        (SaveOptions("run/1", CheckpointFormat.MULTI_SHARD), PARTS),
        (SaveOptions("run/1", CheckpointFormat.SINGLE_FILE), ["00000-of-00001.safetensors"]),
        (SaveOptions("run/1", CheckpointFormat.CONSOLIDATED), [*TENSORS, "model.safetensors.index.json"]),
    ],
    ids=["default", "multi_shard", "single_file", "consolidated"],
)
async def test_format_decides_the_files(options: SaveOptions, files: list[str]) -> None:
    storage = MemoryStorage()
    await save(lambda rank: storage, 3, options=lambda rank: options)
    save_id = listing.read_manifest(storage, "run/1").save_id
    names = [name.removeprefix("run/1/").removeprefix(f"{save_id}.") for name in storage.files]
    assert sorted(names) == sorted([*files, "run/1" + SUFFIX])


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("level", [CompressionLevel.FAST, CompressionLevel.MAXIMUM])
async def test_compressed_checkpoint_has_the_same_state_in_fewer_bytes(
    world_size: int, level: CompressionLevel
) -> None:
    storage = MemoryStorage()
    options = SaveOptions("run/1", compression_level=level)
    assert await save(lambda rank: storage, world_size, options=lambda rank: options) == ["run/1"] * world_size
    check_saved(storage, world_size)
    assert listing.read_manifest(storage, "run/1").size_bytes < ROWS * 16 * 4


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("layout", [CheckpointFormat.SINGLE_FILE, CheckpointFormat.CONSOLIDATED])
@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
async def test_every_format_holds_the_same_state(
    world_size: int, layout: CheckpointFormat, level: CompressionLevel
) -> None:
    storage, options = MemoryStorage(), SaveOptions("run/1", layout, level)
    assert await save(lambda rank: storage, world_size, options=lambda rank: options) == ["run/1"] * world_size
    check_saved(storage, world_size)
    manifest = listing.read_manifest(storage, "run/1")
    named = {part.file for part in manifest.parts} | {*manifest.extra_files, manifest.path}
    assert set(storage.files) == named


async def test_copies_are_written_by_other_ranks() -> None:
    storage = MemoryStorage()
    await save(lambda rank: storage, 3, options=lambda rank: SaveOptions("run/1", copies=2))
    check_saved(storage, 3)
    manifest = listing.read_manifest(storage, "run/1")
    copied = manifest.tensors.names.index("model/copied")
    assert sum(part.tensors.count(copied) for part in manifest.parts) >= 4


async def test_a_state_may_be_nothing_but_values() -> None:
    storage = MemoryStorage()
    for size, layout, level in product((1, 2), CheckpointFormat, CompressionLevel):
        options = SaveOptions(f"run/{size}-{layout}-{level}", layout, level)
        await save(lambda rank: storage, size, options=lambda rank: options, state=lambda rank, size: {"step": 1})  # noqa: B023
        assert state_of(storage, f"run/{size}-{layout}-{level}") == {"step": 1}
    assert all(name.endswith(SUFFIX) for name in storage.files), "where there are no tensors there are no other files"


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
@pytest.mark.parametrize("layout", CheckpointFormat)
async def test_a_rank_that_has_nothing_to_write_writes_nothing(
    layout: CheckpointFormat, level: CompressionLevel
) -> None:
    """Also if the faulty rank is the root."""
    storage = MemoryStorage()
    watched = FaultyStorage(storage)

    def state(rank: int, size: int) -> dict[str, Any]:
        return {"own": PerRank(np.arange(4.0) if rank == 1 else None)}

    await save(lambda rank: watched, 3, options=lambda rank: SaveOptions("run/1", layout, level), state=state)
    assert watched.calls.count("write") == (1 if layout is CheckpointFormat.MULTI_SHARD else 2)
    manifest = listing.read_manifest(storage, "run/1")
    assert (manifest.world_size, len(manifest.parts)) == (3, 1)
    assert set(listing.files_of(manifest)) | {manifest.path} == set(storage.files)
    assert CheckpointValidator(storage).validate_checkpoint("run/1").findings == ()
    for rank in range(3):
        loaded = load_state(storage, manifest, rank=rank, world_size=3).state
        assert (None if loaded["own"] is None else loaded["own"].tolist()) == ([0, 1, 2, 3] if rank == 1 else None)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from(["", "a", "/", "#1", "~", "a/b", "[0:1]", "a@0", "."]), unique=True), st.booleans())
def test_arrays_with_similar_keys_are_not_confused(keys: list[str], nested: bool) -> None:
    """Also where a key is empty, or looks like what a name is made of."""

    async def all_of_it() -> None:
        storage = MemoryStorage()
        state: dict[Any, Any] = {key: np.full(3, n) for n, key in enumerate(keys)}
        if nested:
            state = {"": state, "deeper": {key: {"": value, "a": value + 50} for key, value in state.items()}, **state}
        mine = {**state, "a@1": np.ones(2), "p": PerRank(np.zeros(2))}
        await save(lambda rank: storage, 2, state=lambda rank, size: mine)
        assert same(state_of(storage, "run/1", 1), {**mine, "p": np.zeros(2)})

    asyncio.run(all_of_it())


async def test_default_prefix_has_the_time_and_is_unique() -> None:
    storage = MemoryStorage()
    drawn = iter([b"abcd", b"1234", b"efgh", b"5678"])
    world = SaveContext(storage, lambda: 86_400.0 * 365, lambda size: next(drawn), (), SILENT)
    names = [await alone(Saver(world), SaveOptions()) for _ in range(2)]
    assert names == ["checkpoint_19710101_000000_61626364", "checkpoint_19710101_000000_65666768"]
    assert listing.prefixes(storage) == names


async def alone(one: Saver, options: SaveOptions, state: Any = None, ranks: Any = None) -> str:
    """Save by one rank, as a run does time and again."""
    token = CancelToken(60.0)
    together = RankGroup(ranks or SingleProcess(), token, ExceptionType.SAVE_FAILED)

    async def given() -> Any:
        return {"w": np.arange(5)} if state is None else state

    return await one.write_and_publish(together, await one.agree(together, given, options), RunInfo(), token)


def world_of(storage: Storage) -> SaveContext:
    drawn = count(1)
    return SaveContext(storage, lambda: 0.0, lambda size: next(drawn).to_bytes(size, "big"), (), SILENT)


async def test_state_may_change_between_saves() -> None:
    storage = MemoryStorage()
    one = Saver(world_of(storage))
    states = [
        {"w": np.arange(5)},
        {"w": np.arange(5) + 1},
        {"w": np.arange(6)},
        {"v": np.arange(6)},
        {"v": np.arange(6.0)},
    ]
    for number, state in enumerate([*states, *states]):
        await alone(one, SaveOptions(f"run/{number}"), state)
        assert same(state_of(storage, f"run/{number}"), state)


async def test_a_run_may_go_on_with_its_ranks_in_another_order() -> None:
    """All have the same as before, and each has another share of it."""
    storage = MemoryStorage()
    savings = [Saver(world_of(storage)) for _ in range(3)]
    for number, order in enumerate([[0, 1, 2], [0, 1, 2], [2, 0, 1], [1, 2, 0]]):

        async def act(member: UnreliableRank, order: list[int] = order, number: int = number) -> str:
            copied = np.arange(ROWS * 16, dtype=np.float32).reshape(ROWS, 16) + number
            return await alone(savings[order[member.rank]], SaveOptions(f"run/{number}"), {"w": copied}, member)

        assert await group(3, act) == [f"run/{number}"] * 3
        wanted = np.arange(ROWS * 16, dtype=np.float32).reshape(ROWS, 16) + number
        assert same(state_of(storage, f"run/{number}"), {"w": wanted})


async def test_a_run_may_go_on_in_a_smaller_world_and_alone() -> None:
    storage = MemoryStorage()
    savings = [Saver(world_of(storage)) for _ in range(3)]
    for number, size in enumerate([3, 1, 2, 1, 3]):

        async def act(member: UnreliableRank, number: int = number) -> str:
            rows = state_at(member.rank, member.world_size)
            return await alone(savings[member.rank], SaveOptions(f"run/{number}"), rows, member)

        assert await group(size, act) == [f"run/{number}"] * size
        check_saved(storage, size, f"run/{number}")


async def test_manifest_has_job_step_fence_and_metadata_of_the_run() -> None:
    storage = MemoryStorage()
    one, token = Saver(world_of(storage)), CancelToken(60.0)
    ranks = RankGroup(SingleProcess(), token, ExceptionType.SAVE_FAILED)

    async def given() -> Any:
        return {}

    work = await one.agree(ranks, given, SaveOptions("run/1", custom_metadata={"why": ["because", 1]}))
    await one.write_and_publish(ranks, work, RunInfo("job", 12), token)
    manifest = listing.read_manifest(storage, "run/1")
    assert (manifest.job, manifest.step, manifest.custom) == ("job", 12, {"why": ["because", 1]})
    assert manifest.save_id == work.agreement.save_id


# That it is seen late, and only once.


@pytest.mark.parametrize("world_size", [1, 3])
async def test_nothing_is_seen_before_all_is_written_and_settled(world_size: int) -> None:
    storage, seen = MemoryStorage(), list[tuple[str, list[str]]]()
    calls: list[list[str]] = [[] for _ in range(world_size)]

    def watching(rank: int) -> Fault:
        def fault(number: int, what: str, done: bool) -> None:
            if done:
                calls[rank].append(what)
            if what == "publish" and not done:
                assert [one[-2:] for one in calls[1:]] == [["write", "sync_names"]] * (world_size - 1)
            assert listing.prefixes(storage) == (["run/1"] if "publish" in calls[0] else [])
            seen.append((what, listing.prefixes(storage)))

        return fault

    await save(lambda rank: FaultyStorage(storage, watching(rank)), world_size)
    assert [what for what, there in seen if there] == ["publish"]


async def test_a_name_that_is_taken_is_refused_before_anything_is_written() -> None:
    storage = MemoryStorage()
    await save(lambda rank: storage, 2)
    before = dict(storage.files)
    watched = FaultyStorage(storage)
    for error in await save(lambda rank: watched, 2):
        assert (error.code, error.type) == ("checkpoint_exists", ExceptionType.SAVE_FAILED)
    assert storage.files == before
    assert "write" not in watched.calls


async def test_a_name_whose_checkpoint_is_being_deleted_is_refused_until_it_is_gone() -> None:
    storage = MemoryStorage()
    await save(lambda rank: storage, 1)
    storage.move("run/1" + SUFFIX, "run/1" + TOMBSTONE)
    (error,) = await save(lambda rank: storage, 1)
    assert (error.code, error.retryable) == ("checkpoint_being_deleted", True)
    listing.delete(storage, "run/1")
    assert storage.files == {}
    assert await save(lambda rank: storage, 1) == ["run/1"]


@pytest.mark.parametrize("layout", list(CheckpointFormat))
async def test_concurrent_saves_of_one_name_commit_one_and_clean_up_the_other(layout: CheckpointFormat) -> None:
    """Both have found the name free, and both come to write."""
    storage, both = MemoryStorage(), threading.Barrier(2)

    def meeting() -> Fault:
        has_met = threading.Event()

        def fault(number: int, what: str, done: bool) -> None:
            if what == "write" and not has_met.is_set():
                has_met.set()
                both.wait(30)

        return fault

    options = SaveOptions("run/1", layout)

    async def one_of_them() -> list[Any]:
        faulty = FaultyStorage(storage, meeting())
        return await save(lambda rank: faulty, 1, options=lambda rank: options)

    outcomes = await asyncio.gather(one_of_them(), one_of_them())
    (won,), (lost,) = sorted(outcomes, key=lambda one: isinstance(one[0], Exception))
    assert (won, lost.code) == ("run/1", "checkpoint_exists")
    check_saved(storage, 1)
    manifest = listing.read_manifest(storage, "run/1")
    assert set(storage.files) == {part.file for part in manifest.parts} | {manifest.path, *manifest.extra_files}


# That it fails, and all learn it.


@pytest.mark.parametrize("faulty", [0, 3])
@pytest.mark.parametrize("call", range(WISH, VERDICT + 1))
@pytest.mark.parametrize("fault", [hang, die, fail(ConnectionResetError("gone")), answer_with(b"\xc1")])
async def test_rank_lost_at_any_collective_is_reported_at_all_ranks(faulty: int, call: int, fault: RankFault) -> None:
    async def save_until(timeout_s: float) -> tuple[MemoryStorage, list[Any]]:
        storage = MemoryStorage()
        return storage, await save(lambda rank: storage, 4, {faulty: {call: fault}}, timeout_s)

    timeout_s = SOON_S
    storage, outcomes = await save_until(timeout_s)
    while call == VERDICT and faulty and timeout_s < LATE_S and not listing.checkpoint_exists(storage, "run/1"):
        # On a busy machine the time may be over before the manifest is published.
        check_failed(outcomes, storage)
        timeout_s *= 4
        storage, outcomes = await save_until(timeout_s)
    if call == VERDICT and faulty:
        # The manifest was published before; ranks without an answer report an unknown outcome.
        check_saved(storage, 4)
        assert all(one == "run/1" or isinstance(one, OutcomeUnknown | asyncio.CancelledError) for one in outcomes)
    elif faulty and call in {TERMS, PLAN, AGREED} and not any(isinstance(one, BaseException) for one in outcomes):
        # No rank uses the value of this call.
        check_saved(storage, 4)
    else:
        check_failed(outcomes, storage)


@pytest.mark.parametrize("faulty", [0, 2])
async def test_a_rank_that_cannot_take_its_state_is_named_at_all(faulty: int) -> None:
    storage = MemoryStorage()

    def state(rank: int, size: int) -> Any:
        return {"bad": object()} if rank == faulty else {"bad": 1}

    for error in check_failed(await save(lambda rank: storage, 3, state=state), storage):
        assert error.message.startswith(f"rank {faulty}: bad is a object")
        assert error.code == "checkpoint_value_unsupported"


@pytest.mark.parametrize(
    "other",
    [
        SaveOptions("run/2"),
        SaveOptions("run/1", CheckpointFormat.SINGLE_FILE),
        SaveOptions("run/1", compression_level=CompressionLevel.FAST),
        SaveOptions("run/1", copies=2),
        SaveOptions(),
    ],
)
async def test_ranks_with_different_options_are_refused(other: SaveOptions) -> None:
    storage = MemoryStorage()
    outcomes = await save(lambda rank: storage, 4, options=lambda rank: other if rank == 2 else NAMED)
    for error in check_failed(outcomes, storage):
        assert error.code == "checkpoint_ranks_differ"
        assert "rank 2" in error.message


@pytest.mark.parametrize("other", [np.zeros(4), np.zeros(3, np.int32), ShardedArray(np.zeros(3), (6,), (0,))])
async def test_ranks_with_different_arrays_are_refused(other: Any) -> None:
    storage = MemoryStorage()
    outcomes = await save(lambda rank: storage, 4, state=lambda rank, size: {"w": other if rank == 2 else np.zeros(3)})
    for error in check_failed(outcomes, storage):
        assert error.code == "checkpoint_ranks_differ"
        assert "w is float64 (3,) at rank 0" in error.message or "rank 2" in error.message


@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("is_planned", [False, True])
async def test_out_of_memory_at_one_rank_is_raised_at_all_ranks(
    monkeypatch: pytest.MonkeyPatch, faulty: int, is_planned: bool
) -> None:
    """Also where the plan is known already, so that there is nothing to meet for before they write."""
    storage = MemoryStorage()
    savings = [Saver(world_of(storage)) for _ in range(2)]
    short_of_memory = threading.Event()
    image_of = parts.image_of

    def made(plan: Any, rank: int, *rest: Any) -> Any:
        if rank == faulty and short_of_memory.is_set():
            raise MemoryError
        return image_of(plan, rank, *rest)

    monkeypatch.setattr(parts, "image_of", made)

    async def act(member: UnreliableRank, prefix: str) -> str:
        return await alone(savings[member.rank], SaveOptions(prefix), state_at(member.rank, 2), member)

    if is_planned:
        assert await group(2, lambda member: act(member, "a")) == ["a"] * 2
    short_of_memory.set()
    outcomes = await group(2, lambda member: act(member, "b"))
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointException)
        assert outcome.code == "checkpoint_memory"
        assert outcome.message == f"rank {faulty}: out of memory"
    short_of_memory.clear()
    assert await group(2, lambda member: act(member, "b")) == ["b"] * 2


async def test_parts_of_which_one_is_missing_are_refused_at_all() -> None:
    storage = MemoryStorage()

    def state(rank: int, size: int) -> Any:
        return {"w": ShardedArray(np.zeros(2), (8,), (2 * (rank % 3),))}

    for error in check_failed(await save(lambda rank: storage, 4, state=state), storage):
        assert error.code == "checkpoint_incomplete"


@pytest.mark.parametrize("layout", list(CheckpointFormat))
@pytest.mark.parametrize("after_it", [False, True])
@pytest.mark.parametrize("faulty", [0, 2])
async def test_a_storage_may_fail_at_any_step_of_any_rank(
    faulty: int, after_it: bool, layout: CheckpointFormat
) -> None:
    """All ranks succeed or all report the error; no file is left, or the checkpoint is whole."""
    options = SaveOptions("run/1", layout)
    for number in count():
        storage = MemoryStorage()
        storages = {
            rank: FaultyStorage(storage, at(number, after=after_it) if rank == faulty else on()) for rank in range(3)
        }
        outcomes = await save(storages.__getitem__, 3, options=lambda rank: options)
        if len(storages[faulty].calls) <= number:
            assert number >= 3
            break
        if outcomes == ["run/1"] * 3:
            check_saved(storage, 3)
        else:
            assert not any(isinstance(one, str) for one in outcomes), storages[faulty].calls[number]
            if layout is CheckpointFormat.CONSOLIDATED and storages[faulty].calls[number] == "write" and after_it:
                # The file's name has no save id, so its save is unknown.
                assert len(listing.delete_unfinished(storage, "run/1")) <= 1
            check_failed(outcomes, storage)
    assert outcomes == ["run/1"] * 3


@pytest.mark.parametrize("names", [("publish", "delete"), ("publish", "read"), ("publish", "read", "delete")])
async def test_where_a_manifest_cannot_be_taken_back_nothing_is_deleted_that_it_names(names: tuple[str, ...]) -> None:
    """Its publishing has failed after it was there; and so does every attempt to undo that."""
    storage = MemoryStorage()

    def fault(number: int, what: str, done: bool) -> None:
        if what in names and done == (what == "publish"):
            raise broken()

    outcomes = await save(lambda rank: FaultyStorage(storage, fault), 3)
    assert all(isinstance(one, OutcomeUnknown) for one in outcomes)
    assert {one.code for one in outcomes} == {"checkpoint_undecided"}
    check_saved(storage, 3)


async def test_a_manifest_that_may_not_be_durable_is_taken_back() -> None:
    storage = MemoryStorage()
    outcomes = await save(lambda rank: FaultyStorage(storage, on("publish", after=True)), 3)
    check_failed(outcomes, storage)
    assert storage.files == {}


async def test_own_manifest_of_an_earlier_try_counts_as_published() -> None:
    """A try before has got through, though it was told that it had not."""
    storage = MemoryStorage()

    def exists() -> BaseException:
        return CheckpointException("it is there", code="checkpoint_exists", type=ExceptionType.STORAGE_ERROR)

    watched = FaultyStorage(storage, on("publish", after=True, error=exists))
    assert await save(lambda rank: watched, 1) == ["run/1"]
    check_saved(storage, 1)
    assert watched.calls[-1] == "sync_names"


async def test_a_manifest_that_is_stuck_leaves_all_that_it_names() -> None:
    """The manifest may appear later, so no rank deletes the files that it names."""
    storage, release = MemoryStorage(), threading.Event()

    def stuck(number: int, what: str, done: bool) -> None:
        if what == "publish" and not done:
            release.wait(30)

    stalled = FaultyStorage(storage, stuck)
    outcomes = await save(lambda rank: stalled if rank == 0 else storage, 3, timeout_s=3.0)
    assert all(isinstance(one, OutcomeUnknown) for one in outcomes), outcomes
    assert not listing.checkpoint_exists(storage, "run/1")
    release.set()
    await asyncio.to_thread(_until, lambda: listing.checkpoint_exists(storage, "run/1"))
    check_saved(storage, 3)


def _until(true: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    tick = threading.Event()
    for _ in range(3000):
        if true():
            return
        tick.wait(0.01)
    raise AssertionError("it does not come")


@pytest.mark.parametrize("faulty", [0, 2])
async def test_hanging_write_times_out_at_all_ranks(faulty: int) -> None:
    storage, release = MemoryStorage(), threading.Event()

    def stuck(number: int, what: str, done: bool) -> None:
        if what == "write" and not done:
            release.wait(30)

    try:
        outcomes = await save(
            lambda rank: FaultyStorage(storage, stuck) if rank == faulty else storage, 3, timeout_s=SOON_S
        )
        errors = check_failed(outcomes, storage)
        assert {error.type for error in errors} == {ExceptionType.TIMEOUT}
        assert not listing.checkpoint_exists(storage, "run/1")
    finally:
        release.set()


async def test_a_write_that_is_slow_is_stopped_at_its_next_block() -> None:
    storage = MemoryStorage()

    class Slow(MemoryStorage):
        def write(self, name: str, source: ByteSource, token: CancelToken) -> None:
            token.wait(60)

    outcomes = await save(lambda rank: Slow() if rank == 1 else storage, 3, timeout_s=3.0)
    for error in check_failed(outcomes, storage):
        assert not isinstance(error, OutcomeUnknown)
        assert (error.type, error.message[:7]) == (ExceptionType.TIMEOUT, "rank 1:")
    assert storage.files == {}


@pytest.mark.parametrize("faulty", [0, 2])
async def test_too_large_header_at_one_rank_is_raised_at_all_ranks(
    faulty: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = MemoryStorage()
    monkeypatch.setattr("forged.checkpoint.format.safetensors.HEADER_BYTES_MAX", 20_000)
    many = {f"{'x' * 100}{number}": PerRank(np.zeros(1)) for number in range(200)}
    outcomes = await save(lambda rank: storage, 3, state=lambda rank, size: many if rank == faulty else {})
    for error in check_failed(outcomes, storage):
        assert error.message.startswith(f"rank {faulty}: the names and shapes")


async def test_too_large_manifest_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    monkeypatch.setattr("forged.checkpoint.format.manifest.MANIFEST_BYTES_MAX", 2_000)
    for error in check_failed(await save(lambda rank: storage, 2), storage):
        assert "the manifest of run/1 has" in error.message


async def test_too_little_room_is_found_before_anything_is_written() -> None:
    storage = MemoryStorage()
    storage.room = 1000
    watched = FaultyStorage(storage)
    for error in check_failed(await save(lambda rank: watched, 2), storage):
        assert error.code == "checkpoint_disk_full"
    assert "write" not in watched.calls


async def test_cancelled_write_leaves_no_files() -> None:
    storage, began = MemoryStorage(), asyncio.Event()
    loop = asyncio.get_running_loop()

    class Slow(MemoryStorage):
        def write(self, name: str, source: ByteSource, token: CancelToken) -> None:
            loop.call_soon_threadsafe(began.set)
            token.wait(60)

    slow = Slow()
    task = asyncio.create_task(alone(Saver(world_of(slow)), NAMED))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slow.files == storage.files == {}


async def test_a_late_rank_is_waited_for_and_all_is_saved() -> None:
    storage, come = MemoryStorage(), asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, come.set)
    assert await save(lambda rank: storage, 3, {1: {PART: after_event(come)}}) == ["run/1"] * 3
    check_saved(storage, 3)


async def test_failed_clean_up_is_logged_and_the_first_error_raised() -> None:
    storage = MemoryStorage()
    (error,) = await save(lambda rank: FaultyStorage(storage, on("sync_names", "delete")), 1)
    assert error.code == "broken"
    left = [*storage.files]
    assert len(left) == 1
    assert listing.delete_unfinished(storage, "run/1") == [*left]
    assert storage.files == {}
