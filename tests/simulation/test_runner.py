from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from tests.simulation import runner
from tests.simulation.environment.loop import run
from tests.simulation.runner import Kind, simulate_seed


def loops(seed: int, _watch: Callable[[Any], None]) -> None:
    """A simulation with a task that never yields."""

    async def ask() -> None:
        while True:
            try:
                anyio.current_time()
            except Exception:  # noqa: BLE001 - it is what this is about
                continue

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)

    run(main, seed)


def test_endless_loop_is_reported_with_seed_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CPU_S_MAX", 0.2)
    monkeypatch.setitem(runner.SIMULATE, Kind.ELASTIC, loops)
    outcome = simulate_seed(7, kind=Kind.ELASTIC)
    assert outcome.seed == 7
    assert "a loop never yields" in outcome.error
    assert "in ask" in outcome.error
