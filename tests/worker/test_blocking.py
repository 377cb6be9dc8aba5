"""Training scripts without an event loop, in threads of this process, and a real daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import pytest

from forged.blocking.loop_thread import LoopThread
from forged.client import BlockingClient
from forged.data.model import Dataset
from forged.data.placement.plan import DataRedistributionPlan
from forged.data.store.memory import MemoryShardStore
from forged.data.training import TrainingData
from forged.data.transfer.outcome import MovedShard, TransferReport
from forged.elastic.messages import JobCompleted, WorkerFailed, WorkerJoined, WorkerLeft
from forged.elastic.model import GlobalTrainingState, RescalingEvent, WorkerId, WorkerStatus
from forged.errors import ConfigError, RequestRefused
from forged.kernel.messages import Fact, Record
from forged.net.protocol.messages import INTEGER_MAX
from forged.worker.blocking import Training, join
from forged.worker.errors import JobEnded, StepAborted, WorkerEvicted
from forged.worker.process.pulse import PulseProcess
from forged.worker.process.sigterm import is_heeded
from forged.worker.process.worker_process import OwnProcess
from forged.worker.rescaler import Rescaler
from tests.client.threaded_daemon import ThreadedDaemon
from tests.telemetry.recording_log import RecordingLog
from tests.worker.process.test_forks import in_a_child, is_nothing
from tests.worker.trainers import JOB, PATIENCE_S, advance, chain_after, config

R = TypeVar("R")

STEPS = 12
QUIET_TURNS = 40
TERMINATED_TOO_EARLY = """
import signal, sys
import forged

with forged.join(sys.argv[1], job="run"):
    signal.raise_signal(signal.SIGTERM)
    print("it was not heeded")
"""


def state() -> dict[str, Any]:
    return {"chain": np.zeros(1, np.int64), "scratch": {"last": 0, "many": [np.zeros(3)]}}


def at(endpoint: str, name: str = "me", **given: Any) -> Training:
    """A training that has not begun."""
    options: dict[str, Any] = {"job": JOB, "worker_id": name, "state": state(), "config": config()} | given
    return join(endpoint, **options)


def pulse_of(worker: Training) -> PulseProcess:
    """The process that speaks for it."""
    process = worker.worker.process
    assert isinstance(process, OwnProcess)
    assert process.heart is not None
    return process.heart.pulse


def frames_of(thread: int) -> Iterator[FrameType]:
    """What a thread is doing, the innermost call first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def waits(thread: int) -> bool:
    """Whether a script waits for its worker there."""
    return any(frame.f_code is LoopThread._result_of.__code__ for frame in frames_of(thread))


def learn(worker: Training, step: int) -> None:
    """A script without `with step:` that changes its state before its last collective."""
    assert worker.state["chain"][0] == chain_after(step), f"{worker.worker_id} is not where {step} steps lead"
    assert worker.state["scratch"]["last"] == step
    worker.state["scratch"]["last"] = step + 1
    worker.state["scratch"]["many"][0] += 1
    worker.state["chain"][0] = advance(int(worker.state["chain"][0]), step)
    worker.all_reduce(np.array([step]))


def is_right_behind(steps: int, worker: Training) -> bool:
    scratch = worker.state["scratch"]
    return (
        (worker.step, worker.state["chain"][0]) == (steps, chain_after(steps))
        and scratch["last"] == steps
        and bool((scratch["many"][0] == steps).all())
    )


def train_until_step_two(endpoint: str, error: BaseException) -> None:
    with at(endpoint) as worker:
        for step in worker.steps():
            if step == 2:
                raise error


def meet_at_every_step(worker: Training, before: Callable[[int], object] = lambda step: None) -> None:
    for step in worker.steps():
        before(step)
        worker.barrier()


def descriptors() -> int:
    """How many this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def quiet(count: Callable[[], int], expected: int | None = None) -> int:
    """A count once it is what is expected, or else once it has not changed for a while."""
    found, since, moment = count(), 0, threading.Event()
    while found != expected and since < QUIET_TURNS:
        moment.wait(0.005)
        found, before = count(), found
        since = since + 1 if found == before else 0
    return found


class Scripts:
    """Scripts that run in threads."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.trainings: dict[str, Training] = {}
        self._threads = ThreadPoolExecutor()

    def start(self, name: str, script: Callable[[Training], R], **options: Any) -> Future[R]:
        """Run one; what it returns, or raises, is that of the future."""
        training = self.trainings[name] = at(self.endpoint, name, **options)

        def run() -> R:
            with training as worker:
                return script(worker)

        return self._threads.submit(run)

    def end(self) -> None:
        self._threads.shutdown()


