from __future__ import annotations

from forged.memory import AllocationRequest
from forged.memory.pool.core import PoolCore
from forged.memory.pool.shortage import BLOCKING_MAX, MissingRoom, missing_room


def core_of(total: int, *sizes: int) -> PoolCore:
    core = PoolCore(total)
    for number, size in enumerate(sizes):
        core.allocate(AllocationRequest("t", size, 1), 0.0, f"b{number}")
    return core


def missing(core: PoolCore, size: int) -> MissingRoom:
    return missing_room(core, size, 1, lambda block: block.block_id)


def test_full_pool_names_the_blocks_in_the_way() -> None:
    found = missing(core_of(100, 40, 30, 30), 50)
    assert (found.total_free, found.largest_hole, found.evictable_bytes, found.largest_obtainable) == (0, 0, 0, 0)
    assert [block.block_id for block in found.blocking] == ["b1", "b2"]
    assert found.fix == "free or cache b1, b2 (60 bytes), or ask for it on another device"


def test_blocks_of_the_cheapest_hole_are_named() -> None:
    core = core_of(400, 100, 10, 100, 90, 100)
    core.free("b0")
    core.free("b2")
    core.pin("b1")
    found = missing(core, 190)
    assert [block.block_id for block in found.blocking] == ["b1"]
    assert (found.largest_hole, found.largest_obtainable) == (100, 100)
    assert found.fix == "free or cache b1 (10 bytes), or ask for at most 100 bytes"


def test_eviction_and_compaction_are_named_if_they_help() -> None:
    core = core_of(300, 100, 50, 100, 50)
    core.free("b0")
    assert missing(core, 110).fix.startswith("free or cache b1")
    core.free("b2")
    assert missing(core, 200).fix == "compact the pool"
    core.mark_cached("b1")
    assert missing(core, 210).fix == "evict cached blocks, as make_room does"
    core.use("b1")
    core.mark_cached("b3")
    assert missing(core, 250).fix == "evict cached blocks and compact the pool"


def test_pinned_blocks_bound_what_can_be_obtained() -> None:
    core = core_of(300, 100, 50, 100, 50)
    core.free("b0")
    core.mark_cached("b2")
    core.pin("b1")
    assert missing(core, 150).largest_obtainable == 100


def test_named_blocks_are_bounded() -> None:
    found = missing(core_of(100, *[1] * 100), 50)
    assert len(found.blocking) == BLOCKING_MAX
    assert found.fix == "free or cache b0, b1, b2 and 47 more (50 bytes), or ask for it on another device"


def test_reason_has_the_figures() -> None:
    assert missing(core_of(100, 40, 30), 50).reason == (
        "no room for 50 bytes: 30 are free, 30 of them together, 0 can be evicted"
    )
