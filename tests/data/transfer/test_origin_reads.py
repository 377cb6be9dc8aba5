from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

import anyio
import pytest

from forged.data.model import DataShard
from forged.data.store.directory import DirectoryShardStore
from forged.data.store.memory import MemoryShardStore
from forged.data.store.origin import FunctionOrigin, ShardOrigin
from forged.data.store.port import ArrivingShard, OpenShard, PartialShard, ShardStore, Stamp
from forged.data.transfer import origin_reads
from forged.data.transfer.origin_reads import (
    ABANDONED_PER_SHARD_MAX,
    PIECE_BYTES,
    OriginRead,
    OriginReads,
    OriginSilent,
    OriginStuck,
    StoreStuck,
)
from forged.errors import Unavailable
from tests.data.transfer_cluster import BlockedStore, DelayedStore, content_of, open_descriptors, shard
from tests.worker.meshes import PATIENCE_S, until

SILENT_S = 0.02
"""The timeout, on the test's clock."""
SIZE = 3 * PIECE_BYTES + 5


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def expire(self) -> None:
        """Advance beyond the timeout."""
        self.now += 2 * SILENT_S


class UnlimitedFlow:
    """A flow control without limits."""

    def started(self, offset: int, size: int | None) -> None:
        return

    def received(self, count: int) -> None:
        return

    def delay_before(self, count: int) -> float:
        return 0.0


class HangingOrigin:
    """An origin that hangs after so many bytes in the first calls, until it is released."""

    def __init__(self, behind: int = 0, times: int = 1) -> None:
        self.gate = threading.Event()
        self.hung = 0
        self.raised: list[BaseException] = []
        self.threads: list[threading.Thread] = []
        self._behind = behind
        self._times = times

    def write_to(self, one: DataShard, file: BinaryIO) -> None:
        data = content_of(one.shard_id, SIZE)
        if self._times:
            self._times -= 1
            self.threads.append(threading.current_thread())
            file.write(data[: self._behind])
            self.hung += 1
            assert self.gate.wait(PATIENCE_S)
            try:
                file.write(b"late" * PIECE_BYTES)
            except BaseException as error:
                self.raised.append(error)
                raise
        file.write(data)

    async def end(self) -> None:
        """Release all threads, and wait until they have ended."""
        self.gate.set()
        await until(lambda: not any(thread.is_alive() for thread in self.threads))


class ReadFixture:
    """The reads of one worker from one origin, on a clock of the test."""

    def __init__(self, store: ShardStore, origin: ShardOrigin) -> None:
        self.store = store
        self.origin = origin
        self.clock = Clock()
        self.reads = OriginReads(SILENT_S)

    def read(self, number: int = 7) -> OriginRead:
        return OriginRead(self.origin, shard(number), self.store, UnlimitedFlow(), lambda seconds: None, self.clock)

    def ask(self, number: int = 7) -> asyncio.Task[Stamp]:
        return asyncio.ensure_future(self.reads.read(self.read(number)))

    async def hang(self, origin: HangingOrigin, number: int = 7) -> None:
        """Read until the timeout from an origin that hangs."""
        reading, before = self.ask(number), origin.hung
        await until(lambda: origin.hung > before)
        self.clock.expire()
        with pytest.raises(OriginSilent):
            await reading

    async def supersede(self, hung: Callable[[], int]) -> None:
        """Read, and cancel when that read hangs, too."""
        reading, before = self.ask(), hung()
        await until(lambda: hung() > before)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading


@pytest.fixture(params=[DirectoryShardStore, MemoryShardStore])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ShardStore:
    made: ShardStore = request.param(tmp_path) if request.param is DirectoryShardStore else request.param()
    return made


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write_bytes(one: DataShard, file: BinaryIO) -> None:
    file.write(b"bytes")


def bytes_of(store: ShardStore, number: int) -> bytes:
    with store.open(number) as opened:
        return os.pread(opened.fd, opened.stamp.size + 1, 0)


@asynccontextmanager
async def releasing(origin: HangingOrigin) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await origin.end()


