"""A training script with an event loop of its own: the worker lives on it, beside whatever else the script does."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from forged.client import ElasticWorker
from forged.elastic.config import ElasticTrainingConfig
from tests.processes.worker_script import (
    ARMED,
    COMPUTING_S,
    ENOUGH,
    FOREVER,
    JOB,
    Account,
    Due,
    hold_the_gil,
    say,
)
from tests.worker.crew import advance


def fork() -> None:
    """Have a child that lives until nobody writes to it any more, as one that loads data may."""
    if child := os.fork():
        say(child=child)
        return
    os.close(sys.stdout.fileno())
    os.read(sys.stdin.fileno(), 1)
    os._exit(0)


async def train(worker: ElasticWorker, is_enough: Callable[[], bool], gil_s: int, due: Due) -> None:
    """Train until somebody says that it is enough."""
    state, account = worker.state, Account(worker)
    async for step in worker.steps():
        if step == int(state["ends_at"][0]):
            break
        account.begin(step)
        if gil_s and due.hit():
            hold_the_gil(gil_s)
        with step:
            await asyncio.sleep(COMPUTING_S)
            chain = int(state["chain"][0])
            mine = np.array([1, step, chain, is_enough()], np.int64)
            count, steps, chains, ending = await worker.all_reduce(mine)
            assert (count, steps, chains) == (worker.world_size, step * count, chain * count), "the states differ"
            state["chain"][0] = advance(chain, step)
            state["ballast"] += 1
            state["ends_at"][0] = step + 1 if ending else FOREVER
    account.settle()
    async for _ in worker.steps(worker.step):
        raise AssertionError("no step is left")
    assert state["chain"][0] == account.chain_behind(worker.step)
    say(finished=worker.step)


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
        worker.state_synchronized.subscribe(lambda told: say(entered=worker.generation, at=told.current_step))
        await worker.connect(endpoint)
        fork()
        await train(worker, (directory / ENOUGH).exists, options["gil_s"], Due(1, directory / ARMED))


def main() -> None:
    """Be a worker."""
    asyncio.run(be_a_worker())
