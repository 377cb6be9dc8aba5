"""`DistributedCheckpoint` with one process and with several ranks."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
from structlog.testing import capture_logs

from forged.checkpoint import (
    CheckpointException,
    CheckpointFormat,
    CheckpointOptions,
    CheckpointValidator,
    CompressionLevel,
    DistributedCheckpoint,
    ExceptionType,
    FaultToleranceHandler,
    Finding,
    LeafType,
    LoadOptions,
    RetryPolicy,
    SaveOptions,
    ShardedArray,
    Stateful,
    StorageOptions,
    create_checkpoint,
    thread_calls,
)
from forged.checkpoint import checkpoint as checkpoints
from forged.checkpoint.format.manifest import SUFFIX, TOMBSTONE, ManifestFence
from forged.checkpoint.ports import Storage
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.local import LocalStorage
from forged.errors import RequestRefused
from tests.checkpoint.fixtures.faulty_storage import Fault, FaultyStorage, broken, on
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.plain_reader import same, state_of
from tests.checkpoint.fixtures.rank_group import SimulatedRanks
from tests.checkpoint.fixtures.unreliable_ranks import UnreliableRank, group
from tests.checkpoint.test_rng import unchanged
from tests.telemetry.recording_log import RecordingLog

__all__ = ["unchanged"]


class Model:
    """A model with a state."""

    def __init__(self, seed: int = 0) -> None:
        source = np.random.default_rng(seed)
        self.weights = source.random((300, 7)).astype(np.float32)
        self.layers = [source.random(5), source.integers(0, 9, (2, 3))]
        self.step = seed
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "layers": self.layers, "step": self.step, "by number": {3: "three"}}

    def load_state_dict(self, state: Any) -> None:
        self.loads += 1
        self.weights, self.layers, self.step = state["weights"], state["layers"], state["step"]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make hanging calls end soon after their timeout."""
    monkeypatch.setattr(thread_calls, "RETURN_GRACE_S", 0.2)


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


def checkpoint(storage: Storage, coordinator: Any = None, **settings: Any) -> DistributedCheckpoint:
    return DistributedCheckpoint(
        coordinator, storage, FaultToleranceHandler(storage, RetryPolicy(attempts=1)), **settings
    )


# There and back.


def test_a_model_is_stateful() -> None:
    assert isinstance(Model(), Stateful)


@pytest.mark.parametrize("layout", list(CheckpointFormat))
@pytest.mark.parametrize("level", list(CompressionLevel))
async def test_a_saved_state_is_loaded_with_any_options(
    storage: MemoryStorage, layout: CheckpointFormat, level: CompressionLevel
) -> None:
    one = checkpoint(storage)
    options = SaveOptions("run/1", layout, level, custom_metadata={"note": [1, None]})
    assert await one.save(Model(1), Model(2), options) == "run/1"
    model, optimizer = Model(8), Model(9)
    result = await one.load(model, optimizer, LoadOptions("run/1"))
    assert same(model.state_dict(), Model(1).state_dict())
    assert same(optimizer.state_dict(), Model(2).state_dict())
    assert same(result.model_state, model.state_dict())
    assert same(result.optimizer_state, optimizer.state_dict())
    assert (result.source_world_size, result.target_world_size, result.was_resharded) == (1, 1, False)
    assert (result.metadata.layout, result.metadata.compression) == (layout, level)
    assert result.metadata.custom == {"note": [1, None]}


async def test_given_arrays_are_filled(storage: MemoryStorage) -> None:
    one, model = checkpoint(storage), Model(5)
    await one.save(Model(1), options=SaveOptions("a"))
    weights, layers = model.weights, model.layers[1]
    await one.load(model, options=LoadOptions("a"))
    assert model.weights is weights
    assert model.layers[1] is layers
    assert model.loads == 1
    assert same(model.state_dict(), Model(1).state_dict())


async def test_a_plain_dict_is_a_state(storage: MemoryStorage) -> None:
    one = checkpoint(storage)
    await one.save({"w": np.arange(5)}, [np.arange(3)], SaveOptions("a"))
    mine: dict[str, Any] = {"w": np.zeros(5, int)}
    await one.load(mine, options=LoadOptions("a"))
    assert same(mine, {"w": np.arange(5)})


async def test_without_a_model_the_result_has_the_state(storage: MemoryStorage) -> None:
    one = checkpoint(storage)
    await one.save(Model(1), Model(2), SaveOptions("a"))
    result = await one.load(options=LoadOptions("a"))
    assert same(result.model_state, Model(1).state_dict())
    assert same(result.optimizer_state, Model(2).state_dict())


