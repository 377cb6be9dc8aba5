"""`forgectl models import-mlflow`: takes in the versions of an MLflow registry."""

from __future__ import annotations

import os

import msgspec

from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.models.import_file import send, show_imported
from forged.cli.process import EXIT_FAILED, EXIT_OK
from forged.registry.mlflow import read_registry


def import_mlflow(options: Options) -> int:
    registry = read_registry(options.source, os.environ)
    versions = [msgspec.to_builtins(version) for version in registry.versions]
    done = send(options, versions, options.reason or f"imported from MLflow at {options.source}")
    done["refused"] += registry.refused
    answer(options, done, lambda: show_imported(done))
    return EXIT_FAILED if done["refused"] or not versions else EXIT_OK
