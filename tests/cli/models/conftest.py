"""A real daemon with the model `resnet`, and `forgectl models` run on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forged.client import BlockingClient
from tests.cli.daemon_commands import DaemonCommands
from tests.client.threaded_daemon import ThreadedDaemon

MODEL = "resnet"
TO_CANARY = 2
"""Promotions from validating to canary."""


class RegistryDaemon(DaemonCommands):
    """A daemon, its client, and `forgectl models` run on it."""

    group = "models"

    def __init__(
        self, daemon: ThreadedDaemon, client: BlockingClient, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        super().__init__(daemon, client, capsys)
        self.folder = folder

    def file(self, text: str) -> Path:
        """A file of a model."""
        path = self.folder / f"{text}.onnx"
        path.write_text(text)
        return path

    def register(self, version: str = "1.0.0", **fields: Any) -> str:
        """A version with a file of its own; returns its checksum."""
        fields = {"files": self.file(f"weights {version}")} | fields
        return self.client.register_model(MODEL, version=version, **fields).checksum

    def validate(self, version: str = "1.0.0", **fields: Any) -> None:
        """A passing validation."""
        measured: dict[str, Any] = {"passed": True, "accuracy": 0.9, "latency_p50_ms": 4.0, "latency_p99_ms": 12.0}
        self.client.validate_model(MODEL, version, **measured | fields)

    def promote(self, version: str = "1.0.0", steps: int = 1) -> None:
        for _ in range(steps):
            self.client.promote_model(MODEL, version)

    def serve(self, version: str = "1.0.0", **fields: Any) -> None:
        """A version that is registered, validated and in production."""
        self.register(version)
        self.promote(version)
        self.validate(version, **fields)
        self.promote(version, TO_CANARY + 1)

    def canary(self, version: str, **fields: Any) -> None:
        """A version that is registered, validated and a canary."""
        self.register(version)
        self.promote(version)
        self.validate(version, **fields)
        self.promote(version, TO_CANARY)


@pytest.fixture
def on_daemon(
    threaded_daemon: ThreadedDaemon,
    client: BlockingClient,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> RegistryDaemon:
    folder = tmp_path / "models"
    folder.mkdir()
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return RegistryDaemon(threaded_daemon, client, folder, capsys)
