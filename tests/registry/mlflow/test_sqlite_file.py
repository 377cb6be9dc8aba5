from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from forged.errors import ConfigError
from forged.registry.mlflow.conversion import FoundModel, FoundVersion, converted
from forged.registry.mlflow.sqlite_file import read_file

OLDEST = """
    CREATE TABLE registered_models (name VARCHAR(256) PRIMARY KEY);
    CREATE TABLE model_versions (name VARCHAR(256), version INTEGER);
"""
"""Only what every version of MLflow has."""


def database(path: Path, script: str = OLDEST, *rows: tuple[str, Sequence[Any]]) -> Path:
    """A file with these tables, and rows as statements with their values."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)
        for statement, values in rows:
            connection.execute(statement, values)
        connection.commit()
    return path


MODEL = ("INSERT INTO registered_models VALUES ('a')", ())
VERSION = ("INSERT INTO model_versions VALUES ('a', 1)", ())


def test_tables_and_columns_that_are_not_there_are_empty(tmp_path: Path) -> None:
    found = read_file(database(tmp_path / "db", OLDEST, MODEL, VERSION))
    assert found.models == {"a": FoundModel("a")}
    assert found.versions == [FoundVersion("a", "1")]
    assert (found.metrics, found.refused) == ({}, [])


@pytest.mark.parametrize("table", ["registered_models", "model_versions"])
def test_file_without_the_tables_of_a_registry_is_refused(tmp_path: Path, table: str) -> None:
    path = database(tmp_path / "db", f"{OLDEST} DROP TABLE {table}")
    with pytest.raises(ConfigError, match=f"it has no table {table}") as raised:
        read_file(path)
    assert raised.value.code == "mlflow_file_invalid"


def test_view_in_place_of_a_table_is_refused(tmp_path: Path) -> None:
    script = f"{OLDEST} DROP TABLE model_versions; CREATE VIEW model_versions AS SELECT 'a' AS name, 1 AS version"
    with pytest.raises(ConfigError, match="it has no table model_versions"):
        read_file(database(tmp_path / "db", script))


@pytest.mark.parametrize(
    "content", [b"", b"SQLite", b"SQLite format 3\0", b"SQLite format 3\0" + b"\xff" * 5000, b"{}"]
)
def test_other_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "db"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read as an MLflow database") as raised:
        read_file(path)
    assert raised.value.code == "mlflow_file_invalid"


@pytest.mark.parametrize("name", ["missing", "."])
def test_file_that_cannot_be_opened_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read as an MLflow database"):
        read_file(tmp_path / name)


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    path = database(tmp_path / "db", OLDEST, *[VERSION] * 5000)
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_file(path)
    assert raised.value.code == "mlflow_file_invalid"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (("a", 1, b"\x00", "text", 0), "a@1: Expected `str`, got `bytes`"),
        (("a", 1, "None", "text", "yesterday"), "a@1: Expected `int`, got `str`"),
        (("a", "one", "None", "text", 0), "a@one: its version must be a number"),
        ((None, 1, "None", "text", 0), "None@1: Expected `str`, got `null`"),
    ],
)
def test_row_with_a_wrong_type_is_refused_and_the_others_are_not(
    tmp_path: Path, values: Sequence[Any], reason: str
) -> None:
    script = """
        CREATE TABLE registered_models (name);
        CREATE TABLE model_versions (name, version, current_stage, description, creation_time);
        INSERT INTO model_versions VALUES ('a', 2, 'None', NULL, 1500);
    """
    insert = "INSERT INTO model_versions VALUES (?, ?, ?, ?, ?)"
    registry = converted(read_file(database(tmp_path / "db", script, (insert, values))))
    assert [one.metadata.version.major for one in registry.versions] == [2]
    assert len(registry.refused) == 1
    assert registry.refused[0].startswith(reason)


def test_text_that_is_no_unicode_is_a_typed_error(tmp_path: Path) -> None:
    insert = "INSERT INTO model_versions VALUES (CAST(x'ff' AS TEXT), 1)"
    with pytest.raises(ConfigError, match="cannot be read as an MLflow database"):
        read_file(database(tmp_path / "db", OLDEST, (insert, ())))


def test_file_with_an_unusual_name_is_read(tmp_path: Path) -> None:
    path = database(tmp_path / "a?mode=rwc#%41 ü", OLDEST, MODEL, VERSION)
    assert len(read_file(path).versions) == 1


def test_file_is_read_while_a_server_writes_to_it(tmp_path: Path) -> None:
    path = database(tmp_path / "db", f"PRAGMA journal_mode = WAL; {OLDEST}", MODEL, VERSION)
    with closing(sqlite3.connect(path, isolation_level=None)) as writing:
        writing.execute("BEGIN IMMEDIATE")
        writing.execute(*VERSION)
        assert len(read_file(path).versions) == 1
        writing.execute("COMMIT")
        assert len(read_file(path).versions) == 2


def test_file_is_not_changed(tmp_path: Path) -> None:
    path = database(tmp_path / "db", OLDEST, MODEL, VERSION)
    path.chmod(0o400)
    before = path.read_bytes()
    read_file(path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["db"]
