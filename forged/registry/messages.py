"""Facts and requests of the model registry.

Invariants:
- A version belongs to its model, and a model to a namespace: principals of the job `J` own the models `J` and `J/...`.
- A request that names a version takes a reference: `1.2.3`, an alias, or `latest`; what decides takes exact versions.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import msgspec

from forged.auth.model import Role
from forged.kernel.messages import ANY_JOB, Fact, Nothing, Request
from forged.pagination import PAGE_ENTRIES_MAX
from forged.registry.model import DeploymentState, ModelMetadata, ModelVersion, ValidationResult

SERVING = "serving"
"""The alias of the version that serves; only promotion and rollback move it."""
LATEST = "latest"
"""The reference to the highest version; never an alias."""
IMPORTED_MAX = 500
"""So many versions an import has at most."""
IMPORTED_ALIASES_MAX = 16
"""Of one version of an import: each is several operations of a transaction."""

# Values.


class CanaryAction(StrEnum):
    """What the registry does when a canary is worse than the serving version."""

    OFF = "off"
    ADVISE = "advise"
    """It says so, as a fact."""
    ACT = "act"
    """It rolls back."""


class ModelPolicy(msgspec.Struct, frozen=True):
    """What a model's versions need to be promoted, and what happens to a bad canary."""

    requires_validation: bool = True
    evidence_max_age_s: float = 30 * 86_400.0
    max_latency_p99_ms: float | None = None
    min_accuracy: float | None = None
    canary: CanaryAction = CanaryAction.ADVISE
    rollback_threshold: float = 1.0
    """From this `rollback_priority` on a canary is bad."""


class ArtifactFile(msgspec.Struct, frozen=True):
    """One file of a version, relative to the artifact's location."""

    path: str
    size_bytes: int
    checksum: str
    """`sha256:` and 64 hexadecimal digits."""


class Artifact(msgspec.Struct, frozen=True):
    """Where the files of a version are: of a checkpoint, or plain files."""

    location: str = ""
    """Absolute path or URL: of the checkpoint, or of the folder (or the file) that `files` are in. Empty: unknown."""
    save_id: str = ""
    """Of the checkpoint; empty for plain files."""
    checkpoint_id: str = ""
    """In the catalogue at the time of registration; empty if it was not there."""
    job: str = ""
    files: list[ArtifactFile] = []


class Lineage(msgspec.Struct, frozen=True):
    """What a version was made from, as it was at its registration."""

    job: str
    epoch: int
    step: int
    metrics: dict[str, float]
    settings: dict[str, str | int | float | bool | None]
    audit: str = ""
    """What the audit said of the data used up to the step, in words; empty if the job has none."""
    saved_at: float = 0.0


class RecordedValidation(msgspec.Struct, frozen=True):
    """A validation with its circumstances."""

    number: int
    """Of the version's validations, from 1."""
    result: ValidationResult
    checksum: str
    environment: dict[str, str]
    at: float
    by: str
    samples: int = 0
    """How many latency samples p50 and p99 were computed from; 0: the caller gave them."""


class ArtifactState(StrEnum):
    """What the last verification of a version's files has found."""

    UNVERIFIED = "unverified"
    SOUND = "sound"
    DAMAGED = "damaged"
    MISSING = "missing"


class ModelView(msgspec.Struct, frozen=True):
    """One version with what the registry knows of it."""

    metadata: ModelMetadata
    registered_by: str
    aliases: list[str]
    artifact: Artifact
    lineage: Lineage | None
    validation: RecordedValidation | None
    """The newest one."""
    artifact_state: ArtifactState
    artifact_checked_at: float | None
    next_states: list[DeploymentState]
    policy: ModelPolicy
    """Of the model."""
    blocked_by: str = ""
    """Why it cannot be promoted now, in words; empty if it can."""


class ModelSummary(msgspec.Struct, frozen=True):
    """One model."""

    model_id: str
    versions: int
    latest: ModelVersion
    serving: ModelVersion | None
    aliases: dict[str, ModelVersion]
    policy: ModelPolicy


