"""A SQLite connection with a hook before every statement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from forged.kernel.store.sqlite_connection import Connect, Connection, Cursor, connect

Before: TypeAlias = Callable[[Connection, str], None]


class Intercepted:
    """The standard connection, with `before` called ahead of every statement, on the thread of the database."""

    def __init__(self, connection: Connection, before: Before) -> None:
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

    def intercepted(path: Path) -> Connection:
        return Intercepted(connect(path), before)

    return intercepted
