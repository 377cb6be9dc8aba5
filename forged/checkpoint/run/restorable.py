"""Which checkpoint of a folder can be restored, and which errors mean that an older one is to be tried."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import islice

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.model import DEFAULT_TIMEOUT_S, CheckpointInfo, check_timeout
from forged.checkpoint.ports import CancelToken, Storage, bounded
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.fault_handler import FaultToleranceHandler
from forged.checkpoint.storage.locations import root_at
from forged.checkpoint.verification.validator import CheckpointValidator

DAMAGE = frozenset(
    {
        "checkpoint_file_missing",
        "checkpoint_missing",
        "checkpoint_deleted",
        "checkpoint_replaced",
        "checkpoint_storage_io",
    }
)
"""Errors, besides those of corrupt bytes, after which an older checkpoint is tried."""
SHOWN_MAX = 10


def is_damage(error: CheckpointException) -> bool:
    """Whether the checkpoint itself is damaged or gone, so that an older one may be restored instead."""
    return error.type is ExceptionType.CORRUPTED_CHECKPOINT or error.code in DAMAGE


def is_corruption(error: CheckpointException) -> bool:
    """Whether bytes of the checkpoint are damaged or gone, for every reader and for ever."""
    return error.type is ExceptionType.CORRUPTED_CHECKPOINT or error.code == "checkpoint_file_missing"


def latest_restorable(where: str | os.PathLike[str], timeout: float = DEFAULT_TIMEOUT_S) -> CheckpointInfo | None:
    """The newest checkpoint in a folder whose files are there with the right sizes; None if there is none.

    Checkpoints are ordered by epoch, step and time; those without a step are the oldest.
    """
    check_timeout(timeout)
    token = CancelToken(timeout)
    storage = root_at(where)
    storage = bounded(FaultToleranceHandler(storage).guard(storage), token)
    return first_restorable(storage, token, _by_age(storage))


def _by_age(storage: Storage) -> list[str]:
    """All checkpoints of a storage, newest first."""
    infos = [listing.info_of(found) for _, found in listing.manifests(storage) if isinstance(found, Manifest)]
    return [info.prefix for info in sorted(infos, key=_age, reverse=True)]


def _age(info: CheckpointInfo) -> tuple[int, int, float]:
    """Larger for newer checkpoints."""
    epoch, step = (-1 if number is None else number for number in (info.epoch, info.step))
    return epoch, step, info.timestamp


def first_restorable(storage: Storage, token: CancelToken, names: Sequence[str]) -> CheckpointInfo | None:
    validator = CheckpointValidator(storage)
    for name in names:
        result = validator.validate_checkpoint(name, token, deep=False)
        if result.is_valid and result.manifest is not None:
            return listing.info_of(result.manifest)
    return None


def none_found(newest: str, url: str) -> CheckpointException:
    return CheckpointException(
        f"the catalogue has checkpoints in {url}, the newest is {newest}, and none of them is there",
        newest,
        ExceptionType.LOAD_FAILED,
        code="checkpoint_none_found",
        fix="mount or restore the folder; to start anew, give another folder or remove the job",
    )


def none_restorable(failures: Mapping[str, CheckpointException], url: str) -> CheckpointException:
    shown = [f"{name}: {error.message}" for name, error in islice(failures.items(), SHOWN_MAX)]
    if len(failures) > SHOWN_MAX:
        shown.append(f"and {len(failures) - SHOWN_MAX} more")
    return CheckpointException(
        f"no checkpoint in {url} can be restored: {'; '.join(shown)}",
        next(iter(failures)),
        ExceptionType.CORRUPTED_CHECKPOINT,
        code="checkpoint_none_restorable",
        fix="`forgectl ckpt verify` shows what is damaged; to start anew, give another folder",
    )
