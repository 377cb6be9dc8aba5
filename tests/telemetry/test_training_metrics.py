"""The metrics about training."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from forged.metrics.messages import TimeSpent, TrainingReport
from forged.metrics.metrics_table import MetricsTable
from forged.telemetry import training_metrics
from forged.telemetry.training_metrics import TrainingCollector

BEGAN_AT = 1_000.0


class StoppedClock:
    def wall(self) -> float:
        return BEGAN_AT + 10.0

    def monotonic(self) -> float:
        return 10.0


def train(table: MetricsTable, job: str, workers: int) -> None:
    """Ten seconds of steps, in which each rank waits a second less than the one before."""
    table.begin(job, BEGAN_AT, 0.0)
    for at in (0.0, 4.0, 10.0):
        for rank in range(workers):
            spent = TimeSpent(step_s=at / 2 + at * rank / 20, waiting_s=at / 2 - at * rank / 20)
            report = TrainingReport(job, f"w{rank}", b"\1" * 16, int(at), int(at), spent, 32, {"loss": float("nan")})
            table.report(report, rank, BEGAN_AT + at, at)


def registry_of(table: MetricsTable) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TrainingCollector(table, StoppedClock()))
    return registry


def test_job_is_shown_with_rates_goodput_and_ranks() -> None:
    table = MetricsTable()
    train(table, "run", 2)
    registry = registry_of(table)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"forged_training_{name}", {"job": "run", **labels})

    assert value("steps_per_second") == pytest.approx(1.0)
    assert value("samples_per_second") == pytest.approx(32.0)
    assert value("non_finite_values") == 0
    assert value("step_seconds", rank="1") == pytest.approx(1.0)
    assert value("waiting_seconds", rank="1") == pytest.approx(0.45)
    waiting_s = value("spent_seconds", cause="waiting")
    assert waiting_s is not None
    assert 0.0 < waiting_s < 0.5
    assert value("goodput") == pytest.approx(1.0 - waiting_s / 10.0)
    assert value("spent_seconds", cause="unknown") == 0.0


def test_jobs_and_ranks_with_labels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_metrics, "JOBS_MAX", 2)
    monkeypatch.setattr(training_metrics, "RANKS_MAX", 3)
    table = MetricsTable()
    for job, workers in (("small", 1), ("large", 6), ("middle", 2)):
        train(table, job, workers)
    families = {family.name: family.samples for family in registry_of(table).collect()}
    assert {sample.labels["job"] for sample in families["forged_training_goodput"]} == {"large", "middle"}
    ranks = [one.labels["rank"] for one in families["forged_training_step_seconds"] if one.labels["job"] == "large"]
    assert ranks == ["5", "4", "3"]
