"""What must be true of every job that trains, whatever happens to its workers and their daemon.

Law: the oracle sees facts in the order of their ids, each once and before any worker acts on it, and what training
scripts see at the moment they see it. It knows which processes live and which networks were bad, as the daemon does
not, and it asks nobody.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import singledispatchmethod
from typing import NoReturn

from forged.elastic.config import ElasticTrainingConfig, tolerated_failures
from forged.elastic.messages import (
    JobAborted,
    JobCompleted,
    JobPaused,
    JobResumed,
    JobWaiting,
    RescaleAborted,
    RescaleCompleted,
    RescaleStarted,
    RescaleSynchronising,
    WorkerDraining,
    WorkerFailed,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerRecovered,
    WorkerReturned,
    WorkerStalled,
)
from forged.elastic.model import ClusterTopology, WorkerId
from forged.elastic.phases import OVER, Cause, Phase, following
from forged.errors import ForgedError
from forged.messages import Fact, Record
from forged.status.model import DaemonStarted
from tests.simulation.oracle import Broken

BATCH = 24
"""The samples of a step."""
MODULUS = 2**31 - 1
OLD_WORLD_MAX_S = 30.0
"""How long who is put out may take to hear that a step of the world before was committed."""
SETTLED_AFTER_S = 20.0
"""A network that was good for so long has no part in what happens then."""


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
class Trainee:
    """A training process, as it really is."""

    job: str
    name: str
    host: str
    me: WorkerId | None = None
    """Who it is for others, with its own port; None before it has one."""
    alive: bool = True
    stepping: int | None = None
    """The step that its script is in; None between two steps."""
    generation: int = 0
    """That of the world in which it trains."""
    held_until: float = -math.inf
    """Until when its script is, or was, held up."""
    held_since: float = math.inf
    evicted: bool = False
    """Whether an operator has asked for its end."""


@dataclass
class Step:
    """What the workers of one world did for one step."""

    contributed: dict[int, range] = field(default_factory=dict)
    """By rank."""
    finished: set[WorkerId] = field(default_factory=set)


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
    worlds: dict[int, ClusterTopology] = field(default_factory=dict)
    followed_at: dict[int, float] = field(default_factory=dict)
    """When another world was committed behind this one."""
    steps: dict[tuple[int, int], Step] = field(default_factory=lambda: defaultdict(Step))
    """By generation and number."""
    committed: dict[int, int] = field(default_factory=dict)
    """By generation: the steps behind the newest that anybody has seen committed."""
    chain: list[int] = field(default_factory=lambda: [1])
    """The state behind so many steps."""
    members: dict[str, WorkerId] = field(default_factory=dict)
    failures: int = 0
    failed_behind: list[int] = field(default_factory=list)
    """How many steps were committed at each failure since the last step of which survivors told."""
    waiting_since: float | None = None
    abort_wanted: bool = False
    reason: str = ""

    @property
    def generation(self) -> int:
        return len(self.worlds)

    @property
    def world(self) -> ClusterTopology:
        return self.worlds.get(self.generation, ClusterTopology())

    def state_behind(self, steps: int) -> int:
        """What the state has to be behind so many steps."""
        while len(self.chain) <= steps:
            step = len(self.chain) - 1
            self.chain.append(advance(self.chain[-1], samples(self.job, step, range(BATCH))))
        return self.chain[steps]


class Disturbances:
    """Since when the network of a host, and the daemon behind it, are good or bad, and for what causes."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._ended: dict[str, float] = {}
        self._began: dict[str, float] = {}
        self._causes: defaultdict[str, set[str]] = defaultdict(set)

    def begin(self, cause: str, hosts: Iterable[str]) -> None:
        """From now on something is wrong for these."""
        for host in hosts:
            if self.good_for_s(host) > SETTLED_AFTER_S:
                self._began[host] = self._now()
            self._causes[host].add(cause)

    def end(self, cause: str) -> None:
        """That is over."""
        for host, causes in self._causes.items():
            if cause in causes:
                causes.discard(cause)
                self._ended[host] = self._now()

    def good_for_s(self, host: str) -> float:
        """How long nothing has been wrong."""
        return 0.0 if self._causes[host] else self._now() - self._ended.get(host, -math.inf)

    def bad_for_s(self, host: str) -> float:
        """How long ago it began not to be good, but for short breaks."""
        return self._now() - self._began.get(host, math.inf)


