from __future__ import annotations

import anyio

from forged.worker.daemon.heartbeat import Heartbeat
from tests.kernel_fixture import on_virtual_time, task_group


class Said:
    """What is said, and when."""

    def __init__(self) -> None:
        self.all: list[tuple[float, float]] = []
        self._began_at = anyio.current_time()

    def beat(self, every_s: float) -> None:
        self.all.append((round(anyio.current_time() - self._began_at, 3), every_s))


@on_virtual_time
async def test_it_is_said_at_once_and_again_and_again() -> None:
    said = Said()
    async with task_group() as tasks:
        tasks.start_soon(Heartbeat(said.beat, 3.0).go_on)
        await anyio.sleep(7.0)
    assert said.all == [(0.0, 3.0), (3.0, 3.0), (6.0, 3.0)]


async def said_with_another_interval(interval_s: float, after_s: float) -> list[tuple[float, float]]:
    """What is said when it was every 100 s for 10 s, and `after_s` more have passed since it was changed."""
    said = Said()
    async with task_group() as tasks:
        heartbeat = Heartbeat(said.beat, 100.0)
        tasks.start_soon(heartbeat.go_on)
        await anyio.sleep(10.0)
        heartbeat.go_by(interval_s)
        await anyio.sleep(after_s)
    return said.all


@on_virtual_time
async def test_another_interval_holds_at_once_and_is_told_at_once() -> None:
    assert await said_with_another_interval(1.0, 1.5) == [(0.0, 100.0), (10.0, 1.0), (11.0, 1.0)]


@on_virtual_time
async def test_the_same_interval_again_changes_nothing() -> None:
    assert await said_with_another_interval(100.0, 10.0) == [(0.0, 100.0)]
