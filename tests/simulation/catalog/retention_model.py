"""The rules of retention, once more and without an index: what must not be deleted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import isnan

from forged.catalog.model import CheckpointMeta, CheckpointState, GcPolicy
from forged.catalog.settings import RULES_OF_KEEPING, retention_of
from forged.jobs.model import SettingValue

SETTINGS_LATE_S = 5.0
"""How long after a change of a job's settings a collection may still know the earlier ones."""


def rank(meta: CheckpointMeta) -> tuple[bool, int, int, float, str]:
    """The order of "latest"."""
    return not meta.abandoned, meta.epoch, meta.step, meta.created_at, meta.checkpoint_id


def restorable(metas: Sequence[CheckpointMeta]) -> set[str]:
    """The complete checkpoints whose parents are complete down to a root."""
    complete = {one.checkpoint_id: one for one in metas if one.state is CheckpointState.COMPLETE}
    sound: set[str] = set()
    while more := {
        key for key, one in complete.items() if key not in sound and (one.parent_id is None or one.parent_id in sound)
    }:
        sound |= more
    return sound


class Policies:
    """The settings of all jobs, and those before, which a collection may still know."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._of_job: defaultdict[str, list[tuple[float, Mapping[str, SettingValue]]]] = defaultdict(list)
        self._kept_by_script: dict[str, int] = {}

    def set(self, job: str, settings: Mapping[str, SettingValue]) -> None:
        self._of_job[job].append((self._now(), settings))

    def set_kept_by_script(self, job: str, keep: int | None) -> None:
        """A script has said how many checkpoints it keeps; it always says the same."""
        if keep is not None:
            self._kept_by_script[job] = keep

    def is_of_script(self, job: str) -> bool:
        """Whether the job's settings have no rule, so that the script's counts."""
        return not any(settings.get(key) is not None for _, settings in self._of_job[job] for key in RULES_OF_KEEPING)

    def recent(self, job: str) -> list[GcPolicy]:
        """The present policy of a job, and those that were replaced a moment ago."""
        known = self._of_job[job]
        replaced_at = [at for at, _ in known[1:]] + [float("inf")]
        return [
            retention_of(settings, {}, self._kept_by_script.get(job)).policy
            for (_, settings), at in zip(known, replaced_at, strict=True)
            if at > self._now() - SETTINGS_LATE_S
        ]


def why_kept(meta: CheckpointMeta, rule: str, of_job: Sequence[CheckpointMeta], policy: GcPolicy, at: float) -> str:
    """Why a checkpoint must stay among these of its job; empty if the policy may delete it."""
    sound = restorable(of_job)
    newest_first = sorted(of_job, key=rank, reverse=True)
    restorables = [one for one in newest_first if one.checkpoint_id in sound]
    if meta.state is CheckpointState.CREATING:
        return "being written"
    if newest_first[0].created_at > at:
        return "older than one that was created after the daemon's present time"
    if restorables and meta.checkpoint_id == restorables[0].checkpoint_id:
        return "the newest restorable one"
    verified = [one for one in restorables if one.verified_at is not None]
    last = max(verified, key=lambda one: (one.verified_at or 0.0, rank(one)), default=None)
    if last is not None and meta.checkpoint_id == last.checkpoint_id:
        return "the last verified one"
    if meta.checkpoint_id in _best(restorables, policy):
        return "one of the best"
    return _why_recent(meta, rule, newest_first, restorables, policy, at) or _why_first(meta, restorables, policy)


def _best(restorables: Sequence[CheckpointMeta], policy: GcPolicy) -> list[str]:
    sign = 1.0 if policy.metric_ascending else -1.0
    ranked = [
        (sign * one.metrics[policy.metric_key], place, one.checkpoint_id)
        for place, one in enumerate(sorted(restorables, key=lambda one: rank(one)[1:], reverse=True))
        if not isnan(one.metrics.get(policy.metric_key, float("nan")))
    ]
    return [checkpoint_id for _, _, checkpoint_id in sorted(ranked)[: policy.keep_best_n]]


def _why_recent(
    meta: CheckpointMeta,
    rule: str,
    newest_first: Sequence[CheckpointMeta],
    restorables: Sequence[CheckpointMeta],
    policy: GcPolicy,
    at: float,
) -> str:
    if rule == "old":
        return "" if at - meta.created_at > policy.max_age_seconds else "not old"
    newer = [one for one in restorables if rank(one) > rank(meta)]
    of_any_state = [one for one in newest_first if rank(one) > rank(meta)]
    counted = of_any_state if meta.is_failed_save else newer
    few = len(counted) < policy.max_checkpoints_per_run
    return f"followed by {len(counted)} of {policy.max_checkpoints_per_run} only" if few else ""


def _why_first(meta: CheckpointMeta, restorables: Sequence[CheckpointMeta], policy: GcPolicy) -> str:
    """Whether it is the first one that is offered of an interval of steps."""
    steps = policy.keep_every_steps
    offered = [one for one in restorables if not one.abandoned]
    if steps is None or meta.step < steps:
        return ""
    begin = meta.step // steps * steps
    places = [(one.step, one.created_at, one.checkpoint_id) for one in offered if one.step >= begin]
    is_first = bool(places) and min(places)[2] == meta.checkpoint_id
    return f"the first of an interval of {steps} steps" if is_first else ""
