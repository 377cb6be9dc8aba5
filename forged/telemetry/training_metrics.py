"""The Prometheus metrics of training.

Invariants:
- At most `JOBS_MAX` jobs have labels, those with most workers, and of each at most `RANKS_MAX` ranks: the slowest ones.
- Values that scripts log are not among them: their names are the scripts', and sinks keep them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nlargest

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forged.clock import Clock
from forged.metrics.messages import Goodput, TrainingView, WorkerMetrics
from forged.metrics.metrics_table import MetricsTable

JOBS_MAX = 100
RANKS_MAX = 8


class TrainingCollector(Collector):
    """Collects the metrics of all jobs that train."""

    def __init__(self, table: MetricsTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        wall, now = self._clock.wall(), self._clock.monotonic()
        jobs = nlargest(JOBS_MAX, self._table.jobs, key=lambda name: len(self._table.jobs[name].workers))
        views = [self._table.view(name, wall, now) for name in jobs]
        yield from _rates(views)
        yield from _goodput(views)
        yield from _ranks(views)


def _rates(views: Sequence[TrainingView]) -> Iterable[Metric]:
    steps = GaugeMetricFamily("forged_training_steps_per_second", "Committed steps a second of late", labels=["job"])
    samples = GaugeMetricFamily("forged_training_samples_per_second", "Samples a second of late", labels=["job"])
    not_finite = GaugeMetricFamily(
        "forged_training_non_finite_values", "Logged values that are not finite at present", labels=["job"]
    )
    for view in views:
        for family, value in ((steps, view.steps_per_s), (samples, view.samples_per_s)):
            if value is not None:
                family.add_metric([view.job], value)
        not_finite.add_metric([view.job], len(view.non_finite))
    yield from (steps, samples, not_finite)


def _goodput(views: Sequence[TrainingView]) -> Iterable[Metric]:
    share = GaugeMetricFamily(
        "forged_training_goodput", "The share of the time since the first world in committed steps", labels=["job"]
    )
    # No counter: the time of a step that is aborted moves from one cause to another.
    spent = GaugeMetricFamily(
        "forged_training_spent_seconds", "Time since the first world by what it was spent on", labels=["job", "cause"]
    )
    for view in views:
        if view.goodput is None:
            continue
        if view.goodput.goodput is not None:
            share.add_metric([view.job], view.goodput.goodput)
        for cause, seconds in _by_cause(view.goodput):
            spent.add_metric([view.job, cause], seconds)
    yield from (share, spent)


def _by_cause(goodput: Goodput) -> Iterable[tuple[str, float]]:
    for name in goodput.spent.__struct_fields__:
        yield name.removesuffix("_s"), getattr(goodput.spent, name)
    yield "unknown", goodput.unknown_s


def _ranks(views: Sequence[TrainingView]) -> Iterable[Metric]:
    labels = ["job", "rank"]
    took = GaugeMetricFamily("forged_training_step_seconds", "The time of a step at the slowest ranks", labels=labels)
    waits = GaugeMetricFamily("forged_training_waiting_seconds", "Of that, the time with other ranks", labels=labels)
    for view in views:
        for worker in nlargest(RANKS_MAX, view.workers, key=_own_time):
            if worker.rank >= 0 and worker.step_time_s is not None and worker.waiting_time_s is not None:
                took.add_metric([view.job, f"{worker.rank}"], worker.step_time_s)
                waits.add_metric([view.job, f"{worker.rank}"], worker.waiting_time_s)
    yield from (took, waits)


def _own_time(worker: WorkerMetrics) -> float:
    return (worker.step_time_s or 0.0) - (worker.waiting_time_s or 0.0)
