"""Tickets for side connections, and the daemon's end of side connections.

Invariants:
- A ticket is a secret that is valid once, for at most `TICKET_TTL_S`, and only for the principal that it was issued to.
- Its transfer is closed after use, after expiry, and when the daemon stops.
- At most `connections_max` side connections are open; beyond that a hello is refused and its ticket stays valid.
- An error of one side connection ends only that connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup, TaskStatus

from forged.auth.model import Principal
from forged.clock import Clock
from forged.errors import ForgedError, PeerError, Unavailable
from forged.kernel.messages import Ticket
from forged.net.bulk import movers
from forged.net.bulk.detach import detach
from forged.net.bulk.side_connection import BulkTransfer, move_after_go
from forged.net.protocol.messages import VERSION_MAX, Hello
from forged.net.session import Session

TICKET_BYTES = 16
TICKET_TTL_S = 30.0
TICKETS_MAX = 1024
"""Not shared out: only `BackUp` issues tickets, one at a time, and it needs an operator of all jobs."""
EXPIRY_INTERVAL_S = 5.0
SIDE_CONNECTIONS_MAX = 64
"""Not shared out: without a ticket of its own a tenant cannot open one."""


class _Issued(NamedTuple):
    """An unused ticket: when it expires, which principal may use it, and for what."""

    until: float
    principal: Principal
    transfer: BulkTransfer


class TicketRegistry:
    """The issued tickets that have not been used."""

    def __init__(self, clock: Clock, token_bytes: Callable[[int], bytes], *, tickets_max: int = TICKETS_MAX) -> None:
        self._clock = clock
        self._token_bytes = token_bytes
        self._tickets_max = tickets_max
        self._transfers: dict[bytes, _Issued] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def issue(self, transfer: BulkTransfer, principal: Principal, ttl_s: float = TICKET_TTL_S) -> Ticket:
        """Issue a ticket for this transfer to the principal that has asked for it."""
        self.expire()
        if len(self._transfers) >= self._tickets_max:
            _close(transfer)
            raise Unavailable(
                "tickets_full", f"{len(self._transfers)} tickets are unused; limit {self._tickets_max}", "retry later"
            )
        ticket = self._token_bytes(TICKET_BYTES)
        self._transfers[ticket] = _Issued(self._clock.monotonic() + ttl_s, principal, transfer)
        return Ticket(ticket, transfer.size)

    def redeem(self, ticket: bytes, principal: Principal, offset: int) -> BulkTransfer:
        """The transfer of a ticket of this principal; the ticket is invalid afterwards."""
        self.expire()
        issued = self._transfers.get(ticket)
        if issued is None or issued.principal != principal:
            # Another principal's ticket stays valid, and is not distinguished from an unknown one.
            known = "the ticket is unknown, used, expired or another principal's"
            raise PeerError("ticket_unknown", known, "request a new ticket, with the same token")
        del self._transfers[ticket]
        transfer = issued.transfer
        if not 0 <= offset <= transfer.size:
            _close(transfer)
            raise PeerError(
                "offset_invalid", f"offset must be 0..{transfer.size}, got {offset}", "request a new ticket"
            )
        return transfer

    def expire(self) -> None:
        """Drop expired tickets and close their transfers."""
        now = self._clock.monotonic()
        for ticket in [ticket for ticket, issued in self._transfers.items() if issued.until <= now]:
            _close(self._transfers.pop(ticket).transfer)

    def close(self) -> None:
        """Drop all tickets and close their transfers."""
        for issued in self._transfers.values():
            _close(issued.transfer)
        self._transfers.clear()


class SideConnections:
    """The daemon's end: serves the connections that were opened with a ticket."""

    def __init__(self, tickets: TicketRegistry, *, connections_max: int = SIDE_CONNECTIONS_MAX) -> None:
        self._tickets = tickets
        self.connections_max = connections_max
        self.open_count = 0
        self._tasks: TaskGroup | None = None

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve side connections until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                task_status.started()
                while True:
                    await anyio.sleep(EXPIRY_INTERVAL_S)
                    self._tickets.expire()
        finally:
            self._tickets.close()

    def accept(self, session: Session, hello: Hello) -> None:
        """Serve the connection of a hello with a ticket."""
        assert self._tasks is not None, "side connections run before the server listens"
        assert hello.ticket is not None
        if self.open_count >= self.connections_max:
            reason = f"{self.open_count} side connections are open; limit {self.connections_max}"
            raise Unavailable("too_many_connections", reason, "retry later with the same ticket")
        assert session.peer is not None
        principal = session.host.identify(session.peer, hello.token)
        transfer = self._tickets.redeem(hello.ticket, principal, hello.offset)
        session.send(session.welcome(min(hello.version_max, VERSION_MAX), transfer.size))
        self.open_count += 1
        self._tasks.start_soon(self._fulfil, transfer, hello.offset, session.hand_over())

    async def _fulfil(self, transfer: BulkTransfer, offset: int, transport: asyncio.Transport) -> None:
        try:
            sock = await detach(transport)
            with sock:
                await movers.run(partial(move_after_go, transfer, offset), sock)
        except ForgedError:
            return  # the peer sees the error, and requests a new ticket for the rest
        except Exception as error:  # noqa: BLE001 - a bug in one side connection must not end the daemon
            _report("a side connection raised an unexpected error", error)
        finally:
            self.open_count -= 1
            _close(transfer)


def _close(transfer: BulkTransfer) -> None:
    try:
        transfer.close()
    except Exception as error:  # noqa: BLE001 - an error of `close` must not end the daemon
        _report("a bulk transfer could not be closed", error)


def _report(what: str, error: Exception) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": what, "exception": error})
