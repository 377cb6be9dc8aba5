"""The values of the checkpoint catalogue: records, life cycle, requests, criteria and policies.

Invariants:
- Every value is frozen and copies its mutable arguments; a change makes the next record.
- Times are seconds and are arguments; steps are exact up to 2**64 - 1.
- A state follows another one only if `TRANSITIONS` lists it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, TypeGuard

import msgspec

from forged.catalog.errors import argument_invalid
from forged.errors import ConfigError, Problem
from forged.numbers import NumberChecks, as_float

EPOCH_MAX = 2**32 - 1
STEP_MAX = 2**64 - 1
SIZE_MAX = 2**64 - 1
AGE_MAX_S = 2**64 - 1
RUN_ID_CHARS_MAX = 1024
STORAGE_PATH_CHARS_MAX = 4096
METRICS_MAX = 1000
UNLIMITED = 2**63 - 1
"""As `max_checkpoints_per_run`: no number of newer checkpoints makes one surplus."""
HOLDERS_MAX = 1000

_checks = NumberChecks(argument_invalid)
checked_count, checked_time = _checks.count, _checks.time


class CheckpointState(StrEnum):
    """How far a checkpoint is in its life."""

    CREATING = "creating"
    """It is being written."""
    COMPLETE = "complete"
    """All of it is durable."""
    CORRUPTED = "corrupted"
    """Some of it is missing or damaged."""
    DELETED = "deleted"
    """It is a tombstone: its files may still be there, and nothing uses them."""


class CheckpointType(StrEnum):
    """What a checkpoint stores."""

    FULL = "full"
    """The complete state."""
    INCREMENTAL = "incremental"
    """What differs from its parent."""
    EMERGENCY = "emergency"
    """The complete state, saved because of a failure."""


TRANSITIONS: Mapping[CheckpointState, frozenset[CheckpointState]] = {
    CheckpointState.CREATING: frozenset({CheckpointState.COMPLETE, CheckpointState.CORRUPTED, CheckpointState.DELETED}),
    CheckpointState.COMPLETE: frozenset({CheckpointState.CORRUPTED, CheckpointState.DELETED}),
    CheckpointState.CORRUPTED: frozenset({CheckpointState.COMPLETE, CheckpointState.DELETED}),
    CheckpointState.DELETED: frozenset(),
}
"""The states that may follow a state. A corrupted checkpoint becomes complete only by a repair."""


class CheckpointMeta(msgspec.Struct, frozen=True, gc=False):
    """The record of one checkpoint."""

    checkpoint_id: str
    training_run_id: str
    """The job."""
    epoch: int
    step: int
    checkpoint_type: CheckpointType
    state: CheckpointState
    size_bytes: int
    created_at: float
    parent_id: str | None
    """The checkpoint that an incremental one builds on."""
    metrics: Mapping[str, float]
    storage_path: str
    verified_at: float | None = None
    """When a save, a verification or a scrub last found all bytes correct."""
    pinned: bool = False
    """Whether an operator keeps it, regardless of any policy."""
    holders: tuple[str, ...] = ()
    """What uses it at present: readers, and models that were made from it."""
    abandoned: bool = False
    """Whether training has gone back to an older checkpoint since."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "metrics", dict(self.metrics))

    @property
    def is_incremental(self) -> bool:
        return self.checkpoint_type is CheckpointType.INCREMENTAL

    @property
    def is_failed_save(self) -> bool:
        """Whether it became corrupted before it was complete: it cannot be repaired."""
        return self.state is CheckpointState.CORRUPTED and not self.storage_path


class CreateCheckpointRequest(msgspec.Struct, frozen=True):
    """What a run is about to save."""

    training_run_id: str
    epoch: int
    step: int
    checkpoint_type: CheckpointType = CheckpointType.FULL
    metrics: Mapping[str, float] = {}

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "metrics", dict(self.metrics))


class RestoreCriteria(msgspec.Struct, frozen=True):
    """Which checkpoints of a run may be restored, and which are preferred."""

    training_run_id: str
    max_epoch: int | None = None
    max_step: int | None = None
    require_complete: bool = True
    """If not, checkpoints that are being written or corrupted come after all restorable ones."""
    prefer_full: bool = False
    """Of several of one step, take one that needs no parent."""


class GcPolicy(msgspec.Struct, frozen=True):
    """Which checkpoints of a run are kept.

    A checkpoint goes when there are too many newer ones, or when it is too old; what the other settings name stays.
    """

    max_checkpoints_per_run: int
    max_age_seconds: float
    keep_best_n: int = 0
    metric_key: str = "loss"
    metric_ascending: bool = True
    """Whether a lower value is better."""
    keep_every_steps: int | None = None
    """Keep the first checkpoint at or after each multiple of so many steps."""
    keep_every_seconds: float | None = None
    """Keep the first checkpoint of each interval of so many seconds."""

    def __post_init__(self) -> None:
        problems = tuple(self._problems())
        if problems:
            raise ConfigError("gc_policy_invalid", "the retention policy is not valid", problems=problems)

    def _problems(self) -> Iterator[Problem]:
        for key in ("max_checkpoints_per_run", "keep_best_n"):
            if not is_integer(getattr(self, key), 0):
                yield Problem(key, getattr(self, key), "an integer >= 0")
        age = self.max_age_seconds
        if not is_number(age) or not (0 <= age <= AGE_MAX_S or age == math.inf):
            yield Problem("max_age_seconds", age, f"seconds from 0 to {AGE_MAX_S}, or inf")
        if self.keep_every_steps is not None and not is_integer(self.keep_every_steps, 1):
            yield Problem("keep_every_steps", self.keep_every_steps, "an integer >= 1, or None")
        seconds = self.keep_every_seconds
        if seconds is not None and not (is_number(seconds) and 0 < seconds < math.inf):
            yield Problem("keep_every_seconds", seconds, "finite seconds > 0, or None")


def is_integer(value: object, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def checked_request(request: CreateCheckpointRequest) -> CreateCheckpointRequest:
    """The request with plain values; refuses one that no checkpoint can have."""
    run = request.training_run_id
    if not isinstance(run, str) or not 0 < len(run) <= RUN_ID_CHARS_MAX:
        raise argument_invalid("training_run_id", run, f"a text of 1 to {RUN_ID_CHARS_MAX} characters")
    return CreateCheckpointRequest(
        run,
        checked_count("epoch", request.epoch, EPOCH_MAX),
        checked_count("step", request.step, STEP_MAX),
        _checked_type(request.checkpoint_type),
        _checked_metrics(request.metrics),
    )


def checked_path(path: Any) -> str:
    if not isinstance(path, str) or not 0 < len(path) <= STORAGE_PATH_CHARS_MAX:
        raise argument_invalid("storage_path", path, f"a text of 1 to {STORAGE_PATH_CHARS_MAX} characters")
    return path


def _checked_type(kind: Any) -> CheckpointType:
    try:
        return CheckpointType(kind)
    except ValueError:
        raise argument_invalid("checkpoint_type", kind, f"one of {', '.join(CheckpointType)}") from None


def _checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    if len(metrics) > METRICS_MAX:
        raise argument_invalid("metrics", len(metrics), f"at most {METRICS_MAX} entries")
    return {str(key): _checked_metric(key, value) for key, value in metrics.items()}


def _checked_metric(key: str, value: Any) -> float:
    """A metric may be infinite or NaN: training diverges."""
    metric = as_float(value)
    if metric is None:
        raise argument_invalid(f"metrics[{key!r}]", value, "a number")
    return metric
