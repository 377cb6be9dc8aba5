"""The training script of the demonstration: what a user would write, and a record of what it does.

Law: it knows nothing of who else comes, goes and dies. It asks for its samples of each step, and changes its state
behind the last collective of the step only. What it is about to use is on record before it contributes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from forged.data.sampling.sampler import ElasticSampler
from forged.demo.checkpoints import Keeper
from forged.demo.dataset import Reader, training_data
from forged.demo.learning import BATCH, LEARNING_RATE, Task, contribution, learn
from forged.demo.records import NONE, Committed, Entered, Entry, Finished, Ready, Used, line_of
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import RedistributionType
from forged.worker.blocking import Training, join
from forged.worker.step_loop import Step

JOB = "spirals"
STABILITY_WINDOW_MS = 500
RECONNECT_GRACE_MS = 30_000
STEP_PAUSE_S = 0.003
"""What loading data would take."""
ENOUGH = "enough"
"""The file whose presence asks for the end of the training."""
RECORDS = ".jsonl"
PARAMETERS = ".npy"


def config(workers: int) -> ElasticTrainingConfig:
    """Training goes on with one worker less, and starts at once when all are there."""
    return ElasticTrainingConfig(
        min_workers=workers - 1,
        max_workers=workers,
        stability_window_ms=STABILITY_WINDOW_MS,
        reconnect_grace_ms=RECONNECT_GRACE_MS,
        redistribution_type=RedistributionType.INCREMENTAL,
    )


class Account:
    """What this worker writes about itself."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._generation = NONE
        self._used: Used | None = None
        self._loss: float | None = None

    def write(self, entry: Entry) -> None:
        """Put it on record at once, so that it is there even if the next instruction is never reached."""
        os.write(self._file, line_of(entry))

    def use(self, worker: Training, step: int, size: int) -> None:
        """Say that so many samples are going to be used, and in which world."""
        if worker.generation != self._generation:
            self._generation = worker.generation
            topology = worker.current_topology
            names = [] if topology is None else [one.id for one in topology.workers]
            self.write(Entered(time.monotonic(), worker.generation, step, worker.rank, names, worker.learning_rate))
        first = worker.share(BATCH).start
        self._used, self._loss = Used(time.monotonic(), worker.generation, step, first, first + size), None
        self.write(self._used)

    def learnt(self, loss: float) -> None:
        """Remember what the step has brought, in case that it counts."""
        self._loss = loss

    def settle(self, steps: int) -> None:
        """Say whether the last step counts, now that so many do."""
        used, self._used = self._used, None
        if used is not None and steps > used.step:
            self.write(Committed(time.monotonic(), used.generation, used.step, self._loss))


def steps(worker: Training, account: Account) -> Iterator[Step]:
    """The steps up to that behind which all have agreed to end; unless this worker is to go before."""
    for step in worker.steps():
        account.settle(worker.step)
        if step == worker.state["ends_at"]:
            break
        yield step
    else:
        account.settle(worker.step)
        return
    for _ in worker.steps(worker.step):
        raise AssertionError("no step is left")


def train(
    worker: Training, reader: Reader, account: Account, keeper: Keeper, sampler: ElasticSampler, enough: Path
) -> None:
    """Learn until somebody says that it is enough."""
    state: dict[str, Any] = worker.state
    for step in steps(worker, account):
        with step:
            keeper.save_if_due(int(step), sampler)
            samples = worker.batch()
            account.use(worker, int(step), len(samples))
            time.sleep(STEP_PAUSE_S)
            # Whether to end is settled as the gradient is: by adding up what each has to say.
            says_enough = [float(enough.exists())]
            part = contribution(state, reader.read(samples))
            summed = worker.all_reduce(np.concatenate([part, says_enough]))
            learn(state, summed[:-1], worker.learning_rate)
            if summed[-1] > 0:
                state["ends_at"] = step + 1
            account.learnt(float(summed[-2]))


def main() -> int:
    """Be a worker of the demonstration."""
    parser = argparse.ArgumentParser(description="Learn to tell spirals apart, together with others.")
    parser.add_argument("endpoint")
    parser.add_argument("name")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--workers", type=int, required=True)
    options = parser.parse_args()
    task, account = Task(), Account(options.directory / f"{options.name}{RECORDS}")
    state = task.state() | {"ends_at": NONE}
    data = training_data(options.directory, options.name, task.samples)
    reader, sampler = Reader(data.store, task.samples), task.sampler()
    with join(
        options.endpoint,
        job=JOB,
        state=state,
        worker_id=options.name,
        config=config(options.workers),
        learning_rate=LEARNING_RATE,
        global_batch_size=BATCH,
        data=data,
        sampler=sampler,
    ) as worker:
        account.write(Ready(time.monotonic()))
        with Keeper(worker, options.directory, account.write) as keeper:
            train(worker, reader, account, keeper, sampler, options.directory / ENOUGH)
        np.save(options.directory / f"{options.name}{PARAMETERS}", state["parameters"])
        digest = sha256(state["parameters"].tobytes()).hexdigest()
        account.write(Finished(time.monotonic(), worker.step, digest, reader.here, reader.elsewhere))
    return 0


if __name__ == "__main__":
    sys.exit(main())
