"""An observer is told by the root how each save goes, and fails none."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from forged.checkpoint.checkpoint import DistributedCheckpoint
from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.model import SaveOptions
from forged.checkpoint.ports import ObservedSave, Storage
from forged.checkpoint.rank_group import SingleProcess
from forged.checkpoint.saving.save_report import SaveReport
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.fault_handler import FaultToleranceHandler
from forged.retry import RetryPolicy
from tests.checkpoint.fixtures.faulty_storage import FaultyStorage, on
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.rank_group import SimulatedRank, SimulatedRanks, all_ranks
from tests.telemetry.recording_log import RecordingLog

STATE = {"w": np.zeros(100)}


class Observer:
    """Keeps what it is told; raises if it is broken."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self._is_broken = is_broken

    def _hear(self, *heard: Any) -> None:
        self.heard.append(heard)
        if self._is_broken:
            raise OSError("the observer is broken")

    def save_started(self, save: ObservedSave) -> None:
        self._hear("started", save)

    def save_committed(self, save: ObservedSave, size_bytes: int, seconds: float) -> None:
        self._hear("committed", save, size_bytes, seconds)

    def save_failed(self, save: ObservedSave, reason: str) -> None:
        self._hear("failed", save, reason)

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, *_ in self.heard]


class Root(SingleProcess):
    """One rank whose job has a catalogue."""

    step, epoch = 7, 1

    def __init__(self, observer: Observer) -> None:
        self.checkpoint_catalog = observer


def checkpoint(coordinator: Any, storage: Storage, log: Any = None) -> DistributedCheckpoint:
    return DistributedCheckpoint(
        coordinator, storage, FaultToleranceHandler(storage, RetryPolicy(attempts=1)), logger=log
    )


async def save(one: DistributedCheckpoint, options: SaveOptions, *, in_background: bool) -> None:
    if in_background:
        await (await one.save_async(STATE, options=options)).committed()
    else:
        await one.save(STATE, options=options)


@pytest.mark.parametrize("in_background", [False, True])
async def test_save_is_reported_from_its_start_to_its_end(in_background: bool) -> None:
    observer, storage = Observer(), MemoryStorage()
    one = checkpoint(Root(observer), storage)
    one.keep = 3
    await save(one, SaveOptions("a", metrics={"loss": np.float32(0.5)}, reason="why"), in_background=in_background)
    (_, started), (_, committed, size, seconds) = observer.heard
    manifest = listing.read_manifest(storage, "a")
    assert started == committed
    assert started == ObservedSave(storage, "a", manifest.save_id, 7, 1, {"loss": 0.5}, "why", 3, "")
    assert started.storage_path == f"{storage.url}/a"
    assert size == manifest.size_bytes
    assert seconds >= 0
    assert observer.kinds == ["started", "committed"]
    await one.close()


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("operation", ["write", "publish"])
async def test_failed_save_is_reported_with_its_reason(in_background: bool, operation: str) -> None:
    observer = Observer()
    one = checkpoint(Root(observer), FaultyStorage(MemoryStorage(), on(operation)))
    with pytest.raises(CheckpointException) as caught:
        await save(one, SaveOptions("a"), in_background=in_background)
    assert observer.kinds == ["started", "failed"]
    assert observer.heard[1][2] in str(caught.value)
    await one.close()


