"""A worker on a host of its own: trains, and tells of each step that counts, and at last why it ended.

Each line is an object: `step`, `generation`, `rank`, `at` by the clock that all processes of the machine share; or
`ended` with the code of an error.
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
    """Train for ever, with so large a state."""
    state = {"w": np.zeros(elements)}
    gradient = np.ones(elements)
    committed = -1
    with join(endpoint, job=JOB, state=state, worker_id=name, config=CONFIG, token=os.environ[TOKEN]) as worker:
        for step in worker.steps():
            if worker.step > committed:
                committed = worker.step
                tell(step=committed, generation=worker.generation, rank=worker.rank, at=time.monotonic())
            with step:
                time.sleep(COMPUTATION_S)
                state["w"] -= 0.01 * worker.all_reduce(gradient, "mean")


def tell(**said: Any) -> None:
    """Write a line."""
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except ForgedError as error:
        tell(ended=error.code)
