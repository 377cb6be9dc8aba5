"""`forgectl models import-mlflow`, against a real daemon and what real servers of MLflow have answered."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from forged.cli.process import EXIT_FAILED, EXIT_USAGE
from tests.cli.models.conftest import RegistryDaemon
from tests.registry.mlflow.stub_server import stub_server
from tests.registry.mlflow.test_recorded import VERSIONS, database, replayed

NAME = "mlflow-3.17"
IMPORTED = [
    *("classifier@1.0.0", "classifier@2.0.0"),
    *("speech recogniser@1.0.0", "speech recogniser@2.0.0", "speech recogniser@3.0.0"),
]


def test_registry_of_a_server_is_imported_once(on_daemon: RegistryDaemon) -> None:
    with stub_server(replayed(NAME)) as url:
        code, out, _ = on_daemon.run(f"import-mlflow {url}")
        again = on_daemon.run(f"import-mlflow {url}")
    assert code == again[0] == EXIT_FAILED
    assert out.splitlines()[0] == f"imported 5 versions: {', '.join(IMPORTED)}"
    assert "refused: no@sign@1.0.0: model_id must be 1 to 200 letters and digits" in out
    assert again[1].splitlines()[0] == f"known before: 5 versions: {', '.join(IMPORTED)}"
    shown = on_daemon.json("show 'speech recogniser@champion'")
    assert (shown["metadata"]["version"], shown["metadata"]["state"]) == ("2.0.0", "production")
    assert shown["metadata"]["tags"]["mlflow.metric.accuracy"] == "0.71"
    assert sorted(shown["aliases"]) == ["best-so_far", "champion", "serving"]
    [entry] = on_daemon.json("history 'speech recogniser@3.0.0'")["entries"]
    assert (entry["kind"], entry["reason"]) == ("imported", f"imported from MLflow at {url}")


@pytest.mark.parametrize("name", VERSIONS)
def test_registry_of_a_file_is_imported(on_daemon: RegistryDaemon, tmp_path: Path, name: str) -> None:
    path = database(name, tmp_path)
    done = on_daemon.run(f"import-mlflow {path} --reason moving")[1]
    assert "speech recogniser@2.0.0" in done
    found = on_daemon.json("find --state production")["versions"]
    assert [(one["model_id"], one["version"]) for one in found] == [("speech recogniser", "2.0.0")]
    [entry] = on_daemon.json("history 'speech recogniser@2.0.0'")["entries"][-1:]
    assert entry["reason"] == "moving"


def test_dry_run_changes_nothing(on_daemon: RegistryDaemon, tmp_path: Path) -> None:
    out = on_daemon.run(f"import-mlflow {database(NAME, tmp_path)} --dry-run")[1]
    assert out.splitlines()[0].startswith("would import 5 versions: classifier@1.0.0,")
    assert on_daemon.json("ls")["models"] == []


def test_only_new_versions_are_imported_again(on_daemon: RegistryDaemon, tmp_path: Path) -> None:
    path = database(NAME, tmp_path)
    on_daemon.run(f"import-mlflow {path}")
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO model_versions (name, version) VALUES ('classifier', 3)")
    connection.close()
    assert on_daemon.run(f"import-mlflow {path}")[1].splitlines()[0] == "imported 1 version: classifier@3.0.0"


def test_refusals_of_the_reader_are_shown_with_those_of_the_daemon(on_daemon: RegistryDaemon, tmp_path: Path) -> None:
    path = database(NAME, tmp_path)
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO model_versions (name, version, current_stage) VALUES ('a', 1, 'Shadow')")
    connection.close()
    lines = [line for line in on_daemon.run(f"import-mlflow {path}")[1].splitlines() if line.startswith("refused")]
    assert [line.split(":")[1] for line in lines] == [" no@sign@1.0.0", " a@1"]


def test_source_that_cannot_be_read_is_an_error_of_usage(on_daemon: RegistryDaemon, tmp_path: Path) -> None:
    code, out, err = on_daemon.run(f"import-mlflow {tmp_path / 'missing.db'}")
    assert (code, out) == (EXIT_USAGE, "")
    assert "missing.db cannot be read as an MLflow database: No such file" in err
