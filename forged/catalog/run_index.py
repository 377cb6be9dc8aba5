"""The checkpoints of one run, kept in the orders in which they are asked for.

Invariants:
- `is_restorable` is true of a checkpoint that is complete and whose parents are complete down to a root.
- A checkpoint is in `ranked` and `by_age` as long as it is not deleted; in `offered` if it is restorable and not
  abandoned; in `best` if it is restorable and its metric is a number.
- What a checkpoint is sorted by never changes while it is in that order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import isnan
from operator import attrgetter
from typing import Any

import msgspec

from forged.catalog.model import CheckpointMeta, CheckpointState, GcPolicy

USERS_MAX = 100
Rank = tuple[bool, int, int, float, str]
ModelsOf = Callable[[str], Iterator[str]]
"""The names of the models that refer to a checkpoint, and keep it."""
Key = Callable[["IndexEntry"], Any]


def no_models(checkpoint_id: str) -> Iterator[str]:
    """Without a model registry no model refers to any checkpoint."""
    return iter(())


class IndexEntry:
    """One checkpoint in the index: its record, its links, and what it is sorted by."""

    __slots__ = ("children", "is_offered", "is_restorable", "meta", "metric", "parent", "rank")

    def __init__(self, meta: CheckpointMeta, metric: float | None) -> None:
        self.meta = meta
        self.metric = metric
        """The policy's metric, negated if a higher value is better; None if it is missing or NaN."""
        self.rank = rank_of(meta)
        self.parent: IndexEntry | None = None
        self.children: list[IndexEntry] = []
        self.is_restorable = False
        self.is_offered = False

    @property
    def id(self) -> str:
        return self.meta.checkpoint_id

    def chain(self) -> list[IndexEntry]:
        """From the root to this checkpoint, as far as it is known."""
        links = [self]
        while (parent := links[-1].parent) is not None:
            links.append(parent)
        return links[::-1]


def rank_of(meta: CheckpointMeta) -> Rank:
    """The order of "latest": by epoch and step, then by time; abandoned checkpoints come before all other ones."""
    return not meta.abandoned, meta.epoch, meta.step, meta.created_at, meta.checkpoint_id


def by_step(entry: IndexEntry) -> tuple[int, float, str]:
    """The order of restore points of one kind."""
    return entry.meta.step, entry.meta.created_at, entry.meta.checkpoint_id


def by_age(entry: IndexEntry) -> tuple[float, str]:
    return entry.meta.created_at, entry.meta.checkpoint_id


def by_metric(entry: IndexEntry) -> tuple[float, int, int, float, str]:
    """The best first; of equals the latest."""
    meta = entry.meta
    assert entry.metric is not None
    return entry.metric, -meta.epoch, -meta.step, -meta.created_at, meta.checkpoint_id


by_rank: Callable[[IndexEntry], Rank] = attrgetter("rank")


