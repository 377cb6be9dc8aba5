"""Decide which transactions of a batch apply; pure, so that all stores decide alike.

Invariants:
- Transactions are checked in order, each against the result of the applied ones before it.
- A transaction whose revision is not greater than the current one fails the whole batch with `StoreFenced`.
- A transaction whose expectations fail is skipped alone and does not advance the revision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from forged.kernel.store.port import ABSENT, Conflict, StoreFenced, Transaction

Write: TypeAlias = tuple[str, bytes | None, int]
"""Key, final value (None: deleted), and the revision of the transaction."""


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """The conflict (or None) of each transaction, the applied transactions, and their last write per key."""

    conflicts: Sequence[Conflict | None]
    applied: Sequence[Transaction]
    writes: Mapping[str, Write]
    revision: int


def expected_keys(batch: Iterable[Transaction]) -> frozenset[str]:
    """The keys whose current revisions `decide` needs."""
    return frozenset(key for transaction in batch for key in transaction.expect)


def decide(batch: Iterable[Transaction], revision: int, found: Mapping[str, int]) -> BatchOutcome:
    """Decide on a batch for a store at `revision`; `found` maps the expected keys that exist to their revisions."""
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
    return BatchOutcome(conflicts, applied, writes, revision)


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
        f"a transaction's revision must be greater than the store's {current}, got {revision}",
        "read the store again before writing to it",
    )
