"""The file of a store: how it comes to be at its path.

Law: at the path there is nothing or a whole store, whose directory entry is durable before anything is written to it.
Every file is made beside its path and renamed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forged.errors import ConfigError
from forged.kernel.store.sqlite_connection import Connect, Connection, corrupt
from forged.kernel.store.sqlite_schema import Migration, build

JOURNAL_SUFFIXES = ("-wal", "-journal")
NEW_SUFFIX = ".new"


@dataclass(frozen=True, slots=True)
class Opening:
    """How a store's file is opened."""

    path: Path
    new_history: Callable[[], str]
    connect: Connect
    migrations: Mapping[int, Migration]
    checked_bytes_max: int


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """One after the other opens stores in a directory: at once, two would make two files, or lock each other out."""
    if not directory.is_dir():
        raise ConfigError("store_directory_missing", f"{directory} is not a directory", "create it")
    descriptor = os.open(directory, os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # not by closing alone: a forked child may share the descriptor
        os.close(descriptor)


def ensure(opening: Opening) -> None:
    """Make an empty store unless there is a file; what is at the path stays there from now on."""
    if not opening.path.exists():
        _create(opening)
    # Also for a file that was there: whoever made it may have died before this.
    _sync(opening.path.parent)


def start(new: Path, opening: Opening, history: str) -> Connection:
    """A connection to an empty store in a new file, fast and not durable: for filling, before `put_in_place`."""
    os.close(os.open(new, os.O_CREAT | os.O_EXCL, 0o600))
    connection = opening.connect(new)
    try:
        connection.execute("PRAGMA journal_mode = OFF").close()
        connection.execute("PRAGMA synchronous = OFF").close()
        build(connection, history, opening.migrations)
    except BaseException:
        connection.close()
        new.unlink()
        raise
    return connection


def put_in_place(new: Path, path: Path) -> None:
    """Make a finished file durable under its name. It must not be open: closing it here would drop SQLite's locks."""
    try:
        _sync(new)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _create(opening: Opening) -> None:
    path = opening.path
    _refuse_orphans(path)
    new = path.with_name(path.name + NEW_SUFFIX)
    new.unlink(missing_ok=True)  # left by a creation that was cut short
    start(new, opening, opening.new_history()).close()
    put_in_place(new, path)


def _refuse_orphans(path: Path) -> None:
    """SQLite would play the log of a lost database into the new one."""
    for suffix in JOURNAL_SUFFIXES:
        if (orphan := path.with_name(path.name + suffix)).exists():
            raise corrupt(path, f"it is missing, while {orphan.name} is there")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
