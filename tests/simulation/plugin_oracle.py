"""What must be true of plugins in every run, whatever they did and whatever was done to them.

Law: like the oracle, this one sees what plugins, receivers and operators see, at the moment they see it. It knows what
the store holds and how often it failed, because that is the world's, and nothing of how the daemon keeps its word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from forged.kernel.messages import Gap, Record
from forged.plugins.model import PluginState

_NEXT = {
    ("PluginQuarantined", PluginState.ACTIVE): PluginState.QUARANTINED,
    ("PluginDisabled", PluginState.ACTIVE): PluginState.DISABLED,
    ("PluginDisabled", PluginState.QUARANTINED): PluginState.DISABLED,
    ("PluginEnabled", PluginState.QUARANTINED): PluginState.ACTIVE,
    ("PluginEnabled", PluginState.DISABLED): PluginState.ACTIVE,
    ("PluginRefused", PluginState.ACTIVE): PluginState.REFUSED,
}
"""What the facts of a daemon's life may say of a plugin, which is active until the first of them."""
_STATE_FACTS = frozenset(name for name, _ in _NEXT)


@dataclass(slots=True)
class _Told:
    """What somebody was given, in the order in which it was given first, and what they were told that they miss."""

    seen: dict[int, None] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    last: int = 0

    def knows_of(self, fact_id: int) -> bool:
        return fact_id in self.seen or any(gap.first <= fact_id <= gap.last for gap in self.gaps)


@dataclass(slots=True)
class Receiver(_Told):
    """Somebody outside to whom a follower delivers facts of these types about these jobs; empty means all."""

    types: frozenset[str] = frozenset()
    jobs: frozenset[str] = frozenset()

    def wants(self, record: Record) -> bool:
        return (not self.types or record.type in self.types) and (not self.jobs or record.job in self.jobs)


@dataclass(slots=True)
class Lifetime:
    """What was seen of one life of the daemon, which began with all facts up to `start` in its store."""

    start: int
    watched: _Told = field(default_factory=_Told)
    loads: int = 0
    doing: set[str] = field(default_factory=set)


class PluginOracle:
    """Keeps the promises about plugins in mind. `breach` says that one was broken."""

    def __init__(self, breach: Callable[[str], NoReturn], is_history: Callable[[Record, str], None]) -> None:
        self.receivers: dict[str, Receiver] = {}
        self.lives: list[Lifetime] = []
        self.published: set[str] = set()
        """Texts that a plugin was told are on the record."""
        self._breach = breach
        self._is_history = is_history

    def life_began(self, start: int) -> Lifetime:
        """A daemon has opened the store and found this revision."""
        life = Lifetime(start)
        self.lives.append(life)
        return life

    def called(self, plugin: str, part: str, state: PluginState) -> None:
        """A part of a plugin was given something to do while the plugin was shown in that state."""
        if state is not PluginState.ACTIVE:
            self._breach(f"{plugin} is {state}, and its {part} was called")

    def delivered(self, name: str, records: Iterable[Record], durable: int) -> None:
        """A receiver has taken facts while the store held all up to `durable`."""
        receiver = self.receivers[name]
        for record in records:
            self._is_durable(name, record, durable)
            if not receiver.wants(record):
                self._breach(f"{name} was brought fact {record.id}, a {record.type}, which it did not ask for")
            if record.id in receiver.seen:
                continue
            if record.id < receiver.last:
                self._breach(f"{name} was first brought fact {record.id} after {receiver.last}")
            receiver.last = record.id
            receiver.seen[record.id] = None

    def misses(self, name: str, gap: Gap) -> None:
        """A receiver was told of facts that it will not be brought."""
        self.receivers[name].gaps.append(gap)

    def observed(self, name: str, life: Lifetime, record: Record, durable: int) -> None:
        """An observer within a daemon was given a fact."""
        self._is_durable(name, record, durable)
        watched = life.watched
        if record.id <= max(watched.last, life.start):
            self._breach(f"{name} observed fact {record.id} after {max(watched.last, life.start)}")
        watched.last = record.id
        watched.seen[record.id] = None

    def state_read(self, life: Lifetime, failed_commits: int) -> None:
        """The owners of state read it from the store, which had failed that often to commit in this life."""
        life.loads += 1
        if life.loads > 1 + failed_commits:
            self._breach(f"state was read {life.loads} times in a life in which {failed_commits} commits failed")

    def began(self, life: Lifetime, part: str) -> None:
        """A periodic task has begun a round; `life.doing` is cleared of it when it ends."""
        if part in life.doing:
            self._breach(f"{part} began again before it had ended")
        life.doing.add(part)

    def taken_in(self, refused: Sequence[str], expected: Sequence[str]) -> None:
        """A daemon has started and refused these plugins."""
        if sorted(refused) != sorted(expected):
            self._breach(f"the plugins {refused} were refused, and not {expected}")

    def _is_durable(self, name: str, record: Record, durable: int) -> None:
        if record.id > durable:
            self._breach(f"{name} was given fact {record.id} while no more than {durable} was durable")
        self._is_history(record, name)

    # At the end.

    def check_end(self, known: Mapping[int, Record], floor: int) -> None:
        """All is quiet, and these are all facts that are known; the journal holds all that are newer than `floor`."""
        for name, receiver in self.receivers.items():
            for fact_id, record in known.items():
                if receiver.wants(record) and not receiver.knows_of(fact_id):
                    self._breach(f"{name} was never brought fact {fact_id} and was not told")
        for life in self.lives:
            self._check_watched(life, known)
        self._check_published(known, floor)
        ends = [life.start for life in self.lives[1:]] + [max(known, default=0)]
        for life, end in zip(self.lives, ends, strict=True):
            if life.start >= floor:
                facts = [known[fact_id] for fact_id in sorted(known) if life.start < fact_id <= end]
                states = self._check_states([record for record in facts if record.type in _STATE_FACTS])
                if life is self.lives[-1]:
                    self._check_enabled(states)

    def _check_watched(self, life: Lifetime, known: Mapping[int, Record]) -> None:
        for fact_id in known:
            if life.start < fact_id < life.watched.last and not life.watched.knows_of(fact_id):
                self._breach(f"the watcher observed {life.watched.last}, not {fact_id}, and was not told")

    def _check_published(self, known: Mapping[int, Record], floor: int) -> None:
        counted = Counter(record.fields()["fact"]["text"] for record in known.values() if record.type == "Announced")
        for text, count in counted.items():
            if count > 1:
                self._breach(f"the announcement {text} is on the record {count} times")
        if not floor and (lost := sorted(self.published - counted.keys())):
            self._breach(f"announcements that were on the record are lost: {', '.join(lost[:5])}")

    def _check_states(self, facts: Sequence[Record]) -> dict[str, PluginState]:
        """What is said of each plugin in one life makes sense; returns what it comes to."""
        states: dict[str, PluginState] = {}
        for record in facts:
            plugin = record.fields()["fact"]["plugin"]
            state = states.get(plugin, PluginState.ACTIVE)
            follows = _NEXT.get((record.type, state))
            if follows is None:
                self._breach(f"fact {record.id} is a {record.type} of {plugin}, which was {state}")
            states[plugin] = follows
        return states

    def _check_enabled(self, states: Mapping[str, PluginState]) -> None:
        """An operator has enabled whatever can be, and that is on the record."""
        for plugin, state in states.items():
            if state in (PluginState.QUARANTINED, PluginState.DISABLED):
                self._breach(f"{plugin} was enabled, and the last that is said of it is that it is {state}")
