"""Steps whose ranks vote before their scripts change their states, and loops that are not the worker's."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest

from forged.client import BlockingClient
from forged.data.sampling.sampler import ElasticSampler
from forged.elastic.messages import JobAborted, JobCompleted, WorkerFailed
from forged.errors import RequestRefused
from forged.worker.blocking import Training
from forged.worker.errors import StepAborted
from forged.worker.steps import step_errors
from tests.client.daemon_runner import DaemonRunner
from tests.worker.test_blocking import Meeting, Scripts, at, client, endpoint, is_right_behind, past, scripts
from tests.worker.trainers import JOB, PATIENCE_S, advance, chain_after, config, shared_worker

__all__ = ["client", "endpoint", "scripts"]

STEPS = 8
FAILS_AT = 4
TWO = config(max_workers=2, stability_window_ms=60_000)
ALONE = config(min_workers=1, max_workers=1)


def change_state(worker: Training, step: int) -> None:
    worker.state["scratch"]["last"] = step + 1
    worker.state["scratch"]["many"][0] += 1
    worker.state["chain"][0] = advance(int(worker.state["chain"][0]), step)


class TestCommit:
    def test_rank_that_fails_after_the_commit_makes_no_other_rank_repeat_the_step(
        self, scripts: Scripts, client: BlockingClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # An exception after the commit waits for no evidence.
        monkeypatch.setattr(step_errors, "EVIDENCE_TIMEOUT_S", 2 * PATIENCE_S)

        def fails(worker: Training) -> None:
            for step in worker.steps():
                with step:
                    step.commit()
                    if step == FAILS_AT:
                        raise ValueError("a mistake in the optimizer")
                    change_state(worker, step)

        def survives(worker: Training) -> list[tuple[int, bool]]:
            done = []
            for step in worker.steps(STEPS):
                with step:
                    step.commit()
                    assert step.is_committed
                    change_state(worker, step)
                done.append((int(step), step.aborted))
                assert step.is_committed
            assert is_right_behind(STEPS, worker)
            return done

        one, other = scripts.start("a", fails, config=TWO), scripts.start("b", survives, config=TWO)
        with pytest.raises(ValueError, match="a mistake"):
            one.result(PATIENCE_S)
        assert other.result(PATIENCE_S) == [(step, False) for step in range(STEPS)]
        assert [fact.worker_id for fact in past(client, WorkerFailed)] == ["a"]

    def test_exception_after_the_commit_is_raised_though_the_world_is_over(self, scripts: Scripts) -> None:
        meeting = Meeting()

        def leaves(worker: Training) -> None:
            for step in worker.steps():
                with step:
                    step.commit()
                    if step == FAILS_AT:
                        meeting.wait()
                        return
                    change_state(worker, step)

        def fails(worker: Training) -> None:
            over: list[object] = []
            worker.world_over.subscribe(over.append)
            for step in worker.steps():
                with step:
                    step.commit()
                    if step == FAILS_AT:
                        meeting.pass_by()
                        while not over:
                            pass
                        raise StepAborted("the state is half changed")
                    change_state(worker, step)

        one, other = scripts.start("a", leaves, config=TWO), scripts.start("b", fails, config=TWO)
        with pytest.raises(StepAborted, match="half changed"):
            other.result(PATIENCE_S)
        one.result(PATIENCE_S)

    @pytest.mark.parametrize("how", ["block", "steps"])
    def test_script_that_goes_on_after_an_exception_takes_the_state_of_another_worker(
        self, how: str, scripts: Scripts, client: BlockingClient
    ) -> None:
        def half_changes(worker: Training, step: int) -> None:
            change_state(worker, step)
            worker.state["chain"][0] = -1
            raise KeyboardInterrupt if how == "steps" else ValueError("a mistake in the optimizer")

        def goes_on(worker: Training) -> None:
            failed: list[int] = []

            def train() -> None:
                for step in worker.steps(STEPS):
                    try:
                        with step:
                            step.commit()
                            if step == FAILS_AT and not failed:
                                failed.append(step)
                                half_changes(worker, step)
                            change_state(worker, step)
                    except ValueError:
                        pass

            try:
                train()
            except KeyboardInterrupt:
                train()
            assert failed == [FAILS_AT]
            assert is_right_behind(STEPS, worker)

        def trains(worker: Training) -> list[int]:
            done = []
            for step in worker.steps(STEPS):
                with step:
                    step.commit()
                    done.append(int(step))
                    change_state(worker, step)
            assert is_right_behind(STEPS, worker)
            return done

        one, other = scripts.start("a", goes_on, config=TWO), scripts.start("b", trains, config=TWO)
        one.result(PATIENCE_S)
        assert other.result(PATIENCE_S) == list(range(STEPS))
        assert past(client, WorkerFailed, JobAborted) == []

    def test_workers_that_all_half_change_their_states_go_on_with_none_of_them(self, scripts: Scripts) -> None:
        def fails(worker: Training) -> None:
            for step in worker.steps(STEPS):
                with contextlib.suppress(ValueError), step:
                    step.commit()
                    if step == FAILS_AT:
                        raise ValueError("a mistake in the optimizer")
                    change_state(worker, step)

        both = [scripts.start(name, fails, config=TWO) for name in "ab"]
        for one in both:
            with pytest.raises(RequestRefused, match="has left a step after its commit"):
                one.result(PATIENCE_S)

    def test_worker_that_is_alone_goes_on_after_it_has_restored_its_state(self, scripts: Scripts) -> None:
        def restores(worker: Training) -> int:
            failed = 0
            for step in worker.steps(STEPS):
                try:
                    with step:
                        step.commit()
                        change_state(worker, step)
                        if step == FAILS_AT and not failed:
                            raise ValueError("a mistake in the optimizer")
                except ValueError:
                    failed += 1
                    worker.state["chain"][0] = chain_after(worker.step)
                    worker.update_training_state(0, worker.step, 0.1)
            assert worker.state["chain"][0] == chain_after(STEPS)
            return failed

        assert scripts.start("a", restores, config=ALONE).result(PATIENCE_S) == 1

    @pytest.mark.parametrize("careful", [True, False], ids=["with step", "without"])
    def test_vote_that_is_refused_aborts_the_step_at_all_ranks(
        self, careful: bool, scripts: Scripts, client: BlockingClient
    ) -> None:
        def voids(worker: Training) -> None:
            voided: list[int] = []
            for step in worker.steps(STEPS):
                with step:
                    if step == FAILS_AT and not voided:
                        voided.append(step)
                        step.abort("the loss is not finite")
                    step.commit()
                    change_state(worker, step)
            assert is_right_behind(STEPS, worker)

        def trains(worker: Training) -> int:
            aborted = 0
            for step in worker.steps(STEPS):
                if careful:
                    with step:
                        step.commit()
                        change_state(worker, step)
                else:
                    step.commit()
                    change_state(worker, step)
                aborted += step.aborted
                assert step.is_committed != step.aborted
            assert is_right_behind(STEPS, worker)
            return aborted

        one, other = scripts.start("a", voids, config=TWO), scripts.start("b", trains, config=TWO)
        one.result(PATIENCE_S)
        assert other.result(PATIENCE_S) <= 1
        assert past(client, WorkerFailed, JobAborted) == []

    def test_commit_is_refused_between_two_steps_and_a_second_time(self, endpoint: str) -> None:
        with at(endpoint) as worker:
            for step in worker.steps(2):
                step.commit()
                with pytest.raises(RequestRefused, match="after the step was committed"):
                    step.commit()
                worker.finish_step()
                with pytest.raises(RequestRefused, match="between two steps"):
                    step.commit()
                break

    async def test_asynchronous_script_commits_by_its_worker(self, runner: DaemonRunner) -> None:
        async def train(name: str) -> int:
            state = {"chain": np.zeros(1, np.int64)}
            async with shared_worker(name, TWO, job=JOB, state=state) as worker:
                await worker.connect(runner.endpoint)
                async for step in worker.steps(STEPS):
                    async with step:
                        with pytest.raises(RequestRefused, match=r"await worker\.commit_step"):
                            step.commit()
                        with worker.meeting("forward"):
                            await worker.commit_step()
                        assert step.is_committed
                        state["chain"][0] = advance(int(state["chain"][0]), step)
                    assert step.is_committed
            return int(state["chain"][0])

        async with asyncio.timeout(PATIENCE_S):
            assert [*await asyncio.gather(train("a"), train("b"))] == [chain_after(STEPS)] * 2


class TestLoops:
    @pytest.mark.parametrize("careful", [True, False], ids=["with step", "without"])
    def test_loop_that_is_not_the_workers_trains(self, careful: bool, scripts: Scripts, client: BlockingClient) -> None:
        def script(worker: Training) -> None:
            while (step := worker.begin_step(STEPS)) is not None:
                if careful:
                    with step:
                        worker.all_reduce(np.array([step]))
                        change_state(worker, step)
                else:
                    worker.all_reduce(np.array([step]))
                    change_state(worker, step)
                assert worker.finish_step() or worker.step == step
            assert is_right_behind(STEPS, worker)

        futures = [scripts.start(name, script, config=TWO) for name in "ab"]
        for future in futures:
            future.result(PATIENCE_S)
        assert [fact.step for fact in past(client, JobCompleted)] == [STEPS]

    def test_step_is_begun_and_finished_in_turns(self, endpoint: str) -> None:
        with at(endpoint) as worker:
            with pytest.raises(RequestRefused, match="begin_step"):
                worker.finish_step()
            assert worker.begin_step() == 0
            with pytest.raises(RequestRefused, match="step 0 was begun and not finished"):
                worker.begin_step()
            assert worker.finish_step()
            assert [int(step) for step in worker.steps(3)] == [1, 2]


class TestSampler:
    def test_sampler_may_be_set_until_the_first_step(self, endpoint: str) -> None:
        sampler = ElasticSampler(100, 10, 1)
        used: list[int] = []
        with at(endpoint) as worker:
            assert worker.sampler is None
            worker.use_sampler(ElasticSampler(50, 5, 1))
            worker.use_sampler(sampler)
            assert worker.sampler is sampler
            for _ in worker.steps(10):
                assert worker.global_batch_size == 10
                used.extend(worker.batch().tolist())
                with pytest.raises(RequestRefused, match="before the first step"):
                    worker.use_sampler(sampler)
        assert sorted(used) == list(range(100))

    def test_sampler_is_audited_as_one_that_was_given(self, endpoint: str, client: BlockingClient) -> None:
        with at(endpoint) as worker:
            worker.use_sampler(ElasticSampler(100, 10, 1))
            for _ in worker.steps(10):
                worker.batch()
        audit = client.audit_data(JOB, 0)
        assert (audit.used, audit.complete, audit.repeated_total) == (100, True, 0)
