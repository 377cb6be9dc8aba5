"""A training script that saves in the background and copies further steps into slots: `staging_script.py ENDPOINT NAME
DIRECTORY OPTIONS`.

It reports the steps that all ranks have staged, and those that are on disk, one line of JSON each.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from forged.checkpoint import CheckpointException, Checkpoints, DistributedCheckpoint, SaveOptions
from forged.checkpoint.blocking import BlockingCheckpoint
from forged.checkpoint.saving.background import SaveHandle
from forged.checkpoint.storage.local import LocalStorage
from forged.elastic.config import ElasticTrainingConfig
from forged.worker.blocking import Training, join
from tests.processes.worker_script import JOB, STOP_FILE, report

NUMBERS = 1_500_000
CHECKPOINTS = "checkpoints"


def state_at(step: int, numbers: int = NUMBERS) -> dict[str, Any]:
    """A state in which every rank writes its share of `bulk`."""
    return {"bulk": np.full(numbers, step, np.float32), "step": step}


def tell(step: int, handle: SaveHandle) -> None:
    try:
        handle.result()
    except CheckpointException as error:
        report(lost=step, why=error.code)
    else:
        report(saved=step)


def stage(worker: Training, checkpoint: BlockingCheckpoint, step: int, save_every: int, numbers: int) -> None:
    """Stage one step, and save it if it is due."""
    state = state_at(step, numbers)
    options = SaveOptions(f"step-{step:08d}", step=step, include_rng_state=False)
    report(begun=step)
    try:
        if step % save_every == 0:
            handle = checkpoint.save_async(state, options=options)
            threading.Thread(target=tell, args=(step, handle), daemon=True).start()
        elif not checkpoint.keep_in_memory(state, options=options):
            return
    except CheckpointException as error:
        report(lost=step, why=error.code)
        return
    report(staged=step)


def main() -> None:
    endpoint, name, directory, options = sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4])
    settings = ElasticTrainingConfig(**options["config"])
    storage = LocalStorage(directory / CHECKPOINTS)
    state = {"step": np.zeros(1)}
    numbers = options.get("numbers", NUMBERS)
    with join(endpoint, job=JOB, state=state, worker_id=name, config=settings) as worker:
        Checkpoints(storage.url, ranks=worker).resume(state_at(0, numbers))
        checkpoint = BlockingCheckpoint(DistributedCheckpoint(worker, storage))
        for step in worker.steps():
            with step:
                (ends,) = worker.all_reduce(np.array([(directory / STOP_FILE).exists()], np.int64))
                stage(worker, checkpoint, worker.step, options["save_every"], numbers)
            if ends:
                break


if __name__ == "__main__":
    main()
