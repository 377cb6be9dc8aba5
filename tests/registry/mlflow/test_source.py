from __future__ import annotations

from pathlib import Path

import pytest

from forged.errors import ConfigError
from forged.registry.mlflow import read_registry
from tests.registry.mlflow.test_sqlite_file import MODEL, OLDEST, VERSION, database


@pytest.mark.parametrize("prefix", ["", "sqlite:///"])
def test_file_is_named_by_its_path_or_as_mlflow_names_it(tmp_path: Path, prefix: str) -> None:
    path = database(tmp_path / "db", OLDEST, MODEL, VERSION)
    assert len(read_registry(f"{prefix}{path}", {}).versions) == 1


@pytest.mark.parametrize("source", ["", "sqlite:///", "postgresql://host/db", "ftp://host", "databricks://profile"])
def test_other_source_is_refused(source: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_registry(source, {})
    assert raised.value.code == "mlflow_source_invalid"
