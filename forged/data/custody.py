"""In whose custody each shard of a job is, and what has to travel when the workers change.

Law: what a worker holds is what it says, anew for every attempt, that it has verified; nobody is believed to hold what
he held once. A plan is made when all members have said it, belongs to that attempt, and holds from its commit on. A
shard that nobody has, and that cannot be had again, is named and never left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forged.data.columns import NOBODY, Column, Counts, count
from forged.data.messages import (
    NAMED_MAX,
    PAGE_SHARDS_MAX,
    DatasetSpec,
    HeldView,
    OwnersPage,
    TransferPart,
    TransferTotals,
)
from forged.data.model import SourceKind, TransferPace
from forged.data.plan import DataRedistributionPlan
from forged.data.planner import DataRedistributor
from forged.data.shards import Dataset
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import ClusterTopology, WorkerId
from forged.errors import RequestRefused

FURTHER_SOURCES_MAX = 3
"""So many workers are named from which a shard can be had, besides the one that is asked first."""
NO_SOURCE = -2
"""Where nobody else has a shard."""

Ids = npt.NDArray[np.int64]


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
    """What one worker has said that it holds."""

    ids: Ids
    bytes: int = 0
    bytes_per_second: float = 0.0


@dataclass(slots=True, eq=False)
class Gathering:
    """What the members of one attempt have said, and what follows from it."""

    attempt: int
    target: tuple[WorkerId, ...]
    """The wanted world, by rank."""
    leaving: tuple[WorkerId, ...]
    """Who goes behind the commit; who is not in the target serves what it holds until then."""
    said: dict[WorkerId, Holdings] = field(default_factory=dict)
    partly: dict[WorkerId, Ids] = field(default_factory=dict)
    """Of those who have not said all of it yet."""
    is_drafted: bool = False
    plan: DataRedistributionPlan | None = None
    """None while nothing is planned, and where some shards are with nobody."""
    totals: TransferTotals = field(default_factory=TransferTotals)
    began_at: float = 0.0
    """When it was settled what has to travel."""
    took_s: float | None = None
    """How long it took until all had it; None while some have not."""
    finished: dict[str, tuple[int, int]] = field(default_factory=dict)
    """How many transfers, and bytes, of who has verified what it needs."""

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


class Custody:
    """The data of one job."""

    def __init__(self, job: str, dataset: DatasetSpec, assignment: Assignment | None = None) -> None:
        self.job = job
        self.dataset = dataset
        self._division = Dataset.of(dataset.samples, dataset.shards)
        self.assignment = assignment or Assignment.nobody(dataset.shards)
        self.gathering: Gathering | None = None
        self._bytes_per_sample = 0.0
        self._pace: TransferPace | None = None
        """As it was measured last."""

    def require_same(self, dataset: DatasetSpec) -> None:
        """Refuse a worker that would train with something else."""
        if dataset != self.dataset:
            raise RequestRefused(
                "dataset_differs",
                f"job {self.job} trains with {_in_words(self.dataset)}, and not with {_in_words(dataset)}",
                "give all workers the same dataset, or this one to another job",
            )

    def gather(self, attempt: int, target: tuple[WorkerId, ...], leaving: tuple[WorkerId, ...], now: float) -> None:
        """Ask what the members of an attempt hold; an older one is over."""
        known = self.gathering
        if known is not None and known.attempt > attempt:
            raise RequestRefused(
                "attempt_over", f"attempt {attempt} is over; attempt {known.attempt} is under way", "go by the newest"
            )
        if known is None or known.attempt < attempt:
            self.gathering = Gathering(attempt, target, leaving, began_at=now)

    def offer(self, worker: WorkerId, held: Ids, more: bool, held_bytes: int, bytes_per_second: float) -> bool:
        """A worker says what it holds; tells whether all have now, so that a plan can be made."""
        gathering = self._gathering
        if worker not in gathering.members:
            raise RequestRefused("not_a_member", f"{worker} is not in attempt {gathering.attempt}", "wait for the next")
        if held.size and (held.min() < 0 or held.max() >= self.dataset.shards):
            raise RequestRefused(
                "holdings_invalid", f"held names what is none of {self.dataset.shards} shards", "see the dataset"
            )
        # Somebody may say again what it has said: no more is kept than there are shards.
        ids = np.union1d(gathering.partly.pop(worker, held), held)
        if more:
            gathering.partly[worker] = ids
            return False
        gathering.said[worker] = Holdings(ids, held_bytes, bytes_per_second)
        # Who said it last may have gone before a plan was made, and says it again.
        is_complete = not (gathering.waiting_for or gathering.is_drafted)
        if is_complete:
            self._measure(gathering)
        return is_complete

    def member(self, worker_id: str) -> WorkerId:
        """Who in the attempt that is under way has this id."""
        found = next((worker for worker in self._gathering.members if worker.id == worker_id), None)
        if found is None:
            raise RequestRefused(
                "not_a_member", f"{worker_id} is not in attempt {self._gathering.attempt}", "wait for the next"
            )
        return found

    @property
    def _gathering(self) -> Gathering:
        if self.gathering is None:
            raise RequestRefused("attempt_over", "no attempt is under way", "wait for the daemon's word")
        return self.gathering

    # Planning.

    def draft(self, gathering: Gathering, config: ElasticTrainingConfig) -> DataRedistributionPlan:
        """What has to travel, now that all have said what they hold. Changes nothing, so a thread may do it."""
        present = ClusterTopology(gathering.members)
        redistributor = DataRedistributor(config, replication=self.dataset.replication)
        plan = redistributor.calculate_plan(
            present,
            ClusterTopology(gathering.target),
            self.dataset.samples,
            shards=self.dataset.shards,
            current=self._owners_now(gathering, present),
            replicas={worker: gathering.said[worker].ids for worker in present.workers},
            leaving=gathering.leaving,
            pace=self._pace,
        )
        # Grouped by worker once, here where a thread may do it, and not when the first member asks.
        for worker in gathering.target[:1]:
            plan.for_worker(worker)
            _kept_by(plan, worker)
        return plan

    def settle(self, gathering: Gathering, plan: DataRedistributionPlan) -> None:
        """Let members fetch what was drafted."""
        gathering.plan, gathering.totals, gathering.is_drafted = plan, self._totals(plan), True

    def _owners_now(self, gathering: Gathering, present: ClusterTopology) -> Column:
        """Who has each shard: its owner, if it says so itself; else the first who does."""
        owners = np.full(self.dataset.shards, NOBODY, np.int32)
        known = {worker: place for place, worker in enumerate(self.assignment.workers)}
        held = [gathering.said[worker].ids for worker in present.workers]
        for rank, worker in enumerate(present.workers):
            place = known.get(worker)
            if place is not None:
                own = held[rank][self.assignment.owners[held[rank]] == place]
                owners[own] = rank
        for rank, ids in enumerate(held):
            free = ids[owners[ids] == NOBODY]
            owners[free] = rank
        return owners

    def _measure(self, gathering: Gathering) -> None:
        """Take what the workers know of sizes and speeds; what was measured before holds where they know nothing."""
        speeds = [said.bytes_per_second for said in gathering.said.values() if said.bytes_per_second]
        samples = sum(int(self._division.sizes(said.ids).sum()) for said in gathering.said.values())
        if samples:
            self._bytes_per_sample = sum(said.bytes for said in gathering.said.values()) / samples
        if speeds and self._bytes_per_sample:
            self._pace = TransferPace(sum(speeds) / len(speeds), self._bytes_per_sample)

    def _totals(self, plan: DataRedistributionPlan) -> TransferTotals:
        return TransferTotals(
            shards=plan.moved,
            transfers=len(plan.transfers),
            from_owners=plan.transfer_count(SourceKind.OWNER),
            from_replicas=plan.transfer_count(SourceKind.REPLICA),
            from_origin=plan.transfer_count(SourceKind.ORIGIN),
            bytes=plan.bytes_to_move(self._bytes_per_sample),
            estimated_s=plan.estimated_seconds,
        )

    def lost(self) -> tuple[int, list[int]]:
        """How many shards nobody has, though they cannot be had again; and the first of them."""
        plan = self._gathering.plan
        if plan is None or self.dataset.has_origin:
            return 0, []
        away = plan.columns.shards[(plan.columns.sources == NOBODY) & (plan.columns.copies == 0)]
        return int(away.size), np.sort(away)[:NAMED_MAX].tolist()

    # What members ask.

    def part_for(self, worker_id: str, attempt: int, after: int) -> TransferPart:
        """What a member has to fetch and to keep, behind so many."""
        gathering = self._gathering
        if gathering.attempt != attempt:
            raise RequestRefused("attempt_over", f"attempt {attempt} is not under way", "go by the newest")
        plan = gathering.plan
        if plan is None:
            waiting_for = ", ".join(worker.id for worker in gathering.waiting_for[:NAMED_MAX])
            raise RequestRefused(
                "plan_pending",
                f"nothing is planned yet; waiting for {waiting_for or 'who has lost shards'}",
                "ask later",
            )
        worker = next((worker for worker in plan.workers if worker.id == worker_id), None)
        if worker is None:
            raise RequestRefused("not_a_member", f"{worker_id} is not in attempt {attempt}", "wait for the next")
        rows = plan.for_worker(worker).rows
        owned, keep = _kept_by(plan, worker)
        until = after + PAGE_SHARDS_MAX
        shards = plan.columns.shards[rows[after:until]].astype("<i8")
        sources = self._sources(plan, rows[after:until])
        return TransferPart(
            plan.workers,
            shards.tobytes(),
            np.ascontiguousarray(sources.T, "<i4").tobytes(),
            sources.shape[0],
            keep[after:until].astype("<i8").tobytes(),
            np.isin(keep[after:until], owned).astype(np.uint8).tobytes(),
            until < max(rows.size, keep.size),
            any(worker.id == worker_id for worker in gathering.leaving),
        )

    def _sources(self, plan: DataRedistributionPlan, rows: npt.NDArray[np.intp]) -> Column:
        """Who has the shards of these transfers, in rows: who is asked first, the others, and the origin at last."""
        shards, first = plan.columns.shards[rows], plan.columns.sources[rows]
        held = np.concatenate((plan.owners_before[np.newaxis, shards], plan.replicas_before[:, shards]))
        others = np.where(held == first, NOBODY, held)
        # Those who have it come before the gaps, in each column.
        others = np.take_along_axis(others, np.argsort(others == NOBODY, axis=0, kind="stable"), axis=0)
        sources = np.concatenate((first[np.newaxis], others[:FURTHER_SOURCES_MAX]))
        gaps = np.where(sources == NOBODY, NO_SOURCE, sources)
        if self.dataset.has_origin:
            gaps = np.concatenate((gaps, np.full((1, rows.size), NOBODY, np.int32)))
        return gaps.astype(np.int32)

    def finish(self, worker_id: str, attempt: int, transfers: int, moved_bytes: int) -> bool:
        """A member has all that it needs; tells whether it was the last."""
        gathering = self.require_under_way(attempt)
        was_over = gathering.is_over
        if any(worker.id == worker_id for worker in gathering.target):
            gathering.finished[worker_id] = transfers, moved_bytes
        return gathering.is_over and not was_over

    def give_up(self, attempt: int) -> None:
        """What was planned cannot be had: some copies were found to be bad."""
        self.require_under_way(attempt).plan = None

    def require_under_way(self, attempt: int) -> Gathering:
        """Refuse what is said about an attempt for which nothing is planned, or which is over."""
        gathering = self._gathering
        if gathering.attempt != attempt or gathering.plan is None:
            raise RequestRefused("attempt_over", f"attempt {attempt} is over", "go by the newest")
        return gathering

    # What holds.

    def preview(self, names: list[str], config: ElasticTrainingConfig) -> TransferTotals:
        """What would have to travel if these were the workers, by rank, and all hold what they are known to."""
        assignment = self.assignment
        known = {worker.id: worker for worker in assignment.workers}
        target = tuple(known.get(name) or WorkerId(name, "unknown", 0) for name in names)
        plan = DataRedistributor(config, replication=self.dataset.replication).calculate_plan(
            ClusterTopology(assignment.workers),
            ClusterTopology(target),
            self.dataset.samples,
            shards=self.dataset.shards,
            current=assignment.owners,
            replicas=assignment.replicas,
            leaving=[worker for worker in assignment.workers if worker not in target],
            pace=self._pace,
        )
        return self._totals(plan)

    def held(self) -> Iterator[HeldView]:
        """What each worker owns."""
        assignment = self.assignment
        workers = len(assignment.workers)
        owned, copies = count(assignment.owners, workers), count(assignment.replicas, workers)
        samples = self._samples_of_workers(workers)
        for place, worker in enumerate(assignment.workers):
            yield HeldView(worker.id, int(owned[place]), int(copies[place]), int(samples[place]))

    def _samples_of_workers(self, workers: int) -> Counts:
        """Every shard has as many samples as any other, and the first ones have one more."""
        if not self.dataset.shards:
            return np.zeros(workers, np.int64)
        size, larger = divmod(self.dataset.samples, self.dataset.shards)
        owners = self.assignment.owners
        return size * count(owners, workers) + count(owners[:larger], workers)

    def owners_page(self, after: int) -> OwnersPage:
        """Who owns the shards behind so many."""
        until = after + PAGE_SHARDS_MAX
        owners = self.assignment.owners[after:until].astype("<i4")
        return OwnersPage(
            self.assignment.generation, self.assignment.workers, owners.tobytes(), until < self.dataset.shards
        )


def _kept_by(plan: DataRedistributionPlan, worker: WorkerId) -> tuple[Ids, Ids]:
    """The shards that a worker is to own, and all of which it is to hold a copy; one that goes holds none."""
    if worker not in plan.worker_assignments:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    owned = plan.worker_assignments.ids(worker)
    return owned, np.union1d(owned, plan.replica_assignments.ids(worker))


def _in_words(dataset: DatasetSpec) -> str:
    origin = "with an origin" if dataset.has_origin else "without an origin"
    return f"{dataset.samples} samples in {dataset.shards} shards, {dataset.replication} further copies, {origin}"
