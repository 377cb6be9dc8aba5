"""Block-wise statistics equal numpy's over the whole array."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from forged.cli.ckpt.statistics import Statistics, has_statistics, plain_elements

Array = np.ndarray[Any, Any]


def of(*blocks: Array) -> dict[str, Any]:
    statistics = Statistics()
    for block in blocks:
        statistics.add(block)
    return statistics.summary()


@given(
    hnp.arrays(np.float64, st.integers(1, 50), elements=st.floats(-1e6, 1e6)),
    st.lists(st.integers(0, 50), max_size=4),
)
def test_statistics_do_not_depend_on_the_blocks(array: Array, cuts: list[int]) -> None:
    output = of(*np.split(array, sorted(cuts)))
    assert (output["min"], output["max"]) == (array.min(), array.max())
    assert math.isclose(output["mean"], array.mean(), rel_tol=1e-9, abs_tol=1e-6)
    assert math.isclose(output["std"], array.std(), rel_tol=1e-6, abs_tol=1e-6)
    assert output["zeros"] == np.count_nonzero(array == 0)


def test_nan_and_infinity_are_counted_and_ignored() -> None:
    output = of(np.array([1.0, np.nan, 3.0, np.inf, -np.inf, 0.0]))
    assert output == {
        "min": 0.0, "max": 3.0, "mean": 4 / 3, "std": pytest.approx(np.std([1, 3, 0])), "zeros": 1, "nan": 1,
        "infinite": 2,
    }  # fmt: skip


@pytest.mark.parametrize("array", [np.zeros(0), np.full(3, np.nan), np.zeros(0, np.int64)])
def test_without_numbers_there_is_no_mean(array: Array) -> None:
    output = of(array)
    assert [output[key] for key in ("min", "max", "mean", "std")] == [None] * 4


def test_integers_keep_all_digits() -> None:
    output = of(np.array([2**64 - 1, 2**64 - 2], np.uint64))
    assert (output["min"], output["max"]) == (2**64 - 2, 2**64 - 1)


def test_complex_numbers_have_only_counts() -> None:
    output = of(np.array([1 + 1j, 0, complex(np.nan, 0)]))
    assert (output["min"], output["mean"], output["zeros"], output["nan"]) == (None, None, 1, 1)


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.int8, np.float16, np.longdouble, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4]
)
def test_every_kind_of_number_has_statistics(dtype: Any) -> None:
    array = np.array([0, 1, 1, 1]).astype(dtype)
    assert has_statistics(array.dtype)
    output = of(array)
    assert (output["min"], output["max"], output["mean"], output["zeros"]) == (0, 1, 0.75, 1)


@pytest.mark.parametrize("dtype", ["S3", "<U3", "V4", "M8[s]"])
def test_text_and_times_have_no_statistics(dtype: str) -> None:
    assert not has_statistics(np.dtype(dtype))


@pytest.mark.parametrize(
    ("array", "elements"),
    [
        (np.array([0.1], np.float32), [0.1]),
        (np.array([0.1], ml_dtypes.bfloat16), [0.100097656]),
        (np.array([7], np.uint8), [7]),
        (np.array([True]), [True]),
        (np.array([1 + 2j]), ["(1+2j)"]),
        (np.array([b"ab"]), [b"ab"]),
        (np.array(["ab"]), ["ab"]),
        (np.array([b"\0\1"], "V2"), [b"\0\1"]),
        (np.array(["2020-01-01"], "M8[D]"), ["2020-01-01"]),
        (np.array(5.0), [5.0]),
    ],
)
def test_elements_have_the_fewest_digits(array: Array, elements: list[Any]) -> None:
    assert plain_elements(array) == elements
