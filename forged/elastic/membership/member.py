"""The workers of a job, and what speaks for and against their being alive.

Law: a worker fails by evidence, and the evidence is in words. What its process says of itself counts for it, the end of
its process against it at once; silence counts only when it has lasted, because a busy machine is silent too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from forged.elastic.config import HEARTBEATS_PER_TIMEOUT, ElasticTrainingConfig
from forged.elastic.model import WorkerId

PULSE_INTERVAL_S = 0.5
"""How often the pulse of a worker speaks, unless its job's settings want it to be missed sooner."""
PULSE_INTERVAL_S_MIN = 0.05
"""No pulse speaks more often, whatever the settings: it is to cost next to nothing."""
PULSES_MISSED_MAX = 4
"""So many intervals without a word, and there is no pulse that could tell of a death."""
HEARTBEATS_MISSED_MAX = 2
"""So many intervals without a heartbeat, and it is this worker's library rather than another's that does not get on."""
HEARTBEAT_LATE = 1.25
"""A heartbeat may come so much later than its interval."""
COLLECTIVES_PER_WORLD = 1 << 32
"""The collective_seq of a world begin at its generation times this; the first is made when all of it have met."""
RESCALE_SHARE = 0.8
"""Whoever was silent for so much of a rescale holds it up."""


@dataclass(slots=True)
class Member:
    """A worker that has registered. What the store keeps of it comes first; the rest is known by evidence."""

    worker: WorkerId
    incarnation: bytes
    client: bytes
    joined_at: float
    pid: int = 0
    host: str = ""
    local_world_size: int = 1
    attributes: dict[str, str] = field(default_factory=dict)
    with_data: bool = False
    """Whether it holds training data, for which others may have to come before it goes."""
    drain_reason: str | None = None
    """Why it is to go; None while it may stay."""
    last_step_done: bool = False
    """Whether it has done its last step. It may take its time to save what it has, and no world waits for it."""

    drain_since: float = 0.0
    """Since when, as far as this daemon knows; like all times below by the monotonic clock."""
    joined_id: int = 0
    """The id of the fact that it has joined; 0 where another daemon has told that."""
    seen_at: float = 0.0
    """When it registered with, or was loaded by, this daemon."""
    lost_at: float | None = None
    """Since when it has no connection; None while it has one."""
    is_awaited: bool = False
    """Whether it was there before this daemon, and was not seen since."""
    returned_at: float = -math.inf
    """When it had one again last."""
    heard_at: float | None = None
    pulse_at: float | None = None
    cpu_s: float | None = None
    slack_s: float = 0.0
    """How much longer than the job's settings say it may be silent: it may not have heard of them yet."""
    pulse_every_s: float = 0.0
    """How often its pulse speaks, as that says itself."""
    step: int = 0
    """The steps that it has committed, as far as it said."""
    collective_seq: int = 0
    """How often it has come to where workers meet, which shows who keeps the others waiting."""
    told_at: float = 0.0
    """When it said last how far it is."""
    progress_at: float = 0.0
    stalled: bool = False
    is_expected_to_go: bool = False
    """Whether the world, or the attempt at one, was formed by who knew that it is to go."""

    @property
    def id(self) -> str:
        return self.worker.id

    @property
    def connected(self) -> bool:
        return self.lost_at is None

    def last_heard_at(self) -> float:
        """When anything of it was heard last: its library, its pulse, or its registering."""
        return max(self.seen_at, self.heard_at or 0.0, self.pulse_at or 0.0)

    def is_well(self, since: float) -> bool:
        """Whether nothing speaks against it: it may stay, has a connection, and its library was heard since then."""
        heard_at = self.heard_at
        return heard_at is not None and heard_at > since and self.lost_at is None and self.drain_reason is None

    def is_mute(self, since: float) -> bool:
        """Whether its library was not heard since then, which `mute_since` tells; whatever its pulse says."""
        return self.lost_at is not None or max(self.seen_at, self.heard_at or 0.0) < since - self.slack_s

    def has_pulse(self, now: float) -> bool:
        """Whether there is a pulse that would tell of its death."""
        return self.pulse_at is not None and now - self.pulse_at < PULSES_MISSED_MAX * PULSE_INTERVAL_S

    def beat(self, now: float, interval_s: float, config: ElasticTrainingConfig) -> None:
        """Its library was heard, and says so again in `interval_s`; 0 where it does not say when."""
        self.heard_at = now
        if self.slack_s and 0.0 < interval_s <= config.heartbeat_interval_s:
            # It goes by the present settings.
            self.slack_s = 0.0

    def pulsate(self, now: float, interval_s: float, cpu_s: float) -> None:
        """Its pulse was heard, and is again in `interval_s`; 0 where it does not say when."""
        self.pulse_at, self.cpu_s = now, cpu_s
        if interval_s != self.pulse_every_s:
            self.pulse_every_s = min(max(interval_s, 0.0) or PULSE_INTERVAL_S, PULSE_INTERVAL_S)

    def reconsider(self, before: ElasticTrainingConfig, config: ElasticTrainingConfig) -> None:
        """Other settings hold for the job, of which it has yet to hear."""
        shorter_s = before.worker_heartbeat_timeout_s - config.worker_heartbeat_timeout_s
        self.slack_s = max(0.0, self.slack_s + shorter_s)

    def silence_max_s(self, config: ElasticTrainingConfig) -> float:
        """How long nothing may be heard of it: by the settings that it goes by, and by how often its pulse speaks."""
        return max(config.worker_heartbeat_timeout_s + self.slack_s, HEARTBEATS_PER_TIMEOUT * self.pulse_every_s)

    def forgive(self, late_s: float, now: float) -> None:
        """Hold nothing against it that nobody could have heard for so long."""
        self.seen_at = min(self.seen_at + late_s, now)
        self.drain_since = min(self.drain_since + late_s, now)
        self.told_at = min(self.told_at + late_s, now)
        self.progress_at = min(self.progress_at + late_s, now)
        self.lost_at = None if self.lost_at is None else min(self.lost_at + late_s, now)
        self.heard_at = None if self.heard_at is None else min(self.heard_at + late_s, now)
        self.pulse_at = None if self.pulse_at is None else min(self.pulse_at + late_s, now)

    def hear(self, now: float, step: int, collective_seq: int) -> bool:
        """Take word of how far it is; tells whether that is further than before."""
        self.told_at = now
        further = step > self.step or collective_seq > self.collective_seq
        if further:
            self.step, self.collective_seq, self.progress_at = (
                max(step, self.step),
                max(collective_seq, self.collective_seq),
                now,
            )
        return further


