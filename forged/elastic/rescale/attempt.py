"""One attempt at a rescale: its members, what each has answered, and the state sources of the new world.

Invariants:
- The members of an attempt are fixed. Each reports first that it has stopped and where, then, if it needs the source's
  state or training data, that it has them.
- A draining member answers like every member and may be the state source: its state is taken over before a world
  without it is committed.
- No committed step is taken back: the state source is a survivor with the highest committed step. A step that only
  some members have finished counts only if no remaining member has it unfinished; otherwise all repeat it.
- In a job with groups each group rank has its own source, and all sources are at the same step. An unfinished step then
  counts also where no survivor of a group rank could repeat it.
- A background attempt waits for one answer only, from members with training data: that they hold their shards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from forged.elastic.model import RescaleType

RECEIVED_BYTES_MIN = 1 << 20
"""Fewer bytes within `rescale_silence_ms` do not count as progress of a transfer."""
NO_GROUPS: Mapping[str, int] = {}


class Stage(StrEnum):
    """What an attempt waits for."""

    TRANSFERRING = "transferring"
    """For all members to hold their training data, while the previous world trains on."""
    STOPPING = "stopping"
    """For all members to stop."""
    SYNCHRONISING = "synchronising"
    """For all members to have the state, and their training data."""


@dataclass(frozen=True, slots=True)
class StopReport:
    """Where a member has stopped: its committed step, and whether it has `finished` the next one.

    `holds_state` is false for a member without a state that other members could take. `learning_rate` is None for a
    member that was given none; a rate of 0 is a rate.
    """

    step: int
    holds_state: bool
    finished: bool = False
    epoch: int = 0
    learning_rate: float | None = None
    global_batch_size: int = 0
    is_stale: bool = False
    """Whether its state is of use to no member, because the job has gone on without its group."""

    @property
    def position(self) -> int:
        """The steps applied to its state."""
        return self.step + 1 if self.finished else self.step


@dataclass(slots=True)
class Attempt:
    """The intended world, and what its members have answered."""

    number: int
    type: RescaleType
    target: tuple[str, ...]
    """The members of the intended world, in rank order."""
    added: tuple[str, ...]
    removed: tuple[str, ...]
    reason: str
    began_at: float
    draining: tuple[str, ...] = ()
    """The members that leave at the commit; they take part because their state or data may exist nowhere else."""
    heard_at: float = 0.0
    """When an awaited member last made progress; `rescale_silence_ms` counts from here."""
    stopped_at: float | None = None
    """When the first member stopped training for it; `rescale_timeout_ms` counts from here. None in the background."""
    stage: Stage = Stage.STOPPING
    is_at_step_end: bool = False
    """Whether a member of the world has finished its step, so that no member is in the middle of a long one."""
    group_ranks: Mapping[str, int] = field(default_factory=dict)
    """The positions of the members in their groups; empty without groups."""
    group_size: int = 1
    sources: tuple[str, ...] = ()
    """The state sources by group rank; empty until they are chosen. Without groups there is one."""
    step: int = 0
    """The step after which the new world starts, once the source is chosen."""
    stops: dict[str, StopReport] = field(default_factory=dict)
    received: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The bytes of state, and of training data, that each member has received."""
    waiting_reports: dict[str, float] = field(default_factory=dict)
    """When each member that waits for other members last reported that."""
    problems: dict[str, str] = field(default_factory=dict)
    """The problems that members report."""
    store_failing_s: dict[str, float] = field(default_factory=dict)
    """For how long the shard stores of members have failed, as they reported last; it may be since before the attempt.
    """
    state_receivers: frozenset[str] = frozenset()
    """The members that take the source's state."""
    state_keepers: frozenset[str] = frozenset()
    """The members of the new world that have the state already."""
    dispensable: frozenset[str] = frozenset()
    """The draining members that are no longer needed: they hold no training data, and a state keeper exists."""
    unready: set[str] = field(default_factory=set)
    """The members that do not have the source's state, or their training data, yet."""
    started_id: int = 0
    """The id of its `RescaleStarted`."""
    draining_set: frozenset[str] = field(init=False)
    """`draining` as a set, for single look-ups."""
    members: tuple[str, ...] = field(init=False)
    """The members that must answer: the intended world in rank order, then the draining members."""
    _names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.members, self.draining_set = self.target + self.draining, frozenset(self.draining)
        self._names = frozenset(self.members)

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._names

    @property
    def source(self) -> str:
        """The state source of the first group rank, whose learning rate and batch hold for all; empty until chosen."""
        return self.sources[0] if self.sources else ""

    def source_of(self, worker_id: str) -> str:
        """The state source of a member; empty until it is chosen."""
        return self.sources[self.group_ranks.get(worker_id, 0)] if self.sources else ""

    def has_keeper_for(self, worker_id: str, keepers: Iterable[str]) -> bool:
        """Whether one of these has the same state as the member."""
        group_rank = self.group_ranks.get(worker_id, 0)
        return any(self.group_ranks.get(keeper, 0) == group_rank for keeper in keepers)

    @property
    def waiting_for(self) -> list[str]:
        """The members that owe an answer, in order."""
        missing = set(self.members) - self.stops.keys() if self.stage is Stage.STOPPING else self.unready
        return [worker for worker in self.members if worker in missing]

    def failing_stores(self, timeout_s: float) -> list[str]:
        """The members that need their training data, and whose shard stores have failed for so long."""
        failing = self.store_failing_s.items()
        return [worker for worker, failing_s in failing if failing_s >= timeout_s and worker in self.unready]

    @property
    def in_background(self) -> bool:
        """Whether the previous world trains on until the commit."""
        return self.stage is Stage.TRANSFERRING

    @property
    def all_stopped(self) -> bool:
        return len(self.stops) == len(self.members)

    def record_received(self, worker_id: str, received: tuple[int, int]) -> bool:
        """Take how much state and data a member has received; returns whether that is progress."""
        before = self.received.get(worker_id, (0, 0))
        state, data = max(received[0], before[0]), max(received[1], before[1])
        if state + data < sum(before) + RECEIVED_BYTES_MIN:
            return False
        self.received[worker_id] = state, data
        return True

    def synchronise(self, with_data: Collection[str] = ()) -> bool:
        """Choose the state sources, now that all have stopped; members `with_data` must also report ready.

        Returns false if no step is one whose state the members have in whole.
        """
        added = frozenset(self.added)
        self.sources = choose_sources(self.members, self.stops, added, self.group_ranks, self.group_size)
        if not self.sources:
            return False
        self.step = self.stops[self.source].position
        self.state_receivers = frozenset(without_state(self.stops, self.sources)).difference(self.draining)
        self.unready = {*self.state_receivers, *with_data}
        self.state_keepers = frozenset(self.target).difference(self.state_receivers)
        can_spare = self.draining_set.difference(with_data, self.sources)
        self.dispensable = frozenset(one for one in can_spare if self.has_keeper_for(one, self.state_keepers))
        self.stage = Stage.SYNCHRONISING
        return True


