"""Tests of the metrics in memory and of what is stored of them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from forged.metrics.messages import NonFiniteLoss, ReportNonFinite, TimeSpent, TrainingReport
from forged.metrics.metrics_table import WINDOW_S, WORKER_VALUES, MetricsTable, StoredMetrics

JOB = "run"
BEGAN_AT = 1_000.0


def report(worker: str, steps: int, spent: TimeSpent, *, life: int = 1, job: str = JOB, **more: Any) -> TrainingReport:
    return TrainingReport(job, worker, bytes([life]) * 16, steps, steps, spent, **more)


class Jobs:
    """A table, with both clocks at the same number of seconds."""

    def __init__(self, **limits: int) -> None:
        self.table = MetricsTable(**limits)

    def tell(self, at: float, worker: str, steps: int, rank: int = 0, **spent: float) -> None:
        self.table.report(report(worker, steps, TimeSpent(**spent)), rank, BEGAN_AT + at, at)

    def log(self, at: float, worker: str, rank: int, step: int, **values: float) -> None:
        told = report(worker, step, TimeSpent(step_s=at), values=values, logged_step=step)
        self.table.report(told, rank, BEGAN_AT + at, at)

    def not_finite(self, at: float, worker: str, rank: int, step: int, name: str = "loss") -> NonFiniteLoss | None:
        return self.table.report_non_finite(ReportNonFinite(JOB, worker, b"\1" * 16, step, name, "nan"), rank, at)

    def restarted(self) -> Jobs:
        """Another daemon's table, from what was stored."""
        stored = self.table.stored(JOB)
        assert stored is not None
        others = Jobs()
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=StoredMetrics)
        others.table.load({JOB: read}, 0.0)
        return others

    def goodput(self, at: float) -> Any:
        return self.table.view(JOB, BEGAN_AT + at, at).goodput


@pytest.fixture
def jobs() -> Jobs:
    jobs = Jobs()
    jobs.table.begin(JOB, BEGAN_AT, 0.0)
    return jobs


def test_newest_report_of_a_worker_counts_and_the_lowest_rank_gives_the_jobs_values(jobs: Jobs) -> None:
    jobs.log(1.0, "b", 1, 10, loss=3.0, memory=7.0)
    jobs.log(1.0, "a", 0, 10, loss=2.0)
    jobs.log(2.0, "a", 0, 11, loss=1.0)
    shown = jobs.table.view(JOB, BEGAN_AT, 2.0)
    assert shown.values == {"loss": 1.0, "memory": 7.0}
    assert [(one.worker_id, one.rank, one.step) for one in shown.workers] == [("a", 0, 11), ("b", 1, 10)]


def test_rates_and_the_slowest_rank_follow_from_totals(jobs: Jobs) -> None:
    for steps in (0, 10):
        jobs.tell(float(steps), "slow", steps, rank=1, step_s=0.9 * steps, waiting_s=0.1 * steps)
        jobs.tell(float(steps), "fast", steps, rank=0, step_s=0.2 * steps, waiting_s=0.8 * steps)
    shown = jobs.table.view(JOB, BEGAN_AT, 10.0)
    fast, slow = shown.workers
    assert slow.step_time_s == pytest.approx(1.0)
    assert slow.waiting_time_s == pytest.approx(0.1)
    assert (fast.is_slowest, slow.is_slowest) == (False, True)
    assert shown.steps_per_s == pytest.approx(1.0)


def test_goodput_continues_over_a_restart_of_the_daemon(jobs: Jobs) -> None:
    jobs.tell(WINDOW_S, "a", 5, step_s=WINDOW_S)
    later = jobs.restarted()
    # Down for a minute, in which the worker trained and once waited for a rescale.
    later.tell(WINDOW_S + 70.0, "a", 65, step_s=WINDOW_S + 60.0, rescale_s=10.0)
    told = later.goodput(WINDOW_S + 70.0)
    assert told.unknown_s == 0.0
    assert told.spent.rescale_s == pytest.approx(10.0)
    assert told.wall_s == pytest.approx(WINDOW_S + 70.0)


def test_time_of_workers_whose_totals_were_not_stored_is_unknown_after_a_restart(jobs: Jobs) -> None:
    later = jobs.restarted()
    later.tell(100.0, "a", 100, step_s=500.0)
    assert later.goodput(100.0).unknown_s == pytest.approx(100.0)


def test_worker_without_stored_totals_counts_from_its_next_window_on(jobs: Jobs) -> None:
    later = jobs.restarted()
    later.tell(100.0, "a", 100, step_s=500.0)
    later.tell(100.0 + WINDOW_S, "a", 105, step_s=500.0 + WINDOW_S)
    assert later.goodput(100.0 + WINDOW_S).spent.step_s == pytest.approx(WINDOW_S)