class ModelPage(msgspec.Struct, frozen=True):
    models: list[ModelSummary]
    more: bool


class VersionPage(msgspec.Struct, frozen=True):
    versions: list[ModelMetadata]
    more: bool


class JournalKind(StrEnum):
    REGISTERED = "registered"
    IMPORTED = "imported"
    TRANSITIONED = "transitioned"
    VALIDATED = "validated"
    ALIAS_MOVED = "alias_moved"
    ROLLED_BACK = "rolled_back"
    POLICY_CHANGED = "policy_changed"
    TAGGED = "tagged"
    DELETED = "deleted"


class JournalEntry(msgspec.Struct, frozen=True):
    """One change of a model; `number` counts from 1 for each model, without gaps, also after deletions."""

    number: int
    at: float
    by: str
    kind: JournalKind
    version: ModelVersion | None = None
    was: str = ""
    """The state, or the version of the alias, before."""
    now: str = ""
    alias: str = ""
    reason: str = ""
    waiver: str = ""
    """Why it was promoted without the evidence that the policy demands."""
    evidence: int = 0
    """The number of the validation that a promotion rests on; 0: none."""


class JournalPage(msgspec.Struct, frozen=True):
    entries: list[JournalEntry]
    """The newest first."""
    more: bool


class ServedVersion(msgspec.Struct, frozen=True):
    """What an alias pointed to at a time, and since when."""

    version: ModelVersion | None
    since: float | None
    entry: int = 0
    """The journal's entry that moved it."""


class BestVersion(msgspec.Struct, frozen=True):
    metadata: ModelMetadata | None
    validation: ValidationResult | None
    reason: str


class ModelDifference(msgspec.Struct, frozen=True):
    """How two versions differ, and which step of the version number that suggests."""

    first: ModelMetadata
    second: ModelMetadata
    shape_compatibility: float
    suggested: str
    """`major`, `minor` or `patch`."""
    reason: str
    changed_tags: dict[str, tuple[str | None, str | None]]
    latency_p99_ms: tuple[float | None, float | None]
    accuracy: tuple[float | None, float | None]


class ImportedVersion(msgspec.Struct, frozen=True):
    """A version that exists elsewhere, with the state that it has there."""

    metadata: ModelMetadata
    aliases: list[str] = []
    artifact: Artifact = Artifact()
    validation: ValidationResult | None = None


class ImportedModels(msgspec.Struct, frozen=True):
    imported: list[str]
    """`model@version`."""
    known: list[str]
    refused: list[str]
    """With reasons."""
    serving: list[str] = []
    """What serves instead of another version of a model that was there before: `model@2.0.0 instead of 1.0.0`."""


# Facts. Their job is the namespace of the model if there is such a job, else none.


class ModelRegistered(Fact, frozen=True):
    """A version is in the registry from now on."""

    model_id: str
    version: ModelVersion
    state: DeploymentState
    checksum: str
    by: str
    is_import: bool = False
    checkpoint_id: str = ""


class ModelTransitioned(Fact, frozen=True):
    """A version has another state."""

    model_id: str
    version: ModelVersion
    was: DeploymentState
    now: DeploymentState
    by: str
    reason: str
    waiver: str = ""


class ValidationRecorded(Fact, frozen=True):
    """A version was validated."""

    model_id: str
    version: ModelVersion
    number: int
    passed: bool
    latency_p99_ms: float
    accuracy_score: float
    by: str


class AliasMoved(Fact, frozen=True):
    """An alias names another version; None: it named none before, or names none now."""

    model_id: str
    alias: str
    was: ModelVersion | None
    now: ModelVersion | None
    by: str
    reason: str


class CanaryMeasured(Fact, frozen=True):
    """A canary's metrics were reported and compared with those of the serving version."""

    model_id: str
    version: ModelVersion
    baseline: ModelVersion | None
    priority: float
    threshold: float
    action: CanaryAction
    """What the policy says at this time."""
    reason: str
    entry: int = 0
    """The journal's entry by which the version became a canary; 0 if it serves itself."""


