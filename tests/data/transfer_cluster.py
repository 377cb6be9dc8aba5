"""Workers with shards, and a proxy that tampers with the bytes between them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from forged.data.model import DataShard
from forged.data.store.memory import MemoryShardStore
from forged.data.store.port import ArrivingShard, ShardStore, Stamp
from forged.data.transfer.manager import DataTransferManager
from forged.data.transfer.outcome import BadCopy, MovedShard, TransferProgress
from forged.elastic.model import WorkerId
from forged.retry import RetryPolicy
from forged.worker.mesh import Mesh
from tests.worker.meshes import PATIENCE_S, open_meshes

FAST_RETRY = RetryPolicy(attempts=3, delay_s=0.01)

Tamper = Callable[[int, bytes], bytes]
"""Is given the offset and the bytes of a piece on its way to the fetcher; returns what is passed on, cut if shorter."""


def pass_unchanged(at: int, data: bytes) -> bytes:
    return data


def cut_after(count: int) -> Tamper:
    """Cut the connection after so many bytes."""
    return lambda at, data: data[: max(0, count - at)]


def flip_once(at_byte: int) -> Tamper:
    """Flip a bit of one byte, the first time it passes."""
    done = False

    def tamper(at: int, data: bytes) -> bytes:
        nonlocal done
        if done or not at <= at_byte < at + len(data):
            return data
        done = True
        changed = bytearray(data)
        changed[at_byte - at] ^= 1
        return bytes(changed)

    return tamper


class TamperingProxy:
    """A port that forwards to a worker; `tamper` sees the replies."""

    def __init__(self, target: WorkerId) -> None:
        self.tamper: Tamper = pass_unchanged
        self.hold_at: int | None = None
        """After so many bytes nothing passes until the gate opens."""
        self.gate = asyncio.Event()
        self.held = asyncio.Event()
        self.passed: list[int] = []
        """The bytes of the replies, for each connection."""
        self.worker: WorkerId
        self._target = target
        self._tasks: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[WorkerId]:
        """Listen; yields the worker's address as seen through the proxy."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        self.worker = WorkerId(self._target.id, "127.0.0.1", port)
        try:
            yield self.worker
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.append(asyncio.ensure_future(self._connect(reader, writer)))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with _closing(writer):
            far_reader, far_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
            async with _closing(far_writer):
                self.passed.append(0)
                ways = [
                    asyncio.ensure_future(_carry(reader, far_writer)),
                    asyncio.ensure_future(self._carry_back(far_reader, writer, len(self.passed) - 1)),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)

    async def _carry_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        at = 0
        while data := await reader.read(4096):
            if self.hold_at is not None and at + len(data) > self.hold_at:
                self.held.set()
                await self.gate.wait()
            changed = self.tamper(at, data)
            at += len(data)
            self.passed[number] += len(changed)
            writer.write(changed)
            await writer.drain()
            if len(changed) < len(data):
                break


@asynccontextmanager
async def _closing(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        yield
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(4096):
        writer.write(data)
        await writer.drain()


def shard(number: int) -> DataShard:
    return DataShard(number, number, number + 1)


def open_descriptors() -> int:
    """The number of open file descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def content_of(number: int, size: int) -> bytes:
    """Bytes that differ for every shard."""
    return Random(number).randbytes(size)


class DelayedStore(MemoryShardStore):
    """A store whose writes wait for a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.gate = threading.Event(), threading.Event()

    def has_room_for(self, count: int) -> bool:
        self.reached.set()
        assert self.gate.wait(PATIENCE_S)
        return super().has_room_for(count)


class BlockedStore(MemoryShardStore):
    """A store whose `receive` waits for a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.gate = 0, threading.Event()

    def receive(self, shard: int, stamp: Stamp | None, offset: int = 0) -> ArrivingShard:
        self.reached += 1
        assert self.gate.wait(PATIENCE_S)
        return super().receive(shard, stamp, offset)


@dataclass(frozen=True)
class Observer:
    """Passes on what the transfers of a manager report."""

    progress: Callable[[TransferProgress], object] = lambda progress: None
    bad_copy: Callable[[BadCopy], object] = lambda copy: None

    def on_progress(self, progress: TransferProgress) -> None:
        self.progress(progress)

    def on_bad_copy(self, copy: BadCopy) -> None:
        self.bad_copy(copy)


@dataclass
class TransferCluster:
    """Workers with stores; the first one fetches."""

    meshes: list[Mesh]
    workers: list[WorkerId]
    stores: list[ShardStore]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def fetcher(self) -> WorkerId:
        """The worker that fetches."""
        return self.workers[0]

    @property
    def store(self) -> ShardStore:
        """The fetcher's store."""
        return self.stores[0]

    def manager(self, **options: Any) -> DataTransferManager:
        """A manager of the fetcher, with short retries."""
        defaults = {"retry": FAST_RETRY, "random": Random(1).random, **self.options}
        return DataTransferManager(
            worker=self.fetcher, store=self.store, connect=self.meshes[0].connect_for_shards, **{**defaults, **options}
        )

    async def move(self, manager: DataTransferManager, number: int, *sources: int | WorkerId) -> MovedShard | None:
        """Fetch a shard from these workers, the first one as its owner."""
        first, *rest = (one if isinstance(one, WorkerId) else self.workers[one] for one in sources)
        return await manager.transfer_data_shards(first, self.fetcher, shard(number), replicas=rest)


@asynccontextmanager
async def open_cluster(
    count: int, make_store: Callable[[int], ShardStore] = lambda number: MemoryShardStore(), **options: Any
) -> AsyncIterator[TransferCluster]:
    """Run so many workers, each with a store."""
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(open_meshes(count, **options))
        stores = [make_store(number) for number in range(count)]
        for mesh, store in zip(made.meshes, stores, strict=True):
            mesh.serve_shards(store)
        yield TransferCluster(made.meshes, made.workers, stores)
