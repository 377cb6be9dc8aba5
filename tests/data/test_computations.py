from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from forged.data.computations import Computations


class Running:
    """Computations that end when the test lets them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.gate = anyio.Event()

    async def __call__(self, work: Callable[[], Any]) -> Any:
        self.names.append(work())
        await self.gate.wait()
        return self.names[-1]


async def test_computations_of_one_job_take_turns_and_others_run_beside_them() -> None:
    running = Running()
    computations = Computations(running, at_once_max=2)
    async with anyio.create_task_group() as tasks:
        for name in ("a1", "a2", "a3", "b1"):
            tasks.start_soon(computations.run, name[0], lambda name=name: name)
            await anyio.wait_all_tasks_blocked()
        assert running.names == ["a1", "b1"]
        running.gate.set()
    assert running.names == ["a1", "b1", "a2", "a3"]
    assert not computations._turns


async def test_no_more_computations_run_than_the_limit() -> None:
    running = Running()
    computations = Computations(running, at_once_max=2)
    async with anyio.create_task_group() as tasks:
        for name in "abc":
            tasks.start_soon(computations.run, name, lambda name=name: name)
            await anyio.wait_all_tasks_blocked()
        assert running.names == ["a", "b"]
        running.gate.set()


async def test_failed_computation_ends_its_turn() -> None:
    async def compute(work: Callable[[], Any]) -> Any:
        return work()

    computations = Computations(compute)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await computations.run("a", lambda: 1 // 0)
    assert await computations.run("a", lambda: 5) == 5
