"""Copies that were reported as bad and have to be verified by their holder.

Invariants:
- No plan counts on a suspect copy before its holder has verified it, also when the daemon or the holder restarts, or
  another worker takes the holder's place with its shards.
- A copy that its holder does not offer is no longer suspect.
- A verified copy is no longer suspect: the bytes may have been damaged in transit only.
- Otherwise a suspect is forgotten only for lack of space, and the caller is told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np

from forged.data.model import Indices
from forged.data.placement.plan import DataRedistributionPlan
from forged.elastic.model import WorkerId

SUSPECTS_MAX = 100_000
ASKED_MAX = 1 << 14
"""How many copies one answer asks a worker to verify."""

_NOTHING: Indices = np.empty(0, np.int64)


class SuspectCopies:
    """The suspect copies of one job; `known` are those that were stored."""

    def __init__(self, known: Iterable[tuple[str, int]] = ()) -> None:
        self._of: dict[str, set[int]] = {}
        """The shards, by holder."""
        for holder, shard in known:
            self._of.setdefault(holder, set()).add(shard)
        self._verified_by_newcomers: dict[WorkerId, set[int]] = {}
        """A newcomer may have the shards of a holder that is gone."""
        self._changes: dict[tuple[str, int], bool] = {}
        """Whether a copy is suspect, where that is not stored yet."""

    def add(self, holder: str, shard: int) -> bool:
        """Remember a suspect copy; returns False if there is no space."""
        if shard in self._of.get(holder, ()):
            return True
        if sum(map(len, self._of.values())) >= SUSPECTS_MAX:
            return False
        self._of.setdefault(holder, set()).add(shard)
        self._changes[holder, shard] = True
        return True

    def held_by(self, holder: str, held: Indices) -> Indices:
        """The first suspect copies among those that the holder offers, in order."""
        return _common(self._of.get(holder, ()), held)[:ASKED_MAX]

    def for_newcomer(self, newcomer: WorkerId, verified: Indices, held: Indices, here: Collection[str]) -> Indices:
        """The first copies that a newcomer has to verify, because it may have the shards of a holder that is gone.

        It is asked once for each.
        """
        gone = {shard for holder, shards in self._of.items() if holder not in here for shard in shards}
        if not gone:
            self._verified_by_newcomers.clear()
            return _NOTHING
        known = {worker: shards for worker, shards in self._verified_by_newcomers.items() if worker.id in here}
        self._verified_by_newcomers = known
        if now_verified := gone.intersection(verified.tolist()):
            known.setdefault(newcomer, set()).update(now_verified)
        return _common(gone - known.get(newcomer, set()), held)[:ASKED_MAX]

    def verified(self, holder: str, shards: Indices) -> None:
        """The holder has verified these copies, and dropped the bad ones."""
        self._drop(holder, self._of.get(holder, set()).intersection(shards.tolist()))

    def has_any(self, holder: str) -> bool:
        """Whether any copy of the holder is suspect."""
        return holder in self._of

    def keep_held(self, holder: str, held: Indices) -> None:
        """Forget the suspects that the holder does not hold."""
        suspects = self._of.get(holder, set())
        self._drop(holder, suspects.difference(_common(suspects, held).tolist()))

    def keep_holders(self, holders: Collection[str]) -> int:
        """Forget the suspects of all other holders; returns their number."""
        others = {holder: list(shards) for holder, shards in self._of.items() if holder not in holders}
        for holder, shards in others.items():
            self._drop(holder, shards)
        return sum(map(len, others.values()))

    def take_changes(self) -> dict[tuple[str, int], bool]:
        """The copies whose state has changed since the last call, and whether they are suspect; to be stored."""
        changes, self._changes = self._changes, {}
        return changes

    def used_by(self, plan: DataRedistributionPlan) -> Iterator[tuple[str, int]]:
        """The suspect copies that the plan leaves where they are."""
        for place, worker in enumerate(plan.workers[: plan.world_size]):
            for shard in sorted(self._of.get(worker.id, ())):
                if plan.owners[shard] == place or bool((plan.replicas[:, shard] == place).any()):
                    yield worker.id, shard

    def _drop(self, holder: str, shards: Iterable[int]) -> None:
        for shard in shards:
            self._of[holder].discard(shard)
            self._changes[holder, shard] = False
        if not self._of.get(holder, True):
            del self._of[holder]


def _common(suspects: Collection[int], held: Indices) -> Indices:
    """The suspects that are held, in order; fast in the usual case of none."""
    if not suspects:
        return _NOTHING
    return np.intersect1d(np.fromiter(suspects, np.int64, len(suspects)), held)
