"""A torch script that trains elastically, reports by a pipe, and fails where it is told to."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import forged.torch as ft
from forged.worker.steps import step_errors
from tests.worker.trainers import config

FEATURES, GLOBAL_BATCH, RATE = 6, 12, 0.05
HANGS_S = 600.0


@dataclass(frozen=True)
class Script:
    """What a worker does."""

    endpoint: str
    job: str
    name: str
    total: int | None = 12
    size: int = 2
    """How many workers the job needs at first."""
    fails: str = ""
    """How: kill, hang, raise, abort, interrupt, collective."""
    phase: str = "forward"
    """Where: loader, forward, backward, commit (after the vote), opt."""
    at: int = 5
    """The step; -1 for each step once, at rank 0."""
    times: int = 1
    has_noise: bool = False
    """Whether the model has BatchNorm and dropout."""
    plain: bool = False
    """Whether gradients are averaged without DDP."""
    commits: bool = True
    """Whether the script votes itself."""
    accumulates: bool = False
    compiles: bool = False
    scales: bool = False
    has_mesh: bool = False
    shards: bool = False
    """Whether samples are read from shards."""
    loading_processes: int = 0
    width: int = 5
    """The width of the hidden layer."""
    torch_version: str = ""
    checkpoints: str = ""
    holds: bool = True
    """Whether the script waits for the test before step 2."""
    holds_again: int = -1
    """Another step before which the script waits for the test."""
    group_size: int = 1
    """How many workers a replica group has: those whose names differ in the last digit only."""
    settings: dict[str, Any] = field(default_factory=dict)


def model_of(script: Script, seed: int = 3) -> torch.nn.Module:
    torch.manual_seed(seed)
    noise = [torch.nn.BatchNorm1d(script.width), torch.nn.Dropout(0.25)] if script.has_noise else []
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, script.width), torch.nn.Tanh(), *noise, torch.nn.Linear(script.width, 1)
    )


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), RATE, momentum=0.9)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(GLOBAL_BATCH, FEATURES, generator=generator)
    return inputs, inputs.sum(1, keepdim=True).sin()


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (model(inputs) - wanted).square().mean()


def values_of(model: torch.nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Failure:
    """The failure that a script has been told to run into."""

    def __init__(self, script: Script, run: ft.Run) -> None:
        self._script = script
        self._run = run
        self._times = script.times
        self._last = -1

    def at(self, phase: str, step: ft.RunStep) -> None:
        script = self._script
        if not script.fails or phase != script.phase:
            return
        if script.at < 0:
            # Once in each step.
            if step == self._last or self._run.rank:
                return
            self._last = int(step)
        elif step != script.at or not self._times:
            return
        self._times -= 1
        match script.fails:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(HANGS_S)
            case "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(HANGS_S)
            case "abort":
                step.abort("the test says so")
            case "collective":
                raise dist.DistNetworkError("the test says so")
            case _:
                raise ValueError(f"the test fails in {phase}")


def main(script: Script, reports: Connection) -> None:
    torch.set_num_threads(1)
    # No test fails by an exception that another rank's loss explains.
    step_errors.EVIDENCE_TIMEOUT_S = step_errors.DEPARTURE_TIMEOUT_S = 0.5
    if script.torch_version:
        torch.__version__ = script.torch_version
    try:
        train(script, reports)
    except BaseException as error:
        reports.send({"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc()})
        raise SystemExit(1) from error


def train(script: Script, reports: Connection) -> None:
    model = model_of(script)
    opt = optimizer_of(model)
    sched = torch.optim.lr_scheduler.StepLR(opt, 4, 0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=script.scales, init_scale=8.0)
    trained = torch.compile(model, backend="eager") if script.compiles else model
    run = ft.join(
        script.endpoint,
        job=script.job,
        worker_id=script.name,
        state=ft.State(model=model, opt=opt, sched=sched, scaler=scaler),
        checkpoints=ft.Checkpoints(script.checkpoints, every=5) if script.checkpoints else None,
        config=config(min_workers=script.size, **script.settings),
    )
    failure = Failure(script, run)
    with run:
        net = trained if script.plain else run.ddp(trained)

        @run.on_world
        def tell_world(topology: Any) -> None:
            mesh_size = 0
            if script.has_mesh:
                mesh = dist.init_device_mesh("cpu", (topology.world_size,), mesh_dim_names=("data",))
                mesh_size = dist.get_world_size(mesh.get_group("data"))
            shared = sum(1 for path in Path("/dev/shm").iterdir() if "torch" in path.name)
            reports.send(
                {
                    "world": topology.generation,
                    "size": topology.world_size,
                    "rank": run.rank,
                    "mesh": mesh_size,
                    "files": open_files(),
                    "threads": len(list(Path("/proc/self/task").iterdir())),
                    "shared": shared,
                }
            )

        holds, rank = script.holds, -1
        for step in run.steps(script.total):
            with step:
                if holds and step == 2:
                    holds = False
                    reports.send({"held": int(step)})
                    reports.recv()
                failure.at("loader", step)
                part = run.share(GLOBAL_BATCH)
                inputs, wanted = (one[part.start : part.stop] for one in batch_of(step))
                failure.at("forward", step)
                backward(script, run, net, scaler, (inputs, wanted), partial(failure.at, "backward", step))
                if script.plain:
                    ft.all_reduce_gradients(model, run)
                if script.commits:
                    step.commit()
                failure.at("commit", step)
                scaler.step(opt)
                failure.at("opt", step)
                scaler.update()
                sched.step()
                opt.zero_grad()
            rank = run.rank
            reports.send({"step": int(step), "aborted": step.aborted, "size": run.world_size})
    reports.send({"end": run.step, "rank": rank, "values": values_of(model), "rate": sched.get_last_lr()[0]})


def backward(
    script: Script,
    run: ft.Run,
    net: Any,
    scaler: torch.amp.GradScaler,
    batch: tuple[torch.Tensor, torch.Tensor],
    fail: Callable[[], None],
) -> None:
    """Forward and backward of this rank's part of the batch, in one or two pieces."""
    inputs, wanted = batch
    if script.accumulates and len(inputs) % 2 == 0:
        half = len(inputs) // 2
        with net.no_sync():
            scaler.scale(loss_of(net, inputs[:half], wanted[:half]) / 2).backward()
        scaler.scale(loss_of(net, inputs[half:], wanted[half:]) / 2).backward()
        return
    loss = loss_of(net, inputs, wanted)
    # The first gradient that the backward pass makes: the other ranks wait in the reduction.
    loss.register_hook(lambda gradient: fail())
    scaler.scale(loss).backward()


def undisturbed(total: int) -> dict[str, Any]:
    """The values after so many steps of one process without forged."""
    script = Script("", "", "")
    model = model_of(script)
    opt = optimizer_of(model)
    sched = torch.optim.lr_scheduler.StepLR(opt, 4, 0.5)
    for step in range(total):
        loss_of(model, *batch_of(step)).backward()
        opt.step()
        sched.step()
        opt.zero_grad()
    return values_of(model)
