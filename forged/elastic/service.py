"""Elastic training on the bus: the coordinator.

Law: a cluster is changed by one call at a time, and what comes out of the call is decided together, at once. What
happens by itself (a connection that is lost, time that is over) waits until decisions can be written; what somebody
asks for is refused until then. A fact that made a rescale necessary is that rescale's cause.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup, TaskStatus

from forged.auth.model import Role
from forged.clock import Clock
from forged.elastic.compatibility import check_shared_config
from forged.elastic.config import LEARNING_RATE_MAX, require_trainable
from forged.elastic.coordinator.cluster import Cluster
from forged.elastic.coordinator.records import PREFIX, anew, job_of, restored, writes
from forged.elastic.failure_detector.detector import NEVER
from forged.elastic.membership.member import Member
from forged.elastic.messages import (
    INCARNATION_BYTES,
    AbortJob,
    AnnounceLeave,
    AttemptMembers,
    AttemptProgress,
    ClusterPage,
    ClusterView,
    ControlReply,
    DrainReply,
    DrainWorker,
    EvictWorker,
    Heartbeat,
    JobAborted,
    JobCompleted,
    JobWaiting,
    JoinJob,
    JoinReply,
    LeaveJob,
    LeaveReply,
    ListClusters,
    ListWorkers,
    PauseJob,
    PlanRescale,
    ProgressLost,
    Pulse,
    ReadAttempt,
    ReadLeave,
    ReadTopology,
    ReportDeath,
    ReportReady,
    ReportStopped,
    ReportTrouble,
    RescaleAborted,
    RescaleCompleted,
    RescaleJob,
    RescalePlan,
    RescaleStarted,
    RescaleSynchronising,
    ResumeJob,
    ShowCluster,
    ShowWorker,
    WorkerJoined,
    WorkerPage,
    WorkerView,
)
from forged.elastic.model import ClusterTopology, WorkerId, check_worker
from forged.elastic.outbox import Moment, Probe
from forged.elastic.phases import Phase
from forged.elastic.rescale.attempt import RECEIVED_BYTES_MIN, StopReport
from forged.elastic.status.views import cluster_view, drain_remarks, plan, steered, worker_view
from forged.errors import RequestRefused
from forged.jobs.model import CreateJob, JobChanged, JobRemoved
from forged.kernel.bus import Bus
from forged.kernel.ledger import read_all
from forged.kernel.messages import Call, Decision, Fact, Fence, Nothing, Record
from forged.kernel.store.port import Store
from forged.pagination import ascending, take_page

R = TypeVar("R")

OWNER = "elastic"
PART_MAX = 40
"""Facts, and keys, that are decided together: a transaction has its limits."""
ATTRIBUTES_MAX = 64
ATTRIBUTE_CHARS_MAX = 1_000
PEER_KEY_BYTES = 32
PROBES_MAX = 256
"""Addresses that are asked at once; the others wait for their turn."""
COLLECTIVE_SEQ_MAX = 2**63 - 1
WORKERS_PER_CLIENT = 64
"""With more, those that a client spoke for once are looked through."""
STEP_MAX = 2**53
BATCH_MAX = 2**31 - 1
"""Beyond these, and `LEARNING_RATE_MAX`, nobody trains, and the world's size times the number could not be written."""
BREAKS_MAX = 3
"""So often in a row something may break in a job by itself before that is given up."""

AskWhether = Callable[[WorkerId], Awaitable[bool]]
"""Whether an address refuses connections; false where it accepts one, and where nothing can be said."""

_FOLLOWS = (
    RescaleStarted,
    RescaleAborted,
    RescaleSynchronising,
    ProgressLost,
    RescaleCompleted,
    JobWaiting,
    JobAborted,
    JobCompleted,
)


