from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.data.columns import NOBODY
from forged.data.model import Dataset
from forged.data.permutation import Permutation
from forged.data.sampling.sharded_order import SPANS_MAX, ShardedOrder, even_draws
from forged.errors import RequestRefused, Unavailable
from tests.data.topology_changes import UNTIMED


def order_of(
    samples: int, shards: int, owners: list[int] | None = None, world_size: int = 1, *, shuffle: bool = True
) -> ShardedOrder:
    order = ShardedOrder(Dataset(samples, shards), 7, shuffle=shuffle)
    order.reassign([0] * shards if owners is None else owners, world_size)
    return order


def flat(ranges: list[range]) -> list[int]:
    return [position for one in ranges for position in one]


# How much each rank draws.


@pytest.mark.parametrize(
    ("left", "wanted", "draws"),
    [
        ([], 5, []),
        ([0, 0], 5, [0, 0]),
        ([9, 9], 0, [0, 0]),
        ([9, 9, 9], 6, [2, 2, 2]),
        ([9, 9, 9], 7, [3, 2, 2]),
        ([8, 9, 9], 7, [2, 3, 2]),
        ([1, 9, 9], 7, [1, 3, 3]),
        ([0, 1, 9], 7, [0, 1, 6]),
        ([1, 2, 3], 6, [1, 2, 3]),
        ([1, 2, 3], 7, [1, 2, 3]),
        ([2**62, 2**62 - 1], 2**63 - 1, [2**62, 2**62 - 1]),
    ],
)
def test_ranks_draw_evenly_and_an_exhausted_rank_draws_less(left: list[int], wanted: int, draws: list[int]) -> None:
    assert even_draws(np.array(left, np.int64), wanted).tolist() == draws


@UNTIMED
@given(st.lists(st.integers(0, 12), max_size=8), st.integers(0, 60))
def test_draws_sum_to_the_request_and_differ_by_at_most_one(left: list[int], wanted: int) -> None:
    draws = even_draws(np.array(left, np.int64), wanted).tolist()
    assert sum(draws) == min(wanted, sum(left))
    assert all(0 <= draw <= most for draw, most in zip(draws, left, strict=True))
    open_ranks = [draw for draw, most in zip(draws, left, strict=True) if draw < most]
    assert not open_ranks or max(draws) <= min(open_ranks) + 1


def test_remainder_of_a_step_rotates_over_the_ranks() -> None:
    """With equal shards all ranks are exhausted at about the same step."""
    order = order_of(4000, 4, [0, 1, 2, 3], 4)
    for _ in range(399):
        order.advance(10)
    assert all(len(flat(order.positions(rank, 4, 10))) in {2, 3} for rank in range(4))


# What they draw.


def test_rank_draws_only_from_its_shards() -> None:
    owners = [0, 1, 2, 0, 1, 2, 0]
    dataset, order = Dataset(100, 7), order_of(100, 7, owners, 3)
    while order.left:
        for rank in range(3):
            samples = order.samples(0, order.positions(rank, 3, 8))
            assert {owners[shard] for shard in dataset.shard_of(samples).tolist()} <= {rank}
        order.advance(8)


def test_rank_uses_its_shards_one_after_the_other() -> None:
    dataset, order = Dataset(100, 7), order_of(100, 7)
    shards: list[int] = []
    while order.left:
        for one in order.positions(0, 1, 6):
            shard = int(dataset.shard_of([one.start])[0])
            assert one.start == dataset.shard(shard).start_index + order.cursors[shard]
            shards.append(shard)
        order.advance(6)
    shard_order = list(dict.fromkeys(shards))
    assert sorted(shard_order) == list(range(7))
    assert shards == sorted(shards, key=shard_order.index)


