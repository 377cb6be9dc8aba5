"""Planted bugs of the memory service and of its client, and the promise that each of them breaks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from forged.client.device_memory import DeviceMemory
from forged.elastic.messages import WorkerLeft
from forged.kernel.bus.dispatcher import RequestDispatcher
from forged.kernel.messages import Call, Record, Request
from forged.memory.book import allocation
from forged.memory.book.allocation import Allocation
from forged.memory.book.assertion import Assertion
from forged.memory.book.attempt import Attempt
from forged.memory.book.compactions import Compactions
from forged.memory.book.device import Device, Moment, Owner
from forged.memory.book.device_table import DeviceTable
from forged.memory.messages import REQUESTS, AllocateMemory, FreeMemory, HeldBlock, Move, Wanted
from forged.memory.model import BlockStatus, MemoryBlock, PoolStats
from forged.memory.pool import compaction
from forged.memory.pool.blocks import Block
from forged.memory.pool.core import PoolCore
from forged.memory.service import MemoryService
from forged.memory.waiting import WaitingQueue
from tests.simulation.memory.promises import Promise

Mutant = Callable[[], Any]
USED = BlockStatus.ALLOCATED


@contextmanager
def ignore_the_alignment() -> Iterator[None]:
    """A block is where the smallest hole begins."""
    allocate = PoolCore.allocate

    def careless(self: PoolCore, request: Any, *arguments: Any, **more: Any) -> Block | None:
        size = -(-request.size // request.alignment) * request.alignment
        return allocate(self, replace(request, size=size, alignment=1), *arguments, **more)

    with patch.object(PoolCore, "allocate", careless):
        yield


@contextmanager
def enter_asserted_blocks_where_there_is_room() -> Iterator[None]:
    """An asserted block is entered at the beginning of the largest hole."""
    claim = PoolCore.claim

    def careless(self: PoolCore, block: MemoryBlock, **more: Any) -> Block:
        hole = next(iter(self.holes.largest_first()), None)
        offset = block.offset if hole is None or hole.size < block.size else hole.offset
        return claim(self, replace(block, offset=offset), **more)

    with patch.object(PoolCore, "claim", careless):
        yield


@contextmanager
def tell_a_batch_where_its_blocks_were() -> Iterator[None]:
    """The first blocks of a batch that waits are told as they were allocated."""

    def forgetful(device: Device, attempt: Attempt) -> None:
        attempt.missing = allocation._not_there(device, attempt, attempt.missing)

    with patch.object(allocation, "_look_again", forgetful):
        yield


@contextmanager
def evict_without_a_fact() -> Iterator[None]:
    """Owners are not told that their blocks have given way."""
    with patch.object(Allocation, "_tell_evicted", lambda *_: None):
        yield


@contextmanager
def remove_the_process_that_took_the_name() -> Iterator[None]:
    """The end of a worker removes the devices and blocks of whatever process has its name."""

    def careless(self: MemoryService, record: Record) -> None:
        for owner in self._owners_of(record):
            self.table.remove_worker(owner, "gone", self._now())
        self._record_facts(record.id)

    with patch.object(MemoryService, "_workers_ended", careless):
        yield


@contextmanager
def give_a_repeated_request_another_block() -> Iterator[None]:
    """A name that exists is allocated anew."""
    not_there = allocation._not_there

    def careless(device: Device, attempt: Attempt, wanted: Sequence[Wanted]) -> list[Wanted]:
        missing = not_there(device, attempt, wanted)
        moved = [one.name for one in wanted if one not in missing and device.core.plan is None]
        for name in moved[:1]:
            block = device.core.get(attempt.owner.block_id(name))
            hole = device.core.holes.best_fit(block.size, block.alignment)
            if hole is not None:
                value = block.as_value()
                device.core.free(block.block_id)
                place = -(-hole.offset // block.alignment) * block.alignment
                block = device.core.claim(replace(value, offset=place), owner=block.owner, alignment=block.alignment)
                reply = attempt.found[name]
                attempt.found[name] = replace(reply, offset=place, handle=attempt.owner.handle(block))
        return missing

    with patch.object(allocation, "_not_there", careless):
        yield


@contextmanager
def allocate_a_part_of_all() -> Iterator[None]:
    """With `all_or_none` what fits is allocated."""
    attempt = Allocation._attempt

    def careless(self: Allocation, device: Device, request: AllocateMemory, owner: Owner) -> Attempt:
        return attempt(self, device, replace(request, all_or_none=False), owner)

    with patch.object(Allocation, "_attempt", careless):
        yield


@contextmanager
def move_pinned_blocks() -> Iterator[None]:
    """Pinned blocks are no barriers."""
    with patch.object(compaction, "_is_barrier", lambda block: False):
        yield


@contextmanager
def cache_pinned_blocks() -> Iterator[None]:
    """A pinned block may be marked as cached."""
    with (
        patch("forged.memory.pool.core.require_changeable", lambda block, change: None),
        patch.object(allocation, "require_changeable", lambda block, change: None),
    ):
        yield


@contextmanager
def evict_blocks_that_move() -> Iterator[None]:
    """A cached block gives way while its owner copies it."""

    def careless(self: PoolCore) -> Iterator[Block]:
        return iter([self._cached_blocks[offset] for _, _, offset in self._cached])

    with patch.object(PoolCore, "least_recent", careless):
        yield


@contextmanager
def commit_moves_in_any_order() -> Iterator[None]:
    """A move does not wait for the one that frees its destination."""
    commit = PoolCore.commit_move

    def careless(self: PoolCore, epoch: int, number: int) -> Block:
        move = self._open_moves.get(number)
        if move is not None and self.plan is not None and self.plan.epoch == epoch and move.after in self._open_moves:
            block = self.get(move.block_id)
            block.version += 1
            self._end_move(block)
            return block
        return commit(self, epoch, number)

    with patch.object(PoolCore, "commit_move", careless):
        yield


@contextmanager
def keep_the_version_of_a_moved_block() -> Iterator[None]:
    """A handle is valid after the block has moved."""
    commit = PoolCore.commit_move

    def careless(self: PoolCore, epoch: int, number: int) -> Block:
        block = commit(self, epoch, number)
        block.version -= 1
        return block

    with patch.object(PoolCore, "commit_move", careless):
        yield


@contextmanager
def allocate_where_moves_go() -> Iterator[None]:
    """The room that a plan needs is not kept: it is found out at the commit only."""
    allocate = PoolCore.allocate

    def careless(self: PoolCore, request: Any, now: float, block_id: str = "", **more: Any) -> Block | None:
        block = allocate(self, request, now, block_id, **more)
        if block is None and self.plan is not None:
            self.close_plan(self.plan.epoch)
            block = allocate(self, request, now, block_id, **more)
        return block

    with patch.object(PoolCore, "allocate", careless):
        yield


@contextmanager
def refuse_a_repeated_commit() -> Iterator[None]:
    """A commit whose answer got lost is refused."""
    with patch("forged.memory.book.compactions._committed", lambda *_: None):
        yield


@contextmanager
def never_end_a_plan() -> Iterator[None]:
    """Moves that are not committed do not expire."""
    with patch.object(Compactions, "expire", lambda *_: None):
        yield


@contextmanager
def accept_stale_handles() -> Iterator[None]:
    """The version of a handle does not matter."""
    get = PoolCore.get

    def careless(self: PoolCore, block_id: str, version: int | None = None) -> Block:
        return get(self, block_id)

    with patch.object(PoolCore, "get", careless):
        yield


@contextmanager
def free_what_is_free() -> Iterator[None]:
    """Unknown blocks are freed without a word."""
    free = Allocation.free

    def lax(self: Allocation, request: FreeMemory, owner: Owner, now: Moment) -> None:
        core = self._table.device(request.job, request.device).core
        known = [one for one in request.handles if core.find(owner.block_id(one.name)) is not None]
        if known:
            free(self, replace(request, handles=known), owner, now)

    with patch.object(Allocation, "free", lax):
        yield


@contextmanager
def allocate_while_owners_assert() -> Iterator[None]:
    """A restarted daemon allocates at once."""
    with patch.object(DeviceTable, "_is_awaiting", lambda self, device: False):
        yield


@contextmanager
def wait_for_the_owner_of_the_device_only() -> Iterator[None]:
    """Workers with blocks on the device of another one are not waited for."""

    def hasty(self: DeviceTable, device: Device) -> bool:
        return self.may_assert(device, device.owner)

    with patch.object(DeviceTable, "_is_awaiting", hasty):
        yield


@contextmanager
def plan_while_owners_assert() -> Iterator[None]:
    """A compaction is planned for a device of which not all blocks are known."""
    plan = Compactions.plan

    def hasty(self: Compactions, request: Any, now: Moment) -> Any:
        device = self._table.device(request.job, request.device)
        until, device.assert_until = device.assert_until, None
        try:
            return plan(self, request, now)
        finally:
            device.assert_until = until

    with patch.object(Compactions, "plan", hasty):
        yield


@contextmanager
def believe_late_assertions() -> Iterator[None]:
    """What is free now can be asserted, whatever was there meanwhile."""

    def credulous(self: DeviceTable, device: Device, owner: Owner) -> bool:
        return owner.key in self._at_start.get(owner.job, ()) and owner.key not in device.asserted

    with patch.object(DeviceTable, "may_assert", credulous):
        yield


@contextmanager
def believe_newcomers() -> Iterator[None]:
    """A worker that came after the start may assert blocks."""

    def credulous(self: DeviceTable, device: Device, owner: Owner) -> bool:
        return owner.key not in device.asserted

    with patch.object(DeviceTable, "may_assert", credulous):
        yield


@contextmanager
def believe_asserted_cached_blocks() -> Iterator[None]:
    """A cached block that the daemon has forgotten is entered, though another one may have been written there."""
    enter = Assertion._enter

    def credulous(self: Assertion, device: Device, owner: Owner, held: HeldBlock, now: Moment) -> Any:
        if held.block.status is not BlockStatus.CACHED:
            return enter(self, device, owner, held, now)
        block, is_new = enter(self, device, owner, replace(held, block=replace(held.block, status=USED)), now)
        if block is not None:
            device.core.mark_cached(block.block_id)
        return block, is_new

    with patch.object(Assertion, "_enter", credulous):
        yield


@contextmanager
def believe_blocks_of_earlier_processes() -> Iterator[None]:
    """A block on the device of a process that is gone is entered on the device of the next one."""
    with patch.object(Device, "is_version", lambda self, version: version > 0):
        yield


@contextmanager
def serve_in_the_order_of_arrival() -> Iterator[None]:
    """Priorities do not matter to requests that wait."""
    with patch("forged.memory.waiting.rank_of", lambda priority, since: since):
        yield


@contextmanager
def never_let_requests_age() -> Iterator[None]:
    """A request of a higher priority comes first, however long others have waited."""
    with patch("forged.memory.waiting.rank_of", lambda priority, since: float(-priority)):
        yield


@contextmanager
def serve_what_fits() -> Iterator[None]:
    """Requests that fit are served past one that does not."""

    def unfair(self: Allocation, device: Device, now: Moment) -> None:
        if device.assert_until is None:
            for waiting in device.queue:
                self._serve_one(device, waiting, now)

    def subscribed(self: Allocation, *arguments: Any, **more: Any) -> None:
        begin(self, *arguments, **more)
        self._table.on_room = lambda device, now: unfair(self, device, now)

    begin = Allocation.__init__
    with patch.object(Allocation, "__init__", subscribed), patch.object(Allocation, "_serve", unfair):
        yield


@contextmanager
def pass_those_that_wait() -> Iterator[None]:
    """A new request takes what is free, however long others have waited."""
    with patch.object(WaitingQueue, "has_right_of_way", lambda self, priority, now, *, waits: False):
        yield


@contextmanager
def forget_to_serve() -> Iterator[None]:
    """Requests that wait are not served when blocks are freed."""
    with (
        patch.object(DeviceTable, "changed", lambda self, device, now: self.note_plan_end(device)),
        patch.object(Compactions, "plan_for_waiting", lambda *_: None),
    ):
        yield


@contextmanager
def give_up_early() -> Iterator[None]:
    """A request waits half as long as it may."""
    wait = MemoryService._wait

    def hasty(self: MemoryService, attempt: Attempt, now: Moment) -> Awaitable[Any]:
        attempt.request = replace(attempt.request, wait_s=attempt.request.wait_s / 2)
        return wait(self, attempt, now)

    with patch.object(MemoryService, "_wait", hasty):
        yield


@contextmanager
def wait_on() -> Iterator[None]:
    """A request waits longer than it may."""
    wait = MemoryService._wait

    def patient(self: MemoryService, attempt: Attempt, now: Moment) -> Awaitable[Any]:
        attempt.request = replace(attempt.request, wait_s=attempt.request.wait_s + 1.0)
        return wait(self, attempt, now)

    with patch.object(MemoryService, "_wait", patient):
        yield


@contextmanager
def evict_nothing() -> Iterator[None]:
    """Cached blocks stay, and requests fail."""
    with patch.object(Allocation, "_make_room", lambda *_: ()):
        yield


@contextmanager
def count_cached_blocks_as_free() -> Iterator[None]:
    """A shortage tells of free bytes that are cached."""
    shortage = Allocation._shortage

    def vain(self: Allocation, device: Device, *arguments: Any, **more: Any) -> Any:
        told = shortage(self, device, *arguments, **more)
        return replace(told, total_free=told.total_free + device.core.cached_bytes)

    with patch.object(Allocation, "_shortage", vain):
        yield


@contextmanager
def leave_cached_blocks_out_of_the_sums() -> Iterator[None]:
    """What is cached counts as not allocated."""
    stats = PoolCore.stats

    def other(self: PoolCore) -> PoolStats:
        found = stats(self)
        return replace(found, allocated_bytes=found.allocated_bytes - found.cached_bytes)

    with patch.object(PoolCore, "stats", other):
        yield


@contextmanager
def find_a_fit_without_alignment() -> Iterator[None]:
    """Where a block would go is where the hole begins."""
    with patch("forged.memory.book.questions.FitPlace", _unaligned):
        yield


def _unaligned(device: str, offset: int, *more: Any) -> Any:
    from forged.memory.messages import FitPlace

    return FitPlace(device, offset - offset % 1024 + 256, *more)


@contextmanager
def keep_the_blocks_of_workers_that_left() -> Iterator[None]:
    """Only a worker that fails loses its devices and blocks."""
    workers_ended = MemoryService._workers_ended

    def lazy(self: MemoryService, record: Record) -> None:
        if not isinstance(record.fact, WorkerLeft):
            workers_ended(self, record)

    with patch.object(MemoryService, "_workers_ended", lazy):
        yield


@contextmanager
def serve_gone_workers() -> Iterator[None]:
    """Nothing asks whether a worker is registered."""

    def trusting(self: MemoryService, request: Any, call: Call, now: Moment) -> Owner:
        return self.table.owner(request.job, request.worker_id, request.incarnation, call.principal.holder, now)

    with patch.object(MemoryService, "_owner", trusting):
        yield


@contextmanager
def forget_the_hysteresis() -> Iterator[None]:
    """The pressure falls as soon as it is below a threshold."""
    with patch("forged.memory.forecast.HYSTERESIS", 0.0):
        yield


@contextmanager
def count_expired_moves_as_committed() -> Iterator[None]:
    """A plan's end tells of more moves than were committed."""
    note = DeviceTable.note_plan_end

    def vain(self: DeviceTable, device: Device, expired: int = 0) -> None:
        if expired and device.core.plan is None:
            device.committed = {**device.committed, **{-number: ("", 0) for number in range(1, expired + 1)}}
        note(self, device, expired)

    with patch.object(DeviceTable, "note_plan_end", vain):
        yield


