"""Checkpoints in a folder, and `forgectl ckpt` in front of it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.model import CompressionLevel
from forged.checkpoint.storage.local import LocalStorage
from forged.cli.forgectl import main
from tests.checkpoint.plain_writer import write_checkpoint


class Said(NamedTuple):
    """What a command has said."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


class Shelf:
    """The folder `checkpoints` in the working directory."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def put(
        self,
        prefix: str,
        *states: Any,
        created_at: float = 1.0,
        copies: int = 1,
        level: CompressionLevel = CompressionLevel.NONE,
    ) -> Manifest:
        """A checkpoint of these ranks."""
        storage = LocalStorage(self.folder)
        return write_checkpoint(storage, prefix, states or [STATE], created_at=created_at, copies=copies, level=level)

    def files(self, prefix: str) -> list[Path]:
        """The files of a checkpoint, but for its manifest."""
        return sorted((self.folder / prefix).iterdir())

    def manifest(self, prefix: str) -> Path:
        return self.folder / f"{prefix}.metadata.json"

    def damage(self, path: Path, at: int) -> None:
        """Flip a bit."""
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    def run(self, line: str) -> Said:
        """Have `forgectl ckpt` do something."""
        code = main.main(["ckpt", *shlex.split(line)])
        said = self._capsys.readouterr()
        return Said(code, said.out, said.err)

    def told(self, line: str, code: int = 0) -> Any:
        """What a command tells a program."""
        said = self.run(f"{line} --json")
        assert (said.code, said.err) == (code, "")
        return json.loads(said.out)

    def failed(self, line: str) -> tuple[int, dict[str, str]]:
        """The exit code, and the error that a program is told."""
        said = self.run(f"{line} --json")
        assert said.out == ""
        error: dict[str, str] = json.loads(said.err)["error"]
        return said.code, error

    def on_a_terminal(self, line: str, columns: int = 100) -> Said:
        """The same where somebody looks at it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdout.isatty", lambda: True)
            for name, value in (("TERM", "xterm"), ("COLUMNS", f"{columns}"), ("LINES", "24"), ("NO_COLOR", "1")):
                patch.setenv(name, value)
            return self.run(line)


STATE = {"model": {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}, "optimizer": {"m": np.zeros(5)}, "step": 7}


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shelf:
    monkeypatch.chdir(tmp_path)
    return Shelf(tmp_path / "checkpoints", capsys)
