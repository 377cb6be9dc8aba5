"""The life of a version: promotions with evidence, rollbacks, aliases, policies, deletion.

Invariants:
- A refusal changes nothing, and names the state that the version has.
- `serving` names a version in production, or none; only promotion, rollback and the end of a model's service move it.
- A canary is rolled back once for each time that it was made one.
"""

from __future__ import annotations

from shlex import quote

from msgspec.structs import asdict, replace

from forged.auth.model import Principal
from forged.kernel.messages import Decision, Nothing
from forged.registry import errors
from forged.registry.book.draft import Draft
from forged.registry.book.evidence import missing, needs_evidence
from forged.registry.book.model import ALIASES_MAX, Model, is_in_production
from forged.registry.book.state import RegistryState
from forged.registry.errors import TransitionRefused, argument_invalid
from forged.registry.messages import (
    SERVING,
    CanaryAction,
    CanaryMeasured,
    DeleteModel,
    JournalKind,
    ModelDeleted,
    ModelPolicy,
    ModelPolicyChanged,
    ModelRolledBack,
    ModelTagged,
    MoveAlias,
    RollbackAdvised,
    RollBackModel,
    SetModelPolicy,
    TagModel,
    TransitionModel,
)
from forged.registry.model import TRANSITIONS, DeploymentState, ModelMetadata, ModelVersion, can_transition_state
from forged.registry.names import checked_alias
from forged.registry.records import (
    ENTRY_OVERHEAD_BYTES,
    MOVE_OVERHEAD_BYTES,
    REASON_CHARS_MAX,
    RECORD_BYTES_MAX,
    TAG_OVERHEAD_BYTES,
    VersionRecord,
    checked_policy,
    checked_tags,
    details_key,
    encoded,
    require_size,
    shortened,
    validation_key,
)

ENTRIES_BYTES_MAX = MOVE_OVERHEAD_BYTES + 4 * (ENTRY_OVERHEAD_BYTES + REASON_CHARS_MAX)
"""What a decision adds to a journal at most, about."""
TOWARDS_DELETION = {
    DeploymentState.VALIDATING: DeploymentState.REGISTERED,
    DeploymentState.STAGING: DeploymentState.REGISTERED,
    DeploymentState.CANARY: DeploymentState.STAGING,
    DeploymentState.PRODUCTION: DeploymentState.DEPRECATED,
    DeploymentState.DEPRECATED: DeploymentState.ARCHIVED,
}
"""The next state on the shortest way to one in which a version can be deleted."""


