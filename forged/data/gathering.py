"""What the members of an attempt say about their training data, and what follows from it, as values.

Law: an assignment and a draft never change. What a worker has said is kept as it was said, in parts, and put in order
when somebody asks, which may take long: so not when it is heard, and in no more room than the shards need.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from forged.data.columns import NOBODY, Column
from forged.data.messages import TransferTotals
from forged.data.model import TransferPace
from forged.data.plan import DataRedistributionPlan
from forged.data.shards import Indices
from forged.elastic.model import WorkerId

NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Who owns which shard, and who has further copies, as places in `workers`, in the world of a generation."""

    generation: int
    workers: tuple[WorkerId, ...]
    owners: Column
    replicas: Column

    @classmethod
    def nobody(cls, shards: int) -> Assignment:
        """Before the first world."""
        return cls(0, (), np.full(shards, NOBODY, np.int32), np.empty((0, shards), np.int32))


@dataclass(slots=True)
class Holdings:
    """What one worker has said that it holds, in parts."""

    parts: list[Indices] = field(default_factory=list)
    bytes: int = 0
    bytes_per_second: float = 0.0

    @property
    def ids(self) -> Indices:
        """All of it, each shard once, in their order."""
        return _in_order(self.parts[0] if len(self.parts) == 1 else np.concatenate([NOTHING, *self.parts]))

    def add(self, part: Indices, shards: int) -> None:
        """Another part, of which some may have been said before: what is kept grows no further than with the shards."""
        if not part.size:
            return
        self.parts.append(part)
        if sum(one.size for one in self.parts) > 2 * shards:
            self.parts = [self.ids]


class Finished(NamedTuple):
    """What a member has verified that it needed: how many transfers and bytes, and how long that took."""

    transfers: int
    bytes: int
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """What follows from all that the members of an attempt have said."""

    plan: DataRedistributionPlan
    totals: TransferTotals
    bytes_per_sample: float
    pace: TransferPace | None
    lost: int
    """How many shards nobody has, though they cannot be had again."""
    lost_shards: tuple[int, ...]
    """The first of them."""


@dataclass(slots=True, eq=False)
class Gathering:
    """What the members of one attempt have said, and what follows from it."""

    attempt: int
    target: tuple[WorkerId, ...]
    """The wanted world, by rank."""
    leaving: tuple[WorkerId, ...]
    """Who goes behind the commit; who is not in the target serves what it holds until then."""
    said: dict[WorkerId, Holdings] = field(default_factory=dict)
    partly: dict[WorkerId, Holdings] = field(default_factory=dict)
    """Of those who have not said all of it yet."""
    is_drafted: bool = False
    plan: DataRedistributionPlan | None = None
    """None while nothing is planned, and where some shards are with nobody."""
    totals: TransferTotals = field(default_factory=TransferTotals)
    lost: int = 0
    lost_shards: tuple[int, ...] = ()
    began_at: float = 0.0
    """When it was settled what has to travel."""
    took_s: float | None = None
    """How long it took until all had it; None while some have not."""
    bad_copies: set[tuple[str, int]] = field(default_factory=set)
    """Whose copy of which shard was found to be bad."""
    finished: dict[str, Finished] = field(default_factory=dict)
    """Of who has verified what it needs."""

    @property
    def waiting_for(self) -> list[WorkerId]:
        """Who has not said what it holds."""
        return [worker for worker in self.members if worker not in self.said]

    @property
    def members(self) -> tuple[WorkerId, ...]:
        """Who says what it holds: the wanted world, and then those who only serve."""
        return tuple(dict.fromkeys((*self.target, *self.leaving)))

    @property
    def lacks_shards(self) -> bool:
        """Whether all have said what they hold, and that is not all that there is."""
        return self.plan is None and self.is_drafted

    @property
    def is_over(self) -> bool:
        """Whether everybody has what it needs."""
        return self.plan is not None and len(self.finished) == len(self.target)


def _in_order(ids: Indices) -> Indices:
    """Each of them once, in their order, as they mostly are already."""
    return ids if bool(np.all(ids[1:] > ids[:-1])) else np.unique(ids)
