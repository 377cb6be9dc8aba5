"""The last part of the demo: the only worker of a job is killed, and continues from its host's memory."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forged.catalog.messages import EmergencyCheckpointSaved
from forged.cli.forgectl.tables import duration
from forged.demo.checkpoints import SAVE_STEPS
from forged.demo.learning import State, Task
from forged.demo.observer import ClusterObserver
from forged.demo.output import CYAN, GREEN, RED, Output
from forged.demo.processes import forgectl
from forged.demo.records import Committed, Resumed
from forged.demo.train import PARAMETERS, STOP_FILE
from forged.memory.messages import DeviceRemoved
from forged.phrases import bytes_text

ALONE_JOB = "alone"
WORKER = "solo"
STEPS_TO_KILL = SAVE_STEPS + SAVE_STEPS // 2
"""After so many steps the worker is killed, half-way between two checkpoints on disk."""
GPU_BYTES = 1 << 30
"""What the worker holds on a device: offsets only, no memory."""
STEPS_AFTER = 20
"""The steps that the restarted worker makes at least."""


@dataclass
class MemoryRestore:
    """What has been measured."""

    committed: int
    """The steps that the killed worker had committed."""
    restored: int
    """The step from which the next process has continued."""
    saved_s: float
    """Seconds from the kill until the emergency checkpoint was durable, as the observer saw it."""
    freed_bytes: int
    """The GPU memory that the worker's death has freed."""
    differ_by: float
    """The largest difference between a parameter and the one of an uninterrupted run."""


async def restore_from_memory(
    observer: ClusterObserver, output: Output, directory: Path, endpoint: str
) -> MemoryRestore:
    """Kill the only worker of a job between two checkpoints, start it again, and compare its result."""
    output.step(
        "Kill the only worker of another job",
        "No other worker has its state, and the last checkpoint on disk is older. But it copies its state after every",
        "step into memory of the host that outlives it. The daemon saves the last complete copy as an emergency",
        "checkpoint, and the next process continues from there. The GPU memory that it held is free at once.",
    )
    await asyncio.to_thread(directory.mkdir)
    words = ("--job", ALONE_JOB, "--memory-every", "1", "--resume", "--gpu-bytes", f"{GPU_BYTES}")
    worker = await observer.enter(WORKER, endpoint, 1, directory, words)
    await observer.until(lambda: _committed(observer) >= STEPS_TO_KILL, f"{STEPS_TO_KILL} steps of {WORKER}")
    worker.may_end = True
    killed_at = time.monotonic()
    worker.kill()
    await worker.wait()
    observer.update()
    committed = _committed(observer)
    output.note(f"kill -9 {worker.pid} ({WORKER}) after {committed} committed steps", RED)
    await observer.until(lambda: observer.last_fact(DeviceRemoved) is not None, "the end of the worker's device")
    freed_bytes = _freed_bytes(observer)
    output.note(f"{bytes_text(freed_bytes)} of GPU memory are free that {WORKER} held", GREEN)
    await observer.until(lambda: observer.last_fact(EmergencyCheckpointSaved, WORKER) is not None, "the emergency save")
    saved_s = time.monotonic() - killed_at
    output.note(f"{duration(saved_s)} from the kill to the durable emergency checkpoint", GREEN)
    output.note(f"$ forgectl ckpt ls --job {ALONE_JOB}", CYAN)
    listing = forgectl(observer.daemon.socket, "ckpt", "ls", "--job", ALONE_JOB)
    output.quote(await observer.observe_during(listing, "forgectl ckpt ls"))
    worker = await observer.enter(WORKER, endpoint, 1, directory, words)
    await observer.until(lambda: _resumed(observer) > 0, "the restored state")
    restored = _resumed(observer)
    output.note(f"the next process continues after step {restored}", GREEN)
    await observer.until(lambda: _committed(observer) >= restored + STEPS_AFTER, f"{STEPS_AFTER} more steps")
    worker.may_end = True
    (directory / STOP_FILE).touch()
    await observer.until(lambda: worker.code is not None, f"the end of {WORKER}")
    steps = _committed(observer)
    state: State = {"parameters": np.load(directory / f"{WORKER}{PARAMETERS}")}
    reference = Task().train_alone(steps)
    distance = float(np.abs(state["parameters"] - reference["parameters"]).max())
    return MemoryRestore(committed, restored, saved_s, freed_bytes, distance)


def _freed_bytes(observer: ClusterObserver) -> int:
    record = observer.last_fact(DeviceRemoved)
    return record.fact.bytes if record is not None and isinstance(record.fact, DeviceRemoved) else 0


def _committed(observer: ClusterObserver) -> int:
    """The steps that the worker has recorded as committed."""
    log = observer.logs.get(WORKER, [])
    return next((entry.step + 1 for entry in reversed(log) if isinstance(entry, Committed)), 0)


def _resumed(observer: ClusterObserver) -> int:
    """The step from which the last process has continued."""
    log = observer.logs.get(WORKER, [])
    return next((entry.step for entry in reversed(log) if isinstance(entry, Resumed)), 0)
