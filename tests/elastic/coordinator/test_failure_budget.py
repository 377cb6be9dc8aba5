from __future__ import annotations

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.coordinator.failure_budget import FailureBudget

CONFIG = ElasticTrainingConfig(failure_tolerance_percentage=50, max_consecutive_failures=3)


def failed(*steps: int) -> FailureBudget:
    failures = FailureBudget()
    for step in steps:
        failures.count(step)
    return failures


def test_as_many_as_are_tolerated_are_borne() -> None:
    assert failed(1, 1).exceeded(4, CONFIG) is None
    assert failed(1, 2, 3).exceeded(5, CONFIG) == "3 of 5 workers failed; limit 2"


def test_a_row_without_a_step_is_borne_up_to_its_limit() -> None:
    assert failed(1, 1, 1).exceeded(100, CONFIG) == "3 failures without a committed step in between"


def test_one_failure_is_said_to_be_one() -> None:
    hasty = ElasticTrainingConfig(max_consecutive_failures=1)
    assert failed(1).exceeded(100, hasty) == "1 failure without a committed step in between"


def test_a_step_ends_the_row_if_it_is_a_new_one() -> None:
    failures = failed(5, 5)
    assert not failures.step_committed(5)
    assert failures.in_a_row == 2
    assert failures.step_committed(6)
    assert (failures.in_a_row, failures.in_world) == (0, 2)
    assert not failures.step_committed(7)


def test_another_world_begins_to_count_anew_and_the_row_goes_on() -> None:
    failures = failed(5, 5)
    failures.world_committed(5)
    assert (failures.in_world, failures.in_a_row) == (0, 2)


def test_steps_before_the_failures_of_this_world_end_the_row_before_it() -> None:
    failures = failed(5)
    failures.world_committed(5)
    failures.count(5)
    failures.world_committed(9)
    assert failures.in_a_row == 1


def test_a_world_that_begins_further_back_counts_from_there() -> None:
    failures = failed(9)
    failures.world_committed(3)
    assert failures.step_committed(4)
