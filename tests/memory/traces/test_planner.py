from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.memory.traces import Buffer, FitUnknown, Packing, TraceDoesNotFit, TraceInvalid, plan, planned_blocks
from tests.memory.traces.buffers import check_packing, naive_height, traces

ABOVE_PEAK = [
    Buffer(number, *life)
    for number, life in enumerate(
        [(0, 1, 3), (0, 2, 3), (1, 3, 1), (1, 4, 2), (2, 4, 2), (3, 5, 2), (4, 5, 1), (4, 6, 3)]
    )
]
"""The peak is 6, and the lowest packing has 7."""


@given(traces())
def test_plan_without_capacity_overlaps_nowhere_and_is_not_below_the_peak(buffers: list[Buffer]) -> None:
    found = plan(buffers, nodes_max=2_000)
    check_packing(buffers, found.offsets)
    assert found.height == max((found.offsets[buffer.id] + buffer.size for buffer in buffers), default=0)
    assert found.height >= found.peak


@given(traces(most=6, size_max=4))
def test_plan_finds_a_packing_exactly_if_there_is_one(buffers: list[Buffer]) -> None:
    lowest = naive_height(buffers)
    found = plan(buffers, lowest)
    check_packing(buffers, found.offsets)
    assert found.height <= lowest
    if lowest:
        with pytest.raises(TraceDoesNotFit):
            plan(buffers, lowest - 1)


@given(traces(), st.integers(0, 60))
def test_plan_with_capacity_is_within_it_or_refused(buffers: list[Buffer], capacity: int) -> None:
    try:
        found = plan(buffers, capacity, nodes_max=5_000)
    except (TraceDoesNotFit, FitUnknown):
        assert capacity < sum(buffer.size for buffer in buffers)
    else:
        check_packing(buffers, found.offsets)
        assert found.height <= capacity


@given(traces(), st.sampled_from([2**40, 2**62 + 1, 2**63 - 1]))
def test_sizes_near_2_to_the_63_are_exact(buffers: list[Buffer], factor: int) -> None:
    large = [Buffer(one.id, one.lower, one.upper, one.size * factor) for one in buffers]
    found = plan(large, nodes_max=500)
    check_packing(large, found.offsets)
    assert found.peak == plan(buffers, nodes_max=500).peak * factor
    assert found.height % factor == 0


@given(traces(size_max=20), st.sampled_from([1, 2, 8, 256]))
def test_offsets_of_an_aligned_plan_are_multiples_of_the_alignment(buffers: list[Buffer], alignment: int) -> None:
    rounded = [Buffer(one.id, one.lower, one.upper, -(-one.size // alignment) * alignment) for one in buffers]
    found = plan(buffers, nodes_max=500, alignment=alignment)
    assert found == plan(rounded, nodes_max=500)
    assert all(offset % alignment == 0 for offset in found.offsets.values())
    check_packing(rounded, found.offsets)


def test_alignment_of_a_plan_must_be_a_power_of_two() -> None:
    for alignment in (0, -1, 3, True, 2.0):
        with pytest.raises(TraceInvalid, match="alignment must be"):
            plan([], alignment=alignment)  # type: ignore[arg-type]


def test_planned_blocks_have_the_ids_of_the_buffers_as_names() -> None:
    buffers = [Buffer("a", 0, 2, 3), Buffer(1, 1, 3, 4)]
    packing = plan(buffers)
    blocks = planned_blocks(buffers, packing)
    assert [(one.name, one.size) for one in blocks] == [("a", 3), ("1", 4)]
    assert [one.offset for one in blocks] == [packing.offsets["a"], packing.offsets[1]]
    twice = [Buffer("1", 0, 2, 3), Buffer(1, 1, 3, 4)]
    with pytest.raises(TraceInvalid, match="different texts"):
        planned_blocks(twice, plan(twice))


def test_plan_of_no_buffers_is_empty() -> None:
    assert plan([], 0) == Packing({}, 0, 0)


def test_plan_refuses_a_peak_beyond_the_capacity() -> None:
    with pytest.raises(TraceDoesNotFit, match="need 7 bytes at one time; the capacity is 6"):
        plan([Buffer(0, 0, 5, 3), Buffer(1, 4, 6, 4)], 6)


def test_buffers_share_an_offset_if_one_begins_when_the_other_ends() -> None:
    assert plan([Buffer(0, 0, 5, 3), Buffer(1, 5, 6, 3)], 3).offsets == {0: 0, 1: 0}


def test_plan_proves_that_no_packing_is_as_low_as_the_peak() -> None:
    with pytest.raises(TraceDoesNotFit, match="no packing of the buffers is at most 6 bytes high, although their peak"):
        plan(ABOVE_PEAK, 6)
    assert plan(ABOVE_PEAK, 7).height == 7


def test_plan_says_unknown_if_the_budget_is_used_up() -> None:
    with pytest.raises(FitUnknown) as caught:
        plan(ABOVE_PEAK, 6, nodes_max=1)
    assert (caught.value.code, caught.value.height) == ("trace_fit_unknown", 7)


def test_two_buffers_of_one_id_are_refused() -> None:
    with pytest.raises(TraceInvalid, match="different ids"):
        plan([Buffer(0, 0, 1, 1), Buffer(0, 1, 2, 1)], 10)


@pytest.mark.parametrize("capacity", [-1, 1.5, True, "7"])
def test_plan_refuses_a_capacity_that_is_no_size(capacity: int) -> None:
    with pytest.raises(TraceInvalid, match="capacity must be"):
        plan([], capacity)
