"""The refusals of GPU memory.

Invariants:
- Every refusal names the block, the move or the argument that it is about, and changes nothing.
"""

from __future__ import annotations

from typing import TypeVar

from forged.errors import ForgedError, Problem, RequestRefused

Refusal = TypeVar("Refusal", bound="MemoryRefused")
SHOWN_CHARS = 200


class MemoryRefused(RequestRefused):
    """The base of these refusals. `block_id` is empty if it is about no block."""

    block_id: str = ""


class MemoryInvalid(MemoryRefused):
    """An argument has a value that is never allowed."""


class SizeBeyondDevice(MemoryInvalid):
    """The device is smaller than the block."""


class BlockUnknown(MemoryRefused):
    """The pool has no such block: it was never allocated, or is free again."""


class BlockTaken(MemoryRefused):
    """The pool has a block of this id already, or other blocks are where it should be."""


class HandleStale(MemoryRefused):
    """The block has moved since its handle was given."""


class StatusRefused(MemoryRefused):
    """The block's status does not allow the change."""


class CompactionRefused(MemoryRefused):
    """There is no such compaction plan or move, or it cannot be done now."""


class PoolInconsistent(ForgedError):
    """A pool contradicts itself: a fault of `forged.memory`."""


def size_beyond_device(size: int, total: int) -> SizeBeyondDevice:
    wanted = f"at most {total}, which the device has, when rounded up to the alignment"
    return SizeBeyondDevice(
        "memory_size_beyond_device", str(Problem("size", size, wanted)), "ask for less, or use another device"
    )


def inconsistent(claim: str, what: object) -> PoolInconsistent:
    return PoolInconsistent("memory_pool_inconsistent", f"{claim}: {what!r}", "report this as a fault of forged")


def argument_invalid(name: str, value: object, wanted: str) -> MemoryInvalid:
    return MemoryInvalid("memory_argument_invalid", str(Problem(name, value, wanted)), f"correct {name}")


def block_unknown(block_id: str) -> BlockUnknown:
    text = f"there is no block {block_id[:SHOWN_CHARS]!r}"
    return about(block_id, BlockUnknown("memory_block_unknown", text, "it was never allocated, or is free already"))


def block_taken(block_id: str) -> BlockTaken:
    text = f"there is a block {block_id[:SHOWN_CHARS]!r} already"
    return about(block_id, BlockTaken("memory_block_taken", text, "free it first, or choose another id"))


def place_taken(block_id: str, offset: int, size: int) -> BlockTaken:
    text = f"block {block_id[:SHOWN_CHARS]!r} cannot be at {offset} with {size} bytes: not all of it is free"
    return about(block_id, BlockTaken("memory_place_taken", text, "allocate it anew"))


def handle_stale(block_id: str, version: int, given: int) -> HandleStale:
    text = f"block {block_id[:SHOWN_CHARS]!r} has version {version}, and the handle {given}"
    return about(block_id, HandleStale("memory_handle_stale", text, "the block has moved: use its new handle"))


def status_refused(block_id: str, status: str, change: str, fix: str) -> StatusRefused:
    text = f"block {block_id[:SHOWN_CHARS]!r} is {status}; it cannot be {change}"
    return about(block_id, StatusRefused("memory_status_refused", text, fix))


def block_moving(block_id: str, change: str) -> StatusRefused:
    text = f"block {block_id[:SHOWN_CHARS]!r} is being moved; it cannot be {change}"
    return about(
        block_id, StatusRefused("memory_block_moving", text, "commit its move, or wait until the plan expires")
    )


def plan_unknown(epoch: int, current: int | None) -> CompactionRefused:
    text = f"there is no compaction plan of epoch {epoch}"
    fix = "it has ended: the blocks of uncommitted moves are where they were"
    return CompactionRefused("memory_plan_unknown", text, fix if current is None else f"the open one has {current}")


def plan_open(epoch: int) -> CompactionRefused:
    text = f"the compaction plan of epoch {epoch} is open"
    return CompactionRefused("memory_plan_open", text, "commit its moves, or wait until it expires")


def move_unknown(epoch: int, number: int) -> CompactionRefused:
    text = f"the compaction plan of epoch {epoch} has no open move {number}"
    return CompactionRefused("memory_move_unknown", text, "it is committed already, or its block was freed")


def move_early(block_id: str, number: int, after: int) -> CompactionRefused:
    text = f"move {number} of block {block_id[:SHOWN_CHARS]!r} cannot be committed before move {after}"
    return about(block_id, CompactionRefused("memory_move_early", text, "its destination is not free yet"))


def about(block_id: str, error: Refusal) -> Refusal:
    """The refusal, with the block that it is about."""
    error.block_id = block_id
    return error