class ElasticService:
    """Owns the clusters of all jobs."""

    def __init__(self, bus: Bus, clock: Clock, is_refused: AskWhether, token_bytes: Callable[[int], bytes]) -> None:
        self.clusters: dict[str, Cluster] = {}
        self._bus = bus
        self._clock = clock
        self._is_refused = is_refused
        self._token_bytes = token_bytes
        self._by_client: defaultdict[bytes, dict[tuple[str, str], None]] = defaultdict(dict)
        self._connected: set[bytes] = set()
        self._remains: dict[str, None] = {}
        """Keys of what is no more, which are deleted by and by."""
        self._breaks: dict[str, int] = {}
        """How often in a row something broke in a job by itself."""
        self._probing: set[Probe] = set()
        self._probe_slots = anyio.Semaphore(PROBES_MAX)
        self._tasks: TaskGroup | None = None
        self._woken = anyio.Event()
        self._serve()

    def _serve(self) -> None:
        serve = self._bus.serve
        serve(JoinJob, self._join, owner=OWNER)
        serve(LeaveJob, self._leave, owner=OWNER)
        serve(ReportStopped, self._paused, owner=OWNER)
        serve(ReportReady, self._ready, owner=OWNER)
        serve(ReportTrouble, self._trouble, owner=OWNER)
        serve(ReportDeath, self._death, owner=OWNER)
        serve(ReadTopology, self._topology, owner=OWNER)
        serve(ReadAttempt, self._attempt, owner=OWNER)
        serve(AnnounceLeave, self._announce, owner=OWNER)
        serve(ReadLeave, self._may_leave, owner=OWNER)
        serve(ListWorkers, self._list, owner=OWNER)
        serve(ShowWorker, self._show, owner=OWNER)
        serve(ShowCluster, self._show_cluster, owner=OWNER)
        serve(ListClusters, self._list_clusters, owner=OWNER)
        serve(PlanRescale, self._plan, owner=OWNER)
        serve(DrainWorker, self._drain, owner=OWNER)
        serve(EvictWorker, self._evict, owner=OWNER)
        serve(PauseJob, lambda request, call: self._want(request, call, Cluster.pause), owner=OWNER)
        serve(ResumeJob, lambda request, call: self._want(request, call, Cluster.resume), owner=OWNER)
        serve(AbortJob, lambda request, call: self._want(request, call, Cluster.abort), owner=OWNER)
        serve(RescaleJob, self._rescale, owner=OWNER)
        self._bus.on_signal(Heartbeat, self._heartbeat, name="elastic.heartbeats")
        self._bus.on_signal(Pulse, self._pulse, name="elastic.pulses")
        self._bus.on_signal(AttemptProgress, self._receiving, name="elastic.receiving")
        self._bus.on(JobChanged, self._job_changed, name="elastic.settings", durable=True)
        self._bus.on(JobRemoved, self._job_removed, name="elastic.removal", durable=True)

    # Loading.

    async def load(self, store: Store) -> None:
        """Become what the store holds; who is connected is known already, or will be."""
        entries: defaultdict[str, list[tuple[str, bytes]]] = defaultdict(list)
        for entry in await read_all(store, PREFIX):
            entries[job_of(entry.key)].append((entry.key, entry.value))
        now = self._now()
        self.clusters.clear()
        self._by_client.clear()
        self._remains.clear()
        for job, found in entries.items():
            cluster = restored(job, found, now)
            if cluster is None:
                self._remains.update(dict.fromkeys(key for key, _ in found))
            else:
                self.clusters[job] = cluster
        for cluster in self.clusters.values():
            for member in cluster.members.values():
                self._by_client[member.client][cluster.job, member.id] = None
                if member.client in self._connected:
                    member.lost_at, member.is_awaited = None, False
        self._wake()

    def generation(self, job: str) -> int:
        """The number of a job's committed world; 0 where there is none."""
        cluster = self.clusters.get(job)
        return 0 if cluster is None else cluster.generation

    @property
    def workers(self) -> int:
        """How many workers there are, in all jobs."""
        return sum(len(cluster.members) for cluster in self.clusters.values())

    def workers_at_work(self, job: str) -> int:
        """How many workers a job has that is not over."""
        cluster = self.clusters.get(job)
        return 0 if cluster is None or cluster.over else len(cluster.members)

    # Connections.

    def arrived(self, client: bytes) -> None:
        """A client has said hello."""
        self._connected.add(client)
        for cluster, worker in self._workers_of(client):
            cluster.returned(worker, self._now())
            self._settle(cluster)

    def departed(self, client: bytes) -> None:
        """A client's last connection is gone."""
        self._connected.discard(client)
        for cluster, worker in self._workers_of(client):
            cluster.lost(worker, self._now())
            self._settle(cluster)
            # Who is lost is looked at sooner than anybody was to be.
            self._wake()

    def _workers_of(self, client: bytes) -> list[tuple[Cluster, str]]:
        """The workers that a client speaks for; those that it did once are forgotten."""
        found: list[tuple[Cluster, str]] = []
        for job, worker in tuple(self._by_client.get(client, ())):
            cluster = self.clusters.get(job)
            member = cluster.members.get(worker) if cluster else None
            if cluster is not None and member is not None and member.client == client:
                found.append((cluster, worker))
            else:
                self._by_client[client].pop((job, worker), None)
        if not found:
            self._by_client.pop(client, None)
        return found

    # Running.

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Do what is due, for ever."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            task_status.started()
            while True:
                self._woken = anyio.Event()
                await self._rest()
                if self._bus.ledger.writable_now:
                    self._tick()

    async def _rest(self) -> None:
        """Sleep until something is due, or has happened."""
        await self._bus.ledger.writable()
        due = min(map(self._due_at, self.clusters.values()), default=NEVER)
        due = -NEVER if self._remains else due
        with anyio.move_on_after(max(0.0, due - self._clock.monotonic())):
            await self._woken.wait()

    def _tick(self) -> None:
        now = self._now()
        for cluster in self.clusters.values():
            is_due = self._due_at(cluster) <= now.monotonic or (cluster.out and not self._is_left_alone(cluster))
            if is_due and not self._goes_on(cluster, now):
                return
        if self._remains:
            keys = list(islice(self._remains, PART_MAX))
            self._bus.ledger.append(Decision(None, writes=dict.fromkeys(keys)), origin=OWNER)
            for key in keys:
                del self._remains[key]

    def _due_at(self, cluster: Cluster) -> float:
        return NEVER if self._is_left_alone(cluster) else cluster.due_at()

    def _is_left_alone(self, cluster: Cluster) -> bool:
        """Whether nothing is done for it any more that nobody asks for."""
        return self._breaks.get(cluster.job, 0) > BREAKS_MAX

    def _goes_on(self, cluster: Cluster, now: Moment) -> bool:
        """Do what is due in one job. Where that breaks, by a mistake in the code, all state is read anew; a job in
        which it does so again and again is given up and left alone, and the others go on."""
        breaks = self._breaks.get(cluster.job, 0)
        try:
            if breaks < BREAKS_MAX:
                cluster.tick(now)
            elif not cluster.over:
                cluster.abort(now, f"what decides for it broke {breaks} times in a row, which is a bug: see the log")
            self._settle(cluster)
        except Exception as error:  # noqa: BLE001 - one job's mistake is not to end the daemon
            self._breaks[cluster.job] = breaks + 1
            self._bus.report_service_bug(f"job {cluster.job} in {OWNER}", error)
            return False
        if breaks < BREAKS_MAX:
            self._breaks.pop(cluster.job, None)
        else:
            self._breaks[cluster.job] = BREAKS_MAX + 1
        return True

    async def _probe(self, job: str, probe: Probe) -> None:
        try:
            async with self._probe_slots:
                refused = await self._is_refused(probe.worker)
        finally:
            self._probing.discard(probe)
        if not refused:
            return
        cluster = self.clusters.get(job)
        if cluster is not None:
            cluster.probed(probe.worker.id, probe.incarnation, self._now(), refused=True)
            self._settle(cluster)

    # What workers ask.

    async def _join(self, request: JoinJob, call: Call) -> Decision[JoinReply]:
        worker = check_worker("worker", request.worker)
        _check_joining(request)
        if request.rejoin:
            self._require_known(request)
        # Who has registered before goes by what the settings are now.
        known = self.clusters.get(request.job) if request.rejoin or request.settings is None else None
        settings = known.settings if known else await self._settings(request, call)
        # Before anybody is told of the worker: what the store holds was not always checked at the door.
        require_trainable(request.job, settings)
        if request.rejoin:
            # Much may have happened while the settings were asked for.
            self._require_known(request)
        cluster = self.clusters.get(request.job)
        if cluster is None:
            key = self._token_bytes(PEER_KEY_BYTES)
            cluster = self.clusters[request.job] = Cluster(request.job, settings, key)
        now = self._now()
        newcomer = Member(
            worker,
            request.incarnation,
            call.client,
            now.wall,
            pid=request.pid,
            host=call.origin.rpartition(" at ")[2],
            local_world_size=request.local_world_size,
            attributes=request.attributes,
            with_data=request.with_data,
            # Its client may have gone while the settings were asked for, when there was nobody yet to be lost.
            lost_at=None if call.client in self._connected else now.monotonic,
        )
        cluster.require_compatible(request.shared_config)
        cluster.join(newcomer, now)
        cluster.agree(request.shared_config)
        if (member := cluster.members.get(worker.id)) is None:
            # Its client has gone, and somebody had said before that it does not reach it.
            self._settle(cluster)
            raise _gone(request)
        self._by_client[call.client][cluster.job, worker.id] = None
        if len(self._by_client[call.client]) > WORKERS_PER_CLIENT:
            self._workers_of(call.client)
        fence = self._bus.dispatcher.fence_of(cluster.job) or Fence(self._bus.ledger.term, cluster.generation)
        return self._decide(cluster, _joined(cluster, member, fence))

    def _require_known(self, request: JoinJob) -> None:
        """Refuse who has registered before and was put out since."""
        cluster = self._get(request.job)
        member = cluster.members.get(request.worker.id)
        if not cluster.over and (member is None or member.incarnation != request.incarnation):
            raise _gone(request)

    async def _settings(self, request: JoinJob, call: Call) -> dict[str, Any]:
        """The settings of the job, which is created if need be."""
        ours = Call(call.principal, call.origin, cause=call.cause, timeout_s=call.timeout_s)
        job = await self._bus.ask(CreateJob(request.job, request.settings or {}), ours)
        return dict(job.settings)

    def _leave(self, request: LeaveJob, call: Call) -> Decision[LeaveReply]:
        _check_number("step", request.step, STEP_MAX)
        cluster = self.clusters.get(request.job)
        if cluster is None:
            return Decision(LeaveReply(may_leave=True))
        if request.if_permitted and not _may_go(cluster, request):
            return Decision(LeaveReply(may_leave=False))
        now = self._now()
        if request.failed:
            cluster.died(request.worker_id, request.incarnation, now, request.reason or "it said so")
        else:
            cluster.leave(
                request.worker_id,
                request.incarnation,
                now,
                reason=request.reason,
                done=request.done,
                step=request.step,
            )
        return self._decide(cluster, LeaveReply(may_leave=True))

    def _paused(self, request: ReportStopped, call: Call) -> Decision[Nothing]:
        cluster = self._get(request.job)
        _check_stop(request)
        stop = StopReport(
            request.step,
            request.holds_state,
            request.finished,
            request.epoch,
            request.learning_rate,
            request.global_batch_size,
        )
        cluster.stopped(request.worker_id, request.incarnation, request.attempt, stop, self._now())
        return self._decide(cluster, Nothing())

    def _ready(self, request: ReportReady, call: Call) -> Decision[Nothing]:
        cluster = self._get(request.job)
        cluster.ready(request.worker_id, request.incarnation, request.attempt, self._now())
        return self._decide(cluster, Nothing())

    def _trouble(self, request: ReportTrouble, call: Call) -> Decision[Nothing]:
        cluster = self._get(request.job)
        cluster.trouble(
            request.worker_id,
            request.incarnation,
            request.generation,
            self._now(),
            peer=request.peer,
            why=request.reason,
        )
        return self._decide(cluster, Nothing())

    def _death(self, request: ReportDeath, call: Call) -> Decision[Nothing]:
        cluster = self.clusters.get(request.job)
        if cluster is None:
            return Decision(Nothing())
        reason = request.reason or "its process has ended"
        cluster.died(request.worker_id, request.incarnation, self._now(), reason)
        return self._decide(cluster, Nothing())

    def _topology(self, request: ReadTopology, call: Call) -> ClusterTopology:
        return self._get(request.job).membership.topology

    def _attempt(self, request: ReadAttempt, call: Call) -> AttemptMembers:
        return self._get(request.job).attempt_members(request.worker_id, request.incarnation)

    def _announce(self, request: AnnounceLeave, call: Call) -> Decision[LeaveReply]:
        cluster = self._get(request.job)
        if cluster.members.known(request.worker_id, request.incarnation) is not None:
            cluster.drain(request.worker_id, self._now(), request.reason or "it wanted to")
        return self._decide(cluster, LeaveReply(may_leave=_may_go(cluster, request)))

    def _may_leave(self, request: ReadLeave, call: Call) -> LeaveReply:
        return LeaveReply(may_leave=_may_go(self._get(request.job), request))

    def _heartbeat(self, signal: Heartbeat, call: Call) -> None:
        cluster = self.clusters.get(signal.job)
        if cluster is not None and _is_countable(signal.step, signal.collective_seq):
            now = self._now()
            who = signal.worker_id, signal.incarnation
            cluster.heartbeat(
                *who, signal.step, signal.collective_seq, now, signal.interval_s, last_step_done=signal.last_step_done
            )
            if cluster.out:
                self._settle(cluster)

    def _pulse(self, signal: Pulse, call: Call) -> None:
        cluster = self.clusters.get(signal.job)
        if cluster is not None and _is_countable(signal.step, signal.collective_seq):
            now = self._now()
            who = signal.worker_id, signal.incarnation
            cluster.pulse(*who, signal.step, signal.collective_seq, signal.cpu_s, now, signal.interval_s)
            if cluster.out:
                self._settle(cluster)

    def _receiving(self, signal: AttemptProgress, call: Call) -> None:
        cluster = self.clusters.get(signal.job)
        if cluster is not None:
            # However small a piece is: when it is whole, that is progress.
            received = signal.state_bytes, signal.data_bytes + signal.shards * RECEIVED_BYTES_MIN
            cluster.receiving(
                signal.worker_id,
                signal.incarnation,
                signal.attempt,
                received,
                self._now(),
                waits=signal.is_waiting,
                trouble=signal.trouble,
                unreached=signal.unreachable_peer,
            )
            if signal.unreachable_peer:
                self._wake()
            if cluster.out:
                self._settle(cluster)

    # What operators ask.

    def _list(self, request: ListWorkers, call: Call) -> WorkerPage:
        cluster = self._get(request.job)
        now = self._clock.monotonic()
        names = sorted(worker for worker in cluster.members if worker > request.after)
        return WorkerPage(
            *take_page((worker_view(cluster, cluster.members[name], now) for name in names), request.limit)
        )

    def _show(self, request: ShowWorker, call: Call) -> WorkerView:
        cluster = self._get(request.job)
        return worker_view(cluster, cluster.members.require(request.worker_id), self._clock.monotonic())

    def _show_cluster(self, request: ShowCluster, call: Call) -> ClusterView:
        return cluster_view(self._get(request.job), self._clock.monotonic(), self._why_unwritable)

    def _list_clusters(self, request: ListClusters, call: Call) -> ClusterPage:
        now, may, why = self._clock.monotonic(), call.principal.may, self._why_unwritable
        names = ascending((name for name in self.clusters if may(Role.VIEWER, name)), request.after)
        return ClusterPage(*take_page((cluster_view(self.clusters[name], now, why) for name in names), request.limit))

    @property
    def _why_unwritable(self) -> str:
        """Why nothing can be decided now; empty where it can."""
        return str(self._bus.ledger.read_only or "")

    def _plan(self, request: PlanRescale, call: Call) -> RescalePlan:
        return plan(self._get(request.job), request.workers)

    def _drain(self, request: DrainWorker, call: Call) -> Decision[DrainReply]:
        cluster = self._get(request.job)
        cluster.drain(request.worker_id, self._now(), request.reason)
        return self._decide(cluster, DrainReply(drain_remarks(cluster, request.worker_id)))

    def _evict(self, request: EvictWorker, call: Call) -> Decision[Nothing]:
        cluster = self._get(request.job)
        cluster.evict(request.worker_id, self._now(), request.reason)
        return self._decide(cluster, Nothing())

    def _rescale(self, request: RescaleJob, call: Call) -> Decision[ControlReply]:
        cluster = self._get(request.job)
        cluster.rescale(self._now(), request.reason, stops=request.stops)
        begins = cluster.phase not in (Phase.FORMING, Phase.WAITING)
        return self._decide(cluster, steered(cluster, self._clock.monotonic(), changed=begins))

    def _want(self, request: Any, call: Call, act: Callable[[Cluster, Moment, str], None]) -> Decision[ControlReply]:
        cluster = self._get(request.job)
        before = cluster.phase, cluster.paused
        act(cluster, self._now(), request.reason)
        has_changed = (cluster.phase, cluster.paused) != before
        return self._decide(cluster, steered(cluster, self._clock.monotonic(), changed=has_changed))

    # What happens to jobs.

    def _job_changed(self, record: Record) -> Decision[None] | None:
        fact, cluster = record.fact, self.clusters.get(record.job)
        if cluster is None or not isinstance(fact, JobChanged):
            return None
        cluster.configure(fact.settings)
        cluster.out.cluster = True
        return self._decide(cluster, None)

    def _job_removed(self, record: Record) -> Decision[None] | None:
        cluster = self.clusters.pop(record.job, None)
        if cluster is None:
            return None
        for member in cluster.members.values():
            self._by_client[member.client].pop((cluster.job, member.id), None)
            cluster.out.members.add(member.id)
        cluster.members.clear()
        cluster.out.cluster = cluster.out.world = True
        keys = list(writes(cluster))
        # First what makes it known, so that what is left of it is known for what it is.
        keys.sort(key=lambda key: key.count("/"))
        self._remains.update(dict.fromkeys(keys[PART_MAX:]))
        self._wake()
        return Decision(None, writes=dict.fromkeys(keys[:PART_MAX]))

    # Deciding.

    def _settle(self, cluster: Cluster) -> None:
        """Decide what has come out of something that nobody asked for, if that can be done now."""
        self._send_probes(cluster)
        if cluster.out and self._bus.ledger.writable_now:
            self._bus.ledger.append(self._decide(cluster, None), origin=OWNER)

    def _decide(self, cluster: Cluster, reply: R) -> Decision[R]:
        """What has come out of a call, as a decision; what does not fit into one goes before it."""
        self._send_probes(cluster)
        if not cluster.out:
            # As for nearly every answer to an attempt, of which each worker gives two.
            self._wake()
            return self._decision(cluster, reply, (), {}, [], cluster.cause)
        changed, out = writes(cluster), cluster.out.take()
        cluster.known = cluster.known or bool(changed)
        for key in changed:
            self._remains.pop(key, None)
        *before, last = _parts(out.facts, changed)
        stored_cause = cluster.cause
        for facts, keys in before:
            decision = self._decision(cluster, None, facts, keys, out.triggers, stored_cause)
            self._bus.ledger.append(decision, origin=OWNER)
        self._wake()
        return self._decision(cluster, reply, *last, out.triggers, stored_cause)

    def _decision(
        self,
        cluster: Cluster,
        reply: R,
        facts: tuple[Fact, ...],
        keys: dict[str, bytes | None],
        triggers: list[Fact],
        stored_cause: int,
    ) -> Decision[R]:
        cause = _cause(cluster, facts)
        self._remember_causes(cluster, facts, triggers)
        if cluster.cause != stored_cause:
            # Behind a restart, too, what is left of the rescale follows from it.
            keys |= {key: record for key, record in anew(cluster).items() if key in keys}
        return Decision(reply, facts, keys, cluster.job, cluster.generation, cause)

    def _remember_causes(self, cluster: Cluster, facts: tuple[Fact, ...], triggers: list[Fact]) -> None:
        """What the next rescale, or what is left of this one, will be said to follow from."""
        for fact_id, fact in enumerate(facts, self._bus.ledger.revision + 1):
            if isinstance(fact, RescaleCompleted):
                cluster.cause = 0
            elif isinstance(fact, RescaleStarted) or any(fact is trigger for trigger in triggers):
                cluster.cause = fact_id
                if isinstance(fact, RescaleStarted) and cluster.attempt is not None:
                    # Of several in a decision the last one is under way.
                    cluster.attempt.started_id = fact_id
            elif isinstance(fact, WorkerJoined) and fact.worker.id in cluster.members:
                cluster.members[fact.worker.id].joined_id = fact_id

    def _send_probes(self, cluster: Cluster) -> None:
        probes, cluster.out.probes = cluster.out.probes, []
        for probe in probes:
            if self._tasks is not None and probe not in self._probing:
                self._probing.add(probe)
                self._tasks.start_soon(self._probe, cluster.job, probe)

    def _get(self, job: str) -> Cluster:
        cluster = self.clusters.get(job)
        if cluster is not None:
            return cluster
        self._bus.dispatcher.require_job(job)
        raise RequestRefused("job_untrained", f"no worker has joined job {job[:80]!r} yet", "start some")

    def _now(self) -> Moment:
        return Moment(self._clock.wall(), self._clock.monotonic())

    def _wake(self) -> None:
        self._woken.set()


