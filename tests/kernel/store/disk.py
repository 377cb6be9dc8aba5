"""A disk that records operations, can fail, and can be crashed at any moment.

Invariants:
- After a crash a file has what its last sync made durable, and any subset of the sectors of later writes.
- A file that was never synced may be missing; a deleted file may be back.
- After a failed sync any part of its writes may be lost, even if a later sync succeeds.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeAlias

import apsw

from forged.kernel.store.sqlite_connection import Connect, SqliteConnection

SECTOR_BYTES = 512
Kind: TypeAlias = Literal["create", "write", "truncate", "sync", "failed sync", "delete", "mark"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on the disk; a `mark` is set by the test, with its number in `offset`."""

    kind: Kind
    name: str
    offset: int = 0
    data: bytes = b""


class Disk(apsw.VFS):
    """A VFS that records operations; `failing` maps operations to the error code with which they fail."""

    def __init__(self, name: str) -> None:
        super().__init__(name, base="")
        self.name = name
        self.operations: list[Operation] = []
        self.failing: Callable[[Operation], int | None] = lambda _: None

    def pass_on(self, operation: Operation) -> None:
        if (code := self.failing(operation)) is not None:
            if operation.kind == "sync":
                self.operations.append(Operation("failed sync", operation.name))
            raise apsw.exception_for(code)
        self.operations.append(operation)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> RecordedFile:
        path = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        if not Path(path).exists():
            self.pass_on(Operation("create", Path(path).name))
        return RecordedFile(self, name, Path(path).name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        self.pass_on(Operation("delete", Path(filename).name))


class RecordedFile(apsw.VFSFile):
    """A file that records its changes."""

    def __init__(self, disk: Disk, path: str | apsw.URIFilename | None, name: str, flags: list[int]) -> None:
        super().__init__("", path, flags)
        self._disk = disk
        self._name = name

    def xWrite(self, data: Any, offset: int) -> None:
        self._disk.pass_on(Operation("write", self._name, offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:
        self._disk.pass_on(Operation("truncate", self._name, newsize))
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:
        self._disk.pass_on(Operation("sync", self._name))
        super().xSync(flags)


class Rows:
    """The rows of a statement."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self._rows = list(rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def close(self) -> None:
        """There is nothing to close."""


class ApswConnection:
    """An apsw connection that raises as the standard library does; `replaced` maps statements to replacements."""

    def __init__(self, path: Path, vfs: str, replaced: Mapping[str, str]) -> None:
        self._connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE, vfs=vfs)
        self._replaced = replaced

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Rows:
        try:
            return Rows(self._connection.execute(self._replaced.get(sql, sql), parameters))
        except apsw.Error as error:
            raise _of_library(error) from error

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> Rows:
        try:
            return Rows(self._connection.executemany(sql, parameters))
        except apsw.Error as error:
            raise _of_library(error) from error

    def interrupt(self) -> None:
        self._connection.interrupt()

    def close(self) -> None:
        self._connection.close()


def connect_through(disk: Disk, replaced: Mapping[str, str] | None = None) -> Connect:
    """A `Connect` for files on the disk."""

    def connect(path: Path) -> SqliteConnection:
        return ApswConnection(path, disk.name, replaced or {})

    return connect


def _of_library(error: apsw.Error) -> sqlite3.Error:
    translated = sqlite3.OperationalError(str(error))
    translated.sqlite_errorcode = getattr(error, "extendedresult", sqlite3.SQLITE_ERROR)
    return translated


@dataclass(slots=True)
class File:
    """A file: durable content, pending writes, and the previous file of that name."""

    durable: bytes = b""
    pending: list[Operation] = field(default_factory=list)
    entry_durable: bool = True
    deleted: bool = False
    before: File | None = None

    def after_crash(self, random: Random, kept: float) -> bytes | None:
        """A possible content after a crash; each pending sector is written with probability `kept`."""
        if not self.entry_durable and random.random() >= kept:
            return self.before.after_crash(random, kept) if self.before else None
        return None if self.deleted else apply(self.durable, self.pending, lambda: random.random() < kept)


class Medium:
    """The files of a directory, replayed from recorded operations."""

    def __init__(self, contents: Mapping[str, bytes], random: Random) -> None:
        self._files = {name: File(content) for name, content in contents.items()}
        self._random = random

    def follow(self, operation: Operation) -> None:
        """Apply one operation."""
        before = self._files.get(operation.name)
        match operation.kind:
            case "mark":
                return
            case "create":
                self._files[operation.name] = File(entry_durable=False, before=before)
            case "delete":
                self._files[operation.name] = File(entry_durable=False, deleted=True, before=before)
            case "sync":
                self._sync(self._files[operation.name])
            case "failed sync":
                self._lose(self._files[operation.name])
            case _:
                self._files[operation.name].pending.append(operation)

    def crash(self) -> Mapping[str, bytes]:
        """The files after a crash at this moment."""
        kept = self._random.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        found = {name: file.after_crash(self._random, kept) for name, file in self._files.items()}
        return {name: content for name, content in found.items() if content is not None}

    def _sync(self, file: File) -> None:
        file.durable = apply(file.durable, file.pending, lambda: True)
        file.pending = []
        if not file.entry_durable:
            # SQLite syncs the directory with the first sync of a new journal, and so all entries of it.
            for each in self._files.values():
                each.entry_durable = True

    def _lose(self, file: File) -> None:
        kept = self._random.choice((0.0, 0.5, 1.0))
        file.durable = apply(file.durable, file.pending, lambda: self._random.random() < kept)
        file.pending = []


def apply(content: bytes, operations: Iterable[Operation], survives: Callable[[], bool]) -> bytes:
    """The content after the surviving parts of the operations."""
    image = bytearray(content)
    for operation in operations:
        if operation.kind == "write":
            for offset, piece in sectors(operation):
                if survives():
                    image.extend(bytes(max(0, offset - len(image))))
                    image[offset : offset + len(piece)] = piece
        elif survives():
            del image[operation.offset :]
    return bytes(image)


def sectors(operation: Operation) -> Iterator[tuple[int, bytes]]:
    """A write, split at sector boundaries."""
    offset, end = operation.offset, operation.offset + len(operation.data)
    while offset < end:
        border = min(end, (offset // SECTOR_BYTES + 1) * SECTOR_BYTES)
        yield offset, operation.data[offset - operation.offset : border - operation.offset]
        offset = border
