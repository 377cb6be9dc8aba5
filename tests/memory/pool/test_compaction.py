from __future__ import annotations

import pytest

from forged.memory import AllocationRequest, CompactionRefused, HandleStale, MemoryPool, MovePlan, StatusRefused
from tests.memory.pool.pools import PINNED, allocated, cached, filled, layout, offset_of, pool_of, status_of


def pool_with_holes(sizes: list[int], holes: list[int], total: int | None = None) -> tuple[MemoryPool, list[str]]:
    """A pool of blocks of these sizes, of which some are free again."""
    pool = pool_of(sum(sizes) if total is None else total)
    ids = filled(pool, *sizes)
    for place in holes:
        pool.free(ids[place])
    return pool, ids


def planned(pool: MemoryPool, hole: int | None = None, alignment: int = 1, **bounds: int) -> MovePlan:
    plan = pool.plan_compaction(hole, alignment, **bounds)  # type: ignore[arg-type]
    assert plan is not None
    return plan


def moves_of(plan: MovePlan) -> list[tuple[str, int, int]]:
    return [(move.block_id, move.source, move.destination) for move in plan.moves]


# --- plans ------------------------------------------------------------------------------------------------------------


def test_plan_lists_moves_and_changes_nothing() -> None:
    pool, ids = pool_with_holes([100, 50, 100, 50], [0, 2])
    plan = planned(pool)
    assert moves_of(plan) == [(ids[1], 100, 0), (ids[3], 250, 50)]
    assert (plan.epoch, plan.bytes, plan.opens) == (1, 100, 200)
    assert [(move.number, move.size, move.version) for move in plan.moves] == [(0, 50, 1), (1, 50, 1)]
    assert [offset_of(pool, ids[place]) for place in (1, 3)] == [100, 250]
    pool.validate()


def test_move_by_less_than_its_size_overlaps() -> None:
    pool, _ = pool_with_holes([10, 50, 60, 50], [0, 2])
    assert [move.overlaps for move in planned(pool).moves] == [True, False]


def test_without_overlaps_no_block_moves_by_less_than_its_size() -> None:
    pool, ids = pool_with_holes([10, 50, 60, 50], [0, 2])
    plan = pool.plan_compaction(overlaps=False)
    assert plan is not None
    assert moves_of(plan) == [(ids[3], 120, 60)]


def test_pinned_block_is_a_barrier() -> None:
    pool, ids = pool_with_holes([100, 10, 100, 10, 100], [0, 2, 4])
    pool.pin(ids[1])
    assert moves_of(planned(pool)) == [(ids[3], 210, 110)]
    assert status_of(pool, ids[1]) is PINNED


def test_bounds_limit_bytes_and_moves() -> None:
    pool, ids = pool_with_holes([10, 50, 50, 50], [0])
    assert moves_of(planned(pool, bytes_max=120)) == [(ids[1], 10, 0), (ids[2], 60, 50)]
    pool, ids = pool_with_holes([10, 50, 50, 50], [0])
    assert moves_of(planned(pool, moves_max=1)) == [(ids[1], 10, 0)]
    assert planned(pool_with_holes([10, 50], [0])[0], bytes_max=49).moves == ()


def test_bounded_plan_begins_where_most_is_won() -> None:
    pool, ids = pool_with_holes([5, 10, 5, 10, 100, 20, 100], [0, 2, 4, 6])
    pool.pin(ids[3])
    assert moves_of(planned(pool, moves_max=1)) == [(ids[5], 130, 30)]


def test_plan_without_moves_is_not_open() -> None:
    pool = pool_of()
    filled(pool, 10)
    assert planned(pool).moves == ()
    assert pool.open_moves() == []
    assert planned(pool).epoch == 2


# --- a hole of a size -------------------------------------------------------------------------------------------------


def test_hole_that_is_there_needs_no_moves() -> None:
    pool, _ = pool_with_holes([100, 50], [0])
    assert planned(pool, 100).moves == ()


def test_smallest_block_in_the_way_moves_into_another_hole() -> None:
    pool, ids = pool_with_holes([100, 10, 100, 90, 20, 10], [0, 2, 4])
    plan = planned(pool, 200)
    assert moves_of(plan) == [(ids[1], 100, 200)]
    assert plan.hole == (0, 200)
    pool.commit_move(plan.epoch, 0)
    assert offset_of(pool, allocated(pool, 200)) == 0


def test_blocks_slide_together_if_no_other_hole_has_room() -> None:
    pool, ids = pool_with_holes([60, 50, 60, 50, 60], [0, 2, 4])
    plan = planned(pool, 180)
    assert moves_of(plan) == [(ids[1], 60, 0), (ids[3], 170, 50)]
    assert plan.hole == (100, 180)


def test_no_plan_is_made_if_no_moves_can_open_the_hole() -> None:
    pool, ids = pool_with_holes([100, 50, 100], [0, 2])
    assert pool.plan_compaction(201) is None
    pool.pin(ids[1])
    assert pool.plan_compaction(101) is None
    assert pool.open_moves() == []


def test_no_plan_is_made_beyond_the_bounds() -> None:
    pool, _ = pool_with_holes([100, 50, 100], [0, 2])
    assert pool.plan_compaction(200, bytes_max=49) is None
    assert pool.plan_compaction(200, moves_max=0) is None
    assert pool.plan_compaction(200, bytes_max=50, moves_max=1) is not None


