"""Executes one batch of shard transfers.

Invariants:
- `TransferSchedule` decides what starts next; this module runs it and reports the result back.
- A connection carries one shard after another, and is closed after any error.
- When the execution ends, for any reason, no transfer is running, all connections are closed, and received bytes stay
  in the store.
- There is a report only when every shard is accounted for.
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
from forged.data.store.errors import ShardCorrupt, StoreFailed
from forged.data.store.origin import ShardOrigin
from forged.data.store.port import FlowControl, ShardStore, Stamp
from forged.data.transfer.bandwidth import Bandwidth, Throttle
from forged.data.transfer.origin_reads import OriginRead, OriginReads, OriginSilent, OriginStuck, StoreStuck
from forged.data.transfer.outcome import (
    BadCopy,
    MissingShard,
    MovedShard,
    ShardInTransit,
    SourceFailure,
    TransferProgress,
    TransferReport,
)
from forged.data.transfer.schedule import Fault, Start, TransferSchedule, Wanted
from forged.elastic.model import WorkerId
from forged.errors import ConfigError, ForgedError, PeerError, RequestRefused, Unavailable, describe
from forged.retry import Random, RetryPolicy

T = TypeVar("T")

_BAD_COPY_CODES = frozenset({"shard_corrupt", "shard_changed", "shard_damaged"})


class SourceConnection(Protocol):
    """A connection to a worker that serves shards."""

    async def fetch(self, shard: int, store: ShardStore, flow: FlowControl) -> Stamp:
        """Fetch a shard into the store, and verify it."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class TransferObserver(Protocol):
    """Is told what happens to transfers, in the event loop, without waiting."""

    def on_progress(self, progress: TransferProgress) -> None:
        """The transfers have advanced; replaces what was told before."""
        ...

    def on_bad_copy(self, copy: BadCopy) -> None:
        """A source sent wrong bytes."""
        ...


@dataclass(frozen=True)
class TransferContext:
    """What the executions of one worker share."""

    store: ShardStore
    connect: Callable[[WorkerId], Awaitable[SourceConnection]]
    origin: ShardOrigin | None
    concurrency: int
    slots: CapacityLimiter
    """Limits all executions of the worker together."""
    retry: RetryPolicy
    random: Random
    clock: Clock
    throttle: Throttle
    bandwidth: Bandwidth
    uses_threads: bool
    origin_reads: OriginReads
    observer: TransferObserver | None
    progress_interval_s: float

    async def ask_store(self, act: Callable[[], T]) -> T:
        """Call the store, which may block, in a thread that no other call waits for."""
        return await to_thread.run_sync(act, limiter=CapacityLimiter(1)) if self.uses_threads else act()


def _no_origin_read() -> None:
    return


@dataclass(eq=False)
class _Attempt(FlowControl):
    """One attempt to move a shard. One thread writes its numbers and the event loop reads them."""

    start: Start
    began_at: float
    throttle: Callable[[int], float]
    offset: int = 0
    size: int | None = None
    bytes_moved: int = 0
    bytes_measured: int = 0
    measured_at: float = 0.0
    origin_silent_s: Callable[[], float | None] = _no_origin_read
    stopped: threading.Event = field(default_factory=threading.Event)

    def started(self, offset: int, size: int | None) -> None:
        self.offset, self.size = offset, size

    def received(self, count: int) -> None:
        if self.stopped.is_set():
            raise Unavailable("transfer_stopped", f"shard {self.start.shard.shard_id} is no longer wanted", "")
        self.bytes_moved += count

    def delay_before(self, count: int) -> float:
        return self.throttle(count)

    def sleep(self, seconds: float) -> None:
        """Sleep; returns early when the attempt is stopped."""
        if seconds > 0:
            self.stopped.wait(seconds)

    def in_transit(self) -> ShardInTransit:
        start, stored = self.start, self.offset + self.bytes_moved
        silent_s = self.origin_silent_s()
        return ShardInTransit(start.shard.shard_id, start.source, stored, self.size, silent_s, start.may_be_at_a_worker)


async def execute(wanted: Iterable[Wanted], context: TransferContext) -> TransferReport:
    """Move shards until each is held or given up."""
    shards = list(wanted)
    held = await context.ask_store(partial(_held, context.store, shards))
    return await Execution(shards, held, context).run()


def _held(store: ShardStore, wanted: Iterable[Wanted]) -> list[int]:
    """Which shards are held already. A store error is ignored here: it occurs again when the shard is written."""
    found = []
    for one in wanted:
        with suppress(Exception):
            if store.holds(one.shard.shard_id):
                found.append(one.shard.shard_id)
    return found


