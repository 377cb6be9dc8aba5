"""A worker as the daemon knows it, with the evidence for and against its being alive.

Invariants:
- A worker fails by evidence, and the evidence is a sentence. The end of its process counts at once; silence counts only
  after a timeout, because a busy machine is silent too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from forged.elastic.config import HEARTBEATS_PER_TIMEOUT, PULSE_INTERVAL_S, ElasticTrainingConfig
from forged.elastic.model import WorkerId

PULSES_MISSED_MAX = 4
"""After so many missed intervals the pulse counts as dead and cannot report the worker's death."""
HEARTBEATS_MISSED_MAX = 2
"""After so many missed intervals a member counts as the one that holds a rescale up."""
HEARTBEAT_LATE = 1.25
"""A heartbeat may be late by a quarter of its interval."""
COLLECTIVES_PER_WORLD = 1 << 32
"""A world's collectives are numbered from its generation times this; the first is entered when all members have met."""
RESCALE_SHARE = 0.8
"""A member that was silent for this share of the rescale timeout holds the rescale up."""


@dataclass(slots=True)
class Member:
    """A registered worker. The fields before `drain_since` are stored; the rest is evidence of this daemon's run."""

    worker: WorkerId
    incarnation: bytes
    client: bytes
    joined_at: float
    pid: int = 0
    host: str = ""
    local_world_size: int = 1
    attributes: dict[str, str] = field(default_factory=dict)
    with_data: bool = False
    """Whether it holds training data, which other workers may have to fetch before it leaves."""
    drain_reason: str | None = None
    """Why it drains; None if it does not."""
    last_step_done: bool = False
    """Whether a draining worker trains no more. It may still save its state, and no world waits for it."""
    group: str = ""
    """The name of its group; empty in a job without groups."""
    group_rank: int = 0
    """Its position in its group."""

    drain_since: float = 0.0
    """Since when it drains; like all times below by the monotonic clock of this daemon."""
    joined_id: int = 0
    """The id of its `WorkerJoined`; 0 if an earlier run of the daemon published that."""
    seen_at: float = 0.0
    """When it registered with this daemon, or was loaded by it."""
    lost_at: float | None = None
    """Since when it has no connection; None while it has one."""
    is_unseen_since_restart: bool = False
    """Whether it registered with an earlier run of the daemon and was not heard since."""
    returned_at: float = -math.inf
    """When it last reconnected."""
    heard_at: float | None = None
    pulse_at: float | None = None
    cpu_s: float | None = None
    extra_silence_s: float = 0.0
    """How much longer than the settings allow it may be silent, until it applies changed settings."""
    pulse_interval_s: float = 0.0
    """How often its pulse is sent, as the pulse itself reports."""
    step: int = 0
    """The steps that it has reported as committed."""
    is_done: bool = False
    """Whether it says that training is complete after `step`."""
    collective_seq: int = 0
    """The number of its last collective, which shows which member its peers wait for."""
    meeting: str = ""
    """The meeting of its script's own collectives that it was in at its last heartbeat; empty for none."""
    reported_at: float = 0.0
    """When it last reported its progress."""
    progress_at: float = 0.0
    """When its progress last advanced."""
    stalled: bool = False
    drain_announced: bool = False
    """Whether the world, or the attempt, was formed with the knowledge that it drains."""

    @property
    def id(self) -> str:
        return self.worker.id

    @property
    def connected(self) -> bool:
        return self.lost_at is None

    def last_heard_at(self) -> float:
        """When its library or its pulse was last heard, or when it registered."""
        return max(self.seen_at, self.heard_at or 0.0, self.pulse_at or 0.0)

    def is_well(self, since: float) -> bool:
        """Whether it is connected, does not drain, and its library was heard after `since`."""
        heard_at = self.heard_at
        return heard_at is not None and heard_at > since and self.lost_at is None and self.drain_reason is None

    def is_silent(self, since: float) -> bool:
        """Whether its library was not heard after `since` (see `silent_since`), whatever its pulse says."""
        return self.lost_at is not None or max(self.seen_at, self.heard_at or 0.0) < since - self.extra_silence_s

    def has_pulse(self, now: float) -> bool:
        """Whether its pulse is alive and would report its death."""
        return self.pulse_at is not None and now - self.pulse_at < PULSES_MISSED_MAX * PULSE_INTERVAL_S

    def record_heartbeat(self, now: float, interval_s: float, config: ElasticTrainingConfig) -> None:
        """Its library was heard; the next heartbeat follows in `interval_s`, 0 if it does not say."""
        self.heard_at = now
        if self.extra_silence_s and 0.0 < interval_s <= config.heartbeat_interval_s:
            # The interval shows that the worker has applied the current settings.
            self.extra_silence_s = 0.0

    def record_pulse(self, now: float, interval_s: float, cpu_s: float) -> None:
        """Its pulse was heard; the next one follows in `interval_s`, 0 if it does not say."""
        self.pulse_at, self.cpu_s = now, cpu_s
        if interval_s != self.pulse_interval_s:
            self.pulse_interval_s = min(max(interval_s, 0.0) or PULSE_INTERVAL_S, PULSE_INTERVAL_S)

    def record_progress(self, now: float, step: int, collective_seq: int) -> bool:
        """Take its progress report; returns whether it has advanced."""
        self.reported_at = now
        has_advanced = step > self.step or collective_seq > self.collective_seq
        if has_advanced:
            self.step, self.collective_seq = max(step, self.step), max(collective_seq, self.collective_seq)
            self.progress_at = now
        return has_advanced

    def allow_for_settings_change(self, before: ElasticTrainingConfig, config: ElasticTrainingConfig) -> None:
        """Let it be silent for as long as the settings that it still applies allow."""
        shorter_s = before.worker_heartbeat_timeout_s - config.worker_heartbeat_timeout_s
        self.extra_silence_s = max(0.0, self.extra_silence_s + shorter_s)

    def silence_max_s(self, config: ElasticTrainingConfig) -> float:
        """How long it may be silent: by the settings that it applies, and by the interval of its pulse."""
        by_settings = config.worker_heartbeat_timeout_s + self.extra_silence_s
        return max(by_settings, HEARTBEATS_PER_TIMEOUT * self.pulse_interval_s)

    def extend_deadlines(self, late_s: float, now: float) -> None:
        """Extend all its deadlines by the time that the daemon itself was stalled."""
        self.seen_at = min(self.seen_at + late_s, now)
        self.drain_since = min(self.drain_since + late_s, now)
        self.reported_at = min(self.reported_at + late_s, now)
        self.progress_at = min(self.progress_at + late_s, now)
        self.lost_at = None if self.lost_at is None else min(self.lost_at + late_s, now)
        self.heard_at = None if self.heard_at is None else min(self.heard_at + late_s, now)
        self.pulse_at = None if self.pulse_at is None else min(self.pulse_at + late_s, now)


