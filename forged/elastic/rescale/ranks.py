"""Assigns the ranks of the next world.

Invariants:
- As few workers as possible change their rank: survivors keep their order, joiners fill the lowest gaps first and then
  the ranks after the last. A survivor keeps its rank exactly when every rank below it is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

W = TypeVar("W", bound=Hashable)


def assign_ranks(old: Sequence[W], survivors: Collection[W], joiners: Iterable[W]) -> tuple[W, ...]:
    """The next world in rank order."""
    waiting = iter(joiners)
    return (*_filled(old, survivors, waiting), *waiting)


def moves(old: Sequence[W], new: Sequence[W]) -> int:
    """How many workers in both worlds change their rank."""
    before = {worker: rank for rank, worker in enumerate(old)}
    return sum(1 for rank, worker in enumerate(new) if before.get(worker, rank) != rank)


def _filled(old: Sequence[W], survivors: Collection[W], waiting: Iterator[W]) -> Iterator[W]:
    for worker in old:
        if worker in survivors:
            yield worker
        else:
            yield from _next(waiting)


def _next(waiting: Iterator[W]) -> Iterator[W]:
    for worker in waiting:
        yield worker
        return