def _cause(cluster: Cluster, facts: tuple[Fact, ...]) -> int:
    """The id of the fact that these follow from: the newest that made a rescale necessary, or the first joiner's."""
    if not (facts and isinstance(facts[0], _FOLLOWS)):
        return 0
    added = [worker for fact in facts if isinstance(fact, RescaleStarted) for worker in fact.added[:1]]
    # Who was added may be gone by now: what happens while nothing can be written is decided all at once.
    joined = (cluster.members[worker].joined_id for worker in added if worker in cluster.members)
    return cluster.cause or next(joined, 0)


def _parts(
    facts: list[Fact], changed: dict[str, bytes | None]
) -> Iterator[tuple[tuple[Fact, ...], dict[str, bytes | None]]]:
    """So much at a time as fits into a transaction, and no facts together of which one is the other's cause.

    The last facts, and what is written of the cluster and its world, are together in the last part, so that nobody
    hears of a world that is not kept.
    """
    keys = sorted(changed, key=lambda key: key.count("/"), reverse=True)
    runs = list(_runs(facts))
    count = max(1, len(runs), math.ceil(len(keys) / PART_MAX))
    nothing: tuple[Fact, ...] = ()
    for index, run in enumerate([*[nothing] * (count - len(runs)), *runs], 1 - count):
        end = len(keys) + index * PART_MAX
        yield run, {key: changed[key] for key in keys[max(0, end - PART_MAX) : max(0, end)]}


