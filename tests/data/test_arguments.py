"""Whole numbers that a script gives."""

from __future__ import annotations

import numpy as np
import pytest

from forged.data.arguments import whole


@pytest.mark.parametrize("number", [7, np.int64(7), np.uint8(7), np.array(7)])
def test_of_any_kind_are_pythons_own(number: object) -> None:
    found = whole(number)
    assert found == 7
    assert type(found) is int


@pytest.mark.parametrize("number", [True, np.True_, 7.0, np.float64(7), "7", None, np.array([7, 8])])
def test_are_not_what_only_looks_like_one(number: object) -> None:
    assert whole(number) is None
