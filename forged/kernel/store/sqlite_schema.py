"""The tables of a store: creation, examination and migration.

Invariants:
- The examination alters nothing. A damaged or newer store is refused.
- An older store is migrated version by version in one transaction. New stores are created at version 1 and migrated.

`kv` has a rowid: with values of about 300 bytes and a database larger than the cache, writes were up to twice as fast
as WITHOUT ROWID, because new rows are appended and only small index pages are scattered. Scans are slower (700,000/s).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from forged.errors import ConfigError
from forged.kernel.store.sqlite_connection import APPLICATION_ID, SqliteConnection, corrupt, single, transaction

CHECKED_BYTES_MAX = 512 << 20
"""Up to this size every page is checked when a store is opened. Above it, only header, length, schema and meta are;
other damage raises `StoreCorrupt` at the first read of the page."""

HISTORY_BYTES = 16

Migration: TypeAlias = Callable[[SqliteConnection], None]
MIGRATIONS: Mapping[int, Migration] = {}
"""For each version above 1, the migration from the version before."""

# The constraint is checked by the examination: a flipped bit can turn a blob into text.
_TABLES = (
    "CREATE TABLE kv (key TEXT PRIMARY KEY NOT NULL, value BLOB NOT NULL, revision INTEGER NOT NULL,"
    " CHECK (typeof(key) = 'text' AND typeof(value) = 'blob' AND typeof(revision) = 'integer'))",
    "CREATE TABLE meta (name TEXT PRIMARY KEY NOT NULL, value NOT NULL) WITHOUT ROWID",
)


def build(connection: SqliteConnection, history: str, migrations: Mapping[int, Migration]) -> None:
    """Create the tables of an empty store."""
    with transaction(connection):
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        for table in _TABLES:
            connection.execute(table)
        meta = {"revision": 0, "history": history, "schema_version": 1}
        connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        connection.execute("PRAGMA user_version = 1")
    migrate(connection, migrations)


def migrate(connection: SqliteConnection, migrations: Mapping[int, Migration]) -> None:
    """Migrate an examined store to the newest version."""
    version, newest = single(connection, "PRAGMA user_version"), newest_version(migrations)
    if version == newest:
        return
    with transaction(connection):
        for step in range(version + 1, newest + 1):
            migrations[step](connection)
        connection.execute("UPDATE meta SET value = ? WHERE name = 'schema_version'", (newest,))
        connection.execute(f"PRAGMA user_version = {newest}")


def newest_version(migrations: Mapping[int, Migration]) -> int:
    """The newest version that the migrations reach."""
    return max(migrations, default=1)


def examine(connection: SqliteConnection, path: Path, newest: int, checked_bytes_max: int) -> None:
    """Raise `StoreCorrupt` for a damaged store, `ConfigError` for a newer version."""
    _examine_identity(connection, path, newest)
    _examine_length(connection, path)
    if path.stat().st_size <= checked_bytes_max:
        _examine_pages(connection, path)
    _examine_tables(connection, path)


def _examine_identity(connection: SqliteConnection, path: Path, newest: int) -> None:
    application = single(connection, "PRAGMA application_id")
    if application != APPLICATION_ID:
        raise corrupt(
            path,
            f"it is no store of forged: its SQLite application id is {application:#x}, must be {APPLICATION_ID:#x}",
        )
    if (encoding := single(connection, "PRAGMA encoding")) != "UTF-8":
        raise corrupt(path, f"its text encoding is {encoding}, must be UTF-8")
    version = single(connection, "PRAGMA user_version")
    if version > newest:
        raise ConfigError(
            "store_too_new",
            f"{path} has schema version {version}; this release knows versions up to {newest}",
            "run the release that wrote it, or a newer one",
        )
    if version < 1:
        raise corrupt(path, f"its schema version is {version}")


def _examine_length(connection: SqliteConnection, path: Path) -> None:
    """Detect a truncated file: SQLite would read the missing part of a page as zeros."""
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size > 0:
        return  # pages may be in the log only
    wanted = single(connection, "PRAGMA page_count") * single(connection, "PRAGMA page_size")
    if (found := path.stat().st_size) < wanted:
        raise corrupt(path, f"it is truncated: {found} bytes of {wanted}")


def _examine_pages(connection: SqliteConnection, path: Path) -> None:
    # `quick_check` would pass an index whose entries point to missing rows.
    found = single(connection, "PRAGMA integrity_check(1)")
    if found != "ok":
        raise corrupt(path, " ".join(found.split()))


def _examine_tables(connection: SqliteConnection, path: Path) -> None:
    connection.execute("SELECT key, value, revision FROM kv LIMIT 0").close()
    meta = dict(connection.execute("SELECT name, value FROM meta"))
    if meta.get("schema_version") != single(connection, "PRAGMA user_version"):
        raise corrupt(path, "its two records of the schema version disagree")
    if not isinstance(meta.get("revision"), int):
        raise corrupt(path, "its revision is missing")
    if not isinstance(meta.get("history"), str):
        raise corrupt(path, "its history is missing")
