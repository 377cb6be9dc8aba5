"""A worker's connections to its peers: its listener, the world that it is in, and its state and shard transfers.

Invariants:
- A peer that connects proves that it belongs to the job before it is told anything, and so does the listener.
- What the daemon knows this worker by, its incarnation, is not here; peers tell its sessions apart by the session id.
- A worker is in one world at a time, and enters worlds of growing generations. A peer that connects for an older
  generation is refused; one that connects for a newer generation waits, because this worker may learn of it soon.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Literal

import anyio
from anyio.abc import TaskGroup

from forged.clock import Clock, SystemClock
from forged.data.store.port import ShardStore
from forged.elastic.model import ClusterTopology, WorkerId
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.log import SILENT, Log
from forged.net.transport.connection import ConnectionLimits
from forged.net.transport.port import Address, Listener, Network
from forged.net.transport.sockets import SystemNetwork
from forged.retry import RetryPolicy
from forged.worker.collectives.endpoints import Endpoint, HubEndpoint, MemberEndpoint
from forged.worker.collectives.world import World
from forged.worker.data.shard_connections import ShardConnection, ShardConnections, ShardServer
from forged.worker.errors import ABORTED, WorldIncomplete
from forged.worker.state_transfer.transfer import StateFetch, StateServer
from forged.worker.transport import peer_messages
from forged.worker.transport.bulk_channel import BulkTransport, SocketBulkTransport
from forged.worker.transport.peer_link import (
    PEER_LIMITS,
    UNREAD_IN_WORLD_MAX,
    AcceptedLink,
    Dialler,
    Inbox,
    PeerLink,
    memory_for_peers,
)
from forged.worker.transport.peer_messages import NONCE_BYTES, Answer, PeerHello, Purpose

__all__ = ["Mesh", "World"]

SWEEP_INTERVAL_S = 0.5
"""Before the kernel doubles its retransmission pauses twice: a later timeout takes effect late when a host is gone."""
EARLY_WAIT_S = 10.0
"""How long a peer of a newer generation waits for this worker to learn of it."""
UNAUTHENTICATED_MAX = 1024
"""How many connections may be unproven; the newest displaces the oldest."""
PEERS_MAX = 4096
"""How many connections may be open at all."""
MEETING = RetryPolicy(attempts=None, delay_s=0.02, exponential=True, delay_max_s=0.5, jitter=0.5)

_HOPELESS_CODES = frozenset({ABORTED, "generation_over"})


@dataclass(slots=True)
class MeshCounts:
    """Connections to this worker's listener."""

    accepted: int = 0
    refused: int = 0
    """Proven, and refused what they asked for."""
    unproven: int = 0
    """Ended without a proof."""


@dataclass(frozen=True, slots=True)
class _Early:
    answer: Answer
    since: float


