"""Training data on its way between workers.

Law: whoever belongs to the job may fetch what a worker holds, any number of shards over one connection. A connection
over which nothing moves holds no thread, and one that is silent for `IDLE_MAX_S` ends. At most `GIVEN_AT_ONCE_MAX`
shards leave a worker at once, in the order in which their turn came, and threads that give are others than those that
take, so that workers who fetch from each other never wait in a circle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from anyio import CapacityLimiter
from anyio.abc import TaskGroup

from forged.data.store.port import Passage, ShardStore, Stamp
from forged.elastic.model import WorkerId
from forged.errors import ForgedError, PeerError, Unavailable
from forged.log import Log
from forged.worker.data import shard_protocol
from forged.worker.state_transfer.transfer import ANSWER_TIMEOUT_S, Dialogue
from forged.worker.transport.bulk_channel import BulkChannel, BulkTransport
from forged.worker.transport.peer_link import AcceptedLink, DialledLink, PeerLink, Receiver
from forged.worker.transport.peer_messages import ShardsReady

GIVEN_AT_ONCE_MAX = 8
TAKEN_AT_ONCE_MAX = 64
VISITORS_MAX = 1024
"""How many connections for shards may be open, most of them idle."""
IDLE_MAX_S = 60.0

Dial = Callable[[WorkerId, Receiver], Awaitable[DialledLink]]


class ShardServer:
    """Gives shards to those who come for them."""

    def __init__(
        self, carrier: BulkTransport, tasks: TaskGroup, log: Log, store: Callable[[], ShardStore | None]
    ) -> None:
        self._store = store
        self._carrier = carrier
        self._tasks = tasks
        self._log = log
        self._turns = CapacityLimiter(GIVEN_AT_ONCE_MAX)
        self._channels: dict[BulkChannel, None] = {}
        self._giving = 0
        """To so many at the moment."""
        self._has_given = False

    def has_given(self) -> bool:
        """Whether anybody was given something since this was asked last, or is just now."""
        has_given, self._has_given = self._has_given or self._giving > 0, False
        return has_given

    def descriptors(self) -> list[int]:
        """Those of all sockets."""
        return [fd for channel in self._channels if (fd := channel.descriptor()) is not None]

    def admit(self, link: AcceptedLink, worker: str) -> None:
        """Somebody comes for shards."""
        if len(self._channels) >= VISITORS_MAX:
            raise Unavailable("shards_busy", f"{VISITORS_MAX} others fetch shards already", "come again later")
        link.receiver = Dialogue()
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
            self._log.info("shards were not given", worker=worker, why=error.message)

    async def _answer(self, channel: BulkChannel) -> None:
        while await channel.is_called(IDLE_MAX_S):
            self._giving += 1
            try:
                if not await channel.converse(partial(shard_protocol.serve, store=self._store()), self._turns):
                    break
            finally:
                self._giving -= 1
                self._has_given = True


class ShardConnection:
    """A connection to a worker that has shards."""

    def __init__(
        self, channel: BulkChannel, turns: CapacityLimiter, on_close: Callable[[ShardConnection], None]
    ) -> None:
        self._channel = channel
        self._turns = turns
        self._on_close = on_close

    async def fetch(self, shard: int, store: ShardStore, passage: Passage) -> Stamp:
        """Fetch a shard; after an error that is no refusal the connection is of no more use."""
        conversation = partial(shard_protocol.fetch, shard=shard, store=store, passage=passage)
        return await self._channel.converse(conversation, self._turns)

    def descriptor(self) -> int | None:
        """That of the socket."""
        return self._channel.descriptor()

    def cut(self) -> None:
        """Let not a byte more pass, from now on."""
        self._channel.cut()

    def close(self) -> None:
        """Hang up."""
        self._channel.close()
        self._on_close(self)


class ShardConnections:
    """All connections of one worker over which it fetches shards."""

    def __init__(self, carrier: BulkTransport, dial: Dial) -> None:
        self._carrier = carrier
        self._dial = dial
        self._open: dict[ShardConnection, None] = {}
        self._turns: CapacityLimiter | None = None

    async def visit(self, source: WorkerId) -> ShardConnection:
        """Connect to a worker that has shards."""
        dialogue = Dialogue()
        link = await self._dial(source, dialogue)
        try:
            if not isinstance(await dialogue.next(ANSWER_TIMEOUT_S), ShardsReady):
                raise PeerError("message_unexpected", f"{source} gives no shards", "see its version")
            channel = await self._carrier.open(_taken_over(link))
        finally:
            if not link.lost:
                link.abort()
        if self._turns is None:
            self._turns = CapacityLimiter(TAKEN_AT_ONCE_MAX)
        visit = ShardConnection(channel, self._turns, self._forget)
        self._open[visit] = None
        return visit

    def descriptors(self) -> list[int]:
        """Those of all sockets."""
        return [fd for visit in self._open if (fd := visit.descriptor()) is not None]

    def _forget(self, visit: ShardConnection) -> None:
        self._open.pop(visit, None)

    def cut(self) -> None:
        """Fetch nothing more."""
        for visit in self._open:
            visit.cut()


def _taken_over(link: PeerLink) -> asyncio.Transport:
    """The transport of a connection that has nothing more to say, if it has not ended meanwhile."""
    if link.lost:
        raise Unavailable("shards_broken_off", "the connection ended before a shard was wanted", "connect again")
    return link.hand_over()
