"""The invariants of a pool, checked over all blocks."""

from __future__ import annotations

from itertools import pairwise

from forged.memory.errors import inconsistent
from forged.memory.functions import fragmentation_ratio
from forged.memory.model import BlockStatus
from forged.memory.pool.blocks import Block
from forged.memory.pool.core import PoolCore


def validate(core: PoolCore) -> None:
    """Check all invariants; takes a time that grows with the number of blocks."""
    stretches = list(core.stretches())
    _check_cover(core, stretches)
    _check_lists(core, stretches)
    _check_sums(core, stretches)
    _check_plan(core)


def _check(is_true: bool, claim: str, what: object = "") -> None:
    if not is_true:
        raise inconsistent(claim, what)


def _check_cover(core: PoolCore, stretches: list[Block]) -> None:
    at = 0
    for block in stretches:
        _check(block.offset == at and block.size > 0, "blocks follow each other", block.as_value())
        _check(block.before.after is block and block.after.before is block, "links agree", block.as_value())
        _check(block.is_hole <= (block.status is BlockStatus.FREE), "holes are free", block.as_value())
        _check(block.offset % block.alignment == 0, "blocks are aligned", block.as_value())
        at = block.end
    _check(at == core.total, "blocks cover the device", at)
    for one, other in pairwise(stretches):
        _check(not (one.is_hole and other.is_hole), "holes are merged", (one.offset, other.offset))


def _check_lists(core: PoolCore, stretches: list[Block]) -> None:
    holes = sorted((block.size, block.offset) for block in stretches if block.is_hole)
    _check([(one.size, one.offset) for one in core.holes.from_size(1)] == holes, "free lists have all holes", holes)
    _check([one.size for one in core.holes.largest_first()] == [size for size, _ in holes[::-1]], "and from above")
    _check(len(core.holes) == len(holes), "holes are counted", len(core.holes))
    cached = [block for block in stretches if block.status is BlockStatus.CACHED]
    cached.sort(key=lambda block: (block.last_accessed, block.priority, block.offset))
    unmoved = [block.block_id for block in cached if block.move is None]
    _check([block.block_id for block in core.least_recent()] == unmoved, "eviction order", unmoved)


def _check_sums(core: PoolCore, stretches: list[Block]) -> None:
    used = [block for block in stretches if block.status is not BlockStatus.FREE]
    _check(all(core.find(block.block_id) is block for block in used), "blocks are found by id")
    for tensor_id in {block.tensor_id for block in used}:
        found = core.blocks_of_tensor(tensor_id)
        _check(found == [block for block in used if block.tensor_id == tensor_id], "blocks by tensor", tensor_id)
    stats = core.stats()
    sizes = {status: sum(block.size for block in used if block.status is status) for status in BlockStatus}
    _check(stats.total_bytes == stats.allocated_bytes + stats.free_bytes == core.total, "sums agree", stats)
    _check(stats.allocated_bytes == sum(sizes.values()), "allocated bytes", stats)
    _check(stats.pinned_bytes == sizes[BlockStatus.PINNED], "pinned bytes", stats)
    _check(stats.cached_bytes == sizes[BlockStatus.CACHED], "cached bytes", stats)
    _check((stats.block_count, stats.allocation_count) == (len(stretches), len(used)), "counts", stats)
    _check(core.pinned_count == sum(block.status is BlockStatus.PINNED for block in used), "pinned count")
    if core.plan is None:
        ratio = fragmentation_ratio([block.as_value() for block in stretches])
        _check(stats.fragmentation_ratio == ratio, "fragmentation", stats)


def _check_plan(core: PoolCore) -> None:
    moves = core.open_moves
    _check((core.plan is None) <= (not moves), "moves belong to a plan", moves)
    _check(core.plan is not None or not core.kept_bytes, "nothing is kept without a plan", core.kept_bytes)
    moving = [block for block in core.stretches() if block.move is not None]
    _check({block.move for block in moving} == {move.number for move in moves}, "moving blocks have moves", moves)
    for move in moves:
        block = core.get(move.block_id, move.version)
        _check((block.offset, block.size) == (move.source, move.size), "sources stay", move)
        _check(block.status is not BlockStatus.PINNED, "pinned blocks stay", move)
