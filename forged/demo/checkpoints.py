"""The checkpoints of the demo: saved by all workers during the training, resumed by a single process.

A checkpoint that fails is recorded and does not stop the training.
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
    Checkpoints,
    CheckpointStorage,
    DistributedCheckpoint,
    LoadOptions,
    StorageOptions,
    create_storage,
)
from forged.data.sampling.sampler import ElasticSampler
from forged.demo.learning import State, Task
from forged.demo.records import CheckpointFailed, Entry
from forged.worker.blocking import Training

FOLDER = "checkpoints"
SAVE_STEPS = 50
"""The number of steps between two checkpoints."""


def storage_in(directory: Path) -> CheckpointStorage:
    """The storage of the checkpoints."""
    return create_storage(StorageOptions("local", {"base_path": str(directory / FOLDER)}))


class CheckpointSaver:
    """Saves the state of the workers in the background, and resumes it."""

    def __init__(
        self,
        worker: Training,
        folder: Path,
        sampler: ElasticSampler,
        write: Callable[[Entry], None],
        *,
        memory_every: int,
    ) -> None:
        self._worker = worker
        self._sampler = sampler
        self._write = write
        self._checkpoints = Checkpoints(
            folder, every=SAVE_STEPS, memory_every=memory_every, ranks=worker, in_background=True
        )

    def resume(self) -> int:
        """Load the newest state, from disk or from memory; returns its step, 0 if there is none."""
        return self._checkpoints.resume(self._state())

    def save_if_due(self, step: int) -> None:
        """Save the state after `step` steps if a checkpoint is due, and copy it into memory if that is due."""
        try:
            self._checkpoints.save(step, self._state())
        except CheckpointException as error:
            self._write(CheckpointFailed(time.monotonic(), step, str(error)))

    def _state(self) -> dict[str, Any]:
        return {**self._worker.state, "sampler": self._sampler}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._checkpoints.close()
        except CheckpointException as failure:
            self._write(CheckpointFailed(time.monotonic(), self._worker.step, str(failure)))


def checkpoints(directory: Path) -> list[CheckpointInfo]:
    """All checkpoints, by step."""
    found = BlockingCheckpoint(DistributedCheckpoint(None, storage_in(directory))).list_checkpoints()
    return sorted(found, key=lambda info: info.prefix)


def resumed(directory: Path, prefix: str, task: Task, steps: int) -> tuple[State, int]:
    """Resume a checkpoint in this process up to `steps`; returns the state and the number of resumed steps."""
    state, sampler = task.state(), task.sampler()
    train_alone = BlockingCheckpoint(DistributedCheckpoint(None, storage_in(directory)))
    loaded: dict[str, Any] = train_alone.load(state, options=LoadOptions(prefix, strict_mode=False)).model_state
    sampler.load_state_dict(loaded["sampler"])
    begun = int(prefix.removeprefix("step-"))
    task.train_on(state, sampler, steps - begun)
    return state, steps - begun
