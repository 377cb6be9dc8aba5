"""A job's training as operators see it: workers, cluster, rescale plan, drain remarks.

Invariants:
- A view decides nothing; its fields name their units.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.coordinator.job_state import JobState
from forged.elastic.failure_detector.detector import is_lost
from forged.elastic.membership.member import Member
from forged.elastic.messages import ClusterView, ControlReply, PlannedWorker, RescalePlan, RescaleView, WorkerView
from forged.elastic.model import RANK_NONE, WorkerStatus
from forged.elastic.phases import require_not_over
from forged.elastic.rescale.ranks import assign_ranks, moves
from forged.elastic.rescale.scaling import scale
from forged.elastic.status.stall_report import describe_stall
from forged.errors import RequestRefused
from forged.phrases import counted, is_or_are, named

PLANNED_MAX = 10_000


def worker_view(job: JobState, member: Member, now: float) -> WorkerView:
    heard_at = max(member.heard_at or 0.0, member.pulse_at or 0.0)
    return WorkerView(
        id=member.id,
        rank=rank_of(job, member),
        status=status_of(job, member),
        job=job.name,
        generation=job.generation,
        step=member.step,
        last_heartbeat_age_s=round(now - heard_at, 3) if heard_at else None,
        address=f"{member.worker.hostname}:{member.worker.port}",
        host=member.host,
        pid=member.pid,
        connected=member.connected,
        stalled=member.stalled,
        cpu_s=member.cpu_s,
        joined_at=member.joined_at,
        local_world_size=member.local_world_size,
        attributes=member.attributes,
        group=member.group,
        group_rank=member.group_rank,
    )


def rank_of(job: JobState, member: Member) -> int:
    """Its rank in the committed world; -1 outside it."""
    return job.membership.topology.rank_of(member.worker) if job.membership.in_world(member) else RANK_NONE


def status_of(job: JobState, member: Member) -> WorkerStatus:
    if member.drain_reason is not None:
        return WorkerStatus.LEAVING
    if job.trains and job.membership.in_world(member):
        return WorkerStatus.ACTIVE
    if job.attempt is not None and member.id in job.attempt.target:
        return WorkerStatus.RESCALING
    if not job.membership.in_world(member):
        return WorkerStatus.JOINING
    # Between two worlds, or while too few workers are left, no member trains.
    return WorkerStatus.ACTIVE if job.over else WorkerStatus.RESCALING


def cluster_view(job: JobState, now: float, write_error: str = "") -> ClusterView:
    """`write_error` is why the daemon cannot write; empty if it can."""
    stall_report = describe_stall(job, now, write_error)
    return ClusterView(
        job=job.name,
        phase=job.phase,
        paused=job.paused,
        generation=job.generation,
        world_size=job.membership.present_count,
        joining=sum(1 for _ in job.membership.joiners()),
        state=job.training,
        failures=job.failure_budget.in_world,
        reason=stall_report or job.reason,
        rescale=_rescale_view(job, now),
        stall_report=stall_report,
        group_size=job.membership.group_size,
    )


def _rescale_view(job: JobState, now: float) -> RescaleView | None:
    attempt = job.attempt
    if attempt is None:
        return None
    return RescaleView(
        attempt=attempt.number,
        stage=attempt.stage.value,
        for_s=round(now - attempt.began_at, 3),
        waiting_for=attempt.waiting_for,
        added=list(attempt.added),
        removed=list(attempt.removed),
        reason=attempt.reason,
    )


def control_reply(job: JobState, now: float, *, changed: bool) -> ControlReply:
    """The answer to an operator's request; if it changed nothing, with the reason that holds already."""
    known = job.reason if job.over else job.pause_reason if job.paused else ""
    return ControlReply(changed, "" if changed else known, describe_stall(job, now))


