from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.catalog import (
    CadencePolicy,
    Measured,
    SinceLastSave,
    choose_cadence,
    mean_time_between_failures_s,
    should_checkpoint,
    young_daly_interval_s,
)
from forged.errors import ConfigError


@pytest.mark.parametrize(
    ("current", "last", "interval", "expected"),
    [
        (99, 0, 100, False),
        (100, 0, 100, True),
        (101, 0, 100, True),
        (150, 100, 100, False),
        (0, 0, 1, False),
        (2**64, 2**64 - 100, 100, True),
        (2**64 - 1, 2**64 - 100, 100, False),
        (50, 100, 100, False),
    ],
)
def test_checkpoint_is_due_when_the_interval_has_passed(current: int, last: int, interval: int, expected: bool) -> None:
    assert should_checkpoint(current, last, interval) is expected


@pytest.mark.parametrize(
    ("cost", "between", "expected"),
    [(10.0, 86_400.0, 1307.88), (0.0, 3600.0, 0.0), (50.0, 25.0, 25.0), (60.0, 25.0, 25.0), (1.0, 1e6, 1413.55)],
)
def test_interval_is_that_of_daly(cost: float, between: float, expected: float) -> None:
    assert young_daly_interval_s(cost, between) == pytest.approx(expected, rel=1e-4)


@given(st.floats(0.01, 100.0), st.floats(2000.0, 1e7))
def test_no_interval_loses_much_less_than_the_chosen_one(cost: float, between: float) -> None:
    """The expected time with failures and saves, of which Daly's formula is the minimum (to a per cent)."""

    def overhead(interval: float) -> float:
        return math.expm1((interval + cost) / between) / interval

    chosen = young_daly_interval_s(cost, between)
    assert all(overhead(chosen) <= 1.01 * overhead(chosen * factor) for factor in (0.3, 0.7, 0.9, 1.1, 1.5, 3.0))


@pytest.mark.parametrize(
    ("failures", "observed", "expected"),
    [(0, 0.0, 1000.0), (0, 1000.0, 2000.0), (1, 1000.0, 1000.0), (9, 9000.0, 1000.0)],
)
def test_time_between_failures_begins_with_the_assumed_one(failures: int, observed: float, expected: float) -> None:
    assert mean_time_between_failures_s(failures, observed, 1000.0) == expected


AUTOMATIC = CadencePolicy(automatic=True)
DAY = Measured(save_cost_s=10.0, failures=0, observed_s=0.0)


@pytest.mark.parametrize(
    ("policy", "measured", "steps", "seconds", "expected"),
    [
        (CadencePolicy(), Measured(), 1000, 1e6, (False, None, "no interval is set")),
        (CadencePolicy(), Measured(drain_notice_s=5.0), 1000, 1e6, (False, None, "no interval is set")),
        (CadencePolicy(every_steps=10), Measured(), 9, 1e6, (False, None, "every 10 steps")),
        (CadencePolicy(every_steps=10), Measured(), 10, 0.0, (True, None, "every 10 steps")),
        (CadencePolicy(every_seconds=60), Measured(), 9, 59.9, (False, 60, "every 60 s")),
        (CadencePolicy(every_seconds=60), Measured(), 9, 60.0, (True, 60, "every 60 s")),
        (CadencePolicy(every_seconds=60), Measured(), 0, 99.0, (False, 60, "no step since the last save")),
        (CadencePolicy(every_steps=10, every_seconds=60), Measured(), 10, 5.0, (True, 60, "every 10 steps")),
        (CadencePolicy(every_steps=10, every_seconds=60), Measured(), 9, 60.0, (True, 60, "every 60 s")),
        (AUTOMATIC, Measured(), 1, 10.0, (True, 10.0, "every 10 s until the first save has been measured")),
        (CadencePolicy(every_seconds=60, automatic=True), DAY, 1, 60.0, (True, 60, "every 60 s")),
    ],
)
def test_choice_is_the_interval_that_comes_first(
    policy: CadencePolicy, measured: Measured, steps: int, seconds: float, expected: Any
) -> None:
    choice = choose_cadence(policy, measured, SinceLastSave(steps=steps, seconds=seconds))
    assert (choice.is_due, choice.interval_s, choice.reason) == expected


def test_automatic_choice_says_what_it_was_measured_from() -> None:
    measured = Measured(save_cost_s=10.0, failures=3, observed_s=86_400.0)
    choice = choose_cadence(AUTOMATIC, measured, SinceLastSave(steps=1, seconds=700.0))
    assert choice.reason == "every 922.9 s: a save costs 10 s, 3 failures in 24.0 h"
    assert not choice.is_due


@pytest.mark.parametrize(("cost", "bound"), [(1e-6, 10.0), (1e4, 3600.0)])
def test_automatic_interval_is_bounded(cost: float, bound: float) -> None:
    choice = choose_cadence(AUTOMATIC, Measured(save_cost_s=cost), SinceLastSave(steps=1, seconds=0.0))
    assert choice.interval_s == bound
    assert "(bounded; " in choice.reason


@pytest.mark.parametrize(
    ("cost", "seconds", "is_due", "text"),
    [
        (None, 0.0, True, "a worker leaves in 60.0 s"),
        (5.0, 21.3, True, "every 21.3 s: a worker leaves in 60.0 s"),
        (5.0, 21.2, False, "every 21.3 s: a worker leaves in 60.0 s"),
        (61.0, 1e6, False, "a worker leaves in 60.0 s, and a save takes 61.0 s"),
    ],
)
@pytest.mark.parametrize("policy", [AUTOMATIC, CadencePolicy(every_steps=10**6), CadencePolicy(every_seconds=1e5)])
def test_notice_of_a_drain_shortens_the_interval(
    policy: CadencePolicy, cost: float | None, seconds: float, is_due: bool, text: str
) -> None:
    measured = Measured(save_cost_s=cost, drain_notice_s=60.0)
    choice = choose_cadence(policy, measured, SinceLastSave(steps=1, seconds=seconds))
    assert (choice.is_due, text in choice.reason) == (is_due, True), choice


BAD: list[tuple[dict[str, Any], set[str]]] = [
    ({"every_steps": 0}, {"every_steps"}),
    ({"every_seconds": -1.0, "seconds_min": math.nan}, {"every_seconds", "seconds_min"}),
    ({"seconds_min": 20.0, "seconds_max": 10.0}, {"seconds_max"}),
    ({"seconds_max": math.inf}, {"seconds_max"}),
]


@pytest.mark.parametrize(("changes", "keys"), BAD)
def test_invalid_cadence_names_every_wrong_field(changes: dict[str, Any], keys: set[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        CadencePolicy(**changes)
    assert {problem.key for problem in refused.value.problems} == keys
