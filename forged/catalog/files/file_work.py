"""The daemon's work on the files of checkpoints: deletes, looks for, verifies.

Invariants:
- Files are deleted of tombstones only, and only when these are durable. A tombstone is forgotten after its files are
  gone.
- A record is looked at again after each call, because it may have changed meanwhile.
- A storage that fails, is slow or gone changes no record.
- Work for one storage delays no work for others: it is bounded by storage, and ends when the storage does not answer.
"""

from __future__ import annotations

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
from forged.catalog.ports import FOLDER_MISSING, STORAGE_HANGS, CheckpointFiles
from forged.catalog.records import CheckpointRecord, Moment
from forged.clock import Clock
from forged.errors import ForgedError, Unavailable
from forged.kernel.bus import DAEMON, Bus
from forged.kernel.messages import Call, Decision
from forged.log import Log

OWNER = "catalog"
TICK_S = 10.0
FOLDERS_AT_ONCE, OF_STORAGE_AT_ONCE = 16, 4
SCRUBS_AT_ONCE = COMPACTIONS_AT_ONCE = 8
"""Each of another storage."""
NOT_YET = frozenset({"checkpoint_needed", "checkpoint_being_read", "checkpoint_in_use"})
"""The codes of errors about one checkpoint: its folder can be used."""
MISSING_KEPT_S = 7 * 86_400.0
"""For so long a missing folder may come back, as that of a file system that is mounted again."""
SCRUB_AGAIN_S = 86_400.0
"""So long after a verification a checkpoint is not verified again."""
SCRUB_PAUSE_S = 60.0
SCRUB_CHOSEN_AT_ONCE = 1000
NOT_VERIFIED_S = 600.0
"""So long a checkpoint that could not be read is not verified again."""
NOT_DELETED_S = 60.0
"""So long after a deletion had to wait for readers or other checkpoints it is tried again."""
SUSPECT_BYTES_PER_S = 100 << 20
"""The rate at which a checkpoint is verified that a worker has reported as corrupt, where scrubbing is off."""
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
        self._table = book.table
        self._files = files
        self._log = log
        self._is_registered = is_registered
        self._decide = decide
        self._queue = WorkQueue(FOLDERS_AT_ONCE, OF_STORAGE_AT_ONCE)
        """Deletions and searches, by folder."""
        self._scrubs = WorkQueue(SCRUBS_AT_ONCE, 1)
        """Verifications, by storage."""
        self._compactions = WorkQueue(COMPACTIONS_AT_ONCE, 1)
        """By storage."""
        self._chosen: set[str] = set()
        """The checkpoints that are verified because their last verification is long ago."""
        self._choose_at = 0.0
        self._damaged: set[str] = set()
        """The checkpoints whose damage was found here."""
        self._to_compact: dict[str, int] = {}
        """How often each compaction has been tried."""
        self._compacting: dict[str, anyio.Event] = {}
        """The checkpoints that are compacted now, with the end of that."""
        self._hanging: set[str] = set()
        """The storages that do not answer."""
        self._wake_event = anyio.Event()

    def reload(self) -> None:
        """The book was loaded from the store: everything in it is durable."""
        for queue in (self._queue, self._scrubs, self._compactions):
            queue.clear()
        self._chosen.clear()
        self._damaged.clear()
        self._to_compact.clear()
        self.operations.clear()
        for record in self._table.tombstones():
            self.delete(record)
        for record in self._table.records.values():
            if record.is_to_compact:
                self.compact(record)

    def delete(self, record: CheckpointRecord) -> None:
        """Delete the files of a durable tombstone, if the daemon may."""
        if self._table.is_managed(record):
            self._add(FileTaskKind.DELETE, record)

    def suspect(self, record: CheckpointRecord) -> None:
        """Verify a checkpoint that is said to be corrupt, if the daemon may."""
        if self._table.is_managed(record) and record.id not in self._damaged:
            self._add_of_storage(self._scrubs, FileTaskKind.VERIFY, record, is_urgent=True)

    def verify_again(self, record: CheckpointRecord) -> None:
        """Verify a checkpoint that a job could read, if the daemon may, and repair it; also one that was damaged."""
        self._damaged.discard(record.id)
        self.suspect(record)

    def compact(self, record: CheckpointRecord) -> None:
        """Make a full checkpoint of an incremental one."""
        if record.id not in self._to_compact:
            self._to_compact[record.id] = 0
            self.operations[record.id] = CheckpointOperation(COMPACTING, 0, record.meta.size_bytes)
            self._add_of_storage(self._compactions, FileTaskKind.COMPACT, record)

    def wake(self) -> None:
        """Look at once for what is due."""
        self._wake_event.set()

    def _add(self, kind: FileTaskKind, record: CheckpointRecord) -> None:
        self._queue.add(record.folder, self._files.storage_of(record.path), FileTask(kind, record.id))
        self.wake()

    def _add_of_storage(
        self, queue: WorkQueue, kind: FileTaskKind, record: CheckpointRecord, *, is_urgent: bool = False
    ) -> None:
        storage = self._files.storage_of(record.path)
        queue.add(storage, storage, FileTask(kind, record.id), is_urgent=is_urgent)
        self.wake()

    def _now(self) -> Moment:
        return Moment(self._clock.wall(), self._clock.monotonic())

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Do what is due, until cancelled."""
        queues = self._queue, self._scrubs, self._compactions
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tick_periodically)
            task_status.started()
            while True:
                self._wake_event = anyio.Event()
                now = self._clock.monotonic()
                self._choose_oldest_verified(now)
                for queue in queues:
                    for folder in queue.begin(now):
                        tasks.start_soon(self._work_in, queue, folder)
                next_at = min(queue.next_at() for queue in queues)
                with anyio.move_on_after(max(0.0, min(next_at - now, TICK_S))):
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
        for decision in self._book.holds.release_expired(now):
            self._decide(decision)
        for record, reason in list(self._book.saves.unsettled(self._is_registered, now)):
            if self._table.is_managed(record):
                self._add(FileTaskKind.FIND, record)
            else:
                self._end_without_files(record, reason, now)
        self._bus.signal(GcTick(), Call(DAEMON, OWNER))

    def _end_without_files(self, record: CheckpointRecord, reason: str, now: Moment) -> None:
        if record.is_being_written:
            self._decide(self._book.saves.give_up(record.id, reason, now))
        else:
            self._decide(self._book.collection.sweep(record.id))

    # Folders.

    async def _work_in(self, queue: WorkQueue, folder: str) -> None:
        while (task := queue.next(folder)) is not None:
            try:
                await self._bus.ledger.writable()
                await self._do(task)
            except ForgedError as error:
                await self._bus.ledger.writable()
                if not self._goes_on(queue, folder, task, error):
                    break
            else:
                self._over(queue, folder, task)
        self.wake()

    def _over(self, queue: WorkQueue, folder: str, task: FileTask) -> None:
        queue.done(folder, task)
        if task.kind is FileTaskKind.SCRUB:
            self._chosen.discard(task.checkpoint_id)
        record = self._table.records.get(task.checkpoint_id)
        if self._hanging and record is not None:
            self._hanging.discard(self._files.storage_of(record.path))

    def _goes_on(self, queue: WorkQueue, folder: str, task: FileTask, error: ForgedError) -> bool:
        """What follows from an error. Returns whether the work in the folder goes on."""
        now = self._clock.monotonic()
        if error.code == STORAGE_HANGS:
            self._tell_hanging(task, error)
            queue.failed(folder, task, now, is_hung=True)
            return False
        if task.kind is FileTaskKind.COMPACT:
            if self._is_tried_again(task.checkpoint_id, error):
                queue.postpone(folder, task, now, COMPACTION_PAUSE_S)
            else:
                queue.done(folder, task)
            return True
        if task.kind in (FileTaskKind.SCRUB, FileTaskKind.VERIFY):
            queue.postpone(folder, task, now, NOT_VERIFIED_S)
            self._log.debug("a checkpoint was not verified", checkpoint=task.checkpoint_id, reason=error.message)
            return True
        if error.code in NOT_YET:
            queue.postpone(folder, task, now, NOT_DELETED_S)
            self._log.debug("a checkpoint is not deleted yet", folder=folder, reason=error.message)
            return True
        failing_s = queue.failed(folder, task, now)
        if error.code == FOLDER_MISSING and failing_s >= MISSING_KEPT_S:
            self._forget_missing(task)
        elif not failing_s:
            self._log.warning(
                "the storage of checkpoints cannot be used; trying again", folder=folder, reason=error.message
            )
        return False

    def _tell_hanging(self, task: FileTask, error: ForgedError) -> None:
        """Log that a storage does not answer, once until it does."""
        record = self._table.records.get(task.checkpoint_id)
        if record is None or (storage := self._files.storage_of(record.path)) in self._hanging:
            return
        self._hanging.add(storage)
        self._log.warning(
            "a storage of checkpoints does not answer; trying again at growing intervals",
            storage=storage,
            path=record.path,
            operation=str(task.kind),
            reason=error.message,
        )

    def _forget_missing(self, task: FileTask) -> None:
        record = self._table.records.get(task.checkpoint_id)
        if task.kind is FileTaskKind.DELETE and record is not None and record.is_deleted:
            self._decide(self._book.collection.deleted([record.id])[0])

    async def _do(self, task: FileTask) -> None:
        record = self._table.records.get(task.checkpoint_id)
        if task.kind is FileTaskKind.COMPACT:
            await self._compact(task.checkpoint_id)
        elif record is None or not self._table.is_managed(record):
            return
        elif task.kind is FileTaskKind.DELETE:
            await self._delete(record)
        elif task.kind is FileTaskKind.FIND:
            await self._find(record)
        elif task.kind is FileTaskKind.VERIFY or self.scrub_bytes_per_s:
            await self._verify(record)

    async def _delete(self, record: CheckpointRecord) -> None:
        if not record.is_deleted:
            return
        while (compacted := self._compacting.get(record.id)) is not None:
            # It would write files behind the deletion.
            await compacted.wait()
        self._show(record, FileTaskKind.DELETE, 0, record.meta.size_bytes)
        location = self._table.location(record)
        try:
            # Without a manifest of this job, the files may be those that the other job is writing.
            if not self._table.is_disputed(record) or await self._files.find(location) is not None:
                await self._files.delete(location)
        finally:
            self.operations.pop(record.id, None)
        await self._bus.ledger.writable()
        known = self._table.records.get(record.id)
        if known is not None and known.is_deleted:
            await self._decide(self._book.collection.deleted([record.id])[0]).wait()

    async def _find(self, record: CheckpointRecord) -> None:
        """Complete a checkpoint that is there; give up one that is not, or delete what a failed save has left."""
        reason = self._book.saves.why_unsettled(record, self._is_registered, self._now())
        if not reason:
            return
        found = await self._files.find(self._table.location(record))
        await self._bus.ledger.writable()
        known = self._table.records.get(record.id)
        if known is None or known.meta.state is not record.meta.state or not known.is_unsettled:
            return
        if found is not None:
            for decision in self._book.saves.found(record.id, found, self._now()):
                await self._decide(decision).wait()
            return
        # A failed save may have begun again meanwhile.
        reason = self._book.saves.why_unsettled(known, self._is_registered, self._now())
        if not reason:
            return
        if known.is_being_written:
            await self._decide(self._book.saves.give_up(record.id, reason, self._now())).wait()
        else:
            await self._decide(self._book.collection.sweep(record.id)).wait()

    # Scrubbing.

    def _choose_oldest_verified(self, now: float) -> None:
        """Have those checkpoints verified whose last verification is longest ago, once in a while."""
        if not self.scrub_bytes_per_s or now < self._choose_at:
            return
        self._choose_at = now + SCRUB_PAUSE_S
        latest = self._clock.wall() - SCRUB_AGAIN_S
        due = (
            (one.meta.verified_at or one.meta.created_at, one.id)
            for one in self._table.records.values()
            if one.meta.state is CheckpointState.COMPLETE
            and one.id not in self._chosen
            and (one.meta.verified_at is None or one.meta.verified_at <= latest)
            and self._table.is_managed(one)
        )
        for _, checkpoint_id in nsmallest(SCRUB_CHOSEN_AT_ONCE, due):
            self._chosen.add(checkpoint_id)
            self._add_of_storage(self._scrubs, FileTaskKind.SCRUB, self._table.records[checkpoint_id])

    def _may_verify(self, checkpoint_id: str) -> bool:
        record = self._table.records.get(checkpoint_id)
        if record is None or not self._table.is_managed(record) or record.meta.is_failed_save:
            return False
        return record.meta.state in (CheckpointState.COMPLETE, CheckpointState.CORRUPTED)

    async def _verify(self, record: CheckpointRecord) -> None:
        """Compare all bytes with their checksums; where healthy copies replace corrupt ones, a second time."""
        if await self._finds_damage(record) and await self._repair(record):
            await self._finds_damage(record)

    async def _finds_damage(self, record: CheckpointRecord) -> bool:
        if not self._may_verify(record.id):
            return False
        rate = self.scrub_bytes_per_s or SUSPECT_BYTES_PER_S
        try:
            wrong = await self._files.verify(self._table.location(record), rate, partial(self._show, record, VERIFYING))
        finally:
            self.operations.pop(record.id, None)
        await self._bus.ledger.writable()
        if not self._may_verify(record.id):
            return False
        if not wrong:
            self._damaged.discard(record.id)
            await self._decide(self._book.saves.verified(record.id, self._now())).wait()
        elif self._table.records[record.id].meta.state is CheckpointState.COMPLETE:
            self._damaged.add(record.id)
            await self._decide(self._book.saves.damaged(record.id, wrong)).wait()
        return bool(wrong)

    async def _repair(self, record: CheckpointRecord) -> bool:
        """Replace the corrupt bytes by healthy copies; returns whether there were any."""
        self.operations[record.id] = CheckpointOperation(REPAIRING, 0, record.meta.size_bytes)
        try:
            return await self._files.repair(self._table.location(record))
        except ForgedError as error:
            if error.code == STORAGE_HANGS:
                raise
            self._log.warning("a checkpoint was not repaired", checkpoint=record.id, reason=error.message)
            return False
        finally:
            self.operations.pop(record.id, None)

    # Compaction.

    async def _compact(self, checkpoint_id: str) -> None:
        record = self._table.records.get(checkpoint_id)
        size_bytes = None
        if record is not None and record.meta.state is CheckpointState.COMPLETE and record.meta.is_incremental:
            size_bytes = await self._compact_files(record)
            await self._bus.ledger.writable()
            record = self._table.records.get(checkpoint_id)
        if size_bytes is not None and self._book.compaction.is_read(checkpoint_id):
            # A reader that has read the manifest before may still need the parents.
            raise Unavailable("checkpoint_being_read", f"checkpoint {checkpoint_id} is held", "wait")
        if size_bytes is not None and record is not None and record.meta.state is CheckpointState.COMPLETE:
            await self._decide(self._book.compaction.compacted(checkpoint_id, size_bytes)).wait()
        elif record is not None and record.is_to_compact:
            gone = f"it is {record.meta.state}"
            await self._decide(self._book.compaction.operation_failed(checkpoint_id, COMPACTING, gone)).wait()
        self._compaction_ended(checkpoint_id)

    async def _compact_files(self, record: CheckpointRecord) -> int:
        ended = self._compacting[record.id] = anyio.Event()
        try:
            return await self._files.compact(self._table.location(record), partial(self._show, record, COMPACTING))
        finally:
            del self._compacting[record.id]
            ended.set()

    def _is_tried_again(self, checkpoint_id: str, error: ForgedError) -> bool:
        """Whether a compaction that has failed is tried again later; if not, it is given up."""
        is_waiting = error.code in NOT_YET
        tries = self._to_compact.get(checkpoint_id, 0) + (not is_waiting)
        if is_waiting or (error.retryable and tries < COMPACTION_TRIES):
            self._to_compact[checkpoint_id] = tries
            return True
        self._compaction_ended(checkpoint_id)
        if checkpoint_id in self._table.records:
            self._decide(self._book.compaction.operation_failed(checkpoint_id, COMPACTING, error.message))
        return False

    def _compaction_ended(self, checkpoint_id: str) -> None:
        self._to_compact.pop(checkpoint_id, None)
        self.operations.pop(checkpoint_id, None)

    def _show(self, record: CheckpointRecord, operation: str, done_bytes: int, total_bytes: int) -> None:
        self.operations[record.id] = CheckpointOperation(operation, done_bytes, total_bytes)
        progress = CheckpointProgress(record.job, record.id, operation, done_bytes, total_bytes)
        self._bus.signal(progress, Call(DAEMON, OWNER))