async def test_origin_that_writes_the_shard_completes_the_read(store: ShardStore) -> None:
    fixture = ReadFixture(store, FunctionOrigin(write_bytes))
    assert await fixture.ask() == Stamp.of(b"bytes")
    assert bytes_of(store, 7) == b"bytes"


async def test_error_of_the_origin_is_raised() -> None:
    def fail(one: DataShard, file: BinaryIO) -> None:
        raise OSError("the bucket is away")

    with pytest.raises(Unavailable, match="the bucket is away"):
        await ReadFixture(MemoryShardStore(), FunctionOrigin(fail)).ask()


@pytest.mark.parametrize("behind", [0, 10, PIECE_BYTES, SIZE])
async def test_late_writes_of_an_abandoned_origin_read_are_refused(store: ShardStore, behind: int) -> None:
    origin = HangingOrigin(behind)
    async with releasing(origin):
        fixture = ReadFixture(store, origin)
        await fixture.hang(origin)
        assert await fixture.ask() == Stamp.of(content_of(7, SIZE))
        await origin.end()
        (error,) = origin.raised
        assert isinstance(error, Unavailable)
        assert error.code == "transfer_stopped"
        assert bytes_of(store, 7) == content_of(7, SIZE)


@pytest.mark.parametrize("behind", [0, SIZE])
async def test_late_writes_never_reach_the_shard_of_a_newer_read(store: ShardStore, behind: int) -> None:
    origin = HangingOrigin(behind)
    async with releasing(origin):
        fixture = ReadFixture(store, origin)
        await fixture.hang(origin)
        with store.receive(7, None) as newer:
            newer.write(content_of(7, SIZE)[:1000])
            await origin.end()
            assert origin.raised
            newer.write(content_of(7, SIZE)[1000:])
            assert newer.commit() == Stamp.of(content_of(7, SIZE))
        assert bytes_of(store, 7) == content_of(7, SIZE)


async def test_abandoned_origin_read_leaves_no_file_or_descriptor(tmp_path: Path) -> None:
    store, origin = DirectoryShardStore(tmp_path), HangingOrigin(SIZE)
    async with releasing(origin):
        before = open_descriptors()
        await ReadFixture(store, origin).hang(origin)
        assert names_in(tmp_path) == []
        assert open_descriptors() == before
        await origin.end()
        assert names_in(tmp_path) == []
        assert open_descriptors() == before


async def test_silence_error_names_the_shard_and_the_duration() -> None:
    origin = HangingOrigin()
    async with releasing(origin):
        fixture = ReadFixture(MemoryShardStore(), origin)
        reading = fixture.ask()
        await until(lambda: origin.hung == 1)
        fixture.clock.expire()
        with pytest.raises(OriginSilent, match=r"the origin sent no byte of shard 7 for 0\.02 s"):
            await reading


async def test_abandoned_origin_read_that_returns_normally_stores_nothing(store: ShardStore) -> None:
    gate, ended = threading.Event(), threading.Event()

    def swallow(one: DataShard, file: BinaryIO) -> None:
        file.write(b"some")
        assert gate.wait(PATIENCE_S)
        with suppress(Unavailable):
            file.write(b"more")
        ended.set()

    fixture = ReadFixture(store, FunctionOrigin(swallow))
    read = fixture.read()
    outcome: list[BaseException] = []

    def run() -> None:
        try:
            read.run()
        except Unavailable as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    await until(lambda: bool(store._arriving))  # type: ignore[attr-defined]
    await until(lambda: read.idle_s() == 0.0 and read._silent_since != float("inf"))
    read.abandon()
    store.put(7, [b"another's"])
    gate.set()
    thread.join(PATIENCE_S)
    assert ended.is_set()
    assert [error.code for error in outcome if isinstance(error, Unavailable)] == ["transfer_stopped"]
    assert bytes_of(store, 7) == b"another's"


