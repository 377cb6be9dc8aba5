"""The bytes that connections hold: unfinished frames, requests in flight, unread messages, filters of streams.

Invariants:
- Bytes count per connection, per principal and for the daemon, each with a limit; operators have a reserve.
- A large frame is read only when its whole size was granted, so a frame that was begun can be finished, and frames do
  not wait for each other. Memory still grows with what has arrived.
- A grant that does not fit waits, the principal with the least first. One within the principal's fair share displaces
  the connection with the most bytes of the largest principal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from forged.errors import ForgedError, Unavailable
from forged.shares import Holder, Shares

DAEMON_BYTES_MAX = 256 << 20
PRINCIPAL_BYTES_MAX = 64 << 20
CONNECTION_BYTES_MAX = 16 << 20
RESERVE_PARTS = 16
"""One part in so many is left to operators."""
SMALL_BYTES = 16 << 10
"""What a connection reads at once without a grant; smaller frames need none."""


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """The limits of the bytes that connections hold."""

    daemon_bytes_max: int = DAEMON_BYTES_MAX
    principal_bytes_max: int = PRINCIPAL_BYTES_MAX
    connection_bytes_max: int = CONNECTION_BYTES_MAX


class MemoryUser(Protocol):
    """A connection that holds bytes."""

    @property
    def holder(self) -> Holder:
        """Whose share it uses."""
        ...

    def granted(self, size: int) -> None:
        """A grant that has waited is there."""
        ...

    def fail(self, error: ForgedError) -> None:
        """Tell the peer why and close the connection."""
        ...


class Memory:
    """The bytes that the connections of one process hold. Without `displaces` every grant waits for its turn."""

    def __init__(
        self, limits: MemoryLimits | None = None, *, small_bytes: int = SMALL_BYTES, displaces: bool = True
    ) -> None:
        self.small_bytes = small_bytes
        self._displaces = displaces
        self._limits = limits or MemoryLimits()
        self._shares = Shares("bytes held by connections", 0)
        self._held: dict[Holder, dict[MemoryUser, int]] = {}
        self._waiting: dict[Holder, dict[MemoryUser, int]] = {}
        self.resize(self._limits)

    def resize(self, limits: MemoryLimits) -> None:
        """Change the limits; what is held stays."""
        self._limits = limits
        total = limits.daemon_bytes_max
        self._shares.resize(total, total // RESERVE_PARTS, limits.principal_bytes_max)

    @property
    def used(self) -> int:
        """The bytes that all connections hold."""
        return self._shares.used

    def held_by(self, user: MemoryUser) -> int:
        """The bytes that one connection holds."""
        return self._held.get(user.holder, {}).get(user, 0)

    def has_room(self, user: MemoryUser) -> bool:
        """Whether this connection may hold more."""
        return self.held_by(user) < self._limits.connection_bytes_max and self._shares.fits(user.holder)

    def grant(self, user: MemoryUser, size: int) -> bool:
        """Take so many bytes for a frame; if they do not fit, `granted` is called when they do."""
        if self._waiting.get(user.holder) or not self._make_room(user.holder, size):
            self._waiting.setdefault(user.holder, {})[user] = size
            return False
        self.charge(user, size)
        return True

    def charge(self, user: MemoryUser, size: int) -> None:
        """Count bytes that the connection holds already."""
        self._shares.charge(user.holder, size)
        held = self._held.setdefault(user.holder, {})
        held[user] = held.get(user, 0) + size

    def give_back(self, user: MemoryUser, size: int) -> None:
        """The connection holds so many bytes less."""
        self._reduce(user, size)
        if self._waiting:
            self._serve_waiting()

    def leave(self, user: MemoryUser) -> None:
        """The connection holds nothing more."""
        waiting = self._waiting.get(user.holder, {})
        if waiting.pop(user, None) is not None and not waiting:
            del self._waiting[user.holder]
        self.give_back(user, self.held_by(user))

    def shortage(self, user: MemoryUser) -> str:
        """Which limit this connection has reached."""
        held, limit = self.held_by(user), self._limits.connection_bytes_max
        return (
            f"this connection holds {held} bytes; limit {limit}"
            if held >= limit
            else self._shares.shortage(user.holder)
        )

    def _reduce(self, user: MemoryUser, size: int) -> None:
        if not size:
            return
        self._shares.give_back(user.holder, size)
        held = self._held[user.holder]
        held[user] -= size
        if not held[user]:
            del held[user]
            if not held:
                del self._held[user.holder]

    def _make_room(self, holder: Holder, size: int) -> bool:
        while not self._shares.fits(holder, size):
            crowded = self._shares.to_displace(holder, size) if self._displaces else None
            if crowded is None:
                return False
            users = self._held[crowded]
            largest = max(users, key=users.__getitem__)
            self._reduce(largest, users[largest])
            reason = f"this connection holds the most bytes of {crowded}, which uses more than its share"
            largest.fail(Unavailable("memory_displaced", reason, "send smaller requests, or fewer at once"))
        return True

    def _serve_waiting(self) -> None:
        while self._waiting:
            for holder in sorted(self._waiting, key=self._shares.of):
                user, size = next(iter(self._waiting[holder].items()))
                if self._shares.fits(holder, size):
                    break
            else:
                return
            del self._waiting[holder][user]
            if not self._waiting[holder]:
                del self._waiting[holder]
            self.charge(user, size)
            user.granted(size)
