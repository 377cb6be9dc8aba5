"""The database behind `SqliteStore`: synchronous, and used by one thread.

Law: between two calls no transaction is open and no row is half read, so every call sees what is committed. The
exclusive lock is taken at opening and kept; therefore the revision in memory is the one on the medium. It also spares
the -shm file: the index of the log lives in this process.

A commit is one transaction and one sync of the log. After every `LOG_PAGES` pages SQLite moves the log into the
database, within the commit that got there, and begins it anew: to overwrite a file needs no change of its length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from forged.kernel.store.batch import Decision, Write, decide, expected_keys
from forged.kernel.store.keys import prefix_end
from forged.kernel.store.port import Entry, Transaction
from forged.kernel.store.sqlite_connection import Connection, corrupt, forsake, single, transaction
from forged.kernel.store.sqlite_file import Opening, alone_in, ensure
from forged.kernel.store.sqlite_schema import examine, migrate, newest_version

LOG_PAGES = 1000
LOG_KEPT_BYTES_MAX = 64 << 20
"""A log that a huge batch made longer than this is cut back when it begins anew."""

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


class Follower(Protocol):
    """Somebody who copies this database while it changes."""

    def follow(self, decision: Decision) -> None:
        """See what has been committed; never raises."""
        ...

    def abandon(self) -> None:
        """Stop, for the database closes."""
        ...


class Database:
    """An open database. Everything here runs on the thread that opened it."""

    def __init__(self, opening: Opening, connection: Connection) -> None:
        self.opening = opening
        self.connection = connection
        self.followers: list[Follower] = []
        meta = dict(connection.execute("SELECT name, value FROM meta"))
        self.history: str = meta["history"]
        self.revision: int = meta["revision"]

    @classmethod
    def open(cls, opening: Opening) -> Database:
        """Make, examine and migrate the file; one that the examination refuses is not altered."""
        # SQLite keeps its log beside the file, not beside a link to it.
        opening = replace(opening, path=opening.path.resolve())
        with alone_in(opening.path.parent):
            ensure(opening)
            connection = _examined(opening)
            try:
                _set_up(connection, opening)
                return cls(opening, connection)
            except BaseException:
                connection.close()
                raise

    def get(self, key: str) -> Entry | None:
        """The entry of a key."""
        rows = list(self.connection.execute(_GET, (key,)))
        return Entry(*rows[0]) if rows else None

    def list(self, prefix: str, after: str, limit: int) -> Sequence[Entry]:
        """The first entries under a prefix and behind a key."""
        bounds = (max(prefix, after), after, prefix_end(prefix), limit)
        return [Entry(*row) for row in self.connection.execute(_LIST, bounds)]

    def commit(self, batch: Sequence[Transaction]) -> Decision:
        """Decide on the batch and make what applies durable."""
        found = {row[0]: row[1] for key in expected_keys(batch) for row in self.connection.execute(_REVISION, (key,))}
        decision = decide(batch, self.revision, found)
        if decision.applied:
            with transaction(self.connection):
                write(self.connection, decision.writes.values(), decision.revision)
            self.revision = decision.revision
            for follower in self.followers:
                follower.follow(decision)
        return decision

    def close(self) -> None:
        """Let go of the file; SQLite moves its log into the database first."""
        for follower in tuple(self.followers):
            follower.abandon()
        self.connection.close()


def write(connection: Connection, writes: Iterable[Write], revision: int) -> None:
    """Write one value, or the absence of one, per key; so puts and deletes need no order between them."""
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


def _examined(opening: Opening) -> Connection:
    path = opening.path
    if not path.is_file():
        raise corrupt(path, "it is not a file")
    if path.stat().st_size == 0:
        raise corrupt(path, "it is empty")  # to SQLite that would be a new database
    connection = opening.connect(path)
    try:
        single(connection, "PRAGMA locking_mode = EXCLUSIVE")
        examine(connection, path, newest_version(opening.migrations), opening.checked_bytes_max)
    except BaseException:
        forsake(connection)
        raise
    return connection


def _set_up(connection: Connection, opening: Opening) -> None:
    with transaction(connection):
        pass  # where nothing can be written, that is found now
    mode = single(connection, "PRAGMA journal_mode = WAL")
    assert mode == "wal", mode
    for setting in _SETTINGS:
        connection.execute(setting).close()
    migrate(connection, opening.migrations)
