from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from forged.data.columns import NOBODY, Column, count
from forged.data.placement.replicas import fair_shares, keep_replicas, place_replicas
from forged.data.placement.shares import Weights
from tests.data.topology_changes import UNTIMED


@st.composite
def layouts(draw: st.DrawFn, world_max: int = 8, shards_max: int = 30) -> tuple[Column, list[Column], Column, int]:
    """Owners, copies that are there, hosts, and how many copies are wanted."""
    world = draw(st.integers(1, world_max))
    hosts = np.array(draw(st.lists(st.integers(0, 3), min_size=world, max_size=world)), np.int32)
    shards = draw(st.integers(0, shards_max))
    owners = np.array(draw(st.lists(st.integers(0, world - 1), min_size=shards, max_size=shards)), np.int32)
    held: list[Column] = []
    for _ in range(draw(st.integers(0, 3))):
        row = np.array(draw(st.lists(st.integers(-1, world - 1), min_size=shards, max_size=shards)), np.int32)
        for earlier in held:
            row[row == earlier] = NOBODY
        held.append(row)
    return owners, held, hosts, draw(st.integers(0, world - 1))


@UNTIMED
@given(layouts())
def test_kept_replicas_were_held_and_no_wanted_one_is_dropped(
    layout: tuple[Column, list[Column], Column, int],
) -> None:
    owners, held, hosts, wanted = layout
    kept = keep_replicas(held, owners, hosts, wanted)
    for shard, owner in enumerate(owners.tolist()):
        there = {int(row[shard]) for row in held} - {NOBODY, owner}
        stays = [worker for worker in kept[:, shard].tolist() if worker != NOBODY]
        assert len(stays) == len(set(stays)) == min(wanted, len(there))
        assert set(stays) <= there


@st.composite
def balanced(draw: st.DrawFn) -> tuple[Column, list[Column], Column, int]:
    """The same, so few that all ways to place copies can be tried, and nobody owns more than another can."""
    owners, held, hosts, wanted = draw(layouts(world_max=4, shards_max=4))
    dealt = np.array(draw(st.permutations([shard % hosts.size for shard in range(owners.size)])), np.int32)
    return dealt.reshape(owners.shape), held, hosts, wanted


def placed_of(layout: tuple[Column, list[Column], Column, int], weights: Weights = None) -> Column:
    owners, held, hosts, wanted = layout
    return place_replicas(keep_replicas(held, owners, hosts, wanted), held, owners, hosts, weights)


@UNTIMED
@given(layouts(), st.booleans())
def test_every_shard_gets_its_copies_at_different_workers(
    layout: tuple[Column, list[Column], Column, int], is_weighted: bool
) -> None:
    owners, _, hosts, wanted = layout
    placed = placed_of(layout, tuple(range(1, hosts.size + 1)) if is_weighted else None)
    for shard, owner in enumerate(owners.tolist()):
        holders = [owner, *placed[:, shard].tolist()]
        assert len(set(holders)) == wanted + 1
        assert NOBODY not in holders


@UNTIMED
@given(layouts())
def test_a_new_copy_lies_on_a_host_without_one_where_there_are_hosts_for_all(
    layout: tuple[Column, list[Column], Column, int],
) -> None:
    owners, held, hosts, wanted = layout
    assume(wanted < np.unique(hosts).size)
    placed = placed_of(layout)
    for shard, owner in enumerate(owners.tolist()):
        here = placed[:, shard].tolist()
        for new in set(here) - {int(row[shard]) for row in held}:
            assert hosts[new] not in {hosts[one] for one in (owner, *here) if one != new}


@UNTIMED
@given(layouts(), st.booleans())
def test_replica_shares_are_fair_for_any_holdings(
    layout: tuple[Column, list[Column], Column, int], is_weighted: bool
) -> None:
    owners, held, hosts, wanted = layout
    weights = tuple(range(1, hosts.size + 1)) if is_weighted else None
    shares = fair_shares(keep_replicas(held, owners, hosts, wanted), owners, hosts, weights)
    assert shares.sum() == wanted * owners.size
    assert (count(placed_of(layout, weights), hosts.size) == shares).all()


@UNTIMED
@given(balanced())
def test_no_way_to_place_the_copies_is_more_even(layout: tuple[Column, list[Column], Column, int]) -> None:
    """Of those that put no more of them beside each other on a host."""
    owners, _, hosts, wanted = layout
    placed = placed_of(layout)

    def unevenness(chosen: Sequence[Sequence[int]]) -> int:
        return sum(load * load for load in Counter(worker for one in chosen for worker in one).values())

    def crowded(chosen: Sequence[Sequence[int]]) -> int:
        pairs = zip(owners.tolist(), chosen, strict=True)
        return sum(len({int(hosts[one]) for one in (owner, *copies)}) <= wanted for owner, copies in pairs)

    ranks = range(hosts.size)
    ways = product(*(combinations([one for one in ranks if one != owner], wanted) for owner in owners.tolist()))
    ours = [tuple(placed[:, shard].tolist()) for shard in range(owners.size)]
    as_diverse = [way for way in ways if wanted >= len(set(hosts.tolist())) or crowded(way) <= crowded(ours)]
    assert unevenness(ours) == min(map(unevenness, as_diverse))


