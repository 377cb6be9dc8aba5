"""The daemon's work on the files of checkpoints: deletes, looks for, verifies.

Invariants:
- Files are deleted of tombstones only, and only when these are durable. A tombstone is forgotten after its files are
  gone.
- A record is looked at again after each call, because it may have changed meanwhile.
- A storage that fails, is slow or gone changes no record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import nsmallest
from typing import Any

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from forged.catalog.book.catalog_book import CatalogBook
from forged.catalog.files.work_queue import FileTask, FileTaskKind, WorkQueue
from forged.catalog.messages import CheckpointOperation, CheckpointProgress, GcTick
from forged.catalog.model import CheckpointState
from forged.catalog.ports import FOLDER_MISSING, CheckpointFiles
from forged.catalog.records import CheckpointRecord, Moment
from forged.clock import Clock
from forged.errors import ForgedError
from forged.kernel.bus import DAEMON, Bus
from forged.kernel.messages import Call, Decision
from forged.log import Log

OWNER = "catalog"
TICK_S = 10.0
FOLDERS_AT_ONCE = 8
NOT_YET = frozenset({"checkpoint_needed", "checkpoint_being_read"})
"""The codes of errors about one checkpoint: its folder can be used."""
MISSING_KEPT_S = 7 * 86_400.0
"""For so long a missing folder may come back, as that of a file system that is mounted again."""
SCRUB_AGAIN_S = 86_400.0
"""So long after a verification a checkpoint is not verified again."""
SCRUB_PAUSE_S = 60.0
SCRUB_CHOSEN_AT_ONCE = 1000
SUSPECT_BYTES_PER_S = 100 << 20
"""The rate at which a checkpoint is verified that a worker has reported as corrupt, where scrubbing is off."""
SUSPECTS_MAX = 1000
VERIFYING = "verifying"
REPAIRING = "repairing"
COMPACTING = "compacting"
COMPACTION_TRIES = 5
COMPACTION_PAUSE_S = 30.0


class FileWork:
    """Everything that the daemon does with files of checkpoints."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        book: CatalogBook,
        files: CheckpointFiles,
        log: Log,
        *,
        is_registered: Callable[[str, str, bytes], bool],
        decide: Callable[[Decision[Any]], Any],
        scrub_bytes_per_s: int = 0,
    ) -> None:
        """`decide` queues a decision and returns its pending reply."""
        self.operations: dict[str, CheckpointOperation] = {}
        """What is done at present, by checkpoint."""
        self.scrub_bytes_per_s = scrub_bytes_per_s
        """0: checkpoints are not verified without a reason."""
        self._bus = bus
        self._clock = clock
        self._book = book
        self._files = files
        self._log = log
        self._is_registered = is_registered
        self._decide = decide
        self._queue = WorkQueue()
        self._suspects: deque[str] = deque(maxlen=SUSPECTS_MAX)
        self._chosen: deque[str] = deque()
        """The checkpoints that are verified next."""
        self._not_before: dict[str, float] = {}
        """When a checkpoint whose storage failed may be verified again."""
        self._damaged: set[str] = set()
        """The checkpoints whose damage was found here."""
        self._to_compact: dict[str, int] = {}
        """How often each compaction has been tried."""
        self._wake_event = anyio.Event()
        self._suspected = anyio.Event()
        self._compaction_wanted = anyio.Event()
        self._compacting = ""
        """The checkpoint that is compacted now; the lock is held meanwhile."""
        self._compaction = anyio.Lock()

    def reload(self) -> None:
        """The book was loaded from the store: everything in it is durable."""
        self._queue.clear()
        self._suspects.clear()
        self._chosen.clear()
        self._damaged.clear()
        self._to_compact.clear()
        self.operations.clear()
        for record in self._book.tombstones():
            self.delete(record)
        for record in self._book.records.values():
            if record.is_to_compact:
                self.compact(record)

    def delete(self, record: CheckpointRecord) -> None:
        """Delete the files of a durable tombstone, if the daemon may."""
        if self._book.is_managed(record):
            self._add(FileTaskKind.DELETE, record)

    def suspect(self, record: CheckpointRecord) -> None:
        """Verify a checkpoint that is said to be corrupt, if the daemon may."""
        if self._book.is_managed(record) and record.id not in self._damaged and record.id not in self._suspects:
            self._suspects.append(record.id)
            self._suspected.set()

    def compact(self, record: CheckpointRecord) -> None:
        """Make a full checkpoint of an incremental one."""
        if record.id not in self._to_compact:
            self._to_compact[record.id] = 0
            self.operations[record.id] = CheckpointOperation(COMPACTING, 0, record.meta.size_bytes)
            self._compaction_wanted.set()

    def wake(self) -> None:
        """Look at once for what is due."""
        self._wake_event.set()

    def _add(self, kind: FileTaskKind, record: CheckpointRecord) -> None:
        self._queue.add(record.folder, FileTask(kind, record.id))
        self.wake()

    def _now(self) -> Moment:
        return Moment(self._clock.wall(), self._clock.monotonic())

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Do what is due, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tick_periodically)
            tasks.start_soon(self._scrub)
            tasks.start_soon(self._compact_requested)
            task_status.started()
            while True:
                self._wake_event = anyio.Event()
                now = self._clock.monotonic()
                for folder in list(self._queue.begin(now, FOLDERS_AT_ONCE)):
                    tasks.start_soon(self._work_in, folder)
                with anyio.move_on_after(max(0.0, min(self._queue.next_at() - now, TICK_S))):
                    await self._wake_event.wait()

    # Ticks.

    async def _tick_periodically(self) -> None:
        while True:
            await self._bus.ledger.writable()
            try:
                self.tick()
            except ForgedError as error:
                # The ledger became read-only in between: the next tick finds the same.
                self._log.debug("a tick of the catalogue was not recorded", reason=error.message)
            await anyio.sleep(TICK_S)

    def tick(self) -> None:
        """Release what is held too long, look for saves whose writers have not reported the end, and collect."""
        now = self._now()
        for decision in self._book.release_expired(now):
            self._decide(decision)
        for record, reason in list(self._book.unsettled(self._is_registered, now)):
            if self._book.is_managed(record):
                self._add(FileTaskKind.FIND, record)
            else:
                self._end_without_files(record, reason, now)
        self._bus.signal(GcTick(), Call(DAEMON, OWNER))

    def _end_without_files(self, record: CheckpointRecord, reason: str, now: Moment) -> None:
        if record.is_being_written:
            self._decide(self._book.give_up(record.id, reason, now))
        else:
            self._decide(self._book.sweep(record.id))

    # Folders.

    async def _work_in(self, folder: str) -> None:
        while (task := self._queue.next(folder)) is not None:
            try:
                await self._bus.ledger.writable()
                await self._do(task)
            except ForgedError as error:
                if error.code in NOT_YET:
                    self._queue.postpone(folder, task, self._clock.monotonic())
                    self._log.debug("a checkpoint is not deleted yet", folder=folder, reason=error.message)
                    continue
                failing_s = self._queue.failed(folder, task, self._clock.monotonic())
                if error.code == FOLDER_MISSING and failing_s >= MISSING_KEPT_S:
                    self._forget_missing(task)
                elif not failing_s:
                    self._log.warning(
                        "the storage of checkpoints cannot be used; trying again", folder=folder, reason=error.message
                    )
                break
            else:
                self._queue.done(folder, task)
        self.wake()

    def _forget_missing(self, task: FileTask) -> None:
        record = self._book.records.get(task.checkpoint_id)
        if task.kind is FileTaskKind.DELETE and record is not None and record.is_deleted:
            self._decide(self._book.deleted([record.id])[0])

    async def _do(self, task: FileTask) -> None:
        record = self._book.records.get(task.checkpoint_id)
        if record is None or not self._book.is_managed(record):
            return
        if task.kind is FileTaskKind.DELETE:
            await self._delete(record)
        else:
            await self._find(record)

    async def _delete(self, record: CheckpointRecord) -> None:
        if not record.is_deleted:
            return
        if record.id == self._compacting:
            # It would write files behind the deletion.
            async with self._compaction:
                pass
        self._show(record, FileTaskKind.DELETE, 0, record.meta.size_bytes)
        try:
            await self._files.delete(self._book.location(record))
        finally:
            self.operations.pop(record.id, None)
        await self._bus.ledger.writable()
        known = self._book.records.get(record.id)
        if known is not None and known.is_deleted:
            await self._decide(self._book.deleted([record.id])[0]).wait()

    async def _find(self, record: CheckpointRecord) -> None:
        """Complete a checkpoint that is there; give up one that is not, or delete what a failed save has left."""
        reason = self._book.why_unsettled(record, self._is_registered, self._now())
        if not reason:
            return
        size_bytes = await self._files.find(self._book.location(record))
        await self._bus.ledger.writable()
        known = self._book.records.get(record.id)
        if known is None or known.meta.state is not record.meta.state or record.id not in self._book.since:
            return
        if size_bytes is not None:
            for decision in self._book.found(record.id, size_bytes, self._now()):
                await self._decide(decision).wait()
            return
        # A failed save may have begun again meanwhile.
        reason = self._book.why_unsettled(known, self._is_registered, self._now())
        if not reason:
            return
        if known.is_being_written:
            await self._decide(self._book.give_up(record.id, reason, self._now())).wait()
        else:
            await self._decide(self._book.sweep(record.id)).wait()

    # Scrubbing.

    async def _scrub(self) -> None:
        while True:
            self._suspected = anyio.Event()
            checkpoint_id = self._next_to_verify()
            if checkpoint_id is None:
                with anyio.move_on_after(SCRUB_PAUSE_S):
                    await self._suspected.wait()
                continue
            await self._bus.ledger.writable()
            try:
                await self._verify(checkpoint_id)
            except ForgedError as error:
                self._not_before[checkpoint_id] = self._clock.monotonic() + 10 * SCRUB_PAUSE_S
                self._log.debug("a checkpoint was not verified", checkpoint=checkpoint_id, reason=error.message)

    def _next_to_verify(self) -> str | None:
        while self._suspects:
            if self._may_verify(checkpoint_id := self._suspects.popleft()):
                return checkpoint_id
        if not self.scrub_bytes_per_s:
            return None
        if not self._chosen:
            self._chosen.extend(self._oldest_verified())
        while self._chosen:
            if self._may_verify(checkpoint_id := self._chosen.popleft()):
                return checkpoint_id
        return None

    def _oldest_verified(self) -> list[str]:
        now = self._clock.monotonic()
        self._not_before = {one: at for one, at in self._not_before.items() if at > now}
        latest = self._clock.wall() - SCRUB_AGAIN_S
        due = (
            (one.meta.verified_at or one.meta.created_at, one.id)
            for one in self._book.records.values()
            if one.meta.state is CheckpointState.COMPLETE
            and one.id not in self._not_before
            and (one.meta.verified_at is None or one.meta.verified_at <= latest)
        )
        return [checkpoint_id for _, checkpoint_id in nsmallest(SCRUB_CHOSEN_AT_ONCE, due)]

    def _may_verify(self, checkpoint_id: str) -> bool:
        record = self._book.records.get(checkpoint_id)
        if record is None or not self._book.is_managed(record) or record.meta.is_failed_save:
            return False
        return record.meta.state in (CheckpointState.COMPLETE, CheckpointState.CORRUPTED)

    async def _verify(self, checkpoint_id: str) -> None:
        record = self._book.records[checkpoint_id]
        rate = self.scrub_bytes_per_s or SUSPECT_BYTES_PER_S
        try:
            wrong = await self._files.verify(self._book.location(record), rate, partial(self._show, record, VERIFYING))
        finally:
            self.operations.pop(checkpoint_id, None)
        await self._bus.ledger.writable()
        if not self._may_verify(checkpoint_id):
            return
        is_complete = self._book.records[checkpoint_id].meta.state is CheckpointState.COMPLETE
        if not wrong:
            self._damaged.discard(checkpoint_id)
            await self._decide(self._book.verified(checkpoint_id, self._now())).wait()
        elif is_complete:
            self._damaged.add(checkpoint_id)
            await self._decide(self._book.damaged(checkpoint_id, wrong)).wait()
        if wrong:
            await self._repair(record)

    async def _repair(self, record: CheckpointRecord) -> None:
        """Replace the corrupt bytes by healthy copies, and verify the checkpoint again."""
        self.operations[record.id] = CheckpointOperation(REPAIRING, 0, record.meta.size_bytes)
        try:
            if await self._files.repair(self._book.location(record)):
                self._suspects.append(record.id)
        except ForgedError as error:
            self._log.warning("a checkpoint was not repaired", checkpoint=record.id, reason=error.message)
        finally:
            self.operations.pop(record.id, None)

    # Compaction.

    async def _compact_requested(self) -> None:
        while True:
            self._compaction_wanted = anyio.Event()
            checkpoint_id = next(iter(self._to_compact), None)
            if checkpoint_id is None:
                await self._compaction_wanted.wait()
                continue
            await self._bus.ledger.writable()
            try:
                await self._compact(checkpoint_id)
            except ForgedError as error:
                await self._compaction_failed(checkpoint_id, error)

    async def _compact(self, checkpoint_id: str) -> None:
        record = self._book.records.get(checkpoint_id)
        size_bytes = None
        if record is not None and record.meta.state is CheckpointState.COMPLETE and record.meta.is_incremental:
            size_bytes = await self._compact_files(record)
            await self._bus.ledger.writable()
            record = self._book.records.get(checkpoint_id)
        if size_bytes is not None and self._book.is_read(checkpoint_id):
            # A reader that has read the manifest before may still need the parents.
            del self._to_compact[checkpoint_id]
            self._to_compact[checkpoint_id] = 0
            await anyio.sleep(COMPACTION_PAUSE_S)
            return
        if size_bytes is not None and record is not None and record.meta.state is CheckpointState.COMPLETE:
            await self._decide(self._book.compacted(checkpoint_id, size_bytes)).wait()
        elif record is not None and record.is_to_compact:
            gone = f"it is {record.meta.state}"
            await self._decide(self._book.operation_failed(checkpoint_id, COMPACTING, gone)).wait()
        self._compaction_ended(checkpoint_id)

    async def _compact_files(self, record: CheckpointRecord) -> int:
        async with self._compaction:
            self._compacting = record.id
            try:
                return await self._files.compact(self._book.location(record), partial(self._show, record, COMPACTING))
            finally:
                self._compacting = ""

    async def _compaction_failed(self, checkpoint_id: str, error: ForgedError) -> None:
        """Try it again after the other compactions, if the error may pass."""
        tries = self._to_compact.pop(checkpoint_id, 0) + 1
        if error.retryable and tries < COMPACTION_TRIES:
            self._to_compact[checkpoint_id] = tries
            await anyio.sleep(COMPACTION_PAUSE_S)
            return
        self._compaction_ended(checkpoint_id)
        await self._bus.ledger.writable()
        if checkpoint_id in self._book.records:
            self._decide(self._book.operation_failed(checkpoint_id, COMPACTING, error.message))

    def _compaction_ended(self, checkpoint_id: str) -> None:
        self._to_compact.pop(checkpoint_id, None)
        self.operations.pop(checkpoint_id, None)

    def _show(self, record: CheckpointRecord, operation: str, done_bytes: int, total_bytes: int) -> None:
        self.operations[record.id] = CheckpointOperation(operation, done_bytes, total_bytes)
        progress = CheckpointProgress(record.job, record.id, operation, done_bytes, total_bytes)
        self._bus.signal(progress, Call(DAEMON, OWNER))