class Lifecycle:
    """Decides what happens to versions that are registered."""

    def __init__(self, state: RegistryState) -> None:
        self._state = state

    # States.

    def transition(self, request: TransitionModel, by: Principal, now: float) -> Decision[ModelMetadata]:
        """Give a version a state that may follow its present one."""
        model = self._state.model(request.model_id)
        record = model.record(request.version)
        draft = Draft(self._state, by, now)
        evidence, waiver = self._check(model, record, request, draft.now(model))
        self._require_room_for_entries(by)
        reason = shortened(request.reason)
        if request.to is DeploymentState.DEPRECATED and record.version == model.serving:
            draft.move_alias(model, SERVING, None, reason)
        draft.change_state(model, record.version, request.to, reason, waiver=waiver, evidence=evidence)
        if request.to is DeploymentState.PRODUCTION:
            draft.move_alias(model, SERVING, record.version, reason)
        metadata = draft.record(model, record.version).metadata
        return draft.decided(metadata, self._state.job_of(model.model_id))

    def _check(self, model: Model, record: VersionRecord, request: TransitionModel, now: float) -> tuple[int, str]:
        """The validation that a transition rests on, and the waiver that it needs; or a refusal."""
        name, was, to = (model.model_id, record.version), record.state, request.to
        _require_expected(record, request.expected)
        is_serving = record.version == model.serving
        if not can_transition_state(was, to):
            fix = errors.ends_serving(*name, model.predecessor()) if is_serving else ""
            raise errors.transition_refused(*name, was, to, TRANSITIONS[was], fix)
        if is_serving:
            successor = model.predecessor()
            if successor is not None or not shortened(request.reason):
                raise errors.serves(*name, successor)
        if not needs_evidence(was, to):
            return 0, ""
        waiver = shortened(request.waiver)
        lacking = missing(record, model.policy, now)
        if lacking is not None:
            if not waiver:
                raise errors.evidence_missing(*name, to, lacking.reason, lacking.fix)
            return 0, waiver
        rests_on = record.validation if model.policy.requires_validation else None
        return 0 if rests_on is None else rests_on.number, ""

    def _require_room_for_entries(self, by: Principal) -> None:
        """A journal grows by each decision."""
        self._state.require_room(by.holder, ENTRIES_BYTES_MAX)

    # Rollback. It is never refused for want of room.

    def roll_back(self, request: RollBackModel, by: Principal, now: float) -> Decision[ModelRolledBack]:
        """Take a canary, or the serving version, out of service."""
        model = self._state.model(request.model_id)
        version = request.version or model.serving
        if version is None:
            fix = "name the canary that is to be rolled back"
            raise errors.rollback_refused(model.model_id, None, "no version serves", fix)
        record = model.record(version)
        _require_expected(record, request.expected)
        draft, reason = Draft(self._state, by, now), shortened(request.reason)
        if record.state is DeploymentState.CANARY:
            done = self._roll_back_canary(draft, model, record, request.to, reason)
        else:
            done = self._roll_back_serving(draft, model, record, request.to, reason)
        draft.tell(done)
        return draft.decided(done, self._state.job_of(model.model_id))

    def _roll_back_canary(
        self, draft: Draft, model: Model, record: VersionRecord, to: ModelVersion | None, reason: str
    ) -> ModelRolledBack:
        if to is not None and to != model.serving:
            why = f"{record.version} is a canary, and {model.serving or 'no version'} serves whatever becomes of it"
            raise errors.rollback_refused(model.model_id, record.version, why, "roll it back without `to`")
        was, now = DeploymentState.CANARY, DeploymentState.STAGING
        draft.note(model, JournalKind.ROLLED_BACK, record.version, was=was.value, now=now.value, reason=reason)
        draft.change_state(model, record.version, now, reason)
        return ModelRolledBack(model.model_id, record.version, model.serving, draft.by, reason)

    def _roll_back_serving(
        self, draft: Draft, model: Model, record: VersionRecord, to: ModelVersion | None, reason: str
    ) -> ModelRolledBack:
        failed = record.version
        if failed != model.serving:
            why = f"{failed} is {record.state}, and neither a canary nor the serving version"
            raise errors.rollback_refused(model.model_id, failed, why, "name a version that is in service")
        successor = model.predecessor() if to is None else to
        if successor is None:
            raise _nothing_to_return_to(model, failed)
        if successor == failed or not is_in_production(model.record(successor)):
            why = f"{successor} is {model.record(successor).state}, and cannot serve instead of {failed}"
            raise errors.rollback_refused(model.model_id, failed, why, "name another version that is in production")
        draft.note(
            model,
            JournalKind.ROLLED_BACK,
            failed,
            alias=SERVING,
            was=str(failed),
            now=str(successor),
            reason=reason,
        )
        draft.move_alias(model, SERVING, successor, reason)
        draft.change_state(model, failed, DeploymentState.DEPRECATED, reason)
        return ModelRolledBack(model.model_id, failed, successor, draft.by, reason)

    # The judgement of canaries.

    def to_roll_back(self, fact: CanaryMeasured) -> RollBackModel | None:
        """The rollback that a measurement demands: of a canary that is still the one that was measured."""
        if not self._is_bad(fact, CanaryAction.ACT):
            return None
        reason = f"its metrics in service: {fact.reason}"
        # A plugin may let the request wait, and the canary be promoted meanwhile.
        return RollBackModel(fact.model_id, fact.version, reason=reason, expected=DeploymentState.CANARY)

    def advice(self, fact: CanaryMeasured, by: Principal, now: float) -> Decision[None] | None:
        """Advise a rollback, once for each time that a version is a canary."""
        if not self._is_bad(fact, CanaryAction.ADVISE):
            return None
        model = self._state.model(fact.model_id)
        if model.record(fact.version).advised_entry == fact.entry:
            return None
        draft = Draft(self._state, by, now)
        draft.update(model, fact.version, advised_entry=fact.entry)
        draft.tell(RollbackAdvised(fact.model_id, fact.version, fact.priority, fact.threshold, fact.reason))
        return draft.decided(None, self._state.job_of(fact.model_id))

    def _is_bad(self, fact: CanaryMeasured, action: CanaryAction) -> bool:
        model = self._state.models.get(fact.model_id)
        record = None if model is None else model.records.get(fact.version)
        return (
            fact.action is action
            and fact.baseline is not None
            and fact.priority >= fact.threshold
            and record is not None
            and record.state is DeploymentState.CANARY
            and record.state_entry == fact.entry
        )

    # Aliases, policies, tags.

    def move_alias(self, request: MoveAlias, by: Principal, now: float) -> Decision[Nothing]:
        """Let an alias name a version, or none."""
        model = self._state.model(request.model_id)
        alias = request.alias if request.version is None else checked_alias(request.alias)
        if alias == SERVING:
            raise argument_invalid("alias", alias, "another one: only promotion and rollback move it")
        if request.version is not None:
            model.record(request.version)
            if alias not in model.aliases and len(model.aliases) >= ALIASES_MAX:
                raise argument_invalid("alias", alias, f"one of the model's {ALIASES_MAX} aliases; remove one first")
        if model.aliases.get(alias) == request.version:
            return Decision(Nothing())
        self._require_room_for_entries(by)
        draft = Draft(self._state, by, now)
        draft.move_alias(model, alias, request.version, shortened(request.reason))
        return draft.decided(Nothing(), self._state.job_of(model.model_id))

    def set_policy(self, request: SetModelPolicy, by: Principal, now: float) -> Decision[ModelPolicy]:
        """Replace a model's policy."""
        model, policy = self._state.model(request.model_id), checked_policy(request.policy)
        if policy == model.policy:
            return Decision(policy)
        self._require_room_for_entries(by)
        draft, reason = Draft(self._state, by, now), shortened(request.reason)
        before, after = asdict(model.policy), asdict(policy)
        changed = [key for key in after if before[key] != after[key]]
        was, new = (", ".join(f"{key}={values[key]}" for key in changed) for values in (before, after))
        model.policy = policy
        draft.note(model, JournalKind.POLICY_CHANGED, was=was, now=new, reason=reason)
        draft.tell(ModelPolicyChanged(model.model_id, policy, draft.by, reason))
        return draft.decided(policy, self._state.job_of(model.model_id))

    def tag(self, request: TagModel, by: Principal, now: float) -> Decision[ModelMetadata]:
        """Set and remove tags of a version. To remove one that it does not have is no error."""
        model = self._state.model(request.model_id)
        record = model.record(request.version)
        before = record.metadata.tags
        kept = {key: value for key, value in before.items() if key not in request.remove}
        tags = checked_tags(kept | request.set)
        changed = {key: value for key, value in request.set.items() if before.get(key) != value}
        removed = [key for key in request.remove if key in before and key not in request.set]
        metadata = replace(record.metadata, tags=tags)
        if not changed and not removed:
            return Decision(metadata)
        size = len(encoded(metadata)) - len(encoded(record.metadata))
        grown = size + TAG_OVERHEAD_BYTES * (len(tags) - len(before))
        whole = len(encoded(record)) + record.details_bytes + size
        require_size("the record of a version", whole, RECORD_BYTES_MAX, "keep large values in files")
        self._state.require_room(record.holder, max(grown, 0))
        self._require_room_for_entries(by)
        draft = Draft(self._state, by, now)
        what = ", ".join([*(f"{key}={value}" for key, value in changed.items()), *(f"-{key}" for key in removed)])
        draft.note(model, JournalKind.TAGGED, record.version, now=shortened(what))
        draft.update(model, record.version, metadata=metadata)
        draft.tell(ModelTagged(model.model_id, record.version, changed, removed, draft.by))
        return draft.decided(metadata, self._state.job_of(model.model_id))

    # Deletion.

    def delete(self, request: DeleteModel, by: Principal, now: float) -> Decision[Nothing]:
        """Delete a version that is archived, or registered and not wanted for the reason given; no alias names it."""
        model = self._state.model(request.model_id)
        record = model.record(request.version)
        name, reason = (model.model_id, record.version), shortened(request.reason)
        if record.state in TOWARDS_DELETION:
            raise errors.in_use(*name, f"it is {record.state}", _way_to_deletion(model, record))
        if record.state is DeploymentState.REGISTERED and not reason:
            fix = f"give a reason: `forgectl models rm {_typed(record)} --reason REASON`"
            raise errors.in_use(*name, "it is registered, and may be promoted yet", fix)
        if aliases := model.aliases_of(record.version):
            raise errors.in_use(*name, f"alias {aliases[0]} names it", "move or remove the alias first")
        draft = Draft(self._state, by, now)
        draft.note(model, JournalKind.DELETED, record.version, was=record.state.value, reason=reason)
        draft.tell(ModelDeleted(*name, draft.by, reason))
        draft.delete(model, record.version)
        if record.details_bytes:
            draft.write(details_key(model.digest, record.version), None)
        if record.validation is not None:
            last = record.validation.number
            for number in range(last - len(record.validation_sizes) + 1, last + 1):
                draft.write(validation_key(model.digest, record.version, number), None)
        return draft.decided(Nothing(), self._state.job_of(model.model_id))