async def test_the_optimizer_can_be_left_out_of_a_save(storage: MemoryStorage) -> None:
    one = checkpoint(storage)
    await one.save_model_only(Model(1), SaveOptions("a"))
    await one.save(Model(1), Model(2), SaveOptions("b", include_optimizer=False))
    for prefix in ("a", "b"):
        assert (await one.load(options=LoadOptions(prefix))).optimizer_state is None


async def test_the_optimizer_can_be_left_out_of_a_load(storage: MemoryStorage) -> None:
    one, optimizer = checkpoint(storage), Model(9)
    await one.save(Model(1), Model(2), SaveOptions("a"))
    result = await one.load(Model(8), optimizer, LoadOptions("a", load_optimizer=False))
    assert (optimizer.loads, result.optimizer_state) == (0, None)
    assert same(optimizer.state_dict(), Model(9).state_dict())


async def test_random_generators_are_restored(storage: MemoryStorage) -> None:
    mine = np.random.default_rng(5)
    one = checkpoint(storage, generators={"data": mine})
    await one.save(Model(1), options=SaveOptions("a"))
    wanted = random.random(), np.random.random(), mine.random()
    await one.load(Model(), options=LoadOptions("a"))
    assert (random.random(), np.random.random(), mine.random()) == wanted


async def test_random_generators_can_be_left_out(storage: MemoryStorage) -> None:
    one = checkpoint(storage)
    await one.save(Model(1), options=SaveOptions("with"))
    await one.save(Model(1), options=SaveOptions("without", include_rng_state=False))
    assert "rng" not in state_of(storage, "without")
    random.random()
    for options in (LoadOptions("with", load_rng_state=False), LoadOptions("without")):
        before = random.getstate()
        await one.load(Model(), options=options)
        assert random.getstate() == before


async def test_the_default_name_has_the_time(storage: MemoryStorage) -> None:
    one = checkpoint(storage, wall=lambda: 0.0, draw=lambda size: b"\1\2\3\4"[:size])
    assert await one.save(Model()) == "checkpoint_19700101_000000_01020304"


async def test_leaf_types_are_saved_and_loaded(storage: MemoryStorage) -> None:
    class Tensor:
        def __init__(self, array: Any) -> None:
            self.array = array

    kind = LeafType(
        lambda value: isinstance(value, Tensor), lambda value: value.array, lambda array, there: Tensor(array)
    )
    one = checkpoint(storage, leaf_types=[kind])
    await one.save({"t": Tensor(np.arange(4))}, options=SaveOptions("a"))
    result = await one.load(options=LoadOptions("a"))
    assert same(np.asarray(getattr(result.model_state["t"], "array", result.model_state["t"])), np.arange(4))


