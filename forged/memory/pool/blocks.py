"""A stretch of memory within a pool, linked to its neighbours.

Invariants:
- Only the pool's core changes it; what leaves the pool is a `MemoryBlock`.
"""

from __future__ import annotations

import msgspec

from forged.memory.model import BlockStatus, MemoryBlock


class SizeList(msgspec.Struct, eq=False):
    """The holes of similar sizes, in the order of size, then offset."""

    number: int
    bit: int
    """The one of this number in the bitmap."""
    keys: list[int]
    """Bisection compares integers much faster than tuples or blocks."""
    holes: list[Block]
    """Each at the place of its key."""


class Block(msgspec.Struct, eq=False):
    """A stretch of memory between two others; the first and the last one of a pool are empty and pinned."""

    offset: int
    size: int
    before: Block
    after: Block
    free_list: SizeList | None = None
    """Where it is if it is a hole; what is free and no hole is kept for the moves of a compaction."""
    status: BlockStatus = BlockStatus.FREE
    move: int | None = None
    """The number of its open move."""
    block_id: str = ""
    tensor_id: str | None = None
    allocated_at: float = 0.0
    last_accessed: float = 0.0
    priority: int = 0
    alignment: int = 1
    version: int = 1
    """It grows when the block moves."""
    owner: str = ""
    content: str = ""
    """The checkpoint that has the content, if one has."""
    reload_s: float | None = None
    """What it takes to bring the content back, by the owner's estimate."""
    key: int = 0
    """Of a hole: its size and offset in one integer, as its free list has it."""

    def __repr__(self) -> str:
        # That of a struct would show all blocks of the pool, each with its neighbours.
        return f"Block({self.block_id!r}, offset={self.offset}, size={self.size}, status={str(self.status)!r})"

    @property
    def is_hole(self) -> bool:
        return self.free_list is not None

    @property
    def end(self) -> int:
        return self.offset + self.size

    def as_value(self) -> MemoryBlock:
        return MemoryBlock(
            self.block_id or f"free@{self.offset}",
            self.offset,
            self.size,
            self.status,
            self.tensor_id,
            self.allocated_at,
            self.last_accessed,
            self.priority,
        )
