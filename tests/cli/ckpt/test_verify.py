"""`forgectl ckpt verify`: whether it is what was saved."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from forged.checkpoint.model import CompressionLevel
from forged.cli.ckpt import progress_bar
from tests.cli.ckpt.conftest import STATE, Shelf


def test_one_that_is_whole_exits_with_0(shelf: Shelf) -> None:
    shelf.put("a", STATE, STATE)
    said = shelf.run("verify checkpoints/a")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("a is valid: 2 tensors in 2 files, 88 B compared in ")


def test_a_damaged_chunk_is_told_with_tensor_rank_file_and_number(shelf: Shelf) -> None:
    shelf.put("a", {"w": np.zeros(1 << 16), "v": np.zeros(3)})
    [file] = shelf.files("a")
    shelf.damage(file, 4096 + (1 << 17))
    said = shelf.run("verify checkpoints/a")
    assert said.code == 1
    verdict, finding, touched = said.lines
    assert verdict.startswith("a is invalid: ")
    assert finding.startswith(f"  error: chunk 1 of w, written by rank 0 in a/{file.name} at byte {4096 + (1 << 17)}")
    assert touched == "  1 of 2 tensors are damaged"
    told = shelf.told("verify checkpoints/a", code=1)
    [row] = told["findings"]
    assert (told["valid"], row["tensor"], row["rank"], row["chunk"]) == (False, "w", 0, 1)
    assert (row["file"], row["code"], row["severity"]) == (f"a/{file.name}", "checkpoint_chunk_corrupt", "error")


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
def test_a_file_that_is_not_there_is_told_with_its_rank(shelf: Shelf, level: CompressionLevel) -> None:
    shelf.put("a", STATE, STATE, level=level)
    shelf.files("a")[1].unlink()
    said = shelf.run("verify checkpoints/a")
    assert said.code == 1
    assert "(written by rank 1)" in said.lines[1]


def test_programs_are_told_in_one_object(shelf: Shelf) -> None:
    shelf.put("a")
    told = shelf.told("verify checkpoints/a")
    assert told.pop("seconds") > 0
    assert told == {
        "prefix": "a", "valid": True, "bytes_checked": 88, "findings": [],
        "checks": [{"name": name, "ok": True} for name in ("manifest", "files", "chunks")],
    }  # fmt: skip


class TestAll:
    def test_each_is_told_and_one_that_is_damaged_fails_all(self, shelf: Shelf) -> None:
        for prefix in ("a", "b", "c/d"):
            shelf.put(prefix)
        shelf.damage(shelf.files("b")[0], 4096)
        said = shelf.run("verify checkpoints --all")
        assert said.code == 1
        assert [line.split(":")[0] for line in said.lines if not line.startswith(" ")] == [
            "a is valid", "b is invalid", "c/d is valid",
        ]  # fmt: skip

    def test_programs_are_told_a_line_for_each(self, shelf: Shelf) -> None:
        shelf.put("a")
        shelf.put("b")
        said = shelf.run("verify checkpoints --all --json")
        assert said.code == 0
        assert [json.loads(line)["prefix"] for line in said.lines] == ["a", "b"]

    def test_a_name_that_no_checkpoint_has_does_not_keep_the_others(self, shelf: Shelf) -> None:
        (shelf.folder / "a b").mkdir(parents=True)
        (shelf.folder / "a b.metadata.json").write_text("{}")
        shelf.put("c")
        said = shelf.run("verify checkpoints --all")
        assert said.code == 1
        assert said.lines[0] == "a b is invalid"
        assert said.lines[-1].startswith("c is valid")

    def test_where_there_are_none_it_is_refused(self, shelf: Shelf) -> None:
        code, error = shelf.failed("verify checkpoints --all")
        assert (code, error["code"]) == (3, "checkpoint_missing")


def test_what_is_not_there_is_refused(shelf: Shelf) -> None:
    code, error = shelf.failed("verify checkpoints/none")
    assert (code, error["kind"], error["code"]) == (3, "refused", "checkpoint_missing")


def test_a_manifest_that_is_damaged_is_the_finding(shelf: Shelf) -> None:
    shelf.put("a")
    shelf.damage(shelf.manifest("a"), 10)
    said = shelf.run("verify checkpoints/a")
    assert said.code == 1
    assert said.lines == ["a is invalid", "  error: a.metadata.json is corrupt: its checksum differs"]


def test_one_that_is_given_no_time_is_unavailable(shelf: Shelf) -> None:
    shelf.put("a")
    code, error = shelf.failed("verify checkpoints/a --timeout 0.000000001")
    assert (code, error["kind"], error["code"]) == (4, "unavailable", "checkpoint_timeout")


def test_a_bar_is_on_standard_error_and_the_verdict_on_the_other(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.put("a", {"w": np.zeros(1 << 22)})
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress_bar, "FIRST_AFTER_S", 0)
    said = shelf.run("verify checkpoints/a")
    assert said.err.startswith(f"{progress_bar.AWAY}a  [####")
    assert said.err.endswith(progress_bar.AWAY)
    assert len(said.lines) == 1


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


def test_who_interrupts_it_is_heard(shelf: Shelf) -> None:
    shelf.put("a")
    with subprocess.Popen([sys.executable, "-c", WAITING], stderr=subprocess.PIPE, stdout=subprocess.PIPE) as verifying:
        assert verifying.stderr is not None
        assert verifying.stdout is not None
        assert verifying.stderr.readline() == b"hangs\n"
        verifying.send_signal(signal.SIGINT)
        assert verifying.wait(timeout=30) == 130
        assert (verifying.stderr.read(), verifying.stdout.read()) == (b"", b"")
