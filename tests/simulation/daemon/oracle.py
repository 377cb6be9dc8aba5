"""The invariants of the service simulation.

The oracle records what clients, subscribers and handlers see, when they see it, and does not use the daemon's
internals. It never queries the daemon; at the end it gets the journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NoReturn

from forged.kernel.journal import Journal
from forged.kernel.messages import Gap, Record
from tests.simulation.daemon.plugin_oracle import PluginOracle
from tests.simulation.oracle import InvariantViolated


@dataclass(slots=True)
class Observer:
    """What one subscriber has received, in order."""

    name: str
    last: int = 0
    seen: set[int] = field(default_factory=set)
    gaps: list[tuple[int, int]] = field(default_factory=list)

    def missed(self, fact_id: int) -> bool:
        """Whether a gap that the subscriber received contains this fact."""
        return any(first <= fact_id <= last for first, last in self.gaps)


@dataclass(slots=True)
class Oracle:
    """Collects observations and checks the invariants."""

    facts: dict[int, bytes] = field(default_factory=dict)
    """Every fact that was seen, by id."""
    observers: dict[str, Observer] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    """The texts of the acknowledged notes."""
    attempted: set[str] = field(default_factory=set)
    versions: dict[str, int] = field(default_factory=dict)
    """The highest version of each job that a client has received."""
    violations: list[str] = field(default_factory=list)
    """Violations found inside of the daemon, which isolates exceptions; `check` raises them."""
    plugins: PluginOracle = field(init=False)

    def __post_init__(self) -> None:
        self.plugins = PluginOracle(self.violated, self.is_history)

    def violated(self, what: str) -> NoReturn:
        """Record and raise a violation."""
        self.violations.append(what)
        raise InvariantViolated(what)

    def check(self) -> None:
        """Raise the first recorded violation."""
        if self.violations:
            raise InvariantViolated(self.violations[0])

    def saw(self, name: str, item: Record | Gap) -> None:
        """A subscriber received a fact or gap."""
        observer = self.observers.setdefault(name, Observer(name))
        if isinstance(item, Gap):
            observer.gaps.append((item.first, item.last))
            observer.last = max(observer.last, item.last)
            return
        if item.id <= observer.last:
            self.violated(f"subscriber {name} got fact {item.id} after fact {observer.last}: repeated or out of order")
        observer.last = item.id
        observer.seen.add(item.id)
        self.is_history(item, name)

    def is_history(self, record: Record, by: str) -> None:
        """The same id must always be the same fact."""
        known = self.facts.setdefault(record.id, record.data)
        if known != record.data:
            self.violated(f"{by} received a fact {record.id} that differs from the one seen before: {record!r}")

    def handled(self, handler: str, last: int, record: Record) -> None:
        """A handler in the daemon received a fact."""
        if record.id <= last:
            self.violated(f"handler {handler} received fact {record.id} after fact {last}")
        self.is_history(record, handler)

    def told_version(self, job: str, version: int, at_least: int) -> None:
        """A client received a job's version; `at_least` was received by a client before the request was sent."""
        if version < at_least:
            self.violated(f"job {job} had version {at_least}, but a later read returned version {version}")
        self.versions[job] = max(version, self.versions.get(job, 0))

    def daemon_failed_to_start(self, code: str) -> None:
        """A daemon failed to start, and not by an error of its store."""
        self.violated(f"a daemon failed to start with {code}")

    def check_end(self, journal: Journal) -> None:
        """Check the final journal."""
        floor = journal.floor
        final = {record.id: record for record in journal.after(0, len(journal))}
        for fact_id, data in self.facts.items():
            dropped = fact_id <= journal.floor_of([Record.read(data).job])
            if (fact_id not in final and not dropped) or (fact_id in final and final[fact_id].data != data):
                self.violated(f"fact {fact_id} was seen but is not in the final journal: {Record.read(data)!r}")
        for record in final.values():
            self.is_history(record, "the journal")
        self._check_shares(final.values(), journal.facts_max)
        self._check_notes()
        self._check_reactions(floor)
        for observer in self.observers.values():
            self._check_observer(observer)
        self.check()
        self.plugins.check_end({fact_id: Record.read(self.facts[fact_id]) for fact_id in sorted(self.facts)}, floor)

    def _notes(self) -> list[tuple[int, str]]:
        records = (Record.read(data) for data in self.facts.values())
        return [(record.id, record.fields()["fact"]["text"]) for record in records if record.type == "NoteAdded"]

    def _check_shares(self, final: Collection[Record], facts_max: int) -> None:
        """A job that never had more than an equal share of the journal has lost no fact."""
        written = Counter(Record.read(data).job for data in self.facts.values())
        kept = Counter(record.job for record in final)
        for job, count in written.items():
            if count <= facts_max // len(written) and kept[job] < count:
                self.violated(f"job {job!r} has lost {count - kept[job]} of {count} facts to other jobs")

    def _check_notes(self) -> None:
        counted = Counter(text for _, text in self._notes())
        for text, count in counted.items():
            if count > 1:
                self.violated(f"note {text} is in the journal {count} times")
            if text not in self.attempted:
                self.violated(f"note {text} is in the journal but no client wrote it")
        if lost := sorted(self.acknowledged - counted.keys()):
            self.violated(f"acknowledged notes are lost: {', '.join(lost[:5])}")

    def _check_reactions(self, floor: int) -> None:
        """The durable handler must decide exactly once on every note."""
        records = (Record.read(data) for data in self.facts.values())
        reactions = Counter(record.cause for record in records if record.type == "NoteSeen")
        for fact_id, count in reactions.items():
            if count > 1:
                self.violated(f"the durable handler decided {count} times on fact {fact_id}")
        for fact_id, text in self._notes():
            if fact_id > floor and not reactions[fact_id]:
                self.violated(f"the durable handler never decided on fact {fact_id}, note {text}")

    def _check_observer(self, observer: Observer) -> None:
        for fact_id in sorted(self.facts):
            if fact_id > observer.last:
                self.violated(
                    f"subscriber {observer.name} stopped at fact {observer.last} and never got fact {fact_id}"
                )
            if fact_id not in observer.seen and not observer.missed(fact_id):
                self.violated(f"subscriber {observer.name} never got fact {fact_id}, and no gap contains it")
