"""A worker on a simulated host: trains, and reports each committed step and the error that ends it.

Each line is a JSON object: `step`, `generation`, `rank` and `at`, a time of the monotonic clock; or `ended` with an
error code.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

from forged.elastic.config import ElasticTrainingConfig
from forged.errors import ForgedError
from forged.worker.blocking import join

JOB = "hosts"
TOKEN = "FORGED_TOKEN"
CONFIG = ElasticTrainingConfig(
    stability_window_ms=100,
    rescale_timeout_ms=3000,
    failure_tolerance_percentage=100,
    max_consecutive_failures=1_000_000,
)
COMPUTATION_S = 0.005


def train(endpoint: str, name: str, elements: int) -> None:
    """Train without end, with a state of `elements` numbers."""
    state = {"w": np.zeros(elements)}
    gradient = np.ones(elements)
    committed = -1
    with join(endpoint, job=JOB, state=state, worker_id=name, config=CONFIG, token=os.environ[TOKEN]) as worker:
        for step in worker.steps():
            if worker.step > committed:
                committed = worker.step
                send(step=committed, generation=worker.generation, rank=worker.rank, at=time.monotonic())
            with step:
                time.sleep(COMPUTATION_S)
                state["w"] -= 0.01 * worker.all_reduce(gradient, "mean")


def send(**said: Any) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except ForgedError as error:
        send(ended=error.code)
