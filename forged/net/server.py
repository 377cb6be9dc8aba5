"""The daemon's doors and everybody who came in.

Law: a connection costs what its limits say and no more; one too many is told so and let go, but a few on the Unix
socket are let in beyond the limit, so that an operator can look at what fills it. Facts are sent on to those who stream
them in turns, so that one with much to catch up does not keep the others waiting; and so are requests let in when the
bus is free again. An idle connection costs a look once a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import anyio

from forged.auth.model import Principal
from forged.bus import Bus
from forged.clock import Clock
from forged.errors import PeerError, Unavailable
from forged.journal import Journal
from forged.messages import Record
from forged.net.connection import ConnectionLimits
from forged.net.messages import Bye, Hello
from forged.net.network import Address, Listener, Network, Peer
from forged.net.session import House, Session

CONNECTIONS_MAX = 4096
UNIX_RESERVE = 16
SWEEP_INTERVAL_S = 1.0
CLEAR_INTERVAL_S = 0.01

SideConnection = Callable[[Session, Hello], None]


def no_side_connections(session: Session, hello: Hello) -> None:
    """What a server does with a ticket when it has not given any."""
    raise PeerError("ticket_unknown", "the ticket was not given here, was used, or is too old", "ask for a new one")


class Server:
    """Listens, keeps the sessions, and sends facts on."""

    def __init__(
        self,
        network: Network,
        bus: Bus,
        journal: Journal,
        clock: Clock,
        *,
        history: str,
        identify: Callable[[Peer, str | None], Principal],
        limits: ConnectionLimits | None = None,
        connections_max: int = CONNECTIONS_MAX,
        side_connection: SideConnection = no_side_connections,
    ) -> None:
        self.sessions: dict[Session, None] = {}
        self.stopping = False
        """Nobody is let in any more, and nothing new is begun."""
        self._network = network
        self._bus = bus
        self._clock = clock
        self._connections_max = connections_max
        self._listeners: list[Listener] = []
        self._by_client: dict[bytes, Session] = {}
        self._streaming: dict[Session, None] = {}
        self._due: dict[Session, None] = {}
        self._held: dict[Session, None] = {}
        self._release_scheduled = False
        self._someone_left = asyncio.Event()
        self._house = House(
            bus=bus,
            journal=journal,
            clock=clock,
            history=history,
            identify=identify,
            limits=limits or ConnectionLimits(),
            side_connection=side_connection,
            admit=self._admit,
            greeted=self._greeted,
            left=self._left,
            streaming=self._streaming,
            pump_soon=self._pump_soon,
            resume_when_clear=self._hold,
        )
        bus.on_publish.append(self._published)

    @property
    def addresses(self) -> list[Address]:
        """Where it listens."""
        return [listener.address for listener in self._listeners]

    def session_of(self, client: bytes) -> Session | None:
        """The present session of a client, by the id it said in its hello; the latest one if it has several."""
        return self._by_client.get(client)

    async def listen(self, address: Address) -> Address:
        """Open a door; returns where it really is."""
        listener = await self._network.listen(address, self._enter)
        self._listeners.append(listener)
        return listener.address

    async def run(self) -> None:
        """Look after the sessions for ever."""
        while True:
            await anyio.sleep(SWEEP_INTERVAL_S)
            now = self._clock.monotonic()
            for session in list(self.sessions):
                session.sweep(now)

    def check_rights(self) -> None:
        """Let go of those whose rights have ended."""
        for session in list(self.sessions):
            if session.greeted and not session.closing:
                session.check_rights()

    async def close_doors(self) -> None:
        """Let nobody in any more."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            await listener.close()

    def stop_admitting(self) -> None:
        """Read no more from anybody; what was begun is answered still."""
        self.stopping = True
        for session in list(self.sessions):
            session.limits = replace(session.limits, in_flight_max=0)
            session.work()

    async def say_goodbye(self, deadline_s: float) -> None:
        """Let everybody go in good order, those who take too long without ceremony."""
        self.stopping = True
        for session in list(self.sessions):
            session.pump()
            session.send(Bye(0, "the daemon is stopping"))
            session.close(Unavailable("stopping", "the daemon is stopping", "reconnect"))
        with anyio.move_on_after(deadline_s):
            while self.sessions:
                self._someone_left.clear()
                await self._someone_left.wait()
        for session in list(self.sessions):
            session.abort()

    def _enter(self) -> Session:
        session = Session(self._house, self._network.peer)
        self.sessions[session] = None
        return session

    def _admit(self, peer: Peer) -> None:
        """Refuse one too many; it is among the sessions already."""
        if self.stopping:
            # It was accepted while the doors were being closed.
            raise Unavailable("stopping", "the daemon is stopping", "reconnect")
        room = self._connections_max + (UNIX_RESERVE if peer.scheme == "unix" else 0)
        if len(self.sessions) > room:
            raise Unavailable("too_many_connections", "the daemon has all the connections it may have", "try later")

    def _greeted(self, session: Session) -> None:
        self._by_client[session.client] = session

    def _left(self, session: Session) -> None:
        self.sessions.pop(session, None)
        self._streaming.pop(session, None)
        self._due.pop(session, None)
        self._held.pop(session, None)
        if self._by_client.get(session.client) is session:
            del self._by_client[session.client]
        self._someone_left.set()

    def _hold(self, session: Session) -> None:
        self._held[session] = None
        self._release_soon()

    def _release_soon(self) -> None:
        if not self._release_scheduled:
            self._release_scheduled = True
            asyncio.get_running_loop().call_later(CLEAR_INTERVAL_S, self._release)

    def _release(self) -> None:
        self._release_scheduled = False
        for session in list(self._held):
            if self._bus.congested:
                # Who was not served stays in front of those who were and want more.
                self._release_soon()
                return
            del self._held[session]
            session.work()

    def _published(self, records: Sequence[Record]) -> None:
        if records:
            self._pump_soon(self._streaming)

    def _pump_soon(self, sessions: Iterable[Session]) -> None:
        idle = not self._due
        self._due.update(dict.fromkeys(sessions))
        if idle and self._due:
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        due, self._due = self._due, {}
        more = [session for session in due if session.pump()]
        if more:
            self._pump_soon(more)
