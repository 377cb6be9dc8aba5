"""What real servers of MLflow have answered, and their tables, as `recorded/record.py` has written them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from forged.registry.messages import ImportedVersion
from forged.registry.mlflow import MlflowRegistry, read_registry
from tests.registry.mlflow.stub_server import Answer, Asked, as_json, stub_server

FOLDER = Path(__file__).parent / "recorded"
VERSIONS = sorted(path.stem for path in FOLDER.glob("*.sql"))
with_each_version = pytest.mark.parametrize("name", VERSIONS)


def replayed(name: str) -> Callable[[Asked], Answer]:
    recorded = json.loads((FOLDER / f"{name}.json").read_text())
    answers = {(one["method"], *sorted(one["fields"].items())): one for one in recorded}

    def answer(asked: Asked) -> Answer:
        one = answers[asked.method, *sorted(asked.fields.items())]
        return as_json(one["body"], one["status"])

    return answer


def from_server(name: str) -> MlflowRegistry:
    with stub_server(replayed(name)) as url:
        return read_registry(url, {})


def database(name: str, folder: Path) -> Path:
    """The tables as an SQLite file."""
    path = folder / "mlflow.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((FOLDER / f"{name}.sql").read_text())
    return path


def from_file(name: str, folder: Path) -> MlflowRegistry:
    return read_registry(f"sqlite:///{database(name, folder)}", {})


def by_name(registry: MlflowRegistry) -> dict[str, ImportedVersion]:
    return {f"{one.metadata.model_id}@{one.metadata.version}": one for one in registry.versions}


def test_several_versions_of_mlflow_are_recorded() -> None:
    assert VERSIONS == ["mlflow-1.30", "mlflow-2.9", "mlflow-3.17"]


@with_each_version
def test_server_and_file_have_the_same_versions(name: str, tmp_path: Path) -> None:
    assert from_server(name) == from_file(name, tmp_path)


@with_each_version
def test_versions_have_their_states_aliases_and_metrics(name: str) -> None:
    registry = from_server(name)
    versions = by_name(registry)
    assert registry.refused == []
    speech = {key: one.metadata.state.value for key, one in versions.items() if key.startswith("speech")}
    assert speech == {
        "speech recogniser@1.0.0": "archived",
        "speech recogniser@2.0.0": "production",
        "speech recogniser@3.0.0": "staging",
    }
    serving = versions["speech recogniser@2.0.0"]
    tags = dict(serving.metadata.tags)
    assert serving.artifact.location == "s3://models/1"
    assert (tags["team"], tags["sign ü"], tags["empty"]) == ("vision", "value 1", "")
    assert tags["mlflow.description"].startswith("## Recogniser\n\nTrained on")
    assert (tags["mlflow.metric.accuracy"], tags["mlflow.metric.loss"]) == ("0.71", "nan")
    assert serving.metadata.registered_at > 1.7e9


@pytest.mark.parametrize("name", ["mlflow-2.9", "mlflow-3.17"])
def test_aliases_are_those_of_the_server(name: str) -> None:
    versions = by_name(from_server(name))
    assert versions["speech recogniser@2.0.0"].aliases == ["serving", "best-so_far", "champion"]
    assert versions["speech recogniser@3.0.0"].metadata.tags["mlflow.alias.Challenger"] == "3"


def test_prompts_are_no_models() -> None:
    assert "greeting" in (FOLDER / "mlflow-3.17.sql").read_text()
    assert [key for key in by_name(from_server("mlflow-3.17")) if key.startswith("greeting")] == []
