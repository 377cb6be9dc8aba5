"""Which checkpoints of a run are kept and which go, each with the rule that decides.

Invariants:
- Never goes: what is being written, pinned or held; the newest restorable checkpoint; the last verified one; the parent
  of a checkpoint that stays.
- The same records and the same time give the same verdicts, so a second collection deletes nothing.
- If the newest checkpoint by epoch and step was created after `now`, the clock went back, and nothing goes. The time of
  an earlier checkpoint does not count: the run has saved since, so that time is wrong.
- Parents follow their children in the order of collection, so that an interrupted one breaks no chain.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cached_property
from math import inf, nextafter
from typing import NamedTuple

from forged.catalog.model import UNLIMITED, CheckpointMeta, CheckpointState, GcPolicy
from forged.catalog.run_index import IndexEntry, RunIndex, by_rank
from forged.phrases import named

COLLECTABLE = frozenset({CheckpointState.COMPLETE, CheckpointState.CORRUPTED})


class RetentionRule(StrEnum):
    """The rules, in the order in which they are asked."""

    WRITING = "writing"
    CLOCK = "clock"
    PINNED = "pinned"
    HELD = "held"
    NEWEST = "newest"
    VERIFIED = "verified"
    BEST = "best"
    STEPS = "steps"
    SECONDS = "seconds"
    PARENT = "parent"
    RECENT = "recent"
    """Neither old nor surplus."""
    OLD = "old"
    SURPLUS = "surplus"


class Verdict(NamedTuple):
    """What happens to one checkpoint, and why."""

    checkpoint_id: str
    is_kept: bool
    rule: RetentionRule
    reason: str
    """In words."""
    size_bytes: int
    """What the checkpoint takes up; what its deletion gives back."""


def is_gc_eligible(checkpoint: CheckpointMeta, policy: GcPolicy, latest_step: int, now: float, is_best: bool) -> bool:
    """Whether a checkpoint is too old: none of the best, not the latest, not being written.

    `latest_step` is the step of the newest restorable checkpoint.
    """
    is_latest = (
        checkpoint.state is CheckpointState.COMPLETE and not checkpoint.abandoned and checkpoint.step >= latest_step
    )
    if is_best or is_latest or checkpoint.state not in COLLECTABLE or checkpoint.pinned or checkpoint.holders:
        return False
    return _is_old(checkpoint, policy, now)


def collectable(run: RunIndex, now: float) -> list[CheckpointMeta]:
    """The checkpoints that go, in the order of deletion: the oldest first, but children before their parents."""
    return [entry.meta for entry in _in_order_of_deletion(RunVerdicts(run, now).going)]


def verdicts_of_going(run: RunIndex, now: float, most: int) -> list[Verdict]:
    """The verdicts on the first checkpoints that go, in the order of deletion."""
    run_verdicts = RunVerdicts(run, now)
    return [run_verdicts.verdict(entry) for entry in _in_order_of_deletion(run_verdicts.going)[:most]]


def _in_order_of_deletion(going: Mapping[str, IndexEntry]) -> list[IndexEntry]:
    ordered: list[IndexEntry] = []
    seen: set[str] = set()
    for oldest in sorted(going.values(), key=by_rank):
        unordered = [(oldest, False)]
        while unordered:
            entry, is_after_children = unordered.pop()
            if is_after_children:
                ordered.append(entry)
            elif entry.id not in seen:
                seen.add(entry.id)
                unordered.append((entry, True))
                unordered += [(child, False) for child in entry.children if child.id in going]
    return ordered


def verdicts(run: RunIndex, now: float) -> list[Verdict]:
    """What a collection at this time would do with each checkpoint of the run, the newest first."""
    run_verdicts = RunVerdicts(run, now)
    return [run_verdicts.verdict(entry) for entry in reversed(run.ranked)]


def due_at(run: RunIndex, now: float) -> float:
    """When the next collection of an unchanged run may delete something."""
    if not run.ranked:
        return inf
    if _is_clock_behind(run, now):
        return run.ranked[-1].meta.created_at
    place = _first_not_old(run, now)
    if place == len(run.by_age):
        return inf
    # Rounded down: too early costs a look, too late would keep a checkpoint for a tick.
    return nextafter(run.by_age[place].meta.created_at + run.policy.max_age_seconds, -inf)


class RunVerdicts:
    """The verdicts on one run at one time."""

    def __init__(self, run: RunIndex, now: float) -> None:
        self.run = run
        self.now = now
        self.policy = run.policy
        self.is_clock_behind = _is_clock_behind(run, now)
        self.newest = run.latest_restorable()
        self.surplus = {one.id: one for one in self._surplus()}
        """The checkpoints that have enough newer ones, by id."""
        self.old = {one.id: one for one in self._old()}
        """The checkpoints that are too old, by id."""
        candidates = {**self.surplus, **self.old}
        self.going = {id_: one for id_, one in candidates.items() if self._protection(one) is None}
        """The checkpoints that go, by id."""
        self._keep_parents()

    @cached_property
    def best(self) -> frozenset[str]:
        return frozenset(one.id for one in self.run.best[: self.policy.keep_best_n])

    @cached_property
    def verified(self) -> IndexEntry | None:
        """The restorable checkpoint that was verified last."""
        verified = (one for one in self.run.ranked if one.is_restorable and one.meta.verified_at is not None)
        return max(verified, key=lambda one: (one.meta.verified_at or 0.0, one.rank), default=None)

    @cached_property
    def first_of_seconds(self) -> frozenset[str]:
        """The first checkpoint that is offered of each interval of `keep_every_seconds`."""
        seconds = self.policy.keep_every_seconds
        if seconds is None:
            return frozenset()
        # Each interval keeps the last one put in, which is its oldest.
        newest_first = (one for one in reversed(self.run.by_age) if one.is_offered)
        return frozenset({one.meta.created_at // seconds: one.id for one in newest_first}.values())

    def _old(self) -> Iterator[IndexEntry]:
        for entry in self.run.by_age[: _first_not_old(self.run, self.now)]:
            # Latest is one checkpoint, by epoch and step; the step alone may be reached in several epochs.
            latest_step = entry.meta.step if entry is self.newest else entry.meta.step + 1
            if is_gc_eligible(entry.meta, self.policy, latest_step, self.now, entry.id in self.best):
                yield entry

    def _surplus(self) -> Iterator[IndexEntry]:
        """What is older than the newest restorable checkpoints that the policy keeps.

        A failed save is surplus after as many newer checkpoints of any state: while every save fails, nothing newer is
        restorable.
        """
        ranked, most = self.run.ranked, self.policy.max_checkpoints_per_run
        if len(ranked) <= most:
            return
        place = len(ranked)
        kept = 0
        while place > 0 and kept < most:
            place -= 1
            kept += ranked[place].is_restorable
        yield from (one for one in ranked[:place] if one.meta.state in COLLECTABLE)
        yield from (one for one in ranked[place : len(ranked) - most] if one.meta.is_failed_save)

    def _protection(self, entry: IndexEntry) -> RetentionRule | None:
        """The rule that keeps a checkpoint although there are newer ones or it is old; None if there is none."""
        rules = (
            (RetentionRule.WRITING, entry.meta.state is CheckpointState.CREATING),
            (RetentionRule.CLOCK, self.is_clock_behind),
            (RetentionRule.PINNED, entry.meta.pinned),
            (RetentionRule.HELD, self.run.is_used(entry)),
            (RetentionRule.NEWEST, entry is self.newest),
            (RetentionRule.VERIFIED, entry is self.verified),
            (RetentionRule.BEST, entry.id in self.best),
        )
        return next((rule for rule, holds in rules if holds), None) or self._interval_rule(entry)

    def _interval_rule(self, entry: IndexEntry) -> RetentionRule | None:
        """Whether the checkpoint is the first one of an interval of steps or seconds."""
        if not entry.is_offered:
            return None
        steps = self.policy.keep_every_steps
        if steps is not None and self._is_first_of_steps(entry, steps):
            return RetentionRule.STEPS
        return RetentionRule.SECONDS if entry.id in self.first_of_seconds else None

    def _is_first_of_steps(self, entry: IndexEntry, steps: int) -> bool:
        begin = entry.meta.step // steps * steps
        if begin == 0:
            return False
        return self.run.offered[bisect_left(self.run.offered, begin, key=lambda one: one.meta.step)] is entry

    def _keep_parents(self) -> None:
        """Take out the parents of what stays, until no more follow."""
        unseen = list(self.going.values())
        while unseen:
            entry = unseen.pop()
            if entry.id in self.going and any(child.id not in self.going for child in entry.children):
                del self.going[entry.id]
                if entry.parent is not None:
                    unseen.append(entry.parent)

    def verdict(self, entry: IndexEntry) -> Verdict:
        is_kept = entry.id not in self.going
        rule = self._rule_of_kept(entry) if is_kept else self._rule_of_going(entry)
        return Verdict(entry.id, is_kept, rule, self._reason(rule, entry), entry.meta.size_bytes)

    def _rule_of_going(self, entry: IndexEntry) -> RetentionRule:
        return RetentionRule.SURPLUS if entry.id in self.surplus else RetentionRule.OLD

    def _rule_of_kept(self, entry: IndexEntry) -> RetentionRule:
        protection = self._protection(entry)
        if protection is not None:
            return protection
        return RetentionRule.PARENT if entry.id in self.surplus or entry.id in self.old else RetentionRule.RECENT

    def _reason(self, rule: RetentionRule, entry: IndexEntry) -> str:
        policy = self.policy
        most = policy.max_checkpoints_per_run
        order = "lowest" if policy.metric_ascending else "highest"
        newer = "exist, and its save failed" if entry.meta.is_failed_save else "are restorable"
        needed_by = named([one.id for one in entry.children if one.id not in self.going])
        return {
            RetentionRule.WRITING: "being written",
            RetentionRule.CLOCK: "the clock has gone back behind the newest checkpoint of the run",
            RetentionRule.PINNED: "pinned",
            RetentionRule.HELD: f"used by {named(self.run.users(entry))}",
            RetentionRule.NEWEST: "the newest restorable checkpoint",
            RetentionRule.VERIFIED: "the last verified checkpoint",
            RetentionRule.BEST: f"one of the {policy.keep_best_n} with the {order} {policy.metric_key}",
            RetentionRule.STEPS: f"the first of an interval of {policy.keep_every_steps} steps",
            RetentionRule.SECONDS: f"the first of an interval of {policy.keep_every_seconds} s",
            RetentionRule.PARENT: f"needed by {needed_by}",
            RetentionRule.RECENT: _why_recent(policy),
            RetentionRule.OLD: f"older than {policy.max_age_seconds} s",
            RetentionRule.SURPLUS: f"{most} newer ones {newer}",
        }[rule]


def _why_recent(policy: GcPolicy) -> str:
    most = policy.max_checkpoints_per_run
    few = "" if most >= UNLIMITED else f"fewer than {most} newer ones are restorable"
    young = "" if policy.max_age_seconds == inf else "not too old"
    return ", and ".join(filter(None, (young, few))) or "the policy limits neither number nor age"


def _is_clock_behind(run: RunIndex, now: float) -> bool:
    return bool(run.ranked) and run.ranked[-1].meta.created_at > now


def _is_old(meta: CheckpointMeta, policy: GcPolicy, now: float) -> bool:
    return now - meta.created_at > policy.max_age_seconds


def _first_not_old(run: RunIndex, now: float) -> int:
    """The place in `by_age` behind all checkpoints that are too old."""
    return bisect_left(run.by_age, 1, key=lambda one: not _is_old(one.meta, run.policy, now))