async def test_each_written_byte_restarts_the_timeout() -> None:
    turns = [threading.Event() for _ in range(5)]
    written = [threading.Event() for _ in range(5)]

    def drip(one: DataShard, file: BinaryIO) -> None:
        for turn, done in zip(turns, written, strict=True):
            assert turn.wait(PATIENCE_S)
            file.write(b"x")
            done.set()

    fixture = ReadFixture(MemoryShardStore(), FunctionOrigin(drip))
    read = fixture.read()
    reading = asyncio.ensure_future(fixture.reads.read(read))
    for turn, done in zip(turns, written, strict=True):
        fixture.clock.now += 0.75 * SILENT_S
        turn.set()
        await until(done.is_set)
        assert read.idle_s() == 0.0
    assert await reading == Stamp.of(b"xxxxx")


async def test_empty_write_does_not_restart_the_timeout() -> None:
    asked_for, turn, written, gate = (threading.Event() for _ in range(4))

    def pretend(one: DataShard, file: BinaryIO) -> None:
        asked_for.set()
        assert turn.wait(PATIENCE_S)
        file.write(b"")
        written.set()
        assert gate.wait(PATIENCE_S)

    fixture = ReadFixture(MemoryShardStore(), FunctionOrigin(pretend))
    read = fixture.read()
    reading = asyncio.ensure_future(fixture.reads.read(read))
    await until(asked_for.is_set)
    fixture.clock.now += 0.75 * SILENT_S
    turn.set()
    await until(written.is_set)
    assert read.idle_s() > 0.5 * SILENT_S
    fixture.clock.now += 0.75 * SILENT_S
    with pytest.raises(OriginSilent):
        await reading
    gate.set()


async def test_time_spent_in_the_store_does_not_count_as_origin_silence() -> None:
    store = DelayedStore()
    fixture = ReadFixture(store, FunctionOrigin(write_bytes))
    read = fixture.read()
    reading = asyncio.ensure_future(fixture.reads.read(read))
    await until(store.reached.is_set)
    fixture.clock.expire()
    assert read.idle_s() == 0.0
    assert fixture.reads.origin_silent_s(read) is None
    store.gate.set()
    assert await reading == Stamp.of(b"bytes")


