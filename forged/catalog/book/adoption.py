"""Existing checkpoints that come into the catalogue."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from forged.catalog import errors
from forged.catalog.book.changes import Change, in_decisions
from forged.catalog.book.checkpoint_table import REFUSED_CHARS_MAX, CheckpointTable
from forged.catalog.book.policies import RetentionPolicies
from forged.catalog.messages import (
    AdoptCheckpoints,
    AdoptedCheckpoint,
    Adoption,
    CheckpointParentFound,
    CheckpointsAdopted,
)
from forged.catalog.model import (
    EPOCH_MAX,
    SIZE_MAX,
    STEP_MAX,
    CheckpointMeta,
    CheckpointState,
    CheckpointType,
    checked_count,
    checked_time,
)
from forged.catalog.records import (
    CheckpointRecord,
    Moment,
    checked_checkpoint_path,
    checked_location,
    checked_metrics,
    checked_save_id,
)
from forged.errors import RequestRefused
from forged.kernel.messages import Decision
from forged.shares import Holder

ADOPTED_MAX = 1000


class Adoptions:
    """Adds existing checkpoints."""

    def __init__(self, table: CheckpointTable, policies: RetentionPolicies) -> None:
        self._table = table
        self._policies = policies

    def adopt(
        self, request: AdoptCheckpoints, new_id: Callable[[], str], holder: Holder, now: Moment, *, is_trusted: bool
    ) -> list[Decision[Adoption]]:
        """Add existing checkpoints; parents before their children."""
        if len(request.checkpoints) > ADOPTED_MAX:
            raise errors.argument_invalid("checkpoints", len(request.checkpoints), f"at most {ADOPTED_MAX}")
        folder = checked_location("folder", request.folder)
        self._policies.of(request.job)
        adoption = Adoption([], [], [])
        changes: list[Change] = []
        for one in request.checkpoints:
            try:
                # Others may have the daemon touch only what their own job has saved.
                manifest_job = one.job if is_trusted else request.job
                path, save_id = checked_checkpoint_path(one.storage_path), checked_save_id(one.save_id)
                known = self._table.known(request.job, path, save_id, manifest_job)
                if known is None:
                    meta = self._adopted_meta(request.job, one, new_id)
                    record = CheckpointRecord(meta, path, save_id, holder, is_trusted, recorded_after=now.revision)
                    if manifest_job != request.job:
                        record = msgspec.structs.replace(record, manifest_job=manifest_job)
                    self._table.require_room(record)
                    self._table.index.add(meta)
                    changes += [] if request.dry_run else self._table.keep_parents(meta)
                    changes.append(self._table.put(record))
                    adoption.adopted.append(record.id)
                else:
                    changes += [] if request.dry_run else self._parent_found(known, one.parent_path)
                    adoption.known.append(known.id)
            except RequestRefused as error:
                path = one.storage_path[:REFUSED_CHARS_MAX]
                adoption.refused.append(error.message if repr(path) in error.message else f"{path}: {error.message}")
        if request.dry_run:
            for checkpoint_id in adoption.adopted:
                self._table.index.drop(checkpoint_id)
                self._table.forget(self._table.records[checkpoint_id])
            return [Decision(adoption)]
        if adoption.adopted:
            last = max(place for place, change in enumerate(changes) if change.fact is None)
            changes[last] = changes[last]._replace(fact=CheckpointsAdopted(len(adoption.adopted), folder))
        return in_decisions(adoption, request.job, changes)

    def _adopted_meta(self, job: str, one: AdoptedCheckpoint, new_id: Callable[[], str]) -> CheckpointMeta:
        parent_id = None
        if one.parent_path:
            parent_id = self._table.id_at(job, checked_checkpoint_path(one.parent_path))
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
        parent_id = self._table.id_at(known.job, parent_path)
        is_settled = known.meta.state is CheckpointState.COMPLETE and not known.is_to_compact
        if not is_settled or parent_id is None or parent_id == known.meta.parent_id:
            return []
        record = self._table.with_parent(known, parent_path)
        found = CheckpointParentFound(record.id, record.meta.step, parent_id)
        return [*self._table.keep_parents(record.meta), self._table.put(record, found)]
