"""Which worker owns each shard of a job, by the workers' own verified offers.

Invariants:
- A worker holds what it offers in the current attempt; earlier offers do not count.
- A copy that was reported as bad counts only after its holder has verified it.
- A plan is made when all members have offered, belongs to its attempt, and takes effect with the commit.
- A shard without any source is named, never left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from forged.data.messages import NAMED_MAX, DatasetSpec
from forged.data.model import Dataset, Indices, TransferPace
from forged.data.ownership.attempt import Assignment, DataAttempt, Draft, FinishedTransfers, LostShards, Marks, Offer
from forged.data.ownership.suspect_copies import SuspectCopies
from forged.data.placement.planner import check_replication
from forged.data.placement.shares import check_weight
from forged.elastic.model import WorkerId
from forged.errors import RequestRefused
from forged.phrases import counted

BAD_COPIES_KEPT_MAX = 10_000
"""So many bad copies of an attempt are remembered, to tell new reports from repeated ones."""
SHARDS_LOST = "shards_lost"
"""The error code for a member that asks for a plan while some shards have no source."""


class ShardOwnership:
    """The ownership of one job's shards, and the data attempt that may change it."""

    def __init__(self, job: str, dataset: DatasetSpec, assignment: Assignment | None = None) -> None:
        self.job = job
        check_replication(dataset.replication)
        self.dataset = dataset
        Dataset.of(dataset.samples, dataset.shards)
        self.assignment = assignment or Assignment.empty(dataset.shards)
        self.attempt: DataAttempt | None = None
        self.suspects = SuspectCopies()
        self.full: set[WorkerId] = set()
        """Workers whose store is full and that hold a shard alone, since the last commit."""
        self.bytes_per_sample = 0.0
        self.pace: TransferPace | None = None
        """As measured last."""

    def is_for(self, dataset: DatasetSpec, attempt: int) -> bool:
        """Whether the dataset is the same, or members of this attempt have already offered another one."""
        return dataset == self.dataset or (self.attempt is not None and self.attempt.number == attempt)

    def inherit(self, former: ShardOwnership) -> None:
        """Take over the suspect copies of an ownership that no world has used, if the shards are the same."""
        known = former.dataset
        if (known.samples, known.shards) == (self.dataset.samples, self.dataset.shards):
            self.suspects = former.suspects
        else:
            former.suspects.keep_holders(())

    def require_same(self, dataset: DatasetSpec) -> None:
        """Refuse a worker that offers another dataset."""
        if dataset != self.dataset:
            raise RequestRefused(
                "dataset_differs",
                f"dataset must be that of job {self.job}, {_described(self.dataset)}; got {_described(dataset)}",
                "give all workers the same dataset, or use another job",
            )

    # The offers of an attempt.

    def begin(
        self,
        number: int,
        target: tuple[WorkerId, ...],
        draining: tuple[WorkerId, ...],
        now: float,
        *,
        cause: int = 0,
        generation: int = 0,
    ) -> None:
        """Take offers for this attempt, which ends older ones; refused when a newer one has begun."""
        known = self.attempt
        if known is not None and known.number > number:
            raise RequestRefused(
                "attempt_over",
                f"attempt {number} is over; attempt {known.number} is under way",
                "use the newest attempt",
            )
        if known is None or known.number < number:
            self.attempt = DataAttempt(number, target, draining, planned_at=now, cause=cause, generation=generation)

    def copies_to_verify(self, worker: WorkerId, verified: Indices, held: Indices) -> Indices:
        """The copies that a worker has to verify before its offer counts; any partial offer is dropped."""
        self.suspects.verified(worker.id, verified)
        suspect = self.suspects.held_by(worker.id, held)
        if not suspect.size and not self.is_held_by(worker):
            here = {member.id for member in self._current.members}
            suspect = self.suspects.for_newcomer(worker, verified, held, here)
        if suspect.size:
            self._current.partial_offers.pop(worker, None)
        return suspect

    def offer(
        self,
        worker: WorkerId,
        held: Indices,
        more: bool,
        held_bytes: int,
        bytes_per_second: float,
        weight: float = 1.0,
        marks: Marks | None = None,
    ) -> bool:
        """Take a worker's offer; returns whether all members have offered, so that a plan can be made."""
        check_weight(weight)
        attempt = self._current
        if worker not in attempt.members:
            raise _not_a_member(worker.id, attempt.number)
        if held.size and (held.min() < 0 or held.max() >= self.dataset.shards):
            shards = f"shard ids from 0 to {self.dataset.shards - 1}"
            raise RequestRefused("holdings_invalid", f"held must contain {shards}", "check the dataset")
        if marks is not None and marks.size != held.size:
            raise RequestRefused(
                "holdings_invalid", f"marks must be none or {held.size}, one per shard, got {marks.size}", "send both"
            )
        offer = attempt.partial_offers.setdefault(worker, Offer())
        offer.add(held, self.dataset.shards, marks)
        if more:
            return False
        offer.bytes, offer.bytes_per_second, offer.weight = held_bytes, bytes_per_second, weight
        attempt.offers[worker] = attempt.partial_offers.pop(worker)
        if self.suspects.has_any(worker.id):
            self.suspects.keep_held(worker.id, offer.ids)
        # The last member may disconnect before the plan is made, and offer again.
        return not (attempt.waiting_for or attempt.is_drafted)

    def take(self, attempt: DataAttempt, draft: Draft) -> None:
        """Let the members fetch what the draft says."""
        attempt.plan, attempt.totals, attempt.is_drafted = draft.plan, draft.totals, True
        attempt.outvoted = draft.outvoted
        # Without an origin a shard of which the majority is bad would be lost.
        attempt.replaced = draft.outvoted if self.dataset.has_origin else {}
        attempt.lost_in_plan = draft.lost
        self.bytes_per_sample, self.pace = draft.bytes_per_sample, draft.pace

    # What members report.

    def finish(self, worker_id: str, attempt: int, finished: FinishedTransfers) -> bool:
        """A member has fetched what it needs; returns whether it was the last one."""
        current = self.require_planned(attempt)
        was_over = current.is_over
        current.lost_at_origin.pop(worker_id, None)
        if any(worker.id == worker_id for worker in current.target):
            current.finished[worker_id] = finished
        if not current.is_over or was_over:
            return False
        self._measure(current)
        return True

    def mark_full(self, worker: WorkerId) -> bool:
        """A worker's store is full; returns whether that is news and the worker is needed.

        A worker that holds nothing alone is not needed.
        """
        is_news = worker not in self.full and self._holds_something_alone(worker)
        if is_news:
            self.full.add(worker)
        return is_news

    def report_bad(self, source: str, shard: int) -> bool:
        """A copy was reported as bad; returns whether that is new in this attempt."""
        if shard >= self.dataset.shards:
            raise self._no_such_shard(shard)
        known = set() if self.attempt is None else self.attempt.bad_copies
        is_news = (source, shard) not in known
        if len(known) < BAD_COPIES_KEPT_MAX:
            known.add((source, shard))
        return is_news

    def suspect(self, source: str, shard: int) -> int:
        """Do not count on a copy until it is verified; returns how many suspects were forgotten for lack of space.

        The suspects of absent workers, which may never return, are forgotten first.
        """
        if self.suspects.add(source, shard):
            return 0
        members = () if self.attempt is None else self.attempt.members
        forgotten = self.suspects.keep_holders({worker.id for worker in (*self.assignment.workers, *members)})
        return forgotten if self.suspects.add(source, shard) else forgotten + 1

    def report_lost(self, attempt: DataAttempt, worker_id: str, lost: LostShards) -> bool:
        """The origin gives a member nothing of shards that no worker holds; returns whether that is news."""
        self.require_shards(lost.number, lost.shards)
        known = attempt.lost_at_origin.get(worker_id, LostShards())
        attempt.lost_at_origin[worker_id] = lost
        return known[:2] != lost[:2]

    @staticmethod
    def has_arrived(attempt: DataAttempt, shards: Iterable[int]) -> bool:
        """Whether a member that has finished holds one of these shards by now."""
        plan, ids = attempt.plan, list(shards)
        if plan is None:
            return False
        finished = [place for place, worker in enumerate(plan.workers) if worker.id in attempt.finished]
        return bool(np.isin(np.concatenate((plan.owners[np.newaxis, ids], plan.replicas[:, ids])), finished).any())

    def suspects_in_plan(self, attempt: DataAttempt) -> list[tuple[str, int]]:
        """Worker and shard of the suspect copies that the plan counts on."""
        return [] if attempt.plan is None else list(self.suspects.used_by(attempt.plan))

    def abandon(self, attempt: int) -> bool:
        """End an attempt without a commit; returns whether that is news."""
        current = self._current
        if current.number != attempt:
            raise attempt_over(attempt)
        is_news = not current.is_abandoned
        current.plan, current.is_abandoned = None, True
        return is_news

    # Checks.

    def is_held_by(self, worker: WorkerId) -> bool:
        """Whether a worker is one of the committed world's holders."""
        return worker in self.assignment.workers

    def member(self, worker_id: str) -> WorkerId:
        found = next((worker for worker in self._current.members if worker.id == worker_id), None)
        if found is None:
            raise _not_a_member(worker_id, self._current.number)
        return found

    def require_planned(self, attempt: int) -> DataAttempt:
        """The current attempt; refused if it has another number or no plan."""
        current = self._current
        if current.number != attempt or current.plan is None:
            raise attempt_over(attempt)
        return current

    def require_shards(self, number: int, named: Sequence[int]) -> None:
        """Refuse a report of lost shards that the dataset cannot have."""
        shards = self.dataset.shards
        if not 1 <= number <= shards:
            text = f"count must be from 1 to {shards}, the shards of job {self.job}, got {number}"
            raise RequestRefused("shard_invalid", text, "check the dataset")
        if len(named) > NAMED_MAX:
            text = f"shards must name at most {NAMED_MAX}, got {len(named)}"
            raise RequestRefused("shard_invalid", text, "name the first ones")
        if (largest := max(named, default=0)) >= shards:
            raise self._no_such_shard(largest)

    @property
    def _current(self) -> DataAttempt:
        if self.attempt is None:
            raise RequestRefused("attempt_over", "no attempt is under way", "wait for the next rescale")
        return self.attempt

    def _no_such_shard(self, shard: int) -> RequestRefused:
        text = f"shard must be below {self.dataset.shards}, the shards of job {self.job}, got {shard}"
        return RequestRefused("shard_invalid", text, "check the dataset")

    def _holds_something_alone(self, worker: WorkerId) -> bool:
        offers = self._current.offers
        is_elsewhere = np.zeros(self.dataset.shards, np.bool_)
        for other, offer in offers.items():
            if other != worker:
                is_elsewhere[offer.ids] = True
        return worker in offers and not bool(is_elsewhere[offers[worker].ids].all())

    def _measure(self, attempt: DataAttempt) -> None:
        """Learn sizes and rates from the transfers where unknown; workers report theirs only with the next offer."""
        finished, plan = attempt.finished.values(), attempt.plan
        transfers = sum(one.transfers for one in finished)
        if transfers and not self.bytes_per_sample:
            samples_per_shard = self.dataset.samples / self.dataset.shards
            self.bytes_per_sample = sum(one.bytes for one in finished) / (transfers * samples_per_shard)
        lanes = 1 if plan is None else plan.lanes
        rates = (one.bytes / one.took_s / max(1, min(lanes, one.transfers)) for one in finished if one.took_s > 0)
        self.pace = self.pace or TransferPace.average(rates, self.bytes_per_sample)


def attempt_over(attempt: int) -> RequestRefused:
    return RequestRefused("attempt_over", f"attempt {attempt} is over", "use the newest attempt")


def _not_a_member(worker_id: str, attempt: int) -> RequestRefused:
    return RequestRefused(
        "not_a_member", f"{worker_id} is not a member of attempt {attempt}", "wait for the next attempt"
    )


def _described(dataset: DatasetSpec) -> str:
    origin = "with an origin" if dataset.has_origin else "without an origin"
    replicas = "1 replica" if dataset.replication == 1 else f"{dataset.replication or 'no'} replicas"
    return f"{dataset.samples} samples in {counted(dataset.shards, 'shard')}, {replicas}, {origin}"
