from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.memory.traces import Buffer, Event, TraceDoesNotFit, TraceInvalid, events, replay
from forged.memory.traces.replay import GROWING, POLICIES
from tests.memory.traces.buffers import check_packing, traces

# The holes are 4 and 3 bytes when the last one comes: at 0, and at 6.
HOLES = [Buffer("a", 0, 2, 4), Buffer("b", 0, 9, 2), Buffer("c", 0, 2, 3), Buffer("d", 0, 9, 1), Buffer("e", 2, 9, 2)]


@given(traces(), st.sampled_from([*GROWING, "pool"]))
def test_replay_overlaps_nowhere_and_is_not_below_the_peak(buffers: list[Buffer], policy: str) -> None:
    found = replay(events(buffers), policy=policy)
    check_packing(buffers, found.offsets)
    assert found.height >= found.peak
    assert not found.evicted


@given(traces(), st.sampled_from(POLICIES), st.integers(0, 30))
def test_replay_is_within_the_capacity_or_refused(buffers: list[Buffer], policy: str, capacity: int) -> None:
    try:
        found = replay(events(buffers), capacity, policy)
    except TraceDoesNotFit:
        assert capacity < sum(buffer.size for buffer in buffers)
    else:
        assert found.height <= capacity
        assert found.evicted_bytes == sum(one.size for one in buffers if one.id in found.evicted)


@given(traces(), st.sampled_from([1, 2, 8]))
def test_replay_places_every_buffer_at_the_alignment(buffers: list[Buffer], alignment: int) -> None:
    found = replay(events(buffers), policy="first_fit", alignment=alignment)
    check_packing(buffers, found.offsets)
    assert all(offset % alignment == 0 for offset in found.offsets.values())


@pytest.mark.parametrize(("policy", "offset"), [("best_fit", 6), ("pool", 6), ("first_fit", 0), ("worst_fit", 0)])
def test_the_policy_chooses_the_hole(policy: str, offset: int) -> None:
    assert replay(events(HOLES), 20, policy).offsets["e"] == offset


def test_best_fit_grows_only_if_no_hole_fits_and_the_pool_uses_the_smallest_hole() -> None:
    # The hole below the height is 5 bytes and joins what is unused: the pool prefers the hole of 6.
    buffers = [Buffer("a", 0, 2, 6), Buffer("b", 0, 9, 1), Buffer("c", 0, 2, 5), Buffer("d", 3, 9, 5)]
    assert replay(events(buffers), 20).offsets["d"] == 7
    assert replay(events(buffers), 20, "pool").offsets["d"] == 0


def test_a_buffer_without_a_place_is_refused_with_the_largest_hole() -> None:
    with pytest.raises(TraceDoesNotFit, match="'e' of 5 bytes has no place at time 2: the largest hole has 4"):
        replay(events([*HOLES[:4], Buffer("e", 2, 9, 5)]), 10)


def test_lru_evicts_the_oldest_buffer_and_best_fit_does_not() -> None:
    buffers = [Buffer("old", 0, 9, 6), Buffer("new", 1, 9, 4), Buffer("next", 2, 9, 5)]
    found = replay(events(buffers), 10, "lru")
    assert (found.evicted, found.evicted_bytes) == ({"old": 2}, 6)
    with pytest.raises(TraceDoesNotFit):
        replay(events(buffers), 10)


def test_a_buffer_larger_than_the_capacity_is_refused_by_every_policy() -> None:
    for policy in POLICIES:
        with pytest.raises(TraceDoesNotFit):
            replay(events([Buffer(0, 0, 1, 11)]), 10, policy)


def test_releases_come_before_allocations_of_the_same_time() -> None:
    buffers = [Buffer("b", 3, 4, 1), Buffer("a", 0, 3, 1)]
    assert [(event.buffer.id, event.is_allocation) for event in events(buffers)] == [
        ("a", True),
        ("a", False),
        ("b", True),
        ("b", False),
    ]


def test_events_that_contradict_each_other_are_refused() -> None:
    buffer = Buffer("a", 0, 1, 1)
    with pytest.raises(TraceInvalid, match="event 1 is about buffer 'a': it is allocated twice"):
        replay([Event(0, True, buffer), Event(0, True, buffer)])
    with pytest.raises(TraceInvalid, match="event 0 is about buffer 'a': it is released and not alive"):
        replay([Event(0, False, buffer)])


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(TraceInvalid, match="policy must be one of best_fit, first_fit"):
        replay([], 1, "buddy")


@pytest.mark.parametrize(("lower", "upper", "size"), [(1, 1, 1), (2, 1, 1), (0, 1, 0), (0, 1, -1), (0, 1.5, 1)])
def test_a_buffer_that_cannot_be_is_refused(lower: int, upper: int, size: int) -> None:
    with pytest.raises(TraceInvalid, match="of buffer 'x' must be"):
        Buffer("x", lower, upper, size)
