"""The SQLite database of `SqliteStore`: synchronous, used by one thread.

Invariants:
- Between calls no transaction is open and no cursor is active, so every call sees the committed state.
- The exclusive lock is held from open to close, so the revision in memory equals the one on disk. It also avoids the
  -shm file.

A commit is one transaction and one sync of the write-ahead log. After `LOG_PAGES` pages SQLite checkpoints within that
commit and overwrites the log from its start, which avoids changes of the file length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from forged.kernel.store.batch import BatchOutcome, Write, decide, expected_keys
from forged.kernel.store.keys import prefix_end
from forged.kernel.store.port import Entry, Transaction
from forged.kernel.store.sqlite_connection import (
    SqliteConnection,
    close_without_checkpoint,
    corrupt,
    single,
    transaction,
)
from forged.kernel.store.sqlite_file import OpenOptions, ensure, locked_directory
from forged.kernel.store.sqlite_schema import examine, migrate, newest_version

LOG_PAGES = 1000
LOG_KEPT_BYTES_MAX = 64 << 20
"""A longer write-ahead log, left by a huge batch, is truncated at the next checkpoint."""

_SETTINGS = (
    "PRAGMA synchronous = FULL",
    f"PRAGMA wal_autocheckpoint = {LOG_PAGES}",
    f"PRAGMA journal_size_limit = {LOG_KEPT_BYTES_MAX}",
)
_GET = "SELECT key, value, revision FROM kv WHERE key = ?"
_REVISION = "SELECT key, revision FROM kv WHERE key = ?"
_LIST = "SELECT key, value, revision FROM kv WHERE key >= ? AND key <> ? AND key < ? ORDER BY key LIMIT ?"
_PUT = (
    "INSERT INTO kv (key, value, revision) VALUES (?, ?, ?)"
    " ON CONFLICT (key) DO UPDATE SET value = excluded.value, revision = excluded.revision"
)
_DELETE = "DELETE FROM kv WHERE key = ?"
_ADVANCE = "UPDATE meta SET value = ? WHERE name = 'revision'"


class CommitObserver(Protocol):
    """Observes commits: a backup under way."""

    def committed(self, outcome: BatchOutcome) -> None:
        """Called after each commit; must not raise."""
        ...

    def abandon(self) -> None:
        """Stop: the database closes."""
        ...


class Database:
    """An open database; use it on the thread that opened it."""

    def __init__(self, options: OpenOptions, connection: SqliteConnection) -> None:
        self.options = options
        self.connection = connection
        self.observers: list[CommitObserver] = []
        meta = dict(connection.execute("SELECT name, value FROM meta"))
        self.history: str = meta["history"]
        self.revision: int = meta["revision"]

    @classmethod
    def open(cls, options: OpenOptions) -> Database:
        """Create, examine and migrate the file. A file that fails the examination is not altered."""
        # SQLite puts its log beside the file, not beside a link to it.
        options = replace(options, path=options.path.resolve())
        with locked_directory(options.path.parent):
            ensure(options)
            connection = _examined(options)
            try:
                _set_up(connection, options)
                return cls(options, connection)
            except BaseException:
                connection.close()
                raise

    def get(self, key: str) -> Entry | None:
        """The entry of a key."""
        rows = list(self.connection.execute(_GET, (key,)))
        return Entry(*rows[0]) if rows else None

    def list(self, prefix: str, after: str, limit: int) -> Sequence[Entry]:
        """The first entries under a prefix and after a key."""
        bounds = (max(prefix, after), after, prefix_end(prefix), limit)
        return [Entry(*row) for row in self.connection.execute(_LIST, bounds)]

    def commit(self, batch: Sequence[Transaction]) -> BatchOutcome:
        """Decide on the batch and make the applied transactions durable."""
        found = {row[0]: row[1] for key in expected_keys(batch) for row in self.connection.execute(_REVISION, (key,))}
        outcome = decide(batch, self.revision, found)
        if outcome.applied:
            with transaction(self.connection):
                write(self.connection, outcome.writes.values(), outcome.revision)
            self.revision = outcome.revision
            for observer in self.observers:
                observer.committed(outcome)
        return outcome

    def close(self) -> None:
        """Close the file after a checkpoint."""
        for observer in tuple(self.observers):
            observer.abandon()
        self.connection.close()


def write(connection: SqliteConnection, writes: Iterable[Write], revision: int) -> None:
    """Apply one write per key, so the order of puts and deletes does not matter."""
    puts: list[Write] = []
    deletes: list[tuple[str]] = []
    for each in writes:
        if each[1] is None:
            deletes.append((each[0],))
        else:
            puts.append(each)
    connection.executemany(_PUT, puts)
    connection.executemany(_DELETE, deletes)
    connection.execute(_ADVANCE, (revision,))


def _examined(options: OpenOptions) -> SqliteConnection:
    path = options.path
    if not path.is_file():
        raise corrupt(path, "it is not a file")
    if path.stat().st_size == 0:
        raise corrupt(path, "it is empty")  # SQLite would treat it as a new database
    connection = options.connect(path)
    try:
        single(connection, "PRAGMA locking_mode = EXCLUSIVE")
        examine(connection, path, newest_version(options.migrations), options.checked_bytes_max)
    except BaseException:
        close_without_checkpoint(connection)
        raise
    return connection


def _set_up(connection: SqliteConnection, options: OpenOptions) -> None:
    with transaction(connection):
        pass  # an empty transaction fails now if the file is not writable
    mode = single(connection, "PRAGMA journal_mode = WAL")
    assert mode == "wal", mode
    for setting in _SETTINGS:
        connection.execute(setting).close()
    migrate(connection, options.migrations)
