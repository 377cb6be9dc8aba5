from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from forged.client import ForgedClient
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.messages import WorkerJoined, WorkerLeft
from forged.errors import ForgedError, RequestRefused
from forged.log import SILENT
from forged.worker.drain import drain
from forged.worker.drain.drain import LOOK_INTERVAL_S, QUESTION_INTERVAL_S, Drain, Ties
from forged.worker.mesh import Mesh, WorldIncomplete
from forged.worker.worker_state.job_view import JobView
from tests.client.daemon_runner import DaemonRunner
from tests.client.proxy import Proxy
from tests.kernel_fixture import on_virtual_time, task_group
from tests.worker.crew import JOB, Crew, Trainer, crew_at, past
from tests.worker.meshes import until

CONFIG = ElasticTrainingConfig(leave_timeout_ms=60_000, reconnect_grace_ms=15_000)


class Scene:
    """A worker that may be needed, and a daemon that may be there."""

    def __init__(self) -> None:
        self.standing = JobView("me")
        self.config = CONFIG
        self.is_bound = True
        self.has_daemon = True
        self.is_waited_for = False
        self.meeting: int | None = None
        self.broken_off: list[str] = []
        self.answers: list[bool | ForgedError] = [False]
        """What the daemon says in turn; the last answer holds on. It says nothing without one."""
        self.asked: list[str] = []
        """What it is told, and then what it is asked."""
        self.visits = 0
        """To so many looks somebody has come."""
        self.wakes: list[float] = []
        ties = Ties(
            is_bound=lambda: self.is_bound,
            is_waited_for=lambda: self.is_waited_for,
            meeting=lambda: self.meeting,
            break_off=self._break_off,
            has_given=self._has_given,
            has_daemon=lambda: self.has_daemon,
            announce=self._ask,
            ask=partial(self._ask, "and now?"),
            leave=partial(self._ask, "good bye?"),
        )
        self.departure = Drain(self.standing, ties, self._wake, lambda: 0.5, SILENT)

    @asynccontextmanager
    async def told_to_go(self) -> AsyncIterator[None]:
        """Be told to go, more than once."""
        self.standing.draining = "the spot price"
        async with task_group() as tasks:
            self.departure.begin(lambda: self.config, tasks)
            self.departure.begin(lambda: self.config, tasks)
            yield

    async def drained(self, config: ElasticTrainingConfig = CONFIG) -> float:
        """Be told to go, and wait until that is due; how long it took."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        self.config = config
        async with self.told_to_go():
            while not self.departure.is_due:
                await anyio.sleep(LOOK_INTERVAL_S / 10)
        return loop.time() - began_at

    async def _ask(self, wish: str) -> bool:
        self.asked.append(wish)
        if not self.answers:
            await anyio.sleep_forever()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        await anyio.sleep(0.01)
        if isinstance(answer, ForgedError):
            raise answer
        return answer

    def _break_off(self, why: str) -> None:
        self.broken_off.append(why)
        self.meeting = None

    def _has_given(self) -> bool:
        has_given, self.visits = self.visits > 0, max(0, self.visits - 1)
        return has_given

    def _wake(self) -> None:
        self.wakes.append(asyncio.get_running_loop().time())


@on_virtual_time
async def test_who_may_stay_is_not_due_and_asks_nobody() -> None:
    scene = Scene()
    async with task_group() as tasks:
        scene.departure.begin(lambda: CONFIG, tasks)
        await anyio.sleep(1000)
    assert (scene.departure.is_due, scene.departure.is_overdue, scene.wakes, scene.asked) == (False, False, [], [])


def test_who_is_told_to_go_is_due_when_it_is_in_no_world() -> None:
    scene = Scene()
    scene.standing.draining = "the spot price"
    assert not scene.departure.is_due
    scene.is_bound = False
    assert scene.departure.is_due
    assert scene.departure.reason == "the spot price"


@on_virtual_time
async def test_who_is_in_a_world_goes_when_the_daemon_says_so() -> None:
    scene = Scene()
    scene.answers = [True]
    assert await scene.drained() < 1
    assert scene.asked == ["the spot price"]
    assert scene.departure.reason == "the spot price"


@on_virtual_time
async def test_who_is_kept_asks_again_and_again() -> None:
    scene = Scene()
    scene.answers = [False, False, False, True]
    assert round(await scene.drained()) == 3 * QUESTION_INTERVAL_S
    assert scene.asked == ["the spot price", *["and now?"] * 3], "it is said once, and asked for from then on"


@on_virtual_time
async def test_who_waits_for_nobody_any_more_and_is_here_when_somebody_comes_stays() -> None:
    scene = Scene()
    scene.config = ElasticTrainingConfig(leave_timeout_ms=500)
    async with scene.told_to_go():
        await anyio.sleep(1)
        assert scene.departure.is_due
        assert scene.departure.reason == "the spot price; nobody came for what it holds for 0.5 s"
        scene.is_waited_for = True
        await anyio.sleep(1)
        assert not await scene.departure.leave()
        assert scene.departure.reason == "the spot price"


@on_virtual_time
async def test_who_waits_for_nobody_any_more_asks_nobody_whether_it_may_go() -> None:
    scene = Scene()
    scene.config = ElasticTrainingConfig(leave_timeout_ms=500)
    async with scene.told_to_go():
        await anyio.sleep(1)
        assert await scene.departure.leave()
    assert "good bye?" not in scene.asked


@on_virtual_time
async def test_who_may_go_and_is_needed_after_all_stays() -> None:
    scene = Scene()
    scene.answers = [True, False]
    async with scene.told_to_go():
        await anyio.sleep(0.1)
        assert scene.departure.is_due
        scene.departure.reconsider(is_needed_anew=True)
        assert not scene.departure.is_due, "until the daemon has been asked again"
        await anyio.sleep(0.1)
        assert not scene.departure.is_due
    assert len(scene.asked) == 2


@on_virtual_time
async def test_whether_it_goes_is_settled_in_that_moment() -> None:
    scene = Scene()
    scene.answers = [True, True]
    async with scene.told_to_go():
        await anyio.sleep(50)
        assert (scene.departure.is_due, len(scene.asked)) == (True, 1)
        assert await scene.departure.leave()
    assert scene.asked == ["the spot price", "good bye?"]


@on_virtual_time
async def test_who_is_needed_in_the_moment_of_going_stays_and_asks_again() -> None:
    scene = Scene()
    scene.answers = [True, False, False, True]
    async with scene.told_to_go():
        await anyio.sleep(50)
        assert not await scene.departure.leave()
        assert not scene.departure.is_due
        await anyio.sleep(2 * QUESTION_INTERVAL_S)
        assert scene.departure.is_due
    assert scene.asked == ["the spot price", "good bye?", "and now?", "and now?"]


@on_virtual_time
async def test_who_is_kept_in_the_moment_of_going_is_not_due_at_once_because_it_is_in_no_world() -> None:
    scene = Scene()
    scene.is_bound, scene.answers = False, [False]
    async with scene.told_to_go():
        assert scene.departure.is_due
        assert not await scene.departure.leave()
        await anyio.sleep(50)
        assert not scene.departure.is_due
        scene.answers = [True]
        await anyio.sleep(2 * QUESTION_INTERVAL_S)
        assert scene.departure.is_due
    assert scene.asked.count("good bye?") == 1


@on_virtual_time
async def test_a_daemon_that_does_not_take_down_that_it_goes_is_waited_for_no_longer_than_for_any() -> None:
    scene = Scene()
    scene.answers = [True]
    loop = asyncio.get_running_loop()
    async with scene.told_to_go():
        await anyio.sleep(1)
        scene.answers, began_at = [], loop.time()
        assert await scene.departure.leave()
        assert loop.time() - began_at == pytest.approx(15, abs=1)


@on_virtual_time
async def test_who_gets_no_answer_in_the_moment_of_going_waits_no_longer_than_for_any_daemon() -> None:
    scene = Scene()
    scene.answers = [True]
    loop = asyncio.get_running_loop()
    async with scene.told_to_go():
        await anyio.sleep(1)
        scene.answers, scene.has_daemon, began_at = [], False, loop.time()
        assert await scene.departure.leave()
        assert loop.time() - began_at == pytest.approx(15, abs=1)


@on_virtual_time
async def test_who_is_interrupted_in_the_moment_of_going_has_its_daemon_still() -> None:
    scene = Scene()
    scene.config = ElasticTrainingConfig(leave_timeout_ms=None)
    async with scene.told_to_go():
        await anyio.sleep(1)
        scene.answers = []
        with anyio.move_on_after(1):
            await scene.departure.leave()
        scene.answers = [False]
        await anyio.sleep(100)
        assert not scene.departure.is_overdue


@on_virtual_time
async def test_a_daemon_that_takes_nothing_down_is_waited_for_like_one_that_is_away() -> None:
    scene = Scene()
    scene.answers = []
    assert round(await scene.drained()) == 15
    assert scene.departure.reason == "the spot price; the daemon took nothing down for 15 s"


@on_virtual_time
async def test_an_answer_that_is_older_than_the_change_does_not_count() -> None:
    scene = Scene()
    scene.answers = [True, False]
    async with scene.told_to_go():
        await anyio.sleep(0.005)
        scene.departure.reconsider(is_needed_anew=True)
        await anyio.sleep(0.1)
        assert not scene.departure.is_due
    assert len(scene.asked) == 2


@on_virtual_time
async def test_who_may_go_does_not_ask_at_everybody_else_who_goes() -> None:
    scene = Scene()
    scene.answers = [True]
    async with scene.told_to_go():
        await anyio.sleep(1)
        for _ in range(100):
            scene.departure.reconsider(is_needed_anew=False)
            await anyio.sleep(1)
        assert scene.departure.is_due
    assert len(scene.asked) == 1


@on_virtual_time
async def test_who_is_in_no_world_any_more_asks_nobody_while_it_saves() -> None:
    scene = Scene()
    async with scene.told_to_go():
        await anyio.sleep(1)
        scene.is_bound, asked = False, len(scene.asked)
        for _ in range(100):
            scene.departure.reconsider(is_needed_anew=False)
            await anyio.sleep(1)
        assert len(scene.asked) == asked
        scene.is_bound = True
        await anyio.sleep(2 * QUESTION_INTERVAL_S)
        assert len(scene.asked) > asked, "nobody has told it that it is needed"


@on_virtual_time
async def test_who_has_to_stay_asks_when_fewer_may_need_it() -> None:
    scene = Scene()
    scene.answers = [False, True]
    async with scene.told_to_go():
        await anyio.sleep(0.1)
        assert not scene.departure.is_due
        scene.departure.reconsider(is_needed_anew=False)
        await anyio.sleep(0.1)
        assert scene.departure.is_due


@on_virtual_time
async def test_who_is_refused_an_answer_is_not_kept() -> None:
    scene = Scene()
    scene.answers = [RequestRefused("job_unknown", "no such job")]
    assert await scene.drained() < 1


@on_virtual_time
async def test_while_the_others_wait_for_its_step_its_time_does_not_run() -> None:
    scene = Scene()
    scene.is_waited_for = True

    async def end_the_step() -> None:
        await anyio.sleep(600)
        scene.is_waited_for = False

    async with task_group() as tasks:
        tasks.start_soon(end_the_step)
        assert round(await scene.drained()) == 660


@on_virtual_time
async def test_for_others_who_do_not_come_to_a_collective_it_waits_no_longer_and_breaks_that_off() -> None:
    scene = Scene()
    scene.meeting = 7

    async def change() -> None:
        while True:
            await anyio.sleep(50)
            scene.departure.reconsider(is_needed_anew=True)

    async with task_group() as tasks:
        tasks.start_soon(change)
        assert round(await scene.drained()) == 60
    assert scene.broken_off == ["the others did not come to a collective for 60 s"]
    assert scene.departure.reason == f"the spot price; {scene.broken_off[0]}"


@on_virtual_time
async def test_who_has_broken_off_a_step_goes_however_long_it_takes_to_come_to_its_end() -> None:
    scene = Scene()
    scene.config = ElasticTrainingConfig(leave_timeout_ms=5000)
    scene.meeting = 7
    async with scene.told_to_go():
        await anyio.sleep(6)
        assert scene.broken_off
        scene.is_waited_for = True
        await anyio.sleep(600)
        assert scene.departure.is_due


@on_virtual_time
async def test_who_comes_from_one_collective_to_the_next_or_gives_meanwhile_breaks_off_nothing() -> None:
    scene = Scene()
    scene.is_waited_for = True

    async def step() -> None:
        for scene.meeting in range(20):
            await anyio.sleep(30)
        scene.visits = round(600 / LOOK_INTERVAL_S)
        await anyio.sleep(600)
        scene.meeting = None

    async with scene.told_to_go(), task_group() as tasks:
        tasks.start_soon(step)
        await anyio.sleep(1300)
        assert (scene.broken_off, scene.departure.is_due) == ([], False)


@on_virtual_time
async def test_with_every_change_of_the_world_its_time_begins_anew() -> None:
    scene = Scene()

    async def change() -> None:
        for _ in range(10):
            await anyio.sleep(50)
            scene.departure.reconsider(is_needed_anew=True)

    async with task_group() as tasks:
        tasks.start_soon(change)
        assert round(await scene.drained()) == 560


@on_virtual_time
async def test_others_have_so_long_to_take_over_what_it_holds() -> None:
    scene = Scene()
    assert round(await scene.drained()) == 60
    assert scene.departure.reason == "the spot price; nobody came for what it holds for 60 s"
    scene.is_bound = False
    assert scene.departure.reason == "the spot price"


@on_virtual_time
async def test_who_is_come_for_stays_as_long_as_that_lasts() -> None:
    scene = Scene()
    scene.visits = round(600 / LOOK_INTERVAL_S)
    assert round(await scene.drained()) == 600 + 60


@on_virtual_time
async def test_a_daemon_that_is_away_is_waited_for_as_long_as_it_has_for_its_workers() -> None:
    scene = Scene()
    scene.has_daemon = False
    assert round(await scene.drained()) == 15
    assert scene.departure.reason == "the spot price; there was no daemon for 15 s"


@on_virtual_time
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


@on_virtual_time
async def test_without_a_grace_a_daemon_that_is_there_is_waited_for_all_the_same() -> None:
    scene = Scene()
    assert round(await scene.drained(ElasticTrainingConfig(reconnect_grace_ms=0, leave_timeout_ms=5000))) == 5


@on_virtual_time
async def test_a_job_may_wait_for_ever_as_long_as_there_is_a_daemon() -> None:
    scene = Scene()
    config = ElasticTrainingConfig(leave_timeout_ms=None)

    async def go_away() -> None:
        await anyio.sleep(3000)
        scene.has_daemon = False

    async with task_group() as tasks:
        tasks.start_soon(go_away)
        assert round(await scene.drained(config)) == 3015


@on_virtual_time
async def test_other_settings_hold_for_who_waits_already() -> None:
    scene = Scene()

    async def change() -> None:
        await anyio.sleep(50)
        scene.config = ElasticTrainingConfig(leave_timeout_ms=100_000)

    async with task_group() as tasks:
        tasks.start_soon(change)
        assert round(await scene.drained()) == 100
    assert scene.departure.reason == "the spot price; nobody came for what it holds for 100 s"


class TestHandingOverTheState:
    """Somebody waits to be taken in, and all who have the state are told to go; with a real daemon."""

    @pytest.fixture(params=[True, False], ids=["synchronous", "asynchronous"])
    async def crew(self, request: pytest.FixtureRequest, runner: DaemonRunner) -> AsyncIterator[Crew]:
        # Nobody is taken in before somebody has to be.
        settings = {"stability_window_ms": 600_000, "use_synchronous_rescaling": request.param}
        async with crew_at(runner.endpoint, **settings) as crew:
            yield crew

    async def _train(self, crew: Crew, client: ForgedClient, *names: str) -> None:
        await self._register(crew, client, *names)
        await client.rescale_job(JOB)
        await crew.world_of(*names, steps=5)

    async def _register(self, crew: Crew, client: ForgedClient, *names: str) -> None:
        async with client.facts(WorkerJoined, jobs=[JOB]) as joined:
            crew.start(*names)
            for _ in names:
                await anext(joined)

    async def _is_continued_by(self, crew: Crew, name: str) -> None:
        await crew.until(lambda: bool(crew[name].places))
        assert crew[name].places[0].step >= 5
        await crew.finish(name)

    async def test_who_joins_behind_the_wish_that_all_others_go_gets_it(self, crew: Crew, client: ForgedClient) -> None:
        await self._train(crew, client, "a")
        go_on = await held_in_a_step(crew["a"])
        await client.drain_worker(JOB, "a")
        await self._register(crew, client, "b")
        go_on.set()
        assert await crew.over("a") == [None]
        await self._is_continued_by(crew, "b")

    async def test_who_was_to_stay_may_die_before_the_other_has_gone(
        self, runner: DaemonRunner, crew: Crew, client: ForgedClient
    ) -> None:
        await self._train(crew, client, "a", "b")
        await self._register(crew, client, "c")
        await held_in_a_step(crew["b"])
        a, b = crew["a"].worker, crew["b"].member
        a.drain("the spot price")
        cluster = runner.daemon.elastic.clusters[JOB]
        await until(lambda: cluster.members["a"].drain_reason is not None)
        for link in list(b._mesh._links):
            link.abort()
        await until(lambda: a._presence.world is None)
        await client.evict_worker(JOB, "b")
        assert await crew.over("a") == [None]
        await self._is_continued_by(crew, "c")

    async def test_who_comes_while_the_only_one_saves_something_gets_it(
        self, runner: DaemonRunner, crew: Crew, client: ForgedClient
    ) -> None:
        await self._train(crew, client, "a")
        saves, saved = asyncio.Event(), asyncio.Event()

        async def save(reason: str) -> None:
            saves.set()
            await saved.wait()

        crew["a"].worker.leaving.subscribe(save)
        crew["a"].worker.drain("the night")
        await saves.wait()
        await self._register(crew, client, "b")
        cluster = runner.daemon.elastic.clusters[JOB]
        await until(lambda: "b" in cluster.membership.world)
        assert "a" in cluster.members, "it gives away what it has while it saves"
        saved.set()
        assert await crew.over("a") == [None]
        await self._is_continued_by(crew, "b")

    @pytest.mark.parametrize("how", ["is put out", "goes"])
    @pytest.mark.parametrize("synchronous", [True, False])
    async def test_who_comes_when_the_world_behind_that_has_ended_gets_it_from_who_saves_something_still(
        self, how: str, synchronous: bool, runner: DaemonRunner, client: ForgedClient
    ) -> None:
        async with crew_at(runner.endpoint, use_synchronous_rescaling=synchronous) as crew:
            await self._train(crew, client, "a", "b")
            saves, saved = asyncio.Event(), asyncio.Event()

            async def save(reason: str) -> None:
                saves.set()
                await saved.wait()

            crew["a"].worker.leaving.subscribe(save)
            crew["a"].worker.drain("the spot price")
            await saves.wait()
            await crew.world_of("b")
            if how == "goes":
                crew["b"].worker.drain("the spot price, too")
            else:
                await client.evict_worker(JOB, "b", "it is bad")
            await crew.over("b")
            crew.start("c")
            await crew.world_of("c")
            saved.set()
            assert await crew.over("a") == [None]
            await self._is_continued_by(crew, "c")

    async def test_who_was_to_stay_may_die_while_the_other_saves_something(
        self, crew: Crew, client: ForgedClient
    ) -> None:
        await self._train(crew, client, "a", "b")
        await self._register(crew, client, "c")
        reasons = []

        async def save(reason: str) -> None:
            reasons.append(reason)
            await client.evict_worker(JOB, "b")

        crew["a"].worker.leaving.subscribe(save)
        crew["a"].worker.drain("the spot price")
        assert await crew.over("a") == [None]
        await self._is_continued_by(crew, "c")
        assert reasons == ["the spot price"], "what it saved is the newest"

    async def test_a_connection_that_breaks_at_the_wrong_moment_changes_nothing(
        self, runner: DaemonRunner, tmp_path: Path, client: ForgedClient
    ) -> None:
        proxy = Proxy(tmp_path / "p", runner.config.socket)
        async with crew_at(proxy.endpoint, stability_window_ms=600_000) as crew:
            await self._train(crew, client, "a")
            crew.endpoints = [runner.endpoint]
            await self._register(crew, client, "b")
            go_on = await held_in_a_step(crew["a"])
            a = crew["a"].worker
            proxy.cut()
            while crew["a"].member._client.connected:
                await asyncio.sleep(0)
            a.drain("it was told to end, by SIGTERM")
            go_on.set()
            assert await crew.over("a") == [None]
            await self._is_continued_by(crew, "b")
        await proxy.close()

    async def test_a_step_that_lasts_longer_than_anybody_is_waited_for_is_not_held_against_it(
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
        async with crew_at(runner.endpoint, stability_window_ms=600_000, leave_timeout_ms=200) as crew:
            await self._train(crew, client, "a")
            await self._register(crew, client, "b")
            go_on = await held_in_a_step(crew["a"])
            await client.drain_worker(JOB, "a")
            # So many looks take twice as long as anybody is waited for.
            await until(lambda: looks > 40)
            go_on.set()
            assert await crew.over("a") == [None]
            await self._is_continued_by(crew, "b")

    async def test_of_several_who_are_told_to_go_at_once_the_last_one_gives_it(
        self, crew: Crew, client: ForgedClient
    ) -> None:
        await self._train(crew, client, "a", "c")
        await self._register(crew, client, "b")
        for name in "ac":
            crew[name].worker.drain("the spot price")
        assert await crew.over("a", "c") == [None, None]
        await self._is_continued_by(crew, "b")

    async def test_a_world_that_does_not_come_together_at_once_is_waited_for(
        self, crew: Crew, client: ForgedClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await self._train(crew, client, "a")
        enter, failed = Mesh.enter, asyncio.Event()

        async def fail_once(mesh: Mesh, *arguments: Any) -> Any:
            if mesh is crew["a"].member._mesh and not failed.is_set():
                failed.set()
                raise WorldIncomplete("a packet was lost", "b")
            return await enter(mesh, *arguments)

        monkeypatch.setattr(Mesh, "enter", fail_once)
        await self._register(crew, client, "b")
        crew["a"].worker.drain("its host is needed")
        assert await crew.over("a") == [None]
        await self._is_continued_by(crew, "b")

    async def test_who_nobody_can_follow_goes_at_once(self, crew: Crew, client: ForgedClient) -> None:
        await self._train(crew, client, "a")
        crew["a"].worker.drain("nobody is there")
        assert await crew.over("a") == [None]
        assert [fact.reason for fact in await past(client, WorkerLeft)] == ["nobody is there"]


async def held_in_a_step(trainer: Trainer) -> asyncio.Event:
    """Wait until it is in a step, and stays there until the event."""
    go_on, inside = asyncio.Event(), asyncio.Event()

    async def before(step: int) -> None:
        inside.set()
        await go_on.wait()

    trainer.before_step = before
    await inside.wait()
    return go_on
