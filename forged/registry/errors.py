"""The refusals of the model registry.

Invariants:
- Every refusal names the model, the version or the argument that it is about, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from shlex import quote
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


class NameTaken(RegistryRefused):
    """Another model has a name that counts as the same."""


class EvidenceMissing(RegistryRefused):
    """A promotion has no evidence that the model's policy accepts, or evidence is about other files."""


class VersionInUse(RegistryRefused):
    """The version serves, may be promoted yet, or an alias names it."""


def argument_invalid(name: str, value: object, wanted: str) -> ModelInvalid:
    return ModelInvalid("model_argument_invalid", str(Problem(name, value, wanted)), f"correct {name}")


def version_unknown(model_id: str, version: ModelVersion) -> ModelUnknown:
    text = f"model {model_id[:SHOWN_CHARS]!r} has no version {version}"
    return about(model_id, version, ModelUnknown("model_version_unknown", text, _see_versions(model_id)))


def model_unknown(model_id: str) -> ModelUnknown:
    text = f"there is no model {model_id[:SHOWN_CHARS]!r}"
    return about(model_id, None, ModelUnknown("model_unknown", text, "list the models, as `forgectl models ls` does"))


def version_taken(model_id: str, version: ModelVersion) -> VersionTaken:
    text = f"model {model_id[:SHOWN_CHARS]!r} has version {version} already"
    return about(model_id, version, VersionTaken("model_version_taken", text, "register another version"))


def transition_refused(
    model_id: str,
    version: ModelVersion,
    state: DeploymentState,
    wanted: object,
    following: Iterable[DeploymentState],
    fix: str = "",
) -> TransitionRefused:
    """`following` are the states that may follow the present one; `fix` is needed if the version serves."""
    allowed = " or ".join(sorted(following))
    text = f"version {version} of model {model_id[:SHOWN_CHARS]!r} is {state}; it cannot become {wanted}"
    fix = fix or (f"it can become {allowed}" if allowed else "register a new version")
    return about(model_id, version, TransitionRefused("model_transition_refused", text, fix))


def reference_unknown(model_id: str, ref: str) -> ModelUnknown:
    text = f"model {model_id[:SHOWN_CHARS]!r} has no version and no alias {ref[:SHOWN_CHARS]!r}"
    return about(model_id, None, ModelUnknown("model_reference_unknown", text, _see_versions(model_id)))


def version_deleted(model_id: str, version: ModelVersion) -> VersionTaken:
    text = f"model {model_id[:SHOWN_CHARS]!r} had a version {version}, which was deleted; no number is given twice"
    return about(model_id, version, VersionTaken("model_version_taken", text, "register another version"))


def name_taken(model_id: str, other: str) -> NameTaken:
    text = f"model_id {model_id[:SHOWN_CHARS]!r} cannot be told from that of the model {other!r}"
    return about(model_id, None, NameTaken("model_name_taken", text, f"use {other!r}, or another name"))


def state_changed(
    model_id: str, version: ModelVersion, state: DeploymentState, by: str, expected: DeploymentState
) -> TransitionRefused:
    text = f"version {version} of model {model_id[:SHOWN_CHARS]!r} is {state} by {by}, not {expected} as the caller saw"
    return about(
        model_id, version, TransitionRefused("model_state_changed", text, "look at it again and repeat the request")
    )


def serves(model_id: str, version: ModelVersion, successor: ModelVersion | None) -> TransitionRefused:
    """`successor` is the version that a rollback would return to."""
    text = f"version {version} of model {model_id[:SHOWN_CHARS]!r} serves"
    return about(
        model_id, version, TransitionRefused("model_serving", text, ends_serving(model_id, version, successor))
    )


def ends_serving(model_id: str, version: ModelVersion, successor: ModelVersion | None) -> str:
    """How the serving version is taken out of service."""
    command = (
        f"transition {quote(f'{model_id}@{version}')} deprecated --reason REASON` ends the service of the model"
        if successor is None
        else f"rollback {quote(model_id)}` returns to {successor}"
    )
    return f"promote another version to production first, or `forgectl models {command}"


def evidence_missing(
    model_id: str, version: ModelVersion, state: DeploymentState, reason: str, fix: str
) -> EvidenceMissing:
    text = f"version {version} of model {model_id[:SHOWN_CHARS]!r} cannot become {state}: {reason}"
    return about(model_id, version, EvidenceMissing("model_evidence_missing", text, fix))


def checksum_differs(model_id: str, version: ModelVersion, checksum: str, given: str) -> EvidenceMissing:
    text = f"checksum must be {checksum}, that of version {version} of {model_id[:SHOWN_CHARS]!r}, got {given!r}"
    fix = "validate the files of this version"
    return about(model_id, version, EvidenceMissing("model_checksum_differs", text, fix))


def rollback_refused(model_id: str, version: ModelVersion | None, reason: str, fix: str) -> TransitionRefused:
    text = f"model {model_id[:SHOWN_CHARS]!r} cannot be rolled back: {reason}"
    return about(model_id, version, TransitionRefused("model_rollback_refused", text, fix))


def not_measurable(
    model_id: str, version: ModelVersion, state: DeploymentState, *, leads_to_canary: bool
) -> TransitionRefused:
    text = f"version {version} of model {model_id[:SHOWN_CHARS]!r} is {state}; only canaries and the serving one report"
    fix = (
        f"`forgectl models promote {quote(f'{model_id}@{version}')}` leads to canary"
        if leads_to_canary
        else "report the version that is in service"
    )
    return about(model_id, version, TransitionRefused("model_not_measurable", text, fix))


def in_use(model_id: str, version: ModelVersion, reason: str, fix: str) -> VersionInUse:
    text = f"version {version} of model {model_id[:SHOWN_CHARS]!r} cannot be deleted: {reason}"
    return about(model_id, version, VersionInUse("model_version_in_use", text, fix))


def checkpoint_unusable(model_id: str, path: str, reason: str) -> ModelInvalid:
    text = f"the checkpoint at {path[:SHOWN_CHARS]!r} is {reason}"
    return about(model_id, None, ModelInvalid("model_checkpoint_unusable", text, "register a complete checkpoint"))


def _see_versions(model_id: str) -> str:
    return f"list its versions, as `forgectl models versions {quote(model_id[:SHOWN_CHARS])}` does"


def about(model_id: str, version: ModelVersion | None, error: Refusal) -> Refusal:
    """The refusal, with what it is about."""
    error.model_id = model_id
    error.version = version
    return error
