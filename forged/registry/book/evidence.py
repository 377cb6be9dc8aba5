"""Evidence about versions: validations, what canaries report, whether the files are sound; and what a promotion needs.

Invariants:
- Only the newest validation counts: a failed one outweighs an older one that passed.
- A canary that was rolled back is promoted again on a validation that is newer than the rollback.
- Evidence is about the checksum of the version that it is recorded for.
"""

from __future__ import annotations

from shlex import quote
from typing import NamedTuple

from forged.auth.model import Principal
from forged.kernel.messages import Decision, Nothing
from forged.registry import errors
from forged.registry.book.draft import Draft
from forged.registry.book.model import UNSOUND, Model
from forged.registry.book.state import RegistryState
from forged.registry.errors import argument_invalid
from forged.registry.messages import (
    ArtifactState,
    CanaryAction,
    CanaryMeasured,
    JournalKind,
    ModelArtifactChecked,
    ModelPolicy,
    RecordedValidation,
    RecordValidation,
    ReportArtifact,
    ReportCanary,
    ValidationRecorded,
)
from forged.registry.model import DeploymentState, ModelVersion, ValidationResult, checked_result, is_rollback
from forged.registry.records import (
    ENTRY_OVERHEAD_BYTES,
    VALIDATION_BYTES_MAX,
    VALIDATIONS_KEPT,
    VersionRecord,
    encoded,
    measured,
    require_size,
    shortened,
    validation_key,
)
from forged.registry.selection import rollback_priority

GUARDED = frozenset({DeploymentState.STAGING, DeploymentState.CANARY, DeploymentState.PRODUCTION})
"""The states that a version is promoted to with evidence."""
BEFORE_CANARY = frozenset({DeploymentState.REGISTERED, DeploymentState.VALIDATING, DeploymentState.STAGING})
ENVIRONMENT_MAX = 64


class Missing(NamedTuple):
    """What a promotion lacks, and how to get it."""

    reason: str
    fix: str


def needs_evidence(was: DeploymentState, to: DeploymentState) -> bool:
    """Whether a transition is a promotion that needs evidence; back from canary is none."""
    return to in GUARDED and not is_rollback(was, to)


def missing(record: VersionRecord, policy: ModelPolicy, now: float) -> Missing | None:
    """What a version lacks to be promoted; None if nothing."""
    name = quote(f"{record.model_id}@{record.version}")
    validate = f"`forgectl models validate {name}`, or give a reason to waive it (`--waive`)"
    if record.artifact_state in UNSOUND:
        fix = f"repair the files and `forgectl models verify {name}`, or give a reason to waive it (`--waive`)"
        problem = f": {record.artifact_problem}" if record.artifact_problem else ""
        return Missing(f"its files are {record.artifact_state}{problem}", fix)
    if not policy.requires_validation:
        return None
    validation = record.validation
    if validation is None:
        return Missing("it was never validated", f"record a passing validation: {validate}")
    reason = _fault(record, validation, policy, now)
    return Missing(f"validation {validation.number} {reason}", f"record a better one: {validate}") if reason else None


def _fault(record: VersionRecord, validation: RecordedValidation, policy: ModelPolicy, now: float) -> str:
    """Why a validation of a version is no evidence; empty if it is."""
    result, age_s, checksum = validation.result, now - validation.at, record.metadata.checksum
    if not result.passed:
        return "has failed"
    if validation.number <= record.outdated_validations:
        return "is older than its rollback from canary"
    if validation.checksum != checksum:
        return f"is about {validation.checksum}, not about {checksum}"
    if age_s > policy.evidence_max_age_s:
        return f"is {age_s / 86_400:.1f} days old; limit {policy.evidence_max_age_s / 86_400:.1f}"
    most, least = policy.max_latency_p99_ms, policy.min_accuracy
    # NaN is within no limit.
    if most is not None and not result.latency_p99_ms <= most:
        return f"has a p99 latency of {result.latency_p99_ms:g} ms; limit {most:g}"
    if least is not None and not result.accuracy_score >= least:
        return f"has an accuracy of {result.accuracy_score:g}; required {least:g}"
    return ""


