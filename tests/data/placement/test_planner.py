"""What moves when the workers change, against plain Python that tries everything."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.data import DataRedistributionPlan, DataRedistributor, DataTransfer, SourceKind
from forged.data.columns import NOBODY
from forged.data.model import KINDS, SHARDS_DEFAULT_MAX
from forged.data.placement.planner import REPLICATION_MAX, WINDOW_MIN, choose_sources
from forged.elastic import ClusterTopology, ElasticTrainingConfig, RedistributionType, WorkerId
from forged.errors import ConfigError, RequestRefused
from tests.data.topology_changes import UNTIMED, Change, at, changes, crowded, held_before, redistributor, spread

NOBODY_THERE = ClusterTopology()
FULL = RedistributionType.FULL_RESHUFFLE


def owners_of(plan: DataRedistributionPlan) -> dict[int, WorkerId]:
    """The owner of each shard after the plan, by its assignments."""
    return {shard.shard_id: worker for worker, shards in plan.worker_assignments.items() for shard in shards}


def living(change: Change) -> list[list[WorkerId]]:
    """The reachable holders of each shard, the owner first."""
    there = {*change.new.workers, *(worker for worker in change.draining if worker in change.old)}
    return [[one for one in holders if one in there] for holders in held_before(change)]


def fewest_moves(change: Change) -> int:
    """The fewest shards that must get another owner, over every way to round the shares."""
    weights = [Fraction((change.weights or {}).get(worker, 1)) for worker in change.new.workers]
    exact = [change.shards * weight / sum(weights) for weight in weights]
    before = [holders[0] for holders in held_before(change)]
    held = [before.count(worker) for worker in change.new.workers]
    rounded = itertools.product(*({math.floor(part), math.ceil(part)} for part in exact))
    stay = max(sum(map(min, held, counts)) for counts in rounded if sum(counts) == change.shards)
    return change.shards - stay


# What every plan promises.


@UNTIMED
@given(changes())
def test_every_plan_is_valid(change: Change) -> None:
    report = change.redistributor().examine_redistribution(change.new, change.plan(), draining=change.draining)
    assert report.errors == ()


@UNTIMED
@given(changes(RedistributionType.INCREMENTAL))
def test_no_balanced_plan_moves_fewer_shards(change: Change) -> None:
    assert change.plan().moved == fewest_moves(change)


@UNTIMED
@given(changes())
def test_every_shard_has_one_owner_and_assignments_name_all_workers(change: Change) -> None:
    plan = change.plan()
    assigned = [shard.shard_id for shards in plan.worker_assignments.values() for shard in shards]
    assert sorted(assigned) == list(range(change.shards))
    assert tuple(plan.worker_assignments) == change.new.workers
    assert plan.total_shards == change.shards
    samples = sum(shard.size for shards in plan.worker_assignments.values() for shard in shards)
    assert samples == change.samples


@UNTIMED
@given(changes())
def test_shard_with_a_new_owner_is_transferred_once_unless_held(change: Change) -> None:
    plan, before = change.plan(), held_before(change)
    owners = owners_of(plan)
    travel = [
        (transfer.shard.shard_id, transfer.destination_worker) for transfer in plan.transfers if transfer.priority > 0
    ]
    assert travel == [(shard, owner) for shard, owner in sorted(owners.items()) if owner not in before[shard]]


@UNTIMED
@given(changes())
def test_a_transfer_takes_the_nearest_living_copy_and_the_origin_where_there_is_none(change: Change) -> None:
    holders, before = living(change), held_before(change)
    for transfer in change.plan().transfers:
        there = holders[transfer.shard.shard_id]
        if transfer.source_kind is SourceKind.ORIGIN:
            assert (there, transfer.source_worker) == ([], None)
            continue
        assert transfer.source_worker in there
        host = transfer.destination_worker.hostname
        assert transfer.source_worker.hostname == host or host not in {one.hostname for one in there}
        is_owner = transfer.source_worker == before[transfer.shard.shard_id][0]
        assert (transfer.source_kind is SourceKind.OWNER) == is_owner


@UNTIMED
@given(changes())
def test_earlier_shards_come_first_and_further_copies_after_every_owner(change: Change) -> None:
    transfers = list(change.plan().transfers)
    priorities = [transfer.priority for transfer in transfers]
    assert priorities == sorted(priorities, reverse=True)
    owned = [transfer for transfer in transfers if transfer.priority > 0]
    assert [transfer.priority for transfer in owned] == [change.shards - one.shard.shard_id for one in owned]
    assert transfers[: len(owned)] == owned


@UNTIMED
@given(changes())
def test_plan_has_all_wanted_replicas_and_transfers_none_to_its_holder(change: Change) -> None:
    plan, holders = change.plan(), living(change)
    owners = owners_of(plan)
    wanted = min(change.replication, change.new.world_size - 1)
    copies: dict[int, set[WorkerId]] = {shard: set() for shard in range(change.shards)}
    for worker, shards in plan.replica_assignments.items():
        for copy in shards:
            copies[copy.shard_id].add(worker)
    made = [(one.shard.shard_id, one.destination_worker) for one in plan.transfers if one.priority <= 0]
    assert len(made) == len(set(made))
    for shard, owner in owners.items():
        assert len(copies[shard] - {owner}) == wanted
        assert {towards for one, towards in made if one == shard} == copies[shard] - set(holders[shard])


@UNTIMED
@given(changes())
def test_replica_counts_differ_by_at_most_one_on_separate_hosts(change: Change) -> None:
    old, new = (spread(*(int(one.id[1:]) for one in known.workers)) for known in (change.old, change.new))
    plan = replace(change, old=old, new=new, weights=None, draining=()).plan()
    copies = plan.replica_assignments.counts
    assert copies.max() - copies.min() <= 1


@UNTIMED
@given(changes())
def test_a_plan_follows_from_its_arguments_alone(change: Change) -> None:
    one, other = change.plan(), change.plan()
    assert [list(one.transfers), owners_of(one)] == [list(other.transfers), owners_of(other)]
    assert (one.replicas == other.replicas).all()


@UNTIMED
@given(changes(), st.sampled_from(RedistributionType))
def test_where_nothing_changed_since_a_plan_nothing_moves(change: Change, strategy: RedistributionType) -> None:
    plan = change.plan()
    again = redistributor(
        strategy if strategy is change.strategy else RedistributionType.INCREMENTAL, change.replication
    )
    same = again.calculate_plan(
        change.new,
        change.new,
        change.samples,
        shards=change.shards,
        current=plan.owners,
        replicas=plan.replicas,
        weights=change.weights,
    )
    assert (same.moved, len(same.transfers)) == (0, 0)
    assert owners_of(same) == owners_of(plan)


@UNTIMED
@given(changes())
def test_it_is_the_same_plan_whether_holdings_are_columns_or_names(change: Change) -> None:
    named: dict[WorkerId, list[int]] = {worker: [] for worker in change.old.workers}
    for shard, holders in enumerate(held_before(change)):
        if holders[0] is not None:
            named[holders[0]].append(shard)
    by_name = change.redistributor().calculate_plan(
        change.old, change.new, change.samples, shards=change.shards, current=named, replicas=change.replicas,
        weights=change.weights, draining=change.draining,
    )  # fmt: skip
    assert list(by_name.transfers) == list(change.plan().transfers)


# A full reshuffle.


def test_a_full_reshuffle_deals_all_shards_out_in_rounds_over_the_new_ranks() -> None:
    new = spread(3, 0, 2)
    plan = redistributor(FULL).calculate_plan(spread(0, 1), new, 8)
    assert owners_of(plan) == {shard: new.workers[shard % 3] for shard in range(8)}
    assert [transfer.shard.shard_id for transfer in plan.transfers] == [0, 1, 2, 3, 5, 6, 7]


def test_the_default_is_a_full_reshuffle() -> None:
    plan = DataRedistributor(ElasticTrainingConfig()).calculate_plan(spread(0), spread(0, 1), 4)
    assert plan.owners.tolist() == [0, 1, 0, 1]


def test_a_full_reshuffle_mixes_by_weight_from_the_first_shard_to_the_last() -> None:
    new = spread(0, 1)
    plan = redistributor(FULL).calculate_plan(new, new, 40, weights={at(1, 1): 3})
    assert [int(plan.owners[start : start + 8].sum()) for start in range(0, 40, 8)] == [6] * 5


# An incremental plan.


def test_joiner_gets_the_last_shards_of_the_owners_and_nothing_else_moves() -> None:
    plan = redistributor().calculate_plan(spread(0, 1), spread(0, 1, 2), 12)
    assert plan.owners.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 2, 2, 2, 2]
    assert {transfer.source_worker for transfer in plan.transfers} == {at(0, 0), at(1, 1)}


def test_shards_of_a_dead_worker_go_to_survivors_in_turn_from_the_origin() -> None:
    plan = redistributor().calculate_plan(spread(0, 1, 2), spread(0, 1), 12)
    assert plan.owners.tolist() == [0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1]
    assert plan.transfer_count(SourceKind.ORIGIN) == len(plan.transfers) == plan.moved == 4


def test_draining_worker_is_the_source_of_its_shards() -> None:
    plan = redistributor().calculate_plan(spread(0, 1, 2), spread(0, 1), 12, draining=[at(2, 2)])
    assert [transfer.source_worker for transfer in plan.transfers] == [at(2, 2)] * 4
    assert plan.transfer_count(SourceKind.OWNER) == 4


def test_worker_on_another_host_holds_nothing() -> None:
    new = ClusterTopology((at(0, 0), at(1, 9)))
    plan = redistributor().calculate_plan(spread(0, 1), new, 4)
    assert [(one.source_worker, one.destination_worker) for one in plan.transfers] == [(None, at(1, 9))] * 2


def test_replica_holder_becomes_owner_without_a_transfer() -> None:
    plan = redistributor().calculate_plan(
        spread(0, 1, 2), spread(0, 1), 6, current=[0, 0, 1, 1, 2, 2], replicas=[-1, -1, -1, -1, 1, 0]
    )
    assert plan.owners.tolist() == [0, 0, 1, 1, 1, 0]
    assert (plan.moved, len(plan.transfers)) == (2, 0)


def test_shards_move_within_a_host_if_possible() -> None:
    old = ClusterTopology((at(0, 0), at(1, 1)))
    new = ClusterTopology((at(0, 0), at(1, 1), at(2, 1), at(3, 0)))
    plan = redistributor().calculate_plan(old, new, 16)
    ways = {(one.source_worker, one.destination_worker) for one in plan.transfers if one.source_worker}
    assert ways == {(at(0, 0), at(3, 0)), (at(1, 1), at(2, 1))}


def test_a_copy_on_the_same_host_is_taken_before_the_owner_elsewhere() -> None:
    new = ClusterTopology((at(0, 0), at(1, 1), at(2, 1)))
    plan = redistributor(FULL).calculate_plan(
        ClusterTopology((at(0, 0), at(1, 1))), new, 3, current=[0, 0, 0], replicas=[[-1, -1, 1]]
    )
    assert [(one.source_worker, one.source_kind) for one in plan.transfers] == [
        (at(0, 0), SourceKind.OWNER),
        (at(1, 1), SourceKind.REPLICA),
    ]


def test_worker_of_weight_zero_holds_no_shards() -> None:
    plan = redistributor().calculate_plan(spread(0, 1), spread(0, 1), 4, weights={at(1, 1): 0})
    assert plan.owners.tolist() == [0, 0, 0, 0]
    assert list(plan.worker_assignments[at(1, 1)]) == []


@pytest.mark.parametrize("start", [0, 1000])
def test_the_latest_shards_are_found_however_far_from_the_end_they_are(start: int) -> None:
    """The worker that has too many holds the first shards of a dataset that is many windows long."""
    shards = 10 * WINDOW_MIN
    current = np.resize(np.array([1, 2], np.int32), shards)
    surplus = np.arange(start, start + shards // 2)
    current[surplus] = 0
    plan = redistributor().calculate_plan(spread(0, 1, 2), spread(0, 1, 2), shards, current=current, shards=shards)
    leaving = np.flatnonzero(plan.owners != current)
    assert plan.moved == leaving.size == shards // 2 - math.ceil(shards / 3)
    assert leaving.tolist() == surplus[-leaving.size :].tolist()


# Further copies.


def test_the_old_owner_becomes_a_further_copy_before_another_is_made() -> None:
    plan = redistributor(replication=1).calculate_plan(
        spread(0, 1), spread(0, 1, 2), 3, current=[0, 0, 0], replicas=[[1, 1, 1]]
    )
    # The copies are the first worker's former shards and the second worker's replicas.
    assert sorted(plan.replicas[0].tolist()) == [0, 1, 2]
    assert [transfer.destination_worker for transfer in plan.transfers] == [at(2, 2)] * 2


def test_one_worker_can_have_no_further_copies_and_needs_none() -> None:
    plan = redistributor(replication=2).calculate_plan(spread(0, 1), spread(0), 4)
    assert plan.replicas.shape == (0, 4)
    assert redistributor(replication=2).validate_redistribution(spread(0), plan)


def test_when_an_owner_dies_its_copies_are_the_sources_and_are_made_up_for() -> None:
    plans = redistributor(replication=1)
    before = plans.calculate_plan(NOBODY_THERE, spread(0, 1, 2, 3), 400)
    assert before.transfer_count(SourceKind.ORIGIN) == 800
    after = plans.calculate_plan(
        spread(0, 1, 2, 3), spread(0, 1, 2), 400, current=before.owners, replicas=before.replicas
    )
    assert after.transfer_count(SourceKind.ORIGIN) == 0
    assert after.moved == 100
    lost = int((before.owners == 3).sum() + (before.replicas == 3).sum())
    assert len(after.transfers) == lost


# The edges.


def test_first_plan_takes_all_shards_from_the_origin() -> None:
    plan = redistributor().calculate_plan(NOBODY_THERE, spread(0, 1), 4)
    assert plan.owners.tolist() == [0, 1, 0, 1]
    assert plan.transfers[0] == DataTransfer(None, at(0, 0), plan.dataset.shard(0), 4, source_kind=SourceKind.ORIGIN)
    assert len(plan.transfers) == 4


@pytest.mark.parametrize("strategy", RedistributionType)
@pytest.mark.parametrize("old", [NOBODY_THERE, spread(0)])
def test_plan_for_an_empty_topology_is_refused(strategy: RedistributionType, old: ClusterTopology) -> None:
    with pytest.raises(RequestRefused) as caught:
        redistributor(strategy).calculate_plan(old, NOBODY_THERE, 4)
    assert caught.value.code == "topology_empty"


@pytest.mark.parametrize("strategy", RedistributionType)
@pytest.mark.parametrize("old", [NOBODY_THERE, spread(0)])
@pytest.mark.parametrize("new", [NOBODY_THERE, spread(0, 1)])
def test_empty_dataset_has_an_empty_valid_plan(
    strategy: RedistributionType, old: ClusterTopology, new: ClusterTopology
) -> None:
    plans = redistributor(strategy, replication=1)
    plan = plans.calculate_plan(old, new, 0)
    assert (plan.total_shards, plan.moved, len(plan.transfers)) == (0, 0, 0)
    assert {worker: list(shards) for worker, shards in plan.worker_assignments.items()} == {
        worker: [] for worker in new.workers
    }
    assert plans.validate_redistribution(new, plan)


@pytest.mark.parametrize("strategy", RedistributionType)
def test_one_worker_has_everything(strategy: RedistributionType) -> None:
    plan = redistributor(strategy).calculate_plan(spread(0), spread(0), 5)
    assert ([shard.shard_id for shard in plan.worker_assignments[at(0, 0)]], plan.moved) == ([0, 1, 2, 3, 4], 0)


@pytest.mark.parametrize("strategy", RedistributionType)
def test_with_fewer_shards_than_workers_some_have_none(strategy: RedistributionType) -> None:
    plan = redistributor(strategy).calculate_plan(spread(0, 1), spread(0, 1, 2, 3), 2)
    assert [len(shards) for shards in plan.worker_assignments.values()] == [1, 1, 0, 0]
    assert plan.moved == 0


@pytest.mark.parametrize("strategy", RedistributionType)
def test_two_billion_samples_are_planned_in_as_many_shards_as_are_useful(strategy: RedistributionType) -> None:
    plan = redistributor(strategy).calculate_plan(crowded(*range(8)), crowded(*range(1, 9)), 2_000_000_000)
    assert plan.total_shards == SHARDS_DEFAULT_MAX
    assert plan.bytes_to_move(1.0) <= 2_000_000_000
    assert redistributor(strategy).validate_redistribution(crowded(*range(1, 9)), plan)


@pytest.mark.parametrize("numbers", [range(1001), range(999), range(500)])
def test_ten_million_shards_move_as_few_as_must(numbers: range) -> None:
    shards, old, new = 10_000_000, spread(*range(1000)), spread(*numbers)
    plan = redistributor().calculate_plan(old, new, shards, shards=shards)
    counts = plan.worker_assignments.counts
    assert counts.max() - counts.min() <= 1
    assert plan.moved == {1001: shards // 1001, 999: shards // 1000, 500: shards // 2}[new.world_size]
    assert len(plan.transfers) == plan.moved


@pytest.mark.parametrize("replication", [-1, REPLICATION_MAX + 1, 1.0, True, "1", None])
def test_invalid_replication_is_refused(replication: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        DataRedistributor(ElasticTrainingConfig(), replication=replication)
    assert caught.value.code == "replication_invalid"


def test_settings_that_are_wrong_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="max_concurrent_transfers"):
        DataRedistributor(ElasticTrainingConfig(max_concurrent_transfers=0))


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


def test_shard_without_a_copy_comes_from_the_origin() -> None:
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


# What a plan assigns is what the next one starts from.


@pytest.mark.parametrize("strategy", RedistributionType)
def test_assignments_of_a_plan_are_the_current_holders_of_the_next(strategy: RedistributionType) -> None:
    plans = redistributor(strategy, replication=1)
    first = plans.calculate_plan(spread(0, 1), spread(0, 1, 2), 100, shards=20)
    expected = plans.calculate_plan(
        spread(0, 1, 2), spread(1, 2, 3), 100, shards=20, current=first.owners, replicas=first.replicas
    )
    for current, replicas in (
        (first.worker_assignments, first.replica_assignments),
        (dict(first.worker_assignments), dict(first.replica_assignments)),
        (
            {worker: list(shards) for worker, shards in first.worker_assignments.items()},
            {worker: list(shards) for worker, shards in first.replica_assignments.items()},
        ),
    ):
        second = plans.calculate_plan(
            spread(0, 1, 2), spread(1, 2, 3), 100, shards=20, current=current, replicas=replicas
        )
        assert list(second.transfers) == list(expected.transfers)
        assert second.owners.tolist() == expected.owners.tolist()


def test_assignments_of_another_dataset_are_refused() -> None:
    first = redistributor().calculate_plan(spread(0), spread(0, 1), 100, shards=20)
    with pytest.raises(RequestRefused) as raised:
        redistributor().calculate_plan(spread(0, 1), spread(0), 200, shards=20, current=first.worker_assignments)
    assert raised.value.code == "holdings_invalid"
    assert raised.value.message == "current assigns 100 samples in 20 shards, not 200 in 20"
