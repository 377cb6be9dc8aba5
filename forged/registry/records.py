"""What the daemon stores of each model and version, and the checks of what callers send.

Invariants:
- A version's record, with its files and its lineage, has at most `RECORD_BYTES_MAX` bytes.
- What can be long and is seldom asked for, the files and the lineage, has a key of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from forged.catalog.records import checked_location, checked_metrics, checked_save_id
from forged.errors import RequestRefused
from forged.ids import check_name
from forged.registry.errors import argument_invalid
from forged.registry.messages import (
    Artifact,
    ArtifactFile,
    ArtifactState,
    JournalEntry,
    Lineage,
    ModelPolicy,
    RecordedValidation,
)
from forged.registry.model import DeploymentState, ModelMetadata, ModelVersion, ValidationResult, checked_metadata
from forged.registry.names import checked_model_id
from forged.registry.selection import percentile
from forged.shares import Holder

RECORDS = "model/"
HEADS = "model-head/"
JOURNAL = "model-journal/"
MOVES = "model-move/"
DETAILS = "model-details/"
VALIDATIONS = "model-validation/"
DELETED = "model-deleted/"

RECORD_BYTES_MAX = (512 << 10) - 4096
RECORD_OVERHEAD_BYTES = 1024
"""What a record takes in memory besides its stored bytes, about."""
MODEL_OVERHEAD_BYTES = 1024
TAG_OVERHEAD_BYTES = 512
"""What the index takes in memory for a tag that no other version has, about."""
ENTRY_OVERHEAD_BYTES = 64
MOVE_OVERHEAD_BYTES = 512
TEXT_CHARS_MAX = 250
FRAMEWORK_CHARS_MAX = 100
CHECKSUM_CHARS_MAX = 200
REASON_CHARS_MAX = 500
DIMENSIONS_MAX = 64
TAGS_MAX = 1000
TAG_KEY_CHARS_MAX = 250
TAG_CHARS_MAX = 5000
FILES_MAX = 10_000
PATH_CHARS_MAX = 1024
SAMPLES_MAX = 100_000
VALIDATION_BYTES_MAX = 8 << 10
ERRORS_MAX = 100
ERROR_CHARS_MAX = 500
ERRORS_BYTES_MAX = 6 << 10
VALIDATIONS_KEPT = 100
SECONDS_MAX = 1e10
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
_SPACES = re.compile(r"[\n\t\r]")


class VersionRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One version as the daemon stores it, without its files and its lineage."""

    metadata: ModelMetadata
    registered_by: str
    holder: Holder
    """The principal that the record is charged to in the shares of the registry."""
    jobs: tuple[str, ...] | None
    """The jobs of that principal, whose checkpoints the version may hold; None for all."""
    artifact: Artifact
    """Without `files`."""
    details_bytes: int = 0
    """The stored size of files and lineage; 0 if it has none."""
    validation: RecordedValidation | None = None
    """The newest one."""
    validation_sizes: tuple[int, ...] = ()
    """The stored sizes of the kept validations, the oldest first."""
    outdated_validations: int = 0
    """Up to this number its validations are older than its last rollback from canary, and no evidence any more."""
    report: ValidationResult | None = None
    """What was last reported of it in service."""
    artifact_state: ArtifactState = ArtifactState.UNVERIFIED
    artifact_checked_at: float | None = None
    artifact_problem: str = ""
    state_by: str = ""
    """The principal that gave it its state."""
    state_entry: int = 0
    """The journal's entry by which it got its state."""
    advised_entry: int = 0
    """The `state_entry` for which a rollback was advised last."""
    last_entry: int = 0
    """The newest entry of the journal about it."""

    @property
    def model_id(self) -> str:
        return self.metadata.model_id

    @property
    def version(self) -> ModelVersion:
        return self.metadata.version

    @property
    def state(self) -> DeploymentState:
        return self.metadata.state


class VersionDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is stored of a version besides its record."""

    files: list[ArtifactFile] = []
    lineage: Lineage | None = None


class ModelHead(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is stored of a model besides its versions."""

    model_id: str
    entries: int
    """How many entries its journal has."""
    at: float
    """The time of the last entry."""
    aliases: dict[str, ModelVersion] = {}
    policy: ModelPolicy = ModelPolicy()
    charges: list[tuple[Holder, int]] = []
    """The bytes of the journal, by the principal that has caused them."""


class StoredEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entry of the journal, and the number of the one before it about the same version."""

    entry: JournalEntry
    previous: int = 0


class AliasMove(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a journal's entry that tells what an alias named from a time on."""

    at: float
    entry: int
    alias: str
    version: ModelVersion | None


encoded = msgspec.msgpack.Encoder().encode
decoded_record = msgspec.msgpack.Decoder(VersionRecord).decode
decoded_details = msgspec.msgpack.Decoder(VersionDetails).decode
decoded_head = msgspec.msgpack.Decoder(ModelHead).decode
decoded_entry = msgspec.msgpack.Decoder(StoredEntry).decode
decoded_move = msgspec.msgpack.Decoder(AliasMove).decode
decoded_validation = msgspec.msgpack.Decoder(RecordedValidation).decode


def record_key(digest: str, version: ModelVersion) -> str:
    return f"{RECORDS}{digest}/{version}"


def details_key(digest: str, version: ModelVersion) -> str:
    return f"{DETAILS}{digest}/{version}"


def deleted_key(digest: str, version: ModelVersion) -> str:
    return f"{DELETED}{digest}/{version}"


def entry_key(digest: str, number: int) -> str:
    """Keys of entries sort like their numbers."""
    return f"{JOURNAL}{digest}/{number:012d}"


def move_key(digest: str, number: int) -> str:
    return f"{MOVES}{digest}/{number:012d}"


def validations_prefix(digest: str, version: ModelVersion) -> str:
    return f"{VALIDATIONS}{digest}/{version}/"


def validation_key(digest: str, version: ModelVersion, number: int) -> str:
    return f"{validations_prefix(digest, version)}{number:012d}"


def shortened(text: str) -> str:
    """A caller's text, in one line and bounded."""
    return " ".join(text.split())[:REASON_CHARS_MAX]


# Checks.


def _checked_text(name: str, text: str, most: int, least: int = 1) -> str:
    if not least <= len(text) <= most or not text.isprintable():
        raise argument_invalid(name, text, f"{least} to {most} printable characters")
    return text


def checked_description(metadata: ModelMetadata) -> ModelMetadata:
    """The metadata of a version, as it may be registered."""
    checked = checked_metadata(metadata)
    checked_model_id(checked.model_id)
    _checked_text("name", checked.name, TEXT_CHARS_MAX, 0)
    _checked_text("framework", checked.framework, FRAMEWORK_CHARS_MAX, 0)
    _checked_text("checksum", checked.checksum, CHECKSUM_CHARS_MAX)
    for name in ("input_shape", "output_shape"):
        if len(shape := getattr(checked, name)) > DIMENSIONS_MAX:
            raise argument_invalid(name, f"{len(shape)} sizes", f"at most {DIMENSIONS_MAX} sizes")
    checked_tags(checked.tags)
    return checked


def checked_tags(tags: Mapping[str, str]) -> Mapping[str, str]:
    if len(tags) > TAGS_MAX:
        raise argument_invalid("tags", f"{len(tags)} tags", f"at most {TAGS_MAX} tags")
    for key, value in tags.items():
        _checked_text("the key of a tag", key, TAG_KEY_CHARS_MAX)
        if len(value) > TAG_CHARS_MAX or not _SPACES.sub("", value).isprintable():
            raise argument_invalid(f"tag {key}", value, f"at most {TAG_CHARS_MAX} printable characters")
    return tags


