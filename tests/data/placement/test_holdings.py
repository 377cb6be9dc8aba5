"""Reading the holders that callers pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forged.data.columns import NOBODY, Column
from forged.data.model import Dataset
from forged.data.placement.holdings import Ids, Roster, read_owners, read_replicas
from forged.elastic import ClusterTopology, WorkerId
from forged.errors import RequestRefused
from tests.data.topology_changes import at, spread

OLD = spread(0, 1, 2)
NEW = spread(2, 5, 0)
ROSTER = Roster.of(OLD, NEW, ())
SERVED = Roster.of(OLD, NEW, [at(1, 1), at(2, 2), at(7, 7)])


def test_without_a_word_the_old_ranks_hold_shards_in_rounds() -> None:
    assert read_owners(ROSTER, 7, None).tolist() == [2, NOBODY, 0, 2, NOBODY, 0, 2]


def test_draining_workers_follow_the_new_ranks() -> None:
    assert SERVED.workers == (*NEW.workers, at(1, 1))
    assert read_owners(SERVED, 3, None).tolist() == [2, 3, 0]


def test_no_owners_are_read_for_an_empty_old_topology() -> None:
    nobody = Roster.of(ClusterTopology(), NEW, ())
    assert read_owners(nobody, 2, None).tolist() == [NOBODY, NOBODY]
    assert read_owners(nobody, 2, [-1, -1]).tolist() == [NOBODY, NOBODY]


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, list])
def test_ranks_may_be_a_column_of_any_whole_numbers(dtype: Any) -> None:
    ranks = [2, -1, 0, 1] if dtype is list else np.array([2, -1, 0, 1], dtype)
    assert read_owners(ROSTER, 4, ranks).tolist() == [0, NOBODY, 2, NOBODY]
    assert read_owners(ROSTER, 2, np.array([2, 0], np.uint64)).tolist() == [0, 2]


def test_the_shards_of_each_worker_may_be_given() -> None:
    current: dict[WorkerId, Ids] = {at(2, 2): range(2, 4), at(0, 0): np.array([0]), at(1, 1): []}
    assert read_owners(ROSTER, 5, current).tolist() == [2, NOBODY, 0, 0, NOBODY]
    shards = Dataset(10, 5)
    values: dict[WorkerId, Ids] = {at(2, 2): [shards.shard(2), shards.shard(3)], at(0, 0): (shards.shard(0),)}
    assert read_owners(ROSTER, 5, values).tolist() == [2, NOBODY, 0, 0, NOBODY]


def test_an_id_that_came_back_on_another_host_holds_nothing() -> None:
    elsewhere = Roster.of(OLD, ClusterTopology((at(0, 9),)), ())
    assert read_owners(elsewhere, 3, None).tolist() == [NOBODY] * 3


def test_arrays_of_the_caller_are_copied() -> None:
    ranks = np.array([0, 1, 2], np.int32)
    same = Roster.of(OLD, OLD, ())
    owners = read_owners(same, 3, ranks)
    owners[:] = 9
    assert ranks.tolist() == [0, 1, 2]
    copies = read_replicas(same, ranks, ranks[np.newaxis])
    assert (ranks.tolist(), copies.shape) == ([0, 1, 2], (0, 3))


def test_further_copies_may_be_given_for_each_worker_and_fill_as_few_rows_as_they_can() -> None:
    owners = read_owners(ROSTER, 4, [2, 2, 2, 2])
    copies = read_replicas(ROSTER, owners, {at(0, 0): [0, 1, 1], at(1, 1): [1], at(2, 2): [3]})
    assert copies.tolist() == [[2, 2, NOBODY, NOBODY]]
    copies = read_replicas(SERVED, owners, {at(0, 0): [0, 1], at(1, 1): [1, 2]})
    assert sorted(copies[:, 1].tolist()) == [2, 3]


def test_duplicate_replica_counts_once() -> None:
    owners = read_owners(ROSTER, 2, [0, 0])
    assert read_replicas(ROSTER, owners, [[2, 0], [2, 2]]).tolist() == [[0, NOBODY], [NOBODY, 0]]


def test_one_row_of_further_copies_need_not_be_in_a_list() -> None:
    owners = read_owners(ROSTER, 2, [0, 0])
    assert read_replicas(ROSTER, owners, [2, -1]).tolist() == [[0, NOBODY]]
    assert read_replicas(ROSTER, owners, None).shape == (0, 2)
    assert read_replicas(ROSTER, owners, {}).shape == (0, 2)


def read_current(given: Any) -> Column:
    return read_owners(ROSTER, 2, given)


def read_copies(given: Any) -> Column:
    return read_replicas(ROSTER, np.zeros(2, np.int32), given)


WRONG_COLUMNS = [
    [0],
    [0, 0, 0],
    [0, 3],
    [0, -2],
    [0.0, 1.0],
    ["0", "1"],
    [None, 0],
    [[0], [0, 1]],
    [[[0, 0]]],
    5,
    "01",
    [0, 2**70],
]


@pytest.mark.parametrize("read", [read_current, read_copies])
@pytest.mark.parametrize("given", WRONG_COLUMNS, ids=repr)
def test_invalid_rank_column_is_refused(read: Callable[[Any], Column], given: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        read(given)
    assert caught.value.code == "holdings_invalid"
    assert caught.value.fix


WRONG_SHARDS = [
    {at(9, 9): [0]},
    {at(0, 0): [2]},
    {at(0, 0): [-1]},
    {at(0, 0): [0.5]},
    {at(0, 0): [[0]]},
    {at(0, 0): "0"},
]


@pytest.mark.parametrize("read", [read_current, read_copies])
@pytest.mark.parametrize("given", WRONG_SHARDS, ids=repr)
def test_unknown_worker_or_invalid_shard_is_refused_by_name(read: Callable[[Any], Column], given: Any) -> None:
    with pytest.raises(RequestRefused, match=r"w[09]@") as caught:
        read(given)
    assert caught.value.code == "holdings_invalid"
    assert caught.value.fix


def test_a_shard_has_one_owner() -> None:
    with pytest.raises(RequestRefused, match="shard 1 has two owners"):
        read_owners(ROSTER, 2, {at(0, 0): [0, 1], at(2, 2): [1]})
