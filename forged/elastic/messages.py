"""What is said about elastic training: by the daemon (facts), to it (requests, signals).

Law: a worker is named by its id, and speaks for itself only with the incarnation that it drew when it started: another
process under the same id is another worker. What concerns one attempt at a rescale carries the attempt's number.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from forged.auth.model import Role
from forged.elastic.compatibility import SharedConfig
from forged.elastic.model import (
    ClusterTopology,
    GlobalTrainingState,
    RescaleType,
    TopologyDelta,
    WorkerId,
    WorkerStatus,
)
from forged.elastic.phases import Phase
from forged.jobs.model import SettingValue
from forged.kernel.messages import ANY_JOB, Fact, Fence, Nothing, Request, Signal
from forged.pagination import PAGE_ENTRIES_MAX

INCARNATION_BYTES = 16


# Facts.


class WorkerJoined(Fact, frozen=True):
    """A worker has registered and waits for its rank."""

    worker: WorkerId


class WorkerReturned(Fact, frozen=True):
    """A worker whose connection was lost is back, the same process; its rank is its own still."""

    worker_id: str
    after_s: float


class WorkerLeft(Fact, frozen=True):
    """A worker has gone in good order, or was told to."""

    worker_id: str
    reason: str


class WorkerFailed(Fact, frozen=True):
    """A worker is dead, or counts as dead; the reason is the evidence."""

    level: ClassVar[str] = "warning"

    worker_id: str
    rank: int
    reason: str


class WorkerDraining(Fact, frozen=True):
    """A worker is to finish its step and go."""

    worker_id: str
    reason: str


class WorkerStalled(Fact, frozen=True):
    """A worker lives and makes no progress."""

    level: ClassVar[str] = "warning"

    worker_id: str
    step: int
    for_s: float


class WorkerRecovered(Fact, frozen=True):
    """A worker that was stalled makes progress again."""

    worker_id: str
    step: int


class WorkerLost(Fact, frozen=True):
    """A worker's connection is gone, and nothing says yet that it died; it has its grace to come back.

    `grace_s` is None where its pulse lives, which holds its place for it as long as it does.
    """

    worker_id: str
    reason: str
    grace_s: float | None


class RescaleStarted(Fact, frozen=True):
    """A new world is to be agreed on: its members stop behind their step and say how far they are.

    `in_background`, nobody stops: training goes on until all hold the training data that they will have.
    """

    attempt: int
    type: RescaleType
    world_size: int
    added: list[str]
    removed: list[str]
    reason: str
    in_background: bool = False
    leaving: list[str] = []  # noqa: RUF012 - msgspec copies it
    """Who of those removed is there, and takes part until the new world holds."""


class RescaleSynchronising(Fact, frozen=True):
    """All members have stopped; those who are behind the step, or new, take the state from the source."""

    attempt: int
    source: WorkerId
    step: int
    behind: int


class ProgressLost(Fact, frozen=True):
    """The next world begins behind `step`; so many steps beyond it were committed, and are to be done again."""

    level: ClassVar[str] = "warning"

    steps: int
    step: int
    reason: str


class RescaleCompleted(Fact, frozen=True):
    """The new world holds, and goes on behind the step. `delta` leads to it from the one before.

    Where nobody has stopped for it, everybody goes over behind the step that it is in, which the daemon does not know:
    there is no step and no epoch then. A rate or a batch of 0 is whatever the workers have.
    """

    attempt: int
    type: RescaleType
    delta: TopologyDelta
    step: int | None
    epoch: int | None
    learning_rate: float
    global_batch_size: int
    added: list[str]
    removed: list[str]
    reason: str
    took_s: float


class RescaleAborted(Fact, frozen=True):
    """An attempt was given up; another follows, or the job waits."""

    attempt: int
    reason: str


class JobWaiting(Fact, frozen=True):
    """Too few workers are left; the job goes on when there are enough."""

    level: ClassVar[str] = "warning"

    workers: int
    needed: int


class JobPaused(Fact, frozen=True):
    """Training is to rest behind its step."""

    reason: str


class JobResumed(Fact, frozen=True):
    """Training goes on."""

    reason: str


class JobCompleted(Fact, frozen=True):
    """Training is done."""

    step: int


class JobAborted(Fact, frozen=True):
    """Training was given up behind this step; its workers end."""

    level: ClassVar[str] = "error"

    reason: str
    step: int


# Requests of workers.


class JoinReply(msgspec.Struct, frozen=True):
    """What a worker has to know: where the job is. `attempt` is the one under way that it is in, 0 without one."""

    generation: int
    fence: Fence
    phase: Phase
    paused: bool
    attempt: int
    peer_key: bytes
    """With which the workers of the job tell each other from strangers."""
    topology: ClusterTopology
    state: GlobalTrainingState
    settings: dict[str, SettingValue]
    is_member: bool = False
    """Whether this very worker is in the committed world."""
    drain_reason: str | None = None
    """Why it is to go; None while it may stay."""
    synchronising: RescaleSynchronising | None = None
    """What was settled in the attempt, once it was."""
    in_background: bool = False
    """Whether nobody stops for the attempt."""
    is_leaver: bool = False
    """Whether the attempt is at a world without this worker, which takes part because it is there."""


class JoinJob(Request[JoinReply], frozen=True):
    """Register as a worker of a job; the same incarnation may do so again. The first one creates the job.

    `settings`, if given, are those that the job has to have, or was created with. Who comes `rejoin` has registered
    before and wants to know what it has missed, whatever the settings are by now; it is refused if it counts as dead.
    """

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker: WorkerId
    incarnation: bytes
    pid: int = 0
    local_world_size: int = 1
    attributes: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it
    settings: dict[str, SettingValue] | None = None
    rejoin: bool = False
    with_data: bool = False
    """Whether it holds training data."""
    shared_config: SharedConfig | None = None
    """What all workers of the job have to have in common; None: it does not say."""


class LeaveReply(msgspec.Struct, frozen=True):
    """Whether a worker that is to go may do so."""

    may_leave: bool
    """False while it is in the committed world and others can form the next one, which has all that it has."""


class LeaveJob(Request[LeaveReply], frozen=True):
    """Go: in good order, because the training is `done`, or because the worker `failed`. Unknown workers: no error.

    Who goes only `if_permitted` stays where it is when the answer is no.
    """

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    reason: str = ""
    done: bool = False
    failed: bool = False
    step: int = 0
    if_permitted: bool = False


class ReportStopped(Request[Nothing], frozen=True):
    """The worker has stopped for an attempt, with so many steps committed.

    `finished` tells that it has done the next one too, and does not know whether all have. `holds_state` is false for
    who has no state yet.
    """

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = True

    job: str
    worker_id: str
    incarnation: bytes
    attempt: int
    step: int
    epoch: int = 0
    learning_rate: float = 0.0
    global_batch_size: int = 0
    holds_state: bool = True
    finished: bool = False


class ReportReady(Request[Nothing], frozen=True):
    """The worker has the state of the attempt's source, and the training data that it will have."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    attempt: int


