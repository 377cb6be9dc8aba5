"""Records of checkpoints for tests."""

from __future__ import annotations

from typing import Any

from forged.catalog import (
    CheckpointCatalog,
    CheckpointMeta,
    CheckpointState,
    CheckpointType,
    CreateCheckpointRequest,
    GcPolicy,
)

FULL, INCREMENTAL, EMERGENCY = CheckpointType.FULL, CheckpointType.INCREMENTAL, CheckpointType.EMERGENCY
CREATING, COMPLETE = CheckpointState.CREATING, CheckpointState.COMPLETE
CORRUPTED, DELETED = CheckpointState.CORRUPTED, CheckpointState.DELETED
KEEP_ALL = GcPolicy(max_checkpoints_per_run=1_000_000, max_age_seconds=float("inf"))


def record(checkpoint_id: str, parent_id: str | None = None, **changes: Any) -> CheckpointMeta:
    """A complete checkpoint; incremental if it has a parent."""
    fields: dict[str, Any] = {
        "checkpoint_id": checkpoint_id,
        "training_run_id": "run",
        "epoch": 0,
        "step": 100,
        "checkpoint_type": FULL if parent_id is None else INCREMENTAL,
        "state": COMPLETE,
        "size_bytes": 10,
        "created_at": 0.0,
        "parent_id": parent_id,
        "metrics": {},
        "storage_path": f"run/{checkpoint_id}",
    }
    return CheckpointMeta(**(fields | changes))


def chain(*ids: str) -> list[CheckpointMeta]:
    """Checkpoints that build on each other, the root first."""
    return [
        record(one, parent, step=100 * number)
        for number, (one, parent) in enumerate(zip(ids, [None, *ids], strict=False))
    ]


def request(step: int = 100, kind: CheckpointType = FULL, run: str = "run", **changes: Any) -> CreateCheckpointRequest:
    fields: dict[str, Any] = {"epoch": 0, "metrics": {}}
    return CreateCheckpointRequest(training_run_id=run, step=step, checkpoint_type=kind, **(fields | changes))


def saved(
    catalog: CheckpointCatalog, step: int = 100, kind: CheckpointType = FULL, now: float = 0.0, **changes: Any
) -> CheckpointMeta:
    """A checkpoint that is created and completed."""
    verified_at = changes.pop("verified_at", None)
    meta = catalog.create(request(step, kind, **changes), now)
    return catalog.complete(meta.checkpoint_id, 10, f"run/{meta.checkpoint_id}", verified_at=verified_at)
