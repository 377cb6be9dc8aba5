"""A worker that trains the benchmarks' transformer with plain DistributedDataParallel, started by torchrun.

Runs in the peers' environment, without anything of forged. Arguments: `[SAMPLES BLOCK]`, as those of
`benchmarks.torch_forged_worker`. Its agent starts it anew for every world, at step 0: what a real training would have
to load then is left out. A generation is the time at which its rank 0 began.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.torch_model import SAMPLES, loss_of, model_and_optimizer, say_ready, say_step, wait_for_go

TIMEOUT = timedelta(seconds=30)
PACED_TIMEOUT = timedelta(minutes=30)
"""Where a rank waits while the benchmark measures another cluster."""


def main() -> None:
    """Train without end; the first failure of a collective ends this process, as its agent wants it."""
    samples, block = map(int, sys.argv[1:]) if sys.argv[1:] else (SAMPLES, 0)
    model, optimizer = model_and_optimizer()
    say_ready()
    if block:
        wait_for_go()
    dist.init_process_group("gloo", timeout=PACED_TIMEOUT if block else TIMEOUT)
    world, rank = dist.get_world_size(), dist.get_rank()
    began_at = torch.tensor([time.monotonic_ns()])
    dist.broadcast(began_at, 0)
    generation = int(began_at.item())
    net = DistributedDataParallel(model)
    step = 0
    while True:
        if block and step and step % block == 0 and rank == 0:
            wait_for_go()
        loss_of(net, step, rank, samples).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        say_step(step, generation, world, rank)


if __name__ == "__main__":
    main()