class RollbackAdvised(Fact, frozen=True):
    """A canary is worse than the serving version by more than the policy allows; an operator decides."""

    level: ClassVar[str] = "warning"

    model_id: str
    version: ModelVersion
    priority: float
    threshold: float
    reason: str


class ModelRolledBack(Fact, frozen=True):
    """A version was taken out of service; `to` is the version that serves instead."""

    level: ClassVar[str] = "warning"

    model_id: str
    version: ModelVersion
    to: ModelVersion | None
    by: str
    reason: str


class ModelPolicyChanged(Fact, frozen=True):
    model_id: str
    policy: ModelPolicy
    by: str
    reason: str


class ModelTagged(Fact, frozen=True):
    model_id: str
    version: ModelVersion
    set: dict[str, str]
    removed: list[str]
    by: str


class ModelDeleted(Fact, frozen=True):
    """A version was deleted from the registry; its files stay."""

    model_id: str
    version: ModelVersion
    by: str
    reason: str


class ModelArtifactChecked(Fact, frozen=True):
    """The files of a version were compared with their checksums, with another outcome than before."""

    model_id: str
    version: ModelVersion
    state: ArtifactState
    problem: str = ""


# Requests of workers and of validation jobs.


class RegisterModel(Request[ModelMetadata], frozen=True):
    """Register a version. State must be `registered`; with `bump` the registry assigns the next version."""

    needs: ClassVar[Role] = Role.WORKER
    job_field: ClassVar[str | None] = ANY_JOB

    metadata: ModelMetadata
    bump: str = ""
    """`major`, `minor` or `patch`: next after the highest version (0.1.0, 0.0.1, 1.0.0 for the first); the metadata's
    version is ignored. Empty: register the metadata's version. `registered_at` is the daemon's."""
    artifact: Artifact = Artifact()
    lineage: Lineage | None = None
    """For a checkpoint that the catalogue does not have; otherwise the daemon fills it in."""
    reason: str = ""


class RecordValidation(Request[RecordedValidation], frozen=True):
    """Record a validation of a version; the checksum must be the version's. Of samples it computes p50 and p99."""

    needs: ClassVar[Role] = Role.WORKER
    job_field: ClassVar[str | None] = ANY_JOB

    result: ValidationResult
    checksum: str
    samples_ms: list[float] = []  # noqa: RUF012 - msgspec copies it
    environment: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it


class ReportCanary(Request[CanaryMeasured], frozen=True):
    """Report what a canary (or the serving version, as the baseline of later comparisons) shows in service."""

    needs: ClassVar[Role] = Role.WORKER
    job_field: ClassVar[str | None] = ANY_JOB

    result: ValidationResult
    """`errors` are those since the last report."""
    samples_ms: list[float] = []  # noqa: RUF012 - msgspec copies it


class ReportArtifact(Request[Nothing], frozen=True):
    """Tell what a verification of a version's files has found."""

    needs: ClassVar[Role] = Role.WORKER
    job_field: ClassVar[str | None] = ANY_JOB

    model_id: str
    version: ModelVersion
    state: ArtifactState
    problem: str = ""


class TagModel(Request[ModelMetadata], frozen=True):
    """Set and remove tags of a version."""

    needs: ClassVar[Role] = Role.WORKER
    job_field: ClassVar[str | None] = ANY_JOB

    model_id: str
    version: ModelVersion
    set: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it
    remove: list[str] = []  # noqa: RUF012 - msgspec copies it


# Requests of operators.


class ImportModels(Request[ImportedModels], frozen=True):
    """Take in versions that serve elsewhere, in the states that they have there; at most 500."""

    job_field: ClassVar[str | None] = ANY_JOB

    versions: list[ImportedVersion]
    reason: str
    dry_run: bool = False


class TransitionModel(Request[ModelMetadata], frozen=True):
    """Give a version another state of the table. To production moves the alias `serving` too. The serving version
    becomes deprecated with a reason only, and if a rollback has no version to return to: then none serves."""

    job_field: ClassVar[str | None] = ANY_JOB

    model_id: str
    version: ModelVersion
    to: DeploymentState
    reason: str = ""
    expected: DeploymentState | None = None
    """The state that the caller has seen: another one refuses the request."""
    waiver: str = ""
    """Why evidence is not needed this time; recorded."""


