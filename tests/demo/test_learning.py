from __future__ import annotations

import numpy as np
import pytest

from forged.demo.learning import BATCH, LEARNING_RATE, SAMPLES, Floats, State, Task, contribution, learn


def shared(task: Task, steps: int, sizes: list[int]) -> State:
    """The state behind so many steps, each of which is dealt out among the next number of workers."""
    state, sampler = task.state(), task.sampler()
    for step in range(steps):
        size = sizes[step % len(sizes)]
        parts = [contribution(state, task.samples[sampler.batch(rank, size)]) for rank in range(size)]
        learn(state, sum(parts[1:], parts[0]), LEARNING_RATE)
        sampler.advance()
    return state


def test_each_epoch_uses_each_sample_once_in_another_order() -> None:
    sampler = Task().sampler()
    epochs = []
    for number in range(3):
        batches = []
        while sampler.epoch == number:
            batches.append(sampler.batch(0, 1))
            sampler.advance()
        epochs.append(np.concatenate(batches))
    for epoch in epochs:
        assert sorted(epoch) == list(range(SAMPLES))
    assert not np.array_equal(epochs[0], epochs[1])


def test_all_follows_from_the_seed() -> None:
    assert np.array_equal(Task(3).train_alone(5)["parameters"], Task(3).train_alone(5)["parameters"])
    assert not np.array_equal(Task(3).train_alone(5)["parameters"], Task(4).train_alone(5)["parameters"])


@pytest.mark.parametrize("sizes", [[1], [4], [4, 3, 5], [BATCH + 7]])
def test_the_division_of_samples_changes_only_the_rounding(sizes: list[int]) -> None:
    task = Task()
    learnt, train_alone = shared(task, 40, sizes), task.train_alone(40)
    for name in train_alone:
        np.testing.assert_allclose(learnt[name], train_alone[name], rtol=0, atol=1e-12)


def test_the_gradient_is_that_of_the_loss() -> None:
    task, nudge = Task(), 1e-6
    state, part = task.state(), task.samples[task.sampler().batch(0, 1)]

    def loss_at(parameters: Floats) -> float:
        return float(contribution({"parameters": parameters}, part)[-1])

    gradient = contribution(state, part)[:-1]
    for at in range(0, len(gradient), 17):
        up, down = state["parameters"].copy(), state["parameters"].copy()
        up[at] += nudge
        down[at] -= nudge
        assert gradient[at] == pytest.approx((loss_at(up) - loss_at(down)) / (2 * nudge), abs=1e-8)


def test_no_samples_are_no_contribution() -> None:
    assert not contribution(Task().state(), Task().samples[np.empty(0, np.int64)]).any()


def test_it_learns_to_tell_the_spirals_apart() -> None:
    task = Task()
    before, after = task.state(), task.train_alone(600)
    assert task.accuracy(before) < 0.5 < 0.9 < task.accuracy(after)
    assert task.loss(after) < task.loss(before) / 3


def test_a_sample_that_is_left_out_is_noticed() -> None:
    """The tolerance of the demonstration is far below what one sample of one step makes."""
    task = Task()
    state = task.state()
    learn(state, contribution(state, task.samples[task.sampler().batch(0, 1)[1:]]), LEARNING_RATE)
    assert np.abs(state["parameters"] - task.train_alone(1)["parameters"]).max() > 1e-6
