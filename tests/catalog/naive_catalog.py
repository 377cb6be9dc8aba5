"""What the catalogue promises, written down without any index: every answer is found by looking at all records."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan

from msgspec.structs import replace

from forged.catalog import CheckpointMeta, CreateCheckpointRequest, GcPolicy, RestoreCriteria
from forged.errors import RequestRefused
from tests.catalog.records import COMPLETE, CORRUPTED, CREATING, DELETED, INCREMENTAL


def refuse(code: str) -> RequestRefused:
    return RequestRefused(code, "")


class NaiveCatalog:
    """The same methods as the index; a refusal has the same code."""

    def __init__(self, policy: GcPolicy) -> None:
        self.policy = policy
        self.records: dict[str, CheckpointMeta] = {}
        """All checkpoints, also deleted ones, in the order of creation."""

    # What the words mean.

    def live(self, run: str | None = None) -> list[CheckpointMeta]:
        live = [one for one in self.records.values() if one.state is not DELETED]
        return [one for one in live if run is None or one.training_run_id == run]

    def is_restorable(self, meta: CheckpointMeta) -> bool:
        seen: set[str] = set()
        while meta.state is COMPLETE and meta.checkpoint_id not in seen:
            if meta.parent_id is None:
                return True
            seen.add(meta.checkpoint_id)
            parent = self.records.get(meta.parent_id)
            if parent is None or parent.training_run_id != meta.training_run_id:
                return False
            meta = parent
        return False

    def restorable(self, run: str) -> list[CheckpointMeta]:
        return [one for one in self.live(run) if self.is_restorable(one)]

    def children(self, meta: CheckpointMeta) -> list[CheckpointMeta]:
        return [one for one in self.live(meta.training_run_id) if one.parent_id == meta.checkpoint_id]

    # Operations.

    def create(self, request: CreateCheckpointRequest, checkpoint_id: str, now: float) -> CheckpointMeta:
        parent_id = None
        if request.checkpoint_type is INCREMENTAL:
            possible = [one for one in self.restorable(request.training_run_id) if not one.abandoned]
            if not possible:
                raise refuse("checkpoint_parent_missing")
            parent_id = max(possible, key=rank).checkpoint_id
        made = CheckpointMeta(
            checkpoint_id,
            request.training_run_id,
            request.epoch,
            request.step,
            request.checkpoint_type,
            CREATING,
            0,
            now,
            parent_id,
            request.metrics,
            "",
        )
        self.records[checkpoint_id] = made
        return made

    def change(
        self, checkpoint_id: str, is_allowed: Callable[[CheckpointMeta], bool], **changes: object
    ) -> CheckpointMeta:
        meta = self.records.get(checkpoint_id)
        if meta is None:
            raise refuse("checkpoint_unknown")
        if meta.state is DELETED or not is_allowed(meta):
            raise refuse("checkpoint_transition_refused")
        self.records[checkpoint_id] = replace(meta, **changes)
        return self.records[checkpoint_id]

    def complete(
        self, checkpoint_id: str, size_bytes: int, storage_path: str, *, verified_at: float | None = None
    ) -> CheckpointMeta:
        return self.change(
            checkpoint_id,
            lambda one: one.state is CREATING,
            state=COMPLETE,
            size_bytes=size_bytes,
            storage_path=storage_path,
            verified_at=verified_at,
        )

    def mark_corrupted(self, checkpoint_id: str) -> CheckpointMeta:
        return self.change(checkpoint_id, lambda one: one.state is not CORRUPTED, state=CORRUPTED)

    def mark_verified(self, checkpoint_id: str, now: float) -> CheckpointMeta:
        return self.change(checkpoint_id, lambda one: one.state is COMPLETE, verified_at=now)

    def mark_repaired(self, checkpoint_id: str, now: float) -> CheckpointMeta:
        def is_allowed(one: CheckpointMeta) -> bool:
            return one.state is CORRUPTED and one.storage_path != ""

        return self.change(checkpoint_id, is_allowed, state=COMPLETE, verified_at=now)

    def abandon_beyond(self, checkpoint_id: str) -> None:
        meta = self.change(checkpoint_id, lambda one: True, abandoned=False)
        for one in self.live(meta.training_run_id):
            if rank(one)[1:] > rank(meta)[1:]:
                self.records[one.checkpoint_id] = replace(one, abandoned=True)

    def reinstate(self, checkpoint_id: str) -> CheckpointMeta:
        if not self.change(checkpoint_id, lambda one: True).abandoned:
            raise refuse("checkpoint_not_abandoned")
        return self.change(checkpoint_id, lambda one: True, abandoned=False)

    def pin(self, checkpoint_id: str) -> CheckpointMeta:
        return self.change(checkpoint_id, lambda one: True, pinned=True)

    def unpin(self, checkpoint_id: str) -> CheckpointMeta:
        return self.change(checkpoint_id, lambda one: True, pinned=False)

    def hold(self, checkpoint_id: str, holder: str) -> CheckpointMeta:
        return self.change(checkpoint_id, lambda one: True, holders=(holder,))

    def release(self, checkpoint_id: str, holder: str) -> CheckpointMeta:
        return self.change(checkpoint_id, lambda one: True, holders=())

    def delete(self, checkpoint_id: str) -> None:
        meta = self.change(checkpoint_id, lambda one: True)
        for is_used, code in (
            (self.children(meta), "checkpoint_parent_needed"),
            (meta.pinned, "checkpoint_pinned"),
            (meta.holders, "checkpoint_held"),
        ):
            if is_used:
                raise refuse(code)
        self.records[checkpoint_id] = replace(meta, state=DELETED)

    # Questions.

    def get_latest(self, run: str) -> CheckpointMeta | None:
        complete = [one for one in self.live(run) if one.state is COMPLETE and not one.abandoned]
        return max(complete, key=rank, default=None)

    def restore_points(self, criteria: RestoreCriteria) -> list[CheckpointMeta]:
        def key(one: CheckpointMeta) -> tuple[bool, int, bool, float, str]:
            is_full = criteria.prefer_full and one.checkpoint_type is not INCREMENTAL
            return self.is_restorable(one), one.step, is_full, one.created_at, one.checkpoint_id

        admitted = [
            one
            for one in self.live(criteria.training_run_id)
            if self.is_restorable(one) or (not criteria.require_complete and one.state is not COMPLETE)
        ]
        matching = [
            one
            for one in admitted
            if not one.abandoned
            and (criteria.max_epoch is None or one.epoch <= criteria.max_epoch)
            and (criteria.max_step is None or one.step <= criteria.max_step)
        ]
        return sorted(matching, key=key, reverse=True)

    def find_by_metric(self, run: str, key: str, threshold: float, ascending: bool) -> set[str]:
        return {
            one.checkpoint_id
            for one in self.live(run)
            if key in one.metrics and (one.metrics[key] < threshold if ascending else one.metrics[key] > threshold)
        }

    # Retention.

    def gc(self, now: float) -> set[str]:
        going = {id_ for run in {one.training_run_id for one in self.live()} for id_ in self.going(run, now)}
        for id_ in going:
            self.records[id_] = replace(self.records[id_], state=DELETED)
        return going

    def going(self, run: str, now: float) -> set[str]:
        live = self.live(run)
        if live and max(live, key=rank).created_at > now:
            return set()
        kept = {one.checkpoint_id for one in live if self.is_protected(one, now) or not self.is_expendable(one, now)}
        while True:
            parents = {one.parent_id for one in live if one.checkpoint_id in kept and one.parent_id is not None}
            if parents <= kept | {one for one in parents if one not in self.records}:
                return {one.checkpoint_id for one in live} - kept
            kept |= parents

    def is_expendable(self, meta: CheckpointMeta, now: float) -> bool:
        """Whether there are enough newer ones, or it is too old."""
        newer = [one for one in self.restorable(meta.training_run_id) if rank(one) > rank(meta)]
        if meta.state is CORRUPTED and not meta.storage_path:
            newer = [one for one in self.live(meta.training_run_id) if rank(one) > rank(meta)]
        if len(newer) >= self.policy.max_checkpoints_per_run:
            return True
        return now - meta.created_at > self.policy.max_age_seconds

    def is_protected(self, meta: CheckpointMeta, now: float) -> bool:
        if meta.state is CREATING or meta.pinned or meta.holders:
            return True
        if not self.is_restorable(meta):
            return False
        restorable = self.restorable(meta.training_run_id)
        verified = [one for one in restorable if one.verified_at is not None]
        return (
            meta == max(restorable, key=rank)
            or (meta in verified and meta == max(verified, key=lambda one: (one.verified_at or 0.0, rank(one))))
            or meta in self.best(restorable)
            or self.is_first_of_interval(meta, [one for one in restorable if not one.abandoned])
        )

    def best(self, restorable: list[CheckpointMeta]) -> list[CheckpointMeta]:
        key, sign = self.policy.metric_key, 1 if self.policy.metric_ascending else -1
        with_metric = [one for one in restorable if key in one.metrics and not isnan(one.metrics[key])]
        by_time = sorted(with_metric, key=lambda one: one.checkpoint_id)
        newest_first = sorted(by_time, key=lambda one: (one.epoch, one.step, one.created_at), reverse=True)
        return sorted(newest_first, key=lambda one: sign * one.metrics[key])[: self.policy.keep_best_n]

    def is_first_of_interval(self, meta: CheckpointMeta, offered: list[CheckpointMeta]) -> bool:
        steps, seconds = self.policy.keep_every_steps, self.policy.keep_every_seconds
        if meta not in offered:
            return False
        if steps is not None and meta.step >= steps:
            same = [one for one in offered if one.step // steps == meta.step // steps]
            if meta == min(same, key=lambda one: (one.step, one.created_at, one.checkpoint_id)):
                return True
        if seconds is None:
            return False
        same = [one for one in offered if one.created_at // seconds == meta.created_at // seconds]
        return meta == min(same, key=lambda one: (one.created_at, one.checkpoint_id))


def rank(meta: CheckpointMeta) -> tuple[bool, int, int, float, str]:
    return not meta.abandoned, meta.epoch, meta.step, meta.created_at, meta.checkpoint_id
