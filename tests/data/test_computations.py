from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from forged.data.computations import Computations
from forged.shares import Holder


class Running:
    """Computations that end when the test lets them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.gate = anyio.Event()

    async def __call__(self, work: Callable[[], Any]) -> Any:
        self.names.append(work())
        await self.gate.wait()
        return self.names[-1]


def tenant(group: str) -> Holder:
    return Holder(group, group)


OPERATOR = Holder("unix:0", "unix:0", is_operator=True)


async def test_computations_of_one_job_take_turns_and_others_run_beside_them() -> None:
    running = Running()
    computations = Computations(running, at_once_max=2)
    async with anyio.create_task_group() as tasks:
        for name in ("a1", "a2", "a3", "b1"):
            tasks.start_soon(computations.run, tenant(name[0]), name[0], lambda name=name: name)
            await anyio.wait_all_tasks_blocked()
        assert running.names == ["a1", "b1"]
        running.gate.set()
    assert running.names == ["a1", "b1", "a2", "a3"]
    assert not computations._waiting
    assert not computations._running


async def test_no_more_computations_of_tenants_run_than_the_limit() -> None:
    running = Running()
    computations = Computations(running, at_once_max=2)
    async with anyio.create_task_group() as tasks:
        for name in "abc":
            tasks.start_soon(computations.run, tenant(name), name, lambda name=name: name)
            await anyio.wait_all_tasks_blocked()
        assert running.names == ["a", "b"]
        running.gate.set()


async def test_operator_has_a_place_while_tenants_use_all_of_theirs_even_for_the_same_job() -> None:
    running = Running()
    computations = Computations(running, at_once_max=2)
    async with anyio.create_task_group() as tasks:
        for name in ("a1", "b1", "a2", "b2"):
            tasks.start_soon(computations.run, tenant(name[0]), name[0], lambda name=name: name)
        tasks.start_soon(computations.run, OPERATOR, "a", lambda: "operator")
        await anyio.wait_all_tasks_blocked()
        assert running.names == ["a1", "b1", "operator"]
        running.gate.set()


async def test_free_place_goes_to_the_principal_that_uses_the_fewest() -> None:
    ended: list[str] = []
    gates = {name: anyio.Event() for name in "abcde"}

    async def compute(work: Callable[[], Any]) -> Any:
        name = work()
        await gates[name].wait()
        ended.append(name)

    computations = Computations(compute, at_once_max=2)
    async with anyio.create_task_group() as tasks:
        for name in "abcd":
            tasks.start_soon(computations.run, tenant("all jobs"), name, lambda name=name: name)
            await anyio.wait_all_tasks_blocked()
        tasks.start_soon(computations.run, tenant("e"), "e", lambda: "e")
        await anyio.wait_all_tasks_blocked()
        gates["e"].set()
        gates["a"].set()
        await anyio.wait_all_tasks_blocked()
        assert ended == ["a", "e"]
        for gate in gates.values():
            gate.set()


async def test_computation_that_is_cancelled_while_it_waits_or_runs_gives_its_place_back() -> None:
    running = Running()
    computations = Computations(running, at_once_max=1)
    async with anyio.create_task_group() as cancelled:
        for name in ("a1", "a2", "b1"):
            cancelled.start_soon(computations.run, tenant(name[0]), name[0], lambda name=name: name)
        await anyio.wait_all_tasks_blocked()
        cancelled.cancel_scope.cancel()
    running.gate.set()
    assert await computations.run(tenant("b"), "b", lambda: "b2") == "b2"
    assert not computations._waiting
    assert not computations._running
    assert not computations._places.used


async def test_failed_computation_ends_its_turn() -> None:
    async def compute(work: Callable[[], Any]) -> Any:
        return work()

    computations = Computations(compute)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await computations.run(OPERATOR, "a", lambda: 1 // 0)
    assert await computations.run(OPERATOR, "a", lambda: 5) == 5