class Execution:
    """Moves those of the wanted shards that are not held."""

    def __init__(self, wanted: Sequence[Wanted], held: list[int], context: TransferContext) -> None:
        self._context = context
        self._began_at = self._now()
        self._kept = held
        known = set(held)
        missing = [one for one in wanted if one.shard.shard_id not in known]
        self._schedule = TransferSchedule(missing, context.concurrency, context.retry, context.random)
        self._total = len({one.shard.shard_id for one in wanted})
        self._moved: list[MovedShard] = []
        self._bad_copies: list[BadCopy] = []
        self._bytes = 0
        self._running: dict[_Attempt, None] = {}
        self._idle: dict[SourceConnection, WorkerId] = {}
        self._changed = anyio.Event()

    async def run(self) -> TransferReport:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._report_progress_regularly)
                await self._start_attempts(tasks)
                tasks.cancel_scope.cancel()
        finally:
            for connection in self._idle:
                connection.close()
        if not self._schedule.is_over:
            # A CancelledError that no cancellation has caused ends a task group without an error.
            raise Unavailable("transfers_broken_off", "the transfers were cancelled before all shards arrived", "retry")
        self._report_progress()
        return self._report()

    async def _start_attempts(self, tasks: TaskGroup) -> None:
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
        with self._running_attempt(start) as attempt:
            try:
                async with self._context.slots:
                    stamp = await self._move(attempt)
            except Exception as error:  # noqa: BLE001 - a script's store or origin may raise anything
                await self._on_failure(attempt, error)
            else:
                self._on_success(attempt, stamp)

    @contextmanager
    def _running_attempt(self, start: Start) -> Iterator[_Attempt]:
        now, throttle = self._now(), self._context.throttle
        attempt = _Attempt(start, now, lambda count: throttle.take(count, self._now()), measured_at=now)
        self._running[attempt] = None
        try:
            yield attempt
        finally:
            attempt.stopped.set()
            self._measure(attempt)
            del self._running[attempt]
            self._changed.set()
        self._report_progress()

    async def _move(self, attempt: _Attempt) -> Stamp:
        shard, source = attempt.start.shard, attempt.start.source
        if source is None:
            return await self._read_from_origin(attempt)
        connection = self._take_idle(source) or await self._context.connect(source)
        try:
            stamp = await connection.fetch(shard.shard_id, self._context.store, attempt)
        except BaseException:
            connection.close()
            raise
        self._idle[connection] = source
        if len(self._idle) > self._context.concurrency:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.close()
        return stamp

    def _take_idle(self, source: WorkerId) -> SourceConnection | None:
        found = next((connection for connection, its_source in self._idle.items() if its_source == source), None)
        if found is not None:
            del self._idle[found]
        return found

    async def _read_from_origin(self, attempt: _Attempt) -> Stamp:
        context = self._context
        assert context.origin is not None
        sleep = attempt.sleep if context.uses_threads else _no_sleep
        read = OriginRead(context.origin, attempt.start.shard, context.store, attempt, sleep, self._now)
        attempt.origin_silent_s = partial(context.origin_reads.origin_silent_s, read)
        return await context.origin_reads.read(read)

    def _on_success(self, attempt: _Attempt, stamp: Stamp) -> None:
        start = attempt.start
        self._schedule.succeeded(start.shard.shard_id)
        seconds = self._now() - attempt.began_at
        self._moved.append(MovedShard(start.shard.shard_id, start.source, stamp.size, attempt.offset, seconds))

    async def _on_failure(self, attempt: _Attempt, error: Exception) -> None:
        shard_id, source = attempt.start.shard.shard_id, attempt.start.source
        fault, reason = _fault_of(error), describe(error)
        try:
            is_held, progressed = await self._context.ask_store(partial(_stored, attempt, self._context.store))
        except Exception as store_error:  # noqa: BLE001 - a script's store may raise anything
            is_held = progressed = False
            fault, reason = Fault.OWN, describe(store_error)
        if is_held:
            self._schedule.succeeded(shard_id)
            self._kept.append(shard_id)
            return
        if isinstance(error, ForgedError) and error.code in _BAD_COPY_CODES and _is_sources_fault(error):
            copy = BadCopy(shard_id, source, error.code, error.message)
            self._bad_copies.append(copy)
            if self._context.observer is not None:
                self._context.observer.on_bad_copy(copy)
        self._schedule.failed(shard_id, fault, reason, self._now(), progressed=progressed)

    def _measure(self, attempt: _Attempt) -> None:
        now, moved = self._now(), attempt.bytes_moved
        fresh = moved - attempt.bytes_measured
        if fresh:
            self._bytes += fresh
            self._context.bandwidth.observe(fresh, now - attempt.measured_at)
            attempt.bytes_measured, attempt.measured_at = moved, now

    async def _report_progress_regularly(self) -> None:
        while True:
            await anyio.sleep(self._context.progress_interval_s)
            for attempt in self._running:
                self._measure(attempt)
            self._report_progress()

    def _report_progress(self) -> None:
        if self._context.observer is not None:
            self._context.observer.on_progress(
                TransferProgress(
                    done=len(self._moved) + len(self._kept),
                    missing=len(self._schedule.given_up),
                    total=self._total,
                    bytes_moved=self._bytes,
                    seconds=self._now() - self._began_at,
                    in_transit=tuple(attempt.in_transit() for attempt in self._running),
                )
            )

    def _report(self) -> TransferReport:
        missing = tuple(
            MissingShard(shard_id, tuple(SourceFailure(*failure) for failure in failures))
            for shard_id, failures in sorted(self._schedule.given_up.items())
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
        return self._context.clock.monotonic()


def _no_sleep(seconds: float) -> None:
    return


def _stored(attempt: _Attempt, store: ShardStore) -> tuple[bool, bool]:
    """Whether the shard is held despite the error; if not, whether the next attempt can start further on."""
    shard_id = attempt.start.shard.shard_id
    if store.holds(shard_id):
        return True, False
    if not attempt.bytes_moved or attempt.start.source is None:
        return False, False
    partial_shard = store.partial(shard_id)
    return False, partial_shard is not None and partial_shard.offset > attempt.offset


def _is_sources_fault(error: ForgedError) -> bool:
    return not isinstance(error, ShardCorrupt) or error.is_whole


def _fault_of(error: Exception) -> Fault:
    match error:
        case ShardCorrupt():
            return Fault.CORRUPT if error.is_whole else Fault.CORRUPT_MIXED
        case PeerError():
            # The message may have been damaged in transit, like the bytes of a shard.
            return Fault.CORRUPT
        case RequestRefused():
            return Fault.REFUSED
        case StoreFailed() | StoreStuck() | ConfigError():
            return Fault.OWN
        case OriginSilent():
            return Fault.SILENT
        case OriginStuck():
            return Fault.STUCK
        case ForgedError():
            return Fault.BROKEN
        case _:
            return Fault.OWN
