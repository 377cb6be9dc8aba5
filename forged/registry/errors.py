"""The refusals of the model registry.

Invariants:
- Every refusal names the model, the version or the argument that it is about, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

from forged.errors import Problem, RequestRefused

if TYPE_CHECKING:
    from forged.registry.model import DeploymentState, ModelVersion

Refusal = TypeVar("Refusal", bound="RegistryRefused")
SHOWN_CHARS = 200


class RegistryRefused(RequestRefused):
    """The base of these refusals. `model_id` is empty, and `version` None, if it is about none."""

    model_id: str = ""
    version: ModelVersion | None = None


class ModelInvalid(RegistryRefused):
    """An argument or a record has values that no model can have."""


class ModelUnknown(RegistryRefused):
    """The registry has no such model, or no such version of it."""


class VersionTaken(RegistryRefused):
    """The model has this version already."""


class TransitionRefused(RegistryRefused):
    """The version's state does not allow the change."""


def argument_invalid(name: str, value: object, wanted: str) -> ModelInvalid:
    return ModelInvalid("model_argument_invalid", str(Problem(name, value, wanted)), f"correct {name}")


def version_unknown(model_id: str, version: ModelVersion) -> ModelUnknown:
    text = f"model {model_id[:SHOWN_CHARS]!r} has no version {version}"
    return about(model_id, version, ModelUnknown("model_version_unknown", text, "list the versions of the model"))


def model_unknown(model_id: str) -> ModelUnknown:
    text = f"there is no model {model_id[:SHOWN_CHARS]!r}"
    return about(model_id, None, ModelUnknown("model_unknown", text, "list the models"))


def version_taken(model_id: str, version: ModelVersion) -> VersionTaken:
    text = f"model {model_id[:SHOWN_CHARS]!r} has version {version} already"
    return about(model_id, version, VersionTaken("model_version_taken", text, "register another version"))


def transition_refused(
    model_id: str, version: ModelVersion, state: DeploymentState, wanted: object, following: Iterable[DeploymentState]
) -> TransitionRefused:
    """`following` are the states that may follow the present one."""
    allowed = " or ".join(sorted(following))
    text = f"version {version} of model {model_id[:SHOWN_CHARS]!r} is {state}; it cannot become {wanted}"
    fix = f"it can become {allowed}" if allowed else "register a new version"
    return about(model_id, version, TransitionRefused("model_transition_refused", text, fix))


def about(model_id: str, version: ModelVersion | None, error: Refusal) -> Refusal:
    """The refusal, with what it is about."""
    error.model_id = model_id
    error.version = version
    return error
