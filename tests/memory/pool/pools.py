"""Pools and blocks for tests."""

from __future__ import annotations

from forged.memory import AllocationRequest, BlockStatus, GpuDevice, MemoryBlock, MemoryPool

FREE, ALLOCATED, PINNED, CACHED = BlockStatus


def pool_of(total: int = 1024) -> MemoryPool:
    return MemoryPool(GpuDevice("gpu0", total))


def allocated(
    pool: MemoryPool, size: int, alignment: int = 1, *, now: float = 0.0, tensor: str = "t", priority: int = 0
) -> str:
    """The id of a new block."""
    result = pool.allocate(AllocationRequest(tensor, size, alignment, priority=priority), now)
    assert result.block_id is not None, result.error
    return result.block_id


def cached(pool: MemoryPool, size: int, *, now: float = 0.0, priority: int = 0) -> str:
    """The id of a new block that may be evicted."""
    block_id = allocated(pool, size, now=now, priority=priority)
    pool.mark_cached(block_id)
    return block_id


def filled(pool: MemoryPool, *sizes: int) -> list[str]:
    """The ids of new blocks, one after the other."""
    return [allocated(pool, size) for size in sizes]


def offset_of(pool: MemoryPool, block_id: str) -> int:
    block = pool.get_block(block_id)
    assert block is not None
    return block.offset


def status_of(pool: MemoryPool, block_id: str) -> BlockStatus:
    block = pool.get_block(block_id)
    assert block is not None
    return block.status


def layout(pool: MemoryPool) -> list[tuple[int, int, bool]]:
    """The offset and size of each block, and whether it is free."""
    pool.validate()
    return [(block.offset, block.size, block.status is FREE) for block in pool.blocks()]


def block(
    block_id: str, offset: int, size: int, status: BlockStatus = FREE, last_accessed: float = 0.0, priority: int = 0
) -> MemoryBlock:
    return MemoryBlock(block_id, offset, size, status, None, 0.0, last_accessed, priority)
