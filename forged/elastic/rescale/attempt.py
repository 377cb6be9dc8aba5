"""One attempt at agreeing on a new world.

Law: an attempt has a fixed set of members, and every one of them has to answer: first that it has stopped and where,
then, if its state is another one and it is to stay, that it has the source's. Who is to go answers like the others, and
may be the source: what it has is taken over, where it is needed, before the world without it holds. What anybody has
committed is not taken back, so the source is at the highest committed step. A step that some have finished and nobody
has committed counts only if nobody is left who has not finished it; otherwise it is done again, by those too who had
finished. An attempt for which nobody stops waits for one answer alone, of those who hold training data: that they hold
what they will have to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from forged.elastic.model import RescaleType
from forged.phrases import counted

RECEIVED_BYTES_MIN = 1 << 20
"""Less is no progress: who is sent so little within `rescale_timeout_ms` keeps the others waiting for nothing."""


class Stage(StrEnum):
    """What an attempt waits for."""

    MOVING = "moving"
    """That all hold the training data that they will have; training goes on meanwhile."""
    PAUSING = "pausing"
    """That all have stopped."""
    SYNCHRONISING = "synchronising"
    """That those behind have the state."""


@dataclass(frozen=True, slots=True)
class StopReport:
    """Where a member has stopped: so many steps are committed, and its state is that of the next if it `finished` it.

    `holds_state` is false for who has nothing that others could take.
    """

    step: int
    holds_state: bool
    finished: bool = False
    epoch: int = 0
    learning_rate: float = 0.0
    global_batch_size: int = 0

    @property
    def position(self) -> int:
        """The steps that its state has behind it."""
        return self.step + 1 if self.finished else self.step


@dataclass(slots=True)
class Attempt:
    """The world that is wanted, and who has answered."""

    number: int
    type: RescaleType
    target: tuple[str, ...]
    """The ids of those who are to be in it, in the order of the ranks that they will have."""
    added: tuple[str, ...]
    removed: tuple[str, ...]
    reason: str
    began_at: float
    leavers: tuple[str, ...] = ()
    """Who of the world before is to go, and so takes part until another holds: what it has, nobody else may have."""
    heard_at: float = 0.0
    """When one of those that are waited for made some progress last."""
    stage: Stage = Stage.PAUSING
    is_at_step_end: bool = False
    """Whether a member of the world has come to the end of its step, at which the others are, too."""
    source: str = ""
    step: int = 0
    """The steps that the new world has behind it, once that is settled."""
    stops: dict[str, StopReport] = field(default_factory=dict)
    received: dict[str, tuple[int, int]] = field(default_factory=dict)
    """How many bytes of the state, and of training data, have come to those who are sent some."""
    resting: dict[str, float] = field(default_factory=dict)
    """When those who wait for others have said so last."""
    troubles: dict[str, str] = field(default_factory=dict)
    """Why those do not get on who say so."""
    takers: frozenset[str] = frozenset()
    """Who takes the source's state."""
    keepers: frozenset[str] = frozenset()
    """Who of those who stay has the state."""
    spare: frozenset[str] = frozenset()
    """Who of those to go is of no more use: it has no training data, and somebody who stays has the state."""
    behind: set[str] = field(default_factory=set)
    """Who does not have the source's state yet, or its training data."""
    started_id: int = 0
    """The id of the fact that it was begun."""
    relieved: frozenset[str] = field(init=False)
    """The leavers, to be asked for one by one."""
    members: tuple[str, ...] = field(init=False)
    """Who has to answer: those to come in the order of ranks, then those to go."""
    _names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.members, self.relieved = self.target + self.leavers, frozenset(self.leavers)
        self._names = frozenset(self.members)

    def __contains__(self, worker_id: object) -> bool:
        """Whether it is one of them; a thousand answer in one attempt."""
        return worker_id in self._names

    @property
    def waiting_for(self) -> list[str]:
        """Who has not answered, in their order."""
        missing = set(self.members) - self.stops.keys() if self.stage is Stage.PAUSING else self.behind
        return [worker for worker in self.members if worker in missing]

    @property
    def in_background(self) -> bool:
        """Whether the world before trains on until the commit."""
        return self.stage is Stage.MOVING

    @property
    def stopped(self) -> bool:
        """Whether all have stopped."""
        return len(self.stops) == len(self.members)

    def receive(self, worker_id: str, received: tuple[int, int]) -> bool:
        """So much has come to a worker; tells whether that is more than before."""
        before = self.received.get(worker_id, (0, 0))
        state, data = max(received[0], before[0]), max(received[1], before[1])
        if state + data < sum(before) + RECEIVED_BYTES_MIN:
            return False
        self.received[worker_id] = state, data
        return True

    def settle(self, with_data: Collection[str] = ()) -> None:
        """Choose the source, now that all have stopped. Those `with_data` have to see to that, too."""
        self.source = choose_source(self.members, self.stops, frozenset(self.added))
        self.step = self.stops[self.source].position
        self.takers = frozenset(_behind(self.stops, self.source)).difference(self.leavers)
        self.behind = {*self.takers, *with_data}
        self.keepers = frozenset(self.target).difference(self.takers)
        self.spare = self.relieved.difference(with_data, {self.source}) if self.keepers else frozenset()
        self.stage = Stage.SYNCHRONISING


def choose_source(members: tuple[str, ...], stops: Mapping[str, StopReport], added: Collection[str] = ()) -> str:
    """Whose state the others take. Where nobody has one yet, it is what the one begins with who is furthest.

    What `added` workers bring along counts only where nobody is left of the world before.
    """
    holders = [worker for worker in members if stops[worker].holds_state]
    if not holders:
        # Scripts may have brought something back; `max` keeps the lowest rank of several.
        return max(members, key=lambda worker: stops[worker].position)
    holders = [worker for worker in holders if worker not in added] or holders
    committed = max(stops[worker].step for worker in holders)
    exact = (worker for worker in holders if stops[worker].position == committed)
    # Where nobody is there, all have finished the step behind it; `max` keeps the lowest rank of several.
    return next(exact, max(holders, key=lambda worker: stops[worker].position))


def brought_along(source: str, stops: Mapping[str, StopReport]) -> str:
    """In words, whose state holds where nobody had one and not all begin alike; empty where there was no choice."""
    nobody_had_one = not any(stop.holds_state for stop in stops.values())
    if not nobody_had_one or len({stop.position for stop in stops.values()}) == 1:
        return ""
    return f"{source} brings {counted(stops[source].position, 'step')} along, and others fewer: its state holds"


def _behind(stops: Mapping[str, StopReport], source: str) -> Iterator[str]:
    position = stops[source].position
    for worker, stop in stops.items():
        if worker != source and not (stop.holds_state and stop.position == position):
            yield worker
