from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from forged.client import ForgedClient
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.messages import WorkerJoined, WorkerLeft
from forged.elastic.model import ClusterTopology, WorkerId
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.kernel.messages import Gap
from forged.worker import drain
from forged.worker.data.usage_report import UsageReport
from forged.worker.drain import LOOK_INTERVAL_S, QUESTION_INTERVAL_S, Drain, Leaving
from forged.worker.errors import WorldIncomplete
from forged.worker.mesh import Mesh
from forged.worker.rescaler import Rescaler
from forged.worker.worker_state.progress import TrainingProgress
from forged.worker.worker_state.session_state import SessionState
from tests.client.daemon_runner import DaemonRunner
from tests.client.proxy import Proxy
from tests.kernel_fixture import on_virtual_time, task_group
from tests.telemetry.recording_log import RecordingLog
from tests.worker.meshes import until
from tests.worker.trainers import JOB, Trainer, TrainerGroup, group_at, past

CONFIG = ElasticTrainingConfig(leave_timeout_ms=60_000, reconnect_grace_ms=15_000)
ME = WorkerId("me", "host", 1)
WISH, QUESTION, LEAVE = "the spot price", "may it leave now?", "leave"
NEEDED = Gap(1, 2, "anything may have happened")
RELEASED = WorkerLeft("other", "it is done")


