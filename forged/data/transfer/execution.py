"""One execution of transfers.

Law: what is to be done next is the schedule's decision; this carries it out, and tells it how that ended. A connection
is used for one shard after the other, and closed after any error. When the execution ends, for whatever reason,
nothing of it is under way any more, its connections are closed, and what has arrived of shards is kept. There is a
report only when each shard is accounted for, whatever was raised within.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import anyio
from anyio import CapacityLimiter, to_thread
from anyio.abc import TaskGroup

from forged.clock import Clock
from forged.data.store.calls import OriginCalls, OriginSilent, OriginStuck, StoreStuck
from forged.data.store.origin import Bringing, ShardOrigin
from forged.data.store.port import Passage, ShardCorrupt, ShardStore, Stamp, StoreFailed
from forged.data.transfer.bandwidth import Bandwidth, Throttle
from forged.data.transfer.outcome import (
    BadCopy,
    MissingShard,
    MovedShard,
    SourceFailure,
    TransferProgress,
    TransferReport,
    UnderWay,
)
from forged.data.transfer.schedule import Fault, Start, TransferSchedule, Wanted
from forged.elastic.model import WorkerId
from forged.errors import ConfigError, ForgedError, PeerError, RequestRefused, Unavailable, describe
from forged.retry import Random, RetryPolicy

T = TypeVar("T")

_BAD_COPY_CODES = frozenset({"shard_corrupt", "shard_changed", "shard_damaged"})


class Visit(Protocol):
    """A connection to a worker that has shards."""

    async def fetch(self, shard: int, store: ShardStore, passage: Passage) -> Stamp:
        """Fetch a shard, and hold it."""
        ...

    def close(self) -> None:
        """Hang up."""
        ...


@dataclass(frozen=True)
class Equipment:
    """What executions work with."""

    store: ShardStore
    connect: Callable[[WorkerId], Awaitable[Visit]]
    origin: ShardOrigin | None
    concurrency: int
    slots: CapacityLimiter
    """Of all executions of the worker together."""
    retry: RetryPolicy
    random: Random
    clock: Clock
    throttle: Throttle
    bandwidth: Bandwidth
    uses_threads: bool
    calls: OriginCalls
    progress: Callable[[TransferProgress], None]
    progress_interval_s: float
    bad_copy: Callable[[BadCopy], None]

    async def ask_store(self, act: Callable[[], T]) -> T:
        """Ask the store, which may block; whoever waits for it takes no thread from others."""
        return await to_thread.run_sync(act, limiter=CapacityLimiter(1)) if self.uses_threads else act()


def _not_at_origin() -> None:
    return


@dataclass(eq=False)
class _Passage:
    """One attempt to move a shard. Its numbers are written by one thread and read by another."""

    start: Start
    began_at: float
    take: Callable[[int], float]
    offset: int = 0
    size: int | None = None
    bytes_moved: int = 0
    bytes_measured: int = 0
    measured_at: float = 0.0
    origin_silent_s: Callable[[], float | None] = _not_at_origin
    stopped: threading.Event = field(default_factory=threading.Event)

    def begins(self, offset: int, size: int | None) -> None:
        self.offset, self.size = offset, size

    def moved(self, count: int) -> None:
        if self.stopped.is_set():
            raise Unavailable("transfer_stopped", f"shard {self.start.shard.shard_id} is no longer wanted", "")
        self.bytes_moved += count

    def pause_before(self, count: int) -> float:
        return self.take(count)

    def wait(self, seconds: float) -> None:
        """Let the time pass, unless the shard is no longer wanted."""
        if seconds > 0:
            self.stopped.wait(seconds)

    def seen(self) -> UnderWay:
        start, here = self.start, self.offset + self.bytes_moved
        silent_s = self.origin_silent_s()
        return UnderWay(start.shard.shard_id, start.source, here, self.size, silent_s, start.is_elsewhere)


async def execute(wanted: Iterable[Wanted], equipment: Equipment) -> TransferReport:
    """Move shards until all are here or given up."""
    everything = list(wanted)
    held = await equipment.ask_store(partial(_held, equipment.store, everything))
    return await Execution(everything, held, equipment).run()


def _held(store: ShardStore, wanted: Iterable[Wanted]) -> list[int]:
    """Which of them are here already; where the store cannot tell, that is found out when it is to take the shard."""
    found = []
    for one in wanted:
        with suppress(Exception):
            if store.holds(one.shard.shard_id):
                found.append(one.shard.shard_id)
    return found


class Execution:
    """Moves shards, of which some are held already."""

    def __init__(self, wanted: Sequence[Wanted], held: list[int], equipment: Equipment) -> None:
        self._with = equipment
        self._began_at = self._now()
        self._kept = held
        known = set(held)
        self._schedule = TransferSchedule(
            (one for one in wanted if one.shard.shard_id not in known),
            equipment.concurrency,
            equipment.retry,
            equipment.random,
        )
        self._total = len({one.shard.shard_id for one in wanted})
        self._moved: list[MovedShard] = []
        self._bad_copies: list[BadCopy] = []
        self._bytes = 0
        self._under_way: dict[_Passage, None] = {}
        self._idle: dict[Visit, WorkerId] = {}
        self._changed = anyio.Event()

    async def run(self) -> TransferReport:
        """Move all of them."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._tell_regularly)
                await self._drive(tasks)
                tasks.cancel_scope.cancel()
        finally:
            for visit in self._idle:
                visit.close()
        self._require_over()
        self._tell()
        return self._report()

    def _require_over(self) -> None:
        """What looks like a cancellation and is none ends a task group without an error."""
        if not self._schedule.is_over:
            raise Unavailable(
                "transfers_broken_off", "something cancelled the transfers before all shards were here", "try again"
            )

    async def _drive(self, tasks: TaskGroup) -> None:
        while True:
            self._changed = anyio.Event()
            while (start := self._schedule.next(self._now())) is not None:
                tasks.start_soon(self._attempt, start)
            if self._schedule.is_over:
                return
            due = self._schedule.next_at()
            with anyio.move_on_after(None if due is None else max(0.0, due - self._now())):
                await self._changed.wait()

    async def _attempt(self, start: Start) -> None:
        with self._passing(start) as passage:
            try:
                async with self._with.slots:
                    stamp = await self._move(start, passage)
            except Exception as error:  # noqa: BLE001 - also what a store or an origin of somebody else's raises
                await self._on_failure(passage, error)
            else:
                self._on_success(passage, stamp)

    @contextmanager
    def _passing(self, start: Start) -> Iterator[_Passage]:
        now = self._now()
        passage = _Passage(start, now, lambda count: self._with.throttle.take(count, self._now()), measured_at=now)
        self._under_way[passage] = None
        try:
            yield passage
        finally:
            passage.stopped.set()
            self._measure(passage)
            del self._under_way[passage]
            self._changed.set()
        self._tell()

    async def _move(self, start: Start, passage: _Passage) -> Stamp:
        if start.source is None:
            return await self._bring(start, passage)
        visit = self._idle_visit(start.source) or await self._with.connect(start.source)
        try:
            stamp = await visit.fetch(start.shard.shard_id, self._with.store, passage)
        except BaseException:
            visit.close()
            raise
        self._idle[visit] = start.source
        if len(self._idle) > self._with.concurrency:
            self._close_oldest()
        return stamp

    def _idle_visit(self, source: WorkerId) -> Visit | None:
        for visit, its_source in self._idle.items():
            if its_source == source:
                del self._idle[visit]
                return visit
        return None

    def _close_oldest(self) -> None:
        visit = next(iter(self._idle))
        del self._idle[visit]
        visit.close()

    async def _bring(self, start: Start, passage: _Passage) -> Stamp:
        assert self._with.origin is not None
        wait = passage.wait if self._with.uses_threads else _at_once
        bringing = Bringing(self._with.origin, start.shard, self._with.store, passage, wait, self._now)
        passage.origin_silent_s = partial(self._with.calls.origin_silent_s, bringing)
        return await self._with.calls.ask(bringing)

    def _on_success(self, passage: _Passage, stamp: Stamp) -> None:
        start = passage.start
        self._schedule.succeeded(start.shard.shard_id)
        seconds = self._now() - passage.began_at
        self._moved.append(MovedShard(start.shard.shard_id, start.source, stamp.size, passage.offset, seconds))

    async def _on_failure(self, passage: _Passage, error: Exception) -> None:
        shard_id, source = passage.start.shard.shard_id, passage.start.source
        fault, reason = _fault_of(error), describe(error)
        try:
            is_held, progressed = await self._with.ask_store(partial(_come_of, passage, self._with.store))
        except Exception as trouble:  # noqa: BLE001 - also what a store of somebody else's raises
            is_held = progressed = False
            fault, reason = Fault.OURS, describe(trouble)
        if is_held:
            self._schedule.succeeded(shard_id)
            self._kept.append(shard_id)
            return
        if isinstance(error, ForgedError) and error.code in _BAD_COPY_CODES and _is_blamed(error):
            copy = BadCopy(shard_id, source, error.code, error.message)
            self._bad_copies.append(copy)
            self._with.bad_copy(copy)
        self._schedule.failed(shard_id, fault, reason, self._now(), progressed=progressed)

    def _measure(self, passage: _Passage) -> None:
        now, moved = self._now(), passage.bytes_moved
        fresh = moved - passage.bytes_measured
        if fresh:
            self._bytes += fresh
            self._with.bandwidth.observe(passage.start.source, fresh, now - passage.measured_at)
            passage.bytes_measured, passage.measured_at = moved, now

    async def _tell_regularly(self) -> None:
        while True:
            await anyio.sleep(self._with.progress_interval_s)
            for passage in self._under_way:
                self._measure(passage)
            self._tell()

    def _tell(self) -> None:
        self._with.progress(
            TransferProgress(
                done=len(self._moved) + len(self._kept),
                missing=len(self._schedule.given_up),
                total=self._total,
                bytes_moved=self._bytes,
                seconds=self._now() - self._began_at,
                under_way=tuple(passage.seen() for passage in self._under_way),
            )
        )

    def _report(self) -> TransferReport:
        missing = tuple(
            MissingShard(shard_id, tuple(SourceFailure(*complaint) for complaint in complaints))
            for shard_id, complaints in sorted(self._schedule.given_up.items())
        )
        return TransferReport(
            tuple(self._moved),
            tuple(self._kept),
            missing,
            tuple(self._bad_copies),
            self._bytes,
            self._now() - self._began_at,
        )

    def _now(self) -> float:
        return self._with.clock.monotonic()


def _at_once(seconds: float) -> None:
    return


def _come_of(passage: _Passage, store: ShardStore) -> tuple[bool, bool]:
    """Whether the shard is here all the same, and if not, whether the next attempt can begin further on."""
    shard_id = passage.start.shard.shard_id
    if store.holds(shard_id):
        return True, False
    if not passage.bytes_moved or passage.start.source is None:
        return False, False
    begun = store.begun(shard_id)
    return False, begun is not None and begun.offset > passage.offset


def _is_blamed(error: ForgedError) -> bool:
    return not isinstance(error, ShardCorrupt) or error.is_whole


def _fault_of(error: Exception) -> Fault:
    match error:
        case ShardCorrupt():
            return Fault.CORRUPT if error.is_whole else Fault.DOUBTFUL
        case PeerError():
            # It may have been damaged on its way, like bytes of a shard.
            return Fault.CORRUPT
        case RequestRefused():
            return Fault.REFUSED
        case StoreFailed() | StoreStuck() | ConfigError():
            return Fault.OURS
        case OriginSilent():
            return Fault.SILENT
        case OriginStuck():
            return Fault.STUCK
        case ForgedError():
            return Fault.BROKEN
        case _:
            return Fault.OURS
