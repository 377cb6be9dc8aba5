"""A decision about models while it is made: its entries in the journals, its writes and facts.

Invariants:
- A change of a version's state and of an alias has an entry in the journal, and a fact, in the same decision.
- The entries of a model are numbered without gaps, and their times never go back.
"""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec.structs import replace

from forged.auth.model import Principal
from forged.kernel.messages import Decision, Fact
from forged.registry.book.model import Model
from forged.registry.book.state import RegistryState
from forged.registry.messages import AliasMoved, JournalEntry, JournalKind, ModelTransitioned
from forged.registry.model import DeploymentState, ModelVersion, is_rollback
from forged.registry.records import (
    ENTRY_OVERHEAD_BYTES,
    HEADS,
    MODEL_OVERHEAD_BYTES,
    MOVE_OVERHEAD_BYTES,
    AliasMove,
    StoredEntry,
    VersionRecord,
    deleted_key,
    encoded,
    entry_key,
    move_key,
    record_key,
)

R = TypeVar("R")


class Draft:
    """What one decision changes. Nothing may be refused after its first change."""

    def __init__(self, state: RegistryState, by: Principal, now: float) -> None:
        self.by = by.name
        self._state = state
        self._holder = by.holder
        self._now = now
        self._facts: list[Fact] = []
        self._writes: dict[str, bytes | None] = {}
        self._changed: dict[tuple[str, ModelVersion], VersionRecord] = {}
        self._models: dict[str, Model] = {}

    def __len__(self) -> int:
        """About how many operations its transaction has."""
        return len(self._facts) + len(self._writes) + len(self._changed) + len(self._models)

    def now(self, model: Model) -> float:
        """The time of the model's next entry."""
        return max(self._now, model.at)

    def record(self, model: Model, version: ModelVersion) -> VersionRecord:
        """The version as this decision leaves it."""
        return self._changed.get((model.model_id, version)) or model.record(version)

    def put(self, model: Model, record: VersionRecord) -> None:
        self._changed[model.model_id, record.version] = record

    def update(self, model: Model, version: ModelVersion, **changes: Any) -> VersionRecord:
        record = replace(self.record(model, version), **changes)
        self.put(model, record)
        return record

    def write(self, key: str, value: bytes | None) -> None:
        self._writes[key] = value

    def tell(self, fact: Fact) -> None:
        self._facts.append(fact)

    def note(self, model: Model, kind: JournalKind, version: ModelVersion | None = None, **more: Any) -> int:
        """Add an entry to the model's journal; returns its number."""
        model.at = self.now(model)
        model.entries += 1
        entry = JournalEntry(model.entries, model.at, self.by, kind, version, **more)
        self._models[model.model_id] = model
        previous = 0
        if version is not None:
            previous = self.record(model, version).last_entry
            self.update(model, version, last_entry=model.entries)
        value = encoded(StoredEntry(entry, previous))
        self.write(entry_key(model.digest, entry.number), value)
        overhead = ENTRY_OVERHEAD_BYTES if entry.number > 1 else ENTRY_OVERHEAD_BYTES + MODEL_OVERHEAD_BYTES
        self._state.charge(model, self._holder, overhead + len(value))
        return entry.number

    def change_state(
        self,
        model: Model,
        version: ModelVersion,
        to: DeploymentState,
        reason: str,
        *,
        waiver: str = "",
        evidence: int = 0,
    ) -> VersionRecord:
        """Give a version another state."""
        was = self.record(model, version)
        number = self.note(
            model,
            JournalKind.TRANSITIONED,
            version,
            was=was.state.value,
            now=to.value,
            reason=reason,
            waiver=waiver,
            evidence=evidence,
        )
        self.tell(ModelTransitioned(model.model_id, version, was.state, to, self.by, reason, waiver))
        # What a canary has shown is the first baseline of its successors.
        report = was.report if to is DeploymentState.PRODUCTION else None
        outdated = was.outdated_validations
        if was.validation is not None and is_rollback(was.state, to):
            outdated = was.validation.number
        return self.update(
            model,
            version,
            metadata=replace(was.metadata, state=to),
            state_entry=number,
            state_by=self.by,
            report=report,
            outdated_validations=outdated,
        )

    def move_alias(self, model: Model, alias: str, version: ModelVersion | None, reason: str) -> None:
        """Let an alias name another version, or none."""
        was = model.aliases.get(alias)
        number = self.note(
            model,
            JournalKind.ALIAS_MOVED,
            version,
            alias=alias,
            was="" if was is None else str(was),
            now="" if version is None else str(version),
            reason=reason,
        )
        self._state.set_alias(model, alias, version)
        move = AliasMove(model.at, number, alias, version)
        self._state.add_move(model, move)
        value = encoded(move)
        self.write(move_key(model.digest, number), value)
        self._state.charge(model, self._holder, MOVE_OVERHEAD_BYTES + len(value))
        self.tell(AliasMoved(model.model_id, alias, was, version, self.by, reason))

    def delete(self, model: Model, version: ModelVersion) -> None:
        """Forget a version; its entries stay."""
        self._settle()
        self._state.remove(model, version)
        self.write(record_key(model.digest, version), None)
        self.write(deleted_key(model.digest, version), b"%d" % model.deleted[version])

    def decided(self, reply: R, job: str) -> Decision[R]:
        """The decision; the draft is empty again."""
        self._settle()
        for model in self._models.values():
            self.write(HEADS + model.digest, encoded(model.head))
        decision = Decision(reply, tuple(self._facts), self._writes, job)
        self._facts, self._writes, self._models = [], {}, {}
        return decision

    def _settle(self) -> None:
        for (model_id, version), record in self._changed.items():
            model = self._state.models[model_id]
            value = encoded(record)
            self.write(record_key(model.digest, version), value)
            self._state.put(model, record, len(value))
        self._changed = {}
