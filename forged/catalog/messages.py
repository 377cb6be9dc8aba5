"""Facts and requests of the checkpoint catalogue.

Invariants:
- A checkpoint is identified by its storage path and save id; the catalogue gives it an id besides.
- What a worker says in its own name carries its incarnation.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from forged.auth.model import Role
from forged.catalog.model import CheckpointMeta, CheckpointState, CheckpointType
from forged.kernel.messages import Fact, Nothing, Request, Signal
from forged.pagination import PAGE_ENTRIES_MAX

# Facts. All of them are about one job.


class CheckpointStarted(Fact, frozen=True):
    """A checkpoint is being written."""

    checkpoint_id: str
    epoch: int
    step: int
    checkpoint_type: CheckpointType
    storage_path: str
    parent_id: str | None = None
    worker_id: str = ""
    """The worker that reported it; empty if the daemon writes it."""
    reason: str = ""
    """Why it is saved now: the cadence's reason, or the script's call."""


class CheckpointCompleted(Fact, frozen=True):
    """All of a checkpoint is durable."""

    checkpoint_id: str
    step: int
    size_bytes: int
    seconds: float
    """From its start until it was durable."""
    parent_id: str | None = None
    """The checkpoint that it builds on; None for a full one."""


class CheckpointFailed(Fact, frozen=True):
    """A checkpoint could not be saved, or its writer is gone."""

    level: ClassVar[str] = "warning"

    checkpoint_id: str
    step: int
    reason: str


class CheckpointCorrupted(Fact, frozen=True):
    """A checkpoint that was complete has missing or damaged bytes."""

    level: ClassVar[str] = "error"

    checkpoint_id: str
    step: int
    reason: str


class CheckpointRepaired(Fact, frozen=True):
    """A corrupted checkpoint has been repaired, or verified as correct."""

    checkpoint_id: str
    step: int


class CheckpointCollected(Fact, frozen=True):
    """The retention policy, or an operator, has deleted a checkpoint; its files follow."""

    checkpoint_id: str
    step: int
    size_bytes: int
    rule: str
    reason: str


class CheckpointCompacted(Fact, frozen=True):
    """An incremental checkpoint has become a full one."""

    checkpoint_id: str
    step: int
    size_bytes: int


class CheckpointParentFound(Fact, frozen=True):
    """An adoption has told which checkpoint a known one builds on."""

    checkpoint_id: str
    step: int
    parent_id: str


class CheckpointOperationFailed(Fact, frozen=True):
    """The daemon has given up something that it did with a checkpoint: compacting, deleting, saving from memory."""

    level: ClassVar[str] = "warning"

    checkpoint_id: str
    step: int
    operation: str
    reason: str


class CheckpointsAbandoned(Fact, frozen=True):
    """Training has gone back to an older step: what was saved beyond it is no longer offered."""

    level: ClassVar[str] = "warning"

    step: int
    """The step that training continues from."""
    count: int
    checkpoint_id: str = ""
    """The checkpoint that was restored, if there was one."""


class CheckpointReinstated(Fact, frozen=True):
    """An operator has taken back that a checkpoint is abandoned: it is offered again."""

    checkpoint_id: str
    step: int
    reason: str


class CheckpointRestored(Fact, frozen=True):
    """A job continues from a checkpoint."""

    checkpoint_id: str
    step: int
    seconds: float
    size_bytes: int
    skipped: list[str] = []  # noqa: RUF012 - msgspec copies it
    """The better restore points that could not be read, with reasons."""


class CheckpointsAdopted(Fact, frozen=True):
    """An operator has added existing checkpoints to the catalogue."""

    count: int
    folder: str


class EmergencyCheckpointSaved(Fact, frozen=True):
    """The last complete step of a failed worker has been saved from its host's memory."""

    level: ClassVar[str] = "warning"

    checkpoint_id: str
    step: int
    worker_id: str
    size_bytes: int
    seconds: float
    """From the failure until the checkpoint was durable."""


class EmergencyCheckpointFailed(Fact, frozen=True):
    """What the job of a failed worker has staged last is not saved from its host's memory. It is told once per save."""

    level: ClassVar[str] = "error"

    step: int
    worker_id: str
    reason: str


# Values in replies.


class RestoreEstimate(msgspec.Struct, frozen=True):
    """How long a restore takes, from measured bandwidth."""

    low_s: float
    expected_s: float
    high_s: float
    source: str
    """Where the figures come from, in words: so many restores, or an assumed bandwidth."""


class RestorePoint(msgspec.Struct, frozen=True):
    """A checkpoint that a job can be restored from."""

    meta: CheckpointMeta
    chain: list[str]
    """From its root to itself."""
    estimate: RestoreEstimate
    lost_steps: int
    """Steps that the job has committed since; 0 if the job is unknown."""
    lost_s: float
    reason: str
    """Why this one is offered at this place of the order, in words."""


class ExcludedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that is not offered, and why: corrupted, abandoned, being written, its chain is broken."""

    checkpoint_id: str
    step: int
    storage_path: str
    reason: str
    state: CheckpointState
    abandoned: bool


class RestorePoints(msgspec.Struct, frozen=True):
    """What a job can be restored from, the best first; and the checkpoints that are not offered, with reasons.

    The excluded ones are the newest 500 at most, and deleted ones that are not forgotten after them.
    """

    points: list[RestorePoint]
    excluded: list[ExcludedCheckpoint]


class CheckpointPage(msgspec.Struct, frozen=True):
    """Some checkpoints of a job, newest first; `more` says that further ones follow."""

    checkpoints: list[CheckpointMeta]
    more: bool
    count: int
    """Of all checkpoints of the job."""
    size_bytes: int
    cadence: str = ""
    """When the job saves and why, as its workers have last reported; empty if they have not."""


class CheckpointOperation(msgspec.Struct, frozen=True):
    """What the daemon does with a checkpoint at present, and how far it is."""

    operation: str
    done_bytes: int
    total_bytes: int


class CheckpointView(msgspec.Struct, frozen=True):
    """One checkpoint with what depends on it and what it depends on."""

    meta: CheckpointMeta
    chain: list[str]
    children: list[str]
    is_restorable: bool
    is_managed: bool
    """Whether the daemon may read and delete its files."""
    is_kept: bool
    retention: str
    """Why it is kept or goes, in words."""
    estimate: RestoreEstimate | None = None
    operation: CheckpointOperation | None = None


class RetentionVerdict(msgspec.Struct, frozen=True):
    """What a collection does with one checkpoint, and why."""

    checkpoint_id: str
    step: int
    is_kept: bool
    rule: str
    reason: str
    size_bytes: int


class RetentionPage(msgspec.Struct, frozen=True):
    """What a collection would do with some checkpoints of a job, newest first."""

    verdicts: list[RetentionVerdict]
    more: bool
    regained_bytes: int
    """Of the whole job."""


class Collection(msgspec.Struct, frozen=True):
    """What was collected, at most 500 checkpoints."""

    collected: list[RetentionVerdict]
    regained_bytes: int
    more: bool = False
    """Whether more may have to go."""


class AdoptedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that exists, as its manifest describes it."""

    storage_path: str
    save_id: str
    epoch: int
    step: int
    size_bytes: int
    created_at: float
    parent_path: str = ""
    """The storage path of the checkpoint that it builds on; empty for a full one."""
    metrics: dict[str, float] = {}
    job: str = ""
    """The job that its manifest names; empty if it names none."""


class Adoption(msgspec.Struct, frozen=True):
    """Which checkpoints were added; those known before, and those refused with their reasons."""

    adopted: list[str]
    known: list[str]
    refused: list[str]


class CompletedCheckpoint(msgspec.Struct, frozen=True):
    """The record of a completed checkpoint, and the collected ones whose files the worker is to delete.

    The daemon deletes the files that it may touch itself; these lie in the same folder, and it may not touch them.
    """

    meta: CheckpointMeta
    delete: list[CollectedFiles]


class CollectedFiles(msgspec.Struct, frozen=True):
    """The files of a collected checkpoint."""

    checkpoint_id: str
    storage_path: str
    save_id: str


# Requests of workers. `worker_id` and `incarnation` must be a registered worker of the job.


class StartCheckpoint(Request[CheckpointMeta], frozen=True):
    """A worker is about to write a checkpoint. The same `storage_path` and `save_id` may be repeated."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    epoch: int
    step: int
    storage_path: str
    """The path or URL of the checkpoint, as `forged.checkpoint.load` takes it; absolute."""
    save_id: str
    checkpoint_type: CheckpointType = CheckpointType.FULL
    parent_path: str = ""
    """The storage path of the checkpoint that an incremental one builds on."""
    metrics: dict[str, float] = {}  # noqa: RUF012 - msgspec copies it
    reason: str = ""
    keep: int | None = None
    """How many checkpoints the script keeps: `checkpoint_keep` for jobs without any setting about retention."""
    age_s: float = 0.0
    """How long ago the ranks have agreed on it, by the worker's clock: a report may wait for a daemon that is away."""


class CompleteCheckpoint(Request[CompletedCheckpoint], frozen=True):
    """All of a checkpoint is durable. The worker that has started it may say so also after it has left."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    checkpoint_id: str
    size_bytes: int
    seconds: float
    parent_path: str | None = None
    """The storage path of the checkpoint whose files it uses, the newest of several, as its manifest tells; empty if it
    uses none. None: as was said at its start."""


class FailCheckpoint(Request[Nothing], frozen=True):
    """A checkpoint was not saved. The worker that has started it may say so also after it has left."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    checkpoint_id: str
    reason: str


