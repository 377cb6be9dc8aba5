"""What workers ask of the daemon: requests and their replies."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from forged.auth.model import Role
from forged.elastic.compatibility import SharedConfig
from forged.elastic.messages.facts import RescaleSynchronising
from forged.elastic.model import ClusterTopology, GlobalTrainingState, WorkerId
from forged.elastic.phases import Phase
from forged.jobs.model import SettingValue
from forged.kernel.messages import Fence, Nothing, Request

INCARNATION_BYTES = 16


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
    group: str = ""
    """The name of the worker's group, whose processes train one replica of the model; empty for a group of one."""
    group_rank: int = 0
    group_size: int = 1
    """How many processes a group has; the same for all workers of the job."""


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
    is_stale: bool = False
    """Whether the job has gone on without the worker's group, so that its state is of use to no other worker."""


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


class ReportStandstill(Request[Nothing], frozen=True):
    """Report that the worker has stood still: it had lost its world, and `peer` if one is named, and had no connection
    to the daemon. Recorded for the worker itself; it is no evidence about `peer`.
    """

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    generation: int
    for_s: float
    peer: str = ""


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


class ConfirmWorker(Request[Nothing], frozen=True):
    """Confirm that the sender is the registered worker of this name, by its incarnation; refused if it is not."""

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


WORKER_REQUESTS = (
    JoinJob,
    LeaveJob,
    ReportStopped,
    ReportReady,
    ReportUnreachablePeer,
    ReportStandstill,
    ReportDeath,
    ReadTopology,
    AnnounceLeave,
    ReadLeave,
    ReadAttempt,
    ConfirmWorker,
)
