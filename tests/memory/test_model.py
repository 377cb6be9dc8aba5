from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from forged.memory import (
    AllocationRequest,
    AllocationResult,
    BlockStatus,
    GpuDevice,
    MemoryBlock,
    MemoryInvalid,
    MemoryPool,
    PoolStats,
)

BLOCK = MemoryBlock("block-1", 256, 512, BlockStatus.CACHED, "weights", 1.5, 2.5, 3)
DEVICE = GpuDevice("gpu0", 80 * 2**30, 1593, (8, 6))
REQUEST = AllocationRequest("weights", 100, 64, True, 7)
RESULT = AllocationResult(True, "block-1", 256, 512, "no error")
STATS = PoolStats(1000, 600, 400, 100, 200, 0.25, 300, 9, 5)


@pytest.mark.parametrize("value", [BLOCK, DEVICE, REQUEST, RESULT, STATS], ids=lambda value: type(value).__name__)
def test_every_value_is_frozen(value: msgspec.Struct) -> None:
    for name in value.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(value, name, None)


@pytest.mark.parametrize("value", [BLOCK, DEVICE, REQUEST, RESULT, STATS], ids=lambda value: type(value).__name__)
def test_changed_copy_leaves_the_value_as_it_is(value: msgspec.Struct) -> None:
    name = value.__struct_fields__[0]
    before = repr(value)
    assert f"{name}={getattr(value, name)!r}" in before
    changed = replace(value, **{name: "changed"})
    assert (getattr(changed, name), repr(value)) == ("changed", before)
    assert replace(changed, **{name: getattr(value, name)}) == value
    with pytest.raises(AttributeError):
        setattr(value, name, "changed")


def test_statuses_have_the_values_of_the_seed_in_their_order() -> None:
    assert [*BlockStatus] == ["free", "allocated", "pinned", "cached"]


def test_block_is_what_was_given() -> None:
    assert (BLOCK.block_id, BLOCK.offset, BLOCK.size, BLOCK.status) == ("block-1", 256, 512, BlockStatus.CACHED)
    assert (BLOCK.tensor_id, BLOCK.allocated_at, BLOCK.last_accessed, BLOCK.priority) == ("weights", 1.5, 2.5, 3)


def test_free_block_needs_no_tensor_times_or_priority() -> None:
    free = MemoryBlock("free@0", 0, 1, BlockStatus.FREE)
    assert (free.tensor_id, free.allocated_at, free.last_accessed, free.priority) == (None, 0.0, 0.0, 0)


def test_device_is_what_was_given() -> None:
    assert (DEVICE.device_id, DEVICE.total_memory) == ("gpu0", 80 * 2**30)
    assert (DEVICE.memory_clock_mhz, DEVICE.compute_capability) == (1593, (8, 6))


def test_request_is_what_was_given() -> None:
    assert (REQUEST.tensor_id, REQUEST.size, REQUEST.alignment) == ("weights", 100, 64)
    assert (REQUEST.pinned, REQUEST.priority) == (True, 7)


def test_request_is_aligned_unpinned_and_of_no_priority_by_default() -> None:
    request = AllocationRequest("weights", 100)
    assert (request.alignment, request.pinned, request.priority) == (256, False, 0)


def test_result_is_what_was_given() -> None:
    assert (RESULT.success, RESULT.block_id, RESULT.offset) == (True, "block-1", 256)
    assert (RESULT.actual_size, RESULT.error) == (512, "no error")


def test_stats_are_what_was_given() -> None:
    assert (STATS.total_bytes, STATS.allocated_bytes, STATS.free_bytes) == (1000, 600, 400)
    assert (STATS.pinned_bytes, STATS.cached_bytes, STATS.fragmentation_ratio) == (100, 200, 0.25)
    assert (STATS.largest_free_block, STATS.block_count, STATS.allocation_count) == (300, 9, 5)


@pytest.mark.parametrize("value", [BLOCK, DEVICE, REQUEST, RESULT, STATS], ids=lambda value: type(value).__name__)
def test_value_survives_the_wire(value: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value


@pytest.mark.parametrize("total", [-1, 1.5, "80G", None, True])
def test_device_without_a_size_is_refused(total: object) -> None:
    with pytest.raises(MemoryInvalid, match="total_memory must be an integer >= 0, got"):
        MemoryPool(GpuDevice("gpu0", total))  # type: ignore[arg-type]


def test_device_must_be_one() -> None:
    with pytest.raises(MemoryInvalid, match="device must be a GpuDevice"):
        MemoryPool("gpu0")  # type: ignore[arg-type]
    with pytest.raises(MemoryInvalid, match="device_id must be a text, got 3"):
        MemoryPool(GpuDevice(3, 1024))  # type: ignore[arg-type]
