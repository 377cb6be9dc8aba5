from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.memory import (
    MemoryBlock,
    MemoryInvalid,
    PoolStats,
    align_up,
    best_fit_block,
    estimate_oom_seconds,
    eviction_candidates,
    fragmentation_ratio,
    is_power_of_two,
    memory_pressure,
    optimal_pool_size,
    should_defragment,
)
from tests.memory.pool.pools import ALLOCATED, CACHED, FREE, PINNED, block

POWERS = [2**n for n in (0, 1, 2, 8, 31, 32, 53, 62, 63, 64)]

# --- alignment --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", POWERS)
def test_each_power_of_two_is_one(n: int) -> None:
    assert is_power_of_two(n)


@pytest.mark.parametrize("n", [0, -1, -2, -(2**63), 3, 6, 255, 257, 2**53 + 1, 2**63 - 1, 2**64 + 2])
def test_other_numbers_are_no_powers_of_two(n: int) -> None:
    assert not is_power_of_two(n)


@pytest.mark.parametrize(
    ("size", "alignment", "aligned"),
    [
        (0, 1, 0),
        (0, 256, 0),
        (1, 1, 1),
        (7, 1, 7),
        (1, 256, 256),
        (255, 256, 256),
        (256, 256, 256),
        (257, 256, 512),
        (2**53 + 1, 1, 2**53 + 1),
        (2**53 + 1, 2, 2**53 + 2),
        (2**63 - 1, 256, 2**63),
        (2**63, 256, 2**63),
        (2**63 + 1, 256, 2**63 + 256),
        (1, 2**63, 2**63),
    ],
)
def test_size_is_rounded_up_to_the_alignment(size: int, alignment: int, aligned: int) -> None:
    assert align_up(size, alignment) == aligned


@pytest.mark.parametrize("alignment", [0, 3, 6, 255, 2**63 - 1])
def test_alignment_that_is_no_power_of_two_is_refused(alignment: int) -> None:
    with pytest.raises(MemoryInvalid, match=f"alignment must be a power of two, got {alignment}"):
        align_up(100, alignment)


@pytest.mark.parametrize(("size", "alignment"), [(-1, 8), (8, -8), (1.5, 8), (8, 2.0), ("8", 8), (8, None)])
def test_size_and_alignment_are_integers_and_not_negative(size: int, alignment: int) -> None:
    with pytest.raises(MemoryInvalid, match="must be an integer >= 0"):
        align_up(size, alignment)


@given(st.integers(0, 2**70), st.sampled_from(POWERS))
def test_aligned_size_is_the_least_multiple_that_suffices(size: int, alignment: int) -> None:
    aligned = align_up(size, alignment)
    assert aligned % alignment == 0
    assert size <= aligned < size + alignment


# --- fragmentation and best fit ---------------------------------------------------------------------------------------


def free_of(*sizes: int) -> list[MemoryBlock]:
    return [block(f"free{n}", n * 2**70, size) for n, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "ratio"),
    [((), 0.0), ((5,), 0.0), ((6, 2), 0.25), ((2, 6), 0.25), ((1, 1, 1, 1), 0.75), ((2**63, 2**63), 0.5)],
)
def test_fragmentation_is_the_share_outside_of_the_largest_free_block(sizes: tuple[int, ...], ratio: float) -> None:
    used = [block("used", 2**80, 1000, status) for status in (ALLOCATED, PINNED, CACHED)]
    assert fragmentation_ratio([*free_of(*sizes), *used]) == ratio


def test_fragmentation_is_exact_where_the_largest_block_is_nearly_all() -> None:
    assert fragmentation_ratio(free_of(2**63, 1)) == 1 / (2**63 + 1)


def test_best_fit_is_the_smallest_free_block_that_suffices() -> None:
    blocks = [block("a", 0, 400), block("b", 400, 100), block("c", 512, 120, CACHED), block("d", 1024, 128)]
    assert best_fit_block(blocks, 101, 1) == "d"
    assert best_fit_block(blocks, 100, 1) == "b"
    assert best_fit_block(blocks, 129, 1) == "a"
    assert best_fit_block(blocks, 401, 1) is None


def test_best_fit_counts_the_padding_before_an_aligned_offset() -> None:
    blocks = [block("a", 8, 256), block("b", 512, 300)]
    assert best_fit_block(blocks, 256, 256) == "b"
    assert best_fit_block(blocks[:1], 256, 256) is None
    assert best_fit_block(blocks, 200, 8) == "a"


def test_best_fit_rounds_the_size_up() -> None:
    blocks = [block("a", 0, 255), block("b", 256, 256)]
    assert best_fit_block(blocks, 255, 256) == "b"


