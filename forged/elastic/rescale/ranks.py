"""Who gets which rank.

Law: no more workers change their rank than must. Survivors keep their order among each other, joiners take the ranks
that were left, the lowest first, and then those behind the last. Filling the lowest gaps first is what leaves most
survivors where they are: a survivor keeps its rank exactly when every rank below it is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

W = TypeVar("W", bound=Hashable)


def assign_ranks(old: Sequence[W], staying: Collection[W], joining: Iterable[W]) -> tuple[W, ...]:
    """The new world in the order of its ranks; who is neither staying nor joining is gone from it."""
    waiting = iter(joining)
    return (*_filled(old, staying, waiting), *waiting)


def moves(old: Sequence[W], new: Sequence[W]) -> int:
    """How many that are in both have another rank in the new world."""
    before = {worker: rank for rank, worker in enumerate(old)}
    return sum(1 for rank, worker in enumerate(new) if before.get(worker, rank) != rank)


def _filled(old: Sequence[W], staying: Collection[W], waiting: Iterator[W]) -> Iterator[W]:
    for worker in old:
        if worker in staying:
            yield worker
        else:
            yield from _next(waiting)


def _next(waiting: Iterator[W]) -> Iterator[W]:
    for worker in waiting:
        yield worker
        return
