"""The data service: takes the members' offers of an attempt, plans the transfers, and follows them to their end.

Per attempt: OfferShards from all members → plan → TransfersPlanned → ReadTransfers → ReportShards from all members →
TransfersCompleted; the commit of the rescale makes the plan the current assignment.

Invariants:
- A plan is durable before any member is told of it.
- Members read their own part of a plan; no message to all carries it.
- Lost shards stop an attempt as the job's policy says; nothing else about the data does.
"""

from __future__ import annotations

from functools import partial
from typing import NoReturn

import numpy as np

from forged.clock import Clock
from forged.data.computations import Computations, Compute
from forged.data.inspection import DataInspection
from forged.data.limits import ShardLimits
from forged.data.messages import (
    NAMED_MAX,
    CopiesDiffer,
    CorruptShardFound,
    OfferShards,
    OfferTaken,
    ReadTransfers,
    ReportCorruptShard,
    ReportLostShards,
    ReportShards,
    ShardsLost,
    TransferPart,
    TransfersCompleted,
    TransfersPlanned,
)
from forged.data.model import Indices
from forged.data.ownership.attempt import DataAttempt, Draft, FinishedTransfers, LostShards
from forged.data.ownership.ownership import ShardOwnership, attempt_over
from forged.data.ownership.pages import transfer_page
from forged.data.ownership.planning import draft, last_holders
from forged.data.ownership_store import OWNER, OwnershipStore
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.messages import (
    AbortJob,
    AttemptMembers,
    ConfirmWorker,
    ControlReply,
    JobAborted,
    ReadAttempt,
    RescaleCompleted,
    RescaleJob,
    WorkerJoined,
)
from forged.elastic.model import LostDataPolicy
from forged.errors import RequestRefused
from forged.ids import check_name
from forged.jobs.model import JobRemoved
from forged.kernel.bus import DAEMON, Bus
from forged.kernel.messages import Call, Decision, Fact, Nothing, Record, Request
from forged.kernel.store.port import Store
from forged.log import SILENT, Log
from forged.phrases import counted
from forged.shares import Holder

OFFER_BYTES_MAX = 2 << 20
REASON_CHARS_MAX = 500
WORKER_JOINED = "a worker joined that may hold lost shards"


