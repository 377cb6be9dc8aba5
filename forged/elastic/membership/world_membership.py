"""Who is in the world of a job, who waits to be, who is to go, and who has the state of the training.

Law: of those who are to go no more are counted on than are missing without them. What may be nowhere else is kept: who
alone is known to have the state goes when others have it, or when nobody is there, nor on the way back, who could take
it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.membership.member import Member
from forged.elastic.membership.registry import MemberRegistry
from forged.elastic.model import ClusterTopology


class WorldMembership:
    """The members of one job by what they are to its world; the settings are those of the job at any time."""

    def __init__(self, job: str, config: ElasticTrainingConfig) -> None:
        self.config = config
        self.members = MemberRegistry(job)
        self.topology = ClusterTopology()
        self.world: dict[str, bytes] = {}
        """The incarnations of those in the committed world, in the order of their ranks."""
        self.state_holders: frozenset[str] = frozenset()
        """Who of them is known to have the state: they are there since all have said where they are, or have met."""
        self._outsiders: dict[str, Member] = {}
        """The members that are not in the world, the first to come first."""
        self._leavers: dict[str, Member] = {}
        """Those of the world that are to go, the first to be told first."""
        self._former: dict[str, Member] = {}
        """Who has gone out of a world with its state, and is still there."""

    def holds(self, member: Member) -> bool:
        """Whether it is in the committed world."""
        return self.world.get(member.id) == member.incarnation

    # Who comes and goes.

    def sort(self) -> None:
        """Tell apart who is in the committed world, who of it is to go, and who is not in it."""
        self._outsiders = {name: member for name, member in self.members.items() if not self.holds(member)}
        leavers = (member for member in self.present() if member.drain_reason is not None)
        self._leavers = {member.id: member for member in sorted(leavers, key=lambda leaver: leaver.drain_since)}

    def enter(self, newcomer: Member) -> None:
        """Somebody registers."""
        self.members.enter(newcomer)
        self._outsiders[newcomer.id] = newcomer

    def send_away(self, member: Member) -> None:
        """Somebody is to go."""
        if self.holds(member):
            self._leavers[member.id] = member

    def strike(self, member: Member) -> None:
        """Somebody is gone."""
        self.members.strike(member)
        for group in (self._outsiders, self._leavers, self._former):
            group.pop(member.id, None)

    def commit(self, target: Sequence[str], removed: Collection[str], now: float, *, all_have_stopped: bool) -> None:
        """Another world holds; where `all_have_stopped` for it, all of it have the state."""
        workers = [self.members[name] for name in target]
        self.topology = ClusterTopology(tuple(one.worker for one in workers), self.topology.epoch + 1, now)
        had_it = [member for member in self.present() if member.id in self.state_holders]
        self.world = {one.id: one.incarnation for one in workers}
        self.state_holders = frozenset(target) if all_have_stopped else self.state_holders.difference(removed)
        self.dismiss(member for member in had_it if not self.holds(member))
        self.sort()

    def dismiss(self, members: Iterable[Member]) -> None:
        """These have gone out of the world with its state."""
        self._former.update((member.id, member) for member in members)

    def have_met(self) -> None:
        """All of the world have met, and so have the state."""
        self.state_holders = frozenset(self.world)

    # Who is there.

    def present(self) -> Iterator[Member]:
        """Who of the world is there, in the order of their ranks."""
        for name, incarnation in self.world.items():
            member = self.members.known(name, incarnation)
            if member is not None:
                yield member

    @property
    def there(self) -> int:
        """How many they are."""
        return len(self.members) - len(self._outsiders)

    @property
    def is_whole(self) -> bool:
        """Whether all of the world are there."""
        return self.there == len(self.world)

    @property
    def remaining(self) -> int:
        """How many of them are not to go."""
        return self.there - len(self._leavers)

    @property
    def leavers(self) -> Collection[str]:
        """Who of the world is to go, the first to be told first."""
        return self._leavers.keys()

    def newcomers(self) -> Iterator[Member]:
        """Who wants to be in the next world, the first to come first; some may have lost their connection."""
        return (member for member in self._outsiders.values() if member.drain_reason is None)

    def waiting(self) -> Iterator[Member]:
        """Those of them who can be taken in."""
        return (member for member in self.newcomers() if member.lost_at is None)

    # The next world.

    def staying(self) -> set[str]:
        """Who of the world is in the next one."""
        return {member.id for member in self._stayers()} | self._needed()

    def joining(self) -> list[str]:
        """Who comes into it: those who wait and find room."""
        room = self.config.max_workers - self.remaining - len(self._needed())
        return [member.id for member in islice(self.waiting(), max(0, room))]

    def size_with(self, joining: Collection[str]) -> int:
        """How large it is, with these. Nobody needs one of those alone who are to go."""
        return self.remaining + len(self._needed()) + len(joining) if self.remaining or joining else 0

    def _stayers(self) -> Iterator[Member]:
        return (member for member in self.present() if member.drain_reason is None)

    def _needed(self) -> set[str]:
        """Who of those who are to go is, because there are too few without them: the last to be told."""
        missing = self.config.min_workers - self.remaining
        if not self._leavers or missing <= 0:
            return set()
        waiting = sum(1 for _ in islice(self.waiting(), missing))
        return set(islice(self._usable(), missing - waiting))

    def _usable(self) -> Iterator[str]:
        """Who of them can be needed, the last to be told first. Who makes no more steps is for its state alone, where
        nobody who stays has it; one of those may be on the way back."""
        is_kept = any(member.id in self.state_holders for member in self._stayers())
        return (name for name, member in reversed(self._leavers.items()) if not (is_kept and member.last_step_done))

    def is_state_kept(self) -> bool:
        """Whether somebody stays and can be reached who is known to have the state."""
        return any(member.connected and member.id in self.state_holders for member in self._stayers())

    # Who is to go.

    def to_be_relieved(self, relieved: Collection[str]) -> Member | None:
        """The first of those who are to go, if there can be a world without it and it is not `relieved` in an attempt.

        Where it is needed, it is one for which there can be a world in which others take over what it has.
        """
        if not (self._leavers and (self.remaining or next(self.waiting(), None))):
            return None
        needed = self._needed()
        dispensable = (one for name, one in self._leavers.items() if name not in needed and name not in relieved)
        news = (one for name, one in self._leavers.items() if name in needed and self._has_news(one))
        first = next(chain(dispensable, news), None)
        return first if first is not None and self._can_form else None

    def _has_news(self, member: Member) -> bool:
        """Whether nobody has been told to take over what it has, and somebody may have to."""
        return not member.is_expected_to_go and (member.with_data or not self.remaining)

    @property
    def _can_form(self) -> bool:
        """Whether there are enough for a world."""
        return self.size_with(self.joining()) >= self.config.min_workers

    def expect_leavers(self, *, to_go: bool) -> None:
        """An attempt begins with the knowledge that they are to go, or comes to nothing."""
        for member in self._leavers.values():
            member.is_expected_to_go = to_go

    def may_go(self, member: Member, *, is_under_way: bool) -> bool:
        """Whether one that is to go is of no use to the next world; an attempt that `is_under_way` needs all."""
        if member.id in self.retained:
            return False
        if not self.holds(member):
            return True
        if is_under_way:
            return False
        if self.remaining == 0 and next(self.newcomers(), None) is None:
            return True
        if member.id not in self._needed() and self._can_form:
            return False
        # Too few are there by now. What it alone has is kept for when there are more.
        return self.is_state_kept() and (member.is_expected_to_go or not member.with_data)

    # Who has the state.

    @property
    def former(self) -> Mapping[str, Member]:
        """Who has gone out of a world with its state, and is still there."""
        return self._former

    @property
    def retained(self) -> Mapping[str, Member]:
        """Who of them must stay: while not all of the world are known to have the state, or nobody of it can be reached
        who has, and somebody is there or comes who may need it."""
        if not self._former:
            return {}
        is_needed = any(self._stayers()) or any(self.newcomers())
        is_safe = self.state_holders.issuperset(self.world) and (self._has_holder or not is_needed)
        return {} if is_safe else self._former

    def givers(self) -> dict[str, Member]:
        """Whose state may be that of the next world; where nobody of this one has it, what is left of those before."""
        present = {member.id: member for member in self.present()}
        return present if self.state_holders & present.keys() else present | self._former

    @property
    def _has_holder(self) -> bool:
        """Whether somebody of the world can be reached who is known to have the state."""
        return any(member.connected and member.id in self.state_holders for member in self.present())

    def holders_there(self) -> set[str]:
        """Who of the world is there, and known to have the state."""
        return {member.id for member in self.present() if member.id in self.state_holders}

    def has_room_beside(self, target: Collection[str]) -> bool:
        """Whether a world of these could have more members."""
        return len(target) < self.config.max_workers

    def left_out(self, target: Collection[str]) -> int:
        """How many wait that are not in a world of these."""
        return sum(member.id not in target for member in self.waiting())
