"""The views of a plan agree with its columns."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from forged.data import DataRedistributionPlan, Dataset, SourceKind, TransferPace
from forged.data.model import KINDS
from forged.data.placement.plan import Assignments, View
from forged.elastic import ClusterTopology
from forged.errors import RequestRefused
from tests.data.topology_changes import UNTIMED, Change, at, changes, redistributor, spread

PACE = TransferPace(bytes_per_second=100.0, bytes_per_sample=10.0, now=1000.0)


def plan_for_one(pace: TransferPace | None = PACE, **settings: Any) -> DataRedistributionPlan:
    """Seven shards of 15, 15, 14... samples that all come from the origin."""
    plans = redistributor(**settings)
    return plans.calculate_plan(ClusterTopology(), spread(0), 100, shards=7, pace=pace)


@UNTIMED
@given(changes())
def test_transfer_views_equal_the_columns(change: Change) -> None:
    plan = change.plan()
    columns = plan.columns
    assert len(plan.transfers) == columns.shards.size
    for row, transfer in enumerate(plan.transfers):
        source = int(columns.sources[row])
        assert transfer.shard == plan.dataset.shard(int(columns.shards[row]))
        assert transfer.source_worker == (None if source == -1 else plan.workers[source])
        assert transfer.destination_worker == plan.workers[columns.destinations[row]]
        assert transfer.priority == plan.priorities[row]
        assert transfer.source_kind == KINDS[columns.kinds[row]]


@UNTIMED
@given(changes())
def test_each_worker_gets_its_own_transfers_in_their_order(change: Change) -> None:
    plan = change.plan()
    for worker in plan.workers:
        mine = [transfer for transfer in plan.transfers if transfer.destination_worker == worker]
        assert list(plan.for_worker(worker)) == mine


def test_worker_outside_the_plan_has_no_transfers() -> None:
    assert list(plan_for_one().for_worker(at(9, 9))) == []


def test_a_plan_cannot_be_changed() -> None:
    plan = plan_for_one()
    with pytest.raises(AttributeError):
        plan.world_size = 2  # type: ignore[misc]
    for column in (plan.owners, plan.owners_before, plan.replicas, plan.replicas_before, *vars(plan.columns).values()):
        with pytest.raises(ValueError, match="read-only"):
            column[...] = 0


def test_a_plan_is_the_same_after_a_journey() -> None:
    plan = plan_for_one()
    for other in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert list(other.transfers) == list(plan.transfers)
        assert other.workers == plan.workers


def test_repr_of_a_plan_is_one_line() -> None:
    assert repr(plan_for_one()) == "DataRedistributionPlan(7 shards, 1 workers, 7 moved, 7 transfers)"


# How much travels.


def test_bytes_are_those_of_the_samples_that_travel() -> None:
    plan = redistributor().calculate_plan(spread(0, 1), spread(0), 11, shards=4)
    assert [transfer.shard.size for transfer in plan.transfers] == [3, 2]
    assert plan.bytes_to_move(8) == 40
    assert plan.bytes_to_move(0.5) == 2
    assert plan.bytes_to_move(sizes=[1, 20, 300, 4000]) == 4020


def test_bytes_are_counted_by_kind_of_source() -> None:
    plan = redistributor().calculate_plan(spread(0, 1, 2), spread(0), 9, shards=3, draining=[at(1, 1)])
    assert [plan.transfer_count(kind) for kind in SourceKind] == [1, 0, 1]
    assert [plan.bytes_to_move(1, kind=kind) for kind in SourceKind] == [3, 0, 3]
    assert plan.bytes_to_move(sizes=np.array([1, 10, 100]), kind=SourceKind.ORIGIN) == 100


@pytest.mark.parametrize("given", [{}, {"bytes_per_sample": 1, "sizes": [1] * 7}, {"sizes": [1] * 6}, {"sizes": []}])
def test_bytes_without_a_clear_size_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused) as caught:
        plan_for_one().bytes_to_move(**given)
    assert caught.value.code == "sizes_invalid"


# How long it takes.


def test_plan_without_pace_has_no_estimates() -> None:
    plan = plan_for_one(pace=None)
    assert (plan.completion_times, plan.estimated_seconds) == (None, None)
    assert {transfer.estimated_completion_time for transfer in plan.transfers} == {None}


def test_one_at_a_time_each_waits_for_those_before_it() -> None:
    plan = plan_for_one(use_parallel_data_transfer=False)
    times = [transfer.estimated_completion_time for transfer in plan.transfers]
    assert times == pytest.approx([1001.5, 1003.0, 1004.4, 1005.8, 1007.2, 1008.6, 1010.0])
    assert plan.estimated_seconds == pytest.approx(10.0)


def test_several_at_once_wait_only_for_those_in_their_lane() -> None:
    plan = plan_for_one(max_concurrent_transfers=3)
    times = [transfer.estimated_completion_time for transfer in plan.transfers]
    assert times == pytest.approx([1001.5, 1001.5, 1001.4, 1002.9, 1002.9, 1002.8, 1004.3])


def test_workers_do_not_wait_for_each_other() -> None:
    plan = redistributor(max_concurrent_transfers=1).calculate_plan(
        ClusterTopology(), spread(0, 1), 100, shards=10, pace=PACE
    )
    times = [one.estimated_completion_time for one in plan.for_worker(at(1, 1))]
    assert times == pytest.approx([1001.0, 1002.0, 1003.0, 1004.0, 1005.0])
    assert plan.estimated_seconds == pytest.approx(5.0)


@pytest.mark.parametrize(("lanes", "seconds"), [(1, 99.0), (4, 24.75)])
def test_single_source_bounds_the_estimate(lanes: int, seconds: float) -> None:
    plan = redistributor(max_concurrent_transfers=lanes).calculate_plan(
        spread(0), spread(*range(100)), 1_000, shards=100, pace=PACE
    )
    assert plan.estimated_seconds == pytest.approx(seconds)
    assert plan.completion_times is not None
    assert np.all(np.diff(plan.completion_times) >= 0)


def test_the_origin_serves_any_number_at_once() -> None:
    plan = redistributor().calculate_plan(ClusterTopology(), spread(*range(100)), 1_000, shards=100, pace=PACE)
    assert plan.estimated_seconds == pytest.approx(1.0)


def test_where_nothing_travels_it_takes_no_time() -> None:
    plan = redistributor().calculate_plan(spread(0), spread(0), 5, pace=PACE)
    assert (plan.estimated_seconds, list(plan.transfers)) == (0.0, [])


DATASET = Dataset(25, 10)
WORKERS = (at(0, 0), at(1, 1), at(2, 2))
HOLDERS = np.array([[0, 1, 0, 1, 0, 1, 0, 1, 0, 1], [-1, 0, 1, -1, -1, 0, 1, -1, -1, -1]], np.int32)


def test_a_view_is_as_the_list_of_its_values() -> None:
    view = View(np.array([4, 2, 7]), DATASET.shard)
    values = [DATASET.shard(number) for number in (4, 2, 7)]
    assert view == values
    assert values == view == View(np.array([4, 2, 7]), DATASET.shard)
    assert view != values[:2]
    assert view != [*values[:2], values[0]]
    assert view != 7
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


def test_assignments_of_several_rows_are_sorted_per_worker() -> None:
    assignments = Assignments(DATASET, WORKERS, HOLDERS)
    assert assignments.ids(at(0, 0)).tolist() == [0, 1, 2, 4, 5, 6, 8]
    assert assignments.ids(at(1, 1)).tolist() == [1, 2, 3, 5, 6, 7, 9]
    assert assignments.counts.tolist() == [7, 7, 0]


def test_assignments_without_rows_are_empty() -> None:
    assignments = Assignments(DATASET, WORKERS, np.empty((0, 10), np.int32))
    assert [len(assignments[worker]) for worker in WORKERS] == [0, 0, 0]
