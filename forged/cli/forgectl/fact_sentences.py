"""Facts about training, checkpoints, models and GPU memory as English sentences.

A sentence leaves out no field of its fact, except fields that follow from the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from forged.cli.forgectl import tables
from forged.cli.forgectl.answers import RANK_NONE, Row, known
from forged.cli.forgectl.commands import data
from forged.phrases import bytes_text

_CLAUSES: Mapping[str, tuple[str, ...]] = {
    "WorkerJoined": ("{worker} joined and waits for a rank",),
    "WorkerReturned": ("{worker_id} reconnected", " after {after_s}"),
    "WorkerLeft": ("{worker_id} left", ": {reason}"),
    "WorkerFailed": ("{worker_id} failed", " (rank {rank})", ": {reason}"),
    "GroupBroken": ("group {group} is broken: it has lost {worker_id}", "; {waiting} wait until it is whole"),
    "WorkerDraining": ("draining {worker_id} after its current step", ": {reason}"),
    "WorkerStalled": ("{worker_id} is alive but makes no progress", " for {for_s}", ", last step {step}"),
    "WorkerRecovered": ("{worker_id} makes progress again", ", last step {step}"),
    "WorkerStoodStill": (
        "{worker_id} stood still without a daemon",
        " for {for_s}",
        ", after losing {peer}",
        " in generation {lost_generation}",
    ),
    "NonFiniteLoss": ("{worker_id} logged {name} = {value}", " (rank {rank})", " at step {step}"),
    "WorkerLost": ("{worker_id} is lost", ": {reason}", "; it has {grace_s} to reconnect"),
    "RescaleStarted": (
        "attempt {attempt} to rescale",
        " to {world_size:worker}",
        " ({type})",
        " {in_background}",
        ", adding {added}",
        ", removing {removed}",
        ", draining {draining}",
        ": {reason}",
    ),
    "RescaleSynchronising": (
        "attempt {attempt}: all workers have stopped",
        " after step {step}",
        "; {source} sends its state to {behind:worker}",
        " (the sources by group rank: {sources})",
    ),
    "ProgressLost": (
        "the steps committed after step {step} are lost",
        " ({steps:step})",
        ": {reason}",
    ),
    "RescaleCompleted": (
        "attempt {attempt} committed",
        " after {took_s}",
        ": {delta:worker}",
        " (added {added})",
        " (removed {removed})",
        ", training resumes after step {step}",
        " of epoch {epoch}",
        ", learning rate {learning_rate}",
        ", batch {global_batch_size}",
        ": {reason}",
    ),
    "RescaleAborted": ("attempt {attempt} aborted", ": {reason}"),
    "JobWaiting": ("training waits: {workers:worker} available", ", {needed} required"),
    "JobPaused": ("training pauses", ": {reason}"),
    "JobResumed": ("training resumes", ": {reason}"),
    "JobCompleted": ("training is complete", " after step {step}"),
    "JobAborted": ("training is aborted", " after step {step}", ": {reason}"),
    "JobReopened": ("the job is reopened", " after step {step}", ": {reason}"),
    "DatasetDefined": ("the workers train with {dataset}",),
    "TransfersPlanned": ("attempt {attempt}", ": {totals}"),
    "TransfersCompleted": (
        "attempt {attempt}: all workers hold their data",
        ", {transfers:shard} transferred",
        ", {bytes}",
        ", in {took_s}",
        " (estimated {estimated_s})",
    ),
    "ShardsLost": (
        "attempt {attempt}: no worker has {count:shard}",
        ", such as {shards}",
        " ({reason})",
        "; {last_held_by}",
    ),
    "CopiesDiffer": (
        "attempt {attempt}: the copies of {count:shard} differ",
        ", such as {shards}",
        "; the different copies are on {workers}",
    ),
    "CorruptShardFound": ("{worker_id} has a corrupt copy of shard {shard}", ", found by {found_by}"),
    "CheckpointStarted": (
        "saving checkpoint {checkpoint_id}",
        " ({checkpoint_type})",
        " of step {step}",
        ", epoch {epoch}",
        ", at {storage_path}",
        ", building on {parent_id}",
        ", by {worker_id}",
        ": {reason}",
    ),
    "CheckpointCompleted": (
        "checkpoint {checkpoint_id} is complete",
        " (step {step})",
        ": {size_bytes}",
        " saved in {seconds}",
        ", building on {parent_id}",
    ),
    "CheckpointFailed": ("checkpoint {checkpoint_id} was not saved", " (step {step})", ": {reason}"),
    "CheckpointCorrupted": ("checkpoint {checkpoint_id} is corrupted", " (step {step})", ": {reason}"),
    "CheckpointRepaired": ("all bytes of checkpoint {checkpoint_id} are correct again", " (step {step})"),
    "CheckpointCollected": (
        "deleting checkpoint {checkpoint_id}",
        " (step {step})",
        ", {size_bytes}",
        ", by the rule {rule}",
        ": {reason}",
    ),
    "CheckpointCompacted": (
        "checkpoint {checkpoint_id} builds on no other one any more",
        " (step {step})",
        ", {size_bytes}",
    ),
    "CheckpointParentFound": ("checkpoint {checkpoint_id} builds on {parent_id}", " (step {step})"),
    "CheckpointOperationFailed": ("{operation} checkpoint {checkpoint_id} failed", " (step {step})", ": {reason}"),
    "CheckpointsAbandoned": (
        "training continues after step {step}",
        ", from checkpoint {checkpoint_id}",
        "; abandons {count:checkpoint} beyond it",
    ),
    "CheckpointReinstated": ("checkpoint {checkpoint_id} is no longer abandoned", " (step {step})", ": {reason}"),
    "CheckpointRestored": (
        "the job is restored from checkpoint {checkpoint_id}",
        " (step {step})",
        ": {size_bytes}",
        " read in {seconds}",
        "; skipped {skipped}",
    ),
    "CheckpointsAdopted": ("{count:checkpoint} adopted", " from {folder}"),
    "EmergencyCheckpointSaved": (
        "checkpoint {checkpoint_id} was saved from memory",
        " (step {step})",
        " {seconds} after {worker_id} failed",
        ", {size_bytes}",
    ),
    "EmergencyCheckpointFailed": (
        "the emergency checkpoint after the failure of {worker_id} was not saved",
        " (step {step})",
        ": {reason}",
    ),
    "ModelRegistered": (
        "{model_id}@{version} is registered",
        " as {state}",
        " by {by}",
        " ({is_import})",
        ", checksum {checksum}",
        ", from checkpoint {checkpoint_id}",
    ),
    "ModelTransitioned": (
        "{model_id}@{version} became {now}",
        " (was {was})",
        ", by {by}",
        ": {reason}",
        "; without evidence: {waiver}",
    ),
    "ValidationRecorded": (
        "validation {number} of {model_id}@{version}",
        " has {passed}",
        ", p99 latency {latency_p99_ms} ms",
        ", accuracy {accuracy_score}",
        ", by {by}",
    ),
    "AliasMoved": ("alias {alias} of {model_id} moved", " from {was}", " to {now}", ", by {by}", ": {reason}"),
    "CanaryMeasured": (
        "canary {model_id}@{version} was measured",
        ": {reason}",
        " (policy: {action})",
    ),
    "RollbackAdvised": (
        "canary {model_id}@{version} should be rolled back",
        ": {reason}",
    ),
    "ModelRolledBack": ("{model_id}@{version} is rolled back", ", {to} serves", ", by {by}", ": {reason}"),
    "ModelPolicyChanged": ("model {model_id} has another policy", " ({policy})", ", by {by}", ": {reason}"),
    "ModelTagged": ("{model_id}@{version} is tagged", " with {set}", ", without {removed}", ", by {by}"),
    "ModelDeleted": ("{model_id}@{version} is deleted", ", by {by}", ": {reason}"),
    "DeviceRegistered": ("device {device} is registered", ", {total_memory:memory}"),
    "DeviceRemoved": ("device {device} is gone", " with {blocks:block}", " ({bytes:memory})", ": {reason}"),
    "BlocksFreed": ("{blocks:block} of {worker_id} on {device} are free", " ({bytes:memory})", ": {reason}"),
    "MemoryPressure": (
        "memory pressure of {device} {rising} {threshold}",
        " ({pressure})",
        ", out of memory in {seconds_to_oom}",
    ),
    "OutOfMemory": (
        "{worker_id} gets no {size:memory} on {device}",
        " for {tensor_id}",
        ": {total_free:memory} free",
        ", {largest_hole:memory} of it together",
        ", {evictable_bytes:memory} evictable",
        "; in the way: {blocking}",
        "; {fix}",
    ),
    "BlockEvicted": (
        "{count:block} on {device} gave way",
        " ({bytes:memory})",
        " to {worker_id}",
        " for {tensor_id}",
        ": {blocks}",
    ),
    "CompactionPlanned": (
        "compaction {epoch} of {device} is planned",
        ": {moves:move}",
        ", {bytes:memory}",
        ", opens {opens:memory}",
        " ({reason})",
    ),
    "CompactionEnded": (
        "compaction {epoch} of {device} has ended",
        ", {committed:move} committed",
        ", {expired:move} expired",
    ),
    "ModelArtifactChecked": ("the files of {model_id}@{version} are {state}", ": {problem}"),
}
"""The clauses of each sentence. A clause is left out if a field is missing; without the first there is no sentence.

