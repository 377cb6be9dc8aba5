"""The invariants of the registry's simulation.

The oracle sees every durable transaction of the store and what callers were told. It replays each journal on its own,
and compares the rest of the store, the facts and the answers with it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from forged.kernel.ledger import FACT_PREFIX
from forged.kernel.messages import Record
from forged.kernel.store.port import Transaction
from forged.registry.book.evidence import GUARDED
from forged.registry.book.model import UNSOUND
from forged.registry.messages import (
    AliasMoved,
    CanaryAction,
    CanaryMeasured,
    JournalEntry,
    JournalKind,
    ModelDeleted,
    ModelPolicy,
    ModelPolicyChanged,
    ModelRegistered,
    ModelRolledBack,
    ModelTagged,
    ModelTransitioned,
    RecordedValidation,
    RollbackAdvised,
    ServedVersion,
    ValidationRecorded,
)
from forged.registry.model import DeploymentState, ModelVersion
from forged.registry.names import digest_of
from forged.registry.records import (
    DELETED,
    HEADS,
    JOURNAL,
    MOVES,
    RECORDS,
    VALIDATIONS,
    AliasMove,
    ModelHead,
    VersionRecord,
    decoded_entry,
    decoded_head,
    decoded_move,
    decoded_record,
    decoded_validation,
)
from forged.registry.versions import parse_version
from tests.registry.stored_registry import Told
from tests.simulation.oracle import StoreOracle

DAEMON = "daemon"
CANARY, STAGING = DeploymentState.CANARY, DeploymentState.STAGING
Saying = tuple[Any, ...]
"""What an entry of a journal and its fact have in common."""


class Promise(Enum):
    """What the registry promises."""

    JOURNAL = "replaying a journal gives the state; its numbers have no gaps and its times never go back"
    FACTS = "facts and journals say the same"
    EVIDENCE = "a version is promoted with evidence, or with a recorded waiver"
    SERVING = "`serving` names a version in production"
    ROLLBACK = "a bad canary is rolled back once, and no other version by the daemon"
    KEPT = "what was acknowledged stays"
    ORDER = "versions are listed by their numbers; the next one is above all that there ever were"
    ANSWERS = "questions are answered as the journals say"
    REFUSED = "a tenant neither sees nor changes the models of another job"


@dataclass
class StoredModel:
    """What the store holds of one model, and what its journal says."""

    told: Told = field(default_factory=Told)
    journal: list[JournalEntry] = field(default_factory=list)
    head: ModelHead | None = None
    records: dict[ModelVersion, VersionRecord] = field(default_factory=dict)
    moves: list[AliasMove] = field(default_factory=list)
    validations: dict[ModelVersion, RecordedValidation] = field(default_factory=dict)
    """The newest one of each version."""
    canary_entries: dict[ModelVersion, int] = field(default_factory=dict)
    """The entry by which each canary became one."""
    canary_times: Counter[ModelVersion] = field(default_factory=Counter)
    validated: dict[ModelVersion, int] = field(default_factory=dict)
    """The number of the newest validation of each version, by the journal."""
    outdated: dict[ModelVersion, int] = field(default_factory=dict)
    """That number when the version was last rolled back as a canary."""

    @property
    def ever(self) -> set[ModelVersion]:
        """All versions that there ever were."""
        return {*self.told.states, *self.told.deleted}

    def served_at(self, at: float, alias: str) -> ServedVersion:
        moves = [move for move in self.moves if move.alias == alias and move.at <= at]
        return ServedVersion(moves[-1].version, moves[-1].at, moves[-1].entry) if moves else ServedVersion(None, None)


@dataclass
class RegistryOracle(StoreOracle):
    """Collects what happens and checks the promises."""

    prefixes = (RECORDS, HEADS, JOURNAL, MOVES, VALIDATIONS, DELETED)
    met: Callable[[str], None]
    bad_canary: Callable[[], None] = lambda: None
    """Called when a measurement that demands a rollback is durable."""
    stored: dict[str, bytes] = field(default_factory=dict)
    models: defaultdict[str, StoredModel] = field(default_factory=lambda: defaultdict(StoredModel))
    """By the digest of the id."""

    def __post_init__(self) -> None:
        self._bad: dict[Saying, CanaryMeasured] = {}
        """The measurements that demand a rollback, by model, version and entry."""
        self._rolled_back: Counter[Saying] = Counter()
        self._advised: Counter[tuple[str, ModelVersion]] = Counter()

    def model(self, model_id: str) -> StoredModel:
        return self.models[digest_of(model_id)]

    # What becomes durable.

    def committed(self, transaction: Transaction) -> None:
        puts = {key: value for key, value in transaction.puts.items() if key.startswith(self.prefixes)}
        gone = [key for key in transaction.deletes if key.startswith(self.prefixes)]
        facts = [Record.read(value) for key, value in transaction.puts.items() if key.startswith(FACT_PREFIX)]
        if puts or gone or facts:
            self._changed(facts, puts, gone)

    def loaded(self, facts: Sequence[Record], entries: Mapping[str, bytes]) -> None:
        puts = {key: value for key, value in entries.items() if self.stored.get(key) != value}
        gone = [key for key in self.stored if key not in entries]
        lost = [key for key in gone if key.startswith((JOURNAL, MOVES, HEADS, DELETED))]
        if lost:
            self.violated(Promise.KEPT, f"{lost} are lost")
        if facts or puts or gone:
            self._changed(facts, puts, gone)

    def _changed(self, facts: Sequence[Record], puts: Mapping[str, bytes], gone: Sequence[str]) -> None:
        for key in gone:
            self.stored.pop(key, None)
            self._forget(key)
        self.stored |= puts
        for record in facts:
            self.facts[record.id] = record
            if isinstance(record.fact, CanaryMeasured):
                self._measured(record.fact)
        # Values before entries: an entry is judged by them.
        for key in sorted(puts):
            self._keep(key, puts[key])
        said, told = self._hear_entries(puts), self._hear_facts(facts)
        if said != told:
            self.violated(Promise.FACTS, f"the journals say {said - told}, and the facts {told - said}")
        for digest in sorted({key.split("/")[1] for key in puts}):
            self._compare(self.models[digest])

    def _hear_entries(self, puts: Mapping[str, bytes]) -> Counter[Saying]:
        said: Counter[Saying] = Counter()
        for key in sorted(puts):
            if key.startswith(JOURNAL):
                digest, entry = key.split("/")[1], decoded_entry(puts[key]).entry
                said[(digest, *_said_by(entry))] += 1
                self._hear(digest, entry)
        return said

    def _hear_facts(self, facts: Sequence[Record]) -> Counter[Saying]:
        sayings = (_told_by(record.fact) for record in facts)
        for record in facts:
            if isinstance(record.fact, RollbackAdvised):
                self._check_advice(record.fact)
        return Counter(saying for saying in sayings if saying is not None)

    def _keep(self, key: str, value: bytes) -> None:
        digest = key.split("/")[1]
        model = self.models[digest]
        if key.startswith(RECORDS):
            record = decoded_record(value)
            model.records[record.version] = record
        elif key.startswith(HEADS):
            model.head = decoded_head(value)
        elif key.startswith(MOVES):
            model.moves.append(decoded_move(value))
        elif key.startswith(VALIDATIONS):
            validation = decoded_validation(value)
            model.validations[validation.result.version] = validation

    def _forget(self, key: str) -> None:
        if key.startswith(RECORDS):
            _, digest, text = key.split("/")
            version = parse_version(text)
            assert version is not None
            self.models[digest].records.pop(version, None)

    def _hear(self, digest: str, entry: JournalEntry) -> None:
        model = self.models[digest]
        model.told.hear(entry)
        model.journal.append(entry)
        self.met(f"entry: {entry.kind}")
        version = entry.version
        if version is None:
            return
        if entry.kind is JournalKind.VALIDATED:
            model.validated[version] = entry.evidence
            self._check_validation(model, version)
        elif entry.kind is JournalKind.ROLLED_BACK and entry.by == DAEMON:
            self._check_rolled_back(digest, version)
        elif entry.kind in (JournalKind.TRANSITIONED, JournalKind.IMPORTED) and entry.now == CANARY:
            model.canary_entries[version] = entry.number
            model.canary_times[version] += 1
        if entry.kind is JournalKind.TRANSITIONED:
            self._check_evidence(model, entry, version)

    def _check_validation(self, model: StoredModel, version: ModelVersion) -> None:
        record, validation = model.records.get(version), model.validations.get(version)
        if record is not None and validation is not None and validation.checksum != record.metadata.checksum:
            self.violated(Promise.EVIDENCE, f"{validation} is about other files than {record.metadata}")

    def _check_evidence(self, model: StoredModel, entry: JournalEntry, version: ModelVersion) -> None:
        is_rollback = (entry.was, entry.now) == (CANARY, STAGING)
        if is_rollback:
            model.outdated[version] = model.validated.get(version, 0)
        record, head = model.records.get(version), model.head
        if DeploymentState(entry.now) not in GUARDED or is_rollback or record is None or head is None:
            return
        validation = model.validations.get(version)
        is_demanded = head.policy.requires_validation
        is_sound = record.artifact_state not in UNSOUND
        has_evidence = (
            validation is not None
            and validation.number > model.outdated.get(version, 0)
            and _is_evidence(validation, record, head.policy, entry.at)
        )
        if is_sound and (has_evidence or not is_demanded):
            right = validation.number if is_demanded and validation is not None else 0
            if (entry.evidence, entry.waiver) != (right, ""):
                self.violated(Promise.EVIDENCE, f"{entry} does not name the evidence {right}")
            self.met("a promotion rests on evidence")
        elif not entry.waiver or entry.evidence:
            self.violated(Promise.EVIDENCE, f"{entry} rests on {validation}, by {head.policy}")
        else:
            self.met("evidence is waived")

    def _compare(self, model: StoredModel) -> None:
        told = model.told
        if told.problems:
            self.violated(Promise.JOURNAL, told.problems.pop(0))
        told.check_serving()
        if told.problems:
            self.violated(Promise.SERVING, told.problems.pop(0))
        if model.head is None:
            self.violated(Promise.JOURNAL, "a model has no head")
            return
        told.compare(model.head, model.records, model.moves)
        if told.problems:
            self.violated(Promise.JOURNAL, told.problems.pop(0))

    # Canaries.

    def _check_advice(self, fact: RollbackAdvised) -> None:
        self.met("a rollback is advised")
        key = fact.model_id, fact.version
        self._advised[key] += 1
        if self._advised[key] > self.model(fact.model_id).canary_times[fact.version]:
            self.violated(Promise.ROLLBACK, f"a rollback of {key} is advised more than once")

    def _measured(self, fact: CanaryMeasured) -> None:
        self.met("a canary is measured")
        if fact.action is CanaryAction.ACT and fact.baseline is not None and fact.priority >= fact.threshold:
            self._bad[digest_of(fact.model_id), fact.version, fact.entry] = fact
            self.bad_canary()

    def _check_rolled_back(self, digest: str, version: ModelVersion) -> None:
        self.met("a canary is rolled back by the daemon")
        entry = self.models[digest].canary_entries.get(version, 0)
        key = digest, version, entry
        if key not in self._bad:
            self.violated(Promise.ROLLBACK, f"nothing bad was measured of {version} since it is a canary, by {entry}")
        self._rolled_back[key] += 1
        if self._rolled_back[key] > 1:
            self.violated(Promise.ROLLBACK, f"{version} is rolled back again, a canary by {entry}")

    def unsettled(self) -> list[str]:
        """The bad canaries that are still canaries."""
        return [
            f"{version} of {fact.model_id} is a canary since entry {entry}"
            for (digest, version, entry), fact in self._bad.items()
            if self.models[digest].told.states.get(version) is CANARY
            and self.models[digest].canary_entries.get(version) == entry
        ]

    # What callers are told.

    def acknowledged(self, model_id: str, kind: JournalKind, version: ModelVersion | None, by: str, after: int) -> None:
        """A caller's change was acknowledged: it is in the journal, after the entries at the time of its request."""
        journal = self.model(model_id).journal
        if not any((one.kind, one.version, one.by) == (kind, version, by) for one in journal[after:]):
            self.broken(Promise.KEPT, f"{kind} of {model_id}@{version} by {by} is not in the journal")

    def entries(self, model_id: str) -> int:
        """How many entries the journal has."""
        return len(self.model(model_id).journal)


