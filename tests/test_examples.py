"""The example scripts run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.test_docs import HANGS_S, a_daemon

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_completes_its_steps(tmp_path: Path) -> None:
    with a_daemon(tmp_path) as environment:
        create = ["forgectl", "jobs", "create", "run", "stability_window_ms=0"]
        subprocess.run(create, env=environment, check=True, capture_output=True, timeout=HANGS_S)
        printed = run("train.py", f"unix://{environment['FORGED_SOCKET']}", environment=environment)
    assert printed == "rank 0 of 1: w = -1.00\n"


def test_checkpoint_saves_and_loads(tmp_path: Path) -> None:
    assert run("checkpoint.py", str(tmp_path)) == "loaded step 100\n"


def test_follow_events_prints_the_facts_of_its_job(tmp_path: Path) -> None:
    with a_daemon(tmp_path) as environment:
        printed = run("follow_events.py", f"unix://{environment['FORGED_SOCKET']}", environment=dict(os.environ))
    assert "JobCreated" in printed
    assert "warm-up is over" in printed


def test_release_model_brings_it_into_production(tmp_path: Path) -> None:
    with a_daemon(tmp_path) as environment:
        printed = run("release_model.py", f"unix://{environment['FORGED_SOCKET']}", str(tmp_path / "checkpoints"))
    assert printed.startswith("digits@0.1.0 serves\n")
    assert "1 0.1.0 registered" in printed
