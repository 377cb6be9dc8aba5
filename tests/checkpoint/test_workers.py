"""The workers of a job as ranks: they save and load over their collectives, with a real daemon."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forged.checkpoint
from forged.checkpoint import (
    AsyncCheckpoints,
    BlockingCheckpoint,
    Checkpoints,
    DistributedCheckpoint,
    LoadOptions,
    SaveOptions,
    ShardedArray,
)
from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.ports import ByteSource, CancelToken
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.local import LocalStorage
from forged.worker.blocking import Training
from forged.worker.errors import StepAborted
from forged.worker.process.worker_process import SharedProcess
from forged.worker.worker import ElasticWorker
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.plain_reader import same, state_of
from tests.client.conftest import runner, threaded_daemon
from tests.client.daemon_runner import DaemonRunner
from tests.client.threaded_daemon import ThreadedDaemon
from tests.worker.test_blocking import Scripts, learn
from tests.worker.trainers import JOB, Trainer, TrainerGroup, chain_after, config, group_at

__all__ = ["runner", "threaded_daemon"]

NAMES = ("a", "b", "c")
ROWS = 6_000


@pytest.fixture
async def group(runner: DaemonRunner) -> AsyncIterator[TrainerGroup]:
    """The workers of the job, when all have joined."""
    async with group_at(runner.endpoint, min_workers=2) as group:
        yield group


@pytest.fixture
def scripts(threaded_daemon: ThreadedDaemon) -> Iterator[Scripts]:
    scripts = Scripts(threaded_daemon.runner.endpoint)
    yield scripts
    scripts.end()


def part(rank: int, size: int, value: float = 1.0) -> ShardedArray:
    """The rows that a rank has of an array."""
    start, end = ROWS * rank // size, ROWS * (rank + 1) // size
    rows = np.arange(ROWS * 64, dtype=np.float32).reshape(ROWS, 64)[start:end] * value
    return ShardedArray(rows, (ROWS, 64), (start, 0))


def whole(value: float = 1.0) -> np.ndarray[Any, Any]:
    return np.arange(ROWS * 64, dtype=np.float32).reshape(ROWS, 64) * np.float32(value)


class Saving:
    """Has trainers save at one of their steps, and remembers what came of it."""

    def __init__(self, storage: Any, trainers: list[Trainer], act: Any) -> None:
        self.outcomes: dict[str, list[Any]] = {trainer.name: [] for trainer in trainers}
        self._step = max(trainer.worker.step for trainer in trainers) + 5
        self._done: set[str] = set()
        for trainer in trainers:
            checkpoint = DistributedCheckpoint(trainer.worker, storage)
            trainer.before_exchange = self._hook(trainer, checkpoint, act)

    def _hook(self, trainer: Trainer, checkpoint: DistributedCheckpoint, act: Any) -> Any:
        async def before_exchange(step: int) -> None:
            if step != self._step:
                return
            try:
                self.outcomes[trainer.name].append(await act(trainer, checkpoint))
            except (CheckpointException, StepAborted) as error:
                self.outcomes[trainer.name].append(error)
                raise StepAborted("the save has failed") from error

        return before_exchange


async def test_workers_save_over_their_collectives(group: TrainerGroup) -> None:
    storage = MemoryStorage()
    group.start(*NAMES)
    await group.world_of(*NAMES)

    async def act(trainer: Trainer, one: DistributedCheckpoint) -> Any:
        worker = trainer.worker
        mine: dict[str, Any] = {"rows": part(worker.rank, worker.world_size), "copied": whole(), "step": worker.step}
        await one.save(mine, options=SaveOptions("a"))
        await (await one.save_async(mine, options=SaveOptions("b"))).committed()
        zeros = {"rows": part(worker.rank, worker.world_size, 0), "copied": whole(0), "step": 0}
        result = await one.load(zeros, options=LoadOptions("b"))
        assert same(np.asarray(zeros["rows"].local), np.asarray(mine["rows"].local))  # type: ignore[attr-defined]
        assert same(zeros["copied"], whole())
        return result.source_world_size, worker.rank

    saving = Saving(storage, [group[name] for name in NAMES], act)
    await group.more_steps(*NAMES, steps=8)
    assert sorted(outcome for (outcome,) in saving.outcomes.values()) == [(3, 0), (3, 1), (3, 2)]
    for prefix in ("a", "b"):
        state = state_of(storage, prefix)["model"]
        assert same(state["rows"], whole())
        assert same(state["copied"], whole())
        manifest = listing.read_manifest(storage, prefix)
        assert (manifest.world_size, manifest.step) == (3, state["step"])
        assert manifest.fence is not None
        assert manifest.fence.generation == group["a"].worker.generation
        assert manifest.fence.term == group["a"].worker.term > 0
    await group.finish(*NAMES)


async def test_values_of_workers_may_exceed_a_frame(group: TrainerGroup) -> None:
    """The names alone are some MiB, and every rank says them."""
    storage = MemoryStorage()
    group.start(*NAMES)
    await group.world_of(*NAMES)
    mine = {f"{number:05d}{'x' * 400}": np.full(3, number) for number in range(6_000)}

    async def act(trainer: Trainer, one: DistributedCheckpoint) -> Any:
        own = {**mine, "own": ShardedArray(np.ones(1), (3,), (trainer.worker.rank,))}
        return await one.save(own, options=SaveOptions("a", include_rng_state=False))

    saving = Saving(storage, [group[name] for name in NAMES], act)
    await group.more_steps(*NAMES, steps=8)
    assert list(saving.outcomes.values()) == [["a"]] * 3
    assert same(state_of(storage, "a")["model"], {**mine, "own": np.ones(3)})
    await group.finish(*NAMES)


async def test_a_worker_that_is_lost_while_all_write_aborts_the_step_and_the_save(group: TrainerGroup) -> None:
    """The save is rolled back; the survivors repeat the step and save in their new world."""
    loop, writing, release = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    class Stalled(MemoryStorage):
        def write(self, name: str, source: ByteSource, token: CancelToken) -> None:
            if ".00001-of-00003" in name:
                loop.call_soon_threadsafe(writing.set)
                release.wait(30)
            super().write(name, source, token)

    storage = Stalled()
    group.start(*NAMES)
    await group.world_of(*NAMES)

    async def act(trainer: Trainer, one: DistributedCheckpoint) -> Any:
        worker = trainer.worker
        mine = {"rows": part(worker.rank, worker.world_size)}
        return await one.save(mine, options=SaveOptions(f"w{worker.world_size}", include_rng_state=False))

    trainers = [group[name] for name in NAMES]
    saving = Saving(storage, trainers, act)
    async with asyncio.timeout(30):
        await writing.wait()
    lost = next(trainer for trainer in trainers if trainer.worker.rank == 1)
    left = [trainer.name for trainer in trainers if trainer is not lost]
    assert lost.task is not None
    lost.task.cancel()
    release.set()
    await group.world_of(*left)
    await group.more_steps(*left, steps=3)
    for name in left:
        first, second = saving.outcomes[name]
        assert isinstance(first, StepAborted)
        assert second == "w2"
    assert listing.prefixes(storage) == ["w2"]
    assert same(state_of(storage, "w2")["model"], {"rows": whole()})
    await group.finish(*left)


def test_scripts_save_and_load_together(scripts: Scripts, tmp_path: Path) -> None:
    where = tmp_path / "checkpoints" / "at-three"

    def train(worker: Training) -> Any:
        found = None
        for step in worker.steps(6):
            with step:
                if step == 3:
                    mine = {"rows": part(worker.rank, worker.world_size), "copied": whole(), "step": int(step)}
                    forged.checkpoint.save(where, mine, ranks=worker)
                if step == 4:
                    zeros: dict[str, Any] = {
                        "rows": part(worker.rank, worker.world_size, 0),
                        "copied": whole(0),
                        "step": 0,
                    }
                    found = forged.checkpoint.load(where, zeros, ranks=worker)
                    assert same(zeros["copied"], whole())
                    assert same(zeros["rows"].local, part(worker.rank, worker.world_size).local)
                worker.barrier()
        assert found is not None
        return found["step"]

    started = [scripts.start(name, train, config=config(min_workers=3)) for name in NAMES]
    assert [future.result(60) for future in started] == [3, 3, 3]
    storage = LocalStorage(tmp_path / "checkpoints")
    assert same(state_of(storage, "at-three")["copied"], whole())
    assert listing.read_manifest(storage, "at-three").world_size == 3


def test_a_script_saves_in_the_background_while_it_trains(scripts: Scripts, tmp_path: Path) -> None:
    def train(worker: Training) -> Any:
        prefixes = []
        with BlockingCheckpoint(DistributedCheckpoint(worker, LocalStorage(tmp_path / "c"))) as one:
            for step in worker.steps(9):
                with step:
                    if step % 3 == 0:
                        mine = {"rows": part(worker.rank, worker.world_size, int(step))}
                        prefixes.append(one.save_async(mine, options=SaveOptions(f"c{step}")).prefix)
                    worker.barrier()
        return prefixes

    started = [scripts.start(name, train, config=config(min_workers=2)) for name in NAMES[:2]]
    assert [future.result(60) for future in started] == [["c0", "c3", "c6"]] * 2
    storage = LocalStorage(tmp_path / "c")
    for number in (0, 3, 6):
        assert same(state_of(storage, f"c{number}")["model"], {"rows": whole(number)})
        manifest = listing.read_manifest(storage, f"c{number}")
        assert (manifest.job, manifest.step, manifest.world_size) == (JOB, number, 2)
        assert manifest.fence is not None
        assert manifest.fence.term > 0


class Crashed(Exception):
    """A script has died."""


def kept_in(folder: Path, count: int) -> list[str]:
    """The checkpoints of a folder, when the daemon has left so many."""
    moment = threading.Event()
    for _ in range(6_000):
        if len(names := listing.prefixes(LocalStorage(folder))) <= count:
            break
        moment.wait(0.01)
    return names


def train_with_checkpoints(folder: Path, until: int, crash: threading.Barrier | None = None, **settings: Any) -> Any:
    """A script that resumes, saves every third step, and may crash in step 11, when all are in it."""

    def train(worker: Training) -> Any:
        steps = []
        with Checkpoints(folder, every=3, keep=2, ranks=worker, **settings) as checkpoints:
            checkpoints.resume(worker.state)
            for step in worker.steps(until):
                with step:
                    checkpoints.save(step, worker.state)
                    if crash is not None and step == 11:
                        crash.wait(60)
                        raise Crashed
                    assert worker.state["scratch"]["last"] == step
                    learn(worker, step)
                    steps.append(int(step))
            worker_step = worker.step
        return steps, worker_step, int(worker.state["chain"][0])

    return train


@pytest.mark.parametrize("in_background", [False, True])
def test_workers_resume_from_the_latest_checkpoint_after_all_have_died(
    scripts: Scripts, tmp_path: Path, in_background: bool
) -> None:
    settings, crash = config(min_workers=2), threading.Barrier(2)
    first = [
        scripts.start(name, train_with_checkpoints(tmp_path, 20, crash, in_background=in_background), config=settings)
        for name in "ab"
    ]
    for future in first:
        with pytest.raises(Crashed):
            future.result(60)
    assert kept_in(tmp_path, 2) == ["step-00000006", "step-00000009"]
    again = [
        scripts.start(name, train_with_checkpoints(tmp_path, 15, in_background=in_background), config=settings)
        for name in "cd"
    ]
    assert [future.result(60) for future in again] == [([*range(9, 15)], 15, chain_after(15))] * 2
    assert kept_in(tmp_path, 2) == ["step-00000009", "step-00000012"]


def test_workers_save_steps_again_after_lost_progress(scripts: Scripts, tmp_path: Path) -> None:
    """The newest checkpoint is damaged, so steps are repeated whose checkpoints exist."""
    settings, crash = config(min_workers=2), threading.Barrier(2)
    first = [scripts.start(name, train_with_checkpoints(tmp_path, 20, crash), config=settings) for name in "ab"]
    for future in first:
        with pytest.raises(Crashed):
            future.result(60)
    for path in (tmp_path / "step-00000009").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    again = [scripts.start(name, train_with_checkpoints(tmp_path, 11), config=settings) for name in "cd"]
    assert [future.result(60) for future in again] == [([*range(6, 11)], 11, chain_after(11))] * 2
    # The damaged one is abandoned, and the first to go.
    assert kept_in(tmp_path, 2) == ["step-00000006", "step-00000009-2"]


def test_joiner_takes_the_state_of_the_workers_and_not_of_the_checkpoint(scripts: Scripts, tmp_path: Path) -> None:
    reached = threading.Event()

    def train(worker: Training) -> Any:
        with Checkpoints(tmp_path, every=3, keep=2, ranks=worker) as checkpoints:
            checkpoints.resume(worker.state)
            for step in worker.steps():
                with step:
                    checkpoints.save(step, worker.state)
                    learn(worker, step)
                    size = worker.world_size
                if step == 8:
                    reached.set()
                if size == 2 and not step.aborted:
                    return int(step), int(worker.state["chain"][0])
        raise AssertionError("the steps have no end")

    first = scripts.start("a", train)
    assert reached.wait(60)
    second = scripts.start("b", train)
    for future in (first, second):
        step, chain = future.result(60)
        assert chain == chain_after(step + 1)


async def test_async_worker_resumes_before_its_first_step(runner: DaemonRunner, tmp_path: Path) -> None:
    async def train(name: str, until: int) -> tuple[list[int], float]:
        state: dict[str, Any] = {"w": np.zeros(3), "steps": 0}
        steps = []
        worker = ElasticWorker(name, config(), job=name, state=state, process=SharedProcess())
        async with worker, AsyncCheckpoints(tmp_path, every=2, keep=2, ranks=worker) as checkpoints:
            await checkpoints.resume(state)
            await worker.connect(runner.endpoint)
            async for step in worker.steps(until):
                with step:
                    await checkpoints.save(step, state)
                    assert state["steps"] == step
                    state["w"] += await worker.all_reduce(np.ones(3))
                    state["steps"] = int(step) + 1
                    steps.append(int(step))
        return steps, state["w"].sum()

    assert await train("first", 5) == ([0, 1, 2, 3, 4], 15.0)
    assert await train("second", 7) == ([4, 5, 6], 21.0)
    assert await asyncio.to_thread(kept_in, tmp_path, 2) == ["step-00000004", "step-00000006"]
