"""A checkpoint as the files of a model.

Invariants:
- The checksum is the digest of the checkpoint's content, which compaction does not change.
- Bytes are compared with the manifest, and the manifest with the checksum.
"""

from __future__ import annotations

import math

from forged.checkpoint.format.content_digest import SCHEME, content_digest, tensor_bytes
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.ports import CancelToken, bounded
from forged.checkpoint.progress import Progress
from forged.checkpoint.storage.listing import missing_checkpoint, read_manifest
from forged.checkpoint.storage.locations import storage_at
from forged.checkpoint.verification.validator import CheckpointValidator, ValidationResult
from forged.client.model_files.description import ModelFiles, Where
from forged.client.model_files.plain_files import DAMAGED, FilesVerdict
from forged.errors import ForgedError
from forged.registry.messages import Artifact, ArtifactState, Lineage

MISSING = "checkpoint_missing"
METRICS = "metrics"
"""The custom metadata in which workers save the metrics."""


def describe_checkpoint(
    where: Where, token: CancelToken, progress: Progress | None = None, *, verify: bool = True
) -> ModelFiles:
    """Describe the checkpoint at a path or URL; with `verify`, every byte of it is compared first."""
    storage, prefix = storage_at(where)
    if verify:
        result = CheckpointValidator(storage).validate_checkpoint(prefix, token, progress=progress)
        if _is_missing(result):
            raise missing_checkpoint(storage, prefix)
        if result.errors:
            fix = f"`forgectl ckpt verify {where}` lists all faults; register another checkpoint"
            raise ForgedError(DAMAGED, f"the checkpoint at {where} is damaged: {_faults(result)}", fix)
    manifest = read_manifest(bounded(storage, token), prefix)
    artifact = Artifact(location=f"{storage.url}/{prefix}", save_id=manifest.save_id, job=manifest.job)
    return ModelFiles(artifact, SCHEME + content_digest(manifest), tensor_bytes(manifest), _lineage_of(manifest))


def compare_checkpoint(
    location: str, checksum: str, token: CancelToken, progress: Progress | None = None
) -> FilesVerdict:
    """Compare every byte of a checkpoint with its manifest, and the manifest with the checksum."""
    storage, prefix = storage_at(location)
    result = CheckpointValidator(storage).validate_checkpoint(prefix, token, progress=progress)
    if _is_missing(result):
        return FilesVerdict(ArtifactState.MISSING, f"there is no checkpoint at {location}")
    problem = _problem_of(result, checksum)
    return FilesVerdict(ArtifactState.DAMAGED if problem else ArtifactState.SOUND, problem, result.bytes_checked)


def require_content(location: str, checksum: str, token: CancelToken) -> None:
    """Refuse a checkpoint with another content than that of the version."""
    storage, prefix = storage_at(location)
    manifest = read_manifest(bounded(storage, token), prefix)
    found = SCHEME + content_digest(manifest)
    if found != checksum:
        raise ForgedError(
            DAMAGED,
            f"the checkpoint at {location} has the checksum {found}, the version {checksum}",
            "another checkpoint was saved there; register that as a version of its own",
        )


def _is_missing(result: ValidationResult) -> bool:
    return any(finding.code == MISSING for finding in result.errors)


def _faults(result: ValidationResult) -> str:
    """The first fault, and how many more there are."""
    errors = result.errors
    more = len(errors) - 1
    return f"{errors[0].message}, and {more:,} more problem{'s' * (more > 1)}" if more else errors[0].message


def _problem_of(result: ValidationResult, checksum: str) -> str:
    if result.errors:
        return _faults(result)
    assert result.manifest is not None, "a manifest that cannot be read is an error"
    found = SCHEME + content_digest(result.manifest)
    return "" if found == checksum else f"its checksum is {found}, expected {checksum}: it is another checkpoint"


def _lineage_of(manifest: Manifest) -> Lineage:
    metrics = manifest.custom.get(METRICS)
    values = metrics.items() if isinstance(metrics, dict) else ()
    return Lineage(
        job=manifest.job,
        epoch=manifest.epoch or 0,
        step=manifest.step or 0,
        metrics={f"{key}": float(value) for key, value in values if _is_finite(value)},
        settings={},
        saved_at=manifest.created_at,
    )


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
