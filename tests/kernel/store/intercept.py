"""A SQLite connection with a hook before every statement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from forged.kernel.store.sqlite_connection import Connect, Cursor, SqliteConnection, connect

Before: TypeAlias = Callable[[SqliteConnection, str], None]


class Intercepted:
    """The standard connection, with `before` called ahead of every statement, on the thread of the database."""

    def __init__(self, connection: SqliteConnection, before: Before) -> None:
        self._connection = connection
        self._before = before

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Cursor:
        self._before(self._connection, sql)
        return self._connection.execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> object:
        self._before(self._connection, sql)
        return self._connection.executemany(sql, parameters)

    def interrupt(self) -> None:
        self._connection.interrupt()

    def close(self) -> None:
        self._before(self._connection, "close")
        self._connection.close()


def connect_with(before: Before) -> Connect:
    """A `Connect` for connections that call `before`."""

    def intercepted(path: Path) -> SqliteConnection:
        return Intercepted(connect(path), before)

    return intercepted
