from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from forged.numbers import NumberChecks, as_finite, as_float, as_integer


@pytest.mark.parametrize("value", [7, np.int64(7), np.uint8(7), np.array(7)], ids=repr)
def test_integers_of_all_libraries_become_int(value: Any) -> None:
    assert type(as_integer(value)) is int
    assert as_integer(value) == 7


@pytest.mark.parametrize("value", [True, np.True_, 7.0, np.float64(7), "7", None, np.array([7, 8])], ids=repr)
def test_value_that_only_looks_like_an_integer_is_none(value: Any) -> None:
    assert as_integer(value) is None


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), "0.5"], ids=repr)
def test_floats_of_all_libraries_become_float(value: Any) -> None:
    assert type(as_float(value)) is type(as_finite(value)) is float
    assert as_float(value) == as_finite(value) == 0.5


@pytest.mark.parametrize("value", ["x", None, [], 10**400], ids=lambda value: repr(value)[:9])
def test_value_that_is_no_number_is_none(value: Any) -> None:
    assert as_float(value) is None
    assert as_finite(value) is None


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=repr)
def test_infinite_values_and_nan_are_floats_and_not_finite(value: float) -> None:
    assert repr(as_float(value)) == repr(value)
    assert as_finite(value) is None


def refusal(name: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"{name} must be {wanted}, got {value!r}")


def test_checked_number_becomes_pythons_own() -> None:
    checks = NumberChecks(refusal)
    assert (checks.count("size", np.uint8(7), 7), checks.count("size", 0, 7)) == (7, 0)
    assert type(checks.count("size", np.uint8(7), 7)) is int
    assert checks.time("now", np.float32(-0.5)) == -0.5


@pytest.mark.parametrize("value", [-1, 8, 7.0, True, None], ids=repr)
def test_wrong_count_is_refused_with_the_refusal_that_was_given(value: Any) -> None:
    with pytest.raises(ValueError, match=f"^size must be an integer from 0 to 7, got {value!r}$"):
        NumberChecks(refusal).count("size", value, 7)


@pytest.mark.parametrize("value", [math.nan, math.inf, None], ids=repr)
def test_time_that_is_not_finite_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=f"^now must be finite seconds, got {value!r}$"):
        NumberChecks(refusal).time("now", value)
