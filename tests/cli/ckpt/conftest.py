"""A folder of checkpoints, and `forgectl ckpt` run on it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from forged.checkpoint.blocking import BlockingCheckpoint
from forged.checkpoint.checkpoint import DistributedCheckpoint
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.model import CompressionLevel, SaveOptions
from forged.checkpoint.storage.local import LocalStorage
from forged.cli.forgectl import main
from tests.checkpoint.fixtures.plain_writer import write_checkpoint


class Output(NamedTuple):
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


class CheckpointFolder:
    """The folder `checkpoints` in the working directory."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def save(
        self,
        prefix: str,
        *states: Any,
        created_at: float = 1.0,
        copies: int = 1,
        level: CompressionLevel = CompressionLevel.NONE,
    ) -> Manifest:
        """Save a checkpoint with these states of ranks."""
        storage = LocalStorage(self.folder)
        return write_checkpoint(storage, prefix, states or [STATE], created_at=created_at, copies=copies, level=level)

    def save_chain(self, *prefixes: str) -> None:
        """Save checkpoints of which each builds on the one before; a chunk changes at each."""
        rows = np.zeros((len(prefixes) + 1, 1 << 14))
        base = None
        with BlockingCheckpoint(DistributedCheckpoint(None, LocalStorage(self.folder))) as checkpoint:
            for number, prefix in enumerate(prefixes):
                rows[number] = number + 1
                checkpoint.save({"w": rows}, options=SaveOptions(prefix, base=base, include_rng_state=False))
                base = prefix

    def files(self, prefix: str) -> list[Path]:
        """The files of a checkpoint without its manifest."""
        return sorted((self.folder / prefix).iterdir())

    def manifest(self, prefix: str) -> Path:
        return self.folder / f"{prefix}.metadata.json"

    def flip_bit(self, path: Path, at: int) -> None:
        """Flip a bit."""
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    def run(self, line: str) -> Output:
        """Run a `forgectl ckpt` command."""
        code = main.main(["ckpt", *shlex.split(line)])
        output = self._capsys.readouterr()
        return Output(code, output.out, output.err)

    def run_json(self, line: str, code: int = 0) -> Any:
        """The JSON output of a command."""
        output = self.run(f"{line} --json")
        assert (output.code, output.err) == (code, "")
        return json.loads(output.out)

    def run_failing(self, line: str) -> tuple[int, dict[str, str]]:
        """The exit code and the JSON error of a command."""
        output = self.run(f"{line} --json")
        assert output.out == ""
        error: dict[str, str] = json.loads(output.err)["error"]
        return output.code, error

    def run_on_terminal(self, line: str, columns: int = 100) -> Output:
        """Run a command as on a terminal."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdout.isatty", lambda: True)
            for name, value in (("TERM", "xterm"), ("COLUMNS", f"{columns}"), ("LINES", "24"), ("NO_COLOR", "1")):
                patch.setenv(name, value)
            return self.run(line)


STATE = {"model": {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}, "optimizer": {"m": np.zeros(5)}, "step": 7}


@pytest.fixture
def checkpoint_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CheckpointFolder:
    monkeypatch.chdir(tmp_path)
    return CheckpointFolder(tmp_path / "checkpoints", capsys)
