"""Where a worker stands, as far as it has heard.

Law: facts come in their order and change this and nothing else; what has to be done about it is decided at the next
step boundary. The newest attempt counts, and every older one is over. What was missed is asked for, and what the daemon
answers counts where no fact has said anything newer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forged.data.messages import TransfersPlanned
from forged.elastic.messages import (
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
from forged.jobs.model import JobChanged, JobRemoved, SettingValue
from forged.kernel.messages import Fact, Gap, Record, UnknownFact
from forged.worker.errors import JobEnded, WorkerEvicted

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
    WorkerDraining,
    WorkerFailed,
    WorkerLeft,
)
"""What a worker has to hear of its job."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A world that holds, and what leads from the one before into it."""

    attempt: int
    before: ClusterTopology
    topology: ClusterTopology
    step: int | None
    """The steps that it has behind it; None where nobody has stopped for it, and its members have yet to agree."""
    epoch: int | None
    learning_rate: float
    global_batch_size: int
    reason: str


@dataclass(slots=True)
class JobView:
    """What the facts so far mean for one worker."""

    worker_id: str
    topology: ClusterTopology = field(default_factory=ClusterTopology)
    """The world that was committed last."""
    term: int = 0
    """The term of the daemon that has answered last; 0 before."""
    heard_at: int = 0
    """The id of the newest fact that was heard."""
    asked_at: int = 0
    """The id of the newest fact that asks for a stop."""
    attempt: int = 0
    """The newest attempt that this worker is to take part in; 0 before the first."""
    is_under_way: bool = False
    """Whether it has not come to its end."""
    goes: bool = False
    """Whether that is at a world without this worker, which has nothing to take any more."""
    rescaling: bool = False
    """Whether another world is wanted than the one that was committed last, and training stops for it."""
    moving: int = 0
    """The attempt under way for which training data moves while training goes on; 0 for none."""
    lost: str = ""
    """Who of the world is gone, so that its collectives cannot end; empty while nobody is known to be."""
    synchronising: RescaleSynchronising | None = None
    """What was settled in the attempt, as long as it is under way."""
    committed: Commit | None = None
    """The newest commit, until the worker has gone over into its world."""
    paused: bool = False
    settings: dict[str, SettingValue] = field(default_factory=dict)
    """The job's."""
    draining: str | None = None
    completed: int | None = None
    """How many steps the training had when it was done; None while it is not."""
    end: Exception | None = None
    """Why training cannot go on here."""
    outdated: bool = False
    """Whether something was missed, so that the daemon has to be asked."""
    known: bool = False
    """Whether the daemon has taken it in; until then, what is said of its name is said of another."""
    _unconfirmed: RescaleSynchronising | None = None
    """What was settled before something was missed; the daemon's answer tells whether it still holds."""
    _is_new: bool = True
    """Whether no answer yet was as new as what was heard."""
    _is_doubtful: bool = False
    """Whether something was heard too early to tell whether this worker, or another before it, was meant."""
    _epoch_told: int = 0
    _pause_told: bool = False
    _settings_told: bool = False
    _attempt_told: bool = False

    @property
    def stop_wanted(self) -> int:
        """The fact for which the world has to stop behind its step, or any if it is not known; 0 for none."""
        wanted = self.paused or self.rescaling or self.committed is not None
        return max(1, self.asked_at) if wanted else 0

    def hear(self, record: Record) -> None:
        """Take a fact."""
        self.heard_at = record.id
        fact = record.fact
        match fact:
            case RescaleStarted():
                self._started(fact, record.id)
            case RescaleSynchronising() if fact.attempt == self.attempt:
                self.synchronising = fact
            case RescaleAborted() | JobWaiting():
                self.synchronising, self.moving, self.is_under_way = None, 0, False
            case RescaleCompleted():
                self._completed(fact, record.id)
            case WorkerFailed() | WorkerLeft():
                self._gone(fact)
            case WorkerDraining() if fact.worker_id == self.worker_id:
                self._drain(fact)
            case _:
                self._hear_of_job(fact, record)

    def miss(self, gap: Gap) -> None:
        """Facts cannot be had any more."""
        self.heard_at = max(self.heard_at, gap.last)
        self.outdated, self._unconfirmed = True, self.synchronising
        self._pause_told = self._settings_told = self._attempt_told = False

    def catch_up(self, joined: JoinReply) -> None:
        """Take what the daemon has told all at once."""
        is_new, self.known, self.term = self._is_new, True, joined.fence.term
        self.outdated = self._is_doubtful or joined.topology.epoch < self._epoch_told
        self._is_new, self._is_doubtful = is_new and self.outdated, False
        if not self._pause_told:
            self.paused = joined.paused
        if not self._settings_told:
            self.settings = joined.settings
        if joined.drain_reason is not None:
            self.draining = joined.drain_reason
        before = self.topology
        is_newer = joined.topology.epoch > before.epoch
        rescaling, moving = self._under_way(joined)
        self.is_under_way = joined.attempt > 0 or (self.is_under_way and self._attempt_told)
        if is_newer:
            self._hold(joined.topology, self.asked_at)
            self.rescaling = rescaling
        if joined.is_member and (is_newer or (is_new and joined.topology.epoch == before.epoch)):
            self.committed = _commit_of(joined, before, self.attempt)
        if joined.attempt > self.attempt:
            self.attempt, self.goes, self.rescaling = joined.attempt, joined.is_leaver, rescaling
        self.moving = moving
        if joined.synchronising is not None and joined.synchronising.attempt == self.attempt:
            self.synchronising = joined.synchronising
        elif self.synchronising is self._unconfirmed:
            self.synchronising = None
        self._unconfirmed = None

    def has(self, worker_id: str) -> bool:
        """Whether a worker is in the committed world."""
        return any(worker.id == worker_id for worker in self.topology.workers)

    def _under_way(self, joined: JoinReply) -> tuple[bool, int]:
        """Whether training stops for what is under way; and the attempt, if training goes on meanwhile."""
        if joined.attempt > self.attempt:
            return not joined.in_background, joined.attempt if joined.in_background else 0
        # The attempt that was heard of may have begun behind the answer. If it is over, that will be heard too.
        moving = self.moving if self._attempt_told or joined.attempt == self.moving else 0
        is_stop = joined.attempt > 0 and not joined.in_background
        return is_stop or (self.rescaling and self._attempt_told), moving

    def _hear_of_job(self, fact: Fact | UnknownFact, record: Record) -> None:
        match fact:
            case JobPaused():
                self.paused, self.asked_at, self._pause_told = True, record.id, True
            case JobResumed():
                self.paused, self._pause_told = False, True
            case JobChanged():
                self.settings, self._settings_told = fact.settings, True
            case JobCompleted() | JobAborted() | JobRemoved() if not self.known:
                # What was told until now may have been told of another job with its name.
                self._is_doubtful, self._settings_told = True, False
            case JobCompleted():
                self.completed, self.moving = fact.step, 0
            case JobAborted():
                self.moving = 0
                see = f"see `forgectl events --job {record.job}`"
                self.end = JobEnded("job_aborted", f"the job was aborted: {fact.reason}", see)
            case JobRemoved():
                self.moving = 0
                self.end = JobEnded("job_removed", "the job was removed", "create it again")
            case _:
                pass

    def _started(self, fact: RescaleStarted, fact_id: int) -> None:
        self.synchronising, self.moving = None, 0
        gone = set(fact.removed).difference(fact.leaving)
        is_wanted = self.has(self.worker_id) and self.worker_id not in gone
        if not (is_wanted or self.worker_id in fact.added or self.worker_id in fact.leaving):
            return
        self.attempt, self.goes, self._attempt_told = fact.attempt, self.worker_id in fact.leaving, True
        self.is_under_way = True
        if fact.in_background:
            self.moving = fact.attempt
            return
        self.asked_at, self.rescaling = fact_id, True
        self.lost = next((worker for worker in fact.removed if worker in gone - {self.worker_id}), self.lost)

    def _completed(self, fact: RescaleCompleted, fact_id: int) -> None:
        self._epoch_told = fact.delta.epoch
        if fact.delta.base_epoch != self.topology.epoch:
            # What is not known yet is told by the daemon's answer, which may be under way.
            self.outdated = self.known
            self.rescaling = self.rescaling and self.attempt > fact.attempt
            self.moving = self.moving if self.moving > fact.attempt else 0
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

    def _hold(self, topology: ClusterTopology, asked_at: int) -> None:
        self.topology, self.asked_at = topology, asked_at
        self.rescaling, self.lost, self.synchronising, self.moving, self.is_under_way = False, "", None, 0, False

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
    """The commit of a world that was told in an answer; its attempt is the newest that was heard of."""
    state = joined.state
    return Commit(
        attempt,
        before,
        joined.topology,
        state.current_step,
        state.current_epoch,
        state.learning_rate,
        state.global_batch_size,
        "what led to it was missed",
    )
