"""Training data on the bus: who holds it, and what travels when the workers change.

Law: an attempt's plan is kept before anybody is told of it, so that a daemon that comes back when the attempt was
committed knows what was agreed; it is forgotten when no commit of it can be heard of any more. Members ask for their
part; nothing large is said to all. What cannot be had stops the attempt by the job's policy, and no other thing does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NoReturn, TypeVar

import numpy as np

from forged.clock import Clock
from forged.data.messages import (
    NAMED_MAX,
    CopiesDiffer,
    CorruptShardFound,
    DatasetDefined,
    DataView,
    OfferShards,
    OfferTaken,
    OwnersPage,
    PlanData,
    ReadOwners,
    ReadTransfers,
    ReportCorruptShard,
    ReportLostShards,
    ReportShards,
    ShardsLost,
    ShowData,
    ShowTransfers,
    TransferPart,
    TransfersCompleted,
    TransfersPlanned,
    TransfersView,
    TransferTotals,
    WorkerTransfers,
)
from forged.data.ownership.gathering import Assignment, Draft, Finished, Gathering, Lack
from forged.data.ownership.ownership import Ids, ShardOwnership
from forged.data.ownership.records import (
    PREFIX,
    Restored,
    dataset_write,
    doubt_writes,
    holders_write,
    job_of,
    keys_of,
    piece_writes,
    restored,
)
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.messages import (
    AbortJob,
    AttemptMembers,
    AttemptProgress,
    ControlReply,
    JobAborted,
    ReadAttempt,
    RescaleCompleted,
    RescaleJob,
    WorkerJoined,
)
from forged.elastic.model import LostDataPolicy
from forged.errors import PeerError, RequestRefused
from forged.ids import check_name
from forged.jobs.model import JobRemoved, ShowJob
from forged.kernel.bus import DAEMON, Bus
from forged.kernel.ledger import read_all
from forged.kernel.messages import Call, Decision, Fact, Nothing, Record, Request
from forged.kernel.store.port import Store
from forged.log import SILENT, Log
from forged.phrases import counted

T = TypeVar("T")

OWNER = "data"
PART_MAX = 40
"""Keys that are decided together: a transaction has its limits."""
OFFER_BYTES_MAX = 2 << 20
REASON_CHARS_MAX = 500
SOMEBODY_CAME = "somebody has come who may hold what is missing"
Compute = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs arithmetic somewhere where it holds up nobody."""


async def inline(act: Callable[[], T]) -> T:
    """Run it here: there are no threads in a simulation."""
    return act()


