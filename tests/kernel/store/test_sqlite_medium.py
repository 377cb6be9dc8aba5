"""A full or failing disk: the store reports it, applies nothing, and recovers when the disk does."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Protocol

import apsw
import pytest

from forged.errors import ForgedError
from forged.kernel.store.port import Change, Entry, StoreUnavailable, Transaction
from forged.kernel.store.sqlite import SqliteStore
from forged.kernel.store.sqlite_connection import Connect, SqliteConnection, connect, translated
from forged.kernel.store.sqlite_database import LOG_PAGES
from tests.kernel.store.conftest import OpenSqlite
from tests.kernel.store.disk import Disk, Operation, connect_through
from tests.kernel.store.intercept import connect_with

TMPFS_BYTES = 4 << 20
VALUE_BYTES = 60_000


class SmallDisk(Protocol):
    """A directory that can be filled and freed."""

    path: Path
    connect: Connect

    def fill(self) -> None: ...

    def free(self) -> None: ...


class PageLimit:
    """SQLite's page limit."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "store.db"
        self.connect = connect_with(self._limit)
        self._pages_max = 1 << 20

    def fill(self) -> None:
        self._pages_max = 1  # SQLite takes the present size when that is more

    def free(self) -> None:
        self._pages_max = 1 << 20

    def _limit(self, connection: SqliteConnection, statement: str) -> None:
        if statement == "BEGIN IMMEDIATE":
            connection.execute(f"PRAGMA max_page_count = {self._pages_max}").close()


