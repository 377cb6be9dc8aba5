from __future__ import annotations

import gc
import math
import random
import re
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import forged.memory
from forged.memory import (
    AllocationRequest,
    BlockStatus,
    BlockUnknown,
    GpuDevice,
    HandleStale,
    MemoryInvalid,
    MemoryPool,
    MemoryRefused,
    StatusRefused,
    best_fit_block,
    eviction_candidates,
    fragmentation_ratio,
    memory_pressure,
)
from forged.memory.pool.core import PoolCore
from tests.memory.pool.pools import (
    ALLOCATED,
    CACHED,
    FREE,
    PINNED,
    allocated,
    cached,
    filled,
    layout,
    offset_of,
    pool_of,
    status_of,
)


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in forged.memory.__all__ if not hasattr(forged.memory, name)] == []


def test_there_are_as_many_tests_as_the_seed_asks_for() -> None:
    sources = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    assert sum(source.count("\ndef test_") for source in sources) >= 25


def test_each_test_is_named_for_its_claim() -> None:
    for path in Path(__file__).parent.glob("test_*.py"):
        names = re.findall(r"^def test_(\w+)", path.read_text(), re.M)
        assert len(names) == len(set(names))
        assert [name for name in names if name.count("_") < 2] == []


# --- allocating -------------------------------------------------------------------------------------------------------


def test_new_pool_is_one_free_block() -> None:
    pool = pool_of(1024)
    assert layout(pool) == [(0, 1024, True)]
    assert pool.device == GpuDevice("gpu0", 1024)


def test_pool_of_nothing_has_no_blocks() -> None:
    pool = pool_of(0)
    assert layout(pool) == []
    assert not pool.allocate(AllocationRequest("t", 1, 1), 0.0).success
    assert (pool.evict(1), pool.defragment(), pool.stats().fragmentation_ratio) == (0, 0, 0.0)


def test_block_is_split_off_at_the_beginning_of_a_hole() -> None:
    pool = pool_of(1024)
    result = pool.allocate(AllocationRequest("weights", 100, 64, priority=3), 7.5)
    assert (result.success, result.offset, result.actual_size, result.error) == (True, 0, 128, None)
    assert layout(pool) == [(0, 128, False), (128, 896, True)]
    assert result.block_id is not None
    block = pool.get_block(result.block_id)
    assert block is not None
    assert (block.block_id, block.status, block.tensor_id, block.priority) == (result.block_id, ALLOCATED, "weights", 3)
    assert (block.allocated_at, block.last_accessed) == (7.5, 7.5)


def test_whole_pool_can_be_one_block() -> None:
    pool = pool_of(1024)
    block_id = allocated(pool, 1024)
    assert layout(pool) == [(0, 1024, False)]
    pool.free(block_id)
    assert layout(pool) == [(0, 1024, True)]


def test_smallest_hole_that_fits_is_taken() -> None:
    pool = pool_of(1000)
    ids = filled(pool, 100, 10, 50, 10, 70, 10)
    for block_id in ids[0::2]:
        pool.free(block_id)
    assert offset_of(pool, allocated(pool, 60)) == 170
    assert offset_of(pool, allocated(pool, 50)) == 110
    assert offset_of(pool, allocated(pool, 51)) == 0
    assert offset_of(pool, allocated(pool, 101)) == 250


def test_padding_before_an_aligned_block_is_free() -> None:
    pool = pool_of(1024)
    allocated(pool, 10)
    assert offset_of(pool, allocated(pool, 256, 256)) == 256
    assert layout(pool) == [(0, 10, False), (10, 246, True), (256, 256, False), (512, 512, True)]
    assert offset_of(pool, allocated(pool, 246)) == 10


def test_smallest_hole_is_passed_over_if_its_offset_does_not_fit() -> None:
    pool = pool_of(1024)
    ids = filled(pool, 8, 260, 8, 300)
    pool.free(ids[1])
    assert offset_of(pool, allocated(pool, 256, 256)) == 768
    assert offset_of(pool, allocated(pool, 256, 4)) == 8


