"""`forgectl ckpt verify` finds every fault of a checkpoint."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from forged.checkpoint.model import CompressionLevel
from forged.cli.ckpt import progress_bar
from tests.cli.ckpt.conftest import STATE, CheckpointFolder


def test_a_valid_checkpoint_exits_with_0(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", STATE, STATE)
    output = checkpoint_folder.run("verify checkpoints/a")
    assert (output.code, output.err) == (0, "")
    assert output.out.startswith("a is valid: 2 tensors in 2 files, 88 B compared in ")


def test_a_corrupt_chunk_is_reported_with_tensor_rank_file_and_number(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a", {"w": np.zeros(1 << 16), "v": np.zeros(3)})
    [file] = checkpoint_folder.files("a")
    checkpoint_folder.flip_bit(file, 4096 + (1 << 17))
    output = checkpoint_folder.run("verify checkpoints/a")
    assert output.code == 1
    verdict, finding, touched = output.lines
    assert verdict.startswith("a is invalid: ")
    assert finding.startswith(f"  error: chunk 1 of w, written by rank 0 in a/{file.name} at byte {4096 + (1 << 17)}")
    assert touched == "  1 of 2 tensors are corrupt"
    summary = checkpoint_folder.run_json("verify checkpoints/a", code=1)
    [row] = summary["findings"]
    assert (summary["valid"], row["tensor"], row["rank"], row["chunk"]) == (False, "w", 0, 1)
    assert (row["file"], row["code"], row["severity"]) == (f"a/{file.name}", "checkpoint_chunk_corrupt", "error")


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
def test_a_missing_file_is_reported_with_its_rank(checkpoint_folder: CheckpointFolder, level: CompressionLevel) -> None:
    checkpoint_folder.save("a", STATE, STATE, level=level)
    checkpoint_folder.files("a")[1].unlink()
    output = checkpoint_folder.run("verify checkpoints/a")
    assert output.code == 1
    assert "(written by rank 1)" in output.lines[1]


def test_json_is_one_object(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a")
    summary = checkpoint_folder.run_json("verify checkpoints/a")
    assert summary.pop("seconds") > 0
    assert summary == {
        "prefix": "a", "valid": True, "bytes_checked": 88, "findings": [],
        "checks": [{"name": name, "ok": True} for name in ("manifest", "files", "chunks")],
    }  # fmt: skip


class TestAll:
    def test_each_checkpoint_is_reported_and_a_corrupt_one_fails(self, checkpoint_folder: CheckpointFolder) -> None:
        for prefix in ("a", "b", "c/d"):
            checkpoint_folder.save(prefix)
        checkpoint_folder.flip_bit(checkpoint_folder.files("b")[0], 4096)
        output = checkpoint_folder.run("verify checkpoints --all")
        assert output.code == 1
        assert [line.split(":")[0] for line in output.lines if not line.startswith(" ")] == [
            "a is valid", "b is invalid", "c/d is valid",
        ]  # fmt: skip

    def test_json_is_a_line_per_checkpoint(self, checkpoint_folder: CheckpointFolder) -> None:
        checkpoint_folder.save("a")
        checkpoint_folder.save("b")
        output = checkpoint_folder.run("verify checkpoints --all --json")
        assert output.code == 0
        assert [json.loads(line)["prefix"] for line in output.lines] == ["a", "b"]

    def test_an_invalid_name_does_not_stop_the_check(self, checkpoint_folder: CheckpointFolder) -> None:
        (checkpoint_folder.folder / "a b").mkdir(parents=True)
        (checkpoint_folder.folder / "a b.metadata.json").write_text("{}")
        checkpoint_folder.save("c")
        output = checkpoint_folder.run("verify checkpoints --all")
        assert output.code == 1
        assert output.lines[0] == "a b is invalid"
        assert output.lines[-1].startswith("c is valid")

    def test_a_folder_without_checkpoints_is_refused(self, checkpoint_folder: CheckpointFolder) -> None:
        code, error = checkpoint_folder.run_failing("verify checkpoints --all")
        assert (code, error["code"]) == (3, "checkpoint_missing")


def test_a_missing_checkpoint_is_refused(checkpoint_folder: CheckpointFolder) -> None:
    code, error = checkpoint_folder.run_failing("verify checkpoints/none")
    assert (code, error["kind"], error["code"]) == (3, "refused", "checkpoint_missing")


def test_a_corrupt_manifest_is_a_finding(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a")
    checkpoint_folder.flip_bit(checkpoint_folder.manifest("a"), 10)
    output = checkpoint_folder.run("verify checkpoints/a")
    assert output.code == 1
    assert output.lines == ["a is invalid", "  error: a.metadata.json is corrupt: its checksum differs"]


def test_a_timeout_is_unavailable(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a")
    code, error = checkpoint_folder.run_failing("verify checkpoints/a --timeout 0.000000001")
    assert (code, error["kind"], error["code"]) == (4, "unavailable", "checkpoint_timeout")


def test_the_bar_is_on_stderr_and_the_result_on_stdout(
    checkpoint_folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_folder.save("a", {"w": np.zeros(1 << 22)})
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress_bar, "FIRST_AFTER_S", 0)
    output = checkpoint_folder.run("verify checkpoints/a")
    assert output.err.startswith(f"{progress_bar.CLEAR_LINE}a  [####")
    assert output.err.endswith(progress_bar.CLEAR_LINE)
    assert len(output.lines) == 1


WAITING = """
import sys, threading
from forged.checkpoint.verification import validator
from forged.cli.forgectl import main

def hang(*arguments):
    print("hangs", file=sys.stderr, flush=True)
    threading.Event().wait()

validator._ChunkScan.part = hang
sys.exit(main.main(["ckpt", "verify", "checkpoints/a"]))
"""


def test_an_interrupt_ends_a_hanging_check(checkpoint_folder: CheckpointFolder) -> None:
    checkpoint_folder.save("a")
    with subprocess.Popen([sys.executable, "-c", WAITING], stderr=subprocess.PIPE, stdout=subprocess.PIPE) as verifying:
        assert verifying.stderr is not None
        assert verifying.stdout is not None
        assert verifying.stderr.readline() == b"hangs\n"
        verifying.send_signal(signal.SIGINT)
        assert verifying.wait(timeout=30) == 130
        assert (verifying.stderr.read(), verifying.stdout.read()) == (b"", b"")