class DataService:
    """Owns the custodies of all jobs."""

    def __init__(self, bus: Bus, clock: Clock, compute: Compute, log: Log = SILENT) -> None:
        self.custodies: dict[str, ShardOwnership] = {}
        self._bus = bus
        self._clock = clock
        self._compute = compute
        self._log = log
        self._committed: dict[str, int] = {}
        """The attempt that led to what is held, of every job where there was one."""
        self._heard: dict[str, int] = {}
        """The newest generation of which it is known what led to it."""
        self._planned: defaultdict[str, dict[int, Assignment]] = defaultdict(dict)
        """What was kept for attempts that may yet be committed."""
        self._remains: dict[str, None] = {}
        """Keys of what is no more, which are deleted by and by."""
        self._progress: dict[str, tuple[int, dict[str, AttemptProgress]]] = {}
        self._serve()

    def _serve(self) -> None:
        serve = self._bus.serve
        serve(OfferShards, self._offer, owner=OWNER)
        serve(ReadTransfers, self._transfers, owner=OWNER)
        serve(ReportShards, self._finish, owner=OWNER)
        serve(ReportLostShards, self._refused, owner=OWNER)
        serve(ReportCorruptShard, self._corrupt, owner=OWNER)
        serve(ReadOwners, self._owners, owner=OWNER)
        serve(ShowData, self._show, owner=OWNER)
        serve(ShowTransfers, self._show_transfers, owner=OWNER)
        serve(PlanData, self._preview, owner=OWNER)
        self._bus.on_signal(AttemptProgress, self._progressed, name="data.progress")
        self._bus.on(RescaleCompleted, self._adopt, name="data.commits", durable=True)
        self._bus.on(JobRemoved, self._removed, name="data.removal", durable=True)
        self._bus.on(WorkerJoined, self._joined, name="data.joins")
        self._bus.on(JobAborted, self._aborted, name="data.ends")

    async def load(self, store: Store) -> None:
        """Become what the store holds."""
        entries: defaultdict[str, list[tuple[str, bytes]]] = defaultdict(list)
        for entry in await read_all(store, PREFIX):
            entries[job_of(entry.key)].append((entry.key, entry.value))
        self._clear()
        for job, found in entries.items():
            known = self._restored(job, found)
            if known is None:
                self._remains.update(dict.fromkeys(key for key, _ in found))
                continue
            self.custodies[job], self._planned[job] = known.custody, dict(known.planned)
            self._remains.update(dict.fromkeys(known.remains))
            self._heard[job] = known.custody.assignment.generation
            if known.attempt:
                self._committed[job] = known.attempt

    def _restored(self, job: str, entries: list[tuple[str, bytes]]) -> Restored | None:
        """What comes back of a job. What cannot be read is in nobody's way: workers say anew what they hold."""
        try:
            return restored(job, entries)
        except PeerError as error:
            self._log.error("what is known of a job's data is forgotten", job=job, why=error.message)
            return None

    def _clear(self) -> None:
        self.custodies.clear()
        self._committed.clear()
        self._heard.clear()
        self._planned.clear()
        self._remains.clear()
        self._progress.clear()

    # What workers say.

    async def _offer(self, request: OfferShards, call: Call) -> Decision[OfferTaken]:
        held, marks = _ids(request.held), _ids(request.marks).view(np.uint64) if request.marks else None
        self._sweep()
        members = await self._members(request)
        custody = self._custody(request, members)
        custody.gather(
            members.attempt,
            members.target,
            members.leaving,
            self._clock.monotonic(),
            cause=members.started_id,
            generation=members.generation,
        )
        worker = custody.member(request.worker_id)
        doubted = custody.looks_again(worker, _ids(request.verified), held)
        self._append(self._doubts_of(custody))
        if doubted.size:
            if members.in_background and custody.is_held_by(worker):
                # What is bad is dropped, and may be what the worker trains with until it stops.
                self._stop_to_look(custody, request.attempt, f"{worker.id} has copies that are in doubt")
            return Decision(OfferTaken(doubted.astype("<i8").tobytes()))
        is_complete = custody.offer(
            worker, held, request.more, request.held_bytes, request.bytes_per_second, request.weight, marks
        )
        self._append(self._doubts_of(custody))
        if not is_complete or custody.gathering is None:
            return Decision(OfferTaken())
        config = ElasticTrainingConfig.from_settings(members.settings)
        facts = await self._settle(custody, custody.gathering, config, request)
        return Decision(OfferTaken(), facts, job=request.job, generation=members.generation, cause=members.started_id)

    async def _members(self, request: OfferShards | ReportLostShards) -> AttemptMembers:
        """Who is in the attempt, for one who is; refused when it is over."""
        members = await self._bus.ask(ReadAttempt(request.job, request.worker_id, request.incarnation))
        if members.attempt != request.attempt:
            raise RequestRefused("attempt_over", f"attempt {request.attempt} is over", "go by the newest")
        return members

    def _custody(self, request: OfferShards, members: AttemptMembers) -> ShardOwnership:
        """The job's data, which the first who offers some defines; anew where nobody has ever trained with it."""
        custody = self.custodies.get(request.job)
        if custody is None or not (members.generation or custody.is_for(request.dataset, members.attempt)):
            custody = self._define(request, members)
        custody.require_same(request.dataset)
        return custody

    def _define(self, request: OfferShards, members: AttemptMembers) -> ShardOwnership:
        job, former = request.job, self.custodies.get(request.job)
        custody = ShardOwnership(job, request.dataset)
        if former is not None:
            custody.inherit(former)
            self._append(self._doubts_of(former))
            self._forget_planned(job, members.attempt)
        self.custodies[job] = custody
        defined = Decision(
            None,
            (DatasetDefined(request.dataset),),
            dataset_write(job, request.dataset),
            job,
            members.generation,
            members.joined_id or members.started_id,
        )
        self._bus.ledger.append(defined, origin=OWNER)
        return custody

    async def _settle(
        self, custody: ShardOwnership, gathering: Gathering, config: ElasticTrainingConfig, request: OfferShards
    ) -> tuple[Fact, ...]:
        """Plan, keep the plan, and say what it is."""
        draft: Draft = await self._compute(partial(custody.draft, gathering, config))
        # Somebody may have come meanwhile.
        members = await self._members(request)
        if gathering.is_left or custody.gathering is not gathering or self.custodies.get(custody.job) is not custody:
            # Another attempt has begun meanwhile, or is about to, or the state was read anew.
            raise RequestRefused("attempt_over", f"attempt {gathering.attempt} is over", "go by the newest")
        if gathering.is_drafted:
            return ()
        custody.settle(gathering, draft)
        gathering.began_at = self._clock.monotonic()
        if gathering.outvoted:
            if gathering.replaced and members.in_background:
                # What is replaced is what some train with until they stop.
                gathering.plan, gathering.is_left = None, True
                why = f"workers hold something else than others of {counted(gathering.differing.size, 'shard')}"
                self._submit(RescaleJob(custody.job, why, stops=True))
                return ()
            self._tell_differing(custody.job, gathering)
        if gathering.lost.number:
            gathering.plan = None
            if members.in_background:
                self._stop_training(gathering, custody.job)
            else:
                lack = gathering.lost = _in_full(gathering.lost, members)
                self._tell_lost(custody.job, gathering, lack)
                self._do_without(custody.job, gathering, lack, members, certain=True)
            return ()
        held = Assignment(0, gathering.target, draft.plan.owners, draft.plan.replicas, draft.weights)
        self._keep(custody.job, gathering.attempt, held, members.generation)
        return (TransfersPlanned(gathering.attempt, gathering.totals),)

    def _stop_training(self, gathering: Gathering, job: str) -> None:
        """Nobody trains on without them."""
        gathering.is_left = True
        self._submit(RescaleJob(job, f"nobody has {gathering.lack.number} of the shards any more", stops=True))

    def _tell_differing(self, job: str, gathering: Gathering) -> None:
        shards, workers = gathering.differing, [worker.id for worker in gathering.outvoted]
        differ = CopiesDiffer(gathering.attempt, shards.size, shards[:NAMED_MAX].tolist(), workers[:NAMED_MAX])
        decision = Decision(None, (differ,), job=job, generation=gathering.generation, cause=gathering.cause)
        self._bus.ledger.append(decision, origin=OWNER)

    def _tell_lost(self, job: str, gathering: Gathering, lack: Lack) -> None:
        by = list(lack.last_held_by)
        lost = ShardsLost(gathering.attempt, lack.number, list(lack.shards), lack.reason, by)
        # What follows from it comes behind it in the history.
        decision = Decision(None, (lost,), job=job, generation=gathering.generation, cause=gathering.cause)
        self._bus.ledger.append(decision, origin=OWNER)

    def _do_without(
        self, job: str, gathering: Gathering, lack: Lack, members: AttemptMembers, *, certain: bool
    ) -> None:
        """Ask those who have come meanwhile, if there are any for whom there is room; else go by the policy."""
        config = ElasticTrainingConfig.from_settings(members.settings)
        if members.has_room and members.waiting:
            self._begin_anew(job, gathering, SOMEBODY_CAME)
        elif certain and config.lost_data_policy is LostDataPolicy.ABORT:
            named = ", ".join(map(str, lack.shards)) + (", …" if lack.number > NAMED_MAX else "")
            why = f" ({lack.reason})" if lack.reason else ""
            they = "it" if lack.number == 1 else "they"
            number = counted(lack.number, "shard")
            reason = f"nobody has {number} any more, and {they} cannot be had again: {named}{why}"
            self._submit(AbortJob(job, reason))

    def _begin_anew(self, job: str, gathering: Gathering, why: str) -> None:
        gathering.is_left = True
        self._submit(RescaleJob(job, why))

    def _submit(self, request: Request[ControlReply]) -> None:
        """Ask for what may be refused, which then is no more needed."""
        self._bus.submit(request, Call(DAEMON, OWNER))

    def _keep(self, job: str, attempt: int, assignment: Assignment, generation: int) -> None:
        """Write down what was planned. What was planned before came to nothing, unless it is what led to the world of
        this generation, and that commit was not heard of here yet."""
        if self._heard.get(job, 0) >= generation:
            self._forget_planned(job, attempt)
        self._planned[job][attempt] = assignment
        pieces = piece_writes(job, attempt, assignment)
        while part := dict(islice(pieces, PART_MAX)):
            self._append(dict(part))
        self._append(holders_write(job, attempt, assignment))

    def _forget_planned(self, job: str, before: int) -> None:
        planned = self._planned[job]
        for older in [number for number in planned if number < before]:
            self._forget(job, older, planned.pop(older))

    def _forget(self, job: str, attempt: int, assignment: Assignment) -> None:
        self._delete(keys_of(job, attempt, assignment.owners.size, 1 + len(assignment.replicas)))

    def _sweep(self) -> None:
        """Delete what is left of jobs that are no more."""
        remains, self._remains = list(self._remains), {}
        self._delete(remains)

    def _delete(self, keys: list[str]) -> None:
        for part in _parts(keys):
            self._append(dict.fromkeys(part))

    def _append(self, writes: dict[str, bytes | None]) -> None:
        if writes:
            self._bus.ledger.append(Decision(None, writes=writes), origin=OWNER)

    def _transfers(self, request: ReadTransfers, call: Call) -> TransferPart:
        return self._get(request.job).part_for(request.worker_id, request.attempt, request.after)

    def _finish(self, request: ReportShards, call: Call) -> Decision[Nothing]:
        custody = self._get(request.job)
        custody.require_under_way(request.attempt)
        if request.missing:
            found = f"{request.worker_id} found bad copies of {counted(request.missing, 'shard')}, and no other"
            self._look_again(custody, request.attempt, found)
            return Decision(Nothing())
        if request.not_stored:
            if custody.is_news_that_full(custody.member(request.worker_id)):
                what = counted(request.not_stored, "shard")
                why = f"{request.worker_id} cannot keep {what} that it was to take: make room on its disk"
                self._look_again(custody, request.attempt, why, stops=False)
            return Decision(Nothing())
        finished = Finished(request.transfers, request.received, request.took_s)
        is_last = custody.finish(request.worker_id, request.attempt, finished)
        gathering = custody.gathering
        if not is_last or gathering is None:
            return Decision(Nothing())
        if doubted := custody.in_doubt(gathering):
            # Whoever has found one said so before it was done, so all that were found are known by now.
            holder, shard = doubted[0]
            more = f", and {counted(len(doubted) - 1, 'other')}" if len(doubted) > 1 else ""
            self._stop_to_look(custody, request.attempt, f"the copy of shard {shard} at {holder} is in doubt{more}")
        gathering.took_s = round(self._clock.monotonic() - gathering.began_at, 3)
        moved = list(gathering.finished.values())
        completed = TransfersCompleted(
            gathering.attempt,
            sum(one.transfers for one in moved),
            sum(one.bytes for one in moved),
            gathering.took_s,
            gathering.totals.estimated_s,
        )
        return Decision(
            Nothing(), (completed,), job=request.job, generation=gathering.generation, cause=gathering.cause
        )

    def _stop_to_look(self, custody: ShardOwnership, attempt: int, why: str) -> NoReturn:
        """Have nobody train while copies are looked at; for who has asked, the attempt is over."""
        self._look_again(custody, attempt, why)
        raise RequestRefused("attempt_over", f"attempt {attempt} is over", "go by the newest")

    def _look_again(self, custody: ShardOwnership, attempt: int, why: str, *, stops: bool = True) -> None:
        """Have all say anew what they hold; nobody trains with a copy that may be bad, or loses it under its hands."""
        if custody.give_up(attempt):
            self._submit(RescaleJob(custody.job, why, stops=stops))

    async def _refused(self, request: ReportLostShards, call: Call) -> Decision[Nothing]:
        members = await self._members(request)
        job, custody = request.job, self._get(request.job)
        gathering, reason = custody.require_under_way(request.attempt), request.reason.strip()[:REASON_CHARS_MAX]
        custody.require_shards(request.count, request.shards)
        by = custody.last_holders(np.array(request.shards, np.int64), gathering.members)
        lack = _in_full(Lack(request.count, tuple(request.shards), f"{request.worker_id}: {reason}", by), members)
        is_news = custody.refuse(gathering, request.worker_id, lack)
        if gathering.is_left:
            return Decision(Nothing())
        if custody.has_come(gathering, lack.shards):
            self._begin_anew(job, gathering, "somebody has by now what another needs")
        elif members.in_background:
            self._stop_training(gathering, job)
        else:
            if is_news:
                self._tell_lost(job, gathering, lack)
            self._do_without(job, gathering, lack, members, certain=request.certain)
        return Decision(Nothing())

    def _corrupt(self, request: ReportCorruptShard, call: Call) -> Decision[Nothing]:
        job, source, custody = request.job, check_name("source", request.source), self._get(request.job)
        is_news = custody.complain(source, request.shard)
        if forgotten := custody.doubt(source, request.shard):
            self._log.warning(
                "bad copies are believed again, as so many cannot be remembered", job=job, copies=forgotten
            )
        writes = self._doubts_of(custody)
        if not is_news:
            return Decision(Nothing(), writes=writes)
        found = CorruptShardFound(source, request.shard, request.worker_id)
        gathering = custody.gathering
        if gathering is None or gathering.is_over:
            # A script had it moved besides.
            return Decision(Nothing(), (found,), writes, job, custody.assignment.generation)
        return Decision(Nothing(), (found,), writes, job, gathering.generation, gathering.cause)

    def _doubts_of(self, custody: ShardOwnership) -> dict[str, bytes | None]:
        """What is new about them, to be written; what does not fit into one decision is written at once."""
        writes = doubt_writes(custody.job, custody.doubts.changes())
        while len(writes) > PART_MAX:
            self._append({key: writes.pop(key) for key in list(islice(writes, PART_MAX))})
        return writes

    def _progressed(self, signal: AttemptProgress, call: Call) -> None:
        attempt, known = self._progress.get(signal.job, (0, {}))
        if signal.attempt > attempt:
            attempt, known = signal.attempt, {}
        if signal.attempt == attempt and signal.job in self.custodies:
            known[signal.worker_id] = signal
            self._progress[signal.job] = attempt, known

    # What happens.

    def _adopt(self, record: Record) -> Decision[None] | None:
        """A rescale was committed."""
        fact, custody = record.fact, self.custodies.get(record.job)
        if custody is None or not isinstance(fact, RescaleCompleted):
            return None
        self._heard[record.job] = max(fact.delta.epoch, self._heard.get(record.job, 0))
        planned = self._planned[record.job].pop(fact.attempt, None)
        if planned is None:
            return None
        self._forget_planned(record.job, fact.attempt)
        held = replace(planned, generation=fact.delta.epoch)
        before, former = self._committed.get(record.job), custody.assignment
        custody.assignment, self._committed[record.job] = held, fact.attempt
        custody.full.clear()
        if before is not None and before != fact.attempt:
            self._forget(record.job, before, former)
        return Decision(None, writes=holders_write(record.job, fact.attempt, held))

    def _removed(self, record: Record) -> None:
        custody = self.custodies.pop(record.job, None)
        if custody is None:
            return
        self._append(dict.fromkeys(dataset_write(record.job, custody.dataset)))
        kept = self._planned.pop(record.job, {})
        self._heard.pop(record.job, None)
        committed = self._committed.pop(record.job, None)
        if committed is not None:
            kept[committed] = custody.assignment
        for attempt, assignment in kept.items():
            self._forget(record.job, attempt, assignment)
        custody.doubts.forget_all_but(())
        self._append(self._doubts_of(custody))
        self._progress.pop(record.job, None)
        self._sweep()

    def _aborted(self, record: Record) -> None:
        """Nothing is waited for any more."""
        custody = self.custodies.get(record.job)
        if custody is not None and custody.gathering is not None:
            custody.gathering.is_aborted = not custody.gathering.is_over

    def _joined(self, record: Record) -> None:
        """Somebody came, who may have what is missing."""
        fact, custody = record.fact, self.custodies.get(record.job)
        if not isinstance(fact, WorkerJoined):
            return
        # Whoever comes while it is not known yet that some are missing is seen when it is.
        if custody is not None and custody.gathering is not None and custody.gathering.lacks_shards:
            self._begin_anew(record.job, custody.gathering, SOMEBODY_CAME)

    # What is asked.

    def _get(self, job: str) -> ShardOwnership:
        custody = self.custodies.get(job)
        if custody is not None:
            return custody
        self._bus.dispatcher.require_job(job)
        raise RequestRefused("job_without_data", f"job {job[:80]!r} has no dataset", "give its workers one")

    def _owners(self, request: ReadOwners, call: Call) -> OwnersPage:
        return self._get(request.job).owners_page(request.after)

    async def _show(self, request: ShowData, call: Call) -> DataView:
        view: DataView = await self._compute(self._get(request.job).view)
        return view

    def _show_transfers(self, request: ShowTransfers, call: Call) -> TransfersView:
        gathering = self._get(request.job).gathering
        if gathering is None:
            raise RequestRefused("transfers_none", f"nothing has travelled in job {request.job} yet", "ask later")
        workers, lack = list(self._workers_at_it(request.job, gathering)), gathering.lack
        return TransfersView(
            job=request.job,
            attempt=gathering.attempt,
            running=not (gathering.is_over or gathering.is_aborted),
            totals=gathering.totals,
            done=sum(worker.done for worker in workers),
            bytes=sum(worker.bytes for worker in workers),
            elapsed_s=self._elapsed_s(gathering),
            waiting_for=[worker.id for worker in gathering.waiting_for],
            lost=lack.number,
            lost_shards=list(lack.shards),
            lost_because=lack.reason,
            last_held_by=list(lack.last_held_by),
            aborted=gathering.is_aborted,
            planned=gathering.plan is not None,
            workers=workers,
        )

    def _elapsed_s(self, gathering: Gathering) -> float:
        if gathering.took_s is not None or gathering.plan is None:
            return gathering.took_s or 0.0
        return round(self._clock.monotonic() - gathering.began_at, 3)

    def _workers_at_it(self, job: str, gathering: Gathering) -> Iterator[WorkerTransfers]:
        attempt, progress = self._progress.get(job, (0, {}))
        for worker in gathering.target:
            told = progress.get(worker.id) if attempt == gathering.attempt else None
            finished = gathering.finished.get(worker.id)
            done, moved, _ = finished or (Finished(told.shards, told.data_bytes) if told else Finished(0, 0))
            transfers = 0 if gathering.plan is None else len(gathering.plan.for_worker(worker))
            yield WorkerTransfers(worker.id, done, transfers, moved, finished is not None)

    async def _preview(self, request: PlanData, call: Call) -> TransferTotals:
        custody, job = self._get(request.job), await self._bus.ask(ShowJob(request.job))
        config = ElasticTrainingConfig.from_settings(job.settings)
        totals: TransferTotals = await self._compute(partial(custody.preview, request.workers, config, request.gone))
        return totals


def _in_full(lack: Lack, members: AttemptMembers) -> Lack:
    """What cannot be had; and that somebody may have it who finds no room in the world, if that is so."""
    waiting = 0 if members.has_room else members.waiting
    if not waiting:
        return lack
    who = "1 worker waits and was" if waiting == 1 else f"{waiting} workers wait and were"
    not_asked = f"{who} not asked, because the world is full"
    return lack._replace(reason=f"{lack.reason}; {not_asked}" if lack.reason else not_asked)


def _ids(held: bytes) -> Ids:
    if len(held) % 8 or len(held) > OFFER_BYTES_MAX:
        raise RequestRefused(
            "holdings_invalid",
            f"held has {len(held)} bytes, which are no whole numbers of 8 bytes, or more than {OFFER_BYTES_MAX}",
            "give int64 in parts",
        )
    return np.frombuffer(held, "<i8").astype(np.int64)


def _parts(keys: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(keys), PART_MAX):
        yield keys[start : start + PART_MAX]
