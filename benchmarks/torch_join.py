"""How long a torch worker takes from the start of its process to its first step, and how long the others wait.

Four processes train with `forged.torch`. A fifth is started, imports torch, joins, takes the state and does its first
step; then it is killed, and the next one comes. The reference is what `python -c "import torch"` takes beside the same
training, in turns with the joins: the limit is 1.3 times that, and 0.3 s. The stability window (0.1 s) counts. In any
script an optimizer imports as much of torch again (`torch._dynamo`): that is a reference of its own, without a limit.
The others wait for their longest step while the joiner comes, minus their median step before.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

from benchmarks.harness import Figure, main
from benchmarks.torch_training import ForgedTorch, run_torch
from benchmarks.training_cluster import TrainingCluster

ROUNDS, ROUNDS_QUICK = 10, 1
IMPORT_TIMES, MORE_S = 1.3, 0.3
WAIT_MAX_S = 0.1
OPTIMIZER = "import torch; torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())"
STEPS_BEFORE, STEPS_AFTER = 50, 5


class Join(NamedTuple):
    """The durations of one join, and of an import before it."""

    import_s: float
    optimizer_s: float
    first_step_s: float
    wait_s: float


def _run_s(script: str) -> float:
    start = time.monotonic()
    run_torch("-c", script)
    return time.monotonic() - start


def _join(cluster: TrainingCluster) -> Join:
    import_s, optimizer_s = _run_s("import torch"), _run_s(OPTIMIZER)
    others = list(cluster.workers)
    for worker in others:
        worker.wait_for_steps(len(worker.steps) + STEPS_BEFORE)
    started_at = time.monotonic()
    joiner = cluster.start()
    joiner.go()
    joiner.wait_for_steps(1)
    cluster.workers.append(joiner)
    cluster.wait_until_whole()
    for worker in others:
        worker.wait_for_steps(len(worker.steps) + STEPS_AFTER)
    waits = [worker.longest_step_s(started_at) - worker.median_step_s(started_at, STEPS_BEFORE) for worker in others]
    cluster.kill_member(joiner)
    cluster.wait_until_whole()
    return Join(import_s, optimizer_s, joiner.steps[0].at - started_at, max(waits))


def measure(quick: bool) -> list[Figure]:
    """Measure joins."""
    with ForgedTorch() as cluster:
        joins = [_join(cluster) for _ in range(ROUNDS_QUICK if quick else ROUNDS)]
    import_s = statistics.median(join.import_s for join in joins)
    optimizer_s = statistics.median(join.optimizer_s for join in joins)
    first_s = statistics.median(join.first_step_s for join in joins)
    wait_s = statistics.median(join.wait_s for join in joins)
    limit_s = IMPORT_TIMES * import_s + MORE_S
    first = f"start of the process to its first step, p50 of {len(joins)}"
    wait = "wait of the other workers, p50"
    return [
        Figure(f"{first}, against 1.3 x import torch + 0.3 s", "s", first_s, limit_s, 1.0, higher_is_better=False),
        Figure(f"{first}, against import torch and an optimizer", "s", first_s, optimizer_s, higher_is_better=False),
        Figure("import torch, p50", "s", import_s),
        Figure(f"{wait}, against the limit", "s", wait_s, WAIT_MAX_S, 1.0, higher_is_better=False),
    ]


if __name__ == "__main__":
    main("torch_join", measure)
