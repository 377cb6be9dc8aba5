"""The blocks of one device: allocation, status, eviction order and moves.

Invariants:
- The blocks and the free stretches between them cover the device, each byte once; no two holes are neighbours.
- What is refused changes nothing.
- Nothing is evicted unless a caller asks for it.
- A block that is evicted and allocated again under its id has a later version than before.
- While a compaction plan is open, the room that its moves need is free, but in no free list.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from math import isfinite
from operator import index
from typing import cast

from msgspec.structs import replace

from forged.memory import errors
from forged.memory.functions import is_power_of_two, share_outside
from forged.memory.model import AllocationRequest, BlockStatus, MemoryBlock, PoolStats, checked_size, checked_time
from forged.memory.pool.blocks import Block
from forged.memory.pool.free_lists import FreeLists
from forged.memory.pool.moves import BlockMove, MovePlan

FREE, ALLOCATED, PINNED, CACHED = BlockStatus.FREE, BlockStatus.ALLOCATED, BlockStatus.PINNED, BlockStatus.CACHED
EvictionKey = tuple[float, int, int]
"""When the block was last used, its priority, its offset: the lowest one is evicted first."""


class PoolCore:
    """One device's memory. It has no clock and no lock: times are arguments, and `MemoryPool` has a lock."""

    def __init__(self, total: int, epoch: int = 0, first_version: int = 1) -> None:
        """The epochs of compaction plans are greater than `epoch`."""
        self.total = checked_size("total_memory", total)
        none = cast("Block", None)
        self._first = Block(0, 0, none, none, None, PINNED)
        self._last = Block(total, 0, self._first, none, None, PINNED)
        self._first.after = self._last
        self.holes = FreeLists(total)
        self._blocks: dict[str, Block] = {}
        self._cached: list[EvictionKey] = []
        self._cached_blocks: dict[int, Block] = {}
        self._allocated_bytes = self._pinned_bytes = self.cached_bytes = 0
        self.pinned_count = 0
        self._last_number = 0
        self.first_version = first_version
        """The version of the next block that is allocated."""
        self._epoch = epoch
        self._plan: MovePlan | None = None
        self._open_moves: dict[int, BlockMove] = {}
        self._kept: dict[int, Block] = {}
        """The free stretches that the open plan keeps, by offset."""
        if total:
            self.holes.add(self._between(self._first, self._last, 0, total))

    # Allocating and freeing.

    def allocate(
        self,
        request: AllocationRequest,
        now: float,
        block_id: str = "",
        *,
        is_cached: bool = False,
        owner: str = "",
        content: str = "",
        reload_s: float | None = None,
    ) -> Block | None:
        """Allocate the smallest hole that fits; without one None, and nothing is changed.

        A request that can never fit is refused. A pinned block is not cached.
        """
        size, alignment, tensor_id, priority = request.size, request.alignment, request.tensor_id, request.priority
        is_plain = type(size) is type(alignment) is type(priority) is int and type(tensor_id) is str
        if not is_plain or type(now) is not float:
            size, alignment, priority, now = _plain_values(request, now)
        needed = (size + alignment - 1) & -alignment
        if size <= 0 or needed > self.total or alignment <= 0 or alignment & (alignment - 1):
            self.needed(size, alignment)  # It says which.
        if not isfinite(now):
            checked_time("now", now)
        if block_id in self._blocks:
            raise errors.block_taken(block_id)
        hole = self.holes.take(needed, alignment)
        if hole is None:
            return None
        offset = hole.offset
        if offset & (alignment - 1) or hole.size == needed:
            offset = (offset + alignment - 1) & -alignment
            before, after = self._cut(hole, offset, needed)
        else:
            # The most frequent case of `_cut`: the hole loses its beginning.
            before, after = hole.before, hole
            hole.offset = offset + needed
            hole.size -= needed
            self.holes.add(hole)
        made_id = block_id or self._next_id()
        # One call with all fields, by position, takes half the time of setting them one by one.
        block = Block(
            offset, needed, before, after, None, ALLOCATED, None, made_id, tensor_id, now, now, priority, alignment,
            self.first_version, owner, content, reload_s,
        )  # fmt: skip
        before.after = after.before = block
        self._blocks[made_id] = block
        self._allocated_bytes += needed
        if request.pinned:
            self._change_status(block, PINNED)
        elif is_cached:
            self._change_status(block, CACHED)
        return block

    def claim(
        self,
        block: MemoryBlock,
        *,
        version: int = 1,
        owner: str = "",
        alignment: int = 1,
        content: str = "",
        reload_s: float | None = None,
        hole: Block | None = None,
    ) -> Block:
        """Enter a block at the offset that it has already; refused unless all of its bytes are free.

        The hole that has these bytes need not be looked for if it is given.
        """
        offset, size = checked_size("offset", block.offset), checked_size("size", block.size)
        if not size or block.status is FREE:
            raise errors.argument_invalid("block", block, "a block of at least one byte that is not free")
        checked_time("allocated_at", block.allocated_at)
        checked_time("last_accessed", block.last_accessed)
        if not is_power_of_two(alignment) or offset & (alignment - 1):
            raise errors.argument_invalid("alignment", alignment, "a power of two that the offset is a multiple of")
        if block.block_id in self._blocks:
            raise errors.block_taken(block.block_id)
        hole = hole or self._hole_around(offset, size)
        if hole is None:
            raise errors.place_taken(block.block_id, offset, size)
        made = self._carve(hole, offset, size)
        made.block_id = block.block_id or self._next_id()
        made.tensor_id = block.tensor_id
        made.allocated_at, made.last_accessed = block.allocated_at, block.last_accessed
        made.priority = block.priority
        made.alignment = alignment
        made.version = version
        made.owner = owner
        made.content = content
        made.reload_s = reload_s
        self._enter(made, block.status)
        return made

    def allocate_at(
        self,
        request: AllocationRequest,
        offset: int,
        now: float,
        block_id: str = "",
        *,
        is_cached: bool = False,
        owner: str = "",
        content: str = "",
        reload_s: float | None = None,
        hole: Block | None = None,
    ) -> Block | None:
        """Allocate at an offset, in the hole if it is given; None if some of the bytes are not free or not aligned."""
        needed, alignment = self.needed(request.size, request.alignment)
        _, _, priority, now = _plain_values(request, now)
        offset = checked_size("offset", offset)
        hole = hole or self._hole_around(offset, needed)
        if hole is None or offset & (alignment - 1):
            return None
        status = PINNED if request.pinned else CACHED if is_cached else ALLOCATED
        return self.claim(
            MemoryBlock(block_id, offset, needed, status, request.tensor_id, now, now, priority),
            version=self.first_version,
            owner=owner,
            alignment=alignment,
            content=content,
            reload_s=reload_s,
            hole=hole,
        )

    def free(self, block_id: str, version: int | None = None) -> Block:
        """Make the block's memory a hole, as one with the holes beside it."""
        block = self._blocks.get(block_id)
        if block is None or (version is not None and version != block.version):
            return self.get(block_id, version)  # It refuses.
        if block.status is not ALLOCATED:
            self._change_status(block, ALLOCATED)
        del self._blocks[block_id]
        self._allocated_bytes -= block.size
        if block.move is None:
            self._free_up(block)
        else:
            self._keep_source(block)
            self._end_move(block)
        return block

    def get(self, block_id: str, version: int | None = None) -> Block:
        """The block; refuses an unknown one, and a version that is not the present one."""
        block = self._blocks.get(block_id)
        if block is None:
            raise errors.block_unknown(block_id)
        if version is not None and version != block.version:
            raise errors.handle_stale(block_id, block.version, version)
        return block

    def find(self, block_id: str) -> Block | None:
        return self._blocks.get(block_id)

    def needed(self, size: int, alignment: int) -> tuple[int, int]:
        """The size that a block would have, and the alignment; refuses what can never fit."""
        if type(size) is not int or type(alignment) is not int:
            size, alignment = _integer("size", size), _integer("alignment", alignment)
        if alignment <= 0 or alignment & (alignment - 1):
            raise errors.argument_invalid("alignment", alignment, "a power of two")
        needed = (size + alignment - 1) & -alignment
        if size <= 0:
            raise errors.argument_invalid("size", size, "an integer >= 1")
        if needed > self.total:
            raise errors.size_beyond_device(size, self.total)
        return needed, alignment

    # Status and use.

    def mark_cached(self, block_id: str, version: int | None = None, content: str | None = None) -> Block:
        """Let the block be evicted; `content` is the checkpoint that has its content."""
        block = self.get(block_id, version)
        require_changeable(block, "cache")
        if content is not None:
            block.content = content
        self._change_status(block, CACHED)
        return block

    def pin(self, block_id: str, version: int | None = None) -> Block:
        """Let the block be neither evicted nor moved."""
        block = self.get(block_id, version)
        require_changeable(block, "pin")
        self._change_status(block, PINNED)
        return block

    def unpin(self, block_id: str, version: int | None = None) -> Block:
        """The pinned block is allocated again; an allocated one stays as it is."""
        block = self.get(block_id, version)
        require_changeable(block, "unpin")
        self._change_status(block, ALLOCATED)
        return block

    def use(self, block_id: str, version: int | None = None) -> Block:
        """The cached block is allocated again; another one stays as it is."""
        block = self.get(block_id, version)
        if block.status is CACHED:
            self._change_status(block, ALLOCATED)
        return block

    def touch(self, block_id: str, now: float, version: int | None = None) -> Block:
        """The block is used; an earlier time than that of its last use changes nothing."""
        time = checked_time("now", now)
        block = self.get(block_id, version)
        if time > block.last_accessed:
            if block.status is CACHED:
                self._forget_cached(block)
            block.last_accessed = time
            if block.status is CACHED:
                self._remember_cached(block)
        return block

    # Eviction.

    def least_recent(self) -> Iterator[Block]:
        """The blocks that may be evicted, in the order of eviction; one that is being moved may not."""
        for _, _, offset in self._cached:
            block = self._cached_blocks[offset]
            if block.move is None:
                yield block

    def uses_of_cached(self) -> tuple[float, float]:
        """When the least and the most recently used of the cached blocks were last used; 0 without any."""
        return (self._cached[0][0], self._cached[-1][0]) if self._cached else (0.0, 0.0)

    def evict(self, needed: int) -> list[Block]:
        """Free blocks in the order of eviction until they are so many bytes together, or none is left."""
        chosen, found = [], 0
        for block in self.least_recent():
            if found >= needed:
                break
            chosen.append(block)
            found += block.size
        self.evict_blocks(chosen)
        return chosen

    def evict_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.free(block.block_id)
            self.first_version = max(self.first_version, block.version + 1)

    # What there is.

    @property
    def free_bytes(self) -> int:
        return self.total - self._allocated_bytes

    @property
    def kept_bytes(self) -> int:
        """Free bytes that the open plan keeps for its moves."""
        return sum(block.size for block in self._kept.values())

    def __len__(self) -> int:
        """How many blocks are not free."""
        return len(self._blocks)

    @property
    def cached_count(self) -> int:
        return len(self._cached)

    def stretches(self, start: int = 0, near: str = "") -> Iterator[Block]:
        """All blocks by offset, free ones too, from the one that has the byte at `start` on.

        It is looked for from the nearest of the first block, the last one, and the one of the id `near`.
        """
        first, last = self._first.after, self._last.before
        block = min(first, self._blocks.get(near, first), last, key=lambda one: abs(one.offset - start))
        while block.offset > start:
            block = block.before
        while block is not self._last:
            if block.offset + block.size > start:
                yield block
            block = block.after

    def hole_at(self, offset: int, size: int, near: str, steps_max: int) -> Block | None:
        """The hole that has all of these bytes.

        It is looked for from the block of the id `near` on, which is below it, else from the first one on, among so
        many neighbours; None if it is not found.
        """
        block = self._blocks.get(near, self._first.after)
        for _ in range(steps_max):
            if block is self._last or block.offset > offset:
                return None
            if offset < block.end:
                return block if block.is_hole and offset + size <= block.end else None
            block = block.after
        return None

    def blocks_of_tensor(self, tensor_id: str | None) -> list[Block]:
        """By offset; looks at all blocks."""
        found = [block for block in self._blocks.values() if block.tensor_id == tensor_id]
        return sorted(found, key=lambda block: block.offset)

    def stats(self) -> PoolStats:
        free, largest = self.free_bytes, self.holes.largest_size()
        return PoolStats(
            self.total,
            self._allocated_bytes,
            free,
            self._pinned_bytes,
            self.cached_bytes,
            share_outside(free, largest),
            largest,
            len(self._blocks) + len(self.holes) + len(self._kept),
            len(self._blocks),
        )

    # Compaction.

    @property
    def plan(self) -> MovePlan | None:
        """The open plan."""
        return self._plan

    @property
    def open_moves(self) -> list[BlockMove]:
        """The moves of the open plan that are not committed yet."""
        return list(self._open_moves.values())

    @property
    def ready_moves(self) -> list[BlockMove]:
        """The open moves whose copies may begin: they wait for no other one."""
        return [move for move in self._open_moves.values() if move.after not in self._open_moves]

    def open_plan(self, plan: MovePlan) -> MovePlan:
        """Keep the room that the plan's moves need until all are committed or the plan is closed.

        The plan must be one for the blocks as they are; it gets its epoch here.
        """
        if self._plan is not None:
            raise errors.plan_open(self._plan.epoch)
        self._epoch += 1
        if not plan.moves:
            return plan.of_epoch(self._epoch)
        self._plan = plan.of_epoch(self._epoch)
        for move in plan.moves:
            self._open_moves[move.number] = move
            self._blocks[move.block_id].move = move.number
        self._keep(plan.regions())
        return self._plan

    def commit_move(self, epoch: int, number: int) -> Block:
        """The block has been copied: it is at its destination from now on, with a new version."""
        self._check_epoch(epoch)
        move = self._open_moves.get(number)
        if move is None:
            raise errors.move_unknown(epoch, number)
        if move.after in self._open_moves:
            raise errors.move_early(move.block_id, number, move.after)
        block = self._blocks[move.block_id]
        if block.status is CACHED:
            self._forget_cached(block)
        source = self._keep_source(block)
        piece = self._kept_from(self._kept.get(move.destination) or source, move.destination, move.size)
        self._place_again(block, piece, move.destination)
        block.version += 1
        if block.status is CACHED:
            self._remember_cached(block)
        self._end_move(block)
        return block

    def close_plan(self, epoch: int) -> list[BlockMove]:
        """End the plan; the blocks of its uncommitted moves, which are returned, stay where they are."""
        self._check_epoch(epoch)
        uncommitted = self.open_moves
        for move in uncommitted:
            self._blocks[move.block_id].move = None
        self._open_moves.clear()
        self._plan = None
        kept = list(self._kept.values())
        self._kept.clear()
        for piece in kept:
            self._free_up(piece)
        return uncommitted

    def _check_epoch(self, epoch: int) -> None:
        if self._plan is None or self._plan.epoch != epoch:
            raise errors.plan_unknown(epoch, None if self._plan is None else self._plan.epoch)

    def _end_move(self, block: Block) -> None:
        ended = self._open_moves.pop(cast("int", block.move))
        block.move = None
        follower = self._open_moves.get(ended.number + 1)
        if follower is not None and follower.after == ended.number:
            # If the ended move is not committed, because its block was freed, the one before it may still be open.
            self._open_moves[follower.number] = replace(follower, after=ended.after)
        if not self._open_moves and self._plan is not None:
            self.close_plan(self._plan.epoch)

    def _keep(self, regions: Iterable[tuple[int, int]]) -> None:
        """Take what is free within these stretches, in ascending order, out of the free lists."""
        block = self._first.after
        for start, end in regions:
            while block.end <= start:
                block = block.after
            while block.offset < end:
                if block.is_hole:
                    begin = max(start, block.offset)
                    block = self._carve(block, begin, min(end, block.end) - begin)
                    self._kept[block.offset] = block
                if block.end > end:
                    break
                block = block.after

    def _keep_source(self, block: Block) -> Block:
        """Replace a block by a free stretch that the open plan keeps."""
        kept = self._between(block.before, block.after, block.offset, block.size)
        self._kept[kept.offset] = kept
        return kept

    def _kept_from(self, piece: Block, offset: int, size: int) -> Block:
        """One stretch of all that is kept from the one that has the offset on, for so many bytes."""
        while piece.offset > offset:
            piece = piece.before
        while piece.end < offset + size:
            absorbed = piece.after
            del self._kept[absorbed.offset]
            piece.size += absorbed.size
            self._link(piece, absorbed.after)
        return piece

    def _place_again(self, block: Block, piece: Block, offset: int) -> None:
        """Put the block into a kept stretch; what is left before and behind it stays kept."""
        del self._kept[piece.offset]
        end, before, after = piece.end, piece.before, piece.after
        block.offset = offset
        if piece.offset < offset:
            before = self._between(before, after, piece.offset, offset - piece.offset)
            self._kept[before.offset] = before
        self._link(before, block)
        self._link(block, after)
        if block.end < end:
            rest = self._between(block, after, block.end, end - block.end)
            self._kept[rest.offset] = rest

    # Stretches of memory.

    def _between(self, before: Block, after: Block, offset: int, size: int) -> Block:
        block = Block(offset, size, before, after)
        before.after = after.before = block
        return block

    def _link(self, before: Block, after: Block) -> None:
        before.after = after
        after.before = before

    def _carve(self, hole: Block, offset: int, size: int) -> Block:
        """A stretch of its own within a hole; what is left before and behind it are holes."""
        self.holes.remove(hole)
        return self._between(*self._cut(hole, offset, size), offset, size)

    def _cut(self, hole: Block, offset: int, size: int) -> tuple[Block, Block]:
        """Leave these bytes out of what was a hole; returns what is now before and behind them."""
        before, rest = hole.before, hole.offset + hole.size - offset - size
        if offset > hole.offset:
            before = self._between(before, hole, hole.offset, offset - hole.offset)
            self.holes.add(before)
        if not rest:
            return before, hole.after
        hole.offset = offset + size
        hole.size = rest
        self.holes.add(hole)
        return before, hole

    def _free_up(self, block: Block) -> None:
        """Make a stretch a hole, as one with the holes beside it."""
        before, after, holes = block.before, block.after, self.holes
        if after.free_list is not None:
            holes.remove(after)
            hole = after
            hole.offset = block.offset
            hole.size += block.size
            if before.free_list is not None:
                holes.remove(before)
                hole.offset = before.offset
                hole.size += before.size
                before = before.before
            hole.before = before
            before.after = hole
        elif before.free_list is not None:
            holes.remove(before)
            hole = before
            hole.size += block.size
            hole.after = after
            after.before = hole
        else:
            hole = Block(block.offset, block.size, before, after)
            before.after = after.before = hole
        holes.add(hole)

    def _hole_around(self, offset: int, size: int) -> Block | None:
        """The hole that has all of these bytes."""
        for hole in self.holes.largest_first():
            if hole.offset <= offset and offset + size <= hole.end:
                return hole
            if hole.size < size:
                break
        return None

    # Blocks.

    def _next_id(self) -> str:
        self._last_number += 1
        while (block_id := f"block-{self._last_number}") in self._blocks:
            self._last_number += 1
        return block_id

    def _enter(self, block: Block, status: BlockStatus) -> None:
        self._blocks[block.block_id] = block
        self._allocated_bytes += block.size
        block.status = ALLOCATED
        if status is not ALLOCATED:
            self._change_status(block, status)

    def _change_status(self, block: Block, status: BlockStatus) -> None:
        """The one place where a block's status changes, so that the sums by status agree."""
        if status is block.status:
            return
        for one, sign in ((block.status, -1), (status, 1)):
            if one is PINNED:
                self._pinned_bytes += sign * block.size
                self.pinned_count += sign
            elif one is CACHED:
                self.cached_bytes += sign * block.size
        if block.status is CACHED:
            self._forget_cached(block)
        block.status = status
        if status is CACHED:
            self._remember_cached(block)

    def _remember_cached(self, block: Block) -> None:
        insort(self._cached, (block.last_accessed, block.priority, block.offset))
        self._cached_blocks[block.offset] = block

    def _forget_cached(self, block: Block) -> None:
        del self._cached[bisect_left(self._cached, (block.last_accessed, block.priority, block.offset))]
        del self._cached_blocks[block.offset]


def require_changeable(block: Block, change: str) -> None:
    """Refuse to `pin`, `unpin` or `cache` a block that cannot be."""
    if change == "pin" and block.move is not None:
        raise errors.block_moving(block.block_id, "pinned")
    if change == "cache" and block.status is PINNED:
        raise errors.status_refused(block.block_id, PINNED, "marked as cached", "unpin it first")
    if change == "unpin" and block.status is CACHED:
        raise errors.status_refused(block.block_id, CACHED, "unpinned", "it is not pinned")


def _plain_values(request: AllocationRequest, now: float) -> tuple[int, int, int, float]:
    """Size, alignment, priority and time as Python's own numbers; refuses what is none."""
    if not isinstance(request.tensor_id, str):
        raise errors.argument_invalid("tensor_id", request.tensor_id, "a text")
    size, alignment = _integer("size", request.size), _integer("alignment", request.alignment)
    return size, alignment, _integer("priority", request.priority), checked_time("now", now)


def _integer(name: str, value: object) -> int:
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise errors.argument_invalid(name, value, "an integer") from None
