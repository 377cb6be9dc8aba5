"""The data part of one rescale attempt, as values: offers, the transfer plan, and its progress.

Invariants:
- `Assignment` and `Draft` are immutable.
- An offer is kept as it arrived, in parts, and sorted only when it is read, because sorting may take long. Its size is
  bounded by the number of shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forged.data.columns import NOBODY, Column
from forged.data.messages import NAMED_MAX, TransferTotals
from forged.data.model import Indices, TransferPace
from forged.data.placement.plan import DataRedistributionPlan
from forged.elastic.model import WorkerId

NO_SHARDS = np.empty(0, np.int64)
Marks = npt.NDArray[np.uint64]
"""The mark of each copy, of its checksum; 0 where unknown."""


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """The owner and the replicas of each shard in the world of one generation, as places in `workers`."""

    generation: int
    workers: tuple[WorkerId, ...]
    owners: Column
    replicas: Column
    weights: Mapping[WorkerId, float] = field(default_factory=dict)
    """The share of the data that each worker should hold; 1 for a worker that is not named."""

    @classmethod
    def empty(cls, shards: int) -> Assignment:
        """The assignment before the first world."""
        return cls(0, (), np.full(shards, NOBODY, np.int32), np.empty((0, shards), np.int32))


@dataclass(slots=True)
class Offer:
    """The copies that one worker says it holds."""

    parts: list[Indices] = field(default_factory=list)
    marks: list[Marks] = field(default_factory=list)
    """The checksum marks of the copies in each part."""
    bytes: int = 0
    bytes_per_second: float = 0.0
    weight: float = 1.0

    @property
    def ids(self) -> Indices:
        """The offered shards in order, each once."""
        return self.copies[0]

    @property
    def copies(self) -> tuple[Indices, Marks]:
        """The offered shards in order, each once, and the mark of each copy."""
        ids = self.parts[0] if len(self.parts) == 1 else np.concatenate([NO_SHARDS, *self.parts])
        marks = self.marks[0] if len(self.marks) == 1 else np.concatenate([NO_SHARDS.view(np.uint64), *self.marks])
        if bool(np.all(ids[1:] > ids[:-1])):
            return ids, marks
        # The latest statement about a shard counts.
        in_order, places = np.unique(ids[::-1], return_index=True)
        return in_order, marks[::-1][places]

    def add(self, part: Indices, shards: int, marks: Marks | None = None) -> None:
        """Add a part, which may repeat shards of earlier parts."""
        if not part.size:
            return
        self.parts.append(part)
        self.marks.append(np.zeros(part.size, np.uint64) if marks is None else marks)
        if sum(one.size for one in self.parts) > 2 * shards:
            ids, known = self.copies
            self.parts, self.marks = [ids], [known]


class FinishedTransfers(NamedTuple):
    """What one member has fetched and verified."""

    transfers: int
    bytes: int
    took_s: float = 0.0


class LostShards(NamedTuple):
    """Shards without any source: their number, the first of them, and why."""

    number: int = 0
    shards: tuple[int, ...] = ()
    reason: str = ""
    last_held_by: tuple[str, ...] = ()
    """The workers that held them in the last world and are gone."""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """The plan that follows from the offers of all members."""

    plan: DataRedistributionPlan
    totals: TransferTotals
    bytes_per_sample: float
    pace: TransferPace | None
    lost: LostShards
    """Shards that no member holds and no origin gives."""
    assignment: Assignment
    """Takes effect with the commit, which gives it its generation."""
    outvoted: Mapping[WorkerId, Indices] = field(default_factory=dict)
    """The shards of which a worker holds different bytes than most other workers."""


@dataclass(slots=True, eq=False)
class DataAttempt:
    """The data part of one rescale attempt."""

    number: int
    target: tuple[WorkerId, ...]
    """The members of the wanted world, by rank."""
    draining: tuple[WorkerId, ...]
    """Workers that leave after the commit, and serve their shards until then."""
    offers: dict[WorkerId, Offer] = field(default_factory=dict)
    partial_offers: dict[WorkerId, Offer] = field(default_factory=dict)
    is_drafted: bool = False
    is_abandoned: bool = False
    """Whether another attempt was requested, so that this one ends without a commit."""
    is_aborted: bool = False
    """Whether the job was aborted meanwhile."""
    plan: DataRedistributionPlan | None = None
    """None before the draft, and when shards are lost."""
    totals: TransferTotals = field(default_factory=TransferTotals)
    lost_in_plan: LostShards = field(default_factory=LostShards)
    """Shards that no member holds and no origin gives."""
    lost_at_origin: dict[str, LostShards] = field(default_factory=dict)
    """Shards that no member holds and the origin refuses, by the member that needs them."""
    planned_at: float = 0.0
    took_s: float | None = None
    """How long the transfers took; None before all members have finished."""
    outvoted: Mapping[WorkerId, Indices] = field(default_factory=dict)
    """The shards of which a worker holds different bytes than most other workers."""
    replaced: Mapping[WorkerId, Indices] = field(default_factory=dict)
    """Outvoted copies that their workers drop, to fetch the majority's bytes."""
    bad_copies: set[tuple[str, int]] = field(default_factory=set)
    """Worker and shard of each copy that was reported as bad."""
    finished: dict[str, FinishedTransfers] = field(default_factory=dict)
    cause: int = 0
    """The id of the fact that the attempt began."""
    generation: int = 0
    """The generation of the world before the attempt."""

    @property
    def members(self) -> tuple[WorkerId, ...]:
        """The workers that offer shards: the wanted world, then those that only serve."""
        return tuple(dict.fromkeys((*self.target, *self.draining)))

    @property
    def waiting_for(self) -> list[WorkerId]:
        """The members that have not offered yet."""
        return [worker for worker in self.members if worker not in self.offers]

    @property
    def lacks_shards(self) -> bool:
        """Whether all members have offered and some shards still have no source; not when the attempt has ended."""
        has_ended = self.is_abandoned or self.is_aborted
        return self.is_drafted and not has_ended and (self.plan is None or bool(self.lost_at_origin))

    @property
    def lost(self) -> LostShards:
        """All lost shards. The number is a lower bound when members report more shards than they name."""
        losses = [lost for lost in (self.lost_in_plan, *self.lost_at_origin.values()) if lost.number]
        shards = sorted({shard for lost in losses for shard in lost.shards})
        reason = next((lost.reason for lost in losses if lost.reason), "")
        holders = dict.fromkeys(worker for lost in losses for worker in lost.last_held_by)
        # The owner and the replicas of one shard may each report it.
        number = max([len(shards), *(lost.number for lost in losses)])
        return LostShards(number, tuple(shards[:NAMED_MAX]), reason, tuple(holders)[:NAMED_MAX])

    @property
    def differing(self) -> Indices:
        """The shards of which workers hold different bytes, in order."""
        return np.unique(np.concatenate([NO_SHARDS, *self.outvoted.values()]))

    @property
    def is_over(self) -> bool:
        """Whether every member of the wanted world has what it needs."""
        return self.plan is not None and len(self.finished) == len(self.target)
