"""A torch script that reports which samples its loader gives in each step."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils.data import Dataset

import forged.torch as ft
from tests.torch.train_script import Script
from tests.worker.trainers import config

SAMPLES, BATCH = 50, 8
SHARDS = [7, 13, 0, 30]


class Numbers(Dataset[Any]):
    """Samples that are their numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, sample: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.tensor([float(sample)])


def read(shard: int) -> Iterator[torch.Tensor]:
    first = sum(SHARDS[:shard])
    return (torch.tensor([float(sample)]) for sample in range(first, first + SHARDS[shard]))


def main(script: Script, reports: Connection) -> None:
    torch.set_num_threads(1)
    try:
        train(script, reports)
    except BaseException as error:
        reports.send({"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc()})
        raise SystemExit(1) from error


def train(script: Script, reports: Connection) -> None:
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    run = ft.join(
        script.endpoint,
        job=script.job,
        worker_id=script.name,
        state={"model": model},
        config=config(min_workers=script.size),
        checkpoints=ft.Checkpoints(script.checkpoints, every=4) if script.checkpoints else None,
    )
    with run:
        dataset = ft.Shards(SHARDS, read) if script.shards else Numbers()
        loader = run.loader(dataset, global_batch=BATCH, num_workers=script.loading_processes)
        net = run.ddp(model)
        holds = script.holds
        for step, batch in zip(run.steps(script.total), loader, strict=False):
            with step:
                if holds and step == 2:
                    holds = False
                    reports.send({"held": 2})
                    reports.recv()
                samples = [int(number) for number in batch[:, 0].tolist()]
                if script.fails == "abort" and step == script.at and run.rank == 0:
                    script = Script(script.endpoint, script.job, script.name)
                    step.abort("the test says so")
                weight = run.weight
                net(batch).mean().backward()
                step.commit()
                gradient = model.weight.grad.item()
                model.zero_grad()
            if not step.aborted:
                used = [] if weight == 0.0 else samples
                reports.send({"step": int(step), "samples": used, "gradient": gradient, "size": run.world_size})
    reports.send({"end": run.step})
