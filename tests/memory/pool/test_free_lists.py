from __future__ import annotations

import random
from itertools import pairwise
from typing import cast

import pytest

from forged.memory.pool import free_lists
from forged.memory.pool.blocks import Block
from forged.memory.pool.free_lists import DIGITS, FreeLists, list_number

NONE = cast("Block", None)
SIZES = [1, 2, 3, 63, 64, 65, 127, 128, 129, 1000, 1023, 1024, 2**20, 2**37 + 1, 2**53 + 1, 2**63 - 1, 2**63, 2**70]


def hole(offset: int, size: int) -> Block:
    return Block(offset, size, NONE, NONE)


def lists_with(*holes: Block) -> FreeLists:
    lists = FreeLists(2**71)
    for one in holes:
        lists.add(one)
    return lists


def test_numbers_grow_with_sizes() -> None:
    numbers = [list_number(size) for size in range(1, 5000)]
    assert all(0 <= after - before <= 1 for before, after in pairwise(numbers))
    assert [list_number(size) for size in SIZES] == sorted(list_number(size) for size in SIZES)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_of_a_number_are_similar(size: int) -> None:
    assert list_number(size + (size >> DIGITS) + 1) > list_number(size)


def test_holes_that_end_too_early_are_passed_over_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_lists, "PASSED_MAX", 3)
    early = [hole(64 + 256 * number, 130) for number in range(3)]
    fitting, large = hole(1024, 140), hole(2000, 255)
    found = lists_with(*early[:2], fitting, large)
    assert found.best_fit(128, 128) is fitting
    found = lists_with(*early, fitting, large)
    assert found.best_fit(128, 128) is large
    found.remove(large)
    assert found.best_fit(128, 128) is None


def test_empty_lists_have_nothing() -> None:
    lists = lists_with()
    assert (len(lists), lists.largest_size(), lists.take(1, 1), lists.best_fit(1, 1)) == (0, 0, None, None)


def test_holes_are_in_the_order_of_size_then_offset() -> None:
    numbers = random.Random(1)
    holes = [hole(offset, numbers.choice(SIZES)) for offset in numbers.sample(range(10_000), 300)]
    lists = lists_with(*holes)
    ordered = sorted(holes, key=lambda one: (one.size, one.offset))
    assert list(lists.from_size(1)) == ordered
    assert list(lists.largest_first()) == ordered[::-1]
    assert (len(lists), lists.largest_size()) == (300, max(one.size for one in holes))
    for size in SIZES:
        assert list(lists.from_size(size)) == [one for one in ordered if one.size >= size]


def test_removed_hole_is_gone() -> None:
    first, second = hole(0, 100), hole(200, 100)
    lists = lists_with(first, second)
    lists.remove(first)
    assert (first.is_hole, second.is_hole, list(lists.from_size(1))) == (False, True, [second])
    lists.remove(second)
    assert (len(lists), lists.largest_size(), list(lists.largest_first())) == (0, 0, [])


@pytest.mark.parametrize("alignment", [1, 8, 64])
def test_taken_hole_is_the_best_fit(alignment: int) -> None:
    numbers = random.Random(alignment)
    offsets = numbers.sample(range(100_000), 400)
    lists = lists_with(*(hole(offset, numbers.randrange(1, 3000)) for offset in offsets))
    while len(lists):
        needed = numbers.randrange(1, 2000)
        best = lists.best_fit(needed, alignment)
        count = len(lists)
        assert lists.take(needed, alignment) is best
        if best is None:
            lists.remove(next(lists.from_size(1)))
        else:
            assert len(lists) == count - 1
            assert not best.is_hole
