"""A look at every worker, again and again: who is gone, who is lost, who does not get on.

Law: who was not heard because nobody listened has nothing held against it. Whoever waits for others is not the one that
does not get on; and what is lost is looked for before it counts as dead. What another says of one that is lost counts
where its own way to the daemon was good all along, and after a moment: a network that pauses for all takes no life.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.membership.member import Member, death_of, holding_up, overstays
from forged.elastic.messages import WorkerLost, WorkerRecovered, WorkerReturned, WorkerStalled
from forged.elastic.outbox import Outbox, Probe

SCAN_INTERVAL_S = 0.5
"""How often every member is looked at."""
LOST_S = 0.25
"""How soon a worker that was lost is looked at: it may have ended, and its pulse say so in a moment."""
LATE_S = 0.25
"""A look that comes so much too late says more of this process than of the workers."""
PROBE_INTERVAL_S = 1.0
AWAITED_S = 2.0
"""Who was there before this daemon has so long to come back, or to have its pulse tell why not, before it is probed."""
DEAF_S = 1.0
"""In so long a time in which nobody listens connections may be lost for that alone."""
STEADY_S = 5.0
"""For so long a worker must not have been away, nor this process deaf, for its word about another to count."""
CONFIRMED_S = 0.15
"""For so long whom neither reaches may come back."""
CONFIRMED_AMONG_SEVERAL_S = 3.0
"""The same where several hosts are lost at once, which says more of the network than of them."""
NEVER = float("inf")


class _Doubt(NamedTuple):
    """Another does not reach one that is lost."""

    reporter: str
    at: float


class FailureDetector:
    """What is known from looking at the members of one job."""

    def __init__(self, out: Outbox) -> None:
        self.out = out
        self._looked_at: float | None = None
        self._soon_at = NEVER
        self._well_since = -NEVER
        """Since when this process has had its turn."""
        self._lost_told: set[str] = set()
        self._probed_at: dict[str, float] = {}
        self._doubts: dict[str, _Doubt] = {}
        self._behind_since: dict[str, float] = {}
        """Since when others have come further than these."""

    def begin_anew(self) -> None:
        """Nobody was there to be looked at."""
        self._looked_at = None

    def due_at(self) -> float:
        """When to look again."""
        return -NEVER if self._looked_at is None else min(self._looked_at + SCAN_INTERVAL_S, self._soon_at)

    def late_s(self, now: float) -> float:
        """How long nobody has listened, in which workers may have said anything."""
        late_s = 0.0 if self._looked_at is None else now - self._looked_at - SCAN_INTERVAL_S
        return late_s if late_s >= LATE_S else 0.0

    def forgive(self, now: float) -> None:
        """Nobody has listened until now: whatever speaks against anybody may be over, and its end not heard yet."""
        self._behind_since.clear()
        if self.late_s(now) < DEAF_S:
            return
        self._well_since = now
        self._doubts = {name: doubt._replace(at=now + STEADY_S) for name, doubt in self._doubts.items()}

    def look(
        self,
        members: Mapping[str, Member],
        world: Collection[str],
        kept: Collection[str],
        config: ElasticTrainingConfig,
        now: float,
        *,
        stepping: Collection[str],
    ) -> Iterator[tuple[Member, str]]:
        """Look at everybody; yields who has to go, and why.

        `world` are those in the committed one, `kept` those who may be needed though they are in none any more, and
        `stepping` those who may be in a step now.
        """
        self._looked_at, self._soon_at = now, NEVER
        is_among_several = self._doubts and len({one.worker.hostname for one in members.values() if is_lost(one)}) > 1
        confirmed_s = CONFIRMED_AMONG_SEVERAL_S if is_among_several else CONFIRMED_S
        # Where nobody has come further, nobody waits for anybody: they are in the same long step.
        late = {member.id for member in holding_up([members[one] for one in world], world, config, now)}
        # Of a thousand nearly all are well, and have to cost next to nothing.
        lately = now - config.worker_heartbeat_timeout_s
        for worker_id, member in list(members.items()):
            is_in_world = worker_id in world
            if not member.is_well(lately):
                is_needed = is_in_world or worker_id in kept
                death = death_of(member, config, now) or overstays(member, config, now, is_needed=is_needed)
                death = death or self._confirmed(member, members, now, confirmed_s)
                if death is not None:
                    yield member, death
                    continue
                if not member.connected:
                    self.look_for(member, now)
                    self._tell_lost(member, config, now)
            if is_in_world:
                # Whoever has done its last step may take its time to save what it has.
                if worker_id not in stepping or member.last_step_done or worker_id not in late:
                    # Whoever waits for others has come further than they have, and may get on from when they do.
                    member.progress_at = now
                    self._behind_since.pop(worker_id, None)
                elif self._holds_up(member, config, now, is_behind=len(late) < len(world)) and config.evict_stalled:
                    yield member, f"it lives and made no progress for {member.told_at - member.progress_at:.1f} s"

    def lose(self, member: Member, now: float) -> None:
        """A worker's connection is gone."""
        self._soon_at = min(self._soon_at, now + LOST_S)
        self.look_for(member, now)

    def is_steady(self, member: Member, now: float) -> bool:
        """Whether nothing but the other is to blame where this one does not reach another."""
        return member.connected and now - member.returned_at >= STEADY_S

    def doubt(self, member: Member, reporter: str, now: float) -> None:
        """Another does not reach one that is lost. It has a moment to come back; longer, if nobody has listened."""
        well_since = now if self.late_s(now) >= DEAF_S else self._well_since
        doubt = self._doubts.setdefault(member.id, _Doubt(reporter, max(now, well_since + STEADY_S)))
        self._soon_at = min(self._soon_at, doubt.at + CONFIRMED_S)

    def _confirmed(self, member: Member, members: Mapping[str, Member], now: float, after_s: float) -> str | None:
        """Why one that is lost counts as dead, because another does not reach it either; None while it does not."""
        doubt = self._doubts.get(member.id)
        if doubt is None or member.lost_at is None or _lives(member, now):
            return None
        reporter = members.get(doubt.reporter)
        if reporter is None or not self.is_steady(reporter, now):
            # It was away itself, or is.
            del self._doubts[member.id]
            return None
        if now >= doubt.at + after_s:
            return f"neither the daemon nor {doubt.reporter} reaches it"
        self._soon_at = min(self._soon_at, doubt.at + after_s)
        return None

    def look_for(self, member: Member, now: float) -> None:
        """Have a lost worker's address probed. Who was there before this daemon may be on its way back."""
        if member.is_awaited and now - member.seen_at < AWAITED_S:
            return
        self.probe(member, now)

    def probe(self, member: Member, now: float) -> None:
        """See whether anybody listens at its address, unless a pulse would tell of its death."""
        last = self._probed_at.get(member.id, -PROBE_INTERVAL_S)
        if not member.has_pulse(now) and now - last >= PROBE_INTERVAL_S:
            self._probed_at[member.id] = now
            self.out.probes.append(Probe(member.worker, member.incarnation))

    def found(self, member: Member, now: float) -> None:
        """A worker that was lost has a connection again."""
        assert member.lost_at is not None
        after_s = now - member.lost_at
        member.lost_at, member.is_awaited, member.heard_at, member.returned_at = None, False, now, now
        self._doubts.pop(member.id, None)
        if member.id in self._lost_told:
            self._lost_told.discard(member.id)
            self.out.say(WorkerReturned(member.id, round(after_s, 3)))

    def recovered(self, member: Member, step: int) -> None:
        """A worker gets on."""
        if member.stalled:
            member.stalled = False
            self.out.say(WorkerRecovered(member.id, step))

    def forget(self, member: Member) -> None:
        """It is a member no more."""
        self._lost_told.discard(member.id)
        self._probed_at.pop(member.id, None)
        self._doubts.pop(member.id, None)
        self._behind_since.pop(member.id, None)

    def _holds_up(self, member: Member, config: ElasticTrainingConfig, now: float, *, is_behind: bool) -> bool:
        """Whether it is stalled, and others have waited for it for so long: not all are in the same long step."""
        stalls = self._stalls(member, config)
        if not is_behind:
            self._behind_since.pop(member.id, None)
            return False
        return now - self._behind_since.setdefault(member.id, now) >= config.stall_timeout_s and stalls

    def _stalls(self, member: Member, config: ElasticTrainingConfig) -> bool:
        # Who is not heard may make some.
        still_s = member.told_at - member.progress_at
        if not member.stalled and still_s >= config.stall_timeout_s:
            member.stalled = True
            self.out.say(WorkerStalled(member.id, member.step, round(still_s, 1)))
        return member.stalled

    def _tell_lost(self, member: Member, config: ElasticTrainingConfig, now: float) -> None:
        if member.id not in self._lost_told and is_lost(member):
            self._lost_told.add(member.id)
            self.out.say(_lost(member, config, now))


def _lost(member: Member, config: ElasticTrainingConfig, now: float) -> WorkerLost:
    assert member.lost_at is not None
    if member.pulse_at is not None and member.has_pulse(now):
        heard_s = now - member.pulse_at
        reason = f"its connection is gone; its pulse was heard {heard_s:.1f} s ago"
        return WorkerLost(member.id, reason, None)
    grace_s = member.lost_at + config.reconnect_grace_s - now
    return WorkerLost(member.id, "its connection is gone", round(grace_s, 3))


def _lives(member: Member, now: float) -> bool:
    """Whether its pulse was heard since it is lost, and still is: it is held up."""
    assert member.lost_at is not None
    return member.pulse_at is not None and member.pulse_at > member.lost_at and member.has_pulse(now)


def is_lost(member: Member) -> bool:
    """Whether its connection broke here. Who was here before this daemon is not lost, but on the way back."""
    return member.lost_at is not None and member.lost_at > member.seen_at
