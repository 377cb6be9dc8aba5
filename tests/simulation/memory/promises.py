"""What the memory service promises, and claims about it that are judged when an instant is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum


class Promise(Enum):
    """What the memory service promises."""

    APART = "no two blocks share a byte, and none is beyond its device"
    KEPT = "a block stays where it is until it is freed, gives way or moves, or its owner is gone"
    CONTENT = "what a worker has written to a block stays there as long as it has it"
    ONCE = "a name has one block, and each request one answer, of all or none if it says so"
    PINNED = "only cached blocks give way, and pinned ones do not move either"
    MOVES = "a block is at its source until its move is committed, then at its destination, which is kept until then"
    HANDLES = "a stale handle, and that of a block that is free, are refused"
    ASSERTED = "after a restart owners get what they hold, lies are refused, and nothing is allocated meanwhile"
    ORDER = "requests that wait are served by priority and age, as soon as there is room"
    DEADLINE = "a request waits as long as it may, and no longer"
    SHORTAGE = "a request fails only without room, and is told true figures"
    LISTED = "devices and blocks are listed as they are, and their sums agree"
    GONE = "a worker that is gone is refused, and what it had is free"
    FACTS = "facts of pressure and of plans alternate, and tell true figures"
    REFUSED = "a tenant neither sees nor changes the memory of another job"


class Claims:
    """Claims that are judged when an instant is over: requests that waited are answered later within it."""

    def __init__(self, now: Callable[[], float], violated: Callable[[Promise, str], None]) -> None:
        self._now = now
        self._violated = violated
        self._claims: deque[tuple[float, Promise, Callable[[], str]]] = deque()

    def add(self, promise: Promise, problem: Callable[[], str]) -> None:
        """The problem is a text that is empty if there is none."""
        self._claims.append((self._now(), promise, problem))

    def settle(self) -> None:
        """Judge what is due."""
        while self._claims and self._claims[0][0] < self._now():
            _, promise, problem = self._claims.popleft()
            if text := problem():
                self._violated(promise, text)