def test_best_fit_of_equal_blocks_has_the_lowest_offset() -> None:
    blocks = [block("b", 512, 100), block("a", 0, 100)]
    assert best_fit_block(blocks, 50, 1) == "a"


def test_nothing_fits_a_size_of_zero() -> None:
    assert best_fit_block([block("a", 0, 100)], 0, 1) is None


def test_best_fit_needs_a_power_of_two() -> None:
    with pytest.raises(MemoryInvalid, match="alignment must be a power of two, got 3"):
        best_fit_block([block("a", 0, 100)], 1, 3)


# --- eviction order ---------------------------------------------------------------------------------------------------


def test_only_cached_blocks_are_candidates_the_oldest_first() -> None:
    blocks = [
        block("new", 0, 1, CACHED, 9.0),
        block("free", 1, 1, FREE, 0.0),
        block("old", 2, 1, CACHED, 1.0),
        block("pinned", 3, 1, PINNED, 0.0),
        block("allocated", 4, 1, ALLOCATED, 0.0),
    ]
    assert eviction_candidates(blocks) == ["old", "new"]


def test_equally_recent_candidates_go_by_priority_then_by_offset() -> None:
    blocks = [
        block("important", 0, 1, CACHED, 1.0, priority=5),
        block("second", 9, 1, CACHED, 1.0),
        block("first", 3, 1, CACHED, 1.0),
        block("least", 7, 1, CACHED, 1.0, priority=-1),
    ]
    assert eviction_candidates(blocks) == ["least", "first", "second", "important"]


# --- pressure and forecasts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allocated", "total", "pressure"),
    [
        (0, 10, 0.0),
        (5, 10, 0.5),
        (10, 10, 1.0),
        (11, 10, 1.0),
        (-1, 10, 0.0),
        (0, 0, 1.0),
        (5, 0, 1.0),
        (2**62, 2**63, 0.5),
    ],
)
def test_pressure_is_the_allocated_share(allocated: int, total: int, pressure: float) -> None:
    assert memory_pressure(allocated, total) == pressure


@pytest.mark.parametrize(
    ("fragmentation", "largest", "expected"),
    [(0.6, 99, True), (0.5, 99, False), (0.6, 100, False), (0.4, 99, False), (0.6, 101, False)],
)
def test_both_fragmentation_and_the_largest_block_call_for_compaction(
    fragmentation: float, largest: int, expected: bool
) -> None:
    stats = PoolStats(1000, 500, 500, 0, 0, fragmentation, largest, 3, 2)
    assert should_defragment(stats, 0.5, 100) is expected


@pytest.mark.parametrize(
    ("free", "rate", "seconds"),
    [
        (100, 50.0, 2.0),
        (0, 50.0, 0.0),
        (-5, 50.0, 0.0),
        (100, 0.0, math.inf),
        (100, -1.0, math.inf),
        (0, 0.0, math.inf),
        (100, math.nan, math.inf),
        (100, math.inf, 0.0),
        (2**63, 2.0**62, 2.0),
    ],
)
def test_memory_lasts_as_long_as_the_rate_allows(free: int, rate: float, seconds: float) -> None:
    assert estimate_oom_seconds(free, rate) == seconds


@pytest.mark.parametrize(
    ("peak", "factor", "page", "size"),
    [
        (1000, 1.1, 1, 1100),
        (1000, 1.1, 100, 1100),
        (1000, 1.1, 4096, 4096),
        (4096, 1.0, 4096, 4096),
        (4097, 1.0, 4096, 8192),
        (1000, 1.5, 700, 2100),
        (0, 2.0, 4096, 0),
        (10, 0.0, 4096, 0),
        (10, 2, 1, 20),
        (2**63 - 1, 1.0, 1, 2**63 - 1),
        (2**63 - 1, 1.0, 2, 2**63),
    ],
)
def test_pool_size_is_the_peak_with_headroom_in_whole_pages(peak: int, factor: float, page: int, size: int) -> None:
    assert optimal_pool_size(peak, factor, page) == size


@pytest.mark.parametrize(
    ("peak", "factor", "page", "name"),
    [
        (-1, 1.0, 1, "peak_usage"),
        (1, -0.1, 1, "headroom_factor"),
        (1, math.nan, 1, "headroom_factor"),
        (1, math.inf, 1, "headroom_factor"),
        (1, 1.0, 0, "page_size"),
        (1, 1.0, -4096, "page_size"),
    ],
)
def test_pool_size_without_a_meaning_is_refused(peak: int, factor: float, page: int, name: str) -> None:
    with pytest.raises(MemoryInvalid, match=f"{name} must be"):
        optimal_pool_size(peak, factor, page)
