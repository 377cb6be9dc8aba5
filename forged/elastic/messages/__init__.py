"""The messages of elastic training: facts, requests and signals.

Invariants:
- A worker is named by its id and speaks with its incarnation; another process under the same id is another worker.
- A message about one attempt carries the attempt's number.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

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
    """A lost worker has reconnected, as the same process; it keeps its rank."""

    worker_id: str
    after_s: float


class WorkerLeft(Fact, frozen=True):
    """A worker has left in good order."""

    worker_id: str
    reason: str


class WorkerFailed(Fact, frozen=True):
    """A worker is dead, or counts as dead; the reason is the evidence."""

    level: ClassVar[str] = "warning"

    worker_id: str
    rank: int
    reason: str


class WorkerDraining(Fact, frozen=True):
    """A worker drains: it leaves once a world without it is committed."""

    worker_id: str
    reason: str


class WorkerStalled(Fact, frozen=True):
    """A worker's process lives and makes no progress."""

    level: ClassVar[str] = "warning"

    worker_id: str
    step: int
    for_s: float


class WorkerRecovered(Fact, frozen=True):
    """A stalled worker makes progress again."""

    worker_id: str
    step: int


class WorkerLost(Fact, frozen=True):
    """A worker's connection is gone, and nothing says yet that it has died.

    `grace_s` is its reconnect grace; None while its pulse lives, which keeps its rank for it.
    """

    worker_id: str
    reason: str
    grace_s: float | None


class RescaleStarted(Fact, frozen=True):
    """An attempt at the next world has started: its members stop after their step and report.

    If `in_background`, training continues until all members hold their training data.
    """

    attempt: int
    type: RescaleType
    world_size: int
    added: list[str]
    removed: list[str]
    reason: str
    in_background: bool = False
    draining: list[str] = []  # noqa: RUF012 - msgspec copies it
    """The removed workers that are present, and take part until the new world is committed."""


class RescaleSynchronising(Fact, frozen=True):
    """All members have stopped; joiners and laggards take the state from the source."""

    attempt: int
    source: WorkerId
    step: int
    behind: int


class ProgressLost(Fact, frozen=True):
    """The next world starts after `step`; so many committed steps after that are lost and must be repeated."""

    level: ClassVar[str] = "warning"

    steps: int
    step: int
    reason: str


class RescaleCompleted(Fact, frozen=True):
    """A new world is committed; `delta` leads to it from the previous topology.

    If the members did not stop for it, they switch after their current step, which the daemon does not know: `step` and
    `epoch` are None. A rate of None and a batch of 0 mean that the world takes those of its state source.
    """

    attempt: int
    type: RescaleType
    delta: TopologyDelta
    step: int | None
    epoch: int | None
    learning_rate: float | None
    global_batch_size: int
    added: list[str]
    removed: list[str]
    reason: str
    took_s: float


class RescaleAborted(Fact, frozen=True):
    """An attempt was given up; another one follows, or the job waits."""

    attempt: int
    reason: str


class JobWaiting(Fact, frozen=True):
    """There are too few workers; the job continues when there are enough."""

    level: ClassVar[str] = "warning"

    workers: int
    needed: int


class JobPaused(Fact, frozen=True):
    """Training pauses after the current step."""

    reason: str


class JobResumed(Fact, frozen=True):
    """Training continues."""

    reason: str


class JobCompleted(Fact, frozen=True):
    """Training is complete."""

    step: int


class JobAborted(Fact, frozen=True):
    """Training was aborted after this step; its workers end."""

    level: ClassVar[str] = "error"

    reason: str
    step: int


# Requests of workers.


class JoinReply(msgspec.Struct, frozen=True):
    """The state of the job for a worker that registers; `attempt` is the current one if it is a member, else 0."""

    generation: int
    fence: Fence
    phase: Phase
    paused: bool
    attempt: int
    peer_key: bytes
    """The secret by which the workers of the job recognise each other."""
    topology: ClusterTopology
    state: GlobalTrainingState
    settings: dict[str, SettingValue]
    is_member: bool = False
    """Whether this incarnation is in the committed world."""
    drain_reason: str | None = None
    """Why it drains; None if it does not."""
    synchronising: RescaleSynchronising | None = None
    """The state source of the attempt, once it is chosen."""
    in_background: bool = False
    """Whether training continues during the attempt."""
    is_draining: bool = False
    """Whether the attempt's world is without this worker, which takes part until the commit."""
    learning_rate: float | None = None
    """The rate that the newest commit has set; None if it has set none."""


