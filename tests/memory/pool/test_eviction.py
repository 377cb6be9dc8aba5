from __future__ import annotations

import random

import pytest

from forged.memory import AllocationRequest, MemoryInvalid, MemoryPool
from forged.memory.pool.core import PoolCore
from forged.memory.pool.eviction import eviction_order, find_room
from tests.memory.pool.pools import allocated, cached, filled, layout, offset_of, pool_of


def full_pool(*uses: tuple[int, float]) -> tuple[MemoryPool, list[str]]:
    """A pool without a hole, of cached blocks of these sizes, last used at these times."""
    pool = pool_of(sum(size for size, _ in uses))
    return pool, [cached(pool, size, now=now) for size, now in uses]


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_nothing_is_evicted_if_the_block_fits(policy: str) -> None:
    pool = pool_of(200)
    cached(pool, 100)
    evicted, hole = pool.make_room(100, policy=policy)
    assert evicted == []
    assert hole is not None
    assert (hole.offset, hole.size) == (100, 100)


def test_least_recently_used_block_that_is_large_enough_gives_way() -> None:
    pool, ids = full_pool((10, 1.0), (100, 2.0), (10, 3.0), (100, 4.0))
    evicted, hole = pool.make_room(50)
    assert [block.block_id for block in evicted] == [ids[1]]
    assert hole is not None
    assert (hole.offset, hole.size) == (10, 100)
    assert offset_of(pool, allocated(pool, 50)) == 10


def test_neighbours_give_way_together() -> None:
    pool, ids = full_pool((50, 3.0), (50, 1.0), (50, 9.0), (50, 2.0), (50, 4.0))
    evicted, hole = pool.make_room(100)
    # In the order of use 1, 3, 0: the first neighbours among them are 0 and 1.
    assert [block.block_id for block in evicted] == [ids[0], ids[1]]
    assert hole is not None
    assert hole.size == 100


def test_old_block_that_is_no_part_of_the_hole_stays() -> None:
    pool, ids = full_pool((10, 1.0), (10, 8.0), (200, 2.0), (10, 9.0))
    evicted, _ = pool.make_room(150)
    assert [block.block_id for block in evicted] == [ids[2]]
    assert pool.get_block(ids[0]) is not None


def test_run_of_marked_blocks_is_trimmed_to_its_cheapest_part() -> None:
    pool, ids = full_pool((90, 1.0), (10, 3.0), (60, 2.0), (40, 9.0))
    # Marking in the order 0, 2, 1 opens 160 bytes at once; 1 and 2 are 70 of them.
    evicted, _ = pool.make_room(95)
    assert [block.block_id for block in evicted] == [ids[0], ids[1]]
    pool, ids = full_pool((60, 1.0), (10, 3.0), (90, 2.0), (40, 9.0))
    evicted, _ = pool.make_room(95)
    assert [block.block_id for block in evicted] == [ids[1], ids[2]]


def test_holes_beside_evicted_blocks_are_used() -> None:
    pool = pool_of(200)
    ids = [*filled(pool, 40), cached(pool, 60), *filled(pool, 40), cached(pool, 60, now=1.0)]
    pool.free(ids[0])
    evicted, hole = pool.make_room(100)
    assert [block.block_id for block in evicted] == [ids[1]]
    assert hole is not None
    assert (hole.offset, hole.size) == (0, 100)


def test_pinned_and_allocated_blocks_are_never_part_of_the_hole() -> None:
    pool = pool_of(300)
    cached(pool, 90)
    kept = filled(pool, 10)
    cached(pool, 90)
    pool.pin(filled(pool, 10)[0])
    last = cached(pool, 100, now=9.0)
    assert [block.block_id for block in pool.make_room(100).evicted] == [last]
    assert pool.get_block(kept[0]) is not None


@pytest.mark.parametrize("policy", ["lru", "cost"])
@pytest.mark.parametrize("size", [151, 300, 301, 2**63])
def test_nothing_is_evicted_if_there_can_be_no_room(policy: str, size: int) -> None:
    pool = pool_of(300)
    cached(pool, 150)
    filled(pool, 10)
    cached(pool, 140)
    before = layout(pool)
    assert pool.make_room(size, policy=policy) == ([], None)
    assert layout(pool) == before


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_room_is_aligned(policy: str) -> None:
    pool, _ = full_pool((8, 1.0), (256, 2.0), (8, 3.0), (256, 4.0), (300, 5.0))
    evicted, hole = pool.make_room(256, 256, policy=policy)
    assert hole is not None
    start = -(-hole.offset // 256) * 256
    assert start + 256 <= hole.offset + hole.size
    assert offset_of(pool, allocated(pool, 256, 256)) == start
    assert evicted


@pytest.mark.parametrize(
    ("size", "alignment", "policy", "text"),
    [
        (0, 1, "lru", "size must be an integer >= 1, got 0"),
        (10, 3, "lru", "alignment must be a power of two, got 3"),
        (10, 1, "random", "policy must be one of lru, cost, got 'random'"),
    ],
)
def test_room_without_a_meaning_is_refused(size: int, alignment: int, policy: str, text: str) -> None:
    with pytest.raises(MemoryInvalid, match=text):
        pool_of().make_room(size, alignment, policy=policy)


def test_cheapest_blocks_give_way_by_cost() -> None:
    # The old one is too large, the recent one costs ten times as much for each byte.
    pool, ids = full_pool((1000, 0.0), (100, 10.0), (110, 1.0))
    assert [block.block_id for block in pool.make_room(100, policy="cost").evicted] == [ids[2]]


def test_content_of_a_checkpoint_counts_only_while_the_checkpoint_can_be_restored() -> None:
    core = PoolCore(200)
    for content in ("gone", "saved"):
        assert core.allocate(AllocationRequest(content, 100, 1), 0.0, content, is_cached=True, content=content)
    for saved, victim in (({"saved"}, "saved"), ({"gone"}, "gone"), (set[str](), "gone")):
        plan = find_room(core, 100, 1, "cost", saved.__contains__)
        assert plan is not None
        assert [block.block_id for block in plan.victims] == [victim]


def test_blocks_are_in_the_order_of_their_policy() -> None:
    core = PoolCore(300)
    for name, last_used, reload_s in (("a", 0.0, 9.0), ("b", 1.0, 0.1), ("c", 2.0, None)):
        request = AllocationRequest(name, 100, 1)
        assert core.allocate(request, last_used, name, is_cached=True, reload_s=reload_s)
    assert [block.block_id for block in eviction_order(core, "lru", bool)] == ["a", "b", "c"]
    assert [block.block_id for block in eviction_order(core, "cost", bool)] == ["b", "a", "c"]


def test_priority_counts_in_the_cost() -> None:
    pool = pool_of(200)
    cached(pool, 100, priority=1)
    low = cached(pool, 100)
    assert [block.block_id for block in pool.make_room(100, policy="cost").evicted] == [low]


def test_far_less_is_evicted_than_by_last_use_alone() -> None:
    numbers = random.Random(5)
    shares = []
    for _ in range(20):
        pool, _ = full_pool(*((numbers.randrange(1, 1000), numbers.random()) for _ in range(200)))
        evicted, _ = pool.make_room(4000)
        pool.validate()
        shares.append(sum(block.size for block in evicted) / 4000)
    assert max(shares) < 1.3