`{count:shard}` is a count with its noun, `{bytes:memory}` a size in powers of 1024, as `forgectl memory` shows it.
"""
MEMORY = "memory"
_FIELD = re.compile(r"\{(\w+)(?::(\w+))?\}")
_FOLLOWS = frozenset({"type", "priority", "threshold", "baseline", "entry"})
"""Fields that follow from the others."""
_EMPTY_AT_0 = frozenset({"behind", "count", "transfers"})
"""Counts of which none is nothing to say."""


def in_words(kind: Any, fact: Row) -> str | None:
    """The sentence for a fact; None if there is none for its type, or its main field is missing."""
    clauses = _CLAUSES.get(kind) if isinstance(kind, str) else None
    if clauses is None:
        return None
    if fact.get("type") == "replace" and not (fact.get("added") or fact.get("removed")):
        # No worker is replaced.
        fact = {**fact, "type": None}
    removed, draining = fact.get("removed"), fact.get("draining")
    if isinstance(removed, list) and isinstance(draining, list):
        # A draining worker is removed, too.
        fact = {**fact, "removed": [worker for worker in removed if worker not in draining]}
    first, *others = (_clause(clause, fact) for clause in clauses)
    if not first:
        return None
    known_fields = _FOLLOWS.union(*(fields_of(clause) for clause in clauses))
    more = tables.fields({key: value for key, value in fact.items() if key not in known_fields})
    return "".join([first, *others, f" {more}" if more else ""])


def fields_of(clause: str) -> set[str]:
    """The names of the fields in a clause."""
    return {name for name, _ in _FIELD.findall(clause)}


def _clause(clause: str, fact: Row) -> str:
    texts = {name: _field(name, fact.get(name), noun) for name, noun in _FIELD.findall(clause)}
    if any(text in ("", tables.NONE) for text in texts.values()):
        return ""
    return _FIELD.sub(lambda found: texts[found[1]], clause)


def _field(name: str, value: Any, noun: str) -> str:
    """A field's value as part of a sentence; empty if there is nothing to say."""
    if name == "delta":
        value = _world_size(value)
    if (name == "rank" and value == RANK_NONE) or (name in _EMPTY_AT_0 and value == 0):
        return ""
    if noun == MEMORY:
        return bytes_text(value) if isinstance(value, int) and value > 0 else ""
    if noun and isinstance(value, int):
        return tables.counted(value, noun)
    if name == "in_background":
        return "in the background" if value is True else ""
    if name in _IN_WORDS:
        return _IN_WORDS[name](value)
    if isinstance(value, list):
        return tables.names(value)
    text = tables.field(name, known(name, value))
    return text.replace("_", " ") if name == "type" else text


