"""A worker process for benchmarks: tells when it has committed which step in which generation.

Each line is `step generation seconds`, by the clock that all processes of the machine share.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from forged.elastic.config import ElasticTrainingConfig
from forged.worker.training import join

CONFIG = ElasticTrainingConfig(
    stability_window_ms=100, failure_tolerance_percentage=100, max_consecutive_failures=1_000_000
)
ELEMENTS = 1024


def main() -> None:
    """Train until the input ends, or for ever."""
    endpoint, name = sys.argv[1:3]
    state = {"w": np.zeros(ELEMENTS)}
    gradient = np.ones(ELEMENTS)
    committed = -1
    with join(endpoint, job="benchmark", state=state, worker_id=name, config=CONFIG) as worker:
        for step in worker.steps():
            if worker.step > committed:
                committed = worker.step
                sys.stdout.write(f"{worker.step} {worker.generation} {time.monotonic()}\n")
                sys.stdout.flush()
            with step:
                state["w"] -= 0.01 * worker.all_reduce(gradient, "mean")


if __name__ == "__main__":
    main()
