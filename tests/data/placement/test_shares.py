"""Fair shares, against fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.data.placement.shares import Weights, WorkerShares, check_weight, read_weights
from forged.elastic import WorkerId
from forged.errors import RequestRefused
from tests.data.topology_changes import at

WEIGHTS = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any).map(tuple)
TOTALS = st.integers(0, 1000) | st.integers(0, 2**40)


@given(TOTALS, WEIGHTS, st.booleans())
def test_shares_are_rounded_down_or_up_and_add_up(total: int, weights: tuple[int, ...], equal: bool) -> None:
    weights = (1,) * len(weights) if equal else weights
    shares = WorkerShares.of(total, len(weights), None if equal else weights)
    exact = [Fraction(total * weight, sum(weights)) for weight in weights]
    counts = shares.settled()
    assert int(counts.sum()) == total
    assert all(math.floor(part) <= have <= math.ceil(part) for part, have in zip(exact, counts.tolist(), strict=True))
    assert shares.least.tolist() == [math.floor(part) for part in exact]
    assert shares.most.tolist() == [math.ceil(part) for part in exact]


@given(TOTALS, WEIGHTS, st.data())
def test_remainder_goes_first_to_preferred_workers(total: int, weights: tuple[int, ...], data: st.DataObject) -> None:
    shares = WorkerShares.of(total, len(weights), weights)
    preferred = np.array(data.draw(st.lists(st.booleans(), min_size=len(weights), max_size=len(weights))))
    more = shares.settled(preferred) > shares.least
    could = shares.most > shares.least
    assert not (more & ~preferred).any() or not (could & preferred & ~more).any()


def test_remainder_goes_to_lowest_ranks_on_tie() -> None:
    assert WorkerShares.of(11, 4).settled().tolist() == [3, 3, 3, 2]


def test_remainder_goes_to_the_largest_fraction() -> None:
    assert WorkerShares.of(10, 3, (1, 2, 4)).settled().tolist() == [1, 3, 6]


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        (None, None),
        ({}, None),
        ({at(0, 0): 2, at(1, 1): 2.0}, None),
        ({at(0, 0): 0.5}, (1, 2)),
        ({at(0, 0): 3, at(9, 9): 7}, (3, 1)),
        ({at(1, 1): 0}, (1, 0)),
    ],
)
def test_weights_are_read_exactly_and_default_to_1(weights: dict[WorkerId, float] | None, whole: Weights) -> None:
    assert read_weights(weights, (at(0, 0), at(1, 1))) == whole


def test_weights_that_lie_far_apart_are_not_rounded() -> None:
    weights = read_weights({at(0, 0): 5e-324, at(1, 1): 1.7e308}, (at(0, 0), at(1, 1)))
    assert WorkerShares.of(10, 2, weights).settled().tolist() == [0, 10]


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), True, "1", None, 10**400])
def test_invalid_weight_is_refused(weight: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        read_weights({at(0, 0): weight}, (at(0, 0),))
    assert caught.value.code == "weights_invalid"


def test_all_zero_weights_are_refused() -> None:
    with pytest.raises(RequestRefused, match="every worker"):
        read_weights({at(0, 0): 0}, (at(0, 0),))


@pytest.mark.parametrize("weight", [5e-324, 1e-300, 0.1, 1, 3, 1e300, 1.7e308])
def test_any_finite_number_above_0_can_be_a_workers_own_weight(weight: float) -> None:
    check_weight(weight)


@pytest.mark.parametrize("weight", [0, 0.0, -0.0, -1, float("nan"), float("inf"), True, "1", b"1", None, 10**400, 1j])
def test_invalid_own_weight_is_refused_by_name(weight: Any) -> None:
    with pytest.raises(RequestRefused, match=r"weight must be a finite number above 0, got ") as caught:
        check_weight(weight)
    assert caught.value.code == "weight_invalid"
