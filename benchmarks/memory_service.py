"""Allocations of GPU memory per second through the client, single and in batches, against bare round trips.

The daemon has a process of its own, and its store is in memory. The reference is an echo request of the same daemon.
Each round frees its blocks outside of the measured time; 10,000 other blocks are held all the time.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from random import Random

from benchmarks.harness import Figure, interleaved, main
from benchmarks.rpc import EchoText
from forged.client import ForgedClient
from forged.elastic.messages import JoinJob
from forged.elastic.model import WorkerId
from forged.jobs.model import SettingValue
from forged.memory.messages import BATCH_MAX, Allocated, Wanted
from forged.memory.model import AllocationRequest, GpuDevice

JOB, WORKER, INCARNATION = "bench", "w0", b"1" * 16
GPU = f"{WORKER}/gpu0"
TOTAL = 80 << 30
SIZE_MAX = 1 << 20
HELD = 10_000
ALLOCATIONS = 4096
BATCH = 64
CONCURRENCY = 16
ROUNDS = 5
HEARTBEAT_MS = 3_600_000
"""The worker sends no heartbeats."""

Act = Callable[[int], Awaitable[object]]


class Caller:
    """A worker with a device, over one connection."""

    def __init__(self, client: ForgedClient) -> None:
        self.client = client
        self.random = Random(1)
        self.replies: list[Allocated] = []
        self._names = 0

    async def begin(self, held: int) -> None:
        settings: dict[str, SettingValue] = {"worker_heartbeat_timeout_ms": HEARTBEAT_MS}
        await self.client.request(JoinJob(JOB, WorkerId(WORKER, "127.0.0.1", 1), INCARNATION, settings=settings))
        await self.client.register_device(JOB, WORKER, INCARNATION, GpuDevice("gpu0", TOTAL))
        for batch in self.wanted(held // BATCH, BATCH):
            await self.allocate(batch)
        self.replies.clear()

    def wanted(self, batches: int, size: int) -> list[list[Wanted]]:
        """What is asked for, made before the time is taken."""
        return [[self._one() for _ in range(size)] for _ in range(batches)]

    def _one(self) -> Wanted:
        self._names += 1
        return Wanted(f"b{self._names}", AllocationRequest("tensor", self.random.randint(1, SIZE_MAX)))

    async def allocate(self, wanted: list[Wanted]) -> None:
        self.replies += await self.client.allocate_memory(JOB, WORKER, INCARNATION, GPU, wanted)

    async def free(self) -> None:
        handles = [one.handle for one in self.replies if one.handle is not None]
        assert len(handles) == len(self.replies)
        for start in range(0, len(handles), BATCH_MAX):
            batch = handles[start : start + BATCH_MAX]
            await self.client.free_memory(JOB, WORKER, INCARNATION, GPU, batch)
        self.replies.clear()

    async def echo(self, number: int) -> None:
        await self.client.request(EchoText("x" * 32, number))


async def _rate(act: Act, count: int, concurrency: int) -> float:
    """How many acts per second, so many at a time."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await act(number)

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return count / (time.perf_counter() - started)


def _measure(quick: bool) -> Sequence[Figure]:
    count, rounds, held = (256, 1, 1024) if quick else (ALLOCATIONS, ROUNDS, HELD)
    with (
        tempfile.TemporaryDirectory() as directory,
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.rpc", "--serve", "ours", directory], stdout=subprocess.PIPE, text=True
        ) as process,
        asyncio.Runner() as runner,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            client = ForgedClient(f"unix://{directory}/ours.sock")
            runner.run(client.__aenter__())
            caller = Caller(client)
            runner.run(caller.begin(held))
            figures = [*_compared(runner, caller, count, rounds)]
            runner.run(client.__aexit__(None, None, None))
            return figures
        finally:
            process.kill()


def _compared(runner: asyncio.Runner, caller: Caller, count: int, rounds: int) -> Sequence[Figure]:
    def single(concurrency: int) -> float:
        wanted = caller.wanted(count, 1)
        rate = runner.run(_rate(lambda number: caller.allocate(wanted[number]), count, concurrency))
        runner.run(caller.free())
        return rate

    def batched() -> float:
        wanted = caller.wanted(count // BATCH * 4, BATCH)
        rate = runner.run(_rate(lambda number: caller.allocate(wanted[number]), len(wanted), 1))
        runner.run(caller.free())
        return rate * BATCH

    def echo(concurrency: int) -> float:
        return runner.run(_rate(caller.echo, count, concurrency))

    rates = interleaved(
        rounds,
        {
            "single": partial(single, 1),
            "many": partial(single, CONCURRENCY),
            "batched": batched,
            "echo": partial(echo, 1),
            "echoes": partial(echo, CONCURRENCY),
        },
    )
    return [
        Figure("single allocations against round trips", "allocations/s", rates["single"], rates["echo"], 0.7),
        Figure(f"{CONCURRENCY} at a time against round trips", "allocations/s", rates["many"], rates["echoes"], 0.7),
        Figure(f"in batches of {BATCH} against single ones", "allocations/s", rates["batched"], rates["single"], 10.0),
    ]


if __name__ == "__main__":
    main("memory_service", _measure)
