"""The facts of elastic training."""

from __future__ import annotations

from typing import ClassVar

from forged.elastic.model import RescaleType, TopologyDelta, WorkerId
from forged.kernel.messages import Fact


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


class GroupBroken(Fact, frozen=True):
    """A group of the world has lost a worker: the next world has the group only if it is whole again by then.

    `waiting` are its other workers. They wait until another process takes the place of the lost one, or end.
    """

    level: ClassVar[str] = "warning"

    group: str
    worker_id: str
    waiting: list[str]


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


class WorkerStoodStill(Fact, frozen=True):
    """A worker has stood still: the world of `lost_generation` was over, and it had no connection to the daemon.

    By its own word. `peer` is the worker that it had lost; empty if none was, or if it is unknown which.
    """

    level: ClassVar[str] = "warning"

    worker_id: str
    lost_generation: int
    peer: str
    for_s: float


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


class RescaleSynchronising(Fact, frozen=True, omit_defaults=True):
    """All members have stopped; joiners and laggards take the state from the source."""

    attempt: int
    source: WorkerId
    step: int
    behind: int
    sources: list[WorkerId] = []  # noqa: RUF012 - msgspec copies it
    """The source of each group rank; `source` is the first. Empty in a job without groups."""

    def source_for(self, group_rank: int) -> WorkerId:
        """The worker from which a member with this group rank takes the state."""
        return self.sources[group_rank] if self.sources else self.source


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


class JobReopened(Fact, frozen=True):
    """An aborted job accepts workers again; its last world had committed `step`."""

    reason: str
    step: int
