"""Plans that a caller makes from transfers, assignments and the number of shards."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from forged.data import DataRedistributionPlan, Dataset, DataShard, DataTransfer, SourceKind
from forged.elastic import ClusterTopology
from forged.elastic.model import WorkerId
from forged.errors import RequestRefused
from tests.data.topology_changes import UNTIMED, Change, at, changes, redistributor, spread

A, B, C = (at(number, number) for number in range(3))
SHARDS = [Dataset(60, 6).shard(number) for number in range(6)]
PLANS = redistributor()
WORLD = spread(0, 1, 2)


def moved(shard: int, source: WorkerId | None, destination: WorkerId, **fields: Any) -> DataTransfer:
    return DataTransfer(source, destination, SHARDS[shard], 6 - shard, **fields)


def scale_up(**fields: Any) -> DataRedistributionPlan:
    """Two workers with the even and the odd shards give one each to a third."""
    arguments: dict[str, Any] = {
        "transfers": [moved(5, B, C), moved(4, A, C)],
        "worker_assignments": {A: [SHARDS[0], SHARDS[2]], B: [SHARDS[1], SHARDS[3]], C: [SHARDS[4], SHARDS[5]]},
        "total_shards": 6,
    }
    return DataRedistributionPlan(**(arguments | fields))


def errors(plan: DataRedistributionPlan, topology: ClusterTopology = WORLD) -> str:
    report = PLANS.examine_redistribution(topology, plan)
    assert PLANS.validate_redistribution(topology, plan) == report.is_valid
    return "\n".join(report.errors)


def test_plan_of_a_caller_reads_as_it_was_given() -> None:
    plan = scale_up()
    assert plan.transfers == [moved(4, A, C), moved(5, B, C)]
    assert plan.worker_assignments == {
        A: [SHARDS[0], SHARDS[2]],
        B: [SHARDS[1], SHARDS[3]],
        C: [SHARDS[4], SHARDS[5]],
    }
    assert (plan.total_shards, plan.moved) == (6, 2)
    assert list(plan.for_worker(C)) == [moved(4, A, C), moved(5, B, C)]
    assert list(plan.for_worker(A)) == list(plan.for_worker(at(9, 9))) == []


def test_plan_without_arguments_is_empty_and_valid_without_workers() -> None:
    plan = DataRedistributionPlan()
    assert (list(plan.transfers), dict(plan.worker_assignments), plan.total_shards) == ([], {}, 0)
    assert errors(plan, ClusterTopology()) == ""
    assert PLANS.validate_redistribution(spread(0), plan) is False


def test_plan_of_a_caller_is_valid_in_any_order_of_its_workers() -> None:
    assert errors(scale_up()) == ""
    reversed_order = dict(reversed(list(scale_up().worker_assignments.items())))
    assert errors(scale_up(worker_assignments=reversed_order)) == ""


def test_plan_of_a_caller_survives_copying_and_pickling() -> None:
    plan = scale_up()
    dict(plan.worker_assignments)
    for other in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert list(other.transfers) == list(plan.transfers)
        assert errors(other) == ""


def test_plan_of_a_caller_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        scale_up().world_size = 2  # type: ignore[misc]


@UNTIMED
@given(changes())
def test_values_of_a_plan_make_a_plan_that_is_as_valid(change: Change) -> None:
    change = replace(change, replication=0, replicas=None, weights=None)
    plan = change.plan()
    again = DataRedistributionPlan(plan.transfers, plan.worker_assignments, plan.total_shards)
    assert list(again.transfers) == list(plan.transfers)
    assert [list(again.worker_assignments[worker]) for worker in change.new.workers] == [
        list(plan.worker_assignments[worker]) for worker in change.new.workers
    ]
    assert change.redistributor().validate_redistribution(change.new, again, draining=change.draining)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"worker_assignments": {A: SHARDS[:2], B: SHARDS[2:4], C: SHARDS[3:6]}},
            f"shard 3 is assigned to {B} and to {C}",
        ),
        ({"worker_assignments": {A: SHARDS[:2], B: SHARDS[2:4]}}, f"{C} is in the topology and not in the plan"),
        ({"worker_assignments": {A: SHARDS[:2], B: SHARDS[2:4], C: SHARDS[4:5]}}, "shard 5 has no owner"),
        ({"total_shards": 5}, f"shard 5 of {C} must be from 0 to 4, below total_shards"),
        (
            {"worker_assignments": {A: SHARDS[:2], B: SHARDS[2:4], C: [SHARDS[4], DataShard(5, 50, 66)]}},
            "shard 0 has the samples from 0 to 10; of 66 samples in 6 shards it has the samples from 0 to 11",
        ),
        ({"transfers": [moved(4, A, C)], "worker_assignments": {A: SHARDS[:2], B: SHARDS[2:4], C: SHARDS[4:]}}, ""),
        ({"transfers": [moved(4, A, C), moved(5, at(9, 9), C)]}, f"{at(9, 9)} serves shards and is neither in"),
        ({"transfers": [moved(4, A, C), moved(5, B, A)]}, "1 replicas of each shard are planned; 0 are wanted"),
        ({"transfers": [moved(4, A, C), moved(5, B, at(9, 9))]}, f"{at(9, 9)} serves shards and is neither in"),
        ({"transfers": [moved(4, A, C), moved(4, A, C), moved(5, B, C)]}, "shard 4 is transferred more than once"),
        (
            {"transfers": [moved(4, A, C), DataTransfer(B, C, DataShard(5, 40, 60), 1)]},
            "shard 5 is transferred with the samples from 40 to 60 and assigned with the samples from 50 to 60",
        ),
        ({"transfers": [DataTransfer(A, C, DataShard(7, 70, 80), 1)]}, "transfer 0 has no valid shard"),
        ({"transfers": [DataTransfer(A, C, DataShard(2**64, 70, 80), 1)]}, "transfer 0 has no valid shard"),
        ({"transfers": [DataTransfer(A, C, DataShard(-1, 70, 80), 1)]}, "transfer 0 has no valid shard"),
    ],
)
def test_fault_of_a_callers_plan_is_reported(fields: dict[str, Any], expected: str) -> None:
    found = errors(scale_up(**fields))
    assert expected in found
    assert bool(found) == bool(expected)


def test_worker_with_more_than_its_share_is_reported() -> None:
    plan = scale_up(transfers=[], worker_assignments={A: SHARDS[:4], B: SHARDS[4:5], C: SHARDS[5:]})
    assert errors(plan).splitlines()[0] == f"{A} has 4 shards; its share is 2"


def test_shard_from_a_replica_or_from_the_origin_is_valid() -> None:
    for source, kind in ((B, SourceKind.REPLICA), (None, SourceKind.ORIGIN), (None, SourceKind.OWNER)):
        transfers = [moved(4, A, C), moved(5, source, C, source_kind=kind)]
        assert errors(scale_up(transfers=transfers)) == ""


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (([1], {}, 0), "transfers[0] must be a DataTransfer, got 1"),
        (((), {A: [7]}, 0), f"worker_assignments[{A}][0] must be a DataShard, got 7"),
        (((), {}, -1), "total_shards must be a whole number from 0 to"),
        (((), {}, 1.5), "total_shards must be a whole number from 0 to"),
    ],
)
def test_values_of_other_types_are_refused_by_name(arguments: Any, field: str) -> None:
    with pytest.raises(RequestRefused) as raised:
        DataRedistributionPlan(*arguments)
    assert raised.value.code == "plan_invalid"
    assert raised.value.message.startswith(field)
