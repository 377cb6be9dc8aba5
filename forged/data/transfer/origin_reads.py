"""Reads shards from a dataset's origin, which may hang.

Invariants:
- Each read has a thread of its own. Nothing waits for a hanging thread: not the caller, another read or process exit.
- A read is abandoned when the origin gives nothing for the timeout, or when the shard is no longer wanted. From then on
  the origin's thread cannot touch the store.
- At most `ABANDONED_MAX` abandoned reads are alive, and `ABANDONED_PER_SHARD_MAX` of one shard. A further read waits
  for them, and is refused when they have been silent for the timeout.
"""

from __future__ import annotations

import asyncio
import io
import math
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context
from typing import BinaryIO, cast

import anyio
from anyio import CapacityLimiter, to_thread

from forged.data.model import DataShard
from forged.data.store.errors import StoreFailed
from forged.data.store.origin import ShardOrigin
from forged.data.store.port import ArrivingShard, FlowControl, ShardStore, Stamp
from forged.errors import ForgedError, Unavailable, describe
from forged.phrases import counted

ABANDONED_MAX = 64
ABANDONED_PER_SHARD_MAX = 3
"""More than one, because a later read may succeed where an earlier one hangs on a dead connection."""
RECHECK_S = 0.01
"""The shortest wait before the clock is read again."""
PIECE_BYTES = 1 << 20
TIMEOUT_FIX = "see what the origin waits for, and give it a timeout of its own"

Sleep = Callable[[float], None]
Now = Callable[[], float]


class OriginSilent(Unavailable):
    """The origin sent no byte within the timeout."""


class OriginStuck(Unavailable):
    """The origin is not asked, because earlier reads still hang in it."""


class StoreStuck(OriginStuck):
    """The origin is not asked, because earlier reads still hang in this worker's store."""


