"""Which checkpoints go, and when their records are forgotten.

Invariants:
- A checkpoint becomes a tombstone before its files are deleted, and is forgotten after they are gone.
- A collection makes tombstones of children before those of their parents.
- What the daemon may not touch is deleted by the job's workers, and never by the daemon.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from forged.catalog import errors, retention
from forged.catalog.book.changes import Change, decided, in_decisions, total
from forged.catalog.book.checkpoint_table import CheckpointTable
from forged.catalog.book.holds import Holds
from forged.catalog.book.policies import RetentionPolicies
from forged.catalog.messages import CheckpointCollected, Collection, ConfirmDeleted, DeleteCheckpoint, RetentionVerdict
from forged.catalog.model import CheckpointMeta
from forged.catalog.records import Moment
from forged.catalog.run_index import IndexEntry
from forged.kernel.messages import Decision, Nothing

COLLECTED_MAX = 500
"""So many checkpoints are collected at once."""
CONFIRMED_MAX = 1000
FAILED_RULE = "failed"
REQUESTED_RULE = "requested"


class CheckpointCollection:
    """Which checkpoints go: collected, deleted, swept; tombstones until their files are gone."""

    def __init__(self, table: CheckpointTable, policies: RetentionPolicies, holds: Holds) -> None:
        self._table = table
        self._policies = policies
        self._holds = holds

    def due(self, now: Moment) -> list[str]:
        """The jobs in which something may have to go."""
        return [job for job in self._table.index.runs_due(now.wall) if self._policies.of(job).collects]

    def collect(self, job: str, now: Moment) -> list[Decision[Collection]]:
        """Make tombstones of what the policy does not keep."""
        if not self._policies.of(job).collects:
            return [Decision(Collection([], 0))]
        going = self._table.index.collect_some(job, now.wall, COLLECTED_MAX)
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
        record = self._table.record(request.job, request.checkpoint_id)
        if record.is_deleted:
            return Decision(Nothing())
        if record.is_being_written:
            # Its writer would publish a manifest that no record knows.
            fix = "delete it when it is complete or its save has failed"
            raise errors.transition_refused(record.id, record.meta.state, "be deleted", fix)
        meta = self._table.index.delete(record.id)
        return decided(Nothing(), request.job, self._tombstone(meta, REQUESTED_RULE, "an operator has deleted it"))

    def sweep(self, checkpoint_id: str) -> Decision[None]:
        """Make a tombstone of a failed save, so that its files are deleted."""
        record = self._table.records[checkpoint_id]
        change = self._tombstone(
            self._table.index.make_tombstone(checkpoint_id), FAILED_RULE, f"its save failed: {record.note}"
        )
        return decided(None, record.job, change)

    def _tombstone(self, meta: CheckpointMeta, rule: str, reason: str) -> Change:
        record = self._table.records[meta.checkpoint_id]
        self._holds.forget(record.id)
        fact = CheckpointCollected(record.id, meta.step, meta.size_bytes, rule, reason)
        return self._table.put(msgspec.structs.replace(record, meta=meta, holds={}), fact)

    def deleted(self, checkpoint_ids: Sequence[str]) -> list[Decision[None]]:
        """The files of tombstones are gone."""
        forgotten = [self._table.records[one] for one in checkpoint_ids]
        return in_decisions(None, forgotten[0].job if forgotten else "", [self._table.forget(one) for one in forgotten])

    def confirm_deleted(self, request: ConfirmDeleted) -> list[Decision[Nothing]]:
        """A worker has deleted the files of tombstones that the daemon may not touch."""
        if len(request.checkpoint_ids) > CONFIRMED_MAX:
            raise errors.argument_invalid("checkpoint_ids", len(request.checkpoint_ids), f"at most {CONFIRMED_MAX}")
        named = (self._table.records.get(one) for one in dict.fromkeys(request.checkpoint_ids))
        deleted = [one for one in named if one is not None and one.job == request.job and one.is_deleted]
        gone = [one for one in deleted if not self._table.is_managed(one)]
        return in_decisions(Nothing(), request.job, [self._table.forget(one) for one in gone])

    def remove_job(self, job: str) -> list[Change]:
        """Forget the checkpoints of a removed job, except pinned and held ones with their parents. No file is deleted.

        Tombstones stay until their files are gone.
        """
        run = self._table.index.run(job)
        if run is None:
            return []
        kept = _needed_by([one for one in run.entries.values() if one.meta.pinned or run.is_used(one)])
        gone = [one for one in run.entries if one not in kept]
        for checkpoint_id in gone:
            self._table.index.drop(checkpoint_id)
        return [self._table.forget(self._table.records[one]) for one in gone]


def _needed_by(entries: Iterable[IndexEntry]) -> set[str]:
    """These checkpoints and all that they build on."""
    return {one.id for entry in entries for one in entry.chain()}


def as_message(verdict: retention.Verdict, step: int) -> RetentionVerdict:
    return RetentionVerdict(
        verdict.checkpoint_id, step, verdict.is_kept, verdict.rule, verdict.reason, verdict.size_bytes
    )