def test_pinned_request_is_pinned() -> None:
    pool = pool_of()
    result = pool.allocate(AllocationRequest("t", 1, 1, pinned=True), 0.0)
    assert result.block_id is not None
    assert status_of(pool, result.block_id) is PINNED


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (AllocationRequest("t", 0), "size must be an integer >= 1, got 0"),
        (AllocationRequest("t", -5), "size must be an integer >= 1, got -5"),
        (AllocationRequest("t", 1025, 1), "size must be at most 1024"),
        (AllocationRequest("t", 2**63, 1), "size must be at most 1024"),
        (AllocationRequest("t", 10, 0), "alignment must be a power of two, got 0"),
        (AllocationRequest("t", 10, 3), "alignment must be a power of two, got 3"),
        (AllocationRequest("t", 10, -8), "alignment must be a power of two, got -8"),
        (AllocationRequest("t", 10, 2048), "size must be at most 1024"),
        (AllocationRequest("t", 1.5), "size must be an integer, got 1.5"),  # type: ignore[arg-type]
        (AllocationRequest("t", 10, "8"), "alignment must be an integer, got '8'"),  # type: ignore[arg-type]
        (AllocationRequest(None, 10), "tensor_id must be a text, got None"),  # type: ignore[arg-type]
        (AllocationRequest("t", 10, priority="high"), "priority must be an integer"),  # type: ignore[arg-type]
    ],
)
def test_request_that_can_never_fit_is_no_success(request_: AllocationRequest, error: str) -> None:
    pool = pool_of(1024)
    result = pool.allocate(request_, 0.0)
    assert (result.success, result.block_id, result.offset, result.actual_size) == (False, None, None, None)
    assert result.error is not None
    assert error in result.error
    assert layout(pool) == [(0, 1024, True)]


@pytest.mark.parametrize("now", [math.nan, math.inf, "now"])
def test_time_must_be_finite(now: float) -> None:
    pool = pool_of()
    result = pool.allocate(AllocationRequest("t", 1), now)
    assert result.error is not None
    assert result.error.startswith("now must be finite seconds, got")
    block_id = allocated(pool, 1)
    with pytest.raises(MemoryInvalid, match="now must be finite seconds"):
        pool.touch(block_id, now)


def test_allocation_evicts_nothing() -> None:
    pool = pool_of(100)
    block_id = cached(pool, 100)
    assert not pool.allocate(AllocationRequest("t", 1, 1), 0.0).success
    assert status_of(pool, block_id) is CACHED


def test_block_goes_to_a_planned_offset_if_that_is_free() -> None:
    pool = pool_of(1000)
    request = AllocationRequest("planned", 100, 100 - 36)
    found = [pool.allocate(request, 0.0, offset=offset).offset for offset in (256, 320, 100, 64)]
    # The second place is taken in part, the third is no multiple of the alignment.
    assert found == [256, 0, 128, 384]
    pool.validate()


def test_failure_says_what_there_is_and_what_would_help() -> None:
    pool = pool_of(100)
    ids = filled(pool, 20, 20, 20, 20)
    pool.free(ids[0])
    error = pool.allocate(AllocationRequest("t", 50, 1), 0.0).error
    assert error == (
        "no room for 50 bytes: 40 are free, 20 of them together, 0 can be evicted "
        "(free or cache block-3, block-4 (40 bytes), or ask for at most 40 bytes)"
    )
    assert "(compact the pool)" in (pool.allocate(AllocationRequest("t", 40, 1), 0.0).error or "")
    for block_id in ids[2:4]:
        pool.mark_cached(block_id)
    assert "(evict cached blocks, as make_room does)" in (pool.allocate(AllocationRequest("t", 50, 1), 0.0).error or "")
    assert "(evict cached blocks and compact" in (pool.allocate(AllocationRequest("t", 80, 1), 0.0).error or "")


