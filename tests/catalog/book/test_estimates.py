"""How long a restore takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.catalog.book.estimates import (
    MEASURED_MAX,
    Line,
    MeasuredRestore,
    RestoreTimes,
    bytes_read,
    line_through,
    seconds_per_step,
)

MB = 10**6
JOB, KIND = "run", "local"


def on_line(*sizes_mb: int, base_s: float = 0.02, bytes_per_s: float = 500e6) -> list[MeasuredRestore]:
    """Restores that take exactly a base and a time for each byte."""
    return [MeasuredRestore(size * MB, base_s + size * MB / bytes_per_s) for size in sizes_mb]


def times_with(measured: list[MeasuredRestore], job: str = JOB) -> RestoreTimes:
    times = RestoreTimes()
    times.load(job, KIND, measured)
    return times


def expected_s(times: RestoreTimes, size_mb: int) -> float:
    return times.estimate(JOB, KIND, size_mb * MB).expected_s


@pytest.mark.parametrize("size_mb", [0, 1, 10, 300, 5000])
def test_sizes_between_and_beyond_the_measured_ones_are_estimated(size_mb: int) -> None:
    times = times_with(on_line(1, 4, 16, 1000))
    assert expected_s(times, size_mb) == pytest.approx(0.02 + size_mb * MB / 500e6)


def test_some_slow_restores_do_not_change_the_estimate() -> None:
    slow = [MeasuredRestore(size * MB, 30.0) for size in (4, 1000)]
    times = times_with([*on_line(1, 4, 16, 64, 256, 1000, 2000, 4000), *slow])
    assert expected_s(times, 500) == pytest.approx(1.02, rel=0.3)


def test_large_restore_is_not_estimated_as_short_as_a_small_one() -> None:
    times = times_with([MeasuredRestore(MB, 0.003)])
    assert expected_s(times, 1000) == pytest.approx(1.5, rel=0.01)


def test_equal_sizes_give_their_median() -> None:
    times = times_with([MeasuredRestore(100 * MB, seconds) for seconds in (1.0, 1.2, 9.0)])
    assert expected_s(times, 100) == pytest.approx(1.2)


def test_smaller_restores_that_took_longer_give_a_line_that_does_not_fall() -> None:
    line = line_through([MeasuredRestore(MB, 2.0), MeasuredRestore(100 * MB, 1.0)])
    assert line.s_per_byte > 0


def test_interval_has_the_nearest_restores() -> None:
    measured = [*on_line(1, 4, 16, 64, 256, 1000), MeasuredRestore(900 * MB, 3.0)]
    estimate = times_with(measured).estimate(JOB, KIND, 900 * MB)
    assert estimate.low_s <= 1.82 <= estimate.high_s
    assert estimate.high_s >= 2.9


def test_interval_of_few_restores_is_wide() -> None:
    estimate = times_with(on_line(100)).estimate(JOB, KIND, 100 * MB)
    assert estimate.high_s == pytest.approx(1.5 * estimate.expected_s)
    assert estimate.low_s == pytest.approx(estimate.expected_s / 1.5)


def test_own_restores_come_before_those_of_other_jobs() -> None:
    times = times_with(on_line(100, base_s=5.0), job="other")
    assert times.estimate(JOB, KIND, MB).source == "1 measured restore of other jobs from local storage"
    times.add(JOB, KIND, MeasuredRestore(100 * MB, 0.22))
    assert times.estimate(JOB, KIND, MB).source == "1 measured restore of this job from local storage"
    assert expected_s(times, 100) == pytest.approx(0.22)
    assert times.forget(JOB) == [KIND]
    assert "of other jobs" in times.estimate(JOB, KIND, MB).source


def test_new_restore_changes_the_estimate_at_once() -> None:
    times = times_with(on_line(100, 200))
    before = expected_s(times, 100)
    for _ in range(MEASURED_MAX):
        times.add(JOB, KIND, MeasuredRestore(100 * MB, 9.0))
    assert before == pytest.approx(0.22)
    assert expected_s(times, 100) == pytest.approx(9.0)


@pytest.mark.parametrize(("kind", "expected"), [("local", 1.05), ("s3", 5.05)])
def test_bandwidth_is_assumed_before_the_first_restore(kind: str, expected: float) -> None:
    estimate = RestoreTimes().estimate(JOB, kind, 1000 * MB)
    assert estimate.expected_s == pytest.approx(expected)
    assert estimate.source.startswith("assumed: ")


@given(
    st.lists(st.tuples(st.integers(0, 2**50), st.floats(0, 1e6)), min_size=1, max_size=2 * MEASURED_MAX),
    st.integers(0, 2**50),
)
def test_interval_always_contains_the_estimate(measured: list[tuple[int, float]], size_bytes: int) -> None:
    estimate = times_with([MeasuredRestore(*one) for one in measured]).estimate(JOB, KIND, size_bytes)
    assert 0 <= estimate.low_s <= estimate.expected_s <= estimate.high_s < float("inf")


def test_chain_is_read_like_its_largest_checkpoint() -> None:
    assert (bytes_read([100, 20, 30]), bytes_read([7]), bytes_read([])) == (100, 7, 0)


def test_line_is_never_zero() -> None:
    assert Line(0.0, 0.0).seconds(0) > 0


def test_seconds_of_a_step_are_the_median_between_saves() -> None:
    assert seconds_per_step([(0, 0.0), (100, 10.0), (200, 500.0), (300, 510.0)]) == pytest.approx(0.1)
    assert seconds_per_step([(0, 0.0)]) == 0.0
