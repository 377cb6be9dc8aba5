"""Which cached blocks give way so that a block fits.

Invariants:
- Nothing is chosen that is not part of the hole that is needed; if there can be no such hole, nothing is.
- With the policy `lru` the hole is within the first one that eviction in the order of last use would open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import islice
from typing import NamedTuple

from forged.memory.errors import argument_invalid
from forged.memory.functions import fits
from forged.memory.model import BlockStatus
from forged.memory.pool.blocks import Block
from forged.memory.pool.core import PoolCore
from forged.memory.pool.windows import windows

LRU, COST = POLICIES = ("lru", "cost")
RECENCY_MAX = 10
"""How much more the most recently used block costs than the least recently used one."""
PRIORITY_MAX = 8
"""A step of priority doubles the cost, up to so many steps."""
SAVED_SHARE = 0.01
"""The share of the cost that is left if a checkpoint has the content."""
_COST_UNITS = 1000
_RECENCY_UNITS = _COST_UNITS * (RECENCY_MAX - 1)


class RoomPlan(NamedTuple):
    """The blocks that would give way, in the order of offsets, and where the room would be."""

    victims: list[Block]
    offset: int


def find_room(
    core: PoolCore,
    size: int,
    alignment: int,
    policy: str = LRU,
    is_saved: Callable[[str], bool] = bool,
    blocks_max: int | None = None,
) -> RoomPlan | None:
    """How room for a block can be made by eviction, or None; changes nothing.

    The policy `lru` marks at most the first `blocks_max` blocks in the order of eviction. `is_saved` says whether the
    checkpoint that has a block's content can be restored, by the name that its owner gave.
    """
    if policy not in POLICIES:
        raise argument_invalid("policy", policy, f"one of {', '.join(POLICIES)}")
    needed, alignment = core.needed(size, alignment)
    hole = core.holes.best_fit(needed, alignment)
    if hole is not None:
        return RoomPlan([], (hole.offset + alignment - 1) & -alignment)
    if policy == LRU:
        return _room_by_last_use(core, needed, alignment, blocks_max)
    return _cheapest(list(core.stretches()), needed, alignment, _cost_of(core, is_saved))


def make_room(core: PoolCore, size: int, alignment: int, policy: str = LRU) -> RoomPlan | None:
    """Evict as `find_room` says; afterwards a block of this size fits."""
    plan = find_room(core, size, alignment, policy)
    if plan is not None:
        core.evict_blocks(plan.victims)
    return plan


def eviction_order(core: PoolCore, policy: str, is_saved: Callable[[str], bool]) -> Iterable[Block]:
    """The blocks that may be evicted: the least recently used first, or the one that costs least for each byte."""
    if policy == LRU:
        return core.least_recent()
    return sorted(core.least_recent(), key=_price_of(core, is_saved))


def _room_by_last_use(core: PoolCore, needed: int, alignment: int, blocks_max: int | None) -> RoomPlan | None:
    """Mark blocks in the order of eviction until one run of marked blocks and holes suffices; then trim that run."""
    first_of: dict[int, Block] = {}
    last_of: dict[int, Block] = {}
    # Runs never touch: a run has the holes beside it, and marking a block joins it with the runs on both sides.
    for block in islice(core.least_recent(), blocks_max):
        first = first_of.pop(block.offset, None) or (block.before if block.before.is_hole else block)
        last = last_of.pop(block.end, None) or (block.after if block.after.is_hole else block)
        first_of[last.end] = first
        last_of[first.offset] = last
        if fits(first.offset, last.end - first.offset, needed, alignment):
            run = [first]
            while run[-1] is not last:
                run.append(run[-1].after)
            return _cheapest(run, needed, alignment, lambda one: 0 if one.is_hole else one.size)
    return None


def _cheapest(
    blocks: list[Block], needed: int, alignment: int, weigh: Callable[[Block], int | None]
) -> RoomPlan | None:
    best = min(windows(blocks, needed, alignment, weigh, improving=True), default=None)
    if best is None:
        return None
    _, first, last, offset = best
    return RoomPlan([one for one in blocks[first:last] if not one.is_hole], offset)


def _cost_of(core: PoolCore, is_saved: Callable[[str], bool]) -> Callable[[Block], int | None]:
    """What the eviction of a block costs; None if it cannot be evicted."""
    price, cached = _price_of(core, is_saved), BlockStatus.CACHED

    def cost(block: Block) -> int | None:
        if block.status is cached and block.move is None:
            return block.size * price(block) + 1
        return None if block.free_list is None else 0

    return cost


def _price_of(core: PoolCore, is_saved: Callable[[str], bool]) -> Callable[[Block], int]:
    """What the eviction of each byte of a cached block costs."""
    oldest, newest = core.uses_of_cached()
    span = (newest - oldest) or 1.0
    has_copy = cache(is_saved)

    def price(block: Block) -> int:
        factor = _COST_UNITS + _RECENCY_UNITS * ((block.last_accessed - oldest) / span)
        if block.priority:
            factor *= 2.0 ** min(max(block.priority, -PRIORITY_MAX), PRIORITY_MAX)
        if block.reload_s is not None:
            factor *= block.reload_s
        if block.content and has_copy(block.content):
            factor *= SAVED_SHARE
        # Integers, so that sums over windows do not depend on where they begin.
        return int(factor)

    return price
