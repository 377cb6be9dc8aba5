"""Many workers in one process, as far as the daemon can tell; the training is left out.

Each is a client of its own over a connection of its own. It registers, follows the facts of its job, says that it has
stopped and that it has the state when an attempt asks for that, and sends heartbeats. What to do comes as lines on the
standard input; what has happened goes out as lines of JSON, with times by the clock that all processes of the machine
share.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from forged.client import ForgedClient
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.messages import (
    INCARNATION_BYTES,
    Heartbeat,
    JoinJob,
    ReportReady,
    ReportStopped,
    RescaleCompleted,
    RescaleStarted,
    RescaleSynchronising,
)
from forged.elastic.model import WorkerId
from forged.errors import RequestRefused
from forged.kernel.messages import Fact, Gap, UnknownFact
from forged.net.protocol import frames
from forged.net.protocol.messages import SignalMessage, encode
from forged.worker.worker_state.job_view import FOLLOWED

JOB = "crowd"
HOST = "127.0.0.1"
CONNECTING_MAX = 32
HEARTBEAT_INTERVAL_S = 1.0
LINE_BYTES_MAX = 1 << 20
BYTES_RECEIVED = struct.Struct("=128xQ")
"""Where Linux' `struct tcp_info` counts the bytes that a connection has received."""

Tell = Callable[[int, float], None]


def incarnation_of(name: str) -> bytes:
    """What tells a worker from another of its name; here there is never another."""
    return name.encode().ljust(INCARNATION_BYTES, b".")


def settings_for(workers: int) -> dict[str, Any]:
    """Those of a job that begins when so many workers are there, and outlives any number of deaths."""
    config = ElasticTrainingConfig(
        max_workers=workers,
        failure_tolerance_percentage=100,
        max_consecutive_failures=1_000_000,
    )
    return config.to_settings()


class Worker:
    """One of the crowd. When somebody dies, those with an odd number have committed the step, the others have not."""

    def __init__(self, number: int, port: int, client: ForgedClient, committed: Tell) -> None:
        self.name = f"w{number}"
        self._port = port
        self.client = client
        self._is_ahead = number % 2 == 1
        self._committed = committed
        self._generation = 0
        self._step = 0
        self._stopped_at = 0

    async def train(self, workers: int, joined: Callable[[], None]) -> None:
        """Take part, for ever."""
        async with self.client.facts(*FOLLOWED, jobs=[JOB]) as facts:
            identity = WorkerId(self.name, HOST, self._port)
            request = JoinJob(JOB, identity, incarnation_of(self.name), settings=settings_for(workers))
            await self.client.request(request)
            joined()
            async for item in facts:
                if isinstance(item, Gap):
                    raise RuntimeError("this benchmark has fallen behind, and measures nothing any more")
                await self._hear(item.fact)

    async def _hear(self, fact: Fact | UnknownFact) -> None:
        if isinstance(fact, RescaleStarted) and (self._generation or self.name in fact.added):
            self._stopped_at = self._step + (self._generation > 0 and self._is_ahead)
            await self._report(
                ReportStopped(
                    *(JOB, self.name, incarnation_of(self.name), fact.attempt, self._stopped_at),
                    holds_state=self._generation > 0,
                )
            )
        elif isinstance(fact, RescaleSynchronising) and fact.source.id != self.name:
            if not self._generation or self._stopped_at != fact.step:
                await self._report(ReportReady(JOB, self.name, incarnation_of(self.name), fact.attempt))
        elif isinstance(fact, RescaleCompleted):
            assert fact.step is not None
            self._generation, self._step = fact.delta.epoch, fact.step
            self._committed(self._generation, time.monotonic())

    async def _report(self, request: ReportStopped | ReportReady) -> None:
        try:
            await self.client.request(request)
        except RequestRefused as error:
            if error.code != "attempt_over":
                raise

    def heartbeat(self) -> Heartbeat:
        """What says that it lives."""
        return Heartbeat(JOB, self.name, incarnation_of(self.name), self._step)

    def beat(self) -> None:
        """Say so."""
        self.client.signal(self.heartbeat())


