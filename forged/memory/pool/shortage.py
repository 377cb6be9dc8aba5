"""Why a block does not fit, and the smallest change that would make it fit.

Invariants:
- The work is bounded: only the blocks around a few of the largest holes are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from forged.memory.model import BlockStatus
from forged.memory.pool.blocks import Block
from forged.memory.pool.compaction import largest_hole
from forged.memory.pool.core import PoolCore
from forged.memory.pool.windows import windows

PLACES = 8
"""Around so many places the blocking blocks are looked for."""
NEIGHBOURS_MAX = 64
"""So many blocks on each side of a place are looked at."""
BLOCKING_MAX = 20
NAMED_MAX = 3


class MissingRoom(NamedTuple):
    """What there is instead of the room for a block."""

    needed: int
    total_free: int
    largest_hole: int
    evictable_bytes: int
    largest_obtainable: int
    """The largest hole after eviction and compaction."""
    blocking: list[Block]
    """The blocks in the way of the cheapest hole that can neither be evicted; at most `BLOCKING_MAX`."""
    fix: str

    @property
    def reason(self) -> str:
        return (
            f"no room for {self.needed} bytes: {self.total_free} are free, {self.largest_hole} of them together, "
            f"{self.evictable_bytes} can be evicted"
        )


def missing_room(core: PoolCore, size: int, alignment: int, name_of: Callable[[Block], str]) -> MissingRoom:
    """What is known of a request that does not fit; `name_of` names a block in the fix."""
    needed, alignment = core.needed(size, alignment)
    blocking, can_evict = _blocking(core, needed, alignment)
    obtainable = largest_hole(core, evicting=True)
    if can_evict:
        fix = "evict cached blocks, as make_room does"
    elif largest_hole(core, evicting=False) >= needed:
        fix = "compact the pool"
    elif obtainable >= needed:
        fix = "evict cached blocks and compact the pool"
    else:
        fix = _smallest_change(blocking, obtainable, name_of)
    found = core.free_bytes, core.holes.largest_size(), core.cached_bytes, obtainable
    return MissingRoom(needed, *found, blocking[:BLOCKING_MAX], fix)


def _smallest_change(blocking: list[Block], obtainable: int, name_of: Callable[[Block], str]) -> str:
    less = f"ask for at most {obtainable} bytes" if obtainable else "ask for it on another device"
    if not blocking:
        return less
    names = ", ".join(name_of(block) for block in blocking[:NAMED_MAX])
    more = f" and {len(blocking) - NAMED_MAX} more" if len(blocking) > NAMED_MAX else ""
    return f"free or cache {names}{more} ({sum(block.size for block in blocking)} bytes), or {less}"


def _blocking(core: PoolCore, needed: int, alignment: int) -> tuple[list[Block], bool]:
    """The blocks that stand in the way of the cheapest hole, and whether eviction alone opens one."""
    best: tuple[int, list[Block]] | None = None
    for place in _places(core):
        blocks = _around(place, needed + alignment)
        window = min(windows(blocks, needed, alignment, _in_the_way, improving=True), default=None)
        if window is not None and (best is None or window[0] < best[0]):
            best = window[0], blocks[window[1] : window[2]]
    if best is None:
        return [], False
    return [block for block in best[1] if _in_the_way(block)], best[0] == 0


def _in_the_way(block: Block) -> int:
    is_evictable = block.status is BlockStatus.CACHED and block.move is None
    return 0 if block.is_hole or is_evictable else block.size


def _places(core: PoolCore) -> Iterator[Block]:
    """The largest holes, and the blocks that are evicted first."""
    yield from islice(core.holes.largest_first(), PLACES)
    yield from islice(core.least_recent(), PLACES)
    yield from islice(core.stretches(), 1)


def _around(place: Block, reach: int) -> list[Block]:
    """The neighbours on both sides, as far as room with this place can go."""
    block, before = place.before, list[Block]()
    while block.size and place.offset - block.end < reach and len(before) < NEIGHBOURS_MAX:
        before.append(block)
        block = block.before
    block, after = place.after, list[Block]()
    while block.size and block.offset - place.end < reach and len(after) < NEIGHBOURS_MAX:
        after.append(block)
        block = block.after
    return [*reversed(before), place, *after]
