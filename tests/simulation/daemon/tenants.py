"""Tenants that flood the daemon in some seeds, and the promises that it keeps to others meanwhile.

Two hostile tenants, each bound to a job of its own, hold as many connections as they can, each with a new client id, an
unacknowledged reply and an unfinished frame.

Invariants:
- An operator's connection, large frame and deciding request are admitted.
- So are those of a tenant that uses no more than its share.
- Once the faults have ended, each is answered within `ANSWER_MAX_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import anyio
import msgspec

from forged.auth.messages import CreateToken
from forged.auth.model import Role
from forged.auth.tokens import encode_token
from forged.client import ForgedClient
from forged.daemon import Daemon
from forged.errors import ForgedError
from forged.ids import CLIENT_ID_BYTES
from forged.jobs.model import AddNote, CreateJob
from forged.kernel.messages import Request
from forged.kernel.replies import ReplyTable
from forged.net.admission import OPERATOR_RESERVE
from forged.net.protocol import frames
from forged.net.protocol.messages import VERSION_MAX, VERSION_MIN, Failure, Hello, RequestMessage, encode
from forged.net.transport.connection import Connection, ConnectionLimits
from forged.net.transport.port import Address
from forged.status.model import PingDaemon
from tests.simulation.base import ENDPOINT, until_done
from tests.simulation.daemon.oracle import Oracle
from tests.simulation.environment.loop import VirtualClock, VirtualLoop
from tests.simulation.environment.network import HostNetwork, SimulatedNetwork

FLOODED_SEEDS = 0.25
HOSTILE = ("hostile0", "hostile1")
QUIET = "quiet"
OPERATOR = "prober"
JOBS = (*HOSTILE, QUIET)
CONNECTIONS_MAX = 18
QUIET_CONNECTIONS_MAX = CONNECTIONS_MAX // len(JOBS)
HELD_MAX = 20
"""How many connections each hostile tenant opens; both together want more than there are with the reserve."""
CLIENTS_MAX = 48
CLIENTS_RESERVE = 16
CLIENTS_OF_PROBE_MAX = 6
"""How many client ids one sender of probes uses: less than its share of the remembered clients."""
FRAME_BYTES_MAX = 128 << 10
BYTE_LIMITS: Mapping[str, int] = {
    "frame_bytes_max": FRAME_BYTES_MAX,
    "connection_bytes_max": 256 << 10,
    "principal_bytes_max": 512 << 10,
    "daemon_bytes_max": 1 << 20,
}
LARGE_BYTES = 40 << 10
"""A frame of this size needs a grant of memory."""
UNFINISHED_BYTES = 127 << 10
"""Four of them fit into the share of a principal, and eight into the daemon without the reserve."""
UNFINISHED = UNFINISHED_BYTES.to_bytes(4, "big") + bytes(LARGE_BYTES)
ANSWER_MAX_S = 8.0
PART_PAUSE_S = 0.1
PROBES_AFTER_FAULTS = 8
SHORTAGES = frozenset({"too_many_connections", "reply_memory_full", "busy", "memory_displaced", "not_reading"})


class Link(Connection):
    """One connection to the daemon, whose messages the caller takes."""

    def __init__(self, clock: VirtualClock, hello: Hello) -> None:
        super().__init__(clock, ConnectionLimits())
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._hello = hello

    def opened(self) -> None:
        self.established()
        self.send(self._hello)

    def received(self, message: Any) -> None:
        self.inbox.put_nowait(message)

    def ended(self, error: ForgedError) -> None:
        self.inbox.put_nowait(error)

    async def next(self) -> Any:
        """The next message; raises the error of an ended connection."""
        message = await self.inbox.get()
        if isinstance(message, ForgedError):
            raise message
        return message

    async def request(self, number: int, request: Request[Any], padding: str = "") -> Any:
        """Send a request in two parts, so that a large one needs a grant of memory, and wait for its answer."""
        fields = msgspec.structs.asdict(request) | {"padding": padding}
        body = msgspec.Raw(msgspec.msgpack.encode(fields))
        frame = frames.encode(encode(RequestMessage(number, number - 1, type(request).__name__, body)))
        self.write(frame[: len(frame) // 2])
        await anyio.sleep(PART_PAUSE_S)
        self.write(frame[len(frame) // 2 :])
        return await self.next()

    def write(self, data: bytes) -> None:
        if self._transport is not None and not (self.closing or self.lost):
            self._transport.write(data)


class Tenants:
    """The tenants of one seed."""

    def __init__(self, seed: int, loop: VirtualLoop, network: SimulatedNetwork, oracle: Oracle) -> None:
        self.random = Random(f"tenants {seed}")
        self.are_hostile = self.random.random() < FLOODED_SEEDS
        self._loop = loop
        self._network = network
        self._oracle = oracle
        self._clock = VirtualClock(loop)
        self._tokens: dict[str, str] = {}
        self._notes = 0

    def settings(self) -> dict[str, Any]:
        """Limits that the flood exceeds."""
        return {"connections_max": CONNECTIONS_MAX, **BYTE_LIMITS} if self.are_hostile else {}

    def extend(self, daemon: Daemon) -> None:
        if self.are_hostile:
            daemon.ledger.replies = ReplyTable(CLIENTS_MAX)
            daemon.ledger.replies._client_shares.resize(CLIENTS_MAX, CLIENTS_RESERVE)

    async def prepare(self, operator: ForgedClient, token: str) -> None:
        """Create the jobs of the tenants and their tokens; `token` is the operator's."""
        self._tokens[OPERATOR] = token
        for job in JOBS:
            secret = self.random.randbytes(32)
            await until_done(operator, CreateJob(job))
            await until_done(operator, CreateToken(job, Role.WORKER, secret, jobs=(job,)))
            self._tokens[job] = encode_token(secret)[1]

    async def flood(self, job: str, until: Callable[[], bool]) -> None:
        """Hold connections, replies and bytes until the condition is true."""
        network = self._network.host(job)
        held: list[Link] = []
        while not until():
            held = [link for link in held if not (link.closing or link.lost)]
            if len(held) < HELD_MAX and (link := await self._dial(network, job, self._client_id())) is not None:
                held.append(link)
                with anyio.move_on_after(ANSWER_MAX_S):
                    await self._hold(link, job)
            await anyio.sleep(self.random.uniform(0.0, 0.2))
        for link in held:
            link.abort()

    async def _hold(self, link: Link, job: str) -> None:
        try:
            await link.next()
            await link.request(1, AddNote(job, self._note_text()))
            link.write(UNFINISHED)
        except ForgedError:
            link.abort()

    async def probe(self, name: str, job: str, faults_active: Callable[[], bool]) -> None:
        """Send requests, each on a connection of its own, until enough were answered after the faults."""
        network, clients, answered = self._network.host(name), [self._client_id()], 0
        number = 0
        while answered < PROBES_AFTER_FAULTS:
            await anyio.sleep(self.random.uniform(0.2, 1.0))
            is_calm = not faults_active()
            if is_calm and len(clients) < CLIENTS_OF_PROBE_MAX:
                # A new client needs room in the table of replies.
                clients.append(self._client_id())
            link = await self._dial(network, name, clients[-1])
            if link is None:
                continue
            number += 1
            with anyio.move_on_after(ANSWER_MAX_S) as deadline:
                is_answered = await self._ask(link, name, job, number)
                answered += is_calm and is_answered
            link.abort()
            if deadline.cancelled_caught and is_calm:
                self._oracle.violated(f"{name} got no answer within {ANSWER_MAX_S} s while others flooded the daemon")

    async def _ask(self, link: Link, name: str, job: str, number: int) -> bool:
        """Send a large frame and a request that decides; returns whether the latter was executed."""
        try:
            await link.next()
            await link.request(2 * number - 1, PingDaemon(), padding="x" * LARGE_BYTES)
            answer = await link.request(2 * number, AddNote(job, self._note_text()))
        except ForgedError as error:
            self._admitted(name, error.code)
            return False
        if isinstance(answer, Failure):
            self._admitted(name, answer.code)
        return not isinstance(answer, Failure)

    def _admitted(self, name: str, code: str) -> None:
        """Complain about a refusal for want of room, unless this principal itself has used up its share."""
        if code in SHORTAGES and self._connections_of(name) <= (
            QUIET_CONNECTIONS_MAX if name == QUIET else OPERATOR_RESERVE
        ):
            self._oracle.violated(f"{name}, within its share, was refused with {code} while others flooded the daemon")

    def _connections_of(self, name: str) -> int:
        """The connections of the quiet tenant, or of all operators, the dying ones included."""
        clients = [connection.client_host for connection in self._network.connections]
        return clients.count(QUIET) if name == QUIET else sum(client not in JOBS for client in clients)

    async def _dial(self, network: HostNetwork, name: str, client: bytes) -> Link | None:
        token = self._tokens[name]
        link = Link(self._clock, Hello(VERSION_MIN, VERSION_MAX, client, name, token))
        try:
            await network.connect(Address.parse(ENDPOINT), lambda: link)
        except ForgedError:
            return None
        return link

    def _client_id(self) -> bytes:
        return self.random.randbytes(CLIENT_ID_BYTES)

    def _note_text(self) -> str:
        self._notes += 1
        text = f"tenants-{self._notes}"
        self._oracle.attempted.add(text)
        return text
