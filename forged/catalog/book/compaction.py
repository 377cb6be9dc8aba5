"""Incremental checkpoints that become full ones."""

from __future__ import annotations

import msgspec

from forged.catalog import errors
from forged.catalog.book.changes import decided
from forged.catalog.book.checkpoint_table import CheckpointTable
from forged.catalog.book.policies import RetentionPolicies
from forged.catalog.messages import CheckpointCompacted, CheckpointOperationFailed, CompactCheckpoint
from forged.catalog.records import CheckpointRecord, shortened
from forged.errors import RequestRefused
from forged.kernel.messages import Decision, Nothing


class Compaction:
    """Which checkpoints are made full ones."""

    def __init__(self, table: CheckpointTable, policies: RetentionPolicies) -> None:
        self._table = table
        self._policies = policies

    def compact(self, request: CompactCheckpoint) -> Decision[Nothing]:
        """Have a full checkpoint made of an incremental one."""
        record = self._table.record(request.job, request.checkpoint_id)
        if record.is_to_compact or not record.meta.is_incremental:
            return Decision(Nothing())
        run = self._table.index.run(request.job)
        entry = None if run is None else run.entries.get(record.id)
        if entry is None or not entry.is_restorable:
            raise errors.transition_refused(record.id, record.meta.state, "be compacted", "choose a restorable one")
        if not self._table.is_managed(record):
            raise RequestRefused(
                "checkpoint_not_managed",
                f"the daemon may not touch the files of checkpoint {record.id} at {record.path}",
                "add its folder to checkpoint_roots, or use `forgectl ckpt compact` on the path",
            )
        return decided(Nothing(), request.job, self._table.put(msgspec.structs.replace(record, is_to_compact=True)))

    def has_long_chain(self, record: CheckpointRecord) -> bool:
        """Whether a complete checkpoint ends a chain that is longer than its job's settings allow."""
        most, run = self._policies.of(record.job).chain_max, self._table.index.run(record.job)
        entry = None if run is None else run.entries.get(record.id)
        return bool(most and entry is not None and entry.is_offered and len(entry.chain()) > most)

    def is_read(self, checkpoint_id: str) -> bool:
        """Whether a checkpoint, or one that builds on it, is held."""
        record = self._table.records.get(checkpoint_id)
        run = None if record is None else self._table.index.run(record.job)
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
        record = self._table.records[checkpoint_id]
        meta = self._table.index.make_full(checkpoint_id, size_bytes)
        fact = CheckpointCompacted(record.id, meta.step, meta.size_bytes)
        return decided(
            None, record.job, self._table.put(msgspec.structs.replace(record, meta=meta, is_to_compact=False), fact)
        )

    def operation_failed(self, checkpoint_id: str, operation: str, reason: str) -> Decision[None]:
        """The daemon has given up something that it did with a checkpoint."""
        record = self._table.records[checkpoint_id]
        fact = CheckpointOperationFailed(record.id, record.meta.step, operation, shortened(reason))
        return decided(None, record.job, self._table.put(msgspec.structs.replace(record, is_to_compact=False), fact))
