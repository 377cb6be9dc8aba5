"""The training script of the demo: an ordinary user script that also records its steps.

Invariants:
- The script does not handle joins, failures and rescales; it takes its samples of each step from the worker.
- It changes its state only after the last collective of a step.
- It records the samples of a step before it contributes to the step.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from forged.client import BlockingClient
from forged.demo.checkpoints import FOLDER, CheckpointSaver
from forged.demo.dataset import DatasetReader, training_data
from forged.demo.learning import BATCH, LEARNING_RATE, Task, contribution, learn
from forged.demo.records import NONE, Committed, Entered, Entry, Finished, Ready, Resumed, Used, line_of
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import RedistributionType
from forged.memory.messages import Wanted
from forged.memory.model import AllocationRequest, GpuDevice
from forged.worker.blocking import Training, join
from forged.worker.steps.step_loop import Step

JOB = "spirals"
STABILITY_WINDOW_MS = 500
RECONNECT_GRACE_MS = 30_000
STEP_PAUSE_S = 0.003
"""Simulated time to load data."""
MEMORY_STEPS = 10
"""The number of steps between two copies of the state in memory that outlives the worker."""
STOP_FILE = "stop"
"""The file that asks the workers to end the training."""
RECORDS = ".jsonl"
PARAMETERS = ".npy"


def config(workers: int) -> ElasticTrainingConfig:
    """Training continues with one worker less, and starts as soon as all workers have joined."""
    return ElasticTrainingConfig(
        min_workers=max(1, workers - 1),
        max_workers=workers,
        stability_window_ms=STABILITY_WINDOW_MS,
        reconnect_grace_ms=RECONNECT_GRACE_MS,
        redistribution_type=RedistributionType.INCREMENTAL,
    )


class Recorder:
    """Writes the records of this worker."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._generation = NONE
        self._used: Used | None = None
        self._loss: float | None = None

    def write(self, entry: Entry) -> None:
        """Write a record at once, so that it exists even if the worker is killed now."""
        os.write(self._file, line_of(entry))

    def use(self, worker: Training, step: int, size: int) -> None:
        """Record the samples of a step, and the world if it is new."""
        if worker.generation != self._generation:
            self._generation = worker.generation
            topology = worker.current_topology
            names = [] if topology is None else [one.id for one in topology.workers]
            self.write(Entered(time.monotonic(), worker.generation, step, worker.rank, names, worker.learning_rate))
        first = worker.share(BATCH).start
        self._used, self._loss = Used(time.monotonic(), worker.generation, step, first, first + size), None
        self.write(self._used)

    def set_loss(self, loss: float) -> None:
        """Keep the loss of the step for its commit."""
        self._loss = loss

    def settle(self, steps: int) -> None:
        """Record the last step if it is committed; `steps` is the number of committed steps."""
        used, self._used = self._used, None
        if used is not None and steps > used.step:
            self.write(Committed(time.monotonic(), used.generation, used.step, self._loss))


def steps(worker: Training, recorder: Recorder) -> Iterator[Step]:
    """The steps until the end that all workers have agreed on, or until this worker drains.

    The end is known before the last step begins. A worker that came to know it only after that step would have to wait
    for another world if the other workers, which are done, left first; with `min_workers` there might be none.
    """
    for step in worker.steps():
        recorder.settle(worker.step)
        if worker.state["ends_at"] != NONE:
            break
        yield step
    else:
        recorder.settle(worker.step)
        return
    for step in worker.steps(worker.state["ends_at"]):
        recorder.settle(worker.step)
        yield step
    recorder.settle(worker.step)


def train(
    worker: Training,
    reader: DatasetReader,
    recorder: Recorder,
    saver: CheckpointSaver,
    stop_file: Path,
    entered: Callable[[], None],
) -> None:
    """Train until the stop file exists; `entered` is called in the first step."""
    state: dict[str, Any] = worker.state
    has_entered = False
    for step in steps(worker, recorder):
        with step:
            if not has_entered:
                has_entered = True
                entered()
            saver.save_if_due(int(step))
            samples = worker.batch()
            recorder.use(worker, int(step), len(samples))
            time.sleep(STEP_PAUSE_S)
            # All workers agree on the end, because the wish to stop is reduced together with the gradient.
            wants_stop = [float(stop_file.exists())]
            part = contribution(state, reader.read(samples))
            summed = worker.all_reduce(np.concatenate([part, wants_stop]))
            learn(state, summed[:-1], worker.learning_rate)
            if summed[-1] > 0 and state["ends_at"] == NONE:
                state["ends_at"] = step + 2
            recorder.set_loss(float(summed[-2]))


def hold_gpu_memory(endpoint: str, worker: Training, job: str, size: int) -> None:
    """Register a device that is twice as large, and allocate a block of this size in it."""
    me = (job, worker.worker_id.id, worker.worker.incarnation)
    with BlockingClient(endpoint) as client:
        device = client.register_device(*me, GpuDevice("gpu0", 2 * size))
        wanted = Wanted("parameters", AllocationRequest("parameters", size))
        client.allocate_memory(*me, device.name, [wanted])


def main() -> int:
    """Run a worker of the demo."""
    parser = argparse.ArgumentParser(description="A worker of `forged demo`.")
    parser.add_argument("endpoint")
    parser.add_argument("name")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--job", default=JOB)
    parser.add_argument("--memory-every", type=int, default=MEMORY_STEPS, help="the steps between two copies in memory")
    parser.add_argument("--resume", action="store_true", help="begin with the newest state that was saved")
    parser.add_argument("--gpu-bytes", type=int, default=0, help="hold a block of so many bytes on a device of its own")
    options = parser.parse_args()
    task, recorder = Task(), Recorder(options.directory / f"{options.name}{RECORDS}")
    state = task.state() | {"ends_at": NONE}
    data = training_data(options.directory, options.name, task.samples)
    reader, sampler = DatasetReader(data.store, task.samples), task.sampler()
    with join(
        options.endpoint,
        job=options.job,
        state=state,
        worker_id=options.name,
        config=config(options.workers),
        learning_rate=LEARNING_RATE,
        global_batch_size=BATCH,
        data=data,
        sampler=sampler,
    ) as worker:
        folder = options.directory / FOLDER
        with CheckpointSaver(worker, folder, sampler, recorder.write, memory_every=options.memory_every) as saver:
            if options.resume:
                recorder.write(Resumed(time.monotonic(), saver.resume()))
            recorder.write(Ready(time.monotonic()))
            size = options.gpu_bytes
            hold = partial(hold_gpu_memory, options.endpoint, worker, options.job, size) if size else lambda: None
            train(worker, reader, recorder, saver, options.directory / STOP_FILE, hold)
        np.save(options.directory / f"{options.name}{PARAMETERS}", state["parameters"])
        digest = sha256(state["parameters"].tobytes()).hexdigest()
        recorder.write(Finished(time.monotonic(), worker.step, digest, reader.here, reader.elsewhere))
    return 0


if __name__ == "__main__":
    sys.exit(main())