class DrainFixture:
    """A worker that may be needed, and a daemon that may be there."""

    def __init__(self) -> None:
        self.state = SessionState(ME, TrainingProgress(0.0, 0))
        self.follow(CONFIG)
        self.has_daemon = True
        self.aborted: list[str] = []
        """Why its collective was aborted."""
        self.answers: list[bool | ForgedError] = [False]
        """The daemon's answers in turn; the last one is repeated. Without one it does not answer."""
        self.asked: list[str] = []
        """The announcement, and then the questions."""
        self.takers = 0
        """At so many looks another worker has taken something."""
        self.wakes: list[float] = []
        self.log = RecordingLog()
        self.beats: list[bool] = []
        """Whether each heartbeat said that the worker is leaving."""
        self.serves = 0
        """How many tasks take part in rescales while the script saves."""
        self.serving_fails: Exception | None = None
        self.serving_ends_s = 0.0
        """How long such a task takes to end when it is cancelled."""
        self.is_bound = True
        self.state.wake = self._wake  # type: ignore[method-assign]
        self.state.current_world.abort_collective = self._abort  # type: ignore[method-assign]

    @property
    def is_bound(self) -> bool:
        return ME in self.state.view.topology

    @is_bound.setter
    def is_bound(self, is_bound: bool) -> None:
        self.state.view.topology = ClusterTopology((ME,) if is_bound else (), 1)

    def hold_up_world(self, holds_up: bool) -> None:
        """Whether the other workers wait for this one to stop."""
        self.state.view.is_attempt_running = holds_up

    def meet(self, mark: int | None) -> None:
        """Wait in the collective of this mark, or in none."""
        self.state.current_world.marks = mark or 0
        self.state.current_world._is_meeting = mark is not None

    def follow(self, config: ElasticTrainingConfig) -> None:
        self.state.follow_settings(config.to_settings())

    @asynccontextmanager
    async def told_to_drain(self, wish: str | None = WISH) -> AsyncIterator[Drain]:
        """Be told to drain, more than once."""
        self.state.view.draining = wish
        async with task_group() as tasks:
            anything: Any = self
            usage = UsageReport(self.state, anything, anything, self.log)
            drain = self.drain = Drain(self.state, anything, anything, anything, usage, tasks, lambda: 0.5, self.log)
            drain.begin_if_told()
            drain.begin_if_told()
            yield drain

    async def drained(self, config: ElasticTrainingConfig = CONFIG) -> float:
        """Be told to drain, and wait until the worker may leave; returns how long that took."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        self.follow(config)
        async with self.told_to_drain():
            while not self.state.is_leave_due:
                await anyio.sleep(LOOK_INTERVAL_S / 10)
        return loop.time() - began_at

    def steps(self, count: int) -> None:
        """Be after so many steps."""
        self.state.progress.step = count

    async def start_leaving(self) -> Leaving:
        return await self.drain.start_leaving(cast("Rescaler", self))

    # The daemon.

    @property
    def is_connected(self) -> bool:
        return self.has_daemon

    async def announce_leave(self, wish: str) -> bool:
        return await self._answer(wish)

    async def may_leave(self) -> bool:
        return await self._answer(QUESTION)

    async def leave_if_it_may(self, reason: str, step: int) -> bool:
        return await self._answer(LEAVE)

    async def _answer(self, asked: str) -> bool:
        self.asked.append(asked)
        if not self.answers:
            await anyio.sleep_forever()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        await anyio.sleep(0.01)
        if isinstance(answer, ForgedError):
            raise answer
        return answer

    # The mesh, the heartbeat and the rescaler.

    def has_given(self) -> bool:
        has_given, self.takers = self.takers > 0, max(0, self.takers - 1)
        return has_given

    def beat_now(self) -> None:
        self.beats.append(self.state.drain.is_leaving)

    async def advance(self, *, takes_state: bool) -> None:
        assert not takes_state
        self.serves += 1
        try:
            await anyio.lowlevel.checkpoint()
            if self.serving_fails is not None:
                raise self.serving_fails
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(self.serving_ends_s)
            self.serves -= 1

    def _abort(self, why: str) -> None:
        self.aborted.append(why)
        self.meet(None)

    def _wake(self) -> None:
        self.wakes.append(asyncio.get_running_loop().time())


@on_virtual_time
async def test_worker_that_does_not_drain_sends_no_leave_query() -> None:
    fixture = DrainFixture()
    async with fixture.told_to_drain(None):
        await anyio.sleep(1000)
    assert (fixture.state.is_leave_due, fixture.state.drain.is_overdue, fixture.wakes, fixture.asked) == (
        False,
        False,
        [],
        [],
    )


def test_draining_worker_in_no_world_may_leave() -> None:
    fixture = DrainFixture()
    fixture.state.view.draining = WISH
    assert not fixture.state.is_leave_due
    fixture.is_bound = False
    assert fixture.state.is_leave_due


@on_virtual_time
async def test_draining_worker_in_a_world_may_leave_when_the_daemon_says_so() -> None:
    fixture = DrainFixture()
    fixture.answers = [True]
    assert await fixture.drained() < 1
    assert fixture.asked == [WISH]
    assert fixture.drain.reason == WISH


@on_virtual_time
async def test_needed_worker_announces_once_and_asks_again_and_again() -> None:
    fixture = DrainFixture()
    fixture.answers = [False, False, False, True]
    assert round(await fixture.drained()) == 3 * QUESTION_INTERVAL_S
    assert fixture.asked == [WISH, *[QUESTION] * 3]


@on_virtual_time
async def test_overdue_worker_stays_for_a_taker_that_comes_before_it_has_left() -> None:
    fixture = DrainFixture()
    fixture.follow(ElasticTrainingConfig(leave_timeout_ms=500))
    async with fixture.told_to_drain() as drain:
        await anyio.sleep(1)
        assert fixture.state.is_leave_due
        assert drain.reason == "the spot price; no worker has taken over its state or shards for 0.5 s"
        fixture.hold_up_world(True)
        await anyio.sleep(1)
        assert not await drain.finish_leaving()
        assert drain.reason == WISH


@on_virtual_time
async def test_overdue_worker_leaves_without_asking() -> None:
    fixture = DrainFixture()
    fixture.follow(ElasticTrainingConfig(leave_timeout_ms=500))
    async with fixture.told_to_drain() as drain:
        await anyio.sleep(1)
        assert await drain.finish_leaving()
    assert LEAVE not in fixture.asked


@on_virtual_time
async def test_permission_ends_with_a_fact_after_which_the_worker_may_be_needed() -> None:
    fixture = DrainFixture()
    fixture.answers = [True, False]
    async with fixture.told_to_drain() as drain:
        await anyio.sleep(0.1)
        assert fixture.state.is_leave_due
        drain.hear(NEEDED)
        assert not fixture.state.is_leave_due, "until the daemon has been asked again"
        await anyio.sleep(0.1)
        assert not fixture.state.is_leave_due
    assert len(fixture.asked) == 2


@on_virtual_time
async def test_daemon_decides_at_the_moment_of_leaving() -> None:
    fixture = DrainFixture()
    fixture.answers = [True, True]
    async with fixture.told_to_drain() as drain:
        await anyio.sleep(50)
        assert (fixture.state.is_leave_due, len(fixture.asked)) == (True, 1)
        assert await drain.finish_leaving()
    assert fixture.asked == [WISH, LEAVE]


@on_virtual_time
async def test_worker_kept_at_the_moment_of_leaving_asks_again() -> None:
    fixture = DrainFixture()
    fixture.answers = [True, False, False, True]
    async with fixture.told_to_drain() as drain:
        await anyio.sleep(50)
        assert not await drain.finish_leaving()
        assert not fixture.state.is_leave_due
        await anyio.sleep(2 * QUESTION_INTERVAL_S)
        assert fixture.state.is_leave_due
    assert fixture.asked == [WISH, LEAVE, QUESTION, QUESTION]


@on_virtual_time
async def test_kept_worker_may_not_leave_because_it_is_in_no_world() -> None:
    fixture = DrainFixture()
    fixture.is_bound, fixture.answers = False, [False]
    async with fixture.told_to_drain() as drain:
        assert fixture.state.is_leave_due
        assert not await drain.finish_leaving()
        await anyio.sleep(50)
        assert not fixture.state.is_leave_due
        fixture.answers = [True]
        await anyio.sleep(2 * QUESTION_INTERVAL_S)
        assert fixture.state.is_leave_due
    assert fixture.asked.count(LEAVE) == 1


@pytest.mark.parametrize("has_daemon", [True, False])
@on_virtual_time
async def test_worker_leaves_without_an_answer_after_the_reconnect_grace(has_daemon: bool) -> None:
    fixture = DrainFixture()
    fixture.answers = [True]
    loop = asyncio.get_running_loop()
    async with fixture.told_to_drain() as drain:
        await anyio.sleep(1)
        fixture.answers, fixture.has_daemon, began_at = [], has_daemon, loop.time()
        assert await drain.finish_leaving()
        assert loop.time() - began_at == pytest.approx(15, abs=1)


@on_virtual_time
async def test_cancelled_leave_request_does_not_count_as_a_missing_daemon() -> None:
    fixture = DrainFixture()
    fixture.follow(ElasticTrainingConfig(leave_timeout_ms=None))
    async with fixture.told_to_drain() as drain:
        await anyio.sleep(1)
        fixture.answers = []
        with anyio.move_on_after(1):
            await drain.finish_leaving()
        fixture.answers = [False]
        await anyio.sleep(100)
        assert not fixture.state.drain.is_overdue


@on_virtual_time
async def test_daemon_that_records_nothing_counts_as_missing() -> None:
    fixture = DrainFixture()
    fixture.answers = []
    assert round(await fixture.drained()) == 15
    assert fixture.drain.reason == "the spot price; the daemon recorded nothing for 15 s"


@on_virtual_time
async def test_answer_older_than_a_change_does_not_count() -> None:
    fixture = DrainFixture()
    fixture.answers = [True, False]
    async with fixture.told_to_drain() as drain:
        await anyio.sleep(0.005)
        drain.hear(NEEDED)
        await anyio.sleep(0.1)
        assert not fixture.state.is_leave_due
    assert len(fixture.asked) == 2


@on_virtual_time
async def test_worker_that_may_leave_does_not_ask_when_other_workers_leave() -> None:
    fixture = DrainFixture()
    fixture.answers = [True]
    async with fixture.told_to_drain() as drain:
        await anyio.sleep(1)
        for _ in range(100):
            drain.hear(RELEASED)
            await anyio.sleep(1)
        assert fixture.state.is_leave_due
    assert len(fixture.asked) == 1


@on_virtual_time
async def test_worker_in_no_world_asks_nothing_until_a_world_has_it() -> None:
    fixture = DrainFixture()
    async with fixture.told_to_drain() as drain:
        await anyio.sleep(1)
        fixture.is_bound, asked = False, len(fixture.asked)
        for _ in range(100):
            drain.hear(RELEASED)
            await anyio.sleep(1)
        assert len(fixture.asked) == asked
        fixture.is_bound = True
        await anyio.sleep(2 * QUESTION_INTERVAL_S)
        assert len(fixture.asked) > asked, "no fact said that the worker is needed"


@on_virtual_time
async def test_needed_worker_asks_when_fewer_workers_may_need_it() -> None:
    fixture = DrainFixture()
    fixture.answers = [False, True]
    async with fixture.told_to_drain() as drain:
        await anyio.sleep(0.1)
        assert not fixture.state.is_leave_due
        drain.hear(RELEASED)
        await anyio.sleep(0.1)
        assert fixture.state.is_leave_due


@on_virtual_time
async def test_worker_leaves_if_its_leave_query_is_refused() -> None:
    fixture = DrainFixture()
    fixture.answers = [RequestRefused("job_unknown", "no such job")]
    assert await fixture.drained() < 1


class TestTimeouts:
    @on_virtual_time
    async def test_time_does_not_run_while_the_other_workers_wait_for_its_step(self) -> None:
        fixture = DrainFixture()
        fixture.hold_up_world(True)

        async def end_the_step() -> None:
            await anyio.sleep(600)
            fixture.hold_up_world(False)

        async with task_group() as tasks:
            tasks.start_soon(end_the_step)
            assert round(await fixture.drained()) == 660

    @on_virtual_time
    async def test_collective_that_other_ranks_do_not_join_is_aborted(self) -> None:
        fixture = DrainFixture()
        fixture.meet(7)

        async def change() -> None:
            while True:
                await anyio.sleep(50)
                fixture.drain.hear(NEEDED)

        async with task_group() as tasks:
            tasks.start_soon(change)
            assert round(await fixture.drained()) == 60
        why = "the other ranks did not join a collective for 60 s"
        assert fixture.aborted == [f"me leaves without waiting further: {why}"]
        assert fixture.drain.reason == f"{WISH}; {why}"

    @on_virtual_time
    async def test_worker_that_has_aborted_a_step_leaves_however_long_the_step_takes_to_end(self) -> None:
        fixture = DrainFixture()
        fixture.follow(ElasticTrainingConfig(leave_timeout_ms=5000))
        fixture.meet(7)
        async with fixture.told_to_drain():
            await anyio.sleep(6)
            assert fixture.aborted
            fixture.hold_up_world(True)
            await anyio.sleep(600)
            assert fixture.state.is_leave_due

    @on_virtual_time
    async def test_no_collective_is_aborted_while_steps_go_on_or_other_workers_take_something(self) -> None:
        fixture = DrainFixture()
        fixture.hold_up_world(True)

        async def step() -> None:
            for mark in range(20):
                fixture.meet(mark)
                await anyio.sleep(30)
            fixture.takers = round(600 / LOOK_INTERVAL_S)
            await anyio.sleep(600)
            fixture.meet(None)

        async with fixture.told_to_drain(), task_group() as tasks:
            tasks.start_soon(step)
            await anyio.sleep(1300)
            assert (fixture.aborted, fixture.state.is_leave_due) == ([], False)

    @on_virtual_time
    async def test_each_change_of_the_world_starts_the_leave_timeout_anew(self) -> None:
        fixture = DrainFixture()

        async def change() -> None:
            for _ in range(10):
                await anyio.sleep(50)
                fixture.drain.hear(NEEDED)

        async with task_group() as tasks:
            tasks.start_soon(change)
            assert round(await fixture.drained()) == 560

    @on_virtual_time
    async def test_worker_leaves_when_no_other_worker_takes_over_in_time(self) -> None:
        fixture = DrainFixture()
        assert round(await fixture.drained()) == 60
        assert fixture.drain.reason == "the spot price; no worker has taken over its state or shards for 60 s"
        fixture.is_bound = False
        assert fixture.drain.reason == WISH

    @on_virtual_time
    async def test_worker_stays_for_as_long_as_other_workers_take_from_it(self) -> None:
        fixture = DrainFixture()
        fixture.takers = round(600 / LOOK_INTERVAL_S)
        assert round(await fixture.drained()) == 600 + 60

    @on_virtual_time
    async def test_missing_daemon_is_waited_for_during_the_reconnect_grace(self) -> None:
        fixture = DrainFixture()
        fixture.has_daemon = False
        assert round(await fixture.drained()) == 15
        assert fixture.drain.reason == "the spot price; there was no daemon for 15 s"

    @on_virtual_time
    async def test_daemon_that_was_back_has_the_whole_grace_again(self) -> None:
        fixture = DrainFixture()
        fixture.has_daemon = False

        async def come_and_go() -> None:
            await anyio.sleep(14)
            fixture.has_daemon = True
            await anyio.sleep(10)
            fixture.has_daemon = False

        async with task_group() as tasks:
            tasks.start_soon(come_and_go)
            took_s = await fixture.drained()
            assert abs(took_s - (14 + 10 + 15)) <= 2 * LOOK_INTERVAL_S

    @on_virtual_time
    async def test_without_a_reconnect_grace_a_connected_daemon_is_waited_for(self) -> None:
        fixture = DrainFixture()
        assert round(await fixture.drained(ElasticTrainingConfig(reconnect_grace_ms=0, leave_timeout_ms=5000))) == 5

    @on_virtual_time
    async def test_without_a_leave_timeout_the_worker_stays_as_long_as_there_is_a_daemon(self) -> None:
        fixture = DrainFixture()
        config = ElasticTrainingConfig(leave_timeout_ms=None)

        async def go_away() -> None:
            await anyio.sleep(3000)
            fixture.has_daemon = False

        async with task_group() as tasks:
            tasks.start_soon(go_away)
            assert round(await fixture.drained(config)) == 3015

    @on_virtual_time
    async def test_changed_settings_apply_to_a_worker_that_waits_already(self) -> None:
        fixture = DrainFixture()

        async def change() -> None:
            await anyio.sleep(50)
            fixture.follow(ElasticTrainingConfig(leave_timeout_ms=100_000))

        async with task_group() as tasks:
            tasks.start_soon(change)
            assert round(await fixture.drained()) == 100
        assert fixture.drain.reason == "the spot price; no worker has taken over its state or shards for 100 s"


class TestWhileTheScriptSaves:
    """The worker has trained its last step, in no world, and the daemon decides when it leaves."""

    @asynccontextmanager
    async def _scene(self, *, may_leave: bool = True) -> AsyncIterator[DrainFixture]:
        fixture = DrainFixture()
        fixture.answers = [may_leave]
        fixture.steps(7)
        async with fixture.told_to_drain():
            await anyio.sleep(1)
            yield fixture

    @on_virtual_time
    async def test_worker_takes_part_in_rescales_until_it_leaves(self) -> None:
        async with self._scene() as fixture:
            fixture.state.drain.may_leave = False
            assert await fixture.start_leaving() == Leaving(WISH, True)
            await anyio.sleep(1)
            assert (fixture.serves, fixture.state.drain.is_leaving) == (1, True)
            assert await fixture.drain.finish_leaving()
            assert (fixture.serves, fixture.state.drain.is_leaving, fixture.beats) == (0, True, [True])

    @on_virtual_time
    async def test_kept_worker_tells_its_subscribers_again_only_after_further_steps(self) -> None:
        async with self._scene(may_leave=False) as fixture:
            await fixture.start_leaving()
            assert not await fixture.drain.finish_leaving()
            assert (fixture.state.drain.is_leaving, fixture.beats) == (False, [True, False])
            assert not (await fixture.start_leaving()).is_news
            assert not await fixture.drain.finish_leaving()
            fixture.steps(8)
            assert (await fixture.start_leaving()).is_news

    @on_virtual_time
    async def test_leaving_is_reported_again_to_an_interrupted_script(self) -> None:
        async with self._scene() as fixture:
            assert (await fixture.start_leaving()).is_news
            assert (await fixture.start_leaving()).is_news
            await fixture.drain.finish_leaving()
            assert not (await fixture.start_leaving()).is_news

    @on_virtual_time
    async def test_interrupted_script_keeps_one_task_that_takes_part_in_rescales(self) -> None:
        async with self._scene(may_leave=False) as fixture:
            for _ in range(2):
                await fixture.start_leaving()
                await anyio.sleep(1)
            assert (fixture.serves, fixture.beats) == (1, [True])

    @on_virtual_time
    async def test_cancelled_leaving_is_announced_once_and_can_begin_again(self) -> None:
        async with self._scene(may_leave=False) as fixture:
            await fixture.start_leaving()
            await anyio.sleep(1)
            await fixture.drain.cancel_leaving()
            assert (fixture.serves, fixture.state.drain.is_leaving, fixture.beats) == (0, False, [True, False])
            await fixture.drain.cancel_leaving()
            assert fixture.beats == [True, False]
            await fixture.start_leaving()
            await anyio.sleep(1)
            assert fixture.serves == 1

    @on_virtual_time
    async def test_worker_leaving_again_after_an_interrupted_cancellation_takes_part_in_rescales(self) -> None:
        async with self._scene(may_leave=False) as fixture:
            fixture.serving_ends_s = 5.0
            await fixture.start_leaving()
            await anyio.sleep(1)
            with anyio.move_on_after(1):
                await fixture.drain.cancel_leaving()
            assert (fixture.serves, fixture.state.drain.is_leaving) == (1, False)
            await fixture.start_leaving()
            await anyio.sleep(10)
            assert fixture.serves == 1

    @pytest.mark.parametrize("error", [Unavailable("no", "it changed size"), RuntimeError("it changed size")])
    @on_virtual_time
    async def test_error_while_giving_is_logged_and_does_not_keep_the_worker(self, error: Exception) -> None:
        async with self._scene() as fixture:
            fixture.state.drain.may_leave, fixture.serving_fails = False, error
            await fixture.start_leaving()
            await anyio.sleep(1)
            (said,) = fixture.log.of("this worker can no longer give its state or shards to other workers")
            assert "it changed size" in said["reason"]
            assert await fixture.drain.finish_leaving()


class TestHandingOverTheState:
    """A joiner waits, and all workers with the state are told to drain; with a real daemon."""

    @pytest.fixture(params=[True, False], ids=["synchronous", "asynchronous"])
    async def group(self, request: pytest.FixtureRequest, runner: DaemonRunner) -> AsyncIterator[TrainerGroup]:
        # No joiner is taken in before one is needed.
        settings = {"stability_window_ms": 600_000, "use_synchronous_rescaling": request.param}
        async with group_at(runner.endpoint, **settings) as group:
            yield group

    async def _train(self, group: TrainerGroup, client: ForgedClient, *names: str) -> None:
        await self._register(group, client, *names)
        await client.rescale_job(JOB)
        await group.world_of(*names, steps=5)

    async def _register(self, group: TrainerGroup, client: ForgedClient, *names: str) -> None:
        async with client.facts(WorkerJoined, jobs=[JOB]) as joined:
            group.start(*names)
            for _ in names:
                await anext(joined)

    async def _is_continued_by(self, group: TrainerGroup, name: str) -> None:
        await group.until(lambda: bool(group[name].committed_steps))
        assert group[name].committed_steps[0].step >= 5
        await group.finish(name)

    async def test_joiner_takes_the_state_of_a_fully_draining_world(
        self, group: TrainerGroup, client: ForgedClient
    ) -> None:
        await self._train(group, client, "a")
        go_on = await held_in_a_step(group["a"])
        await client.drain_worker(JOB, "a")
        await self._register(group, client, "b")
        go_on.set()
        assert await group.over("a") == [None]
        await self._is_continued_by(group, "b")

    async def test_remaining_worker_may_die_before_the_draining_one_has_left(
        self, runner: DaemonRunner, group: TrainerGroup, client: ForgedClient
    ) -> None:
        await self._train(group, client, "a", "b")
        await self._register(group, client, "c")
        await held_in_a_step(group["b"])
        a, b = group["a"].worker, group["b"].member
        a.drain("the spot price")
        cluster = runner.daemon.elastic.coordinators[JOB]
        await until(lambda: cluster.members["a"].drain_reason is not None)
        for link in list(b._mesh._links):
            link.abort()
        await until(lambda: a._state.current_world.world is None)
        await client.evict_worker(JOB, "b")
        assert await group.over("a") == [None]
        await self._is_continued_by(group, "c")

    async def test_joiner_gets_the_state_while_the_only_worker_saves(
        self, runner: DaemonRunner, group: TrainerGroup, client: ForgedClient
    ) -> None:
        await self._train(group, client, "a")
        saves, saved = asyncio.Event(), asyncio.Event()

        async def save(reason: str) -> None:
            saves.set()
            await saved.wait()

        group["a"].worker.leaving.subscribe(save)
        group["a"].worker.drain("the night")
        await saves.wait()
        await self._register(group, client, "b")
        cluster = runner.daemon.elastic.coordinators[JOB]
        await until(lambda: "b" in cluster.membership.world)
        assert "a" in cluster.members, "it gives away what it has while it saves"
        saved.set()
        assert await group.over("a") == [None]
        await self._is_continued_by(group, "b")

    @pytest.mark.parametrize("how", ["is put out", "goes"])
    @pytest.mark.parametrize("synchronous", [True, False])
    async def test_joiner_gets_the_state_from_a_saving_worker_when_the_next_world_has_ended(
        self, how: str, synchronous: bool, runner: DaemonRunner, client: ForgedClient
    ) -> None:
        async with group_at(runner.endpoint, use_synchronous_rescaling=synchronous) as group:
            await self._train(group, client, "a", "b")
            saves, saved = asyncio.Event(), asyncio.Event()

            async def save(reason: str) -> None:
                saves.set()
                await saved.wait()

            group["a"].worker.leaving.subscribe(save)
            group["a"].worker.drain("the spot price")
            await saves.wait()
            await group.world_of("b")
            if how == "goes":
                group["b"].worker.drain("the spot price, too")
            else:
                await client.evict_worker(JOB, "b", "it is bad")
            await group.over("b")
            group.start("c")
            await group.world_of("c")
            saved.set()
            assert await group.over("a") == [None]
            await self._is_continued_by(group, "c")

    async def test_remaining_worker_may_die_while_the_draining_one_saves(
        self, group: TrainerGroup, client: ForgedClient
    ) -> None:
        await self._train(group, client, "a", "b")
        await self._register(group, client, "c")
        reasons = []

        async def save(reason: str) -> None:
            reasons.append(reason)
            await client.evict_worker(JOB, "b")

        group["a"].worker.leaving.subscribe(save)
        group["a"].worker.drain("the spot price")
        assert await group.over("a") == [None]
        await self._is_continued_by(group, "c")
        assert reasons == ["the spot price"], "what it saved is the newest"

    async def test_a_connection_that_breaks_at_the_wrong_moment_changes_nothing(
        self, runner: DaemonRunner, tmp_path: Path, client: ForgedClient
    ) -> None:
        proxy = Proxy(tmp_path / "p", runner.config.socket)
        async with group_at(proxy.endpoint, stability_window_ms=600_000) as group:
            await self._train(group, client, "a")
            group.endpoints = [runner.endpoint]
            await self._register(group, client, "b")
            go_on = await held_in_a_step(group["a"])
            a = group["a"].worker
            proxy.cut()
            while group["a"].member._client.connected:
                await asyncio.sleep(0)
            a.drain("it received SIGTERM")
            go_on.set()
            assert await group.over("a") == [None]
            await self._is_continued_by(group, "b")
        await proxy.close()

    async def test_step_longer_than_the_leave_timeout_does_not_make_the_worker_overdue(
        self, runner: DaemonRunner, client: ForgedClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks = 0
        has_given = Mesh.has_given

        def look(mesh: Mesh) -> bool:
            nonlocal looks
            looks += 1
            return has_given(mesh)

        monkeypatch.setattr(Mesh, "has_given", look)
        monkeypatch.setattr(drain, "LOOK_INTERVAL_S", 0.01)
        async with group_at(runner.endpoint, stability_window_ms=600_000, leave_timeout_ms=200) as group:
            await self._train(group, client, "a")
            await self._register(group, client, "b")
            go_on = await held_in_a_step(group["a"])
            await client.drain_worker(JOB, "a")
            # So many looks take twice the leave timeout.
            await until(lambda: looks > 40)
            go_on.set()
            assert await group.over("a") == [None]
            await self._is_continued_by(group, "b")

    async def test_last_of_several_draining_workers_gives_the_state(
        self, group: TrainerGroup, client: ForgedClient
    ) -> None:
        await self._train(group, client, "a", "c")
        await self._register(group, client, "b")
        for name in "ac":
            group[name].worker.drain("the spot price")
        assert await group.over("a", "c") == [None, None]
        await self._is_continued_by(group, "b")

    async def test_drain_completes_when_first_world_entry_fails(
        self, group: TrainerGroup, client: ForgedClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await self._train(group, client, "a")
        enter, failed = Mesh.enter, asyncio.Event()

        async def fail_once(mesh: Mesh, *arguments: Any) -> Any:
            if mesh is group["a"].member._mesh and not failed.is_set():
                failed.set()
                raise WorldIncomplete("a packet was lost", "b")
            return await enter(mesh, *arguments)

        monkeypatch.setattr(Mesh, "enter", fail_once)
        await self._register(group, client, "b")
        group["a"].worker.drain("its host is needed")
        assert await group.over("a") == [None]
        await self._is_continued_by(group, "b")

    async def test_worker_without_a_successor_leaves_at_once(self, group: TrainerGroup, client: ForgedClient) -> None:
        await self._train(group, client, "a")
        group["a"].worker.drain("there is no other worker")
        assert await group.over("a") == [None]
        assert [fact.reason for fact in await past(client, WorkerLeft)] == ["there is no other worker"]


async def held_in_a_step(trainer: Trainer) -> asyncio.Event:
    """Wait until it is in a step, and stays there until the event."""
    go_on, inside = asyncio.Event(), asyncio.Event()

    async def before(step: int) -> None:
        inside.set()
        await go_on.wait()

    trainer.before_step = before
    await inside.wait()
    return go_on
