"""A training script with data in a process of its own. What each step draws is told before the step can count."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

import numpy as np

from forged.data import Dataset, ElasticSampler, FunctionOrigin, TrainingData
from forged.data.model import DataShard
from forged.elastic.config import ElasticTrainingConfig
from forged.worker.blocking import Training, join
from tests.data.transfer_cluster import content_of
from tests.processes.worker_script import (
    ACTIONS,
    ARMED,
    COMPUTING_S,
    FOREVER,
    JOB,
    POINTS,
    STOP_FILE,
    Countdown,
    StepRecorder,
    agree_on_end,
    report,
    steps,
    stop_at,
)
from tests.worker.trainers import advance

SAMPLES, SHARDS, BATCH, SEED = 200, 40, 16, 7
SHARD_BYTES = 100_000
DATASET = Dataset.of(SAMPLES, SHARDS)


def sampler_of(mode: str) -> ElasticSampler:
    return ElasticSampler(SAMPLES, BATCH, SEED, mode=mode, dataset=DATASET if mode == "sharded" else None)


def write(shard: DataShard, file: BinaryIO) -> None:
    file.write(content_of(shard.shard_id, SHARD_BYTES))


def hang(shard: DataShard, file: BinaryIO) -> None:
    report(held="in the origin")
    threading.Event().wait()


def check(worker: Training, data: TrainingData, mode: str, drawn: list[int]) -> None:
    """In sharded mode all drawn samples must be in the worker's own shards."""
    if mode == "sharded":
        missing = {int(shard) for shard in DATASET.shard_of(drawn)} - set(data.store.held())
        assert not missing, f"{worker.worker.worker_id} draws from {missing}, which it does not hold"


def train(worker: Training, data: TrainingData, mode: str, stop_file: Path) -> None:
    """Train until the stop file exists."""
    state, recorder = worker.state, StepRecorder(worker)
    for step in steps(worker):
        recorder.begin(step)
        drawn = worker.batch().tolist()
        check(worker, data, mode, drawn)
        report(drew=drawn, at=step, world=worker.generation)
        with step:
            time.sleep(COMPUTING_S)
            chain = int(state["chain"][0])
            mine = np.array([1, chain, len(drawn), stop_file.exists()], np.int64)
            count, chains, samples, ending = worker.all_reduce(mine)
            assert chains == chain * count, "the states differ"
            assert 0 < samples <= BATCH
            state["chain"][0] = advance(chain, step)
            agree_on_end(state, step, ending)
    recorder.record_commit()
    report(finished=worker.step)


def main() -> None:
    """Be a worker."""
    endpoint, name, directory, options = sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4])
    for point, action in options["points"]:
        stop_at(POINTS[point], ACTIONS[action], Countdown(1, directory / ARMED))
    state = {"chain": np.zeros(1, np.int64), "ends_at": np.full(1, FOREVER, np.int64)}
    origin = FunctionOrigin(hang if options["origin_hangs"] else write) if options["has_origin"] else None
    data = TrainingData(
        SAMPLES,
        SHARDS,
        options["shards"],
        origin=origin,
        replication=options["replication"],
        rate_bytes_per_s=options["rate_bytes_per_s"],
        weight=options["weight"],
    )
    config = ElasticTrainingConfig(**options["config"])
    mode = options["mode"]
    with join(
        endpoint, job=JOB, state=state, worker_id=name, config=config, data=data, sampler=sampler_of(mode)
    ) as worker:
        train(worker, data, mode, directory / STOP_FILE)
