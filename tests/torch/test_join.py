"""Torch scripts in threads of this process, and a real daemon: a joiner takes the state of a worker that trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

import forged
import forged.torch as ft
from tests.client.threaded_daemon import ThreadedDaemon
from tests.torch.test_tensors import bits_of
from tests.worker.trainers import JOB, PATIENCE_S, config

TOGETHER = 4
"""The steps that two workers train together."""
Make = Callable[[torch.nn.Module, torch.optim.Optimizer], Any]


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    daemon = ThreadedDaemon(tmp_path)
    yield daemon.runner.endpoint
    daemon.close()


def train(endpoint: str, name: str, make: Make, has_trained: Event) -> list[bytes]:
    """Train until two workers have trained some steps together; returns the bits of model and optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).to(torch.bfloat16)
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    together = 0
    with forged.join(endpoint, job=JOB, worker_id=name, state=make(model, opt), config=config()) as worker:
        for step in worker.steps():
            with step:
                generator = torch.Generator().manual_seed(int(step))
                batch = torch.randn(8, 4, generator=generator).bfloat16()
                model(batch).float().square().mean().backward()
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad = ft.tensor_of(worker.all_reduce(ft.array_of(parameter.grad), "mean"))
                opt.step()
                opt.zero_grad()
                together += worker.world_size == 2
            if worker.step == 3:
                has_trained.set()
            if together == TOGETHER:
                break
    values = [*model.state_dict().values()]
    moments = [value for entry in opt.state_dict()["state"].values() for value in entry.values()]
    return [bits_of(value) for value in (*values, *moments)]


@pytest.mark.parametrize(
    "make",
    [
        lambda model, opt: {"model": model, "opt": opt},
        lambda model, opt: ft.State(model=model, opt=opt),
        lambda model, opt: {"all": ft.State(model=model), "opt": ft.State(opt=opt, rng=False)},
    ],
    ids=["objects", "State", "nested"],
)
def test_joiner_takes_the_state_of_an_optimizer_that_was_empty_when_it_was_given(endpoint: str, make: Make) -> None:
    has_trained = Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(train, endpoint, "first", make, has_trained)
        while not has_trained.wait(0.1):
            assert not first.done(), first.result()
        torch.manual_seed(1)
        second = pool.submit(train, endpoint, "second", make, Event())
        assert first.result(PATIENCE_S) == second.result(PATIENCE_S)
