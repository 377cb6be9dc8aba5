"""The values of GPU memory: devices, blocks, requests for blocks and what becomes of them.

Invariants:
- Every value is frozen; a change makes the next record.
- Sizes and offsets are integers and exact, also beyond 2**53.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from forged.memory.errors import argument_invalid
from forged.numbers import NumberChecks, as_integer

ALIGNMENT_DEFAULT = 256

checked_time = NumberChecks(argument_invalid).time


class BlockStatus(StrEnum):
    """What a stretch of memory is used for."""

    FREE = "free"
    """It belongs to no tensor."""
    ALLOCATED = "allocated"
    """It belongs to a tensor; it may be moved, but not evicted."""
    PINNED = "pinned"
    """It may neither be evicted nor moved."""
    CACHED = "cached"
    """It may be moved, and evicted if the room is needed."""


class MemoryBlock(msgspec.Struct, frozen=True, gc=False):
    """A contiguous stretch of a device's memory."""

    block_id: str
    offset: int
    size: int
    status: BlockStatus
    tensor_id: str | None = None
    allocated_at: float = 0.0
    last_accessed: float = 0.0
    priority: int = 0
    """Higher is more important: of equally recent blocks the one of the lowest priority is evicted first."""


class GpuDevice(msgspec.Struct, frozen=True, gc=False):
    """A device, as its owner describes it."""

    device_id: str
    total_memory: int
    memory_clock_mhz: int = 0
    compute_capability: tuple[int, int] = (0, 0)
    """Such as (8, 6)."""


class AllocationRequest(msgspec.Struct, frozen=True, gc=False):
    """The block that a tensor needs."""

    tensor_id: str
    size: int
    alignment: int = ALIGNMENT_DEFAULT
    """A power of two: of the block's offset, and of its size, which is rounded up."""
    pinned: bool = False
    priority: int = 0
    """Higher is more important."""


class AllocationResult(msgspec.Struct, frozen=True, gc=False):
    """The allocated block, or why there is none."""

    success: bool
    block_id: str | None = None
    offset: int | None = None
    actual_size: int | None = None
    """The size, rounded up to the alignment."""
    error: str | None = None


class PlannedBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a block goes: `Packing.offsets` of a planned trace for the block of this name."""

    name: str
    offset: int
    size: int
    """A larger block of this name goes elsewhere."""


class PoolStats(msgspec.Struct, frozen=True, gc=False):
    """The use of a device's memory; `total_bytes` is `allocated_bytes` and `free_bytes`."""

    total_bytes: int
    allocated_bytes: int
    """Of all blocks that are not free: pinned and cached ones too."""
    free_bytes: int
    pinned_bytes: int
    cached_bytes: int
    fragmentation_ratio: float
    largest_free_block: int
    block_count: int
    """Of all blocks, free ones too."""
    allocation_count: int
    """Of the blocks that are not free."""


class Room(NamedTuple):
    """What `make_room` has done: the blocks that gave way, and the free block that has the room.

    Without a hole nothing was evicted.
    """

    evicted: list[MemoryBlock]
    hole: MemoryBlock | None


def checked_device(device: Any) -> GpuDevice:
    """The device with plain values; refuses those that no device can have."""
    if not isinstance(device, GpuDevice):
        raise argument_invalid("device", device, "a GpuDevice")
    if not isinstance(device.device_id, str):
        raise argument_invalid("device_id", device.device_id, "a text")
    return msgspec.structs.replace(device, total_memory=checked_size("total_memory", device.total_memory))


def checked_size(name: str, value: Any) -> int:
    """The value as an integer that is not negative."""
    number = as_integer(value)
    if number is None or number < 0:
        raise argument_invalid(name, value, "an integer >= 0")
    return number
