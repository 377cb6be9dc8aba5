"""Shell completion of checkpoint and tensor names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forged.checkpoint.format import manifest
from forged.cli.ckpt import candidates as checkpoint_candidates
from forged.cli.forgectl import candidates, main
from tests.cli.ckpt.conftest import CheckpointFolder


def words(*typed: str) -> list[str]:
    return [word for word, _ in candidates.candidates(main._parser(), ["ckpt", *typed])]


@pytest.fixture
def _some(checkpoint_folder: CheckpointFolder) -> None:
    for prefix in ("run/step-1", "step-1", "step-2"):
        checkpoint_folder.save(prefix)
    (checkpoint_folder.folder / "model.safetensors").touch()
    (checkpoint_folder.folder / ".hidden.metadata.json").touch()


@pytest.mark.usefixtures("_some")
class TestCompletion:
    @pytest.mark.parametrize(
        ("typed", "offered"),
        [
            (["show", ""], ["checkpoints/"]),
            (["show", "checkpoints/"], ["checkpoints/run/", "checkpoints/step-1", "checkpoints/step-2"]),
            (["show", "checkpoints/s"], ["checkpoints/step-1", "checkpoints/step-2"]),
            (["verify", "checkpoints/run/"], ["checkpoints/run/step-1"]),
            (["diff", "checkpoints/step-1", "checkpoints/r"], ["checkpoints/run/"]),
            (["rm", "checkpoints/step-2"], ["checkpoints/step-2"]),
            (["convert", "checkpoints/m"], ["checkpoints/model.safetensors"]),
            (["convert", "x", "checkpoints/m"], ["checkpoints/model.safetensors"]),
            (["cat", "checkpoints/step-1", ""], ["model/w", "optimizer/m"]),
            (["cat", "checkpoints/step-1", "o"], ["optimizer/m"]),
            (["cat", "checkpoints/none", ""], []),
            (["cat", "s3://bucket/x", ""], []),
            (["show", "s3://bucket/"], []),
            (["ls", ""], ["checkpoints/"]),
            (["convert", "--format", "s"], ["single_file"]),
        ],
    )
    def test_candidates_extend_the_typed_text(self, typed: list[str], offered: list[str]) -> None:
        assert words(*typed) == offered

    def test_home_directories_are_expanded(
        self, checkpoint_folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(checkpoint_folder.folder))
        assert words("show", "~/step-1") == ["~/step-1"]
        assert words("cat", "~/step-1", "m") == ["model/w"]


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"tensors": {"names": 7}}', '{"tensors": {"names": [7]}}'])
def test_an_invalid_manifest_offers_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.metadata.json").write_text(text)
    assert list(checkpoint_candidates.tensors(str(tmp_path / "a"))) == []


def test_names_with_control_characters_are_not_offered(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", {"x\x1b[2J": np.zeros(1), "y": np.zeros(1)})
    assert words("cat", "checkpoints/a", "") == ["y"]


def test_the_manifest_suffix_is_the_formats() -> None:
    assert manifest.SUFFIX == checkpoint_candidates.SUFFIX


def test_completion_does_not_import_numpy() -> None:
    program = (
        "import sys; from forged.cli.forgectl import main; main.main(['complete', 'ckpt', 'show', '']); "
        "sys.exit({'numpy', 'asyncio', 'msgspec', 'forged.checkpoint'} & {*sys.modules} != set())"
    )
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL).returncode == 0