def _runs(facts: list[Fact]) -> Iterator[tuple[Fact, ...]]:
    """Facts that have one cause, as many at a time as fit."""
    run: list[Fact] = []
    for fact in facts:
        if run and (
            len(run) == PART_MAX
            or isinstance(run[-1], RescaleStarted)
            or isinstance(run[-1], _FOLLOWS) != isinstance(fact, _FOLLOWS)
        ):
            yield tuple(run)
            run = []
        run.append(fact)
    if run:
        yield tuple(run)


def _gone(request: JoinJob) -> RequestRefused:
    who = f"worker {request.worker.id} of job {request.job}"
    return RequestRefused("worker_gone", f"{who} counts as dead or has left", "start another")


def _joined(cluster: Cluster, member: Member, fence: Fence) -> JoinReply:
    # Who is not in the attempt has nothing to do in it, and is to take nobody's state.
    attempt = cluster.attempt if cluster.attempt and member.id in cluster.attempt else None
    return JoinReply(
        generation=cluster.generation,
        fence=fence,
        phase=cluster.phase,
        paused=cluster.paused,
        attempt=attempt.number if attempt else 0,
        peer_key=cluster.key,
        topology=cluster.membership.topology,
        state=cluster.state,
        settings=cluster.settings,
        is_member=cluster.membership.holds(member),
        drain_reason=member.drain_reason,
        synchronising=cluster.synchronising if attempt else None,
        in_background=attempt is not None and attempt.in_background,
        is_leaver=attempt is not None and member.id in attempt.relieved,
    )


