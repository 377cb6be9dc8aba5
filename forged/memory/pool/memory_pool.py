"""The memory pool for programs without a daemon: one device, in memory, safe from several threads.

Invariants:
- Each call is atomic; a refused one changes nothing.
- What is returned is the caller's own: it does not change when the pool does.
"""

from __future__ import annotations

import threading

from forged.memory.errors import MemoryInvalid, SizeBeyondDevice
from forged.memory.model import (
    AllocationRequest,
    AllocationResult,
    GpuDevice,
    MemoryBlock,
    PoolStats,
    Room,
    checked_device,
    checked_size,
)
from forged.memory.pool import compaction, eviction, validation
from forged.memory.pool.core import PoolCore
from forged.memory.pool.moves import BlockMove, MovePlan
from forged.memory.pool.shortage import missing_room


class MemoryPool:
    """The blocks of a device. What it refuses is a `MemoryRefused`.

    A block moves if the pool is compacted, and then has another version. A call with an older version is refused.
    """

    def __init__(self, device: GpuDevice) -> None:
        self._device = checked_device(device)
        self._core = PoolCore(self._device.total_memory)
        self._lock = threading.Lock()

    @property
    def device(self) -> GpuDevice:
        return self._device

    def allocate(self, request: AllocationRequest, now: float, *, offset: int | None = None) -> AllocationResult:
        """Allocate a block in the smallest free one that fits; nothing is evicted.

        With `offset`, such as one of `forged.memory.traces.plan`, the block goes there if all of its bytes are free.
        Without success the error says why, and what would help.
        """
        with self._lock:
            try:
                block = None if offset is None else self._core.allocate_at(request, offset, now)
                if block is None:
                    block = self._core.allocate(request, now)
            except MemoryInvalid as refused:
                return AllocationResult(success=False, error=str(refused))
            if block is not None:
                # By position, as this is the most frequent call.
                return AllocationResult(True, block.block_id, block.offset, block.size)  # noqa: FBT003
            missing = missing_room(self._core, request.size, request.alignment, lambda one: one.block_id)
        return AllocationResult(success=False, error=f"{missing.reason} ({missing.fix})")

    def free(self, block_id: str, version: int | None = None) -> None:
        """Free a block, whatever its status; its memory becomes one with the free memory beside it."""
        with self._lock:
            self._core.free(block_id, version)

    def mark_cached(self, block_id: str, version: int | None = None) -> None:
        """Let a block be evicted; a pinned one is refused."""
        with self._lock:
            self._core.mark_cached(block_id, version)

    def pin(self, block_id: str, version: int | None = None) -> None:
        """Let a block be neither evicted nor moved."""
        with self._lock:
            self._core.pin(block_id, version)

    def unpin(self, block_id: str, version: int | None = None) -> None:
        """A pinned block is allocated again; a cached one is refused."""
        with self._lock:
            self._core.unpin(block_id, version)

    def use(self, block_id: str, version: int | None = None) -> None:
        """A cached block is allocated again: it is not evicted any more."""
        with self._lock:
            self._core.use(block_id, version)

    def touch(self, block_id: str, now: float, version: int | None = None) -> None:
        """A block is used; an earlier time than that of its last use changes nothing."""
        with self._lock:
            self._core.touch(block_id, now, version)

    def evict(self, needed: int) -> int:
        """Evict cached blocks, the least recently used first, until so many bytes are freed or none is left.

        Returns the bytes freed. They need not lie together: see `make_room`.
        """
        wanted = checked_size("needed", needed)
        with self._lock:
            return sum(block.size for block in self._core.evict(wanted))

    def make_room(self, size: int, alignment: int = 1, *, policy: str = eviction.LRU) -> Room:
        """Evict what is needed, and nothing else, so that a block of this size fits; if it cannot, evict nothing.

        The policy `lru` evicts the least recently used blocks first, `cost` those that cost least: by size, time since
        the last use, priority.
        """
        with self._lock:
            try:
                plan = eviction.find_room(self._core, size, alignment, policy)
            except SizeBeyondDevice:
                plan = None
            if plan is None:
                return Room([], None)
            evicted = [block.as_value() for block in plan.victims]
            self._core.evict_blocks(plan.victims)
            hole = next(self._core.stretches(plan.offset))
            return Room(evicted, hole.as_value())

    def defragment(self) -> int:
        """Move all blocks but pinned ones to lower offsets, as far as they go; returns how many have moved.

        It counts as done at once. `plan_compaction` is for blocks that must be copied.
        """
        with self._lock:
            return compaction.defragment(self._core)

    def plan_compaction(
        self,
        hole: int | None = None,
        alignment: int = 1,
        *,
        bytes_max: int | None = None,
        moves_max: int | None = None,
        overlaps: bool = True,
    ) -> MovePlan | None:
        """Open a plan of moves that make a hole of this size, or as large a one as can be; None if no moves can.

        Copy each block as soon as its move is among the `ready_moves`, and commit the move. Until then the block is
        where it was; what the moves need is kept for them until all are committed or the plan is closed. With
        `overlaps` a copy may write over its source.
        """
        with self._lock:
            core = self._core
            if hole is None:
                plan = compaction.plan_compaction(core, bytes_max=bytes_max, moves_max=moves_max, overlaps=overlaps)
                return core.open_plan(plan)
            found = compaction.plan_hole(
                core, hole, alignment, bytes_max=bytes_max, moves_max=moves_max, overlaps=overlaps
            )
            return None if found is None else core.open_plan(found)

    def open_moves(self) -> list[BlockMove]:
        """The moves of the open plan that are not committed yet."""
        with self._lock:
            return self._core.open_moves

    def ready_moves(self) -> list[BlockMove]:
        """The open moves whose copies may begin: all that they wait for is committed."""
        with self._lock:
            return self._core.ready_moves

    def commit_move(self, epoch: int, number: int) -> int:
        """A block has been copied: it is at its destination from now on. Returns its new version."""
        with self._lock:
            return self._core.commit_move(epoch, number).version

    def close_plan(self, epoch: int) -> int:
        """End a plan; returns how many blocks stay where they were because their moves are not committed."""
        with self._lock:
            return len(self._core.close_plan(epoch))

    def stats(self) -> PoolStats:
        with self._lock:
            return self._core.stats()

    def get_block(self, block_id: str) -> MemoryBlock | None:
        """The block; None if there is none of this id, or it is free again."""
        with self._lock:
            block = self._core.find(block_id)
            return None if block is None else block.as_value()

    def version_of(self, block_id: str) -> int:
        """The version of a block: it grows when the block moves."""
        with self._lock:
            return self._core.get(block_id).version

    def blocks_for_tensor(self, tensor_id: str) -> list[MemoryBlock]:
        """The blocks of a tensor, by offset."""
        with self._lock:
            return [block.as_value() for block in self._core.blocks_of_tensor(tensor_id)]

    def blocks(self) -> list[MemoryBlock]:
        """All blocks by offset, free ones too."""
        with self._lock:
            return [block.as_value() for block in self._core.stretches()]

    def validate(self) -> None:
        """Check all invariants; raises `PoolInconsistent` if the pool contradicts itself."""
        with self._lock:
            validation.validate(self._core)
