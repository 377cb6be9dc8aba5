"""The newest metrics of each worker, and the figures of each job for some minutes, in memory.

Invariants:
- The newest report of a worker replaces earlier ones. What is kept is bounded for each worker, each job and in all: the
  job with most values loses its oldest report first.
- A job's time is accounted for in windows of `WINDOW_S`; only that, and which values are not finite, is stored.
- A value counts as not finite from the first report of a worker until a later step of the same worker logs it finite,
  or the worker is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from forged.metrics import goodput
from forged.metrics.goodput import BASELINES_STORED_MAX, Account
from forged.metrics.messages import (
    JobMetrics,
    MetricsSample,
    NonFiniteLoss,
    ReportNonFinite,
    TimeSpent,
    TrainingReport,
    TrainingView,
    WorkerMetrics,
)
from forged.rate_limit import RateLimit

WINDOW_S = 5.0
STORED_EVERY_S = 30.0
SLACK_S = 1.0
"""By so much a worker may have begun before its job's time that is not accounted for."""
SAMPLE_S = 1.0
SAMPLES_MAX = 180
MARKS_MAX = 16
"""Of so many reports with further steps the rates of a worker are computed."""
VALUES_MAX = 200_000
"""Values of all workers of all jobs; a worker counts as `WORKER_VALUES` more."""
WORKER_VALUES = 16
WORKERS_SHOWN_MAX = 256
NON_FINITE_MAX = 64
FACTS_PER_S, FACTS_BURST = 0.1, 20.0
"""Of values that are not finite, for each job."""
SLOWEST_WAITS = 0.05
"""The share of a step that ranks wait on average before one of them is called the slowest."""


class StoredMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of a job."""

    account: Account
    baselines: dict[str, TimeSpent] = {}
    """By worker and incarnation: what it had spent at `account.until`."""
    non_finite: dict[str, tuple[str, int]] = {}
    """By name: the worker and the step."""


@dataclass(slots=True)
class WorkerRecord:
    """The newest report of one worker."""

    report: TrainingReport
    rank: int
    heard_at: float
    marks: deque[tuple[int, TimeSpent]] = field(default_factory=lambda: deque(maxlen=MARKS_MAX))
    """Steps and time spent, at each report with further steps."""

    @property
    def weight(self) -> int:
        return len(self.report.values) + WORKER_VALUES

    def times(self) -> tuple[float | None, float | None]:
        """The time of a committed step, and the part of it that is waiting."""
        if len(self.marks) < 2:
            return None, None
        (before, first), (now, last) = self.marks[0], self.marks[-1]
        spent, steps = goodput.difference(last, first), now - before
        return (spent.step_s + spent.waiting_s) / steps, spent.waiting_s / steps

    def steps_per_s(self) -> float | None:
        """Committed steps a second, pauses included."""
        if len(self.marks) < 2:
            return None
        (before, first), (now, _) = self.marks[0], self.marks[-1]
        seconds = self.report.spent.total_s - first.total_s
        return (now - before) / seconds if seconds > 0 else None


@dataclass(slots=True)
class JobRecord:
    """The metrics of one job."""

    facts: RateLimit
    account: Account | None = None
    baselines: dict[str, TimeSpent] = field(default_factory=dict)
    pending: dict[str, TimeSpent] = field(default_factory=dict)
    """What workers have told since the last window, by worker and incarnation."""
    window_at: float = 0.0
    stored_at: float = 0.0
    sampled_at: float = 0.0
    non_finite: dict[str, tuple[str, int]] = field(default_factory=dict)
    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    """The one that was heard longest ago first."""
    samples: deque[MetricsSample] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))

    @property
    def weight(self) -> int:
        return sum(record.weight for record in self.workers.values())

    def by_rank(self) -> list[WorkerRecord]:
        return sorted(self.workers.values(), key=lambda record: (record.rank < 0, record.rank, record.report.worker_id))


class MetricsTable:
    """The metrics of all jobs. `wall` and `now` are the wall clock's and the monotonic clock's seconds."""

    def __init__(self, values_max: int = VALUES_MAX) -> None:
        self.jobs: dict[str, JobRecord] = {}
        self._values = 0
        self._values_max = values_max

    # What workers tell.

    def report(self, report: TrainingReport, rank: int, wall: float, now: float) -> None:
        """Take the report of a registered worker."""
        job = self._job(report.job, now)
        old = job.workers.pop(report.worker_id, None)
        if old is not None and old.report.incarnation != report.incarnation:
            self._values -= old.weight
            old = None
        record = job.workers[report.worker_id] = old or WorkerRecord(report, rank, now)
        self._values -= 0 if old is None else old.weight
        record.report, record.rank, record.heard_at = report, rank, now
        self._values += record.weight
        if not record.marks or record.marks[-1][0] < report.steps:
            record.marks.append((report.steps, report.spent))
        job.pending[identity(report.worker_id, report.incarnation)] = report.spent
        self._settle_finite(job, report)
        self._account(job, wall, now)
        while self._values > self._values_max:
            self._drop_oldest()

    def report_non_finite(self, request: ReportNonFinite, rank: int, now: float) -> NonFiniteLoss | None:
        """The fact about a value that is not finite; None if it is known, or facts come too fast."""
        job = self._job(request.job, now)
        known = request.name in job.non_finite or len(job.non_finite) >= NON_FINITE_MAX
        if known or not job.facts.admits(now):
            return None
        job.non_finite[request.name] = request.worker_id, request.step
        return NonFiniteLoss(request.worker_id, rank, request.step, request.name, request.value)

    def _settle_finite(self, job: JobRecord, report: TrainingReport) -> None:
        for name, (worker, step) in list(job.non_finite.items()):
            value = report.values.get(name)
            if worker == report.worker_id and value is not None and is_finite(value) and report.logged_step > step:
                del job.non_finite[name]

    def _account(self, job: JobRecord, wall: float, now: float) -> None:
        if job.account is None or job.account.is_over or now - job.window_at < WINDOW_S:
            return
        job.account = goodput.advanced(job.account, wall, self._deltas(job, job.account, wall))
        job.baselines.update(job.pending)
        job.baselines = {key: spent for key, spent in job.baselines.items() if key in self._present(job)}
        job.pending.clear()
        job.window_at = now

    def _deltas(self, job: JobRecord, account: Account, wall: float) -> list[TimeSpent]:
        """What workers have spent since `account.until`; without those of which it is not known."""
        span_s = wall - account.until
        before = job.baselines
        told = [(spent, before.get(worker)) for worker, spent in job.pending.items()]
        known = [(spent, old) for spent, old in told if old is not None or spent.total_s <= span_s + SLACK_S]
        return [goodput.difference(spent, old) for spent, old in known]

    def _present(self, job: JobRecord) -> set[str]:
        return {identity(record.report.worker_id, record.report.incarnation) for record in job.workers.values()}

    # What facts tell.

    def begin(self, name: str, at: float, now: float) -> None:
        """The job's first world is committed."""
        job = self._job(name, now)
        if job.account is None:
            job.account = Account(began_at=at, until=at)

    def idle(self, name: str, cause: str, at: float, now: float) -> None:
        """From `at` on, time that no worker tells about has this cause; before, the one that was told before."""
        job = self.jobs.get(name)
        if job is None or job.account is None or job.account.is_over:
            return
        if not any(now - record.heard_at < goodput.STALE_S for record in job.workers.values()):
            job.account = goodput.idled(job.account, at)
        job.account = msgspec.structs.replace(job.account, idle_cause=cause)

    def end(self, name: str, at: float) -> None:
        """Training is complete or aborted."""
        job = self.jobs.get(name)
        if job is not None and job.account is not None and not job.account.is_over:
            account = goodput.idled(goodput.advanced(job.account, at, self._deltas(job, job.account, at)), at)
            job.account = msgspec.structs.replace(account, is_over=True)
            job.pending.clear()

    def reopen(self, name: str, at: float) -> None:
        """An aborted job accepts workers again; the time in between does not count."""
        job = self.jobs.get(name)
        if job is not None and job.account is not None and job.account.is_over:
            pause_s = max(0.0, at - job.account.until)
            job.account = msgspec.structs.replace(
                job.account, is_over=False, began_at=job.account.began_at + pause_s, until=job.account.until + pause_s
            )
            job.account = msgspec.structs.replace(job.account, idle_cause="workers_s")

    def remove_worker(self, name: str, worker_id: str, incarnation: bytes | None) -> None:
        """A worker has left or failed; `incarnation` is that of a newer worker of its name, which stays."""
        job = self.jobs.get(name)
        if job is None:
            return
        record = job.workers.get(worker_id)
        if record is not None and record.report.incarnation != incarnation:
            self._values -= job.workers.pop(worker_id).weight
        job.non_finite = {key: seen for key, seen in job.non_finite.items() if seen[0] != worker_id}

    def remove_job(self, name: str) -> None:
        job = self.jobs.pop(name, None)
        if job is not None:
            self._values -= job.weight

    # What is stored.

    def load(self, stored: Mapping[str, StoredMetrics], now: float) -> None:
        """Replace what is stored of all jobs; the newest reports stay."""
        for name in [*self.jobs, *stored]:
            job, old = self._job(name, now), stored.get(name)
            job.account = None if old is None else old.account
            job.baselines = {} if old is None else dict(old.baselines)
            job.non_finite = {} if old is None else dict(old.non_finite)
            # Workers report again before the first window ends.
            job.window_at = now

    def stored(self, name: str) -> StoredMetrics | None:
        """What to store of a job; None if there is nothing."""
        job = self.jobs.get(name)
        if job is None or job.account is None:
            return None
        lowest = [identity(one.report.worker_id, one.report.incarnation) for one in job.by_rank()]
        kept = [key for key in lowest if key in job.baselines][:BASELINES_STORED_MAX] or list(job.baselines)
        baselines = {key: job.baselines[key] for key in kept[:BASELINES_STORED_MAX]}
        return StoredMetrics(account=job.account, baselines=baselines, non_finite=job.non_finite)

    def is_store_due(self, name: str, now: float) -> bool:
        """Whether the account of a job was not stored for long; it counts as stored then."""
        job = self.jobs[name]
        if job.account is None or now - job.stored_at < STORED_EVERY_S:
            return False
        job.stored_at = now
        return True

    # What is shown.

    def sample(self, name: str, wall: float, now: float) -> JobMetrics | None:
        """The job's figures, if none were taken within `SAMPLE_S`."""
        job = self.jobs[name]
        if now - job.sampled_at < SAMPLE_S:
            return None
        job.sampled_at = now
        ranks = job.by_rank()
        step, steps_per_s, samples_per_s, values = self._figures(ranks)
        job.samples.append(MetricsSample(wall, step, steps_per_s, samples_per_s, values))
        share = None if job.account is None else goodput.view(job.account).goodput
        return JobMetrics(name, wall, step, values, steps_per_s, samples_per_s, share)

    def view(self, name: str, wall: float, now: float) -> TrainingView:
        """A job's metrics."""
        job = self.jobs.get(name) or _new_job(now)
        ranks = job.by_rank()
        step, steps_per_s, samples_per_s, values = self._figures(ranks)
        shown = ranks[:WORKERS_SHOWN_MAX]
        slowest = slowest_of(ranks)
        return TrainingView(
            job=name,
            step=step,
            steps_per_s=steps_per_s,
            samples_per_s=samples_per_s,
            values=values,
            workers=[_worker_view(one, now, is_slowest=one is slowest) for one in shown],
            workers_left_out=len(ranks) - len(shown),
            goodput=None if job.account is None else goodput.view(self._account_now(job, job.account, wall, now)),
            non_finite=sorted(job.non_finite),
            history=list(job.samples),
        )

    def _account_now(self, job: JobRecord, account: Account, wall: float, now: float) -> Account:
        """The account with what is not settled yet."""
        if account.is_over:
            return account
        account = goodput.advanced(account, wall, self._deltas(job, account, wall))
        is_idle = not any(now - record.heard_at < goodput.STALE_S for record in job.workers.values())
        return goodput.idled(account, wall) if is_idle else account

    def _figures(self, ranks: list[WorkerRecord]) -> tuple[int, float | None, float | None, dict[str, float]]:
        values: dict[str, float] = {}
        for record in ranks:
            for key, value in record.report.values.items():
                values.setdefault(key, value)
        step = max((record.report.step for record in ranks), default=0)
        rates = [rate for record in ranks if (rate := record.steps_per_s()) is not None]
        steps_per_s = max(rates, default=None)
        batch = max((record.report.samples_per_step for record in ranks), default=0)
        samples_per_s = steps_per_s * batch if steps_per_s is not None and batch else None
        return step, steps_per_s, samples_per_s, values

    def _job(self, name: str, now: float) -> JobRecord:
        job = self.jobs.get(name)
        if job is None:
            job = self.jobs[name] = _new_job(now)
        return job

    def _drop_oldest(self) -> None:
        job = max(self.jobs.values(), key=lambda one: one.weight)
        self._values -= job.workers.pop(next(iter(job.workers))).weight


