"""A worker process for benchmarks, which reports its committed steps.

It writes `ready PID` when it is connected, and waits for a line before it registers. Then each line is `step generation
world seconds`, with a time of the monotonic clock.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from forged.elastic.config import ElasticTrainingConfig
from forged.worker.blocking import join

CONFIG = ElasticTrainingConfig(
    stability_window_ms=100, failure_tolerance_percentage=100, max_consecutive_failures=1_000_000
)
ELEMENTS = 1024


def main() -> None:
    """Train without end; arguments: `ENDPOINT NAME`."""
    endpoint, name = sys.argv[1:3]
    state = {"w": np.zeros(ELEMENTS)}
    gradient = np.ones(ELEMENTS)
    committed = -1
    with join(endpoint, job="benchmark", state=state, worker_id=name, config=CONFIG) as worker:
        sys.stdout.write(f"ready {os.getpid()}\n")
        sys.stdout.flush()
        sys.stdin.readline()
        for step in worker.steps():
            if worker.step > committed:
                committed = worker.step
                sys.stdout.write(f"{worker.step} {worker.generation} {worker.world_size} {time.monotonic()}\n")
                sys.stdout.flush()
            with step:
                state["w"] -= 0.01 * worker.all_reduce(gradient, "mean")


if __name__ == "__main__":
    main()
