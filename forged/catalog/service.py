"""The checkpoint catalogue on the bus: answers requests, follows jobs and their progress.

Invariants:
- A request in the name of a worker is refused unless its incarnation is that of the registered worker.
- A collection is asked for by `CollectCheckpoints`, also by the daemon itself, so that a plugin can replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from msgspec import structs

from forged.auth.model import Principal, Role
from forged.catalog.book.catalog_book import CATALOG_BYTES_MAX, CatalogBook
from forged.catalog.book.questions import CatalogQuestions
from forged.catalog.book.restores import RESTORES_PREFIX
from forged.catalog.files.file_work import OWNER, FileWork
from forged.catalog.messages import (
    AdoptCheckpoints,
    Adoption,
    CheckpointCadence,
    CheckpointCollected,
    CheckpointCompleted,
    CheckpointCorrupted,
    CheckpointPage,
    CheckpointView,
    CollectCheckpoints,
    Collection,
    CompactCheckpoint,
    CompleteCheckpoint,
    CompletedCheckpoint,
    ConfirmDeleted,
    DeleteCheckpoint,
    FailCheckpoint,
    FindRestorePoints,
    GcTick,
    HoldCheckpoint,
    ListCheckpoints,
    PinCheckpoint,
    ReadRetention,
    ReinstateCheckpoint,
    ReleaseCheckpoint,
    ReportCorruptCheckpoint,
    ReportRestore,
    RestorePoints,
    RetentionPage,
    ShowCheckpoint,
    StartCheckpoint,
    UnpinCheckpoint,
)
from forged.catalog.model import CheckpointMeta, CheckpointState
from forged.catalog.ports import CheckpointFiles, JobsPort, NoFiles
from forged.catalog.records import PREFIX, CheckpointRecord, Moment, root_of, shortened
from forged.clock import Clock
from forged.elastic.messages import ConfirmWorker, ProgressLost
from forged.errors import ForgedError
from forged.jobs.model import JobChanged, JobCreated, JobRemoved, SettingValue
from forged.kernel.bus import DAEMON, Bus
from forged.kernel.ledger import read_all
from forged.kernel.messages import Call, Decision, Nothing, Record
from forged.kernel.pending import Pending
from forged.kernel.store.port import Store
from forged.log import SILENT, Log
from forged.registry.messages import ModelDeleted

R = TypeVar("R")

FILES = "catalog.files"
JOBS_AT_ONCE = 100

WorkersRequest = StartCheckpoint | CompleteCheckpoint | FailCheckpoint | ReportRestore | ConfirmDeleted


class CatalogService:
    """The checkpoints of all jobs."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        jobs: JobsPort,
        *,
        uid: int,
        defaults: Mapping[str, SettingValue],
        roots: tuple[str, ...] = (),
        bytes_max: int = CATALOG_BYTES_MAX,
        models_of: Callable[[CheckpointRecord], Iterator[str]] = lambda record: iter(()),
        files: CheckpointFiles | None = None,
        scrub_bytes_per_s: int = 0,
        log: Log = SILENT,
    ) -> None:
        """Without `files` the daemon touches none."""
        self.book = CatalogBook(jobs.settings, defaults=defaults, roots=roots, bytes_max=bytes_max, models_of=models_of)
        self._questions = CatalogQuestions(self.book)
        self._bus = bus
        self._clock = clock
        self._jobs = jobs
        self._own_names = frozenset({f"unix:{uid}", f"loopback:{uid}"})
        self._numbers = 0
        self._cadences: dict[str, str] = {}
        self.work = FileWork(
            bus,
            clock,
            self.book,
            files or NoFiles(),
            log,
            is_registered=jobs.is_registered,
            decide=self._decide,
            scrub_bytes_per_s=scrub_bytes_per_s,
        )
        self._log = log
        self._subscribe()

    def _subscribe(self) -> None:
        bus, book = self._bus, self.book
        bus.serve(StartCheckpoint, self._start, owner=OWNER)
        bus.serve(CompleteCheckpoint, self._complete, owner=OWNER)
        bus.serve(FailCheckpoint, self._fail, owner=OWNER)
        bus.serve(ReportCorruptCheckpoint, lambda request, call: book.saves.report_corrupt(request), owner=OWNER)
        bus.serve(ReportRestore, self._restored, owner=OWNER)
        bus.serve(ConfirmDeleted, self._confirm_deleted, owner=OWNER)
        bus.serve(HoldCheckpoint, lambda request, call: book.holds.hold(request, self._now()), owner=OWNER)
        bus.serve(ReleaseCheckpoint, lambda request, call: book.holds.release(request), owner=OWNER)
        bus.serve(FindRestorePoints, self._find, owner=OWNER)
        bus.serve(ListCheckpoints, self._list, owner=OWNER)
        bus.serve(ShowCheckpoint, self._show, owner=OWNER)
        bus.serve(ReadRetention, self._read_retention, owner=OWNER)
        bus.serve(PinCheckpoint, lambda request, call: book.holds.pin(request, is_pinned=True), owner=OWNER)
        bus.serve(UnpinCheckpoint, lambda request, call: book.holds.pin(request, is_pinned=False), owner=OWNER)
        bus.serve(ReinstateCheckpoint, lambda request, call: book.restores.reinstate(request), owner=OWNER)
        bus.serve(CollectCheckpoints, self._collect, owner=OWNER)
        bus.serve(DeleteCheckpoint, lambda request, call: book.collection.delete(request), owner=OWNER)
        bus.serve(CompactCheckpoint, self._compact, owner=OWNER)
        bus.serve(AdoptCheckpoints, self._adopt, owner=OWNER)
        bus.on_signal(CheckpointCadence, self._cadence, name="catalog.cadences")
        bus.on_signal(GcTick, self._tick, name="catalog.collection")
        bus.on((CheckpointCollected, CheckpointCompleted, CheckpointCorrupted), self._checkpoint_changed, name=FILES)
        bus.on((JobCreated, JobChanged), self._job_changed, name="catalog.settings")
        bus.on(JobRemoved, self._job_removed, name="catalog.removal", durable=True)
        bus.on(ModelDeleted, lambda record: book.table.index.look_again(), name="catalog.models")
        bus.on(ProgressLost, self._progress_lost, name="catalog.progress", durable=True)

    async def load(self, store: Store) -> None:
        """Become what the store holds."""
        entries = await read_all(store, PREFIX)
        restores = {entry.key: entry.value for entry in await read_all(store, RESTORES_PREFIX)}
        self.book.load((entry.value for entry in entries), restores, self._now())
        self.work.reload()

    def set_roots(self, roots: tuple[str, ...]) -> None:
        """Beneath these the daemon may touch files from now on."""
        if roots != self.book.table.roots:
            self.book.table.roots = roots
            # The daemon may delete the files of more tombstones now.
            self._bus.ledger.settled(list(self.book.table.tombstones())).when_done(self._delete_all)

    def _delete_all(self, durable: Pending) -> None:
        for record in durable.reply if durable.error is None else ():
            self.work.delete(record)

    def _now(self) -> Moment:
        return Moment(self._clock.wall(), self._clock.monotonic(), self._bus.ledger.revision)

    # Requests of workers.

    async def _start(self, request: StartCheckpoint, call: Call) -> Decision[CheckpointMeta]:
        await self._confirm(request, call)
        holder, is_trusted = call.principal.holder, self.is_trusted(call.principal)
        return self._of_job(
            self.book.saves.start(request, self._new_id(), holder, self._now(), is_trusted=is_trusted), request.job
        )

    async def _complete(self, request: CompleteCheckpoint, call: Call) -> Decision[CompletedCheckpoint]:
        await self._confirm_writer(request, call)
        return self._last(self.book.saves.complete(request), request.job)

    def verify_again(self, checkpoint_id: str) -> None:
        """Verify a checkpoint that was damaged and is repaired, perhaps; ignores unknown ones."""
        record = self.book.table.records.get(checkpoint_id)
        if record is not None:
            self.work.verify_again(record)

    async def _fail(self, request: FailCheckpoint, call: Call) -> Decision[Nothing]:
        await self._confirm_writer(request, call)
        return self._of_job(self.book.saves.fail(request, self._now()), request.job)

    async def _restored(self, request: ReportRestore, call: Call) -> Decision[Nothing]:
        await self._confirm(request, call)
        decision = self._last(self.book.restores.restored(request, self._now()), request.job)
        record = self.book.restores.restored_from(request)
        if record is not None and (request.repaired_chunks or record.meta.state is CheckpointState.CORRUPTED):
            self.work.verify_again(record)
        return decision

    async def _confirm_deleted(self, request: ConfirmDeleted, call: Call) -> Decision[Nothing]:
        await self._confirm(request, call)
        return self._last(self.book.collection.confirm_deleted(request), request.job)

    async def _confirm_writer(self, request: CompleteCheckpoint | FailCheckpoint, call: Call) -> None:
        """As `_confirm`; the worker that has started the checkpoint may have left, and its job may be over."""
        if not self.book.saves.has_started(request.worker_id, request.incarnation, request.checkpoint_id):
            await self._confirm(request, call)

    async def _confirm(self, request: WorkersRequest, call: Call) -> None:
        """Refuse a request in the name of a worker that is not registered. The daemon itself names none."""
        self._bus.dispatcher.require_job(request.job)
        if request.worker_id or not call.principal.may(Role.OPERATOR, request.job):
            await self._bus.ask(ConfirmWorker(request.job, request.worker_id, request.incarnation))

    def is_trusted(self, principal: Principal) -> bool:
        """Whether the daemon may touch what this principal names: an operator, or the daemon's own user."""
        return principal.may(Role.OPERATOR, None) or principal.name in self._own_names

    def is_root(self, folder: str, job: str) -> bool:
        """Whether the daemon may touch what is in a directory for any worker of the job."""
        return root_of(f"{folder}/", self.book.table.roots, job) is not None

    def _cadence(self, signal: CheckpointCadence, call: Call) -> None:
        if self._jobs.settings(signal.job) is not None:
            self._cadences[signal.job] = shortened(signal.text)

    # Requests of operators and viewers.

    def _find(self, request: FindRestorePoints, call: Call) -> RestorePoints:
        if self.book.table.index.run(request.job) is None:
            # A removed job whose checkpoints are kept is not refused. An empty answer to a wrong name would mislead.
            self._bus.dispatcher.require_job(request.job)
        return self._questions.find(request, self._jobs.step(request.job))

    def _list(self, request: ListCheckpoints, call: Call) -> CheckpointPage:
        return self._questions.page(request, self._cadences.get(request.job, ""))

    def _show(self, request: ShowCheckpoint, call: Call) -> CheckpointView:
        view = self._questions.show(request, self._now())
        return structs.replace(view, operation=self.work.operations.get(request.checkpoint_id))

    def _read_retention(self, request: ReadRetention, call: Call) -> RetentionPage:
        return self._questions.retention_page(request, self._now())

    def _collect(self, request: CollectCheckpoints, call: Call) -> Decision[Collection]:
        return self._last(self.book.collection.collect(request.job, self._now()), request.job)

    def _adopt(self, request: AdoptCheckpoints, call: Call) -> Decision[Adoption]:
        self._bus.dispatcher.require_job(request.job)
        holder, is_trusted = call.principal.holder, self.is_trusted(call.principal)
        return self._last(
            self.book.adoptions.adopt(request, self._new_id, holder, self._now(), is_trusted=is_trusted), request.job
        )

    def _compact(self, request: CompactCheckpoint, call: Call) -> Decision[Nothing]:
        decision = self.book.compaction.compact(request)
        record = self.book.table.records[request.checkpoint_id]
        if record.is_to_compact:
            self.work.compact(record)
        return self._of_job(decision, request.job)

    # Collection.

    async def _tick(self, signal: GcTick, call: Call) -> None:
        due = self.book.collection.due(self._now())
        while due:
            # Together, so that they share commits.
            now, due = due[:JOBS_AT_ONCE], due[JOBS_AT_ONCE:]
            asked = [(job, self._bus.submit(CollectCheckpoints(job), Call(DAEMON, OWNER))) for job in now]
            for job, pending in asked:
                try:
                    collection: Collection = await pending.wait()
                except ForgedError as error:
                    self._log.warning("checkpoints were not collected", job=job, reason=error.message)
                else:
                    due += [job] if collection.more else []

    def _checkpoint_changed(self, record: Record) -> None:
        """A durable change of a checkpoint, whose files are to be deleted or verified, or that supersedes others."""
        fact = record.fact
        if isinstance(fact, CheckpointCompleted):
            self._bus.signal(GcTick(), Call(DAEMON, OWNER))
            self._bound_chain(fact.checkpoint_id)
        elif isinstance(fact, CheckpointCollected | CheckpointCorrupted):
            known = self.book.table.records.get(fact.checkpoint_id)
            if known is None:
                return
            # The record is newer than the fact: a tombstone is durable only if the fact is about it.
            if isinstance(fact, CheckpointCollected):
                self.work.delete(known)
            elif not known.is_deleted:
                self.work.suspect(known)

    def _bound_chain(self, checkpoint_id: str) -> None:
        """Compact a checkpoint at the end of a chain that is too long."""
        record = self.book.table.records.get(checkpoint_id)
        if record is not None and self.book.table.is_managed(record) and self.book.compaction.has_long_chain(record):
            self._bus.submit(CompactCheckpoint(record.job, checkpoint_id), Call(DAEMON, OWNER))

    # Facts of other services.

    def _job_changed(self, record: Record) -> None:
        self.book.policies.settings_changed(record.job)

    def _job_removed(self, record: Record) -> Decision[None]:
        self._cadences.pop(record.job, None)
        return self._last(self.book.remove_job(record.job), record.job)

    def _progress_lost(self, record: Record) -> Decision[None] | None:
        fact = record.fact
        if not isinstance(fact, ProgressLost):
            return None
        return self._last(self.book.restores.progress_lost(record.job, fact.step, record.id), record.job)

    # Decisions.

    def _new_id(self) -> str:
        """An id that no checkpoint of this store ever had: each start of the daemon has a term of its own."""
        self._numbers += 1
        return f"ckpt-{self._bus.ledger.term:04d}-{self._numbers:06d}"

    def _decide(self, decision: Decision[Any]) -> Pending:
        """Queue a decision that no request has asked for."""
        return self._bus.ledger.append(self._of_job(decision, decision.job), origin=OWNER)

    def _of_job(self, decision: Decision[R], job: str) -> Decision[R]:
        return replace(decision, generation=self._jobs.generation(job))

    def _last(self, decisions: Sequence[Decision[R]], job: str) -> Decision[R]:
        """Queue all decisions but the last one, which carries the reply."""
        *first, last = (self._of_job(decision, job) for decision in decisions)
        for decision in first:
            self._bus.ledger.append(decision, origin=OWNER)
        return last
