"""Connections on which a worker serves shards to other workers and fetches shards from them.

Invariants:
- Any worker of the job may fetch any number of held shards over one connection.
- A connection on which nothing moves holds no thread, and is closed after `IDLE_MAX_S`.
- At most `SERVED_AT_ONCE_MAX` shards are sent at once, first come, first served. Sending and receiving use separate
  threads, so workers that fetch from each other cannot deadlock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from anyio import CapacityLimiter
from anyio.abc import TaskGroup

from forged.data.store.port import FlowControl, ShardStore, Stamp
from forged.elastic.model import WorkerId
from forged.errors import ForgedError, PeerError, Unavailable
from forged.log import Log
from forged.worker.data import shard_protocol
from forged.worker.state_transfer.transfer import ANSWER_TIMEOUT_S
from forged.worker.transport.bulk_channel import BulkChannel, BulkTransport
from forged.worker.transport.peer_link import AcceptedLink, DialledLink, Inbox, PeerLink
from forged.worker.transport.peer_messages import ShardsReady

SERVED_AT_ONCE_MAX = 8
FETCHED_AT_ONCE_MAX = 64
CONNECTIONS_MAX = 1024
"""Served connections, most of them idle."""
IDLE_MAX_S = 60.0


class ShardServer:
    """Serves this worker's shards."""

    def __init__(self, carrier: BulkTransport, tasks: TaskGroup, log: Log, store: ShardStore | None) -> None:
        self.store = store
        self._carrier = carrier
        self._tasks = tasks
        self._log = log
        self._slots = CapacityLimiter(SERVED_AT_ONCE_MAX)
        self._channels: dict[BulkChannel, None] = {}
        self._serving = 0
        """How many shards are being sent now."""
        self._has_given = False

    def has_given(self) -> bool:
        """Whether a shard was sent since the last call, or is being sent now."""
        has_given, self._has_given = self._has_given or self._serving > 0, False
        return has_given

    def descriptors(self) -> list[int]:
        """The file descriptors of all sockets."""
        return [fd for channel in self._channels if (fd := channel.descriptor()) is not None]

    def admit(self, link: AcceptedLink, worker: str) -> None:
        """Serve an authenticated connection of another worker."""
        if len(self._channels) >= CONNECTIONS_MAX:
            raise Unavailable("shards_busy", f"{CONNECTIONS_MAX} connections fetch shards already", "try again later")
        link.inbox = Inbox(unread_max=1)
        self._tasks.start_soon(self._serve, link, worker)

    async def _serve(self, link: AcceptedLink, worker: str) -> None:
        try:
            link.send(ShardsReady())
            channel = await self._carrier.open(_taken_over(link))
            self._channels[channel] = None
            try:
                await self._answer(channel)
            finally:
                del self._channels[channel]
                channel.close()
        except ForgedError as error:
            self._log.info("serving shards ended", worker=worker, reason=error.message)

    async def _answer(self, channel: BulkChannel) -> None:
        while await channel.is_called(IDLE_MAX_S):
            self._serving += 1
            try:
                if not await channel.converse(partial(shard_protocol.serve, store=self.store), self._slots):
                    break
            finally:
                self._serving -= 1
                self._has_given = True


class ShardConnection:
    """A connection to a worker that serves shards."""

    def __init__(
        self, channel: BulkChannel, slots: CapacityLimiter, on_close: Callable[[ShardConnection], None]
    ) -> None:
        self._channel = channel
        self._slots = slots
        self._on_close = on_close

    async def fetch(self, shard: int, store: ShardStore, flow: FlowControl) -> Stamp:
        """Fetch a shard into the store; after an error other than a refusal the connection must be closed."""
        conversation = partial(shard_protocol.fetch, shard=shard, store=store, flow=flow)
        return await self._channel.converse(conversation, self._slots)

    def descriptor(self) -> int | None:
        """The file descriptor of the socket."""
        return self._channel.descriptor()

    def cut(self) -> None:
        """End the connection at once, also under a thread that uses it."""
        self._channel.cut()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
        self._on_close(self)


class ShardConnections:
    """The connections over which one worker fetches shards."""

    def __init__(self, carrier: BulkTransport) -> None:
        self._carrier = carrier
        self._open: dict[ShardConnection, None] = {}
        self._slots: CapacityLimiter | None = None

    async def open(self, source: WorkerId, link: DialledLink, inbox: Inbox) -> ShardConnection:
        """Take over a link that was dialled to fetch shards, once the source is ready."""
        try:
            if not isinstance(await inbox.next(ANSWER_TIMEOUT_S), ShardsReady):
                raise PeerError(
                    "message_unexpected", f"{source} does not serve shards", "check which version of forged it runs"
                )
            channel = await self._carrier.open(_taken_over(link))
        finally:
            if not link.lost:
                link.abort()
        if self._slots is None:
            self._slots = CapacityLimiter(FETCHED_AT_ONCE_MAX)
        connection = ShardConnection(channel, self._slots, self._forget)
        self._open[connection] = None
        return connection

    def descriptors(self) -> list[int]:
        """The file descriptors of all sockets."""
        return [fd for connection in self._open if (fd := connection.descriptor()) is not None]

    def _forget(self, connection: ShardConnection) -> None:
        self._open.pop(connection, None)

    def cut(self) -> None:
        """End all connections at once."""
        for connection in self._open:
            connection.cut()


def _taken_over(link: PeerLink) -> asyncio.Transport:
    if link.lost:
        raise Unavailable("shards_broken_off", "the connection ended before a shard was requested", "connect again")
    return link.hand_over()
