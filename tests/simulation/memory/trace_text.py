"""Requests and answers of the memory service in a line of the trace."""

from __future__ import annotations

from typing import Any

from forged.memory.messages import (
    Allocated,
    AllocateMemory,
    AssertBlocks,
    ChangeBlocks,
    CommitMove,
    CompactionPlan,
    FreeMemory,
    Handle,
    PlanCompaction,
    RegisterDevice,
)
from tests.simulation.memory.known_device import (
    id_of,
)


def in_short(message: Any) -> str:
    """A request or reply in a line of the trace."""
    match message:
        case AllocateMemory():
            blocks = ", ".join(
                f"{one.name}: {one.request.size}%{one.request.alignment}"
                f"{' pinned' * one.request.pinned}{' cached' * one.cached} p{one.request.priority}"
                for one in message.wanted
            )
            more = f"wait {message.wait_s}{' all' * message.all_or_none}{' evict' * message.evict}"
            return f"Allocate {message.job} {message.worker_id} on {message.device} [{blocks}] {more}"
        case [Allocated(), *_]:
            return ", ".join(
                f"{one.name} v{one.handle.version} {one.offset}+{one.actual_size} {one.evicted}"
                if one.handle is not None
                else f"{one.name} none"
                for one in message
            )
        case FreeMemory() | ChangeBlocks():
            change = getattr(message, "change", "free")
            handles = ", ".join(f"{one.name} v{one.version}" for one in message.handles)
            return f"{change} {message.job} {message.worker_id} on {message.device} [{handles}]"
        case AssertBlocks():
            blocks = ", ".join(
                f"{one.handle.name} v{one.handle.version} {one.block.offset}+{one.block.size} {one.block.status}"
                for one in message.blocks
            )
            return f"Assert {message.job} {message.worker_id} on {message.device} [{blocks}]{' more' * message.more}"
        case CompactionPlan():
            moves = ", ".join(
                f"{one.number}: {id_of(one)} v{one.handle.version} {one.source}>{one.destination}+{one.size}"
                for one in message.moves
            )
            return f"plan {message.epoch} for {message.expires_in_s:.1f} s [{moves}]"
        case CommitMove():
            return f"Commit {message.job} {message.worker_id} on {message.device} {message.epoch} {message.number}"
        case RegisterDevice() | PlanCompaction() | Handle():
            return str(message)
        case _:
            return type(message).__name__