class Mesh:
    """One worker's connections to its peers. It has none before `trust` has given it the job's key."""

    def __init__(
        self,
        worker_id: str,
        session_id: bytes,
        job: str,
        network: Network | None = None,
        clock: Clock | None = None,
        log: Log = SILENT,
        *,
        key: bytes = b"",
        source: random.Random | None = None,
        carrier: BulkTransport | None = None,
        limits: ConnectionLimits = PEER_LIMITS,
        scheme: Literal["tcp", "tls"] = "tcp",
    ) -> None:
        self.counts = MeshCounts()
        self._worker_id = worker_id
        self._job = job
        self._network = network if network is not None else SystemNetwork()
        self._clock = clock or SystemClock()
        self._log = log
        self._random = source or random.SystemRandom()
        self._carrier = carrier or SocketBulkTransport()
        self._limits = limits
        self._scheme: Literal["tcp", "tls"] = scheme
        self._links: dict[PeerLink, None] = {}
        self._memory = memory_for_peers()
        self._dialler = Dialler(
            job,
            worker_id,
            session_id,
            self._network,
            scheme,
            limits,
            self._memory,
            self._clock,
            self._random,
            self._links,
            b"",
        )
        self.trust(key)
        self.state_fetch = StateFetch(self._carrier, self._dialler, self._random)
        self._generation = -1
        self._endpoint: Endpoint | None = None
        """The part in the newest world."""
        self._unauthenticated: dict[AcceptedLink, None] = {}
        self._early: dict[AcceptedLink, _Early] = {}
        self._tasks: TaskGroup | None = None
        self._listener: Listener | None = None
        self._state_server: StateServer | None = None
        self._shards: ShardStore | None = None
        self._shard_server: ShardServer | None = None
        self._shard_connections: ShardConnections | None = None
        """Both are made for the first connection: a worker without training data has none."""

    def trust(self, key: bytes) -> None:
        """Use the job's key from now on; without one there is no mesh."""
        self._dialler.key = peer_messages.mesh_key(key, self._job) if key else b""

    @asynccontextmanager
    async def open(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Address]:
        """Listen for peers inside the block; the address has the port."""
        if self._tasks is not None:
            raise RequestRefused("mesh_reopened", "a mesh can be opened only once", "make another mesh")
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            self._state_server = StateServer(self._carrier, tasks, self._log)
            tasks.start_soon(self._sweep)
            try:
                async with self._listening(Address(self._scheme, host=host, port=port)) as address:
                    yield address
            except Exception as error:  # noqa: BLE001 - raised below: a task group would wrap it in an exception group
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    @asynccontextmanager
    async def _listening(self, address: Address) -> AsyncIterator[Address]:
        listener = self._listener = await self._network.listen(address, self._make_link)
        try:
            yield listener.address
        finally:
            with anyio.CancelScope(shield=True):
                await listener.close()
                await self._close()

    # Worlds.

    async def enter(self, generation: int, topology: ClusterTopology, timeout_s: float | None = None) -> World:
        """Meet the members of a generation; returns when all are connected. The previous world has ended by then."""
        rank = self._rank_in(topology)
        if generation < self._generation or (self._endpoint is not None and generation == self._generation):
            raise RequestRefused(
                "generation_over", f"generation {generation} was entered before", "enter a later generation"
            )
        if self._endpoint is not None:
            self._endpoint.abort(f"{self._worker_id} enters generation {generation}")
        self._generation = generation
        endpoint = self._endpoint = self._endpoint_in(topology, rank)
        try:
            with anyio.move_on_after(timeout_s):
                if isinstance(endpoint, HubEndpoint):
                    await self._host(endpoint)
                else:
                    await self._meet(endpoint, topology)
                return World(endpoint)
            raise self._not_met(endpoint, topology, timeout_s)
        except BaseException as error:
            why = error.message if isinstance(error, ForgedError) else "it was cancelled"
            peer = error.peer if isinstance(error, WorldIncomplete) else ""
            endpoint.abort(f"{self._worker_id} does not enter generation {generation}: {why}", peer)
            if self._endpoint is endpoint:
                self._endpoint = None
            raise

    def _endpoint_in(self, topology: ClusterTopology, rank: int) -> HubEndpoint | MemberEndpoint:
        assert self._tasks is not None
        names = [worker.id for worker in topology.workers]
        if rank == 0:
            return HubEndpoint(self._generation, names, peer_messages.digest_of(topology.workers), self._tasks)
        return MemberEndpoint(self._generation, rank, names, self._tasks)

    async def _host(self, hub: HubEndpoint) -> None:
        self._place_early()
        await hub.settled.wait()
        if hub.ending is not None:
            raise hub.ending.error()

    async def _meet(self, endpoint: MemberEndpoint, topology: ClusterTopology) -> None:
        self._place_early()
        hub, world = topology.workers[0], peer_messages.digest_of(topology.workers)

        for pause_s in MEETING.delays(self._random.random):
            endpoint.link, inbox = None, Inbox(UNREAD_IN_WORLD_MAX)
            try:
                link = await self._dialler.dial(
                    hub, Purpose.MEMBER, endpoint.generation, inbox, rank=endpoint.rank, world=world
                )
                await endpoint.start(link, inbox)
                break
            except ForgedError as error:
                if not error.retryable or error.code in _HOPELESS_CODES:
                    raise
            await anyio.sleep(pause_s)
        if endpoint.ending is not None:
            raise endpoint.ending.error()

    def _not_met(
        self, endpoint: HubEndpoint | MemberEndpoint, topology: ClusterTopology, timeout_s: float | None
    ) -> WorldIncomplete:
        if isinstance(endpoint, HubEndpoint):
            absent, peer = endpoint.absent, endpoint.first_absent
        else:
            hub = topology.workers[0]
            absent, peer = f"the other members at {hub}", "" if endpoint.link is not None else hub.id
        return WorldIncomplete(f"{absent} did not connect within {timeout_s:g} s", peer)

    def _rank_in(self, topology: ClusterTopology) -> int:
        if self._tasks is None or not self._dialler.key:
            raise RequestRefused(
                "mesh_not_ready", "the mesh is not open, or has no key", "open the mesh and set the job's key"
            )
        for rank, worker in enumerate(topology.workers):
            if worker.id == self._worker_id:
                return rank
        raise RequestRefused(
            "not_a_member", f"{self._worker_id} is not in this world", "wait for a world with this worker"
        )

    # States.

    @property
    def state_server(self) -> StateServer:
        """Serves this worker's state to fetchers."""
        if self._state_server is None:
            raise RequestRefused("mesh_not_ready", "the mesh is not open", "open the mesh")
        return self._state_server

    # Training data.

    def serve_shards(self, store: ShardStore | None) -> None:
        """Serve the shards of this store from now on."""
        self._shards = store
        if self._shard_server is not None:
            self._shard_server.store = store

    async def connect_for_shards(self, source: WorkerId) -> ShardConnection:
        """Connect to a worker, to fetch shards from it."""
        inbox = Inbox(unread_max=1)
        link = await self._dialler.dial(source, Purpose.SHARDS, 0, inbox)
        if self._shard_connections is None:
            self._shard_connections = ShardConnections(self._carrier)
        return await self._shard_connections.open(source, link, inbox)

    def has_given(self) -> bool:
        """Whether a peer has taken state or shards since the last call, or takes some now."""
        gave_shards = self._shard_server is not None and self._shard_server.has_given()
        return gave_shards or (self._state_server is not None and self._state_server.is_giving)

    def descriptors(self) -> list[int]:
        """The file descriptors of the listener and of all connections, which a forked child has to close."""
        linked = [fd for link in (*self._unauthenticated, *self._links) if (fd := link.descriptor()) is not None]
        owners = (self._listener, self.state_fetch, self._state_server, self._shard_connections, self._shard_server)
        return linked + [fd for owner in owners if owner is not None for fd in owner.descriptors()]

    # Connections.

    def _make_link(self) -> AcceptedLink:
        link = AcceptedLink(self._clock, self._limits, self._memory, self)
        self._unauthenticated[link] = None
        if (
            len(self._unauthenticated) > UNAUTHENTICATED_MAX
            or len(self._unauthenticated) + len(self._links) > PEERS_MAX
        ):
            next(iter(self._unauthenticated)).cut(
                f"too many connections; limit {UNAUTHENTICATED_MAX} unauthenticated ones, {PEERS_MAX} in all"
            )
        return link

    def on_hello(self, link: AcceptedLink, hello: PeerHello) -> None:
        """A peer has connected: prove to it that this worker belongs to the job, or close the connection."""
        if not self._dialler.key:
            link.cut("this worker does not know the job's key yet")
            return
        nonce = self._random.randbytes(NONCE_BYTES)
        link.challenge(hello, peer_messages.challenge_to(hello, nonce, self._dialler.key, self._job, self._worker_id))

    def on_answer(self, link: AcceptedLink, answer: Answer) -> None:
        """A peer has answered the challenge: accept its proof, or close the connection."""
        if not peer_messages.is_proven(answer, self._dialler.key, link.nonces):
            link.cut("its authentication proof is wrong")
            return
        if answer.job != self._job or answer.target != self._worker_id:
            link.cut("it addressed another worker or job")
            return
        del self._unauthenticated[link]
        self._links[link] = None
        link.over.add_done_callback(lambda _: self._forget(link))
        self.counts.accepted += 1
        link.believe(peer_messages.accepted(answer, self._dialler.key, link.nonces), answer.worker)
        self._place(link, answer)

    def on_stranger_gone(self, link: AcceptedLink, reason: str) -> None:
        """An unproven connection has ended."""
        self._unauthenticated.pop(link, None)
        self.counts.unproven += 1
        self._log.debug("a peer connection closed before authentication", reason=reason)

    def _forget(self, link: AcceptedLink) -> None:
        self._links.pop(link, None)
        self._early.pop(link, None)

    def _place(self, link: AcceptedLink, answer: Answer) -> None:
        """Give a proven peer's connection to the part that it asks for."""
        self._early.pop(link, None)
        if link.lost:
            return
        if answer.purpose is Purpose.STATE:
            self.state_server.admit(link, answer.number, answer.worker)
        elif answer.purpose is Purpose.SHARDS:
            assert self._tasks is not None
            if self._shard_server is None:
                self._shard_server = ShardServer(self._carrier, self._tasks, self._log, self._shards)
            with self._refusing(link):
                self._shard_server.admit(link, answer.worker)
        elif answer.number > self._generation:
            self._early[link] = _Early(answer, self._clock.monotonic())
        else:
            with self._refusing(link):
                self._hub_of(answer).admit(link, answer)

    def _hub_of(self, answer: Answer) -> HubEndpoint:
        if answer.number < self._generation or not isinstance(self._endpoint, HubEndpoint):
            raise Unavailable(
                "generation_over",
                f"{self._worker_id} is in generation {self._generation} and is not the hub of {answer.number}",
                "wait for the daemon's next fact",
            )
        return self._endpoint

    def _place_early(self) -> None:
        """Place the peers that have waited for this generation; they go on waiting for a newer one."""
        for link, early in list(self._early.items()):
            self._place(link, early.answer)

    @contextmanager
    def _refusing(self, link: PeerLink) -> Iterator[None]:
        try:
            yield
        except ForgedError as error:
            self.counts.refused += 1
            link.refuse(error)

    # Housekeeping.

    async def _sweep(self) -> None:
        while True:
            await anyio.sleep(SWEEP_INTERVAL_S)
            now = self._clock.monotonic()
            for link in [*self._unauthenticated, *self._links]:
                link.sweep(now)
            for link, early in list(self._early.items()):
                if now - early.since > EARLY_WAIT_S:
                    with self._refusing(link):
                        raise Unavailable(
                            "generation_unknown", f"generation {early.answer.number} is not known here yet"
                        )

    async def _close(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.leave()
        if self._shard_connections is not None:
            self._shard_connections.cut()
        for link in [*self._unauthenticated, *self._links]:
            link.abort()