def silent_since(config: ElasticTrainingConfig, now: float) -> float:
    """A member last heard before this time is silent. The time is equal for all members, so a scan computes it once."""
    interval_s = config.heartbeat_interval_s
    # In a short rescale there is less time to tell silent members, but never less than one heartbeat.
    short_s = max(HEARTBEAT_LATE * interval_s, RESCALE_SHARE * (config.rescale_silence_s or math.inf))
    return now - min(HEARTBEATS_MISSED_MAX * interval_s, short_s)


def members_holding_up(
    members: Sequence[Member], waiting: Collection[str], config: ElasticTrainingConfig, now: float
) -> list[Member]:
    """The members that the rest waits for: those whose library is silent, else those with the lowest progress.

    A member outside `waiting`, such as a joiner, waits for no other member.
    """
    lowest = min((member.collective_seq for member in members if member.id in waiting), default=0)
    since = silent_since(config, now)
    silent = [member for member in members if member.is_silent(since)]
    return silent or [member for member in members if member.collective_seq == lowest or member.id not in waiting]


def death_evidence(member: Member, config: ElasticTrainingConfig, now: float) -> str | None:
    """Why the member counts as dead; None while it does not."""
    if member.lost_at is not None:
        # A lost member has its reconnect grace. With a live pulse it is suspended, or holds the GIL, and not dead.
        if now - member.lost_at < config.reconnect_grace_s or member.has_pulse(now):
            return None
        return f"connection lost {now - member.lost_at:.1f} s ago and not restored"
    silent_s = now - member.last_heard_at()
    if silent_s < member.silence_max_s(config):
        return None
    return f"no heartbeat and no pulse for {silent_s:.1f} s"


def drain_overdue(member: Member, config: ElasticTrainingConfig, now: float, *, is_required: bool) -> str | None:
    """Why a draining member that lives is no longer waited for; None while it is.

    A required member leaves by itself as long as its library lives: it may be handing over or saving its state.
    """
    draining_s = now - max(member.drain_since, member.seen_at)
    # However short the leave timeout is, a library is heard no more often than at every heartbeat.
    limit_s = max(config.leave_timeout_s, config.worker_heartbeat_timeout_s)
    if member.drain_reason is None or draining_s < limit_s:
        return None
    if member.lost_at is not None and now - member.lost_at < config.reconnect_grace_s:
        return None
    if not (is_required or member.last_step_done):
        return f"draining for {draining_s:.1f} s and has not left"
    silent_s = min(draining_s, now - (member.heard_at or 0.0))
    if silent_s < limit_s:
        return None
    return f"draining for {draining_s:.1f} s, and no heartbeat for {silent_s:.1f} s"
