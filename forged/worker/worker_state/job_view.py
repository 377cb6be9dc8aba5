"""The worker's view of the job, built from facts and from the daemon's answers to joins.

Invariants:
- Facts arrive in their order and change this view and nothing else; the worker acts on it at the next step boundary.
- The newest attempt counts, and every older one is over.
- After a gap in the facts, the daemon's answer counts wherever no later fact says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forged.data.messages import TransfersPlanned
from forged.elastic.messages import (
    GroupBroken,
    JobAborted,
    JobCompleted,
    JobPaused,
    JobResumed,
    JobWaiting,
    JoinReply,
    RescaleAborted,
    RescaleCompleted,
    RescaleStarted,
    RescaleSynchronising,
    WorkerDraining,
    WorkerFailed,
    WorkerLeft,
)
from forged.elastic.model import ClusterTopology
from forged.elastic.phases import Phase
from forged.jobs.model import JobChanged, JobRemoved, SettingValue
from forged.kernel.messages import Fact, Gap, Record, UnknownFact
from forged.worker.errors import JobEnded, WorkerEvicted, job_aborted

FOLLOWED: tuple[type[Fact], ...] = (
    TransfersPlanned,
    RescaleStarted,
    RescaleSynchronising,
    RescaleCompleted,
    RescaleAborted,
    JobPaused,
    JobResumed,
    JobWaiting,
    JobCompleted,
    JobAborted,
    JobChanged,
    JobRemoved,
    GroupBroken,
    WorkerDraining,
    WorkerFailed,
    WorkerLeft,
)
"""The facts of its job that a worker subscribes to."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed world, and what a worker needs to cross into it."""

    attempt: int
    before: ClusterTopology
    topology: ClusterTopology
    step: int | None
    """The committed step that the world begins with; None after a background rescale, where the members agree on it."""
    epoch: int | None
    learning_rate: float | None
    """None where the world takes that of its state source."""
    global_batch_size: int
    reason: str


