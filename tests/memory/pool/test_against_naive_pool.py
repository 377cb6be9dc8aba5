"""The pool against its definition, after every operation of random histories; its invariants hold all the time."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forged.memory import AllocationRequest, BlockStatus, GpuDevice, MemoryPool, MemoryRefused, MovePlan, align_up
from tests.memory.pool.naive_pool import NaivePool, shown
from tests.sweeps import WHOLE

FREE, ALLOCATED, PINNED, CACHED = BlockStatus
ALIGNMENTS = [1, 1, 2, 8, 64]
sizes = st.integers(1, 40) | st.sampled_from([64, 100, 200])
places = st.integers(0, 60)


class Histories(RuleBasedStateMachine):
    """The same operations on the pool and on its definition."""

    @initialize(total=st.sampled_from([1, 64, 300, 1000, 2**63 + 300]))
    def start(self, total: int) -> None:
        self.pool = MemoryPool(GpuDevice("gpu0", total))
        self.naive = NaivePool(total)
        self.alignments: dict[str, int] = {}
        self.plan: MovePlan | None = None
        self.now = 0.0
        if total > 2**62:
            # Most of it is in use, so that the rest is as crowded as that of a small device.
            self.allocate(2**63, 1, pinned=True, priority=0)

    def known(self, place: int) -> str:
        """One of the blocks, or an id that is none."""
        names = [block.block_id for block in self.naive.used]
        return names[place % len(names)] if names else "nothing"

    def plan_is_open(self) -> bool:
        return self.plan is not None

    @rule(size=sizes, alignment=st.sampled_from(ALIGNMENTS), pinned=st.booleans(), priority=st.integers(-1, 1))
    def allocate(self, size: int, alignment: int, pinned: bool, priority: int) -> None:
        request = AllocationRequest(f"t{size % 3}", size, alignment, pinned and size % 4 == 0, priority)
        result = self.pool.allocate(request, self.now)
        if align_up(size, alignment) > self.naive.total:
            assert not result.success
        elif self.plan is None or result.success:
            # While a plan is open, the room that it keeps cannot be allocated.
            assert self.plan is not None or result.success == self.naive.room_after(set(), size, alignment)
            if result.success:
                assert result.block_id is not None
                expected = self.naive.allocate(request, self.now, result.block_id)
                assert expected is not None
                if self.plan is not None:
                    self.naive.change(result.block_id, offset=result.offset)
                    expected = result.offset
                assert (result.offset, result.actual_size) == (expected, align_up(size, alignment))
                self.alignments[result.block_id] = alignment

    @rule(place=places)
    def free(self, place: int) -> None:
        block_id = self.known(place)
        if self.naive.find(block_id) is None:
            with pytest.raises(MemoryRefused):
                self.pool.free(block_id)
        else:
            self.pool.free(block_id)
            self.naive.free(block_id)

    @rule(place=places, change=st.sampled_from(["mark_cached", "mark_cached", "pin", "unpin", "use"]))
    def change_status(self, place: int, change: str) -> None:
        block_id = self.known(place)
        block = self.naive.find(block_id)
        status = None if block is None else block.status
        refused = {"mark_cached": PINNED, "unpin": CACHED}.get(change, FREE)
        is_moving = change == "pin" and self.plan is not None and block_id in self.moving()
        try:
            getattr(self.pool, change)(block_id)
        except MemoryRefused:
            assert status in (None, refused) or is_moving
        else:
            assert status not in (None, refused)
            following = {"mark_cached": CACHED, "pin": PINNED}.get(change, ALLOCATED)
            self.naive.change(block_id, status=PINNED if (change, status) == ("use", PINNED) else following)

    @rule(place=places, later=st.sampled_from([-1.0, 0.0, 1.0]))
    def touch(self, place: int, later: float) -> None:
        block = self.naive.find(self.known(place))
        if block is not None:
            self.now += max(later, 0.0)
            self.pool.touch(block.block_id, self.now + later)
            self.naive.change(block.block_id, last_accessed=max(block.last_accessed, self.now + later))

    def moving(self) -> set[str]:
        return set() if self.plan is None else {move.block_id for move in self.pool.open_moves()}

    @rule(needed=st.integers(0, 300))
    def evict(self, needed: int) -> None:
        moving = self.moving()
        gone, found = [], 0
        for block in self.naive.eviction_order():
            if found < needed and block.block_id not in moving:
                gone.append(block.block_id)
                found += block.size
        assert self.pool.evict(needed) == found
        for block_id in gone:
            self.naive.free(block_id)

    @precondition(lambda self: not self.plan_is_open())
    @rule(size=sizes, alignment=st.sampled_from(ALIGNMENTS), policy=st.sampled_from(["lru", "lru", "cost"]))
    def make_room(self, size: int, alignment: int, policy: str) -> None:
        evicted, hole = self.pool.make_room(size, alignment, policy=policy)
        order = [block.block_id for block in self.naive.eviction_order()]
        gone = {block.block_id for block in evicted}
        can_fit = self.naive.room_after(set(order), size, alignment) and align_up(size, alignment) <= self.naive.total
        assert (hole is not None) == can_fit
        assert can_fit or not gone
        if hole is None:
            return
        assert gone <= set(order)
        assert self.naive.room_after(gone, size, alignment)
        if policy == "lru":
            # All are among those that eviction in that order would need, and each one is needed.
            least = next(n for n in range(len(order) + 1) if self.naive.room_after(set(order[:n]), size, alignment))
            assert gone <= set(order[:least])
        for block_id in gone:
            assert not self.naive.room_after(gone - {block_id}, size, alignment)
            self.naive.free(block_id)
        assert hole.size >= align_up(size, alignment)

    @precondition(lambda self: not self.plan_is_open())
    @rule()
    def defragment(self) -> None:
        assert self.pool.defragment() == self.naive.compact(self.alignments)

    @precondition(lambda self: not self.plan_is_open())
    @rule(
        hole=st.none() | sizes,
        alignment=st.sampled_from(ALIGNMENTS),
        moves_max=st.sampled_from([None, 1, 3]),
        overlaps=st.booleans(),
    )
    def plan_compaction(self, hole: int | None, alignment: int, moves_max: int | None, overlaps: bool) -> None:
        if hole is not None and align_up(hole, alignment) > self.naive.total:
            return
        plan = self.pool.plan_compaction(hole, alignment, moves_max=moves_max, overlaps=overlaps)
        if plan is None:
            assert hole is not None
            assert not self.naive.room_after(set(), hole, alignment)
            return
        assert moves_max is None or len(plan.moves) <= moves_max
        assert overlaps or not any(move.overlaps for move in plan.moves)
        after = NaivePool(self.naive.total)
        after.used = list(self.naive.used)
        for move in plan.moves:
            after.change(move.block_id, offset=move.destination)
        assert plan.opens == max((one.size for one in after.free_blocks()), default=0)
        assert hole is None or after.room_after(set(), hole, alignment)
        self.plan = plan if plan.moves else None

    @precondition(plan_is_open)
    @rule(place=places)
    def commit_move(self, place: int) -> None:
        assert self.plan is not None
        move = self.plan.moves[place % len(self.plan.moves)]
        is_ready = move.number in {one.number for one in self.pool.ready_moves()}
        version = self.pool.version_of(move.block_id) if self.naive.find(move.block_id) else 0
        try:
            now = self.pool.commit_move(self.plan.epoch, move.number)
        except MemoryRefused:
            assert not is_ready
        else:
            assert is_ready
            assert now == version + 1
            self.naive.change(move.block_id, offset=move.destination)

    @precondition(plan_is_open)
    @rule()
    def close_plan(self) -> None:
        assert self.plan is not None
        self.pool.close_plan(self.plan.epoch)

    @invariant()
    def both_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.validate()
        if not self.pool.open_moves():
            self.plan = None
        ours = [shown(block) for block in self.pool.blocks()]
        if self.plan is None:
            assert ours == self.naive.blocks()
        else:
            # What the plan keeps is free, but stands for itself.
            assert [one for one in ours if one.status is not FREE] == [
                one for one in self.naive.blocks() if one.status is not FREE
            ]


# A whole sweep, as in `make soak`, has a million operations.
Histories.TestCase.settings = settings(
    max_examples=10_000 if WHOLE else 60,
    stateful_step_count=100 if WHOLE else 50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestPoolAgainstItsDefinition = Histories.TestCase
