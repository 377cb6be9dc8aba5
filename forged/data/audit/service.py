"""The proof that each sample was used once, on the bus.

Law: what workers report is kept before it is acknowledged, so they may forget it. What they report again changes
nothing. When a world begins behind fewer steps than were reported, what was used behind them is void. A log that cannot
be read proves nothing ever more, and is in the way of nothing else: it stays as it is until its job is removed, whoever
asks for a proof is told so, and workers need keep nothing for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from forged.data.audit.epoch_audit import EpochAudit, UsageLog
from forged.data.messages import AuditData, AuditView, ReportUsage, UsageConflict, UsageTaken
from forged.elastic.messages import RescaleCompleted
from forged.errors import PeerError, RequestRefused, describe
from forged.jobs.model import JobRemoved
from forged.kernel.bus import Bus
from forged.kernel.ledger import read_all
from forged.kernel.messages import Call, Decision, Record
from forged.kernel.store.port import Store
from forged.log import SILENT, Log

OWNER = "usage"
PREFIX = "usage/"
CHUNKS_MAX = 100
"""What is written together has its limits, and so has a log."""
ROWS_MAX = 100_000
"""Of more rows it is forgotten which step has used what: a training that goes back behind them proves less."""

BEGUN_MAX = 64
"""So many worlds of a job are remembered before it tells of any usage."""


class AuditService:
    """Owns the logs of all jobs."""

    def __init__(self, bus: Bus, log: Log = SILENT) -> None:
        self.logs: dict[str, UsageLog] = {}
        self._chunks: dict[str, list[bytes]] = {}
        """What the store holds of each."""
        self._kept: dict[str, int] = {}
        """Which revision of each that is."""
        self._unreadable: dict[str, list[str]] = {}
        """Under which keys the logs lie that cannot be read."""
        self._begun: dict[str, list[tuple[int, int]]] = {}
        """Which worlds have begun behind which steps, of jobs that have told of no usage yet; both ascend."""
        self._log = log
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
            self._log.error("what the steps of a job have used cannot be read", job=job, why=describe(error))
            self._unreadable[job] = [f"{PREFIX}{job}/{number}" for number in chunks]

    def _report(self, request: ReportUsage, call: Call) -> Decision[UsageTaken]:
        self._dispatcher.require_job(request.job)
        if request.job in self._unreadable:
            return Decision(UsageTaken())
        log = self.logs.get(request.job) or self._new_log(request)
        if log.samples != request.samples:
            raise RequestRefused(
                "dataset_differs",
                f"job {request.job} trains with {log.samples} samples, and not with {request.samples}",
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
        """A log that knows of the worlds so far: what is told first may be void by now."""
        log = UsageLog(request.samples)
        for generation, step in self._begun.pop(request.job, ()):
            log.rewind(generation, step)
        return log

    def _writes(self, job: str, log: UsageLog) -> dict[str, bytes | None]:
        """The chunks that are others than those in the store."""
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
        """A world begins there; what an earlier one tells after a later one has is in order, too."""
        try:
            log.rewind(generation, step)
        except RequestRefused as error:
            self._log.debug("a world's beginning was heard late", job=job, generation=generation, why=error.message)

    def _committed(self, record: Record) -> Decision[None] | None:
        """Another world holds, and may die before it reports. Where the fact does not say behind which step it begins,
        somebody in it has the state, and it goes on from there."""
        fact, log = record.fact, self.logs.get(record.job)
        if not isinstance(fact, RescaleCompleted) or fact.step is None:
            return None
        if log is None:
            # Of those before it, the ones that began behind fewer steps make more void than it does.
            before = [begun for begun in self._begun.get(record.job, ()) if begun[1] < fact.step]
            self._begun[record.job] = [*before, (fact.delta.epoch, fact.step)][-BEGUN_MAX:]
            return None
        self._go_back(record.job, log, fact.delta.epoch, fact.step)
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
                f"what the steps of job {request.job} have used cannot be read, so nothing is proven of it",
                "see the daemon's log; a backup may have it",
            )
        log = self.logs.get(request.job)
        if log is None:
            raise RequestRefused(
                "usage_none",
                f"no step of job {request.job!r} was reported yet",
                "give its workers a sampler, and wait for its first steps",
            )
        epochs = log.epochs
        epoch = request.epoch if request.epoch is not None else max(epochs, default=0)
        return _view(request.job, log.audit(epoch), epochs)


def _bounded(log: UsageLog) -> list[bytes]:
    """The log in chunks. Of what is too much the oldest is forgotten: an epoch whose rows are gone is not complete, and
    says so."""
    chunks = log.encode()
    while len(chunks) > CHUNKS_MAX and log.forget_oldest():
        chunks = log.encode()
    return chunks


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