@dataclass(slots=True)
class JobView:
    """What the facts so far mean for one worker."""

    worker_id: str
    topology: ClusterTopology = field(default_factory=ClusterTopology)
    """The newest committed world."""
    term: int = 0
    """The term of the daemon that has answered last; 0 before the first answer."""
    newest_fact_id: int = 0
    """The id of the newest fact that has arrived."""
    stop_asked_by: int = 0
    """The id of the newest fact that asks for a stop."""
    attempt: int = 0
    """The newest attempt that this worker takes part in; 0 before the first."""
    is_attempt_running: bool = False
    """Whether that attempt has not ended."""
    leaves: bool = False
    """Whether that attempt forms a world without this worker, which takes no state then."""
    rescaling: bool = False
    """Whether a new world is being formed and training stops for it."""
    background_attempt: int = 0
    """The attempt for which shards move while training continues; 0 for none."""
    lost: str = ""
    """A member of the world that is gone, so that collectives cannot complete; empty for none."""
    synchronising: RescaleSynchronising | None = None
    """The state source and step that the attempt has settled on, while the attempt is under way."""
    committed: Commit | None = None
    """The newest commit, until the worker has crossed into its world."""
    paused: bool = False
    waiting: bool = False
    """Whether the job waits for more workers."""
    settings: dict[str, SettingValue] = field(default_factory=dict)
    """The job's settings."""
    draining: str | None = None
    completed: int | None = None
    """The committed steps of a training that is complete; None while it is not."""
    end: Exception | None = None
    """Why training cannot continue here."""
    outdated: bool = False
    """Whether facts were missed, so that the daemon has to be asked."""
    known: bool = False
    """Whether the daemon has registered this worker; facts before that are about an earlier worker of its name."""
    _unconfirmed: RescaleSynchronising | None = None
    """What was settled before a gap; the daemon's answer tells whether it still holds."""
    _is_new: bool = True
    """Whether no answer yet was as new as the facts."""
    _is_doubtful: bool = False
    """Whether a fact arrived too early to tell whether it is about this worker or about an earlier one of its name."""
    _generation_told: int = 0
    _pause_told: bool = False
    _settings_told: bool = False
    _attempt_told: bool = False

    @property
    def stop_wanted(self) -> int:
        """The id of the fact for which the world has to stop after its step; 1 where the id is unknown, 0 for none."""
        wanted = self.paused or self.rescaling or self.committed is not None
        return max(1, self.stop_asked_by) if wanted else 0

    def is_stopping_for(self, attempt: int) -> bool:
        """Whether training stops for this attempt."""
        return self.rescaling and self.attempt == attempt

    def is_synchronising_for(self, attempt: int) -> bool:
        """Whether the state transfer of this attempt is under way."""
        is_over = self.end is not None or self.completed is not None or self.committed is not None
        return not is_over and self.synchronising is not None and self.synchronising.attempt == attempt

    def is_crossing_into(self, commit: Commit) -> bool:
        """Whether this is the newest commit, and its world is not known to be broken."""
        return self.committed is commit and not (self.rescaling or self.lost)

    def hear(self, record: Record) -> None:
        self.newest_fact_id = record.id
        fact = record.fact
        match fact:
            case RescaleStarted():
                self._started(fact, record.id)
            case RescaleSynchronising() if fact.attempt == self.attempt:
                self.synchronising = fact
            case RescaleAborted() | JobWaiting():
                self.synchronising, self.background_attempt, self.is_attempt_running = None, 0, False
                self.waiting = isinstance(fact, JobWaiting)
            case RescaleCompleted():
                self._completed(fact, record.id)
            case WorkerFailed() | WorkerLeft():
                self._gone(fact)
            case WorkerDraining() if fact.worker_id == self.worker_id:
                self._drain(fact)
            case _:
                self._hear_of_job(fact, record)

    def miss(self, gap: Gap) -> None:
        """The daemon does not have these facts any more."""
        self.newest_fact_id = max(self.newest_fact_id, gap.last)
        self.outdated, self._unconfirmed = True, self.synchronising
        self._pause_told = self._settings_told = self._attempt_told = False

    def catch_up(self, joined: JoinReply) -> None:
        """Take over the daemon's answer to a join."""
        is_new, self.known, self.term = self._is_new, True, joined.fence.term
        self.outdated = self._is_doubtful or joined.topology.generation < self._generation_told
        self._is_new, self._is_doubtful = is_new and self.outdated, False
        if not self._pause_told:
            self.paused = joined.paused
        if not self._attempt_told:
            self.waiting = joined.phase is Phase.WAITING
        if not self._settings_told:
            self.settings = joined.settings
        if joined.drain_reason is not None:
            self.draining = joined.drain_reason
        before = self.topology
        is_newer = joined.topology.generation > before.generation
        rescaling, moving = self._under_way(joined)
        self.is_attempt_running = joined.attempt > 0 or (self.is_attempt_running and self._attempt_told)
        if is_newer:
            self._hold(joined.topology, self.stop_asked_by)
            self.rescaling = rescaling
        if joined.is_member and (is_newer or (is_new and joined.topology.generation == before.generation)):
            self.committed = _commit_of(joined, before, self.attempt)
        if joined.attempt > self.attempt:
            self.attempt, self.leaves, self.rescaling = joined.attempt, joined.is_draining, rescaling
        self.background_attempt = moving
        if joined.synchronising is not None and joined.synchronising.attempt == self.attempt:
            self.synchronising = joined.synchronising
        elif self.synchronising is self._unconfirmed:
            self.synchronising = None
        self._unconfirmed = None

    def has(self, worker_id: str) -> bool:
        """Whether a worker is in the committed world."""
        return any(worker.id == worker_id for worker in self.topology.workers)

    def _under_way(self, joined: JoinReply) -> tuple[bool, int]:
        """Whether training stops for the attempt under way; and that attempt, if training continues meanwhile."""
        if joined.attempt > self.attempt:
            return not joined.in_background, joined.attempt if joined.in_background else 0
        # The known attempt may have begun after the answer was made. If it has ended since, a fact will tell.
        moving = self.background_attempt if self._attempt_told or joined.attempt == self.background_attempt else 0
        is_stop = joined.attempt > 0 and not joined.in_background
        return is_stop or (self.rescaling and self._attempt_told), moving

    def _hear_of_job(self, fact: Fact | UnknownFact, record: Record) -> None:
        match fact:
            case JobPaused():
                self.paused, self.stop_asked_by, self._pause_told = True, record.id, True
            case JobResumed():
                self.paused, self._pause_told = False, True
            case JobChanged():
                self.settings, self._settings_told = fact.settings, True
            case JobCompleted() | JobAborted() | JobRemoved() if not self.known:
                # The facts until now may be about an earlier job of the same name.
                self._is_doubtful, self._settings_told = True, False
            case JobCompleted():
                self.completed, self.background_attempt = fact.step, 0
            case JobAborted():
                self.background_attempt = 0
                self.end = job_aborted(record.job, fact.reason)
            case JobRemoved():
                self.background_attempt = 0
                self.end = JobEnded("job_removed", "the job was removed", "create it again")
            case _:
                pass

    def _started(self, fact: RescaleStarted, fact_id: int) -> None:
        self.synchronising, self.background_attempt, self.waiting = None, 0, False
        gone = set(fact.removed).difference(fact.draining)
        is_wanted = self.has(self.worker_id) and self.worker_id not in gone
        if not (is_wanted or self.worker_id in fact.added or self.worker_id in fact.draining):
            return
        self.attempt, self.leaves, self._attempt_told = fact.attempt, self.worker_id in fact.draining, True
        self.is_attempt_running = True
        if fact.in_background:
            self.background_attempt = fact.attempt
            return
        self.stop_asked_by, self.rescaling = fact_id, True
        self.lost = next((worker for worker in fact.removed if worker in gone - {self.worker_id}), self.lost)

    def _completed(self, fact: RescaleCompleted, fact_id: int) -> None:
        self._generation_told = fact.delta.generation
        if fact.delta.base_generation != self.topology.generation:
            # The daemon's answer, which may be under way, tells the rest.
            self.outdated = self.known
            self.rescaling = self.rescaling and self.attempt > fact.attempt
            self.background_attempt = self.background_attempt if self.background_attempt > fact.attempt else 0
            return
        before = self.topology
        self._hold(before.apply(fact.delta), fact_id)
        if self.known:
            self.committed = Commit(
                fact.attempt,
                before,
                self.topology,
                fact.step,
                fact.epoch,
                fact.learning_rate,
                fact.global_batch_size,
                fact.reason,
            )

    def _hold(self, topology: ClusterTopology, stop_asked_by: int) -> None:
        self.topology, self.stop_asked_by = topology, stop_asked_by
        self.rescaling, self.lost, self.synchronising, self.background_attempt, self.is_attempt_running = (
            False,
            "",
            None,
            0,
            False,
        )

    def _gone(self, fact: WorkerFailed | WorkerLeft) -> None:
        if fact.worker_id != self.worker_id:
            self.lost = fact.worker_id if self.has(fact.worker_id) else self.lost
        elif not self.known:
            self._is_doubtful = True
        elif isinstance(fact, WorkerFailed):
            self.end = WorkerEvicted(fact.reason)

    def _drain(self, fact: WorkerDraining) -> None:
        if self.known:
            self.draining = fact.reason
        else:
            self._is_doubtful = True


def _commit_of(joined: JoinReply, before: ClusterTopology, attempt: int) -> Commit:
    """The commit of a world that an answer tells of; its attempt is the newest known one."""
    state = joined.state
    return Commit(
        attempt,
        before,
        joined.topology,
        state.current_step,
        state.current_epoch,
        joined.learning_rate,
        state.global_batch_size,
        "unknown: the facts before it were missed",
    )
