"""Where an MLflow registry is read from: its server, or its SQLite file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from forged.registry.mlflow import errors
from forged.registry.mlflow.conversion import MlflowRegistry, converted
from forged.registry.mlflow.rest import read_server
from forged.registry.mlflow.sqlite_file import read_file

SQLITE = "sqlite:///"


def read_registry(source: str, environ: Mapping[str, str]) -> MlflowRegistry:
    """The versions of an MLflow registry: of the server at a URL, or in an SQLite file (`PATH` or `sqlite:///PATH`).

    `environ` has the credentials: `MLFLOW_TRACKING_TOKEN`, or `MLFLOW_TRACKING_USERNAME` and `_PASSWORD`; and for TLS
    `MLFLOW_TRACKING_SERVER_CERT_PATH` and `MLFLOW_TRACKING_CLIENT_CERT_PATH`.
    """
    if source.startswith(("http://", "https://")):
        return converted(read_server(source, environ))
    path = source.removeprefix(SQLITE)
    if "://" in path or not path:
        raise errors.source_invalid(source, "is neither an http or https URL nor a file")
    return converted(read_file(Path(path)))
