"""The sink for offline runs of Weights & Biases, against a stand-in for the package."""

from __future__ import annotations

import asyncio
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from forged.elastic.messages import JobAborted
from forged.kernel.messages import Call
from forged.metrics.messages import JobMetrics
from plugins import wandb_offline
from tests.dropins.dropin_fixture import VIEWER, LoadedPlugin, refusal, running_plugin

JOB = "run"


class FakeRun:
    def __init__(self, **options: Any) -> None:
        self.options = options
        self.logged: list[dict[str, float]] = []
        self.axes: dict[str, str] = {}
        self.exit_code: int | None = None

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """The runs that were begun, by a module in the place of the package."""
    made: list[FakeRun] = []
    package: Any = ModuleType("wandb")
    package.__spec__ = ModuleSpec("wandb", None)
    package.Settings = lambda **options: options

    def init(**options: Any) -> FakeRun:
        made.append(FakeRun(**options))
        return made[-1]

    package.init = init
    monkeypatch.setitem(sys.modules, "wandb", package)
    return made


def figures(step: int, job: str = JOB, **values: float) -> JobMetrics:
    return JobMetrics(job, 1_000.0 + step, step, values, 4.0, None, None)


async def write(plugin: LoadedPlugin, *told: JobMetrics) -> Any:
    """Signal figures one after the other, each once the one before is written."""
    for one in told:
        before = (await plugin.run("status", VIEWER))["written"]
        plugin.kernel.bus.signal(one, Call(VIEWER, "a test"))
        while (await plugin.run("status", VIEWER))["written"] == before:
            await asyncio.sleep(0)
    return await plugin.run("status", VIEWER)


async def test_figures_of_a_job_are_one_offline_run_with_the_step_as_axis(runs: list[FakeRun], tmp_path: Path) -> None:
    settings = {"directory": str(tmp_path / "wandb"), "project": "lab"}
    async with running_plugin("wandb_offline", wandb_offline, settings, tmp_path) as plugin:
        status = await write(plugin, figures(7, loss=0.5), figures(6, loss=0.25))
        assert status == {"directory": str(tmp_path / "wandb"), "runs": [JOB], "written": 2}
    [run] = runs
    assert (run.options["mode"], run.options["project"], run.options["name"]) == ("offline", "lab", JOB)
    assert run.axes == {"*": "forged/step"}
    assert run.logged == [
        {"forged/step": 7, "loss": 0.5, "forged/steps_per_s": 4.0},
        {"forged/step": 6, "loss": 0.25, "forged/steps_per_s": 4.0},
    ]
    assert run.exit_code == 0, "the stop finishes it"


async def test_run_of_an_aborted_job_fails_and_a_later_one_has_the_same_id(runs: list[FakeRun], tmp_path: Path) -> None:
    async with running_plugin("wandb_offline", wandb_offline, {}, tmp_path) as plugin:
        await write(plugin, figures(1, loss=0.5))
        await plugin.publish(JobAborted("enough", 1), job=JOB)
        while (await plugin.run("status", VIEWER))["runs"]:
            await asyncio.sleep(0)
        assert runs[0].exit_code == 1
        await write(plugin, figures(2, loss=0.5))
    assert len(runs) == 2
    assert runs[0].options["id"] == runs[1].options["id"]


async def test_runs_beyond_the_limit_are_finished(
    runs: list[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_offline, "RUNS_MAX", 2)
    async with running_plugin("wandb_offline", wandb_offline, {"jobs": ["a", "b", "c"]}, tmp_path) as plugin:
        status = await write(plugin, *(figures(1, job, loss=1.0) for job in ("a", "b", "c")))
        assert status["runs"] == ["b", "c"]


def test_without_the_package_the_plugin_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_offline, "find_spec", lambda name: None)
    assert "pip install wandb" in refusal("wandb_offline", wandb_offline, {}, tmp_path)
