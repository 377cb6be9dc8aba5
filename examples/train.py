"""Elastic training: start a daemon (`forged run`), then this script as often as you like.

python examples/train.py [ENDPOINT]
"""

import sys

import numpy as np

import forged

ENDPOINT = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:7433"

state = {"w": np.zeros(8)}
with forged.join(ENDPOINT, job="run", state=state) as worker:
    for step in worker.steps(100):
        with step:
            state["w"] -= 0.01 * worker.all_reduce(np.full(8, 1.0 + worker.rank), "mean")
    print(f"rank {worker.rank} of {worker.world_size}: w = {state['w'][0]:.2f}")
