"""A backup shows one revision and is made while commits continue."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from forged.errors import RequestRefused
from forged.kernel.store.batch import BatchOutcome
from forged.kernel.store.port import Entry, StoreUnavailable, Transaction
from forged.kernel.store.sqlite import SqliteStore
from forged.kernel.store.sqlite_backup import SLICE_ENTRIES_MAX, Backup
from forged.kernel.store.sqlite_connection import SqliteConnection
from tests.kernel.store.conftest import OpenSqlite
from tests.kernel.store.intercept import connect_with

KEYS = [f"key/{number:05}" for number in range(12 * SLICE_ENTRIES_MAX)]


async def fill(store: SqliteStore) -> None:
    keys = iter(KEYS)
    for revision in range(1, len(KEYS) // 128 + 1):
        await store.commit([Transaction(revision, {next(keys): bytes(100) for _ in range(128)})])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "backups" / "monday.db"


@pytest.fixture
async def store(tmp_path: Path, path: Path, open_sqlite: OpenSqlite) -> SqliteStore:
    """A store with a dozen slices."""
    path.parent.mkdir()
    store = await open_sqlite(tmp_path / "store.db")
    await fill(store)
    return store


def names(directory: Path) -> set[str]:
    return {each.name for each in directory.iterdir()}


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)


async def a_backup_on_its_way(store: SqliteStore, path: Path) -> asyncio.Future[None]:
    backing_up = asyncio.ensure_future(store.backup(path))
    while names(path.parent) == set():
        await store.get("a")
    return backing_up


async def content(store: SqliteStore) -> Sequence[Entry]:
    return await store.list("")


async def commits_until(done: asyncio.Future[Any], store: SqliteStore) -> dict[int, Sequence[Entry]]:
    """Change keys in, before and after the current slice; returns the content at each revision."""
    states: dict[int, Sequence[Entry]] = {}
    for step in count(store.revision + 1):
        puts = {KEYS[step * 997 % len(KEYS)]: f"{step}".encode(), f"key/{step * 331 % 4000:05}/new": b""}
        await store.commit([Transaction(step, puts, deletes=[KEYS[step * 577 % len(KEYS)]])])
        states[step] = await content(store)
        if done.done():
            return states
    raise AssertionError


async def test_a_backup_opens_as_a_store_with_the_same_content(
    store: SqliteStore, path: Path, open_sqlite: OpenSqlite
) -> None:
    await store.backup(path)
    copy = await open_sqlite(path)
    assert (copy.revision, await content(copy)) == (store.revision, await content(store))


async def test_a_backup_has_a_history_of_its_own(store: SqliteStore, path: Path, open_sqlite: OpenSqlite) -> None:
    await store.backup(path)
    assert (await open_sqlite(path)).history != store.history


async def test_a_backup_shows_one_revision_although_commits_go_on(
    store: SqliteStore, path: Path, open_sqlite: OpenSqlite
) -> None:
    begun_at = store.revision
    backing_up = asyncio.ensure_future(store.backup(path))
    states = await commits_until(backing_up, store)
    await backing_up
    copy = await open_sqlite(path)
    assert begun_at < copy.revision <= store.revision
    assert await content(copy) == states[copy.revision]


async def test_two_backups_at_once_are_both_whole(store: SqliteStore, path: Path, open_sqlite: OpenSqlite) -> None:
    other = path.with_name("tuesday.db")
    both = asyncio.gather(store.backup(path), store.backup(other))
    states = await commits_until(both, store)
    for copy in (await open_sqlite(path), await open_sqlite(other)):
        assert await content(copy) == states[copy.revision]


async def test_a_backup_holds_long_values(store: SqliteStore, path: Path, open_sqlite: OpenSqlite) -> None:
    values = {f"long/{number}": os.urandom(1 << 20) for number in range(4)}
    await store.commit([Transaction(store.revision + 1, values)])
    await store.backup(path)
    assert {each.key: each.value for each in await (await open_sqlite(path)).list("long/")} == values


async def test_a_backup_replaces_an_older_one(store: SqliteStore, path: Path, open_sqlite: OpenSqlite) -> None:
    await store.backup(path)
    await store.commit([Transaction(store.revision + 1, {"a": b""})])
    await store.backup(path)
    assert (await open_sqlite(path)).revision == store.revision
    assert names(path.parent) == {path.name, f"{path.name}-wal"}


async def test_a_backup_is_synced_before_it_gets_its_name(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    had_its_name: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda _: had_its_name.append(path.exists()))
    await store.backup(path)
    assert had_its_name == [False, True]


async def test_a_backup_onto_the_store_itself_is_refused(
    store: SqliteStore, path: Path, tmp_path: Path, open_sqlite: OpenSqlite
) -> None:
    link(path, tmp_path / "store.db")
    for itself in (tmp_path / "store.db", path):
        with pytest.raises(RequestRefused) as caught:
            await store.backup(itself)
        assert caught.value.code == "backup_onto_store"
    assert await store.commit([Transaction(store.revision + 1, {"a": b""})]) == [None]


async def test_a_backup_into_a_missing_directory_fails_alone(store: SqliteStore, tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable) as caught:
        await store.backup(tmp_path / "missing" / "monday.db")
    assert "missing" in caught.value.message
    assert await store.commit([Transaction(store.revision + 1, {"a": b""})]) == [None]


async def test_a_cancelled_backup_leaves_nothing(store: SqliteStore, path: Path) -> None:
    backing_up = await a_backup_on_its_way(store, path)
    backing_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await backing_up
    await store.commit([Transaction(store.revision + 1, {KEYS[0]: b""})])
    assert names(path.parent) == set()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_ended_backup_observes_no_further_commit(
    is_cancelled: bool, store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backing_up = await a_backup_on_its_way(store, path)
    if is_cancelled:
        backing_up.cancel()
    await asyncio.wait([backing_up])
    observed: list[BatchOutcome] = []
    monkeypatch.setattr(Backup, "committed", lambda backup, outcome: observed.append(outcome))
    await store.commit([Transaction(store.revision + 1, {KEYS[0]: b""})])
    assert observed == []


async def test_closing_ends_a_backup_and_leaves_nothing(store: SqliteStore, path: Path) -> None:
    backing_up = await a_backup_on_its_way(store, path)
    await store.close()
    with pytest.raises(StoreUnavailable):
        await backing_up
    assert names(path.parent) == set()


async def test_a_closed_store_has_no_backup(store: SqliteStore, path: Path) -> None:
    await store.close()
    with pytest.raises(StoreUnavailable):
        await store.backup(path)


async def test_a_full_disk_under_the_backup_is_no_failure_of_the_store(
    tmp_path: Path, path: Path, open_sqlite: OpenSqlite
) -> None:
    def before(connection: SqliteConnection, statement: str) -> None:
        """Limit the size of the copy only, which is filled in one long transaction."""
        if statement == "BEGIN":
            connection.execute("PRAGMA max_page_count = 1").close()

    path.parent.mkdir()
    store = await open_sqlite(tmp_path / "store.db", connect=connect_with(before))
    await store.commit([Transaction(1, {"long": bytes(1 << 20)})])
    with pytest.raises(StoreUnavailable) as caught:
        await store.backup(path)
    assert caught.value.code == "store_full"
    assert str(path) in caught.value.message
    assert await store.commit([Transaction(2, {"a": b""})]) == [None]
    assert names(path.parent) == set()


async def test_a_copy_that_cannot_follow_a_commit_fails_alone(
    tmp_path: Path, path: Path, open_sqlite: OpenSqlite
) -> None:
    copy: SqliteConnection | None = None
    committed = False

    def before(connection: SqliteConnection, statement: str) -> None:
        """Fail when a commit is repeated in the copy."""
        nonlocal copy, committed
        if statement == "BEGIN":
            copy = connection
        elif copy is not None and connection is not copy:
            committed = statement == "COMMIT"
        elif committed:
            committed = False
            refused = sqlite3.OperationalError("full")
            refused.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise refused

    path.parent.mkdir()
    store = await open_sqlite(tmp_path / "store.db", connect=connect_with(before))
    await fill(store)
    backing_up = await a_backup_on_its_way(store, path)
    assert await store.commit([Transaction(store.revision + 1, {KEYS[0]: b"new"})]) == [None]
    with pytest.raises(StoreUnavailable) as caught:
        await backing_up
    assert caught.value.code == "store_full"
    await store.get("a")
    assert names(path.parent) == set()
