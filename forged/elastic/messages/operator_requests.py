"""What operators ask of the daemon: requests, and what the replies show."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from forged.auth.model import Role
from forged.elastic.model import GlobalTrainingState, WorkerStatus
from forged.elastic.phases import Phase
from forged.kernel.messages import ANY_JOB, Nothing, Request
from forged.pagination import PAGE_ENTRIES_MAX


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
    group: str = ""
    """The name of its group; empty in a job without groups."""
    group_rank: int = 0


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
    """Why the job is as it is: the stall report if anything is stalled, else the reason of its phase."""
    rescale: RescaleView | None
    stall_report: str = ""
    """What is stalled, and why; empty if nothing is."""
    group_size: int = 1
    """How many processes a group has."""


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


class ReopenJob(Request[ControlReply], frozen=True):
    """Let an aborted job accept workers again; refused for a job that is not aborted."""

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
    ReopenJob,
    RescaleJob,
    PlanRescale,
)
