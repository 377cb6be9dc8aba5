"""How the benchmarks of checkpoints tell what they have found."""

from __future__ import annotations

from benchmarks.ckpt_comparison import Comparison, best_of, measured_rounds


def test_a_rate_stands_beside_that_of_the_median_and_of_the_best_round() -> None:
    median, best = Comparison("save", [1.0, 2.0, 4.0], gib=2.0).against("raw", [2.0, 4.0, 8.0], 0.9)
    assert (median.ours, median.reference, median.ratio, median.met) == (1.0, 0.5, 2.0, True)
    assert (best.ours, best.reference, best.aim) == (2.0, 1.0, None)


def test_a_shorter_duration_is_a_larger_ratio() -> None:
    median, _ = Comparison("stall", [1.0]).against("memcpy", [2.0], 1.0)
    assert (median.ours, median.ratio, median.met) == (1.0, 2.0, True)


def test_missing_reference_has_no_figure() -> None:
    (row,) = Comparison("save", [1.0]).against("torch (not installed)", None, 1.4)
    assert (row.name, row.reference, row.met) == ("save, against torch (not installed)", None, None)


def test_the_ceiling_is_the_fastest_of_the_references() -> None:
    found = {"direct": [3.0, 3.0], "buffered": [1.0, 4.0], "ours": [0.1]}
    assert best_of(found, {"direct": "O_DIRECT", "buffered": "page cache"}) == ("page cache", [1.0, 4.0])


def test_the_first_round_does_not_count() -> None:
    rounds = iter(range(3))
    assert measured_rounds(2, {"ours": lambda: float(next(rounds))}) == {"ours": [1.0, 2.0]}
