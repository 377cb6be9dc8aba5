"""Planted bugs of the registry, and the promise that each of them breaks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from forged.auth.model import Principal, Role
from forged.kernel.messages import Decision, Record
from forged.registry.book import evidence, lifecycle, registration, state
from forged.registry.book.draft import Draft
from forged.registry.book.evidence import Evidence
from forged.registry.book.lifecycle import Lifecycle
from forged.registry.book.model import Model
from forged.registry.book.state import RegistryState
from forged.registry.messages import (
    SERVING,
    CanaryAction,
    CanaryMeasured,
    JournalKind,
    ModelPolicy,
    RecordedValidation,
    RecordValidation,
    RollBackModel,
    TransitionModel,
)
from forged.registry.model import DeploymentState, ModelVersion
from forged.registry.names import require_access
from forged.registry.records import AliasMove, VersionRecord, encoded
from forged.registry.service import RegistryService
from tests.registry.stored_registry import OPERATOR
from tests.simulation.registry.oracle import Promise

Mutant = Callable[[], Any]


@contextmanager
def promote_without_evidence() -> Iterator[None]:
    """No promotion is checked."""
    with patch.object(lifecycle, "missing", lambda record, policy, now: None):
        yield


@contextmanager
def accept_expired_evidence() -> Iterator[None]:
    """The age of a validation does not matter."""
    missing = evidence.missing

    def ageless(record: VersionRecord, policy: ModelPolicy, now: float) -> Any:
        return missing(record, replace(policy, evidence_max_age_s=1e10), now)

    with patch.object(lifecycle, "missing", ageless):
        yield


@contextmanager
def accept_evidence_that_failed() -> Iterator[None]:
    """A failed validation does not replace one that passed."""
    keep = evidence.keep_validation

    def generous(draft: Draft, model: Model, validation: RecordedValidation) -> None:
        before = draft.record(model, validation.result.version).validation
        keep(draft, model, validation)
        if before is not None and before.result.passed and not validation.result.passed:
            draft.update(model, validation.result.version, validation=replace(before, number=validation.number))

    with patch.object(evidence, "keep_validation", generous):
        yield


@contextmanager
def accept_evidence_from_before_a_rollback() -> Iterator[None]:
    """A canary that was rolled back is promoted again on the same validation."""
    with patch("forged.registry.book.draft.is_rollback", lambda was, to: False):
        yield


@contextmanager
def accept_evidence_about_other_files() -> Iterator[None]:
    """A validation is recorded whatever its checksum."""
    validate = Evidence.validate

    def careless(self: Evidence, request: RecordValidation, by: Principal, now: float) -> Any:
        record = self._state.record(request.result.model_id, request.result.version)
        decision = validate(self, replace(request, checksum=record.metadata.checksum), by, now)
        writes = dict(decision.writes)
        for key in writes:
            if key.startswith("model-validation/") and writes[key] is not None:
                writes[key] = encoded(replace(decision.reply, checksum=request.checksum))
        return Decision(decision.reply, decision.facts, writes, decision.job)

    with patch.object(Evidence, "validate", careless):
        yield


@contextmanager
def ignore_the_limits_of_the_policy() -> Iterator[None]:
    """Any latency and accuracy is good enough."""
    missing = evidence.missing

    def lax(record: VersionRecord, policy: ModelPolicy, now: float) -> Any:
        return missing(record, replace(policy, max_latency_p99_ms=None, min_accuracy=None), now)

    with patch.object(lifecycle, "missing", lax):
        yield


@contextmanager
def forget_the_waiver() -> Iterator[None]:
    """Why evidence was waived is not recorded."""
    change_state = Draft.change_state

    def silent(self: Draft, *arguments: Any, waiver: str = "", **more: Any) -> VersionRecord:
        return change_state(self, *arguments, **more)

    with patch.object(Draft, "change_state", silent):
        yield


@contextmanager
def move_aliases_without_a_journal() -> Iterator[None]:
    """An alias names another version, and no entry says so."""

    def silent(self: Draft, model: Model, alias: str, version: ModelVersion | None, reason: str) -> None:
        self._state.set_alias(model, alias, version)
        self._models[model.model_id] = model

    with patch.object(Draft, "move_alias", silent):
        yield


@contextmanager
def skip_a_number() -> Iterator[None]:
    """A deletion uses up two numbers of the journal."""
    note = Draft.note

    def hasty(self: Draft, model: Model, kind: JournalKind, *arguments: Any, **more: Any) -> int:
        model.entries += kind is JournalKind.TAGGED
        return note(self, model, kind, *arguments, **more)

    with patch.object(Draft, "note", hasty):
        yield


@contextmanager
def write_the_time_as_it_is() -> Iterator[None]:
    """The times of a journal follow a clock that goes back."""
    with patch.object(Draft, "now", lambda self, model: self._now):
        yield


@contextmanager
def change_states_without_a_journal() -> Iterator[None]:
    """A version has another state, and no entry says so."""

    def silent(self: Draft, model: Model, version: ModelVersion, to: DeploymentState, *_: Any, **__: Any) -> Any:
        self._models[model.model_id] = model
        metadata = replace(self.record(model, version).metadata, state=to)
        return self.update(model, version, metadata=metadata)

    with patch.object(Draft, "change_state", silent):
        yield


@contextmanager
def change_states_without_a_fact() -> Iterator[None]:
    """A transition is in the journal only."""
    change_state = Draft.change_state

    def silent(self: Draft, *arguments: Any, **more: Any) -> VersionRecord:
        record = change_state(self, *arguments, **more)
        self._facts.pop()
        return record

    with patch.object(Draft, "change_state", silent):
        yield


@contextmanager
def split_a_promotion() -> Iterator[None]:
    """The transition is one decision, and the move of `serving` another one, which may get lost."""
    transition = Lifecycle.transition

    def hasty(self: Lifecycle, request: TransitionModel, by: Principal, now: float) -> Any:
        decision = transition(self, request, by, now)
        journal = [key for key in decision.writes if key.startswith("model-journal/")]
        late = {key: value for key, value in decision.writes.items() if key in journal[1:] or "move" in key}
        writes = {key: value for key, value in decision.writes.items() if key not in late}
        return Decision(decision.reply, decision.facts[:1], writes, decision.job)

    with patch.object(Lifecycle, "transition", hasty):
        yield


@contextmanager
def deprecate_what_serves() -> Iterator[None]:
    """The last serving version is deprecated, and `serving` goes on to name it."""
    move_alias = Draft.move_alias

    def careless(self: Draft, model: Model, alias: str, version: ModelVersion | None, reason: str) -> None:
        if alias != SERVING or version is not None:
            move_alias(self, model, alias, version, reason)

    with patch.object(Draft, "move_alias", careless):
        yield


@contextmanager
def return_to_a_retired_version() -> Iterator[None]:
    """A rollback returns to the version that served before, whatever its state."""

    def careless(self: Model, unfit: object = ()) -> ModelVersion | None:
        served = [move.version for move in self.moves.get(SERVING, []) if move.version in self.records]
        return next((one for one in reversed(served) if one != self.serving), None)

    with patch.object(Model, "predecessor", careless), patch.object(lifecycle, "is_in_production", lambda record: True):
        yield


@contextmanager
def roll_back_twice() -> Iterator[None]:
    """A canary is rolled back, made one again, and rolled back for the same measurement."""
    judge = RegistryService._judge

    async def again(self: RegistryService, record: Record) -> Any:
        decision = await judge(self, record)
        fact = record.fact
        if isinstance(fact, CanaryMeasured) and fact.action is CanaryAction.ACT and fact.priority >= fact.threshold:
            known = self.state.models[fact.model_id].records.get(fact.version)
            if known is not None and known.state is DeploymentState.STAGING:
                model = self.state.models[fact.model_id]
                draft = Draft(self.state, OPERATOR, self._clock.wall())
                draft.change_state(model, fact.version, DeploymentState.CANARY, "again", waiver="again")
                self._bus.ledger.append(draft.decided(None, self.state.job_of(fact.model_id)))
                await self._bus.ask(RollBackModel(fact.model_id, fact.version))
        return decision

    with patch.object(RegistryService, "_judge", again):
        yield


@contextmanager
def forget_measurements_at_restart() -> Iterator[None]:
    """A new daemon judges only what was measured since it started."""
    judge = RegistryService._judge

    async def forgetful(self: RegistryService, record: Record) -> Any:
        is_first = record.id <= self.__dict__.setdefault("restarted_at", self._bus.ledger.durable)
        return None if is_first else await judge(self, record)

    with patch.object(RegistryService, "_judge", forgetful):
        yield


@contextmanager
def roll_back_good_canaries() -> Iterator[None]:
    """Every measurement is bad enough."""
    is_bad = Lifecycle._is_bad

    def harsh(self: Lifecycle, fact: CanaryMeasured, action: CanaryAction) -> bool:
        return is_bad(self, replace(fact, threshold=0.0, priority=1.0), action)

    with patch.object(Lifecycle, "_is_bad", harsh):
        yield


@contextmanager
def act_instead_of_advising() -> Iterator[None]:
    """A rollback that is to be advised is done."""
    is_bad = Lifecycle._is_bad

    def eager(self: Lifecycle, fact: CanaryMeasured, action: CanaryAction) -> bool:
        return is_bad(self, replace(fact, action=CanaryAction.ACT), action)

    with patch.object(Lifecycle, "_is_bad", eager):
        yield


@contextmanager
def advise_again_and_again() -> Iterator[None]:
    """Each bad measurement is advice."""
    advice = Lifecycle.advice

    def chatty(self: Lifecycle, fact: CanaryMeasured, *arguments: Any) -> Any:
        known = self._state.models[fact.model_id].records.get(fact.version)
        if known is not None and known.advised_entry:
            self._state.models[fact.model_id].records[fact.version] = replace(known, advised_entry=0)
        return advice(self, fact, *arguments)

    with patch.object(Lifecycle, "advice", chatty):
        yield


@contextmanager
def order_versions_as_text() -> Iterator[None]:
    """Version 0.10.0 comes before version 0.9.0."""

    def put(self: Model, record: VersionRecord) -> None:
        if record.version not in self.records:
            insort(self.versions, record.version, key=str)
            self.note_version(record.version)
        self.records[record.version] = record

    def remove(self: Model, version: ModelVersion) -> None:
        del self.records[version]
        del self.versions[bisect_left(self.versions, str(version), key=str)]

    with patch.object(Model, "put", put), patch.object(Model, "remove", remove):
        yield


@contextmanager
def give_numbers_again() -> Iterator[None]:
    """A deleted version's number is free."""
    require = registration._require_new

    def careless(model: Model | None, model_id: str, version: ModelVersion) -> None:
        if model is not None:
            model.deleted.pop(version, None)
        require(model, model_id, version)

    with patch.object(registration, "_require_new", careless):
        yield


