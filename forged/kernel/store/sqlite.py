"""The durable store: one SQLite file, used by one thread.

Invariants:
- The event loop never waits for the disk: every operation runs on the store's thread, in the order of the calls.
- Watchers get durable changes in that order, also if the caller of `commit` was cancelled.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from forged.kernel.store.batch import BatchOutcome
from forged.kernel.store.changes import CHANGES_BYTES_MAX, CHANGES_MAX, ChangeLog
from forged.kernel.store.port import (
    PAGE_ENTRIES_MAX,
    Change,
    Conflict,
    Entry,
    Transaction,
    check,
    check_key,
    check_page,
    closed,
    key_bytes,
)
from forged.kernel.store.sqlite_backup import Backup
from forged.kernel.store.sqlite_connection import Connect, connect, translated
from forged.kernel.store.sqlite_database import Database
from forged.kernel.store.sqlite_file import OpenOptions, put_in_place
from forged.kernel.store.sqlite_schema import CHECKED_BYTES_MAX, HISTORY_BYTES, MIGRATIONS, Migration

P = ParamSpec("P")
T = TypeVar("T")


class SqliteStore:
    """A store in a SQLite file; use `open`."""

    def __init__(self, thread: ThreadPoolExecutor, database: Database, log: ChangeLog) -> None:
        self._thread = thread
        self._database = database
        self._path = database.options.path
        self._log = log
        self._revision = database.revision
        self._closing: asyncio.Future[None] | None = None

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        connect: Connect = connect,
        migrations: Mapping[int, Migration] = MIGRATIONS,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
        checked_bytes_max: int = CHECKED_BYTES_MAX,
        changes_max: int = CHANGES_MAX,
        changes_bytes_max: int = CHANGES_BYTES_MAX,
    ) -> SqliteStore:
        """Open the store at `path`, or create it.

        Raises `StoreCorrupt` if it is damaged, `ConfigError` if it is in use or too new, `StoreUnavailable` if the
        disk is full or failing.
        """
        options = OpenOptions(path, lambda: random_bytes(HISTORY_BYTES).hex(), connect, migrations, checked_bytes_max)
        thread = ThreadPoolExecutor(1, thread_name_prefix="forged-store")
        opened = thread.submit(_guarded, path, Database.open, options)
        try:
            database = await asyncio.wrap_future(opened)
        except BaseException:
            thread.submit(_close_if_opened, opened)
            thread.shutdown(wait=False)
            raise
        log = ChangeLog(database.revision, changes_max=changes_max, changes_bytes_max=changes_bytes_max)
        return cls(thread, database, log)

    @property
    def revision(self) -> int:
        return self._revision

    @property
    def history(self) -> str:
        return self._database.history

    async def get(self, key: str) -> Entry | None:
        check_key(key)
        return await self._job(self._path, self._database.get, key)

    async def list(self, prefix: str, *, after: str = "", limit: int = PAGE_ENTRIES_MAX) -> Sequence[Entry]:
        check_page(prefix, after, limit)
        return await self._job(self._path, self._database.list, prefix, after, limit)

    async def commit(self, batch: Sequence[Transaction]) -> Sequence[Conflict | None]:
        for transaction in batch:
            check(transaction)
        committed = self._job(self._path, self._database.commit, batch)
        committed.add_done_callback(self._publish)
        # Not `shield`: since Python 3.14 it reports a commit that fails after the caller was cancelled as unhandled.
        await asyncio.wait((committed,))
        return committed.result().conflicts

    def watch(self, prefix: str, after: int) -> AsyncIterator[Change]:
        self._require_open()
        key_bytes(prefix)
        return self._log.watch(prefix, after)

    async def backup(self, path: Path) -> None:
        """Write a durable copy of one revision to `path`, replacing a file there; commits continue meanwhile.

        The copy gets a new history name. It is written to `path` with a suffix and renamed when complete; a killed
        process leaves the file with the suffix.
        """
        backup = Backup(self._database, path)
        try:
            await self._job(path, backup.begin)
            while await self._job(path, backup.step):
                pass
            await asyncio.to_thread(_guarded, path, put_in_place, backup.new, path)
        except BaseException:
            if self._closing is None:
                self._thread.submit(backup.abandon)
            raise

    async def close(self) -> None:
        if self._closing is None:
            self._closing = self._job(self._path, self._database.close)
            self._closing.add_done_callback(self._closed)
        await asyncio.shield(self._closing)

    def _job(self, path: Path, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        self._require_open()
        return asyncio.wrap_future(self._thread.submit(lambda: _guarded(path, job, *args, **kwargs)))

    def _require_open(self) -> None:
        if self._closing is not None:
            raise closed()

    def _publish(self, committed: asyncio.Future[BatchOutcome]) -> None:
        if not committed.cancelled() and committed.exception() is None:
            outcome = committed.result()
            self._revision = outcome.revision
            self._log.append(outcome.applied)

    def _closed(self, _: asyncio.Future[None]) -> None:
        self._log.close()
        self._thread.shutdown(wait=False)


def _guarded(path: Path, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    with translated(path):
        return job(*args, **kwargs)


def _close_if_opened(opened: Future[Database]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        opened.result().close()