class Evidence:
    """Records what is reported about versions."""

    def __init__(self, state: RegistryState) -> None:
        self._state = state

    def validate(self, request: RecordValidation, by: Principal, now: float) -> Decision[RecordedValidation]:
        """Keep a validation of a version."""
        result = measured(checked_result(request.result), request.samples_ms)
        model = self._state.model(result.model_id)
        record = model.record(result.version)
        if request.checksum != record.metadata.checksum:
            raise errors.checksum_differs(model.model_id, record.version, record.metadata.checksum, request.checksum)
        _check_environment(request.environment)
        draft = Draft(self._state, by, now)
        validation = RecordedValidation(
            1 if record.validation is None else record.validation.number + 1,
            result,
            request.checksum,
            request.environment,
            draft.now(model),
            draft.by,
            len(request.samples_ms),
        )
        require_size("a validation", len(encoded(validation)), VALIDATION_BYTES_MAX, "report less of the environment")
        self._state.require_room(record.holder, 2 * len(encoded(validation)) + ENTRY_OVERHEAD_BYTES)
        keep_validation(draft, model, validation)
        return draft.decided(validation, self._state.job_of(model.model_id))

    def measure(self, request: ReportCanary, by: Principal, now: float) -> Decision[CanaryMeasured]:
        """Keep what a version shows in service, and compare a canary with the version that serves."""
        result = measured(checked_result(request.result), request.samples_ms)
        model = self._state.model(result.model_id)
        record = model.record(result.version)
        is_canary = record.state is DeploymentState.CANARY
        if not is_canary and record.version != model.serving:
            leads_to_canary = record.state in BEFORE_CANARY
            raise errors.not_measurable(model.model_id, record.version, record.state, leads_to_canary=leads_to_canary)
        growth = len(encoded(result)) - (0 if record.report is None else len(encoded(record.report)))
        self._state.require_room(record.holder, max(growth, 0))
        draft = Draft(self._state, by, now)
        draft.update(model, record.version, report=result)
        reply = _compared(model, record, result) if is_canary else _as_baseline(model, record)
        if is_canary:
            draft.tell(reply)
        return draft.decided(reply, self._state.job_of(model.model_id))

    def check_files(self, request: ReportArtifact, by: Principal, now: float) -> Decision[Nothing]:
        """Keep what a verification of a version's files has found."""
        model = self._state.model(request.model_id)
        record = model.record(request.version)
        if request.state is ArtifactState.UNVERIFIED:
            raise argument_invalid("state", request.state, "what was found: sound, damaged or missing")
        problem = shortened(request.problem)
        draft = Draft(self._state, by, now)
        draft.update(
            model,
            record.version,
            artifact_state=request.state,
            artifact_checked_at=draft.now(model),
            artifact_problem=problem,
        )
        if request.state is not record.artifact_state:
            draft.tell(ModelArtifactChecked(model.model_id, record.version, request.state, problem))
        return draft.decided(Nothing(), self._state.job_of(model.model_id))


def keep_validation(draft: Draft, model: Model, validation: RecordedValidation) -> None:
    """Make it the newest validation of its version; beyond `VALIDATIONS_KEPT` the oldest one goes."""
    result, value = validation.result, encoded(validation)
    version = result.version
    now = "passed" if result.passed else "failed"
    draft.note(model, JournalKind.VALIDATED, version, now=now, evidence=validation.number)
    sizes = (*draft.record(model, version).validation_sizes, len(value))
    if len(sizes) > VALIDATIONS_KEPT:
        sizes = sizes[1:]
        draft.write(validation_key(model.digest, version, validation.number - VALIDATIONS_KEPT), None)
    draft.write(validation_key(model.digest, version, validation.number), value)
    draft.update(model, version, validation=validation, validation_sizes=sizes)
    draft.tell(
        ValidationRecorded(
            model.model_id,
            version,
            validation.number,
            result.passed,
            result.latency_p99_ms,
            result.accuracy_score,
            validation.by,
        )
    )


def _compared(model: Model, record: VersionRecord, result: ValidationResult) -> CanaryMeasured:
    """A canary's metrics against those of the serving version."""
    baseline, source = _baseline(model)
    priority = 0.0 if baseline is None else rollback_priority(result, baseline)
    policy = model.policy
    if baseline is None:
        reason = source
    else:
        reason = f"rollback priority {priority:.3g}, threshold {policy.rollback_threshold:g}, compared with {source}"
    return CanaryMeasured(
        model.model_id,
        record.version,
        model.serving if baseline is not None else None,
        priority,
        policy.rollback_threshold,
        policy.canary,
        reason,
        record.state_entry,
    )


def _as_baseline(model: Model, record: VersionRecord) -> CanaryMeasured:
    policy = model.policy
    reason = "the version serves: later canaries are compared with it"
    return CanaryMeasured(
        model.model_id, record.version, record.version, 0.0, policy.rollback_threshold, CanaryAction.OFF, reason
    )


def _baseline(model: Model) -> tuple[ValidationResult | None, str]:
    """What canaries are compared with, and what it is, in words."""
    serving: ModelVersion | None = model.serving
    if serving is None:
        return None, "no version serves that it could be compared with"
    record = model.record(serving)
    if record.report is not None:
        return record.report, f"what {serving} has reported"
    if record.validation is not None:
        return record.validation.result, f"validation {record.validation.number} of {serving}"
    return None, f"version {serving} serves, and has neither reported nor was it validated"


def _check_environment(environment: dict[str, str]) -> None:
    if len(environment) > ENVIRONMENT_MAX:
        raise argument_invalid("environment", f"{len(environment)} entries", f"at most {ENVIRONMENT_MAX} entries")
    for key, value in environment.items():
        if not key or not (key.isprintable() and value.isprintable()):
            raise argument_invalid(f"environment {key}", value, "printable characters")
