"""What becomes of a batch: decided without a medium, so that every store decides alike.

Law: transactions are judged in order, each against what the applied ones before it left. A transaction that is not
ahead of the revision fences the whole batch; one whose expectations fail is left out alone, and its revision is not
reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from forged.kernel.store.port import ABSENT, Conflict, StoreFenced, Transaction

Write: TypeAlias = tuple[str, bytes | None, int]
"""A key, the value it is left with (None: deleted), and the revision that did it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The fate of each transaction, those that apply, and the last write to each key of theirs."""

    conflicts: Sequence[Conflict | None]
    applied: Sequence[Transaction]
    writes: Mapping[str, Write]
    revision: int


def expected_keys(batch: Iterable[Transaction]) -> frozenset[str]:
    """The keys whose revisions must be known to decide on the batch."""
    return frozenset(key for transaction in batch for key in transaction.expect)


def decide(batch: Iterable[Transaction], revision: int, found: Mapping[str, int]) -> Decision:
    """Judge a batch for a store at `revision` whose keys have the revisions `found`; all others are absent."""
    conflicts: list[Conflict | None] = []
    applied: list[Transaction] = []
    writes: dict[str, Write] = {}
    for transaction in batch:
        if transaction.revision <= revision:
            raise _fenced(transaction.revision, revision)
        conflict = _first_conflict(transaction, found, writes)
        conflicts.append(conflict)
        if conflict is None:
            _write(transaction, writes)
            applied.append(transaction)
            revision = transaction.revision
    return Decision(conflicts, applied, writes, revision)


def _first_conflict(transaction: Transaction, found: Mapping[str, int], writes: Mapping[str, Write]) -> Conflict | None:
    for key, expected in transaction.expect.items():
        revision = _revision_of(writes[key]) if key in writes else found.get(key, ABSENT)
        if revision != expected:
            return Conflict(key, expected, revision)
    return None


def _revision_of(write: Write) -> int:
    _, value, revision = write
    return ABSENT if value is None else revision


def _write(transaction: Transaction, writes: dict[str, Write]) -> None:
    revision = transaction.revision
    for key, value in transaction.puts.items():
        writes[key] = (key, value, revision)
    for key in transaction.deletes:
        writes[key] = (key, None, revision)


def _fenced(revision: int, current: int) -> StoreFenced:
    return StoreFenced(
        "store_fenced",
        f"a transaction of revision {revision} is not ahead of the store, which is at {current}",
        "read the store again before writing to it",
    )
