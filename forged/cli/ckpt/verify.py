"""`forgectl ckpt verify`: compares every byte of a checkpoint with its checksum.

Invariants:
- The exit code is 0 only if every checkpoint that was named is valid.
- Each finding is a line with its location.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import SUFFIX
from forged.checkpoint.ports import CancelToken, Storage
from forged.checkpoint.storage import listing
from forged.checkpoint.verification.validator import FINDINGS_MAX, CheckpointValidator, Finding, ValidationResult
from forged.cli.ckpt.command import checkpoint_command
from forged.cli.ckpt.progress_bar import ProgressBar
from forged.cli.ckpt.target import storage_and_prefix, storage_of
from forged.cli.forgectl import tables
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.process import EXIT_FAILED, EXIT_OK

MISSING = "checkpoint_missing"


@checkpoint_command
def verify(options: Options, token: CancelToken) -> int:
    """Check one checkpoint, or with `--all` every checkpoint of a folder."""
    if not options.all:
        return EXIT_OK if _verify(options, *storage_and_prefix(options.where, token), token) else EXIT_FAILED
    storage = storage_of(options.where, token)
    verdicts = [_verify(options, storage, prefix, token) for prefix in _those_in(storage)]
    return EXIT_OK if all(verdicts) else EXIT_FAILED


def _those_in(storage: Storage) -> list[str]:
    found = listing.prefixes(storage)
    if not found:
        raise CheckpointException(
            f"no checkpoints in {storage.url}",
            type=ExceptionType.LOAD_FAILED,
            code=MISSING,
            fix="name a folder with checkpoints",
        )
    return found


def _verify(options: Options, storage: Storage, prefix: str, token: CancelToken) -> bool:
    """Check a checkpoint and print the result."""
    started_at = time.monotonic()
    with ProgressBar(options, prefix) as bar:
        result = _validated(storage, prefix, token, bar)
    took_s = time.monotonic() - started_at
    if any(finding.code == MISSING for finding in result.errors):
        raise listing.missing_checkpoint(storage, prefix)
    answer(options, _as_json(result, took_s), lambda: _show(result, took_s))
    return result.is_valid


def _validated(storage: Storage, prefix: str, token: CancelToken, bar: ProgressBar) -> ValidationResult:
    try:
        return CheckpointValidator(storage).validate_checkpoint(prefix, token, progress=bar)
    except CheckpointException as error:
        if error.retryable or error.type is not ExceptionType.VALIDATION_FAILED:
            raise
        # A file in the folder may have an invalid checkpoint name; the other checkpoints are still checked.
        return ValidationResult(prefix, (Finding(error.message, error.code, file=prefix + SUFFIX),))


def _as_json(result: ValidationResult, took_s: float) -> dict[str, Any]:
    return {
        "prefix": result.name,
        "valid": result.is_valid,
        "bytes_checked": result.bytes_checked,
        "seconds": took_s,
        "checks": [{"name": one.name, "ok": one.is_valid} for one in result.sub_results],
        "findings": [_finding(finding) for finding in [*result.errors, *result.warnings]],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "severity": _severity(finding),
        "code": finding.code,
        "message": finding.message,
        "tensor": finding.tensor,
        "rank": finding.rank,
        "file": finding.file,
        "chunk": finding.chunk,
    }


def _show(result: ValidationResult, took_s: float) -> None:
    for line in _lines(result, took_s):
        print(line)


def _lines(result: ValidationResult, took_s: float) -> Iterator[str]:
    manifest = result.manifest
    name = tables.field("", result.name)
    verdict = tables.paint("valid", tables.GREEN) if result.is_valid else tables.paint("invalid", tables.RED)
    text = f"{name} is {verdict}"
    if manifest is not None:
        tensors, files = len(manifest.tensors.names), len(listing.files_of(manifest))
        text += f": {tables.counted(tensors, 'tensor')} in {tables.counted(files, 'file')}"
        rate = tables.size(int(result.bytes_checked / took_s)) if took_s > 0 else tables.NONE
        text += f", {tables.size(result.bytes_checked)} compared in {tables.duration(took_s)} ({rate}/s)"
    yield text
    for finding in [*result.errors, *result.warnings]:
        rank = "" if finding.rank is None or finding.tensor else f" (written by rank {finding.rank})"
        yield f"  {_severity(finding)}: {tables.field('', finding.message)}{rank}"
    if manifest is not None and not result.is_valid:
        touched = len({finding.tensor for finding in result.errors} - {None})
        if touched:
            yield f"  {touched:,} of {len(manifest.tensors.names):,} tensors are corrupt"
    if len(result.errors) >= FINDINGS_MAX:
        yield f"  stopped after {FINDINGS_MAX} findings; there may be more"


def _severity(finding: Finding) -> str:
    return "error" if finding.is_error else "warning"
