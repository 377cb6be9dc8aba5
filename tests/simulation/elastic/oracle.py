"""What must be true of every job that trains, whatever happens to its workers and their daemon.

Invariants:
- The oracle sees facts in the order of their ids, each once and before any worker acts on it, and what training scripts
  see at that moment. It knows which processes live and which networks were bad, and asks neither daemon nor workers.
- Every breach names the broken promise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import singledispatchmethod
from typing import NoReturn

from forged.elastic.config import tolerated_failures
from forged.elastic.messages import (
    JobAborted,
    JobCompleted,
    JobPaused,
    JobReopened,
    JobResumed,
    JobWaiting,
    ProgressLost,
    ReportReady,
    ReportStopped,
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
    WorkerStoodStill,
)
from forged.elastic.model import ClusterTopology, WorkerId
from forged.elastic.phases import OVER, Cause, next_phase
from forged.elastic.rescale.attempt import StopReport
from forged.errors import ForgedError
from forged.kernel.messages import Fact, Record
from forged.status.model import DaemonStarted
from tests.simulation.data.oracle import DataOracle, DataPromise
from tests.simulation.elastic.background import Background
from tests.simulation.elastic.evidence import GIVEN_UP, Evidence
from tests.simulation.elastic.truth import (
    BATCH,
    IMPOSSIBLE_STEP,
    QUIET_S,
    WAITS_S,
    Disturbances,
    Promise,
    SimulatedWorker,
    Truth,
)
from tests.simulation.oracle import InvariantViolated, broken

REPORTED_WITHIN_S = 1.0
"""How long a worker may stand still without a daemon before it says so."""
RELEASED_WITHIN_S = 2.0
"""How long a script may wait for a peer that is gone."""
OLD_WORLD_MAX_S = 60.0
"""How long an evicted worker may take to commit a last step with peers that have not heard of it, or are blocked."""

CONNECTED = frozenset({"daemon", "hostile", "slow", "link_quality"})
"""The disturbances in which workers still learn in time that a peer of theirs is gone."""


class ElasticOracle:
    """Keeps the promises in mind."""

    def __init__(self, now: Callable[[], float], look: Callable[[], None], met: Callable[[str], None]) -> None:
        self.facts: dict[int, bytes] = {}
        self.last = 0
        self.truths: dict[str, Truth] = {}
        self.simulated_workers: list[SimulatedWorker] = []
        self.disturbances = Disturbances(now)
        self.breaches: list[InvariantViolated] = []
        self.data = DataOracle(self.simulated_worker_of, self._raise, look, met)
        self._evidence = Evidence(self.simulated_workers, self.disturbances, now)
        self._background = Background(self.simulated_workers, self.disturbances, now)
        self._now = now
        self._met = met
        self._steady_from = 0.0
        """Since when workers have had time to find the daemon."""

    # Facts.

    def heard(self, records: Sequence[Record]) -> None:
        """These are on record now."""
        for record in records:
            known = self.facts.get(record.id)
            if known is not None:
                if known != record.data:
                    self.breach(Promise.HISTORY, f"fact {record.id} is another one than before: {record!r}")
                continue
            if record.id <= self.last:
                self.breach(Promise.HISTORY, f"fact {record.id} came after {self.last}")
            self.facts[record.id], self.last = record.data, record.id
            if isinstance(record.fact, DaemonStarted):
                # Workers may have reached the daemon before this fact, so attempts may have begun in its run.
                self._steady_from = self._now() + QUIET_S
            truth = self.truths.get(record.job)
            if truth is not None and isinstance(record.fact, Fact):
                self.take(record.fact, truth)
                self.data.heard(record.fact, truth)

    def reloaded(self) -> None:
        """A daemon has begun with what the store holds, or goes on with it."""
        self._steady_from = self._now() + QUIET_S
        for truth in self.truths.values():
            truth.in_attempt = truth.synchronising = truth.in_background = False

    @singledispatchmethod
    def take(self, fact: Fact, truth: Truth) -> None:
        """What a fact says of a job; many say nothing that matters here."""

    @take.register
    def _joined(self, fact: WorkerJoined, truth: Truth) -> None:
        if there := truth.members.get(fact.worker.id):
            self.breach(Promise.MEMBERS, f"{fact.worker} joined {truth.job}, and {there} has not gone")
        self._must_not_be_over(fact, truth)
        truth.members[fact.worker.id] = fact.worker
        truth.joined_at[fact.worker] = self._now()
        truth.hosts[fact.worker.id] = fact.worker.hostname

    @take.register
    def _left(self, fact: WorkerLeft, truth: Truth) -> None:
        worker = self._gone(fact.worker_id, truth, fact)
        if worker in truth.claims and not any(other in truth.world for other in truth.members.values()):
            truth.lone_liar = True
        if heir := self._heir_of(worker, truth, fact.reason):
            told_s = self._now() - truth.told_to_go[worker]
            self.breach(
                Promise.HANDED_OVER,
                f"{worker} left {truth.job}, told to {told_s:.1f} s ago, with the only state; {heir} waited for it",
            )

    def _heir_of(self, worker: WorkerId, truth: Truth, reason: str) -> WorkerId | None:
        """The worker that waited for the state that a draining worker took along; None if there is none."""
        if truth.group_size > 1:
            # A single worker hands over no whole state.
            return None
        is_last = worker in truth.world and not any(other in truth.world for other in truth.members.values())
        waited_in_vain = "; " in reason
        is_told_to_go = worker in truth.told_to_go and worker not in truth.claims
        if not is_last or waited_in_vain or not is_told_to_go or truth.phase in OVER:
            return None
        config, now = truth.config, self._now()
        waiting = [other for other in truth.members.values() if other not in truth.told_to_go]
        has_room = config.max_workers > 1 and 1 + len(waiting) >= config.min_workers
        simulated = self.simulated_worker_of(worker)
        has_state = simulated is not None and simulated.committed == truth.steps_committed > 0
        if not (has_state and has_room) or self._is_disturbed(worker):
            return None
        return next((one for one in waiting if now - truth.joined_at[one] > WAITS_S and self._hears(one)), None)

    def _hears(self, worker: WorkerId) -> bool:
        simulated = self.simulated_worker_of(worker)
        is_held = simulated is None or simulated.held_until > self._now() - WAITS_S
        return not (is_held or self._is_disturbed(worker)) and simulated is not None and simulated.alive

    def _is_disturbed(self, worker: WorkerId) -> bool:
        """Whether it may not have heard what was said, or not been heard."""
        return self.disturbances.good_for_s(worker.hostname) < QUIET_S or self._now() < self._steady_from

    @take.register
    def _failed(self, fact: WorkerFailed, truth: Truth) -> None:
        worker = self._gone(fact.worker_id, truth, fact)
        rank = truth.world.rank_of(worker)
        if fact.rank != rank:
            self.breach(Promise.ONE_OWNER, f"{worker} failed at rank {fact.rank}, and has rank {rank}")
        is_wanted = fact.reason.startswith("evicted: ") or worker in truth.told_to_go
        is_wanted = is_wanted or fact.reason.endswith("it disappeared while the daemon was down")
        is_wanted = is_wanted or GIVEN_UP in fact.reason or (rank >= 0 and truth.has_lost_member(worker))
        if fact.rank >= 0 and truth.phase not in OVER and not is_wanted:
            truth.failures += 1
            truth.failed_behind.append(truth.steps_committed)
        simulated = self.simulated_worker_of(worker)
        if simulated is None:
            self.breach(Promise.EVIDENCE, f"{worker} failed, and is not known")
        if against := self._evidence.against_death(simulated, fact.reason, truth):
            self.breach(Promise.EVIDENCE, f"{worker} failed: {fact.reason}; but {against}")

    @take.register
    def _of_a_member(
        self,
        fact: WorkerDraining | WorkerStalled | WorkerRecovered | WorkerLost | WorkerReturned | WorkerStoodStill,
        truth: Truth,
    ) -> None:
        if fact.worker_id not in truth.members:
            stranger = f"{fact.worker_id}, which is no member of {truth.job}"
            self.breach(Promise.MEMBERS, f"{type(fact).__name__} of {stranger}")
        if isinstance(fact, WorkerDraining):
            truth.told_to_go[truth.members[fact.worker_id]] = self._now()

    @take.register
    def _rescale_started(self, fact: RescaleStarted, truth: Truth) -> None:
        if truth.in_attempt:
            self.breach(Promise.HISTORY, f"attempt {fact.attempt} of {truth.job} began within attempt {truth.attempt}")
        if fact.attempt <= truth.attempt:
            self.breach(
                Promise.GENERATIONS_GROW, f"attempt {fact.attempt} of {truth.job} began after attempt {truth.attempt}"
            )
        self._must_be_borne(truth)
        restarted = truth.phase.value == "rescaling"
        self._go_on(truth, Cause.RESCALE_RESTARTED if restarted else Cause.RESCALE_STARTED, fact)
        truth.attempt, truth.in_attempt, truth.synchronising = fact.attempt, True, False
        truth.in_background, truth.began_at = fact.in_background, self._now()
        if fact.in_background and (truth.stops_to_rescale or set(fact.removed) - set(fact.draining)):
            self.breach(Promise.HISTORY, f"background attempt {fact.attempt} of {truth.job}: {fact}")
        truth.added, truth.source, truth.sources = tuple(fact.added), "", ()
        truth.waiting_since = None
        config = truth.config
        if not config.min_workers <= fact.world_size <= config.max_workers:
            limits = f"{config.min_workers} to {config.max_workers}"
            self.breach(Promise.MEMBERS, f"{truth.job} rescales to {fact.world_size} workers, and is to have {limits}")

    @take.register
    def _rescale_aborted(self, fact: RescaleAborted, truth: Truth) -> None:
        if fact.reason != "the daemon restarted":
            self._must_be_attempt(fact.attempt, truth, fact)
        truth.in_attempt = truth.synchronising = truth.in_background = False

    @take.register
    def _rescale_synchronising(self, fact: RescaleSynchronising, truth: Truth) -> None:
        self._must_be_attempt(fact.attempt, truth, fact)
        if truth.synchronising:
            self.breach(Promise.HISTORY, f"attempt {fact.attempt} of {truth.job} synchronises twice")
        truth.synchronising, truth.source = True, fact.source.id
        truth.sources = {worker.id for worker in fact.sources or (fact.source,)}
        source = self.simulated_worker_of(fact.source)
        truth.source_world = 0 if source is None or fact.source in truth.world else source.generation

    @take.register
    def _rescale_completed(self, fact: RescaleCompleted, truth: Truth) -> None:
        self._must_be_attempt(fact.attempt, truth, fact)
        self._go_on(truth, Cause.RESCALE_COMPLETED, fact)
        old, number = truth.world, truth.generation + 1
        if fact.delta.generation != number:
            self.breach(
                Promise.GENERATIONS_GROW,
                f"{truth.job} has world {truth.generation}, and {fact.delta.generation} is committed behind it",
            )
        try:
            new = old.apply(fact.delta)
        except ForgedError as error:
            self.breach(Promise.HISTORY, f"what leads to world {number} of {truth.job} does not fit: {error}")
        self._check_owners(truth, new)
        self._check_order(truth, old, new)
        self._check_groups(truth, new)
        if fact.step is not None:
            self._check_acknowledged(truth, new, fact.attempt, fact.step)
            self._check_stopped(truth, new, number)
            if truth.stops_to_rescale:
                self._check_step(truth, old, new, fact.step)
            else:
                self._check_beginning(truth, new, fact.step)
        elif truth.stops_to_rescale or not self._goes_on(truth, old, new):
            self.breach(Promise.STEPS, f"no commit says after which step world {number} of {truth.job} begins")
        self._open(truth, new, fact)

    def _open(self, truth: Truth, new: ClusterTopology, fact: RescaleCompleted) -> None:
        """The new world holds."""
        truth.followed_at[truth.generation] = self._now()
        truth.worlds[new.epoch] = new
        if fact.step is not None:
            truth.placed.update(new.workers)
            truth.begun.add(new.epoch)
            truth.begins[new.epoch] = truth.committed[new.epoch] = fact.step
            if truth.source_world:
                truth.continues[new.epoch] = truth.source_world
        truth.in_attempt = truth.synchronising = truth.in_background = False
        truth.failures = 0
        first = self.simulated_worker_of(new.workers[0])
        truth.lone_liar |= new.world_size == 1 and first is not None and first.lies

    @take.register
    def _waiting(self, fact: JobWaiting, truth: Truth) -> None:
        self._go_on(truth, Cause.TOO_FEW, fact)
        if fact.workers >= truth.config.min_workers:
            self.breach(
                Promise.MEMBERS, f"{truth.job} waits with {fact.workers} workers, and needs {truth.config.min_workers}"
            )
        truth.in_attempt = truth.synchronising = truth.in_background = False
        truth.waiting_since = self._now()

    @take.register
    def _wish(self, fact: JobPaused | JobResumed, truth: Truth) -> None:
        self._must_not_be_over(fact, truth)
        truth.paused = isinstance(fact, JobPaused)

    @take.register
    def _completed(self, fact: JobCompleted, truth: Truth) -> None:
        self._go_on(truth, Cause.COMPLETED, fact)
        steps = truth.steps_committed
        if fact.step != steps and not truth.lone_liar:
            self.breach(Promise.STEPS, f"{truth.job} was completed behind step {fact.step}, and {steps} are committed")
        truth.reason = "completed"

    @take.register
    def _aborted(self, fact: JobAborted, truth: Truth) -> None:
        self._go_on(truth, Cause.ABORTED, fact)
        if against := self._evidence.against_abort(fact.reason, truth):
            self.breach(Promise.TOLERANCE, f"{truth.job} was aborted without a reason: {fact.reason}; but {against}")
        if fact.step > truth.steps_heard_of:
            self.breach(Promise.STEPS, f"{truth.job} is aborted behind {fact.step}, {truth.steps_heard_of} committed")
        truth.reason = fact.reason

    @take.register
    def _reopened(self, fact: JobReopened, truth: Truth) -> None:
        """The job begins anew, but for its worlds; its workers are gone without a fact about each."""
        self._go_on(truth, Cause.REOPENED, fact)
        if not truth.reopening_wanted:
            self.breach(Promise.TOLERANCE, f"{truth.job} was reopened, and no operator has asked for it")
        if fact.step > truth.steps_heard_of:
            self.breach(Promise.STEPS, f"{truth.job} is reopened behind {fact.step}, {truth.steps_heard_of} committed")
        truth.gone.update(truth.members.values())
        truth.members.clear()
        truth.failures, truth.waiting_since, truth.reason = 0, None, ""
        truth.failed_behind.clear()
        truth.reopening_wanted, truth.reopened_after = False, truth.generation

    @take.register
    def _lost(self, fact: ProgressLost, truth: Truth) -> None:
        if (steps := fact.step + fact.steps) > truth.steps_heard_of:
            self.breach(Promise.STEPS, f"{truth.job} has lost steps up to {steps}, {truth.steps_heard_of} committed")

    # What was reported to the daemon.

    def stopped(self, report: ReportStopped) -> None:
        """A worker says where it has stopped."""
        truth = self.truths.get(report.job)
        if truth is not None and report.step < IMPOSSIBLE_STEP:
            stop = StopReport(report.step, report.holds_state, report.finished)
            truth.stops[report.attempt][report.incarnation] = stop

    def has_state(self, report: ReportReady) -> None:
        """A worker says that it has the state."""
        if truth := self.truths.get(report.job):
            truth.ready[report.attempt].add(report.incarnation)

    # What facts must fit.

    def _gone(self, name: str, truth: Truth, fact: Fact) -> WorkerId:
        worker = truth.members.pop(name, None)
        if worker is None:
            self.breach(Promise.MEMBERS, f"{type(fact).__name__} of {name}, which is no member of {truth.job}")
        truth.gone.add(worker)
        return worker

    def _go_on(self, truth: Truth, cause: Cause, fact: Fact) -> None:
        try:
            truth.phase = next_phase(truth.phase, cause)
        except ForgedError as error:
            self.breach(Promise.HISTORY, f"{truth.job}, {type(fact).__name__}: {error.message}")

    def _must_not_be_over(self, fact: Fact, truth: Truth) -> None:
        if truth.phase in OVER:
            self.breach(Promise.HISTORY, f"{type(fact).__name__} of {truth.job}, which is {truth.phase}")

    def _must_be_attempt(self, attempt: int, truth: Truth, fact: Fact) -> None:
        if not truth.in_attempt or attempt != truth.attempt:
            self.breach(Promise.HISTORY, f"{type(fact).__name__} of attempt {attempt}, and {truth.job} is not in it")

    def _must_be_borne(self, truth: Truth) -> None:
        """A job goes on only with what it tolerates."""
        size, config = truth.world.world_size // truth.group_size, truth.config
        if truth.failures > tolerated_failures(size, config.failure_tolerance_percentage):
            self.breach(Promise.TOLERANCE, f"{truth.job} goes on with {truth.failures} of {size} workers failed")

    def _check_owners(self, truth: Truth, new: ClusterTopology) -> None:
        if len({worker.id for worker in new.workers}) != new.world_size:
            self.breach(Promise.ONE_OWNER, f"world {new.epoch} of {truth.job} names a worker twice: {new.workers}")
        if strangers := sorted(set(new.workers) - set(truth.members.values())):
            self.breach(Promise.MEMBERS, f"world {new.epoch} of {truth.job} names {strangers}, which are no members")

    def _check_order(self, truth: Truth, old: ClusterTopology, new: ClusterTopology) -> None:
        before = [str(worker) for worker in old.workers if worker in new]
        after = [str(worker) for worker in new.workers if worker in old]
        if before != after:
            self.breach(
                Promise.ORDER_KEPT, f"world {new.epoch} of {truth.job} has {after}, and was in the order {before}"
            )

    def _check_groups(self, truth: Truth, new: ClusterTopology) -> None:
        workers = [self.simulated_worker_of(worker) for worker in new.workers]
        places = [(one.group, one.group_rank) for one in workers if one is not None]
        size = truth.group_size
        groups = [name for name, _ in places[::size]]
        is_whole = places == [(name, rank) for name in groups for rank in range(size)] if size > 1 else True
        if not is_whole or (size > 1 and len(set(groups)) < len(groups)):
            self.breach(Promise.GROUPS, f"world {new.epoch} of {truth.job} has {places}")

    def _is_whole(self, truth: Truth, step: int) -> bool:
        """Whether the registered members of the last world have the state behind this step, of all group ranks."""
        present = set(truth.members.values()) & set(truth.world.workers)
        holders = (one for one in self.simulated_workers if one.alive and one.me in present)
        at_step = (one for one in holders if one.generation == truth.generation and one.steps_in_state == step)
        return len({one.group_rank for one in at_step}) == truth.group_size

    def _check_acknowledged(self, truth: Truth, new: ClusterTopology, attempt: int, step: int) -> None:
        """All members have stopped at the step after which the new world starts, or have received its state."""
        simulated_workers = [self.simulated_worker_of(worker) for worker in new.workers]
        told = truth.stops[attempt]
        stops = [None if simulated is None else told.get(simulated.incarnation) for simulated in simulated_workers]
        nobody_has_any = not any(stop and stop.holds_state for stop in stops)
        for rank, (simulated, stop) in enumerate(zip(simulated_workers, stops, strict=True)):
            world = f"world {new.epoch} of {truth.job} was committed behind {step}"
            if simulated is None or stop is None:
                self.breach(Promise.ACKNOWLEDGED, f"{world}, and {new.workers[rank]} did not stop")
            is_source = simulated.name in truth.sources or (rank == 0 and nobody_has_any)
            # Without a transfer each member is the source of its group rank, or has the state.
            is_source |= truth.group_size > 1 and not truth.synchronising and stop.position == step
            has_state = stop.holds_state and stop.position == step
            if not (is_source or has_state or simulated.incarnation in truth.ready[attempt]):
                self.breach(Promise.ACKNOWLEDGED, f"{world}, and {simulated.me} is at {stop}")

    def _check_stopped(self, truth: Truth, new: ClusterTopology, number: int) -> None:
        """A member of a new world has left the previous one."""
        for simulated in self.simulated_workers:
            if not simulated.alive or simulated.me is None or simulated.job != truth.job or simulated.me not in new:
                continue
            if simulated.stepping is not None and simulated.generation < number:
                self.breach(
                    Promise.ACKNOWLEDGED,
                    f"world {number} of {truth.job} is committed while {simulated.me} is in step {simulated.stepping}",
                )

    def _check_step(self, truth: Truth, old: ClusterTopology, new: ClusterTopology, behind: int) -> None:
        """Committed steps stay committed; a step that a member has not finished does not count."""
        staying = [worker for worker in old.workers if worker in new]
        in_groups = truth.group_size > 1
        if in_groups and behind < truth.committed.get(old.epoch, 0):
            committed = truth.committed[old.epoch]
            if self._is_whole(truth, committed) or self._is_whole(truth, committed + 1):
                lost = f"{committed} steps of {truth.job} are committed, and world {new.epoch} begins behind {behind}"
                self.breach(Promise.REPLICAS, lost)
            self._met("a job with groups loses committed steps")
            staying = []
        if not staying:
            # What is left is what a joiner has been given, if anything.
            truth.failed_behind = [min(failed, behind) for failed in truth.failed_behind]
            if behind > truth.committed.get(old.epoch, 0) + 1:
                self.breach(
                    Promise.STEPS,
                    f"no worker of world {old.epoch} of {truth.job} is left, and it goes on behind {behind}",
                )
            return
        # A step that survivors finished before a failure, and that counts now, is not one after it.
        older = len(truth.failed_behind) - truth.failures
        before = [failed for failed in truth.failed_behind[:older] if failed >= behind]
        truth.failed_behind = [*before, *(max(failed, behind) for failed in truth.failed_behind[older:])]
        committed = truth.committed[old.epoch]
        if not committed <= behind <= committed + 1:
            self.breach(
                Promise.STEPS,
                f"{committed} steps of {truth.job} are committed, and world {new.epoch} begins behind {behind}",
            )
        step = truth.steps[old.epoch, committed]
        final = [str(worker) for worker in staying if worker in step.final]
        # The other ranks of a group may not have been released from the vote: then no whole state has the step.
        is_whole = not in_groups or self._is_whole(truth, committed + 1)
        if behind <= committed and final and is_whole:
            self.breach(
                Promise.VOTES, f"step {committed} of {truth.job} is repeated, which {final} finished after a vote"
            )
        if behind > committed:
            self._check_covered(truth, old, committed)
            unfinished = [str(worker) for worker in staying if worker not in step.finished]
            if in_groups and unfinished and not self._is_whole(truth, committed):
                self._met("a step counts that some group rank cannot repeat")
            elif unfinished and not step.final:
                self.breach(
                    Promise.STEPS, f"step {committed} of {truth.job} counts, and {unfinished} have not finished it"
                )

    def _goes_on(self, truth: Truth, old: ClusterTopology, new: ClusterTopology) -> bool:
        """Whether a survivor has the state, by a commit with a step or from training."""
        trained = {simulated.me for simulated in self.simulated_workers if simulated.generation}
        return any(worker in new and (worker in truth.placed or worker in trained) for worker in old.workers)

    def _check_covered(self, truth: Truth, world: ClusterTopology, number: int) -> None:
        """Every sample of the step was used once."""
        parts = truth.steps[world.epoch, number].contributed
        used = sorted(sample for share in parts.values() for sample in share)
        if used != list(range(BATCH)):
            self.breach(
                Promise.STEPS,
                f"step {number} of {truth.job} used {used} in world {world.epoch}: ranks {sorted(parts)}",
            )

    def is_gone(self, simulated: SimulatedWorker) -> bool:
        """Whether the facts say that it is no member any more."""
        truth = self.truths[simulated.job]
        return truth.phase in OVER or simulated.me in truth.gone

    def gone_from(self, simulated: SimulatedWorker, world: ClusterTopology) -> str:
        """The name of a peer in this world that has died, or that the facts say is gone; empty for none."""
        peers = (self.simulated_worker_of(worker) for worker in world.workers if worker != simulated.me)
        return next((one.name for one in peers if one is not None and (not one.alive or self.is_gone(one))), "")

    def simulated_worker_of(self, worker: WorkerId) -> SimulatedWorker | None:
        """The process that this is."""
        return next((simulated for simulated in self.simulated_workers if simulated.me == worker), None)

    # Training scripts.

    def enters(self, simulated: SimulatedWorker, known: ClusterTopology, step: int) -> None:
        """A worker has met its world, and the members have agreed after which step it starts."""
        truth, me = self.truths[simulated.job], simulated.me
        assert me is not None
        world = truth.worlds.get(known.epoch)
        if world is None or known.workers != world.workers:
            self.breach(
                Promise.ONE_OWNER, f"{me} enters world {known.epoch} of {truth.job}, which it takes for {known}"
            )
        if me not in world:
            self.breach(Promise.ONE_OWNER, f"{me} enters world {world.epoch} of {truth.job}, which it is not in")
        if known.epoch <= simulated.generation:
            self.breach(Promise.GENERATIONS_GROW, f"{me} enters world {known.epoch} behind {simulated.generation}")
        if world.epoch not in truth.begun:
            self._begin_world(truth, world, step)
        if simulated.generation and simulated.generation not in simulated.overs:
            self.breach(Promise.WORLDS, f"{me} enters world {known.epoch}, and was not told that its last one is over")
        simulated.generation, simulated.committed, simulated.finished = known.epoch, step, None
        simulated.final, simulated.has_voted = 0, False
        simulated.is_void = False

    def _begin_world(self, truth: Truth, world: ClusterTopology, step: int) -> None:
        """An asynchronous world starts after the step on which its members agreed."""
        self._check_beginning(truth, world, step)
        truth.begun.add(world.epoch)
        truth.begins[world.epoch] = truth.committed[world.epoch] = step

    def _check_beginning(self, truth: Truth, world: ClusterTopology, step: int) -> None:
        """Survivors continue where they were."""
        known = [simulated for worker in world.workers if (simulated := self.simulated_worker_of(worker)) is not None]
        staying = [simulated for simulated in known if simulated.generation]
        if truth.group_size > 1:
            # A group that was left out of a world says nothing about the steps after it.
            staying = [simulated for simulated in staying if simulated.generation == max(truth.begun)]
        least, most = 0, truth.steps_committed + 1
        if staying:
            last = max(truth.begun)
            in_last = any(simulated.generation == last for simulated in staying)
            least = max([simulated.committed for simulated in staying] + [truth.committed[last]] * in_last)
            most = least + all(simulated.has_finished(least) for simulated in staying)
            if any(simulated.final > least for simulated in staying):
                most = least + 1
                if any(simulated.final > least and simulated.generation == last for simulated in staying):
                    least = most
            if truth.group_size > 1 and not self._is_whole(truth, least):
                least, most = (least if self._is_whole(truth, least + 1) else 0), least + 1
        if not least <= step <= most:
            begins = f"world {world.epoch} of {truth.job} begins behind {step}"
            self.breach(Promise.STEPS, f"{begins}, and it must be from {least} to {most}")

    def begins(self, simulated: SimulatedWorker, step: int, state: int) -> None:
        """A script is told to do a step."""
        # A member that heard of it earlier may not have reported it.
        self.check()
        truth, me = self.truths[simulated.job], simulated.me
        assert me is not None
        if truth.stops_to_rescale and simulated.generation < truth.generation and me in truth.world:
            self.breach(
                Promise.ACKNOWLEDGED,
                f"{me} begins step {step} in world {simulated.generation} of {truth.job}, {truth.generation} holds",
            )
        committed = truth.committed.get(simulated.generation)
        if step != committed:
            self.breach(Promise.STEPS, f"{me} begins step {step} of {truth.job}, and {committed} are committed")
        self._check_state(truth, me, step, state)
        if simulated.told_to_enter != simulated.generation:
            self.breach(Promise.WORLDS, f"{me} begins step {step}, and was not told of world {simulated.generation}")
        simulated.stepping, simulated.is_void, simulated.has_voted = step, False, False
        simulated.misses_since = None

    def enters_steps(self, simulated: SimulatedWorker, generation: int) -> None:
        """A script is told of the world in which it trains next."""
        if generation != simulated.generation or generation == simulated.told_to_enter:
            self.breach(
                Promise.WORLDS, f"{simulated.me} is told to enter world {generation} in world {simulated.generation}"
            )
        simulated.told_to_enter = generation

    def world_over(self, simulated: SimulatedWorker, generation: int) -> None:
        """A script is told that a world is over."""
        if generation in simulated.overs or generation < simulated.generation:
            told = f"{simulated.me} is told in world {simulated.generation} that world {generation} is over"
            self.breach(Promise.WORLDS, f"{told}, and before of {sorted(simulated.overs)}")
        simulated.overs.add(generation)

    def must_be_released(self, simulated: SimulatedWorker, world: ClusterTopology) -> None:
        """A script waits for its peers. To be told again and again."""
        quiet_s = min(self.disturbances.quiet_for_s(worker.hostname, CONNECTED) for worker in world.workers)
        if not (gone := self.gone_from(simulated, world)) or quiet_s < QUIET_S:
            simulated.misses_since = None
            return
        now = self._now()
        since = simulated.misses_since = now if simulated.misses_since is None else simulated.misses_since
        if now - since > RELEASED_WITHIN_S:
            self.breach(
                Promise.RELEASED, f"{simulated.me} has waited for {gone}, which is gone, for {now - since:.1f} s"
            )

    def votes(self, simulated: SimulatedWorker) -> None:
        """A script has come to the vote of its step."""
        assert simulated.me is not None
        assert simulated.stepping is not None
        self.truths[simulated.job].steps[simulated.generation, simulated.stepping].voting.add(simulated.me)

    def has_voted(self, simulated: SimulatedWorker) -> None:
        """A script is told that all ranks have voted."""
        truth, step = self.truths[simulated.job], simulated.stepping
        assert step is not None
        voting = truth.steps[simulated.generation, step].voting
        world = truth.worlds[simulated.generation]
        if missing := [str(worker) for worker in world.workers if worker not in voting]:
            self.breach(Promise.VOTES, f"{simulated.me} goes on with step {step}, and {missing} have not voted")
        simulated.has_voted = True

    def contributes(self, simulated: SimulatedWorker, rank: int, share: range, pace: tuple[float, int]) -> None:
        """A script contributes its part of a step, with this learning rate and batch."""
        truth, step = self.truths[simulated.job], simulated.stepping
        assert simulated.me is not None
        assert step is not None
        if truth.worlds[simulated.generation].rank_of(simulated.me) != rank:
            self.breach(
                Promise.ONE_OWNER, f"{simulated.me} takes itself for rank {rank} in world {simulated.generation}"
            )
        contributed = truth.steps[simulated.generation, step].contributed
        if rank in contributed:
            self.breach(
                Promise.ONE_OWNER, f"rank {rank} gives its part of step {step} twice in world {simulated.generation}"
            )
        contributed[rank] = share
        paces = truth.steps[simulated.generation, step].paces
        paces[rank] = pace
        if len(set(paces.values())) > 1:
            self.breach(
                Promise.ONE_RATE, f"rates and batches differ in step {step} of world {simulated.generation}: {paces}"
            )

    def finishes(self, simulated: SimulatedWorker) -> None:
        """A script has done its part of a step, and changed its state."""
        assert simulated.me is not None
        assert simulated.stepping is not None
        truth, step = self.truths[simulated.job], simulated.stepping
        simulated.finished = step
        truth.steps[simulated.generation, step].finished.add(simulated.me)
        if simulated.has_voted:
            truth.steps[simulated.generation, step].final.add(simulated.me)
            simulated.final, truth.final = step + 1, max(truth.final, step + 1)

    def ends(self, simulated: SimulatedWorker, state: int, *, counts: bool) -> None:
        """A script is told what became of the step."""
        truth, step = self.truths[simulated.job], simulated.stepping
        assert simulated.me is not None
        assert step is not None
        simulated.stepping, simulated.is_void = None, not counts
        if not counts:
            return
        world = truth.worlds[simulated.generation]
        finished = truth.steps[simulated.generation, step].finished
        if unfinished := [str(worker) for worker in world.workers if worker not in finished]:
            self.breach(
                Promise.STEPS, f"step {step} of {truth.job} is committed, and {unfinished} have not finished it"
            )
        self._check_covered(truth, world, step)
        self._check_state(truth, simulated.me, step + 1, state)
        self._check_not_put_out(truth, simulated, step)
        truth.committed[simulated.generation] = max(truth.committed[simulated.generation], step + 1)
        simulated.committed, truth.stepped_at = step + 1, self._now()

    def fails(self, simulated: SimulatedWorker, error: Exception) -> None:
        """A worker takes the exception in its step for its script's own; a peer was gone before the exception."""
        world = self.truths[simulated.job].worlds[simulated.generation]
        quiet_s = (self.disturbances.quiet_for_s(worker.hostname, CONNECTED) for worker in world.workers)
        if min(quiet_s) >= QUIET_S:
            what = f"{simulated.me} fails in step {simulated.stepping}, and its world is over: {error}"
            self.breach(Promise.STEP_ERRORS, what)

    def _check_not_put_out(self, truth: Truth, simulated: SimulatedWorker, step: int) -> None:
        """An evicted worker does not train on for long, and one that has stopped for another world not at all.

        In asynchronous mode a world ends with its step, however long a member is blocked in it.
        """
        is_member = simulated.me in truth.world
        old = f"{simulated.me} commits step {step} in world {simulated.generation}, and {truth.generation} holds"
        if truth.stops_to_rescale and simulated.generation < truth.generation and is_member:
            self.breach(Promise.ACKNOWLEDGED, old)
        if not is_member and self._now() > truth.followed_at.get(simulated.generation, math.inf) + OLD_WORLD_MAX_S:
            self.breach(Promise.GENERATIONS_GROW, f"{old} for {OLD_WORLD_MAX_S:g} s")

    def _check_state(self, truth: Truth, me: WorkerId, steps: int, state: int) -> None:
        simulated = self.simulated_worker_of(me)
        group_rank = 0 if simulated is None else simulated.group_rank
        if state != truth.state_after(steps, group_rank):
            chain = truth.chains[group_rank]
            known = chain.index(state) if state in chain else "no"
            self.breach(
                Promise.STATE, f"{me} has the state of {known} steps of {truth.job} where {steps} are behind it"
            )

    def waits(self, simulated: SimulatedWorker, *, for_daemon: bool) -> None:
        """A process waits, as far as it knows for nothing but a daemon, or not. To be told again and again."""
        truth = self.truths[simulated.job]
        # A worker whose group was left out of the world waits as a joiner.
        is_left_out = truth.group_size > 1 and simulated.me not in truth.world
        if is_left_out or not (for_daemon and simulated.is_void and simulated.alive):
            simulated.waits_since = None
            return
        now = self._now()
        since = simulated.waits_since = now if simulated.waits_since is None else simulated.waits_since
        if now - since > REPORTED_WITHIN_S and not simulated.stands_still:
            self.breach(
                Promise.STANDSTILL, f"{simulated.me} of {simulated.job} stands still for {now - since:.1f} s in silence"
            )

    # Breaches.

    def breach(self, promise: Promise, what: str) -> NoReturn:
        """A promise was not kept."""
        self._raise(broken(promise, what))

    def _raise(self, error: InvariantViolated) -> NoReturn:
        self.breaches.append(error)
        raise error

    def check(self) -> None:
        """Raise a breach that was found where an exception would be lost."""
        if self.breaches:
            raise self.breaches[0]
        for truth in self.truths.values():
            if against := self._background.against(truth):
                self.data.breach(DataPromise.GOES_ON, against)
