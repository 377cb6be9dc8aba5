"""Requests that wait for memory: the order in which they are served.

Invariants:
- A request is served before every less important or later one; each step of priority is worth `AGING_S` of waiting, so
  that an unimportant request waits at most `2 * PRIORITY_MAX * AGING_S` longer than the most important ones after it.
- A request that does not wait may take memory past those that do, but not once the first of them has been passed for
  `PASSED_S`: small requests do not keep a large one from its hole for ever.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

PRIORITY_MAX = 10
"""Higher and lower priorities count as this one, so that aging overcomes every difference."""
AGING_S = 5.0
PASSED_S = 5.0


class Place(NamedTuple):
    """A request's place in the queue: the lowest is served first."""

    rank: float
    number: int


class Waiting(NamedTuple, Generic[T]):
    """A request that waits. Places are unique, so that no two requests are compared beyond them."""

    place: Place
    since: float
    request: T


def rank_of(priority: int, since: float) -> float:
    """The order of service. All requests age at the same speed, so it never changes."""
    return since - AGING_S * min(max(priority, -PRIORITY_MAX), PRIORITY_MAX)


class WaitingQueue(Generic[T]):
    """The requests that wait for one device."""

    def __init__(self) -> None:
        self._waiting: list[Waiting[T]] = []
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting[T]]:
        """In the order of service."""
        return iter(tuple(self._waiting))

    def add(self, request: T, priority: int, now: float) -> Waiting[T]:
        self._last_number += 1
        place = Place(rank_of(priority, now), self._last_number)
        waiting = Waiting(place, now, request)
        insort(self._waiting, waiting, key=lambda one: one.place)
        return waiting

    def remove(self, waiting: Waiting[T]) -> None:
        """Take a request out; one that is gone already is no error."""
        self._waiting = [one for one in self._waiting if one.place != waiting.place]

    def first(self) -> Waiting[T] | None:
        return self._waiting[0] if self._waiting else None

    def has_right_of_way(self, priority: int, now: float, *, waits: bool) -> bool:
        """Whether the first waiting request comes before a new one, which must not take memory then."""
        first = self.first()
        if first is None or rank_of(priority, now) < first.place.rank:
            return False
        return waits or now >= first.since + PASSED_S
