"""The events of a worker's worlds: entered, in the script's thread, and over, in the worker's."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from forged.client import BlockingClient
from forged.elastic.messages import JobAborted, JobCompleted, RescaleCompleted, WorkerFailed
from forged.elastic.model import ClusterTopology, WorldOver
from forged.errors import RequestRefused
from forged.worker.blocking import Training
from forged.worker.errors import StepAborted
from tests.client.daemon_runner import DaemonRunner
from tests.worker import released_collectives
from tests.worker.test_blocking import Scripts, at, client, endpoint, is_right_behind, past, scripts
from tests.worker.trainers import JOB, PATIENCE_S, advance, chain_after, config, shared_worker

__all__ = ["client", "endpoint", "scripts"]

STEPS = 8
VOIDED = 3
TWO = config(max_workers=2, stability_window_ms=60_000)
PROCESS_PATIENCE_S = 60.0


def train(worker: Training, step: int) -> None:
    worker.all_reduce(np.array([step]))
    worker.state["scratch"]["last"] = step + 1
    worker.state["scratch"]["many"][0] += 1
    worker.state["chain"][0] = advance(int(worker.state["chain"][0]), step)


def started(endpoint: str, name: str, victim_rank: int, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", released_collectives.__name__, endpoint, name, str(STEPS), str(victim_rank), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class TestEntered:
    def test_subscribers_use_collectives_in_the_scripts_thread_before_the_first_step(self, scripts: Scripts) -> None:
        def script(worker: Training) -> list[object]:
            told: list[object] = []

            def enter(topology: ClusterTopology) -> None:
                assert topology == worker.current_topology
                assert not worker.worker.is_rescaling
                names = worker.gather(worker.rank)
                told.append((worker.generation, worker.step, worker.broadcast(7), names, threading.get_ident()))

            worker.world_entered.subscribe(enter)
            for step in worker.steps(3):
                told.append(int(step))
                with step:
                    train(worker, step)
            return [threading.get_ident(), *told]

        futures = [scripts.start(name, script, config=TWO) for name in "ab"]
        results = sorted((future.result(PATIENCE_S) for future in futures), key=lambda told: told[1][3] is None)  # type: ignore[index]
        for told, names in zip(results, ([0, 1], None), strict=True):
            thread, entered, *steps = told
            assert entered == (1, 0, 7, names, thread)
            assert steps == [0, 1, 2]

    def test_aborted_entry_happens_again_in_the_next_world_with_its_state(
        self, scripts: Scripts, client: BlockingClient
    ) -> None:
        def script(worker: Training) -> list[tuple[int, int]]:
            entered: list[tuple[int, int]] = []
            overs: list[WorldOver] = []
            worker.world_over.subscribe(overs.append)

            def enter(topology: ClusterTopology) -> None:
                entered.append((topology.generation, worker.step))
                if worker.rank == 0 and len(entered) < 3:
                    raise StepAborted("no port is free")
                worker.barrier()

            worker.world_entered.subscribe(enter)
            for step in worker.steps(STEPS):
                with step:
                    train(worker, step)
            assert is_right_behind(STEPS, worker)
            assert [over.generation for over in overs][:2] == [1, 2]
            assert all("no port is free" in over.reason for over in overs[:2])
            return entered

        futures = [scripts.start(name, script, config=TWO) for name in "ab"]
        for future in futures:
            entered = future.result(PATIENCE_S)
            # A rank that hears of the end of a world before it comes to its entry has no such event there.
            assert entered[-1] == (3, 0)
            assert set(entered) <= {(1, 0), (2, 0), (3, 0)}
        assert past(client, WorkerFailed, JobAborted) == []
        assert [fact.step for fact in past(client, JobCompleted)] == [STEPS]

    def test_other_exception_of_a_subscriber_leaves_the_steps(self, endpoint: str, client: BlockingClient) -> None:
        def enter(topology: ClusterTopology) -> None:
            raise ValueError("a mistake")

        def script() -> None:
            with at(endpoint) as worker:
                worker.world_entered.subscribe(enter)
                next(worker.steps())

        with pytest.raises(ValueError, match="a mistake"):
            script()
        assert [fact.reason for fact in past(client, WorkerFailed)] == ["its script failed: ValueError: a mistake"]

    def test_event_happens_once_for_each_world_also_in_two_loops(self, endpoint: str) -> None:
        entered: list[int] = []
        with at(endpoint) as worker:
            worker.world_entered.subscribe(lambda topology: entered.append(topology.generation))
            for total in (2, 4):
                for _ in worker.steps(total):
                    if total == 2 and worker.step == 1:
                        break
        assert entered == [1]

    async def test_asynchronous_subscribers_are_awaited(self, runner: DaemonRunner) -> None:
        entered: list[tuple[int, int]] = []

        async def train_one(name: str) -> int:
            state = {"chain": np.zeros(1, np.int64)}
            async with shared_worker(name, TWO, job=JOB, state=state) as worker:

                async def enter(topology: ClusterTopology) -> None:
                    await worker.barrier()
                    entered.append((topology.generation, worker.step))
                    if len(entered) == 1:
                        raise ConnectionError("a peer is gone")

                worker.world_entered.subscribe(enter)
                worker.world_over.subscribe(lambda over: None)
                await worker.connect(runner.endpoint)
                async for step in worker.steps(STEPS):
                    with step:
                        await worker.all_reduce(np.array([step]))
                        state["chain"][0] = advance(int(state["chain"][0]), step)
            return int(state["chain"][0])

        async with asyncio.timeout(PATIENCE_S):
            one, other = await asyncio.gather(train_one("a"), train_one("b"), return_exceptions=True)
        # The first subscriber has failed by itself: its worker fails, and the other one trains on.
        assert sorted((one, other), key=str) == [
            chain_after(STEPS),
            *[e for e in (one, other) if isinstance(e, Exception)],
        ]
        assert sum(isinstance(outcome, ConnectionError) for outcome in (one, other)) == 1
        assert len({generation for generation, _ in entered}) == 2


class TestOver:
    def test_script_that_voids_a_step_releases_a_rank_that_hangs(self, scripts: Scripts) -> None:
        def script(worker: Training) -> list[WorldOver]:
            overs: list[WorldOver] = []
            released = threading.Event()

            def end(over: WorldOver) -> None:
                overs.append(over)
                released.set()

            worker.world_over.subscribe(end)
            for step in worker.steps(STEPS):
                with step:
                    worker.barrier()
                    if step == VOIDED and worker.generation == 1:
                        if worker.rank == 1:
                            step.abort("the sum is not finite")
                        assert released.wait(PATIENCE_S), "no event arrives while the script hangs"
                        raise RuntimeError("connection closed by peer")
                    train(worker, step)
            assert is_right_behind(STEPS, worker)
            return overs

        futures = [scripts.start(name, script, config=TWO) for name in "ab"]
        for future in futures:
            first, *rest = future.result(PATIENCE_S)
            assert (first.generation, first.peer, first.is_orderly) == (1, "", False)
            assert first.reason.endswith("voided step 3: the sum is not finite")
            assert len(rest) <= 1
            assert all(over.is_orderly for over in rest)

    def test_worker_that_completes_tells_the_end_of_its_world(self, endpoint: str) -> None:
        overs: list[WorldOver] = []
        with at(endpoint) as worker:
            worker.world_over.subscribe(overs.append)
            assert [int(step) for step in worker.steps(3)] == [0, 1, 2]
            assert [(over.generation, over.is_orderly) for over in overs] == [(1, True)]
        assert len(overs) == 1

    def test_joiner_makes_the_old_world_end_in_order_before_the_new_one_is_entered(
        self, scripts: Scripts, client: BlockingClient
    ) -> None:
        told: list[tuple[str, int, bool]] = []
        has_joined = threading.Event()

        def first(worker: Training) -> None:
            worker.world_over.subscribe(lambda over: told.append(("over", over.generation, over.is_orderly)))
            worker.world_entered.subscribe(lambda topology: told.append(("entered", topology.generation, True)))
            for step in worker.steps():
                with step:
                    worker.barrier()
                if worker.world_size == 2:
                    has_joined.set()
                    break

        def second(worker: Training) -> None:
            for step in worker.steps():
                with step:
                    worker.barrier()

        one = scripts.start("a", first, config=config())
        scripts.start("b", second, config=config())
        one.result(PATIENCE_S)
        assert has_joined.is_set()
        generations = sorted({generation for _, generation, _ in told})
        *before, last = generations
        expected = [(what, generation, True) for generation in before for what in ("entered", "over")]
        # The script leaves its loop within the step.
        assert told == [*expected, ("entered", last, True), ("over", last, False)]
        client.abort_job(JOB)


class TestProcesses:
    @pytest.mark.parametrize("victim_rank", [0, 2], ids=["hub", "member"])
    def test_killed_peer_releases_collectives_that_would_never_end(
        self, victim_rank: int, endpoint: str, client: BlockingClient
    ) -> None:
        processes = [started(endpoint, name, victim_rank, "dies") for name in "abc"]
        self._train_on(processes, client)

    def test_rank_that_hangs_before_a_meeting_is_named_and_its_eviction_releases_the_rest(
        self, endpoint: str, client: BlockingClient
    ) -> None:
        processes = {name: started(endpoint, name, 1, "hangs") for name in "abc"}
        told, deadline = "", time.monotonic() + PROCESS_PATIENCE_S
        while released_collectives.MEETING not in told or " stalled for " not in told:
            assert time.monotonic() < deadline, told
            with contextlib.suppress(RequestRefused):
                told = client.cluster(JOB).stall_report
        assert f"not come to meeting {released_collectives.MEETING!r}" in told
        hanging = told.split(" stalled for ")[0][-1]
        job = client.job(JOB)
        client.change_job(JOB, job.settings | {"evict_stalled": True}, job.version)
        while not past(client, WorkerFailed):
            assert time.monotonic() < deadline, client.cluster(JOB).stall_report
        processes[hanging].kill()
        self._train_on(list(processes.values()), client)
        (failed,) = past(client, WorkerFailed)
        assert failed.worker_id == hanging
        assert "no progress" in failed.reason

    def _train_on(self, processes: list[subprocess.Popen[str]], client: BlockingClient) -> None:
        ended = [(*process.communicate(timeout=PROCESS_PATIENCE_S), process.returncode) for process in processes]
        survivors = [out for out, _, code in ended if code == 0]
        assert len(survivors) == 2, ended
        assert all("released" in out for out in survivors), ended
        for out in survivors:
            *_, last = out.splitlines()
            assert last.split() == [str(STEPS), str(released_collectives.chain_after(STEPS))]
        assert len(past(client, WorkerFailed)) == 1
        assert past(client, JobAborted) == []
        assert len(past(client, RescaleCompleted)) >= 2
        assert [fact.step for fact in past(client, JobCompleted)] == [STEPS]
