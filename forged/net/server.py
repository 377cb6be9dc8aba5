"""The server: listens, keeps the client sessions, and schedules their streams.

Invariants:
- The limits of connections are shared out by principal, with a reserve for operators (`admission`).
- Sessions send facts in turn, and resume requests in turn after congestion, so that no session delays another one.
- An idle connection costs one check per second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import anyio

from forged.auth.model import Principal
from forged.clock import Clock
from forged.errors import ForgedError, PeerError, Unavailable
from forged.kernel.bus import Bus
from forged.kernel.journal import Journal
from forged.kernel.messages import Record, Request
from forged.log import SILENT, Log
from forged.net.admission import HANDSHAKES_MAX, ConnectionTable, holder_before_hello
from forged.net.protocol.messages import Bye, Hello
from forged.net.session import Session
from forged.net.transport.connection import ConnectionLimits
from forged.net.transport.memory import Memory, MemoryLimits
from forged.net.transport.port import Address, Listener, Network, Peer
from forged.net.turns import Turns
from forged.rate_limit import RateLimit
from forged.shares import Holder, Shares

R = TypeVar("R")

CONNECTIONS_MAX = 4096
REQUESTS_MAX = 8192
"""How many requests of all connections may be in flight; further ones wait. A reply waits for earlier decisions."""
REQUESTS_RESERVE = 1024
REQUESTS_EACH_MAX = 2048
"""How many of one principal, or of the principals of one job: two batches of decisions."""
SWEEP_INTERVAL_S = 1.0
CLEAR_INTERVAL_S = 0.01
DISCONNECTS_LOGGED_PER_S_MAX = 10.0
"""The maximum rate of log lines about disconnected peers, which any peer can cause."""

SideConnection = Callable[[Session, Hello], None]


def refuse_side_connection(session: Session, hello: Hello) -> None:
    """Refuse a ticket; for servers without side connections."""
    raise PeerError("ticket_unknown", "the ticket is unknown, used or expired", "request a new ticket")


class Server:
    """Listens and keeps the sessions; implements `SessionHost`."""

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
        handshakes_max: int = HANDSHAKES_MAX,
        memory: MemoryLimits | None = None,
        side_connection: SideConnection = refuse_side_connection,
        log: Log = SILENT,
    ) -> None:
        self.sessions: dict[Session, None] = {}
        self.stopping = False
        """Whether new connections and new requests are refused."""
        self.on_client_connected: list[Callable[[bytes], None]] = []
        """Called with the client id of every accepted hello."""
        self.on_client_gone: list[Callable[[bytes], None]] = []
        """Called with the client id when a client's latest session has ended."""
        self.bus = bus
        self.journal = journal
        self.clock = clock
        self.history = history
        self.limits = limits or ConnectionLimits()
        self.log = log
        self.identify = identify
        self.side_connection = side_connection
        self.streaming: dict[Session, None] = {}
        self.disconnect_log = RateLimit(DISCONNECTS_LOGGED_PER_S_MAX, DISCONNECTS_LOGGED_PER_S_MAX, clock.monotonic())
        self.memory = Memory(memory)
        self.requests = Shares("requests in flight", REQUESTS_MAX, REQUESTS_RESERVE, REQUESTS_EACH_MAX)
        self.turns = Turns(lambda act: asyncio.get_running_loop().call_soon(act))
        self._network = network
        self._table = ConnectionTable(connections_max, handshakes_max)
        self._listeners: list[Listener] = []
        self._by_client: dict[bytes, Session] = {}
        self._due: dict[Session, None] = {}
        self._held: dict[Session, None] = {}
        self._release_scheduled = False
        self._session_ended = asyncio.Event()
        bus.on_publish.append(self._published)

    @property
    def addresses(self) -> list[Address]:
        """The addresses at which it listens."""
        return [listener.address for listener in self._listeners]

    async def listen(self, address: Address) -> Address:
        """Listen at an address; returns the actual one."""
        listener = await self._network.listen(address, self._new_session)
        self._listeners.append(listener)
        return listener.address

    async def run(self) -> None:
        """Check the sessions once per second until cancelled."""
        while True:
            await anyio.sleep(SWEEP_INTERVAL_S)
            now = self.clock.monotonic()
            for session in list(self.sessions):
                session.sweep(now)
            if suppressed := self.disconnect_log.count(now):
                self.log.warning("more peers were disconnected", times=suppressed)

    def set_limits(
        self, limits: ConnectionLimits, connections_max: int, handshakes_max: int, memory: MemoryLimits
    ) -> None:
        """Apply new limits. Existing sessions keep their frame size, which was part of their welcome."""
        self._table.resize(connections_max, handshakes_max)
        self.memory.resize(memory)
        self.limits = limits
        if self.stopping:
            return
        for session in list(self.sessions):
            session.limits = replace(limits, frame_bytes_max=session.limits.frame_bytes_max)
            session.work()

    def check_rights(self) -> None:
        """Disconnect sessions without further rights."""
        for session in list(self.sessions):
            if session.greeted and not session.closing:
                session.check_rights()

    async def stop_listening(self) -> None:
        """Stop accepting connections."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            await listener.close()

    def stop_admitting(self) -> None:
        """Read no further requests; requests in flight are answered."""
        self.stopping = True
        for session in list(self.sessions):
            session.limits = replace(session.limits, in_flight_max=0)
            session.work()

    async def close_sessions(self, deadline_s: float) -> None:
        """Send a bye to all sessions and close them; abort those that are open after `deadline_s`."""
        self.stopping = True
        for session in list(self.sessions):
            session.pump()
            session.send(Bye(0, "the daemon is stopping"))
            session.close(Unavailable("stopping", "the daemon is stopping", "reconnect"))
        with anyio.move_on_after(deadline_s):
            while self.sessions:
                self._session_ended.clear()
                await self._session_ended.wait()
        for session in list(self.sessions):
            session.abort()

    def _new_session(self) -> Session:
        session = Session(self, self._network.peer)
        self.sessions[session] = None
        return session

    def admit(self, session: Session, peer: Peer) -> None:
        """Refuse a new connection if its address already has its full share; it is in `sessions` already."""
        if self.stopping:
            # It was accepted while the listeners were being closed.
            raise Unavailable("stopping", "the daemon is stopping", "reconnect")
        session.holder = holder_before_hello(peer, self._is_operator)
        self._table.open(session, session.holder, self.clock.monotonic())

    def _is_operator(self, peer: Peer) -> bool:
        try:
            return self.identify(peer, None).holder.is_operator
        except ForgedError:
            return False

    def greet(self, session: Session, principal: Principal) -> None:
        """Refuse the connection if its principal already has its full share of the connections."""
        self._table.greet(session, principal.holder)

    def greeted(self, session: Session) -> None:
        self._by_client[session.client] = session
        for hook in self.on_client_connected:
            hook(session.client)

    async def ask(self, client: bytes, request: Request[R], timeout_s: float) -> R:
        """Send a request to a connected client and wait for its reply."""
        session = self._by_client.get(client)
        if session is None:
            raise Unavailable("connection_lost", "this client is not connected", "retry when it has reconnected")
        return await session.request(request, timeout_s)

    def left(self, session: Session) -> None:
        self.sessions.pop(session, None)
        self._table.close(session)
        self.streaming.pop(session, None)
        self._due.pop(session, None)
        self._held.pop(session, None)
        if self._by_client.get(session.client) is session:
            del self._by_client[session.client]
            # A session that is closed because the daemon stops does not count as lost.
            for hook in () if self.stopping else self.on_client_gone:
                hook(session.client)
        self._session_ended.set()

    def resume_when_clear(self, session: Session) -> None:
        self._held[session] = None
        self._release_soon()

    def _release_soon(self) -> None:
        if not self._release_scheduled:
            self._release_scheduled = True
            asyncio.get_running_loop().call_later(CLEAR_INTERVAL_S, self._release)

    def _release(self) -> None:
        self._release_scheduled = False
        blocked: set[Holder] = set()
        for session in list(self._held):
            # Sessions that were not served stay ahead of served ones that want more.
            if session.holder in blocked or session.is_blocked:
                blocked.add(session.holder)
            else:
                self._held.pop(session, None)
                session.work()
        if self._held:
            self._release_soon()

    def _published(self, records: Sequence[Record]) -> None:
        if records:
            self.pump_soon(self.streaming)

    def pump_soon(self, sessions: Iterable[Session]) -> None:
        idle = not self._due
        self._due.update(dict.fromkeys(sessions))
        if idle and self._due:
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        due, self._due = self._due, {}
        more = [session for session in due if session.pump()]
        if more:
            self.pump_soon(more)