def _is_evidence(validation: RecordedValidation, record: VersionRecord, policy: ModelPolicy, at: float) -> bool:
    most, least, result = policy.max_latency_p99_ms, policy.min_accuracy, validation.result
    return (
        result.passed
        and validation.checksum == record.metadata.checksum
        and at - validation.at <= policy.evidence_max_age_s
        and (most is None or result.latency_p99_ms <= most)
        and (least is None or result.accuracy_score >= least)
    )


def _said_by(entry: JournalEntry) -> Saying:
    what: Saying
    match entry.kind:
        case JournalKind.REGISTERED | JournalKind.IMPORTED:
            what = (entry.now,)
        case JournalKind.TRANSITIONED:
            what = (entry.was, entry.now, entry.reason, entry.waiver)
        case JournalKind.VALIDATED:
            what = (entry.evidence, entry.now)
        case JournalKind.ALIAS_MOVED:
            what = (entry.alias, entry.was, entry.now)
        case _:
            what = ()
    return (entry.kind.value, entry.version, entry.by, *what)


def _told_by(fact: Any) -> Saying | None:
    """What the entry of the fact has to say; None for a fact without one."""
    found: Saying
    match fact:
        case ModelRegistered():
            found = ("imported" if fact.is_import else "registered", fact.version, fact.by, fact.state.value)
        case ModelTransitioned():
            change = (fact.was.value, fact.now.value, fact.reason, fact.waiver)
            found = ("transitioned", fact.version, fact.by, *change)
        case ValidationRecorded():
            found = ("validated", fact.version, fact.by, fact.number, "passed" if fact.passed else "failed")
        case AliasMoved():
            was, now = ("" if one is None else str(one) for one in (fact.was, fact.now))
            found = ("alias_moved", fact.now, fact.by, fact.alias, was, now)
        case ModelRolledBack():
            found = ("rolled_back", fact.version, fact.by)
        case ModelPolicyChanged():
            found = ("policy_changed", None, fact.by)
        case ModelTagged():
            found = ("tagged", fact.version, fact.by)
        case ModelDeleted():
            found = ("deleted", fact.version, fact.by)
        case _:
            return None
    return (digest_of(fact.model_id), *found)
