"""The examples of the pages about torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from forged.client import BlockingClient
from tests.client.threaded_daemon import ThreadedDaemon

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
LAUNCH = ["-m", "forged.cli.forged", "launch", "-n", "2"]
# Several processes share the machine, and each would take all of its cores.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    daemon = ThreadedDaemon(tmp_path)
    yield daemon.runner.endpoint
    daemon.close()


def run(*words: str, folder: Path = ROOT) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(page: str, has: str) -> str:
    [found] = [
        block
        for block in re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
        if has in block
    ]
    return str(found)


def test_example_trains_to_its_end_and_keeps_checkpoints(endpoint: str, tmp_path: Path) -> None:
    printed = run("examples/torch_ddp.py", endpoint, str(tmp_path / "checkpoints"))
    assert "step 250: loss" in printed
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*.json"))
    assert kept == [f"step-{step:08}.metadata.json" for step in (200, 250, 300)]


@pytest.mark.parametrize("page", ["README.md", "docs/torch.md"])
def test_quickstart_trains_and_another_launch_resumes(page: str, endpoint: str, tmp_path: Path) -> None:
    quickstart = example(page, "run.steps(5_000)").replace(
        "run.log(", "print('step', int(step), flush=True)\n        run.log("
    )
    printed = {}
    for job, total in (("first", 20), ("second", 30)):
        script = tmp_path / f"{job}.py"
        script.write_text(quickstart.replace("5_000", str(total)))
        printed[job] = run(*LAUNCH, "--endpoint", endpoint, str(script), folder=tmp_path)
    steps = {job: {int(step) for step in re.findall(r"step (\d+)", lines)} for job, lines in printed.items()}
    assert steps == {"first": set(range(20)), "second": set(range(20, 30))}
    with BlockingClient(endpoint) as client:
        assert "loss" in client.read_training("second").history[-1].values


def test_example_that_accumulates_and_scales_trains(endpoint: str, tmp_path: Path) -> None:
    preamble, *_ = example("docs/torch.md", "run.steps(5_000)").partition("with ft.join")
    trains = example("docs/torch.md", "no_sync").replace("steps(100)", "steps(5)")
    script = tmp_path / "train.py"
    # The default backend needs a compiler.
    script.write_text(preamble + trains.replace("torch.compile(model)", 'torch.compile(model, backend="eager")'))
    run(*LAUNCH, "--endpoint", endpoint, str(script), folder=tmp_path)
    with BlockingClient(endpoint) as client:
        assert client.cluster("train").state.current_step == 5


def test_tutorial_draws_the_losses_of_both_trainings(tmp_path: Path) -> None:
    picture = tmp_path / "loss.svg"
    printed = run("examples/torch_tutorial/compare.py", "--steps", "120", "--workers", "2", "--picture", str(picture))
    assert re.search(r"^120 steps, [1-4] kills", printed, re.MULTILINE)
    drawn = ET.parse(picture).getroot()
    assert len(drawn.findall("{*}polyline")) == 3
