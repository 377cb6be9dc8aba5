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
from forged.clock import Clock
from forged.errors import PeerError, Unavailable
from forged.kernel.bus import Bus
from forged.kernel.journal import Journal
from forged.kernel.messages import Record
from forged.log import SILENT, Log
from forged.net.protocol.messages import Bye, Hello
from forged.net.session import Session, SessionHost
from forged.net.transport.connection import ConnectionLimits
from forged.net.transport.port import Address, Listener, Network, Peer
from forged.rate_limit import RateLimit

CONNECTIONS_MAX = 4096
UNIX_RESERVE = 16
SWEEP_INTERVAL_S = 1.0
CLEAR_INTERVAL_S = 0.01
COMPLAINTS_PER_S_MAX = 10.0
"""How many peers that were sent away are told of one by one; anybody can cause them."""

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
        log: Log = SILENT,
    ) -> None:
        self.sessions: dict[Session, None] = {}
        self.stopping = False
        """Nobody is let in any more, and nothing new is begun."""
        self.on_arrival: list[Callable[[bytes], None]] = []
        """Called with the id of a client that has said hello."""
        self.on_departure: list[Callable[[bytes], None]] = []
        """Called with the id of a client whose last connection is gone."""
        self._network = network
        self._bus = bus
        self._clock = clock
        self._log = log
        self._complaints = RateLimit(COMPLAINTS_PER_S_MAX, COMPLAINTS_PER_S_MAX, clock.monotonic())
        self._connections_max = connections_max
        self._listeners: list[Listener] = []
        self._arriving: dict[Session, None] = {}
        """Those whose connections do not stand yet."""
        self._by_client: dict[bytes, Session] = {}
        self._streaming: dict[Session, None] = {}
        self._due: dict[Session, None] = {}
        self._held: dict[Session, None] = {}
        self._release_scheduled = False
        self._someone_left = asyncio.Event()
        self._house = SessionHost(
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
            log=log,
            complaints=self._complaints,
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
            if left_out := self._complaints.count(now):
                self._log.warning("more peers were sent away", times=left_out)

    def set_limits(self, limits: ConnectionLimits, connections_max: int) -> None:
        """Judge by these from now on; the size of frames was agreed on with those who are here already."""
        self._connections_max = connections_max
        self._house = replace(self._house, limits=limits)
        if self.stopping:
            return
        for session in list(self.sessions):
            session.limits = replace(limits, frame_bytes_max=session.limits.frame_bytes_max)
            session.work()

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
        self.sessions[session] = self._arriving[session] = None
        return session

    def _admit(self, session: Session) -> None:
        """Refuse one too many; it is among the sessions already."""
        self._arriving.pop(session, None)
        if self.stopping:
            # It was accepted while the doors were being closed.
            raise Unavailable("stopping", "the daemon is stopping", "reconnect")
        assert session.peer is not None, "it is known once the connection stands"
        room = self._connections_max + (UNIX_RESERVE if session.peer.scheme == "unix" else 0)
        # Who is in the middle of a TLS handshake takes up no room yet, or silent strangers could lock out everybody.
        if len(self.sessions) - len(self._arriving) > room:
            raise Unavailable("too_many_connections", "the daemon has all the connections it may have", "try later")

    def _greeted(self, session: Session) -> None:
        self._by_client[session.client] = session
        for hook in self.on_arrival:
            hook(session.client)

    def _left(self, session: Session) -> None:
        self.sessions.pop(session, None)
        self._arriving.pop(session, None)
        self._streaming.pop(session, None)
        self._due.pop(session, None)
        self._held.pop(session, None)
        if self._by_client.get(session.client) is session:
            del self._by_client[session.client]
            # Who is sent away by a daemon that stops is not lost.
            for hook in () if self.stopping else self.on_departure:
                hook(session.client)
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