@pytest.fixture
def scripts(threaded_daemon: ThreadedDaemon) -> Iterator[Scripts]:
    scripts = Scripts(threaded_daemon.runner.endpoint)
    yield scripts
    scripts.end()


@pytest.fixture
def client(threaded_daemon: ThreadedDaemon) -> Iterator[BlockingClient]:
    with threaded_daemon.client() as client:
        yield client


@pytest.fixture
def endpoint(threaded_daemon: ThreadedDaemon) -> str:
    return threaded_daemon.runner.endpoint


def past(client: BlockingClient, *types: type[Fact]) -> list[Any]:
    return [item.fact for item in client.past_facts(*types, jobs=[JOB]) if isinstance(item, Record)]


class Meeting:
    """Where scripts wait for what a test, or another script, does."""

    def __init__(self) -> None:
        self._reached = threading.Semaphore(0)
        self._go_on = threading.Event()

    def pass_by(self) -> None:
        """Let it be known that this is reached."""
        self._reached.release()

    def hold(self) -> None:
        """Be here until it goes on."""
        self.pass_by()
        assert self._go_on.wait(PATIENCE_S)

    def wait(self, number: int = 1) -> None:
        """Wait until so many have come here."""
        for _ in range(number):
            assert self._reached.acquire(timeout=PATIENCE_S)

    def go_on(self) -> None:
        self._go_on.set()


class TestSteps:
    @pytest.mark.parametrize("careful", [True, False], ids=["with step", "without"])
    def test_every_step_is_done_once_by_every_worker(
        self, careful: bool, scripts: Scripts, client: BlockingClient
    ) -> None:
        def script(worker: Training) -> list[int]:
            done = []
            for step in worker.steps(STEPS):
                if careful:
                    with step:
                        learn(worker, step)
                else:
                    learn(worker, step)
                done.append(int(step))
            assert is_right_behind(STEPS, worker)
            return done

        two = [scripts.start(name, script, config=config(min_workers=2)) for name in "ab"]
        assert [future.result(PATIENCE_S) for future in two] == [list(range(STEPS))] * 2
        assert [fact.step for fact in past(client, JobCompleted)] == [STEPS]

    def test_aborted_step_without_a_block_restores_the_state(self, scripts: Scripts, client: BlockingClient) -> None:
        meeting = Meeting()
        repeated: dict[str, list[int]] = {"b": [], "c": []}

        def evicted_script(worker: Training) -> None:
            for step in worker.steps():
                if step == 3:
                    meeting.hold()
                learn(worker, step)

        def survivor(worker: Training) -> None:
            for step in worker.steps(STEPS):
                repeated[worker.worker_id.id].append(int(step))
                if step == 3:
                    meeting.pass_by()
                learn(worker, step)
            assert is_right_behind(STEPS, worker)

        two = config(min_workers=2)
        a = scripts.start("a", evicted_script, config=two)
        b = scripts.start("b", survivor, config=two)
        meeting.wait(2)
        client.evict_worker(JOB, "a")
        # The job goes on when it has two again.
        c = scripts.start("c", survivor, config=two)
        b.result(PATIENCE_S)
        c.result(PATIENCE_S)
        meeting.go_on()
        with pytest.raises((WorkerEvicted, JobEnded)):
            a.result(PATIENCE_S)
        assert repeated["b"] == [0, 1, 2, 3, 3, *range(4, STEPS)]
        assert repeated["c"] == list(range(3, STEPS))

    def test_aborted_step_skips_the_rest_of_its_block(self, scripts: Scripts, client: BlockingClient) -> None:
        meeting = Meeting()
        begun: list[int] = []
        done: list[int] = []
        aborted: list[int] = []

        def evicted_script(worker: Training) -> None:
            for step in worker.steps():
                with step:
                    if step == 3:
                        meeting.hold()
                    worker.barrier()

        def survivor(worker: Training) -> None:
            for step in worker.steps(STEPS):
                with step:
                    begun.append(int(step))
                    if step == 3:
                        meeting.pass_by()
                    worker.barrier()
                    done.append(int(step))
                if step.aborted:
                    aborted.append(int(step))

        a = scripts.start("a", evicted_script, config=config(min_workers=2))
        b = scripts.start("b", survivor, config=config(min_workers=2))
        meeting.wait(2)
        client.change_job(JOB, config().to_settings(), client.job(JOB).version)
        client.evict_worker(JOB, "a")
        b.result(PATIENCE_S)
        meeting.go_on()
        with pytest.raises((WorkerEvicted, JobEnded)):
            a.result(PATIENCE_S)
        assert begun == [0, 1, 2, 3, 3, *range(4, STEPS)]
        assert done == list(range(STEPS))
        assert aborted == [3]

    def test_unfinished_step_is_returned_again_by_a_new_iteration(self, endpoint: str) -> None:
        with at(endpoint) as worker:
            for step in worker.steps():
                if step == 3:
                    break
            assert [int(step) for step in worker.steps(5)] == [3, 4]

    def test_script_that_breaks_out_of_its_loop_leaves_and_the_world_trains_on(
        self, scripts: Scripts, client: BlockingClient
    ) -> None:
        def short(worker: Training) -> None:
            for step in worker.steps():
                if step == 3:
                    break
                learn(worker, step)

        def long(worker: Training) -> None:
            for step in worker.steps(STEPS):
                learn(worker, step)
            assert is_right_behind(STEPS, worker)

        settings = config(min_workers=1, max_workers=2, stability_window_ms=60_000)
        a, b = scripts.start("a", short, config=settings), scripts.start("b", long, config=settings)
        a.result(PATIENCE_S)
        b.result(PATIENCE_S)
        assert [(fact.worker_id, fact.reason) for fact in past(client, WorkerLeft)] == [
            ("a", "its script left the step loop"),
            ("b", "training completed"),
        ]
        assert past(client, WorkerFailed) == []


