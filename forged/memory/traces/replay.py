"""Replays a trace against a pool: what an allocation policy needs, and what it evicts if the capacity is less."""

from __future__ import annotations

from collections.abc import Iterable

from forged.memory.functions import fits
from forged.memory.model import AllocationRequest, BlockStatus, MemoryBlock
from forged.memory.pool.blocks import Block
from forged.memory.pool.core import PoolCore
from forged.memory.pool.eviction import POLICIES as EVICTING
from forged.memory.pool.eviction import make_room
from forged.memory.traces.errors import argument_invalid, event_invalid, no_place
from forged.memory.traces.model import Buffer, BufferId, Event, Replay, checked_capacity, peak_of

BEST_FIT, FIRST_FIT, WORST_FIT = GROWING = ("best_fit", "first_fit", "worst_fit")
"""The smallest hole, the lowest one, the largest one; the memory grows only if no hole is large enough."""
POOL = "pool"
"""As `MemoryPool` allocates: the smallest hole, and what was never used is one of them."""
POLICIES = (*GROWING, POOL, *EVICTING)


def replay(trace: Iterable[Event], capacity: int | None = None, policy: str = BEST_FIT, alignment: int = 1) -> Replay:
    """Allocate and release in the order of the events; without a capacity there is room for all buffers together.

    The policies `lru` and `cost` place like `pool` and evict what is in the way, as if every buffer could be brought
    back; with the other ones a buffer that has no place is refused with `TraceDoesNotFit`.
    """
    given = list(trace)
    if policy not in POLICIES:
        raise argument_invalid("policy", policy, f"one of {', '.join(POLICIES)}")
    if capacity is None:
        capacity = sum(event.buffer.size + alignment for event in given if event.is_allocation)
    pool = _ReplayPool(checked_capacity(capacity), policy, alignment)
    for number, event in enumerate(given):
        pool.apply(number, event)
    return Replay(pool.offsets, pool.height, peak_of(given), pool.evicted, pool.evicted_bytes)


class _ReplayPool:
    def __init__(self, capacity: int, policy: str, alignment: int) -> None:
        self._core = PoolCore(capacity)
        self._policy = policy
        self._alignment = alignment
        self._live: dict[BufferId, str] = {}
        """The block of each buffer that is alive; an evicted one has none in the core."""
        self._buffer_of: dict[str, Buffer] = {}
        self.offsets: dict[BufferId, int] = {}
        self.height = 0
        self.evicted: dict[BufferId, int] = {}
        self.evicted_bytes = 0
        self._unused: Block | None = None
        """What is above the height, while it is kept from allocations."""
        self._keep_unused()

    def apply(self, number: int, event: Event) -> None:
        buffer = event.buffer
        if event.is_allocation:
            if buffer.id in self.offsets:
                raise event_invalid(number, buffer.id, "it is allocated twice")
            self._allocate(number, event.time, buffer)
            return
        block_id = self._live.pop(buffer.id, None)
        if block_id is None:
            raise event_invalid(number, buffer.id, "it is released and not alive")
        if self._core.find(block_id) is not None:
            self._core.free(block_id)
        del self._buffer_of[block_id]

    def _allocate(self, number: int, time: int, buffer: Buffer) -> None:
        block = self._placed(number, time, buffer)
        if block is None and self._unused is not None:
            self._core.free(self._unused.block_id)
            self._unused = None
            block = self._placed(number, time, buffer)
        if block is None:
            core = self._core
            raise no_place(buffer.id, buffer.size, time, core.holes.largest_size(), core.total)
        self._live[buffer.id] = block.block_id
        self._buffer_of[block.block_id] = buffer
        self.offsets[buffer.id] = block.offset
        self.height = max(self.height, block.end)
        self._keep_unused()

    def _keep_unused(self) -> None:
        if self._policy in GROWING and self._unused is None and self.height < self._core.total:
            block = MemoryBlock("unused", self.height, self._core.total - self.height, BlockStatus.PINNED)
            self._unused = self._core.claim(block)

    def _placed(self, number: int, time: int, buffer: Buffer) -> Block | None:
        """The block of the buffer; `number` is its last use, so that buffers of one time have an order."""
        if -(-buffer.size // self._alignment) * self._alignment > self._core.total:
            return None
        request = AllocationRequest(str(buffer.id), buffer.size, self._alignment)
        if self._policy in (FIRST_FIT, WORST_FIT):
            return self._claimed(buffer.size)
        if self._policy not in EVICTING:
            return self._core.allocate(request, number)
        room = make_room(self._core, buffer.size, self._alignment, self._policy)
        if room is None:
            return None
        for victim in room.victims:
            gone = self._buffer_of[victim.block_id]
            self.evicted[gone.id] = time
            self.evicted_bytes += gone.size
        return self._core.allocate(request, number, is_cached=True)

    def _claimed(self, size: int) -> Block | None:
        """A block in the lowest hole, or in the largest one."""
        core, alignment = self._core, self._alignment
        needed, _ = core.needed(size, alignment)
        holes = core.holes.from_size(needed) if self._policy == FIRST_FIT else core.holes.largest_first()
        fitting = (hole for hole in holes if fits(hole.offset, hole.size, needed, alignment))
        if self._policy == FIRST_FIT:
            hole = min(fitting, key=lambda one: one.offset, default=None)
        else:
            hole = next(fitting, None)
        if hole is None:
            return None
        offset = (hole.offset + alignment - 1) & -alignment
        return core.claim(MemoryBlock("", offset, needed, BlockStatus.ALLOCATED), alignment=alignment)