@contextmanager
def answer_all_jobs() -> Iterator[None]:
    """The memory of a job is shown to, and changed by, the tenants of all jobs."""
    authorise = RequestDispatcher._authorise

    def open_to_all(self: RequestDispatcher, request: Request[Any], call: Call) -> None:
        if not isinstance(request, REQUESTS):
            authorise(self, request, call)

    with patch.object(RequestDispatcher, "_authorise", open_to_all):
        yield


@contextmanager
def commit_without_a_copy() -> Iterator[None]:
    """The client commits moves, and copies nothing."""
    move_blocks = DeviceMemory._move_blocks

    async def nothing(move: Move) -> None:
        """The content stays where it was."""

    async def hasty(self: DeviceMemory, copy: Callable[[Move], Awaitable[None]], epoch: int) -> None:
        await move_blocks(self, nothing, epoch)

    with patch.object(DeviceMemory, "_move_blocks", hasty):
        yield


@contextmanager
def forget_to_assert() -> Iterator[None]:
    """The client registers its device after a restart, and asserts nothing."""

    async def forgetful(self: DeviceMemory) -> None:
        await self._client.assert_blocks(*self._worker, self.name, [])

    with patch.object(DeviceMemory, "_assert_all", forgetful):
        yield


@contextmanager
def assert_all_blocks_or_none() -> Iterator[None]:
    """When the assertion of all blocks is refused, the client asserts none."""

    async def hasty(self: DeviceMemory, held: Iterable[HeldBlock]) -> None:
        """What is not refused is not asserted either."""

    with patch.object(DeviceMemory, "_assert_each", hasty):
        yield


