from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.data.columns import NOBODY, Column, count
from forged.data.replicas import keep_replicas, place_replicas
from tests.data.values import UNTIMED


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Column, list[Column], Column, int]:
    """Owners, copies that are there, hosts, and how many copies are wanted."""
    world = draw(st.integers(1, 8))
    hosts = np.array(draw(st.lists(st.integers(0, 3), min_size=world, max_size=world)), np.int32)
    shards = draw(st.integers(0, 30))
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
def test_what_is_kept_was_there_and_nothing_that_is_wanted_is_thrown_away(
    layout: tuple[Column, list[Column], Column, int],
) -> None:
    owners, held, hosts, wanted = layout
    kept = keep_replicas(held, owners, hosts, wanted)
    for shard, owner in enumerate(owners.tolist()):
        there = {int(row[shard]) for row in held} - {NOBODY, owner}
        stays = [worker for worker in kept[:, shard].tolist() if worker != NOBODY]
        assert len(stays) == len(set(stays)) == min(wanted, len(there))
        assert set(stays) <= there


@UNTIMED
@given(layouts(), st.booleans())
def test_every_shard_gets_its_copies_at_different_workers(
    layout: tuple[Column, list[Column], Column, int], is_weighted: bool
) -> None:
    owners, held, hosts, wanted = layout
    kept = keep_replicas(held, owners, hosts, wanted)
    weights = tuple(range(1, hosts.size + 1)) if is_weighted else None
    placed = place_replicas(kept, owners, hosts, weights)
    assert (placed[kept != NOBODY] == kept[kept != NOBODY]).all()
    for shard, owner in enumerate(owners.tolist()):
        holders = [owner, *placed[:, shard].tolist()]
        assert len(set(holders)) == wanted + 1
        assert NOBODY not in holders


@UNTIMED
@given(layouts())
def test_a_new_copy_lies_on_a_host_without_one_where_there_is_such_a_host(
    layout: tuple[Column, list[Column], Column, int],
) -> None:
    owners, held, hosts, wanted = layout
    kept = keep_replicas(held, owners, hosts, wanted)
    placed = place_replicas(kept, owners, hosts, None)
    for shard, owner in enumerate(owners.tolist()):
        for number in np.flatnonzero(kept[:, shard] == NOBODY):
            taken = {int(hosts[owner]), *hosts[placed[:number, shard]].tolist()}
            assert int(hosts[placed[number, shard]]) not in taken or taken == set(hosts.tolist())


def test_copies_on_other_hosts_are_kept_before_those_on_the_owners() -> None:
    hosts = np.array([0, 0, 1], np.int32)
    held = [np.array([row], np.int32) for row in (1, 2)]
    assert keep_replicas(held, np.array([0], np.int32), hosts, 1).tolist() == [[2]]


@pytest.mark.parametrize("world", [2, 3, 10])
def test_copies_are_spread_evenly(world: int) -> None:
    hosts = np.arange(world, dtype=np.int32)
    owners = np.resize(hosts, 600)
    loads = count(place_replicas(np.full((1, 600), NOBODY, np.int32), owners, hosts, None), world)
    assert loads.max() - loads.min() <= max(2, 600 // world // 20)


def test_who_has_the_fewest_copies_gets_the_new_ones() -> None:
    hosts = np.arange(4, dtype=np.int32)
    owners = np.zeros(30, np.int32)
    kept = np.array([[1] * 10 + [2] * 10 + [NOBODY] * 10], np.int32)
    assert place_replicas(kept, owners, hosts, None)[0, 20:].tolist().count(3) >= 7
