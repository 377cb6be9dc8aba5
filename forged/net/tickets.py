"""Tickets for side connections, and the daemon's end of those.

Law: a ticket is a secret that is good once and not for long. What it was for is let go of when it was used, when it has
expired, and when the daemon stops. Only so many side connections are open at once; one too many is refused, and its
ticket stays good. Whatever goes wrong with one of them ends that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import anyio
from anyio.abc import TaskGroup, TaskStatus

from forged.clock import Clock
from forged.errors import ForgedError, PeerError, Unavailable
from forged.kernel.messages import Ticket
from forged.net.bulk import movers
from forged.net.bulk.detach import detach
from forged.net.bulk.side_connection import Offer, move_when_told
from forged.net.protocol.messages import VERSION_MAX, Hello
from forged.net.session import Session

TICKET_BYTES = 16
TICKET_TTL_S = 30.0
TICKETS_MAX = 1024
EXPIRY_INTERVAL_S = 5.0
SIDE_CONNECTIONS_MAX = 64


class TicketRegistry:
    """The tickets that were given and not yet used."""

    def __init__(self, clock: Clock, token_bytes: Callable[[int], bytes], *, tickets_max: int = TICKETS_MAX) -> None:
        self._clock = clock
        self._token_bytes = token_bytes
        self._tickets_max = tickets_max
        self._offers: dict[bytes, tuple[float, Offer]] = {}

    def __len__(self) -> int:
        return len(self._offers)

    def issue(self, offer: Offer, ttl_s: float = TICKET_TTL_S) -> Ticket:
        """A ticket for this offer."""
        self.expire()
        if len(self._offers) >= self._tickets_max:
            _let_go(offer)
            raise Unavailable("tickets_full", f"{len(self._offers)} tickets wait to be used", "try again later")
        ticket = self._token_bytes(TICKET_BYTES)
        self._offers[ticket] = (self._clock.monotonic() + ttl_s, offer)
        return Ticket(ticket, offer.size)

    def redeem(self, ticket: bytes, offset: int) -> Offer:
        """What the ticket is for; it is good no more."""
        self.expire()
        _, offer = self._offers.pop(ticket, (0.0, None))
        if offer is None:
            raise PeerError(
                "ticket_unknown", "the ticket was not given here, was used, or is too old", "ask for a new one"
            )
        if not 0 <= offset <= offer.size:
            _let_go(offer)
            raise PeerError("offset_invalid", f"offset {offset} is outside 0..{offer.size}", "ask for a new ticket")
        return offer

    def expire(self) -> None:
        """Let go of what nobody came for."""
        now = self._clock.monotonic()
        for ticket in [ticket for ticket, (until, _) in self._offers.items() if until <= now]:
            _let_go(self._offers.pop(ticket)[1])

    def close(self) -> None:
        """Let go of everything."""
        for _, offer in self._offers.values():
            _let_go(offer)
        self._offers.clear()


class SideConnections:
    """The daemon's end: takes over the connections that came with a ticket."""

    def __init__(self, booth: TicketRegistry, *, connections_max: int = SIDE_CONNECTIONS_MAX) -> None:
        self._booth = booth
        self.connections_max = connections_max
        self.open_count = 0
        self._tasks: TaskGroup | None = None

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Move bytes for ever."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                task_status.started()
                while True:
                    await anyio.sleep(EXPIRY_INTERVAL_S)
                    self._booth.expire()
        finally:
            self._booth.close()

    def accept(self, session: Session, hello: Hello) -> None:
        """Take over the connection of a hello with a ticket."""
        assert self._tasks is not None, "side connections run before the doors open"
        assert hello.ticket is not None
        if self.open_count >= self.connections_max:
            reason = f"{self.open_count} side connections are open, and no more may be"
            raise Unavailable("too_many_connections", reason, "come again later with the same ticket")
        offer = self._booth.redeem(hello.ticket, hello.offset)
        session.send(session.welcome(min(hello.version_max, VERSION_MAX), offer.size))
        self.open_count += 1
        self._tasks.start_soon(self._fulfil, offer, hello.offset, session.hand_over())

    async def _fulfil(self, offer: Offer, offset: int, transport: asyncio.Transport) -> None:
        try:
            sock = await detach(transport)
            with sock:
                await movers.run(partial(move_when_told, offer, offset), sock)
        except ForgedError:
            return  # the other end has a name for it, and the ticket is gone: who wants the rest asks again
        except Exception as error:  # noqa: BLE001 - our mistake over one side connection must not reach the others
            _report("a side connection was not survived", error)
        finally:
            self.open_count -= 1
            _let_go(offer)


def _let_go(offer: Offer) -> None:
    try:
        offer.close()
    except Exception as error:  # noqa: BLE001 - what an offer holds is its maker's, and not worth the daemon
        _report("an offer could not be let go of", error)


def _report(what: str, error: Exception) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": what, "exception": error})
