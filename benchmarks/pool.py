"""Allocations in a memory pool, and a best fit over a sorted list that keeps no handles, order of use or statistics."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from time import process_time

from sortedcontainers import SortedList

from benchmarks.harness import Figure, interleaved, main
from forged.memory import AllocationRequest, GpuDevice, MemoryPool

SIZE_MAX = 1 << 20
ALIGNMENT = 256
LIVE = {1_000: None, 10_000: 1.1, 100_000: 1.5}
"""How many blocks are live, and the ratio to reach."""
OPERATIONS = 20_000
ROUNDS = 9


class SortedListPool:
    """Exact best fit over (size, offset) in a sorted list; holes merge by dictionaries of their ends."""

    def __init__(self, total: int) -> None:
        self._by_size = SortedList([(total, 0)])
        self._ends = {0: total}
        self._begins = {total: 0}

    def allocate(self, size: int) -> int:
        found: int
        offset: int
        found, offset = self._by_size.pop(self._by_size.bisect_left((size, 0)))
        end = self._ends.pop(offset)
        if found > size:
            self._by_size.add((found - size, offset + size))
            self._ends[offset + size] = end
            self._begins[end] = offset + size
        else:
            del self._begins[end]
        return offset

    def free(self, offset: int, size: int) -> None:
        end = offset + size
        after = self._ends.pop(end, None)
        if after is not None:
            self._by_size.remove((after - end, end))
            end = after
        before = self._begins.pop(offset, None)
        if before is not None:
            self._by_size.remove((offset - before, before))
            offset = before
        self._by_size.add((end - offset, offset))
        self._ends[offset] = end
        self._begins[end] = offset


class Ours:
    """Allocations with handles, order of use and statistics, in a pool with so many live blocks."""

    def __init__(self, live: int) -> None:
        self._pool = MemoryPool(GpuDevice("gpu0", live * SIZE_MAX))
        self._live = [self._allocate(request) for request in _requests(random.Random(1), live)]
        self._random = random.Random(2)

    def _allocate(self, request: AllocationRequest) -> str:
        block_id = self._pool.allocate(request, 1.0).block_id
        if block_id is None:
            raise RuntimeError(f"no room for {request.size} bytes")
        return block_id

    def rate(self, operations: int) -> float:
        """Pairs of a free and an allocation per second."""
        pool, live = self._pool, self._live
        places = self._random.choices(range(len(live)), k=operations)
        requests = _requests(self._random, operations)
        began = process_time()
        for place, request in zip(places, requests, strict=True):
            pool.free(live[place])
            live[place] = pool.allocate(request, 1.0).block_id or ""
        took = process_time() - began
        pool.stats()
        return operations / took


class Reference:
    """The same with the sorted list."""

    def __init__(self, live: int) -> None:
        self._pool = SortedListPool(live * SIZE_MAX)
        self._live = [(self._pool.allocate(size), size) for size in _sizes(random.Random(1), live)]
        self._random = random.Random(2)

    def rate(self, operations: int) -> float:
        pool, live = self._pool, self._live
        places = self._random.choices(range(len(live)), k=operations)
        sizes = _sizes(self._random, operations)
        began = process_time()
        for place, size in zip(places, sizes, strict=True):
            pool.free(*live[place])
            live[place] = pool.allocate(size), size
        return operations / (process_time() - began)


def _sizes(numbers: random.Random, count: int) -> list[int]:
    """Random sizes, rounded up to the alignment for both."""
    return [-(-numbers.randint(1, SIZE_MAX) // ALIGNMENT) * ALIGNMENT for _ in range(count)]


def _requests(numbers: random.Random, count: int) -> list[AllocationRequest]:
    return [AllocationRequest("tensor", size, ALIGNMENT) for size in _sizes(numbers, count)]


def _rates(live: int, rounds: int, operations: int) -> dict[str, float]:
    pools: dict[str, Ours | Reference] = {"ours": Ours(live), "reference": Reference(live)}
    # The holes are of their final number and sizes once each block has been replaced twice.
    for pool in pools.values():
        pool.rate(2 * live)
    return interleaved(rounds, {name: partial(pool.rate, operations) for name, pool in pools.items()})


def _measure(quick: bool) -> Sequence[Figure]:
    figures = []
    for live, aim in LIVE.items():
        if quick and live > min(LIVE):
            break
        rates = _rates(live, *((1, 500) if quick else (ROUNDS, OPERATIONS)))
        name = f"free + allocate, {live:,} live blocks, CPU time, against a sorted list"
        figures.append(Figure(name, "1/s", rates["ours"], rates["reference"], aim))
    return figures


if __name__ == "__main__":
    main("pool", _measure)
