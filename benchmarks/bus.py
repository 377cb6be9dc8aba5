"""Deliveries per second to five subscribers, against bare `asyncio.Queue` consumers.

Ours: facts of the bus with mailboxes, a bounded journal, counters and a latency per delivery. The reference: five
tasks that take from five unbounded queues and count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import anyio

from benchmarks.harness import Figure, interleaved, main
from forged.clock import SystemClock
from forged.kernel.bus import Bus
from forged.kernel.journal import Journal
from forged.kernel.ledger import Ledger
from forged.kernel.messages import Fact, Record
from forged.kernel.store.memory import MemoryStore

SUBSCRIBERS = 5
BATCH = 64
"""Facts published at once: what one commit carries under load."""
FACTS = 100_000
ROUNDS = 7


class StepDone(Fact, frozen=True):
    """Something small that happens often."""

    step: int


def _records(count: int) -> list[Record]:
    return [Record.of(StepDone(step), fact_id=step, at=0.0) for step in range(1, count + 1)]


async def _ours(records: list[Record]) -> float:
    seen = [0] * SUBSCRIBERS
    finished = asyncio.Event()

    def subscriber(index: int) -> None:
        async def count(record: Record) -> None:
            seen[index] += 1
            if record.id == len(records):
                finished.set()

        bus.on(StepDone, count, name=f"subscriber {index}")

    clock = SystemClock()
    bus = Bus(clock)
    journal = Journal()
    ledger = Ledger(MemoryStore("bench"), journal, clock, bus)
    for index in range(SUBSCRIBERS):
        subscriber(index)
    bus.seal((), ledger)
    await ledger.start()
    async with anyio.create_task_group() as tasks:
        await tasks.start(bus.run)
        started = time.perf_counter()
        for first in range(0, len(records), BATCH):
            batch = records[first : first + BATCH]
            journal.extend(batch)
            bus.publish(batch)
            await asyncio.sleep(0)
        await finished.wait()
        while bus.backlog:
            await asyncio.sleep(0)
        took_s = time.perf_counter() - started
        tasks.cancel_scope.cancel()
    assert seen == [len(records)] * SUBSCRIBERS
    return sum(seen) / took_s


async def _bare(records: list[Record]) -> float:
    queues: list[asyncio.Queue[Record | None]] = [asyncio.Queue() for _ in range(SUBSCRIBERS)]
    seen = [0] * SUBSCRIBERS

    async def consume(index: int) -> None:
        queue = queues[index]
        while await queue.get() is not None:
            seen[index] += 1

    consumers = [asyncio.create_task(consume(index)) for index in range(SUBSCRIBERS)]
    await asyncio.sleep(0)
    started = time.perf_counter()
    for first in range(0, len(records), BATCH):
        for record in records[first : first + BATCH]:
            for queue in queues:
                queue.put_nowait(record)
        await asyncio.sleep(0)
    for queue in queues:
        queue.put_nowait(None)
    await asyncio.gather(*consumers)
    took_s = time.perf_counter() - started
    assert seen == [len(records)] * SUBSCRIBERS
    return sum(seen) / took_s


def _measure(quick: bool) -> Sequence[Figure]:
    records = _records(FACTS // 20 if quick else FACTS)
    rates = interleaved(
        1 if quick else ROUNDS,
        {"ours": lambda: asyncio.run(_ours(records)), "bare": lambda: asyncio.run(_bare(records))},
    )
    name = f"deliveries to {SUBSCRIBERS} subscribers, against bare asyncio.Queue"
    return [Figure(name, "deliveries/s", rates["ours"], rates["bare"], 1.0)]


if __name__ == "__main__":
    main("bus", _measure)
