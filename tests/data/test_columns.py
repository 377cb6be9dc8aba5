from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.data.columns import COUNTED_AT_ONCE, NARROW_MAX, count, deal, group, ordinals

KEYS = st.lists(st.integers(0, 5)).map(lambda keys: np.array(keys, np.int32))
COUNTS = st.lists(st.integers(0, 30), max_size=8)


@pytest.mark.parametrize("bound", [6, NARROW_MAX + 1])
@given(keys=KEYS)
def test_a_group_is_the_rows_with_its_key_in_their_order(keys: np.ndarray, bound: int) -> None:
    order, starts = group(keys, bound)
    for key in range(6):
        assert order[starts[key] : starts[key + 1]].tolist() == np.flatnonzero(keys == key).tolist()


@given(KEYS)
def test_an_ordinal_counts_the_rows_before_with_the_same_key(keys: np.ndarray) -> None:
    assert ordinals(keys, 6).tolist() == [keys[:row].tolist().count(key) for row, key in enumerate(keys.tolist())]


@given(st.lists(st.integers(-1, 5)))
def test_count_ignores_minus_one(numbers: list[int]) -> None:
    assert count(np.array(numbers, np.int32), 6).tolist() == [numbers.count(number) for number in range(6)]


def test_all_of_a_long_column_is_counted() -> None:
    column = np.zeros((2, COUNTED_AT_ONCE + 1), np.int32)
    column[1] = 1
    assert count(column, 3).tolist() == [COUNTED_AT_ONCE + 1, COUNTED_AT_ONCE + 1, 0]


@given(COUNTS)
def test_deal_gives_each_number_its_count(counts: list[int]) -> None:
    dealt = deal(np.array(counts, np.int64))
    assert np.bincount(dealt, minlength=len(counts)).tolist() == counts


def test_equal_counts_are_dealt_in_rounds_and_the_last_is_of_those_with_one_more() -> None:
    assert deal(np.array([2, 2, 2])).tolist() == [0, 1, 2, 0, 1, 2]
    assert deal(np.array([2, 3, 0, 3])).tolist() == [0, 1, 3, 0, 1, 3, 1, 3]


@given(COUNTS)
def test_deal_stays_proportional_at_every_prefix(counts: list[int]) -> None:
    """Each receiver's count stays within the number of receivers of its exact share."""
    dealt, total = deal(np.array(counts, np.int64)), sum(counts)
    for much in range(total):
        have = np.bincount(dealt[:much], minlength=len(counts))
        due = np.array(counts) * much / total
        assert np.abs(have - due).max() <= len(counts)