MUTANTS: dict[str, Mutant] = {}
BREAKS: dict[str, Promise] = {}
"""The promise that each of them breaks."""

for mutant, promise in (
    (ignore_the_alignment, Promise.APART),
    (enter_asserted_blocks_where_there_is_room, Promise.APART),
    (tell_a_batch_where_its_blocks_were, Promise.KEPT),
    (evict_without_a_fact, Promise.KEPT),
    (remove_the_process_that_took_the_name, Promise.KEPT),
    (forget_to_assert, Promise.KEPT),
    (assert_all_blocks_or_none, Promise.KEPT),
    (commit_without_a_copy, Promise.CONTENT),
    (give_a_repeated_request_another_block, Promise.ONCE),
    (allocate_a_part_of_all, Promise.ONCE),
    (move_pinned_blocks, Promise.PINNED),
    (cache_pinned_blocks, Promise.PINNED),
    (evict_blocks_that_move, Promise.MOVES),
    (commit_moves_in_any_order, Promise.MOVES),
    (keep_the_version_of_a_moved_block, Promise.MOVES),
    (allocate_where_moves_go, Promise.MOVES),
    (refuse_a_repeated_commit, Promise.MOVES),
    (never_end_a_plan, Promise.MOVES),
    (accept_stale_handles, Promise.HANDLES),
    (free_what_is_free, Promise.HANDLES),
    (allocate_while_owners_assert, Promise.ASSERTED),
    (wait_for_the_owner_of_the_device_only, Promise.ASSERTED),
    (plan_while_owners_assert, Promise.ASSERTED),
    (believe_late_assertions, Promise.ASSERTED),
    (believe_newcomers, Promise.ASSERTED),
    (believe_asserted_cached_blocks, Promise.ASSERTED),
    (believe_blocks_of_earlier_processes, Promise.ASSERTED),
    (serve_in_the_order_of_arrival, Promise.ORDER),
    (never_let_requests_age, Promise.ORDER),
    (serve_what_fits, Promise.ORDER),
    (pass_those_that_wait, Promise.ORDER),
    (forget_to_serve, Promise.ORDER),
    (give_up_early, Promise.DEADLINE),
    (wait_on, Promise.DEADLINE),
    (evict_nothing, Promise.SHORTAGE),
    (count_cached_blocks_as_free, Promise.SHORTAGE),
    (leave_cached_blocks_out_of_the_sums, Promise.LISTED),
    (find_a_fit_without_alignment, Promise.LISTED),
    (keep_the_blocks_of_workers_that_left, Promise.GONE),
    (serve_gone_workers, Promise.GONE),
    (forget_the_hysteresis, Promise.FACTS),
    (count_expired_moves_as_committed, Promise.FACTS),
    (answer_all_jobs, Promise.REFUSED),
):
    MUTANTS[mutant.__name__] = mutant
    BREAKS[mutant.__name__] = promise
