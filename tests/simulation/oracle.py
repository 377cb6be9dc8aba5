"""What must be true of every run, whatever happened in it.

Law: the oracle sees what clients, observers and handlers see, at the moment they see it, and knows nothing of how the
daemon works. It never asks the daemon; the final journal is the only thing that it is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from forged.kernel.messages import Gap, Record
from tests.simulation.plugin_oracle import PluginOracle


class InvariantViolated(AssertionError):
    """A promise was not kept."""


@dataclass(slots=True)
class Observer:
    """What one subscriber has seen, in the order in which it saw it."""

    name: str
    last: int = 0
    seen: set[int] = field(default_factory=set)
    gaps: list[tuple[int, int]] = field(default_factory=list)

    def missed(self, fact_id: int) -> bool:
        """Whether the subscriber was told that it misses this fact."""
        return any(first <= fact_id <= last for first, last in self.gaps)


@dataclass(slots=True)
class Oracle:
    """Keeps the promises in mind."""

    facts: dict[int, bytes] = field(default_factory=dict)
    """Every fact that anybody ever saw, by id."""
    observers: dict[str, Observer] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    """Texts of the notes that clients were told are on the record."""
    attempted: set[str] = field(default_factory=set)
    versions: dict[str, int] = field(default_factory=dict)
    """The highest version of each job that anybody was ever told."""
    breaches: list[str] = field(default_factory=list)
    """Promises that were broken where the daemon contains what is raised; whoever runs the world has to look."""
    plugins: PluginOracle = field(init=False)

    def __post_init__(self) -> None:
        self.plugins = PluginOracle(self.breach, self.is_history)

    def breach(self, what: str) -> NoReturn:
        """A promise was not kept."""
        self.breaches.append(what)
        raise InvariantViolated(what)

    def check(self) -> None:
        """Raise what was found where nobody heard of it."""
        if self.breaches:
            raise InvariantViolated(self.breaches[0])

    def saw(self, name: str, item: Record | Gap) -> None:
        """A subscriber received something."""
        observer = self.observers.setdefault(name, Observer(name))
        if isinstance(item, Gap):
            observer.gaps.append((item.first, item.last))
            observer.last = max(observer.last, item.last)
            return
        if item.id <= observer.last:
            self.breach(f"{name} saw fact {item.id} after {observer.last}: twice, or out of order")
        observer.last = item.id
        observer.seen.add(item.id)
        self.is_history(item, name)

    def is_history(self, record: Record, by: str) -> None:
        """Everybody must see the same fact under the same id."""
        known = self.facts.setdefault(record.id, record.data)
        if known != record.data:
            self.breach(f"{by} saw another fact {record.id} than somebody before: {record!r}")

    def handled(self, handler: str, last: int, record: Record) -> None:
        """A handler inside the daemon was given a fact."""
        if record.id <= last:
            self.breach(f"{handler} was given fact {record.id} after {last}")
        self.is_history(record, handler)

    def told_version(self, job: str, version: int, at_least: int) -> None:
        """A client was told a job's version; `at_least` is what had been told to anybody before it asked."""
        if version < at_least:
            self.breach(f"job {job} was at version {at_least} and is told to be at {version}")
        self.versions[job] = max(version, self.versions.get(job, 0))

    def daemon_failed_to_start(self, code: str) -> None:
        """A daemon could not start; its store, and nothing else, may be a reason."""
        if not code.startswith("store_"):
            self.breach(f"a daemon did not start: {code}")

    def check_end(self, journal: Iterable[Record], floor: int) -> None:
        """All is quiet, and this is the final journal: what is older than `floor` is no longer in it."""
        final = {record.id: record for record in journal}
        for fact_id, data in self.facts.items():
            if fact_id > floor and (fact_id not in final or final[fact_id].data != data):
                self.breach(f"fact {fact_id} was seen and is not in the journal: {Record.read(data)!r}")
        for record in final.values():
            self.is_history(record, "the journal")
        self._check_notes()
        self._check_reactions(floor)
        for observer in self.observers.values():
            self._check_observer(observer)
        self.check()
        self.plugins.check_end({fact_id: Record.read(self.facts[fact_id]) for fact_id in sorted(self.facts)}, floor)

    def _notes(self) -> list[tuple[int, str]]:
        records = (Record.read(data) for data in self.facts.values())
        return [(record.id, record.fields()["fact"]["text"]) for record in records if record.type == "NoteAdded"]

    def _check_notes(self) -> None:
        counted = Counter(text for _, text in self._notes())
        for text, count in counted.items():
            if count > 1:
                self.breach(f"note {text} is on the record {count} times")
            if text not in self.attempted:
                self.breach(f"note {text} is on the record and nobody wrote it")
        if lost := sorted(self.acknowledged - counted.keys()):
            self.breach(f"notes that were acknowledged are lost: {', '.join(lost[:5])}")

    def _check_reactions(self, floor: int) -> None:
        """The durable handler decided once on every note, however often the daemon died."""
        records = (Record.read(data) for data in self.facts.values())
        reactions = Counter(record.cause for record in records if record.type == "NoteSeen")
        for fact_id, count in reactions.items():
            if count > 1:
                self.breach(f"the durable handler decided {count} times on fact {fact_id}")
        for fact_id, text in self._notes():
            if fact_id > floor and not reactions[fact_id]:
                self.breach(f"the durable handler never decided on fact {fact_id}, note {text}")

    def _check_observer(self, observer: Observer) -> None:
        for fact_id in sorted(self.facts):
            if fact_id > observer.last:
                self.breach(f"{observer.name} stopped at {observer.last} and never saw fact {fact_id}")
            if fact_id not in observer.seen and not observer.missed(fact_id):
                self.breach(f"{observer.name} never saw fact {fact_id} and was not told")
