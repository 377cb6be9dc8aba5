"""From the versions of an MLflow registry to versions that can be imported.

Invariants:
- Version N of a model becomes N.0.0. A name, alias or tag is never changed: what cannot be taken as it is, is refused
  with a reason, except an alias that is not allowed here, which becomes a tag.
- The highest version in the stage Production serves, as in MLflow `models:/NAME/Production` is that one; a version in
  production that has the alias `serving` serves in its place.
- What MLflow knows and this registry has no field for becomes a tag that begins with `mlflow.`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from forged.errors import RequestRefused
from forged.registry.messages import IMPORTED_ALIASES_MAX, SERVING, Artifact, ImportedVersion
from forged.registry.model import NUMBER_MAX, DeploymentState, ModelMetadata, ModelVersion
from forged.registry.names import checked_alias
from forged.registry.records import RECORD_BYTES_MAX, checked_artifact

FRAMEWORK = "mlflow"
PREFIX = "mlflow."
STATES: Mapping[str, DeploymentState] = {
    "": DeploymentState.REGISTERED,
    "None": DeploymentState.REGISTERED,
    "Staging": DeploymentState.STAGING,
    "Production": DeploymentState.PRODUCTION,
    "Archived": DeploymentState.ARCHIVED,
}
DELETED_STAGE = "Deleted_Internal"
PROMPT = {"mlflow.prompt.is_prompt": "true"}
"""A tag: MLflow keeps prompts beside models, and its own client does not list them as models."""
READY = frozenset({"", "READY"})
METRICS_MAX = 200
"""So many metrics of a run become tags; the others are counted in one."""


class FoundModel(msgspec.Struct, frozen=True):
    """A registered model of MLflow."""

    name: str
    description: str = ""
    tags: dict[str, str] = {}
    aliases: dict[str, str] = {}
    """The version that each alias names."""


class FoundVersion(msgspec.Struct, frozen=True):
    """A version of a registered model of MLflow."""

    name: str
    version: str
    stage: str = ""
    status: str = ""
    created_ms: int = 0
    description: str = ""
    source: str = ""
    location: str = ""
    """Where the files are, if `source` is a reference."""
    run_id: str = ""
    user_id: str = ""
    tags: dict[str, str] = {}


class FoundRegistry(msgspec.Struct, frozen=True):
    """What was read from an MLflow registry."""

    models: dict[str, FoundModel]
    versions: list[FoundVersion]
    metrics: dict[str, dict[str, float]]
    """Of each run, the last value of each metric."""
    refused: list[str] = []
    """With reasons."""


class MlflowRegistry(msgspec.Struct, frozen=True):
    """The versions of an MLflow registry as they can be imported."""

    versions: list[ImportedVersion]
    """By model and version."""
    refused: list[str]
    """What cannot be imported, each with the reason."""


class _NotImportable(Exception):
    """The reason why one version is left out."""


def converted(found: FoundRegistry) -> MlflowRegistry:
    versions: list[ImportedVersion] = []
    refused = list(found.refused)
    serving = _serving(found)
    for one in found.versions:
        model = found.models.get(one.name, FoundModel(one.name))
        if one.stage == DELETED_STAGE or PROMPT.items() & (one.tags.items() | model.tags.items()):
            continue
        try:
            is_serving = serving.get(one.name) == one.version
            versions.append(_imported(one, model, found.metrics.get(one.run_id, {}), is_serving=is_serving))
        except _NotImportable as reason:
            refused.append(f"{one.name}@{one.version}: {reason}")
    versions.sort(key=lambda one: (one.metadata.model_id, one.metadata.version))
    return MlflowRegistry(versions, refused)


def _serving(found: FoundRegistry) -> dict[str, str]:
    """The version of each model that serves, if one does."""
    in_production = [one for one in found.versions if STATES.get(one.stage) is DeploymentState.PRODUCTION]
    in_production.sort(key=lambda one: (len(one.version), one.version))
    serving = {one.name: one.version for one in in_production}
    named = {name: model.aliases.get(SERVING) for name, model in found.models.items()}
    return serving | {one.name: one.version for one in in_production if named.get(one.name) == one.version}


def _imported(
    found: FoundVersion, model: FoundModel, metrics: Mapping[str, float], *, is_serving: bool
) -> ImportedVersion:
    if found.stage not in STATES:
        raise _NotImportable(f"its stage must be one of {', '.join(filter(None, STATES))}, got {found.stage!r}")
    if found.status not in READY:
        raise _NotImportable(f"its status must be READY, got {found.status!r}")
    of_version = [alias for alias, version in model.aliases.items() if version == found.version]
    aliases, others = _sorted_out(of_version, is_serving=is_serving)
    metadata = ModelMetadata(
        model_id=found.name,
        name=found.name,
        version=_version(found.version),
        framework=FRAMEWORK,
        input_shape=(),
        output_shape=(),
        size_bytes=0,
        checksum=f"{FRAMEWORK}:{found.name}/{found.version}",
        registered_at=found.created_ms / 1000,
        state=STATES[found.stage],
        tags=_tags(found, model, others, metrics),
    )
    imported = ImportedVersion(metadata, aliases, _artifact(found))
    if (size := len(msgspec.msgpack.encode(imported))) > RECORD_BYTES_MAX:
        raise _NotImportable(f"it must have at most {RECORD_BYTES_MAX:,} bytes, got {size:,}")
    return imported


def _version(text: str) -> ModelVersion:
    """Version N as N.0.0."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(NUMBER_MAX)) else -1
    if not 0 <= number <= NUMBER_MAX or str(number) != text:
        raise _NotImportable(f"its version must be a number from 0 to {NUMBER_MAX}, got {text!r}")
    return ModelVersion(number, 0, 0)


