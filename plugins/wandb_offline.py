"""Writes the training metrics of jobs as offline runs of Weights & Biases, by its package `wandb`.

Invariants:
- Nothing is sent anywhere: `wandb sync` uploads the directories when the user wants.
- One run id for each job: runs of several starts of the daemon have the same one, and `wandb sync --append` joins them.
- The package is called in one thread of its own. While it is slow, the newest values of a job replace those that wait.

The package is needed because the format of its files is its own and changes with it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from forged.elastic.messages import JobAborted, JobCompleted
from forged.metrics.messages import JobMetrics
from forged.plugins import Call, ConfigError, PluginContext, Problem, Record, Role

API_VERSION = 1

RUNS_MAX = 20
"""Runs that are open at a time; the one that was written longest ago is finished, and begun again later."""
DEADLINE_S = 120.0
"""The package starts a process of its own for the first run."""
STEP = "forged/step"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    directory: str = ""
    project: str = "forged"
    jobs: list[str] = []


def register(context: PluginContext) -> None:
    """Write the metrics of the jobs that the settings name."""
    settings = context.settings(Settings)
    if find_spec("wandb") is None:
        problem = Problem(f"plugins.{context.name}", "", "used with the package wandb: pip install wandb")
        raise ConfigError("wandb_missing", "wandb is not installed", "install it beside forged", [problem])
    directory = Path(settings.directory) if settings.directory else context.directory()
    if not directory.is_absolute():
        wanted = "an absolute path, because the daemon may run in any directory"
        problem = Problem(f"plugins.{context.name}.directory", str(directory), wanted)
        raise ConfigError("wandb_directory", "no runs can be written there", "name another", [problem])
    sink = WandbSink(context, settings, directory)
    context.on_signal(JobMetrics, sink.take, name="metrics", deadline_s=DEADLINE_S)
    context.on((JobCompleted, JobAborted), sink.end_job, name="jobs", deadline_s=DEADLINE_S)
    context.command("status", sink.status, help="show the directory and the open runs", needs=Role.VIEWER)
    context.on_stop(sink.close)


class WandbSink:
    """The open runs by job, the one that was written longest ago first."""

    def __init__(self, context: PluginContext, settings: Settings, directory: Path) -> None:
        self._context = context
        self._settings = settings
        self._directory = directory
        self._runs: dict[str, Any] = {}
        self._written = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="wandb")

    async def take(self, metrics: JobMetrics, call: Call) -> None:
        """Write the figures of a job."""
        if not self._settings.jobs or metrics.job in self._settings.jobs:
            await self._do(partial(self._write, metrics))

    async def end_job(self, record: Record) -> None:
        """Finish the run of a job that has ended."""
        if record.job in self._runs:
            await self._do(partial(self._finish, record.job, int(record.type == "JobAborted")))

    def status(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The directory, the open runs, and how many points were written."""
        return {"directory": str(self._directory), "runs": sorted(self._runs), "written": self._written}

    async def close(self) -> None:
        """Finish all runs."""
        await self._do(self._finish_all)
        self._thread.shutdown(wait=False)

    async def _do(self, act: Callable[[], Any]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, act)

    def _write(self, metrics: JobMetrics) -> None:
        run = self._runs.pop(metrics.job, None) or self._begin(metrics.job)
        self._runs[metrics.job] = run
        values = dict(metrics.values)
        for name in ("steps_per_s", "samples_per_s", "goodput"):
            value = getattr(metrics, name)
            if value is not None:
                values[f"forged/{name}"] = value
        # Not as the package's own step, which must not go back, as a job's does that has lost steps.
        run.log({STEP: metrics.step, **values})
        self._written += 1

    def _begin(self, job: str) -> Any:
        if len(self._runs) >= RUNS_MAX:
            self._finish(next(iter(self._runs)))
        # By name: the package is optional.
        wandb: Any = import_module("wandb")
        self._directory.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            mode="offline",
            dir=str(self._directory),
            project=self._settings.project,
            name=job,
            id=run_id(self._context.history, job),
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                disable_git=True,
                disable_code=True,
                silent=True,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )
        run.define_metric("*", step_metric=STEP)
        return run

    def _finish_all(self) -> None:
        for job in list(self._runs):
            self._finish(job)

    def _finish(self, job: str, exit_code: int = 0) -> None:
        self._runs.pop(job).finish(exit_code=exit_code)


def run_id(history: str, job: str) -> str:
    """The same for each run of the daemon on the same history."""
    return hashlib.sha256(f"{history}/{job}".encode()).hexdigest()[:16]
