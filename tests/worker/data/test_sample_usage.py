from __future__ import annotations

import pytest

from forged.data.audit.epoch_audit import UsageLog
from forged.data.model import Dataset
from forged.data.sampling.sampler import ElasticSampler
from forged.worker.data import sample_usage as sample_usage
from forged.worker.data.sample_usage import SampleUsage

SAMPLES, BATCH = 100, 10


def consumption(batch: int = BATCH) -> SampleUsage:
    return SampleUsage(ElasticSampler(SAMPLES, batch, 1))


def train(it: SampleUsage, first: int, end: int) -> None:
    """Finish and commit these steps."""
    for step in range(first, end):
        it.finish()
        it.commit(step)


def report_all(it: SampleUsage, log: UsageLog) -> None:
    """Report all usage to the daemon's log."""
    for generation, begins_at, runs in list(it.unreported()):
        log.rewind(generation, begins_at)
        log.report(generation, runs)
        it.known(generation, max(run.end_step for run in runs))


def test_step_is_recorded_when_committed_and_not_before() -> None:
    it = consumption()
    it.enter(1, 0)
    it.finish()
    assert list(it.unreported()) == []
    it.commit(0)
    ((generation, begins_at, (run,)),) = it.unreported()
    assert (generation, begins_at, run.step, run.size) == (1, 0, 0, BATCH)


def test_repeated_step_counts_only_its_last_run() -> None:
    it = consumption()
    it.enter(1, 0)
    train(it, 0, 3)
    before = it.sampler.state_dict()
    it.finish()
    it.sampler.load_state_dict(before)
    it.enter(2, 3)
    train(it, 3, 10)
    log = UsageLog(SAMPLES)
    report_all(it, log)
    assert log.audit(0).complete


def test_step_committed_late_is_recorded_under_its_own_generation() -> None:
    it = consumption()
    it.enter(1, 0)
    train(it, 0, 3)
    it.finish()
    it.commit(3)
    it.enter(2, 4)
    assert [(generation, runs[0].count) for generation, _, runs in it.unreported()] == [(1, 4)]


def test_reported_usage_is_not_reported_again() -> None:
    it = consumption()
    log = UsageLog(SAMPLES)
    it.enter(1, 0)
    train(it, 0, 4)
    report_all(it, log)
    assert list(it.unreported()) == []
    train(it, 4, 10)
    ((_, _, (run,)),) = it.unreported()
    assert (run.step, run.count) == (4, 6)
    report_all(it, log)
    assert log.audit(0).complete


def test_steps_committed_during_a_report_are_reported_later() -> None:
    it = consumption()
    it.enter(1, 0)
    train(it, 0, 4)
    ((generation, _, runs),) = it.unreported()
    train(it, 4, 6)
    it.known(generation, max(run.end_step for run in runs))
    ((_, _, (run,)),) = it.unreported()
    assert (run.step, run.count) == (4, 2)


def test_fully_reported_generations_are_dropped() -> None:
    it = consumption()
    log = UsageLog(SAMPLES)
    for generation in range(1, 50):
        it.enter(generation, generation - 1)
        train(it, generation - 1, generation)
        report_all(it, log)
    assert len(it.state_dict()["noted"]) < 50


def test_report_split_into_parts_keeps_steps_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank continues in a large shard while other ranks take several small ones."""
    monkeypatch.setattr(sample_usage, "REPORT_ROWS_MAX", 7)
    sampler = ElasticSampler(1_000, 20, 1, mode="sharded", dataset=Dataset.of(1_000, 200))
    sampler.reassign([0] * 150 + [1] * 30 + [2] * 20, 3)
    it = SampleUsage(sampler)
    it.enter(1, 0)
    step = 0
    while it.sampler.epoch == 0:
        train(it, step, step + 1)
        step += 1
    log = UsageLog(1_000)
    parts = list(it.unreported())
    assert len(parts) > 5
    ends = [max(run.end_step for run in runs) for _, _, runs in parts]
    starts = [min(run.step for run in runs) for _, _, runs in parts]
    assert starts[1:] == ends[:-1]
    report_all(it, log)
    assert log.audit(0).complete
    assert list(it.unreported()) == []


def test_loaded_state_carries_the_unreported_usage() -> None:
    it, other = consumption(), consumption()
    it.enter(1, 0)
    train(it, 0, 3)
    it.enter(2, 3)
    train(it, 3, 7)
    other.sampler.load_state_dict(it.sampler.state_dict())
    other.load_state_dict(it.state_dict())
    other.enter(3, 7)
    train(other, 7, 10)
    log = UsageLog(SAMPLES)
    report_all(other, log)
    assert log.audit(0).complete


def test_loaded_state_replaces_the_workers_own_usage() -> None:
    it, other = consumption(), consumption()
    log = UsageLog(SAMPLES)
    for one in (it, other):
        one.enter(1, 0)
        train(one, 0, 3)
        one.finish()
    it.commit(3)
    report_all(it, log)
    train(it, 4, 5)
    other.sampler.load_state_dict(it.sampler.state_dict())
    other.load_state_dict(it.state_dict())
    other.enter(2, 5)
    train(other, 5, 10)
    report_all(other, log)
    assert log.audit(0).complete
