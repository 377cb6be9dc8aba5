"""Which connections the daemon keeps open: shares by address before the hello, by principal after it.

Invariants:
- Connections without a hello never take room from connections with one.
- `OPERATOR_RESERVE` connections, with and without a hello, are left to operators. An operator is known before the hello
  on the Unix socket, by its uid.
- A principal below its fair share displaces the newest connection of the largest one, so long-lived connections stay.
- Before the hello an address over its share loses its oldest connection, once that was silent for `SILENT_MIN_S`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from forged.errors import ForgedError, Unavailable
from forged.net.transport.port import Peer
from forged.shares import Holder, Shares

OPERATOR_RESERVE = 16
HANDSHAKES_MAX = 256
SILENT_MIN_S = 1.0
"""How long a connection may wait with its hello before a new one of the same address displaces it."""


class Admitted(Protocol):
    """A connection as the table sees it."""

    def fail(self, error: ForgedError) -> None:
        """Tell the peer why and close the connection."""
        ...


class ConnectionTable:
    """The open connections, by the holder of the share that they use."""

    def __init__(self, connections_max: int, handshakes_max: int = HANDSHAKES_MAX) -> None:
        self._connections = Shares("connections", connections_max + OPERATOR_RESERVE, OPERATOR_RESERVE)
        self._handshakes = Shares("connections without a hello", handshakes_max + OPERATOR_RESERVE, OPERATOR_RESERVE)
        self._greeted: dict[Holder, dict[Admitted, None]] = {}
        """Oldest first."""
        self._silent: dict[Holder, dict[Admitted, float]] = {}
        """When each was opened, oldest first."""
        self._holders: dict[Admitted, Holder] = {}

    def resize(self, connections_max: int, handshakes_max: int) -> None:
        """Change the limits; open connections stay."""
        self._connections.resize(connections_max + OPERATOR_RESERVE, OPERATOR_RESERVE)
        self._handshakes.resize(handshakes_max + OPERATOR_RESERVE, OPERATOR_RESERVE)

    def open(self, connection: Admitted, holder: Holder, now: float) -> None:
        """Admit a connection before its hello, or raise `Unavailable`."""
        if not self._handshakes.fits(holder):
            crowded = self._handshakes.to_displace(holder) or holder
            oldest = next(iter(self._silent.get(crowded, {}).items()), None)
            if oldest is None or (crowded == holder and now - oldest[1] < SILENT_MIN_S):
                shortage = self._handshakes.shortage(holder)
                raise Unavailable("too_many_connections", shortage, "send the hello at once, or raise handshakes_max")
            self._displace(oldest[0], holder)
        self._handshakes.charge(holder, 1)
        self._silent.setdefault(holder, {})[connection] = now
        self._holders[connection] = holder

    def greet(self, connection: Admitted, holder: Holder) -> None:
        """Admit a connection for the principal that its hello names, or raise `Unavailable`."""
        if not self._connections.fits(holder):
            crowded = self._connections.to_displace(holder)
            if crowded is None:
                shortage = self._connections.shortage(holder)
                raise Unavailable("too_many_connections", shortage, "close unused ones, or raise connections_max")
            self._displace(next(reversed(self._greeted[crowded])), holder)
        self.close(connection)
        self._connections.charge(holder, 1)
        self._greeted.setdefault(holder, {})[connection] = None
        self._holders[connection] = holder

    def close(self, connection: Admitted) -> None:
        """The connection has ended or carries bulk bytes from now on."""
        holder = self._holders.pop(connection, None)
        if holder is None:
            return
        silent = connection in self._silent.get(holder, ())
        table, shares = (self._silent, self._handshakes) if silent else (self._greeted, self._connections)
        del table[holder][connection]
        if not table[holder]:
            del table[holder]
        shares.give_back(holder)

    def _displace(self, connection: Admitted, by: Holder) -> None:
        self.close(connection)
        reason = f"this connection gives way to one of {by}, which has fewer"
        connection.fail(Unavailable("too_many_connections", reason, "reconnect later, or raise connections_max"))


def holder_before_hello(peer: Peer, is_operator: Callable[[Peer], bool]) -> Holder:
    """The holder of a connection without a hello: the peer's user, if it is on this host and known, or its address."""
    return Holder(peer.source, peer.source, peer.scheme == "unix" and is_operator(peer))
