"""Room made in full memory pools: what is evicted for it, and how long that takes.

All blocks may be evicted, and no hole has room for the request. A packed pool has hardly any holes, so that the whole
request must be evicted; in a fragmented one they are a seventh of the memory. The reference evicts in the order of last
use until the block fits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import mean, median
from time import process_time

from benchmarks.harness import Figure, main
from forged.memory import AllocationRequest, BlockStatus, GpuDevice, MemoryPool

BLOCKS = (1_000, 3_000, 10_000)
SIZE_MAX = 1 << 20
ALIGNMENT = 256
REQUEST = 8 * SIZE_MAX
FREED_SHARES = {"packed": 0.0, "fragmented": 0.15}
POOLS = 6
REQUESTS = 10
"""In each pool; few, so that it stays as it is."""
TIME_MS = 5.0
"""How long an eviction may take."""


class FullPool:
    """A pool of about so many cached blocks of random sizes, which were used at random times."""

    def __init__(self, blocks: int, freed_share: float, seed: int) -> None:
        self._numbers = random.Random(seed)
        self._pool = MemoryPool(GpuDevice("gpu0", blocks * SIZE_MAX // 2))
        while self._pool.stats().largest_free_block >= (size := _size(self._numbers)):
            self._cache(size)
        for block in self._pool.blocks():
            if block.status is BlockStatus.CACHED and self._numbers.random() < freed_share:
                self._pool.free(block.block_id)

    def _cache(self, size: int) -> None:
        result = self._pool.allocate(AllocationRequest("tensor", size, ALIGNMENT), self._numbers.random())
        if result.block_id is None:
            raise RuntimeError(result.error)
        self._pool.mark_cached(result.block_id)

    def make_room(self, policy: str) -> tuple[float, float]:
        """The bytes evicted for each byte requested, and how many milliseconds it took; the room is then used."""
        began = process_time()
        room = self._pool.make_room(REQUEST, ALIGNMENT, policy=policy)
        took_s = process_time() - began
        self._cache(REQUEST)
        return sum(block.size for block in room.evicted) / REQUEST, took_s * 1e3

    def in_order_of_use(self) -> float:
        """The bytes evicted for each byte requested if blocks are evicted one by one until the request fits."""
        evicted = 0
        while self._pool.stats().largest_free_block < REQUEST:
            evicted += self._pool.evict(1)
        return evicted / REQUEST


def _size(numbers: random.Random) -> int:
    return -(-numbers.randint(1, SIZE_MAX) // ALIGNMENT) * ALIGNMENT


def _measure(quick: bool) -> Sequence[Figure]:
    figures = []
    pools, requests = (1, 2) if quick else (POOLS, REQUESTS)
    for blocks in BLOCKS[:1] if quick else BLOCKS:
        for kind, freed_share in FREED_SHARES.items():
            plain = mean(FullPool(blocks, freed_share, seed).in_order_of_use() for seed in range(pools))
            for policy in ("lru", "cost"):
                made = [
                    pool.make_room(policy)
                    for pool in (FullPool(blocks, freed_share, seed) for seed in range(pools))
                    for _ in range(requests)
                ]
                share, took_ms = mean(share for share, _ in made), median(took_ms for _, took_ms in made)
                label = f"{policy}, {kind} pool of {blocks:,} blocks"
                # What is packed has to go, byte for byte: whole blocks are then more than the request.
                aim = 1.0 if freed_share else None
                figures += [
                    Figure(f"{label}: evicted for each byte", "1", share, 1.0, aim, higher_is_better=False),
                    Figure(f"{label}: against eviction by last use", "1", share, plain, higher_is_better=False),
                    Figure(f"{label}: CPU time, median", "ms", took_ms, TIME_MS, 1.0, higher_is_better=False),
                ]
    return figures


if __name__ == "__main__":
    main("eviction", _measure)
