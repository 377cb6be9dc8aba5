"""Who of a job's world does not work with whom, and who has to go over it.

Law: what one says of another is weighed with what the daemon sees for itself. Whom neither reaches may be dead; of
those whom the daemon reaches nobody goes before world after world has come to nothing. Who alone is known to have the
state is spared for as long as it can be.
"""

from __future__ import annotations

from forged.elastic.failure_detector.detector import FailureDetector, is_lost
from forged.elastic.failure_detector.peer_reports import PeerReports
from forged.elastic.membership.member import Member
from forged.elastic.membership.world_membership import WorldMembership

QUARRELS_MAX = 3
"""So many worlds in which the same workers did not reach each other, without a step between, and one has to go."""


class Suspicions:
    """What the workers of one job say of each other, and what follows."""

    def __init__(self, membership: WorldMembership, watch: FailureDetector) -> None:
        self.complaints = PeerReports()
        self._lineup = membership
        self._watch = watch

    def does_not_reach(self, member: Member, peer: str, now: float) -> None:
        """One of the world says that it does not reach another."""
        other = self._lineup.members.get(peer)
        if other is None or not self._lineup.holds(member):
            return
        if other is not member and self._lineup.holds(other):
            self.complaints.add(member.id, peer, self._lineup.topology.epoch)
        self._doubt(other, member, now)

    def cannot_go_on(self, member: Member, peer: str) -> None:
        """One says so of its world, over nobody else of it, and nobody has gone who would explain that.

        Of a world that comes to nothing again and again somebody has to go, if only who says so.
        """
        other = self._lineup.members.get(peer)
        if other is None or other is member or not self._lineup.holds(other):
            self.complaints.add(member.id, member.id, self._lineup.topology.epoch)

    def lost(self, member: Member, now: float) -> None:
        """The daemon does not reach one; another may have said the same."""
        reporter = self._lineup.members.get(self.complaints.about(member.id, self._lineup.topology.epoch))
        if reporter is not None:
            self._doubt(member, reporter, now)

    def _doubt(self, member: Member, reporter: Member, now: float) -> None:
        """Another does not reach this one; if the daemon does not either, it may be dead."""
        alone_has_the_state = self._lineup.holders_there() == {member.id}
        if is_lost(member) and self._watch.is_steady(reporter, now) and not alone_has_the_state:
            self._watch.doubt(member, reporter.id, now)

    def loser(self) -> str | None:
        """Who has to go because of those who will not work together in any world; None for nobody."""
        membership, ranks = self._lineup, {worker: rank for rank, worker in enumerate(self._lineup.world)}
        worst = self.complaints.worst(ranks) if self.complaints.worlds >= QUARRELS_MAX else None
        if worst is not None and not membership.holders_there() - {worst}:
            # Nobody else is known to have the state: of those who may not, the worst goes.
            others = {worker: rank for worker, rank in ranks.items() if worker not in membership.state_holders}
            worst = self.complaints.worst(others) or worst
        return worst
