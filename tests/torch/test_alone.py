"""Runs of one worker in this process: what is logged, process groups without a run, and groups that cannot be made."""

from __future__ import annotations

import datetime as dt
import math
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import forged
import forged.torch as ft
from forged.client import BlockingClient
from forged.elastic.model import ClusterTopology, WorkerId
from forged.errors import RequestRefused
from forged.kernel.messages import Record
from forged.metrics.messages import NonFiniteLoss
from forged.torch import group
from forged.torch.agreement import Agreement
from forged.torch.deferred_log import DeferredLog
from forged.worker.errors import StepAborted
from tests.client.daemon_runner import SOON
from tests.client.threaded_daemon import ThreadedDaemon
from tests.worker.trainers import config


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    daemon = ThreadedDaemon(tmp_path_factory.mktemp("daemon"))
    yield daemon.runner.endpoint
    daemon.close()


class DeviceTensor(torch.Tensor):
    """A tensor that stands for one of a device, and counts how often the script waits for it."""

    is_cpu = False
    waits = 0

    def tolist(self) -> Any:
        DeviceTensor.waits += 1
        return super().tolist()


def on_device(value: float) -> torch.Tensor:
    return torch.tensor(value).as_subclass(DeviceTensor)


def test_tensors_of_a_device_are_converted_once_a_second_and_each_is_told() -> None:
    told: list[Any] = []
    log = DeferredLog(lambda step, **values: told.append((step, *values.items())))
    before = DeviceTensor.waits
    loss = on_device(0.0)
    for step in range(10):
        log.add(step, {"loss": loss, "rate": 0.5}, now=10.0 + step / 8)
        loss += 1
    assert [one for one in told if one[1][0] == "loss"] == [(step, ("loss", float(step))) for step in range(9)]
    assert DeviceTensor.waits == before + 2
    log.flush()
    assert told[-1] == (9, ("loss", 9.0))
    assert [one[0] for one in told if one[1] == ("rate", 0.5)] == list(range(10))


def test_loss_that_is_not_finite_is_told_with_its_step(endpoint: str) -> None:
    with ft.join(endpoint, job="nan", worker_id="a", state=ft.State(), config=config(min_workers=1)) as run:
        for step in run.steps(4):
            with step:
                run.log(loss=torch.tensor(math.nan if step == 2 else 1.0), rate=0.1)
        # The worker tells it by itself: while the run is open.
        with BlockingClient(endpoint, reconnect=SOON) as client, client.facts(NonFiniteLoss, jobs=["nan"]) as facts:
            told = [one.fact for one in client.past_facts(NonFiniteLoss, jobs=["nan"]) if isinstance(one, Record)]
            told = told or [next(one.fact for one in facts if isinstance(one, Record))]
    assert told == [NonFiniteLoss("a", 0, 2, "loss", "nan")]


def test_process_group_is_made_for_a_worker_without_a_run(endpoint: str) -> None:
    with (
        forged.join(endpoint, job="bare", worker_id="a", config=config(min_workers=1)) as worker,
        ft.init_process_group(worker) as groups,
    ):
        for step in worker.steps(2):
            with step:
                value = torch.ones(1)
                dist.all_reduce(value, group=groups.group)
                assert value.item() == worker.world_size == 1
        assert groups.made == 1
    assert not dist.is_initialized()


def test_worker_with_another_backend_is_refused() -> None:
    state = ft.State()
    with pytest.raises(
        RequestRefused, match="the job trains with backend gloo, and this worker has backend nccl"
    ) as at:
        Agreement(state, "nccl").load_state_dict(Agreement(state, "gloo").state_dict())
    assert at.value.code == "backend_differs"


class SecondOfTwo:
    """A worker whose rank 0 tells of a store at a port at which nothing listens."""

    worker_id, step, generation = "b", 3, 1

    def __init__(self, port: int) -> None:
        self.port = port
        self.current_topology = ClusterTopology(tuple(WorkerId(name, "127.0.0.1", 1) for name in "ab"), 1)

    def broadcast(self, value: Any) -> int:
        return self.port


def test_store_that_cannot_be_reached_aborts_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "MAKE_TIMEOUT", dt.timedelta(0))
    monkeypatch.setattr(group, "CONNECT_TIMEOUT", dt.timedelta(milliseconds=200))
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        worker: Any = SecondOfTwo(unheard.getsockname()[1])
        with pytest.raises(StepAborted, match="the process group was not made"):
            ft.ProcessGroups(worker)._make(worker.current_topology)
    assert not dist.is_initialized()