def checked_artifact(artifact: Artifact) -> Artifact:
    """Where the files of a version are."""
    if artifact.location:
        checked_location("location", artifact.location)
    if artifact.save_id:
        checked_save_id(artifact.save_id)
        if not artifact.location:
            raise argument_invalid("location", "", "the path or URL of the checkpoint with the save id")
    if artifact.job:
        check_name("job", artifact.job)
    if len(artifact.files) > FILES_MAX:
        raise argument_invalid("files", f"{len(artifact.files)} files", f"at most {FILES_MAX} files")
    for file in artifact.files:
        _check_file(file)
    if len({file.path for file in artifact.files}) < len(artifact.files):
        raise argument_invalid("files", "a path twice", "each path once")
    return msgspec.structs.replace(artifact, checkpoint_id="")


def _check_file(file: ArtifactFile) -> None:
    _checked_text("the path of a file", file.path, PATH_CHARS_MAX)
    if any(part in ("", ".", "..") for part in file.path.split("/")) or "\\" in file.path:
        raise argument_invalid("the path of a file", file.path, "relative, without `.`, `..`, `\\` and doubled slashes")
    if not _SHA256.fullmatch(file.checksum):
        raise argument_invalid(f"the checksum of {file.path}", file.checksum, "`sha256:` and 64 hexadecimal digits")
    if not 0 <= file.size_bytes < 1 << 63:
        raise argument_invalid(f"the size of {file.path}", file.size_bytes, "an integer from 0 to 2^63 - 1")


def checked_lineage(lineage: Lineage) -> Lineage:
    """What a caller says that a version was made from."""
    if lineage.job:
        check_name("job", lineage.job)
    checked_metrics(lineage.metrics)
    for name in ("epoch", "step"):
        if not 0 <= (number := getattr(lineage, name)) < 1 << 63:
            raise argument_invalid(name, number, "an integer from 0 to 2^63 - 1")
    checked_seconds("saved_at", lineage.saved_at)
    return msgspec.structs.replace(lineage, audit=shortened(lineage.audit))


def checked_policy(policy: ModelPolicy) -> ModelPolicy:
    checked_seconds("evidence_max_age_s", policy.evidence_max_age_s)
    for name in ("max_latency_p99_ms", "min_accuracy", "rollback_threshold"):
        number = getattr(policy, name)
        if number is not None and not math.isfinite(number):
            raise argument_invalid(name, number, "a finite number")
    if policy.rollback_threshold < 0:
        raise argument_invalid("rollback_threshold", policy.rollback_threshold, "a number >= 0")
    return policy


def checked_seconds(name: str, seconds: float) -> float:
    if not 0 <= seconds <= SECONDS_MAX:
        raise argument_invalid(name, seconds, f"seconds from 0 to {SECONDS_MAX:g}")
    return seconds


def measured(result: ValidationResult, samples_ms: Sequence[float]) -> ValidationResult:
    """The result with the latencies of the samples, if there are any, and with the first of its errors."""
    if samples_ms:
        if len(samples_ms) > SAMPLES_MAX:
            raise argument_invalid("samples_ms", f"{len(samples_ms)} samples", f"at most {SAMPLES_MAX} samples")
        if not all(0 <= sample < math.inf for sample in samples_ms):
            raise argument_invalid("samples_ms", "a sample below 0 or not finite", "finite numbers >= 0")
        p50, p99 = percentile(samples_ms, 50), percentile(samples_ms, 99)
        result = msgspec.structs.replace(result, latency_p50_ms=p50, latency_p99_ms=p99)
    return msgspec.structs.replace(result, errors=tuple(_first_errors(result.errors)))


def _first_errors(errors: Sequence[str]) -> Iterator[str]:
    """The errors that are kept. They are not refused: what fails most has the longest list."""
    room_bytes = ERRORS_BYTES_MAX
    for error in errors[:ERRORS_MAX]:
        text = error[:ERROR_CHARS_MAX]
        room_bytes -= len(text.encode())
        if room_bytes < 0:
            return
        yield text


def require_size(what: str, size: int, most: int, fix: str) -> None:
    if size > most:
        raise RequestRefused("model_too_large", f"{what} must have at most {most} bytes, got {size}", fix)
