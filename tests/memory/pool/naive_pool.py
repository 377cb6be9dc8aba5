"""A memory pool as its definition says: a list of blocks, looked at from one end to the other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forged.memory import AllocationRequest, BlockStatus, MemoryBlock, align_up

FREE, ALLOCATED, PINNED, CACHED = BlockStatus


@dataclass(frozen=True)
class NaiveBlock:
    offset: int
    size: int
    status: BlockStatus = FREE
    block_id: str = ""
    tensor_id: str = ""
    last_accessed: float = 0.0
    priority: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.size


def shown(block: MemoryBlock) -> NaiveBlock:
    name = "" if block.status is FREE else block.block_id
    return NaiveBlock(
        block.offset, block.size, block.status, name, block.tensor_id or "", block.last_accessed, block.priority
    )


class NaivePool:
    def __init__(self, total: int) -> None:
        self.total = total
        self.used: list[NaiveBlock] = []

    def blocks(self) -> list[NaiveBlock]:
        """All blocks by offset, with the free ones between them."""
        found: list[NaiveBlock] = []
        at = 0
        for block in sorted(self.used, key=lambda one: one.offset):
            if at < block.offset:
                found.append(NaiveBlock(at, block.offset - at))
            found.append(block)
            at = block.end
        return [*found, NaiveBlock(at, self.total - at)] if at < self.total else found

    def free_blocks(self) -> list[NaiveBlock]:
        return [block for block in self.blocks() if block.status is FREE]

    def allocate(self, request: AllocationRequest, now: float, block_id: str) -> int | None:
        """The offset of the new block, or None."""
        size = align_up(request.size, request.alignment)
        fitting = [
            (hole.size, start)
            for hole in self.free_blocks()
            if (start := align_up(hole.offset, request.alignment)) + size <= hole.end
        ]
        if not fitting:
            return None
        offset = min(fitting)[1]
        status = PINNED if request.pinned else ALLOCATED
        self.used.append(NaiveBlock(offset, size, status, block_id, request.tensor_id, now, request.priority))
        return offset

    def find(self, block_id: str) -> NaiveBlock | None:
        return next((block for block in self.used if block.block_id == block_id), None)

    def free(self, block_id: str) -> None:
        self.used = [block for block in self.used if block.block_id != block_id]

    def change(self, block_id: str, **values: object) -> None:
        self.used = [replace(one, **values) if one.block_id == block_id else one for one in self.used]  # type: ignore[arg-type]

    def eviction_order(self) -> list[NaiveBlock]:
        cached = [block for block in self.used if block.status is CACHED]
        return sorted(cached, key=lambda one: (one.last_accessed, one.priority, one.offset))

    def room_after(self, gone: set[str], size: int, alignment: int) -> bool:
        """Whether a block fits once these are free."""
        rest = NaivePool(self.total)
        rest.used = [block for block in self.used if block.block_id not in gone]
        needed = align_up(size, alignment)
        return any(align_up(hole.offset, alignment) + needed <= hole.end for hole in rest.free_blocks())

    def compact(self, alignments: dict[str, int]) -> int:
        """Slide all blocks down between pinned ones; returns how many have moved."""
        at = moved = 0
        for block in sorted(self.used, key=lambda one: one.offset):
            offset = block.offset if block.status is PINNED else align_up(at, alignments[block.block_id])
            moved += offset != block.offset
            self.change(block.block_id, offset=offset)
            at = offset + block.size
        return moved
