"""Which role each member has: in the world, joiner, draining, state holder; and which of them form the next world.

Invariants:
- Only as many draining workers stay in the next world as `min_workers` requires.
- The only known holder of the state may leave when another worker has the state, or when no worker is there, or on its
  way back, that could take it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.membership.member import Member
from forged.elastic.membership.registry import MemberRegistry
from forged.elastic.model import ClusterTopology


class WorldMembership:
    """The members of one job by their role; `config` is the job's current one."""

    def __init__(self, job: str, config: ElasticTrainingConfig) -> None:
        self.config = config
        self.members = MemberRegistry(job)
        self.topology = ClusterTopology()
        self.world: dict[str, bytes] = {}
        """The incarnations of the committed world's members, in rank order."""
        self.state_holders: frozenset[str] = frozenset()
        """Members of the world known to have the state, by their stop reports or because all members have met."""
        self._outsiders: dict[str, Member] = {}
        """The members outside the world, in the order in which they registered."""
        self._draining: dict[str, Member] = {}
        """The draining members of the world, in the order in which their drains began."""
        self._former: dict[str, Member] = {}
        """Members that left a world with its state and are still registered."""

    def in_world(self, member: Member) -> bool:
        """Whether this incarnation is in the committed world."""
        return self.world.get(member.id) == member.incarnation

    # Changes.

    def classify(self) -> None:
        """Sort all members into outsiders and draining members anew."""
        self._outsiders = {name: member for name, member in self.members.items() if not self.in_world(member)}
        draining = (member for member in self.present() if member.drain_reason is not None)
        self._draining = {member.id: member for member in sorted(draining, key=lambda member: member.drain_since)}

    def add(self, newcomer: Member) -> None:
        self.members.add(newcomer)
        # A process that has left and registers again before the next world is in the committed one still.
        if not self.in_world(newcomer):
            self._outsiders[newcomer.id] = newcomer

    def mark_draining(self, member: Member) -> None:
        if self.in_world(member):
            self._draining[member.id] = member

    def remove(self, member: Member) -> None:
        self.members.remove(member)
        for group in (self._outsiders, self._draining, self._former):
            group.pop(member.id, None)

    def commit(self, target: Sequence[str], removed: Collection[str], now: float, *, all_have_stopped: bool) -> None:
        """Make `target` the world; if all have stopped for it, all of them have the state."""
        workers = [self.members[name] for name in target]
        self.topology = ClusterTopology(tuple(one.worker for one in workers), self.topology.generation + 1, now)
        holders = [member for member in self.present() if member.id in self.state_holders]
        self.world = {one.id: one.incarnation for one in workers}
        self.state_holders = frozenset(target) if all_have_stopped else self.state_holders.difference(removed)
        self.add_former(member for member in holders if not self.in_world(member))
        self.classify()

    def add_former(self, members: Iterable[Member]) -> None:
        """Keep members that have left the world with its state."""
        self._former.update((member.id, member) for member in members)

    def mark_all_state_holders(self) -> None:
        """Note that all members of the world have met, and so have the state."""
        self.state_holders = frozenset(self.world)

    # The current world.

    def present(self) -> Iterator[Member]:
        """The members of the world that are registered, in rank order."""
        for name, incarnation in self.world.items():
            member = self.members.find(name, incarnation)
            if member is not None:
                yield member

    @property
    def present_count(self) -> int:
        return len(self.members) - len(self._outsiders)

    @property
    def is_complete(self) -> bool:
        """Whether all members of the world are registered."""
        return self.present_count == len(self.world)

    @property
    def remaining(self) -> int:
        """How many members of the world do not drain."""
        return self.present_count - len(self._draining)

    @property
    def draining(self) -> Collection[str]:
        """The draining members of the world, in the order in which their drains began."""
        return self._draining.keys()

    def joiners(self) -> Iterator[Member]:
        """The workers that wait for a world, in the order in which they registered; some may be lost."""
        return (member for member in self._outsiders.values() if member.drain_reason is None)

    def connected_joiners(self) -> Iterator[Member]:
        return (member for member in self.joiners() if member.lost_at is None)

    # The next world.

    def next_survivors(self) -> set[str]:
        """The members of the world that stay in the next one."""
        return {member.id for member in self._stayers()} | self._required_draining()

    def next_joiners(self) -> list[str]:
        """The joiners that the next world has room for."""
        room = self.config.max_workers - self.remaining - len(self._required_draining())
        return [member.id for member in islice(self.connected_joiners(), max(0, room))]

    def next_size(self, joiners: Collection[str]) -> int:
        """The size of the next world with these joiners; draining members alone form no world."""
        return self.remaining + len(self._required_draining()) + len(joiners) if self.remaining or joiners else 0

    def _stayers(self) -> Iterator[Member]:
        return (member for member in self.present() if member.drain_reason is None)

    def _required_draining(self) -> set[str]:
        """The draining members that `min_workers` requires; the last to drain stay."""
        missing = self.config.min_workers - self.remaining
        if not self._draining or missing <= 0:
            return set()
        joining = sum(1 for _ in islice(self.connected_joiners(), missing))
        return set(islice(self._usable_draining(), missing - joining))

    def _usable_draining(self) -> Iterator[str]:
        """The draining members that a world can use, the last to drain first.

        A draining member that has done its last step is of use for its state only, while no stayer holds the state.
        """
        # A stayer that is lost counts: it may be on its way back.
        is_held = any(member.id in self.state_holders for member in self._stayers())
        return (name for name, member in reversed(self._draining.items()) if not (is_held and member.last_step_done))

    def state_survives(self) -> bool:
        """Whether a connected stayer is known to have the state."""
        return any(member.connected and member.id in self.state_holders for member in self._stayers())

    # Leaving.

    def next_to_leave(self, in_attempt: Collection[str]) -> Member | None:
        """The first draining member outside `in_attempt` without which a world can form.

        `in_attempt` has the members whose drain the current attempt completes. A required member counts too while no
        attempt has announced its drain to the workers that could take over its data.
        """
        if not (self._draining and (self.remaining or next(self.connected_joiners(), None))):
            return None
        required = self._required_draining()
        dispensable = (one for name, one in self._draining.items() if name not in required and name not in in_attempt)
        unannounced = (one for name, one in self._draining.items() if name in required and self._is_unannounced(one))
        first = next(chain(dispensable, unannounced), None)
        return first if first is not None and self._can_form else None

    def _is_unannounced(self, member: Member) -> bool:
        """Whether the members do not know of its drain, and may have to take over its state or data."""
        return not member.drain_announced and (member.with_data or not self.remaining)

    @property
    def _can_form(self) -> bool:
        """Whether there are enough workers for a world."""
        return self.next_size(self.next_joiners()) >= self.config.min_workers

    def announce_drains(self, *, announced: bool) -> None:
        """Record for all draining members whether an attempt was formed with the knowledge that they drain."""
        for member in self._draining.values():
            member.drain_announced = announced

    def may_leave(self, member: Member, *, attempt_is_under_way: bool) -> bool:
        """Whether the next world has no use for a draining member; an attempt under way needs all its members."""
        if member.id in self.retained:
            return False
        if not self.in_world(member):
            return True
        if attempt_is_under_way:
            return False
        if self.remaining == 0 and next(self.joiners(), None) is None:
            return True
        if member.id not in self._required_draining() and self._can_form:
            return False
        # There are too few workers for a world. What only this member has is kept until there are more.
        return self.state_survives() and (member.drain_announced or not member.with_data)

    # The training state.

    @property
    def former(self) -> Mapping[str, Member]:
        """Members that left a world with its state and are still registered."""
        return self._former

    @property
    def retained(self) -> Mapping[str, Member]:
        """The former members that must stay because the world may still need their state.

        That is so while a member of the world may not have the state, or no holder is connected and a worker may
        need it.
        """
        if not self._former:
            return {}
        is_needed = any(self._stayers()) or any(self.joiners())
        is_safe = self.state_holders.issuperset(self.world) and (self._has_connected_holder or not is_needed)
        return {} if is_safe else self._former

    def state_candidates(self) -> dict[str, Member]:
        """The members whose state the next world may take: of this world, and former ones if no holder is present."""
        present = {member.id: member for member in self.present()}
        return present if self.state_holders & present.keys() else present | self._former

    @property
    def _has_connected_holder(self) -> bool:
        return any(member.connected and member.id in self.state_holders for member in self.present())

    def present_state_holders(self) -> set[str]:
        return {member.id for member in self.present() if member.id in self.state_holders}

    def has_room_beside(self, target: Collection[str]) -> bool:
        """Whether a world of these workers could have more members."""
        return len(target) < self.config.max_workers

    def left_out(self, target: Collection[str]) -> int:
        """How many connected joiners are not in a world of these workers."""
        return sum(member.id not in target for member in self.connected_joiners())
