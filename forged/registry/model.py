"""The values of the model registry: versions, deployment states, metadata and results of validations.

Invariants:
- Every value is frozen and copies its mutable arguments; a change makes the next record.
- A state follows another one only if `TRANSITIONS` lists it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec.structs import force_setattr, replace

from forged.numbers import NumberChecks, as_float
from forged.registry.errors import argument_invalid

NUMBER_MAX = 2**32 - 1
SIZE_MAX = 2**64 - 1

Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]

_checks = NumberChecks(argument_invalid)
_checked_count, checked_time = _checks.count, _checks.time


class ModelVersion(msgspec.Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A semantic version: three numbers that are compared one after the other."""

    major: Number
    minor: Number
    patch: Number

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            number = getattr(self, name)
            if type(number) is not int or not 0 <= number <= NUMBER_MAX:
                force_setattr(self, name, _checked_count(name, number, NUMBER_MAX))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


class DeploymentState(StrEnum):
    """How far a version is in its deployment."""

    REGISTERED = "registered"
    """It is known."""
    VALIDATING = "validating"
    """Its latency and accuracy are being measured."""
    STAGING = "staging"
    """It has been validated and may be tried."""
    CANARY = "canary"
    """It serves a part of the requests."""
    PRODUCTION = "production"
    """It may serve all requests."""
    DEPRECATED = "deprecated"
    """It is not to be used any more."""
    ARCHIVED = "archived"
    """It is kept for the record."""


TRANSITIONS: Mapping[DeploymentState, frozenset[DeploymentState]] = {
    DeploymentState.REGISTERED: frozenset({DeploymentState.VALIDATING}),
    DeploymentState.VALIDATING: frozenset({DeploymentState.STAGING, DeploymentState.REGISTERED}),
    DeploymentState.STAGING: frozenset({DeploymentState.CANARY, DeploymentState.REGISTERED}),
    DeploymentState.CANARY: frozenset({DeploymentState.PRODUCTION, DeploymentState.STAGING}),
    DeploymentState.PRODUCTION: frozenset({DeploymentState.DEPRECATED}),
    DeploymentState.DEPRECATED: frozenset({DeploymentState.ARCHIVED}),
    DeploymentState.ARCHIVED: frozenset(),
}
"""The states that may follow a state. Back to registered: a failure; from canary back to staging: a rollback."""
PROMOTIONS = {
    DeploymentState.REGISTERED: DeploymentState.VALIDATING,
    DeploymentState.VALIDATING: DeploymentState.STAGING,
    DeploymentState.STAGING: DeploymentState.CANARY,
    DeploymentState.CANARY: DeploymentState.PRODUCTION,
}
"""The next state towards production."""


class ModelMetadata(msgspec.Struct, frozen=True, gc=False):
    """The record of one version of a model."""

    model_id: str
    name: str
    version: ModelVersion
    framework: str
    """Such as `pytorch`, `tensorflow` or `onnx`."""
    input_shape: Sequence[int]
    output_shape: Sequence[int]
    size_bytes: int
    checksum: str
    registered_at: float = 0.0
    state: DeploymentState = DeploymentState.REGISTERED
    tags: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        force_setattr(self, "input_shape", tuple(self.input_shape))
        force_setattr(self, "output_shape", tuple(self.output_shape))
        force_setattr(self, "tags", dict(self.tags))


class ValidationResult(msgspec.Struct, frozen=True, gc=False):
    """What a validation of one version has measured. A metric that was not measured is NaN."""

    model_id: str
    version: ModelVersion
    passed: bool
    latency_p50_ms: float
    latency_p99_ms: float
    accuracy_score: float
    """Higher is better; it may be negative."""
    errors: Sequence[str] = ()

    def __post_init__(self) -> None:
        force_setattr(self, "errors", _texts("errors", self.errors))


def can_transition_state(from_state: DeploymentState, to_state: DeploymentState) -> bool:
    """Whether a version in one state may go on to another one."""
    return to_state in TRANSITIONS.get(from_state, frozenset())


def is_rollback(from_state: DeploymentState, to_state: DeploymentState) -> bool:
    """Whether a transition takes a canary out of service."""
    return (from_state, to_state) == (DeploymentState.CANARY, DeploymentState.STAGING)


def checked_metadata(metadata: ModelMetadata) -> ModelMetadata:
    """The metadata with plain values; refuses those that no version of a model can have."""
    if not isinstance(metadata, ModelMetadata):
        raise argument_invalid("metadata", metadata, "a ModelMetadata")
    return ModelMetadata(
        _checked_text("model_id", metadata.model_id),
        _checked_text("name", metadata.name),
        checked_version(metadata.version),
        _checked_text("framework", metadata.framework),
        _checked_shape("input_shape", metadata.input_shape),
        _checked_shape("output_shape", metadata.output_shape),
        _checked_count("size_bytes", metadata.size_bytes, SIZE_MAX),
        _checked_text("checksum", metadata.checksum),
        checked_time("registered_at", metadata.registered_at),
        checked_state(metadata.state),
        {_checked_text("tags", key): _checked_text(f"tags[{key!r}]", value) for key, value in metadata.tags.items()},
    )


def checked_result(result: ValidationResult) -> ValidationResult:
    """The result with plain values; its metrics may be infinite or NaN."""
    if not isinstance(result, ValidationResult):
        raise argument_invalid("result", result, "a ValidationResult")
    _checked_text("model_id", result.model_id)
    checked_version(result.version)
    if not isinstance(result.passed, bool):
        raise argument_invalid("passed", result.passed, "True or False")
    metrics = ("latency_p50_ms", "latency_p99_ms", "accuracy_score")
    return replace(result, **{name: checked_number(name, getattr(result, name)) for name in metrics})


def checked_version(version: Any) -> ModelVersion:
    if not isinstance(version, ModelVersion):
        raise argument_invalid("version", version, "a ModelVersion")
    return version


def checked_state(state: Any) -> DeploymentState:
    try:
        return DeploymentState(state)
    except ValueError:
        raise argument_invalid("state", state, f"one of {', '.join(DeploymentState)}") from None


def checked_number(name: str, value: Any) -> float:
    """The value as a float; it may be infinite or NaN."""
    number = as_float(value)
    if number is None:
        raise argument_invalid(name, value, "a number")
    return number


def _checked_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise argument_invalid(name, value, "a text")
    return value


def _checked_shape(name: str, shape: Sequence[Any]) -> tuple[int, ...]:
    return tuple(_checked_count(name, size, SIZE_MAX) for size in shape)


def _texts(name: str, values: Sequence[str]) -> tuple[str, ...]:
    if isinstance(values, str) or not all(isinstance(value, str) for value in values):
        raise argument_invalid(name, values, "a list of texts")
    return tuple(values)