class JoinJob(Request[JoinReply], frozen=True):
    """Register as a worker of a job; the same incarnation may repeat it. The first worker creates the job.

    `settings` must be those that the job has, or was created with. With `rejoin` a registered worker asks for what it
    has missed, and its settings are not compared; it is refused if it has failed or left.
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
    """What all workers of the job must agree on; None if the worker does not declare any."""


class LeaveReply(msgspec.Struct, frozen=True):
    """Whether a draining worker may leave."""

    may_leave: bool
    """False while it is in the committed world and a next world that has its state and data can still form."""


class LeaveJob(Request[LeaveReply], frozen=True):
    """Leave: in good order, because training is `done`, or because the worker `failed`. Unknown workers: no error.

    With `if_permitted` the worker stays if the reply is no.
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
    """Report that the worker has stopped for an attempt, after so many committed steps.

    `finished` says that it has also done the next step, and does not know whether all members have. `holds_state` is
    false for a worker without a state.
    """

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = True

    job: str
    worker_id: str
    incarnation: bytes
    attempt: int
    step: int
    epoch: int = 0
    learning_rate: float | None = None
    global_batch_size: int = 0
    holds_state: bool = True
    finished: bool = False


class ReportReady(Request[Nothing], frozen=True):
    """Report that the worker has the source's state and the training data that it needs."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    attempt: int


class ReportUnreachablePeer(Request[Nothing], frozen=True):
    """Report that the worker cannot continue with its world, because it cannot reach `peer` if one is named, or because
    a member's script has voided the step."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    generation: int
    peer: str = ""
    reason: str = ""
    step_voided: bool = False


class ReportDeath(Request[Nothing], frozen=True):
    """Report, by a worker's pulse, that the worker's process has ended."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    reason: str = ""


class AnnounceLeave(Request[LeaveReply], frozen=True):
    """Drain this worker: form a world without it that has all its state and data."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    reason: str = ""


class ReadLeave(Request[LeaveReply], frozen=True):
    """Tell whether a draining worker may leave by now."""

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = False

    job: str
    worker_id: str
    incarnation: bytes


class AttemptMembers(msgspec.Struct, frozen=True):
    """The members of an attempt that hold training data: of the intended world by rank, and the draining ones.

    If no such member stays, the draining ones are also the target.
    """

    attempt: int
    target: tuple[WorkerId, ...]
    draining: tuple[WorkerId, ...]
    settings: dict[str, SettingValue]
    in_background: bool = False
    """Whether the previous world trains on meanwhile."""
    generation: int = 0
    """The generation of the previous world."""
    has_room: bool = True
    """Whether the intended world could have more members."""
    waiting: int = 0
    """How many connected joiners are not in the attempt."""
    started_id: int = 0
    """The id of the attempt's `RescaleStarted`."""
    joined_id: int = 0
    """The id of the asking worker's `WorkerJoined`; 0 if an earlier run of the daemon published it."""


class ReadAttempt(Request[AttemptMembers], frozen=True):
    """Show the members of the current attempt to one of them."""

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = False

    job: str
    worker_id: str
    incarnation: bytes


class ReadTopology(Request[ClusterTopology], frozen=True):
    """Show the committed world."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str


# Signals of workers.


class Heartbeat(Signal, frozen=True):
    """A worker's library is alive: its committed steps, its last collective, and the interval of heartbeats."""

    external: ClassVar[bool] = True

    job: str
    worker_id: str
    incarnation: bytes
    step: int = 0
    collective_seq: int = 0
    interval_s: float = 0.0
    last_step_done: bool = False
    """Whether a draining worker trains no more and only finishes what it does before it leaves."""

    @property
    def key(self) -> str:
        return self.worker_id


