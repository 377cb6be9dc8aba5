"""What a worker has of its process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from forged.client import ForgedClient
from forged.elastic.messages import WorkerFailed, WorkerLeft
from forged.errors import RequestRefused
from forged.log import SILENT
from forged.worker.process.counters import Counters
from forged.worker.process.pulse import PulseProcess
from forged.worker.process.sigterm import SIGTERM_REASON, is_heeded
from forged.worker.process.worker_process import OwnProcess, SharedProcess
from forged.worker.worker import ElasticWorker
from tests.client.daemon_runner import DaemonRunner
from tests.worker.process.test_forks import in_a_child, is_nothing
from tests.worker.process.test_sigterm import SigtermHandler
from tests.worker.trainers import JOB, config, past


@pytest.fixture
def own() -> OwnProcess:
    return OwnProcess(SILENT)


@pytest.fixture
def pair() -> Iterator[list[int]]:
    """Two descriptors."""
    descriptors = list(os.pipe())
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def begin_pulse(process: OwnProcess | SharedProcess, directory: Path) -> None:
    process.begin_pulse([f"unix://{directory}/nobody"], JOB, "me", bytes(16), None)


def who_uses_it_is_refused(process: OwnProcess) -> None:
    with pytest.raises(RequestRefused) as raised:
        process.check()
    assert (raised.value.code, process.is_forked) == ("worker_forked", True)


def kill(pulse: PulseProcess) -> None:
    """As another library that handles SIGTERM does."""
    os.kill(pulse.pid, signal.SIGKILL)
    os.waitid(os.P_PID, pulse.pid, os.WEXITED | os.WNOWAIT)


class TestOwnProcess:
    def test_own_process_has_a_pulse_until_the_worker_has_left(self, own: OwnProcess, tmp_path: Path) -> None:
        with own.inhabited(list, lambda: False):
            begin_pulse(own, tmp_path)
            assert own.heart is not None
            pulse = own.heart.pulse
            alive = [pulse.alive]
        alive.append(pulse.alive)
        assert alive == [True, False]
        assert own.heart is None

    def test_ended_pulse_is_replaced(self, own: OwnProcess, tmp_path: Path) -> None:
        with own.inhabited(list, lambda: False):
            begin_pulse(own, tmp_path)
            assert own.heart is not None
            first = own.heart.pulse
            kill(first)
            own.look_after_pulse()
            assert own.heart.pulse.alive
            assert own.heart.pulse is not first

    def test_process_without_a_pulse_watches_none(self, own: OwnProcess) -> None:
        own.look_after_pulse()
        assert own.heart is None

    def test_forked_children_inherit_neither_connections_nor_the_worker(self, own: OwnProcess, pair: list[int]) -> None:
        with own.inhabited(lambda: pair, lambda: False):
            in_a_child(lambda: who_uses_it_is_refused(own))
            in_a_child(lambda: all(is_nothing(one) for one in pair) or os._exit(1))
            own.check()
            assert not own.is_forked

    def test_sigterm_is_handled_while_the_worker_exists(self, own: OwnProcess) -> None:
        told = SigtermHandler()
        with own.inhabited(list, told):
            signal.raise_signal(signal.SIGTERM)
        assert told.times == 1
        assert not is_heeded()


class TestSharedProcess:
    def test_shared_process_has_only_the_counters(self, tmp_path: Path, pair: list[int]) -> None:
        with closing(Counters.create()) as counters:
            shared = SharedProcess(counters)
            with shared.inhabited(lambda: pair, lambda: True) as shown:
                begin_pulse(shared, tmp_path)
                shared.look_after_pulse()
                in_a_child(shared.check)
                in_a_child(lambda: os.write(pair[1], b"still there"))
                assert shown is counters
                assert not is_heeded()


class TestAsyncWorker:
    """It has all of that by default."""

    async def test_pulse_is_replaced_and_ends_with_the_worker(self, runner: DaemonRunner) -> None:
        process = OwnProcess(SILENT)
        async with ElasticWorker("me", config(), job=JOB, process=process) as worker:
            await worker.connect(runner.endpoint)
            assert process.heart is not None
            first = process.heart.pulse
            kill(first)
            await worker.begin_step()
            second = process.heart.pulse
            assert (second is first, second.alive) == (False, True)
        assert not second.alive

    async def test_pulse_sees_the_step_counter(self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        counters = Counters.create()
        monkeypatch.setattr(Counters, "create", lambda: counters)
        async with ElasticWorker("me", config(), job=JOB) as worker:
            await worker.connect(runner.endpoint)
            for _ in range(2):
                await worker.begin_step()
                await worker.finish_step()
            assert counters.step == 2
            assert counters.marks > 0

    async def test_worker_cannot_be_used_in_a_forked_child(self, runner: DaemonRunner, client: ForgedClient) -> None:
        async with ElasticWorker("me", config(), job=JOB) as worker:
            await worker.connect(runner.endpoint)
            held = [number for number in worker.descriptors() if number >= 0]
            await worker.begin_step()
            in_a_child(lambda: is_cut_off(worker, held))
            await worker.barrier()
        assert [fact.reason for fact in await past(client, WorkerLeft)] == ["its script left the step loop"]
        assert await past(client, WorkerFailed) == []

    async def test_worker_finishes_its_step_and_leaves_at_sigterm(
        self, runner: DaemonRunner, client: ForgedClient
    ) -> None:
        why: list[str] = []
        done: list[int] = []
        async with ElasticWorker("me", config(), job=JOB) as worker:
            worker.leaving.subscribe(why.append)
            await worker.connect(runner.endpoint)
            async for step in worker.steps():
                with step:
                    if step == 3:
                        signal.raise_signal(signal.SIGTERM)
                    await worker.barrier()
                    done.append(int(step))
        assert done == list(range(worker.step))
        assert [fact.reason for fact in await past(client, WorkerLeft)] == why == [SIGTERM_REASON]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    async def test_signals_handled_on_the_scripts_loop_are_left_to_the_script(self, runner: DaemonRunner) -> None:
        heard = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, heard.set)
        try:
            async with ElasticWorker("me", config(), job=JOB) as worker:
                await worker.connect(runner.endpoint)
                signal.raise_signal(signal.SIGTERM)
                await heard.wait()
                assert await worker.begin_step() == 0
        finally:
            assert loop.remove_signal_handler(signal.SIGTERM)


def is_cut_off(worker: ElasticWorker, held: list[int]) -> None:
    assert held
    assert all(is_nothing(number) for number in held)
    for use in (worker.begin_step, worker.finish_step, worker.barrier, worker.register, worker.connect):
        with pytest.raises(RequestRefused) as raised:
            # A coroutine runs up to where it waits.
            use().send(None)
        assert raised.value.code == "worker_forked"
    with pytest.raises(StopIteration):
        worker.disconnect().send(None)
    assert worker.process.is_forked
