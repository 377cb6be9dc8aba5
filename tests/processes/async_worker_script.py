"""A training script with an event loop of its own, on which the worker runs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np

from forged.client import ElasticWorker
from forged.elastic.config import ElasticTrainingConfig
from forged.worker.steps.step_loop import Step
from tests.processes.worker_script import (
    ARMED,
    COMPUTING_S,
    FOREVER,
    JOB,
    STOP_FILE,
    Countdown,
    StepRecorder,
    agree_on_end,
    hold_gil,
    report,
    report_standstill,
)
from tests.worker.trainers import advance


def fork() -> None:
    """Fork a child, like a data loader, that lives until its input is closed."""
    if child := os.fork():
        report(child=child)
        return
    os.close(sys.stdout.fileno())
    os.read(sys.stdin.fileno(), 1)
    os._exit(0)


async def steps(worker: ElasticWorker) -> AsyncIterator[Step]:
    """The steps to the end that the workers agree on, which each of them knows before it makes the last one."""
    async for step in worker.steps():
        if worker.state["ends_at"][0] != FOREVER:
            break
        yield step
    else:
        return
    async for step in worker.steps(int(worker.state["ends_at"][0])):
        yield step


async def train(worker: ElasticWorker, is_enough: Callable[[], bool], gil_s: int, countdown: Countdown) -> None:
    """Train until the stop file exists."""
    state, recorder = worker.state, StepRecorder(worker)
    async for step in steps(worker):
        recorder.begin(step)
        if gil_s and countdown.hit():
            hold_gil(gil_s)
        with step:
            await asyncio.sleep(COMPUTING_S)
            chain = int(state["chain"][0])
            mine = np.array([1, step, chain, is_enough()], np.int64)
            count, places, chains, ending = await worker.all_reduce(mine)
            assert (count, places, chains) == (worker.world_size, step * count, chain * count), "the states differ"
            state["chain"][0] = advance(chain, step)
            state["ballast"] += 1
            agree_on_end(state, step, ending)
    recorder.record_commit()
    assert state["chain"][0] == recorder.chain_after(worker.step)
    report(finished=worker.step)


async def be_a_worker() -> None:
    """Train from the beginning to the end."""
    endpoint, name, directory, options = sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4])
    # As in the other script, so that the two may train together.
    state = {
        "chain": np.zeros(1, np.int64),
        "ends_at": np.full(1, FOREVER, np.int64),
        "ballast": np.zeros(options["ballast"], np.int64),
    }
    config = ElasticTrainingConfig(**options["config"])
    async with ElasticWorker(name, config, job=JOB, state=state) as worker:
        worker.state_synchronized.subscribe(lambda event: report(entered=worker.generation, at=event.current_step))
        worker.standstill.subscribe(report_standstill)
        await worker.connect(endpoint)
        fork()
        await train(worker, (directory / STOP_FILE).exists, options["gil_s"], Countdown(1, directory / ARMED))


def main() -> None:
    """Be a worker."""
    asyncio.run(be_a_worker())
