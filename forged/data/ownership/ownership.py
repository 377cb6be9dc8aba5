"""In whose custody each shard of a job is, and what has to travel when the workers change.

Law: what a worker holds is what it says, anew for every attempt, that it has verified; nobody is believed to hold what
he held once. A copy that somebody has found to be bad counts when its holder has verified it again. A plan is made when
all members have said what they hold, belongs to that attempt, and holds from its commit on. A shard that nobody has,
and that cannot be had again, is named and never left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from forged.data.columns import NOBODY, Column, Counts, count
from forged.data.dataset import Dataset, Indices
from forged.data.messages import (
    NAMED_MAX,
    PAGE_SHARDS_MAX,
    DatasetSpec,
    DataView,
    HeldView,
    OwnersPage,
    TransferPart,
    TransferTotals,
)
from forged.data.model import SourceKind, TransferPace
from forged.data.ownership.conflicting_copies import Marks, outvoted
from forged.data.ownership.gathering import NOTHING, Assignment, Draft, Finished, Gathering, Holdings, Lack
from forged.data.ownership.suspect_copies import SuspectCopies
from forged.data.placement.plan import DataRedistributionPlan
from forged.data.placement.planner import DataRedistributor, check_replication
from forged.data.placement.shares import check_weight
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import ClusterTopology, RedistributionType, WorkerId
from forged.errors import RequestRefused
from forged.phrases import counted, named

BAD_COPIES_KEPT_MAX = 10_000
"""Of so many bad copies in an attempt it is remembered that they are known."""
FURTHER_SOURCES_MAX = 3
"""So many workers are named from which a shard can be had, besides the one that is asked first."""
SHARDS_LOST = "shards_lost"
"""The code with which a member is told that there is no plan, because nobody has some shards."""
NO_SOURCE = -2
"""Where nobody else has a shard."""

Ids = Indices


class ShardOwnership:
    """The data of one job."""

    def __init__(self, job: str, dataset: DatasetSpec, assignment: Assignment | None = None) -> None:
        self.job = job
        check_replication(dataset.replication)
        self.dataset = dataset
        Dataset.of(dataset.samples, dataset.shards)
        self.assignment = assignment or Assignment.nobody(dataset.shards)
        self.gathering: Gathering | None = None
        self.doubts = SuspectCopies()
        self.full: set[WorkerId] = set()
        """Who cannot keep any more than it has, and alone has some of it, since the last commit."""
        self._bytes_per_sample = 0.0
        self._pace: TransferPace | None = None
        """As it was measured last."""

    def is_for(self, dataset: DatasetSpec, attempt: int) -> bool:
        """Whether it is of this dataset, or members of this attempt have said already that they have another."""
        return dataset == self.dataset or (self.gathering is not None and self.gathering.attempt == attempt)

    def inherit(self, former: ShardOwnership) -> None:
        """Come after one with which nobody has trained: the copies that were in doubt there are the same here, unless
        the shards are others."""
        known = former.dataset
        if (known.samples, known.shards) == (self.dataset.samples, self.dataset.shards):
            self.doubts = former.doubts
        else:
            former.doubts.forget_all_but(())

    def require_same(self, dataset: DatasetSpec) -> None:
        """Refuse a worker that would train with something else."""
        if dataset != self.dataset:
            raise RequestRefused(
                "dataset_differs",
                f"job {self.job} trains with {_in_words(self.dataset)}, and not with {_in_words(dataset)}",
                "give all workers the same dataset, or this one to another job",
            )

    def gather(
        self,
        attempt: int,
        target: tuple[WorkerId, ...],
        leaving: tuple[WorkerId, ...],
        now: float,
        *,
        cause: int = 0,
        generation: int = 0,
    ) -> None:
        """Ask what the members of an attempt hold; an older one is over."""
        known = self.gathering
        if known is not None and known.attempt > attempt:
            raise RequestRefused(
                "attempt_over", f"attempt {attempt} is over; attempt {known.attempt} is under way", "go by the newest"
            )
        if known is None or known.attempt < attempt:
            self.gathering = Gathering(attempt, target, leaving, began_at=now, cause=cause, generation=generation)

    def offer(
        self,
        worker: WorkerId,
        held: Ids,
        more: bool,
        held_bytes: int,
        bytes_per_second: float,
        weight: float = 1.0,
        marks: Marks | None = None,
    ) -> bool:
        """A worker says what it holds; tells whether all have now, so that a plan can be made."""
        check_weight(weight)
        gathering = self._gathering
        if worker not in gathering.members:
            raise RequestRefused("not_a_member", f"{worker} is not in attempt {gathering.attempt}", "wait for the next")
        if held.size and (held.min() < 0 or held.max() >= self.dataset.shards):
            raise RequestRefused(
                "holdings_invalid", f"held names what is none of {self.dataset.shards} shards", "see the dataset"
            )
        if marks is not None and marks.size != held.size:
            raise RequestRefused(
                "holdings_invalid", f"{marks.size} marks are told of {held.size} shards", "tell one of each, or none"
            )
        holdings = gathering.partly.setdefault(worker, Holdings())
        holdings.add(held, self.dataset.shards, marks)
        if more:
            return False
        holdings.bytes, holdings.bytes_per_second, holdings.weight = held_bytes, bytes_per_second, weight
        gathering.said[worker] = gathering.partly.pop(worker)
        if self.doubts.concern(worker.id):
            self.doubts.keep_only(worker.id, holdings.ids)
        # Who said it last may have gone before a plan was made, and says it again.
        return not (gathering.waiting_for or gathering.is_drafted)

    def looks_again(self, worker: WorkerId, looked_at: Ids, held: Ids) -> Ids:
        """Which copies a worker has to look at before what it holds is heard; what it has said of it is forgotten."""
        self.doubts.looked_at(worker.id, looked_at)
        doubted = self.doubts.among(worker.id, held)
        if not doubted.size and not self.is_held_by(worker):
            here = {member.id for member in self._gathering.members}
            doubted = self.doubts.inherited(worker, looked_at, held, here)
        if doubted.size:
            self._gathering.partly.pop(worker, None)
        return doubted

    def is_held_by(self, worker: WorkerId) -> bool:
        """Whether a worker is one of those who hold the data of the committed world."""
        return worker in self.assignment.workers

    def is_news_that_full(self, worker: WorkerId) -> bool:
        """A worker cannot keep any more than it has. Whether it is to get nothing new for that, as is news.

        One that has nothing alone can be done without.
        """
        is_news = worker not in self.full and self._has_some_alone(worker)
        if is_news:
            self.full.add(worker)
        return is_news

    def _has_some_alone(self, worker: WorkerId) -> bool:
        said = self._gathering.said
        others = [one.ids for other, one in said.items() if other != worker]
        is_elsewhere = np.zeros(self.dataset.shards, np.bool_)
        for ids in others:
            is_elsewhere[ids] = True
        return worker in said and not bool(is_elsewhere[said[worker].ids].all())

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

    def draft(self, gathering: Gathering, config: ElasticTrainingConfig) -> Draft:
        """What has to travel, now that all have said what they hold. Changes nothing, so a thread may do it."""
        present = ClusterTopology(gathering.members)
        said = dict(gathering.said)
        copies = {worker: said[worker].copies for worker in present.workers}
        held = {worker: ids for worker, (ids, _) in copies.items()}
        bytes_per_sample = self._measured_size(said, held)
        pace = _pace_of((one.bytes_per_second for one in said.values()), bytes_per_sample) or self._pace
        owners = self._owners_now(held)
        others = _outvoted(copies, owners)
        if others and self.dataset.has_origin:
            held |= {worker: np.setdiff1d(held[worker], ids) for worker, ids in others.items()}
            owners = self._owners_now(held)
        weights = {worker: one.weight for worker, one in said.items() if one.weight != 1.0}
        redistributor = DataRedistributor(config, replication=self.dataset.replication)
        plan = redistributor.calculate_plan(
            present,
            ClusterTopology(gathering.target),
            self.dataset.samples,
            shards=self.dataset.shards,
            current=owners,
            # Not the owners' own, which are nearly all of them.
            replicas={worker: ids[owners[ids] != rank] for rank, (worker, ids) in enumerate(held.items())},
            weights=self._weights_where_full(gathering, config, weights, owners),
            leaving=gathering.leaving,
            pace=pace,
        )
        # Grouped by worker once, here where a thread may do it, and not when the first member asks.
        for worker in gathering.target[:1]:
            plan.for_worker(worker)
            plan.copy_assignments.ids(worker)
        lost = self._lost(plan)
        totals = _totals(plan, bytes_per_sample)
        by = self.last_holders(lost, held)
        return Draft(plan, totals, bytes_per_sample, pace, int(lost.size), _first(lost), by, weights, others)

    def _weights_where_full(
        self, gathering: Gathering, config: ElasticTrainingConfig, weights: Mapping[WorkerId, float], owners: Column
    ) -> Mapping[WorkerId, float]:
        """By which who is full gets nothing new: it has its share, or none where shards do not stay where they are."""
        full = [worker for worker in gathering.target if worker in self.full]
        room = math.fsum(weights.get(worker, 1.0) for worker in gathering.target if worker not in self.full)
        if not full or not 0.0 < room < math.inf:
            return weights
        held = count(owners, len(gathering.members))
        kept = {worker: int(held[gathering.members.index(worker)]) for worker in full}
        left = self.dataset.shards - sum(kept.values())
        if config.redistribution_type is not RedistributionType.INCREMENTAL or self.dataset.replication or not left:
            return {**weights, **dict.fromkeys(full, 0.0)}
        shares = {worker: number * room / left for worker, number in kept.items()}
        return {**weights, **{worker: min(share, weights.get(worker, 1.0)) for worker, share in shares.items()}}

    def settle(self, gathering: Gathering, draft: Draft) -> None:
        """Let members fetch what was drafted."""
        gathering.plan, gathering.totals, gathering.is_drafted = draft.plan, draft.totals, True
        gathering.outvoted = draft.outvoted
        # What is bad at those who hold what counts would be nowhere.
        gathering.replaced = draft.outvoted if self.dataset.has_origin else {}
        gathering.lost = Lack(draft.lost, draft.lost_shards, last_held_by=draft.lost_by)
        self._bytes_per_sample, self._pace = draft.bytes_per_sample, draft.pace

    def _owners_now(self, held: Mapping[WorkerId, Ids]) -> Column:
        """Who has each shard: its owner, if it says so itself; else the first who does."""
        owners = np.full(self.dataset.shards, NOBODY, np.int32)
        known = {worker: place for place, worker in enumerate(self.assignment.workers)}
        for rank, (worker, ids) in enumerate(held.items()):
            place = known.get(worker)
            if place is not None:
                own = ids[self.assignment.owners[ids] == place]
                owners[own] = rank
        for rank, ids in enumerate(held.values()):
            free = ids[owners[ids] == NOBODY]
            owners[free] = rank
        return owners

    def _measured_size(self, said: Mapping[WorkerId, Holdings], held: Mapping[WorkerId, Ids]) -> float:
        """The bytes of a sample; as it was before where the workers know nothing."""
        size, larger = divmod(self.dataset.samples, self.dataset.shards or 1)
        samples = sum(size * ids.size + int(np.searchsorted(ids, larger)) for ids in held.values())
        return sum(one.bytes for one in said.values()) / samples if samples else self._bytes_per_sample

    def _lost(self, plan: DataRedistributionPlan) -> Ids:
        """The shards that nobody has, though they cannot be had again, in their order."""
        columns = plan.columns
        is_lost = (columns.sources == NOBODY) & (columns.copies == 0)
        lost: Ids = columns.shards[is_lost & (not self.dataset.has_origin)]
        return lost

    def last_holders(self, shards: Ids, there: Collection[WorkerId]) -> tuple[str, ...]:
        """Who had these in the last world and is not there, whoever had most of them first."""
        known = self.assignment
        holders = np.concatenate((known.owners[np.newaxis, shards], known.replicas[:, shards]))
        held = count(holders, len(known.workers))
        order = np.argsort(-held, kind="stable")[: np.count_nonzero(held)].tolist()
        return tuple(known.workers[place].id for place in order if known.workers[place] not in there)[:NAMED_MAX]

    # What members ask.

    def part_for(self, worker_id: str, attempt: int, after: int) -> TransferPart:
        """What a member has to fetch and to keep, behind so many."""
        gathering = self._gathering
        if gathering.attempt != attempt:
            raise RequestRefused("attempt_over", f"attempt {attempt} is not under way", "go by the newest")
        plan = gathering.plan
        if plan is None:
            if gathering.lost.number:
                raise RequestRefused(
                    SHARDS_LOST, lack_in_words(gathering.lost), "start who had them with its directory"
                )
            waiting_for = ", ".join(worker.id for worker in gathering.waiting_for[:NAMED_MAX])
            raise RequestRefused(
                "plan_pending", f"nothing is planned yet; waiting for {waiting_for or 'the plan'}", "ask later"
            )
        worker = next((worker for worker in plan.workers if worker.id == worker_id), None)
        if worker is None:
            raise RequestRefused("not_a_member", f"{worker_id} is not in attempt {attempt}", "wait for the next")
        rows, keep = plan.for_worker(worker).rows, _kept_by(plan, worker)
        until = after + PAGE_SHARDS_MAX
        shards = plan.columns.shards[rows[after:until]].astype("<i8")
        sources = self._sources(plan, rows[after:until])
        return TransferPart(
            plan.workers,
            shards.tobytes(),
            np.ascontiguousarray(sources.T, "<i4").tobytes(),
            sources.shape[0],
            keep[after:until].astype("<i8").tobytes(),
            (plan.owners[keep[after:until]] == plan.workers.index(worker)).astype(np.uint8).tobytes(),
            until < max(rows.size, keep.size),
            any(worker.id == worker_id for worker in gathering.leaving),
            np.intersect1d(shards, gathering.replaced.get(worker, NOTHING)).astype("<i8").tobytes(),
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

    def finish(self, worker_id: str, attempt: int, finished: Finished) -> bool:
        """A member has all that it needs; tells whether it was the last."""
        gathering = self.require_under_way(attempt)
        was_over = gathering.is_over
        gathering.refused.pop(worker_id, None)
        if any(worker.id == worker_id for worker in gathering.target):
            gathering.finished[worker_id] = finished
        if not gathering.is_over or was_over:
            return False
        self._learn(gathering)
        return True

    def _learn(self, gathering: Gathering) -> None:
        """What the transfers have shown, where nothing is known: workers say it themselves at the next attempt only."""
        finished, plan = gathering.finished.values(), gathering.plan
        transfers = sum(one.transfers for one in finished)
        if transfers and not self._bytes_per_sample:
            samples_per_shard = self.dataset.samples / self.dataset.shards
            self._bytes_per_sample = sum(one.bytes for one in finished) / (transfers * samples_per_shard)
        lanes = 1 if plan is None else plan.lanes
        speeds = (one.bytes / one.took_s / max(1, min(lanes, one.transfers)) for one in finished if one.took_s > 0)
        self._pace = self._pace or _pace_of(speeds, self._bytes_per_sample)

    def complain(self, source: str, shard: int) -> bool:
        """A copy was found to be bad; tells whether that is news: who looks for another may come upon it again."""
        if shard >= self.dataset.shards:
            raise RequestRefused("shard_invalid", f"there is no shard {shard} in job {self.job}", "see the dataset")
        known = set() if self.gathering is None else self.gathering.bad_copies
        is_news = (source, shard) not in known
        if len(known) < BAD_COPIES_KEPT_MAX:
            known.add((source, shard))
        return is_news

    def doubt(self, source: str, shard: int) -> int:
        """Believe a copy no more before it was looked at; tells how many are believed again for want of room.

        Who is away may never come back: what is known of his copies has to make room first.
        """
        if self.doubts.add(source, shard):
            return 0
        members = () if self.gathering is None else self.gathering.members
        forgotten = self.doubts.forget_all_but({worker.id for worker in (*self.assignment.workers, *members)})
        return forgotten if self.doubts.add(source, shard) else forgotten + 1

    def require_shards(self, number: int, named: Sequence[int]) -> None:
        """Refuse a number of shards that there are not, or some that there are not."""
        shards = self.dataset.shards
        if not 1 <= number <= shards or len(named) > NAMED_MAX or any(one >= shards for one in named):
            raise RequestRefused(
                "shard_invalid", f"so many of {shards} shards, or those, cannot be missing", "see the dataset"
            )

    def refuse(self, gathering: Gathering, worker_id: str, lack: Lack) -> bool:
        """The origin does not give a member what no worker has; tells whether that is news."""
        self.require_shards(lack.number, lack.shards)
        known = gathering.refused.get(worker_id, Lack())
        gathering.refused[worker_id] = lack
        return known[:2] != lack[:2]

    @staticmethod
    def has_come(gathering: Gathering, shards: Iterable[int]) -> bool:
        """Whether one of these lies by now with a member who was to fetch it, too, and has all that it needs."""
        plan, ids = gathering.plan, list(shards)
        if plan is None:
            return False
        finished = [place for place, worker in enumerate(plan.workers) if worker.id in gathering.finished]
        return bool(np.isin(np.concatenate((plan.owners[np.newaxis, ids], plan.replicas[:, ids])), finished).any())

    def in_doubt(self, gathering: Gathering) -> list[tuple[str, int]]:
        """The copies that were found to be bad though the plan counts on them: who has them, and of what."""
        return [] if gathering.plan is None else list(self.doubts.counted_on(gathering.plan))

    def give_up(self, attempt: int) -> bool:
        """An attempt leads nowhere, planned or not, and another is wanted; tells whether that is news."""
        gathering = self._gathering
        if gathering.attempt != attempt:
            raise _over(attempt)
        is_news = not gathering.is_left
        gathering.plan, gathering.is_left = None, True
        return is_news

    def require_under_way(self, attempt: int) -> Gathering:
        """Refuse what is said about an attempt for which nothing is planned, or which is over."""
        gathering = self._gathering
        if gathering.attempt != attempt or gathering.plan is None:
            raise _over(attempt)
        return gathering

    # What holds.

    def preview(self, names: list[str], config: ElasticTrainingConfig, gone: Collection[str] = ()) -> TransferTotals:
        """What would have to travel if these were the workers, by rank, and all but the `gone` hold what they are known
        to."""
        assignment = self.assignment
        known = {worker.id: worker for worker in assignment.workers}
        if len(set(names)) < len(names):
            raise RequestRefused("workers_invalid", "a worker is named twice", "name each of them once")
        # Nobody knows where others will be: none of them near to anybody.
        target = tuple(known.get(name) or WorkerId(name, f"host of {name}", 0) for name in names)
        plan = DataRedistributor(config, replication=self.dataset.replication).calculate_plan(
            ClusterTopology(assignment.workers),
            ClusterTopology(target),
            self.dataset.samples,
            shards=self.dataset.shards,
            current=assignment.owners,
            replicas=assignment.replicas,
            weights=assignment.weights,
            leaving=[worker for worker in assignment.workers if worker not in target and worker.id not in gone],
            pace=self._pace,
        )
        return _totals(plan, self._bytes_per_sample)

    def view(self) -> DataView:
        """Who holds what. Changes nothing, so a thread may ask."""
        assignment = self.assignment
        held = list(self._held(assignment))
        lack = Lack() if self.gathering is None else self.gathering.lack
        differing = NOTHING if self.gathering is None else self.gathering.differing
        return DataView(
            job=self.job,
            dataset=self.dataset,
            generation=assignment.generation,
            workers=held,
            lost=lack.number,
            lost_shards=list(lack.shards),
            lost_because=lack.reason,
            last_held_by=list(lack.last_held_by),
            differing=int(differing.size),
            differing_shards=list(_first(differing)),
        )

    def _held(self, assignment: Assignment) -> Iterator[HeldView]:
        workers = len(assignment.workers)
        owned, copies = count(assignment.owners, workers), count(assignment.replicas, workers)
        samples = self._samples_of_workers(assignment.owners, workers)
        for place, worker in enumerate(assignment.workers):
            weight = assignment.weights.get(worker, 1.0)
            yield HeldView(worker.id, int(owned[place]), int(copies[place]), int(samples[place]), weight)

    def _samples_of_workers(self, owners: Column, workers: int) -> Counts:
        """Every shard has as many samples as any other, and the first ones have one more."""
        if not self.dataset.shards:
            return np.zeros(workers, np.int64)
        size, larger = divmod(self.dataset.samples, self.dataset.shards)
        return size * count(owners, workers) + count(owners[:larger], workers)

    def owners_page(self, after: int) -> OwnersPage:
        """Who owns the shards behind so many."""
        until = after + PAGE_SHARDS_MAX
        owners = self.assignment.owners[after:until].astype("<i4")
        return OwnersPage(
            self.assignment.generation, self.assignment.workers, owners.tobytes(), until < self.dataset.shards
        )


def _outvoted(copies: Mapping[WorkerId, tuple[Ids, Marks]], owners: Column) -> dict[WorkerId, Ids]:
    """The shards of which somebody holds something else than most of those who hold one."""
    sizes = [ids.size for ids, _ in copies.values()]
    ids = np.concatenate([NOTHING, *(ids for ids, _ in copies.values())])
    marks = np.concatenate([NOTHING.view(np.uint64), *(marks for _, marks in copies.values())])
    lost = outvoted(ids, marks, np.repeat(np.arange(len(sizes), dtype=np.int32), sizes), owners)
    if not lost.any():
        return {}
    parts = np.split(np.flatnonzero(lost), np.searchsorted(np.flatnonzero(lost), np.cumsum(sizes)[:-1]))
    return {worker: ids[part] for worker, part in zip(copies, parts, strict=True) if part.size}


def _over(attempt: int) -> RequestRefused:
    return RequestRefused("attempt_over", f"attempt {attempt} is over", "go by the newest")


def _kept_by(plan: DataRedistributionPlan, worker: WorkerId) -> Ids:
    """The shards of which a worker is to hold a copy; one that goes holds none."""
    assignments = plan.copy_assignments
    return assignments.ids(worker) if worker in assignments else NOTHING


def _totals(plan: DataRedistributionPlan, bytes_per_sample: float) -> TransferTotals:
    return TransferTotals(
        shards=plan.moved,
        transfers=len(plan.transfers),
        from_owners=plan.transfer_count(SourceKind.OWNER),
        from_replicas=plan.transfer_count(SourceKind.REPLICA),
        from_origin=plan.transfer_count(SourceKind.ORIGIN),
        bytes=plan.bytes_to_move(bytes_per_sample),
        estimated_s=plan.estimated_seconds,
    )


def _pace_of(speeds: Iterable[float], bytes_per_sample: float) -> TransferPace | None:
    """What they are on average; None where nobody has measured anything."""
    known = [speed for speed in speeds if 0.0 < speed < math.inf]
    if not (known and bytes_per_sample):
        return None
    return TransferPace(sum(speed / len(known) for speed in known), bytes_per_sample)


def lack_in_words(lack: Lack) -> str:
    """What nobody has, and who had it."""
    shards = ", ".join(map(str, lack.shards)) + (", …" if lack.number > len(lack.shards) else "")
    said = f"nobody has {counted(lack.number, 'shard')} any more: {shards}"
    return f"{said}; last with {named(lack.last_held_by)}" if lack.last_held_by else said


def _first(shards: Ids) -> tuple[int, ...]:
    return tuple(shards[:NAMED_MAX].tolist())


def _in_words(dataset: DatasetSpec) -> str:
    origin = "with an origin" if dataset.has_origin else "without an origin"
    copies = "1 further copy" if dataset.replication == 1 else f"{dataset.replication or 'no'} further copies"
    return f"{dataset.samples} samples in {counted(dataset.shards, 'shard')}, {copies}, {origin}"
