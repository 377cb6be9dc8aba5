"""Which blocks to move so that free memory lies together.

Invariants:
- Pinned blocks are barriers: they are not moved, and no block is slid past one.
- Every destination is a multiple of the alignment that its block was allocated with.
- The moves of a plan can be committed in their order; each waits for at most one other one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest
from itertools import pairwise

from forged.memory import errors
from forged.memory.functions import fits
from forged.memory.model import BlockStatus
from forged.memory.pool.blocks import Block
from forged.memory.pool.core import PoolCore
from forged.memory.pool.moves import NO_MOVE, BlockMove, MovePlan
from forged.memory.pool.windows import windows

TRIES = 8
"""So many of the cheapest places are tried for a hole, in each of two ways."""

Relocation = tuple[Block, int]
"""A block, and the offset where it goes."""


def plan_compaction(
    core: PoolCore, *, bytes_max: int | None = None, moves_max: int | None = None, overlaps: bool = True
) -> MovePlan:
    """Slide all blocks down between the barriers, within the bounds: first where most is won.

    Without `overlaps` no block is moved by less than its size, so that its source stays valid until its move is
    committed.
    """
    segments = sorted(_segments(core), key=_gain, reverse=True)
    chosen: list[Relocation] = []
    budget = _Budget(bytes_max, moves_max)
    for segment in segments:
        for block, destination in _slid(segment, overlaps=overlaps):
            if not budget.takes(block):
                break
            chosen.append((block, destination))
    return _plan(core, chosen, None, is_slide=True)


def plan_hole(
    core: PoolCore,
    size: int,
    alignment: int,
    *,
    bytes_max: int | None = None,
    moves_max: int | None = None,
    overlaps: bool = True,
) -> MovePlan | None:
    """The cheapest moves found that open a hole for a block, all within the bounds; None if none are found.

    Either the blocks of a window move into holes elsewhere, or neighbouring blocks slide together. Nothing moves if the
    block fits already.
    """
    needed, alignment = core.needed(size, alignment)
    hole = core.holes.best_fit(needed, alignment)
    if hole is not None:
        return _plan(core, [], ((hole.offset + alignment - 1) & -alignment, needed))
    ways = (
        (False, _evacuations(core, needed, alignment)),
        (True, _joins(core, needed, alignment, overlaps=overlaps)),
    )
    found = [
        (sum(block.size for block, _ in moved), len(moved), is_slide, offset, moved)
        for is_slide, way in ways
        for moved, offset in way
        if _Budget(bytes_max, moves_max).takes_all(moved)
    ]
    if not found:
        return None
    _, _, is_slide, offset, moved = min(found, key=lambda one: one[:4])
    return _plan(core, moved, (offset, needed), is_slide=is_slide)


def defragment(core: PoolCore) -> int:
    """Plan and commit at once; returns how many blocks have moved."""
    if core.plan is not None:
        raise errors.plan_open(core.plan.epoch)
    plan = core.open_plan(plan_compaction(core))
    for move in plan.moves:
        core.commit_move(plan.epoch, move.number)
    return len(plan.moves)


def largest_hole(core: PoolCore, *, evicting: bool) -> int:
    """The largest hole after sliding all blocks together, and `evicting` after eviction too; but for alignment."""
    if not core.pinned_count:
        return core.free_bytes + (core.cached_bytes if evicting else 0)
    return max((_room(segment, evicting=evicting) for segment in _segments(core)), default=0)


class _Budget:
    """The bytes and moves that a plan may have."""

    def __init__(self, bytes_max: int | None, moves_max: int | None) -> None:
        self._bytes_max = bytes_max
        self._moves_max = moves_max
        self._bytes = self._moves = 0

    def takes(self, block: Block) -> bool:
        """Count one more block, if it is within the bounds."""
        is_within = (self._bytes_max is None or self._bytes + block.size <= self._bytes_max) and (
            self._moves_max is None or self._moves < self._moves_max
        )
        if is_within:
            self._bytes += block.size
            self._moves += 1
        return is_within

    def takes_all(self, moved: Iterable[Relocation]) -> bool:
        return all(self.takes(block) for block, _ in moved)


# Sliding.


def _is_barrier(block: Block) -> bool:
    return block.status is BlockStatus.PINNED


def _segments(core: PoolCore) -> Iterator[list[Block]]:
    """The blocks between barriers, free ones too."""
    segment: list[Block] = []
    for block in core.stretches():
        if not _is_barrier(block):
            segment.append(block)
        elif segment:
            yield segment
            segment = []
    if segment:
        yield segment


def _room(segment: Sequence[Block], *, evicting: bool) -> int:
    gone = (BlockStatus.FREE, BlockStatus.CACHED) if evicting else (BlockStatus.FREE,)
    return sum(block.size for block in segment if block.status in gone)


def _gain(segment: Sequence[Block]) -> int:
    holes = [block.size for block in segment if block.is_hole]
    return sum(holes) - max(holes, default=0)


def _slid(segment: Sequence[Block], *, overlaps: bool) -> Iterator[Relocation]:
    """The blocks that move if all go to the lowest offsets that they can have in the same order."""
    free_from = segment[0].offset
    for block in segment:
        if block.is_hole:
            continue
        destination = (free_from + block.alignment - 1) & -block.alignment
        if destination < block.offset and (overlaps or destination + block.size <= block.offset):
            yield block, destination
            free_from = destination + block.size
        else:
            free_from = block.end


def _joins(core: PoolCore, needed: int, alignment: int, *, overlaps: bool) -> Iterator[tuple[list[Relocation], int]]:
    """Neighbouring holes become one, because the blocks between them slide down."""
    found = (one for segment in _segments(core) for one in _rows_of_holes(segment, needed))
    for _, _, row in nsmallest(TRIES, found, key=lambda one: one[:2]):
        moved = list(_slid(row, overlaps=overlaps))
        begin = moved[-1][1] + moved[-1][0].size if moved else row[0].offset
        if moved and moved[-1][0] is row[-2] and fits(begin, row[-1].end - begin, needed, alignment):
            yield moved, (begin + alignment - 1) & -alignment


def _rows_of_holes(segment: Sequence[Block], needed: int) -> Iterator[tuple[int, int, Sequence[Block]]]:
    """From each hole on the shortest row of blocks, up to another hole, whose holes suffice; with the bytes to move."""
    places = [at for at, block in enumerate(segment) if block.is_hole]
    free = 0
    first = 0
    for last, place in enumerate(places):
        free += segment[place].size
        while free - segment[places[first]].size >= needed:
            free -= segment[places[first]].size
            first += 1
        if free >= needed and first < last:
            row = segment[places[first] : place + 1]
            yield row[-1].end - row[0].offset - free, row[0].offset, row


# Moving into other holes.


def _evacuations(core: PoolCore, needed: int, alignment: int) -> Iterator[tuple[list[Relocation], int]]:
    """All blocks of a window move into holes outside of it."""
    blocks = list(core.stretches())

    def weigh(block: Block) -> int | None:
        return None if _is_barrier(block) else 0 if block.is_hole else block.size

    holes = sorted((block.size, block.offset) for block in blocks if block.is_hole)
    for window in nsmallest(TRIES, windows(blocks, needed, alignment, weigh)):
        _, first, last, begin = window
        moved = _rehoused(blocks[first:last], holes, begin, begin + needed)
        if moved is not None:
            yield moved, begin


def _rehoused(
    blocks: Sequence[Block], holes: Sequence[tuple[int, int]], begin: int, end: int
) -> list[Relocation] | None:
    """Where the blocks go, the largest first, each into the smallest hole outside of a window, or None."""
    outside: list[tuple[int, int]] = []
    for size, offset in holes:
        # A hole that the window cuts gives what is outside.
        if offset < begin:
            insort(outside, (min(size, begin - offset), offset))
        if offset + size > end:
            insort(outside, (min(size, offset + size - end), max(offset, end)))
    found: list[Relocation] = []
    inside = [block for block in blocks if not block.is_hole]
    for block in sorted(inside, key=lambda one: (-one.size, one.offset)):
        destination = _housed(block, outside)
        if destination is None:
            return None
        found.append((block, destination))
    return found


def _housed(block: Block, holes: list[tuple[int, int]]) -> int | None:
    """The place of a block in the smallest hole that fits, whose rest remains."""
    for at in range(bisect_left(holes, (block.size, 0)), len(holes)):
        size, offset = holes[at]
        if fits(offset, size, block.size, block.alignment):
            del holes[at]
            destination = (offset + block.alignment - 1) & -block.alignment
            for begin, end in ((offset, destination), (destination + block.size, offset + size)):
                if begin < end:
                    insort(holes, (end - begin, begin))
            return destination
    return None


# The plan.


def _plan(
    core: PoolCore, moved: Sequence[Relocation], hole: tuple[int, int] | None, *, is_slide: bool = False
) -> MovePlan:
    moves = []
    for number, (block, destination) in enumerate(moved):
        earlier = moved[number - 1][0] if number else None
        # A slid block may go to where any block before it was, and those wait for each other in turn.
        waits = is_slide and earlier is not None and earlier.offset < block.offset and destination < earlier.end
        after = number - 1 if waits else NO_MOVE
        moves.append(BlockMove(number, block.block_id, block.version, block.offset, destination, block.size, after))
    return MovePlan(0, tuple(moves), sum(move.size for move in moves), _opened(core, moved), hole)


def _opened(core: PoolCore, moved: Sequence[Relocation]) -> int:
    """The largest hole after the moves."""
    if not moved:
        return core.holes.largest_size()
    destinations = {block.block_id: destination for block, destination in moved}
    used = [
        (destinations.get(block.block_id, block.offset), block.size)
        for block in core.stretches()
        if block.status is not BlockStatus.FREE
    ]
    ends = [(0, 0), *sorted(used), (core.total, 0)]
    return max(after - offset - size for (offset, size), (after, _) in pairwise(ends))
