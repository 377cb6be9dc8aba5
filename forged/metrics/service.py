"""Training metrics on the bus: takes reports of workers, answers questions, and follows facts about worlds.

Invariants:
- A report counts only if it is of a registered worker.
- Reports are not durable. Of each job the time that is accounted for is stored with the facts that end a stretch of it,
  and otherwise every half minute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from forged.clock import Clock
from forged.elastic.messages import (
    JobAborted,
    JobCompleted,
    JobPaused,
    JobReopened,
    JobWaiting,
    RescaleCompleted,
    RescaleStarted,
    WorkerFailed,
    WorkerLeft,
)
from forged.errors import RequestRefused
from forged.jobs.model import JobRemoved
from forged.kernel.bus import DAEMON, Bus
from forged.kernel.ledger import read_all
from forged.kernel.messages import Call, Decision, Nothing, Record
from forged.kernel.store.port import Store
from forged.metrics.messages import ReadTraining, ReportNonFinite, TrainingReport, TrainingView
from forged.metrics.metrics_table import MetricsTable, StoredMetrics

OWNER = "metrics"
PREFIX = "metrics/"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredMetrics).decode


@dataclass(frozen=True, slots=True)
class MembersPort:
    """What the metrics need to know of the training service."""

    rank: Callable[[str, str, bytes], int | None]
    """The rank of a job's worker of this incarnation, -1 outside a world; None if it is not registered."""
    generation: Callable[[str], int]
    registered: Callable[[], dict[str, list[tuple[str, bytes]]]]
    """By job: the ids and incarnations of all registered workers."""


class MetricsService:
    """The training metrics of all jobs."""

    def __init__(self, bus: Bus, clock: Clock, members: MembersPort) -> None:
        self.table = MetricsTable()
        self._bus = bus
        self._clock = clock
        self._members = members
        bus.on_signal(TrainingReport, self._report, name="metrics.reports")
        bus.serve(ReportNonFinite, self._report_non_finite, owner=OWNER)
        bus.serve(ReadTraining, self._read, owner=OWNER)
        bus.on(
            (RescaleStarted, RescaleCompleted, JobWaiting, JobPaused, JobCompleted, JobAborted, JobReopened),
            self._world_changed,
            name="metrics.worlds",
            durable=True,
        )
        bus.on((WorkerLeft, WorkerFailed), self._worker_ended, name="metrics.workers")
        bus.on(JobRemoved, self._job_removed, name="metrics.removal", durable=True)

    async def load(self, store: Store) -> None:
        """Replace what is stored; the newest reports stay known."""
        entries = await read_all(store, PREFIX)
        stored = {entry.key.removeprefix(PREFIX): _decode(entry.value) for entry in entries}
        self.table.load(stored, self._clock.monotonic())

    # What workers tell.

    def _report(self, report: TrainingReport, call: Call) -> None:
        rank = self._members.rank(report.job, report.worker_id, report.incarnation)
        if rank is None:
            return
        wall, now = self._clock.wall(), self._clock.monotonic()
        self.table.report(report, rank, wall, now)
        figures = self.table.sample(report.job, wall, now)
        if figures is not None:
            self._bus.signal(figures, Call(DAEMON, OWNER))
        ledger = self._bus.ledger
        if ledger.writable_now and self.table.is_store_due(report.job, now):
            ledger.append(Decision(None, writes=self._writes(report.job)), origin=OWNER)

    def _report_non_finite(self, request: ReportNonFinite, call: Call) -> Decision[Nothing]:
        rank = self._members.rank(request.job, request.worker_id, request.incarnation)
        if rank is None:
            self._bus.dispatcher.require_job(request.job)
            raise RequestRefused(
                "worker_gone",
                f"worker {request.worker_id[:80]} of job {request.job} has failed or left",
                "start a new process",
            )
        fact = self.table.report_non_finite(request, rank, self._clock.monotonic())
        facts = () if fact is None else (fact,)
        generation = self._members.generation(request.job)
        return Decision(
            Nothing(), facts, self._writes(request.job) if facts else {}, job=request.job, generation=generation
        )

    # Questions.

    def _read(self, request: ReadTraining, call: Call) -> TrainingView:
        self._bus.dispatcher.require_job(request.job)
        return self.table.view(request.job, self._clock.wall(), self._clock.monotonic())

    # Facts of other services.

    def _world_changed(self, record: Record) -> Decision[None]:
        table, job, at, now = self.table, record.job, record.at, self._clock.monotonic()
        match record.fact:
            case RescaleStarted(in_background=False):
                table.idle(job, "rescale_s", at, now)
            case RescaleCompleted():
                table.begin(job, at, now)
                table.idle(job, "", at, now)
            case JobWaiting():
                table.idle(job, "workers_s", at, now)
            case JobPaused():
                table.idle(job, "paused_s", at, now)
            case JobCompleted() | JobAborted():
                table.end(job, at)
            case JobReopened():
                table.reopen(job, at)
        return Decision(None, writes=self._writes(job))

    def _worker_ended(self, record: Record) -> None:
        """A worker has failed or left; another process may have its name by now."""
        fact = record.fact
        if isinstance(fact, WorkerLeft | WorkerFailed):
            registered = dict(self._members.registered().get(record.job, ()))
            self.table.remove_worker(record.job, fact.worker_id, registered.get(fact.worker_id))

    def _job_removed(self, record: Record) -> Decision[None]:
        self.table.remove_job(record.job)
        return Decision(None, writes={PREFIX + record.job: None})

    def _writes(self, job: str) -> dict[str, bytes | None]:
        stored = self.table.stored(job)
        return {} if stored is None else {PREFIX + job: _encode(stored)}
