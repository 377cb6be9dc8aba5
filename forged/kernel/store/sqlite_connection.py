"""What the store asks of SQLite, and what becomes of SQLite's errors.

Law: only this much of DB-API is used, so that a test can put another binding underneath. A connection makes no file,
waits for no lock, and begins no transaction by itself. Its errors, and the system's, become errors of forged here and
nowhere else.
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


class Connection(Protocol):
    """One connection in autocommit mode; it raises `sqlite3.Error` with its `sqlite_errorcode`."""

    @property
    def in_transaction(self) -> bool: ...

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Cursor: ...

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> object: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


Connect: TypeAlias = Callable[[Path], Connection]


def connect(path: Path) -> Connection:
    """A connection of the standard library to an existing file."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None, timeout=0)


def single(connection: Connection, sql: str, *parameters: object) -> Any:
    """The value that a statement with one row and one column yields."""
    [(value,)] = connection.execute(sql, parameters)
    return value


@contextmanager
def transaction(connection: Connection) -> Iterator[None]:
    """All of the block becomes durable, or none of it."""
    if connection.in_transaction:  # an earlier ROLLBACK failed
        connection.execute("ROLLBACK")
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        _undo(connection)
        raise


def _undo(connection: Connection) -> None:
    """Roll back, and make sure that what failed stays undone.

    SQLite may have rolled back by itself. And when only the sync of a COMMIT failed, the whole transaction may stand in
    the log, where it would be found after a crash, although it was reported as failed: another one is written over it.
    """
    with suppress(sqlite3.Error):
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")


def forsake(connection: Connection) -> None:
    """Close and leave the files alone: the interrupt keeps SQLite from moving its log into the database."""
    connection.interrupt()
    connection.close()


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn what SQLite and the system raise about the file at `path` into errors of forged."""
    try:
        yield
    except sqlite3.Error as error:
        raise _of_code(_code_of_sqlite(error), path, error) from error
    except OSError as error:
        raise _of_code(_CODES_OF_SYSTEM.get(error.errno or 0, "store_failed"), path, error) from error


def corrupt(path: Path, what: str) -> StoreCorrupt:
    """The error that names a damaged store."""
    return StoreCorrupt(
        "store_corrupt",
        f"{path} is not a sound store: {what}",
        f"move the directory {path.parent} away and restore a backup, that file alone, into a new one",
    )


_CODES_OF_SQLITE = {
    sqlite3.SQLITE_FULL: "store_full",
    sqlite3.SQLITE_READONLY: "store_readonly",
    sqlite3.SQLITE_BUSY: "store_locked",
    sqlite3.SQLITE_LOCKED: "store_locked",
    sqlite3.SQLITE_PROTOCOL: "store_locked",
    sqlite3.SQLITE_CORRUPT: "store_corrupt",
    sqlite3.SQLITE_NOTADB: "store_corrupt",
    sqlite3.SQLITE_ERROR: "store_corrupt",  # the statements are fixed, so it is the schema that is not ours
}
_CODES_OF_SYSTEM = {
    errno.ENOSPC: "store_full",
    errno.EDQUOT: "store_full",
    errno.EROFS: "store_readonly",
    errno.EACCES: "store_readonly",
    errno.EPERM: "store_readonly",
}
_UNAVAILABLE = {
    "store_full": ("there is no space left", "free some space; no restart is needed"),
    "store_readonly": ("it cannot be written", "make the file and its directory writable"),
    "store_failed": ("the medium failed", "look at the system's log and at the disk"),
}


def _code_of_sqlite(error: sqlite3.Error) -> str:
    # The one error without a code is that a text is not UTF-8.
    primary = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    return _CODES_OF_SQLITE.get(primary, "store_failed")


def _of_code(code: str, path: Path, error: Exception) -> ForgedError:
    if code == "store_corrupt":
        return corrupt(path, str(error))
    if code == "store_locked":
        return ConfigError(code, f"{path} is in use already ({error})", "stop who uses it, or take another directory")
    if code == "store_failed" and any(each.exists() and not os.access(each, os.W_OK) for each in (path, path.parent)):
        code = "store_readonly"  # SQLite tells no errno, so a medium that became read-only shows as a failed write
    what, fix = _UNAVAILABLE[code]
    return StoreUnavailable(code, f"{path}: {what} ({error})", fix)
