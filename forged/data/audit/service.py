"""The audit service: keeps the usage that workers report, and answers `AuditData`.

Invariants:
- Usage is durable before it is acknowledged, so workers may forget it. A repeated report changes nothing.
- When a world begins at a lower step than was reported, the usage from there on is void.
- An unreadable log stays until its job is removed: its audit is refused, reports for it are acknowledged, and nothing
  else is affected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from forged.data.audit.epoch_audit import EpochAudit, UsageLog
from forged.data.messages import AuditData, AuditView, ReportUsage, UsageConflict, UsageTaken
from forged.elastic.messages import ConfirmWorker, RescaleCompleted
from forged.errors import PeerError, RequestRefused, describe
from forged.jobs.model import JobRemoved
from forged.kernel.bus import Bus
from forged.kernel.ledger import read_all
from forged.kernel.messages import Call, Decision, Record
from forged.kernel.store.port import Store
from forged.log import SILENT, Log
from forged.phrases import counted

OWNER = "usage"
PREFIX = "usage/"
CHUNKS_MAX = 100
"""A transaction has a limited number of operations, and a log a limited size."""
ROWS_MAX = 100_000
"""Beyond this many rows the oldest are settled, so a training that goes back before them proves less."""

BEGUN_MAX = 64
"""How many worlds of a job are remembered before its first usage report."""


class AuditService:
    """The usage logs of all jobs."""

    def __init__(self, bus: Bus, log: Log = SILENT) -> None:
        self.logs: dict[str, UsageLog] = {}
        self._chunks: dict[str, list[bytes]] = {}
        """The stored chunks of each job."""
        self._kept: dict[str, int] = {}
        """The revision of each job's stored log."""
        self._unreadable: dict[str, list[str]] = {}
        """The keys of unreadable logs, by job."""
        self._begun: dict[str, list[tuple[int, int]]] = {}
        """Generation and first step of each world, for jobs without usage reports; both ascend."""
        self._log = log
        self._bus = bus
        self._dispatcher = bus.dispatcher
        bus.serve(ReportUsage, self._report, owner=OWNER)
        bus.serve(AuditData, self._audit, owner=OWNER)
        bus.on(RescaleCompleted, self._committed, name="usage.commits", durable=True)
        bus.on(JobRemoved, self._removed, name="usage.removal", durable=True)

    async def load(self, store: Store) -> None:
        """Become what the store holds."""
        self.logs.clear()
        self._chunks.clear()
        self._kept.clear()
        self._unreadable.clear()
        self._begun.clear()
        found: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
        for entry in await read_all(store, PREFIX):
            job, _, number = entry.key.removeprefix(PREFIX).rpartition("/")
            found[job][number] = entry.value
        for job, chunks in found.items():
            self._take_over(job, chunks)

    def _take_over(self, job: str, chunks: Mapping[str, bytes]) -> None:
        try:
            in_order = [chunks[str(number)] for number in range(len(chunks))]
            self.logs[job], self._chunks[job] = UsageLog.decode(in_order), in_order
        except (KeyError, PeerError) as error:
            self._log.error("the sample usage of a job is unreadable", job=job, reason=describe(error))
            self._unreadable[job] = [f"{PREFIX}{job}/{number}" for number in chunks]

    def summary(self, job: str, epoch: int) -> str:
        """What the audit says of an epoch so far, in words; empty if the job reports no usage."""
        log = self.logs.get(job)
        return "" if log is None else _in_words(log.audit(epoch))

    async def _report(self, request: ReportUsage, call: Call) -> Decision[UsageTaken]:
        self._dispatcher.require_job(request.job)
        await self._bus.ask(ConfirmWorker(request.job, request.worker_id, request.incarnation))
        if request.job in self._unreadable:
            return Decision(UsageTaken())
        log = self.logs.get(request.job) or self._new_log(request)
        if log.samples != request.samples:
            raise RequestRefused(
                "dataset_differs",
                f"samples must be {log.samples}, the dataset of job {request.job}, got {request.samples}",
                "give all workers the same dataset",
            )
        self._go_back(request.job, log, request.generation, request.begins_at)
        log.report(request.generation, request.runs, request.worker_id)
        if log.rows > ROWS_MAX:
            log.settle(log.told(request.generation))
        self.logs[request.job] = log
        taken = UsageTaken(log.told(request.generation))
        return Decision(taken, writes=self._writes(request.job, log), job=request.job)

    def _new_log(self, request: ReportUsage) -> UsageLog:
        """A log that knows the worlds so far, because the first report may be void already."""
        log = UsageLog(request.samples)
        for generation, step in self._begun.pop(request.job, ()):
            log.rewind(generation, step)
        return log

    def _writes(self, job: str, log: UsageLog) -> dict[str, bytes | None]:
        """The chunks that differ from the stored ones."""
        if self._kept.get(job) == log.revision:
            return {}
        chunks, before = _bounded(log), self._chunks.get(job, [])
        self._chunks[job], self._kept[job] = chunks, log.revision
        writes: dict[str, bytes | None] = {
            f"{PREFIX}{job}/{number}": chunk
            for number, chunk in enumerate(chunks)
            if number >= len(before) or before[number] != chunk
        }
        return writes | {f"{PREFIX}{job}/{number}": None for number in range(len(chunks), len(before))}

    def _go_back(self, job: str, log: UsageLog, generation: int, step: int) -> None:
        """Void the usage from this step on, where a new world begins; earlier worlds may still report their steps."""
        try:
            log.rewind(generation, step)
        except RequestRefused as error:
            self._log.debug("start of a world recorded late", job=job, generation=generation, reason=error.message)

    def _committed(self, record: Record) -> Decision[None] | None:
        """A world was committed, and may fail before it reports. Where the fact names no step, a member has the state,
        and the world continues from there."""
        fact, log = record.fact, self.logs.get(record.job)
        if not isinstance(fact, RescaleCompleted) or fact.step is None:
            return None
        if log is None:
            # Earlier worlds that began at a lower step void more than this one does.
            before = [begun for begun in self._begun.get(record.job, ()) if begun[1] < fact.step]
            self._begun[record.job] = [*before, (fact.delta.generation, fact.step)][-BEGUN_MAX:]
            return None
        self._go_back(record.job, log, fact.delta.generation, fact.step)
        return Decision(None, writes=self._writes(record.job, log))

    def _removed(self, record: Record) -> Decision[None] | None:
        self._begun.pop(record.job, None)
        if unreadable := self._unreadable.pop(record.job, None):
            return Decision(None, writes=dict.fromkeys(unreadable))
        if self.logs.pop(record.job, None) is None:
            return None
        self._kept.pop(record.job, None)
        chunks = self._chunks.pop(record.job, [])
        return Decision(None, writes={f"{PREFIX}{record.job}/{number}": None for number in range(len(chunks))})

    def _audit(self, request: AuditData, call: Call) -> AuditView:
        self._dispatcher.require_job(request.job)
        if request.job in self._unreadable:
            raise RequestRefused(
                "usage_unreadable",
                f"the usage log of job {request.job} cannot be read, so none of its epochs can be audited",
                "see the daemon's log, and restore a backup",
            )
        log = self.logs.get(request.job)
        if log is None:
            raise RequestRefused(
                "usage_none",
                f"no step of job {request.job!r} has been reported yet",
                "give its workers a sampler, and wait for its first steps",
            )
        epochs = log.epochs
        epoch = request.epoch if request.epoch is not None else max(epochs, default=0)
        return _view(request.job, log.audit(epoch), epochs)


