"""Mutants of the rows of tensorforge_greenfield_tasks.md, Task 3."""

from __future__ import annotations

from collections.abc import Mapping

from tests.seed_map_mutants.mutation import Constant, Edit, Mutation

CADENCE = "forged/catalog/cadence.py"
CATALOG = "forged/catalog/catalog.py"
CHAINS = "forged/catalog/chains.py"
INDEX = "forged/catalog/catalog_index.py"
MODEL = "forged/catalog/model.py"
RETENTION = "forged/catalog/retention.py"
RUN_INDEX = "forged/catalog/run_index.py"
SELECTION = "forged/catalog/selection.py"
CRITERIA = "Checkpoints: acceptance criteria"


def thawed(record: str) -> Edit:
    return Edit(MODEL, f"class {record}(msgspec.Struct, frozen=True", f"class {record}(msgspec.Struct")


def constants(record: str, values: Mapping[str, str]) -> dict[str, Mutation | str]:
    return {f"{record}.{name}": Constant(MODEL, f"{record}.{name}", value) for name, value in values.items()}


MUTANTS: Mapping[str, Mutation | str] = {
    "enum CheckpointState": Edit(
        MODEL, "class CheckpointState(StrEnum):\n", 'class CheckpointState(StrEnum):\n    NOTHING = "nothing"\n'
    ),
    "CheckpointState.Creating": Edit(INDEX, "state=CheckpointState.CREATING,", "state=CheckpointState.COMPLETE,"),
    "CheckpointState.Complete": Edit(INDEX, "            state=CheckpointState.COMPLETE,\n", ""),
    "CheckpointState.Corrupted": Edit(
        INDEX, "state=_following(meta, CheckpointState.CORRUPTED)", "state=CheckpointState.COMPLETE"
    ),
    "CheckpointState.Deleted": Edit(INDEX, "state=_following(meta, CheckpointState.DELETED)", "state=meta.state"),
    "enum CheckpointType": Edit(
        MODEL, "class CheckpointType(StrEnum):\n", 'class CheckpointType(StrEnum):\n    NOTHING = "nothing"\n'
    ),
    "CheckpointType.Full": Edit(
        INDEX,
        "if request.checkpoint_type is not CheckpointType.INCREMENTAL:",
        "if request.checkpoint_type == 'emergency':",
    ),
    "CheckpointType.Incremental": Edit(INDEX, "    return parent.id\n", "    return None\n"),
    "CheckpointType.Emergency": Edit(
        INDEX, "if request.checkpoint_type is not CheckpointType.INCREMENTAL:", "if request.checkpoint_type == 'full':"
    ),
    "struct CheckpointMeta": thawed("CheckpointMeta"),
    **constants(
        "CheckpointMeta",
        {
            "checkpoint_id": '""',
            "training_run_id": '""',
            "epoch": "0",
            "step": "0",
            "checkpoint_type": "CheckpointType.FULL",
            "state": "CheckpointState.COMPLETE",
            "size_bytes": "0",
            "created_at": "0.0",
            "parent_id": "None",
            "metrics": "{}",
            "storage_path": '""',
        },
    ),
    "struct CreateCheckpointRequest": thawed("CreateCheckpointRequest"),
    **constants(
        "CreateCheckpointRequest",
        {
            "training_run_id": '"another"',
            "epoch": "0",
            "step": "0",
            "checkpoint_type": "CheckpointType.FULL",
            "metrics": "{}",
        },
    ),
    "struct RestoreCriteria": thawed("RestoreCriteria"),
    **constants(
        "RestoreCriteria",
        {
            "training_run_id": '"run"',
            "max_epoch": "None",
            "max_step": "None",
            "require_complete": "False",
            "prefer_full": "False",
        },
    ),
    "struct GcPolicy": thawed("GcPolicy"),
    **constants(
        "GcPolicy",
        {
            "max_checkpoints_per_run": "9",
            "max_age_seconds": "1e9",
            "keep_best_n": "0",
            "metric_key": '"accuracy"',
            "metric_ascending": "True",
        },
    ),
    "fn chain_length(checkpoints, checkpoint_id)": Edit(
        CHAINS,
        "return len(_chain_of(checkpoints, checkpoint_id))",
        "return len(_chain_of(checkpoints, checkpoint_id)) - 1",
    ),
    "fn find_chain_root(checkpoints, checkpoint_id)": Edit(
        CHAINS, "checkpoint_id)[-1].checkpoint_id", "checkpoint_id)[0].checkpoint_id"
    ),
    "fn restoration_chain(checkpoints, target_id)": Edit(CHAINS, "for one in reversed(chain)]", "for one in chain]"),
    "fn chain_size(checkpoints, target_id)": Edit(
        CHAINS, "sum(one.size_bytes for one in _chain_of", "max(one.size_bytes for one in _chain_of"
    ),
    "fn is_gc_eligible(checkpoint, policy, latest_step, now, is_best)": Edit(
        RETENTION, "if is_best or is_latest or", "if is_latest or"
    ),
    "fn selection_score(checkpoint, criteria)": Edit(
        SELECTION, "is_preferred + _recency(checkpoint.created_at)", "is_preferred - _recency(checkpoint.created_at)"
    ),
    "fn estimate_restore_time(chain, base_ms, per_checkpoint_ms, bytes_per_ms)": Edit(
        CHAINS, "per_checkpoint_ms * len(chain)", "per_checkpoint_ms"
    ),
    "fn validate_checkpoint(checkpoint, all_checkpoints)": Edit(
        CHAINS, "if not checkpoint.storage_path and", "if checkpoint.storage_path is None and"
    ),
    "struct CheckpointManager": Edit(CATALOG, "            self._last_number += 1\n", ""),
    "CheckpointManager.new(gc_policy)": Edit(
        CATALOG, "self._index = CatalogIndex(policy)", "self._index = CatalogIndex(GcPolicy(9, 9e9))"
    ),
    "CheckpointManager.create(request, now)": Edit(INDEX, 'created_at=checked_time("now", now)', "created_at=0.0"),
    "CheckpointManager.complete(checkpoint_id, size_bytes, storage_path)": Edit(
        INDEX,
        "storage_path=checked_path(storage_path),\n            verified_at",
        'storage_path="path",\n            verified_at',
    ),
    "CheckpointManager.mark_corrupted(checkpoint_id)": Edit(
        RUN_INDEX, "                unsettled += entry.children\n", ""
    ),
    "CheckpointManager.get(checkpoint_id)": Edit(
        INDEX, "return self.tombstones.get(checkpoint_id) if run is None", "return None if run is None"
    ),
    "CheckpointManager.find_restore_point(criteria)": Edit(SELECTION, "range(end - 1, -1, -1)", "range(end)"),
    "CheckpointManager.list_for_run(training_run_id)": Edit(
        INDEX, "for entry in self._run(training_run_id).entries.values()]", "for entry in self._run('run').best]"
    ),
    "CheckpointManager.get_latest(training_run_id)": Edit(
        RUN_INDEX,
        "return not meta.abandoned, meta.epoch, meta.step,",
        "return not meta.abandoned, meta.step, meta.epoch,",
    ),
    "CheckpointManager.gc(now)": Edit(RETENTION, "kept += ranked[place].is_restorable", "kept += 2"),
    "CheckpointManager.total_count()": Edit(
        INDEX, "return len(self._run_of)", "return len(self._run_of) + len(self.tombstones)"
    ),
    "CheckpointManager.total_size()": Edit(INDEX, "        self._size_bytes -= meta.size_bytes\n", ""),
    "CheckpointManager.delete(checkpoint_id)": Edit(INDEX, "        if children:\n", "        if len(children) > 1:\n"),
    "CheckpointManager.find_by_metric(training_run_id, metric_key, threshold, ascending)": Edit(
        SELECTION, "sign * value < sign * threshold", "sign * value <= sign * threshold"
    ),
    "Integrate with `resilience::CheckpointManager::should_checkpoint` for interval logic": Edit(
        CADENCE, "return current_step - last_step >= interval", "return current_step - last_step > interval"
    ),
    f"{CRITERIA}: All trait methods implemented with correct logic": Edit(
        RETENTION, "        self._keep_parents()\n", ""
    ),
    "Checkpoint chains correctly linked via parent_id": Edit(
        INDEX, "    return parent.id\n", "    return run.ranked[0].id\n"
    ),
    "Restoration chain built in correct order (root to target)": Edit(
        CHAINS, "chain.append(known[parent_id])", "chain.insert(0, known[parent_id])"
    ),
    'GC respects "keep best N" and maximum age policies': Edit(
        RETENTION, "            (RetentionRule.BEST, entry.id in self.best),\n", ""
    ),
    "Incremental checkpoints depend on parent existence": Edit(
        INDEX, "        raise errors.parent_missing(request.training_run_id)\n", "        return None\n"
    ),
    f"{CRITERIA}: Thread-safe operations using RwLock appropriately": Edit(
        CATALOG,
        "        with self._lock:\n            return self._index.total_size()",
        "        return self._index.total_size()",
    ),
    "Checkpoint creation and completion lifecycle": Edit(
        INDEX, "if meta.state is not CheckpointState.CREATING:", "if meta.state is CheckpointState.CORRUPTED:"
    ),
    "Chain building and traversal": Edit(
        CHAINS, "            raise chain_cyclic(target_id, parent_id)\n", "            break\n"
    ),
    "Restoration chain ordering": Edit(CHAINS, "for one in reversed(chain)]", "for one in chain]"),
    "GC eligibility rules": Edit(
        RETENTION, "now - meta.created_at > policy.max_age_seconds", "now - meta.created_at >= policy.max_age_seconds"
    ),
    "Selection scoring algorithm": Edit(
        SELECTION, "return score if is_complete else score * _UNSOUND_SCALE", "return score"
    ),
    "Metric-based filtering": Edit(
        SELECTION, 'metrics.get(metric_key, float("nan"))', 'metrics.get(metric_key, -float("inf"))'
    ),
    "Concurrent operations": Edit(
        INDEX, "if meta.state is not CheckpointState.CREATING:", "if meta.state is CheckpointState.CORRUPTED:"
    ),
    "Edge cases (empty runs, corrupted parents, etc.)": Edit(
        CHAINS, "if known[parent_id].state is not CheckpointState.COMPLETE:", "if known[parent_id].state == 'deleted':"
    ),
    f"{CRITERIA}: Minimum 25 test cases": "it counts tests, which no edit of the code changes",
}