async def test_prepared_memory_suffices_for_a_save(storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    one = checkpoint(storage)
    await one.prepare(Model(1), Model(2), SaveOptions("a"))
    assert storage.files == {}
    monkeypatch.setattr(
        "forged.checkpoint.saving.files.staging.new_memory", lambda size: pytest.fail("it was not prepared")
    )
    await one.save_async(Model(1), Model(2), SaveOptions("a"))
    await one.close()
    assert listing.prefixes(storage) == ["a"]


# What is refused.


@pytest.mark.parametrize("options", [None, LoadOptions(), LoadOptions("")])
async def test_a_load_without_a_name_is_refused(storage: MemoryStorage, options: LoadOptions | None) -> None:
    with pytest.raises(CheckpointException) as caught:
        await checkpoint(storage).load(Model(), options=options)
    assert (caught.value.code, caught.value.type) == ("checkpoint_prefix_missing", ExceptionType.VALIDATION_FAILED)


@pytest.mark.parametrize("prefix", ["/a", "../a", "a//b", ".a", "a b", "a/", "ü", "a" * 201])
async def test_names_that_leave_the_storage_are_refused(storage: MemoryStorage, prefix: str) -> None:
    one = checkpoint(storage)
    with pytest.raises(CheckpointException, match="invalid checkpoint_prefix"):
        SaveOptions(prefix)
    for call in (one.load(options=LoadOptions(prefix)), one.delete_checkpoint(prefix)):
        with pytest.raises(CheckpointException, match="invalid checkpoint_prefix"):
            await call


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"format": "tar"}, "format must be one of .* got 'tar'"),
        ({"compression_level": 9}, "compression_level must be one of .* got 9"),
        ({"when_busy": "never"}, "when_busy"),
        ({"timeout": 0}, "timeout must be above 0 seconds or None, got 0"),
        ({"timeout": float("nan")}, "timeout must be .* got nan"),
        ({"copies": 0}, "copies must be from 1 to 8, got 0"),
        ({"custom_metadata": {"a": object()}}, "JSON"),
        ({"custom_metadata": {"a": float("nan")}}, "JSON"),
        ({"custom_metadata": {"a": np.float32(1)}}, "JSON"),
        ({"custom_metadata": {"a": "\ud800"}}, "JSON"),
        ({"custom_metadata": [1]}, "JSON"),
    ],
)
def test_options_are_validated_on_construction(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(CheckpointException, match=what) as caught:
        SaveOptions(**settings)
    assert caught.value.type is ExceptionType.VALIDATION_FAILED


def test_metadata_is_copied() -> None:
    given: dict[str, Any] = {"list": [1], "tuple": (2, 3)}
    options = SaveOptions(custom_metadata=given)
    given["list"].append(5)
    assert options.custom_metadata == {"list": [1], "tuple": [2, 3]}


async def test_an_object_without_a_state_is_refused(storage: MemoryStorage) -> None:
    one, thing = checkpoint(storage), SimpleNamespace()
    with pytest.raises(CheckpointException, match="the model is a SimpleNamespace"):
        await one.save(thing, options=SaveOptions("a"))
    with pytest.raises(CheckpointException, match="the optimizer is a SimpleNamespace"):
        await one.save(Model(), thing, SaveOptions("a"))
    assert storage.files == {}


async def test_a_missing_checkpoint_cannot_be_loaded_or_deleted(storage: MemoryStorage) -> None:
    one = checkpoint(storage)
    for call in (one.load(Model(), options=LoadOptions("a")), one.delete_checkpoint("a")):
        with pytest.raises(CheckpointException, match="checkpoint a does not exist") as caught:
            await call
        assert (caught.value.code, caught.value.checkpoint_path) == ("checkpoint_missing", "a")
        assert caught.value.type is ExceptionType.LOAD_FAILED
        assert "skip_validation" not in caught.value.fix


async def test_a_corrupt_manifest_is_named(storage: MemoryStorage) -> None:
    one = checkpoint(storage)
    await one.save(Model(), options=SaveOptions("a"))
    storage.damage("a" + SUFFIX, 20)
    with pytest.raises(CheckpointException) as caught:
        await one.load(Model(), options=LoadOptions("a"))
    assert caught.value.type is ExceptionType.CORRUPTED_CHECKPOINT


@pytest.mark.parametrize("storage", ["checkpoints", Path("checkpoints")])
def test_a_path_as_storage_is_refused(storage: Any) -> None:
    with pytest.raises(CheckpointException, match="create_storage"):
        DistributedCheckpoint(None, storage)


@pytest.mark.parametrize("skip", [False, True])
async def test_corruption_is_never_loaded(storage: MemoryStorage, skip: bool) -> None:
    one = checkpoint(storage)
    await one.save({"w": np.arange(1000)}, options=SaveOptions("a", include_rng_state=False))
    (part,) = listing.read_manifest(storage, "a").parts
    storage.damage(part.file, part.size - 1)
    with pytest.raises(CheckpointException) as caught:
        await one.load(options=LoadOptions("a", skip_validation=skip))
    assert caught.value.type is ExceptionType.CORRUPTED_CHECKPOINT
    assert "model/w" in caught.value.message


def lose(storage: MemoryStorage, file: str) -> None:
    del storage.files[file]


def cut_short(storage: MemoryStorage, file: str) -> None:
    storage.files[file] = storage.files[file][:-10]


def damage_header(storage: MemoryStorage, file: str) -> None:
    storage.damage(file, 100)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("spoil", [lose, cut_short, damage_header])
async def test_a_corrupt_file_with_a_copy_is_repaired(
    storage: MemoryStorage, spoil: Callable[[MemoryStorage, str], None], number: int, skip: bool
) -> None:
    """Faults of files that are found before the load do not refuse what the load can repair."""

    async def save(one: UnreliableRank) -> str:
        options = SaveOptions("a", copies=2, include_rng_state=False)
        return await checkpoint(storage, one).save({"w": np.arange(1 << 16)}, options=options)

    assert await group(2, save) == ["a", "a"]
    spoil(storage, listing.read_manifest(storage, "a").parts[number].file)
    mine = {"w": np.zeros(1 << 16, int)}
    await checkpoint(storage).load(mine, options=LoadOptions("a", skip_validation=skip))
    assert same(mine, {"w": np.arange(1 << 16)})


class Never:
    """A checker that finds a fault in every checkpoint."""

    name = "never"

    def check(self, manifest: Any, storage: Any, token: Any) -> list[Finding]:
        return [Finding("not today", self.name)]


async def test_findings_of_a_checker_refuse_the_load(storage: MemoryStorage) -> None:
    await checkpoint(storage).save({"w": np.arange(3)}, options=SaveOptions("a"))
    with pytest.raises(CheckpointException, match="not today") as caught:
        await checkpoint(storage, validator=CheckpointValidator(storage, [Never()])).load(options=LoadOptions("a"))
    assert caught.value.code == "never"


async def test_skip_validation_leaves_out_the_checkers(storage: MemoryStorage) -> None:
    one = checkpoint(storage, validator=CheckpointValidator(storage, [Never()]))
    await one.save({"w": np.arange(3)}, options=SaveOptions("a"))
    result = await one.load(options=LoadOptions("a", skip_validation=True))
    assert same(result.model_state, {"w": np.arange(3)})
    with pytest.raises(CheckpointException, match="not today"):
        await one.load(options=LoadOptions("a", skip_validation=False))


@pytest.mark.parametrize("skip", [False, True])
async def test_a_missing_file_is_an_error(storage: MemoryStorage, skip: bool) -> None:
    one = checkpoint(storage)
    await one.save(Model(), options=SaveOptions("a"))
    (part,) = listing.read_manifest(storage, "a").parts
    del storage.files[part.file]
    with pytest.raises(CheckpointException) as caught:
        await one.load(Model(), options=LoadOptions("a", skip_validation=skip))
    assert caught.value.checkpoint_path == "a"


async def test_a_model_of_other_shapes_is_refused_and_unchanged(storage: MemoryStorage) -> None:
    one = checkpoint(storage)
    await one.save({"w": np.ones(5), "v": np.ones(3)}, options=SaveOptions("a"))
    mine = {"w": np.zeros(6), "v": np.zeros(3), "u": np.zeros(1)}
    with pytest.raises(CheckpointException, match="model/w"):
        await one.load(mine, options=LoadOptions("a"))
    assert not mine["v"].any()
    result = await one.load(mine, options=LoadOptions("a", strict_mode=False))
    assert mine["v"].all()
    assert not mine["w"].any()
    assert result.mismatched
    assert any("model/u" in name for name in result.missing)


async def test_a_failing_load_state_dict_is_raised(storage: MemoryStorage) -> None:
    class Stubborn(Model):
        def load_state_dict(self, state: Any) -> None:
            raise ZeroDivisionError("not today")

    one = checkpoint(storage)
    await one.save(Model(), options=SaveOptions("a"))
    with pytest.raises(CheckpointException, match="not today") as caught:
        await one.load(Stubborn(), options=LoadOptions("a"))
    assert (caught.value.type, caught.value.checkpoint_path) == (ExceptionType.LOAD_FAILED, "a")


# What there is, and what is no more.


async def test_checkpoints_are_listed_oldest_first(storage: MemoryStorage) -> None:
    times = iter([300.0, 200.0, 100.0])
    one = checkpoint(storage, wall=lambda: next(times))
    assert await one.list_checkpoints() == []
    for prefix in ("c", "a/1", "b"):
        await one.save(Model(), options=SaveOptions(prefix, CheckpointFormat.SINGLE_FILE))
    infos = await one.list_checkpoints()
    assert [info.prefix for info in infos] == ["b", "a/1", "c"]
    second = infos[1]
    assert (second.version, second.world_size, second.format) == ("1.0", 1, CheckpointFormat.SINGLE_FILE)
    assert second.timestamp == 200.0
    assert second.size_bytes == sum(len(data) for name, data in storage.files.items() if name.startswith("a/1/"))


async def test_unfinished_checkpoints_are_not_listed(storage: MemoryStorage) -> None:
    one = checkpoint(storage)
    for prefix in ("good", "dying", "broken", "gone"):
        await one.save(Model(), options=SaveOptions(prefix))
    storage.move("dying" + SUFFIX, "dying" + TOMBSTONE)
    storage.damage("broken" + SUFFIX, 50)
    del storage.files["gone" + SUFFIX]
    assert [info.prefix for info in await one.list_checkpoints()] == ["good"]


async def test_a_deleted_checkpoint_is_gone_and_its_name_is_free(storage: MemoryStorage) -> None:
    one = checkpoint(storage)
    for prefix in ("a", "a/1", "b"):
        await one.save(Model(), options=SaveOptions(prefix))
    kept = {name for name in storage.files if name.startswith(("b", "a/1/", "a/1."))}
    await one.delete_checkpoint("a")
    assert set(storage.files) == kept
    assert [info.prefix for info in await one.list_checkpoints()] == ["a/1", "b"]
    assert await one.save(Model(), options=SaveOptions("a")) == "a"


async def test_an_interrupted_deletion_can_be_finished(storage: MemoryStorage) -> None:
    faulty = FaultyStorage(storage)
    one = checkpoint(faulty)
    await one.save(Model(), options=SaveOptions("a"))
    faulty._fault = on("delete")
    with pytest.raises(CheckpointException, match="broken"):
        await one.delete_checkpoint("a")
    assert await one.list_checkpoints() == []
    faulty._fault = on()
    await one.delete_checkpoint("a")
    assert storage.files == {}


# Time.


def holding(*names: str, release: threading.Event) -> Fault:
    def fault(number: int, what: str, done: bool) -> None:
        if what in names and not done:
            release.wait(30)

    return fault


CALLS: dict[str, tuple[tuple[str, ...], Callable[[DistributedCheckpoint], Awaitable[Any]]]] = {
    "save": (("write",), lambda one: one.save(Model(), options=SaveOptions("b", timeout=0.1))),
    "load": (("open", "read"), lambda one: one.load(Model(), options=LoadOptions("a", timeout=0.1))),
    "delete": (("move",), lambda one: one.delete_checkpoint("a")),
    "list": (("entries",), lambda one: one.list_checkpoints()),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_hanging_storage_ends_in_a_timeout(storage: MemoryStorage, call: str) -> None:
    await checkpoint(storage).save(Model(), options=SaveOptions("a"))
    names, act = CALLS[call]
    release = threading.Event()
    one = checkpoint(FaultyStorage(storage, holding(*names, release=release)), default_timeout=0.1)
    try:
        with pytest.raises(CheckpointException) as caught:
            await asyncio.wait_for(act(one), 30)
        assert caught.value.type is ExceptionType.TIMEOUT
    finally:
        release.set()


@pytest.mark.parametrize("call", ["save", "load"])
async def test_timeout_of_the_options_comes_before_the_default(storage: MemoryStorage, call: str) -> None:
    await checkpoint(storage).save(Model(), options=SaveOptions("a"))
    names, act = CALLS[call]
    release = threading.Event()
    one = checkpoint(FaultyStorage(storage, holding(*names, release=release)), default_timeout=0.3)
    try:
        with pytest.raises(CheckpointException, match=r"within 0\.1 s") as caught:
            await asyncio.wait_for(act(one), 30)
        assert caught.value.type is ExceptionType.TIMEOUT
    finally:
        release.set()


async def test_transient_failures_are_retried_within_the_timeout(storage: MemoryStorage) -> None:
    pauses = list[float]()

    def fault(number: int, what: str, done: bool) -> None:
        if (
            what in {"free_bytes", "publish", "sync_names"}
            and not done
            and faulty.calls.count(what) < 3
            and what != "free_bytes"
        ):
            raise broken(retryable=True)

    faulty = FaultyStorage(storage, fault)
    handler = FaultToleranceHandler(faulty, RetryPolicy(attempts=3, delay_s=0.001), sleep=pauses.append)
    one = DistributedCheckpoint(None, faulty, handler)
    assert await one.save(Model(), options=SaveOptions("a")) == "a"
    assert same(state_of(storage, "a")["model"], Model().state_dict())
    assert faulty.calls.count("publish") == 3


async def test_permanent_failures_are_raised(storage: MemoryStorage) -> None:
    faulty = FaultyStorage(storage, on("write", error=lambda: broken(retryable=True)))
    one = DistributedCheckpoint(None, faulty, FaultToleranceHandler(faulty, RetryPolicy(attempts=3, delay_s=0.001)))
    with pytest.raises(CheckpointException, match="broken"):
        await one.save(Model(), options=SaveOptions("a"))
    assert faulty.calls.count("write") == 3
    assert storage.files == {}


# Several ranks.

WHOLE = np.arange(60 * 4.0).reshape(60, 4)


def rows(rank: int, size: int, value: np.ndarray[Any, Any] = WHOLE) -> ShardedArray:
    start, end = len(WHOLE) * rank // size, len(WHOLE) * (rank + 1) // size
    return ShardedArray(value[start:end].copy(), WHOLE.shape, (start, 0))


def columns(rank: int, size: int, value: np.ndarray[Any, Any] = WHOLE) -> ShardedArray:
    start, end = 4 * rank // size, 4 * (rank + 1) // size
    return ShardedArray(value[:, start:end].copy(), WHOLE.shape, (0, start))


async def ranks(
    size: int, storage: Storage, act: Callable[[DistributedCheckpoint, UnreliableRank], Awaitable[Any]]
) -> list[Any]:
    async def member(one: UnreliableRank) -> Any:
        return await act(checkpoint(storage, one), one)

    return await asyncio.wait_for(group(size, member), 60)


@pytest.mark.parametrize(("before", "then"), [(1, 3), (4, 3), (3, 1), (2, 5), (3, 3)])
@pytest.mark.parametrize("layout", [rows, columns])
async def test_a_checkpoint_of_n_ranks_is_loaded_by_m(
    storage: MemoryStorage, before: int, then: int, layout: Callable[..., ShardedArray]
) -> None:
    async def save(one: DistributedCheckpoint, member: UnreliableRank) -> str:
        return await one.save({"w": rows(member.rank, before), "c": WHOLE}, options=SaveOptions("a"))

    async def load(one: DistributedCheckpoint, member: UnreliableRank) -> Any:
        mine: dict[str, Any] = {"w": layout(member.rank, then, np.zeros_like(WHOLE)), "c": np.zeros_like(WHOLE)}
        result = await one.load(mine, options=LoadOptions("a", load_rng_state=False))
        assert same(np.asarray(mine["w"].local), np.asarray(layout(member.rank, then).local))
        assert same(mine["c"], WHOLE)
        return result.source_world_size, result.target_world_size, result.was_resharded

    assert await ranks(before, storage, save) == ["a"] * before
    assert await ranks(then, storage, load) == [(before, then, before != then)] * then


async def test_each_ranks_generators_are_restored(storage: MemoryStorage) -> None:
    """The ranks of this test share a process, so each has its own generator."""
    mine = [np.random.default_rng(rank) for rank in range(3)]

    async def member(one: UnreliableRank) -> tuple[float, float]:
        ckpt = checkpoint(storage, one, generators={"data": mine[one.rank]})
        await ckpt.save({}, options=SaveOptions("a"))
        wanted = mine[one.rank].random()
        await ckpt.load({}, options=LoadOptions("a"))
        return wanted, mine[one.rank].random()

    outcomes = await group(3, member)
    assert len(set(outcomes)) == 3
    assert all(wanted == found for wanted, found in outcomes)  # type: ignore[misc]


async def test_rank_0_deletes_and_all_ranks_learn_the_outcome(storage: MemoryStorage) -> None:
    async def act(one: DistributedCheckpoint, member: UnreliableRank) -> Any:
        await one.save({"w": rows(member.rank, 3)}, options=SaveOptions("a"))
        await one.delete_checkpoint("a")
        with pytest.raises(CheckpointException) as caught:
            await one.delete_checkpoint("a")
        return caught.value.code

    assert await ranks(3, storage, act) == ["checkpoint_missing"] * 3
    assert storage.files == {}


async def test_a_load_failure_of_one_rank_is_raised_at_all(storage: MemoryStorage) -> None:
    async def act(one: DistributedCheckpoint, member: UnreliableRank) -> Any:
        await one.save({"w": np.ones(4)}, options=SaveOptions("a"))
        mine = {"w": np.zeros(5 if member.rank == 2 else 4)}
        with pytest.raises(CheckpointException) as caught:
            await one.load(mine, options=LoadOptions("a"))
        return caught.value.message[:7]

    assert await ranks(3, storage, act) == ["rank 2:"] * 3


async def test_ranks_that_read_different_saves_raise() -> None:
    """The checkpoint is replaced during the load."""
    storages = MemoryStorage(), MemoryStorage()
    for number, storage in enumerate(storages):
        await checkpoint(storage).save({"w": np.full(4, number)}, options=SaveOptions("a", include_rng_state=False))

    async def member(one: UnreliableRank) -> Any:
        with pytest.raises(CheckpointException) as caught:
            await checkpoint(storages[one.rank], one).load(options=LoadOptions("a"))
        return caught.value.code, caught.value.checkpoint_path, caught.value.retryable

    assert await group(2, member) == [("checkpoint_replaced", "a", True)] * 2


async def test_job_step_and_generation_are_in_the_manifest(storage: MemoryStorage) -> None:
    class Worker(UnreliableRank):
        generation, step, job = 7, 41, "run"

    await checkpoint(storage, Worker(SimulatedRanks(1), 0, {})).save({}, options=SaveOptions("a"))
    manifest = listing.read_manifest(storage, "a")
    assert (manifest.job, manifest.step) == ("run", 41)
    assert manifest.fence is not None
    assert manifest.fence.generation == 7


@pytest.mark.parametrize("value", [True, 1.5, "7", None, -1, 1 << 70, np.float32(3), [1]])
async def test_invalid_numbers_of_a_coordinator_are_left_out(storage: MemoryStorage, value: Any) -> None:
    """A coordinator is code of the caller, and the manifest must stay readable."""

    class Worker(UnreliableRank):
        generation, step, term, job = 7, value, value, value

    one = checkpoint(storage, Worker(SimulatedRanks(1), 0, {}))
    await one.save({"w": np.arange(3)}, options=SaveOptions("a"))
    manifest = listing.read_manifest(storage, "a")
    assert (manifest.step, manifest.fence) == (None, ManifestFence(0, 7))
    assert manifest.job == (value if isinstance(value, str) else "")


async def test_the_term_is_in_the_manifest(storage: MemoryStorage) -> None:
    class Worker(UnreliableRank):
        generation, step, term = np.int64(7), np.int32(41), 3

    await checkpoint(storage, Worker(SimulatedRanks(1), 0, {})).save({}, options=SaveOptions("a"))
    manifest = listing.read_manifest(storage, "a")
    assert (manifest.step, manifest.fence) == (41, ManifestFence(3, 7))


# The factory.


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "1"])
def test_an_invalid_timeout_is_refused(storage: MemoryStorage, timeout: Any) -> None:
    with pytest.raises(CheckpointException, match="default_timeout must be"):
        CheckpointOptions(default_timeout=timeout)
    with pytest.raises(CheckpointException, match="default_timeout must be"):
        checkpoint(storage, default_timeout=timeout)


