from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import anyio
from anyio.abc import TaskGroup

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import WorkerId
from forged.worker.registration import HeartbeatSender, Registration
from forged.worker.worker_state.progress import TrainingProgress
from forged.worker.worker_state.session_state import SessionState
from tests.kernel_fixture import on_virtual_time, task_group
from tests.simulation.environment.loop import VirtualClock


def settings(interval_s: float) -> Mapping[str, Any]:
    return ElasticTrainingConfig(worker_heartbeat_timeout_ms=round(3000 * interval_s)).to_settings()


class HeartbeatFixture:
    """A worker that sends heartbeats, and the times and intervals of those that were sent."""

    def __init__(self, interval_s: float, tasks: TaskGroup) -> None:
        self.beats: list[tuple[float, float]] = []
        self.leaving: list[bool] = []
        self.state = SessionState(WorkerId("me", "host", 1), TrainingProgress(0.0, 0))
        self.state.follow_settings(settings(interval_s))
        clock = VirtualClock(asyncio.get_running_loop())
        self.heartbeat = HeartbeatSender(self.state, cast("Registration", self), clock)
        self._began_at = anyio.current_time()
        tasks.start_soon(self.heartbeat.run)

    def beat(
        self, step: int, marks: int, interval_s: float, *, last_step_done: bool, is_done: bool, meeting: str
    ) -> None:
        self.beats.append((round(anyio.current_time() - self._began_at, 3), interval_s))
        self.leaving.append(last_step_done)

    def follow(self, interval_s: float) -> None:
        self.state.follow_settings(settings(interval_s))
        self.heartbeat.follow_settings()


@on_virtual_time
async def test_first_heartbeat_is_sent_at_once_and_the_next_after_each_interval() -> None:
    async with task_group() as tasks:
        fixture = HeartbeatFixture(3.0, tasks)
        await anyio.sleep(7.0)
    assert fixture.beats == [(0.0, 3.0), (3.0, 3.0), (6.0, 3.0)]


@on_virtual_time
async def test_new_interval_takes_effect_and_is_sent_at_once() -> None:
    async with task_group() as tasks:
        fixture = HeartbeatFixture(100.0, tasks)
        await anyio.sleep(10.0)
        fixture.follow(1.0)
        await anyio.sleep(1.5)
    assert fixture.beats == [(0.0, 100.0), (10.0, 1.0), (11.0, 1.0)]


@on_virtual_time
async def test_settings_with_the_same_interval_send_no_heartbeat() -> None:
    async with task_group() as tasks:
        fixture = HeartbeatFixture(100.0, tasks)
        await anyio.sleep(10.0)
        fixture.follow(100.0)
        await anyio.sleep(10.0)
    assert fixture.beats == [(0.0, 100.0)]


@on_virtual_time
async def test_heartbeat_tells_that_the_worker_is_leaving() -> None:
    async with task_group() as tasks:
        fixture = HeartbeatFixture(100.0, tasks)
        await anyio.sleep(1.0)
        fixture.state.drain.is_leaving = True
        fixture.heartbeat.beat_now()
    assert fixture.leaving == [False, True]