def test_sizes_near_two_to_the_63rd_are_exact() -> None:
    total = 2**63 + 2**53 + 3
    pool = pool_of(total)
    first = allocated(pool, 2**63 - 1)
    second = allocated(pool, 2**53 + 1)
    assert layout(pool) == [
        (0, 2**63 - 1, False),
        (2**63 - 1, 2**53 + 1, False),
        (2**63 + 2**53, 3, True),
    ]
    stats = pool.stats()
    assert (stats.allocated_bytes, stats.free_bytes) == (2**63 + 2**53, 3)
    pool.free(first)
    assert pool.stats().largest_free_block == 2**63 - 1
    assert offset_of(pool, second) == 2**63 - 1


# --- freeing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_freed_blocks_become_one_in_any_order(order: tuple[int, ...]) -> None:
    pool = pool_of(300)
    ids = filled(pool, 100, 100, 100)
    for place in order:
        pool.free(ids[place])
        pool.validate()
    assert layout(pool) == [(0, 300, True)]


def test_block_is_freed_once() -> None:
    pool = pool_of()
    block_id = allocated(pool, 10)
    pool.free(block_id)
    with pytest.raises(BlockUnknown, match="there is no block 'block-1'") as refused:
        pool.free(block_id)
    assert refused.value.block_id == block_id
    assert pool.get_block(block_id) is None


def test_block_is_freed_whatever_its_status() -> None:
    pool = pool_of()
    ids = filled(pool, 1, 1, 1)
    pool.pin(ids[0])
    pool.mark_cached(ids[1])
    for block_id in ids:
        pool.free(block_id)
    assert layout(pool) == [(0, 1024, True)]


def test_id_of_a_freed_block_is_not_given_again() -> None:
    pool = pool_of()
    first = allocated(pool, 1)
    pool.free(first)
    assert allocated(pool, 1) != first


CALLS: dict[str, Callable[[MemoryPool, str], object]] = {
    "free": lambda pool, block_id: pool.free(block_id),
    "mark_cached": lambda pool, block_id: pool.mark_cached(block_id),
    "pin": lambda pool, block_id: pool.pin(block_id),
    "unpin": lambda pool, block_id: pool.unpin(block_id),
    "use": lambda pool, block_id: pool.use(block_id),
    "touch": lambda pool, block_id: pool.touch(block_id, 1.0),
    "version_of": lambda pool, block_id: pool.version_of(block_id),
}


@pytest.mark.parametrize("name", CALLS)
def test_unknown_block_is_refused(name: str) -> None:
    pool = pool_of()
    with pytest.raises(BlockUnknown, match="there is no block 'free@0'"):
        CALLS[name](pool, "free@0")


# --- status and use ---------------------------------------------------------------------------------------------------

STATUS_CHANGES = {
    (ALLOCATED, "mark_cached"): CACHED,
    (ALLOCATED, "pin"): PINNED,
    (ALLOCATED, "unpin"): ALLOCATED,
    (ALLOCATED, "use"): ALLOCATED,
    (CACHED, "mark_cached"): CACHED,
    (CACHED, "pin"): PINNED,
    (CACHED, "unpin"): None,
    (CACHED, "use"): ALLOCATED,
    (PINNED, "mark_cached"): None,
    (PINNED, "pin"): PINNED,
    (PINNED, "unpin"): ALLOCATED,
    (PINNED, "use"): PINNED,
}


@pytest.mark.parametrize(("status", "change"), STATUS_CHANGES)
def test_status_follows_another_only_as_listed(status: BlockStatus, change: str) -> None:
    pool = pool_of()
    block_id = allocated(pool, 10)
    for name in {ALLOCATED: (), CACHED: ("mark_cached",), PINNED: ("pin",)}[status]:
        CALLS[name](pool, block_id)
    following = STATUS_CHANGES[status, change]
    if following is None:
        with pytest.raises(StatusRefused, match=f"block 'block-1' is {status}; it cannot be"):
            CALLS[change](pool, block_id)
    else:
        CALLS[change](pool, block_id)
    assert status_of(pool, block_id) is (following or status)
    pool.validate()


