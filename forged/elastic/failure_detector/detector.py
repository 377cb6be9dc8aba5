"""The failure detector: a periodic scan of all members for dead, lost and stalled ones.

Invariants:
- Silence while the daemon itself was stalled counts against no member.
- A member that waits for other members is not stalled; a lost member is probed before it counts as dead.
- A peer report about a lost member counts after a moment, if the reporter's own connection was steady throughout, so
  that a network-wide pause fails no worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.membership.member import Member, death_evidence, drain_overdue, members_holding_up
from forged.elastic.messages import WorkerLost, WorkerRecovered, WorkerReturned, WorkerStalled
from forged.elastic.outbox import Outbox, Probe
from forged.rate_limit import TokenBucket

SCAN_INTERVAL_S = 0.5
LOST_SCAN_DELAY_S = 0.25
"""How soon a scan follows a lost connection: the worker may have died, and its pulse reports that in a moment."""
DAEMON_STALL_S = 0.25
"""A scan that is late by this much shows that the daemon was stalled."""
PROBE_INTERVAL_S = 1.0
PROBES_PER_S_MAX = 64
PROBES_AT_ONCE_MAX = 1024
"""A whole job may lose its connections at once; in the long run a job causes no more probes than `PROBES_PER_S_MAX`."""
RESTART_GRACE_S = 2.0
"""How long a member has after a daemon restart to reconnect, or its pulse to report its death, before it is probed."""
LONG_STALL_S = 1.0
"""In a daemon stall of this length connections may be lost because of the stall alone."""
STEADY_S = 5.0
"""How long the reporter must have been connected, and the daemon without a long stall, for a peer report to count."""
CONFIRM_S = 0.15
"""How long a suspected worker has to reconnect."""
CONFIRM_SEVERAL_HOSTS_S = 3.0
"""The same if several hosts are lost at once, which points to the network rather than to the hosts."""
NEVER = float("inf")


class _Suspicion(NamedTuple):
    """A peer report about a lost member; it counts from `at` on."""

    reporter: str
    at: float


class FailureDetector:
    """What the daemon has observed about the members of one job."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self._scanned_at: float | None = None
        self._early_scan_at = NEVER
        self._no_long_stall_since = -NEVER
        self._reported_lost: set[str] = set()
        self._probed_at: dict[str, float] = {}
        self._probe_limit = TokenBucket(PROBES_PER_S_MAX, PROBES_AT_ONCE_MAX, 0.0)
        self._suspicions: dict[str, _Suspicion] = {}
        self._behind_since: dict[str, float] = {}
        """Since when these members have been behind other members."""

    def reset(self) -> None:
        """Scan at once, with no stall counted: there were no members before."""
        self._scanned_at = None

    def due_at(self) -> float:
        """When the next scan is due."""
        return -NEVER if self._scanned_at is None else min(self._scanned_at + SCAN_INTERVAL_S, self._early_scan_at)

    def daemon_stall_s(self, now: float) -> float:
        """How long the daemon has been stalled since the last scan, and could hear no worker; 0 for a short delay."""
        late_s = 0.0 if self._scanned_at is None else now - self._scanned_at - SCAN_INTERVAL_S
        return late_s if late_s >= DAEMON_STALL_S else 0.0

    def extend_deadlines(self, now: float) -> None:
        """Take the daemon's stall into account: evidence gathered before it may be outdated."""
        self._behind_since.clear()
        if self.daemon_stall_s(now) < LONG_STALL_S:
            return
        self._no_long_stall_since = now
        self._suspicions = {name: one._replace(at=now + STEADY_S) for name, one in self._suspicions.items()}

    def scan(
        self,
        members: Mapping[str, Member],
        world: Collection[str],
        retained: Collection[str],
        config: ElasticTrainingConfig,
        now: float,
        *,
        stepping: Collection[str],
    ) -> Iterator[tuple[Member, str]]:
        """Judge every member; yields those that have failed, with the evidence.

        `world` are the members of the committed world, `retained` former ones that may still be needed, and `stepping`
        those that may be in a step now.
        """
        self._scanned_at, self._early_scan_at = now, NEVER
        several = self._suspicions and len({one.worker.hostname for one in members.values() if is_lost(one)}) > 1
        confirm_s = CONFIRM_SEVERAL_HOSTS_S if several else CONFIRM_S
        # If no member is ahead, all are in the same long step and none waits for another.
        late = {member.id for member in members_holding_up([members[one] for one in world], world, config, now)}
        # Of a thousand members nearly all are well, so a well member costs next to nothing here.
        recently = now - config.worker_heartbeat_timeout_s
        for worker_id, member in list(members.items()):
            in_world = worker_id in world
            if not member.is_well(recently):
                is_required = in_world or worker_id in retained
                reason = death_evidence(member, config, now)
                reason = reason or drain_overdue(member, config, now, is_required=is_required)
                reason = reason or self._confirmed_suspicion(member, members, now, confirm_s)
                if reason is not None:
                    yield member, reason
                    continue
                if not member.connected:
                    self._probe_lost(member, now)
                    self._report_lost(member, config, now)
            if in_world:
                # A draining member that has done its last step may take its time to save its state.
                if worker_id not in stepping or member.last_step_done or worker_id not in late:
                    # A member that waits for slower members can advance only after they do.
                    member.progress_at = now
                    self._behind_since.pop(worker_id, None)
                elif self._holds_up(member, config, now, is_behind=len(late) < len(world)) and config.evict_stalled:
                    yield member, f"alive, but no progress for {member.reported_at - member.progress_at:.1f} s"

    # Lost connections.

    def connection_lost(self, member: Member, now: float) -> None:
        self._early_scan_at = min(self._early_scan_at, now + LOST_SCAN_DELAY_S)
        self._probe_lost(member, now)

    def connection_restored(self, member: Member, now: float) -> None:
        assert member.lost_at is not None
        after_s = now - member.lost_at
        member.lost_at, member.is_unseen_since_restart, member.heard_at, member.returned_at = None, False, now, now
        self._suspicions.pop(member.id, None)
        if member.id in self._reported_lost:
            self._reported_lost.discard(member.id)
            self.outbox.publish(WorkerReturned(member.id, round(after_s, 3)))

    def _report_lost(self, member: Member, config: ElasticTrainingConfig, now: float) -> None:
        if member.id not in self._reported_lost and is_lost(member):
            self._reported_lost.add(member.id)
            self.outbox.publish(_lost_fact(member, config, now))

    def _probe_lost(self, member: Member, now: float) -> None:
        """Probe a lost member, unless the daemon has just restarted and the member may be on its way back."""
        if not (member.is_unseen_since_restart and now - member.seen_at < RESTART_GRACE_S):
            self.probe(member, now)

    def probe(self, member: Member, now: float) -> None:
        """Probe a member's peer port, unless a pulse would report its death."""
        last = self._probed_at.get(member.id, -PROBE_INTERVAL_S)
        is_due = not member.has_pulse(now) and now - last >= PROBE_INTERVAL_S
        if is_due and self._probe_limit.take(1, now):
            self._probed_at[member.id] = now
            self.outbox.probes.append(Probe(member.worker, member.incarnation, member.host))

    # Suspicions.

    def is_reliable_reporter(self, member: Member, now: float) -> bool:
        """Whether the member's own connection was steady for long enough for its peer reports to count."""
        return member.connected and now - member.returned_at >= STEADY_S

    def suspect(self, member: Member, reporter: str, now: float) -> None:
        """Note that a peer cannot reach a lost member either; after a long stall of the daemon it counts later."""
        no_stall_since = now if self.daemon_stall_s(now) >= LONG_STALL_S else self._no_long_stall_since
        found = self._suspicions.setdefault(member.id, _Suspicion(reporter, max(now, no_stall_since + STEADY_S)))
        self._early_scan_at = min(self._early_scan_at, found.at + CONFIRM_S)

    def _confirmed_suspicion(
        self, member: Member, members: Mapping[str, Member], now: float, confirm_s: float
    ) -> str | None:
        """Why a suspected member counts as dead; None while it does not."""
        suspicion = self._suspicions.get(member.id)
        if suspicion is None or member.lost_at is None or _has_pulse_since_loss(member, now):
            return None
        reporter = members.get(suspicion.reporter)
        if reporter is None or not self.is_reliable_reporter(reporter, now):
            # The reporter was, or is, disconnected itself.
            del self._suspicions[member.id]
            return None
        if now >= suspicion.at + confirm_s:
            return f"unreachable from the daemon and from {suspicion.reporter}"
        self._early_scan_at = min(self._early_scan_at, suspicion.at + confirm_s)
        return None

    # Stalls.

    def recovered(self, member: Member, step: int) -> None:
        """Note that a member's progress has advanced."""
        if member.stalled:
            member.stalled = False
            self.outbox.publish(WorkerRecovered(member.id, step))

    def _holds_up(self, member: Member, config: ElasticTrainingConfig, now: float, *, is_behind: bool) -> bool:
        """Whether the member is stalled and other members have waited for it for the stall timeout."""
        is_stalled = self._is_stalled(member, config)
        if not is_behind:
            self._behind_since.pop(member.id, None)
            return False
        return now - self._behind_since.setdefault(member.id, now) >= config.stall_timeout_s and is_stalled

    def _is_stalled(self, member: Member, config: ElasticTrainingConfig) -> bool:
        # Measured up to its last report: a member that is not heard may still advance.
        still_s = member.reported_at - member.progress_at
        if not member.stalled and still_s >= config.stall_timeout_s:
            member.stalled = True
            self.outbox.publish(WorkerStalled(member.id, member.step, round(still_s, 1)))
        return member.stalled

    def forget(self, member: Member) -> None:
        self._reported_lost.discard(member.id)
        self._probed_at.pop(member.id, None)
        self._suspicions.pop(member.id, None)
        self._behind_since.pop(member.id, None)


def is_lost(member: Member) -> bool:
    """Whether this daemon has lost the member's connection; a member not seen since a restart is not lost."""
    return member.lost_at is not None and member.lost_at > member.seen_at


def _lost_fact(member: Member, config: ElasticTrainingConfig, now: float) -> WorkerLost:
    assert member.lost_at is not None
    if member.pulse_at is not None and member.has_pulse(now):
        reason = f"connection lost; its pulse was heard {now - member.pulse_at:.1f} s ago"
        return WorkerLost(member.id, reason, None)
    grace_s = member.lost_at + config.reconnect_grace_s - now
    return WorkerLost(member.id, "connection lost", round(grace_s, 3))


def _has_pulse_since_loss(member: Member, now: float) -> bool:
    """Whether its pulse has been heard since its connection was lost, and still is."""
    assert member.lost_at is not None
    return member.pulse_at is not None and member.pulse_at > member.lost_at and member.has_pulse(now)
