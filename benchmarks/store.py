"""Durable decisions per second with 64 concurrent writers.

A decision is what the daemon commits for one request: the leader's term is compared, a key is set, a fact goes to the
outbox and the reply is remembered, all in one transaction, and the writer waits until it is on the disk. It is measured
in process against one writer alone, which pays a flush for each decision, and over the wire, from a client to a daemon
in a process of its own, against puts to etcd over gRPC (values of the same size, fsync on, which is its default).
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import anyio

from benchmarks.harness import Figure, interleaved, main
from forged.auth.model import Principal, Role
from forged.client import ForgedClient
from forged.clock import SystemClock
from forged.jobs.model import Job
from forged.kernel.bus import Bus
from forged.kernel.journal import Journal
from forged.kernel.ledger import Ledger
from forged.kernel.messages import Call, Decision, Fact, Nothing
from forged.kernel.store.sqlite import SqliteStore

WRITERS = 64
VALUE_BYTES = 256
ROUNDS = 5
SECONDS = 1.5


class KeySet(Fact, frozen=True):
    """A key has a value."""

    key: str
    revision: int


async def _ours(directory: str, writers: int, seconds: float, per_flush: list[float]) -> float:
    path = Path(tempfile.mkdtemp(dir=directory)) / "bench.sqlite3"
    clock = SystemClock()
    store = await SqliteStore.open(path)
    journal = Journal()
    bus = Bus(clock)
    ledger = Ledger(store, journal, clock, bus)
    bus.seal((), ledger)
    await ledger.start()
    value = b"v" * VALUE_BYTES
    principal = Principal("bench", Role.OPERATOR)
    done = 0
    deadline = time.perf_counter() + seconds

    async def write(index: int) -> None:
        nonlocal done
        key, client, number = f"key/{index}", index.to_bytes(16, "big"), 0
        while time.perf_counter() < deadline:
            number += 1
            call = Call(principal, "bench", client=client, number=number, acknowledged=number - 1, digest=number)
            ledger.recall(call)
            decision = Decision(Nothing(), (KeySet(key, number),), {key: value})
            await ledger.append(decision, origin="bench", call=call).wait()
            done += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ledger.run)
        started = time.perf_counter()
        async with anyio.create_task_group() as writing:
            for index in range(writers):
                writing.start_soon(write, index)
        took_s = time.perf_counter() - started
        tasks.cancel_scope.cancel()
    per_flush.append(ledger.decisions / ledger.batches)
    await store.close()
    shutil.rmtree(path.parent)
    return done / took_s


async def _over_the_wire(endpoint: str, seconds: float) -> float:
    done = 0
    text = "v" * VALUE_BYTES
    async with ForgedClient(endpoint) as client:
        jobs = [await client.create_job(f"job{index}-{time.time_ns()}") for index in range(WRITERS)]
        deadline = time.perf_counter() + seconds

        async def write(job: Job) -> None:
            nonlocal done
            while time.perf_counter() < deadline:
                job = await client.change_job(job.name, {"text": text}, job.version)
                done += 1

        started = time.perf_counter()
        await asyncio.gather(*map(write, jobs))
        took_s = time.perf_counter() - started
        for job in jobs:
            await client.remove_job(job.name)
    return done / took_s


class _Forged:
    """A daemon in a process of its own, with its data in the same file system."""

    def __init__(self, directory: str) -> None:
        self.endpoint = f"unix://{directory}/forged.sock"
        self._command = [
            *(sys.executable, "-m", "forged.cli.forged", "run"),
            *("--data-dir", f"{directory}/forged", "--socket", f"{directory}/forged.sock", "--listen", "127.0.0.1:0"),
        ]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        if b"ready" not in self._process.stdout.readline():
            raise RuntimeError("the daemon of this benchmark did not start")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.communicate()


async def _etcd(endpoint: str, writers: int, seconds: float) -> float:
    import grpc

    done = 0
    value = b"v" * VALUE_BYTES
    async with grpc.aio.insecure_channel(endpoint) as channel:
        put = channel.unary_unary("/etcdserverpb.KV/Put")
        await put(_put_request(b"warm", value), wait_for_ready=True)
        deadline = time.perf_counter() + seconds

        async def write(index: int) -> None:
            nonlocal done
            request = _put_request(b"key/%d" % index, value)
            while time.perf_counter() < deadline:
                await put(request)
                done += 1

        started = time.perf_counter()
        await asyncio.gather(*(write(index) for index in range(writers)))
        return done / (time.perf_counter() - started)


def _put_request(key: bytes, value: bytes) -> bytes:
    """`etcdserverpb.PutRequest` with its first two fields, in protobuf's own encoding."""
    return b"\x0a" + _length(key) + key + b"\x12" + _length(value) + value


def _length(data: bytes) -> bytes:
    size = len(data)
    return bytes([size]) if size < 0x80 else bytes([size & 0x7F | 0x80, size >> 7])


class _Etcd:
    """etcd on loopback with its data in the same file system as ours; absent where it is not installed."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.endpoint: str | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        binary = shutil.which("etcd")
        if binary is None or not _has_grpc():
            return self
        client, peer = _free_port(), _free_port()
        urls = {"client": f"http://127.0.0.1:{client}", "peer": f"http://127.0.0.1:{peer}"}
        self._process = subprocess.Popen(
            [
                binary,
                f"--data-dir={self._directory}/etcd",
                f"--listen-client-urls={urls['client']}",
                f"--advertise-client-urls={urls['client']}",
                f"--listen-peer-urls={urls['peer']}",
                f"--initial-advertise-peer-urls={urls['peer']}",
                f"--initial-cluster=default={urls['peer']}",
                "--log-level=error",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.endpoint = f"127.0.0.1:{client}"
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _has_grpc() -> bool:
    try:
        import grpc.aio
    except ImportError:
        return False
    return bool(grpc.aio)


def _measure(quick: bool) -> Sequence[Figure]:
    rounds, seconds = (1, 0.3) if quick else (ROUNDS, SECONDS)
    per_flush: list[float] = []
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd()) as directory,
        _Forged(directory) as forged,
        _Etcd(directory) as etcd,
    ):
        subjects: dict[str, Any] = {
            "together": lambda: asyncio.run(_ours(directory, WRITERS, seconds, per_flush)),
            "alone": lambda: asyncio.run(_ours(directory, 1, seconds, [])),
            "wire": lambda: asyncio.run(_over_the_wire(forged.endpoint, seconds)),
        }
        if etcd.endpoint is not None:
            subjects["etcd"] = partial(_run_etcd, etcd.endpoint, seconds)
        rates = interleaved(rounds, subjects)
    flushes = sorted(per_flush)[len(per_flush) // 2]
    name = f"durable decisions with {WRITERS} writers"
    return [
        Figure(f"{name}, against one writer alone", "decisions/s", rates["together"], rates["alone"], 5.0),
        Figure(f"{name}, over the wire, against etcd puts", "decisions/s", rates["wire"], rates.get("etcd"), 1.0),
        Figure(f"decisions per flush with {WRITERS} writers, against one", "decisions", flushes, 1.0, 16.0),
    ]


def _run_etcd(endpoint: str, seconds: float) -> float:
    return asyncio.run(_etcd(endpoint, WRITERS, seconds))


if __name__ == "__main__":
    main("store", _measure)
