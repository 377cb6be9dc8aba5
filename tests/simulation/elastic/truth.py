"""A job that trains, as it really is: its processes, its worlds, its steps, and what was wrong around it.

Law: nothing here judges. What is written down comes from facts in the order of their ids and from training scripts at
the moment they act; the daemon is not asked.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import ClusterTopology, WorkerId
from forged.elastic.phases import Phase
from forged.elastic.rescale.attempt import StopReport

BATCH = 24
"""The samples of a step."""
MODULUS = 2**31 - 1
BREAK_S = 1.0
"""Between two times that a script is held up so little may pass without a step."""
QUIET_S = 5.0
"""When nothing has been wrong for so long, what is said is heard."""
WAITS_S = 0.5
"""A worker that has been there for so long is known to wait to be taken in."""
IMPOSSIBLE_STEP = 2**50
"""More steps than any world can have made, however far a wall clock jumps."""
SETTLED_AFTER_S = 20.0
"""A network that was good for so long has no part in what happens then."""


class Promise(StrEnum):
    """What is promised of every job."""

    HISTORY = "what was told stays, in one order, and the phases follow their table"
    MEMBERS = "a worker joins once and goes once, and only members are spoken of"
    ONE_OWNER = "one rank has one owner per generation"
    GENERATIONS_GROW = "generations and attempts only grow"
    ACKNOWLEDGED = "a committed rescale was acknowledged by all its members"
    ORDER_KEPT = "survivors keep their relative order"
    EVIDENCE = "no worker is declared dead without evidence"
    TOLERANCE = "a job is aborted when it has had too much, and only then"
    STEPS = "a step counts once, when all have finished it, and what counts stays"
    VOTES = "a rank goes on when all ranks have voted, and never repeats a step that it has finished after a vote"
    WORLDS = "each world is entered before its first step, and over once, before the next one"
    RELEASED = "a script that waits for a lost peer is told at once that its world is over"
    STEP_ERRORS = "an exception in a step whose world is over repeats the step, and fails no worker"
    HANDED_OVER = "a draining worker hands its state over to waiting joiners"
    ONE_RATE = "all ranks of a world have one learning rate and one batch"
    GROUPS = "a world consists of whole groups, each contiguous in rank and in the order of its group ranks"
    REPLICAS = "no committed step is lost while the state of each group rank survives"
    STATE = "the state of every trainer is a function of the number of committed steps"
    STANDSTILL = "a survivor without a daemon reports its standstill within a second"
    RUNS_AGAIN = "when the faults have stopped, every job runs again within a bound"
    ANSWERS = "a correct request is not refused"


def samples(job: str, step: int, share: Iterable[int]) -> int:
    """What some of the samples of a step come to."""
    offset = sum(job.encode()) * 7919 + step * BATCH
    return sum((offset + sample) * 2_654_435_761 % 1_000_003 for sample in share)


def share_of(rank: int, size: int) -> range:
    """A rank's part of the batch."""
    return range(BATCH * rank // size, BATCH * (rank + 1) // size)


def advance(chain: int, total: int) -> int:
    """The state behind a step: it tells what steps there were, and in what order."""
    return (chain * 31 + total) % MODULUS


@dataclass(eq=False)
class SimulatedWorker:
    """A training process, as it really is."""

    job: str
    name: str
    host: str
    incarnation: bytes
    group: str = ""
    group_rank: int = 0
    me: WorkerId | None = None
    """Its id for peers, with its own port; None before it has one."""
    alive: bool = True
    has_left: bool = False
    """Whether its script came to its end."""
    stepping: int | None = None
    """The step that its script is in; None between two steps."""
    generation: int = 0
    """That of the world in which it trains; 0 before the first."""
    committed: int = 0
    """How many steps it has seen committed."""
    finished: int | None = None
    """The step that it has finished last."""
    has_voted: bool = False
    """Whether all ranks have voted for the step that its script is in, or was in last."""
    final: int = 0
    """How many steps it never repeats, by votes."""
    overs: set[int] = field(default_factory=set)
    """The worlds of which its script was told that they are over."""
    told_to_enter: int = 0
    """The generation of the world of which its script was told last that it is entered."""
    misses_since: float | None = None
    """Since when its script waits for a lost peer."""
    is_void: bool = False
    """Whether its last step was void, and it has neither begun another one nor entered another world."""
    waits_since: float | None = None
    """Since when it is known to wait for nothing but a daemon."""
    stands_still: bool = False
    """Whether its script was told that it stands still."""
    held_since: float = math.inf
    """Since when, and until when, its script is held up, or was: it hangs, or the process is suspended."""
    held_until: float = -math.inf
    lies: bool = False
    """Whether its heartbeats do."""

    def hold(self, now: float, seconds: float) -> None:
        """Note that its script is held up for so long."""
        if now > self.held_until + BREAK_S:
            self.held_since = now
        self.held_until = max(self.held_until, now + seconds)

    def let_go(self, now: float, since: float) -> None:
        """Note that what held it up since then is over before its time; what held it up already may last."""
        if since <= self.held_since:
            self.held_until = min(self.held_until, now)

    @property
    def steps_in_state(self) -> int:
        """The steps applied to its state, if it has trained in the last world."""
        return self.committed + (self.finished == self.committed)

    def has_finished(self, step: int) -> bool:
        """Whether the step is behind it, committed or not."""
        return self.committed > step or self.finished == step


@dataclass
class Step:
    """What the workers of one world did for one step."""

    contributed: dict[int, range] = field(default_factory=dict)
    """By rank."""
    paces: dict[int, tuple[float, int]] = field(default_factory=dict)
    """The learning rate and the batch of each rank."""
    finished: set[WorkerId] = field(default_factory=set)
    voting: set[WorkerId] = field(default_factory=set)
    """The workers that have come to the vote."""
    final: set[WorkerId] = field(default_factory=set)
    """The workers that have finished the step after the vote."""


@dataclass
class Truth:
    """What is known of one job."""

    job: str
    config: ElasticTrainingConfig
    phase: Phase = Phase.FORMING
    attempt: int = 0
    in_attempt: bool = False
    """Whether the attempt of that number is under way, as far as the facts tell."""
    synchronising: bool = False
    in_background: bool = False
    """Whether no member stops for it before its commit."""
    began_at: float = 0.0
    """When it began."""
    paused: bool = False
    added: Sequence[str] = ()
    """The joiners of the attempt."""
    source: str = ""
    """The state source of the attempt."""
    sources: Collection[str] = ()
    """The state sources of all group ranks."""
    group_size: int = 1
    source_world: int = 0
    """The generation in which the state source last trained, if it is not in the present world; else 0."""
    worlds: dict[int, ClusterTopology] = field(default_factory=dict)
    followed_at: dict[int, float] = field(default_factory=dict)
    """When another world was committed behind this one."""
    begun: set[int] = field(default_factory=set)
    """The worlds of which it is known with what step they begin."""
    begins: dict[int, int] = field(default_factory=dict)
    """Behind how many steps; by generation, in their order."""
    continues: dict[int, int] = field(default_factory=dict)
    """By generation: the world that its state continues, where that is not the world before it."""
    placed: set[WorkerId] = field(default_factory=set)
    """The members of a world whose commit had a step."""
    steps: dict[tuple[int, int], Step] = field(default_factory=lambda: defaultdict(Step))
    """By generation and number."""
    committed: dict[int, int] = field(default_factory=dict)
    """By generation: the newest step that a script has seen committed."""
    chains: dict[int, list[int]] = field(default_factory=dict)
    """By group rank: the state behind so many steps."""
    members: dict[str, WorkerId] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)
    """Where a worker of that id was last."""
    joined_at: dict[WorkerId, float] = field(default_factory=dict)
    told_to_go: dict[WorkerId, float] = field(default_factory=dict)
    """When that became known."""
    gone: set[WorkerId] = field(default_factory=set)
    stops: defaultdict[int, dict[bytes, StopReport]] = field(default_factory=lambda: defaultdict(dict))
    """By attempt and incarnation: where members said that they have stopped."""
    ready: defaultdict[int, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    """By attempt: the members that reported ready."""
    stepped_at: float = -math.inf
    """When a script last saw a step committed."""
    failures: int = 0
    failed_behind: list[int] = field(default_factory=list)
    """How many steps were committed at each failure since the last step of which survivors told."""
    lone_liar: bool = False
    """Whether a worker that lies was alone in a world, or the last one there, so that no witness contradicts it."""
    final: int = 0
    """How many steps a worker has finished after votes, so that it may tell them as committed."""
    claims: dict[WorkerId, int] = field(default_factory=dict)
    """The members that have said that training is complete while it was not, and after which step."""
    waiting_since: float | None = None
    abort_wanted: bool = False
    reopening_wanted: bool = False
    """Whether an operator has asked for a reopening that has not taken effect."""
    reopened_after: int = 0
    """The generation of the last world before the job was reopened; 0 before that."""
    evictions_wanted: set[str] = field(default_factory=set)
    """The names with a requested eviction; it may arrive late, at the next worker of that name."""
    data_lost: bool = False
    """Whether shards are lost and the job is not to wait for them."""
    reason: str = ""

    @property
    def generation(self) -> int:
        return len(self.worlds)

    @property
    def world(self) -> ClusterTopology:
        return self.worlds.get(self.generation, ClusterTopology())

    @property
    def stops_to_rescale(self) -> bool:
        """Whether all members stop for a new world, and its state is settled before the commit."""
        return self.config.use_synchronous_rescaling

    @property
    def steps_committed(self) -> int:
        """The newest step that a script has seen committed in the latest world."""
        return self.committed[max(self.begun)] if self.begun else 0

    @property
    def steps_heard_of(self) -> float:
        """The highest step that the daemon can have heard of; in asynchronous mode it may be of a lost world."""
        if self.lone_liar:
            return math.inf
        heard = self.steps_committed if self.stops_to_rescale else max(self.committed.values(), default=0)
        return max(heard, *self.claims.values(), self.final)

    def state_after(self, steps: int, group_rank: int = 0) -> int:
        """What the state has to be behind so many steps, at this group rank."""
        chain = self.chains.setdefault(group_rank, [1 + group_rank])
        while len(chain) <= steps:
            step = len(chain) - 1
            chain.append(advance(chain[-1], samples(self.job, step, range(BATCH))))
        return chain[steps]

    def has_lost_member(self, worker: WorkerId) -> bool:
        """Whether the group of this member of the world has lost another one."""
        first = self.world.rank_of(worker) // self.group_size * self.group_size
        group = self.world.workers[first : first + self.group_size]
        present = set(self.members.values())
        return any(other not in present for other in group if other != worker)


PAUSE = "pause"
"""What is wrong where nothing passes between any two hosts."""


class Disturbances:
    """Since when the network of a host, and the daemon behind it, are good or bad, and for what causes."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._ended: defaultdict[str, dict[str, float]] = defaultdict(dict)
        """By host and cause."""
        self._began: dict[str, float] = {}
        self._causes: defaultdict[str, set[str]] = defaultdict(set)
        self._paused_at = -math.inf

    def begin(self, cause: str, hosts: Iterable[str]) -> None:
        """From now on something is wrong for these."""
        if cause == PAUSE:
            self._paused_at = self._now()
        for host in hosts:
            if self.good_for_s(host) > SETTLED_AFTER_S:
                self._began[host] = self._now()
            self._causes[host].add(cause)

    def end(self, cause: str) -> None:
        """That is over."""
        for host, causes in self._causes.items():
            if cause in causes:
                causes.discard(cause)
                self._ended[host][cause] = self._now()

    def good_for_s(self, host: str) -> float:
        """How long nothing has been wrong."""
        return self.quiet_for_s(host, frozenset())

    def quiet_for_s(self, host: str, but_for: frozenset[str]) -> float:
        """How long nothing has been wrong but for this."""
        if self._causes[host] - but_for:
            return 0.0
        ended = (at for cause, at in self._ended[host].items() if cause not in but_for)
        return self._now() - max(ended, default=-math.inf)

    def is_but_a_pause(self, host: str) -> bool:
        """Whether nothing is wrong, or was a moment ago, but that all of the network paused."""
        ended_at = self._ended[host].get(PAUSE, -math.inf)
        is_pausing = PAUSE in self._causes[host] or self._now() - ended_at <= QUIET_S
        paused_s = self._now() - self._paused_at
        return is_pausing and self.quiet_for_s(host, frozenset({PAUSE})) > paused_s + QUIET_S

    def bad_for_s(self, host: str) -> float:
        """How long ago it began not to be good, but for short breaks."""
        return self._now() - self._began.get(host, math.inf)