def test_epochs_order_shards_and_samples_differently() -> None:
    order = order_of(60, 6)
    first = order.samples(0, order.positions(0, 1, 60)).tolist()
    order.begin(1)
    second = order.samples(1, order.positions(0, 1, 60)).tolist()
    assert first != second
    assert [sample // 10 for sample in first] != [sample // 10 for sample in second]
    assert sorted(first) == sorted(second) == list(range(60))


def test_each_shard_is_shuffled_differently() -> None:
    order = order_of(400, 4)
    within = [
        tuple(sample - shard * 100 for sample in order.samples(0, [range(shard * 100, shard * 100 + 100)]).tolist())
        for shard in range(4)
    ]
    assert len(set(within)) == 4


def test_order_without_shuffling_is_ascending() -> None:
    order = order_of(60, 6, [1, 0, 1, 0, 1, 0], 2, shuffle=False)
    assert order.samples(0, order.positions(0, 2, 60)).tolist() == [*range(10, 20), *range(30, 40), *range(50, 60)]


@pytest.mark.parametrize(("samples", "shards"), [(1000, 7), (1000, 300), (1000, 1000), (5, 1)])
def test_samples_of_many_shards_equal_those_read_shard_by_shard(samples: int, shards: int) -> None:
    dataset, order = Dataset(samples, shards), order_of(samples, shards)
    starts, ends = dataset.bounds(np.arange(shards))
    one_by_one = [
        int(start) + int(sample)
        for shard, (start, end) in enumerate(zip(starts, ends, strict=True))
        for sample in Permutation(int(end - start), 7, 3, shard).span(0, int(end - start))
    ]
    assert order.samples(3, [range(samples)]).tolist() == one_by_one
    pieces = [range(at, min(samples, at + 3)) for at in range(0, samples, 3)]
    assert order.samples(3, pieces).tolist() == one_by_one
    few = [range(0), *pieces[: SPANS_MAX - 2], range(4, 4)]
    assert order.samples(3, few).tolist() == one_by_one[: sum(map(len, few))]


def test_empty_positions_have_no_samples() -> None:
    assert order_of(60, 6).samples(0, []).tolist() == []
    assert order_of(60, 6).samples(0, [range(3, 3)]).tolist() == []
    assert order_of(0, 0).samples(0, [range(0)]).tolist() == []


# The holders.


@st.composite
def worlds(draw: st.DrawFn, shards: int) -> tuple[list[int], int]:
    size = draw(st.integers(1, 5))
    return draw(st.lists(st.integers(NOBODY, size - 1), min_size=shards, max_size=shards)), size


@UNTIMED
@given(st.data())
def test_each_sample_of_an_epoch_is_used_once_under_any_history(data: st.DataObject) -> None:
    """Worlds change, drawn steps are not committed, states move, and shards temporarily have no holder."""
    samples = data.draw(st.integers(1, 60))
    shards = data.draw(st.integers(1, min(samples, 9)))
    order = order_of(samples, shards)
    used: list[int] = []
    for _ in range(data.draw(st.integers(0, 6))):
        owners, size = data.draw(worlds(shards))
        order.reassign(owners, size)
        for _ in range(data.draw(st.integers(0, 4))):
            wanted = data.draw(st.integers(1, 20))
            try:
                parts = [order.positions(rank, size, wanted) for rank in range(size)]
            except Unavailable:
                break
            held = [flat(part) for part in parts]
            assert flat(order.taken(wanted)) == [position for part in held for position in part]
            if data.draw(st.booleans()):
                used += [sample for part in parts for sample in order.samples(0, part).tolist()]
                order.advance(wanted)
                assert order.left == samples - len(used)
        if data.draw(st.booleans()):
            other = order_of(samples, shards, owners, size)
            other.load_state_dict(order.state_dict())
            order = other
    used += order.samples(0, order.rest()).tolist()
    assert sorted(used) == list(range(samples))


@UNTIMED
@given(st.data())
def test_step_is_independent_of_when_the_rank_joined(data: st.DataObject) -> None:
    """A joiner with another rank's cursors draws the same as a rank of the first world."""
    shards = data.draw(st.integers(1, 8))
    owners, size = data.draw(worlds(shards))
    order = order_of(50, shards, owners, size)
    for _ in range(data.draw(st.integers(0, 5))):
        if not order.left or NOBODY in owners:
            break
        order.advance(data.draw(st.integers(1, 12)))
    joined = order_of(50, shards)
    joined.load_state_dict(order.state_dict())
    joined.reassign(owners, size)
    assert joined.state_dict()["cursors"].tolist() == order.state_dict()["cursors"].tolist()
    while order.left and any(owner != NOBODY for owner in owners):
        try:
            taken = order.taken(7)
        except Unavailable:
            break
        assert joined.taken(7) == taken
        order.advance(7)
        joined.advance(7)


def test_positions_of_an_uncommitted_step_are_drawn_again() -> None:
    order = order_of(100, 10, [0, 1] * 5, 2)
    order.advance(10)
    drawn = order.taken(10)
    order.reassign([0, 1] * 5, 2)
    assert order.taken(10) == drawn


def test_samples_used_by_a_dead_worker_are_not_drawn_again() -> None:
    order = order_of(100, 10, [0, 1] * 5, 2)
    used = order.samples(0, order.taken(30)).tolist()
    order.advance(30)
    order.reassign([0] * 10, 1)
    rest = order.samples(0, order.positions(0, 1, 100)).tolist()
    assert sorted(used + rest) == list(range(100))


def test_unheld_shards_shrink_the_step_and_then_raise_shards_unheld() -> None:
    order = order_of(100, 10, [0, NOBODY] * 5, 1)
    assert len(flat(order.taken(80))) == 50
    order.advance(80)
    assert order.left == 50
    with pytest.raises(Unavailable, match="the 5 remaining shards of epoch 0: 1, 3, 5, 7, 9") as caught:
        order.taken(10)
    assert caught.value.code == "shards_unheld"
    with pytest.raises(Unavailable):
        order.advance(10)
    order.reassign([0] * 10, 1)
    assert len(flat(order.taken(80))) == 50


def test_order_without_an_assignment_is_refused() -> None:
    order = ShardedOrder(Dataset(10, 2), 7, shuffle=True)
    with pytest.raises(RequestRefused, match="world_size must be 0"):
        order.positions(0, 1, 4)
    with pytest.raises(Unavailable, match="2 remaining shards"):
        order.advance(4)


def test_rank_without_shards_draws_nothing() -> None:
    order = order_of(30, 3, [2, 0, 2], 4)
    assert [len(flat(order.positions(rank, 4, 8))) for rank in range(4)] == [4, 0, 4, 0]


def test_empty_dataset_has_no_positions() -> None:
    order = order_of(0, 0, [], 3)
    assert (order.left, order.taken(5), order.rest()) == (0, [], [])
    order.advance(5)


def test_fork_leaves_the_order_unchanged() -> None:
    order = order_of(100, 10, [0, 1] * 5, 2)
    ahead = order.fork()
    while ahead.left:
        ahead.advance(9)
    ahead.begin(1)
    assert order.left == 100
    assert order.cursors.sum() == 0
    assert order.epoch == 0


def test_state_dict_is_a_copy() -> None:
    order = order_of(100, 10)
    state = order.state_dict()
    order.advance(50)
    assert state["cursors"].sum() == 0
    order.load_state_dict(state)
    state["cursors"][:] = 5
    order.cursors[:] = 5
    assert order.cursors.sum() == 0


@pytest.mark.parametrize(
    ("owners", "world_size", "name"),
    [
        ([0], 1, "owners"),
        ([0] * 11, 1, "owners"),
        ([[0] * 10], 1, "owners"),
        ([0.5] * 10, 1, "owners"),
        (None, 1, "owners"),
        (["a"] * 10, 1, "owners"),
        ([1] * 10, 1, "owners"),
        ([-2] * 10, 1, "owners"),
        ([2**40] * 10, 1, "owners"),
        ([0] * 10, 0, "world_size"),
        ([0] * 10, True, "world_size"),
    ],
)
def test_invalid_assignment_is_refused_and_changes_nothing(owners: Any, world_size: Any, name: str) -> None:
    order = order_of(100, 10, [0, 1] * 5, 2)
    order.advance(30)
    before = order.taken(10)
    with pytest.raises(RequestRefused, match=name) as caught:
        order.reassign(owners, world_size)
    assert caught.value.code == "sampler_invalid"
    assert order.taken(10) == before


def test_world_size_other_than_the_assigned_one_is_refused() -> None:
    with pytest.raises(RequestRefused, match=r"world_size must be 2, .* got 3"):
        order_of(100, 10, [0, 1] * 5, 2).positions(0, 3, 4)


@pytest.mark.parametrize("cursors", [None, [0] * 9, [[0] * 10], [0.0] * 10, [11] + [0] * 9, [-1] + [0] * 9, ["0"] * 10])
def test_invalid_cursors_are_refused_and_change_nothing(cursors: Any) -> None:
    order = order_of(100, 10)
    order.advance(30)
    before = order.taken(10)
    with pytest.raises(RequestRefused, match="cursors"):
        order.load_state_dict({"epoch": 4, "cursors": cursors})
    assert (order.epoch, order.taken(10)) == (0, before)
