"""A whole daemon over real sockets, and workers that are made of a client and a door for peers."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import anyio
import pytest

from forged.client import ForgedClient
from forged.elastic.messages import (
    INCARNATION_BYTES,
    JoinJob,
    JoinReply,
    ReadTopology,
    ReportReady,
    ReportStopped,
    RescaleCompleted,
    RescaleJob,
    RescaleStarted,
    RescaleSynchronising,
    ShowCluster,
    WorkerFailed,
    WorkerLost,
)
from forged.elastic.model import ClusterTopology, WorkerId
from forged.errors import RequestRefused
from forged.jobs.model import SettingValue
from forged.kernel.messages import Fact, Record
from tests.client.daemon_runner import SOON, DaemonRunner, config_in

JOB = "run"
SETTINGS: dict[str, SettingValue] = {"stability_window_ms": 300, "failure_tolerance_percentage": 100}
PATIENCE_S = 60.0


class Worker:
    """Answers what attempts ask of it, and follows the world by its changes."""

    def __init__(self, runner: DaemonRunner, name: str) -> None:
        self.client = ForgedClient(runner.endpoint, reconnect=SOON)
        self.name = name
        self.incarnation = os.urandom(INCARNATION_BYTES)
        self.topology = ClusterTopology()
        self.step = 0
        self.holds_state = False
        self.answers = True
        self.asked: set[int] = set()
        """The attempts that it was asked to stop for."""
        self.worlds: list[int] = []
        self.changed = asyncio.Event()
        self._over = asyncio.Event()

    async def __aenter__(self) -> Self:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # In a task of its own, because workers do not end in the order in which they began.
        self._life = asyncio.create_task(self._live(ready))
        self._life.add_done_callback(lambda _: ready.cancel())
        await ready
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.die()

    async def die(self) -> None:
        """The door and the connection are gone, as when a process ends."""
        self._over.set()
        await self._life

    async def _live(self, ready: asyncio.Future[None]) -> None:
        async with AsyncExitStack() as stack:
            door = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
            self.me = WorkerId(self.name, *door.sockets[0].getsockname()[:2])
            await stack.enter_async_context(self.client)
            kinds: tuple[type[Fact], ...] = (RescaleStarted, RescaleSynchronising, RescaleCompleted)
            facts = await stack.enter_async_context(self.client.facts(*kinds, jobs=[JOB]))
            self.joined = await self.join()
            self.topology = self.joined.topology
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(self._follow, facts)
            ready.set_result(None)
            await self._over.wait()
            tasks.cancel_scope.cancel()
            door.close()

    async def join(self) -> JoinReply:
        return await self.client.request(JoinJob(JOB, self.me, self.incarnation, settings=SETTINGS))

    async def until_world(self, generation: int) -> None:
        await self._until(lambda: self.topology.epoch >= generation)

    async def until_asked(self, attempt: int) -> None:
        await self._until(lambda: attempt in self.asked)

    async def _until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            self.changed.clear()
            await self.changed.wait()

    async def _follow(self, facts: Any) -> None:
        async for record in facts:
            match record.fact:
                case RescaleStarted() as fact:
                    self.asked.add(fact.attempt)
                    await self._stop(fact.attempt)
                case RescaleSynchronising() as fact if self.answers and fact.source.id != self.name:
                    await self._get_ready(fact)
                case RescaleCompleted() as fact:
                    self.topology = self.topology.apply(fact.delta)
                    self.worlds.append(self.topology.epoch)
                    assert fact.step is not None
                    self.step, self.holds_state = fact.step, True
                case _:
                    pass
            self.changed.set()

    async def _stop(self, attempt: int) -> None:
        if self.answers:
            report = ReportStopped(JOB, self.name, self.incarnation, attempt, self.step, holds_state=self.holds_state)
            await self._say(report)

    async def _get_ready(self, fact: RescaleSynchronising) -> None:
        if not self.holds_state or self.step != fact.step:
            await self._say(ReportReady(JOB, self.name, self.incarnation, fact.attempt))

    async def _say(self, report: ReportStopped | ReportReady) -> None:
        try:
            await self.client.request(report)
        except RequestRefused as error:
            assert error.code == "attempt_over"  # noqa: PT017 - a newer one follows in the stream


@asynccontextmanager
async def workers(runner: DaemonRunner, *names: str) -> AsyncIterator[list[Worker]]:
    """Workers in their first world."""
    with anyio.fail_after(PATIENCE_S):
        async with AsyncExitStack() as stack:
            crew = [await stack.enter_async_context(Worker(runner, name)) for name in names]
            for worker in crew:
                await worker.until_world(1)
            yield crew


async def facts_of(crew: list[Worker], kind: type[Fact]) -> list[Fact]:
    """All facts of a kind, from the daemon's journal."""
    past = [item async for item in crew[0].client.past_facts() if isinstance(item, Record)]
    return [record.fact for record in past if isinstance(record.fact, kind)]


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[DaemonRunner]:
    runner = DaemonRunner(config_in(tmp_path))
    await runner.open()
    yield runner
    await runner.close()


