"""The demonstration shows what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples import spine_demo
from examples.spine_demo import Demonstration

ROOT = Path(__file__).parents[2]


def demonstrate(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.spine_demo", "--quick", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_in_a_pipe_it_is_plain_text_and_all_of_it_holds() -> None:
    done = demonstrate()
    assert (done.returncode, done.stderr) == (0, "")
    assert "All of it held." in done.stdout
    assert "\x1b" not in done.stdout
    assert "FAIL" not in done.stdout


def test_a_program_is_told_one_object() -> None:
    told = json.loads(demonstrate("--json").stdout)
    assert told["held"]
    assert all(check["held"] for check in told["checks"])
    assert told["outage_s"] > 0
    assert told["facts"] > told["acknowledged"] > 0


def test_it_fails_when_something_did_not_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(demonstration: Demonstration) -> None:
        demonstration.stage.check("the sky is green", held=False)

    monkeypatch.setattr(Demonstration, "run", run)
    assert spine_demo.main([]) == 1
    assert "FAIL  the sky is green" in capsys.readouterr().out