class TestCollectives:
    def test_collectives_run_in_the_current_world(self, scripts: Scripts) -> None:
        def script(worker: Training) -> list[Any]:
            found: list[Any] = []
            for _ in worker.steps(1):
                worker.barrier()
                found = [worker.gather(worker.rank), worker.broadcast(worker.rank + 5, 1), worker.all_reduce(2)]
            return [worker.rank, *found]

        two = [scripts.start(name, script, config=config(min_workers=2)) for name in "ab"]
        found = sorted((future.result(PATIENCE_S) for future in two), key=lambda one: int(one[0]))
        assert found == [[0, [0, 1], 6, 4], [1, None, 6, 4]]

    def test_collectives_before_the_first_world_are_refused(self, endpoint: str) -> None:
        with at(endpoint) as worker:
            for collective in (worker.barrier, lambda: worker.all_reduce(1), lambda: worker.gather(1)):
                with pytest.raises(StepAborted):
                    collective()
            assert [int(step) for step in worker.steps(2)] == [0, 1]

    def test_collectives_between_two_steps_run_in_the_current_world(self, scripts: Scripts) -> None:
        def script(worker: Training) -> int:
            for step in worker.steps():
                if step == 2:
                    break
            total: int = worker.all_reduce(worker.rank + 1)
            return total

        two = [scripts.start(name, script, config=config(min_workers=2)) for name in "ab"]
        assert [future.result(PATIENCE_S) for future in two] == [3, 3]

    def test_aborted_collective_between_two_steps_is_raised(self, scripts: Scripts, client: BlockingClient) -> None:
        meeting = Meeting()

        def stays_behind(worker: Training) -> None:
            for step in worker.steps():
                if step == 2:
                    meeting.hold()

        def goes_ahead(worker: Training) -> None:
            for step in worker.steps():
                if step == 2:
                    break
            meeting.pass_by()
            worker.barrier()

        a = scripts.start("a", stays_behind, config=config(min_workers=2))
        b = scripts.start("b", goes_ahead, config=config(min_workers=2))
        meeting.wait(2)
        client.evict_worker(JOB, "a")
        with pytest.raises(StepAborted):
            b.result(PATIENCE_S)
        meeting.go_on()
        with pytest.raises(WorkerEvicted):
            a.result(PATIENCE_S)


