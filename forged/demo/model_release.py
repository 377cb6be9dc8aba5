"""A part of the demo: the trained model goes into production, and a bad canary is rolled back by the registry."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forged.cli.forgectl.tables import duration
from forged.client import ForgedClient
from forged.client.model_files.plain_files import FilesVerdict
from forged.demo.checkpoints import FOLDER, checkpoints, resumed
from forged.demo.learning import CLASSES, State, Task
from forged.demo.observer import ClusterObserver
from forged.demo.output import CYAN, GREEN, Output
from forged.demo.processes import forgectl
from forged.demo.train import JOB
from forged.registry.messages import CanaryAction, ModelPolicy, ModelRolledBack, ModelView
from forged.registry.model import DeploymentState, ModelVersion

MODEL = f"{JOB}/classifier"
ROUNDED = "rounded.npy"
SAMPLES = 40
"""The latencies that a validation measures."""
POINT = (2,)
"""The shape of an input."""


@dataclass
class Release:
    """What has been observed."""

    serving: ModelView
    """The version that serves at the end."""
    canary: ModelView
    """The rolled back version."""
    rollback_s: float
    """Seconds from the report about the canary until it was rolled back."""
    files: FilesVerdict
    """What the verification of the serving version's files has found."""


async def release_model(client: ForgedClient, observer: ClusterObserver, output: Output, directory: Path) -> Release:
    """Register the last checkpoint, promote it, and let a bad second version be rolled back."""
    output.step(
        "Put the trained model into production",
        "The registry takes the last checkpoint as version 0.1.0, with its checksum. A promotion needs evidence, so",
        "latency and accuracy are measured first. Version 0.2.0 has the same weights, rounded to whole numbers; its",
        "validation looked at the latency only. As a canary it classifies badly, and the registry rolls it back.",
    )
    last, task = checkpoints(directory)[-1], Task()
    state, _ = resumed(directory, last.prefix, task, int(last.prefix.removeprefix("step-")))
    place = directory / FOLDER / last.prefix
    first = await client.register_model(MODEL, checkpoint=place, input_shape=POINT, output_shape=(CLASSES,))
    output.note(f"{MODEL}@{first.version} is the checkpoint {last.prefix}, {first.checksum[:19]}…")
    await client.set_model_policy(MODEL, ModelPolicy(canary=CanaryAction.ACT), reason="nobody watches the demo")
    await _validate(client, first.version, task, state, accuracy=task.accuracy(state))
    await _promote(client, first.version, DeploymentState.PRODUCTION)
    observer.update()
    rounded: State = {"parameters": np.round(state["parameters"])}
    np.save(directory / ROUNDED, rounded["parameters"])
    second = await client.register_model(
        MODEL, files=directory / ROUNDED, input_shape=POINT, output_shape=(CLASSES,), reason="smaller weights"
    )
    await _validate(client, second.version, task, rounded)
    await _promote(client, second.version, DeploymentState.CANARY)
    observer.update()
    reported_at = time.monotonic()
    measured = await client.report_canary(MODEL, second.version, accuracy=task.accuracy(rounded))
    output.note(f"the canary has a rollback priority of {measured.priority:.3g}; the limit is {measured.threshold:g}")
    await observer.until(lambda: observer.last_fact(ModelRolledBack) is not None, "the rollback of the canary")
    rollback_s = time.monotonic() - reported_at
    output.note(f"rolled back {duration(rollback_s)} after the report", GREEN)
    for words in (("history", MODEL), ("lineage", f"{MODEL}@serving")):
        output.note(f"$ forgectl models {' '.join(words)}", CYAN)
        asking = forgectl(observer.daemon.socket, "models", *words)
        output.quote(await observer.observe_during(asking, f"forgectl models {words[0]}"))
    serving, canary = await client.model(MODEL, "serving"), await client.model(MODEL, second.version)
    files = await client.verify_model(MODEL, first.version)
    return Release(serving, canary, rollback_s, files)


async def _validate(
    client: ForgedClient, version: ModelVersion, task: Task, state: State, accuracy: float = float("nan")
) -> None:
    """Measure the latency of classifying all samples, and record it."""
    samples_ms = await asyncio.to_thread(lambda: [_latency_ms(task, state) for _ in range(SAMPLES)])
    await client.validate_model(MODEL, version, passed=True, accuracy=accuracy, samples_ms=samples_ms)


def _latency_ms(task: Task, state: State) -> float:
    began_at = time.perf_counter()
    task.accuracy(state)
    return (time.perf_counter() - began_at) * 1000


async def _promote(client: ForgedClient, version: ModelVersion, to: DeploymentState) -> None:
    """Promote a version step by step."""
    while (await client.promote_model(MODEL, version)).state is not to:
        pass