class OriginRead:
    """One read of one shard, watched by the event loop, which may abandon it.

    The thread holds the lock while it uses the arriving shard. So `abandon` takes the shard at once from a thread that
    hangs in the origin, and leaves it to a thread that is in the store, which releases it when it returns.
    """

    def __init__(
        self, origin: ShardOrigin, shard: DataShard, store: ShardStore, flow: FlowControl, sleep: Sleep, now: Now
    ) -> None:
        self.shard_id = shard.shard_id
        self.finished = anyio.Event()
        self._result: Stamp | Exception | None = None
        self._origin = origin
        self._shard = shard
        self._store = store
        self._flow = flow
        self._sleep = sleep
        self._now = now
        self._lock = threading.Lock()
        self._arriving: ArrivingShard | None = None
        self._abandoned_at = math.inf
        self._is_over = False
        self._has_given = False
        self._silent_since = math.inf
        """Since when the read waits for the origin; infinity while it does not."""

    def run(self) -> Stamp:
        """Have the origin write the shard into the store."""
        with self._arriving_file() as file:
            # Also what would cancel or exit something other than this thread.
            with _translated(self.shard_id, BaseException):
                self._origin.write_to(self._shard, file)
            return self._commit()

    async def run_in_loop(self) -> Stamp:
        """Like `run`, for a simulation without threads, where an origin may return an awaitable."""
        with self._arriving_file() as file:
            with _translated(self.shard_id):
                rest = cast("Callable[..., Awaitable[None] | None]", self._origin.write_to)(self._shard, file)
                if rest is not None:
                    await rest
            return self._commit()

    def run_to_result(self) -> Stamp | Exception:
        """Run, and return the error instead of raising it: raised in the thread it would be lost."""
        try:
            return self.run()
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            return error
        except BaseException as error:  # noqa: BLE001 - raised there, it would cancel the caller or end the event loop
            why = f"shard {self.shard_id} cannot be stored: {describe(error)}"
            return StoreFailed("shard_store_failed", why, "check the shard store")

    def finish(self, result: Stamp | Exception) -> None:
        self._result = result
        self.finished.set()

    def result(self) -> Stamp:
        """The stamp of the shard, once the read is finished; raises what went wrong."""
        if isinstance(self._result, Exception):
            raise self._result
        assert self._result is not None
        return self._result

    @property
    def is_abandoned(self) -> bool:
        return self._abandoned_at < math.inf

    def idle_s(self) -> float:
        """Since when the origin is silent or the read is abandoned, in seconds; 0 while it makes progress."""
        return max(0.0, self._now() - min(self._silent_since, self._abandoned_at))

    def origin_silent_s(self) -> float | None:
        """For how long the origin is silent; None while the thread is not in it."""
        silent_since = self._silent_since
        return None if silent_since == math.inf else max(0.0, self._now() - silent_since)

    def abandon(self) -> None:
        """Let another read write the shard. Any thread may call this, more than once."""
        self._abandoned_at = min(self._abandoned_at, self._now())
        if self._lock.acquire(blocking=False):
            try:
                self._release()
            finally:
                self._lock.release()

    @contextmanager
    def _arriving_file(self) -> Iterator[BinaryIO]:
        try:
            with self._lock:
                self._require_wanted()
                self._arriving = self._store.receive(self.shard_id, None)
            self._require_wanted()
            self._flow.started(0, None)
            self._silent_since = self._now()
            yield cast("BinaryIO", _OriginFile(self._take))
        finally:
            self._silent_since = math.inf
            with self._lock:
                self._is_over = True
                self._release()

    def _commit(self) -> Stamp:
        self._silent_since = math.inf
        if self._shard.size and not self._has_given:
            raise Unavailable(
                "origin_empty",
                f"the origin wrote no byte of shard {self.shard_id}, which has {self._shard.size} samples",
                "check the dataset's origin",
            )
        with self._lock:
            return self._require_arriving().commit()

    def _take(self, view: memoryview) -> None:
        self._require_wanted()
        self._silent_since = math.inf
        try:
            for start in range(0, view.nbytes, PIECE_BYTES):
                self._write(view[start : start + PIECE_BYTES])
        finally:
            self._silent_since = self._now()

    def _write(self, piece: memoryview) -> None:
        self._sleep(self._flow.delay_before(piece.nbytes))
        with self._lock:
            self._require_arriving().write(piece)
        self._has_given = True
        if self.is_abandoned:
            # `abandon` left the shard to this thread, and the origin may hang again.
            self.abandon()
            self._require_wanted()
        self._flow.received(piece.nbytes)

    def _require_arriving(self) -> ArrivingShard:
        self._require_wanted()
        assert self._arriving is not None
        return self._arriving

    def _require_wanted(self) -> None:
        if self.is_abandoned or self._is_over:
            raise Unavailable("transfer_stopped", f"shard {self.shard_id} is no longer read from the origin", "")

    def _release(self) -> None:
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.close()


