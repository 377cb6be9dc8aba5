"""A torch script that trains a model of FSDP2, made anew in each world and loaded from checkpoints."""

from __future__ import annotations

import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import forged.torch as ft
from tests.torch.train_script import GLOBAL_BATCH, Failure, Script, batch_of, loss_of, model_of, optimizer_of
from tests.worker.trainers import config

EVERY = 5


def main(script: Script, reports: Connection) -> None:
    torch.set_num_threads(1)
    try:
        train(script, reports)
    except BaseException as error:
        reports.send({"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc()})
        raise SystemExit(1) from error


def train(script: Script, reports: Connection) -> None:
    run = ft.join(
        script.endpoint,
        job=script.job,
        worker_id=script.name,
        checkpoints=ft.Checkpoints(script.checkpoints, every=EVERY, in_background=False)
        if script.checkpoints
        else None,
        group=script.name[:-1] if script.group_size > 1 else None,
        group_rank=int(script.name[-1]) if script.group_size > 1 else None,
        group_size=script.group_size,
        config=config(min_workers=script.size),
    )
    failure, made = Failure(script, run), {}
    holds_at = {2, script.holds_again} if script.holds else set()
    with run:

        @run.on_world
        def shard(topology: Any) -> None:
            is_grouped = script.group_size > 1
            # Of groups, the values of the first one count.
            differs = is_grouped and run.rank >= script.group_size
            model = made["model"] = model_of(script, seed=int(script.name, 36) if differs else 3)
            mesh = run.mesh if is_grouped else dist.init_device_mesh("cpu", (topology.world_size,))
            for layer in model:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            opt = made["opt"] = optimizer_of(model)
            resumed = run.use_sharded(ft.State(model=model, opt=opt))
            reports.send({"world": topology.generation, "size": topology.world_size, "resumed": resumed})

        for step in run.steps(script.total):
            with step:
                if step in holds_at:
                    holds_at.remove(step)
                    reports.send({"held": int(step)})
                    reports.recv()
                part = run.share(GLOBAL_BATCH)
                inputs, wanted = (one[part.start : part.stop] for one in batch_of(step))
                loss = loss_of(made["model"], inputs, wanted)
                failure.at("forward", step)
                loss.backward()
                step.commit()
                made["opt"].step()
                made["opt"].zero_grad()
            reports.send({"step": int(step), "aborted": step.aborted, "size": run.world_size})
    parts = {name: value.to_local().tolist() for name, value in made["model"].state_dict().items()}
    reports.send({"end": run.step, "values": parts})
