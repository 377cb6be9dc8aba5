"""The token bucket; suppressed reports in a flood, and when their count is returned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.rate_limit import COUNT_S, RateLimit, TokenBucket

PER_S = 10.0
BURST = 50.0

uses = st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.0, 100.0)), max_size=60)
"""Pauses and the amount requested after each."""


def test_full_bucket_gives_a_whole_burst() -> None:
    assert TokenBucket(PER_S, BURST, 0.0).take(BURST, 0.0)


def test_take_of_more_than_available_takes_nothing() -> None:
    bucket = TokenBucket(PER_S, BURST, 0.0)
    assert not bucket.take(BURST + 1, 0.0)
    assert bucket.take(BURST, 0.0)


def test_bucket_refills_with_time() -> None:
    bucket = TokenBucket(PER_S, BURST, 0.0)
    bucket.take(BURST, 0.0)
    assert [bucket.take(10.0, now) for now in (0.5, 1.0, 1.5, 2.0)] == [False, True, False, True]


def test_no_more_than_a_burst_is_saved_up() -> None:
    bucket = TokenBucket(PER_S, BURST, 0.0)
    assert not bucket.take(BURST + 1, 1e9)


@given(uses=uses)
def test_use_over_any_interval_is_bounded_by_burst_and_rate(uses: list[tuple[float, float]]) -> None:
    bucket, now = TokenBucket(PER_S, BURST, 0.0), 0.0
    used: list[tuple[float, float]] = []
    for pause_s, amount in uses:
        now += pause_s
        if bucket.take(amount, now):
            used.append((now, amount))
    for first, (began, _) in enumerate(used):
        for last, (ended, _) in enumerate(used[first:], first):
            total = sum(amount for _, amount in used[first : last + 1])
            assert total <= BURST + PER_S * (ended - began) + 1e-6


@given(uses=uses)
def test_use_within_the_rate_is_never_refused(uses: list[tuple[float, float]]) -> None:
    bucket, now = TokenBucket(PER_S, BURST, 0.0), 0.0
    for pause_s, _ in uses:
        now += pause_s
        assert bucket.take(min(BURST, PER_S * pause_s) * 0.999, now)


@pytest.mark.parametrize("now", [-5.0, 0.0])
def test_clock_that_stops_or_goes_back_adds_no_tokens(now: float) -> None:
    bucket = TokenBucket(PER_S, BURST, 0.0)
    bucket.take(BURST, 0.0)
    assert not bucket.take(1.0, now)


def let_through(flood: RateLimit, times: int, now: float) -> int:
    return sum(flood.admits(now) for _ in range(times))


def test_one_burst_passes_and_then_the_rate_per_second() -> None:
    flood = RateLimit(10, 10, 0.0)
    assert let_through(flood, 100, 0.0) == 10
    assert let_through(flood, 100, 0.5) == 5
    assert let_through(flood, 100, 60.0) == 10


def test_suppressed_count_is_returned_once_at_the_end_of_the_flood() -> None:
    flood = RateLimit(10, 10, 0.0)
    let_through(flood, 100, 0.0)
    let_through(flood, 100, 0.5)
    assert flood.count(1.0) == 0
    assert flood.count(1.5) == 185
    assert flood.count(100.0) == 0


def test_suppressed_count_is_returned_periodically_during_a_long_flood() -> None:
    flood = RateLimit(1, 1, 0.0)
    told = []
    for second in range(int(COUNT_S) + 2):
        let_through(flood, 11, float(second))
        told.append(flood.count(float(second)))
    assert [count for count in told if count] == [10 * (COUNT_S + 1)]


def test_nothing_is_returned_without_suppressed_reports() -> None:
    flood = RateLimit(10, 10, 0.0)
    let_through(flood, 10, 0.0)
    assert flood.count(1000.0) == 0


def test_a_limit_can_be_changed_while_it_is_used() -> None:
    flood = RateLimit(1, 1, 0.0)
    assert let_through(flood, 10, 0.0) == 1
    flood.resize(100, 100)
    assert let_through(flood, 1000, 1.0) == 100
    flood.resize(0, 1)
    assert let_through(flood, 1000, 2.0) == 0
    assert flood.count(2.0) == 9 + 900 + 1000


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 30)), max_size=40),
    st.floats(0.05, 50),
    st.integers(1, 50),
)
def test_each_report_passes_or_is_counted(arrivals: list[tuple[float, int]], per_s: float, burst: int) -> None:
    flood = RateLimit(per_s, burst, 0.0)
    now, through, told = 0.0, 0, 0
    for pause, times in arrivals:
        now += pause
        through += let_through(flood, times, now)
        told += flood.count(now)
    told += flood.count(now + COUNT_S + burst / per_s)
    assert through + told == sum(times for _, times in arrivals)
    assert through <= burst + per_s * now + 1e-6 * (1 + now)
