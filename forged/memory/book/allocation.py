"""Allocating, freeing and changing blocks, and serving the requests that wait.

Invariants:
- A name that a worker has on a device already gets the same block again, so a repeated request allocates nothing twice.
- A hole is used, then cached blocks give way, then the request waits.
- The request that a compaction makes room for is served first when it ends; else the queue decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from msgspec.structs import replace

from forged.errors import ForgedError
from forged.memory.book import refusals
from forged.memory.book.attempt import Attempt
from forged.memory.book.device import Device, Moment, Owner
from forged.memory.book.device_table import DeviceTable
from forged.memory.book.job_budgets import JobBudgets
from forged.memory.book.offset_plan import OffsetPlan
from forged.memory.errors import argument_invalid
from forged.memory.messages import (
    BATCH_MAX,
    Allocated,
    AllocateMemory,
    BlockEvicted,
    ChangeBlocks,
    FreeMemory,
    Handle,
    OutOfMemory,
    Shortage,
    Wanted,
)
from forged.memory.model import AllocationRequest, BlockStatus
from forged.memory.pool.blocks import Block
from forged.memory.pool.compaction import largest_hole
from forged.memory.pool.core import require_changeable
from forged.memory.pool.eviction import LRU, RoomPlan
from forged.memory.pool.shortage import missing_room
from forged.memory.waiting import Waiting
from forged.rate_limit import TokenBucket

EVICTED_NAMED_MAX = 100
SEARCHES_MAX = 4
"""After so many blocks of a request that do not fit nothing is evicted for the others, and they are not explained in
detail: both take up to 1 us for each block of the device."""
SEARCHED_BLOCKS_PER_S, SEARCHED_BLOCKS_MAX = 100_000, 200_000
"""So many blocks are searched for explanations in a second, and at once; as many of each job for blocks that give way,
and twice as many of all jobs."""
SEARCHED_AT_LEAST = 1000
"""So many of the least recently used blocks are searched for every request."""
_NONE: Sequence[Block] = ()
CHANGES = ("pin", "unpin", "cache", "use", "touch")


class Allocation:
    """What workers do with the blocks of devices."""

    def __init__(self, table: DeviceTable) -> None:
        self._table = table
        self._explaining = TokenBucket(SEARCHED_BLOCKS_PER_S, SEARCHED_BLOCKS_MAX, 0.0)
        self._evicting = JobBudgets(SEARCHED_BLOCKS_PER_S, SEARCHED_BLOCKS_MAX)
        table.on_room = self._serve

    def forget(self, job: str) -> None:
        """The job is removed."""
        self._evicting.forget(job)

    # Allocating.

    def allocate(self, request: AllocateMemory, owner: Owner, now: Moment) -> Attempt:
        """Allocate what fits. If the attempt is not done then, and the caller waits, it is to be queued."""
        device = self._table.device(request.job, request.device)
        attempt = self._attempt(device, request, owner)
        if not attempt.missing:
            return attempt
        if device.assert_until is not None:
            if request.wait_s <= 0:
                raise refusals.asserting(device.name, max(0.0, device.assert_until - now.monotonic))
            return attempt
        if len(device.queue) and device.queue.has_right_of_way(
            attempt.priority, now.monotonic, waits=request.wait_s > 0
        ):
            return attempt
        self._try(device, attempt, now)
        return attempt

    def _attempt(self, device: Device, request: AllocateMemory, owner: Owner) -> Attempt:
        """What is wanted, checked, and what of it the worker has already."""
        wanted = request.wanted
        if not 0 < len(wanted) <= BATCH_MAX:
            refusals.require_between("wanted", len(wanted), 1, BATCH_MAX)
        attempt = Attempt(request, owner, [])
        for one in wanted:
            _require_valid(one)
        attempt.missing = _not_there(device, attempt, wanted)
        if len(wanted) > 1 and len({one.name for one in wanted}) < len(wanted):
            raise argument_invalid("wanted", [one.name for one in wanted], "names that occur once")
        if attempt.missing and not self._table.block_shares.fits(owner.holder, len(attempt.missing)):
            raise refusals.blocks_full(self._table.block_shares.shortage(owner.holder))
        return attempt

    def _try(self, device: Device, attempt: Attempt, now: Moment) -> None:
        """Allocate what is missing, as far as it fits; with `all_or_none` nothing unless all fit."""
        if not self._table.block_shares.fits(attempt.owner.holder, len(attempt.missing)):
            return
        missing, got = list[Wanted](), list[Block]()
        evicted = list[Block]()
        for wanted in attempt.missing:
            evict = attempt.request.evict and len(missing) < SEARCHES_MAX
            block, victims = self._get(device, attempt, wanted, now, evict=evict)
            if block is None:
                missing.append(wanted)
                if attempt.request.all_or_none:
                    break
                continue
            got.append(block)
            evicted += victims
            names = [victim.block_id for victim in victims]
            handle = Handle(wanted.name, block.version)
            attempt.found[wanted.name] = Allocated(wanted.name, handle, block.offset, block.size, names)
        if missing and attempt.request.all_or_none:
            self._take_back(device, attempt, got, evicted)
            return
        if got:
            device.has_allocated = True
            self._table.counts.allocations += len(got)
        self._table.entered(device, got, attempt.owner)
        for block in evicted:
            self._table.gone(device, block)
        if evicted:
            self._tell_evicted(device, attempt, evicted)
        attempt.missing = missing

    def _get(
        self, device: Device, attempt: Attempt, wanted: Wanted, now: Moment, *, evict: bool
    ) -> tuple[Block | None, Sequence[Block]]:
        """The block, if it fits, and what gave way to it."""
        block = _allocated(device, attempt.owner, wanted, now)
        if block is not None or not evict:
            return block, _NONE
        victims = self._make_room(device, attempt, wanted, now)
        return (_allocated(device, attempt.owner, wanted, now) if victims else None), victims

    def _make_room(self, device: Device, attempt: Attempt, wanted: Wanted, now: Moment) -> Sequence[Block]:
        """Evict so that a block fits for which there is no hole; the blocks that gave way, none if it cannot fit."""
        core, request = device.core, wanted.request
        if request.size > core.free_bytes + core.cached_bytes:
            return _NONE
        room = self._find_room(device, attempt, request, now)
        # The blocks of one request do not evict each other.
        own = {attempt.owner.block_id(name) for name in attempt.found}
        if room is None or any(victim.block_id in own for victim in room.victims):
            return _NONE
        core.evict_blocks(room.victims)
        return room.victims

    def _find_room(self, device: Device, attempt: Attempt, request: AllocationRequest, now: Moment) -> RoomPlan | None:
        """What gives way to a block. Beyond the budget only the least recently used blocks are searched."""
        core, table = device.core, self._table
        size, alignment = request.size, request.alignment
        is_lru = table.eviction_of(device.owner.job) == LRU
        count = core.cached_count if is_lru else len(core)
        if count > SEARCHED_AT_LEAST:
            # By last use a search of all blocks would find the same.
            room = table.find_room(device, size, alignment, SEARCHED_AT_LEAST) if is_lru else None
            if room is not None:
                return room
            if not self._evicting.take(device.owner.job, min(count, SEARCHED_BLOCKS_MAX), now.monotonic):
                device.is_search_due |= attempt.waits
                return None if is_lru else table.find_room(device, size, alignment, SEARCHED_AT_LEAST)
        return table.find_room(device, size, alignment)

    def _take_back(self, device: Device, attempt: Attempt, got: Sequence[Block], evicted: Sequence[Block]) -> None:
        """Undo an attempt: its blocks are free again, and what gave way is where it was."""
        for block in got:
            device.core.free(block.block_id)
            del attempt.found[attempt.owner.handle(block).name]
        for victim in evicted:
            device.core.claim(
                replace(victim.as_value(), status=BlockStatus.CACHED),
                version=victim.version,
                owner=victim.owner,
                alignment=victim.alignment,
                content=victim.content,
                reload_s=victim.reload_s,
            )

    def _tell_evicted(self, device: Device, attempt: Attempt, evicted: Sequence[Block]) -> None:
        tensor_id = attempt.request.wanted[0].request.tensor_id
        fact = BlockEvicted(
            device.name,
            [block.block_id for block in evicted[:EVICTED_NAMED_MAX]],
            len(evicted),
            sum(block.size for block in evicted),
            tensor_id,
            attempt.owner.worker_id,
        )
        self._table.counts.evictions += len(evicted)
        self._table.facts.append((device.owner.job, fact))

    # Waiting.

    def wait(self, attempt: Attempt, now: Moment) -> Waiting[Attempt]:
        """Let an attempt wait; its `wake` is called when it has ended."""
        device = self._table.device(attempt.request.job, attempt.request.device)
        if not self._table.waiting_shares.take(attempt.owner.holder):
            raise refusals.waiting_full(self._table.waiting_shares.shortage(attempt.owner.holder))
        attempt.waits = True
        return device.queue.add(attempt, attempt.priority, now.monotonic)

    def end_wait(self, waiting: Waiting[Attempt], now: Moment) -> None:
        """The attempt waits no more: it is done, or given up."""
        attempt = waiting.request
        self._table.waiting_shares.give_back(attempt.owner.holder)
        device = self._table.jobs.get(attempt.request.job, {}).get(attempt.request.device)
        if device is None:
            return
        device.queue.remove(waiting)
        if device.plan_for is attempt:
            device.plan_for = None
        if not attempt.is_done:
            self._serve(device, now)
            _look_again(device, attempt)

    def search_if_due(self, device: Device, now: Moment) -> None:
        """Try the requests that wait again if there was no time for a search when the device last changed."""
        if device.is_search_due:
            device.is_search_due = False
            self._serve(device, now)

    def _serve(self, device: Device, now: Moment) -> None:
        """Serve the waiting requests in their order, until one does not fit."""
        if device.assert_until is not None or not len(device.queue):
            return
        if device.plan_for is not None and device.core.plan is None:
            favoured, device.plan_for = device.plan_for, None
            for waiting in device.queue:
                if waiting.request is favoured:
                    self._serve_one(device, waiting, now)
        for waiting in device.queue:
            if not self._serve_one(device, waiting, now):
                break

    def _serve_one(self, device: Device, waiting: Waiting[Attempt], now: Moment) -> bool:
        attempt = waiting.request
        _look_again(device, attempt)
        if attempt.error is None:
            self._try(device, attempt, now)
        if not attempt.is_done:
            return False
        device.queue.remove(waiting)
        attempt.wake()
        return True

    # Shortages.

    def explain(self, attempt: Attempt, now: Moment) -> None:
        """Give every missing block its shortage, and tell of the first one."""
        if attempt.error is not None:
            raise attempt.error
        device = self._table.device(attempt.request.job, attempt.request.device)
        missing, attempt.missing = attempt.missing, []
        for number, wanted in enumerate(missing):
            shortage = self._shortage(device, wanted.request, now, in_detail=number < SEARCHES_MAX)
            attempt.found[wanted.name] = Allocated(wanted.name, shortage=shortage)
            if number == 0:
                self._tell_shortage(device, attempt, wanted, shortage)
        for wanted in attempt.request.wanted:
            if wanted.name not in attempt.found:
                # With all_or_none it fits, but not all do.
                attempt.found[wanted.name] = Allocated(wanted.name)

    def _shortage(self, device: Device, request: AllocationRequest, now: Moment, *, in_detail: bool) -> Shortage:
        if not in_detail or not self._explaining.take(len(device.core), now.monotonic):
            return _in_brief(device, request)
        missing = missing_room(device.core, request.size, request.alignment, lambda block: block.block_id)
        reason, fix = missing.reason, missing.fix
        if device.assert_until is not None:
            reason = "the daemon has restarted, and not all owners of blocks have asserted them"
            fix = f"wait for {max(0.0, device.assert_until - now.monotonic):.1f} s more"
        elif missing.largest_hole >= missing.needed and len(device.queue):
            reason = f"{len(device.queue)} requests wait for memory of this device, and come first"
            fix = "wait in the same way, with a wait_s or a higher priority"
        return Shortage(
            reason,
            missing.needed,
            missing.total_free,
            missing.largest_hole,
            missing.evictable_bytes,
            missing.largest_obtainable,
            [block.block_id for block in missing.blocking],
            fix,
        )

    def _tell_shortage(self, device: Device, attempt: Attempt, wanted: Wanted, shortage: Shortage) -> None:
        fact = OutOfMemory(
            device.name,
            attempt.owner.worker_id,
            wanted.request.tensor_id,
            shortage.size,
            shortage.total_free,
            shortage.largest_hole,
            shortage.evictable_bytes,
            shortage.blocking,
            shortage.fix,
        )
        self._table.counts.out_of_memory += 1
        self._table.facts.append((device.owner.job, fact))

    def evict_for_compaction(self, device: Device, attempt: Attempt) -> None:
        """Evict what compaction needs besides the free bytes, in the order of the eviction policy."""
        request, core = attempt.missing[0].request, device.core
        needed, _ = core.needed(request.size, request.alignment)
        movable = largest_hole(core, evicting=False)
        if not attempt.request.evict or not movable < needed <= largest_hole(core, evicting=True):
            return
        # The blocks of one request do not evict each other.
        own = {attempt.owner.block_id(name) for name in attempt.found}
        evicted, size = list[Block](), 0
        for block in self._table.eviction_order(device):
            if block.block_id not in own and size < needed - movable:
                evicted.append(block)
                size += block.size
        if size < needed - movable:
            return
        core.evict_blocks(evicted)
        for block in evicted:
            self._table.gone(device, block)
        self._tell_evicted(device, attempt, evicted)

    # Freeing and changing.

    def free(self, request: FreeMemory, owner: Owner, now: Moment) -> None:
        device = self._table.device(request.job, request.device)
        for block in self._blocks(device, owner, request.handles):
            device.core.free(block.block_id)
            self._table.gone(device, block, owner)
        if len(device.queue) or device.plan_until:
            self._table.changed(device, now)

    def change(self, request: ChangeBlocks, owner: Owner, now: Moment) -> None:
        device = self._table.device(request.job, request.device)
        core, change = device.core, request.change
        if change not in CHANGES:
            raise argument_invalid("change", change, f"one of {', '.join(CHANGES)}")
        require_content(request.content or "", None)
        blocks = self._blocks(device, owner, request.handles)
        for block in blocks:
            # Before any of them is changed.
            require_changeable(block, change)
        for block in blocks:
            match change:
                case "pin":
                    core.pin(block.block_id)
                case "unpin":
                    core.unpin(block.block_id)
                case "cache":
                    core.mark_cached(block.block_id, content=request.content)
                case "use":
                    core.use(block.block_id)
                case _:
                    core.touch(block.block_id, now.wall)
        if change in ("unpin", "cache"):
            self._table.changed(device, now)

    def _blocks(self, device: Device, owner: Owner, handles: Sequence[Handle]) -> list[Block]:
        """The blocks of these handles, all of them or an error."""
        refusals.require_between("handles", len(handles), 1, BATCH_MAX)
        blocks = [device.core.get(owner.block_id(handle.name), handle.version) for handle in handles]
        if len(blocks) > 1 and len({block.block_id for block in blocks}) < len(blocks):
            raise argument_invalid("handles", [handle.name for handle in handles], "names that occur once")
        return blocks


def _require_valid(wanted: Wanted) -> None:
    request = wanted.request
    refusals.require_name("name", wanted.name)
    if len(request.tensor_id) > refusals.NAME_CHARS_MAX:
        raise argument_invalid("tensor_id", request.tensor_id, f"at most {refusals.NAME_CHARS_MAX} characters")
    if wanted.content or wanted.reload_s is not None:
        require_content(wanted.content, wanted.reload_s)


def _look_again(device: Device, attempt: Attempt) -> None:
    """What the worker has of a request that waits: blocks have moved and given way, and it may have asked again."""
    try:
        attempt.missing = _not_there(device, attempt, attempt.request.wanted)
    except ForgedError as error:
        attempt.error = error


def _not_there(device: Device, attempt: Attempt, wanted: Sequence[Wanted]) -> list[Wanted]:
    """The wanted blocks that the worker does not have; those that it has are found."""
    core, owner, missing = device.core, attempt.owner, list[Wanted]()
    prefix = owner.block_id("")
    for one in wanted:
        needed = core.needed(one.request.size, one.request.alignment)[0]
        block, found = core.find(prefix + one.name), attempt.found.get(one.name)
        if block is None:
            if found is not None:
                del attempt.found[one.name]
            missing.append(one)
        elif found is not None and (found.handle, found.offset) == (owner.handle(block), block.offset):
            continue
        elif block.size != needed or block.tensor_id != one.request.tensor_id:
            raise refusals.name_taken(one.name, block.size, needed)
        else:
            attempt.found[one.name] = Allocated(one.name, owner.handle(block), block.offset, block.size)
    return missing


def _allocated(device: Device, owner: Owner, wanted: Wanted, now: Moment) -> Block | None:
    """The block in a hole, at its planned offset if it has one; None if there is no hole for it."""
    block = None if device.offset_plan is None else _placed(device, device.offset_plan, owner, wanted, now)
    return block or device.core.allocate(
        wanted.request,
        now.wall,
        owner.block_id(wanted.name),
        is_cached=wanted.cached,
        owner=owner.worker_id,
        content=wanted.content,
        reload_s=wanted.reload_s,
    )


def _placed(device: Device, plan: OffsetPlan, owner: Owner, wanted: Wanted, now: Moment) -> Block | None:
    """The block at its planned offset, or above the plan; None if neither is free."""
    core, request, block_id = device.core, wanted.request, owner.block_id(wanted.name)
    place = plan.place(core, block_id, request)
    if place is None:
        return None
    return core.allocate_at(
        request,
        place.offset,
        now.wall,
        block_id,
        is_cached=wanted.cached,
        owner=owner.worker_id,
        content=wanted.content,
        reload_s=wanted.reload_s,
        hole=place.hole,
    )


def _in_brief(device: Device, request: AllocationRequest) -> Shortage:
    """What is known of a shortage without a look at the blocks."""
    core = device.core
    needed, _ = core.needed(request.size, request.alignment)
    hole = core.holes.largest_size()
    reason = f"no room for {needed} bytes: {core.free_bytes} are free, {hole} of them together"
    fix = "ask for this block alone, and not many times a second, to be told more"
    return Shortage(reason, needed, core.free_bytes, hole, core.cached_bytes, hole, [], fix)


def require_content(content: str, reload_s: float | None) -> None:
    if len(content) > refusals.CONTENT_CHARS_MAX:
        raise argument_invalid("content", content, f"at most {refusals.CONTENT_CHARS_MAX} characters")
    if reload_s is not None and not 0 <= reload_s < inf:
        raise argument_invalid("reload_s", reload_s, "finite and >= 0")
