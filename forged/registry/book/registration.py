"""Registers versions, and takes in those that serve elsewhere.

Invariants:
- A version is registered once; neither its number nor its checksum ever changes.
- An import of versions that are known changes nothing, so an interrupted one may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from forged.auth.model import Principal, Role
from forged.catalog.model import CheckpointState
from forged.catalog.records import CheckpointRecord
from forged.errors import RequestRefused
from forged.kernel.messages import Decision
from forged.registry import errors
from forged.registry.book.draft import Draft
from forged.registry.book.evidence import keep_validation
from forged.registry.book.model import ALIASES_MAX, Model
from forged.registry.book.state import RegistryState, cost_of
from forged.registry.errors import argument_invalid
from forged.registry.messages import (
    IMPORTED_ALIASES_MAX,
    IMPORTED_MAX,
    SERVING,
    Artifact,
    ImportedModels,
    ImportedVersion,
    ImportModels,
    JournalKind,
    Lineage,
    ModelRegistered,
    RecordedValidation,
    RegisterModel,
)
from forged.registry.model import DeploymentState, ModelMetadata, ModelVersion, ValidationResult, checked_result
from forged.registry.names import checked_alias, form_of, namespace_of
from forged.registry.ports import OriginsPort
from forged.registry.records import (
    ENTRY_OVERHEAD_BYTES,
    MODEL_OVERHEAD_BYTES,
    REASON_CHARS_MAX,
    RECORD_BYTES_MAX,
    VersionDetails,
    VersionRecord,
    checked_artifact,
    checked_description,
    checked_lineage,
    checked_seconds,
    details_key,
    encoded,
    measured,
    require_size,
    shortened,
)
from forged.registry.versions import next_version

OPERATIONS_MAX = 40
"""Beyond so many operations an import begins its next decision."""
REFUSED_CHARS_MAX = 300


class NewVersion(NamedTuple):
    """A version that may be added."""

    record: VersionRecord
    details: VersionDetails
    aliases: list[str]
    validation: ValidationResult | None
    cost: int


class Registration:
    """Decides which versions there are."""

    def __init__(self, state: RegistryState, origins: OriginsPort) -> None:
        self._state = state
        self._origins = origins

    def register(self, request: RegisterModel, by: Principal, now: float) -> Decision[ModelMetadata]:
        """Add a version in the state `registered`."""
        given = request.metadata
        if given.state is not DeploymentState.REGISTERED:
            raise argument_invalid("state", given.state, f"{DeploymentState.REGISTERED.value}, or use an import")
        model = self._state.models.get(given.model_id)
        if request.bump:
            given = replace(given, version=next_version(model.highest if model else None, request.bump))
        _require_new(model, given.model_id, given.version)
        self._state.require_name(given.model_id, by)
        at = now if model is None else max(now, model.at)
        new = self._new(replace(given, registered_at=at), request.artifact, request.lineage, by)
        self._state.require_room(by.holder, new.cost)
        draft = Draft(self._state, by, now)
        self._add(draft, new, JournalKind.REGISTERED, shortened(request.reason))
        return draft.decided(new.record.metadata, self._state.job_of(given.model_id))

    def import_models(self, request: ImportModels, by: Principal, now: float) -> list[Decision[ImportedModels]]:
        """Add versions in the states that they have elsewhere."""
        if len(request.versions) > IMPORTED_MAX:
            raise argument_invalid("versions", f"{len(request.versions)} versions", f"at most {IMPORTED_MAX}")
        reply = ImportedModels([], [], [], [])
        new = list(self._to_import(request, by, now, reply))
        reply.serving.extend(self._to_serve(new))
        if request.dry_run or not new:
            return [Decision(reply)]
        return list(self._imported(new, request, by, now, reply))

    def _to_import(
        self, request: ImportModels, by: Principal, now: float, reply: ImportedModels
    ) -> Iterator[NewVersion]:
        """The versions that can be added; sorts all of them into the reply."""
        forms: dict[str, str] = {}
        planned: dict[tuple[str, ModelVersion], str] = {}
        aliases: dict[str, set[str]] = {}
        cost = 0
        for one in request.versions:
            name = f"{one.metadata.model_id}@{one.metadata.version}"
            key = one.metadata.model_id, one.metadata.version
            try:
                if self._is_known(one, planned):
                    reply.known.append(name)
                    continue
                self._state.require_name(one.metadata.model_id, by)
                other = forms.setdefault(form_of(one.metadata.model_id), one.metadata.model_id)
                if other != one.metadata.model_id:
                    raise errors.name_taken(one.metadata.model_id, other)
                new = self._imported_version(one, by, now)
                self._state.require_room(by.holder, cost + new.cost)
                self._plan_aliases(one.metadata.model_id, new.aliases, aliases)
            except RequestRefused as error:
                reply.refused.append(f"{name[:REFUSED_CHARS_MAX]}: {error.message}")
                continue
            planned[key] = one.metadata.checksum
            cost += new.cost
            reply.imported.append(name)
            yield new

    def _plan_aliases(self, model_id: str, new: list[str], planned: dict[str, set[str]]) -> None:
        """Add the aliases to those that the model would have; refuses too many."""
        model = self._state.models.get(model_id)
        names = planned.setdefault(model_id, set() if model is None else set(model.aliases))
        if len(names.union(new)) > ALIASES_MAX:
            raise argument_invalid("aliases", f"{len(names)} and more", f"at most {ALIASES_MAX} aliases of a model")
        names.update(new)

    def _to_serve(self, new: list[NewVersion]) -> Iterator[str]:
        """The models that are known, in which one of these versions is to serve."""
        versions = {one.record.model_id: one.record.version for one in new if SERVING in one.aliases}
        for model_id, version in versions.items():
            model = self._state.models.get(model_id)
            if model is not None:
                yield f"{model_id}@{version} instead of {model.serving or 'none'}"

    def _is_known(self, one: ImportedVersion, planned: dict[tuple[str, ModelVersion], str]) -> bool:
        model_id, version = one.metadata.model_id, one.metadata.version
        model = self._state.models.get(model_id)
        record = None if model is None else model.records.get(version)
        checksum = planned.get((model_id, version)) if record is None else record.metadata.checksum
        if checksum is None:
            _require_new(model, model_id, version)
            return False
        if checksum != one.metadata.checksum:
            raise errors.checksum_differs(model_id, version, checksum, one.metadata.checksum)
        return True

    def _imported_version(self, one: ImportedVersion, by: Principal, now: float) -> NewVersion:
        metadata = one.metadata
        aliases = list(dict.fromkeys(map(checked_alias, one.aliases)))
        if len(aliases) > IMPORTED_ALIASES_MAX:
            raise argument_invalid("aliases", f"{len(aliases)} aliases", f"at most {IMPORTED_ALIASES_MAX}")
        if SERVING in aliases and metadata.state is not DeploymentState.PRODUCTION:
            raise argument_invalid("aliases", SERVING, f"others for a version that is {metadata.state}")
        validation = None if one.validation is None else measured(checked_result(one.validation), ())
        if validation is not None and (validation.model_id, validation.version) != (
            metadata.model_id,
            metadata.version,
        ):
            raise argument_invalid("validation", f"{validation.model_id}@{validation.version}", "about the version")
        registered_at = checked_seconds("registered_at", metadata.registered_at) or now
        new = self._new(replace(metadata, registered_at=registered_at), one.artifact, None, by)
        return new._replace(aliases=aliases, validation=validation)

    def _imported(
        self, new: list[NewVersion], request: ImportModels, by: Principal, now: float, reply: ImportedModels
    ) -> Iterator[Decision[ImportedModels]]:
        reason = shortened(request.reason)
        draft, job = Draft(self._state, by, now), self._state.job_of(new[0].record.model_id)
        for one in new:
            job_of_this = self._state.job_of(one.record.model_id)
            if len(draft) > OPERATIONS_MAX or (len(draft) and job_of_this != job):
                yield draft.decided(reply, job)
            job = job_of_this
            self._add(draft, one, JournalKind.IMPORTED, reason)
        yield draft.decided(reply, job)

    # One version.

    def _new(self, metadata: ModelMetadata, artifact: Artifact, lineage: Lineage | None, by: Principal) -> NewVersion:
        """The version with what it was made from, checked; it is not added yet."""
        metadata, artifact = checked_description(metadata), checked_artifact(artifact)
        lineage = None if lineage is None else checked_lineage(lineage)
        checkpoint = self._checkpoint(metadata.model_id, artifact, by)
        if checkpoint is not None:
            artifact = replace(artifact, checkpoint_id=checkpoint.id, save_id=checkpoint.save_id, job=checkpoint.job)
            lineage = self._lineage(checkpoint)
        details = VersionDetails(artifact.files, lineage)
        has_details = bool(artifact.files or lineage)
        record = VersionRecord(
            metadata,
            by.name,
            by.holder,
            None if by.jobs is None else tuple(sorted(by.jobs)),
            replace(artifact, files=[]),
            details_bytes=len(encoded(details)) if has_details else 0,
            state_by=by.name,
        )
        size = len(encoded(record))
        whole = size + record.details_bytes
        require_size("the record of a version", whole, RECORD_BYTES_MAX, "give it fewer files and smaller tags")
        cost = cost_of(record, size) + MODEL_OVERHEAD_BYTES + ENTRY_OVERHEAD_BYTES + REASON_CHARS_MAX
        return NewVersion(record, details, [], None, cost)

    def _checkpoint(self, model_id: str, artifact: Artifact, by: Principal) -> CheckpointRecord | None:
        """The catalogued checkpoint of an artifact, if the principal may use it."""
        if not artifact.location or (artifact.files and not artifact.save_id):
            return None
        job = artifact.job or namespace_of(model_id)
        if not by.may(Role.WORKER, job):
            return None
        found = self._origins.checkpoint(job, artifact.location, artifact.save_id)
        if found is None:
            return None
        if found.meta.state is not CheckpointState.COMPLETE:
            raise errors.checkpoint_unusable(model_id, artifact.location, found.meta.state)
        return found

    def _lineage(self, checkpoint: CheckpointRecord) -> Lineage:
        meta, job = checkpoint.meta, checkpoint.job
        settings = dict(self._origins.settings(job) or {})
        audit = shortened(self._origins.audit(job, meta.epoch))
        return Lineage(job, meta.epoch, meta.step, dict(meta.metrics), settings, audit, meta.created_at)

    def _add(self, draft: Draft, new: NewVersion, kind: JournalKind, reason: str) -> None:
        metadata = new.record.metadata
        model_id, version = metadata.model_id, metadata.version
        model = self._state.models.get(model_id) or self._state.add_model(model_id)
        draft.put(model, new.record)
        number = draft.note(model, kind, version, now=metadata.state.value, reason=reason)
        draft.update(model, version, state_entry=number)
        if new.record.details_bytes:
            draft.write(details_key(model.digest, version), encoded(new.details))
        draft.tell(
            ModelRegistered(
                model_id,
                version,
                metadata.state,
                metadata.checksum,
                draft.by,
                kind is JournalKind.IMPORTED,
                new.record.artifact.checkpoint_id,
            )
        )
        if new.validation is not None:
            at = draft.now(model)
            keep_validation(draft, model, RecordedValidation(1, new.validation, metadata.checksum, {}, at, draft.by))
        for alias in new.aliases:
            draft.move_alias(model, alias, version, reason)


def _require_new(model: Model | None, model_id: str, version: ModelVersion) -> None:
    if model is not None and version in model.records:
        raise errors.version_taken(model_id, version)
    if model is not None and version in model.deleted:
        raise errors.version_deleted(model_id, version)