def pulse_interval_s(config: ElasticTrainingConfig) -> float:
    """How often the pulse of a worker speaks: so often that two of its words may be lost without a timeout."""
    return min(PULSE_INTERVAL_S, max(PULSE_INTERVAL_S_MIN, config.heartbeat_interval_s))


def mute_since(config: ElasticTrainingConfig, now: float) -> float:
    """Whoever was not heard since then is silent; the same for all, so it is worked out once for many."""
    interval_s = config.heartbeat_interval_s
    # Who has to be told from others within a short rescale has less time to be heard, but for one heartbeat.
    short_s = max(HEARTBEAT_LATE * interval_s, RESCALE_SHARE * (config.rescale_timeout_s or math.inf))
    return now - min(HEARTBEATS_MISSED_MAX * interval_s, short_s)


def holding_up(
    members: Sequence[Member], waiting: Collection[str], config: ElasticTrainingConfig, now: float
) -> list[Member]:
    """For whom the others wait: those whose library is silent, or else those who have come least far.

    Whoever is not one of `waiting`, as who is not in the world yet, waits for nobody.
    """
    last = min((member.collective_seq for member in members if member.id in waiting), default=0)
    since = mute_since(config, now)
    mute = [member for member in members if member.is_mute(since)]
    return mute or [member for member in members if member.collective_seq == last or member.id not in waiting]


def death_of(member: Member, config: ElasticTrainingConfig, now: float) -> str | None:
    """Why it counts as dead by now; None while it does not."""
    if member.lost_at is not None:
        # Whoever has no connection is silent of course, and has its grace to come back. One whose pulse lives is only
        # held up: its process is suspended, or does not let go of Python's lock.
        if now - member.lost_at < config.reconnect_grace_s or member.has_pulse(now):
            return None
        return f"its connection was lost {now - member.lost_at:.1f} s ago and did not come back"
    silent_s = now - member.last_heard_at()
    if silent_s < member.silence_max_s(config):
        return None
    return f"neither its library nor its pulse was heard for {silent_s:.1f} s"


def overstays(member: Member, config: ElasticTrainingConfig, now: float, *, is_needed: bool) -> str | None:
    """Why one that is to go is waited for no longer, though it lives; None while it is, or may stay.

    Whoever is needed by the others goes by itself as long as its library lives: it may be handing over what it holds,
    or saving it.
    """
    told_s = now - max(member.drain_since, member.seen_at)
    # However short its patience is, nobody is heard more often than at every heartbeat.
    patience_s = max(config.leave_timeout_s, config.worker_heartbeat_timeout_s)
    if member.drain_reason is None or told_s < patience_s:
        return None
    if member.lost_at is not None and now - member.lost_at < config.reconnect_grace_s:
        return None
    if not (is_needed or member.last_step_done):
        return f"it was told to go {told_s:.1f} s ago, and did not"
    silent_s = min(told_s, now - (member.heard_at or 0.0))
    if silent_s < patience_s:
        return None
    return f"it was told to go {told_s:.1f} s ago, and its library was not heard for {silent_s:.1f} s"
