"""A compaction plan: which blocks are copied to where.

Invariants:
- Destinations are disjoint, and free by the time that the move in `after` is committed.
- A plan changes nothing until it is opened, and each block stays where it is until its move is committed.
"""

from __future__ import annotations

import msgspec

NO_MOVE = -1


class BlockMove(msgspec.Struct, frozen=True, gc=False):
    """One block that is to be copied."""

    number: int
    block_id: str
    version: int
    source: int
    destination: int
    size: int
    after: int = NO_MOVE
    """The number of the move that must be committed before this copy begins."""

    @property
    def overlaps(self) -> bool:
        """Whether the copy writes over its own source: once begun, it must be finished."""
        return abs(self.source - self.destination) < self.size


class MovePlan(msgspec.Struct, frozen=True, gc=False):
    """Moves, and the hole that they open."""

    epoch: int
    moves: tuple[BlockMove, ...]
    bytes: int
    """That are copied."""
    opens: int
    """The largest hole after all moves."""
    hole: tuple[int, int] | None = None
    """The offset and the size of the hole that was asked for."""

    def of_epoch(self, epoch: int) -> MovePlan:
        return msgspec.structs.replace(self, epoch=epoch)

    def regions(self) -> list[tuple[int, int]]:
        """The stretches that are kept from allocations meanwhile: their offsets and ends, ascending."""
        found = [(move.destination, move.destination + move.size) for move in self.moves]
        if self.hole is not None:
            found.append((self.hole[0], sum(self.hole)))
        return sorted(found)