class RunIndex:
    """All checkpoints of one run that are not deleted."""

    def __init__(self, policy: GcPolicy, models_of: ModelsOf = no_models) -> None:
        self.policy = policy
        self._models_of = models_of
        self.entries: dict[str, IndexEntry] = {}
        self.ranked: list[IndexEntry] = []
        self.by_age: list[IndexEntry] = []
        self.offered: list[IndexEntry] = []
        """By step and time."""
        self.best: list[IndexEntry] = []
        self.size_bytes = 0

    def users(self, entry: IndexEntry) -> list[str]:
        """Who keeps a checkpoint: its holders, and the first of the models that refer to it."""
        return [*entry.meta.holders, *islice(self._models_of(entry.id), USERS_MAX)]

    def shown(self, entry: IndexEntry) -> CheckpointMeta:
        """The record as callers see it: the models that keep the checkpoint are among its holders."""
        users = self.users(entry)
        is_stored = len(users) == len(entry.meta.holders)
        return entry.meta if is_stored else msgspec.structs.replace(entry.meta, holders=tuple(users))

    def is_used(self, entry: IndexEntry) -> bool:
        return bool(entry.meta.holders) or next(self._models_of(entry.id), None) is not None

    def load(self, records: Iterable[CheckpointMeta]) -> None:
        """Take in many records at once; their parents may come after them."""
        for meta in records:
            self.entries[meta.checkpoint_id] = IndexEntry(meta, self._metric_of(meta))
            self.size_bytes += meta.size_bytes
        self.ranked = sorted(self.entries.values(), key=by_rank)
        self.by_age = sorted(self.entries.values(), key=by_age)
        for entry in self.entries.values():
            self._link(entry)
        sound = [entry for entry in self.ranked if entry.meta.parent_id is None]
        while sound:
            entry = sound.pop()
            if entry.meta.state is CheckpointState.COMPLETE:
                entry.is_restorable = True
                entry.is_offered = not entry.meta.abandoned
                sound += entry.children
        self.offered = sorted((entry for entry in self.ranked if entry.is_offered), key=by_step)
        self._rank_by_metric()

    def set_policy(self, policy: GcPolicy) -> None:
        """Replace the policy, and with it the metric by which checkpoints are ranked."""
        self.policy = policy
        for entry in self.entries.values():
            entry.metric = self._metric_of(entry.meta)
        self._rank_by_metric()

    def _rank_by_metric(self) -> None:
        rankable = (entry for entry in self.ranked if entry.is_restorable and entry.metric is not None)
        self.best = sorted(rankable, key=by_metric)

    def add(self, meta: CheckpointMeta) -> None:
        """Take in a checkpoint whose parent, if it has one, is there."""
        entry = self.entries[meta.checkpoint_id] = IndexEntry(meta, self._metric_of(meta))
        self._link(entry)
        self.size_bytes += meta.size_bytes
        insort(self.ranked, entry, key=by_rank)
        insort(self.by_age, entry, key=by_age)
        self._settle(entry)

    def put(self, meta: CheckpointMeta) -> None:
        """Replace the record of a checkpoint; step, epoch, time, parent and metrics stay."""
        entry = self.entries[meta.checkpoint_id]
        self.size_bytes += meta.size_bytes - entry.meta.size_bytes
        rank = rank_of(meta)
        if rank != entry.rank:
            _remove(self.ranked, entry, by_rank)
            entry.rank = rank
            insort(self.ranked, entry, key=by_rank)
        entry.meta = meta
        self._settle(entry)

    def relink(self, meta: CheckpointMeta) -> None:
        """Replace the record of a checkpoint that builds on another one than before, or on none."""
        entry = self.entries[meta.checkpoint_id]
        if entry.parent is not None:
            entry.parent.children.remove(entry)
        entry.meta = msgspec.structs.replace(entry.meta, parent_id=meta.parent_id)
        self._link(entry)
        self.put(meta)

    def remove(self, checkpoint_id: str) -> None:
        """Remove a checkpoint that has been deleted."""
        entry = self.entries.pop(checkpoint_id)
        self.size_bytes -= entry.meta.size_bytes
        _remove(self.ranked, entry, by_rank)
        _remove(self.by_age, entry, by_age)
        if entry.is_restorable and entry.metric is not None:
            _remove(self.best, entry, by_metric)
        if entry.is_offered:
            _remove(self.offered, entry, by_step)
        if entry.parent is not None:
            entry.parent.children.remove(entry)

    def latest(self) -> IndexEntry | None:
        """The latest complete checkpoint that is not abandoned, whether or not it can be restored."""
        return next((one for one in self._newest_first() if one.meta.state is CheckpointState.COMPLETE), None)

    def latest_restorable(self) -> IndexEntry | None:
        """The latest checkpoint that can be restored; one that is not abandoned, if there is any."""
        return next((one for one in reversed(self.ranked) if one.is_restorable), None)

    def beyond(self, entry: IndexEntry) -> list[IndexEntry]:
        """The checkpoints, not abandoned yet, that come after this one in the order of "latest"."""
        place = (True, *entry.rank[1:])
        return [one for one in self.ranked[self.place_of(place) :] if one is not entry]

    def place_of(self, rank: Rank) -> int:
        """The place in `ranked` of the checkpoint with this rank, or where it would be."""
        return bisect_left(self.ranked, rank, key=by_rank)

    def _newest_first(self) -> Iterator[IndexEntry]:
        for entry in reversed(self.ranked):
            if entry.meta.abandoned:
                return
            yield entry

    def _link(self, entry: IndexEntry) -> None:
        parent_id = entry.meta.parent_id
        entry.parent = None if parent_id is None else self.entries.get(parent_id)
        if entry.parent is not None:
            entry.parent.children.append(entry)

    def _settle(self, changed: IndexEntry) -> None:
        """Decide anew which of a checkpoint and its descendants are restorable and offered."""
        unsettled = [changed]
        while unsettled:
            entry = unsettled.pop()
            is_restorable = _is_restorable(entry)
            if is_restorable != entry.is_restorable:
                entry.is_restorable = is_restorable
                unsettled += entry.children
                if entry.metric is not None:
                    _set_member(self.best, entry, by_metric, is_member=is_restorable)
            is_offered = is_restorable and not entry.meta.abandoned
            if is_offered != entry.is_offered:
                entry.is_offered = is_offered
                _set_member(self.offered, entry, by_step, is_member=is_offered)

    def _metric_of(self, meta: CheckpointMeta) -> float | None:
        value = meta.metrics.get(self.policy.metric_key)
        if value is None or isnan(value):
            return None
        return value if self.policy.metric_ascending else -value


def _is_restorable(entry: IndexEntry) -> bool:
    if entry.meta.state is not CheckpointState.COMPLETE:
        return False
    return entry.meta.parent_id is None or (entry.parent is not None and entry.parent.is_restorable)


def _set_member(order: list[IndexEntry], entry: IndexEntry, key: Key, *, is_member: bool) -> None:
    if is_member:
        insort(order, entry, key=key)
    else:
        _remove(order, entry, key)


def _remove(order: list[IndexEntry], entry: IndexEntry, key: Key) -> None:
    place = bisect_left(order, key(entry), key=key)
    assert order[place] is entry
    del order[place]