def test_touched_block_was_used_then() -> None:
    pool = pool_of()
    block_id = allocated(pool, 10, now=5.0)
    pool.touch(block_id, 9.0)
    block = pool.get_block(block_id)
    assert block is not None
    assert (block.allocated_at, block.last_accessed) == (5.0, 9.0)
    pool.touch(block_id, 7.0)
    assert pool.get_block(block_id) == block


# --- eviction ---------------------------------------------------------------------------------------------------------


def test_least_recently_used_blocks_are_evicted_until_it_is_enough() -> None:
    pool = pool_of(1000)
    ids = [cached(pool, 100, now=now) for now in (3.0, 1.0, 2.0, 4.0)]
    pool.touch(ids[1], 5.0)
    assert pool.evict(150) == 200
    assert [pool.get_block(block_id) is None for block_id in ids] == [True, False, True, False]


def test_pinned_and_allocated_blocks_are_not_evicted() -> None:
    pool = pool_of(300)
    kept = filled(pool, 100, 100)
    pool.mark_cached(kept[0])
    pool.pin(kept[0])
    gone = cached(pool, 100)
    assert pool.evict(1000) == 100
    assert pool.get_block(gone) is None
    assert [status_of(pool, block_id) for block_id in kept] == [PINNED, ALLOCATED]


def test_equally_recent_blocks_are_evicted_by_priority_then_by_offset() -> None:
    pool = pool_of(400)
    ids = [cached(pool, 100, priority=priority) for priority in (1, 0, 0, -1)]
    evicted = []
    for _ in ids:
        assert pool.evict(1) == 100
        evicted += [block_id for block_id in ids if pool.get_block(block_id) is None and block_id not in evicted]
    assert evicted == [ids[3], ids[1], ids[2], ids[0]]


def test_eviction_order_is_that_of_the_candidates() -> None:
    rng = random.Random(1)
    pool = pool_of(100)
    for _ in range(100):
        cached(pool, 1, now=float(rng.randrange(5)), priority=rng.randrange(3))
    for _ in range(100):
        expected = eviction_candidates(pool.blocks())[0]
        assert pool.evict(1) == 1
        assert pool.get_block(expected) is None


def test_nothing_is_evicted_for_nothing() -> None:
    pool = pool_of()
    cached(pool, 10)
    assert pool.evict(0) == 0
    with pytest.raises(MemoryInvalid, match="needed must be an integer >= 0, got -1"):
        pool.evict(-1)


def test_block_in_use_again_is_not_evicted() -> None:
    pool = pool_of()
    block_id = cached(pool, 10)
    pool.use(block_id)
    assert pool.evict(10) == 0


# --- compaction -------------------------------------------------------------------------------------------------------


def test_blocks_move_together_and_keep_their_tensors() -> None:
    pool = pool_of(1000)
    ids = [allocated(pool, 100, tensor=f"t{n}", now=float(n)) for n in range(6)]
    for place in (0, 2, 3):
        pool.free(ids[place])
    before = [pool.get_block(ids[place]) for place in (1, 4, 5)]
    assert pool.defragment() == 3
    assert layout(pool) == [(0, 100, False), (100, 100, False), (200, 100, False), (300, 700, True)]
    for block, offset in zip(before, (0, 100, 200), strict=True):
        assert block is not None
        now = pool.get_block(block.block_id)
        assert now is not None
        assert (now.offset, now.size, now.tensor_id, now.status) == (offset, 100, block.tensor_id, block.status)
        assert (now.allocated_at, now.last_accessed) == (block.allocated_at, block.last_accessed)
    assert pool.stats().fragmentation_ratio == 0.0
    assert pool.defragment() == 0


