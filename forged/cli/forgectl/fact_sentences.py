"""Facts about training as English sentences.

A sentence leaves out no field of its fact, except fields that follow from the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from forged.cli.forgectl import tables
from forged.cli.forgectl.answers import RANK_NONE, Row, known
from forged.cli.forgectl.commands import data

_CLAUSES: Mapping[str, tuple[str, ...]] = {
    "WorkerJoined": ("{worker} joined and waits for a rank",),
    "WorkerReturned": ("{worker_id} reconnected", " after {after_s}"),
    "WorkerLeft": ("{worker_id} left", ": {reason}"),
    "WorkerFailed": ("{worker_id} failed", " (rank {rank})", ": {reason}"),
    "WorkerDraining": ("draining {worker_id} after its current step", ": {reason}"),
    "WorkerStalled": ("{worker_id} is alive but makes no progress", " for {for_s}", ", last step {step}"),
    "WorkerRecovered": ("{worker_id} makes progress again", ", last step {step}"),
    "WorkerStoodStill": (
        "{worker_id} stood still without a daemon",
        " for {for_s}",
        ", after losing {peer}",
        " in generation {lost_generation}",
    ),
    "WorkerLost": ("{worker_id} is lost", ": {reason}", "; it has {grace_s} to reconnect"),
    "RescaleStarted": (
        "attempt {attempt} to rescale",
        " to {world_size}",
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
        "; {source} sends its state to {behind}",
    ),
    "ProgressLost": (
        "the steps committed after step {step} are lost",
        " ({steps} steps)",
        ": {reason}",
    ),
    "RescaleCompleted": (
        "attempt {attempt} committed",
        " after {took_s}",
        ": {delta}",
        " (added {added})",
        " (removed {removed})",
        ", training resumes after step {step}",
        " of epoch {epoch}",
        ", learning rate {learning_rate}",
        ", batch {global_batch_size}",
        ": {reason}",
    ),
    "RescaleAborted": ("attempt {attempt} aborted", ": {reason}"),
    "JobWaiting": ("training waits: {workers} available", ", {needed} required"),
    "JobPaused": ("training pauses", ": {reason}"),
    "JobResumed": ("training resumes", ": {reason}"),
    "JobCompleted": ("training is complete", " after step {step}"),
    "JobAborted": ("training is aborted", " after step {step}", ": {reason}"),
    "DatasetDefined": ("the workers train with {dataset}",),
    "TransfersPlanned": ("attempt {attempt}", ": {totals}"),
    "TransfersCompleted": (
        "attempt {attempt}: all workers hold their data",
        ", {transfers} transferred",
        ", {bytes}",
        ", in {took_s}",
        " (estimated {estimated_s})",
    ),
    "ShardsLost": (
        "attempt {attempt}: no worker has {count}",
        ", such as {shards}",
        " ({reason})",
        "; {last_held_by}",
    ),
    "CopiesDiffer": (
        "attempt {attempt}: the copies of {count} differ",
        ", such as {shards}",
        "; the different copies are on {workers}",
    ),
    "CorruptShardFound": ("{worker_id} has a corrupt copy of shard {shard}", ", found by {found_by}"),
}
"""The clauses of each sentence. A clause is left out if a field is missing; without the first there is no sentence."""
_FIELD = re.compile(r"\{(\w+)\}")
_FOLLOWS = frozenset({"type"})
"""Fields that follow from the others."""
_COUNTS_OF_WORKERS = frozenset({"world_size", "behind", "workers"})


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
    known_fields = _FOLLOWS.union(*(_FIELD.findall(clause) for clause in clauses))
    more = tables.fields({key: value for key, value in fact.items() if key not in known_fields})
    return "".join([first, *others, f" {more}" if more else ""])


def _clause(clause: str, fact: Row) -> str:
    texts = {name: _field(name, fact.get(name)) for name in _FIELD.findall(clause)}
    if any(text in ("", tables.NONE) for text in texts.values()):
        return ""
    return _FIELD.sub(lambda found: texts[found[1]], clause)


def _field(name: str, value: Any) -> str:
    """A field's value as part of a sentence; empty if there is nothing to say."""
    if name == "delta":
        name, value = "world_size", _world_size(value)
    if (name == "rank" and value == RANK_NONE) or (name == "behind" and value == 0):
        return ""
    if name == "in_background":
        return "in the background" if value is True else ""
    if name in _IN_WORDS:
        return _IN_WORDS[name](value)
    if isinstance(value, list):
        return tables.names(value)
    if name in _COUNTS_OF_WORKERS and isinstance(value, int):
        return tables.counted(value, "worker")
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


def _shards(count: Any) -> str:
    return tables.counted(count, "shard") if isinstance(count, int) and count else ""


def _restart(workers: Any) -> str:
    return data.restart_hint(workers) if isinstance(workers, list) and workers else ""


def _size(count: Any) -> str:
    return tables.size(count) if isinstance(count, int) and count > 0 else ""


_IN_WORDS: Mapping[str, Callable[[Any], str]] = {
    "dataset": data.dataset_in_words,
    "totals": data.totals_in_words,
    "transfers": _shards,
    "count": _shards,
    "last_held_by": _restart,
    "bytes": _size,
}
"""Fields with a wording of their own."""