class TestEndOfScript:
    def test_script_that_raises_has_failed_and_keeps_its_error(self, endpoint: str, client: BlockingClient) -> None:
        with pytest.raises(ValueError, match="a mistake"):
            train_until_step_two(endpoint, ValueError("a mistake"))
        assert [fact.reason for fact in past(client, WorkerFailed)] == ["its script failed: ValueError: a mistake"]

    def test_script_that_raises_before_its_first_step_is_never_a_member(
        self, endpoint: str, client: BlockingClient
    ) -> None:
        with pytest.raises(ValueError, match="a mistake"), at(endpoint):
            raise ValueError("a mistake")
        assert past(client, WorkerJoined, WorkerFailed, WorkerLeft) == []

    @pytest.mark.parametrize(
        ("end", "reason"),
        [(SystemExit(3), "its script exited with 3"), (KeyboardInterrupt(), "its script was interrupted")],
        ids=["exit", "interrupt"],
    )
    def test_script_that_is_interrupted_leaves_without_failing(
        self, end: BaseException, reason: str, endpoint: str, client: BlockingClient
    ) -> None:
        with pytest.raises(type(end)):
            train_until_step_two(endpoint, end)
        assert [fact.reason for fact in past(client, WorkerLeft)] == [reason]
        assert past(client, WorkerFailed) == []

    def test_script_interrupted_in_a_collective_ends_at_once(self, scripts: Scripts, client: BlockingClient) -> None:
        meeting = Meeting()
        main = threading.main_thread().ident
        assert main is not None

        def keeps_waiting(worker: Training) -> None:
            for step in worker.steps():
                if step == 2:
                    # The other comes to its collective, or is already there.
                    signal.pthread_kill(main, signal.SIGINT)
                    meeting.hold()
                worker.barrier()

        a = scripts.start("a", keeps_waiting, config=config(min_workers=2))
        with pytest.raises(KeyboardInterrupt), at(scripts.endpoint, "b", config=config(min_workers=2)) as worker:
            meet_at_every_step(worker)
        client.abort_job(JOB)
        meeting.go_on()
        with pytest.raises(JobEnded):
            a.result(PATIENCE_S)
        left = [(fact.worker_id, fact.reason) for fact in past(client, WorkerLeft)]
        assert left[0] == ("b", "its script was interrupted")

    def test_system_exit_of_a_subscriber_ends_the_script_with_its_code(
        self, endpoint: str, client: BlockingClient
    ) -> None:
        def train() -> None:
            with at(endpoint) as worker:
                worker.rescaling_requested.subscribe(lambda event: sys.exit(3))
                meet_at_every_step(worker)

        with pytest.raises(SystemExit) as raised:
            train()
        assert raised.value.code == 3
        assert [fact.reason for fact in past(client, WorkerLeft)] == ["its script exited with 3"]

    def test_end_of_the_job_is_raised(self, endpoint: str, client: BlockingClient) -> None:
        def give_up(step: int) -> None:
            if step == 2:
                client.abort_job(JOB, "enough of it")

        with at(endpoint) as worker, pytest.raises(JobEnded, match="enough of it"):
            meet_at_every_step(worker, give_up)
        assert [fact.reason for fact in past(client, WorkerLeft)] == ["the job was aborted"]
        assert past(client, WorkerFailed) == []

    def test_close_is_idempotent_and_leaks_nothing(self, endpoint: str, client: BlockingClient) -> None:
        worker = at(endpoint).__enter__()
        next(worker.steps())
        pulse = pulse_of(worker)
        worker.close()
        worker.close()
        assert not pulse.alive
        assert client.workers(JOB) == []
        assert not worker.worker.is_connected
        assert [thread.name for thread in threading.enumerate() if "forged-worker" in thread.name] == []

    def test_second_opening_is_refused(self, endpoint: str) -> None:
        training = at(endpoint)
        with training:
            pass
        with pytest.raises(RequestRefused) as raised, training:
            pass
        assert raised.value.code == "training_reopened"

    def test_use_before_the_block_is_refused_with_a_fix(self, endpoint: str) -> None:
        training = at(endpoint)
        for use in (lambda: training.rank, lambda: next(training.steps()), training.barrier):
            with pytest.raises(RequestRefused) as raised:
                use()
            assert raised.value.code == "worker_not_open"
        training.close()

    def test_use_after_the_block_is_refused(self, endpoint: str) -> None:
        with at(endpoint) as worker:
            pass
        for use in (worker.barrier, worker.drain, lambda: worker.update_training_state(0, 0, 0.5)):
            with pytest.raises(RequestRefused) as raised:
                use()
            assert raised.value.code == "worker_not_open"

    def test_ten_workers_leak_no_descriptor_and_no_thread(self, endpoint: str) -> None:
        def once(number: int) -> None:
            with at(endpoint, f"w{number}") as worker:
                next(worker.steps())

        once(0)
        # Those of the daemon are counted too, which lets go of a connection when it has seen its end.
        before = quiet(descriptors), threading.active_count()
        for number in range(1, 11):
            once(number)
        assert (quiet(descriptors, before[0]), threading.active_count()) == before

    def test_refusal_by_the_daemon_leaks_nothing(self, endpoint: str) -> None:
        before = quiet(descriptors)
        with pytest.raises(RequestRefused) as raised, at(endpoint, state={"w": object()}) as worker:
            next(worker.steps())
        assert raised.value.code == "state_unfit"
        with pytest.raises(ConfigError):
            at(endpoint, config=config(min_workers=0)).__enter__()
        assert quiet(descriptors, before) == before


