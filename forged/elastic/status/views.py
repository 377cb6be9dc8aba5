"""A job's training as it is shown.

Law: a view tells what is, decides nothing, and names the units in its fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.coordinator.cluster import Cluster
from forged.elastic.failure_detector.detector import is_lost
from forged.elastic.membership.member import Member
from forged.elastic.messages import ClusterView, ControlReply, PlannedWorker, RescalePlan, RescaleView, WorkerView
from forged.elastic.model import RANK_NONE, WorkerStatus
from forged.elastic.phases import require_not_over
from forged.elastic.rescale.ranks import assign_ranks, moves
from forged.elastic.status.stall_report import describe_stall
from forged.errors import RequestRefused
from forged.phrases import counted, is_or_are, named

PLANNED_MAX = 10_000


def worker_view(cluster: Cluster, member: Member, now: float) -> WorkerView:
    """One worker."""
    heard_at = max(member.heard_at or 0.0, member.pulse_at or 0.0)
    return WorkerView(
        id=member.id,
        rank=rank_of(cluster, member),
        status=status_of(cluster, member),
        job=cluster.job,
        generation=cluster.generation,
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
    )


def rank_of(cluster: Cluster, member: Member) -> int:
    """Its rank in the committed world; -1 for who is not in it."""
    return cluster.membership.topology.rank_of(member.worker) if cluster.membership.holds(member) else RANK_NONE


def status_of(cluster: Cluster, member: Member) -> WorkerStatus:
    """What it is doing."""
    if member.drain_reason is not None:
        return WorkerStatus.LEAVING
    if cluster.trains and cluster.membership.holds(member):
        return WorkerStatus.ACTIVE
    if cluster.attempt is not None and member.id in cluster.attempt.target:
        return WorkerStatus.RESCALING
    if not cluster.membership.holds(member):
        return WorkerStatus.JOINING
    # Between two worlds, or in one of which too few are left, nobody trains.
    return WorkerStatus.ACTIVE if cluster.over else WorkerStatus.RESCALING


def cluster_view(cluster: Cluster, now: float, trouble: str = "") -> ClusterView:
    """The whole in one look; `trouble` is why the daemon cannot write, empty where it can."""
    return ClusterView(
        job=cluster.job,
        phase=cluster.phase,
        paused=cluster.paused,
        generation=cluster.generation,
        world_size=cluster.membership.there,
        joining=sum(1 for _ in cluster.membership.newcomers()),
        state=cluster.state,
        failures=cluster.failures.in_world,
        reason=cluster.reason,
        rescale=_rescale_view(cluster, now),
        stall_report=describe_stall(cluster, now, trouble),
    )


def _rescale_view(cluster: Cluster, now: float) -> RescaleView | None:
    attempt = cluster.attempt
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


def plan(cluster: Cluster, size: int) -> RescalePlan:
    """What a rescale to so many workers would do; workers that are not there yet are called `new-1` and so on."""
    require_not_over(cluster.job, cluster.phase, cluster.reason)
    if not 1 <= size <= PLANNED_MAX:
        raise RequestRefused("plan_invalid", f"workers = {size}", f"give 1 to {PLANNED_MAX}")
    old, there = list(cluster.membership.world), [member.id for member in cluster.membership.present()]
    # The highest ranks go first, so that nobody else has to move.
    staying = [worker for worker in there if worker not in cluster.membership.leavers][:size]
    joining = [member.id for member in cluster.membership.waiting()][: size - len(staying)]
    missing = size - len(staying) - len(joining)
    new = assign_ranks(old, set(staying), [*joining, *islice(_strangers(cluster), missing)])
    gone = [worker for worker in old if worker not in cluster.members]
    rate, batch = cluster.paces(size)
    return RescalePlan(
        world_size=len(there),
        new_world_size=size,
        workers=_planned(old, new),
        moves=moves(old, new),
        learning_rate=cluster.state.learning_rate,
        new_learning_rate=rate,
        global_batch_size=cluster.state.global_batch_size,
        new_global_batch_size=batch,
        remarks=[*_remarks_on_those_there(cluster, gone), *_remarks(cluster.config, size, missing)],
        gone=gone,
        missing=missing,
    )


def _strangers(cluster: Cluster) -> Iterator[str]:
    """Names for workers that are not there yet, and nobody else's."""
    names = (f"new-{number}" for number in count(1))
    return (name for name in names if name not in cluster.members and name not in cluster.membership.world)


def drain_remarks(cluster: Cluster, worker_id: str) -> list[str]:
    """What will come of it that a worker is to go, where that may not be what was wanted."""
    member, needed = cluster.members.require(worker_id), cluster.config.min_workers
    remarks = []
    left = sum(1 for other in cluster.members.values() if other.drain_reason is None)
    if cluster.membership.holds(member) and not cluster.over and left < needed:
        stay = f"{counted(left, 'worker')} will be left, and min_workers is {needed}"
        remarks.append(f"training will stand still: {stay}")
    if (
        cluster.membership.holds(member)
        and not cluster.over
        and not (cluster.membership.remaining or cluster.membership.joining())
    ):
        with_it = "the state of the training goes with it: nobody is left to take it"
        remarks.append(f"{with_it}; have the script save a checkpoint first, or start another worker")
    if member.stalled:
        remarks.append(f"{worker_id} is stalled, and goes when it has finished its step; evict it if it never does")
    if not member.connected:
        remarks.append(f"{worker_id} has no connection, and hears of it when it is back")
    return remarks


def steered(cluster: Cluster, now: float, *, changed: bool) -> ControlReply:
    """What has come of it that somebody steers the training."""
    known = cluster.reason if cluster.over else cluster.paused_because if cluster.paused else ""
    return ControlReply(changed, "" if changed else known, describe_stall(cluster, now))


def _planned(old: list[str], new: tuple[str, ...]) -> list[PlannedWorker]:
    before = {worker: rank for rank, worker in enumerate(old)}
    after = {worker: rank for rank, worker in enumerate(new)}
    return [
        PlannedWorker(worker, before.get(worker, RANK_NONE), after.get(worker, RANK_NONE))
        for worker in dict.fromkeys([*new, *old])
    ]


def _remarks_on_those_there(cluster: Cluster, gone: Sequence[str]) -> Iterator[str]:
    """What is to be said of who was in the last world, and of its pace."""
    before = len(cluster.membership.world)
    if gone:
        yield f"{named(gone)} of world {cluster.generation} {is_or_are(len(gone))} gone"
    if lost := [member.id for member in cluster.membership.present() if is_lost(member)]:
        yield f"{named(lost)} {is_or_are(len(lost))} counted, and {'has' if len(lost) == 1 else 'have'} no connection"
    if before != cluster.membership.there and cluster.config.scale_batch_with_world:
        yield f"the present rate and batch are those of a world of {counted(before, 'worker')}"


def _remarks(config: ElasticTrainingConfig, size: int, missing: int) -> Iterator[str]:
    if missing:
        yield f"{counted(missing, 'worker')} {'has' if missing == 1 else 'have'} yet to join"
    if size < config.min_workers:
        yield f"the job would wait: min_workers is {config.min_workers}"
    if size > config.max_workers:
        yield f"so many are not taken in: max_workers is {config.max_workers}"