@contextmanager
def forget_deletions_at_restart() -> Iterator[None]:
    """A new daemon does not know which numbers were given."""
    load = RegistryState.load

    def forgetful(self: RegistryState, heads: Any, records: Any, moves: Any, deleted: Mapping[str, bytes]) -> None:
        load(self, heads, records, moves, {})

    with patch.object(RegistryState, "load", forgetful):
        yield


@contextmanager
def forget_moves_at_restart() -> Iterator[None]:
    """A new daemon does not know what served before."""
    load = RegistryState.load

    def forgetful(self: RegistryState, heads: Any, records: Any, moves: Any, deleted: Any) -> None:
        load(self, heads, records, {}, deleted)

    with patch.object(RegistryState, "load", forgetful):
        yield


@contextmanager
def tell_what_serves_next() -> Iterator[None]:
    """What served at a time is the first move after it."""

    def late(self: Model, alias: str, at: float) -> AliasMove | None:
        return next((move for move in self.moves.get(alias, []) if move.at > at), None)

    with patch.object(Model, "served_at", late):
        yield


@contextmanager
def leave_versions_in_their_old_state() -> Iterator[None]:
    """The index by state is not changed by a transition."""
    properties = state._properties

    def lazy(record: VersionRecord) -> Any:
        return {what for what in properties(record) if what[0] != "state"} | {("state", DeploymentState.REGISTERED)}

    with patch.object(state, "_properties", lazy):
        yield