class RollBackModel(Request[ModelRolledBack], frozen=True):
    """Take a version out of service: a canary goes back to staging; from the serving version the alias moves to the one
    that served before and is still in production, with files not known to be damaged (or to `to`), then it is
    deprecated. Refused if there is none."""

    job_field: ClassVar[str | None] = ANY_JOB

    model_id: str
    version: ModelVersion | None = None
    """None: the serving version."""
    to: ModelVersion | None = None
    reason: str = ""
    expected: DeploymentState | None = None
    """The state that the caller has seen: another one refuses the request."""


class MoveAlias(Request[Nothing], frozen=True):
    """Let an alias name a version; None removes it. Not for `serving`."""

    job_field: ClassVar[str | None] = ANY_JOB

    model_id: str
    alias: str
    version: ModelVersion | None
    reason: str = ""


class SetModelPolicy(Request[ModelPolicy], frozen=True):
    """Replace the policy of a model."""

    job_field: ClassVar[str | None] = ANY_JOB

    model_id: str
    policy: ModelPolicy
    reason: str = ""


class DeleteModel(Request[Nothing], frozen=True):
    """Delete a version that no alias names: one that is archived, or one that is registered and not wanted, with a
    reason."""

    job_field: ClassVar[str | None] = ANY_JOB

    model_id: str
    version: ModelVersion
    reason: str = ""


# Questions. `ref` is `1.2.3`, an alias, or `latest`.


class ShowModel(Request[ModelView], frozen=True):
    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    model_id: str
    ref: str = LATEST


class ListModels(Request[ModelPage], frozen=True):
    """The models that the caller may see, by id, after `after`."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    after: str = ""
    limit: int = PAGE_ENTRIES_MAX


class ListModelVersions(Request[VersionPage], frozen=True):
    """The versions of a model, the highest first, below `before`."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    model_id: str
    before: ModelVersion | None = None
    limit: int = PAGE_ENTRIES_MAX


class FindModels(Request[VersionPage], frozen=True):
    """Versions that match all that is given, by model and version, after the key `after` (`model@version`)."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    state: DeploymentState | None = None
    tags: dict[str, str | None] = {}  # noqa: RUF012 - msgspec copies it
    """None: any value."""
    checksum: str = ""
    alias: str = ""
    text: str = ""
    """A part of the model's id or name, regardless of case."""
    after: str = ""
    limit: int = PAGE_ENTRIES_MAX


class ReadModelJournal(Request[JournalPage], frozen=True):
    """The changes of a model, the newest first, below the number `before` (0: from the end)."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    model_id: str
    version: ModelVersion | None = None
    before: int = 0
    limit: int = PAGE_ENTRIES_MAX


class FindServed(Request[ServedVersion], frozen=True):
    """What an alias of a model pointed to at a time."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    model_id: str
    at: float
    alias: str = SERVING


class ListValidations(Request[list[RecordedValidation]], frozen=True):
    """The newest validations of a version, the newest first; at most 100 are kept."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    model_id: str
    version: ModelVersion


class FindBestModel(Request[BestVersion], frozen=True):
    """The best version of a model (empty id: of all models the caller may see) by `select_best_version`; with limits,
    of those that meet them."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    model_id: str = ""
    max_latency_ms: float | None = None
    min_accuracy: float | None = None


class CompareModels(Request[ModelDifference], frozen=True):
    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    model_id: str
    first: str
    second: str


REQUESTS = (
    RegisterModel,
    RecordValidation,
    ReportCanary,
    ReportArtifact,
    TagModel,
    ImportModels,
    TransitionModel,
    RollBackModel,
    MoveAlias,
    SetModelPolicy,
    DeleteModel,
    ShowModel,
    ListModels,
    ListModelVersions,
    FindModels,
    ReadModelJournal,
    FindServed,
    ListValidations,
    FindBestModel,
    CompareModels,
)
