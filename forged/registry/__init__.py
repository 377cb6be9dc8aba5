"""The model registry: which versions a model has, how far each is deployed, and on which evidence."""

from forged.registry.errors import ModelInvalid, ModelUnknown, RegistryRefused, TransitionRefused, VersionTaken
from forged.registry.model import (
    TRANSITIONS,
    DeploymentState,
    ModelMetadata,
    ModelVersion,
    ValidationResult,
    can_transition_state,
)
from forged.registry.registry import ModelRegistry
from forged.registry.selection import (
    meets_sla,
    percentile,
    rollback_priority,
    select_best_model,
    select_best_version,
)
from forged.registry.versions import (
    compare_versions,
    format_version,
    next_version,
    parse_version,
    shape_compatibility,
    suggested_bump,
)

__all__ = [
    "TRANSITIONS",
    "DeploymentState",
    "ModelInvalid",
    "ModelMetadata",
    "ModelRegistry",
    "ModelUnknown",
    "ModelVersion",
    "RegistryRefused",
    "TransitionRefused",
    "ValidationResult",
    "VersionTaken",
    "can_transition_state",
    "compare_versions",
    "format_version",
    "meets_sla",
    "next_version",
    "parse_version",
    "percentile",
    "rollback_priority",
    "select_best_model",
    "select_best_version",
    "shape_compatibility",
    "suggested_bump",
]
