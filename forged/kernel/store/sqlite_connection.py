"""The part of DB-API that the store uses, and the translation of SQLite's errors.

Invariants:
- Only the `SqliteConnection` protocol is used, so that a test can substitute another binding.
- A connection creates no file, waits for no lock, and begins no transaction implicitly.
- SQLite and OS errors are translated to `ForgedError` here only.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from forged.errors import ConfigError, ForgedError
from forged.kernel.store.port import StoreCorrupt, StoreUnavailable

APPLICATION_ID = 0x666F7267


class Cursor(Protocol):
    """The rows of a statement."""

    def __iter__(self) -> Iterator[Any]: ...

    def close(self) -> None: ...


class SqliteConnection(Protocol):
    """One connection in autocommit mode; it raises `sqlite3.Error` with its `sqlite_errorcode`."""

    @property
    def in_transaction(self) -> bool: ...

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Cursor: ...

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> object: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


Connect: TypeAlias = Callable[[Path], SqliteConnection]


def connect(path: Path) -> SqliteConnection:
    """Connect to an existing file with the standard library."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None, timeout=0)


def single(connection: SqliteConnection, sql: str, *parameters: object) -> Any:
    """Execute a statement with one row and one column and return the value."""
    [(value,)] = connection.execute(sql, parameters)
    return value


@contextmanager
def transaction(connection: SqliteConnection) -> Iterator[None]:
    """Run the block in a transaction."""
    if connection.in_transaction:  # an earlier ROLLBACK failed
        connection.execute("ROLLBACK")
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        _undo(connection)
        raise


def _undo(connection: SqliteConnection) -> None:
    """Roll back, and make sure that the failed transaction cannot reappear.

    SQLite may have rolled back by itself. If only the sync of a COMMIT failed, the transaction may be complete in the
    write-ahead log, where recovery after a crash would find it: another transaction is written over it.
    """
    with suppress(sqlite3.Error):
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")


def close_without_checkpoint(connection: SqliteConnection) -> None:
    """Close without changing the files: the interrupt prevents the checkpoint of the write-ahead log."""
    connection.interrupt()
    connection.close()


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Translate SQLite and OS errors about the file at `path` to `ForgedError`."""
    try:
        yield
    except sqlite3.Error as error:
        raise _of_code(_code_of_sqlite(error), path, error) from error
    except OSError as error:
        raise _of_code(_CODES_OF_SYSTEM.get(error.errno or 0, "store_failed"), path, error) from error


def corrupt(path: Path, what: str) -> StoreCorrupt:
    """The error of a corrupt store."""
    return StoreCorrupt(
        "store_corrupt",
        f"store {path} is corrupt: {what}",
        f"move the directory {path.parent} away and restore a backup (that file only) into a new directory",
    )


_CODES_OF_SQLITE = {
    sqlite3.SQLITE_FULL: "store_full",
    sqlite3.SQLITE_READONLY: "store_readonly",
    sqlite3.SQLITE_BUSY: "store_locked",
    sqlite3.SQLITE_LOCKED: "store_locked",
    sqlite3.SQLITE_PROTOCOL: "store_locked",
    sqlite3.SQLITE_CORRUPT: "store_corrupt",
    sqlite3.SQLITE_NOTADB: "store_corrupt",
    sqlite3.SQLITE_ERROR: "store_corrupt",  # the statements are fixed, so the schema is wrong
}
_CODES_OF_SYSTEM = {
    errno.ENOSPC: "store_full",
    errno.EDQUOT: "store_full",
    errno.EROFS: "store_readonly",
    errno.EACCES: "store_readonly",
    errno.EPERM: "store_readonly",
}
_UNAVAILABLE = {
    "store_full": ("no space left", "free some space; no restart is needed"),
    "store_readonly": ("not writable", "make the file and its directory writable"),
    "store_failed": ("I/O failed", "check the system log and the disk"),
}


def _code_of_sqlite(error: sqlite3.Error) -> str:
    # The only error without a code: text that is not UTF-8.
    primary = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    return _CODES_OF_SQLITE.get(primary, "store_failed")


def _of_code(code: str, path: Path, error: Exception) -> ForgedError:
    if code == "store_corrupt":
        return corrupt(path, str(error))
    if code == "store_locked":
        return ConfigError(code, f"{path} is in use ({error})", "stop the other process, or use another data directory")
    if code == "store_failed" and any(each.exists() and not os.access(each, os.W_OK) for each in (path, path.parent)):
        code = (
            "store_readonly"  # SQLite reports no errno, so a file system that became read-only shows as a failed write
        )
    what, fix = _UNAVAILABLE[code]
    return StoreUnavailable(code, f"{path}: {what} ({error})", fix)
