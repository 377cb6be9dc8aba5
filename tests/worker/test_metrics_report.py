"""What a worker's script logs, and what the daemon makes of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from forged.client import ForgedClient
from forged.errors import RequestRefused
from forged.kernel.messages import Record
from forged.metrics.messages import NonFiniteLoss, TimeSpent, TrainingReport, TrainingView
from forged.worker.metrics_report import LoggedValues
from tests.client.daemon_runner import DaemonRunner
from tests.worker.trainers import JOB, PATIENCE_S, TrainerGroup, shared_worker


async def shown(client: ForgedClient, is_so: Callable[[TrainingView], bool]) -> TrainingView:
    """The metrics of the job once they are so; reports come once a second."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_so(view := await client.read_training(JOB)):
            await asyncio.sleep(0.05)
    return view


async def test_operator_sees_logged_values_rates_and_goodput(group: TrainerGroup, client: ForgedClient) -> None:
    a, b = group.start("a", "b")
    await group.world_of("a", "b")
    for trainer in (a, b):
        rank = trainer.worker.rank
        trainer.worker.log(loss=0.5 + rank, **{f"only {rank}": 1})
    view = await shown(client, lambda view: len(view.values) == 3 and view.steps_per_s is not None)
    assert view.values == {"loss": 0.5, "only 0": 1.0, "only 1": 1.0}
    assert [worker.rank for worker in view.workers] == [0, 1]
    assert view.step > 0
    assert view.goodput is not None
    assert view.goodput.spent.total_s + view.goodput.unknown_s == pytest.approx(view.goodput.wall_s)
    assert all(worker.step_time_s is not None and worker.waiting_time_s is not None for worker in view.workers)
    assert all(worker.waiting_time_s <= worker.step_time_s for worker in view.workers)  # type: ignore[operator]


async def test_value_that_is_not_finite_becomes_one_fact(group: TrainerGroup, client: ForgedClient) -> None:
    (a,) = group.start("a")
    await group.world_of("a")
    async with client.facts(NonFiniteLoss, jobs=[JOB]) as facts:
        for value in (1.0, math.nan, math.nan, math.inf):
            a.worker.log(step=7, loss=value)
        record = await anext(facts)
        assert isinstance(record, Record)
        assert record.fact == NonFiniteLoss("a", 0, 7, "loss", "nan")
        a.worker.log(step=8, loss=1.0)
        await shown(client, lambda view: not view.non_finite)
        a.worker.log(step=9, loss=-math.inf)
        record = await anext(facts)
        assert isinstance(record, Record)
        assert record.fact == NonFiniteLoss("a", 0, 9, "loss", "-inf")


async def test_report_of_a_worker_that_is_not_registered_is_ignored(
    group: TrainerGroup, client: ForgedClient, runner: DaemonRunner
) -> None:
    group.start("a")
    await group.world_of("a")
    for worker, life in (("stranger", b"\1" * 16), ("a", b"\1" * 16)):
        client.signal(TrainingReport(JOB, worker, life, 5, 5, TimeSpent(), 0, {"forged": 1.0}))
    view = await shown(client, lambda view: bool(view.workers))
    assert [worker.worker_id for worker in view.workers] == ["a"]
    assert "forged" not in view.values


async def test_metrics_of_a_worker_that_has_left_are_gone(group: TrainerGroup, client: ForgedClient) -> None:
    group.start("a", "b")
    await group.world_of("a", "b")
    await shown(client, lambda view: len(view.workers) == 2)
    group["b"].worker.drain("it leaves")
    view = await shown(client, lambda view: len(view.workers) == 1)
    assert [worker.worker_id for worker in view.workers] == ["a"]


def test_values_may_be_logged_before_the_worker_is_connected() -> None:
    worker = shared_worker("a")
    worker.log(loss=1)
    worker.log(3, loss=2, accuracy=0.5)
    assert worker._logged.values == {"loss": 2.0, "accuracy": 0.5}
    assert worker._logged.step == 3


@pytest.mark.parametrize("values", [{"loss": "much"}, {"loss": [1.0, 2.0]}, {"x" * 65: 1.0}, {"": 1.0}])
def test_value_that_cannot_be_logged_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused, match="must be"):
        LoggedValues().log(1, values)


def test_more_names_than_allowed_are_refused() -> None:
    logged = LoggedValues()
    logged.log(1, {f"v{number}": 1.0 for number in range(64)})
    logged.log(2, {"v63": 2.0})
    with pytest.raises(RequestRefused, match="limit 64"):
        logged.log(2, {"another": 1.0})


def test_value_is_told_at_once_only_when_it_ceases_to_be_finite() -> None:
    logged, told = LoggedValues(), []
    logged.wake = lambda: told.append(dict(logged.not_finite))
    for step, value in enumerate((1.0, math.nan, math.nan, 2.0, math.inf)):
        logged.log(step, {"loss": value})
    assert told == [{"loss": (1, "nan")}, {"loss": (4, "inf")}]
