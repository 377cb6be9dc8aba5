"""A worker of the other job: trains in steps of about ten milliseconds, and writes a byte to its output for each.

Run as `python -m tests.hostile_tenant.trainer ENDPOINT JOB`, with the token in FORGED_TOKEN.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

import forged

STEP_S = 0.01
STEPS = 10**9


def main() -> None:
    endpoint, job = sys.argv[1:]
    state = {"w": np.zeros(8)}
    with forged.join(endpoint, job=job, state=state) as worker:
        for step in worker.steps(STEPS):
            with step:
                time.sleep(STEP_S)
                state["w"] += worker.all_reduce(np.ones(8), "mean")
            os.write(sys.stdout.fileno(), b".")


if __name__ == "__main__":
    main()
