"""A worker of torchrun for benchmarks: the loop of `benchmarks.forged_worker`, over gloo.

Runs in the peers' environment, without anything of forged. Like that one it writes `ready PID`, then a line for each
step, `step generation world seconds`. Its agent starts it anew for every world, at step 0: what a real training would
have to load then is left out. A generation is the time at which its rank 0 began.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

ELEMENTS = 1024
TIMEOUT = timedelta(seconds=30)


def main() -> None:
    """Train for ever; the first failure of a collective ends this process, as its agent wants it."""
    sys.stdout.write(f"ready {os.getpid()}\n")
    sys.stdout.flush()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    world = dist.get_world_size()
    began_at = torch.tensor([time.monotonic_ns()])
    dist.broadcast(began_at, 0)
    generation = int(began_at.item())
    weights = torch.zeros(ELEMENTS, dtype=torch.float64)
    step = 0
    while True:
        gradient = torch.ones(ELEMENTS, dtype=torch.float64)
        dist.all_reduce(gradient)
        weights -= 0.01 * gradient / world
        step += 1
        sys.stdout.write(f"{step} {generation} {world} {time.monotonic()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
