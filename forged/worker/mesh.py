"""A worker's connections to its peers: its listener, the world that it is in, and its state and shard transfers.

Invariants:
- A peer that connects proves that it belongs to the job before it is told anything.
- A worker is in one world at a time, and enters worlds of growing generations. A peer that connects for an older
  generation is refused; one that connects for a newer generation waits, because this worker may learn of it soon.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Literal

import anyio
import msgspec
from anyio.abc import TaskGroup

from forged import retry
from forged.clock import Clock, SystemClock
from forged.data.store.port import ShardStore
from forged.elastic.model import ClusterTopology, WorkerId
from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable
from forged.log import SILENT, Log
from forged.net.transport.connection import ConnectionLimits
from forged.net.transport.port import Address, Listener, Network
from forged.net.transport.sockets import SystemNetwork
from forged.retry import RetryPolicy
from forged.worker.collectives.endpoints import HubEndpoint, MemberEndpoint
from forged.worker.collectives.world import ABORTED, World
from forged.worker.data.shard_connections import ShardConnection, ShardConnections, ShardServer
from forged.worker.errors import WorldIncomplete
from forged.worker.state_transfer.transfer import Dialogue, Into, StateFetch, StateServer
from forged.worker.transport import peer_messages
from forged.worker.transport.bulk_channel import BulkTransport, SocketBulkTransport
from forged.worker.transport.peer_link import PEER_LIMITS, AcceptedLink, DialledLink, PeerLink, Receiver, dial
from forged.worker.transport.peer_messages import NONCE_BYTES, Answer, PeerMessage, Purpose

__all__ = ["Mesh", "World"]

SWEEP_INTERVAL_S = 0.5
"""Before the kernel doubles its retransmission pauses twice: a later timeout takes effect late when a host is gone."""
EARLY_WAIT_S = 10.0
"""How long a peer of a newer generation waits for this worker to learn of it."""
STRANGERS_MAX = 1024
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
        incarnation: bytes,
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
        self._incarnation = incarnation
        self._job = job
        self._network = network if network is not None else SystemNetwork()
        self._clock = clock or SystemClock()
        self._log = log
        self._key = key
        self._random = source or random.SystemRandom()
        self._carrier = carrier or SocketBulkTransport()
        self._limits = limits
        self._scheme: Literal["tcp", "tls"] = scheme
        self._generation = -1
        self._world: World | None = None
        self._hub: HubEndpoint | None = None
        self._strangers: dict[AcceptedLink, None] = {}
        self._links: dict[PeerLink, None] = {}
        self._early: dict[PeerLink, _Early] = {}
        self._tasks: TaskGroup | None = None
        self._door: Listener | None = None
        self._desk: StateServer | None = None
        self._fetch = StateFetch(self._carrier, self._dial_source, self._random)
        self._shards: ShardStore | None = None
        self._shard_server: ShardServer | None = None
        self._shard_connections = ShardConnections(self._carrier)

    def trust(self, key: bytes) -> None:
        """Use the job's key from now on."""
        self._key = key

    @asynccontextmanager
    async def open(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Address]:
        """Listen for peers inside the block; the address has the port."""
        if self._tasks is not None:
            raise RequestRefused("mesh_reopened", "a mesh can be opened only once", "make another mesh")
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            self._desk = StateServer(self._carrier, tasks, self._log)
            self._shard_server = ShardServer(self._carrier, tasks, self._log, self._shards)
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
        listener = self._door = await self._network.listen(address, self._make_link)
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
        if generation < self._generation or (self._world is not None and generation == self._generation):
            raise RequestRefused(
                "generation_over", f"generation {generation} was entered before", "enter a later generation"
            )
        if self._world is not None:
            self._world.abort(f"{self._worker_id} enters generation {generation}")
        self._generation = generation
        world = self._world = World(generation, rank, [worker.id for worker in topology.workers])
        try:
            with anyio.move_on_after(timeout_s):
                await (self._host(world, topology) if rank == 0 else self._meet(world, topology))
                return world
            raise self._not_met(world, topology, timeout_s)
        except BaseException as error:
            why = error.message if isinstance(error, ForgedError) else "it was cancelled"
            peer = error.peer if isinstance(error, WorldIncomplete) else ""
            world.abort(f"{self._worker_id} does not enter generation {generation}: {why}", peer)
            if self._world is world:
                self._world = self._hub = None
            raise

    async def _host(self, world: World, topology: ClusterTopology) -> None:
        assert self._tasks is not None
        hub = self._hub = HubEndpoint(world, peer_messages.digest_of(topology.workers), self._tasks)
        world.endpoint = hub
        for link, early in list(self._early.items()):
            self._place(link, early.answer)
        await hub.settled.wait()
        if world.ending is not None:
            raise world.ending.error()

    async def _meet(self, world: World, topology: ClusterTopology) -> None:
        self._hub = None
        self._turn_away_early()
        endpoint = MemberEndpoint(world)
        world.endpoint = endpoint
        answer = msgspec.structs.replace(
            self._answer(topology.workers[0].id, Purpose.MEMBER, world.generation),
            rank=world.rank,
            world=peer_messages.digest_of(topology.workers),
        )

        async def attempt() -> None:
            endpoint.await_start()
            endpoint.link = await self._dial(topology.workers[0], answer, endpoint)
            await endpoint.started

        await retry.run(
            MEETING,
            attempt,
            sleep=anyio.sleep,
            random=self._random.random,
            retryable=lambda error: retry.is_retryable(error) and getattr(error, "code", "") not in _HOPELESS_CODES,
        )
        if world.ending is not None:
            raise world.ending.error()

    def _not_met(self, world: World, topology: ClusterTopology, timeout_s: float | None) -> WorldIncomplete:
        if self._hub is not None:
            absent, peer = self._hub.absent, self._hub.first_absent
        else:
            is_let_in = isinstance(world.endpoint, MemberEndpoint) and world.endpoint.link is not None
            absent, peer = f"the other members at {topology.workers[0]}", "" if is_let_in else topology.workers[0].id
        return WorldIncomplete(f"{absent} did not connect within {timeout_s:g} s", peer)

    def _rank_in(self, topology: ClusterTopology) -> int:
        if self._tasks is None or not self._key:
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

    def offering(self, attempt: int, head: bytes, parts: Sequence[memoryview | bytes]) -> AbstractContextManager[None]:
        """Offer the training state for an attempt at a rescale, until the block is left."""
        if self._desk is None:
            raise RequestRefused("mesh_not_ready", "the mesh is not open", "open the mesh")
        return self._desk.offering(attempt, head, parts)

    async def fetch_state(self, source: WorkerId, attempt: int, into: Into) -> None:
        """Fetch the state that another worker offers for an attempt.

        `into` takes its head and returns memory for every part; it is called again if the source offers another state.
        """
        await self._fetch.fetch(source, attempt, into)

    @property
    def state_received(self) -> int:
        """The bytes of states that have arrived."""
        return self._fetch.received

    @property
    def source_unreached(self) -> Unavailable | None:
        """Why the state source was not reached the last time; None when it was."""
        return self._fetch.unreached

    # Training data.

    def serve_shards(self, store: ShardStore | None) -> None:
        """Serve the shards of this store from now on."""
        self._shards = store
        if self._shard_server is not None:
            self._shard_server.store = store

    async def connect_for_shards(self, source: WorkerId) -> ShardConnection:
        """Connect to a worker, to fetch shards from it."""
        dialogue = Dialogue()
        link = await self._dial(source, self._answer(source.id, Purpose.SHARDS, 0), dialogue)
        return await self._shard_connections.open(source, link, dialogue)

    def has_given(self) -> bool:
        """Whether a peer has taken state or shards since the last call, or takes some now."""
        gave_shards = self._shard_server is not None and self._shard_server.has_given()
        return gave_shards or (self._desk is not None and self._desk.is_giving)

    def descriptors(self) -> list[int]:
        """The file descriptors of the listener and of all connections, which a forked child has to close."""
        linked = [fd for link in (*self._strangers, *self._links) if (fd := link.descriptor()) is not None]
        owners = (self._door, self._fetch, self._desk, self._shard_connections, self._shard_server)
        return linked + [fd for owner in owners if owner is not None for fd in owner.descriptors()]

    # Connections.

    async def _dial_source(self, source: WorkerId, attempt: int, receiver: Receiver) -> DialledLink:
        return await self._dial(source, self._answer(source.id, Purpose.STATE, attempt), receiver)

    async def _dial(self, target: WorkerId, answer: Answer, receiver: Receiver) -> DialledLink:
        if self._tasks is None or not self._key:
            raise RequestRefused(
                "mesh_not_ready", "the mesh is not open, or has no key", "open the mesh and set the job's key"
            )
        link = DialledLink(self._clock, self._limits, receiver, self._key, answer, str(target))
        self._links[link] = None
        link.over.add_done_callback(lambda _: self._links.pop(link, None))
        await dial(self._network, Address(self._scheme, host=target.hostname, port=target.port), link)
        return link

    def _answer(self, target: str, purpose: Purpose, number: int) -> Answer:
        nonce = self._random.randbytes(NONCE_BYTES)
        return Answer(
            peer_messages.VERSION_MAX, self._job, target, self._worker_id, self._incarnation, purpose, number, nonce
        )

    def _make_link(self) -> AcceptedLink:
        link = AcceptedLink(self._clock, self._limits, self, self._random.randbytes(NONCE_BYTES))
        self._strangers[link] = None
        if len(self._strangers) > STRANGERS_MAX or len(self._strangers) + len(self._links) > PEERS_MAX:
            next(iter(self._strangers)).cut("too many unauthenticated connections")
        return link

    def on_answer(self, link: AcceptedLink, answer: Answer) -> None:
        """A peer has answered the challenge: accept its proof, or close the connection."""
        if not self._key or not peer_messages.is_proven(answer, self._key, link.nonce):
            link.cut("its authentication proof is wrong")
            return
        if answer.job != self._job or answer.target != self._worker_id:
            link.cut("it addressed another worker or job")
            return
        del self._strangers[link]
        self._links[link] = None
        link.over.add_done_callback(lambda _: self._links.pop(link, None))
        self.counts.accepted += 1
        link.believe(self, peer_messages.accepted(answer, self._key, link.nonce, self._incarnation))
        self._place(link, answer)

    def on_stranger_gone(self, link: AcceptedLink, reason: str) -> None:
        """An unproven connection has ended."""
        self._strangers.pop(link, None)
        self.counts.unproven += 1
        self._log.debug("a peer connection closed before authentication", reason=reason)

    # Peers that wait for a world.

    def on_message(self, link: PeerLink, message: PeerMessage) -> None:
        """A waiting peer has nothing to send."""
        raise PeerError("message_unexpected", f"{type(message).__name__} was sent before the world began")

    def on_end(self, link: PeerLink, error: ForgedError) -> None:
        """A waiting peer is gone."""
        self._early.pop(link, None)

    def _place(self, link: PeerLink, answer: Answer) -> None:
        assert isinstance(link, AcceptedLink)
        self._early.pop(link, None)
        if answer.purpose is Purpose.STATE:
            assert self._desk is not None
            self._desk.admit(link, answer.number, answer.worker)
        elif answer.purpose is Purpose.SHARDS:
            assert self._shard_server is not None
            with self._refusing(link):
                self._shard_server.admit(link, answer.worker)
        elif answer.number > self._generation:
            self._early[link] = _Early(answer, self._clock.monotonic())
        else:
            with self._refusing(link):
                self._hub_of(answer).admit(link, answer)

    def _hub_of(self, answer: Answer) -> HubEndpoint:
        if answer.number < self._generation or self._hub is None:
            raise Unavailable(
                "generation_over",
                f"{self._worker_id} is in generation {self._generation} and is not the hub of {answer.number}",
                "wait for the daemon's next fact",
            )
        return self._hub

    def _turn_away_early(self) -> None:
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
            for link in [*self._strangers, *self._links]:
                link.sweep(now)
            for link, early in list(self._early.items()):
                if now - early.since > EARLY_WAIT_S:
                    with self._refusing(link):
                        raise Unavailable(
                            "generation_unknown", f"generation {early.answer.number} is not known here yet"
                        )

    async def _close(self) -> None:
        if self._world is not None:
            await self._world.leave()
        self._shard_connections.cut()
        for link in [*self._strangers, *self._links]:
            link.abort()
