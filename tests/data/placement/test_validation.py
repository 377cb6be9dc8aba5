"""A plan that is wrong in one place, and what is said of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from forged.data import DataRedistributionPlan, Dataset, SourceKind
from forged.data.placement.validation import NAMED_MAX
from forged.elastic import ClusterTopology
from forged.elastic.model import WorkerId
from tests.data.topology_changes import UNTIMED, Change, at, changes, redistributor, spread

NEW = spread(0, 1, 2)
PLANS = redistributor(replication=1)
PLAN = PLANS.calculate_plan(
    spread(0, 1, 3), NEW, 24, shards=12, replicas=[[1, 0, 0, -1, -1, -1, 1, 0, 1, -1, -1, -1]], draining=[at(3, 3)]
)
"""The owners before are 0, 1 and the draining worker 3; some shards have a replica."""

BELOW_ALL_KINDS: Any = PLAN.columns.kinds.astype(np.int8) - len(SourceKind)


def errors(
    plan: DataRedistributionPlan, topology: ClusterTopology = NEW, draining: Collection[WorkerId] = (at(3, 3),)
) -> str:
    report = PLANS.examine_redistribution(topology, plan, draining=draining)
    is_valid = PLANS.validate_redistribution(topology, plan, draining=draining)
    assert is_valid == report.is_valid == (not report.errors)
    return "\n".join(report.errors)


def with_column(name: str, changed: dict[int, int], plan: DataRedistributionPlan = PLAN) -> DataRedistributionPlan:
    """The plan with these rows of a column changed."""
    column = getattr(plan, name).copy()
    for row, value in changed.items():
        column.flat[row] = value
    return replace(plan, **{name: column})


def with_transfers(name: str, changed: dict[int, int], plan: DataRedistributionPlan = PLAN) -> DataRedistributionPlan:
    """The plan with these rows of a column of its transfers changed."""
    column = getattr(plan.columns, name).copy()
    for row, value in changed.items():
        column[row] = value
    return replace(plan, columns=replace(plan.columns, **{name: column}))


def picked(rows: Any, plan: DataRedistributionPlan = PLAN) -> DataRedistributionPlan:
    """The plan with only these of its transfers, in this order."""
    columns = {name: column[rows] for name, column in vars(plan.columns).items()}
    return replace(plan, columns=replace(plan.columns, **columns))


def test_a_plan_of_the_planner_has_no_errors() -> None:
    assert errors(PLAN) == ""
    assert {0, 1} <= set(PLAN.columns.copies.tolist())


def test_source_outside_topology_and_not_draining_is_named() -> None:
    assert errors(PLAN, draining=()) == f"{at(3, 3)} serves shards and is neither in the topology nor draining"


def test_ranks_are_those_of_the_topology() -> None:
    workers = (PLAN.workers[1], PLAN.workers[0], *PLAN.workers[2:])
    assert errors(replace(PLAN, workers=workers)).splitlines() == [
        f"{at(1, 1)} has rank 0 in the plan, and {at(0, 0)} in the topology",
        f"{at(0, 0)} has rank 1 in the plan, and {at(1, 1)} in the topology",
    ]


@pytest.mark.parametrize("name", ["owners", "owners_before", "replicas", "replicas_before"])
def test_a_column_that_is_not_of_whole_numbers_is_named(name: str) -> None:
    broken = replace(PLAN, **{name: getattr(PLAN, name).astype(np.float64)})
    assert errors(broken) == f"{name} must contain whole numbers, not float64"


@pytest.mark.parametrize("name", list(vars(PLAN.columns)))
def test_a_column_of_transfers_that_is_not_of_whole_numbers_is_named(name: str) -> None:
    columns = replace(PLAN.columns, **{name: getattr(PLAN.columns, name).astype(np.float32)})
    assert errors(replace(PLAN, columns=columns)) == f"{name} of the transfers must contain whole numbers, not float32"


def test_a_shard_without_an_owner_is_named() -> None:
    assert "shard 4 has no owner" in errors(with_column("owners", {4: -1}))
    assert "shard 4 has no owner" in errors(with_column("owners", {4: 3}))


def test_a_worker_with_too_many_and_one_with_too_few_shards_are_named() -> None:
    taken = int(np.flatnonzero(PLAN.owners == 2)[0])
    found = errors(with_column("owners", {taken: 0}))
    assert f"{at(0, 0)} has 5 shards; its share is 4" in found
    assert f"{at(2, 2)} has 3 shards; its share is 4" in found


def test_shares_are_by_weight() -> None:
    plan = PLANS.calculate_plan(NEW, NEW, 16, weights={at(0, 0): 2})
    assert errors(plan) == ""
    assert f"{at(0, 0)} has 8 shards; its share is 5 or 6" in errors(replace(plan, weights=None))


def test_owner_outside_the_topology_is_named() -> None:
    found = errors(PLAN, spread(0, 1, 5))
    assert f"{at(2, 2)} gets shards and is not in the topology" in found
    assert f"{at(5, 5)} is in the topology and not in the plan" in found


def test_a_transfer_that_is_missing_is_named() -> None:
    shard = int(PLAN.columns.shards[0])
    owner = PLAN.workers[PLAN.owners[shard]]
    assert f"shard {shard} is not transferred to {owner}, which needs it" in errors(picked(slice(1, None)))


def test_a_transfer_that_is_there_twice_is_named() -> None:
    shard = int(PLAN.columns.shards[0])
    rows = [0, *range(PLAN.columns.shards.size)]
    assert f"shard {shard} is transferred more than once as one copy" in errors(picked(rows))


def test_needless_transfer_is_named() -> None:
    stays = int(np.flatnonzero(PLAN.owners == PLAN.owners_before)[0])
    assert f"shard {stays} is transferred without need" in errors(with_transfers("shards", {0: stays}))


def test_transfer_to_a_worker_that_does_not_keep_the_shard_is_named() -> None:
    shard, other = int(PLAN.columns.shards[0]), (int(PLAN.columns.destinations[0]) + 1) % 3
    found = errors(with_transfers("destinations", {0: other}))
    assert f"shard {shard} is transferred to {PLAN.workers[other]}, which does not keep it" in found


def test_a_source_that_does_not_have_the_shard_is_named() -> None:
    shard = int(PLAN.columns.shards[0])
    assert f"shard {shard} comes from {at(2, 2)}, which does not have it" in errors(with_transfers("sources", {0: 2}))
    assert f"shard {shard} comes from no worker, which does not have it" in errors(with_transfers("sources", {0: -1}))


def test_an_owner_as_a_source_must_be_the_owner() -> None:
    row = int(np.flatnonzero(PLAN.columns.kinds == 1)[0])
    assert "which does not have it" in errors(with_transfers("kinds", {row: 0}))


def test_the_origin_is_no_source_while_a_worker_has_the_shard() -> None:
    plan = with_transfers("kinds", {0: 2}, with_transfers("sources", {0: -1}))
    assert f"shard {int(PLAN.columns.shards[0])} comes from the origin although a worker has it" in errors(plan)


def test_a_further_copy_that_is_missing_or_at_the_owner_is_named() -> None:
    assert "shard 5 has no replica 1" in errors(with_column("replicas", {5: -1}))
    owner = int(PLAN.owners[5])
    assert f"{PLAN.workers[owner]} has shard 5 twice" in errors(with_column("replicas", {5: owner}))


def test_wrong_number_of_replicas_is_named() -> None:
    assert "0 replicas of each shard are planned; 1 are wanted" in errors(redistributor().calculate_plan(NEW, NEW, 4))


def test_transfers_out_of_order_are_named() -> None:
    assert "is due before transfer" in errors(picked(slice(None, None, -1)))


@pytest.mark.parametrize(
    "broken",
    [
        with_column("owners_before", {0: 9}),
        with_column("replicas_before", {0: -2}),
        with_column("replicas", {0: 3}),
        with_transfers("sources", {0: 4}),
        with_transfers("shards", {0: 12}),
        with_transfers("shards", {0: -1}),
        with_transfers("destinations", {0: 3}),
        with_transfers("destinations", {0: -1}),
        with_transfers("copies", {0: 2}),
        with_transfers("kinds", {0: 3}),
        replace(PLAN, columns=replace(PLAN.columns, kinds=BELOW_ALL_KINDS)),
        replace(PLAN, world_size=len(PLAN.workers) + 1),
        replace(PLAN, world_size=-1),
        replace(PLAN, weights=(1, 2)),
        replace(PLAN, weights=(0, 0, 0)),
        replace(PLAN, weights=(3, -1, 1)),
        replace(PLAN, dataset=Dataset(13, 13)),
        replace(PLAN, owners=PLAN.owners[:-1]),
        replace(PLAN, replicas=PLAN.replicas[:, :-1]),
        replace(PLAN, replicas_before=PLAN.replicas_before[0]),
        replace(PLAN, columns=replace(PLAN.columns, copies=PLAN.columns.copies[:-1])),
        replace(PLAN, workers=(at(0, 0), at(1, 1), at(2, 2), at(0, 0))),
    ],
)
def test_invalid_worker_and_shard_numbers_are_named(broken: DataRedistributionPlan) -> None:
    assert errors(broken) != ""


def test_similar_errors_are_named_up_to_a_limit_and_counted() -> None:
    plan = redistributor().calculate_plan(NEW, NEW, 100)
    broken = replace(plan, owners=np.full(100, -1, np.int32))
    report = redistributor().examine_redistribution(NEW, broken)
    assert report.errors == (*(f"shard {number} has no owner" for number in range(NAMED_MAX)), "and 90 more like it")


@UNTIMED
@given(changes())
def test_a_plan_without_one_of_its_transfers_is_never_valid(change: Change) -> None:
    plan = change.plan()
    for row in range(len(plan.transfers)):
        rows = [other for other in range(len(plan.transfers)) if other != row]
        assert not change.redistributor().validate_redistribution(
            change.new, picked(rows, plan), draining=change.draining
        )
