from __future__ import annotations

import numpy as np

from forged.data.columns import NOBODY
from forged.data.placement.sources import KINDS, choose_sources

HOSTS = np.array([0, 0, 1, 1, 2], np.int32)


def chosen(copies: list[list[int]], destinations: list[int]) -> list[tuple[int, str]]:
    """The source and its kind for each transfer; `copies` has a row for each of them."""
    columns = np.array(copies, np.int32).reshape(len(destinations), len(copies[0]) if copies else 1).T
    sources = choose_sources(columns, np.array(destinations, np.int32), HOSTS)
    return [(int(worker), KINDS[kind].value) for worker, kind in zip(sources.workers, sources.kinds, strict=True)]


def test_a_copy_on_the_destinations_host_is_taken_before_the_owners() -> None:
    assert chosen([[0, 2, 4]], [3]) == [(2, "replica")]
    assert chosen([[2, 0, 4]], [3]) == [(2, "owner")]


def test_any_copy_is_taken_before_the_origin() -> None:
    assert chosen([[NOBODY, 2]], [0]) == [(2, "replica")]
    assert chosen([[2, NOBODY]], [0]) == [(2, "owner")]


def test_where_nobody_has_a_copy_the_origin_has() -> None:
    assert chosen([[NOBODY, NOBODY], [NOBODY, 2]], [0, 0]) == [(NOBODY, "origin"), (2, "replica")]


def test_copies_that_are_as_good_take_turns() -> None:
    taken = [worker for worker, _ in chosen([[2, 3, 4]] * 9, [0] * 9)]
    assert [taken.count(worker) for worker in (2, 3, 4)] == [3, 3, 3]


def test_turns_do_not_follow_a_rhythm_of_the_shards() -> None:
    """Every second shard lies elsewhere, and yet each copy is asked for half of them."""
    taken = [worker for worker, _ in chosen([[2, 3], [4, 4]] * 8, [0] * 16)]
    assert [taken.count(worker) for worker in (2, 3)] == [4, 4]


def test_of_nothing_there_are_no_sources() -> None:
    assert chosen([], []) == []
