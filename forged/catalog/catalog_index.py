"""The checkpoints of all runs in memory, and every operation on them; for one owner, without locks.

Each change returns the records that it made, for their owner to store. A deleted checkpoint stays as a tombstone until
`forget`, when its files are gone.

Invariants:
- A refused operation changes nothing.
- A question is answered from the run that it is about; a collection looks only at runs that have changed, and at those
  where a checkpoint has become too old.
- Tombstones do not appear in counts, sizes, listings or selections.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

import msgspec

from forged.catalog import errors, retention, selection
from forged.catalog.model import (
    HOLDERS_MAX,
    SIZE_MAX,
    TRANSITIONS,
    CheckpointMeta,
    CheckpointState,
    CheckpointType,
    CreateCheckpointRequest,
    GcPolicy,
    RestoreCriteria,
    checked_count,
    checked_path,
    checked_request,
    checked_time,
)
from forged.catalog.run_index import IndexEntry, ModelsOf, RunIndex, no_models

OUTDATED_MAX = 1000
"""So many outdated times of collections are kept, or as many as there are runs."""


class CatalogIndex:
    """All checkpoints, by id and by run."""

    def __init__(self, policy: GcPolicy, models_of: ModelsOf = no_models) -> None:
        self._models_of = models_of
        self.policy = policy
        """That of each run without one of its own."""
        self._policies: dict[str, GcPolicy] = {}
        self._clear()

    def _clear(self) -> None:
        self.tombstones: dict[str, CheckpointMeta] = {}
        """Deleted checkpoints whose files may still be there, in the order of deletion."""
        self._runs: dict[str, RunIndex] = {}
        self._run_of: dict[str, RunIndex] = {}
        self.states: Counter[CheckpointState] = Counter()
        """How many checkpoints are in each state."""
        self._size_bytes = 0
        self._changed: dict[str, None] = {}
        """The runs that have changed since they were last collected, or in which a checkpoint has become too old."""
        self._due_at: dict[str, float] = {}
        self._due: list[tuple[float, str]] = []
        """When each run is next to be looked at; a pair that differs from `_due_at` is outdated."""

    def load(self, records: Iterable[CheckpointMeta]) -> None:
        """Replace all checkpoints by these."""
        self._clear()
        by_run: dict[str, list[CheckpointMeta]] = {}
        for meta in sorted(records, key=lambda one: (one.created_at, one.checkpoint_id)):
            self.states[meta.state] += 1
            if meta.state is CheckpointState.DELETED:
                self.tombstones[meta.checkpoint_id] = meta
            else:
                by_run.setdefault(meta.training_run_id, []).append(meta)
        for run_id, of_run in by_run.items():
            run = self._runs[run_id] = RunIndex(self.policy_of(run_id), self._models_of)
            run.load(of_run)
            self._run_of.update(dict.fromkeys(run.entries, run))
            self._size_bytes += run.size_bytes
            self._changed[run_id] = None

    def policy_of(self, training_run_id: str) -> GcPolicy:
        return self._policies.get(training_run_id, self.policy)

    def set_policy(self, training_run_id: str, policy: GcPolicy | None) -> None:
        """Give a run a policy of its own; None takes it away."""
        before = self.policy_of(training_run_id)
        if policy is None:
            self._policies.pop(training_run_id, None)
        else:
            self._policies[training_run_id] = policy
        run, after = self._runs.get(training_run_id), self.policy_of(training_run_id)
        if run is not None and after != before:
            run.set_policy(after)
            self._changed[training_run_id] = None

    # The life of a checkpoint.

    def create(self, request: CreateCheckpointRequest, checkpoint_id: str, now: float) -> CheckpointMeta:
        """A checkpoint that is about to be written; an incremental one builds on the latest restorable one."""
        wanted = checked_request(request)
        meta = CheckpointMeta(
            checkpoint_id=checkpoint_id,
            training_run_id=wanted.training_run_id,
            epoch=wanted.epoch,
            step=wanted.step,
            checkpoint_type=wanted.checkpoint_type,
            state=CheckpointState.CREATING,
            size_bytes=0,
            created_at=checked_time("now", now),
            parent_id=_parent_for(wanted, self._run(wanted.training_run_id)),
            metrics=wanted.metrics,
            storage_path="",
        )
        return self.add(meta)

    def add(self, meta: CheckpointMeta) -> CheckpointMeta:
        """A checkpoint as its owner describes it. One whose parent is not in the run cannot be restored."""
        checkpoint_id, run_id = meta.checkpoint_id, meta.training_run_id
        if checkpoint_id in self._run_of or checkpoint_id in self.tombstones:
            raise errors.argument_invalid("checkpoint_id", checkpoint_id, "an id that no other checkpoint has")
        run = self._run(run_id)
        run.add(meta)
        self._runs[run_id] = self._run_of[checkpoint_id] = run
        self.states[meta.state] += 1
        self._size_bytes += meta.size_bytes
        self._changed[run_id] = None
        return meta

    def complete(
        self, checkpoint_id: str, size_bytes: int, storage_path: str, *, verified_at: float | None = None
    ) -> CheckpointMeta:
        """All of a checkpoint is durable; `verified_at` if its writer has verified it."""
        meta = self._live(checkpoint_id)
        if meta.state is not CheckpointState.CREATING:
            raise errors.transition_refused(checkpoint_id, meta.state, "be completed", "create another one")
        return self._put(
            meta,
            state=CheckpointState.COMPLETE,
            size_bytes=checked_count("size_bytes", size_bytes, SIZE_MAX),
            storage_path=checked_path(storage_path),
            verified_at=None if verified_at is None else checked_time("verified_at", verified_at),
        )

    def complete_late(self, checkpoint_id: str, size_bytes: int, storage_path: str) -> CheckpointMeta:
        """A save that counted as failed is durable after all."""
        meta = self._live(checkpoint_id)
        if not meta.is_failed_save:
            raise errors.transition_refused(checkpoint_id, meta.state, "be completed late", "save another one")
        return self._put(
            meta,
            state=_following(meta, CheckpointState.COMPLETE),
            size_bytes=checked_count("size_bytes", size_bytes, SIZE_MAX),
            storage_path=checked_path(storage_path),
        )

    def mark_corrupted(self, checkpoint_id: str) -> CheckpointMeta:
        """Some of a checkpoint is missing or damaged; what builds on it cannot be restored either."""
        meta = self._live(checkpoint_id)
        return self._put(meta, state=_following(meta, CheckpointState.CORRUPTED))

    def mark_verified(self, checkpoint_id: str, now: float) -> CheckpointMeta:
        """All bytes of a complete checkpoint have been found correct."""
        meta = self._live(checkpoint_id)
        if meta.state is not CheckpointState.COMPLETE:
            raise errors.transition_refused(checkpoint_id, meta.state, "be verified", "repair or delete it")
        return self._put(meta, verified_at=checked_time("now", now))

    def mark_repaired(self, checkpoint_id: str, now: float) -> CheckpointMeta:
        """All bytes of a corrupted checkpoint are correct again."""
        meta = self._live(checkpoint_id)
        if meta.state is not CheckpointState.CORRUPTED or meta.is_failed_save:
            raise errors.transition_refused(
                checkpoint_id, meta.state, "be repaired", "repair one that was damaged after it was complete"
            )
        return self._put(meta, state=_following(meta, CheckpointState.COMPLETE), verified_at=checked_time("now", now))

    def make_full(self, checkpoint_id: str, size_bytes: int) -> CheckpointMeta:
        """A complete checkpoint contains all of its state now, and builds on no other one."""
        meta = self._live(checkpoint_id)
        if meta.state is not CheckpointState.COMPLETE:
            raise errors.transition_refused(checkpoint_id, meta.state, "become full", "repair or delete it")
        self.set_parent(checkpoint_id, None)
        return self._put(self._live(checkpoint_id), size_bytes=checked_count("size_bytes", size_bytes, SIZE_MAX))

    def set_parent(self, checkpoint_id: str, parent_id: str | None) -> CheckpointMeta:
        """A checkpoint builds on another one than was said, or on none; refuses what builds on itself."""
        meta, run = self._live(checkpoint_id), self._run_of[checkpoint_id]
        kind = CheckpointType.FULL if meta.is_incremental else meta.checkpoint_type
        if parent_id is not None:
            kind = CheckpointType.INCREMENTAL
            parent = run.entries.get(parent_id)
            if parent is not None and any(one.id == checkpoint_id for one in parent.chain()):
                raise errors.chain_cyclic(checkpoint_id, parent_id)
        changed = msgspec.structs.replace(meta, checkpoint_type=kind, parent_id=parent_id)
        run.relink(changed)
        self._changed[meta.training_run_id] = None
        return changed

    def abandon_beyond(self, checkpoint_id: str) -> list[CheckpointMeta]:
        """Training has gone back to this checkpoint: what was saved beyond it is no longer latest, nor offered."""
        meta = self._live(checkpoint_id)
        run = self._run_of[checkpoint_id]
        changed = [self._put(one.meta, abandoned=True) for one in run.beyond(run.entries[checkpoint_id])]
        return [*([self._put(meta, abandoned=False)] if meta.abandoned else []), *changed]

    def abandon_after(
        self, training_run_id: str, step: int, is_later: Callable[[str], bool] = lambda checkpoint_id: False
    ) -> list[CheckpointMeta]:
        """Training has gone back to a step: what was saved beyond it is no longer latest, nor offered.

        `is_later` tells whether a checkpoint was saved after that.
        """
        beyond = [
            one.meta
            for one in self._run(training_run_id).ranked
            if one.meta.step > step and not one.meta.abandoned and not is_later(one.id)
        ]
        return [self._put(meta, abandoned=True) for meta in beyond]

    def reinstate(self, checkpoint_id: str) -> CheckpointMeta:
        """Take back that a checkpoint is abandoned; refuses one that is not."""
        meta = self._live(checkpoint_id)
        if not meta.abandoned:
            raise errors.not_abandoned(checkpoint_id)
        return self._put(meta, abandoned=False)

    def delete(self, checkpoint_id: str) -> CheckpointMeta:
        """Make a tombstone of a checkpoint that no other one, nor an operator or a reader, needs."""
        meta = self.require_deletable(checkpoint_id)
        return self._make_tombstone(meta)

    def make_tombstone(self, checkpoint_id: str) -> CheckpointMeta:
        """Make a tombstone of a checkpoint, whatever it is; its children cannot be restored any more."""
        return self._make_tombstone(self._live(checkpoint_id))

    def require_deletable(self, checkpoint_id: str) -> CheckpointMeta:
        """The record of a checkpoint that no other one, nor an operator or a reader, needs; refuses others."""
        meta = self._live(checkpoint_id)
        run = self._run_of[checkpoint_id]
        children = [one.id for one in run.entries[checkpoint_id].children]
        if children:
            raise errors.parent_needed(checkpoint_id, children)
        if meta.pinned:
            raise errors.pinned(checkpoint_id)
        if users := run.users(run.entries[checkpoint_id]):
            raise errors.held(checkpoint_id, users)
        return meta

    def revive(self, checkpoint_id: str) -> CheckpointMeta:
        """Take back a deletion: a complete checkpoint uses the files, so they are there."""
        tombstone = self.tombstones[checkpoint_id]
        self.forget(checkpoint_id)
        revived = msgspec.structs.replace(tombstone, state=CheckpointState.COMPLETE, pinned=False, holders=())
        self.add(revived)
        run = self._run_of[checkpoint_id]
        for child in [one.meta for one in run.entries.values() if one.meta.parent_id == checkpoint_id]:
            run.relink(child)
        return revived

    def drop(self, checkpoint_id: str) -> None:
        """Forget a checkpoint without a tombstone: its files are not the catalogue's any more."""
        meta = self._live(checkpoint_id)
        self._make_tombstone(meta)
        self.forget(checkpoint_id)

    def forget(self, checkpoint_id: str) -> None:
        """The files of a deleted checkpoint are gone."""
        if self.tombstones.pop(checkpoint_id, None) is not None:
            self.states[CheckpointState.DELETED] -= 1

    # What keeps a checkpoint.

    def pin(self, checkpoint_id: str) -> CheckpointMeta:
        return self._put(self._live(checkpoint_id), pinned=True)

    def unpin(self, checkpoint_id: str) -> CheckpointMeta:
        return self._put(self._live(checkpoint_id), pinned=False)

    def hold(self, checkpoint_id: str, holder: str) -> CheckpointMeta:
        """Keep a checkpoint until the holder has released it."""
        meta = self._live(checkpoint_id)
        if holder in meta.holders:
            return meta
        if not holder or len(meta.holders) >= HOLDERS_MAX:
            raise errors.argument_invalid("holder", holder, f"a name, one of at most {HOLDERS_MAX}")
        return self._put(meta, holders=(*meta.holders, holder))

    def release(self, checkpoint_id: str, holder: str) -> CheckpointMeta:
        """A holder no longer needs the checkpoint; one that did not hold it is no error."""
        meta = self._live(checkpoint_id)
        return self._put(meta, holders=tuple(one for one in meta.holders if one != holder))

    def look_again(self) -> None:
        """A model no longer refers to some checkpoint, which may have to go."""
        self._changed.update(dict.fromkeys(self._runs))

    # Questions.

    def run(self, training_run_id: str) -> RunIndex | None:
        """The index of a run that has checkpoints; to read only."""
        return self._runs.get(training_run_id)

    @property
    def runs(self) -> Iterable[str]:
        """The runs that have checkpoints."""
        return self._runs.keys()

    def get(self, checkpoint_id: str) -> CheckpointMeta | None:
        """The record, also of a deleted checkpoint that is not forgotten."""
        run = self._run_of.get(checkpoint_id)
        return self.tombstones.get(checkpoint_id) if run is None else run.entries[checkpoint_id].meta

    def list_for_run(self, training_run_id: str) -> list[CheckpointMeta]:
        """The checkpoints of a run in the order of their creation."""
        return [entry.meta for entry in self._run(training_run_id).entries.values()]

    def get_latest(self, training_run_id: str) -> CheckpointMeta | None:
        """The complete checkpoint with the highest epoch and step; of equals the newest."""
        entry = self._run(training_run_id).latest()
        return None if entry is None else entry.meta

    def find_restore_point(self, criteria: RestoreCriteria) -> CheckpointMeta | None:
        """The best checkpoint that matches the criteria."""
        return next(self.restore_points(criteria), None)

    def restore_points(self, criteria: RestoreCriteria) -> Iterator[CheckpointMeta]:
        """All that match the criteria, the best first; the index must not change meanwhile."""
        return selection.restore_points(self._run(criteria.training_run_id), criteria)

    def find_by_metric(
        self, training_run_id: str, metric_key: str, threshold: float, ascending: bool
    ) -> list[CheckpointMeta]:
        """The checkpoints of a run with a metric better than the threshold, the best first."""
        return selection.find_by_metric(self._run(training_run_id), metric_key, threshold, ascending=ascending)

    def newest_complete(self) -> Iterator[CheckpointMeta]:
        """The latest complete checkpoint of each run that has one."""
        return (entry.meta for run in self._runs.values() if (entry := run.latest()) is not None)

    def total_count(self) -> int:
        return len(self._run_of)

    def total_size(self) -> int:
        return self._size_bytes

    # Collection.

    def gc(self, now: float) -> list[CheckpointMeta]:
        """Delete what the policy does not keep; returns the tombstones, children before their parents."""
        return [meta for run_id in self.runs_due(now) for meta in self.collect(run_id, now)]

    def runs_due(self, now: float) -> list[str]:
        """The runs in which something may have to go."""
        now = checked_time("now", now)
        while self._due and self._due[0][0] <= now:
            at, run_id = heappop(self._due)
            if self._due_at.get(run_id) == at:
                self._changed[run_id] = None
        return list(self._changed)

    def collect(self, training_run_id: str, now: float) -> list[CheckpointMeta]:
        """Delete what the policy does not keep of one run; returns the tombstones."""
        collected = [self._make_tombstone(meta) for meta in retention.collectable(self._run(training_run_id), now)]
        self._changed.pop(training_run_id, None)
        self._schedule(training_run_id, now)
        return collected

    def collect_some(
        self, training_run_id: str, now: float, most: int
    ) -> list[tuple[CheckpointMeta, retention.Verdict]]:
        """As `collect`, at most so many, with the verdicts; the run stays due if more have to go."""
        verdicts = retention.verdicts_of_going(self._run(training_run_id), now, most)
        collected = [(self._make_tombstone(self._live(one.checkpoint_id)), one) for one in verdicts]
        if len(collected) < most:
            self._changed.pop(training_run_id, None)
            self._schedule(training_run_id, now)
        return collected

    def verdicts(self, training_run_id: str, now: float) -> list[retention.Verdict]:
        """What a collection would do with each checkpoint of a run, and why; the newest first."""
        return retention.verdicts(self._run(training_run_id), checked_time("now", now))

    def _schedule(self, run_id: str, now: float) -> None:
        run = self._runs.get(run_id)
        at = inf if run is None else retention.due_at(run, now)
        self._due_at.pop(run_id, None)
        if at < inf:
            self._due_at[run_id] = at
            heappush(self._due, (at, run_id))
        if len(self._due) > 2 * len(self._due_at) + OUTDATED_MAX:
            self._due = [(at, run_id) for run_id, at in self._due_at.items()]
            heapify(self._due)

    # Records.

    def _run(self, training_run_id: str) -> RunIndex:
        return self._runs.get(training_run_id) or RunIndex(self.policy_of(training_run_id), self._models_of)

    def _live(self, checkpoint_id: str) -> CheckpointMeta:
        """The record of a checkpoint that is not deleted."""
        run = self._run_of.get(checkpoint_id)
        if run is not None:
            return run.entries[checkpoint_id].meta
        if checkpoint_id in self.tombstones:
            raise errors.transition_refused(checkpoint_id, CheckpointState.DELETED, "change", "save another one")
        raise errors.unknown(checkpoint_id)

    def _put(self, meta: CheckpointMeta, **changes: Any) -> CheckpointMeta:
        changed = msgspec.structs.replace(meta, **changes)
        self._run_of[meta.checkpoint_id].put(changed)
        self._count_change(meta, changed)
        self._size_bytes += changed.size_bytes - meta.size_bytes
        self._changed[meta.training_run_id] = None
        return changed

    def _make_tombstone(self, meta: CheckpointMeta) -> CheckpointMeta:
        tombstone = msgspec.structs.replace(meta, state=_following(meta, CheckpointState.DELETED))
        run = self._run_of.pop(meta.checkpoint_id)
        run.remove(meta.checkpoint_id)
        if not run.entries:
            del self._runs[meta.training_run_id]
        self._count_change(meta, tombstone)
        self._size_bytes -= meta.size_bytes
        self._changed[meta.training_run_id] = None
        self.tombstones[meta.checkpoint_id] = tombstone
        return tombstone

    def _count_change(self, before: CheckpointMeta, after: CheckpointMeta) -> None:
        self.states[before.state] -= 1
        self.states[after.state] += 1


def _parent_for(request: CreateCheckpointRequest, run: RunIndex) -> str | None:
    if request.checkpoint_type is not CheckpointType.INCREMENTAL:
        return None
    parent: IndexEntry | None = run.latest_restorable()
    if parent is None or not parent.is_offered:
        raise errors.parent_missing(request.training_run_id)
    return parent.id


def _following(meta: CheckpointMeta, state: CheckpointState) -> CheckpointState:
    """The next state, if the life cycle allows it."""
    if state not in TRANSITIONS[meta.state]:
        raise errors.transition_refused(meta.checkpoint_id, meta.state, f"become {state}", "repair or delete it")
    return state
