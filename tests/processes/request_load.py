"""Clients that send many requests and record requests, acknowledgements and facts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from forged.client import EARLIEST, FactStream, ForgedClient
from forged.jobs.model import JobCreated, NoteAdded
from forged.kernel.messages import Gap, Record
from forged.retry import RetryPolicy

JOB = "load"
WORKERS_PER_CLIENT = 6
JOB_EVERY = 10
REQUEST_TIMEOUT_S = 120.0
SOON = RetryPolicy(attempts=None, delay_s=0.01, exponential=True, delay_max_s=0.05, jitter=0.5)


@dataclass
class StepRecorder:
    """The records of all clients."""

    all_have_written: asyncio.Barrier
    asked: Counter[str] = field(default_factory=Counter)
    acknowledged: set[str] = field(default_factory=set)
    over: bool = False
    _goal: int = 0
    _reached: asyncio.Event = field(default_factory=asyncio.Event)

    def acknowledge(self, name: str) -> None:
        self.acknowledged.add(name)
        if len(self.acknowledged) >= self._goal:
            self._reached.set()

    async def more(self, count: int) -> None:
        """Wait until `count` more requests are acknowledged."""
        self._goal = len(self.acknowledged) + count
        self._reached.clear()
        await self._reached.wait()


@dataclass
class LoadClient:
    """One client: several writers and one reader."""

    name: str
    endpoints: Sequence[str]
    recorder: StepRecorder
    received: list[Record | Gap] = field(default_factory=list)

    async def run(self) -> None:
        """Send requests until the load ends, and receive all facts up to then."""
        async with ForgedClient(
            *self.endpoints, reconnect=SOON, connect_timeout_s=60, timeout_s=REQUEST_TIMEOUT_S
        ) as client:
            await client.create_job(JOB)
            async with client.facts(since=EARLIEST) as stream, asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read(stream))
                async with asyncio.TaskGroup() as writing:
                    for number in range(WORKERS_PER_CLIENT):
                        writing.create_task(self._write(client, f"{self.name}-{number}"))
                await self.recorder.all_have_written.wait()
                last = (await client.status()).last_fact
                while stream.position is None or stream.position < last or stream.waiting:
                    await asyncio.sleep(0.001)
                reading.cancel()

    async def _write(self, client: ForgedClient, prefix: str) -> None:
        number = 0
        while not self.recorder.over:
            number += 1
            name = f"{prefix}-{number}"
            self.recorder.asked[name] += 1
            if number % JOB_EVERY:
                await client.note(JOB, name)
            else:
                await client.create_job(name, {"by": self.name})
            self.recorder.acknowledge(name)

    async def _read(self, stream: FactStream) -> None:
        async for item in stream:
            self.received.append(item)


def names(journal: Sequence[Record | Gap]) -> Counter[str]:
    """The number of facts of each request."""
    facts = [item.fact for item in journal if isinstance(item, Record)]
    notes = (fact.text for fact in facts if isinstance(fact, NoteAdded))
    jobs = (fact.name for fact in facts if isinstance(fact, JobCreated) and fact.name != JOB)
    return Counter([*notes, *jobs])
