"""How a worker learns the facts of its job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup

from forged.client import ForgedClient
from forged.clock import SystemClock
from forged.elastic.messages import (
    JobCompleted,
    JobPaused,
    RescaleCompleted,
    RescaleStarted,
    ShowCluster,
)
from forged.elastic.model import WorkerId
from forged.elastic.phases import Phase
from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable
from forged.kernel.messages import Fact, Gap, Record, UnknownFact
from forged.log import SILENT
from forged.net.protocol.messages import Facts
from forged.worker.catalog.worker_catalog import WorkerCatalog
from forged.worker.errors import JobEnded, WorkerEvicted
from forged.worker.fact_listener import FactListener
from forged.worker.worker_state.progress import TrainingProgress
from forged.worker.worker_state.session_state import SessionState
from tests.client.daemon_runner import DaemonRunner, config_in
from tests.client.proxy import Proxy
from tests.kernel_fixture import on_virtual_time, task_group
from tests.worker.trainers import JOB, TrainerGroup, group_at

PAUSED = Record.of(JobPaused("lunch"), fact_id=7, at=0.0)
DONE = Record.of(JobCompleted(9), fact_id=8, at=0.0)
GAP = Gap(5, 6, "the journal has moved on")


class Stream:
    """A fact stream that ends."""

    def __init__(self, *items: Record | Gap, error: ForgedError | None = None) -> None:
        self.items = items
        self.error = error
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[Record | Gap]:
        for item in self.items:
            await anyio.lowlevel.checkpoint()
            yield item
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.is_closed = True


class Daemon:
    """Answers joins in turn; the last answer is repeated."""

    def __init__(self, *answers: ForgedError | None, phase: Phase = Phase.ABORTED) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.phase = phase

    async def request(self, request: Any) -> Any:
        assert request == ShowCluster("run")
        return SimpleNamespace(phase=self.phase, reason="too many failed", state=SimpleNamespace(current_step=12))


class ListenerFixture:
    """A fact listener and its surroundings."""

    def __init__(self, daemon: Daemon, tasks: TaskGroup) -> None:
        self.daemon = daemon
        self.state = SessionState(WorkerId("me", "host", 1), TrainingProgress(0.0, 0))
        self.view = self.state.view
        self.view.known = True
        self.heard: list[Fact | UnknownFact | Gap] = []
        self.wakes = 0
        self.state.wake = self._wake  # type: ignore[method-assign]
        anything: Any = self
        catalog = WorkerCatalog(SystemClock(), SILENT)
        self.listener = FactListener(anything, self.state, anything, anything, anything, anything, catalog, tasks)
        self.listener.learn = self._learn  # type: ignore[method-assign]

    job = "run"

    async def join(self, spec: object, *, again: bool) -> Any:
        assert again
        await self._ask()

    async def show_cluster(self) -> Any:
        return await self.daemon.request(ShowCluster("run"))

    def begin_if_told(self) -> None: ...

    def hear(self, item: Fact | UnknownFact | Gap) -> None:
        self.heard.append(item)

    def _learn(self, joined: object) -> None:
        self.view.outdated = False

    async def _ask(self) -> None:
        daemon = self.daemon
        daemon.asked += 1
        await anyio.sleep(1)
        answer = daemon.answers.pop(0) if len(daemon.answers) > 1 else (daemon.answers or [None])[0]
        if answer is not None:
            raise answer

    def _wake(self) -> None:
        self.wakes += 1


def run_with_listener(
    act: Callable[[ListenerFixture], Any], *answers: ForgedError | None, phase: Phase = Phase.ABORTED
) -> Any:
    async def run() -> None:
        async with task_group() as tasks:
            await act(ListenerFixture(Daemon(*answers, phase=phase), tasks))

    return on_virtual_time(run)()


def test_facts_update_the_view_and_are_passed_on_in_order() -> None:
    async def act(fixture: ListenerFixture) -> None:
        stream = Stream(PAUSED, DONE)
        await fixture.listener.listen(cast("Any", stream))
        assert (fixture.view.paused, fixture.view.completed) == (True, 9)
        assert fixture.heard == [PAUSED.fact, DONE.fact]
        assert fixture.wakes == 2
        assert stream.is_closed

    run_with_listener(act)


def test_failing_stream_ends_the_training_and_is_closed() -> None:
    async def act(fixture: ListenerFixture) -> None:
        error = PeerError("stream_lost", "it is gone")
        stream = Stream(PAUSED, error=error)
        await fixture.listener.listen(cast("Any", stream))
        assert fixture.view.end is error
        assert (fixture.wakes, stream.is_closed) == (2, True)

    run_with_listener(act)


def test_abandoned_stream_is_closed() -> None:
    async def act(fixture: ListenerFixture) -> None:
        stream = Stream(PAUSED)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await fixture.listener.listen(cast("Any", stream))
        assert stream.is_closed
        assert fixture.view.end is None

    run_with_listener(act)


def test_missed_facts_are_requested_by_one_request_at_a_time() -> None:
    async def act(fixture: ListenerFixture) -> None:
        fixture.listener.begin_to_ask()
        for _ in range(3):
            fixture.listener.hear(GAP)
        assert fixture.view.outdated
        await anyio.sleep(10)
        assert fixture.daemon.asked == 1
        assert not fixture.view.outdated
        assert fixture.wakes == 4
        fixture.listener.hear(GAP)
        await anyio.sleep(10)
        assert fixture.daemon.asked == 2

    run_with_listener(act)


def test_facts_missed_during_a_request_are_requested_again() -> None:
    async def act(fixture: ListenerFixture) -> None:
        fixture.listener.begin_to_ask()
        fixture.listener.hear(GAP)
        await anyio.sleep(0.5)
        fixture.listener.hear(GAP)
        await anyio.sleep(10)
        assert fixture.daemon.asked == 2
        assert not fixture.view.outdated

    run_with_listener(act)


def test_missed_facts_are_asked_for_once_the_daemon_knows_the_worker() -> None:
    async def act(fixture: ListenerFixture) -> None:
        fixture.listener.hear(GAP)
        await anyio.sleep(10)
        assert fixture.daemon.asked == 0
        fixture.listener.begin_to_ask()
        await anyio.sleep(10)
        assert fixture.daemon.asked == 1

    run_with_listener(act)


@pytest.mark.parametrize("phase", [Phase.COMPLETED, Phase.ABORTED])
def test_listener_learns_how_a_finished_job_ended(phase: Phase) -> None:
    async def act(fixture: ListenerFixture) -> None:
        fixture.listener.begin_to_ask()
        fixture.listener.hear(GAP)
        await anyio.sleep(10)
        if phase is Phase.COMPLETED:
            assert (fixture.view.completed, fixture.view.end) == (12, None)
        else:
            assert isinstance(fixture.view.end, JobEnded)
            assert "too many failed" in fixture.view.end.message
        assert fixture.wakes == 2

    run_with_listener(act, RequestRefused("job_over", "it is over"), phase=phase)


@pytest.mark.parametrize(
    ("refusal", "end"),
    [
        (RequestRefused("worker_gone", "it was put out"), WorkerEvicted),
        (RequestRefused("forbidden", "the token does not allow it"), RequestRefused),
        (Unavailable("too_late", "the client is closed"), Unavailable),
    ],
)
def test_refused_worker_ends_without_further_requests(refusal: ForgedError, end: type[ForgedError]) -> None:
    async def act(fixture: ListenerFixture) -> None:
        fixture.listener.begin_to_ask()
        fixture.listener.hear(GAP)
        await anyio.sleep(100)
        assert type(fixture.view.end) is end
        assert refusal.message in fixture.view.end.message
        assert (fixture.daemon.asked, fixture.wakes) == (1, 2)

    run_with_listener(act, refusal)


def test_answer_after_the_end_of_the_tasks_has_no_effect() -> None:
    async def run() -> None:
        async with task_group() as tasks:
            one = ListenerFixture(Daemon(), tasks)
            one.listener.begin_to_ask()
            one.listener.hear(GAP)
            await asyncio.sleep(0)
        assert one.view.outdated

    on_virtual_time(run)()


class TestFactsThatAreMissed:
    """A worker that was away for longer than the daemon keeps facts joins again."""

    @pytest.fixture
    async def runner(self, tmp_path: Path) -> AsyncIterator[DaemonRunner]:
        runner = DaemonRunner(config_in(tmp_path, journal_facts_max=100))
        await runner.open()
        yield runner
        await runner.close()

    async def _noise(self, client: ForgedClient) -> None:
        await client.create_job("noise")
        for number in range(150):
            await client.note("noise", f"{number}")

    async def test_world_of_a_background_rescale_begins_at_its_members_step(
        self, runner: DaemonRunner, tmp_path: Path, client: ForgedClient
    ) -> None:
        """The daemon, which is asked for what was missed, has heard less of the steps than have been made."""
        proxy = Proxy(tmp_path / "p", runner.config.socket)
        async with group_at(proxy.endpoint, use_synchronous_rescaling=False) as group:
            group.start("me")
            await group.world_of("me", steps=5)
            proxy.rule = lambda way, message: way == "down" and isinstance(message, Facts)
            group.endpoints = [runner.endpoint]
            async with client.facts(RescaleCompleted) as facts:
                group.start("c")
                await anext(facts)
            await self._noise(client)
            proxy.rule = lambda way, message: False
            proxy.cut()
            await group.world_of("me", "c")
            await group.finish("me", "c")
        await proxy.close()

    @pytest.mark.parametrize(
        "happening",
        ["nothing", "pause", "drain", "join", "evict", "abort", "complete"],
    )
    async def test_worker_learns_of_missed_facts_by_joining_again(
        self, happening: str, runner: DaemonRunner, tmp_path: Path, client: ForgedClient
    ) -> None:
        proxy = Proxy(tmp_path / "p", runner.config.socket)
        async with group_at(runner.endpoint) as group:
            group.start("a", "b")
            await group.world_of("a", "b")
            group.endpoints = [proxy.endpoint]
            group.start("me")
            await group.world_of("a", "b", "me")
            group.endpoints = [runner.endpoint]
            # Facts do not come through until there are too many of them.
            proxy.rule = lambda way, message: way == "down" and isinstance(message, Facts)
            await HAPPENINGS[happening](client, group)
            await self._noise(client)
            proxy.rule = lambda way, message: False
            proxy.cut()
            await AFTERMATHS[happening](client, group)
        await proxy.close()


async def _nothing(client: ForgedClient, group: TrainerGroup) -> None:
    await client.note(JOB, "a remark")


async def _join(client: ForgedClient, group: TrainerGroup) -> None:
    async with client.facts(RescaleStarted) as facts:
        group.start("c")
        await anext(facts)


async def _complete(client: ForgedClient, group: TrainerGroup) -> None:
    async with client.facts(JobCompleted) as facts:
        group.total = group["a"].worker.step + 3
        await anext(facts)


async def _all_go_on(client: ForgedClient, group: TrainerGroup) -> None:
    await group.more_steps("a", "b", "me")
    await group.finish("a", "b", "me")


async def _resumes(client: ForgedClient, group: TrainerGroup) -> None:
    await group.until(lambda: all(group[name].worker._state.current_world.is_stopped for name in ("a", "b")))
    await client.resume_job(JOB)
    await _all_go_on(client, group)


async def _drained(client: ForgedClient, group: TrainerGroup) -> None:
    assert await group.over("me") == [None]
    await group.world_of("a", "b")


async def _joined(client: ForgedClient, group: TrainerGroup) -> None:
    await group.world_of("a", "b", "c", "me")
    await group.finish("a", "b", "c", "me")


async def _evicted(client: ForgedClient, group: TrainerGroup) -> None:
    assert isinstance((await group.over("me"))[0], WorkerEvicted)
    await group.world_of("a", "b")


async def _aborted(client: ForgedClient, group: TrainerGroup) -> None:
    assert all(isinstance(error, JobEnded) for error in await group.over("a", "b", "me"))


async def _completed(client: ForgedClient, group: TrainerGroup) -> None:
    assert await group.over("a", "b", "me") == [None] * 3
    assert group["me"].worker.step == group.total


HAPPENINGS: dict[str, Callable[[ForgedClient, TrainerGroup], Awaitable[object]]] = {
    "nothing": _nothing,
    "pause": lambda client, group: client.pause_job(JOB),
    "drain": lambda client, group: client.drain_worker(JOB, "me"),
    "join": _join,
    "evict": lambda client, group: client.evict_worker(JOB, "me"),
    "abort": lambda client, group: client.abort_job(JOB),
    "complete": _complete,
}
AFTERMATHS = {
    "nothing": _all_go_on,
    "pause": _resumes,
    "drain": _drained,
    "join": _joined,
    "evict": _evicted,
    "abort": _aborted,
    "complete": _completed,
}