def _require_expected(record: VersionRecord, expected: DeploymentState | None) -> None:
    if expected is not None and record.state is not expected:
        raise errors.state_changed(record.model_id, record.version, record.state, record.state_by, expected)


def _nothing_to_return_to(model: Model, failed: ModelVersion) -> TransitionRefused:
    damaged = model.predecessor(unfit=())
    if damaged is None:
        why = f"no version that served before {failed} is in production"
        return errors.rollback_refused(model.model_id, failed, why, errors.ends_serving(model.model_id, failed, None))
    record = model.record(damaged)
    why = f"{damaged} served before, and its files are {record.artifact_state}"
    command = f"`forgectl models rollback {quote(model.model_id)} --to {damaged}`"
    fix = f"verify {damaged} again, or return to it nevertheless: {command}"
    return errors.rollback_refused(model.model_id, failed, why, fix)


def _way_to_deletion(model: Model, record: VersionRecord) -> str:
    if record.version == model.serving:
        return errors.ends_serving(model.model_id, record.version, model.predecessor())
    state = TOWARDS_DELETION[record.state]
    command = f"`forgectl models transition {_typed(record)} {state}`"
    return f"only archived and registered versions are deleted: {command} is the next step"


def _typed(record: VersionRecord) -> str:
    """The version as it is typed on a command line."""
    return quote(f"{record.model_id}@{record.version}")
