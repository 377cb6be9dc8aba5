from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.memory.forecast import (
    HYSTERESIS,
    SAMPLE_S,
    SAMPLES_MAX,
    SAMPLES_MIN,
    THRESHOLDS,
    PressureLevel,
    Rate,
    UsageWindow,
    seconds_left,
)

MIB = 1 << 20


def window_of(used: list[int]) -> UsageWindow:
    window = UsageWindow()
    for number, one in enumerate(used):
        window.observe(one, number * SAMPLE_S)
    return window


def test_steady_growth_is_measured_exactly() -> None:
    rate = window_of([10 * number * MIB for number in range(10)]).rate()
    assert rate == pytest.approx(Rate(*[10 * MIB / SAMPLE_S] * 3))


def test_single_peaks_and_releases_do_not_turn_the_rate() -> None:
    used = [number * MIB for number in range(20)]
    used[7], used[13] = 500 * MIB, 0
    rate = window_of(used).rate()
    assert rate is not None
    assert rate.middle == pytest.approx(MIB / SAMPLE_S, rel=0.05)
    assert rate.low <= rate.middle <= rate.high


def test_there_is_no_rate_with_few_samples() -> None:
    assert window_of([MIB] * (SAMPLES_MIN - 1)).rate() is None
    assert window_of([MIB] * SAMPLES_MIN).rate() == Rate(0.0, 0.0, 0.0)


def test_within_an_interval_the_highest_use_counts() -> None:
    window = UsageWindow()
    for number in range(6):
        window.observe(number * MIB, number * SAMPLE_S)
        window.observe(0, number * SAMPLE_S + SAMPLE_S / 2)
    assert len(window) == 6
    assert window.rate() == pytest.approx(Rate(*[MIB / SAMPLE_S] * 3))


@given(st.lists(st.integers(0, 1 << 63), max_size=SAMPLES_MAX * 2))
def test_the_interval_has_the_rate_and_the_window_is_bounded(used: list[int]) -> None:
    window = window_of(used)
    assert len(window) <= SAMPLES_MAX
    rate = window.rate()
    if rate is not None:
        assert rate.low <= rate.middle <= rate.high
        left = seconds_left(1 << 40, rate)
        found = [one for one in (left.low, left.middle, left.high) if one is not None]
        assert found == sorted(found)
        assert left.middle is None or left.low is not None


def test_seconds_are_told_with_their_interval() -> None:
    assert seconds_left(100, Rate(10.0, 5.0, 20.0)) == (10.0, 5.0, 20.0)
    assert seconds_left(100, Rate(10.0, -5.0, 20.0)) == (10.0, 5.0, None)
    assert seconds_left(100, Rate(0.0, -5.0, 0.0)) == (None, None, None)
    assert seconds_left(0, Rate(10.0, 5.0, 20.0)) == (0.0, 0.0, 0.0)


def test_a_threshold_is_reported_once_until_the_pressure_has_fallen_below_it() -> None:
    level = PressureLevel()
    assert level.crossed(0.5) is None
    assert level.crossed(0.8) == (0.8, True)
    assert level.crossed(0.79) is level.crossed(0.81) is None
    assert level.crossed(0.98) == (0.97, True)
    assert level.crossed(0.93) is None
    assert level.crossed(0.91) == (0.97, False)
    assert level.crossed(0.1) == (0.8, False)


@given(st.lists(st.floats(0, 1)))
def test_crossings_alternate_and_agree_with_the_pressure(pressures: list[float]) -> None:
    level = PressureLevel()
    above = 0.0
    for pressure in pressures:
        crossing = level.crossed(pressure)
        if crossing is None:
            continue
        assert crossing.threshold in THRESHOLDS
        if crossing.is_rising:
            assert pressure >= crossing.threshold > above
            above = crossing.threshold
        else:
            assert pressure < crossing.threshold - HYSTERESIS + 1e-9
            assert crossing.threshold <= above
            above = max((one for one in THRESHOLDS if one < crossing.threshold), default=0.0)
