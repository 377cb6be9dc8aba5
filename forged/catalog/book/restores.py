"""Going back: what a job was restored from, how long that took, and what is abandoned."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from forged.catalog.book.changes import Change, decided, in_decisions
from forged.catalog.book.checkpoint_table import CheckpointTable
from forged.catalog.book.estimates import MeasuredRestore, RestoreTimes, bytes_read
from forged.catalog.messages import (
    CheckpointReinstated,
    CheckpointRestored,
    CheckpointsAbandoned,
    ReinstateCheckpoint,
    ReportRestore,
)
from forged.catalog.model import SIZE_MAX, STEP_MAX, CheckpointMeta, CheckpointState, checked_count
from forged.catalog.records import CheckpointRecord, Moment, checked_seconds, shortened, storage_kind
from forged.kernel.messages import Decision, Fact, Nothing

RESTORES_PREFIX = "restore-times/"
SKIPPED_MAX = 1000
_encode = msgspec.msgpack.Encoder().encode
_decode_restores = msgspec.msgpack.Decoder(list[MeasuredRestore]).decode


class Restores:
    """The restores of all jobs."""

    def __init__(self, table: CheckpointTable) -> None:
        self._table = table
        self.times = RestoreTimes()

    def load(self, restores: Mapping[str, bytes]) -> None:
        """Replace the measured restores by what the store holds."""
        self.times.clear()
        for key, value in restores.items():
            job, _, kind = key.removeprefix(RESTORES_PREFIX).partition("/")
            self.times.load(job, kind, _decode_restores(value))

    def forget(self, job: str) -> list[Change]:
        """Forget the measured restores of a removed job."""
        return [Change(f"{RESTORES_PREFIX}{job}/{kind}", None) for kind in self.times.forget(job)]

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
                changes.append(self._table.repaired(record, now))
            if record.meta.step == step and not record.is_deleted:
                abandoned = {meta.checkpoint_id: meta for meta in self._table.index.abandon_beyond(record.id)}
        abandoned |= {meta.checkpoint_id: meta for meta in self._table.index.abandon_after(request.job, step)}
        changes += self._abandoned(step, "" if record is None else record.id, abandoned)
        return in_decisions(Nothing(), request.job, changes)

    def restored_from(self, request: ReportRestore) -> CheckpointRecord | None:
        """The checkpoint that a job continues from, if the catalogue knows it."""
        if request.checkpoint_id:
            return self._table.record(request.job, request.checkpoint_id)
        if not request.save_id:
            return None
        return self._table.record_at(request.job, request.storage_path, request.save_id)

    def _is_proven_sound(self, record: CheckpointRecord) -> bool:
        """Whether a restore shows that a checkpoint is not corrupted; what the daemon may touch it verifies itself."""
        is_corrupted = record.meta.state is CheckpointState.CORRUPTED and not record.meta.is_failed_save
        return is_corrupted and not self._table.is_managed(record)

    def _bytes_read(self, record: CheckpointRecord, otherwise: int) -> int:
        """What a restore of a checkpoint reads, as estimates count it."""
        run = self._table.index.run(record.job)
        entry = None if run is None else run.entries.get(record.id)
        return otherwise if entry is None else bytes_read(one.meta.size_bytes for one in entry.chain())

    def _measured(self, record: CheckpointRecord, measured: MeasuredRestore, fact: Fact) -> Change:
        kind = storage_kind(record.path)
        kept = self.times.add(record.job, kind, measured)
        return Change(f"{RESTORES_PREFIX}{record.job}/{kind}", _encode(kept), fact)

    def progress_lost(self, job: str, step: int, fact_id: int) -> list[Decision[None]]:
        """The job has gone back to a step, as a fact says: what was recorded beyond it before the fact is abandoned."""

        def is_later(checkpoint_id: str) -> bool:
            return self._table.records[checkpoint_id].recorded_after >= fact_id

        changed = {meta.checkpoint_id: meta for meta in self._table.index.abandon_after(job, step, is_later)}
        return in_decisions(None, job, self._abandoned(step, "", changed))

    def reinstate(self, request: ReinstateCheckpoint) -> Decision[CheckpointMeta]:
        """Offer an abandoned checkpoint again."""
        record = self._table.record(request.job, request.checkpoint_id)
        meta = self._table.index.reinstate(record.id)
        reinstated = CheckpointReinstated(record.id, meta.step, shortened(request.reason))
        return decided(meta, request.job, self._table.put(msgspec.structs.replace(record, meta=meta), reinstated))

    def _abandoned(self, step: int, checkpoint_id: str, changed: Mapping[str, CheckpointMeta]) -> list[Change]:
        records = self._table.records
        changes = [self._table.put(msgspec.structs.replace(records[one], meta=meta)) for one, meta in changed.items()]
        count = sum(meta.abandoned for meta in changed.values())
        if count:
            changes[0] = changes[0]._replace(fact=CheckpointsAbandoned(step, count, checkpoint_id))
        return changes