class ElasticOracle:
    """Keeps the promises in mind."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.facts: dict[int, bytes] = {}
        self.last = 0
        self.truths: dict[str, Truth] = {}
        self.trainees: list[Trainee] = []
        self.disturbances = Disturbances(now)
        self.breaches: list[str] = []
        self._now = now

    # Facts.

    def heard(self, records: Sequence[Record]) -> None:
        """These are on record now."""
        for record in records:
            known = self.facts.get(record.id)
            if known is not None:
                if known != record.data:
                    self.breach(f"fact {record.id} is another one than before: {record!r}")
                continue
            if record.id <= self.last:
                self.breach(f"fact {record.id} came after {self.last}")
            self.facts[record.id], self.last = record.data, record.id
            if isinstance(record.fact, DaemonStarted):
                self.reloaded()
            truth = self.truths.get(record.job)
            if truth is not None and isinstance(record.fact, Fact):
                self.take(record.fact, truth)

    def reloaded(self) -> None:
        """A daemon has begun with what the store holds, or goes on with it."""
        for truth in self.truths.values():
            truth.in_attempt = truth.synchronising = False

    @singledispatchmethod
    def take(self, fact: Fact, truth: Truth) -> None:
        """What a fact says of a job; many say nothing that matters here."""

    @take.register
    def _joined(self, fact: WorkerJoined, truth: Truth) -> None:
        if fact.worker.id in truth.members:
            self.breach(f"{fact.worker} joined {truth.job}, and {truth.members[fact.worker.id]} has not gone")
        self._must_not_be_over(fact, truth)
        truth.members[fact.worker.id] = fact.worker

    @take.register
    def _left(self, fact: WorkerLeft, truth: Truth) -> None:
        self._gone(fact.worker_id, truth, fact)

    @take.register
    def _failed(self, fact: WorkerFailed, truth: Truth) -> None:
        worker = self._gone(fact.worker_id, truth, fact)
        if fact.rank != truth.world.rank_of(worker):
            self.breach(f"{worker} failed at rank {fact.rank}, and has rank {truth.world.rank_of(worker)}")
        if fact.rank >= 0 and truth.phase not in OVER:
            truth.failures += 1
            truth.failed_behind.append(truth.committed[truth.generation])
        self._must_be_dead(worker, fact.reason, truth)

    @take.register
    def _of_a_member(
        self, fact: WorkerDraining | WorkerStalled | WorkerRecovered | WorkerLost | WorkerReturned, truth: Truth
    ) -> None:
        if fact.worker_id not in truth.members:
            self.breach(f"{type(fact).__name__} of {fact.worker_id}, who is no member of {truth.job}")

    @take.register
    def _rescale_started(self, fact: RescaleStarted, truth: Truth) -> None:
        if truth.in_attempt:
            self.breach(f"attempt {fact.attempt} of {truth.job} began within attempt {truth.attempt}")
        if fact.attempt <= truth.attempt:
            self.breach(f"attempt {fact.attempt} of {truth.job} began after attempt {truth.attempt}")
        if truth.failures > tolerated_failures(truth.world.world_size, truth.config.failure_tolerance_percentage):
            self.breach(f"{truth.job} goes on with {truth.failures} of {truth.world.world_size} workers failed")
        restarted = truth.phase is Phase.RESCALING
        self._go_on(truth, Cause.RESCALE_RESTARTED if restarted else Cause.RESCALE_STARTED, fact)
        truth.attempt, truth.in_attempt, truth.synchronising = fact.attempt, True, False
        truth.waiting_since = None
        if fact.world_size < truth.config.min_workers:
            self.breach(f"{truth.job} rescales to {fact.world_size} workers, under {truth.config.min_workers}")

    @take.register
    def _rescale_aborted(self, fact: RescaleAborted, truth: Truth) -> None:
        self._must_be_attempt(fact.attempt, truth, fact)
        truth.in_attempt = truth.synchronising = False

    @take.register
    def _rescale_synchronising(self, fact: RescaleSynchronising, truth: Truth) -> None:
        self._must_be_attempt(fact.attempt, truth, fact)
        if truth.synchronising:
            self.breach(f"attempt {fact.attempt} of {truth.job} synchronises twice")
        truth.synchronising = True

    @take.register
    def _rescale_completed(self, fact: RescaleCompleted, truth: Truth) -> None:
        self._must_be_attempt(fact.attempt, truth, fact)
        self._go_on(truth, Cause.RESCALE_COMPLETED, fact)
        old, number = truth.world, truth.generation + 1
        if fact.delta.epoch != number:
            self.breach(f"{truth.job} has world {truth.generation}, and {fact.delta.epoch} is committed behind it")
        try:
            new = old.apply(fact.delta)
        except ForgedError as error:
            self.breach(f"what leads to world {number} of {truth.job} does not fit the one before: {error}")
        self._check_order(truth, old, new)
        self._check_step(truth, old, new, fact)
        self._check_stopped(truth, new, number)
        truth.followed_at[truth.generation] = self._now()
        truth.worlds[number] = new
        truth.committed[number] = fact.step
        truth.in_attempt = truth.synchronising = False
        truth.failures = 0

    @take.register
    def _waiting(self, fact: JobWaiting, truth: Truth) -> None:
        self._go_on(truth, Cause.TOO_FEW, fact)
        if fact.workers >= truth.config.min_workers:
            self.breach(f"{truth.job} waits with {fact.workers} workers, and needs {truth.config.min_workers}")
        truth.in_attempt = truth.synchronising = False
        truth.waiting_since = self._now()

    @take.register
    def _wish(self, fact: JobPaused | JobResumed, truth: Truth) -> None:
        self._must_not_be_over(fact, truth)

    @take.register
    def _completed(self, fact: JobCompleted, truth: Truth) -> None:
        self._go_on(truth, Cause.COMPLETED, fact)
        steps = truth.committed.get(truth.generation, 0)
        if fact.step != steps:
            self.breach(f"{truth.job} was completed behind step {fact.step}, and {steps} are committed")
        truth.reason = "completed"

    @take.register
    def _aborted(self, fact: JobAborted, truth: Truth) -> None:
        self._go_on(truth, Cause.ABORTED, fact)
        self._must_have_reason(fact.reason, truth)
        truth.reason = fact.reason

    # What facts must fit.

    def _gone(self, name: str, truth: Truth, fact: Fact) -> WorkerId:
        worker = truth.members.pop(name, None)
        if worker is None:
            self.breach(f"{type(fact).__name__} of {name}, who is no member of {truth.job}")
        return worker

    def _go_on(self, truth: Truth, cause: Cause, fact: Fact) -> None:
        try:
            truth.phase = following(truth.phase, cause)
        except ForgedError as error:
            self.breach(f"{truth.job}, {type(fact).__name__}: {error.message}")

    def _must_not_be_over(self, fact: Fact, truth: Truth) -> None:
        if truth.phase in OVER:
            self.breach(f"{type(fact).__name__} of {truth.job}, which is {truth.phase}")

    def _must_be_attempt(self, attempt: int, truth: Truth, fact: Fact) -> None:
        if not truth.in_attempt or attempt != truth.attempt:
            self.breach(f"{type(fact).__name__} of attempt {attempt}, and {truth.job} is not in it")

    def _check_order(self, truth: Truth, old: ClusterTopology, new: ClusterTopology) -> None:
        if len({worker.id for worker in new.workers}) != new.world_size:
            self.breach(f"world {new.epoch} of {truth.job} names somebody twice: {new.workers}")
        before = [worker for worker in old.workers if worker in new]
        after = [worker for worker in new.workers if worker in old]
        if before != after:
            self.breach(f"world {new.epoch} of {truth.job} changes the order of those who stay: {before} to {after}")
        if strangers := set(new.workers) - set(truth.members.values()):
            self.breach(f"world {new.epoch} of {truth.job} names {strangers}, who are no members")

    def _check_step(self, truth: Truth, old: ClusterTopology, new: ClusterTopology, fact: RescaleCompleted) -> None:
        """What was committed stays, and what somebody has yet to finish does not count."""
        staying = [worker for worker in old.workers if worker in new]
        if not staying:
            # What is left is what a joiner has been given, if anything.
            truth.failed_behind = [min(behind, fact.step) for behind in truth.failed_behind]
            if fact.step > truth.committed.get(old.epoch, 0) + 1:
                self.breach(f"nobody of world {old.epoch} of {truth.job} is left, and it goes on behind {fact.step}")
            return
        # A step that survivors finished before a failure, and that counts now, is not one after it.
        older = len(truth.failed_behind) - truth.failures
        before = [behind for behind in truth.failed_behind[:older] if behind >= fact.step]
        truth.failed_behind = [*before, *(max(behind, fact.step) for behind in truth.failed_behind[older:])]
        committed = truth.committed[old.epoch]
        if fact.step < committed:
            self.breach(f"{committed} steps of {truth.job} are committed, and world {new.epoch} has {fact.step}")
        if fact.step > committed + 1:
            self.breach(f"{committed} steps of {truth.job} are committed, and world {new.epoch} skips to {fact.step}")
        if fact.step > committed:
            step = truth.steps[old.epoch, committed]
            self._check_covered(truth, old, committed)
            if unfinished := [worker for worker in staying if worker not in step.finished]:
                self.breach(f"step {committed} of {truth.job} counts, and {unfinished} have not finished it")

    def _check_stopped(self, truth: Truth, new: ClusterTopology, number: int) -> None:
        """Who is in a new world has left the one before."""
        for trainee in self.trainees:
            if not trainee.alive or trainee.me is None or trainee.job != truth.job or trainee.me not in new:
                continue
            if trainee.stepping is not None and trainee.generation < number:
                self.breach(
                    f"world {number} of {truth.job} was committed while {trainee.me} was in step {trainee.stepping}"
                )

    def _check_covered(self, truth: Truth, world: ClusterTopology, number: int) -> None:
        """Every sample of the step was used once."""
        parts = truth.steps[world.epoch, number].contributed
        used = sorted(sample for share in parts.values() for sample in share)
        if used != list(range(BATCH)):
            self.breach(f"step {number} of {truth.job} used {used} in world {world.epoch}: ranks {sorted(parts)}")

    def _must_have_reason(self, reason: str, truth: Truth) -> None:
        """Why a job is aborted must be one of the rules', and true."""
        config, size = truth.config, truth.world.world_size
        tolerated = tolerated_failures(size, config.failure_tolerance_percentage)
        if found := re.fullmatch(r"(\d+) of (\d+) workers failed, and (\d+) may", reason):
            true = tuple(map(int, found.groups())) == (truth.failures, size, tolerated) and truth.failures > tolerated
        elif found := re.fullmatch(r"(\d+) failures without a committed step in between", reason):
            true = config.max_consecutive_failures <= int(found[1]) <= len(truth.failed_behind)
        elif reason.startswith(f"fewer than {config.min_workers} workers for"):
            true = self._is_short(truth)
        else:
            true = truth.abort_wanted
        if not true:
            failed = f"{truth.failures} of {size} failed, {len(truth.failed_behind)} since the last step"
            self.breach(f"{truth.job} was aborted without a reason: {reason} ({failed}, {truth.phase})")

    def _is_short(self, truth: Truth) -> bool:
        if truth.waiting_since is None:
            return not truth.worlds
        return self._now() - truth.waiting_since >= truth.config.min_workers_timeout_s - 0.01

    # Deaths.

    def trainee_of(self, worker: WorkerId) -> Trainee | None:
        """The process that this is."""
        return next((trainee for trainee in self.trainees if trainee.me == worker), None)

    def _must_be_dead(self, worker: WorkerId, reason: str, truth: Truth) -> None:
        trainee = self.trainee_of(worker)
        if trainee is None:
            self.breach(f"{worker} failed, and nobody knows it")
            return
        if not trainee.alive:
            return
        if reason.startswith("evicted: "):
            if not trainee.evicted:
                self.breach(f"{worker} was evicted, and nobody wanted that")
        elif reason.startswith(("its process", "nobody listens")):
            self.breach(f"{worker} lives, and failed: {reason}")
        elif reason.startswith("it lives and made no progress"):
            if not (self._was_held(trainee, truth.config.stall_timeout_s) or self._is_disturbed(truth)):
                self.breach(f"{worker} was not held up, and failed: {reason}")
        elif not self._may_count_as_dead(trainee, reason, truth):
            good_s = self.disturbances.good_for_s(trainee.host)
            self.breach(f"{worker} lives, its network is good for {good_s:.1f} s, and it failed: {reason}")

    def _may_count_as_dead(self, trainee: Trainee, reason: str, truth: Truth) -> bool:
        """Whether what is wrong with its network, or its script, was bad enough and lasted."""
        config = truth.config
        if reason.startswith("it did not answer"):
            return self._is_disturbed(truth) or self._now() - trainee.held_until < 1.0
        if "worlds in a row could not work" in reason:
            return self._is_disturbed(truth)
        if self._was_good(trainee.host):
            return False
        limit_s = {
            "its connection was lost": config.reconnect_grace_s,
            "neither its library nor": config.worker_heartbeat_timeout_s - config.heartbeat_interval_s,
        }.get(reason[:23], 0.0)
        return self.disturbances.bad_for_s(trainee.host) >= limit_s - 0.01

    def _was_held(self, trainee: Trainee, seconds: float) -> bool:
        """Whether its script was held up for so long, until a moment ago."""
        return trainee.held_since + seconds - 0.01 <= self._now() <= trainee.held_until + 2.0

    def _was_good(self, host: str) -> bool:
        return self.disturbances.good_for_s(host) > SETTLED_AFTER_S

    def _is_disturbed(self, truth: Truth) -> bool:
        """Whether anything was wrong with any host of the job."""
        hosts = {trainee.host for trainee in self.trainees if trainee.job == truth.job}
        return not all(map(self._was_good, hosts))

    # Training scripts.

    def begins(self, trainee: Trainee, known: ClusterTopology | None, step: int, state: int) -> None:
        """A script is told to do a step."""
        truth, me = self.truths[trainee.job], trainee.me
        assert me is not None
        world = truth.worlds.get(trainee.generation)
        if world is None or known is None or known.workers != world.workers or known.epoch != trainee.generation:
            self.breach(f"{me} trains in world {trainee.generation} of {truth.job}, which it takes for {known}")
        if me not in world:
            self.breach(f"{me} trains in world {world.epoch} of {truth.job}, which it is not in")
        if trainee.generation < truth.generation and me in truth.world:
            self.breach(
                f"{me} begins step {step} in world {trainee.generation} of {truth.job}, {truth.generation} holds"
            )
        if step < truth.committed[trainee.generation]:
            self.breach(f"{me} does step {step} of {truth.job} again, which was committed")
        if step > truth.committed[trainee.generation]:
            self.breach(f"{me} begins step {step} of {truth.job} before the one before was committed")
        self._check_state(truth, me, step, state)
        trainee.stepping = step

    def contributes(self, trainee: Trainee, rank: int, share: range) -> None:
        """A script gives its part of a step to the others."""
        truth, step = self.truths[trainee.job], trainee.stepping
        assert trainee.me is not None
        assert step is not None
        if truth.worlds[trainee.generation].rank_of(trainee.me) != rank:
            self.breach(f"{trainee.me} takes itself for rank {rank} in world {trainee.generation}")
        contributed = truth.steps[trainee.generation, step].contributed
        if rank in contributed:
            self.breach(f"rank {rank} gives its part of step {step} twice in world {trainee.generation}")
        contributed[rank] = share

    def finishes(self, trainee: Trainee) -> None:
        """A script has done its part of a step, and changed its state."""
        assert trainee.me is not None
        assert trainee.stepping is not None
        self.truths[trainee.job].steps[trainee.generation, trainee.stepping].finished.add(trainee.me)

    def ends(self, trainee: Trainee, state: int, *, counts: bool) -> None:
        """A script is told what became of the step."""
        truth, step = self.truths[trainee.job], trainee.stepping
        assert trainee.me is not None
        assert step is not None
        trainee.stepping = None
        if not counts:
            return
        world = truth.worlds[trainee.generation]
        finished = truth.steps[trainee.generation, step].finished
        if unfinished := [worker for worker in world.workers if worker not in finished]:
            self.breach(f"step {step} of {truth.job} is committed, and {unfinished} have not finished it")
        self._check_covered(truth, world, step)
        self._check_state(truth, trainee.me, step + 1, state)
        if trainee.generation < truth.generation and trainee.me in truth.world:
            self.breach(f"{trainee.me} commits step {step} in world {trainee.generation}, {truth.generation} holds")
        if self._now() > truth.followed_at.get(trainee.generation, math.inf) + OLD_WORLD_MAX_S:
            self.breach(f"{trainee.me} still trains in world {trainee.generation}, and {truth.generation} holds")
        truth.committed[trainee.generation] = max(truth.committed[trainee.generation], step + 1)

    def _check_state(self, truth: Truth, me: WorkerId, steps: int, state: int) -> None:
        if state != truth.state_behind(steps):
            known = truth.chain.index(state) if state in truth.chain else "no"
            self.breach(f"{me} has the state of {known} steps of {truth.job} where {steps} are behind it")

    # Breaches.

    def breach(self, what: str) -> NoReturn:
        """A promise was not kept."""
        self.breaches.append(what)
        raise Broken(what)

    def check(self) -> None:
        """Raise what was found where nobody heard of it."""
        if self.breaches:
            raise Broken(self.breaches[0])
