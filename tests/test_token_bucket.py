from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.token_bucket import TokenBucket

PER_S = 10.0
BURST = 50.0

uses = st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.0, 100.0)), max_size=60)
"""Pauses and the amount requested after each."""


def test_whoever_was_quiet_may_use_a_whole_burst_at_once() -> None:
    assert TokenBucket(PER_S, BURST, 0.0).take(BURST, 0.0)


def test_what_is_more_than_there_is_takes_nothing() -> None:
    allowance = TokenBucket(PER_S, BURST, 0.0)
    assert not allowance.take(BURST + 1, 0.0)
    assert allowance.take(BURST, 0.0)


def test_it_comes_back_with_time() -> None:
    allowance = TokenBucket(PER_S, BURST, 0.0)
    allowance.take(BURST, 0.0)
    assert [allowance.take(10.0, now) for now in (0.5, 1.0, 1.5, 2.0)] == [False, True, False, True]


def test_no_more_than_a_burst_is_saved_up() -> None:
    allowance = TokenBucket(PER_S, BURST, 0.0)
    assert not allowance.take(BURST + 1, 1e9)


@given(uses=uses)
def test_over_any_stretch_of_time_no_more_than_a_burst_and_the_rate_is_used(uses: list[tuple[float, float]]) -> None:
    allowance, now = TokenBucket(PER_S, BURST, 0.0), 0.0
    used: list[tuple[float, float]] = []
    for pause_s, amount in uses:
        now += pause_s
        if allowance.take(amount, now):
            used.append((now, amount))
    for first, (began, _) in enumerate(used):
        for last, (ended, _) in enumerate(used[first:], first):
            total = sum(amount for _, amount in used[first : last + 1])
            assert total <= BURST + PER_S * (ended - began) + 1e-6


@given(uses=uses)
def test_who_asks_for_no_more_than_the_rate_is_never_refused(uses: list[tuple[float, float]]) -> None:
    allowance, now = TokenBucket(PER_S, BURST, 0.0), 0.0
    for pause_s, _ in uses:
        now += pause_s
        assert allowance.take(min(BURST, PER_S * pause_s) * 0.999, now)


@pytest.mark.parametrize("now", [-5.0, 0.0])
def test_a_clock_that_stands_or_goes_back_gives_nothing(now: float) -> None:
    allowance = TokenBucket(PER_S, BURST, 0.0)
    allowance.take(BURST, 0.0)
    assert not allowance.take(1.0, now)
