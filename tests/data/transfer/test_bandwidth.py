from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.data.transfer.bandwidth import BURST_S, HALF_LIFE_S, RATE_BYTES_MIN, Bandwidth, Throttle
from forged.errors import ConfigError

RATE = 100 * RATE_BYTES_MIN


@given(
    st.lists(st.tuples(st.integers(0, RATE), st.floats(0, 2)), max_size=30),
    st.floats(0, 1e6),
)
def test_bytes_never_exceed_the_rate_plus_one_burst(wishes: list[tuple[int, float]], began: float) -> None:
    throttle = Throttle(RATE)
    now, passed = began, 0
    for count, idle_s in wishes:
        now += idle_s
        now += throttle.take(count, now)
        passed += count
        assert passed <= RATE * (now - began + BURST_S) * (1 + 1e-6) + 1


def test_later_callers_wait_longer() -> None:
    throttle = Throttle(RATE)
    throttle.take(int(RATE * BURST_S), 0.0)
    assert [round(throttle.take(RATE, 0.0), 6) for _ in range(3)] == [1.0, 2.0, 3.0]


def test_limiter_without_a_rate_never_delays() -> None:
    assert Throttle(None).take(1 << 60, 0.0) == 0.0


def test_clock_values_out_of_order_grant_no_extra_bytes() -> None:
    throttle = Throttle(RATE)
    throttle.take(int(RATE * BURST_S), 10.0)
    first = throttle.take(RATE, 9.0)
    assert throttle.take(0, 10.0) == pytest.approx(first)


@pytest.mark.parametrize("rate", [0.0, -1.0, RATE_BYTES_MIN - 1, math.inf, math.nan])
def test_invalid_rate_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError):
        Throttle(rate)


def test_rate_is_unknown_before_the_first_byte() -> None:
    bandwidth = Bandwidth()
    bandwidth.observe(0, 1.0)
    bandwidth.observe(5, 0.0)
    assert bandwidth.bytes_per_s is None


def test_rate_is_bytes_over_time() -> None:
    bandwidth = Bandwidth()
    bandwidth.observe(100, 1.0)
    assert bandwidth.bytes_per_s == 100.0


def test_older_transfers_weigh_less() -> None:
    bandwidth = Bandwidth()
    bandwidth.observe(1000, 1.0)
    for _ in range(20):
        bandwidth.observe(int(10 * HALF_LIFE_S), HALF_LIFE_S)
    assert bandwidth.bytes_per_s is not None
    assert 10.0 <= bandwidth.bytes_per_s < 10.1