class OneRank(UnreliableRank):
    """The only rank of a job."""

    job, step, generation = "run", 41, 7

    def __init__(self) -> None:
        super().__init__(SimulatedRanks(1), 0, {})


async def test_constructor_uses_each_part_that_it_is_given(storage: MemoryStorage) -> None:
    def fault(number: int, what: str, done: bool) -> None:
        if what == "write" and faulty.calls.count("write") < 5:
            raise broken(retryable=True)

    log, faulty = RecordingLog(), FaultyStorage(storage, fault)
    handler = FaultToleranceHandler(faulty, RetryPolicy(attempts=5, delay_s=0.001))
    one = DistributedCheckpoint(OneRank(), faulty, handler, CheckpointValidator(faulty, [Never()]), log)
    await one.save(Model(), options=SaveOptions("a"))
    assert one.storage is faulty
    assert faulty.calls.count("write") == 5
    assert listing.read_manifest(storage, "a").job == "run"
    assert [line["prefix"] for line in log.of("checkpoint saved")] == ["a"]
    with pytest.raises(CheckpointException, match="not today"):
        await one.load(options=LoadOptions("a"))


async def test_create_checkpoint_uses_its_storage_and_its_coordinator(tmp_path: Path) -> None:
    options = CheckpointOptions(StorageOptions("local", {"base_path": str(tmp_path)}))
    async with create_checkpoint(OneRank(), options) as one:
        assert isinstance(one.storage, LocalStorage)
        await one.save(Model(1), options=SaveOptions("a"))
        model = Model()
        await one.load(model, options=LoadOptions("a"))
    assert same(model.state_dict(), Model(1).state_dict())
    assert (tmp_path / "a.metadata.json").is_file()
    assert listing.read_manifest(one.storage, "a").job == "run"