class TestSignals:
    def test_sigterm_finishes_the_step_and_leaves(self, endpoint: str, client: BlockingClient) -> None:
        why: list[str] = []
        done: list[int] = []
        with at(endpoint) as worker:
            worker.leaving.subscribe(why.append)
            for step in worker.steps():
                with step:
                    if step == 3:
                        signal.raise_signal(signal.SIGTERM)
                    worker.barrier()
                    done.append(int(step))
            assert worker.step >= 4
        assert done == list(range(worker.step))
        assert why == ["it received SIGTERM"]
        assert [fact.reason for fact in past(client, WorkerLeft)] == why
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def test_sigterm_ends_a_worker_that_waits_for_a_world(
        self, endpoint: str, client: BlockingClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        main = threading.main_thread().ident
        assert main is not None
        advance = Rescaler.advance

        async def terminate(rescaler: Rescaler) -> None:
            monkeypatch.undo()
            signal.pthread_kill(main, signal.SIGTERM)
            await advance(rescaler)

        monkeypatch.setattr(Rescaler, "advance", terminate)
        with at(endpoint, config=config(min_workers=2)) as worker:
            assert list(worker.steps()) == []
        assert [fact.reason for fact in past(client, WorkerLeft)] == ["it received SIGTERM"]

    def test_sigterm_during_a_wait_is_handled_in_any_thread(self, endpoint: str, client: BlockingClient) -> None:
        main = threading.get_ident()

        def terminate() -> None:
            while not (past(client, WorkerJoined) and waits(main)):
                pass
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

        thread = threading.Thread(target=terminate)
        with at(endpoint, config=config(min_workers=2)) as worker:
            thread.start()
            for _ in worker.steps(STEPS):
                raise AssertionError("no other worker is there")
        thread.join(PATIENCE_S)
        assert [fact.reason for fact in past(client, WorkerLeft)] == ["it received SIGTERM"]

    def test_timeout_error_raised_by_the_scripts_handler_ends_the_wait(self, endpoint: str) -> None:
        def too_late(number: int, frame: object) -> None:
            raise TimeoutError("the script has no more time")

        def remind(script: int) -> None:
            while not waits(script):
                pass
            signal.pthread_kill(script, signal.SIGALRM)

        before = signal.signal(signal.SIGALRM, too_late)
        thread = threading.Thread(target=remind, args=(threading.get_ident(),))
        try:
            with at(endpoint, config=config(min_workers=2)) as worker:
                steps = worker.steps()
                thread.start()
                with pytest.raises(TimeoutError, match="no more time"):
                    next(steps)
        finally:
            signal.signal(signal.SIGALRM, before)
        thread.join(PATIENCE_S)

    def test_handler_of_the_script_may_drain_without_waiting(self, endpoint: str, client: BlockingClient) -> None:
        came_back, waited = threading.Event(), list[bool]()
        before = signal.signal(signal.SIGALRM, lambda number, frame: worker.drain("the host is taken away"))
        try:
            with at(endpoint) as worker:
                for step in worker.steps():
                    if step == 2:
                        worker._checked_loop().tell(lambda: waited.append(not came_back.wait(PATIENCE_S)))
                        signal.raise_signal(signal.SIGALRM)
                        came_back.set()
        finally:
            signal.signal(signal.SIGALRM, before)
        assert waited == [False]
        assert [fact.reason for fact in past(client, WorkerLeft)] == ["the host is taken away"]

    def test_sigterm_before_registration_has_its_default_effect(self, endpoint: str, client: BlockingClient) -> None:
        done = subprocess.run([sys.executable, "-c", TERMINATED_TOO_EARLY, endpoint], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "", "")
        assert past(client, WorkerJoined) == []

    def test_sigterm_handler_of_the_script_is_kept(self, endpoint: str) -> None:
        heard: list[int] = []

        def own(number: int, frame: object) -> None:
            heard.append(number)

        signal.signal(signal.SIGTERM, own)
        try:
            with at(endpoint) as worker:
                for _ in worker.steps(3):
                    assert signal.getsignal(signal.SIGTERM) is own
                    signal.raise_signal(signal.SIGTERM)
                assert worker.step == 3
            assert signal.getsignal(signal.SIGTERM) is own
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert heard == [signal.SIGTERM] * 3

    def test_worker_outside_the_main_thread_handles_no_signals(self, scripts: Scripts) -> None:
        script = scripts.start("a", lambda worker: [signal.getsignal(signal.SIGTERM) for _ in worker.steps(1)])
        assert script.result(PATIENCE_S) == [signal.SIG_DFL]


class TestPulse:
    def test_ended_pulse_is_replaced_at_the_next_step_and_logged(self, endpoint: str) -> None:
        log = RecordingLog()
        with at(endpoint, log=log) as worker:
            steps = worker.steps()
            next(steps)
            first = pulse_of(worker)
            os.kill(first.pid, signal.SIGKILL)
            os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
            next(steps)
            assert pulse_of(worker).alive
            assert pulse_of(worker).pid != first.pid
        assert log.levels("the process that reports this worker's liveness (pulse) has ended; another was started") == {
            "warning"
        }


class TestLeaving:
    def test_leaving_subscriber_may_block_in_the_scripts_thread(self, endpoint: str, client: BlockingClient) -> None:
        found: list[Any] = []

        def save(reason: str) -> None:
            # It is alone in its world and has not left yet.
            worker.barrier()
            found.extend([reason, threading.get_ident(), worker.gather(worker.step), past(client, WorkerLeft)])

        with at(endpoint) as worker:
            worker.leaving.subscribe(save)
            for step in worker.steps():
                if step == 2:
                    worker.drain("it is enough")
        assert found == ["it is enough", threading.get_ident(), [worker.step], []]
        assert [fact.reason for fact in past(client, WorkerLeft)] == ["it is enough"]

    def test_collective_of_a_leaving_worker_is_refused(self, scripts: Scripts) -> None:
        log = RecordingLog()
        has_gone = threading.Event()

        def goes(worker: Training) -> None:
            worker.leaving.subscribe(lambda reason: worker.barrier())
            for step in worker.steps():
                if step == 2:
                    worker.drain()
                worker.barrier()
            has_gone.set()

        def stays(worker: Training) -> None:
            for step in worker.steps():
                with step:
                    worker.barrier()
                if has_gone.is_set():
                    break

        a = scripts.start("a", goes, config=config(min_workers=1, max_workers=2, stability_window_ms=60_000), log=log)
        b = scripts.start("b", stays, config=config(min_workers=1, max_workers=2, stability_window_ms=60_000))
        a.result(PATIENCE_S)
        b.result(PATIENCE_S)
        (failure,) = log.of("a subscriber failed")
        assert failure["event_name"] == "leaving"
        assert "worker_leaving" in failure["reason"] or "is leaving" in failure["reason"]

    def test_blocking_call_of_a_subscriber_is_refused_with_a_fix(self, endpoint: str) -> None:
        log = RecordingLog()
        with at(endpoint, log=log) as worker:
            worker.rescaling_requested.subscribe(lambda event: worker.barrier())
            next(worker.steps())
        (failure,) = log.of("a subscriber failed")
        assert "call it in the next step" in failure["reason"]

    def test_refusal_of_a_completed_job_is_raised_with_few_frames_and_no_context(self, endpoint: str) -> None:
        with at(endpoint) as worker:
            assert [int(step) for step in worker.steps(1)] == [0]
        with at(endpoint, "late") as worker, pytest.raises(RequestRefused, match=r"is completed.*jobs rm") as raised:
            next(worker.steps(1))
        assert [entry.name for entry in raised.traceback][1:] == ["steps", "begin_step", "_come_to_step", "_run"]
        assert raised.value.__suppress_context__

    @pytest.mark.parametrize("event", ["leaving", "rescaling_requested", "state_synchronized"])
    def test_asynchronous_subscriber_of_a_blocking_worker_is_refused(self, event: str, endpoint: str) -> None:
        async def save(value: object) -> None:
            raise AssertionError("never awaited")

        with at(endpoint) as worker, pytest.raises(RequestRefused) as raised:
            getattr(worker, event).subscribe(save)
        assert raised.value.code == "subscriber_asynchronous"

    def test_subscriber_may_drain_the_worker(self, endpoint: str, client: BlockingClient) -> None:
        with at(endpoint) as worker:
            worker.state_synchronized.subscribe(lambda state: worker.drain("it has seen enough"))
            for _ in worker.steps():
                pass
        assert [fact.reason for fact in past(client, WorkerLeft)] == ["it has seen enough"]


class TestForkedChildren:
    @pytest.mark.parametrize("by_a_thread", [False, True], ids=["main thread", "another thread"])
    def test_sigterm_has_its_default_effect_in_forked_children(
        self, by_a_thread: bool, endpoint: str, client: BlockingClient
    ) -> None:
        def forked() -> int:
            child = os.fork()
            if child == 0:
                signal.alarm(round(PATIENCE_S))
                while True:
                    signal.pause()
            os.kill(child, signal.SIGTERM)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        with at(endpoint) as worker:
            for step in worker.steps(3):
                if step == 1:
                    if by_a_thread:
                        with ThreadPoolExecutor(1) as threads:
                            assert threads.submit(forked).result(PATIENCE_S) == -signal.SIGTERM
                    else:
                        assert forked() == -signal.SIGTERM
            assert worker.step == 3
            assert is_heeded()
        assert [fact.reason for fact in past(client, WorkerLeft)] == ["training completed"]

    def test_forked_children_keep_the_scripts_handler(self) -> None:
        heard: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
        try:

            def is_heard() -> None:
                signal.raise_signal(signal.SIGTERM)
                assert heard == [signal.SIGTERM]

            in_a_child(is_heard)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def test_forked_children_hold_no_socket_and_send_nothing(self, endpoint: str, client: BlockingClient) -> None:
        with at(endpoint) as worker:
            for step in worker.steps(4):
                if step == 2:
                    held = [number for number in worker.worker.descriptors() if number >= 0]
                    in_a_child(partial(self._is_cut_off, worker, held))
                worker.barrier()
            assert worker.step == 4
        assert [fact.reason for fact in past(client, WorkerLeft)] == ["training completed"]

    def _is_cut_off(self, worker: Training, held: list[int]) -> None:
        assert held
        assert all(is_nothing(number) for number in held)
        for use in (worker.barrier, worker.drain, lambda: worker.all_reduce(1)):
            with pytest.raises(RequestRefused) as raised:
                use()
            assert raised.value.code == "worker_forked"
        worker.close()
        worker.__exit__(ValueError, ValueError("in the child"), None)

    def test_forked_children_can_read_the_state(self, endpoint: str) -> None:
        with at(endpoint) as worker:
            for step in worker.steps(3):
                learn(worker, step)

            def reads() -> None:
                assert worker.state["chain"][0] == chain_after(3)
                assert worker.step == 3

            in_a_child(reads)


class TestReports:
    def test_events_carry_the_world_and_the_progress(self, scripts: Scripts) -> None:
        rescales: list[RescalingEvent] = []
        synchronised: list[GlobalTrainingState] = []

        def script(worker: Training) -> None:
            worker.rescaling_requested.subscribe(rescales.append)
            worker.state_synchronized.subscribe(synchronised.append)
            for _ in worker.steps(3):
                worker.barrier()

        scripts.start("a", script, learning_rate=0.25, global_batch_size=64).result(PATIENCE_S)
        (rescale,), (global_state,) = rescales, synchronised
        assert [worker.id for worker in rescale.new_topology.workers] == ["a"]
        assert (global_state.learning_rate, global_state.global_batch_size) == (0.25, 64)

    def test_blocking_worker_has_the_properties_of_its_worker(self, endpoint: str) -> None:
        with at(endpoint, learning_rate=0.25, global_batch_size=64, attributes={"gpu": "none"}) as worker:
            assert (worker.rank, worker.world_size, worker.generation) == (-1, 0, 0)
            assert worker.current_topology is None
            assert worker.current_state is None
            next(worker.steps())
            assert (worker.rank, worker.world_size, worker.generation) == (0, 1, 1)
            assert worker.term > 0
            topology, now = worker.current_topology, worker.current_state
            assert topology is not None
            assert topology.workers == (worker.worker_id,)
            assert now is not None
            assert (now.learning_rate, now.global_batch_size) == (0.25, 64)
            assert (worker.learning_rate, worker.global_batch_size, worker.step) == (0.25, 64, 0)
            assert worker.should_handle_shard(3, 4)
            metadata = worker.worker.get_metadata()
            assert (metadata.status, metadata.custom_attributes) == (WorkerStatus.ACTIVE, {"gpu": "none"})

    def test_transfers_fetch_shards_from_another_worker(self, scripts: Scripts) -> None:
        dataset, stores = Dataset(8, 4), {name: MemoryShardStore() for name in "ab"}
        for shard in range(4):
            stores["b"].put(shard, [b"%d" % shard * 100])

        def script(worker: Training) -> list[MovedShard | None]:
            moved: list[MovedShard | None] = []
            for _ in worker.steps(2):
                if worker.worker_id.id == "a" and not moved:
                    assert worker.current_topology is not None
                    (other,) = set(worker.current_topology.workers) - {worker.worker_id}
                    theirs = (shard for shard in range(4) if not worker.should_handle_shard(shard, 4))
                    moved = [
                        worker.transfers.transfer_data_shards(other, worker.worker_id, dataset.shard(shard))
                        for shard in theirs
                    ]
                worker.barrier()
            return moved

        both = [
            scripts.start(name, script, config=config(min_workers=2), data=TrainingData(8, 4, store))
            for name, store in stores.items()
        ]
        moved, nothing = [script.result(PATIENCE_S) for script in both]
        assert (len([one for one in moved if one is not None]), nothing) == (2, [])
        assert set(stores["a"].held()) == {0, 1, 2, 3}

    def test_plan_without_transfers_to_a_worker_is_done_at_once(self, endpoint: str) -> None:
        with at(endpoint) as worker:
            assert worker.redistribute_data(DataRedistributionPlan()) == TransferReport()

    def test_progress_may_be_set_before_the_training_begins(self, endpoint: str) -> None:
        with at(endpoint) as worker:
            worker.update_training_state(2, 40, 0.5)
            assert [int(step) for step in worker.steps(42)] == [40, 41]
            assert worker.current_state is not None
            assert (worker.current_state.current_epoch, worker.learning_rate) == (2, 0.5)

    def test_numpy_numbers_are_accepted_across_rescales(self, scripts: Scripts) -> None:
        meeting = Meeting()
        settings = config(max_workers=2)

        def first(worker: Training) -> tuple[float, int]:
            for step in worker.steps():
                with step:
                    worker.barrier()
                place: tuple[Any, ...] = np.int64(1), np.int64(worker.step), np.float64(0.25)
                worker.update_training_state(*place)
                if step == 3:
                    meeting.hold()
                if worker.world_size == 2:
                    break
            return worker.learning_rate, worker.global_batch_size

        def second(worker: Training) -> tuple[float, int]:
            for step in worker.steps():
                with step:
                    worker.barrier()
                break
            return worker.learning_rate, worker.global_batch_size

        numbers = {"learning_rate": np.float64(0.5), "global_batch_size": np.int64(32)}
        a = scripts.start("a", first, config=settings, **numbers)
        meeting.wait()
        b = scripts.start("b", second, config=settings, **numbers)
        meeting.go_on()
        assert a.result(PATIENCE_S) == b.result(PATIENCE_S) == (0.25, 32)

    def test_step_counter_cannot_be_set_inside_a_world(self, endpoint: str) -> None:
        with at(endpoint) as worker:
            next(worker.steps())
            with pytest.raises(RequestRefused) as raised:
                worker.update_training_state(1, 7, 0.5)
            assert raised.value.code == "step_counted"

    def test_worker_without_a_name_gets_a_unique_one(self, endpoint: str) -> None:
        names = set()
        for _ in range(2):
            with join(endpoint, job=JOB) as worker:
                names.add(worker.worker_id.id)
        assert len(names) == 2
        assert all(f"-{os.getpid()}-" in name for name in names)

    def test_explicit_address_is_used(self, endpoint: str) -> None:
        with join(endpoint, job=JOB, worker_id=WorkerId("me", "127.0.0.1", 0)) as worker:
            assert worker.worker_id.hostname == "127.0.0.1"
            assert worker.worker_id.port > 0

    def test_concurrent_reader_sees_consistent_worlds(self, scripts: Scripts, client: BlockingClient) -> None:
        over = threading.Event()

        def script(worker: Training) -> None:
            for step in worker.steps(40):
                learn(worker, step)
                if step % 4 == 0:
                    client.rescale_job(JOB)

        def look() -> int:
            looks = 0
            while not over.is_set():
                training = scripts.trainings["a"]
                topology = training.current_topology if training._worker is not None else None
                if topology is not None:
                    assert topology.world_size == 1
                    rank = training.worker.get_metadata().rank
                    # A worker whose training is over meanwhile has none.
                    assert rank == topology.rank_of(training.worker_id) or not training.worker.is_connected
                    looks += 1
            return looks

        with ThreadPoolExecutor(1) as watcher:
            a = scripts.start("a", script)
            looking = watcher.submit(look)
            try:
                a.result(PATIENCE_S)
                assert scripts.trainings["a"].generation >= 8
            finally:
                over.set()
            assert looking.result(PATIENCE_S) > 0


def test_endpoint_and_job_are_read_from_the_environment(
    threaded_daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGED_ENDPOINT", threaded_daemon.runner.endpoint)
    monkeypatch.setenv("FORGED_JOB", "named-outside")
    with join() as worker:
        assert worker.job == "named-outside"
    with join(job="named-here") as worker:
        assert worker.job == "named-here"


@pytest.mark.parametrize(
    ("total", "size", "shares"),
    [
        (0, 3, [0, 0, 0]),
        (2, 3, [0, 1, 1]),
        (10, 1, [10]),
        (10, 3, [3, 3, 4]),
        (64, 4, [16] * 4),
    ],
)
def test_shares_cover_the_total_in_rank_order(
    total: int, size: int, shares: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = join("tcp://127.0.0.1:1")
    monkeypatch.setattr(Training, "world_size", size)
    found: list[range] = []
    for rank in range(size):
        monkeypatch.setattr(Training, "rank", rank)
        found.append(training.share(total))
    assert [len(share) for share in found] == shares
    assert [one for share in found for one in share] == list(range(total))


def test_worker_in_no_world_has_no_share(endpoint: str) -> None:
    with at(endpoint) as worker:
        assert worker.share(64) == range(0)


@pytest.mark.parametrize("total", [-1, 1.5, 240.0, "240", None, [1, 2]])
def test_share_of_an_invalid_total_is_refused(endpoint: str, total: Any) -> None:
    with at(endpoint) as worker, pytest.raises(RequestRefused) as error:
        worker.share(total)
    expected = f"total must be an integer from 0 to {INTEGER_MAX}, got {total!r}"
    assert (error.value.code, error.value.message) == ("number_invalid", expected)
