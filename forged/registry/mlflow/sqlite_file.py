"""Reads an MLflow registry from its SQLite file.

Invariants:
- The file is opened for reading only, and read in one transaction, so that a server may use it meanwhile.
- Tables and columns that other versions of MLflow do not have are not needed.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from forged.registry.mlflow import errors
from forged.registry.mlflow.conversion import FoundModel, FoundRegistry, FoundVersion

MAGIC = b"SQLite format 3\0"
BUSY_TIMEOUT_S = 10.0
TEXT_BYTES_MAX = 16 << 20
MODELS, VERSIONS = "registered_models", "model_versions"
MODEL_TAGS, VERSION_TAGS = "registered_model_tags", "model_version_tags"
ALIASES, METRICS = "registered_model_aliases", "latest_metrics"
WORKSPACE, DEFAULT_WORKSPACE = "workspace", "default"

Row = tuple[Any, ...]


def read_file(path: Path) -> FoundRegistry:
    """All models, versions and metrics of their runs."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(MAGIC))
    except OSError as error:
        raise errors.file_invalid(str(path), error.strerror or str(error)) from error
    if begin != MAGIC:
        raise errors.file_invalid(str(path), "it is no SQLite file")
    try:
        with closing(_opened(path)) as connection:
            return _Database(path, connection).read()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise errors.file_invalid(str(path), str(error)) from error


def _opened(path: Path) -> sqlite3.Connection:
    address = f"file:{quote(str(path.absolute()))}?mode=ro"
    connection = sqlite3.connect(address, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, TEXT_BYTES_MAX)
    # A file of others may have a schema that calls functions.
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA query_only = ON")
    connection.execute("BEGIN")
    return connection


class _Database:
    """An open MLflow database."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._connection = connection
        names = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        self._columns = {name: self._columns_of(name) for (name,) in names}
        for table in (MODELS, VERSIONS):
            if table not in self._columns:
                raise errors.file_invalid(str(path), f"it has no table {table}")
        self._refused: list[str] = []

    def _columns_of(self, table: str) -> set[str]:
        return {name for (name,) in self._connection.execute("SELECT name FROM pragma_table_info(?)", (table,))}

    def read(self) -> FoundRegistry:
        tags_of_model, tags_of_version, aliases = self._model_tags(), self._version_tags(), self._aliases()
        models: dict[str, FoundModel] = {}
        for name, description in self._rows(MODELS, "name", "description"):
            fields = {"description": description, "tags": tags_of_model[name], "aliases": aliases[name]}
            if model := self._converted(FoundModel, name, "", fields):
                models[name] = model
        versions: list[FoundVersion] = []
        for row in self._rows(VERSIONS, "name", "version", *_VERSION_COLUMNS):
            name, version, *values = row
            fields = dict(zip(_VERSION_COLUMNS.values(), values, strict=True)) | {
                "tags": tags_of_version[name, version]
            }
            if found := self._converted(FoundVersion, name, str(version), fields | {"version": str(version)}):
                versions.append(found)
        return FoundRegistry(models, versions, self._metrics(), [*self._refused, *self._other_workspaces()])

    def _converted(self, record: type[Any], name: Any, version: str, fields: dict[str, Any]) -> Any:
        """The record; None, with the reason among the refusals, if a value has a wrong type."""
        given = {"name": name} | {key: value for key, value in fields.items() if value is not None}
        try:
            return msgspec.convert(given, record)
        except msgspec.ValidationError as error:
            self._refused.append(f"{name}@{version}: {error}" if version else f"{name}: {error}")
            return None

    def _model_tags(self) -> dict[Any, dict[Any, Any]]:
        tags: dict[Any, dict[Any, Any]] = defaultdict(dict)
        for name, key, value in self._rows(MODEL_TAGS, "name", "key", "value"):
            tags[name][key] = value or ""
        return tags

    def _version_tags(self) -> dict[Any, dict[Any, Any]]:
        tags: dict[Any, dict[Any, Any]] = defaultdict(dict)
        for name, version, key, value in self._rows(VERSION_TAGS, "name", "version", "key", "value"):
            tags[name, version][key] = value or ""
        return tags

    def _aliases(self) -> dict[Any, dict[Any, str]]:
        aliases: dict[Any, dict[Any, str]] = defaultdict(dict)
        for name, alias, version in self._rows(ALIASES, "name", "alias", "version"):
            aliases[name][alias] = str(version)
        return aliases

    def _other_workspaces(self) -> Iterator[str]:
        """A model of another workspace may have the name of one in the default workspace."""
        if WORKSPACE in self._columns[VERSIONS]:
            found = self._connection.execute(
                "SELECT workspace, count(*) FROM model_versions WHERE workspace != ? GROUP BY workspace",
                (DEFAULT_WORKSPACE,),
            )
            for workspace, number in found:
                yield f"workspace {workspace}: its versions ({number:,}) are left out; only `default` is read"

    def _metrics(self) -> dict[str, dict[str, float]]:
        metrics: dict[str, dict[str, float]] = defaultdict(dict)
        if METRICS in self._columns and "run_id" in self._columns[VERSIONS]:
            found = self._connection.execute(
                "SELECT run_uuid, key, value, is_nan FROM latest_metrics"
                " WHERE run_uuid IN (SELECT run_id FROM model_versions)"
            )
            for run_id, key, value, is_nan in found:
                if isinstance(value, int | float):
                    metrics[str(run_id)][str(key)] = float("nan") if is_nan else float(value)
        return metrics

    def _rows(self, table: str, *columns: str) -> Iterator[Row]:
        """The rows of a table; None for the columns that it does not have, and no rows if there is no such table."""
        known = self._columns.get(table, set())
        if not known:
            return
        chosen = ", ".join(column if column in known else "NULL" for column in columns)
        where = f" WHERE {WORKSPACE} = '{DEFAULT_WORKSPACE}'" if WORKSPACE in known else ""
        yield from self._connection.execute(f"SELECT {chosen} FROM {table}{where}")  # noqa: S608 - names of this module


_VERSION_COLUMNS = {
    "current_stage": "stage",
    "status": "status",
    "creation_time": "created_ms",
    "description": "description",
    "source": "source",
    "storage_location": "location",
    "run_id": "run_id",
    "user_id": "user_id",
}
"""The field of each column."""
