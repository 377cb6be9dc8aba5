"""Creation of a store's file.

Invariants:
- At the path there is no file or a complete store, whose directory entry is durable before the first commit.
- Every file is created under a temporary name in the same directory and renamed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forged.errors import ConfigError
from forged.kernel.store.sqlite_connection import Connect, SqliteConnection, corrupt
from forged.kernel.store.sqlite_schema import Migration, build

JOURNAL_SUFFIXES = ("-wal", "-journal")
NEW_SUFFIX = ".new"


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """The parameters for options a store's file."""

    path: Path
    new_history: Callable[[], str]
    connect: Connect
    migrations: Mapping[int, Migration]
    checked_bytes_max: int


@contextmanager
def locked_directory(directory: Path) -> Iterator[None]:
    """Hold the lock for opening stores in a directory, so that two processes do not create it at once."""
    if not directory.is_dir():
        raise ConfigError("store_directory_missing", f"{directory} is not a directory", "create it")
    descriptor = os.open(directory, os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # explicit, because a forked child may share the descriptor
        os.close(descriptor)


def ensure(options: OpenOptions) -> None:
    """Create an empty store unless there is a file, and make the directory entry durable."""
    if not options.path.exists():
        _create(options)
    # Also for an existing file: the process that created it may have been killed before this.
    _sync(options.path.parent)


def create_file(new: Path, options: OpenOptions, history: str) -> SqliteConnection:
    """Create a file with an empty store and connect to it without durability, to fill it before `put_in_place`."""
    os.close(os.open(new, os.O_CREAT | os.O_EXCL, 0o600))
    connection = options.connect(new)
    try:
        connection.execute("PRAGMA journal_mode = OFF").close()
        connection.execute("PRAGMA synchronous = OFF").close()
        build(connection, history, options.migrations)
    except BaseException:
        connection.close()
        new.unlink()
        raise
    return connection


def put_in_place(new: Path, path: Path) -> None:
    """Sync a finished file and rename it. It must not be open in SQLite: closing it here would drop SQLite's locks."""
    try:
        _sync(new)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _create(options: OpenOptions) -> None:
    path = options.path
    _refuse_orphans(path)
    new = path.with_name(path.name + NEW_SUFFIX)
    new.unlink(missing_ok=True)  # left by an interrupted creation
    create_file(new, options, options.new_history()).close()
    put_in_place(new, path)


def _refuse_orphans(path: Path) -> None:
    """Refuse a log without its database: SQLite would apply it to the new one."""
    for suffix in JOURNAL_SUFFIXES:
        if (orphan := path.with_name(path.name + suffix)).exists():
            raise corrupt(path, f"it is missing, while {orphan.name} is there")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
