"""What the store keeps of a job's training.

Invariants:
- A change writes only the records that it changed: a member's, the world's, the job's.
- A restored job equals the stored one, except for what is known by evidence only.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from forged.elastic.compatibility import SharedConfig
from forged.elastic.coordinator.failure_budget import FailureBudget
from forged.elastic.coordinator.job_coordinator import JobCoordinator
from forged.elastic.coordinator.job_state import JobState
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
    """The job's settings and training state."""

    settings: dict[str, SettingValue]
    key: bytes
    phase: Phase
    paused: bool
    pause_reason: str = ""
    state: GlobalTrainingState
    learning_rate: float | None = None
    attempts: int
    failures: int
    failures_in_a_row: int
    failed_at_step: int
    base: tuple[int, float | None, int]
    reason: str
    rescale_reasons: list[str]
    extra_silence_s: float = 0.0
    """The most that any worker may be silent beyond what the settings allow."""
    shared_config: SharedConfig | None = None
    interrupted_attempt: int = 0
    cause_id: int = 0
    group_size: int = 1


class WorldRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The committed world; `incarnations` are those of its members, in rank order."""

    topology: ClusterTopology
    incarnations: tuple[bytes, ...]
    state_holders: tuple[str, ...] = ()
    former: dict[str, bytes] = {}
    """The incarnations of former members that are kept for their state."""


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A registered worker."""

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
    group: str = ""
    group_rank: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode_cluster = msgspec.msgpack.Decoder(ClusterRecord).decode
_decode_world = msgspec.msgpack.Decoder(WorldRecord).decode
_decode_member = msgspec.msgpack.Decoder(MemberRecord).decode


def job_of(key: str) -> str:
    """The job that a key belongs to."""
    return key.removeprefix(PREFIX).partition("/")[0]


def changed_records(job: JobState) -> dict[str, bytes | None]:
    """The writes for all that changed since the outbox was taken; None deletes a key."""
    outbox, prefix = job.outbox, f"{PREFIX}{job.name}/"
    found: dict[str, bytes | None] = {}
    if outbox.job or outbox.world:
        found |= job_record(job)
    if outbox.world:
        found[prefix + WORLD] = _encode(
            WorldRecord(
                topology=job.membership.topology,
                incarnations=tuple(job.membership.world.values()),
                state_holders=tuple(sorted(job.membership.state_holders)),
                former={name: member.incarnation for name, member in job.membership.former.items()},
            )
        )
    for worker in outbox.members:
        member = job.members.get(worker)
        found[f"{prefix}{MEMBER}/{worker}"] = None if member is None else _encode(_member_record(member))
    return found


def job_record(job: JobState) -> dict[str, bytes | None]:
    """The write of the job's own record, without members and world."""
    return {f"{PREFIX}{job.name}/{CLUSTER}": _encode(_cluster_record(job))}


def restore(name: str, entries: Iterable[tuple[str, bytes]], now: Moment) -> JobCoordinator | None:
    """The job that these entries were written for, with all members unseen; None if the job was removed."""
    job = JobCoordinator(name, {})
    members: list[Member] = []
    world: WorldRecord | None = None
    extra_silence_s = 0.0
    for key, value in entries:
        kind = key.removeprefix(f"{PREFIX}{name}/").partition("/")[0]
        if kind == CLUSTER:
            record = _decode_cluster(value)
            _restore_cluster(job, record)
            extra_silence_s = record.extra_silence_s
        elif kind == WORLD:
            world = _decode_world(value)
        else:
            members.append(_member(_decode_member(value), now))
    if not job.is_stored:
        return None
    for member in members:
        member.extra_silence_s = extra_silence_s
    # Joiners are taken in by the order of registration, also after a restart.
    job.membership.members = MemberRegistry(name, sorted(members, key=lambda member: member.joined_at))
    if world is not None:
        _restore_world(job, world)
    job.resume_from_store(now)
    return job


def _cluster_record(job: JobState) -> ClusterRecord:
    return ClusterRecord(
        settings=job.settings,
        key=job.key,
        phase=job.phase,
        paused=job.paused,
        pause_reason=job.pause_reason,
        state=job.training,
        learning_rate=job.learning_rate,
        attempts=job.attempts,
        failures=job.failure_budget.in_world,
        failures_in_a_row=job.failure_budget.in_a_row,
        failed_at_step=job.failure_budget.at_step,
        base=job.scaling_base,
        reason=job.reason,
        rescale_reasons=job.rescale_reasons,
        extra_silence_s=max((member.extra_silence_s for member in job.members.values()), default=0.0),
        shared_config=job.shared_config,
        interrupted_attempt=job.interrupted_attempt,
        cause_id=job.cause_id,
        group_size=job.membership.group_size,
    )


def _restore_cluster(job: JobState, record: ClusterRecord) -> None:
    job.is_stored, job.key = True, record.key
    job.configure(record.settings)
    job.phase, job.reason, job.paused, job.pause_reason = (
        record.phase,
        record.reason,
        record.paused,
        record.pause_reason,
    )
    job.training, job.learning_rate, job.scaling_base = record.state, record.learning_rate, ScalingBase(*record.base)
    job.failure_budget = FailureBudget(record.failures, record.failures_in_a_row, record.failed_at_step)
    job.attempts, job.interrupted_attempt = record.attempts, record.interrupted_attempt
    job.rescale_reasons, job.cause_id = record.rescale_reasons, record.cause_id
    job.shared_config = record.shared_config
    job.membership.group_size = record.group_size


def _restore_world(job: JobState, record: WorldRecord) -> None:
    job.membership.topology = record.topology
    ids = (worker.id for worker in record.topology.workers)
    job.membership.world = dict(zip(ids, record.incarnations, strict=True))
    job.membership.state_holders = frozenset(record.state_holders)
    former = (job.members.find(name, incarnation) for name, incarnation in record.former.items())
    job.membership.add_former(member for member in former if member is not None)


def _member_record(member: Member) -> MemberRecord:
    return MemberRecord(**{name: getattr(member, name) for name in MemberRecord.__struct_fields__})


def _member(record: MemberRecord, now: Moment) -> Member:
    member = Member(**msgspec.structs.asdict(record))
    member.seen_at = member.lost_at = member.progress_at = now.monotonic
    member.is_unseen_since_restart = True
    return member
