"""Records of models for tests."""

from __future__ import annotations

from typing import Any

from forged.registry import DeploymentState, ModelMetadata, ModelRegistry, ModelVersion, ValidationResult

REGISTERED, VALIDATING = DeploymentState.REGISTERED, DeploymentState.VALIDATING
STAGING, CANARY = DeploymentState.STAGING, DeploymentState.CANARY
PRODUCTION, DEPRECATED = DeploymentState.PRODUCTION, DeploymentState.DEPRECATED
ARCHIVED = DeploymentState.ARCHIVED
V1, V2 = ModelVersion(1, 0, 0), ModelVersion(2, 0, 0)
PATH_TO = {
    REGISTERED: (),
    VALIDATING: (VALIDATING,),
    STAGING: (VALIDATING, STAGING),
    CANARY: (VALIDATING, STAGING, CANARY),
    PRODUCTION: (VALIDATING, STAGING, CANARY, PRODUCTION),
    DEPRECATED: (VALIDATING, STAGING, CANARY, PRODUCTION, DEPRECATED),
    ARCHIVED: (VALIDATING, STAGING, CANARY, PRODUCTION, DEPRECATED, ARCHIVED),
}
"""The shortest way to each state."""


def metadata(model_id: str = "model", version: ModelVersion = V1, **changes: Any) -> ModelMetadata:
    fields: dict[str, Any] = {
        "name": "a model",
        "framework": "pytorch",
        "input_shape": (1, 3, 224, 224),
        "output_shape": (1, 1000),
        "size_bytes": 10,
        "checksum": "sha256:0",
        "registered_at": 5.0,
        "state": REGISTERED,
        "tags": {"team": "vision"},
    }
    return ModelMetadata(model_id=model_id, version=version, **(fields | changes))


def result(accuracy: float = 0.9, p99: float = 10.0, **changes: Any) -> ValidationResult:
    fields: dict[str, Any] = {"model_id": "model", "version": V1, "passed": True, "latency_p50_ms": 5.0, "errors": ()}
    return ValidationResult(latency_p99_ms=p99, accuracy_score=accuracy, **(fields | changes))


def registered(
    registry: ModelRegistry, model_id: str = "model", version: ModelVersion = V1, state: DeploymentState = REGISTERED
) -> ModelMetadata:
    """A version that is in a state."""
    registry.register(metadata(model_id, version))
    for step in PATH_TO[state]:
        registry.transition_state(model_id, version, step)
    found = registry.get(model_id, version)
    assert found is not None
    return found