def drain_remarks(job: JobState, worker_id: str) -> list[str]:
    """Consequences of a drain that the operator may not expect."""
    member, needed = job.members.require(worker_id), job.config.min_workers
    is_in_running_world = job.membership.in_world(member) and not job.over
    remarks = []
    left = sum(1 for one in job.members.values() if one.drain_reason is None)
    if is_in_running_world and left < needed:
        remarks.append(f"training will stop: {counted(left, 'worker')} left, min_workers is {needed}")
    if is_in_running_world and not (job.membership.remaining or job.membership.next_joiners()):
        loss = "the training state is lost when it leaves: no other worker can take it"
        remarks.append(f"{loss}; save a checkpoint in the script first, or start another worker")
    if member.stalled:
        remarks.append(f"{worker_id} is stalled and leaves after its step; evict it if the step never ends")
    if not member.connected:
        remarks.append(f"{worker_id} has no connection and drains when it is back")
    return remarks


def plan(job: JobState, size: int) -> RescalePlan:
    """What a rescale to `size` workers would do; workers that do not exist yet are called `new-1` and so on."""
    require_not_over(job.name, job.phase, job.reason)
    if size % job.membership.group_size:
        text = f"workers must be a multiple of the group size, {job.membership.group_size}, got {size}"
        raise RequestRefused("plan_invalid", text, "plan whole groups")
    if not 1 <= size <= PLANNED_MAX:
        raise RequestRefused("plan_invalid", f"workers must be 1 to {PLANNED_MAX}, got {size}", "give another number")
    old, present = list(job.membership.world), [member.id for member in job.membership.present()]
    # The highest ranks are removed, so that no survivor changes its rank.
    survivors = [member.id for member in job.membership.stayers()][:size]
    joiners = [member.id for member in job.membership.joining()][: size - len(survivors)]
    missing = size - len(survivors) - len(joiners)
    new = assign_ranks(old, set(survivors), [*joiners, *islice(_new_names(job), missing)])
    gone = [worker for worker in old if worker not in job.members]
    rate, batch = scale(job.config, job.scaling_base, job.learning_rate, job.training.global_batch_size, size)
    return RescalePlan(
        world_size=len(present),
        new_world_size=size,
        workers=_planned(old, new),
        ranks_changed=moves(old, new),
        learning_rate=job.learning_rate,
        new_learning_rate=rate,
        global_batch_size=job.training.global_batch_size,
        new_global_batch_size=batch,
        remarks=[*_current_remarks(job, gone), *_size_remarks(job.config, size, missing)],
        gone=gone,
        missing=missing,
    )


def _new_names(job: JobState) -> Iterator[str]:
    """Names for workers that do not exist yet."""
    names = (f"new-{number}" for number in count(1))
    return (name for name in names if name not in job.members and name not in job.membership.world)


def _planned(old: list[str], new: tuple[str, ...]) -> list[PlannedWorker]:
    before = {worker: rank for rank, worker in enumerate(old)}
    after = {worker: rank for rank, worker in enumerate(new)}
    return [
        PlannedWorker(worker, before.get(worker, RANK_NONE), after.get(worker, RANK_NONE))
        for worker in dict.fromkeys([*new, *old])
    ]


def _current_remarks(job: JobState, gone: Sequence[str]) -> Iterator[str]:
    """Remarks on the workers, rate and batch that the plan starts from."""
    before = len(job.membership.world)
    if gone:
        yield f"{named(gone)} of world {job.generation} {is_or_are(len(gone))} gone"
    if lost := [member.id for member in job.membership.present() if is_lost(member)]:
        yield f"{named(lost)} {is_or_are(len(lost))} included, without a connection"
    if before != job.membership.present_count and job.config.scale_batch_with_world:
        yield f"current rate and batch are for a world of {counted(before, 'worker')}"


def _size_remarks(config: ElasticTrainingConfig, size: int, missing: int) -> Iterator[str]:
    if missing:
        yield f"{counted(missing, 'worker')} must still join"
    if size < config.min_workers:
        yield f"the job would wait: min_workers is {config.min_workers}"
    if size > config.max_workers:
        yield f"no more than max_workers are taken in: max_workers is {config.max_workers}"
