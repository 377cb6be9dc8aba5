"""The durable store beyond the contract: durability, locking, and commits of cancelled callers."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest

import forged
from forged.errors import ConfigError
from forged.kernel.store.port import Change, Compacted, Entry, StoreUnavailable, Transaction
from forged.kernel.store.sqlite import SqliteStore
from forged.kernel.store.sqlite_connection import SqliteConnection, connect
from forged.kernel.store.sqlite_database import LOG_KEPT_BYTES_MAX, LOG_PAGES
from tests.kernel.store.conftest import OpenSqlite
from tests.kernel.store.disk import Disk, Operation, connect_through
from tests.kernel.store.intercept import connect_with

PROJECT = Path(forged.__file__).parents[1]
HOLDER = """
import asyncio, sys
from pathlib import Path
from forged.kernel.store.sqlite import SqliteStore

async def hold():
    store = await SqliteStore.open(Path(sys.argv[1]))
    print("open", flush=True)
    sys.stdin.read()
    await store.close()

asyncio.run(hold())
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@contextmanager
def another_process_with(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the store open."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        yield process
        process.kill()


def names(directory: Path) -> set[str]:
    return {each.name for each in directory.iterdir()}


def size(path: Path) -> int:
    return path.stat().st_size


class Gate:
    """Blocks the database thread before one statement until the test releases it."""

    def __init__(self, statement: str) -> None:
        self.statement = statement
        self.shut = False
        self._arrived = Event()
        self._open = Event()

    def __call__(self, _: SqliteConnection, statement: str) -> None:
        if self.shut and statement == self.statement:
            self.shut = False
            self._arrived.set()
            assert self._open.wait(60)

    async def arrival(self) -> None:
        assert await asyncio.to_thread(self._arrived.wait, 60)

    def let_pass(self) -> None:
        self._open.set()


class TestReopening:
    async def test_all_of_it_is_there_again(self, open_sqlite: OpenSqlite, path: Path) -> None:
        store = await open_sqlite(path)
        await store.commit([Transaction(1, {"a": b"1", "b": b"1"}), Transaction(4, {"a": b"4"}, deletes=["b"])])
        await store.close()
        again = await open_sqlite(path)
        assert (again.revision, again.history) == (4, store.history)
        assert await again.list("") == [Entry("a", b"4", 4)]

    async def test_the_revision_of_a_transaction_without_writes_is_there_again(
        self, open_sqlite: OpenSqlite, path: Path
    ) -> None:
        store = await open_sqlite(path)
        await store.commit([Transaction(9)])
        await store.close()
        assert (await open_sqlite(path)).revision == 9

    async def test_changes_from_before_the_opening_are_not_kept(self, open_sqlite: OpenSqlite, path: Path) -> None:
        store = await open_sqlite(path)
        await store.commit([Transaction(1, {"a": b""}), Transaction(2, {"a": b""})])
        await store.close()
        again = await open_sqlite(path)
        with pytest.raises(Compacted):
            await anext(again.watch("", 1))
        watch = again.watch("", 2)
        await again.commit([Transaction(3, {"b": b""})])
        assert await anext(watch) == Change("b", b"", 3)

    async def test_closing_leaves_one_file(self, open_sqlite: OpenSqlite, path: Path) -> None:
        store = await open_sqlite(path)
        await store.commit([Transaction(1, {"a": b""})])
        assert names(path.parent) == {"store.db", "store.db-wal"}
        await store.close()
        assert names(path.parent) == {"store.db"}


class TestDurability:
    async def test_a_new_file_is_synced_before_it_gets_its_name_and_the_directory_after(
        self, open_sqlite: OpenSqlite, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[tuple[bool, bool]] = []
        fsync = os.fsync

        def recording(descriptor: int) -> None:
            synced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), path.exists()))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", recording)
        await open_sqlite(path)
        assert synced[:2] == [(False, False), (True, True)]
        assert set(synced[2:]) == {(True, True)}

    async def test_the_directory_is_synced_for_a_file_that_was_there(
        self, open_sqlite: OpenSqlite, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await (await open_sqlite(path)).close()
        synced: list[bool] = []
        monkeypatch.setattr(os, "fsync", lambda it: synced.append(stat.S_ISDIR(os.fstat(it).st_mode)))
        await open_sqlite(path)
        assert synced == [True]

    @pytest.mark.parametrize("transactions", [1, 64])
    async def test_a_batch_is_one_sync(
        self, open_sqlite: OpenSqlite, path: Path, disk: Disk, transactions: int
    ) -> None:
        store = await open_sqlite(path, connect=connect_through(disk))
        await store.commit([Transaction(1, {"a": b""})])
        disk.operations.clear()
        await store.commit([Transaction(2 + number, {f"{number}": b"x"}) for number in range(transactions)])
        assert [each for each in disk.operations if each.kind == "sync"] == [Operation("sync", "store.db-wal")]

    async def test_a_batch_of_conflicts_alone_writes_nothing(
        self, open_sqlite: OpenSqlite, path: Path, disk: Disk
    ) -> None:
        store = await open_sqlite(path, connect=connect_through(disk))
        disk.operations.clear()
        await store.commit([Transaction(1, {"a": b""}, expect={"b": 1})])
        assert disk.operations == []


class TestLog:
    async def test_the_log_does_not_grow_with_the_number_of_commits(self, open_sqlite: OpenSqlite, path: Path) -> None:
        store = await open_sqlite(path)
        batch_bytes = 100_000
        for revision in range(1, 301):
            await store.commit([Transaction(revision, {f"{revision % 50}": bytes(batch_bytes)})])
        assert size(path.with_name("store.db-wal")) < LOG_PAGES * 4096 + 3 * batch_bytes

    async def test_the_log_of_a_huge_batch_is_cut_back(self, open_sqlite: OpenSqlite, path: Path) -> None:
        store = await open_sqlite(path)
        values_mib = (LOG_KEPT_BYTES_MAX >> 20) * 3 // 2
        await store.commit([Transaction(1, {f"{number}": bytes(1 << 20) for number in range(values_mib)})])
        log = path.with_name("store.db-wal")
        assert size(log) > LOG_KEPT_BYTES_MAX
        await store.commit([Transaction(2, {"a": b""})])
        assert size(log) <= LOG_KEPT_BYTES_MAX


class TestLocking:
    async def test_a_store_that_another_process_has_open_is_refused(self, path: Path) -> None:
        with another_process_with(path):
            with pytest.raises(ConfigError) as caught:
                await SqliteStore.open(path)
            assert caught.value.code == "store_locked"
            assert str(path) in caught.value.message

    async def test_a_store_is_free_when_the_process_that_had_it_was_killed(
        self, open_sqlite: OpenSqlite, path: Path
    ) -> None:
        with another_process_with(path) as process:
            process.kill()
            process.wait()
            await open_sqlite(path)

    async def test_a_store_that_is_open_in_this_process_is_refused(self, open_sqlite: OpenSqlite, path: Path) -> None:
        store = await open_sqlite(path)
        await store.commit([Transaction(1, {"a": b""})])
        with pytest.raises(ConfigError) as caught:
            await SqliteStore.open(path)
        assert caught.value.code == "store_locked"
        assert await store.commit([Transaction(2, {"a": b""})]) == [None]

    async def test_being_refused_does_not_free_the_lock(self, open_sqlite: OpenSqlite, path: Path) -> None:
        await open_sqlite(path)
        with pytest.raises(ConfigError):
            await SqliteStore.open(path)
        command = [sys.executable, "-c", HOLDER, str(path)]
        refused = await asyncio.to_thread(subprocess.run, command, cwd=PROJECT, capture_output=True)
        assert b"is in use" in refused.stderr

    async def test_of_several_that_make_a_store_at_once_one_has_it(self, open_sqlite: OpenSqlite, path: Path) -> None:
        attempts = await asyncio.gather(*(open_sqlite(path) for _ in range(4)), return_exceptions=True)
        assert sum(isinstance(each, SqliteStore) for each in attempts) == 1
        assert sum(isinstance(each, ConfigError) and each.code == "store_locked" for each in attempts) == 3


class TestCancelling:
    async def test_cancelled_commit_is_applied_whole_and_watched(self, open_sqlite: OpenSqlite, path: Path) -> None:
        gate = Gate("COMMIT")
        store = await open_sqlite(path, connect=connect_with(gate))
        watch = store.watch("", 0)
        gate.shut = True
        committing = asyncio.ensure_future(store.commit([Transaction(1, {"a": b"1", "b": b"1"})]))
        await gate.arrival()
        committing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await committing
        assert store.revision == 0
        gate.let_pass()
        assert await store.get("a") == Entry("a", b"1", 1)
        assert await store.get("b") == Entry("b", b"1", 1)
        assert store.revision == 1
        assert await anext(watch) == Change("a", b"1", 1)

    async def test_a_commit_that_fails_after_its_caller_was_cancelled_changes_nothing(
        self, open_sqlite: OpenSqlite, path: Path
    ) -> None:
        gate = Gate("COMMIT")
        store = await open_sqlite(path, connect=connect_with(gate))
        gate.shut = True
        first = asyncio.ensure_future(store.commit([Transaction(5, {"a": b"5"})]))
        await gate.arrival()
        fenced = asyncio.ensure_future(store.commit([Transaction(3, {"b": b"3"})]))
        await asyncio.sleep(0)
        fenced.cancel()
        gate.let_pass()
        assert await first == [None]
        assert await store.list("") == [Entry("a", b"5", 5)]

    async def test_operations_run_in_the_order_of_their_calls(self, open_sqlite: OpenSqlite, path: Path) -> None:
        store = await open_sqlite(path)

        async def commit(revision: int) -> Sequence[object]:
            return await store.commit([Transaction(revision, {"a": b""}, expect={"a": revision - 1})])

        results = await asyncio.gather(*(commit(revision) for revision in range(1, 30)))
        assert results == [[None]] * 29

    async def test_close_waits_for_running_operations(self, open_sqlite: OpenSqlite, path: Path) -> None:
        gate = Gate("COMMIT")
        store = await open_sqlite(path, connect=connect_with(gate))
        gate.shut = True
        committing = asyncio.ensure_future(store.commit([Transaction(1, {"a": b""})]))
        await gate.arrival()
        closing = asyncio.ensure_future(store.close())
        await asyncio.sleep(0)
        with pytest.raises(StoreUnavailable):
            await store.get("a")
        gate.let_pass()
        assert await committing == [None]
        await closing

    async def test_a_cancelled_close_still_closes(self, open_sqlite: OpenSqlite, path: Path) -> None:
        gate = Gate("close")
        store = await open_sqlite(path, connect=connect_with(gate))
        gate.shut = True
        closing = asyncio.ensure_future(store.close())
        await gate.arrival()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        gate.let_pass()
        await store.close()
        await open_sqlite(path)

    async def test_a_cancelled_opening_lets_go_of_the_file(self, open_sqlite: OpenSqlite, path: Path) -> None:
        await (await open_sqlite(path)).close()
        gate, closed = Gate("PRAGMA synchronous = FULL"), Event()

        def before(connection: SqliteConnection, statement: str) -> None:
            gate(connection, statement)
            if statement == "close":
                connection.close()  # before the event is set; closing twice is closing
                closed.set()

        gate.shut = True
        opening = asyncio.ensure_future(SqliteStore.open(path, connect=connect_with(before)))
        await gate.arrival()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        gate.let_pass()
        assert await asyncio.to_thread(closed.wait, 60)
        await open_sqlite(path)


async def test_the_standard_connection_never_makes_a_file(path: Path) -> None:
    with pytest.raises(Exception, match="unable to open"):
        connect(path)
    assert names(path.parent) == set()