@contextmanager
def acknowledge_before_it_is_done() -> Iterator[None]:
    """A tag is acknowledged and not stored."""
    tag = Lifecycle.tag

    def lazy(self: Lifecycle, *arguments: Any) -> Any:
        decision = tag(self, *arguments)
        return Decision(decision.reply, (), {}, decision.job)

    with patch.object(Lifecycle, "tag", lazy):
        yield


@contextmanager
def show_models_to_everybody() -> Iterator[None]:
    """Lists and searches have the models of all jobs."""
    with (
        patch("forged.registry.book.questions.sees", lambda principal, model_id: True),
        patch("forged.registry.book.questions.Questions._visible", lambda self, by, after: iter(self._state.ids)),
    ):
        yield


@contextmanager
def look_before_checking_rights() -> Iterator[None]:
    """A tenant learns by the refusal that there is no such model."""

    def late(principal: Principal, needed: Role, model_id: str) -> None:
        if "none" not in model_id:
            require_access(principal, needed, model_id)

    with patch("forged.registry.service.require_access", late):
        yield


MUTANTS: dict[str, Mutant] = {}
BREAKS: dict[str, Promise] = {}
"""The promise that each of them breaks."""

for mutant, promise in (
    (promote_without_evidence, Promise.EVIDENCE),
    (accept_expired_evidence, Promise.EVIDENCE),
    (accept_evidence_that_failed, Promise.EVIDENCE),
    (accept_evidence_from_before_a_rollback, Promise.EVIDENCE),
    (accept_evidence_about_other_files, Promise.EVIDENCE),
    (ignore_the_limits_of_the_policy, Promise.EVIDENCE),
    (forget_the_waiver, Promise.EVIDENCE),
    (move_aliases_without_a_journal, Promise.JOURNAL),
    (skip_a_number, Promise.JOURNAL),
    (write_the_time_as_it_is, Promise.JOURNAL),
    (change_states_without_a_journal, Promise.JOURNAL),
    (change_states_without_a_fact, Promise.FACTS),
    (split_a_promotion, Promise.JOURNAL),
    (deprecate_what_serves, Promise.SERVING),
    (return_to_a_retired_version, Promise.SERVING),
    (roll_back_twice, Promise.ROLLBACK),
    (forget_measurements_at_restart, Promise.ROLLBACK),
    (roll_back_good_canaries, Promise.ROLLBACK),
    (act_instead_of_advising, Promise.ROLLBACK),
    (advise_again_and_again, Promise.ROLLBACK),
    (order_versions_as_text, Promise.ORDER),
    (give_numbers_again, Promise.ORDER),
    (forget_deletions_at_restart, Promise.ANSWERS),
    (forget_moves_at_restart, Promise.ANSWERS),
    (tell_what_serves_next, Promise.ANSWERS),
    (leave_versions_in_their_old_state, Promise.ANSWERS),
    (acknowledge_before_it_is_done, Promise.KEPT),
    (show_models_to_everybody, Promise.REFUSED),
    (look_before_checking_rights, Promise.REFUSED),
):
    MUTANTS[mutant.__name__] = mutant
    BREAKS[mutant.__name__] = promise