async def test_workers_agree_on_a_world_that_each_builds_from_its_changes(runner: DaemonRunner) -> None:
    async with workers(runner, "a", "b", "c") as crew:
        topology = await crew[0].client.request(ReadTopology(JOB))
        assert {worker.topology for worker in crew} == {topology}
        assert sorted(worker.id for worker in topology.workers) == ["a", "b", "c"]
        keys = {worker.joined.peer_key for worker in crew}
        assert len(keys) == 1


async def test_dead_worker_is_found_by_its_refusing_port_and_replaced_by_a_joiner(runner: DaemonRunner) -> None:
    async with workers(runner, "a", "b", "c") as crew:
        before = [worker.id for worker in crew[0].topology.workers]
        await crew[1].die()
        async with Worker(runner, "d") as joiner:
            for worker in (crew[0], crew[2]):
                await worker.until_world(2)
            if joiner.name not in {worker.id for worker in crew[0].topology.workers}:
                await crew[0].until_world(3)
            await joiner.until_world(crew[0].topology.epoch)
            (failed,) = await facts_of(crew, WorkerFailed)
            assert isinstance(failed, WorkerFailed)
            assert (failed.worker_id, failed.rank) == ("b", before.index("b"))
            assert re.fullmatch(r"127\.0\.0\.1:\d+ refuses connections", failed.reason)
            assert joiner.topology == crew[0].topology
            survivors = [worker.id for worker in crew[0].topology.workers if worker.id in "ac"]
            assert survivors == [worker for worker in before if worker in "ac"]


async def test_a_daemon_that_is_restarted_finds_its_workers_where_they_were(runner: DaemonRunner) -> None:
    async with workers(runner, "a", "b", "c") as crew:
        await runner.reopen()
        for worker in crew:
            again = await worker.join()
            assert (again.generation, again.topology) == (1, worker.topology)
        view = await crew[0].client.request(ShowCluster(JOB))
        assert (view.phase, view.generation, view.world_size, view.rescale) == ("running", 1, 3, None)
        assert await facts_of(crew, WorkerFailed) == await facts_of(crew, WorkerLost) == []
        await crew[0].client.request(RescaleJob(JOB))
        for worker in crew:
            await worker.until_world(2)
        assert {worker.topology for worker in crew} == {crew[0].topology}


async def test_a_daemon_that_goes_in_the_middle_of_a_rescale_completes_it_when_it_is_back(runner: DaemonRunner) -> None:
    async with workers(runner, "a", "b", "c") as crew:
        crew[2].answers = False
        await crew[0].client.request(RescaleJob(JOB))
        await crew[2].until_asked(2)
        await runner.reopen()
        crew[2].answers = True
        for worker in crew:
            await worker.until_world(2)
        assert [worker.worlds for worker in crew] == [[1, 2]] * 3
        assert {worker.topology for worker in crew} == {crew[0].topology}
        completed = await facts_of(crew, RescaleCompleted)
        assert [fact.attempt for fact in completed if isinstance(fact, RescaleCompleted)] == [1, 3]
