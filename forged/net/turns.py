"""How many messages each principal may have processed in one turn of the event loop.

Invariants:
- A turn processes at most `MESSAGES_PER_TURN` messages of the principals of one job, over all their connections, so
  that the requests of other jobs wait for a few milliseconds only. Operators are not limited.
- Connections of one job are served in turn, `MESSAGES_AT_ONCE` messages each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from forged.net.transport.connection import MESSAGES_PER_TURN
from forged.shares import Holder

MESSAGES_AT_ONCE = 32


class Worked(Protocol):
    """A connection that has messages to process."""

    @property
    def holder(self) -> Holder:
        """The holder of the share of the turn that it uses."""
        ...

    def work(self) -> None:
        """Process received messages."""
        ...


class Turns:
    """The messages processed in this turn, and the connections that wait for the next one."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._call_soon = call_soon
        self._spent: dict[str, int] = {}
        self._waiting: dict[str, deque[Worked]] = {}
        self._queued: set[Worked] = set()
        self._is_scheduled = False

    def quota(self, connection: Worked) -> int:
        """How many messages of this connection may be processed now; without any, it waits for its turn."""
        holder = connection.holder
        if holder.is_operator:
            return MESSAGES_PER_TURN
        left = MESSAGES_PER_TURN - self._spent.get(holder.group, 0)
        if left > 0 and connection not in self._queued:
            # A connection alone may use the whole turn.
            return left if holder.group not in self._waiting else min(left, MESSAGES_AT_ONCE)
        self.wait(connection)
        return 0

    def spend(self, connection: Worked, messages: int) -> None:
        """Count processed messages."""
        if messages:
            group = connection.holder.group
            spent = self._spent[group] = self._spent.get(group, 0) + messages
            # A few messages need no turn of their own: they count until the next one.
            if spent >= MESSAGES_AT_ONCE or len(self._spent) > MESSAGES_PER_TURN:
                self._schedule()

    def wait(self, connection: Worked) -> None:
        """Let the connection process further messages in its next turn."""
        if connection not in self._queued:
            self._queued.add(connection)
            self._waiting.setdefault(connection.holder.group, deque()).append(connection)
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_scheduled = False
        self._spent.clear()
        for group in list(self._waiting):
            waiting = self._waiting[group]
            # A connection that waits again has processed messages, so this ends.
            while waiting and self._spent.get(group, 0) < MESSAGES_PER_TURN:
                connection = waiting.popleft()
                self._queued.discard(connection)
                connection.work()
            if not waiting:
                del self._waiting[group]
        if self._waiting:
            self._schedule()
