from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from forged.errors import RequestRefused
from forged.net.protocol.messages import INTEGER_MAX
from forged.worker.arguments import count, rate


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0, 0.0),
        (0.1, 0.1),
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.array(0.25), 0.25),
        (np.int64(3), 3.0),
        (Fraction(1, 4), 0.25),
    ],
)
def test_rate_becomes_a_python_float(given: Any, expected: float) -> None:
    assert (type(rate("lr", given)), rate("lr", given)) == (float, expected)


@pytest.mark.parametrize(
    "given", [-0.1, math.nan, math.inf, np.float64("nan"), 10**400, None, "0.1", b"1", 1j, np.zeros(2), [0.1]]
)
def test_invalid_rate_is_refused_by_name(given: Any) -> None:
    with pytest.raises(RequestRefused, match="learning_rate") as raised:
        rate("learning_rate", given)
    assert raised.value.code == "number_invalid"


@pytest.mark.parametrize("given", [0, 32, INTEGER_MAX, np.int64(32), np.uint8(7), np.array(5), True])
def test_count_becomes_a_python_int(given: Any) -> None:
    assert (type(count("batch", given)), count("batch", given)) == (int, int(given))


@pytest.mark.parametrize(
    "given", [-1, np.int64(-1), INTEGER_MAX + 1, 32.0, np.float64(32), math.nan, None, "32", np.zeros(2, int)]
)
def test_invalid_count_is_refused_by_name(given: Any) -> None:
    with pytest.raises(RequestRefused, match="global_batch_size") as raised:
        count("global_batch_size", given)
    assert raised.value.code == "number_invalid"
