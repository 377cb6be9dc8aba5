"""Tests of the measurement of a worker's time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from forged.metrics.messages import TimeSpent
from forged.worker.worker_state.step_clock import RESCALE, StepClock


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def clock(time: Time) -> StepClock:
    return StepClock(time)


@contextmanager
def meeting(clock: StepClock) -> Iterator[None]:
    is_measured = clock.begin_meeting()
    yield
    if is_measured:
        clock.end_meeting()


def test_nothing_is_measured_before_the_first_step(time: Time, clock: StepClock) -> None:
    clock.wait_between_steps(RESCALE)
    with meeting(clock), clock.saving():
        time.passes(5.0)
    assert clock.spent() == TimeSpent()
    assert not clock.has_begun


def step(time: Time, clock: StepClock, *, is_committed: bool) -> None:
    clock.begin_step()
    time.passes(1.0)
    with meeting(clock):
        time.passes(2.0)
    with clock.saving():
        time.passes(3.0)
        with meeting(clock):
            time.passes(4.0)
    clock.end_step(is_committed=is_committed)


def test_committed_step_counts_by_cause(time: Time, clock: StepClock) -> None:
    step(time, clock, is_committed=True)
    assert clock.spent() == TimeSpent(step_s=1.0, waiting_s=2.0, checkpoint_s=7.0)
    assert clock.steps == 1


def test_aborted_step_counts_as_aborted_whole(time: Time, clock: StepClock) -> None:
    step(time, clock, is_committed=False)
    assert clock.spent() == TimeSpent(aborted_s=10.0)
    assert clock.steps == 0


def test_time_between_steps_has_the_cause_that_is_told_and_is_the_scripts_otherwise(
    time: Time, clock: StepClock
) -> None:
    step(time, clock, is_committed=True)
    time.passes(1.0)
    clock.wait_between_steps(RESCALE)
    time.passes(2.0)
    assert clock.spent() == TimeSpent(step_s=1.0, waiting_s=2.0, checkpoint_s=7.0, script_s=1.0, rescale_s=2.0)


def test_meeting_outside_a_step_keeps_the_cause_of_the_time(time: Time, clock: StepClock) -> None:
    step(time, clock, is_committed=True)
    clock.wait_between_steps(RESCALE)
    with meeting(clock):
        time.passes(2.0)
    assert clock.spent().rescale_s == 2.0


def test_step_under_way_counts_as_if_it_will_be_committed(time: Time, clock: StepClock) -> None:
    clock.begin_step()
    time.passes(5.0)
    assert clock.spent() == TimeSpent(step_s=5.0)
    clock.end_step(is_committed=False)
    assert clock.spent() == TimeSpent(aborted_s=5.0)


@pytest.mark.parametrize("block", [meeting, StepClock.saving])
def test_step_that_ends_inside_a_block_leaves_the_scripts_time(
    time: Time, clock: StepClock, block: Callable[[StepClock], AbstractContextManager[None]]
) -> None:
    clock.begin_step()
    with block(clock):
        time.passes(1.0)
        clock.end_step(is_committed=True)
        clock.wait_between_steps(RESCALE)
        time.passes(2.0)
    time.passes(4.0)
    assert clock.spent().rescale_s == 6.0
    assert clock.spent().total_s == 7.0


def test_all_time_since_the_first_step_has_a_cause(time: Time, clock: StepClock) -> None:
    for number in range(20):
        step(time, clock, is_committed=number % 3 > 0)
        time.passes(0.25)
        if number % 4 == 0:
            clock.wait_between_steps(RESCALE)
            time.passes(0.5)
    assert clock.spent().total_s == pytest.approx(time.now - 100.0)
