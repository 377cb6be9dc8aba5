"""A training script that resumes and saves every fifth step, and may wait before one of its checkpoints exists."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from forged.checkpoint import Checkpoints
from forged.checkpoint.format.manifest import SUFFIX
from forged.checkpoint.saving.background import BackgroundSaver
from forged.checkpoint.saving.rank_save import RankSave
from forged.checkpoint.storage.local import LocalStorage
from forged.elastic.config import ElasticTrainingConfig
from forged.worker.blocking import Training, join
from tests.processes.worker_script import (
    COMPUTING_S,
    FOREVER,
    JOB,
    STOP_FILE,
    StepRecorder,
    agree_on_end,
    report,
    steps,
)
from tests.worker.trainers import advance

FOLDER = "checkpoints"
EVERY = 5


def hold_before_manifest_of(step: int) -> None:
    """Wait once for the test before the manifest of this step is published, by this process or by the daemon."""
    publish, have_published = LocalStorage.publish, BackgroundSaver._publish
    held_steps = set[int]()

    def hold() -> None:
        if step in held_steps:
            return
        held_steps.add(step)
        report(held=True)
        sys.stdin.readline()

    def held(storage: LocalStorage, name: str, data: bytes) -> None:
        if name == f"step-{step:08d}{SUFFIX}":
            hold()
        publish(storage, name, data)

    def held_in_background(saver: BackgroundSaver, save: RankSave, *others: Any) -> None:
        if save.options.step == step and save.is_persisted_by_host:
            hold()
        have_published(saver, save, *others)

    setattr(LocalStorage, "publish", held)  # noqa: B010 - mypy has methods for constants
    setattr(BackgroundSaver, "_publish", held_in_background)  # noqa: B010


def train(worker: Training, directory: Path, *, in_background: bool) -> None:
    """Train until the stop file exists."""
    state, stop_file = worker.state, directory / STOP_FILE
    with Checkpoints(directory / FOLDER, every=EVERY, ranks=worker, in_background=in_background) as checkpoints:
        report(resumed=checkpoints.resume(state))
        recorder = StepRecorder(worker)
        for step in steps(worker):
            recorder.begin(step)
            with step:
                checkpoints.save(step, state)
                time.sleep(COMPUTING_S)
                chain = int(state["chain"][0])
                count, chains, ending = worker.all_reduce(np.array([1, chain, stop_file.exists()], np.int64))
                assert (count, chains) == (worker.world_size, chain * count), "the states differ"
                state["chain"][0] = advance(chain, step)
                agree_on_end(state, step, ending)
        recorder.record_commit()
    report(finished=worker.step)


def main() -> None:
    """Run a worker."""
    endpoint, name, directory, options = sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4])
    if options["hold"]:
        hold_before_manifest_of(options["hold"])
    state = {"chain": np.zeros(1, np.int64), "ends_at": np.full(1, FOREVER, np.int64)}
    config = ElasticTrainingConfig(**options["config"])
    with join(endpoint, job=JOB, state=state, worker_id=name, config=config) as worker:
        train(worker, directory, in_background=options["in_background"])


if __name__ == "__main__":
    main()
