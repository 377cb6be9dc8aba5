"""The life of a checkpoint: started, completed or failed, found, corrupted, verified.

Invariants:
- A save ends: it is completed, or it fails, also when its writer does not say so. What has failed may complete late.
- A checkpoint that is known by its path and save id is not started again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

import msgspec

from forged.catalog import errors
from forged.catalog.book.changes import Change, decided, in_decisions
from forged.catalog.book.checkpoint_table import CheckpointTable
from forged.catalog.book.policies import RetentionPolicies
from forged.catalog.messages import (
    CheckpointCompleted,
    CheckpointCorrupted,
    CheckpointFailed,
    CheckpointStarted,
    CollectedFiles,
    CompleteCheckpoint,
    CompletedCheckpoint,
    FailCheckpoint,
    ReportCorruptCheckpoint,
    StartCheckpoint,
)
from forged.catalog.model import (
    SIZE_MAX,
    CheckpointMeta,
    CheckpointState,
    CheckpointType,
    CreateCheckpointRequest,
    checked_count,
    checked_request,
)
from forged.catalog.ports import FoundCheckpoint
from forged.catalog.records import (
    CheckpointRecord,
    Moment,
    checked_checkpoint_path,
    checked_metrics,
    checked_save_id,
    checked_seconds,
    shortened,
)
from forged.kernel.messages import Decision, Nothing
from forged.shares import Holder

DELETE_MAX = 100
"""So many deletions are given to a worker at once."""
KEEP_MAX = 2**31 - 1
WRITER_GONE_S = 60.0
"""So long after its writer is gone, a checkpoint is looked for: a save in the background ends after its worker."""
WRITING_S_MAX = 3600.0
"""So long a checkpoint may be written."""
FAILED_KEPT_S = 3600.0
"""So long after a save has failed its files are deleted: its writer may be late, and complete it yet."""
IsRegistered = Callable[[str, str, bytes], bool]
"""Whether a worker of a job, with an incarnation, is registered."""


class Saves:
    """The saves of all jobs."""

    def __init__(self, table: CheckpointTable, policies: RetentionPolicies) -> None:
        self._table = table
        self._policies = policies
        self._since: dict[str, float] = {}
        """Since when, by the monotonic clock, each checkpoint is being written or has failed."""
        self._gone_since: dict[str, float] = {}
        """Since when, by the monotonic clock, the writer of a checkpoint is not registered any more."""

    def load(self, now: Moment) -> None:
        """Look after the saves in the table: their times begin anew."""
        self._gone_since.clear()
        unsettled = (one.id for one in self._table.records.values() if one.is_unsettled)
        self._since = dict.fromkeys(unsettled, now.monotonic)

    def start(
        self, request: StartCheckpoint, checkpoint_id: str, holder: Holder, now: Moment, *, is_trusted: bool
    ) -> Decision[CheckpointMeta]:
        """A checkpoint that is about to be written, or the known one of this path and save id."""
        path, save_id = checked_checkpoint_path(request.storage_path), checked_save_id(request.save_id)
        if (known := self._table.known(request.job, path, save_id, request.job)) is not None:
            if known.meta.is_failed_save:
                # It is written again, so its files are not deleted.
                self._since[known.id] = now.monotonic
            return Decision(known.meta)
        parent_path = request.parent_path and checked_checkpoint_path(request.parent_path)
        began_at = now.wall - checked_seconds("age_s", request.age_s)
        parent_id = self._table.id_at(request.job, parent_path)
        meta = self._new_meta(request.job, checkpoint_id, request, began_at, parent_id)
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
        self._table.require_room(record)
        self._policies.keep_as_script_does(record)
        self._table.index.add(meta)
        self._since[record.id] = now.monotonic
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
        return decided(meta, request.job, self._table.put(record, started))

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

    def has_started(self, worker_id: str, incarnation: bytes, checkpoint_id: str) -> bool:
        """Whether this worker writes the checkpoint, or has written it."""
        record = self._table.records.get(checkpoint_id)
        return (
            record is not None
            and bool(worker_id)
            and (record.worker_id, record.incarnation) == (worker_id, incarnation)
        )

    def complete(self, request: CompleteCheckpoint) -> list[Decision[CompletedCheckpoint]]:
        """All of a checkpoint is durable; also of one that counted as failed."""
        record = self._table.record(request.job, request.checkpoint_id)
        checked_seconds("seconds", request.seconds)
        if record.meta.state is CheckpointState.COMPLETE:
            return [Decision(self._completed(record))]
        if request.parent_path is not None and (record.is_being_written or record.meta.is_failed_save):
            checked_count("size_bytes", request.size_bytes, SIZE_MAX)
            parent_path = request.parent_path and checked_checkpoint_path(request.parent_path)
            record = self._table.with_parent(record, parent_path)
        changes = self._complete(record, request.size_bytes, request.seconds)
        return in_decisions(self._completed(self._table.records[record.id]), request.job, changes)

    def found(self, checkpoint_id: str, found: FoundCheckpoint, now: Moment) -> list[Decision[None]]:
        """A checkpoint whose writer did not report it is there as a whole."""
        record = self._table.records[checkpoint_id]
        # A manifest that names what builds on itself is a hostile one.
        with suppress(errors.ChainCyclic):
            record = self._table.with_parent(record, found.parent_path)
        seconds = max(0.0, now.wall - record.meta.created_at)
        return in_decisions(None, record.job, self._complete(record, found.size_bytes, seconds))

    def _complete(self, record: CheckpointRecord, size_bytes: int, seconds: float) -> list[Change]:
        finish = self._table.index.complete_late if record.meta.is_failed_save else self._table.index.complete
        meta = finish(record.id, size_bytes, record.path)
        self._since.pop(record.id, None)
        self._gone_since.pop(record.id, None)
        fact = CheckpointCompleted(record.id, meta.step, meta.size_bytes, seconds, meta.parent_id)
        completed = self._table.put(msgspec.structs.replace(record, meta=meta, note="", is_given_up=False), fact)
        return [*self._table.keep_parents(meta), completed]

    def _completed(self, record: CheckpointRecord) -> CompletedCheckpoint:
        files = (
            CollectedFiles(one.id, one.path, one.save_id)
            for one in self._table.tombstones_in(record.folder)
            if one.job == record.job and not self._table.is_managed(one)
        )
        return CompletedCheckpoint(record.meta, list(islice(files, DELETE_MAX)))

    def fail(self, request: FailCheckpoint, now: Moment) -> Decision[Nothing]:
        """A checkpoint was not saved. One that is known to be complete, or to have failed, stays as it is."""
        record = self._table.record(request.job, request.checkpoint_id)
        if not record.is_being_written:
            return Decision(Nothing())
        return decided(Nothing(), request.job, self._fail(record, shortened(request.reason), now))

    def give_up(self, checkpoint_id: str, reason: str, now: Moment) -> Decision[None]:
        """The writer of a checkpoint is gone, or takes too long."""
        record = self._table.records[checkpoint_id]
        return decided(None, record.job, self._fail(msgspec.structs.replace(record, is_given_up=True), reason, now))

    def _fail(self, record: CheckpointRecord, reason: str, now: Moment) -> Change:
        meta = self._table.index.mark_corrupted(record.id)
        self._since[record.id] = now.monotonic
        self._gone_since.pop(record.id, None)
        failed = CheckpointFailed(record.id, meta.step, reason)
        return self._table.put(msgspec.structs.replace(record, meta=meta, note=reason), failed)

    def report_corrupt(self, request: ReportCorruptCheckpoint) -> Decision[Nothing]:
        """A reader has found missing or damaged bytes."""
        record = self._table.record(request.job, request.checkpoint_id)
        if record.meta.state is CheckpointState.CORRUPTED:
            return Decision(Nothing())
        if record.meta.state is not CheckpointState.COMPLETE:
            raise errors.transition_refused(record.id, record.meta.state, "be corrupted", "report complete ones only")
        return decided(Nothing(), request.job, self._corrupt(record, shortened(request.reason)))

    def damaged(self, checkpoint_id: str, reason: str) -> Decision[None]:
        """The daemon has found missing or damaged bytes."""
        record = self._table.records[checkpoint_id]
        return decided(None, record.job, self._corrupt(record, shortened(reason)))

    def _corrupt(self, record: CheckpointRecord, reason: str) -> Change:
        meta = self._table.index.mark_corrupted(record.id)
        fact = CheckpointCorrupted(record.id, meta.step, reason)
        return self._table.put(msgspec.structs.replace(record, meta=meta, note=reason), fact)

    def verified(self, checkpoint_id: str, now: Moment) -> Decision[None]:
        """All bytes of a checkpoint are correct, or correct again."""
        record = self._table.records[checkpoint_id]
        if record.meta.state is CheckpointState.COMPLETE:
            meta = self._table.index.mark_verified(record.id, now.wall)
            return decided(None, record.job, self._table.put(msgspec.structs.replace(record, meta=meta)))
        return decided(None, record.job, self._table.repaired(record, now))

    def unsettled(self, is_registered: IsRegistered, now: Moment) -> Iterator[tuple[CheckpointRecord, str]]:
        """The checkpoints whose files have to be looked for, and why."""
        for checkpoint_id in list(self._since):
            record = self._table.records.get(checkpoint_id)
            if record is None or not record.is_unsettled:
                # It was deleted meanwhile.
                del self._since[checkpoint_id]
                self._gone_since.pop(checkpoint_id, None)
            elif reason := self.why_unsettled(record, is_registered, now):
                yield record, reason

    def why_unsettled(self, record: CheckpointRecord, is_registered: IsRegistered, now: Moment) -> str:
        """Why the files of a checkpoint have to be looked for: its writer is gone or late, or has failed long ago."""
        since = self._since.get(record.id)
        if since is None or not record.is_unsettled:
            return ""
        is_there = not record.worker_id or is_registered(record.job, record.worker_id, record.incarnation)
        if is_there:
            self._gone_since.pop(record.id, None)
        gone_s = 0.0 if is_there else now.monotonic - self._gone_since.setdefault(record.id, now.monotonic)
        age_s = now.monotonic - since
        if not record.is_being_written:
            # A save from slots holds it while it tries again.
            may_be_written = record.holds or (record.is_given_up and record.worker_id and is_there)
            return (record.note or "its save failed") if age_s >= FAILED_KEPT_S and not may_be_written else ""
        if gone_s >= WRITER_GONE_S:
            return f"worker {record.worker_id}, which was saving it, is gone"
        return f"it was not completed within {WRITING_S_MAX:g} s" if age_s >= WRITING_S_MAX else ""
