"""The memory of a worker's device, with the blocks that the worker has in it.

Invariants:
- The blocks outlive the daemon: after each reconnection the device is registered, its planned offsets are too, and its
  blocks are asserted again.
- A block that was evicted is told once, as soon as it is known, and is among the blocks no more.
- A block is never told as held where another one may be: a cached block is dropped when the daemon restarts, and so is
  one whose move may have been committed by a daemon that is gone.
- A block is copied when all moves that its move waits for are committed, and has its new handle when its own one is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Self, TypeVar

import anyio
from anyio.abc import TaskGroup
from msgspec.structs import replace

from forged.client.client import CLOSED, ForgedClient
from forged.client.owner_task import OwnerTask
from forged.client.stream import FactStream
from forged.clock import Clock, SystemClock
from forged.errors import ForgedError, RequestRefused, Unavailable, describe
from forged.kernel.messages import Record
from forged.log import SILENT, Log
from forged.memory.errors import block_unknown
from forged.memory.messages import (
    BATCH_MAX,
    Allocated,
    AssertBlocks,
    BlockEvicted,
    CompactionPlanned,
    Handle,
    HeldBlock,
    ListBlocks,
    Move,
    OffsetPlanView,
    Wanted,
)
from forged.memory.model import BlockStatus, GpuDevice, MemoryBlock, PlannedBlock

T = TypeVar("T")

AGAIN_S = 0.1
"""So often it is looked whether the moves of other workers are committed, and whether a busy daemon answers."""
DEVICE_UNKNOWN, BLOCK_UNKNOWN = "memory_device_unknown", "memory_block_unknown"
ASSERTION_REFUSED = "memory_assertion_refused"
STATUS_AFTER = {
    "pin": BlockStatus.PINNED,
    "unpin": BlockStatus.ALLOCATED,
    "cache": BlockStatus.CACHED,
    "use": BlockStatus.ALLOCATED,
}


class DeviceMemory:
    """A device of a registered worker, and the worker's blocks in it; an asynchronous context manager.

    `copy` moves the bytes of a block from `move.source` to `move.destination`; without it no block moves. `evicted` is
    called for each cached block that has given way to another one, or that a restarted daemon does not have, and for
    each block whose move the daemon did not answer before it restarted: their content is lost. `elsewhere` are the
    devices of other workers on which the worker has blocks; the program asserts those itself.
    """

    def __init__(
        self,
        client: ForgedClient,
        job: str,
        worker_id: str,
        incarnation: bytes,
        device: GpuDevice,
        *,
        copy: Callable[[Move], Awaitable[None]] | None = None,
        evicted: Callable[[HeldBlock], object] = lambda held: None,
        elsewhere: Sequence[str] = (),
        clock: Clock | None = None,
        log: Log = SILENT,
    ) -> None:
        self.name = f"{worker_id}/{device.device_id}"
        self._client = client
        self._worker = (job, worker_id, incarnation)
        self._device = device
        self._copy = copy
        self._evicted = evicted
        self._elsewhere = elsewhere
        self._clock = clock or SystemClock()
        self._log = log
        self._blocks: dict[str, HeldBlock] = {}
        self._planned: list[PlannedBlock] = []
        self._committing: Move | None = None
        """The move whose commit is not answered."""
        self._lock = anyio.Lock()
        """Held while blocks are asserted or freed: a freed block must not be asserted."""
        self._needs_restoring = anyio.Event()
        """Set when the connection has changed, and when it is unknown whether blocks are freed."""
        self._owner = OwnerTask(self._running())

    async def __aenter__(self) -> Self:
        await self._owner.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self._owner.close()

    @property
    def blocks(self) -> Mapping[str, HeldBlock]:
        """The worker's blocks in this device, by name."""
        return MappingProxyType(self._blocks)

    async def plan_offsets(self, blocks: Sequence[PlannedBlock]) -> OffsetPlanView:
        """Give blocks of these names their planned offsets, also after a restart of the daemon; none ends the plan."""
        self._planned = list(blocks)
        return await self._asked(partial(self._client.plan_offsets, *self._worker, self.name, self._planned))

    async def allocate(
        self, *wanted: Wanted, all_or_none: bool = False, evict: bool = True, wait_s: float = 0.0
    ) -> list[Allocated]:
        """Allocate blocks in batches; `all_or_none` is for as many blocks as one request has at most."""
        replies: list[Allocated] = []
        for page in [wanted] if all_or_none else _pages(wanted):
            replies += await self._allocate(page, all_or_none=all_or_none, evict=evict, wait_s=wait_s)
        return replies

    async def free(self, *names: str) -> None:
        """Free blocks; those that were evicted meanwhile are free already.

        After an error the blocks may be free: they are asserted again, and `evicted` is called for those that are.
        """
        async with self._lock:
            for page in _pages(self._named(names)):
                for one in page:
                    self._blocks.pop(one.handle.name, None)
                try:
                    await self._free(page)
                except BaseException:
                    for one in page:
                        self._blocks.setdefault(one.handle.name, one)
                    self._needs_restoring.set()
                    raise

    async def change(self, change: str, *names: str, content: str | None = None) -> None:
        """Change blocks by `pin`, `unpin`, `cache`, `use` or `touch`; refused if one of them was evicted."""
        for page in _pages(self._named(names)):
            handles = [one.handle for one in page]
            if change == "cache":
                # From the request on the blocks may give way, whether it is answered or not.
                for one in page:
                    self._note_change(one.handle.name, change, content)
            try:
                await self._asked(
                    partial(self._client.change_blocks, *self._worker, self.name, handles, change, content=content)
                )
            except RequestRefused as refusal:
                if change == "cache":
                    self._not_changed(page)
                if refusal.code == BLOCK_UNKNOWN:
                    await self._check(one.handle.name for one in page)
                raise
            for one in page:
                self._note_change(one.handle.name, change, content)

    def _named(self, names: Iterable[str]) -> list[HeldBlock]:
        for name in names:
            if name not in self._blocks:
                raise block_unknown(name)
        return [self._blocks[name] for name in dict.fromkeys(names)]

    def _not_changed(self, before: Iterable[HeldBlock]) -> None:
        """The daemon has refused to change these blocks."""
        for one in before:
            if (held := self._blocks.get(one.handle.name)) is not None and held.handle == one.handle:
                self._blocks[one.handle.name] = one

    def _note_change(self, name: str, change: str, content: str | None) -> None:
        held = self._blocks.get(name)
        if held is not None:
            status = STATUS_AFTER.get(change, held.block.status)
            if change == "use" and held.block.status is BlockStatus.PINNED:
                status = BlockStatus.PINNED
            block = replace(held.block, status=status, last_accessed=self._clock.wall())
            self._blocks[name] = replace(held, block=block, content=held.content if content is None else content)

    # Requests.

    async def _allocate(
        self, wanted: Sequence[Wanted], *, all_or_none: bool, evict: bool, wait_s: float
    ) -> list[Allocated]:
        async with self._lock:
            # Blocks that are being asserted come first: a new one must not take their place.
            pass
        replies = await self._asked(
            lambda: self._client.allocate_memory(
                *self._worker, self.name, wanted, all_or_none=all_or_none, evict=evict, wait_s=wait_s
            )
        )
        own = f"{self._worker[1]}:"
        for reply in replies:
            for block_id in reply.evicted:
                if block_id.startswith(own):
                    self._forget(block_id[len(own) :])
        for one, reply in zip(wanted, replies, strict=True):
            self._enter(one, reply)
        return replies

    def _enter(self, wanted: Wanted, reply: Allocated) -> None:
        known = self._blocks.get(wanted.name)
        if reply.handle is None:
            return
        if known is not None and (known.handle, known.block.offset) == (reply.handle, reply.offset):
            return
        if known is not None and not self._is_moved(known, reply):
            # The one that was known has given way.
            self._forget(wanted.name)
        request, now = wanted.request, self._clock.wall()
        status = (
            BlockStatus.PINNED if request.pinned else BlockStatus.CACHED if wanted.cached else BlockStatus.ALLOCATED
        )
        block_id = f"{self._worker[1]}:{wanted.name}"
        block = MemoryBlock(
            block_id, reply.offset, reply.actual_size, status, request.tensor_id, now, now, request.priority
        )
        held = HeldBlock(reply.handle, self._worker[1], block, wanted.content, wanted.reload_s)
        self._blocks[wanted.name] = held

    def _is_moved(self, known: HeldBlock, reply: Allocated) -> bool:
        """Whether the block that is told is the known one, after its move that is being committed."""
        move, handle = self._committing, reply.handle
        return (
            move is not None
            and handle is not None
            and move.handle == known.handle
            and (handle.version, reply.offset) == (known.handle.version + 1, move.destination)
        )

    async def _free(self, held: Sequence[HeldBlock]) -> None:
        try:
            await self._client.free_memory(*self._worker, self.name, [one.handle for one in held])
        except RequestRefused as refusal:
            if refusal.code == BLOCK_UNKNOWN and len(held) > 1:
                for one in held:
                    await self._free([one])
            elif refusal.code not in (BLOCK_UNKNOWN, DEVICE_UNKNOWN):
                raise

    async def _asked(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The reply; a daemon that has restarted gets the device and the blocks first."""
        try:
            return await ask()
        except RequestRefused as refusal:
            if refusal.code != DEVICE_UNKNOWN:
                raise
        await self._restore()
        return await ask()

    # What happens meanwhile.

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        client, job = self._client, self._worker[0]
        async with client.facts(BlockEvicted, CompactionPlanned, jobs=[job]) as stream:
            await self._restore()
            async with anyio.create_task_group() as tasks:
                client.connection_listeners.append(self._note_connection)
                try:
                    tasks.start_soon(self._listen, stream)
                    tasks.start_soon(self._restore_when_needed)
                    yield
                finally:
                    client.connection_listeners.remove(self._note_connection)
                    tasks.cancel_scope.cancel()

    def _note_connection(self) -> None:
        self._needs_restoring.set()

    async def _restore_when_needed(self) -> None:
        while True:
            await self._needs_restoring.wait()
            self._needs_restoring = anyio.Event()
            if not self._client.connected:
                continue
            try:
                await self._restore()
            except Unavailable:
                await anyio.sleep(AGAIN_S)
                self._needs_restoring.set()
            except ForgedError as error:
                # Such as that the worker is registered no more: its next request is refused too.
                self._log.warning("a device could not be registered again", device=self.name, error=describe(error))

    async def _restore(self) -> None:
        """Register the device and assert its blocks; a daemon that knows them changes nothing."""
        async with self._lock:
            while True:
                await self._client.register_device(*self._worker, self._device)
                try:
                    if self._planned:
                        await self._client.plan_offsets(*self._worker, self.name, self._planned)
                    await self._assert_all()
                except RequestRefused as refusal:
                    if refusal.code != DEVICE_UNKNOWN:
                        raise
                    # The daemon has restarted once more.
                else:
                    return

    async def _assert_all(self) -> None:
        # By offset, as the daemon enters them faster in this order.
        held = sorted(self._blocks.values(), key=lambda one: one.block.offset)
        try:
            handles = await self._client.assert_blocks(*self._worker, self.name, held, elsewhere=self._elsewhere)
        except RequestRefused as refusal:
            if refusal.code != ASSERTION_REFUSED:
                raise
            await self._assert_each(held)
            await self._client.assert_blocks(*self._worker, self.name, [], elsewhere=self._elsewhere)
        else:
            self._keep(held, handles)

    async def _check(self, names: Iterable[str]) -> None:
        """Find out which of these blocks were evicted."""
        async with self._lock:
            await self._assert_each([self._blocks[name] for name in names if name in self._blocks])

    async def _assert_each(self, held: Iterable[HeldBlock]) -> None:
        """Assert blocks one by one; those that the daemon does not have are gone."""
        for one in held:
            try:
                handles = await self._client.request(AssertBlocks(*self._worker, self.name, [one], more=True))
            except RequestRefused as refusal:
                if refusal.code != ASSERTION_REFUSED:
                    raise
                self._forget(one.handle.name)
            else:
                self._keep([one], handles)

    def _keep(self, asserted: Iterable[HeldBlock], handles: Iterable[Handle]) -> None:
        """Of the asserted blocks the daemon has those of these handles; the others are gone."""
        kept = set(handles)
        for one in asserted:
            held = self._blocks.get(one.handle.name)
            if held is not None and held.handle == one.handle and one.handle not in kept:
                self._forget(one.handle.name)

    def _forget(self, name: str) -> None:
        held = self._blocks.pop(name, None)
        if held is not None:
            self._evicted(held)

    async def _listen(self, stream: FactStream) -> None:
        async with anyio.create_task_group() as moving:
            # The stream ends with the client; further requests tell why.
            with _logged(self._log, "facts are not received any more", self.name):
                await self._follow(stream, moving)

    async def _follow(self, stream: FactStream, moving: TaskGroup) -> None:
        async for item in stream:
            fact = item.fact if isinstance(item, Record) else None
            if isinstance(fact, CompactionPlanned):
                if fact.device == self.name and self._copy is not None:
                    moving.start_soon(self._move_blocks, self._copy, fact.epoch)
            elif fact is None or (isinstance(fact, BlockEvicted) and fact.device == self.name):
                with _logged(self._log, "evicted blocks are unknown", self.name):
                    await self._check(self._perhaps_evicted(fact))

    def _perhaps_evicted(self, fact: BlockEvicted | None) -> list[str]:
        """The blocks that a fact names; all that could be if it does not name all, or if facts are missing."""
        if fact is None or fact.count > len(fact.blocks):
            return [name for name, held in self._blocks.items() if held.block.status is BlockStatus.CACHED]
        own = f"{self._worker[1]}:"
        return [block_id[len(own) :] for block_id in fact.blocks if block_id.startswith(own)]

    async def _move_blocks(self, copy: Callable[[Move], Awaitable[None]], epoch: int) -> None:
        """Copy and commit this worker's moves of a compaction plan."""
        with _logged(self._log, "blocks were not moved", self.name):
            while moves := await self._open_moves(epoch):
                numbers = {move.number for move in moves}
                own = [move for move in moves if move.worker_id == self._worker[1]]
                ready = [move for move in own if move.after not in numbers]
                if not own:
                    return
                for move in ready:
                    try:
                        await copy(move)
                    except Exception as error:  # noqa: BLE001 - the block stays where it is
                        self._log.error("a block could not be copied", block=move.handle.name, error=describe(error))
                        return
                    if move in await self._open_moves(epoch):
                        # A daemon that has restarted meanwhile is not asked: its refusal would not tell the place.
                        await self._commit(epoch, move)
                if not ready:
                    await anyio.sleep(AGAIN_S)

    async def _open_moves(self, epoch: int) -> list[Move]:
        """The uncommitted moves of the plan; empty if it has ended."""
        plan = await self._client.plan_compaction(self._worker[0], self.name, dry_run=True)
        return plan.moves if plan.epoch == epoch and plan.expires_in_s > 0 else []

    async def _commit(self, epoch: int, move: Move) -> None:
        async with self._lock:
            self._committing = move
            try:
                handle = await self._committed(epoch, move.number)
            except RequestRefused:
                # An attempt that was not answered may have been executed, also by a daemon that is gone.
                if not await self._is_at_source(move):
                    self._forget(move.handle.name)
                raise
            finally:
                self._committing = None
            held = self._blocks.get(handle.name)
            if held is not None and held.handle == move.handle:
                block = replace(held.block, offset=move.destination)
                self._blocks[handle.name] = replace(held, handle=handle, block=block)

    async def _is_at_source(self, move: Move) -> bool:
        """Whether the daemon has the block where it was before the move; one that has restarted has not."""
        job, own = self._worker[0], (self._worker[1], move.handle, move.source)
        while True:
            try:
                page = await self._client.request(ListBlocks(job, self.name, move.source, 1))
            except RequestRefused:
                return False
            except Unavailable as error:
                if error.code == CLOSED.code:
                    raise
                await anyio.sleep(AGAIN_S)
            else:
                return any((one.worker_id, one.handle, one.block.offset) == own for one in page.blocks)

    async def _committed(self, epoch: int, number: int) -> Handle:
        """Commit until it is answered: before, it is unknown where the block is."""
        while True:
            try:
                return await self._client.commit_move(*self._worker, self.name, epoch, number)
            except Unavailable as error:
                if error.code == CLOSED.code:
                    raise
                await anyio.sleep(AGAIN_S)


@contextmanager
def _logged(log: Log, event: str, device: str) -> Iterator[None]:
    """Log an error of the daemon, and go on."""
    try:
        yield
    except ForgedError as error:
        log.warning(event, device=device, error=describe(error))


def _pages(entries: Sequence[T]) -> list[Sequence[T]]:
    return [entries[start : start + BATCH_MAX] for start in range(0, len(entries), BATCH_MAX)]
