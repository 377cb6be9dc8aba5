"""Exceptions that leave a step: the end of the step's world, a step that the script voids, or the script's failure."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import numpy as np
import pytest

from forged.client import BlockingClient, ForgedClient
from forged.elastic.messages import JobAborted, JobCompleted, RescaleCompleted, WorkerFailed
from forged.worker.blocking import Training
from forged.worker.errors import StepAborted
from forged.worker.steps import step_errors
from tests.client.daemon_runner import DaemonRunner
from tests.telemetry.recording_log import RecordingLog
from tests.worker import own_collectives
from tests.worker.test_blocking import Meeting, Scripts, client, endpoint, is_right_behind, past, scripts
from tests.worker.trainers import JOB, PATIENCE_S, advance, chain_after, config, shared_worker
from tests.worker.trainers import past as past_of

__all__ = ["client", "endpoint", "scripts"]

STEPS = 10
VOIDED = 4
PROCESS_PATIENCE_S = 60.0


def careful(worker: Training, step: int) -> None:
    """Train one step without a collective of the library after the change of the state."""
    worker.all_reduce(np.array([step]))
    worker.state["scratch"]["last"] = step + 1
    worker.state["scratch"]["many"][0] += 1
    worker.state["chain"][0] = advance(int(worker.state["chain"][0]), step)


class TestOwnCollectives:
    @pytest.mark.parametrize("victim_rank", [0, 2], ids=["hub", "member"])
    def test_death_in_a_collective_of_the_scripts_own_does_not_end_the_job(
        self, victim_rank: int, endpoint: str, client: BlockingClient
    ) -> None:
        command = [sys.executable, "-m", own_collectives.__name__, endpoint]
        processes = [
            subprocess.Popen(
                [*command, name, str(STEPS), str(victim_rank)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name in "abc"
        ]
        ended = [(*process.communicate(timeout=PROCESS_PATIENCE_S), process.returncode) for process in processes]
        survivors = [(out, err) for out, err, code in ended if code == 0]
        assert len(survivors) == 2, ended
        for out, _ in survivors:
            assert out.split() == [str(STEPS), str(own_collectives.chain_after(STEPS))]
        # A member that hears of the failure before it begins its collective sees no error of its own.
        errors = [err for _, err in survivors if "the step is repeated, because its world is over" in err]
        assert errors
        assert all("RuntimeError: own collective" in err for err in errors)
        assert past(client, JobAborted) == []
        assert len(past(client, WorkerFailed)) == 1
        assert [fact.step for fact in past(client, JobCompleted)] == [STEPS]

    def test_departure_of_a_member_before_the_exception_repeats_the_step(self, scripts: Scripts) -> None:
        meeting = Meeting()

        def leaves(worker: Training) -> None:
            for step in worker.steps():
                if step == 3:
                    meeting.wait()
                    return
                with step:
                    careful(worker, step)

        def stays(worker: Training) -> None:
            for step in worker.steps(STEPS):
                with step:
                    if step == 3 and worker.world_size == 2:
                        meeting.pass_by()
                        raise ConnectionError("the peer has closed the connection")
                    careful(worker, step)
            assert is_right_behind(STEPS, worker)

        settings = config(max_workers=2, stability_window_ms=60_000)
        two = [scripts.start("a", leaves, config=settings), scripts.start("b", stays, config=settings)]
        for future in two:
            future.result(PATIENCE_S)


class TestFailures:
    def test_exception_in_a_world_of_one_is_raised_at_once(self, scripts: Scripts, client: BlockingClient) -> None:
        log = RecordingLog()

        def script(worker: Training) -> None:
            for step in worker.steps():
                with step:
                    raise ValueError("a mistake")

        with pytest.raises(ValueError, match="a mistake"):
            scripts.start("a", script, log=log).result(PATIENCE_S)
        assert log.of("an exception left the step; waiting for evidence that a worker of its world is lost") == []

    def test_same_exception_on_all_ranks_is_raised_on_each(self, scripts: Scripts, client: BlockingClient) -> None:
        logs = [RecordingLog(), RecordingLog()]

        def script(worker: Training) -> None:
            for step in worker.steps():
                with step:
                    careful(worker, step)
                    if step == 3:
                        raise ValueError("a mistake")

        settings = config(max_workers=2, stability_window_ms=60_000)
        two = [scripts.start(name, script, config=settings, log=log) for name, log in zip("ab", logs, strict=True)]
        for future in two:
            with pytest.raises(ValueError, match="a mistake"):
                future.result(PATIENCE_S)
        for log in logs:
            (waiting,) = log.of("an exception left the step; waiting for evidence that a worker of its world is lost")
            assert waiting["error"] == "ValueError: a mistake"
        assert {fact.reason for fact in past(client, WorkerFailed)} <= {"its script failed: ValueError: a mistake"}

    def test_interrupt_is_raised_without_a_wait(self, scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(step_errors, "EVIDENCE_TIMEOUT_S", 2 * PATIENCE_S)

        def script(worker: Training) -> None:
            for step in worker.steps():
                with step:
                    careful(worker, step)
                    raise KeyboardInterrupt

        def peer(worker: Training) -> None:
            for step in worker.steps(1):
                with step:
                    careful(worker, step)

        settings = config(max_workers=2, stability_window_ms=60_000)
        one, other = scripts.start("a", script, config=settings), scripts.start("b", peer, config=settings)
        with pytest.raises(KeyboardInterrupt):
            one.result(PATIENCE_S)
        other.result(PATIENCE_S)


class TestVoidedSteps:
    @pytest.mark.parametrize("workers", [1, 3])
    def test_step_that_a_script_voids_is_repeated_at_all_ranks(
        self, workers: int, scripts: Scripts, client: BlockingClient
    ) -> None:
        begun: dict[str, list[int]] = {}

        def script(worker: Training) -> None:
            mine = begun.setdefault(worker.worker_id.id, [])
            for step in worker.steps(STEPS):
                with step:
                    mine.append(int(step))
                    if worker.rank == workers - 1 and mine.count(VOIDED) <= VOIDED and step == VOIDED:
                        raise StepAborted("a batch was damaged")
                    careful(worker, step)
            assert is_right_behind(STEPS, worker)

        settings = config(max_workers=workers, stability_window_ms=60_000)
        futures = [scripts.start(name, script, config=settings) for name in "abc"[:workers]]
        for future in futures:
            future.result(PATIENCE_S)
        # Three worlds in a row with peer reports would evict a worker.
        most = [*range(VOIDED), *[VOIDED] * (VOIDED + 1), *range(VOIDED + 1, STEPS)]
        # A rank that has not begun the step when it is voided begins it in a later world only.
        assert max(begun.values(), key=len) == most
        assert all(steps == sorted(steps) and set(steps) == set(range(STEPS)) for steps in begun.values())
        assert past(client, WorkerFailed, JobAborted) == []
        reasons = [fact.reason for fact in past(client, RescaleCompleted)][1:]
        # At the end a world may form without a worker that was done before the other workers.
        reasons = [reason for reason in reasons if "training completed" not in reason]
        assert len(reasons) == VOIDED
        assert all(reason.endswith(f"voided step {VOIDED}: a batch was damaged") for reason in reasons), reasons

    def test_step_voided_after_other_ranks_have_finished_it_is_repeated_from_the_state_before(
        self, scripts: Scripts
    ) -> None:
        voided: list[int] = []

        def voids(worker: Training) -> None:
            for step in worker.steps(STEPS):
                with step:
                    worker.all_reduce(np.array([step]))
                    if step == VOIDED and not voided:
                        voided.append(step)
                        raise StepAborted("the sum is not finite")
                    worker.state["scratch"]["last"] = step + 1
                    worker.state["scratch"]["many"][0] += 1
                    worker.state["chain"][0] = advance(int(worker.state["chain"][0]), step)
            assert is_right_behind(STEPS, worker)

        def trains(worker: Training) -> None:
            for step in worker.steps(STEPS):
                with step:
                    careful(worker, step)
            assert is_right_behind(STEPS, worker)

        settings = config(max_workers=2, stability_window_ms=60_000)
        two = [scripts.start("a", voids, config=settings), scripts.start("b", trains, config=settings)]
        for future in two:
            future.result(PATIENCE_S)
        assert voided == [VOIDED]

    async def test_asynchronous_script_voids_a_step_with_either_block(self, runner: DaemonRunner) -> None:
        async def train(name: str) -> tuple[int, set[int]]:
            state = {"chain": np.zeros(1, np.int64)}
            settings = config(max_workers=2, stability_window_ms=60_000)
            voided = set[int]()
            async with shared_worker(name, settings, job=JOB, state=state) as worker:
                await worker.connect(runner.endpoint)

                async def do(step: int) -> None:
                    await worker.all_reduce(np.array([step]))
                    if name == "b" and step in (2, 5) and step not in voided:
                        voided.add(step)
                        raise StepAborted("a batch was damaged")
                    state["chain"][0] = advance(int(state["chain"][0]), step)

                async for step in worker.steps(STEPS):
                    if step % 2:
                        async with step:
                            await do(step)
                    else:
                        with step:
                            await do(step)
            return int(state["chain"][0]), voided

        async with asyncio.timeout(PATIENCE_S):
            results = list(await asyncio.gather(train("a"), train("b")))
        assert results == [(chain_after(STEPS), set()), (chain_after(STEPS), {2, 5})]

    async def test_asynchronous_block_waits_for_the_evidence(self, runner: DaemonRunner) -> None:
        """The exception comes first, then the death of the peer that has caused it."""
        settings = config(max_workers=2, stability_window_ms=60_000)
        state = {"chain": np.zeros(1, np.int64)}
        a = shared_worker("a", settings, job=JOB, state=state)
        b = shared_worker("b", settings, job=JOB, state={"chain": np.zeros(1, np.int64)})
        raised = asyncio.Event()

        async def dies() -> None:
            async with b.session(runner.endpoint):
                async for step in b.steps():
                    if step == 3:
                        await raised.wait()
                        raise RuntimeError("it dies")
                    await b.all_reduce(np.array([step]))

        async def survives() -> None:
            async with a.session(runner.endpoint):
                async for step in a.steps(STEPS):
                    async with step:
                        if step == 3 and a.world_size == 2:
                            raised.set()
                            raise ConnectionError("a peer has closed the connection")
                        await a.all_reduce(np.array([step]))
                        state["chain"][0] = advance(int(state["chain"][0]), step)

        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(survives(), dies(), return_exceptions=True)
        assert state["chain"][0] == chain_after(STEPS)
        async with ForgedClient(runner.endpoint) as asking:
            assert await past_of(asking, JobAborted) == []
