"""Slots on the bus: gives workers memory that outlives them, has checkpoints saved from it, and frees it.

Invariants:
- A slot is recorded durably before its worker learns of it. A file without a record is deleted at the next start.
- Only the process that has opened slots, by its incarnation, asks for a save from them, also after it has left.
- The slots of a failed worker stay until what its job has staged last is saved, superseded or impossible to save.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from random import Random

import anyio
import msgspec
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from forged.auth.model import Role
from forged.clock import Clock
from forged.elastic.messages import ConfirmWorker, JobAborted, JobCompleted, WorkerFailed, WorkerLeft
from forged.errors import ForgedError, RequestRefused, Unavailable, describe
from forged.host.agent import HostAgent
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
from forged.host.model import SlotContents, SlotOwner, SlotRecord
from forged.host.ports import SlotsPort
from forged.host.slot_saves import OWNER, SlotSaves
from forged.host.slot_table import SLOTS_PER_WORKER, SlotLimits, SlotTable, staged_checkpoints
from forged.jobs.model import JobRemoved
from forged.kernel.bus import Bus
from forged.kernel.ledger import read_all
from forged.kernel.messages import Call, Decision, Nothing, Record, Ticket
from forged.kernel.store.port import Store
from forged.log import SILENT, Log
from forged.net.bulk.side_connection import descriptor_sender
from forged.net.tickets import TicketRegistry
from forged.pagination import ascending, take_page
from forged.shares import Shares

PREFIX = "slots/"
SLOT_ID_BYTES = 16
SLOT_BYTES_MIN = 1 << 12
WRITES_MAX = 100
"""In one transaction."""
STORAGE_PATH_CHARS_MAX = 4096
TICKETS_MAX, PRINCIPAL_TICKETS_MAX = 32, 8
"""Fewer than the limit of side connections, which other transfers need too."""
READY_WAIT_S = 5.0
"""How long a worker waits for a daemon that is starting."""
LOOK_AFTER_S = 5.0
"""How often slots whose workers are gone are looked after."""
LOCAL_HOSTS = ("pid ", "127.", "[::1]")
"""How the addresses of callers on this host begin."""


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
        limits: SlotLimits,
        log: Log = SILENT,
    ) -> None:
        self.table = SlotTable(limits)
        self._bus = bus
        self._clock = clock
        self._agent = agent
        self._tickets = tickets
        self._port = port
        self._token_bytes = token_bytes
        self._history = history
        self._log = log
        self._changed = anyio.Event()
        self._saves = SlotSaves(bus, clock, agent, self.table, port, random, log, changed=self._look)
        self._shared = Shares("tickets for slots", TICKETS_MAX, TICKETS_MAX // 4, PRINCIPAL_TICKETS_MAX)
        """The tickets whose side connections have not ended."""
        self._looking: set[str] = set()
        """The jobs whose slots are looked after now."""
        self._warned: dict[str, str] = {}
        """By job: the failure that was logged, until it is over."""
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
                self._saves.tasks = tasks
                task_status.started()
                await self._look_after_periodically()
        finally:
            self._agent.end()

    def _look(self) -> None:
        """Look at once after the slots whose workers are gone."""
        self._changed.set()

    async def _look_after_periodically(self) -> None:
        while True:
            self._changed = anyio.Event()
            await self._bus.ledger.writable()
            try:
                await self._look_after_all()
                self._warned.pop("", None)
            except (ForgedError, OSError) as error:
                self._warn("", error)
            with anyio.move_on_after(LOOK_AFTER_S):
                await self._changed.wait()

    # Requests of workers.

    async def _open(self, request: OpenSlots, call: Call) -> Decision[OpenedSlots]:
        self._check(request, call)
        await self._ready()
        opened_after = self._bus.ledger.revision
        await self._bus.ask(ConfirmWorker(request.job, request.worker_id, request.incarnation))
        holder, is_trusted = call.principal.holder, self._port.is_trusted(call.principal)
        present = self.table.newest_of(request.job, request.worker_id, request.incarnation)
        if present and all(
            (record.storage_path, record.is_trusted) == (request.storage_path, is_trusted)
            and record.size_bytes >= request.size_bytes
            for record in present
        ):
            return Decision(await self._opened(present), job=request.job)
        self.table.require_few(request.job, request.worker_id, request.incarnation)
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
                opened_after=opened_after,
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
        return OpenedSlots(paths, min(record.size_bytes for record in records), self._saves.may_write(records))

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
        return await self._saves.save(request, self._records_of(request))

    async def _find_staged(self, request: FindStagedSlots, call: Call) -> StagedSlots:
        await self._ready()
        contents = await self._saves.read(request.job)
        for staged in staged_checkpoints(contents)[:1]:
            durable_step = await self._saves.durable_step(request.job)
            is_newer = durable_step is None or staged.step > durable_step
            paths = {record.storage_path for record in self._saves.known(staged)}
            if is_newer and paths == {request.storage_path}:
                return StagedSlots(await self._agent.paths(staged.slot_ids), staged.step)
        return StagedSlots()

    # Facts of other services.

    def _ended(self, record: Record) -> None:
        """Owners of slots have failed or left. What follows from it is found out from the records."""
        fact, job = record.fact, record.job
        owner = SlotOwner.FAILED if isinstance(fact, WorkerFailed | JobAborted) else SlotOwner.LEFT
        worker_id = fact.worker_id if isinstance(fact, WorkerFailed | WorkerLeft) else None

        def is_ended(slot: SlotRecord) -> bool:
            if worker_id is None:
                # The job may have been reopened since, and its new workers may have opened slots.
                return slot.opened_after < record.id
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
        self._saves.forget_ended()
        jobs = self.table.jobs_to_look_after()
        for job in self._warned.keys() - jobs - {""}:
            del self._warned[job]
        assert self._saves.tasks is not None
        for job in sorted(jobs - self._looking):
            # A save that hangs delays no other job.
            self._looking.add(job)
            self._saves.tasks.start_soon(self._look_after_one, job)

    async def _look_after_one(self, job: str) -> None:
        try:
            await self._look_after(job)
            self._warned.pop(job, None)
        except (ForgedError, OSError) as error:
            self._warn(job, error)
        finally:
            self._looking.discard(job)

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
        if failed:
            is_settled = await self._saves.rescue(job, min(failed, key=lambda record: record.ended_at))
        contents, durable_step = await self._saves.read(job), await self._saves.durable_step(job)
        newest = next(iter(staged_checkpoints(contents)), None)
        if newest is not None and self._saves.is_saved(job, newest):
            durable_step = newest.step
        needless = list(self.table.superseded(job, contents, durable_step, self._clock.wall()))
        free = [
            record
            for record in needless
            if not self._saves.is_used(record)
            # A worker that has failed or left meanwhile may have staged something newer than these contents.
            and owners.get(record.slot_id) is record.owner
            and (is_settled or record.owner is not SlotOwner.FAILED)
        ]
        self._append(await self._free(free))

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
        records = map(self.table.records.__getitem__, ascending(self.table.records, request.after))
        views = (
            _view(record)
            for record in records
            if request.job in ("", record.job) and call.principal.may(Role.VIEWER, record.job)
        )
        slots, more = take_page(views, request.limit)
        used_bytes = self.table.shares.used
        # Those of the page only: a file is opened for each.
        contents = {one.slot_id: one for one in await self._agent.read([view.slot_id for view in slots])}
        slots = [_with_contents(view, contents.get(view.slot_id)) for view in slots]
        return SlotPage(slots, more, used_bytes, self.table.limits.bytes_max)


def _view(record: SlotRecord) -> SlotView:
    return SlotView(
        slot_id=record.slot_id,
        job=record.job,
        worker_id=record.worker_id,
        size_bytes=record.size_bytes,
        storage_path=record.storage_path,
        owner=record.owner,
    )


def _with_contents(view: SlotView, contents: SlotContents | None) -> SlotView:
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
