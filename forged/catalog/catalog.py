"""The checkpoint catalogue for programs without a daemon: in memory, safe from several threads.

Invariants:
- Each call is atomic; a collection is atomic for each run, so that it delays no other call for long.
- What is returned is the caller's own: changing it changes nothing in the catalogue.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import islice

from msgspec.structs import replace

from forged.catalog.catalog_index import CatalogIndex
from forged.catalog.model import CheckpointMeta, CreateCheckpointRequest, GcPolicy, RestoreCriteria
from forged.catalog.retention import Verdict

TOMBSTONES_MAX = 10_000
"""How many deleted checkpoints are remembered; older ones become unknown."""


class CheckpointCatalog:
    """All checkpoints of all runs. What it refuses is a `CatalogRefused`, and changes nothing."""

    def __init__(self, policy: GcPolicy) -> None:
        self._index = CatalogIndex(policy)
        self._lock = threading.Lock()
        self._last_number = 0

    def create(self, request: CreateCheckpointRequest, now: float) -> CheckpointMeta:
        """Add a checkpoint that is about to be written; an incremental one builds on the latest restorable one."""
        with self._lock:
            meta = self._index.create(request, f"ckpt-{self._last_number + 1:08d}", now)
            self._last_number += 1
            return replace(meta)

    def complete(
        self, checkpoint_id: str, size_bytes: int, storage_path: str, *, verified_at: float | None = None
    ) -> CheckpointMeta:
        """All of a checkpoint is durable; `verified_at` if its writer has verified it."""
        with self._lock:
            return replace(self._index.complete(checkpoint_id, size_bytes, storage_path, verified_at=verified_at))

    def mark_corrupted(self, checkpoint_id: str) -> CheckpointMeta:
        """Some of a checkpoint is missing or damaged; what builds on it cannot be restored either."""
        with self._lock:
            return replace(self._index.mark_corrupted(checkpoint_id))

    def mark_verified(self, checkpoint_id: str, now: float) -> CheckpointMeta:
        """All bytes of a complete checkpoint have been found correct."""
        with self._lock:
            return replace(self._index.mark_verified(checkpoint_id, now))

    def mark_repaired(self, checkpoint_id: str, now: float) -> CheckpointMeta:
        """All bytes of a corrupted checkpoint are correct again."""
        with self._lock:
            return replace(self._index.mark_repaired(checkpoint_id, now))

    def abandon_beyond(self, checkpoint_id: str) -> list[CheckpointMeta]:
        """Training has gone back to this checkpoint: what was saved beyond it is no longer latest, nor offered."""
        with self._lock:
            return _copies(self._index.abandon_beyond(checkpoint_id))

    def reinstate(self, checkpoint_id: str) -> CheckpointMeta:
        """Take back that a checkpoint is abandoned."""
        with self._lock:
            return replace(self._index.reinstate(checkpoint_id))

    def pin(self, checkpoint_id: str) -> CheckpointMeta:
        """Keep a checkpoint, regardless of the policy."""
        with self._lock:
            return replace(self._index.pin(checkpoint_id))

    def unpin(self, checkpoint_id: str) -> CheckpointMeta:
        with self._lock:
            return replace(self._index.unpin(checkpoint_id))

    def hold(self, checkpoint_id: str, holder: str) -> CheckpointMeta:
        """Keep a checkpoint until the holder has released it."""
        with self._lock:
            return replace(self._index.hold(checkpoint_id, holder))

    def release(self, checkpoint_id: str, holder: str) -> CheckpointMeta:
        """A holder no longer needs the checkpoint; one that did not hold it is no error."""
        with self._lock:
            return replace(self._index.release(checkpoint_id, holder))

    def get(self, checkpoint_id: str) -> CheckpointMeta | None:
        """The record; of a deleted checkpoint its tombstone, as long as it is remembered."""
        with self._lock:
            meta = self._index.get(checkpoint_id)
            return None if meta is None else replace(meta)

    def find_restore_point(self, criteria: RestoreCriteria) -> CheckpointMeta | None:
        """The best checkpoint that matches the criteria."""
        with self._lock:
            meta = self._index.find_restore_point(criteria)
            return None if meta is None else replace(meta)

    def restore_points(self, criteria: RestoreCriteria) -> list[CheckpointMeta]:
        """All that match the criteria, the best first: when one cannot be read, the next is tried."""
        with self._lock:
            return _copies(self._index.restore_points(criteria))

    def list_for_run(self, training_run_id: str) -> list[CheckpointMeta]:
        """The checkpoints of a run in the order of their creation."""
        with self._lock:
            return _copies(self._index.list_for_run(training_run_id))

    def get_latest(self, training_run_id: str) -> CheckpointMeta | None:
        """The complete checkpoint with the highest epoch and step; of equals the newest."""
        with self._lock:
            meta = self._index.get_latest(training_run_id)
            return None if meta is None else replace(meta)

    def gc(self, now: float) -> list[str]:
        """Delete what the policy does not keep; returns the ids, children before their parents."""
        with self._lock:
            due = self._index.runs_due(now)
        collected: list[str] = []
        for run_id in due:
            with self._lock:
                collected += [meta.checkpoint_id for meta in self._index.collect(run_id, now)]
                self._limit_tombstones()
        return collected

    def verdicts(self, training_run_id: str, now: float) -> list[Verdict]:
        """What `gc` would do with each checkpoint of a run, and why; the newest first."""
        with self._lock:
            return self._index.verdicts(training_run_id, now)

    def total_count(self) -> int:
        """How many checkpoints there are in all runs."""
        with self._lock:
            return self._index.total_count()

    def total_size(self) -> int:
        """The bytes of all checkpoints of all runs."""
        with self._lock:
            return self._index.total_size()

    def delete(self, checkpoint_id: str) -> None:
        """Delete a checkpoint that no other one, nor an operator or a reader, needs."""
        with self._lock:
            self._index.delete(checkpoint_id)
            self._limit_tombstones()

    def find_by_metric(
        self, training_run_id: str, metric_key: str, threshold: float, ascending: bool
    ) -> list[CheckpointMeta]:
        """The checkpoints of a run with a metric better than the threshold, the best first.

        With `ascending` a lower value is better.
        """
        with self._lock:
            return _copies(self._index.find_by_metric(training_run_id, metric_key, threshold, ascending))

    def _limit_tombstones(self) -> None:
        excess = len(self._index.tombstones) - TOMBSTONES_MAX
        for checkpoint_id in list(islice(self._index.tombstones, max(excess, 0))):
            self._index.forget(checkpoint_id)


def _copies(records: Iterable[CheckpointMeta]) -> list[CheckpointMeta]:
    return [replace(meta) for meta in records]