class ReportCorruptCheckpoint(Request[Nothing], frozen=True):
    """A checkpoint could not be read, because its bytes are damaged or gone."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    checkpoint_id: str
    reason: str


class ReportRestore(Request[Nothing], frozen=True):
    """The job continues from a checkpoint: what was saved beyond `step` is abandoned.

    Rank 0 of the first world sends it. `checkpoint_id` is empty if the worker has not learnt it, or there was no
    checkpoint; `storage_path` and `save_id` name it too.
    """

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    checkpoint_id: str
    step: int
    seconds: float
    size_bytes: int
    skipped: list[str] = []  # noqa: RUF012 - msgspec copies it
    storage_path: str = ""
    save_id: str = ""
    repaired_chunks: int = 0
    """How many corrupt chunks were read from healthy copies, which the checkpoint's files do not have."""


class ConfirmDeleted(Request[Nothing], frozen=True):
    """The files of collected checkpoints, which the daemon may not touch, are gone."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    worker_id: str
    incarnation: bytes
    checkpoint_ids: list[str]


class HoldCheckpoint(Request[Nothing], frozen=True):
    """Keep a checkpoint while it is read, for at most so many seconds; repeat it to extend them."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    checkpoint_id: str
    holder: str
    seconds: float = 600.0


class ReleaseCheckpoint(Request[Nothing], frozen=True):
    """A checkpoint is no longer read. An unknown holder is no error."""

    needs: ClassVar[Role] = Role.WORKER

    job: str
    checkpoint_id: str
    holder: str


class CheckpointCadence(Signal, frozen=True):
    """When a job's workers save next, and why."""

    external: ClassVar[bool] = True

    job: str
    text: str


# Requests of operators and viewers.


class FindRestorePoints(Request[RestorePoints], frozen=True):
    """What a job can be restored from, the best first; also before the job exists in this daemon (an empty list)."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str
    folder: str = ""
    """Only checkpoints beneath this directory or bucket folder."""
    max_epoch: int | None = None
    max_step: int | None = None
    require_complete: bool = True
    prefer_full: bool = False
    limit: int = 100


class ListCheckpoints(Request[CheckpointPage], frozen=True):
    """List the checkpoints of a job, newest first, after the one with the id `after`."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str
    after: str = ""
    limit: int = PAGE_ENTRIES_MAX


class ShowCheckpoint(Request[CheckpointView], frozen=True):
    """Show one checkpoint."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str
    checkpoint_id: str


class PinCheckpoint(Request[CheckpointMeta], frozen=True):
    """Keep a checkpoint regardless of any policy."""

    job: str
    checkpoint_id: str


class UnpinCheckpoint(Request[CheckpointMeta], frozen=True):
    """Leave a checkpoint to the retention policy again."""

    job: str
    checkpoint_id: str


class ReinstateCheckpoint(Request[CheckpointMeta], frozen=True):
    """Take back that a checkpoint is abandoned: it is offered again, and may be the latest one."""

    job: str
    checkpoint_id: str
    reason: str = ""


class ReadRetention(Request[RetentionPage], frozen=True):
    """Show what a collection would do now with each checkpoint of a job, newest first, after the id `after`."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str
    after: str = ""
    limit: int = PAGE_ENTRIES_MAX


class CollectCheckpoints(Request[Collection], frozen=True):
    """Collect what the policy does not keep, now."""

    job: str


class DeleteCheckpoint(Request[Nothing], frozen=True):
    """Delete one checkpoint that no other one, nor a pin or a holder, needs."""

    job: str
    checkpoint_id: str


class CompactCheckpoint(Request[Nothing], frozen=True):
    """Make a full checkpoint of an incremental one, in the background; `ShowCheckpoint` tells how far it is."""

    job: str
    checkpoint_id: str


class AdoptCheckpoints(Request[Adoption], frozen=True):
    """Add existing checkpoints to the catalogue; parents before their children, at most 1000."""

    job: str
    folder: str
    checkpoints: list[AdoptedCheckpoint]
    dry_run: bool = False
    """Reply as if they were added, and change nothing."""


class CheckpointProgress(Signal, frozen=True):
    """How far the daemon is with a checkpoint: compacting, verifying, deleting, saving from memory."""

    job: str
    checkpoint_id: str
    operation: str
    done_bytes: int
    total_bytes: int

    @property
    def key(self) -> str:
        return self.checkpoint_id


class GcTick(Signal, frozen=True):
    """The checkpoints of all jobs may be due for collection. The daemon signals it, and asks `CollectCheckpoints` for
    each job that is due: a plugin replaces or wraps that request."""

    job_field: ClassVar[str | None] = None


REQUESTS = (
    StartCheckpoint,
    CompleteCheckpoint,
    FailCheckpoint,
    ReportCorruptCheckpoint,
    ReportRestore,
    ConfirmDeleted,
    HoldCheckpoint,
    ReleaseCheckpoint,
    FindRestorePoints,
    ListCheckpoints,
    ShowCheckpoint,
    PinCheckpoint,
    UnpinCheckpoint,
    ReinstateCheckpoint,
    ReadRetention,
    CollectCheckpoints,
    DeleteCheckpoint,
    CompactCheckpoint,
    AdoptCheckpoints,
)