class ReportTrouble(Request[Nothing], frozen=True):
    """The worker cannot go on with its world, because it does not reach a peer (if one is named)."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    generation: int
    peer: str = ""
    reason: str = ""


class ReportDeath(Request[Nothing], frozen=True):
    """The pulse of a worker says that the worker's process has ended."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    reason: str = ""


class AnnounceLeave(Request[LeaveReply], frozen=True):
    """A worker is to go: others form a world without it, in which all is that it has."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    reason: str = ""


class ReadLeave(Request[LeaveReply], frozen=True):
    """Whether a worker that has announced its leave may go by now."""

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = False

    job: str
    worker_id: str
    incarnation: bytes


class AttemptMembers(msgspec.Struct, frozen=True):
    """Who holds training data in an attempt: the world that is wanted, by rank, and who is to go behind its commit.

    Where nobody would stay, those who are to go are the world as well.
    """

    attempt: int
    target: tuple[WorkerId, ...]
    leaving: tuple[WorkerId, ...]
    settings: dict[str, SettingValue]
    in_background: bool = False
    """Whether the world before trains on meanwhile."""
    generation: int = 0
    """Of the world before."""
    has_room: bool = True
    """Whether the wanted world could have more members."""
    waiting: int = 0
    """How many workers wait that are not in the attempt."""
    started_id: int = 0
    """The id of the fact that the attempt was begun."""
    joined_id: int = 0
    """That of the fact that the worker which asks has joined; 0 where that was another daemon's."""


class ReadAttempt(Request[AttemptMembers], frozen=True):
    """Who is in the attempt that is under way, for a worker that is in it."""

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = False

    job: str
    worker_id: str
    incarnation: bytes


class ReadTopology(Request[ClusterTopology], frozen=True):
    """The world that was committed last."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str


# Signals of workers.


class Heartbeat(Signal, frozen=True):
    """A worker lives, has committed so many steps, and has come so often to where workers meet; said so often."""

    external: ClassVar[bool] = True

    job: str
    worker_id: str
    incarnation: bytes
    step: int = 0
    collective_seq: int = 0
    interval_s: float = 0.0
    last_step_done: bool = False
    """Whether it has done its last step, and does by itself what remains to be done before it goes."""

    @property
    def key(self) -> str:
        return self.worker_id


class AttemptProgress(Signal, frozen=True):
    """A member of an attempt is sent what it needs, or waits for others. So many bytes of the state have come."""

    external: ClassVar[bool] = True

    job: str
    worker_id: str
    incarnation: bytes
    attempt: int
    state_bytes: int
    shards: int = 0
    """How many pieces of training data are whole."""
    data_bytes: int = 0
    """How many bytes of training data have come."""
    is_waiting: bool = False
    """Whether it waits for others, or gets on with what may last."""
    trouble: str = ""
    """Why it does not get on; empty where nothing is the matter."""
    unreachable_peer: str = ""
    """Whom it does not reach; empty where it need not, or does."""

    @property
    def key(self) -> str:
        """Each worker has its own."""
        return self.worker_id


class Pulse(Signal, frozen=True):
    """The process of a worker lives, whatever its library does: CPU seconds used, steps made; said so often."""

    external: ClassVar[bool] = True

    job: str
    worker_id: str
    incarnation: bytes
    cpu_s: float = 0.0
    step: int = 0
    collective_seq: int = 0
    interval_s: float = 0.0

    @property
    def key(self) -> str:
        return self.worker_id


# Requests of people.


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as it is shown."""

    id: str
    rank: int
    status: WorkerStatus
    job: str
    generation: int
    step: int
    last_heartbeat_age_s: float | None
    address: str
    host: str
    pid: int
    connected: bool
    stalled: bool
    cpu_s: float | None
    joined_at: float
    local_world_size: int
    attributes: dict[str, str]