def _new_job(now: float) -> JobRecord:
    return JobRecord(RateLimit(FACTS_PER_S, FACTS_BURST, now))


def identity(worker_id: str, incarnation: bytes) -> str:
    """The name of one process of a worker."""
    return f"{worker_id}/{incarnation.hex()}"


def is_finite(value: float) -> bool:
    return value - value == 0.0


def slowest_of(ranks: Iterable[WorkerRecord]) -> WorkerRecord | None:
    """The worker that takes longest apart from waiting, if the others wait for it; None if all are alike."""
    times = [(one, *one.times()) for one in ranks]
    known = [(one, took, waits) for one, took, waits in times if took and waits is not None]
    if len(known) < 2:
        return None
    lost_s = sum(waits for _, _, waits in known) / len(known) - min(waits for _, _, waits in known)
    worst = max(known, key=lambda each: each[1] - each[2])
    return worst[0] if lost_s > SLOWEST_WAITS * worst[1] else None


def _worker_view(record: WorkerRecord, now: float, *, is_slowest: bool) -> WorkerMetrics:
    report, (step_time_s, waiting_time_s) = record.report, record.times()
    return WorkerMetrics(
        worker_id=report.worker_id,
        rank=record.rank,
        step=report.step,
        age_s=round(now - record.heard_at, 3),
        step_time_s=step_time_s,
        waiting_time_s=waiting_time_s,
        values=report.values,
        logged_step=report.logged_step,
        spent=report.spent,
        is_slowest=is_slowest,
    )