async def test_state_that_cannot_be_staged_is_a_failed_save(monkeypatch: pytest.MonkeyPatch) -> None:
    observer = Observer()
    one = checkpoint(Root(observer), MemoryStorage())

    def stage(*arguments: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(one._staging, "stage", stage)
    with pytest.raises(CheckpointException):
        await one.save_async(STATE)
    assert observer.kinds == ["started", "failed"]
    await one.close()


@pytest.mark.parametrize("in_background", [False, True])
async def test_only_the_root_reports(in_background: bool) -> None:
    storage, observers = MemoryStorage(), [Observer() for _ in range(3)]

    async def act(rank: SimulatedRank) -> None:
        rank.checkpoint_catalog = observers[rank.rank]  # type: ignore[attr-defined]
        one = checkpoint(rank, storage)
        await save(one, SaveOptions("a"), in_background=in_background)
        await one.close()

    assert await all_ranks(3, act) == [None] * 3
    assert [observer.kinds for observer in observers] == [["started", "committed"], [], []]


async def test_save_that_another_rank_fails_is_reported_as_failed() -> None:
    observer, storage = Observer(), MemoryStorage()
    together = SimulatedRanks(2)

    async def act(number: int) -> None:
        rank = SimulatedRank(together, number)
        rank.checkpoint_catalog = observer  # type: ignore[attr-defined]
        one = checkpoint(rank, FaultyStorage(storage, on("write")) if number else storage)
        await one.save({"w": np.zeros(1 << 20)}, options=SaveOptions("a"))

    outcomes = await asyncio.gather(act(0), act(1), return_exceptions=True)
    assert all(isinstance(outcome, CheckpointException) for outcome in outcomes)
    assert observer.kinds == ["started", "failed"]


@pytest.mark.parametrize("in_background", [False, True])
async def test_incremental_save_names_the_checkpoint_whose_files_it_uses(in_background: bool) -> None:
    observer, storage = Observer(), MemoryStorage()
    one = checkpoint(Root(observer), storage)
    same = np.arange(100_000.0)
    for name, base, other in (("a", None, 0.0), ("b", "a", 1.0), ("c", "b", 2.0)):
        state, options = {"same": same, "other": np.full(100_000, other)}, SaveOptions(name, base=base)
        if in_background:
            await (await one.save_async(state, options=options)).committed()
        else:
            await one.save(state, options=options)
    assert observer.kinds == ["started", "committed"] * 3
    saves = [save for _, save, *_ in observer.heard]
    # A save may use all files of its base. What "c" shares with it is in the files of "a".
    assert [save.parent for save in saves] == ["", "", "a", "a", "b", "a"]
    assert saves[4].parent_path == f"{storage.url}/b"
    await one.close()


async def test_save_that_shares_nothing_with_its_base_is_full() -> None:
    observer, storage = Observer(), MemoryStorage()
    one = checkpoint(Root(observer), storage)
    for name, base, value in (("a", None, 0.0), ("b", "a", 1.0)):
        options = SaveOptions(name, base=base, include_rng_state=False)
        await one.save({"w": np.full(100_000, value)}, options=options)
    assert [(kind, save.parent) for kind, save, *_ in observer.heard[2:]] == [("started", "a"), ("committed", "")]


async def test_incremental_save_that_fails_is_reported() -> None:
    observer, storage = Observer(), MemoryStorage()
    await checkpoint(None, storage).save(STATE, options=SaveOptions("a"))
    one = checkpoint(Root(observer), FaultyStorage(storage, on("publish")))
    with pytest.raises(CheckpointException):
        await one.save(STATE, options=SaveOptions("b", base="a"))
    assert observer.kinds == ["started", "failed"]


@pytest.mark.parametrize("in_background", [False, True])
async def test_observer_that_raises_fails_no_save(in_background: bool) -> None:
    observer, storage, log = Observer(is_broken=True), MemoryStorage(), RecordingLog()
    one = checkpoint(Root(observer), storage, log)
    await save(one, SaveOptions("a"), in_background=in_background)
    assert listing.prefixes(storage) == ["a"]
    assert observer.kinds == ["started", "committed"]
    await one.close()


def test_committed_save_does_not_fail_afterwards() -> None:
    times, observer = iter([10.0, 12.5]), Observer()
    save = ObservedSave(MemoryStorage(), "a", "00", 1, 0, {}, "", None, "")
    report = SaveReport(observer, save, RecordingLog(), lambda: next(times))
    report.committed(5)
    report.failed(OSError("a rank was lost after that"))
    assert observer.heard == [("started", save), ("committed", save, 5, 2.5)]


async def test_metrics_are_in_the_manifest_as_far_as_json_has_them() -> None:
    storage = MemoryStorage()
    one = checkpoint(None, storage)
    metrics = {"loss": float("nan"), "accuracy": 1}
    await one.save(STATE, options=SaveOptions("a", metrics=metrics, custom_metadata={"mine": 2}))
    assert listing.read_manifest(storage, "a").custom == {"metrics": {"accuracy": 1.0}, "mine": 2}
    await one.save(STATE, options=SaveOptions("b", metrics=metrics, custom_metadata={"metrics": "mine"}))
    assert listing.read_manifest(storage, "b").custom == {"metrics": "mine"}


@pytest.mark.parametrize(
    "metrics", [{"loss": "low"}, {1: 2.0}, {"is": True}, [0.5], {str(n): n for n in range(65)}, {"n" * 129: 1}, {"": 1}]
)
def test_invalid_metrics_are_refused(metrics: Any) -> None:
    with pytest.raises(CheckpointException, match="metrics must"):
        SaveOptions("a", metrics=metrics)
