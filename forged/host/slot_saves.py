"""Saves from slots: those in the background that workers ask for, and the emergency checkpoints of failed workers.

Invariants:
- The daemon writes to a directory only if the principal that has opened the slots may have it written.
- One save of the same slots runs at a time: a second one would replace files that the manifest of the first one names.
- The last save that all ranks have staged is saved as an emergency checkpoint when one of them fails, unless the
  catalogue offers one that is as new. It is repeated until it is saved, superseded or impossible. When its slots are
  damaged, the save before it is saved.
- A failure is told once per save, by `EmergencyCheckpointFailed` and in the log.
- A checkpoint that the daemon has saved is complete in the catalogue, also if its save counted as failed. One that was
  damaged on disk is verified after it was saved again. Until then no collection and no caller deletes its record.
- A save that has succeeded is not written again when its worker asks again: it may have been collected meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import TypeVar

import anyio
from anyio import lowlevel
from anyio.abc import TaskGroup

from forged.auth.model import Principal, Role
from forged.catalog.messages import (
    CompleteCheckpoint,
    EmergencyCheckpointFailed,
    EmergencyCheckpointSaved,
    FailCheckpoint,
    FindRestorePoints,
    HoldCheckpoint,
    ReleaseCheckpoint,
    StartCheckpoint,
)
from forged.catalog.model import CheckpointMeta, CheckpointState, CheckpointType
from forged.clock import Clock
from forged.errors import ForgedError, RequestRefused, Unavailable, describe
from forged.host.agent import HeldSlots, HostAgent
from forged.host.messages import SaveSlots, SlotSave
from forged.host.model import SavedSlots, SlotContents, SlotRecord, StagedCheckpoint
from forged.host.ports import SlotsPort
from forged.host.slot_table import SlotTable, staged_checkpoints
from forged.kernel.bus import DAEMON, Bus
from forged.kernel.messages import Call, Decision, Request
from forged.log import Log
from forged.retry import RetryPolicy, is_retryable

R = TypeVar("R")

OWNER = "slots"
RETRYING = RetryPolicy(attempts=None, delay_s=0.5, exponential=True, delay_max_s=60.0, jitter=0.5)
HOLDS_MAX = 20
"""How often the newest save is looked for again because it was overwritten meanwhile."""
SAVE_WAIT_S = 1.0
"""How long one request waits for a save; the worker repeats it."""
TOLD_AFTER, GIVEN_UP_AFTER = 3, 5
"""Tries after which a failure that may pass is told, and after which slots that cannot be read are given up."""
HOLDER, HELD_S = "slots", 3600.0
"""The holder of a corrupted checkpoint that is saved again, and how long the hold lasts if the daemon dies."""
ENDED_KEPT = 8
"""So many saves of a job that have ended are remembered: more than its workers can still ask for."""
UNREADABLE = frozenset({"slots_unreadable", "checkpoint_slot_torn"})
"""The codes of errors about what is in slots; others are about the directory that is written to."""
INTERRUPTED = Unavailable("slots_interrupted", "the save was interrupted", "try again")


class RunningSave:
    """A save from slots that runs, or has ended."""

    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.saved: SavedSlots | None = None
        self.error: ForgedError | None = None
        self.is_refusal_told = False
        """Whether the rank that has begun it knows the error."""

    def end(self, saved: SavedSlots | None = None, error: ForgedError | None = None) -> None:
        """The save has ended; no effect the second time."""
        if not self.ended.is_set():
            self.saved, self.error = saved, error
            self.ended.set()


class Rescue:
    """The attempts to save what a job with failed workers has staged last."""

    def __init__(self, new_delays: Callable[[], Iterator[float]]) -> None:
        self.staged: StagedCheckpoint | None = None
        """What was tried last."""
        self.tries = 0
        """How often that has failed."""
        self.told = ""
        """The last save whose failure was told."""
        self.saved = ""
        """The last save that is on disk; its checkpoint is not offered if training has gone back behind it."""
        self.damaged: set[str] = set()
        """The saves whose slots cannot be read."""
        self.retry_at = 0.0
        self._new_delays = new_delays
        self._delays = new_delays()

    def begin(self, staged: StagedCheckpoint) -> None:
        if self.staged is None or self.staged.save_id != staged.save_id:
            self.tries = 0
        self.staged = staged

    def failed(self, now: float) -> None:
        self.tries += 1
        self.retry_at = now + next(self._delays)

    def settle(self) -> None:
        """There is nothing to try again."""
        self.tries, self.retry_at, self._delays = 0, 0.0, self._new_delays()


class SlotSaves:
    """The saves from the slots of all jobs."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        agent: HostAgent,
        table: SlotTable,
        port: SlotsPort,
        random: Random,
        log: Log,
        *,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when a save has ended."""
        self.tasks: TaskGroup | None = None
        """In which saves in the background run."""
        self._bus = bus
        self._clock = clock
        self._agent = agent
        self._table = table
        self._port = port
        self._random = random
        self._log = log
        self._changed = changed
        self._saves: dict[tuple[str, str], RunningSave] = {}
        """By job and save id."""
        self._rescues: dict[str, Rescue] = {}
        """By job with failed workers."""

    # Questions.

    async def read(self, job: str) -> list[SlotContents]:
        """What the slots of a job hold, without damaged saves."""
        contents = await self._agent.read([record.slot_id for record in self._table.of_job(job)])
        rescue = self._rescues.get(job)
        return [one for one in contents if rescue is None or one.save_id not in rescue.damaged]

    def known(self, staged: StagedCheckpoint) -> list[SlotRecord]:
        """The records of a checkpoint's slots; empty if one has been freed meanwhile."""
        found = [self._table.records.get(slot_id) for slot_id in staged.slot_ids]
        return [record for record in found if record is not None] if None not in found else []

    def may_write(self, records: Iterable[SlotRecord]) -> bool:
        """Whether the daemon may write to the directories that slots are for."""
        return all(record.is_trusted or self._port.is_managed(record.storage_path, record.job) for record in records)

    def is_used(self, record: SlotRecord) -> bool:
        """Whether a save of the job may read the slot."""
        return any(job == record.job and not save.ended.is_set() for (job, _), save in self._saves.items())

    def is_saved(self, job: str, staged: StagedCheckpoint) -> bool:
        """Whether a checkpoint was saved after a failure, offered or not."""
        rescue = self._rescues.get(job)
        return rescue is not None and rescue.saved == staged.save_id

    async def durable_step(self, job: str) -> int | None:
        """The step of the best checkpoint on disk."""
        found = await self._ask(FindRestorePoints(job, limit=1))
        return found.points[0].meta.step if found.points else None

    def forget_ended(self) -> None:
        """Forget all but the last saves that have ended, and jobs without slots."""
        with_slots = {record.job for record in self._table.records.values()}
        ended = Counter[str]()
        for (job, save_id), save in reversed(list(self._saves.items())):
            ended[job] += save.ended.is_set()
            if save.ended.is_set() and (job not in with_slots or ended[job] > ENDED_KEPT):
                del self._saves[job, save_id]
        for job in self._rescues.keys() - with_slots:
            del self._rescues[job]

    # Saves in the background.

    async def save(self, request: SaveSlots, own: Sequence[SlotRecord]) -> SlotSave:
        """Save what all ranks have staged, or go on waiting for that; `own` are the slots of the worker that asks."""
        key = request.job, request.save_id
        save = self._saves.get(key)
        if request.begins and (save is None or save.is_refusal_told):
            staged = await self._staged(request, own)
            if self._saves.get(key) in (save, None):
                # It was not begun meanwhile.
                self._begin_save(request.job, staged, own[0].storage_path)
            save = self._saves[key]
        if save is None:
            return SlotSave(is_saved=False)
        with anyio.move_on_after(SAVE_WAIT_S):
            await save.ended.wait()
        if save.error is not None:
            save.is_refusal_told |= request.begins
            if save.error.retryable:
                raise Unavailable(save.error.code, save.error.message, save.error.fix)
            raise RequestRefused(save.error.code, save.error.message, save.error.fix)
        if save.saved is None:
            return SlotSave(is_saved=False)
        return SlotSave(is_saved=True, size_bytes=save.saved.size_bytes)

    async def _staged(self, request: SaveSlots, own: Sequence[SlotRecord]) -> StagedCheckpoint:
        """The slots of all ranks of the save, which must be for the same directory."""
        contents = await self.read(request.job)
        found = next((one for one in staged_checkpoints(contents) if one.save_id == request.save_id), None)
        records = [] if found is None else self.known(found)
        paths = {record.storage_path for record in records}
        if found is None or not records or paths != {own[0].storage_path}:
            raise RequestRefused(
                "slots_incomplete",
                f"the slots of save {request.save_id[:40]} are not there for all ranks",
                "stage the state again",
            )
        if not self.may_write(records):
            raise RequestRefused(
                "slots_storage_denied",
                f"the daemon may not write to {own[0].storage_path} for {records[0].holder}",
                "add the directory to checkpoint_roots, or let the workers write",
            )
        return found

    def _begin_save(self, job: str, staged: StagedCheckpoint, storage_path: str) -> None:
        assert self.tasks is not None, "the service runs before the server listens"
        save = self._saves[job, staged.save_id] = RunningSave()
        self.tasks.start_soon(self._hold_and_save, save, job, staged, storage_path)

    async def _hold(self, staged: StagedCheckpoint) -> HeldSlots | None:
        is_trusted = all(record.is_trusted for record in self.known(staged))
        return await self._agent.hold(staged, is_trusted=is_trusted)

    async def _hold_and_save(self, save: RunningSave, job: str, staged: StagedCheckpoint, storage_path: str) -> None:
        held = await self._hold(staged)
        if held is None:
            save.end(error=RequestRefused("slots_overwritten", "the slots hold something else by now", "stage again"))
            return
        path = f"{storage_path}/{held.prefix}"
        known = self._port.checkpoint_at(job, path, staged.save_id)
        try:
            if known is not None and known.state is CheckpointState.DELETED:
                raise RequestRefused("slots_checkpoint_deleted", f"{path} was deleted", "save the state again")
            async with self._kept(job, known):
                await self._run_save(save, held, storage_path, is_damaged=_is_damaged(known))
                if save.saved is not None:
                    await self._report(job, staged, path, save.saved)
        except ForgedError as error:
            save.end(error=error)
        finally:
            save.end(error=INTERRUPTED)
            held.release()

    @asynccontextmanager
    async def _kept(self, job: str, known: CheckpointMeta | None) -> AsyncIterator[None]:
        """Keep the record of a corrupted checkpoint while it is saved again; it could be collected or deleted."""
        if known is None or known.state is not CheckpointState.CORRUPTED:
            yield
            return
        await self._ask(HoldCheckpoint(job, known.checkpoint_id, HOLDER, HELD_S))
        try:
            yield
        finally:
            with suppress(ForgedError):
                await self._ask(ReleaseCheckpoint(job, known.checkpoint_id, HOLDER))

    async def _report(self, job: str, staged: StagedCheckpoint, path: str, saved: SavedSlots) -> None:
        """Complete a checkpoint in the catalogue: its worker may have given up waiting, or have left."""
        meta = self._port.checkpoint_at(job, path, staged.save_id)
        if meta is None or meta.state is CheckpointState.DELETED:
            return
        seconds = max(0.0, self._clock.wall() - meta.created_at)
        try:
            await self._complete(job, meta, saved, seconds)
        except ForgedError as error:
            self._log.warning("a saved checkpoint was not catalogued", job=job, path=path, reason=error.message)

    async def _complete(self, job: str, meta: CheckpointMeta, saved: SavedSlots, seconds: float) -> None:
        if _is_damaged(meta):
            # It is offered again when all of it has been read.
            self._port.verify_again(meta.checkpoint_id)
            return
        # Its worker may have started it as an incremental one.
        await self._ask(
            CompleteCheckpoint(job, "", b"", meta.checkpoint_id, saved.size_bytes, seconds, saved.parent_path)
        )

    async def _run_save(self, save: RunningSave, held: HeldSlots, storage_path: str, *, is_damaged: bool) -> None:
        try:
            save.end(await held.save(storage_path, is_damaged=is_damaged))
        except ForgedError as error:
            save.end(error=error)
        except OSError as error:
            save.end(error=RequestRefused("slots_unreadable", f"cannot save slots: {error.strerror}", "stage again"))
        finally:
            save.end(error=INTERRUPTED)
            self._changed()

    # Emergency checkpoints.

    async def rescue(self, job: str, failed: SlotRecord) -> bool:
        """Save the emergency checkpoint of a failed worker; returns whether there is no more to do for it."""
        rescue = self._rescues.get(job)
        if rescue is None:
            rescue = self._rescues[job] = Rescue(lambda: RETRYING.delays(self._random.random))
        if self._clock.monotonic() < rescue.retry_at:
            return False
        try:
            await self._save_newest(job, failed, rescue)
        except (ForgedError, OSError) as error:
            self._rescue_failed(job, failed, rescue, error)
            return False
        rescue.settle()
        return True

    def _rescue_failed(self, job: str, failed: SlotRecord, rescue: Rescue, error: ForgedError | OSError) -> None:
        if rescue.staged is None:
            raise error
        rescue.failed(self._clock.monotonic())
        code = error.code if isinstance(error, ForgedError) else ""
        if not is_retryable(error) or rescue.tries >= TOLD_AFTER:
            self._tell_failed(job, failed, rescue, rescue.staged, describe(error))
        if code in UNREADABLE and rescue.tries >= GIVEN_UP_AFTER:
            rescue.damaged.add(rescue.staged.save_id)
            rescue.settle()
            self._changed()

    def _tell_failed(self, job: str, failed: SlotRecord, rescue: Rescue, staged: StagedCheckpoint, reason: str) -> None:
        """Record that a staged save cannot be saved, once."""
        if rescue.told == staged.save_id:
            return
        rescue.told = staged.save_id
        self._log.error("the emergency checkpoint was not saved", job=job, step=staged.step, reason=reason)
        fact = EmergencyCheckpointFailed(staged.step, failed.worker_id, reason)
        self._bus.ledger.append(Decision(None, (fact,), job=job), cause=failed.cause, origin=OWNER)

    async def _save_newest(self, job: str, failed: SlotRecord, rescue: Rescue) -> None:
        """Save the newest checkpoint that is staged, which may be one of the failed worker's survivors by now."""
        for _ in range(HOLDS_MAX):
            staged = next(iter(staged_checkpoints(await self.read(job))), None)
            records = [] if staged is None else self.known(staged)
            if staged is None or not records:
                return
            rescue.begin(staged)
            # Held before anything else is asked: the survivors may be staging again.
            held = await self._hold(staged)
            if held is None:
                continue
            try:
                await self._save_emergency(job, staged, records, held, failed, rescue)
            finally:
                held.release()
            return
        raise Unavailable("slots_unreadable", "the slots are overwritten again and again, or are damaged", "")

    async def _save_emergency(
        self,
        job: str,
        staged: StagedCheckpoint,
        records: Sequence[SlotRecord],
        held: HeldSlots,
        failed: SlotRecord,
        rescue: Rescue,
    ) -> None:
        durable_step = await self.durable_step(job)
        if durable_step is not None and staged.step <= durable_step:
            return
        path = records[0].storage_path
        reason = ""
        if {record.storage_path for record in records} != {path}:
            reason = "its ranks have staged for different directories: give all ranks the same"
        elif not self.may_write(records):
            reason = f"the daemon may not write to {path} for {records[0].holder}: add it to checkpoint_roots"
        if reason:
            self._tell_failed(job, failed, rescue, staged, reason)
            return
        reason = f"worker {failed.worker_id} failed"
        location = f"{path}/{held.prefix}"
        kind = CheckpointType.EMERGENCY
        # The files of a checkpoint of untrusted workers are touched only beneath the roots, also later.
        is_trusted = all(record.is_trusted for record in records)
        principal = DAEMON if is_trusted else Principal(DAEMON.name, Role.OPERATOR, frozenset({job}))
        meta = await self._ask(
            StartCheckpoint(job, "", b"", staged.epoch, staged.step, location, staged.save_id, kind, reason=reason),
            principal,
        )
        if meta.state is CheckpointState.DELETED:
            # An earlier try has failed for so long that its files are being deleted.
            raise Unavailable("slots_being_deleted", f"what is left of {location} is being deleted", "wait")
        key = job, staged.save_id
        while (other := self._saves.get(key)) is not None and not other.ended.is_set():
            await other.ended.wait()
        save = self._saves[key] = RunningSave()
        async with self._kept(job, meta):
            await self._run_save(save, held, path, is_damaged=_is_damaged(meta))
            seconds = max(0.0, self._clock.wall() - failed.ended_at)
            if save.saved is None:
                error = save.error or INTERRUPTED
                await self._ask(FailCheckpoint(job, "", b"", meta.checkpoint_id, describe(error)))
                raise error
            await self._complete(job, meta, save.saved, seconds)
        rescue.saved = staged.save_id
        if save.saved.is_new:
            size_bytes = save.saved.size_bytes
            fact = EmergencyCheckpointSaved(meta.checkpoint_id, staged.step, failed.worker_id, size_bytes, seconds)
            self._bus.ledger.append(Decision(None, (fact,), job=job), cause=failed.cause, origin=OWNER)

    async def _ask(self, request: Request[R], principal: Principal = DAEMON) -> R:
        """Ask another service, unless the daemon ends: a call in a thread has returned regardless of that."""
        await lowlevel.checkpoint_if_cancelled()
        return await self._bus.ask(request, Call(principal, OWNER))


def _is_damaged(meta: CheckpointMeta | None) -> bool:
    """Whether a checkpoint was complete, and bytes of it are missing or wrong."""
    return meta is not None and meta.state is CheckpointState.CORRUPTED and not meta.is_failed_save