def test_hole_is_aligned() -> None:
    pool, _ = pool_with_holes([40, 8, 300, 8, 156], [0, 2, 4])
    plan = planned(pool, 256, 256)
    assert plan.hole is not None
    assert plan.hole[0] % 256 == 0
    for move in plan.moves:
        pool.commit_move(plan.epoch, move.number)
    assert offset_of(pool, allocated(pool, 256, 256)) == plan.hole[0]


# --- commits ----------------------------------------------------------------------------------------------------------


def test_committed_block_is_at_its_destination_with_a_new_version() -> None:
    pool, ids = pool_with_holes([100, 50, 10], [0])
    plan = planned(pool)
    assert pool.commit_move(plan.epoch, 0) == 2
    assert offset_of(pool, ids[1]) == 0
    with pytest.raises(HandleStale):
        pool.touch(ids[1], 1.0, 1)
    pool.validate()


def test_plan_ends_with_its_last_move() -> None:
    pool, _ = pool_with_holes([100, 50, 100, 50], [0, 2])
    plan = planned(pool)
    for move in plan.moves:
        pool.commit_move(plan.epoch, move.number)
    assert layout(pool) == [(0, 50, False), (50, 50, False), (100, 200, True)]
    with pytest.raises(CompactionRefused, match="there is no compaction plan of epoch 1"):
        pool.commit_move(plan.epoch, 0)


def test_uncommitted_blocks_stay_where_they_are_when_the_plan_is_closed() -> None:
    pool, ids = pool_with_holes([100, 50, 100, 50], [0, 2])
    plan = planned(pool)
    pool.commit_move(plan.epoch, 0)
    assert pool.close_plan(plan.epoch) == 1
    assert [offset_of(pool, ids[place]) for place in (1, 3)] == [0, 250]
    assert [pool.version_of(ids[place]) for place in (1, 3)] == [2, 1]
    assert layout(pool) == [(0, 50, False), (50, 200, True), (250, 50, False)]


def test_move_waits_for_the_one_before_it() -> None:
    pool, _ = pool_with_holes([10, 50, 50], [0])
    plan = planned(pool)
    assert [move.after for move in plan.moves] == [-1, 0]
    assert [move.number for move in pool.ready_moves()] == [0]
    with pytest.raises(CompactionRefused, match="move 1 of block 'block-3' cannot be committed before move 0"):
        pool.commit_move(plan.epoch, 1)
    pool.commit_move(plan.epoch, 0)
    assert [move.number for move in pool.ready_moves()] == [1]
    pool.commit_move(plan.epoch, 1)


def test_move_is_committed_once() -> None:
    pool, _ = pool_with_holes([100, 50, 100, 50], [0, 2])
    plan = planned(pool)
    pool.commit_move(plan.epoch, 0)
    with pytest.raises(CompactionRefused, match="has no open move 0"):
        pool.commit_move(plan.epoch, 0)


def test_one_plan_is_open_at_a_time() -> None:
    pool, _ = pool_with_holes([100, 50], [0])
    plan = planned(pool)
    with pytest.raises(CompactionRefused, match="the compaction plan of epoch 1 is open"):
        pool.plan_compaction()
    with pytest.raises(CompactionRefused, match="the compaction plan of epoch 1 is open"):
        pool.defragment()
    with pytest.raises(CompactionRefused, match=r"no compaction plan of epoch 7 \(the open one has 1\)"):
        pool.close_plan(7)
    pool.close_plan(plan.epoch)
    assert pool.defragment() == 1


def test_room_of_a_plan_is_given_to_nobody_else() -> None:
    pool, _ = pool_with_holes([100, 50, 100], [0, 2])
    plan = planned(pool, 200)
    assert not pool.allocate(AllocationRequest("t", 1, 1), 0.0).success
    assert pool.stats().free_bytes == 200
    pool.commit_move(plan.epoch, 0)
    assert offset_of(pool, allocated(pool, 200)) == 0


# --- changes while a plan is open -------------------------------------------------------------------------------------


def test_move_of_a_freed_block_is_dropped_and_the_next_one_waits_for_what_it_waited_for() -> None:
    pool, ids = pool_with_holes([10, 50, 5, 50], [0])
    plan = planned(pool)
    pool.free(ids[2])
    pool.validate()
    # The third one would be written over the first one, which has not moved.
    assert [(move.number, move.after) for move in pool.open_moves()] == [(0, -1), (2, 0)]
    with pytest.raises(CompactionRefused, match="cannot be committed before move 0"):
        pool.commit_move(plan.epoch, 2)
    pool.commit_move(plan.epoch, 0)
    pool.commit_move(plan.epoch, 2)
    assert layout(pool) == [(0, 50, False), (50, 5, True), (55, 50, False), (105, 10, True)]


def test_plan_ends_when_its_last_block_is_freed() -> None:
    pool, ids = pool_with_holes([10, 50], [0])
    planned(pool)
    pool.free(ids[1])
    assert layout(pool) == [(0, 60, True)]
    assert pool.open_moves() == []


def test_moving_block_is_neither_pinned_nor_evicted() -> None:
    pool = pool_of(200)
    first = allocated(pool, 50)
    moving = cached(pool, 50)
    pool.free(first)
    plan = planned(pool)
    with pytest.raises(StatusRefused, match="block 'block-2' is being moved; it cannot be pinned"):
        pool.pin(moving)
    assert pool.evict(10) == 0
    pool.commit_move(plan.epoch, 0)
    assert pool.evict(10) == 50