class DataService:
    """The data of all jobs."""

    def __init__(
        self, bus: Bus, clock: Clock, compute: Compute, log: Log = SILENT, *, limits: ShardLimits | None = None
    ) -> None:
        self.limits = limits or ShardLimits()
        self._bus = bus
        self._clock = clock
        self._computations = Computations(compute)
        self._log = log
        self._store = OwnershipStore(bus, log)
        self.jobs = self._store.jobs
        self._inspection = DataInspection(bus, clock, self._computations, self._store)
        bus.serve(OfferShards, self._offer, owner=OWNER)
        bus.serve(ReadTransfers, self._read_transfers, owner=OWNER)
        bus.serve(ReportShards, self._report, owner=OWNER)
        bus.serve(ReportLostShards, self._report_lost, owner=OWNER)
        bus.serve(ReportCorruptShard, self._report_corrupt, owner=OWNER)
        bus.on(RescaleCompleted, self._on_commit, name="data.commits", durable=True)
        bus.on(JobRemoved, self._on_job_removed, name="data.removal", durable=True)
        bus.on(WorkerJoined, self._on_worker_joined, name="data.joins")
        bus.on(JobAborted, self._on_job_aborted, name="data.ends")

    async def load(self, store: Store) -> None:
        """Become what the store holds."""
        await self._store.load(store)
        self._inspection.clear()

    # 1. Members offer what they hold.

    async def _offer(self, request: OfferShards, call: Call) -> Decision[OfferTaken]:
        held, marks = _ids(request.held), _ids(request.marks).view(np.uint64) if request.marks else None
        self._store.delete_unused()
        members = await self._members(request)
        ownership = self._defined(request, members)
        ownership.begin(
            members.attempt,
            members.target,
            members.draining,
            self._clock.monotonic(),
            cause=members.started_id,
            generation=members.generation,
        )
        worker = ownership.member(request.worker_id)
        suspect = ownership.copies_to_verify(worker, _ids(request.verified), held)
        self._store.write(self._store.suspect_changes(ownership))
        if suspect.size:
            if members.in_background and ownership.is_held_by(worker):
                # A bad copy is dropped, and the worker may train with it until it stops.
                self._stop_to_verify(ownership, request.attempt, f"{worker.id} has to verify suspect copies")
            return Decision(OfferTaken(suspect.astype("<i8").tobytes()))
        is_complete = ownership.offer(
            worker, held, request.more, request.held_bytes, request.bytes_per_second, request.weight, marks
        )
        self._store.write(self._store.suspect_changes(ownership))
        if not is_complete or ownership.attempt is None:
            return Decision(OfferTaken())
        config = ElasticTrainingConfig.from_settings(members.settings)
        facts = await self._plan(ownership, ownership.attempt, config, request, call.principal.holder)
        return Decision(OfferTaken(), facts, job=request.job, generation=members.generation, cause=members.started_id)

    async def _members(self, request: OfferShards | ReadTransfers | ReportLostShards | ReportShards) -> AttemptMembers:
        """The members of the request's attempt; refused when it is over or the worker is not one of them."""
        members = await self._bus.ask(ReadAttempt(request.job, request.worker_id, request.incarnation))
        if members.attempt != request.attempt:
            raise attempt_over(request.attempt)
        return members

    def _defined(self, request: OfferShards, members: AttemptMembers) -> ShardOwnership:
        """The job's ownership. The first offer defines the dataset; until a world has used it, so may another."""
        ownership = self.jobs.get(request.job)
        if ownership is None or not (members.generation or ownership.is_for(request.dataset, members.attempt)):
            cause = members.joined_id or members.started_id
            self.limits.require_room(
                request.job, request.dataset, {name: one.dataset for name, one in self.jobs.items()}
            )
            ownership = self._store.define(request.job, request.dataset, members.attempt, members.generation, cause)
        ownership.require_same(request.dataset)
        return ownership

    # 2. The last offer completes the plan.

    async def _plan(
        self,
        ownership: ShardOwnership,
        attempt: DataAttempt,
        config: ElasticTrainingConfig,
        request: OfferShards,
        holder: Holder,
    ) -> tuple[Fact, ...]:
        made: Draft = await self._computations.run(holder, ownership.job, partial(draft, ownership, attempt, config))
        # A worker may have joined meanwhile, another attempt may have begun, or the state may have been reloaded.
        members = await self._members(request)
        is_current = ownership.attempt is attempt and self.jobs.get(ownership.job) is ownership
        if attempt.is_abandoned or not is_current:
            raise attempt_over(attempt.number)
        if attempt.is_drafted:
            return ()
        ownership.take(attempt, made)
        attempt.planned_at = self._clock.monotonic()
        if attempt.outvoted:
            if attempt.replaced and members.in_background:
                # Workers may train with the replaced copies until they stop.
                attempt.plan, attempt.is_abandoned = None, True
                why = f"workers hold different bytes of {counted(attempt.differing.size, 'shard')}"
                self._submit(RescaleJob(ownership.job, why, synchronous=True))
                return ()
            self._publish_differing(ownership.job, attempt)
        if attempt.lost_in_plan.number:
            attempt.plan = None
            if members.in_background:
                self._stop_training(ownership.job, attempt)
            else:
                lost = attempt.lost_in_plan = _with_waiting_workers(attempt.lost_in_plan, members)
                self._publish_lost(ownership.job, attempt, lost)
                self._apply_lost_data_policy(ownership.job, attempt, lost, members, certain=True)
            return ()
        self._store.keep_plan(ownership.job, attempt.number, made.assignment, members.generation)
        return (TransfersPlanned(attempt.number, attempt.totals),)

    def _publish_differing(self, job: str, attempt: DataAttempt) -> None:
        shards, workers = attempt.differing, [worker.id for worker in attempt.outvoted]
        self._publish(
            job, attempt, CopiesDiffer(attempt.number, shards.size, shards[:NAMED_MAX].tolist(), workers[:NAMED_MAX])
        )

    # 3. Members read their part, fetch, and report.

    async def _read_transfers(self, request: ReadTransfers, call: Call) -> TransferPart:
        await self._members(request)
        ownership = self._store.ownership(request.job)
        return transfer_page(ownership, request.worker_id, request.attempt, request.after)

    async def _report(self, request: ReportShards, call: Call) -> Decision[Nothing]:
        await self._members(request)
        ownership = self._store.ownership(request.job)
        ownership.require_planned(request.attempt)
        if request.missing:
            shards = counted(request.missing, "shard")
            self._abandon(ownership, request.attempt, f"{request.worker_id} found only bad copies of {shards}")
            return Decision(Nothing())
        if request.not_stored:
            if ownership.mark_full(ownership.member(request.worker_id)):
                shards = counted(request.not_stored, "assigned shard")
                why = f"{request.worker_id} cannot store {shards}: free space on its disk"
                self._abandon(ownership, request.attempt, why, synchronous=False)
            return Decision(Nothing())
        finished = FinishedTransfers(request.transfers, request.received, request.took_s)
        is_last = ownership.finish(request.worker_id, request.attempt, finished)
        attempt = ownership.attempt
        if not is_last or attempt is None:
            return Decision(Nothing())
        if suspects := ownership.suspects_in_plan(attempt):
            # A member reports bad copies before it reports that it is done, so all of them are known here.
            holder, shard = suspects[0]
            more = f", and {counted(len(suspects) - 1, 'other')}" if len(suspects) > 1 else ""
            self._stop_to_verify(ownership, request.attempt, f"the copy of shard {shard} at {holder} is suspect{more}")
        attempt.took_s = round(self._clock.monotonic() - attempt.planned_at, 3)
        results = list(attempt.finished.values())
        completed = TransfersCompleted(
            attempt.number,
            sum(one.transfers for one in results),
            sum(one.bytes for one in results),
            attempt.took_s,
            attempt.totals.estimated_s,
        )
        return Decision(Nothing(), (completed,), job=request.job, generation=attempt.generation, cause=attempt.cause)

    async def _report_corrupt(self, request: ReportCorruptShard, call: Call) -> Decision[Nothing]:
        await self._bus.ask(ConfirmWorker(request.job, request.worker_id, request.incarnation))
        job, source = request.job, check_name("source", request.source)
        ownership = self._store.ownership(job)
        is_news = ownership.report_bad(source, request.shard)
        if forgotten := ownership.suspect(source, request.shard):
            self._log.warning("too many suspect copies; some are trusted again", job=job, copies=forgotten)
        writes = self._store.suspect_changes(ownership)
        if not is_news:
            return Decision(Nothing(), writes=writes)
        found = CorruptShardFound(source, request.shard, request.worker_id)
        attempt = ownership.attempt
        if attempt is None or attempt.is_over:
            # A transfer of the script found it.
            return Decision(Nothing(), (found,), writes, job, ownership.assignment.generation)
        return Decision(Nothing(), (found,), writes, job, attempt.generation, attempt.cause)

    def _stop_to_verify(self, ownership: ShardOwnership, attempt: int, why: str) -> NoReturn:
        """Stop the training while copies are verified, and tell the caller that the attempt is over."""
        self._abandon(ownership, attempt, why)
        raise attempt_over(attempt)

    def _abandon(self, ownership: ShardOwnership, attempt: int, why: str, *, synchronous: bool = True) -> None:
        """Start another attempt, in which all members offer anew.

        It is synchronous by default, because a worker may train with a copy that it has to drop.
        """
        if ownership.abandon(attempt):
            self._submit(RescaleJob(ownership.job, why, synchronous=synchronous))

    # Lost shards.

    async def _report_lost(self, request: ReportLostShards, call: Call) -> Decision[Nothing]:
        members = await self._members(request)
        job, ownership = request.job, self._store.ownership(request.job)
        attempt, reason = ownership.require_planned(request.attempt), request.reason.strip()[:REASON_CHARS_MAX]
        ownership.require_shards(request.count, request.shards)
        holders = last_holders(ownership.assignment, np.array(request.shards, np.int64), attempt.members)
        reported = LostShards(request.count, tuple(request.shards), f"{request.worker_id}: {reason}", holders)
        lost = _with_waiting_workers(reported, members)
        is_news = ownership.report_lost(attempt, request.worker_id, lost)
        if attempt.is_abandoned:
            return Decision(Nothing())
        if ownership.has_arrived(attempt, lost.shards):
            self._restart(job, attempt, "a worker has obtained shards that another worker needs")
        elif members.in_background:
            self._stop_training(job, attempt)
        else:
            if is_news:
                self._publish_lost(job, attempt, lost)
            self._apply_lost_data_policy(job, attempt, lost, members, certain=request.certain)
        return Decision(Nothing())

    def _stop_training(self, job: str, attempt: DataAttempt) -> None:
        attempt.is_abandoned = True
        self._submit(RescaleJob(job, f"no worker has {counted(attempt.lost.number, 'shard')}", synchronous=True))

    def _publish_lost(self, job: str, attempt: DataAttempt, lost: LostShards) -> None:
        holders = list(lost.last_held_by)
        self._publish(job, attempt, ShardsLost(attempt.number, lost.number, list(lost.shards), lost.reason, holders))

    def _apply_lost_data_policy(
        self, job: str, attempt: DataAttempt, lost: LostShards, members: AttemptMembers, *, certain: bool
    ) -> None:
        """Take in workers that wait and may hold the shards; else abort or wait, as the job says."""
        config = ElasticTrainingConfig.from_settings(members.settings)
        if members.has_room and members.waiting:
            self._restart(job, attempt, WORKER_JOINED)
        elif certain and config.lost_data_policy is LostDataPolicy.ABORT:
            named = ", ".join(map(str, lost.shards)) + (", …" if lost.number > NAMED_MAX else "")
            why = f" ({lost.reason})" if lost.reason else ""
            self._submit(AbortJob(job, f"{counted(lost.number, 'shard')} lost: {named}{why}"))

    def _restart(self, job: str, attempt: DataAttempt, why: str) -> None:
        attempt.is_abandoned = True
        self._submit(RescaleJob(job, why))

    def _submit(self, request: Request[ControlReply]) -> None:
        """Send a request whose refusal means that it is no longer needed."""
        self._bus.submit(request, Call(DAEMON, OWNER))

    def _publish(self, job: str, attempt: DataAttempt, fact: Fact) -> None:
        """Publish a fact before the decisions that follow from it."""
        decision = Decision(None, (fact,), job=job, generation=attempt.generation, cause=attempt.cause)
        self._bus.ledger.append(decision, origin=OWNER)

    # Facts of other services.

    def _on_commit(self, record: Record) -> Decision[None] | None:
        fact = record.fact
        if not isinstance(fact, RescaleCompleted):
            return None
        writes = self._store.commit(record.job, fact.attempt, fact.delta.generation)
        return Decision(None, writes=writes) if writes else None

    def _on_job_removed(self, record: Record) -> None:
        self._store.remove(record.job)
        self._inspection.forget(record.job)

    def _on_job_aborted(self, record: Record) -> None:
        ownership = self.jobs.get(record.job)
        if ownership is not None and ownership.attempt is not None:
            ownership.attempt.is_aborted = not ownership.attempt.is_over

    def _on_worker_joined(self, record: Record) -> None:
        fact, ownership = record.fact, self.jobs.get(record.job)
        if not isinstance(fact, WorkerJoined) or ownership is None or ownership.attempt is None:
            return
        # A worker that joins before shards are known to be lost is seen when they are.
        if ownership.attempt.lacks_shards:
            self._restart(record.job, ownership.attempt, WORKER_JOINED)


def _with_waiting_workers(lost: LostShards, members: AttemptMembers) -> LostShards:
    """Add to the reason that workers wait outside a full world and may hold the shards, if any do."""
    waiting = 0 if members.has_room else members.waiting
    if not waiting:
        return lost
    named = "1 waiting worker was" if waiting == 1 else f"{waiting} waiting workers were"
    not_asked = f"{named} not asked, because the world is full"
    return lost._replace(reason=f"{lost.reason}; {not_asked}" if lost.reason else not_asked)


def _ids(held: bytes) -> Indices:
    if len(held) % 8 or len(held) > OFFER_BYTES_MAX:
        raise RequestRefused(
            "holdings_invalid",
            f"held must be int64 values in at most {OFFER_BYTES_MAX} bytes, got {len(held)} bytes",
            "send them in parts",
        )
    return np.frombuffer(held, "<i8").astype(np.int64)
