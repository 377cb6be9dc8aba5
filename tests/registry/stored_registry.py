"""The registry's pure core with a store of its own, and what its journals say: an independent reading of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from forged.auth.model import Principal, Role
from forged.errors import RequestRefused
from forged.kernel.messages import Decision, Fact
from forged.registry.book.evidence import Evidence
from forged.registry.book.lifecycle import Lifecycle
from forged.registry.book.questions import Questions
from forged.registry.book.registration import Registration
from forged.registry.book.state import RegistryState
from forged.registry.messages import SERVING, JournalEntry, JournalKind
from forged.registry.model import DeploymentState, ModelVersion
from forged.registry.ports import OriginsPort
from forged.registry.records import (
    DELETED,
    HEADS,
    JOURNAL,
    MOVES,
    RECORDS,
    AliasMove,
    ModelHead,
    VersionRecord,
    decoded_entry,
    decoded_head,
    decoded_move,
    decoded_record,
)
from forged.registry.versions import parse_version

OPERATOR = Principal("an operator", Role.OPERATOR)


class StoredRegistry:
    """The core; each decision's writes go into `stored`."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.state = RegistryState(**options)
        self.stored: dict[str, bytes] = {}
        self.facts: list[Fact] = []
        self.now = 1000.0
        self.registration = Registration(self.state, OriginsPort())
        self.evidence = Evidence(self.state)
        self.lifecycle = Lifecycle(self.state)
        self.questions = Questions(self.state)

    def do(self, decide: Any, request: Any, by: Principal = OPERATOR) -> Any:
        """The reply, or the refusal."""
        try:
            decided = decide(request, by, self.now)
        except RequestRefused as error:
            return error
        decisions: Iterable[Decision[Any]] = decided if isinstance(decided, list) else [decided]
        for decision in decisions:
            assert len(decision.writes) + len(decision.facts) <= 120
            self.facts += decision.facts
            for key, value in decision.writes.items():
                if value is None:
                    self.stored.pop(key, None)
                else:
                    self.stored[key] = value
        return decision.reply

    def under(self, prefix: str) -> dict[str, bytes]:
        return {key: self.stored[key] for key in sorted(self.stored) if key.startswith(prefix)}

    def loaded(self) -> RegistryState:
        """What a new daemon loads."""
        state = RegistryState(**self.options)
        load(state, self)
        return state


def load(state: RegistryState, stored: StoredRegistry) -> None:
    heads, records = stored.under(HEADS).values(), stored.under(RECORDS).values()
    state.load(heads, records, stored.under(MOVES), stored.under(DELETED))


@dataclass
class Told:
    """What the journal of one model says."""

    states: dict[ModelVersion, DeploymentState] = field(default_factory=dict)
    aliases: dict[str, ModelVersion] = field(default_factory=dict)
    moves: list[AliasMove] = field(default_factory=list)
    last: dict[ModelVersion, int] = field(default_factory=dict)
    deleted: dict[ModelVersion, int] = field(default_factory=dict)
    entries: int = 0
    at: float = 0.0
    problems: list[str] = field(default_factory=list)

    def hear(self, entry: JournalEntry) -> None:
        self._require(entry.number == self.entries + 1, f"entry {entry.number} follows {self.entries}")
        self._require(entry.at >= self.at, f"entry {entry.number} is before the one before it")
        self.entries, self.at = entry.number, entry.at
        version = entry.version
        if version is not None:
            self.last[version] = entry.number
        if entry.kind in (JournalKind.REGISTERED, JournalKind.IMPORTED):
            assert version is not None
            self._require(version not in self.states and version not in self.deleted, f"{version} is there already")
            self.states[version] = DeploymentState(entry.now)
        elif entry.kind is JournalKind.TRANSITIONED:
            assert version is not None
            was, now = DeploymentState(entry.was), DeploymentState(entry.now)
            self._require(self.states.get(version) is was, f"{version} is {self.states.get(version)}, not {was}")
            self.states[version] = now
        elif entry.kind is JournalKind.ALIAS_MOVED:
            self._move(entry)
        elif entry.kind is JournalKind.DELETED:
            assert version is not None
            state = self.states.pop(version, None)
            is_unwanted = state is DeploymentState.REGISTERED and bool(entry.reason)
            self._require(is_unwanted or state is DeploymentState.ARCHIVED, f"{version} was {state}, and was deleted")
            self.deleted[version] = entry.number

    def _move(self, entry: JournalEntry) -> None:
        named = self.aliases.get(entry.alias)
        self._require(
            ("" if named is None else str(named)) == entry.was, f"{entry.alias} names {named}, not {entry.was}"
        )
        version = parse_version(entry.now)
        if version is None:
            self.aliases.pop(entry.alias, None)
        else:
            self.aliases[entry.alias] = version
        self.moves.append(AliasMove(entry.at, entry.number, entry.alias, version))

    def check_serving(self) -> None:
        """`serving` names a version in production, at the end of each decision."""
        serving = self.aliases.get(SERVING)
        if serving is not None:
            state = self.states.get(serving)
            self._require(state is DeploymentState.PRODUCTION, f"{serving} serves and is {state}")

    def compare(self, head: ModelHead, records: dict[ModelVersion, VersionRecord], moves: list[AliasMove]) -> None:
        """Compare with what is stored besides."""
        self._require((head.entries, head.at) == (self.entries, self.at), f"{head} counts otherwise")
        self._require(head.aliases == self.aliases, f"the aliases are {head.aliases}, and told {self.aliases}")
        states = {version: record.state for version, record in records.items()}
        self._require(states == self.states, f"the states are {states}, and told {self.states}")
        last = {version: record.last_entry for version, record in records.items()} | self.deleted
        self._require(last == self.last, f"the last entries are {last}, and told {self.last}")
        self._require(moves == self.moves, f"the moves are {moves}, and told {self.moves}")

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.problems.append(otherwise)


def replayed(stored: dict[str, bytes]) -> tuple[dict[str, Told], list[str]]:
    """What the stored journals say, by the digest of the model, and where the rest of the store says otherwise."""
    told: defaultdict[str, Told] = defaultdict(Told)
    records: defaultdict[str, dict[ModelVersion, VersionRecord]] = defaultdict(dict)
    moves: defaultdict[str, list[AliasMove]] = defaultdict(list)
    heads: dict[str, ModelHead] = {}
    for key in sorted(stored):
        digest = key.split("/")[1] if "/" in key else ""
        if key.startswith(JOURNAL):
            told[digest].hear(decoded_entry(stored[key]).entry)
        elif key.startswith(RECORDS):
            record = decoded_record(stored[key])
            records[digest][record.version] = record
        elif key.startswith(MOVES):
            moves[digest].append(decoded_move(stored[key]))
        elif key.startswith(HEADS):
            heads[digest] = decoded_head(stored[key])
    problems: list[str] = []
    for digest in {*told, *heads, *records, *moves}:
        if digest not in heads:
            problems.append(f"no head of {digest}")
            continue
        told[digest].check_serving()
        told[digest].compare(heads[digest], records[digest], moves[digest])
        problems += told[digest].problems
    return dict(told), problems
