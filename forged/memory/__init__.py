"""GPU memory: which blocks of a device belong to which tensors, what may give way, and what fits."""

from forged.memory.errors import (
    BlockTaken,
    BlockUnknown,
    CompactionRefused,
    HandleStale,
    MemoryInvalid,
    MemoryRefused,
    PoolInconsistent,
    SizeBeyondDevice,
    StatusRefused,
)
from forged.memory.functions import (
    align_up,
    best_fit_block,
    estimate_oom_seconds,
    eviction_candidates,
    fragmentation_ratio,
    is_power_of_two,
    memory_pressure,
    optimal_pool_size,
    should_defragment,
)
from forged.memory.model import (
    AllocationRequest,
    AllocationResult,
    BlockStatus,
    GpuDevice,
    MemoryBlock,
    PoolStats,
    Room,
)
from forged.memory.pool.memory_pool import MemoryPool
from forged.memory.pool.moves import BlockMove, MovePlan

__all__ = [
    "AllocationRequest",
    "AllocationResult",
    "BlockMove",
    "BlockStatus",
    "BlockTaken",
    "BlockUnknown",
    "CompactionRefused",
    "GpuDevice",
    "HandleStale",
    "MemoryBlock",
    "MemoryInvalid",
    "MemoryPool",
    "MemoryRefused",
    "MovePlan",
    "PoolInconsistent",
    "PoolStats",
    "Room",
    "SizeBeyondDevice",
    "StatusRefused",
    "align_up",
    "best_fit_block",
    "estimate_oom_seconds",
    "eviction_candidates",
    "fragmentation_ratio",
    "is_power_of_two",
    "memory_pressure",
    "optimal_pool_size",
    "should_defragment",
]
