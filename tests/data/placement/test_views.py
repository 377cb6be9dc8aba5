from __future__ import annotations

import numpy as np
import pytest

from forged.data import Dataset
from forged.data.placement.views import Assignments, View
from tests.data.topology_changes import at

DATASET = Dataset(25, 10)
WORKERS = (at(0, 0), at(1, 1), at(2, 2))
HOLDERS = np.array([[0, 1, 0, 1, 0, 1, 0, 1, 0, 1], [-1, 0, 1, -1, -1, 0, 1, -1, -1, -1]], np.int32)


def test_a_view_is_as_the_list_of_its_values() -> None:
    view = View(np.array([4, 2, 7]), DATASET.shard)
    values = [DATASET.shard(number) for number in (4, 2, 7)]
    assert list(view) == values
    assert list(reversed(view)) == values[::-1]
    assert [view[0], view[-1], view[1]] == [values[0], values[-1], values[1]]
    assert list(view[1:]) == values[1:]
    assert list(view[::-2]) == values[::-2]
    assert (len(view), values[1] in view, view.index(values[2]), bool(view[:0])) == (3, True, 2, False)
    with pytest.raises(IndexError):
        view[3]


def test_a_view_makes_no_value_before_it_is_asked() -> None:
    asked: list[int] = []
    view = View(np.arange(10**6), lambda row: asked.append(row))
    assert len(view[10:20]) == 10
    assert asked == []
    view[5]
    assert asked == [5]


def test_assignments_are_as_the_dictionary_of_lists() -> None:
    assignments = Assignments(DATASET, WORKERS, HOLDERS[:1])
    eager = {
        worker: [DATASET.shard(shard) for shard in range(10) if HOLDERS[0, shard] == rank]
        for rank, worker in enumerate(WORKERS)
    }
    assert {worker: list(shards) for worker, shards in assignments.items()} == eager
    assert list(assignments) == list(WORKERS)
    assert assignments.counts.tolist() == [5, 5, 0]
    assert list(assignments[at(2, 2)]) == []
    assert at(9, 9) not in assignments
    with pytest.raises(KeyError):
        assignments[at(9, 9)]


def test_with_several_copies_everybody_has_all_of_theirs_in_order() -> None:
    assignments = Assignments(DATASET, WORKERS, HOLDERS)
    assert assignments.ids(at(0, 0)).tolist() == [0, 1, 2, 4, 5, 6, 8]
    assert assignments.ids(at(1, 1)).tolist() == [1, 2, 3, 5, 6, 7, 9]
    assert assignments.counts.tolist() == [7, 7, 0]


def test_without_copies_nobody_has_any() -> None:
    assignments = Assignments(DATASET, WORKERS, np.empty((0, 10), np.int32))
    assert [len(assignments[worker]) for worker in WORKERS] == [0, 0, 0]
