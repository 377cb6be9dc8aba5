"""Many simulated workers in one process: clients that take part in rescales and do not train.

Each worker has a client and a connection of its own. It registers, follows the facts of its job, sends stop reports and
ready reports when an attempt asks for them, and sends heartbeats. Commands come as lines on standard input; events go
out as lines of JSON, with times of the monotonic clock that all processes of the machine share.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
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
from forged.log import SILENT
from forged.net.protocol import frames
from forged.net.protocol.messages import SignalMessage, encode
from forged.worker.registration import persevere
from forged.worker.worker_state.job_view import FOLLOWED

JOB = "scale"
HOST = "127.0.0.1"
CONNECTING_MAX = 32
HEARTBEAT_INTERVAL_S = 1.0
LINE_BYTES_MAX = 1 << 20
BYTES_RECEIVED = struct.Struct("=128xQ")
"""Where Linux' `struct tcp_info` counts the bytes that a connection has received."""

Tell = Callable[[int, float], None]


def incarnation_of(name: str) -> bytes:
    """A fixed incarnation: no simulated worker restarts."""
    return name.encode().ljust(INCARNATION_BYTES, b".")


def settings_for(workers: int) -> dict[str, Any]:
    """Settings of a job that starts with this many workers and tolerates any number of failures."""
    config = ElasticTrainingConfig(
        max_workers=workers,
        failure_tolerance_percentage=100,
        max_consecutive_failures=1_000_000,
    )
    return config.to_settings()


class Worker:
    """A simulated worker. When another worker dies, workers with an odd number are one step ahead of the rest."""

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
        """Take part in the job until the process ends."""
        async with self.client.facts(*FOLLOWED, jobs=[JOB]) as facts:
            identity = WorkerId(self.name, HOST, self._port)
            request = JoinJob(JOB, identity, incarnation_of(self.name), settings=settings_for(workers))
            # As a worker does: with many joining at once the daemon tells some to try again.
            await persevere(lambda: self.client.request(request), Random(self.name), SILENT)
            joined()
            async for item in facts:
                if isinstance(item, Gap):
                    raise RuntimeError("a simulated worker missed facts; this machine is too slow for the benchmark")
                await self._handle(item.fact)

    async def _handle(self, fact: Fact | UnknownFact) -> None:
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
            self._generation, self._step = fact.delta.generation, fact.step
            self._committed(self._generation, time.monotonic())

    async def _report(self, request: ReportStopped | ReportReady) -> None:
        try:
            await self.client.request(request)
        except RequestRefused as error:
            if error.code != "attempt_over":
                raise

    def heartbeat(self) -> Heartbeat:
        """The heartbeat to send."""
        return Heartbeat(JOB, self.name, incarnation_of(self.name), self._step)

    def beat(self) -> None:
        self.client.signal(self.heartbeat())


class SimulatedWorkers:
    """The workers of this process."""

    def __init__(self, endpoint: str, first: int, count: int) -> None:
        self._endpoint = endpoint
        self._numbers = range(first, first + count)
        self._workers: list[Worker] = []
        self._joined = 0
        self._beats = 0
        self._latest: dict[int, float] = {}
        """When the last worker so far has received the commit of a generation."""
        self._heard: dict[int, int] = {}

    async def run(self) -> None:
        """Execute commands from standard input until it ends."""
        commands: dict[str, Callable[..., Awaitable[None]]] = {
            "connect": self._connect,
            "join": self._join,
            "beats": self._tell_beats,
            "bytes": self._tell_bytes,
            "bare": self._bare,
            "send_heartbeats": self._send_bare_heartbeats,
            "rest": self._stop_bare_heartbeats,
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
        # The daemon probes peer ports: something has to listen there.
        listener_socket = await asyncio.get_running_loop().create_server(asyncio.Protocol, HOST, 0)
        port = listener_socket.sockets[0].getsockname()[1]
        room = asyncio.Semaphore(CONNECTING_MAX)

        async def connect(number: int) -> None:
            async with room:
                client = ForgedClient(self._endpoint)
                await client.__aenter__()
                self._workers.append(Worker(number, port, client, self._committed))

        async with asyncio.TaskGroup() as tasks:
            for number in self._numbers:
                tasks.create_task(connect(number))
        _report_event("connected")

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
            _report_event("committed", generation=generation, at=at)

    async def _beat(self) -> None:
        """A heartbeat of every worker each second."""
        async for number in _in_turns(len(self._workers)):
            self._workers[number].beat()
            self._beats += 1

    async def _send_bare_heartbeats(self, port: str) -> None:
        """Open one bare connection per worker, and send the bytes of a heartbeat on each every second."""
        loop, beat = asyncio.get_running_loop(), self._workers[0].heartbeat()
        message = frames.encode(encode(SignalMessage(type(beat).__name__, msgspec.Raw(encode(beat)))))
        made = [await loop.create_connection(asyncio.Protocol, HOST, int(port)) for _ in self._numbers]

        async def send_heartbeats() -> None:
            async for number in _in_turns(len(made)):
                made[number][0].write(message)

        self._bare_heartbeats = self._tasks.create_task(send_heartbeats())
        _report_event("heartbeats_started")

    async def _stop_bare_heartbeats(self) -> None:
        self._bare_heartbeats.cancel()

    async def _tell_beats(self) -> None:
        _report_event("beats", total=self._beats)

    async def _tell_bytes(self) -> None:
        total = 0
        for worker in self._workers:
            for descriptor in worker.client.descriptors():
                total += _received(descriptor)
        _report_event("bytes", total=total)

    async def _bare(self, port: str, length: str) -> None:
        """Open one bare connection per worker, and wait until each has received `length` bytes."""
        loop = asyncio.get_running_loop()
        receivers: list[_Receiver] = []
        for _ in self._numbers:
            _, receiver = await loop.create_connection(lambda: _Receiver(int(length)), HOST, int(port))
            receivers.append(receiver)
        times = [await receiver.whole for receiver in receivers]
        _report_event("reached", at=max(times))


class _Receiver(asyncio.Protocol):
    """Waits until `length` bytes have arrived."""

    def __init__(self, length: int) -> None:
        self.whole: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._missing = length

    def data_received(self, data: bytes) -> None:
        self._missing -= len(data)
        if self._missing <= 0 and not self.whole.done():
            self.whole.set_result(time.monotonic())


async def serve_bare(count: int, length: int) -> None:
    """Accept `count` connections; at a line on standard input, send `length` bytes to each."""
    transports: list[asyncio.Transport] = []

    class Server(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transports.append(transport)
            if len(transports) == count:
                _report_event("accepted")

    loop = asyncio.get_running_loop()
    server = await loop.create_server(Server, HOST, 0, backlog=count)
    _report_event("listening", port=server.sockets[0].getsockname()[1])
    await loop.run_in_executor(None, sys.stdin.readline)
    message, began_at = bytes(length), time.monotonic()
    for transport in transports:
        transport.write(message)
    _report_event("sent", at=began_at)
    await loop.run_in_executor(None, sys.stdin.readline)


async def _in_turns(many: int) -> AsyncIterator[int]:
    """Each number below `many` once a second, spread evenly over the second, without end."""
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


def _report_event(event: str, **details: float) -> None:
    sys.stdout.write(json.dumps({"event": event, **details}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """`ENDPOINT FIRST COUNT`, or `--bare COUNT BYTES`."""
    if sys.argv[1] == "--bare":
        asyncio.run(serve_bare(int(sys.argv[2]), int(sys.argv[3])))
    else:
        asyncio.run(SimulatedWorkers(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).run())


if __name__ == "__main__":
    main()
