from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.data.columns import NOBODY
from forged.data.model import Indices
from forged.data.ownership.attempt import Assignment, DataAttempt, LostShards, Offer
from forged.elastic.model import WorkerId


def ids(*numbers: int) -> Indices:
    return np.array(numbers, np.int64)


def worker(name: str) -> WorkerId:
    return WorkerId(name, f"host-{name}", 7000)


@given(parts=st.lists(st.lists(st.integers(0, 49), max_size=20), max_size=12))
def test_whatever_is_said_in_parts_is_held_once(parts: list[list[int]]) -> None:
    holdings = Offer()
    for part in parts:
        holdings.add(ids(*part), 50)
    assert holdings.ids.tolist() == sorted({shard for part in parts for shard in part})


def test_offered_shards_are_sorted_on_first_read() -> None:
    """It takes no longer to hear the more was said before."""
    holdings = Offer()
    parts = [ids(*range(start, start + 10)) for start in range(0, 1_000, 10)]
    for part in parts:
        holdings.add(part, 1_000)
    assert all(one is other for one, other in zip(holdings.parts, parts, strict=True))


@pytest.mark.parametrize("shards", [1_000, 10])
def test_repeated_offers_use_bounded_memory(shards: int) -> None:
    holdings = Offer()
    for _ in range(100):
        for start in range(0, shards, shards // 10):
            holdings.add(ids(*range(start, start + shards // 10)), shards)
    assert sum(part.size for part in holdings.parts) <= 2 * shards
    assert holdings.ids.tolist() == list(range(shards))


def test_to_say_nothing_takes_no_room() -> None:
    holdings = Offer()
    for _ in range(3):
        holdings.add(ids(), 0)
    assert holdings.parts == []
    assert holdings.ids.tolist() == []


def test_empty_assignment_has_no_owners() -> None:
    nobody = Assignment.empty(3)
    assert (nobody.generation, nobody.workers, nobody.replicas.shape) == (0, (), (0, 3))
    assert nobody.owners.tolist() == [NOBODY] * 3


def test_members_are_the_target_and_then_draining_members() -> None:
    a, b, z = map(worker, "abz")
    attempt = DataAttempt(1, (b, a), (a, z))
    assert attempt.members == (b, a, z)
    attempt.offers[a] = Offer()
    assert attempt.waiting_for == [b, z]
    assert not attempt.lacks_shards
    assert not attempt.is_over


def test_lost_shards_of_all_members_are_merged_with_the_first_reason() -> None:
    attempt = DataAttempt(1, (worker("a"), worker("b")), ())
    assert attempt.lost == LostShards()
    attempt.lost_at_origin = {"b": LostShards(30, tuple(range(20)), "b: no"), "a": LostShards(2, (0, 70), "a: no")}
    # One of the two is among the thirty, and the other may be.
    assert attempt.lost == LostShards(30, tuple(range(20)), "b: no")


@pytest.mark.parametrize(
    ("of_a", "of_b", "number"),
    [
        (LostShards(1, (0,)), LostShards(1, (0,)), 1),
        (LostShards(2, (0, 1)), LostShards(2, (1, 2)), 3),
        (LostShards(1, (0,)), LostShards(1, (1,)), 2),
        (LostShards(20, tuple(range(20))), LostShards(25, tuple(range(20, 40))), 40),
    ],
)
def test_a_shard_that_several_need_is_missing_once(of_a: LostShards, of_b: LostShards, number: int) -> None:
    attempt = DataAttempt(1, (worker("a"), worker("b")), ())
    attempt.lost_at_origin = {"a": of_a, "b": of_b}
    assert attempt.lost.number == number


def test_an_attempt_that_was_left_lacks_nothing_any_more() -> None:
    attempt = DataAttempt(1, (worker("a"),), (), is_drafted=True)
    assert attempt.lacks_shards
    attempt.is_abandoned = True
    assert not attempt.lacks_shards
    attempt.is_abandoned, attempt.is_aborted = False, True
    assert not attempt.lacks_shards
