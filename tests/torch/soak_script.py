"""A torch script whose result says whether a step, a sample, a random number or a buffer was lost or used twice.

It trains two models with BatchNorm, dropout and AdamW. The gradients of the shared one are averaged by DDP over the
loader's batches, so its result depends on the world sizes; its dropout is that of step and rank. All ranks train the
same second one on the same samples, with the random generators of the state: its result has the same bits in any world.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import forged.torch as ft
from forged.data.sampling.sampler import ElasticSampler
from tests.worker.trainers import config

SAMPLES, BATCH, FEATURES, WIDTH = 200, 10, 4, 8
RANKS_MAX = 64
PAUSE_S = 0.02
"""Between two steps, which leaves the processor to the workers that start."""


@dataclass(frozen=True)
class SoakScript:
    """What a worker does."""

    endpoint: str
    job: str
    name: str


class Samples(Dataset[Any]):
    """Random inputs, and what a model makes of them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(FEATURES, generator=torch.Generator().manual_seed(sample), dtype=torch.float64)
        return inputs, inputs.sum().sin().reshape(1)


class Training:
    """A model with its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, WIDTH),
            torch.nn.BatchNorm1d(WIDTH),
            torch.nn.Tanh(),
            torch.nn.Dropout(0.25),
            torch.nn.Linear(WIDTH, 1),
        ).double()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def values(self, *, with_buffers: bool) -> list[torch.Tensor]:
        """Parameters and moments, and the averages of BatchNorm."""
        moments = [value for entry in self.opt.state_dict()["state"].values() for value in entry.values()]
        buffers = list(self.model.buffers()) if with_buffers else []
        return [one.detach().double() for one in (*self.model.parameters(), *moments, *buffers)]


def loss_of(model: Any, inputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (model(inputs) - wanted).square().mean()


def shared_loss(model: Any, batch: Sequence[torch.Tensor], step: int, rank: int) -> torch.Tensor:
    """The loss of a rank, with the dropout of this step and rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(step * RANKS_MAX + rank)
        return loss_of(model, *batch)


def batch_of(samples: Sequence[int]) -> list[torch.Tensor]:
    found = [Samples()[sample] for sample in samples]
    return [torch.stack([one[part] for one in found]) for part in (0, 1)]


def own_batch(step: int) -> list[torch.Tensor]:
    """The samples that all ranks use in a step."""
    return batch_of([(step * BATCH + number) % SAMPLES for number in range(BATCH)])


def sockets() -> int:
    """The sockets of this process."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found += str(descriptor.readlink()).startswith("socket:")
        except FileNotFoundError:
            continue
    return found


def main(script: SoakScript, reports: Connection) -> None:
    torch.set_num_threads(1)
    try:
        train(script, reports)
    except BaseException as error:
        reports.send({"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc()})
        raise SystemExit(1) from error


def train(script: SoakScript, reports: Connection) -> None:
    shared, own = Training(), Training()
    sockets_before = sockets()
    run = ft.join(
        script.endpoint,
        job=script.job,
        worker_id=script.name,
        state=ft.State(shared=shared.model, shared_opt=shared.opt, own=own.model, own_opt=own.opt),
        config=config(max_consecutive_failures=1_000_000),
    )
    torch.manual_seed(5)
    with run:
        loader = run.loader(Samples(), global_batch=BATCH, num_workers=1)
        net = run.ddp(shared.model)

        @run.on_world
        def tell_world(topology: Any) -> None:
            reports.send(
                {
                    "world": topology.generation,
                    "size": topology.world_size,
                    "rank": run.rank,
                    "sockets": sockets(),
                    "threads": len(list(Path("/proc/self/task").iterdir())),
                    "processes": [os.getpid(), *(child.pid for child in multiprocessing.active_children())],
                }
            )

        while (step := run.begin_step()) is not None:
            with step:
                shared_loss(net, loader.next(), step, run.rank).backward()
                loss_of(own.model, *own_batch(step)).backward()
                # The pipe has something when the test wants the end; all ranks are to end behind the same step.
                stops = torch.tensor([float(reports.poll())])
                dist.all_reduce(stops, dist.ReduceOp.MAX)
                step.commit()
                for training in (shared, own):
                    training.opt.step()
                    training.opt.zero_grad()
            size = run.world_size
            if run.finish_step():
                reports.send({"step": int(step), "size": size})
                if stops.item():
                    if reports.poll():
                        reports.recv()
                    break
            time.sleep(PAUSE_S)
        worlds_end = run.step
    reports.send(
        {
            "end": worlds_end,
            "shared": [one.tolist() for one in shared.values(with_buffers=False)],
            "own": [one.tolist() for one in own.values(with_buffers=True)],
            "sockets_left": sockets() - sockets_before,
        }
    )


def undisturbed(sizes: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The values of both models after steps in worlds of these sizes, by one process without forged's worker."""
    shared, own = Training(), Training()
    sampler = ElasticSampler(SAMPLES, BATCH, 0)
    torch.manual_seed(5)
    for step, size in enumerate(sizes):
        for rank in range(size):
            samples = sampler.batch(rank, size).tolist()
            loss = shared_loss(shared.model, batch_of(samples), step, rank)
            (loss * len(samples) / BATCH).backward()
        loss_of(own.model, *own_batch(step)).backward()
        for training in (shared, own):
            training.opt.step()
            training.opt.zero_grad()
        sampler.advance()
    return shared.values(with_buffers=False), own.values(with_buffers=True)