def test_pinned_blocks_do_not_move() -> None:
    pool = pool_of(500)
    ids = filled(pool, 100, 100, 100, 100)
    pool.pin(ids[2])
    pool.free(ids[0])
    assert pool.defragment() == 1
    assert [offset_of(pool, block_id) for block_id in ids[1:]] == [0, 200, 300]


def test_moved_blocks_are_aligned() -> None:
    pool = pool_of(1024)
    ids = [allocated(pool, 8), allocated(pool, 8), allocated(pool, 64, 64), allocated(pool, 64, 64)]
    pool.free(ids[0])
    pool.free(ids[2])
    assert pool.defragment() == 2
    assert [offset_of(pool, block_id) for block_id in (ids[1], ids[3])] == [0, 64]


def test_handle_of_a_moved_block_is_stale() -> None:
    pool = pool_of()
    first, second = filled(pool, 100, 100)
    version = pool.version_of(second)
    pool.free(first)
    pool.defragment()
    with pytest.raises(HandleStale, match="block 'block-2' has version 2, and the handle 1"):
        pool.free(second, version)
    pool.touch(second, 1.0, pool.version_of(second))
    pool.free(second, pool.version_of(second))


# --- what there is ----------------------------------------------------------------------------------------------------


def test_stats_count_by_status() -> None:
    pool = pool_of(1000)
    ids = filled(pool, 100, 200, 300, 50)
    pool.pin(ids[0])
    pool.mark_cached(ids[1])
    pool.free(ids[2])
    stats = pool.stats()
    assert (stats.total_bytes, stats.allocated_bytes, stats.free_bytes) == (1000, 350, 650)
    assert (stats.pinned_bytes, stats.cached_bytes) == (100, 200)
    assert (stats.largest_free_block, stats.block_count, stats.allocation_count) == (350, 5, 3)
    assert stats.fragmentation_ratio == fragmentation_ratio(pool.blocks()) == 300 / 650
    assert memory_pressure(stats.allocated_bytes, stats.total_bytes) == 0.35


def test_blocks_of_a_tensor_are_found_by_offset() -> None:
    pool = pool_of()
    ids = [allocated(pool, 10, tensor=tensor) for tensor in ("a", "b", "a", "a")]
    pool.free(ids[0])
    ids[0] = allocated(pool, 5, tensor="a")
    assert [block.block_id for block in pool.blocks_for_tensor("a")] == [ids[0], ids[2], ids[3]]
    assert [block.block_id for block in pool.blocks_for_tensor("b")] == [ids[1]]
    assert pool.blocks_for_tensor("c") == []


def test_what_is_returned_does_not_change_with_the_pool() -> None:
    pool = pool_of()
    block_id = allocated(pool, 10)
    block, stats, blocks = pool.get_block(block_id), pool.stats(), pool.blocks()
    pool.pin(block_id)
    pool.free(block_id)
    assert block is not None
    assert (block.status, stats.allocation_count, len(blocks)) == (ALLOCATED, 1, 2)


