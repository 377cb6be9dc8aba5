from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from forged.data.sampling.sampler import ElasticSampler
from forged.elastic.model import ClusterTopology, GlobalTrainingState
from forged.elastic.rescale.attempt import StopReport
from forged.errors import RequestRefused
from forged.worker.process.counters import Counters
from forged.worker.worker_state.job_view import Commit
from forged.worker.worker_state.progress import TrainingProgress

NOWHERE = ClusterTopology()


def commit(step: int | None = None, epoch: int | None = None, rate: float | None = None, batch: int = 0) -> Commit:
    return Commit(1, NOWHERE, NOWHERE, step, epoch, rate, batch, "a test")


def progress_of(sampler: ElasticSampler | None = None, counters: Counters | None = None) -> TrainingProgress:
    progress = TrainingProgress(0.5, 0 if sampler else 32, sampler)
    progress.counters = counters
    return progress


@pytest.fixture
def counters() -> Iterator[Counters]:
    with contextlib.closing(Counters.create()) as counters:
        yield counters


def test_initial_progress_has_no_steps_and_no_state_to_transfer() -> None:
    found = progress_of()
    assert found.stop_report == StopReport(0, False, False, 0, 0.5, 32)
    assert found.training_state(3, 1.0) is None


def test_a_step_counts_when_it_is_committed() -> None:
    found = progress_of()
    found.receive_state(7)
    found.begin_step()
    assert found.stop_report == StopReport(7, True, False, 0, 0.5, 32)
    found.finish_step()
    assert found.stop_report == StopReport(7, True, True, 0, 0.5, 32)
    found.commit_step()
    assert found.stop_report == StopReport(8, True, False, 0, 0.5, 32)


def test_a_step_that_is_begun_again_was_not_finished() -> None:
    found = progress_of()
    found.receive_state(7)
    found.finish_step()
    found.begin_step()
    assert found.stop_report.position == 7


def test_finished_step_without_a_transferable_state_is_not_reported() -> None:
    found = progress_of()
    found.finish_step()
    assert found.stop_report == StopReport(0, False, False, 0, 0.5, 32)


def test_finished_step_for_which_all_have_voted_is_reported_as_committed() -> None:
    found = progress_of()
    found.receive_state(7)
    found.begin_step()
    found.finish_step(is_voted=True)
    assert (found.step, found.stop_report) == (7, StopReport(8, True, False, 0, 0.5, 32))
    found.apply_commit(commit(step=8))
    assert (found.step, found.has_finished) == (8, False)
    found.finish_step()
    assert found.stop_report == StopReport(8, True, True, 0, 0.5, 32)


@pytest.mark.parametrize("follows", ["commit", "state"])
def test_a_finished_step_that_only_the_next_world_tells_of_counts_once(follows: str, counters: Counters) -> None:
    found = progress_of(ElasticSampler(100, 10, 1), counters)
    assert found.usage is not None
    found.usage.enter(1, 0)
    found.finish_step()
    if follows == "commit":
        found.apply_commit(commit(step=1))
    else:
        found.apply(GlobalTrainingState(0, 1, 0.5, 10, 2, 1.0))
    assert (found.step, found.has_finished, counters.step) == (1, False, 1)
    ((_, _, runs),) = found.usage.unreported()
    assert [(run.step, run.end_step) for run in runs] == [(0, 1)]


def test_a_finished_step_that_the_next_world_does_not_have_has_used_nothing() -> None:
    found = progress_of(ElasticSampler(100, 10, 1))
    assert found.usage is not None
    found.usage.enter(1, 0)
    found.finish_step()
    found.apply_commit(commit(step=0))
    assert (found.step, found.has_finished) == (0, False)
    assert list(found.usage.unreported()) == []


def test_the_state_is_behind_a_finished_step_also_where_that_never_counts() -> None:
    found = progress_of(ElasticSampler(100, 10, 1))
    assert found.usage is not None
    found.usage.enter(1, 0)
    found.receive_state(7)
    found.finish_step()
    assert (found.step, found.steps_applied) == (7, 8)
    found.end_session()
    assert (found.step, found.steps_applied, list(found.usage.unreported())) == (8, 8, [])
    found.end_session()
    assert found.step == 8


def test_commit_without_a_step_keeps_the_workers_own_step() -> None:
    found = progress_of()
    found.receive_state(7)
    found.finish_step()
    found.apply_commit(commit())
    assert found.stop_report == StopReport(7, True, True, 0, 0.5, 32)


def test_rate_batch_and_epoch_keep_their_values_if_a_commit_names_none() -> None:
    found = progress_of()
    found.epoch = 4
    found.apply_commit(commit(step=3))
    assert (found.epoch, found.learning_rate, found.global_batch_size) == (4, 0.5, 32)
    found.apply_commit(commit(step=3, rate=0.0))
    assert (found.epoch, found.learning_rate, found.global_batch_size) == (4, 0.0, 32)
    found.apply_commit(commit(step=3, epoch=5, rate=0.25, batch=64))
    assert (found.epoch, found.learning_rate, found.global_batch_size) == (5, 0.25, 64)


def test_a_sampler_says_the_epoch_and_takes_the_batch() -> None:
    sampler = ElasticSampler(20, 10, 1)
    found = progress_of(sampler)
    assert found.global_batch_size == 10
    for _ in range(2):
        found.finish_step()
        found.commit_step()
    assert (found.epoch, found.stop_report.epoch) == (sampler.epoch, sampler.epoch)
    assert sampler.epoch == 1
    found.apply(GlobalTrainingState(1, 2, 0.5, 5, 2, 1.0))
    assert sampler.global_batch == 5


def test_how_far_it_is_is_known_once_it_has_a_state() -> None:
    found = progress_of()
    found.receive_state(7)
    assert found.training_state(3, 9.0) == GlobalTrainingState(0, 7, 0.5, 32, 3, 9.0)
    found.begin_session(None)
    assert found.training_state(3, 9.0) is None
    assert found.step == 7


@pytest.mark.parametrize("numbers", [{"learning_rate": -1.0}, {"global_batch_size": 1.5}])
def test_numbers_that_are_none_are_refused_by_name(numbers: dict[str, float]) -> None:
    given = {"learning_rate": 0.5, "global_batch_size": 1} | numbers
    with pytest.raises(RequestRefused, match=next(iter(numbers))):
        TrainingProgress(given["learning_rate"], given["global_batch_size"])  # type: ignore[arg-type]
