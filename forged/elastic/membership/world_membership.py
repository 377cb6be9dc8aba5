"""Which role each member has: in the world, joiner, draining, state holder; and which of them form the next world.

Invariants:
- Only as many draining workers stay in the next world as `min_workers` requires.
- The only known holder of the state may leave when another worker has the state, or when no worker is there, or on its
  way back, that could take it.
- A world consists of whole groups of `group_size` members, each with consecutive ranks in the order of their group
  ranks. Without groups each worker is a group of one.
- The members of a broken group take part in the next attempt, as draining ones do: what they hold may exist nowhere
  else. They stay only if the next world has their whole group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.membership.member import Member
from forged.elastic.membership.registry import MemberRegistry
from forged.elastic.model import ClusterTopology
from forged.elastic.rescale.ranks import assign_ranks


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
        self.group_size = 1
        """How many members a group of the job has; 1 for a job without groups."""
        self._broken: dict[str, Member] = {}
        """The registered members of the world in groups that have lost a member, but for draining ones."""

    def in_world(self, member: Member) -> bool:
        """Whether this incarnation is in the committed world."""
        return self.world.get(member.id) == member.incarnation

    # Changes.

    def classify(self) -> None:
        """Sort all members into outsiders and draining members anew."""
        self._outsiders = {name: member for name, member in self.members.items() if not self.in_world(member)}
        draining = (member for member in self.present() if member.drain_reason is not None)
        self._draining = {member.id: member for member in sorted(draining, key=lambda member: member.drain_since)}
        self._find_broken_groups()

    def add(self, newcomer: Member) -> None:
        self.members.add(newcomer)
        # A process that has left and registers again before the next world is in the committed one still.
        if not self.in_world(newcomer):
            self._outsiders[newcomer.id] = newcomer
        self._find_broken_groups()

    def mark_draining(self, member: Member) -> None:
        if self.in_world(member):
            self._draining[member.id] = member
            self._find_broken_groups()

    def remove(self, member: Member) -> None:
        self.members.remove(member)
        for role in (self._outsiders, self._draining, self._former):
            role.pop(member.id, None)
        self._find_broken_groups()

    def commit(self, target: Sequence[str], removed: Collection[str], now: float, *, all_have_stopped: bool) -> None:
        """Make `target` the world; if all have stopped for it, all of them have the state."""
        workers = [self.members[name] for name in target]
        self.topology = ClusterTopology(tuple(one.worker for one in workers), self.topology.generation + 1, now)
        holders = [member for member in self.present() if member.id in self.state_holders]
        self.world = {one.id: one.incarnation for one in workers}
        self.state_holders = frozenset(target) if all_have_stopped else self.state_holders.difference(removed)
        self._former = {name: member for name, member in self._former.items() if not self.in_world(member)}
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
        """How many members of the world do not drain, in groups that are whole."""
        return self.present_count - len(self._draining) - len(self._broken)

    @property
    def draining(self) -> Collection[str]:
        """The draining members of the world, in the order in which their drains began."""
        return self._draining.keys()

    def joiners(self) -> Iterator[Member]:
        """The workers that wait for a world, in the order in which they registered; some may be lost."""
        return (member for member in self._outsiders.values() if member.drain_reason is None)

    def connected_joiners(self) -> Iterator[Member]:
        """The joiners that a world can take in: connected, and with all of their group."""
        return (member for member in self.joining() if self.group_size == 1 or not self.in_world(member))

    def joining(self) -> Iterator[Member]:
        """As `connected_joiners`, with the members of the world whose broken groups they make whole again."""
        if self.group_size > 1:
            return (member for group in self.joining_groups() for member in group)
        return (member for member in self.joiners() if member.lost_at is None)

    # Groups.

    def group_index(self, member: Member) -> int:
        """The place of the member's group in the world."""
        return self.topology.rank_of(member.worker) // self.group_size

    def is_broken(self, member: Member) -> bool:
        """Whether the member of the world is in a group that has lost another member; never without groups."""
        if self.group_size == 1:
            return False
        start = self.group_index(member) * self.group_size
        group = islice(self.world.items(), start, start + self.group_size)
        return any(self.members.find(*one) is None for one in group)

    def partners(self, member: Member) -> list[Member]:
        """The other registered members of its group that do not drain; none without groups."""
        if self.group_size == 1:
            return []
        group = (one for one in self.members.values() if one.group == member.group and one.drain_reason is None)
        return [one for one in group if one is not member]

    def group_ranks(self, workers: Iterable[str]) -> dict[str, int]:
        """The positions of these workers in their groups; empty without groups."""
        return {name: self.members[name].group_rank for name in workers} if self.group_size > 1 else {}

    def joining_groups(self) -> Iterator[list[Member]]:
        """The whole groups, by group rank, that are not in the world as a whole; some members may be in the world."""
        found: dict[str, list[Member]] = {}
        for member in chain(self._broken.values(), self.joiners()):
            if member.lost_at is None:
                found.setdefault(member.group, []).append(member)
        for group in found.values():
            if len(group) == self.group_size:
                yield sorted(group, key=lambda member: member.group_rank)

    def incomplete_groups(self) -> Iterator[list[Member]]:
        """The groups that cannot join because members are missing or lost."""
        whole = {group[0].group for group in self.joining_groups()}
        found: dict[str, list[Member]] = {}
        for member in chain(self._broken.values(), self.joiners()):
            if member.group not in whole:
                found.setdefault(member.group, []).append(member)
        yield from found.values()

    def without_groups_of(self, left_out: Collection[str], workers: Sequence[str]) -> list[str]:
        """These workers without those that are left out, and without the rest of their groups."""
        if self.group_size > 1:
            groups = {self.members[one].group for one in left_out}
            return [one for one in workers if self.members[one].group not in groups]
        return [one for one in workers if one not in left_out]

    def covers_group_ranks(self, members: Iterable[Member]) -> bool:
        """Whether there is a member of each group rank among these; without groups, any member."""
        missing = set(range(self.group_size))
        for member in members:
            missing.discard(member.group_rank)
            if not missing:
                return True
        return False

    def _find_broken_groups(self) -> None:
        if self.group_size == 1:
            return
        self._broken = {}
        places = iter(self.world.items())
        while group := list(islice(places, self.group_size)):
            present = [member for one in group if (member := self.members.find(*one)) is not None]
            if len(present) < self.group_size:
                self._broken |= {member.id: member for member in present if member.drain_reason is None}

    # The next world.

    def next_survivors(self, joiners: Collection[str]) -> set[str]:
        """The members of the world that stay in the next one, which takes these joiners in."""
        return {member.id for member in self.stayers()} | self._required_draining() | self._completed_by(joiners)

    def next_joiners(self) -> list[str]:
        """The joiners that the next world has room for, in whole groups."""
        room = self.config.max_workers - self.remaining - len(self._required_draining())
        if self.group_size > 1:
            groups = islice(self.joining_groups(), max(0, room) // self.group_size)
            return [member.id for group in groups for member in group if not self.in_world(member)]
        return [member.id for member in islice(self.connected_joiners(), max(0, room))]

    def next_size(self, joiners: Collection[str]) -> int:
        """The size of the next world with these joiners; draining members alone form no world."""
        ready = self.ready_count(joiners)
        return ready + len(self._required_draining()) if ready else 0

    def ready_count(self, joiners: Collection[str]) -> int:
        """How many members that do not drain the next world has with these joiners."""
        return self.remaining + len(joiners) + len(self._completed_by(joiners))

    def arranged(self, survivors: Collection[str], joiners: Collection[str]) -> tuple[str, ...]:
        """The next world in rank order; it consists of whole groups."""
        if self.group_size == 1:
            return assign_ranks(list(self.world), survivors, joiners)
        places = {one.group: self.group_index(one) for one in self._broken.values() if one.id in survivors}
        groups: dict[int | str, list[Member]] = {}
        for member in map(self.members.__getitem__, (*survivors, *joiners)):
            is_survivor = member.id in survivors
            key = self.group_index(member) if is_survivor else places.get(member.group, member.group)
            groups.setdefault(key, []).append(member)
        # A group that is still in the world is known by its place there, a new one by its name.
        new = [key for key in groups if isinstance(key, str)]
        order = assign_ranks(range(len(self.world) // self.group_size), groups.keys() - new, new)
        return tuple(one.id for key in order for one in sorted(groups[key], key=lambda member: member.group_rank))

    def _completed_by(self, joiners: Collection[str]) -> set[str]:
        """The members of broken groups that are whole again with these joiners."""
        if not self._broken:
            return set()
        groups = {self.members[one].group for one in joiners}
        return {member.id for member in self._broken.values() if member.group in groups}

    def stayers(self) -> Iterator[Member]:
        """The members of the world that do not drain, in groups that are whole."""
        return (member for member in self.present() if member.drain_reason is None and member.id not in self._broken)

    def _required_draining(self) -> set[str]:
        """The draining members that `min_workers` requires; the last to drain stay."""
        missing = self.config.min_workers - self.remaining
        if not self._draining or missing <= 0:
            return set()
        if self.group_size > 1:
            joining = sum(map(len, self.joining_groups()))
            groups = islice(self._usable_draining_groups(), max(0, -((joining - missing) // self.group_size)))
            return {name for group in groups for name in group}
        joining = sum(1 for _ in islice(self.connected_joiners(), missing))
        return set(islice(self._usable_draining(), missing - joining))

    def _usable_draining(self) -> Iterator[str]:
        """The draining members that a world can use, the last to drain first.

        A draining member that has done its last step is of use for its state only, while no stayer holds the state.
        """
        # A stayer that is lost counts: it may be on its way back.
        is_held = self.covers_group_ranks(member for member in self.stayers() if member.id in self.state_holders)
        return (name for name, member in reversed(self._draining.items()) if not (is_held and member.last_step_done))

    def _usable_draining_groups(self) -> Iterator[list[str]]:
        """The groups of which all members drain and can be used."""
        found: dict[int, list[str]] = {}
        for name in self._usable_draining():
            found.setdefault(self.group_index(self.members[name]), []).append(name)
        return (group for group in found.values() if len(group) == self.group_size)

    def state_survives(self) -> bool:
        """Whether connected stayers are known to have the state, of all group ranks."""
        return self.covers_group_ranks(
            member for member in self.stayers() if member.connected and member.id in self.state_holders
        )

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
        if self.remaining == 0 and next(self._waiting(), None) is None:
            return True
        if member.id not in self._required_draining() and self._can_form:
            return False
        # There are too few workers for a world. What only this member has is kept until there are more.
        return self.state_survives() and (member.drain_announced or not member.with_data)

    def _waiting(self) -> Iterator[Member]:
        """The members that wait for a world, alone or until their group is whole."""
        return chain(self._broken.values(), self.joiners())

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
        is_needed = any(self.stayers()) or any(self._waiting())
        is_safe = self.state_holders.issuperset(self.world) and (self._has_connected_holder or not is_needed)
        return {} if is_safe else self._former

    def state_candidates(self) -> dict[str, Member]:
        """The members whose state the next world may take: of this world, and former ones if no holder is present."""
        present = {member.id: member for member in self.present()}
        return present if self.covers_group_ranks(self._present_holders()) else present | self._former

    @property
    def _has_connected_holder(self) -> bool:
        return self.covers_group_ranks(member for member in self._present_holders() if member.connected)

    def _present_holders(self) -> Iterator[Member]:
        return (member for member in self.present() if member.id in self.state_holders)

    def is_only_holder(self, member: Member) -> bool:
        """Whether no other registered member of the world is known to have the state of this member's group rank."""
        holders = (other for other in self._present_holders() if other.group_rank == member.group_rank)
        return all(other is member for other in holders)

    def has_room_beside(self, target: Collection[str]) -> bool:
        """Whether a world of these workers could have more members."""
        return len(target) + self.group_size <= self.config.max_workers

    def left_out(self, target: Collection[str]) -> int:
        """How many connected joiners are not in a world of these workers."""
        return sum(member.id not in target for member in self.connected_joiners())
