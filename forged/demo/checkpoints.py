"""The demonstration's checkpoints: saved by all workers together while they learn, resumed by one process alone.

Law: training is worth more than a checkpoint. One that comes to nothing is on record, and nothing else is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from forged.checkpoint import (
    BlockingCheckpoint,
    CheckpointException,
    CheckpointInfo,
    CheckpointStorage,
    DistributedCheckpoint,
    LoadOptions,
    SaveOptions,
    StorageOptions,
    WhenBusy,
    create_storage,
)
from forged.data.sampling.sampler import ElasticSampler
from forged.demo.learning import State, Task
from forged.demo.records import Entry, Unsaved
from forged.worker.blocking import Training

FOLDER = "checkpoints"
SAVE_STEPS = 50
"""A checkpoint is saved behind so many steps."""


def storage_in(directory: Path) -> CheckpointStorage:
    """Where the checkpoints lie."""
    return create_storage(StorageOptions("local", {"base_path": str(directory / FOLDER)}))


class Keeper:
    """Saves what a worker knows, together with the others, while training goes on."""

    def __init__(self, worker: Training, directory: Path, write: Callable[[Entry], None]) -> None:
        self._worker = worker
        self._write = write
        self._checkpoints = BlockingCheckpoint(DistributedCheckpoint(worker, storage_in(directory)))

    def save_if_due(self, step: int, sampler: ElasticSampler) -> None:
        """Save the state behind so many steps, if one of that number is wanted."""
        if step % SAVE_STEPS:
            return
        options = SaveOptions(f"step-{step:06d}", include_rng_state=False, when_busy=WhenBusy.REFUSE)
        state = {**self._worker.state, "sampler": sampler.state_dict()}
        try:
            self._checkpoints.save_async(state, options=options)
        except CheckpointException as error:
            self._write(Unsaved(time.monotonic(), step, str(error)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._checkpoints.close()
        except CheckpointException as failure:
            self._write(Unsaved(time.monotonic(), self._worker.step, str(failure)))


def checkpoints(directory: Path) -> list[CheckpointInfo]:
    """Those that there are, by their step."""
    found = BlockingCheckpoint(DistributedCheckpoint(None, storage_in(directory))).list_checkpoints()
    return sorted(found, key=lambda info: info.prefix)


def resumed(directory: Path, prefix: str, task: Task, steps: int) -> tuple[State, int]:
    """The state behind so many steps, those that a checkpoint lacks made by one process; and how many they were."""
    state, sampler = task.state(), task.sampler()
    alone = BlockingCheckpoint(DistributedCheckpoint(None, storage_in(directory)))
    loaded: dict[str, Any] = alone.load(state, options=LoadOptions(prefix, strict_mode=False)).model_state
    sampler.load_state_dict(loaded["sampler"])
    begun = int(prefix.removeprefix("step-"))
    task.go_on(state, sampler, steps - begun)
    return state, steps - begun
