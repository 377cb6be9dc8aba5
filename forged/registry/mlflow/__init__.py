"""Reads the registry of an MLflow server or database, to import its versions."""

from forged.registry.mlflow.conversion import MlflowRegistry
from forged.registry.mlflow.source import read_registry

__all__ = ["MlflowRegistry", "read_registry"]
