"""Weighs peer reports with what the daemon sees itself: suspects lost workers, and names the worker to evict.

Invariants:
- A worker that neither the daemon nor a peer reaches may be dead. A worker that the daemon reaches is evicted only
  after several worlds in a row have failed over it.
- The only known holder of the state is spared as long as possible.
"""

from __future__ import annotations

from forged.elastic.failure_detector.detector import FailureDetector, is_lost
from forged.elastic.failure_detector.peer_reports import PeerReports
from forged.elastic.membership.member import Member
from forged.elastic.membership.world_membership import WorldMembership

REPORTED_WORLDS_MAX = 3
"""After peer reports in so many worlds, without a committed step in between, one worker is evicted."""


class Suspicions:
    """The suspicions about the workers of one job."""

    def __init__(self, membership: WorldMembership, detector: FailureDetector) -> None:
        self.peer_reports = PeerReports()
        self._membership = membership
        self._detector = detector

    def report_unreachable(self, member: Member, peer: str, now: float) -> None:
        """Take a member's report that it cannot reach a peer."""
        other = self._membership.members.get(peer)
        if other is None or not self._membership.in_world(member):
            return
        if other is not member and self._membership.in_world(other):
            self.peer_reports.add(member.id, peer, self._membership.topology.generation)
        self._suspect(other, member, now)

    def report_without_peer(self, member: Member, peer: str) -> None:
        """Take a member's report that it cannot continue, if it names no peer in the world and no failure explains it.

        Of a world that fails again and again one worker must go, if only the reporter.
        """
        other = self._membership.members.get(peer)
        if other is None or other is member or not self._membership.in_world(other):
            self.peer_reports.add(member.id, member.id, self._membership.topology.generation)

    def connection_lost(self, member: Member, now: float) -> None:
        """The daemon has lost a worker; suspect it if a peer has already reported it."""
        reporter_id = self.peer_reports.reporter_of(member.id, self._membership.topology.generation)
        reporter = self._membership.members.get(reporter_id)
        if reporter is not None:
            self._suspect(member, reporter, now)

    def _suspect(self, member: Member, reporter: Member, now: float) -> None:
        """Suspect a reported worker if the daemon has lost it too."""
        membership = self._membership
        holds_state = membership.in_world(member) and member.id in membership.state_holders
        is_spared = holds_state and membership.is_only_holder(member)
        if is_lost(member) and self._detector.is_reliable_reporter(reporter, now) and not is_spared:
            self._detector.suspect(member, reporter.id, now)

    def worker_to_evict(self) -> str | None:
        """The worker to evict because too many worlds have failed over peer reports; None if there is none."""
        membership, ranks = self._membership, {worker: rank for rank, worker in enumerate(self._membership.world)}
        worst = self.peer_reports.worst(ranks) if self.peer_reports.worlds >= REPORTED_WORLDS_MAX else None
        if worst is not None and membership.is_only_holder(membership.members[worst]):
            # No other worker is known to have the state: the worst of the workers without it goes instead.
            without_state = {worker: rank for worker, rank in ranks.items() if worker not in membership.state_holders}
            worst = self.peer_reports.worst(without_state) or worst
        return worst
