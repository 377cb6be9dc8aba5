"""The messages about training metrics: signals, a fact and requests.

Invariants:
- A report carries totals since the worker's first step, so that a lost report loses nothing.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from forged.auth.model import Role
from forged.kernel.messages import Fact, Nothing, Request, Signal

NAME_CHARS_MAX = 64
"""The length of the name of a logged value."""
NAMES_MAX = 64
"""The logged values of a worker, by name."""

STACKS_CHARS_MAX = 128 << 10

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]
Values = Annotated[dict[Name, float], msgspec.Meta(max_length=NAMES_MAX)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class TimeSpent(msgspec.Struct, frozen=True):
    """The seconds of a worker since its first step, or of a job since its first world, by what they were spent on."""

    step_s: Seconds = 0.0
    """In committed steps, without what follows."""
    waiting_s: Seconds = 0.0
    """Of a worker: in collectives and meetings of committed steps. Of a job: what workers waited for slower ones."""
    aborted_s: Seconds = 0.0
    """In steps that were aborted, and repeated."""
    rescale_s: Seconds = 0.0
    """From one world to the next."""
    standstill_s: Seconds = 0.0
    """Without a world that continues, while the daemon was away."""
    checkpoint_s: Seconds = 0.0
    """Waiting for saves of checkpoints."""
    workers_s: Seconds = 0.0
    """Waiting for more workers."""
    paused_s: Seconds = 0.0
    """While an operator had paused the job."""
    script_s: Seconds = 0.0
    """In the script, between two steps."""

    @property
    def total_s(self) -> float:
        return float(sum(msgspec.structs.astuple(self)))


class TrainingReport(Signal, frozen=True):
    """What a worker has measured and its script has logged; the newest replaces earlier ones."""

    external: ClassVar[bool] = True

    job: str
    worker_id: str
    incarnation: bytes
    step: Count
    """Committed steps of the job."""
    steps: Count
    """Committed steps since the worker's first."""
    spent: TimeSpent
    samples_per_step: Count = 0
    """The global batch; 0 if the worker knows none."""
    values: Values = {}  # noqa: RUF012 - msgspec copies it
    """The newest logged value of each name."""
    logged_step: Count = 0
    """The step of the newest logged value."""

    @property
    def key(self) -> str:
        return self.worker_id


class NonFiniteLoss(Fact, frozen=True):
    """A worker has logged a NaN or an infinity, as the first one since the value of that name was finite."""

    level: ClassVar[str] = "warning"

    worker_id: str
    rank: int
    step: int
    name: str
    value: str
    """`nan`, `inf` or `-inf`."""


class ReportNonFinite(Request[Nothing], frozen=True):
    """Report the first logged value that is not finite, after finite ones or none."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    step: Count
    name: Name
    value: Annotated[str, msgspec.Meta(max_length=4)]


class WorkerMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker has reported last, and its rates of late."""

    worker_id: str
    rank: int
    step: int
    age_s: float
    """For how long nothing was reported."""
    step_time_s: float | None
    """The time of a committed step; None before two steps."""
    waiting_time_s: float | None
    """Of that, the time in collectives and meetings."""
    values: dict[str, float]
    logged_step: int
    spent: TimeSpent
    is_slowest: bool = False
    """Whether this worker takes longest apart from waiting, while others wait for it."""


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's time since its first world was spent on; the seconds add up to `wall_s`."""

    wall_s: float
    spent: TimeSpent
    unknown_s: float
    """What no worker has told about: none was left that could, or the daemon lacks what it had told before."""
    goodput: float | None
    """The share of the time in committed steps; None before the first step was reported."""


class MetricsSample(msgspec.Struct, frozen=True):
    """A job's figures at one time."""

    at: float
    step: int
    steps_per_s: float | None
    samples_per_s: float | None
    values: dict[str, float]


class TrainingView(msgspec.Struct, frozen=True, kw_only=True):
    """A job's training metrics. What the daemon does not know yet is None or empty."""

    job: str
    step: int
    steps_per_s: float | None
    samples_per_s: float | None
    values: dict[str, float]
    """Of each name the value of the lowest rank that logs it."""
    workers: list[WorkerMetrics]
    """By rank, at most `WORKERS_SHOWN_MAX`."""
    workers_left_out: int
    goodput: Goodput | None
    """None before the job's first world."""
    non_finite: list[str]
    """The names of the values that are not finite at present."""
    history: list[MetricsSample]
    """The figures of the last minutes, the oldest first."""


class ReadTraining(Request[TrainingView], frozen=True):
    """Show a job's training metrics."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str


class WorkerStacks(msgspec.Struct, frozen=True):
    """The Python stacks of all threads of a worker's process."""

    text: Annotated[str, msgspec.Meta(max_length=STACKS_CHARS_MAX)]
    """As `faulthandler` writes them, the current frame first; empty if they could not be had."""
    reason: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    """Why they could not be had, or not all of them; empty otherwise."""


class ReadStacks(Request[WorkerStacks], frozen=True):
    """Show the Python stacks of a worker's process, also while it hangs in C code with the GIL held."""

    decides: ClassVar[bool] = False

    job: str
    worker_id: str


class JobMetrics(Signal, frozen=True):
    """A job's figures, for plugins; at most one a second, the newest replaces earlier ones."""

    job: str
    at: float
    step: int
    values: dict[str, float]
    steps_per_s: float | None
    samples_per_s: float | None
    goodput: float | None


REQUESTS = (ReportNonFinite, ReadTraining, ReadStacks)
