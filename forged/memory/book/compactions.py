"""Compaction plans: opened for a caller or for a request that waits, committed by the owners of blocks, expired.

Invariants:
- A device has at most one open plan.
- A commit that is repeated has the same answer, until the next plan.
- No move overlaps its own source, so that a block stays valid where it was until its move is committed.
"""

from __future__ import annotations

from forged.memory.book import refusals
from forged.memory.book.allocation import Allocation
from forged.memory.book.attempt import Attempt
from forged.memory.book.device import Device, Moment, Owner
from forged.memory.book.device_table import DeviceTable
from forged.memory.messages import CommitMove, CompactionPlan, CompactionPlanned, PlanCompaction
from forged.memory.model import ALIGNMENT_DEFAULT
from forged.memory.pool.blocks import Block
from forged.memory.pool.compaction import plan_compaction, plan_hole
from forged.memory.pool.moves import MovePlan
from forged.rate_limit import TokenBucket

PLAN_S = 30.0
"""So long the owners of blocks have to copy and commit."""
BYTES_MAX = 1 << 40
MOVES_MAX = 1024
WAITING_BYTES_MAX, WAITING_MOVES_MAX = 16 << 30, 256
"""The bounds of a plan for a request that waits."""
PLAN_AGAIN_S = 1.0
"""So often a plan is looked for while a request waits."""
PLAN_BLOCKS_PER_S, PLAN_BLOCKS_MAX = 20_000, 30_000
"""Devices with so many blocks are planned for in a second, and at once. A block takes about 8 us, so that plans take
a sixth of the daemon's time at most; a device of more blocks gets no plan."""


class Compactions:
    """The compaction plans of all devices."""

    def __init__(self, table: DeviceTable, allocation: Allocation) -> None:
        self._table = table
        self._allocation = allocation
        self._effort = TokenBucket(PLAN_BLOCKS_PER_S, PLAN_BLOCKS_MAX, 0.0)

    def plan(self, request: PlanCompaction, now: Moment) -> CompactionPlan:
        """Open a plan; an open one is returned."""
        device = self._table.device(request.job, request.device)
        if device.assert_until is not None:
            # What is free as far as the daemon knows may be a block that its owner has not asserted yet.
            raise refusals.asserting(device.name, max(0.0, device.assert_until - now.monotonic))
        refusals.require_between("hole", request.hole, 0, device.core.total)
        refusals.require_between("bytes_max", request.bytes_max, 1, BYTES_MAX)
        refusals.require_between("moves_max", request.moves_max, 1, MOVES_MAX)
        if device.core.plan is not None:
            return device.plan_view(device.core.plan, max(0.0, device.plan_until - now.monotonic))
        if len(device.core) > PLAN_BLOCKS_MAX:
            raise refusals.too_many_blocks(device.name, len(device.core), PLAN_BLOCKS_MAX)
        if not self._effort.take(len(device.core), now.monotonic):
            raise refusals.planning_busy(device.name)
        plan = _planned(device, request)
        if plan is None:
            raise refusals.hole_impossible(device.name, request.hole)
        if request.dry_run or not plan.moves:
            return device.plan_view(plan, 0.0)
        plan = self._open(device, plan, "asked for", now)
        return device.plan_view(plan, PLAN_S)

    def plan_for_waiting(self, device: Device, now: Moment) -> None:
        """Open a plan for the first request that waits, if moves open its hole."""
        first = device.queue.first()
        if first is None or device.assert_until is not None or device.core.plan is not None:
            return
        if len(device.core) > PLAN_BLOCKS_MAX:
            return
        if now.monotonic < device.next_plan_at or not self._effort.take(len(device.core), now.monotonic):
            return
        device.next_plan_at = now.monotonic + PLAN_AGAIN_S
        attempt: Attempt = first.request
        self._allocation.evict_for_compaction(device, attempt)
        wanted = attempt.missing[0].request
        plan = plan_hole(
            device.core,
            wanted.size,
            wanted.alignment,
            bytes_max=WAITING_BYTES_MAX,
            moves_max=WAITING_MOVES_MAX,
            overlaps=False,
        )
        if plan is not None and plan.moves:
            device.plan_for = attempt
            self._open(device, plan, f"{attempt.owner.worker_id} waits for {wanted.size} bytes", now)
        else:
            # Eviction may have made room.
            self._table.on_room(device, now)

    def commit(self, request: CommitMove, owner: Owner, now: Moment) -> Block:
        device = self._table.device(request.job, request.device)
        core = device.core
        for move in core.open_moves:
            if move.number == request.number and core.plan is not None and core.plan.epoch == request.epoch:
                of = core.get(move.block_id).owner
                if of != owner.worker_id:
                    raise refusals.owner_differs(request.number, of)
        again = _committed(device, request, owner)
        if again is not None:
            return again
        block = core.commit_move(request.epoch, request.number)
        device.committed[request.number] = block.block_id, block.version
        self._table.counts.moves += 1
        self._table.changed(device, now)
        return block

    def expire(self, device: Device, now: Moment) -> None:
        """Close a plan whose time is over; the blocks of its open moves stay where they are."""
        plan = device.core.plan
        if plan is None or now.monotonic < device.plan_until:
            return
        expired = len(device.core.close_plan(plan.epoch))
        self._table.note_plan_end(device, expired)
        self._table.changed(device, now)

    def _open(self, device: Device, plan: MovePlan, reason: str, now: Moment) -> MovePlan:
        plan = device.core.open_plan(plan)
        device.plan_epoch = plan.epoch
        device.plan_until = now.monotonic + PLAN_S
        device.committed = {}
        fact = CompactionPlanned(device.name, plan.epoch, len(plan.moves), plan.bytes, plan.opens, reason)
        self._table.facts.append((device.owner.job, fact))
        return plan


def _committed(device: Device, request: CommitMove, owner: Owner) -> Block | None:
    """The block of a move that is committed already: its owner has not got the answer, and asks again."""
    block_id, version = device.committed.get(request.number, ("", 0))
    block = device.core.find(block_id) if request.epoch == device.plan_epoch else None
    return block if block is not None and (block.owner, block.version) == (owner.worker_id, version) else None


def _planned(device: Device, request: PlanCompaction) -> MovePlan | None:
    bounds = {"bytes_max": request.bytes_max, "moves_max": request.moves_max}
    if not request.hole:
        return plan_compaction(device.core, **bounds, overlaps=False)
    # A hole of the whole device has no room for the alignment to round it up.
    alignment = ALIGNMENT_DEFAULT if request.hole % ALIGNMENT_DEFAULT == 0 else 1
    return plan_hole(device.core, request.hole, alignment, **bounds, overlaps=False)
