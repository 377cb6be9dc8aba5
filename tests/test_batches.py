from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from forged.batches import in_batches


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
