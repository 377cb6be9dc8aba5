"""What is kept of a job's training in the store.

Law: a change writes only what it changed: a member its record, a commit the world, everything else the cluster. What
comes back is what was there, but for what is known by evidence only.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from forged.elastic.compatibility import SharedConfig
from forged.elastic.coordinator.cluster import Cluster
from forged.elastic.coordinator.failure_budget import FailureBudget
from forged.elastic.membership.member import Member
from forged.elastic.membership.registry import MemberRegistry
from forged.elastic.model import ClusterTopology, GlobalTrainingState, WorkerId
from forged.elastic.outbox import Moment
from forged.elastic.phases import Phase
from forged.elastic.rescale.scaling import ScalingBase
from forged.jobs.model import SettingValue

PREFIX = "elastic/"
CLUSTER, WORLD, MEMBER = "cluster", "world", "member"


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Where the training is, and with which of the job's settings."""

    settings: dict[str, SettingValue]
    key: bytes
    phase: Phase
    paused: bool
    paused_because: str = ""
    state: GlobalTrainingState
    attempts: int
    failures: int
    failures_in_a_row: int
    failed_at_step: int
    base: tuple[int, float, int]
    reason: str
    why: list[str]
    slack_s: float = 0.0
    """The most that any worker may be silent for longer than the settings say."""
    shared_config: SharedConfig | None = None
    told_over: int = 0
    cause: int = 0


class WorldRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The committed world; `incarnations` are those of its workers, in the order of their ranks."""

    topology: ClusterTopology
    incarnations: tuple[bytes, ...]
    state_holders: tuple[str, ...] = ()
    former: dict[str, bytes] = {}
    """The incarnations of those who have gone out of the world before, and are kept for what they have."""


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that has registered."""

    worker: WorkerId
    incarnation: bytes
    client: bytes
    joined_at: float
    pid: int
    host: str
    local_world_size: int
    attributes: dict[str, str]
    drain_reason: str | None
    with_data: bool = False
    last_step_done: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode_cluster = msgspec.msgpack.Decoder(ClusterRecord).decode
_decode_world = msgspec.msgpack.Decoder(WorldRecord).decode
_decode_member = msgspec.msgpack.Decoder(MemberRecord).decode


def job_of(key: str) -> str:
    """The job that a key is about."""
    return key.removeprefix(PREFIX).partition("/")[0]


def writes(cluster: Cluster) -> dict[str, bytes | None]:
    """What has changed since the outbox was emptied."""
    out, prefix = cluster.out, f"{PREFIX}{cluster.job}/"
    found: dict[str, bytes | None] = {}
    if out.cluster or out.world:
        found |= anew(cluster)
    if out.world:
        found[prefix + WORLD] = _encode(
            WorldRecord(
                topology=cluster.membership.topology,
                incarnations=tuple(cluster.membership.world.values()),
                state_holders=tuple(sorted(cluster.membership.state_holders)),
                former={name: member.incarnation for name, member in cluster.membership.former.items()},
            )
        )
    for worker in out.members:
        member = cluster.members.get(worker)
        found[f"{prefix}{MEMBER}/{worker}"] = None if member is None else _encode(_member_record(member))
    return found


def anew(cluster: Cluster) -> dict[str, bytes | None]:
    """What is kept of it besides its members and its world."""
    return {f"{PREFIX}{cluster.job}/{CLUSTER}": _encode(_cluster_record(cluster))}


def restored(job: str, entries: Iterable[tuple[str, bytes]], now: Moment) -> Cluster | None:
    """The cluster that these entries were written for; all members have yet to come back. None where it is no more."""
    cluster = Cluster(job, {})
    members: list[Member] = []
    world: WorldRecord | None = None
    slack_s = 0.0
    for key, value in entries:
        kind = key.removeprefix(f"{PREFIX}{job}/").partition("/")[0]
        if kind == CLUSTER:
            record = _decode_cluster(value)
            _take_cluster(cluster, record)
            slack_s = record.slack_s
        elif kind == WORLD:
            world = _decode_world(value)
        else:
            members.append(_member(_decode_member(value), now))
    if not cluster.known:
        return None
    for member in members:
        member.slack_s = slack_s
    # Who came first is taken in first, also behind a restart.
    cluster.membership.members = MemberRegistry(job, sorted(members, key=lambda member: member.joined_at))
    if world is not None:
        _take_world(cluster, world)
    cluster.resume_from_store(now)
    return cluster


def _cluster_record(cluster: Cluster) -> ClusterRecord:
    return ClusterRecord(
        settings=cluster.settings,
        key=cluster.key,
        phase=cluster.phase,
        paused=cluster.paused,
        paused_because=cluster.paused_because,
        state=cluster.state,
        attempts=cluster.attempts,
        failures=cluster.failures.in_world,
        failures_in_a_row=cluster.failures.in_a_row,
        failed_at_step=cluster.failures.at_step,
        base=cluster.base,
        reason=cluster.reason,
        why=cluster.why,
        slack_s=max((member.slack_s for member in cluster.members.values()), default=0.0),
        shared_config=cluster.shared_config,
        told_over=cluster.told_over,
        cause=cluster.cause,
    )


def _take_cluster(cluster: Cluster, record: ClusterRecord) -> None:
    cluster.known, cluster.key = True, record.key
    cluster.configure(record.settings)
    cluster.phase, cluster.paused, cluster.state = record.phase, record.paused, record.state
    cluster.paused_because, cluster.attempts = record.paused_because, record.attempts
    cluster.failures = FailureBudget(record.failures, record.failures_in_a_row, record.failed_at_step)
    cluster.base, cluster.reason, cluster.why = ScalingBase(*record.base), record.reason, record.why
    cluster.shared_config, cluster.told_over, cluster.cause = record.shared_config, record.told_over, record.cause


def _take_world(cluster: Cluster, record: WorldRecord) -> None:
    cluster.membership.topology = record.topology
    ids = (worker.id for worker in record.topology.workers)
    cluster.membership.world = dict(zip(ids, record.incarnations, strict=True))
    cluster.membership.state_holders = frozenset(record.state_holders)
    former = (cluster.members.known(name, incarnation) for name, incarnation in record.former.items())
    cluster.membership.dismiss(member for member in former if member is not None)


def _member_record(member: Member) -> MemberRecord:
    return MemberRecord(**{name: getattr(member, name) for name in MemberRecord.__struct_fields__})


def _member(record: MemberRecord, now: Moment) -> Member:
    member = Member(**msgspec.structs.asdict(record))
    member.seen_at = member.lost_at = member.progress_at = now.monotonic
    member.is_awaited = True
    return member
