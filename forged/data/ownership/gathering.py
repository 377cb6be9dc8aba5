"""What the members of an attempt say about their training data, and what follows from it, as values.

Law: an assignment and a draft never change. What a worker has said is kept as it was said, in parts, and put in order
when somebody asks, which may take long: so not when it is heard, and in no more room than the shards need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from forged.data.columns import NOBODY, Column
from forged.data.dataset import Indices
from forged.data.messages import NAMED_MAX, TransferTotals
from forged.data.model import TransferPace
from forged.data.ownership.conflicting_copies import Marks
from forged.data.placement.plan import DataRedistributionPlan
from forged.elastic.model import WorkerId

NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Who owns which shard, and who has further copies, as places in `workers`, in the world of a generation."""

    generation: int
    workers: tuple[WorkerId, ...]
    owners: Column
    replicas: Column
    weights: Mapping[WorkerId, float] = field(default_factory=dict)
    """How much of the data each should hold, in proportion; 1 for who is not named."""

    @classmethod
    def nobody(cls, shards: int) -> Assignment:
        """Before the first world."""
        return cls(0, (), np.full(shards, NOBODY, np.int32), np.empty((0, shards), np.int32))


@dataclass(slots=True)
class Holdings:
    """What one worker has said that it holds, in parts."""

    parts: list[Indices] = field(default_factory=list)
    marks: list[Marks] = field(default_factory=list)
    """What the copies in each part are said to be."""
    bytes: int = 0
    bytes_per_second: float = 0.0
    weight: float = 1.0

    @property
    def ids(self) -> Indices:
        """All of it, each shard once, in their order."""
        return self.copies[0]

    @property
    def copies(self) -> tuple[Indices, Marks]:
        """The same, and what each of them is said to be."""
        ids = self.parts[0] if len(self.parts) == 1 else np.concatenate([NOTHING, *self.parts])
        marks = self.marks[0] if len(self.marks) == 1 else np.concatenate([NOTHING.view(np.uint64), *self.marks])
        if bool(np.all(ids[1:] > ids[:-1])):
            return ids, marks
        # What was said last of a shard is so.
        in_order, places = np.unique(ids[::-1], return_index=True)
        return in_order, marks[::-1][places]

    def add(self, part: Indices, shards: int, marks: Marks | None = None) -> None:
        """Another part, of which some may have been said before: what is kept grows no further than with the shards."""
        if not part.size:
            return
        self.parts.append(part)
        self.marks.append(np.zeros(part.size, np.uint64) if marks is None else marks)
        if sum(one.size for one in self.parts) > 2 * shards:
            ids, said = self.copies
            self.parts, self.marks = [ids], [said]


class Finished(NamedTuple):
    """What a member has verified that it needed: how many transfers and bytes, and how long that took."""

    transfers: int
    bytes: int
    took_s: float = 0.0


class Lack(NamedTuple):
    """Which shards cannot be had: how many, the first of them, and why, where there is more to say."""

    number: int = 0
    shards: tuple[int, ...] = ()
    reason: str = ""
    last_held_by: tuple[str, ...] = ()
    """Who had them in the last world, and is not there."""


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
    lost_by: tuple[str, ...]
    """Who had them in the last world, and is not there."""
    weights: Mapping[WorkerId, float]
    """How much of the data each should hold, in proportion; 1 for who is not named."""
    outvoted: Mapping[WorkerId, Indices] = field(default_factory=dict)
    """The shards of which a worker holds something else than most others."""


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
    is_left: bool = False
    """Whether another attempt was asked for, so that nothing more comes of this one."""
    is_aborted: bool = False
    """Whether the job was given up meanwhile."""
    plan: DataRedistributionPlan | None = None
    """None while nothing is planned, and where some shards are with nobody."""
    totals: TransferTotals = field(default_factory=TransferTotals)
    lost: Lack = field(default_factory=Lack)
    """What nobody has, though it cannot be had again."""
    refused: dict[str, Lack] = field(default_factory=dict)
    """What no worker has and the origin does not give, by who needs it."""
    began_at: float = 0.0
    """When it was settled what has to travel."""
    took_s: float | None = None
    """How long it took until all had it; None while some have not."""
    outvoted: Mapping[WorkerId, Indices] = field(default_factory=dict)
    """The shards of which a worker holds something else than most others."""
    replaced: Mapping[WorkerId, Indices] = field(default_factory=dict)
    """Those that it drops, to fetch what most others hold, where it is to hold them."""
    bad_copies: set[tuple[str, int]] = field(default_factory=set)
    """Whose copy of which shard was found to be bad."""
    finished: dict[str, Finished] = field(default_factory=dict)
    """Of who has verified what it needs."""
    cause: int = 0
    """The id of the fact that the attempt was begun."""
    generation: int = 0
    """Of the world before."""

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
        """Whether all have said what they hold, and that, with what the origin gives, is not all that there is."""
        return self.is_drafted and not self.is_left and (self.plan is None or bool(self.refused))

    @property
    def lack(self) -> Lack:
        """All that cannot be had; at least so many, where more are missing than are named and several need them."""
        lacks = [lack for lack in (self.lost, *self.refused.values()) if lack.number]
        shards = sorted({shard for lack in lacks for shard in lack.shards})
        reason = next((lack.reason for lack in lacks if lack.reason), "")
        by = dict.fromkeys(worker for lack in lacks for worker in lack.last_held_by)
        # Several may need the same shard: its owner, and who is to have a further copy.
        number = max([len(shards), *(lack.number for lack in lacks)])
        return Lack(number, tuple(shards[:NAMED_MAX]), reason, tuple(by)[:NAMED_MAX])

    @property
    def differing(self) -> Indices:
        """The shards of which workers hold something else than others, in their order."""
        return np.unique(np.concatenate([NOTHING, *self.outvoted.values()]))

    @property
    def is_over(self) -> bool:
        """Whether everybody has what it needs."""
        return self.plan is not None and len(self.finished) == len(self.target)