def test_copies_on_other_hosts_are_kept_before_those_on_the_owners() -> None:
    hosts = np.array([0, 0, 1], np.int32)
    held = [np.array([row], np.int32) for row in (1, 2)]
    assert keep_replicas(held, np.array([0], np.int32), hosts, 1).tolist() == [[2]]


@pytest.mark.parametrize("world", [2, 3, 10])
def test_copies_are_spread_evenly(world: int) -> None:
    hosts = np.arange(world, dtype=np.int32)
    owners = np.resize(hosts, 600)
    loads = count(place_replicas(np.full((1, 600), NOBODY, np.int32), [], owners, hosts), world)
    assert loads.max() - loads.min() <= 1


def test_replicas_of_an_owner_are_spread_evenly_over_the_other_workers() -> None:
    """A failed worker's shards can be fetched from all other workers at once."""
    hosts = np.arange(5, dtype=np.int32)
    owners = np.resize(hosts, 5_000)
    (placed,) = place_replicas(np.full((1, 5_000), NOBODY, np.int32), [], owners, hosts)
    for owner in range(5):
        sources = count(placed[owners == owner], 5)
        assert 200 <= np.delete(sources, owner).min() <= np.delete(sources, owner).max() <= 300


@pytest.mark.parametrize(("wanted", "on_one_host"), [(1, 1), (2, 1), (3, 1), (2, 4)])
def test_joiner_gets_its_share_of_replicas_and_no_other_replica_moves(wanted: int, on_one_host: int) -> None:
    hosts = (np.arange(21) // on_one_host).astype(np.int32)
    owners = np.resize(np.arange(20, dtype=np.int32), 4_200)
    (*before,) = place_replicas(np.full((wanted, 4_200), NOBODY, np.int32), [], owners, hosts[:20])
    after = placed_of((owners, before, hosts, wanted))
    is_new = np.stack([(row != np.stack(before)).all(axis=0) for row in after])
    assert set(after[is_new].tolist()) == {20}
    assert is_new.sum() == 200 * wanted


def test_surplus_replica_stays_with_a_holder_that_has_it() -> None:
    hosts = np.arange(3, dtype=np.int32)
    held = [np.full(6, 1, np.int32), np.full(6, 2, np.int32)]
    kept = keep_replicas(held, np.zeros(6, np.int32), hosts, 1)
    assert kept.tolist() == [[1] * 6]
    placed = place_replicas(kept, held, np.zeros(6, np.int32), hosts)
    assert count(placed, 3).tolist() == [0, 3, 3]


def test_copies_beside_each_other_on_a_host_are_the_first_to_go() -> None:
    """Each of the first two has to give away two, and one of its copies is on the host of the owner."""
    hosts = np.array([0, 0, 1, 2], np.int32)
    owners = np.array([0, 2, 2, 2, 1, 2, 2, 2], np.int32)
    held = [np.array([1, 1, 1, 1, 0, 0, 0, 0], np.int32)]
    placed = placed_of((owners, held, hosts, 1))
    assert [placed[0, shard] for shard in (0, 4)] != [1, 0]
    assert all(hosts[placed[0, shard]] != 0 for shard in (0, 4))


def test_where_a_host_has_fewer_workers_they_have_more_of_the_copies() -> None:
    hosts = np.array([0, 0, 0, 1], np.int32)
    owners = np.resize(np.arange(4, dtype=np.int32), 1_200)
    placed = placed_of((owners, [], hosts, 1))
    assert count(placed, 4).tolist() == [100, 100, 100, 900]


def test_placed_replicas_stay_when_a_host_limits_its_weight() -> None:
    """Whether all replicas fit does not depend on the workers that get the extra ones."""
    hosts, owners = np.array([0, 1, 2, 2, 0], np.int32), np.array([3, 4], np.int32)
    weights, held = (0, 0, 1, 15, 10), [np.array([0, 2], np.int32)]
    placed = place_replicas(keep_replicas(held, owners, hosts, 1), held, owners, hosts, weights)
    kept = keep_replicas([*placed], owners, hosts, 1)
    assert placed.tolist() == place_replicas(kept, [*placed], owners, hosts, weights).tolist() == [[4, 2]]
