"""The stacks of a worker's process, fetched through its pulse by a real daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager

import pytest

from forged.client import ForgedClient
from forged.errors import RequestRefused
from forged.metrics.messages import WorkerStacks
from forged.worker.process.stack_dump import CANDIDATES, StackDump, handles
from tests.client.conftest import runner
from tests.client.daemon_runner import SOON, DaemonRunner
from tests.worker.trainers import JOB, PATIENCE_S, group_at

__all__ = ["runner"]

SCRIPT = """
import ctypes, sys
import forged
from forged.elastic.config import ElasticTrainingConfig

def hang_here():
    print(flush=True)
    {hang}

config = ElasticTrainingConfig(min_workers=1, stability_window_ms=0, worker_heartbeat_timeout_ms=600_000)
with forged.join(sys.argv[1], job="run", worker_id="w1", state={{}}, config=config) as worker:
    for step in worker.steps():
        hang_here()
"""
IN_PYTHON = "sys.stdin.read()"
IN_C_WITH_THE_GIL = "ctypes.PyDLL(None).sleep(600)"


def started(hang: str, endpoint: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SCRIPT.format(hang=hang), endpoint]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@asynccontextmanager
async def hanging(runner: DaemonRunner, hang: str) -> AsyncIterator[tuple[subprocess.Popen[bytes], ForgedClient]]:
    """A worker's process that hangs in a step, and an operator."""
    with started(hang, runner.endpoint) as process:
        try:
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline)
            async with ForgedClient(runner.endpoint, reconnect=SOON) as client:
                yield process, client
        finally:
            process.kill()


async def stacks(client: ForgedClient) -> WorkerStacks:
    """What the pulse says, once the daemon has heard of it."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await client.worker_stacks(JOB, "w1")
            except RequestRefused:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("hang", [IN_PYTHON, IN_C_WITH_THE_GIL])
async def test_stacks_of_a_process_that_hangs_name_the_function(runner: DaemonRunner, hang: str) -> None:
    async with hanging(runner, hang) as (process, client):
        for _ in range(2):
            told = await stacks(client)
            assert told.reason == ""
            assert "in hang_here" in told.text
            assert told.text.lower().count("thread 0x") >= 2, "the worker's own thread is shown too"
        assert process.poll() is None


async def test_process_that_is_stopped_has_no_stacks_to_show(runner: DaemonRunner) -> None:
    async with hanging(runner, IN_PYTHON) as (process, client):
        await stacks(client)
        process.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert "stopped" in (await stacks(client)).reason


async def test_worker_without_a_pulse_is_refused(runner: DaemonRunner) -> None:
    async with group_at(runner.endpoint) as group, ForgedClient(runner.endpoint, reconnect=SOON) as client:
        group.start("a")
        await group.world_of("a")
        with pytest.raises(RequestRefused, match="no pulse of worker a"):
            await client.worker_stacks(JOB, "a")


@contextmanager
def handled(number: int) -> Iterator[None]:
    before = signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_signal_that_the_script_handles_is_left_alone() -> None:
    with handled(CANDIDATES[0]), closing(StackDump.create()) as dump:
        assert dump.number in CANDIDATES[1:]
        assert handles(dump.status, dump.number)


def test_signal_is_free_again_after_the_end() -> None:
    with closing(StackDump.create()) as dump:
        number, status = dump.number, os.dup(dump.status)
    assert not handles(status, number)
    os.close(status)
    dump.close()