def choose_sources(
    members: Sequence[str],
    stops: Mapping[str, StopReport],
    added: Collection[str] = (),
    group_ranks: Mapping[str, int] = NO_GROUPS,
    group_size: int = 1,
) -> tuple[str, ...]:
    """The state sources by group rank: holders with the highest committed step; without any, those with the most steps.

    Among equals the first in the order of `members`. The state of `added` workers counts only if the other ones hold
    none. Empty if the members have the state of no step in whole.
    """
    holders = [worker for worker in members if stops[worker].holds_state]
    remaining = [worker for worker in holders if worker not in added]
    for candidates in (remaining, holders):
        committed = max((stops[worker].step for worker in candidates), default=0)
        found = _sources_by_position(candidates, stops, group_ranks, group_size)
        if found:
            # If not all group ranks have a holder at that position, all have finished the step after it, or could not
            # repeat it; else the newest older state.
            later = [position for position in found if position >= committed]
            return found[min(later) if later else max(found)]
    # Scripts may have loaded a checkpoint.
    fresh = [worker for worker in members if not stops[worker].is_stale]
    found = _sources_by_position(fresh, stops, group_ranks, group_size)
    return found[max(found)] if found else ()


def _sources_by_position(
    candidates: Iterable[str], stops: Mapping[str, StopReport], group_ranks: Mapping[str, int], group_size: int
) -> dict[int, tuple[str, ...]]:
    """By position: the first candidate of each group rank there, for the positions at which there is one of each."""
    found: dict[int, dict[int, str]] = {}
    for worker in candidates:
        found.setdefault(stops[worker].position, {}).setdefault(group_ranks.get(worker, 0), worker)
    whole = {position: sources for position, sources in found.items() if len(sources) == group_size}
    return {position: tuple(sources[rank] for rank in range(group_size)) for position, sources in whole.items()}


def initial_state_remark(source: str, stops: Mapping[str, StopReport]) -> str:
    """Which worker's initial state is used, if there was a choice between different ones; else empty."""
    is_first_world = not any(stop.holds_state for stop in stops.values())
    if not is_first_world or len({stop.position for stop in stops.values()}) == 1:
        return ""
    return f"state taken from {source}, which starts with the most steps ({stops[source].position:,})"


def without_state(stops: Mapping[str, StopReport], sources: Sequence[str]) -> Iterator[str]:
    """The members without the sources' state: joiners and laggards."""
    position = stops[sources[0]].position
    for worker, stop in stops.items():
        if worker not in sources and not (stop.holds_state and stop.position == position):
            yield worker