def _sorted_out(aliases: Iterable[str], *, is_serving: bool) -> tuple[list[str], list[str]]:
    """Those that are aliases here, and the others."""
    allowed = [SERVING] if is_serving else []
    others: list[str] = []
    for alias in sorted(aliases):
        if alias != SERVING or not is_serving:
            is_taken = alias != SERVING and len(allowed) < IMPORTED_ALIASES_MAX and _is_allowed(alias)
            (allowed if is_taken else others).append(alias)
    return allowed, others


def _is_allowed(alias: str) -> bool:
    try:
        checked_alias(alias)
    except RequestRefused:
        return False
    return True


def _artifact(found: FoundVersion) -> Artifact:
    """Where the files are, if that is a path or URL that can be read without MLflow."""
    try:
        return checked_artifact(Artifact(location=found.location or found.source))
    except RequestRefused:
        return Artifact()


def _tags(
    found: FoundVersion, model: FoundModel, aliases: Iterable[str], metrics: Mapping[str, float]
) -> dict[str, str]:
    tags = dict(found.tags)
    for key, value in _further_tags(found, model, aliases, metrics):
        if tags.setdefault(key, value) != value:
            raise _NotImportable(f"its tag {key!r} must be {value!r}, got {tags[key]!r}")
    return tags


def _further_tags(
    found: FoundVersion, model: FoundModel, aliases: Iterable[str], metrics: Mapping[str, float]
) -> Iterator[tuple[str, str]]:
    texts = {
        "description": found.description,
        "source": found.source,
        "run_id": found.run_id,
        "user_id": found.user_id,
        "model.description": model.description,
    }
    yield from ((f"{PREFIX}{key}", value) for key, value in texts.items() if value)
    yield from ((f"{PREFIX}model.tag.{key}", value) for key, value in model.tags.items())
    yield from ((f"{PREFIX}alias.{alias}", found.version) for alias in aliases)
    named = sorted(metrics)
    yield from ((f"{PREFIX}metric.{key}", repr(metrics[key])) for key in named[:METRICS_MAX])
    if len(named) > METRICS_MAX:
        yield f"{PREFIX}metrics_left_out", str(len(named) - METRICS_MAX)