class Tmpfs:
    """A mounted file system of a few MiB, with a ballast file."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "store.db"
        self.connect: Connect = connect
        self._ballast = directory / "ballast"

    def fill(self) -> None:
        with self._ballast.open("wb", buffering=0) as ballast, suppress(OSError):
            while True:
                ballast.write(bytes(4096))

    def free(self) -> None:
        self._ballast.unlink()


def mount(directory: Path) -> bool:
    """Mount a small tmpfs, if permitted."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(directory)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(params=["page limit", "tmpfs"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk]:
    """Both kinds of small disk; without the right to mount, the page limit is used for both.

    Request it before `open_sqlite`, so that stores are closed before the unmount.
    """
    if request.param == "page limit" or not mount(tmp_path):
        yield PageLimit(tmp_path)
        return
    try:
        yield Tmpfs(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """Make a file read-only: by the immutable flag as root, by permissions otherwise."""
    mode = path.stat().st_mode
    if os.geteuid() != 0:
        path.chmod(mode & ~0o222)
    elif subprocess.run(["chattr", "+i", str(path)], capture_output=True, check=False).returncode != 0:
        pytest.skip("root is bound by nothing here: the immutable flag cannot be set")
    try:
        yield
    finally:
        if os.geteuid() != 0:
            path.chmod(mode)
        else:
            subprocess.run(["chattr", "-i", str(path)], check=True)


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """Limit the size of all files of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def size(path: Path) -> int:
    return path.stat().st_size


def copy_files(source: Path, target: Path) -> None:
    """The files after a kill: all writes, synced or not."""
    target.mkdir()
    for each in source.glob("store.db*"):
        shutil.copy(each, target)


async def commit_until_refused(store: SqliteStore, random: Random) -> StoreUnavailable:
    """Fill the store with random bytes, which no file system compresses."""
    for _ in range(4 * TMPFS_BYTES // VALUE_BYTES):
        revision = store.revision + 1
        try:
            await store.commit([Transaction(revision, {f"{revision:04}": random.randbytes(VALUE_BYTES)})])
        except StoreUnavailable as refused:
            return refused
    pytest.fail("the disk was never full")


class TestFullDisk:
    async def test_a_commit_that_finds_no_space_applies_nothing(
        self, small_disk: SmallDisk, open_sqlite: OpenSqlite
    ) -> None:
        store = await open_sqlite(small_disk.path, connect=small_disk.connect)
        await store.commit([Transaction(1, {"first": b"1"})])
        small_disk.fill()
        error = await commit_until_refused(store, Random(1))
        assert error.code == "store_full"
        assert str(small_disk.path) in error.message
        assert [entry.revision for entry in await store.list("0")] == list(range(2, store.revision + 1))
        assert await store.get("first") == Entry("first", b"1", 1)

    async def test_watch_skips_a_refused_commit(self, small_disk: SmallDisk, open_sqlite: OpenSqlite) -> None:
        store = await open_sqlite(small_disk.path, connect=small_disk.connect)
        small_disk.fill()
        await commit_until_refused(store, Random(1))
        refused = store.revision + 1
        small_disk.free()
        watch = store.watch("", store.revision)
        await store.commit([Transaction(refused, {"other": b""})])
        assert await anext(watch) == Change("other", b"", refused)

    async def test_commits_work_again_as_soon_as_there_is_space(
        self, small_disk: SmallDisk, open_sqlite: OpenSqlite
    ) -> None:
        store = await open_sqlite(small_disk.path, connect=small_disk.connect)
        random = Random(2)
        for round_ in range(3):
            small_disk.fill()
            await commit_until_refused(store, random)
            await commit_until_refused(store, random)
            small_disk.free()
            assert await store.commit([Transaction(store.revision + 1, {f"round/{round_}": b""})]) == [None]
            old = [entry.key for entry in await store.list("0")]
            await store.commit([Transaction(store.revision + 1, deletes=old[:128])])
        before = (store.revision, await store.list(""))
        assert [entry.key for entry in before[1]][-3:] == ["round/0", "round/1", "round/2"]
        await store.close()
        again = await open_sqlite(small_disk.path, connect=small_disk.connect)
        assert (again.revision, await again.list("")) == before

    async def test_a_store_with_a_full_disk_survives_a_reopening(
        self, small_disk: SmallDisk, open_sqlite: OpenSqlite
    ) -> None:
        store = await open_sqlite(small_disk.path, connect=small_disk.connect)
        small_disk.fill()
        await commit_until_refused(store, Random(3))
        before = (store.revision, await store.list(""))
        await store.close()
        small_disk.free()
        again = await open_sqlite(small_disk.path, connect=small_disk.connect)
        assert (again.revision, await again.list("")) == before

    async def test_a_store_cannot_be_made_on_a_full_disk(self, small_disk: SmallDisk) -> None:
        small_disk.fill()
        if isinstance(small_disk, PageLimit):
            return  # the limit is on a database that is there already
        with pytest.raises(StoreUnavailable) as caught:
            await SqliteStore.open(small_disk.path)
        assert caught.value.code == "store_full"
        assert {each.name for each in small_disk.path.parent.iterdir()} == {"ballast"}


class TestReadOnly:
    async def test_a_store_cannot_be_made_in_an_unwritable_directory(self, tmp_path: Path) -> None:
        with unwritable(tmp_path), pytest.raises(StoreUnavailable) as caught:
            await SqliteStore.open(tmp_path / "store.db")
        assert caught.value.code == "store_readonly"

    async def test_a_store_in_an_unwritable_directory_is_not_opened(
        self, open_sqlite: OpenSqlite, tmp_path: Path
    ) -> None:
        await (await open_sqlite(tmp_path / "store.db")).close()
        with unwritable(tmp_path), pytest.raises(StoreUnavailable) as caught:
            await SqliteStore.open(tmp_path / "store.db")
        assert caught.value.code == "store_readonly"
        assert str(tmp_path) in caught.value.message
        await open_sqlite(tmp_path / "store.db")

    async def test_an_unwritable_file_is_not_opened(self, open_sqlite: OpenSqlite, tmp_path: Path) -> None:
        await (await open_sqlite(tmp_path / "store.db")).close()
        with unwritable(tmp_path / "store.db"), pytest.raises(StoreUnavailable) as caught:
            await SqliteStore.open(tmp_path / "store.db")
        assert caught.value.code == "store_readonly"

    async def test_a_store_that_becomes_read_only_is_still_read(self, open_sqlite: OpenSqlite, tmp_path: Path) -> None:
        query_only = False

        def before(connection: SqliteConnection, statement: str) -> None:
            if statement == "BEGIN IMMEDIATE":
                connection.execute(f"PRAGMA query_only = {int(query_only)}").close()

        store = await open_sqlite(tmp_path / "store.db", connect=connect_with(before))
        await store.commit([Transaction(1, {"a": b"1"})])
        query_only = True
        with pytest.raises(StoreUnavailable) as caught:
            await store.commit([Transaction(2, {"a": b"2"})])
        assert caught.value.code == "store_readonly"
        assert await store.get("a") == Entry("a", b"1", 1)
        query_only = False
        assert await store.commit([Transaction(2, {"a": b"2"})]) == [None]


def fail(kind: str, suffix: str, code: int) -> Callable[[Operation], int | None]:
    """Let one kind of operation fail on one file."""
    return lambda operation: code if operation.kind == kind and operation.name == f"store.db{suffix}" else None


FAILURES = [
    pytest.param("write", apsw.SQLITE_IOERR_WRITE, "store_failed", id="write"),
    pytest.param("write", apsw.SQLITE_FULL, "store_full", id="full"),
    pytest.param("sync", apsw.SQLITE_IOERR_FSYNC, "store_failed", id="sync"),
]


class TestFailingDisk:
    @pytest.mark.parametrize(("kind", "code", "wanted"), FAILURES)
    async def test_a_commit_that_fails_applies_nothing_and_the_next_one_works(
        self, open_sqlite: OpenSqlite, tmp_path: Path, disk: Disk, kind: str, code: int, wanted: str
    ) -> None:
        store = await open_sqlite(tmp_path / "store.db", connect=connect_through(disk))
        await store.commit([Transaction(1, {"a": b"1"})])
        for _ in range(3):
            disk.failing = fail(kind, "-wal", code)
            with pytest.raises(StoreUnavailable) as caught:
                await store.commit([Transaction(2, {"a": b"2", "b": bytes(50_000)})])
            assert caught.value.code == wanted
            assert await store.list("") == [Entry("a", b"1", 1)]
            disk.failing = lambda _: None
        assert await store.commit([Transaction(2, {"a": b"2", "c": b""})]) == [None]
        assert await store.list("") == [Entry("a", b"2", 2), Entry("c", b"", 2)]

    async def test_a_commit_whose_sync_failed_does_not_come_back_after_a_crash(
        self, open_sqlite: OpenSqlite, tmp_path: Path, disk: Disk
    ) -> None:
        store = await open_sqlite(tmp_path / "store.db", connect=connect_through(disk))
        await store.commit([Transaction(1, {"a": b"1"})])
        failures = iter([apsw.SQLITE_IOERR_FSYNC])
        disk.failing = lambda operation: next(failures, None) if operation.kind == "sync" else None
        with pytest.raises(StoreUnavailable):
            await store.commit([Transaction(2, {"a": b"2"})])
        copy_files(tmp_path, tmp_path / "crashed")
        crashed = await open_sqlite(tmp_path / "crashed" / "store.db")
        assert (crashed.revision, await crashed.list("")) == (1, [Entry("a", b"1", 1)])

    async def test_a_failing_checkpoint_is_no_failing_commit(self, open_sqlite: OpenSqlite, tmp_path: Path) -> None:
        store = await open_sqlite(tmp_path / "store.db")
        log_bytes, random = LOG_PAGES * 4096, Random(5)
        limit_bytes = log_bytes * 3 // 2
        with file_size_limit(limit_bytes):
            refused = await commit_until_refused(store, random)
            assert refused.code == "store_failed"
            # The second checkpoint met the limit, and the commits went on until the log met it too.
            assert size(tmp_path / "store.db") == limit_bytes
            assert size(tmp_path / "store.db-wal") > log_bytes * 5 // 4
            before = (store.revision, await store.list(""))
        assert await store.commit([Transaction(store.revision + 1, {"after": b""})]) == [None]
        assert size(tmp_path / "store.db") > limit_bytes
        await store.close()
        again = await open_sqlite(tmp_path / "store.db")
        assert (again.revision - 1, await again.list("0")) == before


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "store_full"),
        (errno.EDQUOT, "store_full"),
        (errno.EROFS, "store_readonly"),
        (errno.EACCES, "store_readonly"),
        (errno.EIO, "store_failed"),
        (errno.EMFILE, "store_failed"),
    ],
)
def test_system_error_is_translated_to_its_code(tmp_path: Path, number: int, code: str) -> None:
    with pytest.raises(ForgedError) as caught, translated(tmp_path / "store.db"):
        raise OSError(number, os.strerror(number))
    assert caught.value.code == code
    assert caught.value.fix


def test_an_error_without_a_code_is_a_text_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ForgedError) as caught, translated(tmp_path / "store.db"):
        raise sqlite3.OperationalError("Could not decode to UTF-8 column 'key' with text")
    assert caught.value.code == "store_corrupt"
