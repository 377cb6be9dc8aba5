from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.kernel.bus.statistics import TINY_S, HandlerStatistics, Latency

DURATIONS = st.floats(0, 1e8)


def test_before_the_first_duration_there_is_none() -> None:
    assert (Latency().count, Latency().quantile(0.5)) == (0, 0.0)


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e-6, 0.01, 0.5, 1.0, 3.0, 1e6])
def test_a_quantile_is_an_upper_bound_within_a_factor_of_two(seconds: float) -> None:
    latency = Latency()
    latency.observe(seconds)
    assert seconds <= latency.quantile(0.99) <= 2 * (seconds + TINY_S)


@given(durations=st.lists(DURATIONS, min_size=1, max_size=50), share=st.floats(0.01, 1))
def test_so_large_a_share_of_the_durations_is_within_the_quantile(durations: list[float], share: float) -> None:
    latency = Latency()
    for seconds in durations:
        latency.observe(seconds)
    within = sum(seconds <= latency.quantile(share) for seconds in durations)
    assert within >= share * len(durations)
    assert latency.count == len(durations)


@given(durations=st.lists(DURATIONS, min_size=1, max_size=50))
def test_a_larger_share_has_no_smaller_quantile(durations: list[float]) -> None:
    latency = Latency()
    for seconds in durations:
        latency.observe(seconds)
    quantiles = [latency.quantile(share / 10) for share in range(1, 11)]
    assert quantiles == sorted(quantiles)


def test_a_handler_has_handled_as_many_messages_as_were_timed() -> None:
    statistics = HandlerStatistics()
    for _ in range(3):
        statistics.latency.observe(0.1)
    assert statistics.handled == 3
