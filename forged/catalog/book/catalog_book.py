"""The catalogue of all jobs: answers requests with decisions, without I/O.

Invariants:
- A refusal changes nothing; every change is in the decisions' writes. A decision has at most `CHANGES_MAX` changes.
- The files of a checkpoint are identified by their path, their save id and the job that their manifest names, and
  belong to one record. A job that names the path or the save of another job keeps that job from nothing.
- A checkpoint becomes a tombstone before its files are deleted, and is forgotten after they are gone.
- A collection makes tombstones of children before those of their parents.
- What the daemon may not touch is deleted by the job's workers, and never by the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice

import msgspec

from forged.catalog import errors, retention
from forged.catalog.book.changes import Change, decided, in_decisions, total
from forged.catalog.book.estimates import MeasuredRestore, RestoreTimes, bytes_read
from forged.catalog.catalog_index import CatalogIndex
from forged.catalog.messages import (
    AdoptCheckpoints,
    AdoptedCheckpoint,
    Adoption,
    CheckpointCollected,
    CheckpointCompacted,
    CheckpointCompleted,
    CheckpointCorrupted,
    CheckpointFailed,
    CheckpointOperationFailed,
    CheckpointParentFound,
    CheckpointReinstated,
    CheckpointRepaired,
    CheckpointRestored,
    CheckpointsAbandoned,
    CheckpointsAdopted,
    CheckpointStarted,
    CollectedFiles,
    Collection,
    CompactCheckpoint,
    CompleteCheckpoint,
    CompletedCheckpoint,
    ConfirmDeleted,
    DeleteCheckpoint,
    FailCheckpoint,
    HoldCheckpoint,
    PinCheckpoint,
    ReinstateCheckpoint,
    ReleaseCheckpoint,
    ReportCorruptCheckpoint,
    ReportRestore,
    RetentionVerdict,
    StartCheckpoint,
    UnpinCheckpoint,
)
from forged.catalog.model import (
    EPOCH_MAX,
    SIZE_MAX,
    STEP_MAX,
    CheckpointMeta,
    CheckpointState,
    CheckpointType,
    CreateCheckpointRequest,
    checked_count,
    checked_request,
    checked_time,
)
from forged.catalog.ports import CheckpointLocation, FoundCheckpoint
from forged.catalog.records import (
    HOLD_S_MAX,
    HOLDS_MAX,
    RECORD_OVERHEAD_BYTES,
    CheckpointRecord,
    Moment,
    checked_checkpoint_path,
    checked_holder,
    checked_location,
    checked_metrics,
    checked_save_id,
    checked_seconds,
    decoded,
    encoded,
    root_of,
    shortened,
    storage_kind,
)
from forged.catalog.run_index import IndexEntry
from forged.catalog.settings import JobRetention, retention_of
from forged.errors import RequestRefused
from forged.jobs.model import SettingValue
from forged.kernel.messages import Decision, Fact, Nothing
from forged.shares import Holder, Shares

RESTORES_PREFIX = "restore-times/"
CATALOG_BYTES_MAX = 512 << 20
PARTS = 16
"""One part of the catalogue is left to operators, and four to principals other than the largest."""
COLLECTED_MAX = 500
"""So many checkpoints are collected at once."""
DELETE_MAX = 100
"""So many deletions are given to a worker at once."""
ADOPTED_MAX = 1000
KEEP_MAX = 2**31 - 1
SKIPPED_MAX = 1000
REFUSED_CHARS_MAX = 200
NO_SETTINGS: Mapping[str, SettingValue] = {}
WRITER_GONE_S = 60.0
"""So long after its writer is gone, a checkpoint is looked for: a save in the background ends after its worker."""
WRITING_S_MAX = 3600.0
"""So long a checkpoint may be written."""
FAILED_KEPT_S = 3600.0
"""So long after a save has failed its files are deleted: its writer may be late, and complete it yet."""
FAILED_RULE = "failed"
DELETING = "deleting"
REQUESTED_RULE = "requested"

IsRegistered = Callable[[str, str, bytes], bool]
"""Whether a worker of a job, with an incarnation, is registered."""

_encode = msgspec.msgpack.Encoder().encode
_decode_restores = msgspec.msgpack.Decoder(list[MeasuredRestore]).decode


class CatalogBook:
    """All checkpoints of all jobs."""

    def __init__(
        self,
        settings_of: Callable[[str], Mapping[str, SettingValue] | None] = lambda job: NO_SETTINGS,
        *,
        defaults: Mapping[str, SettingValue] = NO_SETTINGS,
        roots: tuple[str, ...] = (),
        bytes_max: int = CATALOG_BYTES_MAX,
        models_of: Callable[[CheckpointRecord], Iterator[str]] = lambda record: iter(()),
    ) -> None:
        """`models_of`: the names of the models that refer to a checkpoint, and keep it."""
        self.roots = roots
        """Beneath these the daemon may touch files, also if an untrusted principal has named them."""
        self.times = RestoreTimes()
        self.index = CatalogIndex(
            retention_of(NO_SETTINGS, defaults).policy, lambda checkpoint_id: models_of(self.records[checkpoint_id])
        )
        self.records: dict[str, CheckpointRecord] = {}
        """By id; tombstones too."""
        self.since: dict[str, float] = {}
        """Since when, by the monotonic clock, each checkpoint is being written or has failed."""
        self.gone_since: dict[str, float] = {}
        """Since when, by the monotonic clock, the writer of a checkpoint is not registered any more."""
        self._settings_of = settings_of
        self._defaults = defaults
        self._retention: dict[str, JobRetention] = {}
        self._kept_by_script: dict[str, int] = {}
        self._at: dict[tuple[str, str], dict[str, str]] = {}
        """The id of each checkpoint and tombstone, by job and path, and by save id."""
        self._named: dict[tuple[str, str], dict[str, str]] = {}
        """The same, by path and save id, and by job."""
        self._deleted_in: dict[str, dict[str, None]] = {}
        """The ids of the tombstones in each folder."""
        self._cost: dict[str, int] = {}
        self._holds: dict[str, dict[str, float]] = {}
        """When each hold ends, by checkpoint and holder."""
        self._shares = Shares("catalogue bytes", 0)
        self.set_bytes_max(bytes_max)

    # The state as a whole.

    def load(self, values: Iterable[bytes], restores: Mapping[str, bytes], now: Moment) -> None:
        """Replace everything by what the store holds."""
        for checkpoint_id, cost in self._cost.items():
            self._shares.give_back(self.records[checkpoint_id].holder, cost)
        for table in (
            self.records,
            self.since,
            self.gone_since,
            self._deleted_in,
            self._retention,
            self._kept_by_script,
            self._at,
            self._named,
            self._cost,
            self._holds,
        ):
            table.clear()
        for value in values:
            record = decoded(value)
            self._remember(record, len(value))
            if record.is_being_written or record.meta.is_failed_save:
                self.since[record.id] = now.monotonic
            if record.holds:
                self._holds[record.id] = {one: now.monotonic + held_s for one, held_s in record.holds.items()}
        for record in sorted(self.records.values(), key=lambda one: one.meta.created_at):
            self._kept_by_script |= {} if record.keep is None else {record.job: record.keep}
        for job in {record.job for record in self.records.values()}:
            self._set_policy(job)
        self.index.load(record.meta for record in self.records.values())
        self.times.clear()
        for key, value in restores.items():
            job, _, kind = key.removeprefix(RESTORES_PREFIX).partition("/")
            self.times.load(job, kind, _decode_restores(value))

    def set_bytes_max(self, bytes_max: int) -> None:
        part = bytes_max // PARTS
        self._shares.resize(bytes_max, part, bytes_max - 4 * part)

    def set_defaults(self, defaults: Mapping[str, SettingValue]) -> None:
        """Replace the daemon's default settings."""
        if defaults != self._defaults:
            self._defaults = defaults
            for job in list(self._retention):
                self._set_policy(job)

    def settings_changed(self, job: str) -> None:
        """Judge the job's checkpoints by its present settings from now on."""
        if job in self._retention:
            self._set_policy(job)

    def retention(self, job: str) -> JobRetention:
        known = self._retention.get(job)
        return self._set_policy(job) if known is None else known

    def _set_policy(self, job: str) -> JobRetention:
        own = self._settings_of(job)
        # Of a removed job nothing is collected: its pinned checkpoints are an operator's.
        keep = self._kept_by_script.get(job)
        found = retention_of(NO_SETTINGS, NO_SETTINGS) if own is None else retention_of(own, self._defaults, keep)
        self._retention[job] = found
        self.index.set_policy(job, found.policy)
        return found

    # The life of a checkpoint.

    def start(
        self, request: StartCheckpoint, checkpoint_id: str, holder: Holder, now: Moment, *, is_trusted: bool
    ) -> Decision[CheckpointMeta]:
        """A checkpoint that is about to be written, or the known one of this path and save id."""
        path, save_id = checked_checkpoint_path(request.storage_path), checked_save_id(request.save_id)
        if (known := self._known(request.job, path, save_id, request.job)) is not None:
            if known.meta.is_failed_save:
                # It is written again, so its files are not deleted.
                self.since[known.id] = now.monotonic
            return Decision(known.meta)
        parent_path = request.parent_path and checked_checkpoint_path(request.parent_path)
        began_at = now.wall - checked_seconds("age_s", request.age_s)
        meta = self._new_meta(request.job, checkpoint_id, request, began_at, self._id_at(request.job, parent_path))
        record = CheckpointRecord(
            meta,
            path,
            save_id,
            holder,
            is_trusted,
            worker_id=request.worker_id,
            incarnation=request.incarnation if request.worker_id else b"",
            keep=None if request.keep is None else checked_count("keep", request.keep, KEEP_MAX),
            recorded_after=now.revision,
        )
        self._require_room(record)
        self._keep_as_script_does(record)
        self.index.add(meta)
        self.since[record.id] = now.monotonic
        started = CheckpointStarted(
            record.id,
            meta.epoch,
            meta.step,
            meta.checkpoint_type,
            path,
            meta.parent_id,
            record.worker_id,
            shortened(request.reason),
        )
        return decided(meta, request.job, self._put(record, started))

    def _keep_as_script_does(self, record: CheckpointRecord) -> None:
        if record.keep and record.keep != self._kept_by_script.get(record.job):
            self._kept_by_script[record.job] = record.keep
            self._set_policy(record.job)
        else:
            self.retention(record.job)

    def has_started(self, worker_id: str, incarnation: bytes, checkpoint_id: str) -> bool:
        """Whether this worker writes the checkpoint, or has written it."""
        record = self.records.get(checkpoint_id)
        return (
            record is not None
            and bool(worker_id)
            and (record.worker_id, record.incarnation) == (worker_id, incarnation)
        )

    def complete(self, request: CompleteCheckpoint) -> list[Decision[CompletedCheckpoint]]:
        """All of a checkpoint is durable; also of one that counted as failed."""
        record = self.record(request.job, request.checkpoint_id)
        checked_seconds("seconds", request.seconds)
        if record.meta.state is CheckpointState.COMPLETE:
            return [Decision(self._completed(record))]
        if request.parent_path is not None and (record.is_being_written or record.meta.is_failed_save):
            checked_count("size_bytes", request.size_bytes, SIZE_MAX)
            record = self._with_parent(record, request.parent_path and checked_checkpoint_path(request.parent_path))
        changes = self._complete(record, request.size_bytes, request.seconds)
        return in_decisions(self._completed(self.records[record.id]), request.job, changes)

    def found(self, checkpoint_id: str, found: FoundCheckpoint, now: Moment) -> list[Decision[None]]:
        """A checkpoint whose writer did not report it is there as a whole."""
        record = self.records[checkpoint_id]
        # A manifest that names what builds on itself is a hostile one.
        with suppress(errors.ChainCyclic):
            record = self._with_parent(record, found.parent_path)
        seconds = max(0.0, now.wall - record.meta.created_at)
        return in_decisions(None, record.job, self._complete(record, found.size_bytes, seconds))

    def _with_parent(self, record: CheckpointRecord, parent_path: str) -> CheckpointRecord:
        """The record of a checkpoint that builds on the one at this path; on none if the path is empty."""
        meta = self.index.set_parent(record.id, self._id_at(record.job, parent_path))
        return msgspec.structs.replace(record, meta=meta)

    def _complete(self, record: CheckpointRecord, size_bytes: int, seconds: float) -> list[Change]:
        finish = self.index.complete_late if record.meta.is_failed_save else self.index.complete
        meta = finish(record.id, size_bytes, record.path)
        self._settled(record.id)
        fact = CheckpointCompleted(record.id, meta.step, meta.size_bytes, seconds, meta.parent_id)
        completed = self._put(msgspec.structs.replace(record, meta=meta, note="", is_given_up=False), fact)
        return [*self._keep_parents(meta), completed]

    def _keep_parents(self, child: CheckpointMeta) -> list[Change]:
        """Take back the deletion of what a complete checkpoint builds on: no files go that a manifest names."""
        changes: list[Change] = []
        parent = self.records.get(child.parent_id or "")
        while parent is not None and parent.is_deleted:
            meta = self.index.revive(parent.id)
            why = f"{child.checkpoint_id} builds on it, and was saved meanwhile"
            fact = CheckpointOperationFailed(meta.checkpoint_id, meta.step, DELETING, why)
            changes.append(self._put(msgspec.structs.replace(parent, meta=meta), fact))
            child, parent = meta, self.records.get(meta.parent_id or "")
        return changes

    def _completed(self, record: CheckpointRecord) -> CompletedCheckpoint:
        files = (
            CollectedFiles(one.id, one.path, one.save_id)
            for one in map(self.records.__getitem__, self._deleted_in.get(record.folder, ()))
            if one.job == record.job and not self.is_managed(one)
        )
        return CompletedCheckpoint(record.meta, list(islice(files, DELETE_MAX)))

    def fail(self, request: FailCheckpoint, now: Moment) -> Decision[Nothing]:
        """A checkpoint was not saved. One that is known to be complete, or to have failed, stays as it is."""
        record = self.record(request.job, request.checkpoint_id)
        if not record.is_being_written:
            return Decision(Nothing())
        return decided(Nothing(), request.job, self._fail(record, shortened(request.reason), now))

    def give_up(self, checkpoint_id: str, reason: str, now: Moment) -> Decision[None]:
        """The writer of a checkpoint is gone, or takes too long."""
        record = self.records[checkpoint_id]
        return decided(None, record.job, self._fail(msgspec.structs.replace(record, is_given_up=True), reason, now))

    def _fail(self, record: CheckpointRecord, reason: str, now: Moment) -> Change:
        meta = self.index.mark_corrupted(record.id)
        self.since[record.id] = now.monotonic
        self.gone_since.pop(record.id, None)
        failed = CheckpointFailed(record.id, meta.step, reason)
        return self._put(msgspec.structs.replace(record, meta=meta, note=reason), failed)

    def report_corrupt(self, request: ReportCorruptCheckpoint) -> Decision[Nothing]:
        """A reader has found missing or damaged bytes."""
        record = self.record(request.job, request.checkpoint_id)
        if record.meta.state is CheckpointState.CORRUPTED:
            return Decision(Nothing())
        if record.meta.state is not CheckpointState.COMPLETE:
            raise errors.transition_refused(record.id, record.meta.state, "be corrupted", "report complete ones only")
        return decided(Nothing(), request.job, self._corrupt(record, shortened(request.reason)))

    def damaged(self, checkpoint_id: str, reason: str) -> Decision[None]:
        """The daemon has found missing or damaged bytes."""
        record = self.records[checkpoint_id]
        return decided(None, record.job, self._corrupt(record, shortened(reason)))

    def _corrupt(self, record: CheckpointRecord, reason: str) -> Change:
        meta = self.index.mark_corrupted(record.id)
        fact = CheckpointCorrupted(record.id, meta.step, reason)
        return self._put(msgspec.structs.replace(record, meta=meta, note=reason), fact)

    def verified(self, checkpoint_id: str, now: Moment) -> Decision[None]:
        """All bytes of a checkpoint are correct, or correct again."""
        record = self.records[checkpoint_id]
        if record.meta.state is CheckpointState.COMPLETE:
            meta = self.index.mark_verified(record.id, now.wall)
            return decided(None, record.job, self._put(msgspec.structs.replace(record, meta=meta)))
        return decided(None, record.job, self._repaired(record, now))

    def _repaired(self, record: CheckpointRecord, now: Moment) -> Change:
        meta = self.index.mark_repaired(record.id, now.wall)
        repaired = CheckpointRepaired(record.id, meta.step)
        return self._put(msgspec.structs.replace(record, meta=meta, note=""), repaired)

    # Compaction.

    def compact(self, request: CompactCheckpoint) -> Decision[Nothing]:
        """Have a full checkpoint made of an incremental one."""
        record = self.record(request.job, request.checkpoint_id)
        if record.is_to_compact or not record.meta.is_incremental:
            return Decision(Nothing())
        run = self.index.run(request.job)
        entry = None if run is None else run.entries.get(record.id)
        if entry is None or not entry.is_restorable:
            raise errors.transition_refused(record.id, record.meta.state, "be compacted", "choose a restorable one")
        if not self.is_managed(record):
            raise RequestRefused(
                "checkpoint_not_managed",
                f"the daemon may not touch the files of checkpoint {record.id} at {record.path}",
                "add its folder to checkpoint_roots, or use `forgectl ckpt compact` on the path",
            )
        return decided(Nothing(), request.job, self._put(msgspec.structs.replace(record, is_to_compact=True)))

    def has_long_chain(self, record: CheckpointRecord) -> bool:
        """Whether a complete checkpoint ends a chain that is longer than its job's settings allow."""
        most, run = self.retention(record.job).chain_max, self.index.run(record.job)
        entry = None if run is None else run.entries.get(record.id)
        return bool(most and entry is not None and entry.is_offered and len(entry.chain()) > most)

    def is_read(self, checkpoint_id: str) -> bool:
        """Whether a checkpoint, or one that builds on it, is held."""
        record = self.records.get(checkpoint_id)
        run = None if record is None else self.index.run(record.job)
        entry = None if run is None else run.entries.get(checkpoint_id)
        unseen = [] if entry is None else [entry]
        while unseen:
            entry = unseen.pop()
            if entry.meta.holders:
                return True
            unseen += entry.children
        return False

    def compacted(self, checkpoint_id: str, size_bytes: int) -> Decision[None]:
        """A checkpoint is a full one now."""
        record = self.records[checkpoint_id]
        meta = self.index.make_full(checkpoint_id, size_bytes)
        fact = CheckpointCompacted(record.id, meta.step, meta.size_bytes)
        return decided(
            None, record.job, self._put(msgspec.structs.replace(record, meta=meta, is_to_compact=False), fact)
        )

    def operation_failed(self, checkpoint_id: str, operation: str, reason: str) -> Decision[None]:
        """The daemon has given up something that it did with a checkpoint."""
        record = self.records[checkpoint_id]
        fact = CheckpointOperationFailed(record.id, record.meta.step, operation, shortened(reason))
        return decided(None, record.job, self._put(msgspec.structs.replace(record, is_to_compact=False), fact))

    # Going back.

    def restored(self, request: ReportRestore, now: Moment) -> list[Decision[Nothing]]:
        """The job continues from a checkpoint: what lies beyond is abandoned, and the restore is measured."""
        step = checked_count("step", request.step, STEP_MAX)
        seconds = checked_seconds("seconds", request.seconds)
        size_bytes = checked_count("size_bytes", request.size_bytes, SIZE_MAX)
        record = self.restored_from(request)
        changes: list[Change] = []
        abandoned: dict[str, CheckpointMeta] = {}
        if record is not None:
            skipped = [shortened(one) for one in request.skipped[:SKIPPED_MAX]]
            fact = CheckpointRestored(record.id, record.meta.step, seconds, size_bytes, skipped)
            changes.append(self._measured(record, MeasuredRestore(self._bytes_read(record, size_bytes), seconds), fact))
            if self._is_proven_sound(record):
                changes.append(self._repaired(record, now))
            if record.meta.step == step and not record.is_deleted:
                abandoned = {meta.checkpoint_id: meta for meta in self.index.abandon_beyond(record.id)}
        abandoned |= {meta.checkpoint_id: meta for meta in self.index.abandon_after(request.job, step)}
        changes += self._abandoned(step, "" if record is None else record.id, abandoned)
        return in_decisions(Nothing(), request.job, changes)

    def restored_from(self, request: ReportRestore) -> CheckpointRecord | None:
        """The checkpoint that a job continues from, if the catalogue knows it."""
        if request.checkpoint_id:
            return self.record(request.job, request.checkpoint_id)
        checkpoint_id = self._at.get((request.job, request.storage_path), {}).get(request.save_id)
        return None if checkpoint_id is None else self.records[checkpoint_id]

    def _is_proven_sound(self, record: CheckpointRecord) -> bool:
        """Whether a restore shows that a checkpoint is not corrupted; what the daemon may touch it verifies itself."""
        is_corrupted = record.meta.state is CheckpointState.CORRUPTED and not record.meta.is_failed_save
        return is_corrupted and not self.is_managed(record)

    def _bytes_read(self, record: CheckpointRecord, otherwise: int) -> int:
        """What a restore of a checkpoint reads, as estimates count it."""
        run = self.index.run(record.job)
        entry = None if run is None else run.entries.get(record.id)
        return otherwise if entry is None else bytes_read(one.meta.size_bytes for one in entry.chain())

    def progress_lost(self, job: str, step: int, fact_id: int) -> list[Decision[None]]:
        """The job has gone back to a step, as a fact says: what was recorded beyond it before the fact is abandoned."""

        def is_later(checkpoint_id: str) -> bool:
            return self.records[checkpoint_id].recorded_after >= fact_id

        changed = {meta.checkpoint_id: meta for meta in self.index.abandon_after(job, step, is_later)}
        return in_decisions(None, job, self._abandoned(step, "", changed))

    def _abandoned(self, step: int, checkpoint_id: str, changed: Mapping[str, CheckpointMeta]) -> list[Change]:
        changes = [self._put(msgspec.structs.replace(self.records[one], meta=meta)) for one, meta in changed.items()]
        count = sum(meta.abandoned for meta in changed.values())
        if count:
            changes[0] = changes[0]._replace(fact=CheckpointsAbandoned(step, count, checkpoint_id))
        return changes

    def reinstate(self, request: ReinstateCheckpoint) -> Decision[CheckpointMeta]:
        """Offer an abandoned checkpoint again."""
        record = self.record(request.job, request.checkpoint_id)
        meta = self.index.reinstate(record.id)
        reinstated = CheckpointReinstated(record.id, meta.step, shortened(request.reason))
        return decided(meta, request.job, self._put(msgspec.structs.replace(record, meta=meta), reinstated))

    def _measured(self, record: CheckpointRecord, measured: MeasuredRestore, fact: Fact) -> Change:
        kind = storage_kind(record.path)
        kept = self.times.add(record.job, kind, measured)
        return Change(f"{RESTORES_PREFIX}{record.job}/{kind}", _encode(kept), fact)

    # What keeps a checkpoint.

    def pin(self, request: PinCheckpoint | UnpinCheckpoint, *, is_pinned: bool) -> Decision[CheckpointMeta]:
        record = self.record(request.job, request.checkpoint_id)
        meta = self.index.pin(record.id) if is_pinned else self.index.unpin(record.id)
        return decided(meta, request.job, self._put(msgspec.structs.replace(record, meta=meta)))

    def hold(self, request: HoldCheckpoint, now: Moment) -> Decision[Nothing]:
        """Keep a checkpoint while it is read, or keep it longer."""
        record = self.record(request.job, request.checkpoint_id)
        holder = checked_holder(request.holder)
        held_s = checked_seconds("seconds", request.seconds, HOLD_S_MAX)
        if holder not in record.holds and len(record.holds) >= HOLDS_MAX:
            raise errors.argument_invalid("holder", holder, f"one of at most {HOLDS_MAX} of a checkpoint")
        meta = self.index.hold(record.id, holder)
        self._holds.setdefault(record.id, {})[holder] = now.monotonic + held_s
        if record.holds.get(holder) == held_s:
            # Only extended: after a restart it counts anew in any case.
            return Decision(Nothing())
        held = msgspec.structs.replace(record, meta=meta, holds={**record.holds, holder: held_s})
        return decided(Nothing(), request.job, self._put(held))

    def release(self, request: ReleaseCheckpoint) -> Decision[Nothing]:
        record = self.record(request.job, request.checkpoint_id)
        if request.holder not in record.holds:
            return Decision(Nothing())
        return decided(Nothing(), request.job, self._release(record, request.holder))

    def release_expired(self, now: Moment) -> Iterator[Decision[None]]:
        """Release the holds whose time is over."""
        expired = [
            (checkpoint_id, holder)
            for checkpoint_id, holds in self._holds.items()
            for holder, ends_at in holds.items()
            if ends_at <= now.monotonic
        ]
        for checkpoint_id, holder in expired:
            record = self.records[checkpoint_id]
            yield decided(None, record.job, self._release(record, holder))

    def _release(self, record: CheckpointRecord, holder: str) -> Change:
        meta = self.index.release(record.id, holder)
        holds = self._holds.get(record.id, {})
        holds.pop(holder, None)
        if not holds:
            self._holds.pop(record.id, None)
        left = {one: held_s for one, held_s in record.holds.items() if one != holder}
        return self._put(msgspec.structs.replace(record, meta=meta, holds=left))

    # Collection.

    def due(self, now: Moment) -> list[str]:
        """The jobs in which something may have to go."""
        return [job for job in self.index.runs_due(now.wall) if self.retention(job).collects]

    def collect(self, job: str, now: Moment) -> list[Decision[Collection]]:
        """Make tombstones of what the policy does not keep."""
        if not self.retention(job).collects:
            return [Decision(Collection([], 0))]
        going = self.index.collect_some(job, now.wall, COLLECTED_MAX)
        verdicts = [as_message(verdict, meta.step) for meta, verdict in going]
        changes = [
            self._tombstone(meta, verdict.rule, verdict.reason)
            for (meta, _), verdict in zip(going, verdicts, strict=True)
        ]
        more = len(verdicts) == COLLECTED_MAX
        collection = Collection(verdicts, total(one.size_bytes for one in verdicts), more)
        return in_decisions(collection, job, changes)

    def delete(self, request: DeleteCheckpoint) -> Decision[Nothing]:
        """Make a tombstone of a checkpoint that no other one, nor a pin or a holder, needs."""
        record = self.record(request.job, request.checkpoint_id)
        if record.is_deleted:
            return Decision(Nothing())
        if record.is_being_written:
            # Its writer would publish a manifest that no record knows.
            fix = "delete it when it is complete or its save has failed"
            raise errors.transition_refused(record.id, record.meta.state, "be deleted", fix)
        meta = self.index.delete(record.id)
        return decided(Nothing(), request.job, self._tombstone(meta, REQUESTED_RULE, "an operator has deleted it"))

    def sweep(self, checkpoint_id: str) -> Decision[None]:
        """Make a tombstone of a failed save, so that its files are deleted."""
        record = self.records[checkpoint_id]
        change = self._tombstone(
            self.index.make_tombstone(checkpoint_id), FAILED_RULE, f"its save failed: {record.note}"
        )
        return decided(None, record.job, change)

    def _tombstone(self, meta: CheckpointMeta, rule: str, reason: str) -> Change:
        record = self.records[meta.checkpoint_id]
        self._settled(record.id)
        self._holds.pop(record.id, None)
        fact = CheckpointCollected(record.id, meta.step, meta.size_bytes, rule, reason)
        return self._put(msgspec.structs.replace(record, meta=meta, holds={}), fact)

    def _settled(self, checkpoint_id: str) -> None:
        """It is neither being written, nor a failed save that is looked after."""
        self.since.pop(checkpoint_id, None)
        self.gone_since.pop(checkpoint_id, None)

    def unsettled(self, is_registered: IsRegistered, now: Moment) -> Iterator[tuple[CheckpointRecord, str]]:
        """The checkpoints whose files have to be looked for, and why."""
        for checkpoint_id in self.since:
            record = self.records[checkpoint_id]
            if reason := self.why_unsettled(record, is_registered, now):
                yield record, reason

    def why_unsettled(self, record: CheckpointRecord, is_registered: IsRegistered, now: Moment) -> str:
        """Why the files of a checkpoint have to be looked for: its writer is gone or late, or has failed long ago."""
        since = self.since.get(record.id)
        if since is None:
            return ""
        is_there = not record.worker_id or is_registered(record.job, record.worker_id, record.incarnation)
        if is_there:
            self.gone_since.pop(record.id, None)
        gone_s = 0.0 if is_there else now.monotonic - self.gone_since.setdefault(record.id, now.monotonic)
        age_s = now.monotonic - since
        if not record.is_being_written:
            may_be_written = record.is_given_up and record.worker_id and is_there
            return (record.note or "its save failed") if age_s >= FAILED_KEPT_S and not may_be_written else ""
        if gone_s >= WRITER_GONE_S:
            return f"worker {record.worker_id}, which was saving it, is gone"
        return f"it was not completed within {WRITING_S_MAX:g} s" if age_s >= WRITING_S_MAX else ""

    def tombstones(self) -> Iterator[CheckpointRecord]:
        """The deleted checkpoints whose files may still be there, in the order of deletion."""
        return (self.records[checkpoint_id] for checkpoint_id in self.index.tombstones)

    def deleted(self, checkpoint_ids: Sequence[str]) -> list[Decision[None]]:
        """The files of tombstones are gone."""
        forgotten = [self.records[one] for one in checkpoint_ids]
        return in_decisions(None, forgotten[0].job if forgotten else "", [self._forget(one) for one in forgotten])

    def confirm_deleted(self, request: ConfirmDeleted) -> list[Decision[Nothing]]:
        """A worker has deleted the files of tombstones that the daemon may not touch."""
        if len(request.checkpoint_ids) > ADOPTED_MAX:
            raise errors.argument_invalid("checkpoint_ids", len(request.checkpoint_ids), f"at most {ADOPTED_MAX}")
        named = (self.records.get(one) for one in dict.fromkeys(request.checkpoint_ids))
        gone = [one for one in named if one is not None and one.job == request.job and one.is_deleted]
        return in_decisions(Nothing(), request.job, [self._forget(one) for one in gone if not self.is_managed(one)])

    def remove_job(self, job: str) -> list[Decision[None]]:
        """Forget the checkpoints of a removed job, except pinned and held ones with their parents. No file is deleted.

        Tombstones stay until their files are gone.
        """
        run = self.index.run(job)
        changes: list[Change] = []
        if run is not None:
            kept = _needed_by([one for one in run.entries.values() if one.meta.pinned or run.is_used(one)])
            for checkpoint_id in [one for one in run.entries if one not in kept]:
                self.index.drop(checkpoint_id)
                changes.append(self._forget(self.records[checkpoint_id]))
        changes += [Change(f"{RESTORES_PREFIX}{job}/{kind}", None) for kind in self.times.forget(job)]
        self._retention.pop(job, None)
        self._kept_by_script.pop(job, None)
        self.index.set_policy(job, None)
        if self.index.run(job) is not None:
            self._set_policy(job)
        return in_decisions(None, job, changes)

    # Adoption.

    def adopt(
        self, request: AdoptCheckpoints, new_id: Callable[[], str], holder: Holder, now: Moment, *, is_trusted: bool
    ) -> list[Decision[Adoption]]:
        """Add existing checkpoints; parents before their children."""
        if len(request.checkpoints) > ADOPTED_MAX:
            raise errors.argument_invalid("checkpoints", len(request.checkpoints), f"at most {ADOPTED_MAX}")
        folder = checked_location("folder", request.folder)
        self.retention(request.job)
        adoption = Adoption([], [], [])
        changes: list[Change] = []
        for one in request.checkpoints:
            try:
                # Others may have the daemon touch only what their own job has saved.
                manifest_job = one.job if is_trusted else request.job
                path, save_id = checked_checkpoint_path(one.storage_path), checked_save_id(one.save_id)
                known = self._known(request.job, path, save_id, manifest_job)
                if known is None:
                    meta = self._adopted_meta(request.job, one, new_id)
                    record = CheckpointRecord(meta, path, save_id, holder, is_trusted, recorded_after=now.revision)
                    if manifest_job != request.job:
                        record = msgspec.structs.replace(record, manifest_job=manifest_job)
                    self._require_room(record)
                    self.index.add(meta)
                    changes += [] if request.dry_run else self._keep_parents(meta)
                    changes.append(self._put(record))
                    adoption.adopted.append(record.id)
                else:
                    changes += [] if request.dry_run else self._parent_found(known, one.parent_path)
                    adoption.known.append(known.id)
            except RequestRefused as error:
                path = one.storage_path[:REFUSED_CHARS_MAX]
                adoption.refused.append(error.message if repr(path) in error.message else f"{path}: {error.message}")
        if request.dry_run:
            for checkpoint_id in adoption.adopted:
                self.index.drop(checkpoint_id)
                self._forget(self.records[checkpoint_id])
            return [Decision(adoption)]
        if adoption.adopted:
            last = max(place for place, change in enumerate(changes) if change.fact is None)
            changes[last] = changes[last]._replace(fact=CheckpointsAdopted(len(adoption.adopted), folder))
        return in_decisions(adoption, request.job, changes)

    def _adopted_meta(self, job: str, one: AdoptedCheckpoint, new_id: Callable[[], str]) -> CheckpointMeta:
        parent_id = None
        if one.parent_path:
            parent_id = self._id_at(job, checked_checkpoint_path(one.parent_path))
            if parent_id is None:
                raise errors.argument_invalid("parent_path", one.parent_path, "a checkpoint of the catalogue")
        return CheckpointMeta(
            checkpoint_id=new_id(),
            training_run_id=job,
            epoch=checked_count("epoch", one.epoch, EPOCH_MAX),
            step=checked_count("step", one.step, STEP_MAX),
            checkpoint_type=CheckpointType.INCREMENTAL if one.parent_path else CheckpointType.FULL,
            state=CheckpointState.COMPLETE,
            size_bytes=checked_count("size_bytes", one.size_bytes, SIZE_MAX),
            created_at=checked_time("created_at", one.created_at),
            parent_id=parent_id,
            metrics=checked_metrics(one.metrics),
            storage_path=checked_checkpoint_path(one.storage_path),
        )

    def _parent_found(self, known: CheckpointRecord, parent_path: str) -> list[Change]:
        """A known checkpoint builds on this one, which may have come into the catalogue after it."""
        parent_id = self._id_at(known.job, parent_path)
        is_settled = known.meta.state is CheckpointState.COMPLETE and not known.is_to_compact
        if not is_settled or parent_id is None or parent_id == known.meta.parent_id:
            return []
        record = self._with_parent(known, parent_path)
        found = CheckpointParentFound(record.id, record.meta.step, parent_id)
        return [*self._keep_parents(record.meta), self._put(record, found)]

    # Questions.

    def record(self, job: str, checkpoint_id: str) -> CheckpointRecord:
        """The record of a checkpoint or tombstone of the job, or a refusal."""
        record = self.records.get(checkpoint_id)
        if record is None or record.job != job:
            raise errors.unknown(checkpoint_id)
        return record

    def record_at(self, job: str, path: str, save_id: str = "") -> CheckpointRecord | None:
        """The checkpoint or tombstone of a job with this path and save id; without a save id the newest at the path."""
        if not save_id:
            return self.records.get(self._id_at(job, path) or "")
        meta = self.checkpoint_at(job, path, save_id)
        return None if meta is None else self.records[meta.checkpoint_id]

    def checkpoint_at(self, job: str, path: str, save_id: str) -> CheckpointMeta | None:
        """The checkpoint of a job with this path and save id."""
        record = self.records.get(self._at.get((job, path), {}).get(save_id, ""))
        return None if record is None else record.meta

    def is_managed(self, record: CheckpointRecord) -> bool:
        """Whether the daemon may read and delete its files."""
        return record.is_trusted or root_of(record.path, self.roots, record.job) is not None

    def location(self, record: CheckpointRecord) -> CheckpointLocation:
        """Where a managed checkpoint is, and what its manifest must say."""
        root = None if record.is_trusted else root_of(record.path, self.roots, record.job)
        return CheckpointLocation(record.path, record.save_id, record.files_job, root)

    def is_disputed(self, record: CheckpointRecord) -> bool:
        """Whether another job has a managed checkpoint of this path and save id: only a manifest says whose it is."""
        named = map(self.records.__getitem__, self._named.get((record.path, record.save_id), {}).values())
        return any(one.job != record.job and not one.is_deleted and self.is_managed(one) for one in named)

    # Records.

    def _new_meta(
        self, job: str, checkpoint_id: str, request: StartCheckpoint, created_at: float, parent_id: str | None
    ) -> CheckpointMeta:
        kind, metrics = request.checkpoint_type, checked_metrics(request.metrics)
        wanted = checked_request(CreateCheckpointRequest(job, request.epoch, request.step, kind, metrics))
        return CheckpointMeta(
            checkpoint_id=checkpoint_id,
            training_run_id=job,
            epoch=wanted.epoch,
            step=wanted.step,
            checkpoint_type=wanted.checkpoint_type,
            state=CheckpointState.CREATING,
            size_bytes=0,
            created_at=created_at,
            parent_id=parent_id if wanted.checkpoint_type is CheckpointType.INCREMENTAL else None,
            metrics=wanted.metrics,
            storage_path="",
        )

    def _known(self, job: str, path: str, save_id: str, files_job: str) -> CheckpointRecord | None:
        """The job's checkpoint of this path and save id; refused if the files are those of another job's."""
        named = self._named.get((path, save_id), {})
        if job in named:
            return self.records[named[job]]
        if any(self.records[other].files_job == files_job for other in named.values()):
            raise RequestRefused(
                "checkpoint_path_taken",
                f"checkpoint {path[:REFUSED_CHARS_MAX]!r} is in the catalogue of another job",
                "delete it there, or remove that job, first",
            )
        return None

    def _id_at(self, job: str, path: str) -> str | None:
        """The newest checkpoint of a job at a path; none builds on a save that has failed and was deleted."""
        newest_first = map(self.records.__getitem__, reversed(self._at.get((job, path), {}).values()))
        return next((one.id for one in newest_first if not one.is_deleted or one.meta.storage_path), None)

    def _require_room(self, record: CheckpointRecord) -> None:
        cost = RECORD_OVERHEAD_BYTES + len(encoded(record))
        if not self._shares.fits(record.holder, cost):
            raise RequestRefused(
                "catalogue_full",
                self._shares.shortage(record.holder),
                "set a retention policy, remove jobs that are over, or raise catalog_bytes_max",
            )

    def _put(self, record: CheckpointRecord, fact: Fact | None = None) -> Change:
        value = encoded(record)
        if record.id in self._cost:
            self._shares.give_back(record.holder, self._cost[record.id])
        self._remember(record, len(value))
        return Change(record.key, value, fact)

    def _remember(self, record: CheckpointRecord, size: int) -> None:
        self.records[record.id] = record
        self._at.setdefault((record.job, record.path), {})[record.save_id] = record.id
        self._named.setdefault((record.path, record.save_id), {})[record.job] = record.id
        if record.is_deleted:
            self._deleted_in.setdefault(record.folder, {})[record.id] = None
        else:
            self._forget_tombstone(record)
        cost = self._cost[record.id] = RECORD_OVERHEAD_BYTES + size
        self._shares.charge(record.holder, cost)

    def _forget(self, record: CheckpointRecord) -> Change:
        del self.records[record.id]
        self._shares.give_back(record.holder, self._cost.pop(record.id))
        for table, key, place in (
            (self._at, (record.job, record.path), record.save_id),
            (self._named, (record.path, record.save_id), record.job),
        ):
            del table[key][place]
            if not table[key]:
                del table[key]
        self._forget_tombstone(record)
        self._settled(record.id)
        self._holds.pop(record.id, None)
        self.index.forget(record.id)
        return Change(record.key, None)

    def _forget_tombstone(self, record: CheckpointRecord) -> None:
        in_folder = self._deleted_in.get(record.folder)
        if in_folder is not None:
            in_folder.pop(record.id, None)
            if not in_folder:
                del self._deleted_in[record.folder]


def _needed_by(entries: Iterable[IndexEntry]) -> set[str]:
    """These checkpoints and all that they build on."""
    return {one.id for entry in entries for one in entry.chain()}


def as_message(verdict: retention.Verdict, step: int) -> RetentionVerdict:
    return RetentionVerdict(
        verdict.checkpoint_id, step, verdict.is_kept, verdict.rule, verdict.reason, verdict.size_bytes
    )