def _world_size(delta: Any) -> int | None:
    """The number of workers after a change of the topology.

    A piece of the change is a new worker, or a run of present workers: its start and its length.
    """
    pieces = delta.get("pieces") if isinstance(delta, dict) else None
    if not isinstance(pieces, list):
        return None
    counts = [piece[1] if isinstance(piece, list) and len(piece) == 2 else 1 for piece in pieces]
    return sum(counts) if all(isinstance(count, int) for count in counts) else None


def _restart(workers: Any) -> str:
    return data.restart_hint(workers) if isinstance(workers, list) and workers else ""


def _size(count: Any) -> str:
    return tables.size(count) if isinstance(count, int) and count > 0 else ""


def _version(value: Any) -> str:
    """A version of a model, or a state, as it is written elsewhere."""
    is_version = isinstance(value, list) and len(value) == 3 and all(type(number) is int for number in value)
    return ".".join(map(str, value)) if is_version else tables.field("", value)


def _figure(value: Any) -> str:
    """A measured number in four figures; empty if it was not measured."""
    if isinstance(value, float):
        return "" if value != value else f"{value:.4g}"
    return tables.field("", value)


def _outcome(passed: Any) -> str:
    return tables.field("", passed) if not isinstance(passed, bool) else "passed" if passed else "failed"


def _duration(seconds: Any) -> str:
    return tables.duration(seconds) if isinstance(seconds, (int, float)) else ""


_IN_WORDS: Mapping[str, Callable[[Any], str]] = {
    "dataset": data.dataset_in_words,
    "totals": data.totals_in_words,
    "last_held_by": _restart,
    "bytes": _size,
    "size_bytes": _size,
    "seconds": _duration,
    "seconds_to_oom": _duration,
    "pressure": _figure,
    "rising": lambda value: "rises above" if value is True else "falls below",
    "version": _version,
    "state": lambda value: "" if value == "registered" else tables.field("", value),
    "latency_p99_ms": _figure,
    "accuracy_score": _figure,
    "policy": lambda value: tables.fields(value) if isinstance(value, dict) else tables.field("", value),
    "was": _version,
    "now": _version,
    "to": _version,
    "passed": _outcome,
    "is_import": lambda value: "imported" if value is True else "",
}
"""Fields with a wording of their own."""
