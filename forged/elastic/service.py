"""Elastic training on the bus: answers requests, takes signals, and follows changes of jobs.

Invariants:
- Each request is one call on the job's coordinator, whose whole output is decided with the reply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from forged.auth.model import Role
from forged.clock import Clock
from forged.elastic.config import require_trainable
from forged.elastic.coordinator.job_coordinator import JobCoordinator
from forged.elastic.membership.member import Member
from forged.elastic.messages import (
    AbortJob,
    AnnounceLeave,
    AttemptMembers,
    AttemptProgress,
    ClusterPage,
    ClusterView,
    ConfirmWorker,
    ControlReply,
    DrainReply,
    DrainWorker,
    EvictWorker,
    Heartbeat,
    JoinJob,
    JoinReply,
    LeaveJob,
    LeaveReply,
    ListClusters,
    ListWorkers,
    PauseJob,
    PlanRescale,
    Pulse,
    ReadAttempt,
    ReadLeave,
    ReadTopology,
    ReopenJob,
    ReportDeath,
    ReportReady,
    ReportStandstill,
    ReportStopped,
    ReportUnreachablePeer,
    RescaleJob,
    RescalePlan,
    ResumeJob,
    ShowCluster,
    ShowWorker,
    WorkerPage,
    WorkerView,
)
from forged.elastic.model import ClusterTopology
from forged.elastic.outbox import Moment
from forged.elastic.phases import Phase
from forged.elastic.request_checks import check_join, check_standstill, check_step, check_stop, is_countable
from forged.elastic.rescale.attempt import StopReport
from forged.elastic.runtime.decisions import OWNER
from forged.elastic.runtime.job_loop import JobLoop, RefusesConnections
from forged.elastic.runtime.job_table import JobTable
from forged.elastic.status.views import cluster_view, control_reply, drain_remarks, plan, rank_of, worker_view
from forged.errors import RequestRefused
from forged.jobs.model import CreateJob, JobChanged, JobRemoved
from forged.kernel.bus import Bus
from forged.kernel.messages import Call, Decision, Fence, Nothing, Record
from forged.kernel.store.port import Store
from forged.pagination import ascending, take_page

PEER_KEY_BYTES = 32


class ElasticService:
    """Serves elastic training for all jobs."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        refuses_connections: RefusesConnections,
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self._bus = bus
        self._table = JobTable()
        self._loop = JobLoop(bus, clock, self._table, refuses_connections)
        self._token_bytes = token_bytes
        self._subscribe()

    def _subscribe(self) -> None:
        serve = self._bus.serve
        serve(JoinJob, self._join, owner=OWNER)
        serve(LeaveJob, self._leave, owner=OWNER)
        serve(AnnounceLeave, self._announce_leave, owner=OWNER)
        serve(ReadLeave, self._read_leave, owner=OWNER)
        serve(ReportStopped, self._stopped, owner=OWNER)
        serve(ReportReady, self._ready, owner=OWNER)
        serve(ReportUnreachablePeer, self._peer_report, owner=OWNER)
        serve(ReportStandstill, self._stood_still, owner=OWNER)
        serve(ReportDeath, self._death, owner=OWNER)
        serve(ReadTopology, self._topology, owner=OWNER)
        serve(ReadAttempt, self._attempt, owner=OWNER)
        serve(ConfirmWorker, self._confirm, owner=OWNER)
        self._bus.on_signal(Heartbeat, self._heartbeat, name="elastic.heartbeats")
        self._bus.on_signal(Pulse, self._pulse, name="elastic.pulses")
        self._bus.on_signal(AttemptProgress, self._attempt_progress, name="elastic.attempt_progress")
        serve(ListWorkers, self._list_workers, owner=OWNER)
        serve(ShowWorker, self._show_worker, owner=OWNER)
        serve(ShowCluster, self._show_cluster, owner=OWNER)
        serve(ListClusters, self._list_clusters, owner=OWNER)
        serve(PlanRescale, self._plan, owner=OWNER)
        serve(DrainWorker, self._drain, owner=OWNER)
        serve(EvictWorker, self._evict, owner=OWNER)
        serve(PauseJob, lambda request, call: self._control(request, JobCoordinator.pause), owner=OWNER)
        serve(ResumeJob, lambda request, call: self._control(request, JobCoordinator.resume), owner=OWNER)
        serve(AbortJob, lambda request, call: self._control(request, JobCoordinator.abort), owner=OWNER)
        serve(ReopenJob, self._reopen, owner=OWNER)
        serve(RescaleJob, self._rescale, owner=OWNER)
        self._bus.on(JobChanged, self._job_changed, name="elastic.settings", durable=True)
        self._bus.on(JobRemoved, self._job_removed, name="elastic.removal", durable=True)

    # What the daemon calls.

    async def load(self, store: Store) -> None:
        """Replace all state by what the store holds; which clients are connected stays known."""
        await self._table.load(store, self._loop.now)
        self._loop.wake()

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Do what is due, for ever."""
        await self._loop.run(task_status=task_status)

    def arrived(self, client: bytes) -> None:
        """A client has connected."""
        self._table.connected.add(client)
        for coordinator, worker in self._table.workers_of(client):
            coordinator.connection_restored(worker, self._loop.now())
            self._loop.settle(coordinator)

    def connection_lost(self, client: bytes) -> None:
        """A client's last connection is gone."""
        self._table.connected.discard(client)
        for coordinator, worker in self._table.workers_of(client):
            coordinator.connection_lost(worker, self._loop.now())
            self._loop.settle(coordinator)
            # A scan for the lost worker is due sooner than the loop expected.
            self._loop.wake()

    @property
    def coordinators(self) -> dict[str, JobCoordinator]:
        """The coordinators by job."""
        return self._table.coordinators

    @property
    def workers(self) -> int:
        """How many workers all jobs have."""
        return sum(len(coordinator.members) for coordinator in self.coordinators.values())

    def generation(self, job: str) -> int:
        """The generation of a job's committed world; 0 without one."""
        coordinator = self.coordinators.get(job)
        return 0 if coordinator is None else coordinator.generation

    def committed_step(self, job: str) -> int | None:
        """The step that a job's world has committed; None before its first world."""
        coordinator = self.coordinators.get(job)
        return coordinator.training.current_step if coordinator is not None and coordinator.generation else None

    def is_registered(self, job: str, worker_id: str, incarnation: bytes) -> bool:
        """Whether this worker is registered with a job."""
        coordinator = self.coordinators.get(job)
        return coordinator is not None and coordinator.members.find(worker_id, incarnation) is not None

    def registered_rank(self, job: str, worker_id: str, incarnation: bytes) -> int | None:
        """The rank of this worker in the committed world, -1 outside it; None if it is not registered."""
        coordinator = self.coordinators.get(job)
        member = None if coordinator is None else coordinator.members.find(worker_id, incarnation)
        return None if coordinator is None or member is None else rank_of(coordinator, member)

    def registered_workers(self) -> dict[str, list[tuple[str, bytes]]]:
        """By job: the ids and incarnations of all registered workers."""
        return {
            job: [(worker_id, member.incarnation) for worker_id, member in coordinator.members.items()]
            for job, coordinator in self.coordinators.items()
        }

    def workers_at_work(self, job: str) -> int:
        """How many workers a job has that is not over."""
        coordinator = self.coordinators.get(job)
        return 0 if coordinator is None or coordinator.over else len(coordinator.members)

    # Requests of workers.

    async def _join(self, request: JoinJob, call: Call) -> Decision[JoinReply]:
        check_join(request)
        if request.rejoin:
            self._require_registered(request)
        # A worker that rejoins, or brings no settings, takes those that the job has now.
        known = self.coordinators.get(request.job) if request.rejoin or request.settings is None else None
        settings = known.settings if known else await self._create_job(request, call)
        # Settings from the store may date from a version that did not check them.
        require_trainable(request.job, settings)
        if request.rejoin:
            # The worker may have been removed while the job was created.
            self._require_registered(request)
        coordinator = self.coordinators.get(request.job)
        if coordinator is None:
            key = self._token_bytes(PEER_KEY_BYTES)
            coordinator = self.coordinators[request.job] = JobCoordinator(request.job, settings, key)
        now = self._loop.now()
        newcomer = Member(
            request.worker,
            request.incarnation,
            call.client,
            now.wall,
            pid=request.pid,
            host=call.origin.rpartition(" at ")[2],
            local_world_size=request.local_world_size,
            attributes=request.attributes,
            with_data=request.with_data,
            group=request.group,
            group_rank=request.group_rank,
            # The client may have disconnected while the job was created, before it spoke for any worker.
            lost_at=None if call.client in self._table.connected else now.monotonic,
        )
        coordinator.require_compatible(request.shared_config)
        coordinator.settle_group_size(request.group_size)
        coordinator.join(newcomer, now)
        coordinator.adopt_shared_config(request.shared_config)
        if (member := coordinator.members.get(request.worker.id)) is None:
            # Its client has disconnected, and a peer had reported it before: it has failed at once.
            self._loop.settle(coordinator)
            raise _worker_gone(request.job, request.worker.id)
        self._table.add_worker(call.client, coordinator.name, member.id)
        fence = self._bus.dispatcher.fence_of(coordinator.name) or Fence(self._bus.ledger.term, coordinator.generation)
        return self._loop.decide(coordinator, _join_reply(coordinator, member, fence))

    def _require_registered(self, request: JoinJob) -> None:
        """Refuse a worker that rejoins but was removed."""
        coordinator = self._coordinator(request.job)
        if not coordinator.over and coordinator.members.find(request.worker.id, request.incarnation) is None:
            raise _worker_gone(request.job, request.worker.id)

    async def _create_job(self, request: JoinJob, call: Call) -> dict[str, Any]:
        """The settings of the job, which is created if it does not exist."""
        ours = Call(call.principal, call.origin, cause=call.cause, timeout_s=call.timeout_s)
        job = await self._bus.ask(CreateJob(request.job, request.settings or {}), ours)
        return dict(job.settings)

    def _leave(self, request: LeaveJob, call: Call) -> Decision[LeaveReply]:
        check_step(request.step)
        coordinator = self.coordinators.get(request.job)
        if coordinator is None:
            return Decision(LeaveReply(may_leave=True))
        if request.if_permitted and not _may_leave(coordinator, request):
            return Decision(LeaveReply(may_leave=False))
        worker, now = (request.worker_id, request.incarnation), self._loop.now()
        if request.failed:
            coordinator.died(*worker, now, request.reason or "reported by the worker itself")
        else:
            coordinator.leave(*worker, now, reason=request.reason, done=request.done, step=request.step)
        return self._loop.decide(coordinator, LeaveReply(may_leave=True))

    def _announce_leave(self, request: AnnounceLeave, call: Call) -> Decision[LeaveReply]:
        coordinator = self._coordinator(request.job)
        if coordinator.members.find(request.worker_id, request.incarnation) is not None:
            coordinator.drain(request.worker_id, self._loop.now(), request.reason or "requested by the worker")
        return self._loop.decide(coordinator, LeaveReply(may_leave=_may_leave(coordinator, request)))

    def _read_leave(self, request: ReadLeave, call: Call) -> LeaveReply:
        return LeaveReply(may_leave=_may_leave(self._coordinator(request.job), request))

    def _stopped(self, request: ReportStopped, call: Call) -> Decision[Nothing]:
        coordinator = self._coordinator(request.job)
        check_stop(request)
        report = StopReport(
            request.step,
            request.holds_state,
            request.finished,
            request.epoch,
            request.learning_rate,
            request.global_batch_size,
            request.is_stale,
        )
        coordinator.stopped(request.worker_id, request.incarnation, request.attempt, report, self._loop.now())
        return self._loop.decide(coordinator, Nothing())

    def _ready(self, request: ReportReady, call: Call) -> Decision[Nothing]:
        coordinator = self._coordinator(request.job)
        coordinator.ready(request.worker_id, request.incarnation, request.attempt, self._loop.now())
        return self._loop.decide(coordinator, Nothing())

    def _peer_report(self, request: ReportUnreachablePeer, call: Call) -> Decision[Nothing]:
        coordinator = self._coordinator(request.job)
        worker, now = (request.worker_id, request.incarnation), self._loop.now()
        voided = request.step_voided
        coordinator.peer_report(
            *worker, request.generation, now, peer=request.peer, reason=request.reason, step_voided=voided
        )
        return self._loop.decide(coordinator, Nothing())

    def _stood_still(self, request: ReportStandstill, call: Call) -> Decision[Nothing]:
        coordinator = self._coordinator(request.job)
        check_standstill(request)
        worker = request.worker_id, request.incarnation
        coordinator.stood_still(*worker, request.generation, peer=request.peer, for_s=request.for_s)
        return self._loop.decide(coordinator, Nothing())

    def _death(self, request: ReportDeath, call: Call) -> Decision[Nothing]:
        coordinator = self.coordinators.get(request.job)
        if coordinator is None:
            return Decision(Nothing())
        reason = request.reason or "its process has ended"
        coordinator.died(request.worker_id, request.incarnation, self._loop.now(), reason)
        return self._loop.decide(coordinator, Nothing())

    def _topology(self, request: ReadTopology, call: Call) -> ClusterTopology:
        return self._coordinator(request.job).membership.topology

    def _attempt(self, request: ReadAttempt, call: Call) -> AttemptMembers:
        return self._coordinator(request.job).attempt_members(request.worker_id, request.incarnation)

    def _confirm(self, request: ConfirmWorker, call: Call) -> Nothing:
        coordinator = self._coordinator(request.job)
        if coordinator.members.find(request.worker_id, request.incarnation) is None:
            raise _worker_gone(request.job, request.worker_id)
        return Nothing()

    # Signals of workers. They have no reply, so one that makes no sense is ignored.

    def _heartbeat(self, signal: Heartbeat, call: Call) -> None:
        coordinator = self.coordinators.get(signal.job)
        if coordinator is not None and is_countable(signal.step, signal.collective_seq):
            coordinator.heartbeat(signal, self._loop.now())
            if coordinator.outbox:
                self._loop.settle(coordinator)

    def _pulse(self, signal: Pulse, call: Call) -> None:
        coordinator = self.coordinators.get(signal.job)
        if coordinator is not None and is_countable(signal.step, signal.collective_seq):
            coordinator.pulse(signal, self._loop.now())
            if coordinator.outbox:
                self._loop.settle(coordinator)

    def _attempt_progress(self, signal: AttemptProgress, call: Call) -> None:
        coordinator = self.coordinators.get(signal.job)
        if coordinator is None:
            return
        coordinator.attempt_progress(signal, self._loop.now())
        if signal.unreachable_peer or signal.store_failing_s:
            # The worker is judged sooner than the loop expected.
            self._loop.wake()
        if coordinator.outbox:
            self._loop.settle(coordinator)

    # Requests of operators.

    def _list_workers(self, request: ListWorkers, call: Call) -> WorkerPage:
        coordinator, now = self._coordinator(request.job), self._loop.now().monotonic
        names = sorted(worker for worker in coordinator.members if worker > request.after)
        views = (worker_view(coordinator, coordinator.members[name], now) for name in names)
        return WorkerPage(*take_page(views, request.limit))

    def _show_worker(self, request: ShowWorker, call: Call) -> WorkerView:
        coordinator = self._coordinator(request.job)
        return worker_view(coordinator, coordinator.members.require(request.worker_id), self._loop.now().monotonic)

    def _show_cluster(self, request: ShowCluster, call: Call) -> ClusterView:
        return cluster_view(self._coordinator(request.job), self._loop.now().monotonic, self._write_error)

    def _list_clusters(self, request: ListClusters, call: Call) -> ClusterPage:
        now, may, error = self._loop.now().monotonic, call.principal.may, self._write_error
        names = ascending((name for name in self.coordinators if may(Role.VIEWER, name)), request.after)
        views = (cluster_view(self.coordinators[name], now, error) for name in names)
        return ClusterPage(*take_page(views, request.limit))

    @property
    def _write_error(self) -> str:
        """Why the daemon cannot write; empty if it can."""
        return str(self._bus.ledger.read_only or "")

    def _plan(self, request: PlanRescale, call: Call) -> RescalePlan:
        return plan(self._coordinator(request.job), request.workers)

    def _drain(self, request: DrainWorker, call: Call) -> Decision[DrainReply]:
        coordinator = self._coordinator(request.job)
        coordinator.drain(request.worker_id, self._loop.now(), request.reason)
        return self._loop.decide(coordinator, DrainReply(drain_remarks(coordinator, request.worker_id)))

    def _evict(self, request: EvictWorker, call: Call) -> Decision[Nothing]:
        coordinator = self._coordinator(request.job)
        coordinator.evict(request.worker_id, self._loop.now(), request.reason)
        return self._loop.decide(coordinator, Nothing())

    def _rescale(self, request: RescaleJob, call: Call) -> Decision[ControlReply]:
        coordinator, now = self._coordinator(request.job), self._loop.now()
        coordinator.rescale(now, request.reason, synchronous=request.synchronous)
        has_started = coordinator.phase not in (Phase.FORMING, Phase.WAITING)
        return self._loop.decide(coordinator, control_reply(coordinator, now.monotonic, changed=has_started))

    def _control(self, request: Any, act: Callable[[JobCoordinator, Moment, str], None]) -> Decision[ControlReply]:
        coordinator, now = self._coordinator(request.job), self._loop.now()
        before = coordinator.phase, coordinator.paused
        act(coordinator, now, request.reason)
        has_changed = (coordinator.phase, coordinator.paused) != before
        return self._loop.decide(coordinator, control_reply(coordinator, now.monotonic, changed=has_changed))

    def _reopen(self, request: ReopenJob, call: Call) -> Decision[ControlReply]:
        decision = self._control(request, JobCoordinator.reopen)
        self._loop.forget_errors(request.job)
        return decision

    # Changes of jobs.

    def _job_changed(self, record: Record) -> Decision[None] | None:
        fact, coordinator = record.fact, self.coordinators.get(record.job)
        if coordinator is None or not isinstance(fact, JobChanged):
            return None
        coordinator.configure(fact.settings)
        coordinator.outbox.job = True
        return self._loop.decide(coordinator, None)

    def _job_removed(self, record: Record) -> Decision[None] | None:
        deleted = self._table.remove(record.job)
        if deleted is None:
            return None
        self._loop.forget_errors(record.job)
        self._loop.wake()
        return Decision(None, writes=deleted)

    def _coordinator(self, job: str) -> JobCoordinator:
        coordinator = self.coordinators.get(job)
        if coordinator is not None:
            return coordinator
        self._bus.dispatcher.require_job(job)
        raise RequestRefused("job_untrained", f"no worker has joined job {job[:80]!r} yet", "start workers first")


