"""Small typed requests per second, over TCP and Unix, against grpc.aio and a bare asyncio + msgpack echo.

Each server has a process of its own and each client lives in this one. Every request carries a text and a number and is
answered with both. Ours goes through all that a request goes through in the daemon: frames, types, authorisation, the
bus, its counters. The bare echo has none of that: it is what asyncio and msgpack alone can do.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgpack
import msgspec

from benchmarks.harness import Figure, interleaved, main
from forged.auth.model import Role
from forged.kernel.messages import ANY_JOB, Request

TEXT = "x" * 32
CONCURRENCIES = (1, 64)
ROUNDS = 5
SECONDS = 1.0

Ask = Callable[[int], Awaitable[Any]]


class Echoed(msgspec.Struct, frozen=True):
    """What came back."""

    text: str
    number: int


class EchoText(Request[Echoed], frozen=True):
    """Send it back."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    text: str
    number: int


def _serve(name: str, directory: str) -> None:
    # Each on the event loop that it has in earnest.
    from forged.cli.service.serve import event_loop

    with asyncio.Runner(loop_factory=event_loop if name == "ours" else None) as runner:
        runner.run(_SERVERS[name](directory))


# Ours.


async def _serve_ours(directory: str) -> None:
    from forged import daemon as composition
    from forged.clock import SystemClock
    from forged.config import Config
    from forged.kernel.store.memory import MemoryStore
    from forged.net.transport.sockets import SystemNetwork

    async def open_store() -> MemoryStore:
        return MemoryStore("bench")

    def extend(daemon: composition.Daemon) -> None:
        daemon.bus.serve(EchoText, lambda request, _: Echoed(request.text, request.number), owner="bench")

    config = Config(data_dir=directory, socket=f"{directory}/ours.sock", listen=("tcp://127.0.0.1:0",))
    ports = composition.Ports(SystemClock(), SystemNetwork(), 1, 0, open_store)
    async with composition.Daemon.running(config, ports, extend=extend) as daemon:
        print(daemon.listening[0], flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def _ours(endpoint: str) -> AsyncIterator[Ask]:
    from forged.client import ForgedClient

    async with ForgedClient(endpoint) as client:
        yield lambda number: client.request(EchoText(TEXT, number))


# Bare: a length, msgpack, a future per request.


class _BareServer(asyncio.Protocol):
    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 4:
            (length,) = struct.unpack_from(">I", self._buffer)
            if len(self._buffer) < 4 + length:
                return
            message = msgpack.unpackb(self._buffer[4 : 4 + length])
            self._buffer = self._buffer[4 + length :]
            payload = msgpack.packb(message)
            self._transport.write(struct.pack(">I", len(payload)) + payload)


class _BareClient(_BareServer):
    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    def ask(self, number: int) -> asyncio.Future[Any]:
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        payload = msgpack.packb([number, TEXT])
        self._transport.write(struct.pack(">I", len(payload)) + payload)
        return answer

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 4:
            (length,) = struct.unpack_from(">I", self._buffer)
            if len(self._buffer) < 4 + length:
                return
            message = msgpack.unpackb(self._buffer[4 : 4 + length])
            self._buffer = self._buffer[4 + length :]
            self._waiting.pop(message[0]).set_result(message)


async def _serve_bare(directory: str) -> None:
    loop = asyncio.get_running_loop()
    tcp = await loop.create_server(_BareServer, "127.0.0.1", 0)
    await loop.create_unix_server(_BareServer, f"{directory}/bare.sock")
    print(f"tcp://127.0.0.1:{tcp.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


@asynccontextmanager
async def _bare(endpoint: str) -> AsyncIterator[Ask]:
    loop = asyncio.get_running_loop()
    scheme, _, rest = endpoint.partition("://")
    if scheme == "unix":
        transport, client = await loop.create_unix_connection(_BareClient, rest)
    else:
        host, _, port = rest.rpartition(":")
        transport, client = await loop.create_connection(_BareClient, host, int(port))
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    yield client.ask
    transport.close()


# grpc.aio.


async def _serve_grpc(directory: str) -> None:
    import grpc

    async def echo(request: bytes, context: Any) -> bytes:
        packed: bytes = msgpack.packb(msgpack.unpackb(request))
        return packed

    server = grpc.aio.server()
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.add_insecure_port(f"unix:{directory}/grpc.sock")
    await server.start()
    print(f"tcp://127.0.0.1:{port}", flush=True)
    await asyncio.Event().wait()


@asynccontextmanager
async def _grpc(endpoint: str) -> AsyncIterator[Ask]:
    import grpc

    target = endpoint.replace("unix://", "unix:").removeprefix("tcp://")
    async with grpc.aio.insecure_channel(target) as channel:
        call = channel.unary_unary(
            "/bench/Echo", request_serializer=msgpack.packb, response_deserializer=msgpack.unpackb
        )
        yield lambda number: call([number, TEXT])


_SERVERS = {"ours": _serve_ours, "bare": _serve_bare, "grpc": _serve_grpc}
_CLIENTS = {"ours": _ours, "bare": _bare, "grpc": _grpc}


async def _rate(name: str, endpoint: str, concurrency: int, seconds: float) -> float:
    async with _CLIENTS[name](endpoint) as ask:
        done = 0
        numbers = iter(range(1 << 60))
        for _ in range(100):
            await ask(next(numbers))
        deadline = time.perf_counter() + seconds

        async def work() -> None:
            nonlocal done
            while time.perf_counter() < deadline:
                await ask(next(numbers))
                done += 1

        started = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        return done / (time.perf_counter() - started)


def _measure(quick: bool) -> Sequence[Figure]:
    names = [name for name in _SERVERS if name != "grpc" or _has_grpc()]
    rounds, seconds = (1, 0.2) if quick else (ROUNDS, SECONDS)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as directory:
        processes = {name: _start(name, directory) for name in names}
        try:
            tcp = {name: _first_line(process) for name, process in processes.items()}
            unix = {name: f"unix://{Path(directory) / name}.sock" for name in names}
            for transport, endpoints in (("tcp", tcp), ("unix", unix)):
                for concurrency in CONCURRENCIES:
                    figures += _compare(transport, endpoints, concurrency, rounds, seconds)
        finally:
            for process in processes.values():
                process.kill()
                process.communicate()
    return figures


def _compare(transport: str, endpoints: dict[str, str], concurrency: int, rounds: int, seconds: float) -> list[Figure]:
    def run(name: str) -> float:
        return asyncio.run(_rate(name, endpoints[name], concurrency, seconds))

    rates = interleaved(rounds, {name: partial(run, name) for name in endpoints})
    label = f"{transport}, concurrency {concurrency}"
    return [
        Figure(
            f"{label}, against grpc.aio",
            "requests/s",
            rates["ours"],
            rates.get("grpc"),
            3.0 if concurrency == 1 else 5.0,
        ),
        Figure(f"{label}, against bare asyncio + msgpack", "requests/s", rates["ours"], rates["bare"], 0.5),
    ]


def _start(name: str, directory: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.rpc", "--serve", name, directory], stdout=subprocess.PIPE, text=True
    )


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError("a server of this benchmark did not start")
    return line


def _has_grpc() -> bool:
    try:
        import grpc.aio
    except ImportError:
        return False
    return bool(grpc.aio)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(*sys.argv[2:])
    else:
        main("rpc", _measure)