def test_time_without_any_worker_counts_as_waiting_for_workers(jobs: Jobs) -> None:
    jobs.tell(WINDOW_S, "a", 5, step_s=WINDOW_S)
    jobs.table.remove_worker(JOB, "a", None)
    jobs.table.idle(JOB, "workers_s", BEGAN_AT + WINDOW_S, WINDOW_S)
    jobs.table.idle(JOB, "", BEGAN_AT + 65.0, 65.0)
    jobs.table.report(report("b", 5, TimeSpent(step_s=5.0)), 0, BEGAN_AT + 70.0, 70.0)
    told = jobs.goodput(70.0)
    assert told.spent.workers_s == pytest.approx(60.0)
    assert told.goodput == pytest.approx(10.0 / 70.0)


def test_time_after_the_end_does_not_count_and_counts_again_once_reopened(jobs: Jobs) -> None:
    jobs.tell(WINDOW_S, "a", 5, step_s=WINDOW_S)
    jobs.table.end(JOB, BEGAN_AT + 10.0)
    assert jobs.goodput(500.0).wall_s == 10.0
    jobs.table.reopen(JOB, BEGAN_AT + 500.0)
    assert jobs.goodput(520.0).wall_s == pytest.approx(30.0)
    assert jobs.goodput(520.0).spent.workers_s == pytest.approx(20.0)


def test_first_value_that_is_not_finite_is_a_fact_and_further_ones_are_not(jobs: Jobs) -> None:
    fact = jobs.not_finite(1.0, "b", 1, 10)
    assert fact == NonFiniteLoss("b", 1, 10, "loss", "nan")
    assert jobs.not_finite(1.0, "a", 0, 11) is None
    assert jobs.table.view(JOB, BEGAN_AT, 1.0).non_finite == ["loss"]


def test_value_that_was_finite_again_is_a_fact_again(jobs: Jobs) -> None:
    assert jobs.not_finite(1.0, "b", 1, 10)
    jobs.log(2.0, "a", 0, 12, loss=1.0)
    assert jobs.not_finite(2.0, "b", 1, 12) is None
    jobs.log(3.0, "b", 1, 13, loss=1.0)
    assert jobs.not_finite(3.0, "b", 1, 14)


def test_value_of_a_worker_that_is_gone_counts_no_more(jobs: Jobs) -> None:
    assert jobs.not_finite(1.0, "b", 1, 10)
    jobs.table.remove_worker(JOB, "b", None)
    assert jobs.not_finite(2.0, "a", 0, 11)


def test_which_values_are_not_finite_is_known_after_a_restart(jobs: Jobs) -> None:
    assert jobs.not_finite(1.0, "b", 1, 10)
    assert jobs.restarted().not_finite(1.0, "a", 0, 11) is None


def test_facts_of_a_worker_that_floods_are_limited(jobs: Jobs) -> None:
    told = 0
    for step in range(0, 1000, 2):
        told += jobs.not_finite(1.0, "b", 1, step) is not None
        jobs.log(1.0, "b", 1, step + 1, loss=1.0)
    assert told == 20


def test_values_in_all_are_bounded_and_the_largest_job_loses_its_oldest() -> None:
    jobs = Jobs(values_max=10 * (WORKER_VALUES + 4))
    small = report("only", 1, TimeSpent(), job="small", values={"loss": 1.0})
    jobs.table.report(small, 0, BEGAN_AT, 0.0)
    for number in range(100):
        jobs.log(1.0, f"w{number}", number, 1, a=1.0, b=1.0, c=1.0, d=1.0)
    assert list(jobs.table.jobs["small"].workers) == ["only"]
    assert list(jobs.table.jobs[JOB].workers) == [f"w{number}" for number in range(91, 100)]


def test_samples_are_taken_once_a_second_and_bounded(jobs: Jobs) -> None:
    taken = 0
    for number in range(4000):
        at = number / 10
        jobs.log(at, "a", 0, number, loss=1.0)
        taken += jobs.table.sample(JOB, BEGAN_AT + at, at) is not None
    assert 390 <= taken <= 401
    assert len(jobs.table.view(JOB, BEGAN_AT, 400.0).history) == 180


@pytest.mark.parametrize("total", [math.nan, math.inf, -1.0])
def test_report_with_impossible_totals_is_no_report(total: float) -> None:
    said = msgspec.msgpack.encode(report("a", 1, TimeSpent(step_s=total)))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(said, type=TrainingReport)


@pytest.mark.parametrize("values", [{"x" * 65: 1.0}, {"": 1.0}, {f"v{number}": 1.0 for number in range(65)}])
def test_report_with_too_many_or_too_long_names_is_no_report(values: dict[str, float]) -> None:
    said = msgspec.msgpack.encode(report("a", 1, TimeSpent(), values=values))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(said, type=TrainingReport)
