from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from forged.errors import RequestRefused
from forged.net.protocol.messages import INTEGER_MAX
from forged.worker.arguments import count, rate, replica_group


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


LAUNCHED = {"FORGED_GROUP": "host-1-0-2", "FORGED_GROUP_RANK": "1", "FORGED_GROUP_SIZE": "2"}
TORCHRUN = {"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        ((None, None, None), {}, ("", 0, 1)),
        ((None, None, None), TORCHRUN, ("", 0, 1)),
        ((None, None, None), LAUNCHED, ("host-1-0-2", 1, 2)),
        ((None, None, 2), LAUNCHED, ("host-1-0-2", 1, 2)),
        ((None, None, 1), LAUNCHED, ("", 0, 1)),
        (("g", 0, 2), LAUNCHED, ("g", 0, 2)),
        ((None, None, 4), TORCHRUN, ("host-7-1", 1, 4)),
    ],
)
def test_replica_group_is_that_of_the_script_else_of_the_launcher(given: Any, environment: Any, expected: Any) -> None:
    name, rank, size = given
    assert replica_group(name, rank, size, environment, "host-7") == expected


@pytest.mark.parametrize("environment", [{}, TORCHRUN, {"LOCAL_RANK": "x", "LOCAL_WORLD_SIZE": "6"}])
def test_group_size_without_a_launcher_that_divides_by_it_is_refused(environment: Any) -> None:
    with pytest.raises(RequestRefused):
        replica_group(None, None, 3, environment, "host-7")