def _bounded(log: UsageLog) -> list[bytes]:
    """The log in chunks. Beyond the limit the oldest epochs are forgotten, and show up as incomplete."""
    chunks = log.encode()
    while len(chunks) > CHUNKS_MAX and log.forget_oldest():
        chunks = log.encode()
    return chunks


def _in_words(audit: EpochAudit) -> str:
    if audit.complete:
        dropped = f", {audit.dropped:,} of them deliberately dropped" if audit.dropped else ""
        return f"epoch {audit.epoch}: all {audit.expected:,} samples were used once{dropped}"
    faults = [f"{audit.repeated_total:,} more than once"] if audit.repeated_total else []
    faults += [f"reports of {counted(len(audit.conflicts), 'step')} differ"] if audit.conflicts else []
    used = f"epoch {audit.epoch}: {audit.used:,} of {audit.expected:,} samples were used so far"
    return ", ".join([used, *(faults or ["none more than once"])])


def _view(job: str, audit: EpochAudit, epochs: list[int]) -> AuditView:
    return AuditView(
        job=job,
        epoch=audit.epoch,
        samples=audit.expected,
        used=audit.used,
        dropped=audit.dropped,
        complete=audit.complete,
        missing_total=audit.missing_total,
        missing=[(span.start, span.stop) for span in audit.missing],
        repeated_total=audit.repeated_total,
        repeated=[(span.start, span.stop) for span in audit.repeated],
        forgotten=audit.forgotten,
        conflicts=[UsageConflict(step, worker) for step, worker in audit.conflicts],
        epochs=epochs,
    )