class OriginReads:
    """All reads of one worker."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._abandoned: dict[OriginRead, None] = {}
        """Those whose threads have not ended."""
        self._abandoned_ended = anyio.Event()
        self._queued: dict[OriginRead, list[OriginRead]] = {}
        """Reads that are not started, each with the abandoned reads that it waits for."""

    async def read(self, read: OriginRead) -> Stamp:
        """Run the read in a thread; raises `OriginSilent` or `OriginStuck` where it would hang."""
        await self._wait_for_room(read)
        self._start(read)
        try:
            await self._wait_until_finished(read)
        except BaseException:
            await self._abandon(read)
            raise
        return read.result()

    def origin_silent_s(self, read: OriginRead) -> float | None:
        """For how long the origin is silent; None where the read waits for anything else."""
        if read.is_abandoned:
            return None
        awaited = self._queued.get(read) or [read]
        silences = [silent_s for one in awaited if (silent_s := one.origin_silent_s()) is not None]
        return min(silences) if len(silences) == len(awaited) else None

    def _start(self, read: OriginRead) -> None:
        loop = asyncio.get_running_loop()

        def run() -> None:
            # A copied context would say that this thread runs an event loop, and the origin could not run its own.
            result = Context().run(read.run_to_result)
            # The loop may have ended meanwhile.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._on_finished, read, result)

        threading.Thread(target=run, name=f"origin of shard {read.shard_id}", daemon=True).start()

    def _on_finished(self, read: OriginRead, result: Stamp | Exception) -> None:
        read.finish(result)
        if read in self._abandoned:
            del self._abandoned[read]
            ended, self._abandoned_ended = self._abandoned_ended, anyio.Event()
            ended.set()

    async def _wait_until_finished(self, read: OriginRead) -> None:
        while not read.finished.is_set():
            left_s = self._timeout_s - read.idle_s()
            if left_s <= 0:
                raise OriginSilent("origin_silent", _silence(read.shard_id, self._timeout_s), TIMEOUT_FIX)
            with anyio.move_on_after(max(left_s, RECHECK_S)):
                await read.finished.wait()

    async def _abandon(self, read: OriginRead) -> None:
        if read.finished.is_set():
            return
        self._abandoned[read] = None
        # What the store cannot release here it reports when the shard is wanted again.
        with anyio.CancelScope(shield=True), suppress(Exception):
            await to_thread.run_sync(read.abandon, limiter=CapacityLimiter(1))

    async def _wait_for_room(self, read: OriginRead) -> None:
        try:
            while in_the_way := self._in_the_way(read.shard_id):
                self._queued[read] = in_the_way
                left_s = self._timeout_s - min(one.idle_s() for one in in_the_way)
                if left_s <= 0:
                    raise self._stuck(read.shard_id, in_the_way)
                with anyio.move_on_after(max(left_s, RECHECK_S)):
                    await self._abandoned_ended.wait()
        finally:
            self._queued.pop(read, None)

    def _stuck(self, shard_id: int, in_the_way: list[OriginRead]) -> OriginStuck:
        if in_store := sum(one.origin_silent_s() is None for one in in_the_way):
            why = f"{_unfinished(in_store)} in the shard store, so shard {shard_id} is not read from the origin"
            return StoreStuck("store_stuck", why, "check the disk of this host")
        why = f"{_silence(shard_id, self._timeout_s)}, and {_unfinished(len(in_the_way))} in it"
        return OriginStuck("origin_stuck", why, TIMEOUT_FIX)

    def _in_the_way(self, shard_id: int) -> list[OriginRead]:
        if len(self._abandoned) >= ABANDONED_MAX:
            return list(self._abandoned)
        of_the_same = [one for one in self._abandoned if one.shard_id == shard_id]
        return of_the_same if len(of_the_same) >= ABANDONED_PER_SHARD_MAX else []


class OriginReadsInLoop(OriginReads):
    """For simulations: the origin runs in the event loop, and an abandoned read ends at once."""

    async def read(self, read: OriginRead) -> Stamp:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run, read)
            try:
                await self._wait_until_finished(read)
            except OriginSilent as error:
                read.finish(error)
            finally:
                read.abandon()
                tasks.cancel_scope.cancel()
        return read.result()

    @staticmethod
    async def _run(read: OriginRead) -> None:
        try:
            read.finish(await read.run_in_loop())
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            read.finish(error)


def _silence(shard_id: int, timeout_s: float) -> str:
    return f"the origin sent no byte of shard {shard_id} for {timeout_s:g} s"


def _unfinished(reads: int) -> str:
    return f"{counted(reads, 'earlier read')} still {'hang' if reads > 1 else 'hangs'}"


@contextmanager
def _translated(shard_id: int, kind: type[BaseException] = Exception) -> Iterator[None]:
    try:
        yield
    except ForgedError:
        raise
    except kind as error:
        text = f"the origin failed on shard {shard_id}: {describe(error)}"
        raise Unavailable("origin_failed", text, "repair the dataset's origin: it is asked again") from error


class _OriginFile(io.RawIOBase):
    """The file that an origin writes to."""

    def __init__(self, take: Callable[[memoryview], None]) -> None:
        self._take = take

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(cast("bytes", data)).cast("B")
        if view.nbytes:
            self._take(view)
        return view.nbytes
