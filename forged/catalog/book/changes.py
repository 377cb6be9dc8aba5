"""Changes of the catalogue's records, and the decisions that they make.

Invariants:
- A decision has at most `CHANGES_MAX` changes, so that it fits into a transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from forged.catalog.model import SIZE_MAX
from forged.kernel.messages import Decision, Fact

R = TypeVar("R")

CHANGES_MAX = 50
"""A change is a write and a fact, and a transaction has at most 128 operations."""


class Change(NamedTuple):
    """One change of a record: its write, and the fact about it."""

    key: str
    value: bytes | None
    fact: Fact | None = None


def decided(reply: R, job: str, *changes: Change) -> Decision[R]:
    facts = tuple(one.fact for one in changes if one.fact is not None)
    return Decision(reply, facts, {one.key: one.value for one in changes}, job)


def in_decisions(reply: R, job: str, changes: Sequence[Change]) -> list[Decision[R]]:
    """As many decisions as the changes need, at least one; all have the reply."""
    starts = range(0, max(len(changes), 1), CHANGES_MAX)
    return [decided(reply, job, *changes[start : start + CHANGES_MAX]) for start in starts]


def total(sizes: Iterable[int]) -> int:
    """A sum that a message can carry."""
    return min(sum(sizes), SIZE_MAX)