class Crowd:
    """The workers of this process."""

    def __init__(self, endpoint: str, first: int, count: int) -> None:
        self._endpoint = endpoint
        self._numbers = range(first, first + count)
        self._workers: list[Worker] = []
        self._joined = 0
        self._beats = 0
        self._latest: dict[int, float] = {}
        """When the last of those who have heard of a generation has."""
        self._heard: dict[int, int] = {}

    async def run(self) -> None:
        """Do what the lines say, until they end."""
        commands: dict[str, Callable[..., Awaitable[None]]] = {
            "connect": self._connect,
            "join": self._join,
            "beats": self._tell_beats,
            "bytes": self._tell_bytes,
            "bare": self._bare,
            "knock": self._knock,
            "rest": self._rest,
        }
        reader = asyncio.StreamReader(LINE_BYTES_MAX)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            async for line in reader:
                name, *arguments = line.decode().split()
                await commands[name](*arguments)
            sys.exit()

    async def _connect(self) -> None:
        # Somebody has to be there when the daemon looks whether they live.
        door = await asyncio.get_running_loop().create_server(asyncio.Protocol, HOST, 0)
        port = door.sockets[0].getsockname()[1]
        room = asyncio.Semaphore(CONNECTING_MAX)

        async def connect(number: int) -> None:
            async with room:
                client = ForgedClient(self._endpoint)
                await client.__aenter__()
                self._workers.append(Worker(number, port, client, self._committed))

        async with asyncio.TaskGroup() as tasks:
            for number in self._numbers:
                tasks.create_task(connect(number))
        _tell("connected")

    async def _join(self, workers: str) -> None:
        for worker in self._workers:
            self._tasks.create_task(worker.train(int(workers), self._one_joined))

    def _one_joined(self) -> None:
        self._joined += 1
        if self._joined == len(self._workers):
            self._tasks.create_task(self._beat())

    def _committed(self, generation: int, at: float) -> None:
        self._heard[generation] = self._heard.get(generation, 0) + 1
        self._latest[generation] = at
        if self._heard[generation] == len(self._workers):
            _tell("committed", generation=generation, at=at)

    async def _beat(self) -> None:
        """A heartbeat of every worker each second."""
        async for number in _in_turns(len(self._workers)):
            self._workers[number].beat()
            self._beats += 1

    async def _knock(self, port: str) -> None:
        """As many connections as there are workers, and on each of them the bytes of a heartbeat each second."""
        loop, beat = asyncio.get_running_loop(), self._workers[0].heartbeat()
        message = frames.encode(encode(SignalMessage(type(beat).__name__, msgspec.Raw(encode(beat)))))
        made = [await loop.create_connection(asyncio.Protocol, HOST, int(port)) for _ in self._numbers]

        async def knock() -> None:
            async for number in _in_turns(len(made)):
                made[number][0].write(message)

        self._knocking = self._tasks.create_task(knock())
        _tell("knocking")

    async def _rest(self) -> None:
        """Knock no more."""
        self._knocking.cancel()

    async def _tell_beats(self) -> None:
        _tell("beats", total=self._beats)

    async def _tell_bytes(self) -> None:
        total = 0
        for worker in self._workers:
            for descriptor in worker.client.descriptors():
                total += _received(descriptor)
        _tell("bytes", total=total)

    async def _bare(self, port: str, length: str) -> None:
        """As many connections as there are workers, without anything of ours on them."""
        loop = asyncio.get_running_loop()
        listeners: list[_Listener] = []
        for _ in self._numbers:
            _, listener = await loop.create_connection(lambda: _Listener(int(length)), HOST, int(port))
            listeners.append(listener)
        times = [await listener.whole for listener in listeners]
        _tell("reached", at=max(times))


class _Listener(asyncio.Protocol):
    """Waits for so many bytes."""

    def __init__(self, length: int) -> None:
        self.whole: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._missing = length

    def data_received(self, data: bytes) -> None:
        self._missing -= len(data)
        if self._missing <= 0 and not self.whole.done():
            self.whole.set_result(time.monotonic())


async def serve_bare(count: int, length: int) -> None:
    """Take so many connections; at a line on the standard input, send all of them so many bytes at once."""
    transports: list[asyncio.Transport] = []

    class Door(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transports.append(transport)
            if len(transports) == count:
                _tell("accepted")

    loop = asyncio.get_running_loop()
    server = await loop.create_server(Door, HOST, 0, backlog=count)
    _tell("listening", port=server.sockets[0].getsockname()[1])
    await loop.run_in_executor(None, sys.stdin.readline)
    message, began_at = bytes(length), time.monotonic()
    for transport in transports:
        transport.write(message)
    _tell("sent", at=began_at)
    await loop.run_in_executor(None, sys.stdin.readline)


async def _in_turns(many: int) -> AsyncIterator[int]:
    """The number of each of so many once a second for ever, spread over the second as the doings of strangers are."""
    due = time.monotonic()
    while True:
        for number in range(many):
            yield number
            due += HEARTBEAT_INTERVAL_S / many
            await asyncio.sleep(max(0.0, due - time.monotonic()))


def _received(descriptor: int) -> int:
    """The bytes that a connection has received, as the kernel counts them."""
    with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED.size)
    (count,) = BYTES_RECEIVED.unpack(info)
    return int(count)


def _tell(event: str, **details: float) -> None:
    sys.stdout.write(json.dumps({"event": event, **details}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """`ENDPOINT FIRST COUNT`, or `--bare COUNT BYTES`."""
    if sys.argv[1] == "--bare":
        asyncio.run(serve_bare(int(sys.argv[2]), int(sys.argv[3])))
    else:
        asyncio.run(Crowd(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).run())


if __name__ == "__main__":
    main()
