"""Whose copy of a shard somebody has found to be bad, until who has it has looked at it.

Law: a copy that is in doubt counts for no plan before its holder has looked at it again, whoever hears of the doubt and
whoever dies meanwhile. It may have been damaged on its way only; then nothing follows but the look.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from forged.data.plan import DataRedistributionPlan
from forged.data.shards import Indices

DOUBTED_MAX = 100_000
"""So many copies are remembered at once."""
ASKED_MAX = 1 << 14
"""So many are asked for in one answer."""


class Doubts:
    """Those about the copies of one job."""

    def __init__(self) -> None:
        self._of: dict[str, set[int]] = {}
        """By who has the copies."""

    def add(self, holder: str, shard: int) -> None:
        """Somebody has found this copy to be bad."""
        if sum(map(len, self._of.values())) < DOUBTED_MAX:
            self._of.setdefault(holder, set()).add(shard)

    def of(self, holder: str) -> Indices:
        """What it has to look at, in order, or the first of it."""
        return np.array(sorted(self._of.get(holder, ()))[:ASKED_MAX], np.int64)

    def looked_at(self, holder: str, shards: Indices) -> None:
        """It has, and offers those no more that were bad."""
        left = self._of.pop(holder, set()).difference(shards.tolist())
        if left:
            self._of[holder] = left

    def counted_on(self, plan: DataRedistributionPlan) -> Iterator[tuple[str, int]]:
        """The copies in doubt that are to be held by who holds them now."""
        for place, worker in enumerate(plan.workers[: plan.world_size]):
            for shard in sorted(self._of.get(worker.id, ())):
                if plan.owners[shard] == place or bool((plan.replicas[:, shard] == place).any()):
                    yield worker.id, shard
