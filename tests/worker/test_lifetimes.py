"""Connecting and closing in any order and in any task."""

from __future__ import annotations

import asyncio
from pathlib import Path

import anyio
import pytest

from forged.client.client import ForgedClient
from forged.elastic.messages import WorkerLeft
from forged.errors import RequestRefused, Unavailable
from forged.worker.session import WorkerSession
from forged.worker.worker import ElasticWorker
from tests.client.daemon_runner import DaemonRunner
from tests.client.unix_listener import UnixListener
from tests.worker.trainers import JOB, PATIENCE_S, config, past, shared_worker


def worker_named(name: str) -> ElasticWorker:
    return shared_worker(name, config(min_workers=2), job=JOB)


async def test_workers_of_one_task_close_in_the_order_in_which_they_connected(
    runner: DaemonRunner, client: ForgedClient
) -> None:
    a, b = worker_named("a"), worker_named("b")
    await a.connect(runner.endpoint)
    await b.connect(runner.endpoint)
    await a.close()
    assert [view.id for view in await client.workers(JOB)] == ["b"]
    await b.close()
    assert await client.workers(JOB) == []


async def test_worker_that_connected_under_wait_for_closes_in_its_callers_task(
    runner: DaemonRunner, client: ForgedClient
) -> None:
    worker = worker_named("a")
    await asyncio.wait_for(worker.connect(runner.endpoint), PATIENCE_S)
    await asyncio.wait_for(worker.close(), PATIENCE_S)
    assert await client.workers(JOB) == []


async def test_worker_closes_in_another_task_than_the_one_that_connected(
    runner: DaemonRunner, client: ForgedClient
) -> None:
    worker = worker_named("a")
    await asyncio.create_task(worker.connect(runner.endpoint))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.close)
    assert await client.workers(JOB) == []


async def test_every_caller_of_close_waits_until_the_worker_has_left(
    runner: DaemonRunner, client: ForgedClient
) -> None:
    worker = worker_named("a")
    await worker.connect(runner.endpoint)
    await asyncio.gather(worker.close(), worker.disconnect())
    assert not worker.is_connected
    assert len(await past(client, WorkerLeft)) == 1


async def test_close_ends_the_steps_of_another_task(runner: DaemonRunner) -> None:
    worker = worker_named("a")
    await worker.connect(runner.endpoint)
    waiting = asyncio.create_task(worker.begin_step())
    await asyncio.sleep(0.05)
    await worker.close()
    assert await asyncio.wait_for(waiting, PATIENCE_S) is None


async def test_worker_whose_connecting_timed_out_leaves_no_task_and_connects_again(
    runner: DaemonRunner, tmp_path: Path
) -> None:
    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    silent = UnixListener(tmp_path / "silent", stay_silent)
    before = asyncio.all_tasks()
    worker = worker_named("a")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(worker.connect(f"unix://{tmp_path}/silent"), 0.05)
    assert not worker.is_connected
    await silent.close()
    assert asyncio.all_tasks() <= before
    await worker.connect(runner.endpoint)
    await worker.close()


async def test_second_connect_is_refused_and_the_first_connection_lasts(runner: DaemonRunner) -> None:
    worker = worker_named("a")
    await worker.connect(runner.endpoint)
    with pytest.raises(RequestRefused) as raised:
        await worker.connect(runner.endpoint)
    assert raised.value.code == "worker_connected"
    assert worker.is_registered
    await worker.close()
    assert not worker.is_connected


async def test_step_and_close_raise_when_the_session_fails(
    runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[WorkerSession] = []
    made = WorkerSession.__init__

    def keep(session: WorkerSession, *parts: object) -> None:
        made(session, *parts)  # type: ignore[arg-type]
        sessions.append(session)

    async def fail() -> None:
        raise ValueError("a mistake in the session")

    monkeypatch.setattr(WorkerSession, "__init__", keep)
    worker = worker_named("a")
    await worker.connect(runner.endpoint)
    waiting = asyncio.create_task(worker.begin_step())
    await asyncio.sleep(0.05)
    sessions[0]._tasks.start_soon(fail)
    with pytest.raises(Unavailable) as raised:
        await asyncio.wait_for(waiting, PATIENCE_S)
    assert raised.value.code == "session_ended"
    with pytest.raises(ExceptionGroup) as group:
        await worker.close()
    assert group.group_contains(ValueError, match="a mistake in the session")
    assert not worker.is_connected


async def test_clients_of_one_task_close_in_the_order_in_which_they_opened(runner: DaemonRunner) -> None:
    first, second = ForgedClient(runner.endpoint), ForgedClient(runner.endpoint)
    await first.__aenter__()
    await second.__aenter__()
    await first.__aexit__(None, None, None)
    assert (await second.status()).term > 0
    await asyncio.create_task(second.__aexit__(None, None, None))
    assert not second.connected
