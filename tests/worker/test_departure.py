from __future__ import annotations

import asyncio

import anyio

from forged.elastic.config import ElasticTrainingConfig
from forged.log import SILENT
from forged.worker.departure import LOOK_INTERVAL_S, Departure
from forged.worker.standing import Standing
from tests.spine import task_group, virtual

CONFIG = ElasticTrainingConfig(leave_timeout_ms=60_000, reconnect_grace_ms=15_000)


class Scene:
    """A worker that may be needed, and a daemon that may be there."""

    def __init__(self) -> None:
        self.standing = Standing("me")
        self.config = CONFIG
        self.is_needed = True
        self.has_daemon = True
        self.visits = 0
        """To so many looks somebody has come."""
        self.wakes: list[float] = []
        self.departure = Departure(self.standing, lambda: self.is_needed, self._wake, SILENT)

    async def drained(self, config: ElasticTrainingConfig = CONFIG) -> float:
        """Be told to go, and wait until that is due; how long it took."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        self.config, self.standing.draining = config, "the spot price"
        async with task_group() as tasks:
            self.departure.limit(lambda: self.config, lambda: self.has_daemon, self._has_given, tasks)
            self.departure.limit(lambda: self.config, lambda: self.has_daemon, self._has_given, tasks)
            while not self.wakes:
                await anyio.sleep(LOOK_INTERVAL_S / 10)
        assert self.departure.is_due
        return self.wakes[0] - began_at

    def _has_given(self) -> bool:
        has_given, self.visits = self.visits > 0, max(0, self.visits - 1)
        return has_given

    def _wake(self) -> None:
        self.wakes.append(asyncio.get_running_loop().time())


@virtual
async def test_who_may_stay_is_not_due_and_its_waiting_has_no_end() -> None:
    scene = Scene()
    async with task_group() as tasks:
        scene.departure.limit(lambda: CONFIG, lambda: False, lambda: False, tasks)
        await anyio.sleep(1000)
    assert (scene.departure.is_due, scene.departure.is_overdue, scene.wakes) == (False, False, [])


def test_who_is_told_to_go_is_due_when_nobody_needs_it() -> None:
    scene = Scene()
    scene.standing.draining = "the spot price"
    assert not scene.departure.is_due
    scene.is_needed = False
    assert scene.departure.is_due
    assert scene.departure.reason == "the spot price"


@virtual
async def test_others_have_so_long_to_take_over_what_it_holds() -> None:
    scene = Scene()
    assert round(await scene.drained()) == 60
    assert scene.departure.reason == "the spot price; nobody came for what it holds for 60 s"
    scene.is_needed = False
    assert scene.departure.reason == "the spot price"
    assert len(scene.wakes) == 1


@virtual
async def test_who_is_come_for_stays_as_long_as_that_lasts() -> None:
    scene = Scene()
    scene.visits = round(600 / LOOK_INTERVAL_S)
    assert round(await scene.drained()) == 600 + 60


@virtual
async def test_a_daemon_that_is_away_is_waited_for_as_long_as_it_has_for_its_workers() -> None:
    scene = Scene()
    scene.has_daemon = False
    assert round(await scene.drained()) == 15
    assert scene.departure.reason == "the spot price; there was no daemon for 15 s"


@virtual
async def test_a_daemon_that_comes_back_has_its_whole_time_again() -> None:
    scene = Scene()
    scene.has_daemon = False

    async def come_and_go() -> None:
        await anyio.sleep(14)
        scene.has_daemon = True
        await anyio.sleep(10)
        scene.has_daemon = False

    async with task_group() as tasks:
        tasks.start_soon(come_and_go)
        took_s = await scene.drained()
        assert abs(took_s - (14 + 10 + 15)) <= 2 * LOOK_INTERVAL_S


@virtual
async def test_without_a_grace_a_daemon_that_is_there_is_waited_for_all_the_same() -> None:
    scene = Scene()
    assert round(await scene.drained(ElasticTrainingConfig(reconnect_grace_ms=0, leave_timeout_ms=5000))) == 5


@virtual
async def test_a_job_may_wait_for_ever_as_long_as_there_is_a_daemon() -> None:
    scene = Scene()
    config = ElasticTrainingConfig(leave_timeout_ms=None)

    async def go_away() -> None:
        await anyio.sleep(3000)
        scene.has_daemon = False

    async with task_group() as tasks:
        tasks.start_soon(go_away)
        assert round(await scene.drained(config)) == 3015


@virtual
async def test_other_settings_hold_for_who_waits_already() -> None:
    scene = Scene()

    async def change() -> None:
        await anyio.sleep(50)
        scene.config = ElasticTrainingConfig(leave_timeout_ms=100_000)

    async with task_group() as tasks:
        tasks.start_soon(change)
        assert round(await scene.drained()) == 100
    assert scene.departure.reason == "the spot price; nobody came for what it holds for 100 s"
