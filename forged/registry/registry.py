"""The model registry for programs without a daemon: in memory, safe from several threads.

Invariants:
- Each call is atomic; a refused one changes nothing.
- What is returned is the caller's own: changing it changes nothing in the registry.
"""

from __future__ import annotations

import threading
from bisect import insort

from msgspec.structs import replace

from forged.registry import errors
from forged.registry.model import (
    TRANSITIONS,
    DeploymentState,
    ModelMetadata,
    ModelVersion,
    ValidationResult,
    can_transition_state,
    checked_metadata,
    checked_result,
    checked_state,
    checked_version,
)

Key = tuple[str, ModelVersion]


class ModelRegistry:
    """All versions of all models. What it refuses is a `RegistryRefused`. No promotion needs evidence here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[Key, ModelMetadata] = {}
        self._versions: dict[str, list[ModelVersion]] = {}
        """Of each model, in ascending order."""
        self._in_state: dict[DeploymentState, set[Key]] = {state: set() for state in DeploymentState}
        self._validations: dict[Key, ValidationResult] = {}

    def register(self, metadata: ModelMetadata) -> None:
        """Add a version of a model; its state must be `registered`."""
        record = checked_metadata(metadata)
        if record.state is not DeploymentState.REGISTERED:
            raise errors.argument_invalid("state", record.state, DeploymentState.REGISTERED)
        key = record.model_id, record.version
        with self._lock:
            if key in self._records:
                raise errors.version_taken(*key)
            self._records[key] = record
            insort(self._versions.setdefault(record.model_id, []), record.version)
            self._in_state[record.state].add(key)

    def get(self, model_id: str, version: ModelVersion) -> ModelMetadata | None:
        with self._lock:
            record = self._records.get((model_id, version))
            return None if record is None else replace(record)

    def get_latest(self, model_id: str) -> ModelMetadata | None:
        """The highest version of a model, whatever its state."""
        with self._lock:
            versions = self._versions.get(model_id)
            return replace(self._records[model_id, versions[-1]]) if versions else None

    def list_versions(self, model_id: str) -> list[ModelVersion]:
        """All versions of a model, the lowest first."""
        with self._lock:
            return list(self._versions.get(model_id, ()))

    def transition_state(self, model_id: str, version: ModelVersion, new_state: DeploymentState) -> None:
        """Give a version a state that may follow its present one."""
        key, state = (model_id, checked_version(version)), checked_state(new_state)
        with self._lock:
            record = self._records.get(key)
            if record is None:
                raise errors.version_unknown(*key) if model_id in self._versions else errors.model_unknown(model_id)
            if not can_transition_state(record.state, state):
                raise errors.transition_refused(*key, record.state, state, TRANSITIONS[record.state])
            self._records[key] = replace(record, state=state)
            self._in_state[record.state].remove(key)
            self._in_state[state].add(key)

    def record_validation(self, result: ValidationResult) -> None:
        """Keep the newest result of a version; it may be recorded before the version is registered."""
        checked = checked_result(result)
        with self._lock:
            self._validations[checked.model_id, checked.version] = checked

    def get_validation(self, model_id: str, version: ModelVersion) -> ValidationResult | None:
        """The newest result that was recorded of a version."""
        with self._lock:
            result = self._validations.get((model_id, version))
            return None if result is None else replace(result)

    def find_by_state(self, state: DeploymentState) -> list[ModelMetadata]:
        """All versions in a state, by model id and version."""
        wanted = checked_state(state)
        with self._lock:
            return [replace(self._records[key]) for key in sorted(self._in_state[wanted])]

    def model_count(self) -> int:
        """How many models there are."""
        with self._lock:
            return len(self._versions)

    def version_count(self) -> int:
        """How many versions there are of all models."""
        with self._lock:
            return len(self._records)