class WorkerPage(msgspec.Struct, frozen=True):
    """Some workers; `more` tells that there are others behind the last of them."""

    workers: list[WorkerView]
    more: bool


class RescaleView(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt at a rescale that is under way."""

    attempt: int
    stage: str
    for_s: float
    waiting_for: list[str]
    added: list[str]
    removed: list[str]
    reason: str


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """A job's training as it is shown. `world_size` is how many of the committed world are there."""

    job: str
    phase: Phase
    paused: bool
    generation: int
    world_size: int
    joining: int
    state: GlobalTrainingState
    failures: int
    reason: str
    rescale: RescaleView | None
    stall_report: str = ""
    """What stands still, and why; empty where nothing does."""


class ClusterPage(msgspec.Struct, frozen=True):
    """Some jobs' training; `more` tells that there are others behind the last of them."""

    clusters: list[ClusterView]
    more: bool


class ListClusters(Request[ClusterPage], frozen=True):
    """Where the training of all jobs is that a worker has joined and the caller may see, behind the name `after`."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    after: str = ""
    limit: int = PAGE_ENTRIES_MAX


class ListWorkers(Request[WorkerPage], frozen=True):
    """The workers of a job by id, behind the id `after`."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str
    after: str = ""
    limit: int = 500


class ShowWorker(Request[WorkerView], frozen=True):
    """One worker."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str
    worker_id: str


class ShowCluster(Request[ClusterView], frozen=True):
    """Where a job's training is."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str


class DrainReply(msgspec.Struct, frozen=True):
    """What will come of it that a worker is to go, where that may not be what was wanted."""

    remarks: list[str] = []


class DrainWorker(Request[DrainReply], frozen=True):
    """Have a worker finish its step and go."""

    job: str
    worker_id: str
    reason: str = "requested by an operator"


class EvictWorker(Request[Nothing], frozen=True):
    """Count a worker as dead."""

    job: str
    worker_id: str
    reason: str = "requested by an operator"


class ControlReply(msgspec.Struct, frozen=True):
    """What came of it that somebody steered a job's training: whether anything `changed`, or else for which `reason` it
    was so already; and what stands still now."""

    changed: bool = True
    reason: str = ""
    stall_report: str = ""


class PauseJob(Request[ControlReply], frozen=True):
    """Let training rest behind its step."""

    job: str
    reason: str = "requested by an operator"


class ResumeJob(Request[ControlReply], frozen=True):
    """Let training go on."""

    job: str
    reason: str = "requested by an operator"


class AbortJob(Request[ControlReply], frozen=True):
    """Give training up; its workers end."""

    job: str
    reason: str = "requested by an operator"


class RescaleJob(Request[ControlReply], frozen=True):
    """Start a rescale now, with whoever is there. Where it `stops`, nobody trains until it is done."""

    job: str
    reason: str = "requested by an operator"
    synchronous: bool = False


class PlannedWorker(msgspec.Struct, frozen=True):
    """Who would have which rank; -1 for none."""

    id: str
    rank: int
    new_rank: int


class RescalePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a rescale to so many workers would do. `world_size` is how many of the committed world are there, `gone` is
    who of it is not, and `missing` how many have yet to be started."""

    world_size: int
    new_world_size: int
    workers: list[PlannedWorker]
    moves: int
    learning_rate: float
    new_learning_rate: float
    global_batch_size: int
    new_global_batch_size: int
    remarks: list[str]
    gone: list[str] = []
    missing: int = 0


class PlanRescale(Request[RescalePlan], frozen=True):
    """Say what a rescale to so many workers would do, and do nothing."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str
    workers: int


WORKER_REQUESTS = (
    JoinJob,
    LeaveJob,
    ReportStopped,
    ReportReady,
    ReportTrouble,
    ReportDeath,
    ReadTopology,
    AnnounceLeave,
    ReadLeave,
    ReadAttempt,
)
OPERATOR_REQUESTS = (
    ListWorkers,
    ShowWorker,
    ShowCluster,
    ListClusters,
    DrainWorker,
    EvictWorker,
    PauseJob,
    ResumeJob,
    AbortJob,
    RescaleJob,
    PlanRescale,
)
REQUESTS = (*WORKER_REQUESTS, *OPERATOR_REQUESTS)