def _worker_gone(job: str, worker_id: str) -> RequestRefused:
    text = f"worker {worker_id[:80]} of job {job} has failed or left, or another process has its name"
    return RequestRefused("worker_gone", text, "start a new process")


def _join_reply(coordinator: JobCoordinator, member: Member, fence: Fence) -> JoinReply:
    # A worker outside the attempt has no part in it, and must not take its state.
    attempt = coordinator.attempt if coordinator.attempt and member.id in coordinator.attempt else None
    return JoinReply(
        generation=coordinator.generation,
        fence=fence,
        phase=coordinator.phase,
        paused=coordinator.paused,
        attempt=attempt.number if attempt else 0,
        peer_key=coordinator.key,
        topology=coordinator.membership.topology,
        state=coordinator.training,
        learning_rate=coordinator.learning_rate,
        settings=coordinator.settings,
        is_member=coordinator.membership.in_world(member),
        drain_reason=member.drain_reason,
        synchronising=coordinator.synchronising if attempt else None,
        in_background=attempt is not None and attempt.in_background,
        is_draining=attempt is not None and member.id in attempt.draining_set,
    )


def _may_leave(coordinator: JobCoordinator, request: LeaveJob | AnnounceLeave | ReadLeave) -> bool:
    member = coordinator.members.find(request.worker_id, request.incarnation)
    return member is None or coordinator.may_leave(member)
