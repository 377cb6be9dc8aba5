"""Slots on the bus: gives workers memory that outlives them, saves checkpoints from it, and frees it.

Invariants:
- A slot is recorded durably before its worker learns of it. A file without a record is deleted at the next start.
- Only the process that has opened slots, by its incarnation, asks for a save from them, also after it has left.
- The daemon writes to a directory only if the principal that has opened the slots may have it written.
- One save of the same slots runs at a time: a second one would replace files that the manifest of the first one names.
- The last save that all ranks have staged is saved as an emergency checkpoint when one of them fails, unless the
  catalogue offers one that is as new. It is repeated until it is saved, superseded or impossible.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import TypeVar

import anyio
import msgspec
from anyio import TASK_STATUS_IGNORED, lowlevel
from anyio.abc import TaskGroup, TaskStatus

from forged.auth.model import Principal, Role
from forged.catalog.messages import (
    CompleteCheckpoint,
    EmergencyCheckpointSaved,
    FailCheckpoint,
    FindRestorePoints,
    StartCheckpoint,
)
from forged.catalog.model import CheckpointState, CheckpointType
from forged.clock import Clock
from forged.elastic.messages import ConfirmWorker, JobAborted, JobCompleted, WorkerFailed, WorkerLeft
from forged.errors import ForgedError, RequestRefused, Unavailable, describe
from forged.host.agent import HeldSlots, HostAgent
from forged.host.messages import (
    CloseSlots,
    FindStagedSlots,
    ListSlots,
    OpenedSlots,
    OpenSlots,
    SaveSlots,
    ShareSlots,
    SlotPage,
    SlotSave,
    SlotView,
    StagedSlots,
)
from forged.host.model import SavedSlots, SlotContents, SlotOwner, SlotRecord, StagedCheckpoint
from forged.host.slot_table import SLOTS_PER_WORKER, SlotTable, staged_checkpoints
from forged.jobs.model import JobRemoved
from forged.kernel.bus import DAEMON, Bus
from forged.kernel.ledger import read_all
from forged.kernel.messages import Call, Decision, Nothing, Record, Request, Ticket
from forged.kernel.store.port import Store
from forged.log import SILENT, Log
from forged.net.bulk.side_connection import descriptor_sender
from forged.net.tickets import TicketRegistry
from forged.pagination import take_page
from forged.retry import RetryPolicy
from forged.shares import Shares

R = TypeVar("R")

OWNER = "slots"
PREFIX = "slots/"
SLOT_ID_BYTES = 16
SLOT_BYTES_MIN = 1 << 12
WRITES_MAX = 100
"""In one transaction."""
STORAGE_PATH_CHARS_MAX = 4096
TICKETS_MAX, PRINCIPAL_TICKETS_MAX = 32, 8
"""Fewer than the limit of side connections, which other transfers need too."""
SAVE_WAIT_S = 1.0
"""How long one request waits for a save; the worker repeats it."""
READY_WAIT_S = 5.0
"""How long a worker waits for a daemon that is starting."""
LOOK_AFTER_S = 5.0
"""How often slots whose workers are gone are looked after."""
RETRYING = RetryPolicy(attempts=None, delay_s=0.5, exponential=True, delay_max_s=60.0, jitter=0.5)
HOLDS_MAX = 20
"""How often the newest save is looked for again because it was overwritten meanwhile."""
INTERRUPTED = Unavailable("slots_interrupted", "the save was interrupted", "try again")
LOCAL_HOSTS = ("pid ", "127.", "[::1]")
"""How the addresses of callers on this host begin."""


@dataclass(frozen=True, slots=True)
class SlotsPort:
    """What slots need to know of the other services."""

    is_registered: Callable[[str, str, bytes], bool]
    """Whether this process is a worker of the job."""
    is_trusted: Callable[[Principal], bool]
    """Whether the daemon may write to any directory for this principal."""
    is_managed: Callable[[str, str], bool]
    """Whether the daemon may write to this path for any principal of this job."""


class _Save:
    """A save from slots that runs, or has ended."""

    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.saved: SavedSlots | None = None
        self.error: ForgedError | None = None

    def end(self, saved: SavedSlots | None = None, error: ForgedError | None = None) -> None:
        """The save has ended; no effect the second time."""
        if not self.ended.is_set():
            self.saved, self.error = saved, error
            self.ended.set()


class SlotService:
    """The slots of all jobs."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        agent: HostAgent,
        tickets: TicketRegistry,
        port: SlotsPort,
        token_bytes: Callable[[int], bytes],
        random: Random,
        *,
        history: str,
        bytes_max: int,
        principal_bytes_max: int,
        log: Log = SILENT,
    ) -> None:
        self.table = SlotTable(bytes_max, principal_bytes_max)
        self._bus = bus
        self._clock = clock
        self._agent = agent
        self._tickets = tickets
        self._port = port
        self._token_bytes = token_bytes
        self._random = random
        self._history = history
        self._log = log
        self._tasks: TaskGroup | None = None
        self._changed = anyio.Event()
        self._saves: dict[tuple[str, str], _Save] = {}
        self._shared = Shares("tickets for slots", TICKETS_MAX, TICKETS_MAX // 4, PRINCIPAL_TICKETS_MAX)
        """The tickets whose side connections have not ended."""
        self._retry_at: dict[str, float] = {}
        """By job: when a failed emergency save is tried again."""
        self._delays: dict[str, Iterator[float]] = {}
        self._warned: dict[str, str] = {}
        """By job: the last failure that was logged."""
        self._is_ready = anyio.Event()
        """Set while the host's slots are those of the records."""
        self._unready_because = "the daemon is starting"
        self._subscribe()

    def _subscribe(self) -> None:
        bus = self._bus
        bus.serve(OpenSlots, self._open, owner=OWNER)
        bus.serve(CloseSlots, self._close, owner=OWNER)
        bus.serve(ShareSlots, self._share, owner=OWNER)
        bus.serve(SaveSlots, self._save, owner=OWNER)
        bus.serve(FindStagedSlots, self._find_staged, owner=OWNER)
        bus.serve(ListSlots, self._list, owner=OWNER)
        ends = (WorkerFailed, WorkerLeft, JobAborted, JobCompleted)
        bus.on(ends, self._ended, name="slots.owners", durable=True)
        bus.on(JobRemoved, self._job_removed, name="slots.removal", durable=True)

    async def load(self, store: Store) -> None:
        """Become what the store holds."""
        self.table.load(_decode(entry.value) for entry in await read_all(store, PREFIX))
        self._is_ready = anyio.Event()
        self._changed.set()

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Look after the slots whose workers are gone, until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                task_status.started()
                await self._look_after_periodically()
        finally:
            self._agent.end()

    async def _look_after_periodically(self) -> None:
        while True:
            self._changed = anyio.Event()
            await self._bus.ledger.writable()
            try:
                await self._look_after_all()
            except (ForgedError, OSError) as error:
                self._warn("", error)
            with anyio.move_on_after(LOOK_AFTER_S):
                await self._changed.wait()

    # Requests of workers.

    async def _open(self, request: OpenSlots, call: Call) -> Decision[OpenedSlots]:
        self._check(request, call)
        await self._bus.ask(ConfirmWorker(request.job, request.worker_id, request.incarnation))
        await self._ready()
        holder, is_trusted = call.principal.holder, self._port.is_trusted(call.principal)
        present = self.table.newest_of(request.job, request.worker_id, request.incarnation)
        if present and all(
            (record.storage_path, record.is_trusted) == (request.storage_path, is_trusted)
            and record.size_bytes >= request.size_bytes
            for record in present
        ):
            return Decision(await self._opened(present), job=request.job)
        self.table.require_room(holder, request.size_bytes)
        now = self._clock.wall()
        records = [
            SlotRecord(
                self._token_bytes(SLOT_ID_BYTES).hex(),
                request.job,
                request.worker_id,
                request.incarnation,
                request.size_bytes,
                request.storage_path,
                is_trusted,
                holder,
                now,
            )
            for _ in range(SLOTS_PER_WORKER)
        ]
        # Counted before they are made, which takes a while.
        self.table.add(records)
        try:
            await self._agent.make([record.slot_id for record in records], request.size_bytes)
            opened = await self._opened(records)
            if any(record.slot_id not in self.table.records for record in records):
                raise RequestRefused("slots_unknown", f"worker {request.worker_id} is gone", "open slots again")
        except BaseException:
            await self._discard([record.slot_id for record in records])
            raise
        self._changed.set()
        return Decision(opened, writes=_writes(records), job=request.job)

    async def _ready(self) -> None:
        with anyio.move_on_after(READY_WAIT_S):
            await self._is_ready.wait()
        if not self._is_ready.is_set():
            raise RequestRefused("slots_unavailable", f"there are no slots: {self._unready_because}", "see the log")

    def _check(self, request: OpenSlots, call: Call) -> None:
        self._bus.dispatcher.require_job(request.job)
        if request.size_bytes < SLOT_BYTES_MIN:
            raise RequestRefused(
                "slot_size_invalid", f"size_bytes must be >= {SLOT_BYTES_MIN}, got {request.size_bytes}", ""
            )
        path = request.storage_path
        if len(path) > STORAGE_PATH_CHARS_MAX or not path.startswith("/") or os.path.normpath(path) != path:
            raise RequestRefused(
                "slot_storage_invalid",
                f"storage_path must be an absolute path, of at most {STORAGE_PATH_CHARS_MAX} characters, "
                f"got {path[:80]!r}",
                "slots are for checkpoints in directories; others are staged into memory of the worker",
            )
        if not _is_on_this_host(call):
            raise RequestRefused(
                "slots_other_host",
                f"slots are memory of the daemon's host, and {call.origin} is not known to be there",
                "connect by the Unix socket or a loopback address; elsewhere the worker stages into its own memory",
            )

    async def _opened(self, records: Sequence[SlotRecord]) -> OpenedSlots:
        paths = await self._agent.paths([record.slot_id for record in records])
        return OpenedSlots(paths, min(record.size_bytes for record in records), self._may_write(records))

    def _may_write(self, records: Iterable[SlotRecord]) -> bool:
        return all(record.is_trusted or self._port.is_managed(record.storage_path, record.job) for record in records)

    async def _close(self, request: CloseSlots, call: Call) -> Decision[Nothing]:
        records = self.table.of_worker(request.job, request.worker_id, request.incarnation)
        return Decision(Nothing(), writes=await self._free(records), job=request.job)

    async def _share(self, request: ShareSlots, call: Call) -> Ticket:
        records, holder = self._records_of(request), call.principal.holder
        if not self._shared.take(holder):
            raise Unavailable("tickets_full", self._shared.shortage(holder), "use the tickets that were given")
        try:
            fds = await self._agent.descriptors([record.slot_id for record in records])
        except BaseException:
            self._shared.give_back(holder)
            raise

        def close() -> None:
            self._shared.give_back(holder)
            for fd in fds:
                os.close(fd)

        return self._tickets.issue(descriptor_sender(fds, close=close), call.principal)

    def _records_of(self, request: ShareSlots | SaveSlots) -> list[SlotRecord]:
        """The slots of the process that asks; it has left perhaps."""
        records = self.table.newest_of(request.job, request.worker_id, request.incarnation)
        if not records:
            raise RequestRefused(
                "slots_unknown",
                f"worker {request.worker_id} of job {request.job} has no slots",
                "stage the state again; the slots of a worker that has left are freed after a while",
            )
        return records

    async def _save(self, request: SaveSlots, call: Call) -> SlotSave:
        own = self._records_of(request)
        key = request.job, request.save_id
        save = self._saves.get(key)
        if save is None:
            staged = await self._staged(request, own)
            # It may have been begun meanwhile.
            save = self._saves.get(key) or self._begin_save(key, staged, own[0].storage_path)
        with anyio.move_on_after(SAVE_WAIT_S):
            await save.ended.wait()
        if save.error is not None:
            if self._saves.get(key) is save:
                del self._saves[key]
            if save.error.retryable:
                raise Unavailable(save.error.code, save.error.message, save.error.fix)
            raise RequestRefused(save.error.code, save.error.message, save.error.fix)
        if save.saved is None:
            return SlotSave(is_saved=False)
        return SlotSave(is_saved=True, size_bytes=save.saved.size_bytes)

    async def _staged(self, request: SaveSlots, own: Sequence[SlotRecord]) -> StagedCheckpoint:
        """The slots of all ranks of the save, which must be for the same directory."""
        contents = await self._read(request.job)
        found = next((one for one in staged_checkpoints(contents) if one.save_id == request.save_id), None)
        records = [] if found is None else self._known(found)
        paths = {record.storage_path for record in records}
        if found is None or not records or paths != {own[0].storage_path}:
            raise RequestRefused(
                "slots_incomplete",
                f"the slots of save {request.save_id[:40]} are not there for all ranks",
                "stage the state again",
            )
        if not self._may_write(records):
            raise RequestRefused(
                "slots_storage_denied",
                f"the daemon may not write to {own[0].storage_path} for {records[0].holder}",
                "add the directory to checkpoint_roots, or let the workers write",
            )
        return found

    async def _find_staged(self, request: FindStagedSlots, call: Call) -> StagedSlots:
        await self._ready()
        contents = await self._read(request.job)
        for staged in staged_checkpoints(contents)[:1]:
            durable_step = await self._durable_step(request.job)
            is_newer = durable_step is None or staged.step > durable_step
            paths = {record.storage_path for record in self._known(staged)}
            if is_newer and paths == {request.storage_path}:
                return StagedSlots(await self._agent.paths(staged.slot_ids), staged.step)
        return StagedSlots()

    def _known(self, staged: StagedCheckpoint) -> list[SlotRecord]:
        """The records of a checkpoint's slots; empty if one has been freed meanwhile."""
        found = [self.table.records.get(slot_id) for slot_id in staged.slot_ids]
        return [record for record in found if record is not None] if None not in found else []

    async def _read(self, job: str) -> list[SlotContents]:
        return await self._agent.read([record.slot_id for record in self.table.of_job(job)])

    # Saves.

    def _begin_save(self, key: tuple[str, str], staged: StagedCheckpoint, storage_path: str) -> _Save:
        assert self._tasks is not None, "the service runs before the server listens"
        save = self._saves[key] = _Save()
        self._tasks.start_soon(self._hold_and_save, save, staged, storage_path)
        return save

    async def _hold(self, staged: StagedCheckpoint) -> HeldSlots | None:
        is_trusted = all(record.is_trusted for record in self._known(staged))
        return await self._agent.hold(staged, is_trusted=is_trusted)

    async def _hold_and_save(self, save: _Save, staged: StagedCheckpoint, storage_path: str) -> None:
        held = await self._hold(staged)
        if held is None:
            save.end(error=RequestRefused("slots_overwritten", "the slots hold something else by now", "stage again"))
            return
        try:
            await self._run_save(save, held, storage_path)
        finally:
            held.release()

    async def _run_save(self, save: _Save, held: HeldSlots, storage_path: str) -> None:
        try:
            save.end(await held.save(storage_path))
        except ForgedError as error:
            save.end(error=error)
        except OSError as error:
            save.end(error=RequestRefused("slots_unreadable", f"cannot save slots: {error.strerror}", "stage again"))
        finally:
            save.end(error=INTERRUPTED)
            self._changed.set()

    # Facts of other services.

    def _ended(self, record: Record) -> None:
        """Owners of slots have failed or left. What follows from it is found out from the records."""
        fact, job = record.fact, record.job
        owner = SlotOwner.FAILED if isinstance(fact, WorkerFailed | JobAborted) else SlotOwner.LEFT
        worker_id = fact.worker_id if isinstance(fact, WorkerFailed | WorkerLeft) else None

        def is_ended(slot: SlotRecord) -> bool:
            if worker_id is None:
                return True
            # Another process may have the name by now.
            return slot.worker_id == worker_id and not self._port.is_registered(job, worker_id, slot.incarnation)

        changed = self.table.end(job, owner, record.at, record.id, is_ended)
        self._append(_writes(changed))
        self._changed.set()

    async def _job_removed(self, record: Record) -> None:
        self._append(await self._free(self.table.of_job(record.job)))

    # Slots whose workers are gone.

    async def _look_after_all(self) -> None:
        if not self._is_ready.is_set():
            await self._clean()
        for key in [key for key, save in self._saves.items() if save.ended.is_set()]:
            # A worker that asks again finds the checkpoint.
            del self._saves[key]
        for job in sorted(self.table.jobs_to_look_after()):
            try:
                await self._look_after(job)
            except (ForgedError, OSError) as error:
                self._warn(job, error)

    def _warn(self, job: str, error: Exception) -> None:
        """Log a failure, unless it is the same as before."""
        reason = describe(error)
        if self._warned.get(job) != reason:
            self._warned[job] = reason
            self._log.warning("could not look after slots", job=job, reason=reason)

    async def _clean(self) -> None:
        """Delete files without records and records without files; find owners that are gone without a fact."""
        try:
            found = await self._agent.begin(self._history)
        except ForgedError as error:
            self._unready_because = error.message
            raise
        records = self.table.records
        await self._agent.delete([slot_id for slot_id in found if slot_id not in records])
        lost = [record for record in records.values() if found.get(record.slot_id, -1) < record.size_bytes]
        self._append(await self._free(lost))
        now = self._clock.wall()
        for job in {record.job for record in records.values()}:
            gone = self.table.end(job, SlotOwner.FAILED, now, 0, self._is_gone)
            self._append(_writes(gone))
        self._is_ready.set()

    def _is_gone(self, record: SlotRecord) -> bool:
        return not self._port.is_registered(record.job, record.worker_id, record.incarnation)

    async def _look_after(self, job: str) -> None:
        """Save what a failed worker's job has staged last, and free what is needed no more."""
        owners = {record.slot_id: record.owner for record in self.table.of_job(job)}
        failed = [record for record in self.table.of_job(job) if record.owner is SlotOwner.FAILED]
        is_settled = False
        if failed and self._clock.monotonic() >= self._retry_at.get(job, 0.0):
            is_settled = await self._rescue(job, min(failed, key=lambda record: record.ended_at))
        contents, durable_step = await self._read(job), await self._durable_step(job)
        needless = list(self.table.superseded(job, contents, durable_step, self._clock.wall()))
        free = [
            record
            for record in needless
            if not self._is_used(record)
            # A worker that has failed or left meanwhile may have staged something newer than these contents.
            and owners.get(record.slot_id) is record.owner
            and (is_settled or record.owner is not SlotOwner.FAILED)
        ]
        self._append(await self._free(free))

    def _is_used(self, record: SlotRecord) -> bool:
        """Whether a save of the job may read the slot."""
        return any(job == record.job and not save.ended.is_set() for (job, _), save in self._saves.items())

    async def _durable_step(self, job: str) -> int | None:
        """The step of the best checkpoint on disk."""
        found = await self._ask(FindRestorePoints(job, limit=1))
        return found.points[0].meta.step if found.points else None

    async def _rescue(self, job: str, failed: SlotRecord) -> bool:
        """Save the emergency checkpoint of a failed worker; returns whether there is no more to do for it."""
        try:
            is_settled = await self._save_newest(job, failed)
        except (ForgedError, OSError) as error:
            self._log.error("the emergency checkpoint was not saved", job=job, reason=describe(error))
            is_settled = False
        if is_settled:
            self._retry_at.pop(job, None)
            self._delays.pop(job, None)
        else:
            delays = self._delays.setdefault(job, RETRYING.delays(self._random.random))
            self._retry_at[job] = self._clock.monotonic() + next(delays)
        return is_settled

    async def _save_newest(self, job: str, failed: SlotRecord) -> bool:
        """Save the newest checkpoint that is staged, which may be one of the failed worker's survivors by now."""
        for _ in range(HOLDS_MAX):
            staged = next(iter(staged_checkpoints(await self._read(job))), None)
            records = [] if staged is None else self._known(staged)
            if staged is None or not records:
                return True
            # Held before anything else is asked: the survivors may be staging again.
            held = await self._hold(staged)
            if held is None:
                continue
            try:
                return await self._save_emergency(job, staged, records, held, failed)
            finally:
                held.release()
        return False

    async def _save_emergency(
        self, job: str, staged: StagedCheckpoint, records: Sequence[SlotRecord], held: HeldSlots, failed: SlotRecord
    ) -> bool:
        durable_step = await self._durable_step(job)
        if durable_step is not None and staged.step <= durable_step:
            return True
        path = records[0].storage_path
        if {record.storage_path for record in records} != {path} or not self._may_write(records):
            self._log.info("no emergency checkpoint: the daemon may not write there", job=job, path=path)
            return True
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
        save = self._saves[key] = _Save()
        await self._run_save(save, held, path)
        seconds = max(0.0, self._clock.wall() - failed.ended_at)
        if save.saved is None:
            error = save.error or INTERRUPTED
            await self._ask(FailCheckpoint(job, "", b"", meta.checkpoint_id, describe(error)))
            raise error
        size_bytes, parent_path = save.saved.size_bytes, save.saved.parent_path
        # Its worker may have started it as an incremental one.
        await self._ask(CompleteCheckpoint(job, "", b"", meta.checkpoint_id, size_bytes, seconds, parent_path))
        if save.saved.is_new:
            fact = EmergencyCheckpointSaved(meta.checkpoint_id, staged.step, failed.worker_id, size_bytes, seconds)
            self._bus.ledger.append(Decision(None, (fact,), job=job), cause=failed.cause, origin=OWNER)
        return True

    async def _ask(self, request: Request[R], principal: Principal = DAEMON) -> R:
        """Ask another service, unless the daemon ends: a call in a thread has returned regardless of that."""
        await lowlevel.checkpoint_if_cancelled()
        return await self._bus.ask(request, Call(principal, OWNER))

    # Freeing.

    async def _free(self, records: Iterable[SlotRecord]) -> dict[str, bytes | None]:
        """Delete slots; returns the writes that forget them."""
        slot_ids = [record.slot_id for record in records]
        if slot_ids:
            await self._agent.delete(slot_ids)
            self.table.remove(slot_ids)
        return {f"{PREFIX}{slot_id}": None for slot_id in slot_ids}

    async def _discard(self, slot_ids: Sequence[str]) -> None:
        """Delete slots that no worker has learnt of; also if the request that opens them was cancelled or is late."""
        with anyio.CancelScope(shield=True):
            await self._agent.delete(slot_ids)
        self.table.remove(slot_ids)

    def _append(self, writes: Mapping[str, bytes | None]) -> None:
        """Commit the writes, as many in one transaction as fit."""
        rest = iter(writes.items())
        while some := dict(islice(rest, WRITES_MAX)):
            self._bus.ledger.append(Decision(None, writes=some), origin=OWNER)

    # Requests of viewers.

    async def _list(self, request: ListSlots, call: Call) -> SlotPage:
        records = [
            record
            for slot_id, record in sorted(self.table.records.items())
            if slot_id > request.after
            and request.job in ("", record.job)
            and call.principal.may(Role.VIEWER, record.job)
        ]
        contents = {one.slot_id: one for one in await self._agent.read([record.slot_id for record in records])}
        slots, more = take_page((_view(record, contents.get(record.slot_id)) for record in records), request.limit)
        return SlotPage(slots, more, self.table.shares.used, self.table.bytes_max)


def _view(record: SlotRecord, contents: SlotContents | None) -> SlotView:
    view = SlotView(
        slot_id=record.slot_id,
        job=record.job,
        worker_id=record.worker_id,
        size_bytes=record.size_bytes,
        storage_path=record.storage_path,
        owner=record.owner,
    )
    if contents is None:
        return view
    return msgspec.structs.replace(
        view,
        save_id=contents.save_id,
        step=contents.step,
        rank=contents.rank,
        world_size=contents.world_size,
    )


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SlotRecord).decode


def _writes(records: Iterable[SlotRecord]) -> dict[str, bytes | None]:
    return {f"{PREFIX}{record.slot_id}": _encode(record) for record in records}


def _is_on_this_host(call: Call) -> bool:
    """Whether the caller's connection came from this host."""
    return call.origin.rpartition(" at ")[2].startswith(LOCAL_HOSTS)
