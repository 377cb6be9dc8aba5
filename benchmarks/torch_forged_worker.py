"""A worker that trains the benchmarks' transformer with `forged.torch`, as a user writes it.

Runs in the peers' environment. Arguments: `ENDPOINT NAME [SAMPLES BLOCK]`. It writes `ready PID` when it can register,
waits for a line, and writes a line for each committed step. With BLOCK, rank 0 waits for a line before each so many
steps.
"""

from __future__ import annotations

import sys

import forged.torch as ft
from benchmarks.torch_model import SAMPLES, loss_of, model_and_optimizer, say_ready, say_step, wait_for_go
from forged.elastic.config import ElasticTrainingConfig

CONFIG = ElasticTrainingConfig(
    stability_window_ms=100, failure_tolerance_percentage=100, max_consecutive_failures=1_000_000
)


def main() -> None:
    """Train without end."""
    endpoint, name, *pace = sys.argv[1:]
    samples, block = map(int, pace) if pace else (SAMPLES, 0)
    model, optimizer = model_and_optimizer()
    state = ft.State(model=model, optimizer=optimizer)
    with ft.join(endpoint, job="benchmark", state=state, worker_id=name, config=CONFIG) as run:
        net = run.ddp(model)
        say_ready()
        wait_for_go()
        for step in run.steps():
            if block and step and step % block == 0 and run.rank == 0:
                wait_for_go()
            with step:
                loss_of(net, step, run.rank, samples).backward()
                step.commit()
                optimizer.step()
                optimizer.zero_grad()
            if not step.aborted:
                say_step(step + 1, run.generation, run.world_size, run.rank)


if __name__ == "__main__":
    main()
