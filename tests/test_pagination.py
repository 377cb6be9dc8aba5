from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.errors import RequestRefused
from forged.pagination import PAGE_BYTES_MAX, PAGE_ENTRIES_MAX, ascending, in_batches, take_page


@given(names=st.sets(st.text(max_size=3)), after=st.text(max_size=3))
def test_page_continues_after_the_last_name(names: set[str], after: str) -> None:
    assert list(ascending(names, after)) == sorted(name for name in names if name > after)


@given(sizes=st.lists(st.integers(0, 3 * PAGE_BYTES_MAX // 2), max_size=5), limit=st.integers(1, 6))
def test_pages_contain_every_entry_once_and_mark_the_last(sizes: list[int], limit: int) -> None:
    left = [bytes(size) for size in sizes]
    while left:
        page, more = take_page(iter(left), limit)
        assert page == left[: len(page)]
        assert 1 <= len(page) <= limit
        assert len(page) == 1 or len(msgspec.msgpack.encode(page)) <= PAGE_BYTES_MAX + 5
        left = left[len(page) :]
        assert more == bool(left)


def test_page_size_is_bounded() -> None:
    page, more = take_page(iter(range(PAGE_ENTRIES_MAX + 1)), 1 << 60)
    assert (len(page), more) == (PAGE_ENTRIES_MAX, True)


def test_empty_list_is_one_last_page() -> None:
    assert take_page(iter(()), 1) == ([], False)


@pytest.mark.parametrize("limit", [0, -1])
def test_page_limit_of_zero_is_refused(limit: int) -> None:
    with pytest.raises(RequestRefused) as caught:
        take_page(iter((1,)), limit)
    assert caught.value.code == "page_invalid"


@given(sizes=st.lists(st.integers(0, 12), max_size=20), items_max=st.integers(1, 6))
def test_batches_have_every_item_once_and_are_as_large_as_they_may_be(sizes: list[int], items_max: int) -> None:
    items = [bytes(size) for size in sizes]
    batches = list(in_batches(items, lambda item: item, items_max, 10))
    assert [item for batch in batches for item in batch] == items
    for batch in batches:
        assert 1 <= len(batch) <= items_max
        assert len(batch) == 1 or sum(map(len, batch)) <= 10
    for batch, following in pairwise(batches):
        assert len(batch) == items_max or sum(map(len, [*batch, following[0]])) > 10


def test_batch_of_nothing_is_not_sent() -> None:
    assert list(in_batches([], bytes, 1)) == []