class SlowClosingStore(MemoryShardStore):
    """A store whose shards close only when the gate is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.gate = threading.Event(), threading.Event()

    def receive(self, number: int, stamp: Stamp | None, offset: int = 0) -> ArrivingShard:
        arriving = super().receive(number, stamp, offset)
        close = arriving.close

        def close_slowly() -> None:
            self.reached.set()
            assert self.gate.wait(PATIENCE_S)
            close()

        arriving.close = close_slowly  # type: ignore[method-assign]
        return arriving


async def test_origin_is_not_silent_while_the_store_closes_a_failed_shard() -> None:
    def fail(one: DataShard, file: BinaryIO) -> None:
        raise OSError("the bucket is away")

    store = SlowClosingStore()
    fixture = ReadFixture(store, FunctionOrigin(fail))
    read = fixture.read()
    reading = asyncio.ensure_future(fixture.reads.read(read))
    await until(store.reached.is_set)
    assert fixture.reads.origin_silent_s(read) is None
    store.gate.set()
    with pytest.raises(Unavailable, match="the bucket is away"):
        await reading


async def test_origin_is_not_silent_while_the_store_closes_an_abandoned_shard() -> None:
    store, origin = SlowClosingStore(), HangingOrigin()
    async with releasing(origin):
        fixture = ReadFixture(store, origin)
        read = fixture.read()
        reading = asyncio.ensure_future(fixture.reads.read(read))
        await until(lambda: origin.hung == 1)
        fixture.clock.expire()
        assert fixture.reads.origin_silent_s(read) == pytest.approx(2 * SILENT_S)
        await until(store.reached.is_set)
        assert fixture.reads.origin_silent_s(read) is None
        store.gate.set()
        with pytest.raises(OriginSilent):
            await reading


@pytest.mark.parametrize("run", [asyncio.run, anyio.run])
def test_an_origin_may_run_an_event_loop_of_its_own(run: Callable[..., bytes]) -> None:
    async def fetch() -> bytes:
        await anyio.sleep(0.001)
        return b"bytes"

    def write(one: DataShard, file: BinaryIO) -> None:
        file.write(run(fetch() if run is asyncio.run else fetch))

    async def ask() -> Stamp:
        return await ReadFixture(MemoryShardStore(), FunctionOrigin(write)).ask()

    assert anyio.run(ask) == Stamp.of(b"bytes")


async def test_origin_does_not_inherit_the_callers_context() -> None:
    """Set by sniffio: the library that runs the event loop."""
    library: ContextVar[str] = ContextVar("library", default="none")
    library.set("the caller's")
    seen: list[str] = []

    def write(one: DataShard, file: BinaryIO) -> None:
        seen.append(library.get())
        write_bytes(one, file)

    await ReadFixture(MemoryShardStore(), FunctionOrigin(write)).ask()
    assert seen == ["none"]


async def test_cancelled_read_inside_the_store_releases_the_shard_from_its_thread() -> None:
    store = DelayedStore()
    wrote: list[BaseException] = []

    def write(one: DataShard, file: BinaryIO) -> None:
        try:
            file.write(b"bytes")
        except Unavailable as error:
            wrote.append(error)
            raise

    reading = ReadFixture(store, FunctionOrigin(write)).ask()
    await until(store.reached.is_set)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert store._arriving == {7}
    store.gate.set()
    await until(lambda: not store._arriving)
    assert len(wrote) == 1
    assert not store.holds(7)
    assert store.put(7, [b"another's"]) == Stamp.of(b"another's")


async def test_cancelled_read_releases_the_shard_at_once(store: ShardStore) -> None:
    origin = HangingOrigin(10)
    async with releasing(origin):
        fixture = ReadFixture(store, origin)
        reading = fixture.ask()
        await until(lambda: origin.hung == 1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await fixture.ask() == Stamp.of(content_of(7, SIZE))


class TestHangingReads:
    async def test_read_is_refused_at_the_limit_per_shard(self) -> None:
        origin = HangingOrigin(times=1000)
        async with releasing(origin):
            fixture = ReadFixture(MemoryShardStore(), origin)
            for _ in range(ABANDONED_PER_SHARD_MAX):
                await fixture.hang(origin)
            with pytest.raises(OriginStuck, match=r"of shard 7 for .* s, and 3 earlier reads still hang"):
                await fixture.ask()
            assert len(origin.threads) == ABANDONED_PER_SHARD_MAX
            await fixture.hang(origin, 8)

    async def test_read_is_refused_at_the_total_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(origin_reads, "ABANDONED_MAX", 2)
        origin = HangingOrigin(times=1000)
        async with releasing(origin):
            fixture = ReadFixture(MemoryShardStore(), origin)
            await fixture.hang(origin, 1)
            await fixture.hang(origin, 2)
            with pytest.raises(OriginStuck, match=r"of shard 3 .* 2 earlier reads still hang"):
                await fixture.ask(3)

    async def test_read_is_accepted_after_earlier_reads_end(self) -> None:
        origin = HangingOrigin(times=ABANDONED_PER_SHARD_MAX)
        async with releasing(origin):
            fixture = ReadFixture(MemoryShardStore(), origin)
            for _ in range(ABANDONED_PER_SHARD_MAX):
                await fixture.hang(origin)
            await origin.end()
            await until(lambda: not fixture.reads._abandoned)
            assert await fixture.ask() == Stamp.of(content_of(7, SIZE))

    async def test_reads_superseded_before_the_timeout_are_awaited(self) -> None:
        """Otherwise several superseded plans in a row would turn a slow origin into a hanging one."""
        origin = HangingOrigin(times=ABANDONED_PER_SHARD_MAX)
        async with releasing(origin):
            fixture = ReadFixture(MemoryShardStore(), origin)
            for _ in range(ABANDONED_PER_SHARD_MAX):
                await fixture.supersede(lambda: origin.hung)
            read = fixture.read()
            reading = asyncio.ensure_future(fixture.reads.read(read))
            await anyio.wait_all_tasks_blocked()
            assert not reading.done()
            fixture.clock.now += 0.5 * SILENT_S
            assert fixture.reads.origin_silent_s(read) == pytest.approx(0.5 * SILENT_S)
            await origin.end()
            assert await reading == Stamp.of(content_of(7, SIZE))

    async def test_reads_hanging_in_the_store_are_awaited_and_then_blamed_on_the_store(self) -> None:
        store = BlockedStore()
        fixture = ReadFixture(store, FunctionOrigin(write_bytes))
        for _ in range(ABANDONED_PER_SHARD_MAX):
            await fixture.supersede(lambda: store.reached)
        read = fixture.read()
        reading = asyncio.ensure_future(fixture.reads.read(read))
        await anyio.wait_all_tasks_blocked()
        assert not reading.done()
        assert fixture.reads.origin_silent_s(read) is None
        fixture.clock.expire()
        with pytest.raises(StoreStuck, match="3 earlier reads still hang in the shard store"):
            await reading
        store.gate.set()
        await until(lambda: not fixture.reads._abandoned)
        assert await fixture.ask() == Stamp.of(b"bytes")


class CheckedStore(ShardStore):
    """A store that checks that its writers are used as the port says."""

    def __init__(self) -> None:
        self._inner = MemoryShardStore()
        self.writers: list[CheckedArrivingShard] = []

    def held(self) -> Mapping[int, Stamp]:
        return self._inner.held()

    def holds(self, number: int) -> bool:
        return self._inner.holds(number)

    def open(self, number: int) -> OpenShard:
        return self._inner.open(number)

    def partial(self, number: int) -> PartialShard | None:
        return self._inner.partial(number)

    def drop(self, number: int) -> None:
        self._inner.drop(number)

    def receive(self, number: int, stamp: Stamp | None, offset: int = 0) -> ArrivingShard:
        self.writers.append(CheckedArrivingShard(self._inner.receive(number, stamp, offset)))
        return self.writers[-1]


class CheckedArrivingShard(ArrivingShard):
    """Fails the test when it is used after it was closed."""

    def __init__(self, inner: ArrivingShard) -> None:
        self._inner = inner
        self.is_closed = False

    def write(self, data: bytes | memoryview) -> None:
        assert not self.is_closed
        self._inner.write(data)

    def commit(self) -> Stamp:
        assert not self.is_closed
        return self._inner.commit()

    def drop(self) -> None:
        assert not self.is_closed
        self._inner.drop()

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        self._inner.close()


async def test_custom_store_writer_is_closed_once_and_not_used_afterwards() -> None:
    store, origin = CheckedStore(), HangingOrigin(10)
    async with releasing(origin):
        fixture = ReadFixture(store, origin)
        await fixture.hang(origin)
        assert [writer.is_closed for writer in store.writers] == [True]
        assert await fixture.ask() == Stamp.of(content_of(7, SIZE))
        await origin.end()
        assert [error.code for error in origin.raised if isinstance(error, Unavailable)] == ["transfer_stopped"]


END = """
import asyncio, threading
from forged.data.transfer.origin_reads import OriginReads
from forged.data.store.memory import MemoryShardStore
from forged.data.store.origin import FunctionOrigin
from forged.data.transfer.origin_reads import OriginRead
from tests.data.transfer.test_origin_reads import UnlimitedFlow
from tests.data.transfer_cluster import shard

hung = threading.Event()

def hang(one, file):
    hung.set()
    threading.Event().wait()

async def main():
    read = OriginRead(FunctionOrigin(hang), shard(7), MemoryShardStore(), UnlimitedFlow(), lambda s: None, lambda: 0.0)
    reading = asyncio.ensure_future(OriginReads(600.0).read(read))
    await asyncio.to_thread(hung.wait)
    {how}
    print("done", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["reading.cancel()", "pass"])
async def test_process_exits_while_its_origin_hangs(how: str) -> None:
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", END.format(how=how)], capture_output=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"done\n", b"")


def test_origin_that_answers_after_the_loop_has_closed_is_ignored() -> None:
    origin, failed = HangingOrigin(), list[object]()
    original_hook: Callable[..., object] = threading.excepthook

    async def main() -> None:
        reading = ReadFixture(MemoryShardStore(), origin).ask()
        await until(lambda: origin.hung == 1)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading

    threading.excepthook = failed.append
    try:
        asyncio.run(main())
        origin.gate.set()
        for thread in origin.threads:
            thread.join(PATIENCE_S)
    finally:
        threading.excepthook = original_hook
    assert not any(thread.is_alive() for thread in origin.threads)
    assert failed == []