def test_pool_allocates_where_the_best_fit_of_its_blocks_is() -> None:
    rng = random.Random(3)
    pool = pool_of(4096)
    ids: list[str] = []
    for _ in range(400):
        if ids and rng.random() < 0.5:
            pool.free(ids.pop(rng.randrange(len(ids))))
            continue
        request = AllocationRequest("t", rng.randrange(1, 200), rng.choice([1, 8, 64]))
        expected = best_fit_block(pool.blocks(), request.size, request.alignment)
        offsets = {block.block_id: block.offset for block in pool.blocks() if block.status is FREE}
        result = pool.allocate(request, 0.0)
        assert result.success == (expected is not None)
        if result.block_id is not None and expected is not None:
            assert result.offset == -(-offsets[expected] // request.alignment) * request.alignment
            ids.append(result.block_id)


@pytest.mark.parametrize("near", ["", "b0", "b3", "b4", "b7"])
def test_blocks_from_an_offset_on_do_not_depend_on_where_they_are_looked_for(near: str) -> None:
    core = PoolCore(20)
    for number in range(8):
        core.allocate(AllocationRequest("t", 2, 1), 0.0, f"b{number}")
    core.free("b3")
    for start in range(22):
        assert list(core.stretches(start, near)) == [block for block in core.stretches() if block.end > start]


def test_text_of_a_block_does_not_show_its_neighbours() -> None:
    core = PoolCore(1000)
    for number in range(100):
        core.allocate(AllocationRequest("t", 2, 1), 0.0, f"b{number}")
    assert repr(core.get("b7")) == "Block('b7', offset=14, size=2, status='allocated')"


def test_pool_of_many_blocks_can_be_dropped() -> None:
    pool = pool_of(200_000)
    filled(pool, *[2] * 100_000)
    core = weakref.ref(pool._core)
    del pool
    gc.collect()
    assert core() is None


# --- threads ----------------------------------------------------------------------------------------------------------


def test_threads_never_share_memory() -> None:
    pool = pool_of(64 * 1024)
    started = threading.Barrier(8)

    def work(number: int) -> list[str]:
        rng = random.Random(number)
        mine: list[str] = []
        started.wait(60)
        for turn in range(300):
            if mine and rng.random() < 0.4:
                pool.free(mine.pop(rng.randrange(len(mine))))
            elif (
                made := pool.allocate(AllocationRequest(f"t{number}", rng.randrange(1, 300), 8), float(turn))
            ).block_id:
                mine.append(made.block_id)
        return mine

    with ThreadPoolExecutor(8) as threads:
        held = list(threads.map(work, range(8)))
    pool.validate()
    assert pool.stats().allocation_count == sum(map(len, held))
    for number, mine in enumerate(held):
        assert {block.block_id for block in pool.blocks_for_tensor(f"t{number}")} == set(mine)


def test_block_is_freed_by_one_of_several_threads() -> None:
    pool = pool_of()
    ids = filled(pool, *[1] * 200)
    started = threading.Barrier(4)

    def work(_: int) -> int:
        started.wait(60)
        return sum(outcome(pool.free, block_id) for block_id in ids)

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(work, range(4))) == 200
    assert layout(pool) == [(0, 1024, True)]


def outcome(call: Callable[..., Any], *arguments: object) -> bool:
    """Whether a call was not refused."""
    try:
        call(*arguments)
    except MemoryRefused:
        return False
    return True


class Unlocked:
    """Takes the place of a lock, and notes that it was taken."""

    def __init__(self) -> None:
        self.entered = 0

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *_: object) -> None:
        pass


LOCKED: dict[str, Callable[[MemoryPool, str], object]] = {
    **CALLS,
    "allocate": lambda pool, _: pool.allocate(AllocationRequest("t", 1), 0.0),
    "evict": lambda pool, _: pool.evict(1),
    "make_room": lambda pool, _: pool.make_room(1),
    "defragment": lambda pool, _: pool.defragment(),
    "plan_compaction": lambda pool, _: pool.plan_compaction(),
    "stats": lambda pool, _: pool.stats(),
    "get_block": lambda pool, block_id: pool.get_block(block_id),
    "blocks_for_tensor": lambda pool, _: pool.blocks_for_tensor("t"),
    "blocks": lambda pool, _: pool.blocks(),
    "open_moves": lambda pool, _: pool.open_moves(),
    "ready_moves": lambda pool, _: pool.ready_moves(),
    "validate": lambda pool, _: pool.validate(),
}


@pytest.mark.parametrize("name", LOCKED)
def test_each_call_takes_the_lock_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of()
    block_id = allocated(pool, 1)
    lock = Unlocked()
    monkeypatch.setattr(pool, "_lock", lock)
    LOCKED[name](pool, block_id)
    assert lock.entered == 1
