"""What oracles share: a violated promise as an error, and the view of every durable transaction of the store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, NoReturn

from forged.kernel.ledger import FACT_PREFIX, read_all
from forged.kernel.messages import Record
from forged.kernel.store.port import Store, Transaction


class InvariantViolated(AssertionError):
    """An invariant of the simulation was violated."""


def broken(promise: Enum, what: str) -> InvariantViolated:
    """The error that names the promise that was not kept."""
    return InvariantViolated(f"{promise.name.lower()}: {what}")


@dataclass
class StoreOracle(ABC):
    """Sees what the daemon makes durable, and checks promises about it.

    It is an owner of state to the daemon's ledger: what a new daemon loads is history, also if a killed daemon never
    knew that it was durable.
    """

    prefixes: ClassVar[tuple[str, ...]]
    """The keys of the store that `loaded` is given, besides the facts."""
    facts: dict[int, Record] = field(default_factory=dict, init=False)
    violations: list[str] = field(default_factory=list, init=False)

    @abstractmethod
    def committed(self, transaction: Transaction) -> None:
        """A transaction is durable."""

    @abstractmethod
    def loaded(self, facts: Sequence[Record], entries: Mapping[str, bytes]) -> None:
        """A daemon has loaded these entries, and these facts that the oracle has not seen before."""

    @abstractmethod
    def unsettled(self) -> list[str]:
        """What the daemon still has to do after the faults."""

    async def load(self, store: Store) -> None:
        """Called by the ledger."""
        facts = [Record.read(entry.value) for entry in await read_all(store, FACT_PREFIX)]
        entries = {entry.key: entry.value for prefix in self.prefixes for entry in await read_all(store, prefix)}
        last = max(self.facts, default=0)
        self.loaded([one for one in facts if one.id > last], entries)

    def violated(self, promise: Enum, what: str) -> None:
        """Record a violation; `check` raises it, because the daemon isolates exceptions."""
        self.violations.append(str(broken(promise, what)))

    def broken(self, promise: Enum, what: str) -> NoReturn:
        """Raise a violation outside the daemon."""
        raise broken(promise, what)

    def check(self) -> None:
        """Raise the first recorded violation."""
        if self.violations:
            raise InvariantViolated(self.violations[0])
