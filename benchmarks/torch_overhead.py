"""The step time of `forged.torch` without faults, against plain DistributedDataParallel under torchrun.

Two processes of each train the same transformer, one thread each, with a batch whose step takes about 10 ms. Both
clusters stay open and take turns with blocks of steps, so that a slow moment of the machine meets both.
"""

from __future__ import annotations

import statistics
import sys
from itertools import pairwise

from benchmarks.harness import Figure, main, turns
from benchmarks.torch_training import ForgedTorch, TorchrunDdp, run_torch
from benchmarks.training_cluster import TrainingCluster

STEP_MS = 9.0
"""Of one process alone; the reduction of the gradients adds the rest of 10 ms."""
BLOCK = 200
"""Steps of a turn."""
ROUNDS, ROUNDS_QUICK = 15, 1
AIM = 0.98
"""At most 1.02 times the time."""


def _block_s(cluster: TrainingCluster) -> float:
    """The median step of a block that rank 0 is told to do; the step in which it waited is left out."""
    (leader,) = (worker for worker in cluster.workers if worker.rank == 0)
    seen = len(leader.steps)
    ends = seen + -leader.steps[seen - 1].step % BLOCK
    leader.wait_for_steps(ends)
    leader.go()
    leader.wait_for_steps(ends + BLOCK)
    times = [step.at for step in leader.steps[ends:]]
    return statistics.median(after - before for before, after in pairwise(times))


def measure(quick: bool) -> list[Figure]:
    """Measure the step time."""
    pace = (run_torch("-m", "benchmarks.torch_model", str(STEP_MS)).strip(), str(BLOCK))

    class Ours(ForgedTorch):
        size = 2
        arguments = pace

    class Plain(TorchrunDdp):
        size = 2
        nodes = "2"
        worker = (*TorchrunDdp.worker, *pace)

    with Ours() as ours, Plain() as plain:
        subjects = {"ours": lambda: _block_s(ours), "plain": lambda: _block_s(plain)}
        found = turns(ROUNDS_QUICK if quick else ROUNDS, subjects)
    for name, times in found.items():
        sys.stderr.write(f"  {name}: {' '.join(f'{1000 * one:.2f}' for one in times)} ms\n")
    p50 = {name: 1000 * statistics.median(times) for name, times in found.items()}
    what = "step without faults, p50, against plain DDP under torchrun"
    return [Figure(what, "ms", p50["ours"], p50["plain"], AIM, higher_is_better=False)]


if __name__ == "__main__":
    main("torch_overhead", measure)
