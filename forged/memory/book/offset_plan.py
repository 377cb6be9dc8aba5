"""The offsets that the owner of a device has planned for its blocks.

Invariants:
- A block that the plan foresees gets its place if that is free. All others stay above the plan while there is room.
- The work for each block does not grow with the number of blocks, planned or held.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from forged.memory.functions import align_up
from forged.memory.messages import OffsetPlanView
from forged.memory.model import ALIGNMENT_DEFAULT, AllocationRequest, PlannedBlock
from forged.memory.pool.blocks import Block
from forged.memory.pool.core import PoolCore

HOLES_MAX = STEPS_MAX = 64
"""So many holes are looked at for a place above the plan, and so many neighbours for a planned place."""


class Place(NamedTuple):
    """Where a block goes: an offset within a hole."""

    hole: Block
    offset: int


@dataclass(eq=False, slots=True)
class OffsetPlan:
    """The planned offset and size of each block, by its id."""

    height: int = 0
    """The highest end of a planned block."""
    placed: int = 0
    """How many blocks got their planned offsets."""
    missed: int = 0
    """How many planned blocks went elsewhere: larger than planned, or their place was taken."""
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    _live: list[tuple[int, str]] = field(default_factory=list)
    """The offsets and ids of blocks that got their places, in order; some of them may be gone."""

    def add(self, block_ids: Iterable[str], blocks: Iterable[PlannedBlock]) -> None:
        for block_id, block in zip(block_ids, blocks, strict=True):
            self.places[block_id] = block.offset, block.size
            self.height = max(self.height, block.offset + block.size)

    def view(self) -> OffsetPlanView:
        return OffsetPlanView(len(self.places), self.height, self.placed, self.missed)

    def place(self, core: PoolCore, block_id: str, request: AllocationRequest) -> Place | None:
        """Where the block goes: its planned place, else one above the plan; None if both are taken."""
        needed, alignment = core.needed(request.size, request.alignment)
        planned = self.places.get(block_id)
        if planned is not None:
            offset, size = planned
            if request.size <= size and not offset & (alignment - 1):
                hole = core.hole_at(offset, needed, self._live_before(core, offset), STEPS_MAX)
                if hole is not None:
                    return Place(hole, offset)
        # The highest planned block is rounded up to its alignment too.
        above = align_up(self.height, ALIGNMENT_DEFAULT)
        for hole in islice(core.holes.from_size(needed), HOLES_MAX):
            offset = align_up(max(hole.offset, above), alignment)
            if offset + needed <= hole.end:
                return Place(hole, offset)
        return None

    def note(self, block: Block) -> None:
        """A block was entered."""
        planned = self.places.get(block.block_id)
        if planned is None:
            return
        if planned[0] != block.offset:
            self.missed += 1
            return
        self.placed += 1
        entry = block.offset, block.block_id
        at = bisect_left(self._live, entry)
        if self._live[at : at + 1] != [entry]:
            self._live.insert(at, entry)

    def _live_before(self, core: PoolCore, offset: int) -> str:
        """The id of the last planned block in its place below an offset; empty if there is none."""
        at = bisect_left(self._live, (offset, ""))
        while at:
            at -= 1
            where, block_id = self._live[at]
            block = core.find(block_id)
            if block is not None and block.offset == where:
                return block_id
            del self._live[at]
        return ""
