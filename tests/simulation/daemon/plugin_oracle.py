"""The invariants of plugins in the service simulation.

Like the oracle it records what plugins, receivers and operators see. It also knows the store's revision and its failed
commits, which belong to the simulation, but not the daemon's internals.
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
"""The allowed state changes of a plugin in one daemon run, by fact; the initial state is active."""
_STATE_FACTS = frozenset(name for name, _ in _NEXT)


@dataclass(slots=True)
class _Received:
    """The facts that a receiver got, in the order of their first delivery, and its gaps."""

    seen: dict[int, None] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    last: int = 0

    def knows_of(self, fact_id: int) -> bool:
        return fact_id in self.seen or any(gap.first <= fact_id <= gap.last for gap in self.gaps)


@dataclass(slots=True)
class Receiver(_Received):
    """An external receiver of a follower's facts; empty `types` or `jobs` mean all."""

    types: frozenset[str] = frozenset()
    jobs: frozenset[str] = frozenset()

    def wants(self, record: Record) -> bool:
        return (not self.types or record.type in self.types) and (not self.jobs or record.job in self.jobs)


@dataclass(slots=True)
class Lifetime:
    """The observations of one daemon run, whose store was at revision `start`."""

    start: int
    watched: _Received = field(default_factory=_Received)
    loads: int = 0
    doing: set[str] = field(default_factory=set)


class PluginOracle:
    """Collects observations about plugins and checks the invariants; `violated` reports a violation."""

    def __init__(self, violated: Callable[[str], NoReturn], is_history: Callable[[Record, str], None]) -> None:
        self.receivers: dict[str, Receiver] = {}
        self.lives: list[Lifetime] = []
        self.published: set[str] = set()
        """The texts that a plugin has published successfully."""
        self._violated = violated
        self._is_history = is_history

    def life_began(self, start: int) -> Lifetime:
        """A daemon has opened the store at this revision."""
        life = Lifetime(start)
        self.lives.append(life)
        return life

    def called(self, plugin: str, part: str, state: PluginState) -> None:
        """A part of a plugin was called while the plugin was in this state."""
        if state is not PluginState.ACTIVE:
            self._violated(f"part {part} of plugin {plugin} was called while the plugin was {state}")

    def delivered(self, name: str, records: Iterable[Record], durable: int) -> None:
        """A receiver got facts while the store was at revision `durable`."""
        receiver = self.receivers[name]
        for record in records:
            self._is_durable(name, record, durable)
            if not receiver.wants(record):
                self._violated(f"receiver {name} got fact {record.id} ({record.type}), which its filter excludes")
            if record.id in receiver.seen:
                continue
            if record.id < receiver.last:
                self._violated(f"receiver {name} got fact {record.id} for the first time after fact {receiver.last}")
            receiver.last = record.id
            receiver.seen[record.id] = None

    def misses(self, name: str, gap: Gap) -> None:
        """A receiver got a gap."""
        self.receivers[name].gaps.append(gap)

    def observed(self, name: str, life: Lifetime, record: Record, durable: int) -> None:
        """A plugin's observer got a fact."""
        self._is_durable(name, record, durable)
        watched = life.watched
        if record.id <= max(watched.last, life.start):
            self._violated(f"{name} got fact {record.id} after fact {max(watched.last, life.start)}")
        watched.last = record.id
        watched.seen[record.id] = None

    def state_read(self, life: Lifetime, failed_commits: int) -> None:
        """State was reloaded; the store has had `failed_commits` failed commits in this run."""
        life.loads += 1
        if life.loads > 1 + failed_commits:
            self._violated(f"state was loaded {life.loads} times in a daemon run with {failed_commits} failed commits")

    def began(self, life: Lifetime, part: str) -> None:
        """A call of a periodic task began; the task is removed from `life.doing` when it ends."""
        if part in life.doing:
            self._violated(f"periodic task {part} was called while a call was running")
        life.doing.add(part)

    def taken_in(self, refused: Sequence[str], expected: Sequence[str]) -> None:
        """A daemon has started and refused these plugins."""
        if sorted(refused) != sorted(expected):
            self._violated(f"plugins {refused} were refused, expected {expected}")

    def _is_durable(self, name: str, record: Record, durable: int) -> None:
        if record.id > durable:
            self._violated(f"{name} got fact {record.id} while the store was at revision {durable}")
        self._is_history(record, name)

    # At the end.

    def check_end(self, known: Mapping[int, Record], floor: int) -> None:
        """Check all observations against all known facts; the journal has dropped facts up to `floor`."""
        for name, receiver in self.receivers.items():
            for fact_id, record in known.items():
                if receiver.wants(record) and not receiver.knows_of(fact_id):
                    self._violated(f"receiver {name} never got fact {fact_id}, and no gap contains it")
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
                self._violated(f"the observer never got fact {fact_id}, and no gap contains it")

    def _check_published(self, known: Mapping[int, Record], floor: int) -> None:
        counted = Counter(record.fields()["fact"]["text"] for record in known.values() if record.type == "Announced")
        for text, count in counted.items():
            if count > 1:
                self._violated(f"{text} is in the journal {count} times")
        if not floor and (lost := sorted(self.published - counted.keys())):
            self._violated(f"published facts are lost: {', '.join(lost[:5])}")

    def _check_states(self, facts: Sequence[Record]) -> dict[str, PluginState]:
        """Check the state changes of the plugins in one daemon run; returns the final states."""
        states: dict[str, PluginState] = {}
        for record in facts:
            plugin = record.fields()["fact"]["plugin"]
            state = states.get(plugin, PluginState.ACTIVE)
            follows = _NEXT.get((record.type, state))
            if follows is None:
                self._violated(f"fact {record.id} ({record.type}) is not allowed for plugin {plugin} in state {state}")
            states[plugin] = follows
        return states

    def _check_enabled(self, states: Mapping[str, PluginState]) -> None:
        """At the end the operator has enabled all plugins."""
        for plugin, state in states.items():
            if state in (PluginState.QUARANTINED, PluginState.DISABLED):
                self._violated(f"plugin {plugin} was enabled by the operator, but its last journalled state is {state}")