def _may_go(cluster: Cluster, request: LeaveJob | AnnounceLeave | ReadLeave) -> bool:
    member = cluster.members.known(request.worker_id, request.incarnation)
    return member is None or cluster.may_go(member)


def _is_countable(step: int, collective_seq: int) -> bool:
    """Whether these can be numbers of steps, and of collective_seq; what else a signal brings is nobody's word."""
    return 0 <= step <= STEP_MAX and 0 <= collective_seq <= COLLECTIVE_SEQ_MAX


def _check_number(name: str, number: int, most: int) -> None:
    if not 0 <= number <= most:
        raise RequestRefused("stop_invalid", f"{name} = {number} is no number of steps", f"report 0 to {most}")


def _check_stop(request: ReportStopped) -> None:
    sound = {
        "step": 0 <= request.step <= STEP_MAX,
        "epoch": 0 <= request.epoch <= STEP_MAX,
        "learning_rate": 0.0 <= request.learning_rate <= LEARNING_RATE_MAX,
        "global_batch_size": 0 <= request.global_batch_size <= BATCH_MAX,
    }
    for name, is_sound in sound.items():
        if not is_sound:
            text = f"{name} = {getattr(request, name)} is nowhere that training can be"
            raise RequestRefused("stop_invalid", text, "report a finite number, 0 or more")


def _check_joining(request: JoinJob) -> None:
    if len(request.incarnation) != INCARNATION_BYTES:
        raise RequestRefused("incarnation_invalid", f"incarnation has {len(request.incarnation)} bytes", "draw 16")
    check_shared_config(request.shared_config)
    attributes = request.attributes
    if len(attributes) > ATTRIBUTES_MAX or any(
        len(key) + len(value) > ATTRIBUTE_CHARS_MAX for key, value in attributes.items()
    ):
        raise RequestRefused(
            "attributes_invalid", "attributes are too many or too long", f"give at most {ATTRIBUTES_MAX} short ones"
        )
    if request.local_world_size < 1:
        raise RequestRefused("local_world_size_invalid", f"local_world_size = {request.local_world_size}", "at least 1")
