"""Whose copy of a shard somebody has found to be bad, until who has it has looked at it.

Law: a copy that is in doubt counts for no plan before its holder has looked at it again, whoever hears of the doubt and
whoever dies meanwhile, the daemon or the holder, and whoever comes into the holder's place. What a worker does not say
that it holds is no copy. It may have been damaged on its way only; then nothing follows but the look. Nothing is
forgotten otherwise but what there is no room for, and that is said.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np

from forged.data.dataset import Indices
from forged.data.placement.plan import DataRedistributionPlan
from forged.elastic.model import WorkerId

DOUBTED_MAX = 100_000
"""So many copies are remembered at once."""
ASKED_MAX = 1 << 14
"""So many are asked for in one answer."""

_NOTHING: Indices = np.empty(0, np.int64)


class SuspectCopies:
    """Those about the copies of one job; `known` are those that were written down."""

    def __init__(self, known: Iterable[tuple[str, int]] = ()) -> None:
        self._of: dict[str, set[int]] = {}
        """By who has the copies."""
        for holder, shard in known:
            self._of.setdefault(holder, set()).add(shard)
        self._seen: dict[WorkerId, set[int]] = {}
        """What newcomers have looked at, one of whom may have come into the place of somebody who is gone."""
        self._changes: dict[tuple[str, int], bool] = {}
        """Whether a copy is in doubt, where that is not written down yet."""

    def add(self, holder: str, shard: int) -> bool:
        """Somebody has found this copy to be bad; tells whether that is remembered."""
        if shard in self._of.get(holder, ()):
            return True
        if sum(map(len, self._of.values())) >= DOUBTED_MAX:
            return False
        self._of.setdefault(holder, set()).add(shard)
        self._changes[holder, shard] = True
        return True

    def among(self, holder: str, held: Indices) -> Indices:
        """What it has to look at of what it says that it holds, in order, or the first of it."""
        return _common(self._of.get(holder, ()), held)[:ASKED_MAX]

    def inherited(self, newcomer: WorkerId, looked_at: Indices, held: Indices, here: Collection[str]) -> Indices:
        """What a newcomer has to look at, in order, or the first of it, as it may have come with the shards of somebody
        who is not here any more; once it has, it is not asked again."""
        gone = {shard for holder, shards in self._of.items() if holder not in here for shard in shards}
        if not gone:
            self._seen.clear()
            return _NOTHING
        self._seen = {worker: seen for worker, seen in self._seen.items() if worker.id in here}
        if looked := gone.intersection(looked_at.tolist()):
            self._seen.setdefault(newcomer, set()).update(looked)
        return _common(gone - self._seen.get(newcomer, set()), held)[:ASKED_MAX]

    def looked_at(self, holder: str, shards: Indices) -> None:
        """It has, and offers those no more that were bad."""
        self._drop(holder, self._of.get(holder, set()).intersection(shards.tolist()))

    def concern(self, holder: str) -> bool:
        """Whether any of its copies is in doubt."""
        return holder in self._of

    def keep_only(self, holder: str, held: Indices) -> None:
        """This is all that it holds."""
        doubted = self._of.get(holder, set())
        self._drop(holder, doubted.difference(_common(doubted, held).tolist()))

    def forget_all_but(self, holders: Collection[str]) -> int:
        """Forget what is known of others; tells of how many copies."""
        others = {holder: list(shards) for holder, shards in self._of.items() if holder not in holders}
        for holder, shards in others.items():
            self._drop(holder, shards)
        return sum(map(len, others.values()))

    def changes(self) -> dict[tuple[str, int], bool]:
        """Whether these copies are in doubt, which is to be written down now."""
        changes, self._changes = self._changes, {}
        return changes

    def counted_on(self, plan: DataRedistributionPlan) -> Iterator[tuple[str, int]]:
        """The copies in doubt that are to be held by who holds them now."""
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


def _common(doubted: Collection[int], held: Indices) -> Indices:
    """Those in both, in order. Much may be held, and hardly ever is anything in doubt."""
    if not doubted:
        return _NOTHING
    return np.intersect1d(np.fromiter(doubted, np.int64, len(doubted)), held)
