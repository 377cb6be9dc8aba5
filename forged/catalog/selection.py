"""Which checkpoint of a run to restore, and which are better than a threshold.

Invariants:
- Checkpoints are compared exactly, as integers and times: restorable first, then step, then full before incremental if
  that is preferred, then time.
- An abandoned checkpoint, and a complete one whose chain is broken, are never offered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import groupby
from math import isnan

from forged.catalog.model import CheckpointMeta, CheckpointState, RestoreCriteria
from forged.catalog.run_index import IndexEntry, RunIndex

UNSOUND = frozenset({CheckpointState.CREATING, CheckpointState.CORRUPTED})
_UNSOUND_SCALE = 2.0**-66
"""Below the score of every complete checkpoint; a power of two, so that no digit is lost."""
_TIME_SCALE_S = 1e9


def restore_points(run: RunIndex, criteria: RestoreCriteria) -> Iterator[CheckpointMeta]:
    """All checkpoints that match the criteria, the best first: when one fails, the next is tried."""
    yield from _restorable_points(run, criteria)
    if not criteria.require_complete:
        unsound = [one.meta for one in run.entries.values() if one.meta.state in UNSOUND]
        matching = [one for one in unsound if not one.abandoned and is_within(one, criteria)]
        yield from sorted(matching, key=lambda one: (one.step, *_of_one_step(one, criteria)), reverse=True)


def _restorable_points(run: RunIndex, criteria: RestoreCriteria) -> Iterator[CheckpointMeta]:
    offered, most = run.offered, criteria.max_step
    end = len(offered) if most is None else bisect_right(offered, most, key=_step)
    newest_first = (offered[place] for place in range(end - 1, -1, -1))
    for _, same_step in groupby(newest_first, key=_step):
        matching = [one.meta for one in same_step if is_within(one.meta, criteria)]
        yield from sorted(matching, key=lambda one: _of_one_step(one, criteria), reverse=True)


def find_by_metric(run: RunIndex, metric_key: str, threshold: float, *, ascending: bool) -> list[CheckpointMeta]:
    """The checkpoints whose metric is better than the threshold, the best first, the latest of equals first."""
    sign = 1 if ascending else -1
    found = [
        (sign * value, one.meta)
        for one in reversed(run.ranked)
        if not isnan(value := one.meta.metrics.get(metric_key, float("nan"))) and sign * value < sign * threshold
    ]
    return [meta for _, meta in sorted(found, key=lambda one: one[0])]


def selection_score(checkpoint: CheckpointMeta, criteria: RestoreCriteria) -> float:
    """The order of restore points as a float: higher is better, 0.0 does not match the criteria.

    A checkpoint alone does not show its chain, so a complete one counts as restorable. A float cannot tell apart what
    differs by less than one part in 2**53: `find_restore_point` does not use it.
    """
    is_complete = checkpoint.state is CheckpointState.COMPLETE
    is_admitted = is_complete or (checkpoint.state in UNSOUND and not criteria.require_complete)
    is_of_run = checkpoint.training_run_id == criteria.training_run_id and not checkpoint.abandoned
    if not (is_admitted and is_of_run and is_within(checkpoint, criteria)):
        return 0.0
    is_preferred = criteria.prefer_full and not checkpoint.is_incremental
    score = (checkpoint.step + 1) + (is_preferred + _recency(checkpoint.created_at)) / 2
    return score if is_complete else score * _UNSOUND_SCALE


def _recency(created_at: float) -> float:
    """A fraction in [0, 1) that grows with the time."""
    return (1 + created_at / (abs(created_at) + _TIME_SCALE_S)) / 2


def _step(entry: IndexEntry) -> int:
    return entry.meta.step


def _of_one_step(meta: CheckpointMeta, criteria: RestoreCriteria) -> tuple[bool, float, str]:
    return criteria.prefer_full and not meta.is_incremental, meta.created_at, meta.checkpoint_id


def is_within(meta: CheckpointMeta, criteria: RestoreCriteria) -> bool:
    """Whether the checkpoint is at or before the epoch and the step that are asked for."""
    if criteria.max_epoch is not None and meta.epoch > criteria.max_epoch:
        return False
    return criteria.max_step is None or meta.step <= criteria.max_step