def created_with(
    monkeypatch: pytest.MonkeyPatch, storage: Storage, options: CheckpointOptions
) -> DistributedCheckpoint:
    """What `create_checkpoint` makes of the options, with this storage."""
    monkeypatch.setattr(checkpoints, "create_storage", lambda given: storage)
    return create_checkpoint(options=options)


@pytest.mark.parametrize("attempts", [1, 4])
async def test_create_checkpoint_retries_as_its_policy_says(
    storage: MemoryStorage, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = FaultyStorage(storage, on("write", error=lambda: broken(retryable=True)))
    one = created_with(monkeypatch, faulty, CheckpointOptions(retry_policy=RetryPolicy(attempts, delay_s=0.001)))
    with pytest.raises(CheckpointException, match="broken"):
        await one.save(Model(), options=SaveOptions("a"))
    assert faulty.calls.count("write") == attempts


@pytest.mark.parametrize("kind", ["integrity_checkers", "compatibility_checkers"])
async def test_create_checkpoint_uses_its_checkers(
    storage: MemoryStorage, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkers: dict[str, Any] = {kind: [Never()]}
    one = created_with(monkeypatch, storage, CheckpointOptions(**checkers))
    await one.save(Model(), options=SaveOptions("a"))
    with pytest.raises(CheckpointException, match="not today"):
        await one.load(options=LoadOptions("a"))


async def test_create_checkpoint_uses_its_default_timeout(
    storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CheckpointOptions().default_timeout == 600.0
    release = threading.Event()
    hanging = FaultyStorage(storage, holding("write", release=release))
    one = created_with(monkeypatch, hanging, CheckpointOptions(default_timeout=0.1))
    try:
        with pytest.raises(CheckpointException, match=r"within 0\.1 s"):
            await asyncio.wait_for(one.save(Model(), options=SaveOptions("a")), 30)
    finally:
        release.set()


def test_checkpoint_options_have_the_defaults_of_the_seed() -> None:
    options = CheckpointOptions()
    assert options.storage == StorageOptions("local", {"base_path": "./checkpoints"})
    assert options.retry_policy == RetryPolicy(attempts=3, delay_s=1.0)
    assert (options.integrity_checkers, options.compatibility_checkers) == ((), ())
    assert options.default_timeout == 600.0


async def test_the_default_storage_is_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for one, prefix in ((create_checkpoint(), "a"), (DistributedCheckpoint(), "b")):
        await one.save(Model(), options=SaveOptions(prefix))
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("*.json")) == [
        "a.metadata.json",
        "b.metadata.json",
    ]


# The logger.


class RaisingLogger:
    """A logger whose methods raise."""

    def info(self, *args: object, **fields: object) -> None:
        raise OSError("the log server is away")

    debug = warning = error = info


@pytest.mark.parametrize(
    "logger",
    [logging.getLogger("mine"), structlog.get_logger(), RaisingLogger(), logging, None],
    ids=["standard", "structlog", "raising", "logging", "none"],
)
async def test_any_logger_is_taken_by_saves_and_loads(
    logger: Any, storage: MemoryStorage, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "mine"), capture_logs() as events:
        async with checkpoint(storage, logger=logger) as one:
            await one.save(Model(1), options=SaveOptions("a"))
            handle = await one.save_async(Model(1), options=SaveOptions("b"))
            assert await handle.committed() == "b"
            await one.load(Model(), options=LoadOptions("a"))
            storage.delete(["a.metadata.json"])
            with pytest.raises(CheckpointException, match="b exists already"):
                await one.save(Model(1), options=SaveOptions("b"))
    saved = [text for text in caplog.messages if "checkpoint saved" in text] + [event["event"] for event in events]
    if logger in (logging, None) or isinstance(logger, RaisingLogger):
        assert saved == []
    else:
        assert len(saved) == 1


async def test_failed_background_save_ends_its_handle_though_the_logger_raises(storage: MemoryStorage) -> None:
    one = checkpoint(FaultyStorage(storage, on("write")), logger=RaisingLogger())
    handle = await one.save_async(Model(1), options=SaveOptions("a"))
    with pytest.raises(CheckpointException):
        await asyncio.wait_for(handle.committed(), 10.0)
    await one.close()


def test_text_in_place_of_a_logger_is_refused(storage: MemoryStorage) -> None:
    with pytest.raises(RequestRefused, match="logger must have the methods"):
        checkpoint(storage, logger="info")


# Step and epoch.


async def test_listing_tells_step_and_epoch(storage: MemoryStorage) -> None:
    one = checkpoint(storage)
    await one.save(Model(1), options=SaveOptions("a", step=500, epoch=2))
    await (await one.save_async(Model(1), options=SaveOptions("b", step=600))).committed()
    await one.save(Model(1), options=SaveOptions("c"))
    assert [(info.prefix, info.step, info.epoch) for info in await one.list_checkpoints()] == [
        ("a", 500, 2),
        ("b", 600, None),
        ("c", None, None),
    ]


async def test_options_override_the_step_and_epoch_of_the_worker(storage: MemoryStorage) -> None:
    class Worker(UnreliableRank):
        step, epoch = 41, 3

    one = checkpoint(storage, Worker(SimulatedRanks(1), 0, {}))
    await one.save({}, options=SaveOptions("a"))
    await one.save({}, options=SaveOptions("b", step=0, epoch=0))
    infos = await one.list_checkpoints()
    assert [(info.step, info.epoch) for info in infos] == [(41, 3), (0, 0)]


@pytest.mark.parametrize("field", ["step", "epoch"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "7", 1 << 53])
def test_invalid_step_or_epoch_is_refused(field: str, value: Any) -> None:
    with pytest.raises(CheckpointException, match=f"{field} must be an integer from 0 to"):
        SaveOptions("a", **{field: value})


async def test_ranks_that_save_different_steps_are_refused(storage: MemoryStorage) -> None:
    async def act(rank: UnreliableRank) -> str:
        return await checkpoint(storage, rank).save({}, options=SaveOptions("a", step=rank.rank))

    for outcome in await group(2, act):
        assert isinstance(outcome, CheckpointException)
        assert outcome.code == "checkpoint_ranks_differ"