class AttemptProgress(Signal, frozen=True):
    """A member of an attempt receives state or training data, or waits for other members."""

    external: ClassVar[bool] = True

    job: str
    worker_id: str
    incarnation: bytes
    attempt: int
    state_bytes: int
    shards: int = 0
    """How many shards it has completely received."""
    data_bytes: int = 0
    """How many bytes of training data it has received."""
    is_waiting: bool = False
    """Whether it waits for other members."""
    problem: str = ""
    """Its problem; empty without one."""
    unreachable_peer: str = ""
    """The peer that it cannot reach; empty without one."""
    store_failing_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """For how long its shard store has failed while it had a plan, in this attempt and earlier ones; 0 if it works."""

    @property
    def key(self) -> str:
        return self.worker_id


class Pulse(Signal, frozen=True):
    """A worker's process is alive: CPU seconds used, committed steps, last collective, interval of pulses."""

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


# Requests of operators.


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as operators see it."""

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
    """Some workers; `more` says that further ones follow."""

    workers: list[WorkerView]
    more: bool


class RescaleView(msgspec.Struct, frozen=True, kw_only=True):
    """The attempt that is under way."""

    attempt: int
    stage: str
    for_s: float
    waiting_for: list[str]
    added: list[str]
    removed: list[str]
    reason: str


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """A job's training as operators see it. `world_size` counts the registered members of the committed world."""

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
    """What is stalled, and why; empty if nothing is."""


class ClusterPage(msgspec.Struct, frozen=True):
    """Some jobs' training; `more` says that further ones follow."""

    clusters: list[ClusterView]
    more: bool


class ListClusters(Request[ClusterPage], frozen=True):
    """List the training of all jobs that workers have joined and the caller may see, after the name `after`."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    after: str = ""
    limit: int = PAGE_ENTRIES_MAX


class ListWorkers(Request[WorkerPage], frozen=True):
    """List the workers of a job by id, after the id `after`."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str
    after: str = ""
    limit: int = 500


class ShowWorker(Request[WorkerView], frozen=True):
    """Show one worker."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str
    worker_id: str


class ShowCluster(Request[ClusterView], frozen=True):
    """Show a job's training."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str


class DrainReply(msgspec.Struct, frozen=True):
    """Consequences of a drain that the operator may not expect."""

    remarks: list[str] = []


class DrainWorker(Request[DrainReply], frozen=True):
    """Drain a worker: it finishes its step and leaves once a world without it is committed."""

    job: str
    worker_id: str
    reason: str = "requested by an operator"


class EvictWorker(Request[Nothing], frozen=True):
    """Treat a worker as failed."""

    job: str
    worker_id: str
    reason: str = "requested by an operator"


class ControlReply(msgspec.Struct, frozen=True):
    """Whether the request has `changed` anything, else the `reason` that held already; and the job's stall report."""

    changed: bool = True
    reason: str = ""
    stall_report: str = ""


class PauseJob(Request[ControlReply], frozen=True):
    """Pause training after the current step."""

    job: str
    reason: str = "requested by an operator"


class ResumeJob(Request[ControlReply], frozen=True):
    """Resume training."""

    job: str
    reason: str = "requested by an operator"


class AbortJob(Request[ControlReply], frozen=True):
    """Abort training; its workers end."""

    job: str
    reason: str = "requested by an operator"


class RescaleJob(Request[ControlReply], frozen=True):
    """Start a rescale now, with all connected workers; if `synchronous`, all stop for it in either mode."""

    job: str
    reason: str = "requested by an operator"
    synchronous: bool = False


class PlannedWorker(msgspec.Struct, frozen=True):
    """A worker with its rank before and after the plan; -1 for none."""

    id: str
    rank: int
    new_rank: int


class RescalePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a rescale to so many workers would do.

    `world_size` counts the registered members of the committed world, `gone` names the rest of it, and `missing` is how
    many workers must still be started.
    """

    world_size: int
    new_world_size: int
    workers: list[PlannedWorker]
    ranks_changed: int
    """How many workers of both worlds get another rank."""
    learning_rate: float | None
    """None if only the workers know it."""
    new_learning_rate: float | None
    global_batch_size: int
    new_global_batch_size: int
    remarks: list[str]
    gone: list[str] = []
    missing: int = 0


class PlanRescale(Request[RescalePlan], frozen=True):
    """Tell what a rescale to so many workers would do, without doing it."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str
    workers: int


WORKER_REQUESTS = (
    JoinJob,
    LeaveJob,
    ReportStopped,
    ReportReady,
    ReportUnreachablePeer,
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
