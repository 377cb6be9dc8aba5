"""Decisions about lists of blocks and plain numbers: alignment, best fit, fragmentation, pressure and forecasts.

Invariants:
- Nothing here changes its arguments; integers are exact, also beyond 2**53.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from forged.memory.errors import argument_invalid
from forged.memory.model import BlockStatus, MemoryBlock, PoolStats, checked_size


def is_power_of_two(n: int) -> bool:
    """Whether a number is 1, 2, 4 and so on; 0 and negative ones are not."""
    return n > 0 and n & (n - 1) == 0


def align_up(size: int, alignment: int) -> int:
    """The least multiple of the alignment, which must be a power of two, that is not below the size."""
    if not is_power_of_two(checked_size("alignment", alignment)):
        raise argument_invalid("alignment", alignment, "a power of two")
    return (checked_size("size", size) + alignment - 1) & -alignment


def fits(offset: int, size: int, needed: int, alignment: int) -> bool:
    """Whether so many bytes at an aligned offset are within a stretch of memory."""
    return ((offset + alignment - 1) & -alignment) + needed <= offset + size


def fragmentation_ratio(blocks: Iterable[MemoryBlock]) -> float:
    """The share of the free memory that is not in the largest free block; 0.0 without free memory."""
    free = [block.size for block in blocks if block.status is BlockStatus.FREE]
    return share_outside(sum(free), max(free, default=0))


def share_outside(total: int, largest: int) -> float:
    """1.0 - largest / total, rounded once; 0.0 without a total."""
    return (total - largest) / total if total else 0.0


def best_fit_block(blocks: Iterable[MemoryBlock], size: int, alignment: int) -> str | None:
    """The id of the smallest free block that has room for the size, rounded up to the alignment, at an aligned offset.

    Of equal ones the one with the lowest offset; None if there is none, and for a size of 0.
    """
    needed = align_up(size, alignment)
    fitting = [
        (block.size, block.offset, block.block_id)
        for block in blocks
        if block.status is BlockStatus.FREE and fits(block.offset, block.size, needed, alignment)
    ]
    return min(fitting)[2] if needed and fitting else None


def eviction_candidates(blocks: Iterable[MemoryBlock]) -> list[str]:
    """The ids of the cached blocks, the least recently used first; of equals the lowest priority, then offset."""
    cached = [block for block in blocks if block.status is BlockStatus.CACHED]
    cached.sort(key=lambda block: (block.last_accessed, block.priority, block.offset))
    return [block.block_id for block in cached]


def memory_pressure(allocated: int, total: int) -> float:
    """The allocated share of the memory, from 0.0 to 1.0; 1.0 without memory."""
    return min(max(allocated / total, 0.0), 1.0) if total > 0 else 1.0


def should_defragment(stats: PoolStats, frag_threshold: float, min_block_size: int) -> bool:
    """Whether fragmentation is above the threshold and the largest free block too small."""
    return stats.fragmentation_ratio > frag_threshold and stats.largest_free_block < min_block_size


def estimate_oom_seconds(free_bytes: int, alloc_rate_bytes_per_sec: float) -> float:
    """The seconds until the free memory is used up at this rate; infinite if the rate is not positive."""
    if not alloc_rate_bytes_per_sec > 0:
        return math.inf
    return max(free_bytes, 0) / alloc_rate_bytes_per_sec


def optimal_pool_size(peak_usage: int, headroom_factor: float, page_size: int) -> int:
    """The peak usage times the factor, rounded up to whole pages of any size.

    The factor counts as it is written, so that 1.1 times 1000 bytes are 1100.
    """
    if not (math.isfinite(headroom_factor) and headroom_factor >= 0):
        raise argument_invalid("headroom_factor", headroom_factor, "finite and >= 0")
    if checked_size("page_size", page_size) == 0:
        raise argument_invalid("page_size", page_size, "an integer >= 1")
    wanted = checked_size("peak_usage", peak_usage) * Fraction(str(headroom_factor))
    return math.ceil(wanted / page_size) * page_size
