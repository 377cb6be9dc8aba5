from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.data.sampling.usage import Coverage, Run, Spans, UsageTable, Use, compressed, runs_of
from tests.data.topology_changes import UNTIMED

Row = tuple[int, int, int, bool]
"""Step, epoch, position, dropped."""


def rows(runs: list[Run]) -> Counter[Row]:
    """Position by position."""
    return Counter(
        (run.step + number, run.epoch, run.start + number * run.size + at, run.dropped)
        for run in runs
        for number in range(run.count)
        for at in range(run.size)
    )


def spans(*ranges: tuple[int, int]) -> Spans:
    return np.array([start for start, _ in ranges], np.int64), np.array([end for _, end in ranges], np.int64)


def listed(found: Spans) -> list[tuple[int, int]]:
    return list(zip(found[0].tolist(), found[1].tolist(), strict=True))


def table_of(runs: list[Run]) -> UsageTable:
    table = UsageTable()
    table.add(compressed(runs))
    return table


runs = st.builds(
    Run,
    step=st.integers(0, 6),
    epoch=st.integers(0, 1),
    start=st.integers(0, 12),
    size=st.integers(1, 4),
    count=st.integers(1, 4),
    dropped=st.booleans(),
)
runs_of_one_epoch = runs.map(lambda run: msgspec.structs.replace(run, epoch=0))


def test_consecutive_steps_are_one_row() -> None:
    used = ((step, [Use(0, step * 8, step * 8 + 8)]) for step in range(50_000))
    table = table_of(runs_of(used))
    table.add([Run(step=50_000, epoch=0, start=400_000, size=8, count=950_000)])
    assert len(table) == 1


def test_adjacent_ranges_of_ranks_are_merged_in_any_order() -> None:
    shares = [(0, 3), (3, 5), (5, 8)]
    used = [
        (step, [Use(0, step * 8 + start, step * 8 + end) for start, end in shares[step % 3 :] + shares[: step % 3]])
        for step in range(10)
    ]
    assert runs_of(used) == [Run(step=0, epoch=0, start=0, size=8, count=10)]


def test_shards_used_in_parallel_have_one_row_each() -> None:
    used = [
        (step, [Use(0, 100 + step * 3, 103 + step * 3), Use(0, 500 + step * 2, 502 + step * 2)]) for step in range(9)
    ]
    assert runs_of(used) == [Run(0, 0, 100, 3, 9), Run(0, 0, 500, 2, 9)]


def test_gap_or_new_size_or_new_epoch_starts_a_row() -> None:
    used = [(0, [Use(0, 0, 2)]), (1, [Use(0, 2, 4)]), (3, [Use(0, 4, 6)]), (4, [Use(0, 6, 9)]), (5, [Use(1, 9, 12)])]
    assert [(run.step, run.count) for run in runs_of(used)] == [(0, 2), (3, 1), (4, 1), (5, 1)]


def test_dropped_positions_are_kept_apart_from_used_ones() -> None:
    assert runs_of([(4, [Use(0, 8, 10), Use(0, 10, 13, dropped=True)])]) == [
        Run(4, 0, 8, 2),
        Run(4, 0, 10, 3, 1, dropped=True),
    ]


def test_empty_range_is_no_row() -> None:
    assert runs_of([(0, [Use(0, 5, 5)]), (1, [])]) == []


@UNTIMED
@given(st.lists(runs, max_size=12))
def test_compressed_runs_cover_the_same_positions(given_runs: list[Run]) -> None:
    found = compressed(given_runs)
    assert rows(found) == rows(given_runs)
    assert len(found) <= len(given_runs)


@UNTIMED
@given(runs, st.integers(0, 12), st.integers(0, 12))
def test_part_of_a_run_covers_exactly_its_steps(run: Run, first: int, end: int) -> None:
    part = run.between(first, end)
    expected = Counter(row for row in rows([run]).elements() if first <= row[0] < end)
    assert part is None or part.count > 0
    assert rows([part] if part else []) == expected


@UNTIMED
@given(st.lists(runs_of_one_epoch, max_size=10), st.integers(0, 11))
def test_rewind_removes_all_usage_from_its_step_on(given_runs: list[Run], step: int) -> None:
    table = table_of(given_runs)
    table.rewind(step)
    kept = [part for run in given_runs if (part := run.between(0, step))]
    for dropped in (False, True):
        positions = Counter(at for start, end in listed(table.spans(dropped=dropped)) for at in range(start, end))
        assert positions == Counter(row[2] for row in rows(kept).elements() if row[3] == dropped)


@UNTIMED
@given(st.lists(runs_of_one_epoch, max_size=10), st.lists(st.integers(0, 11), max_size=3), st.integers(0, 11))
def test_settling_keeps_every_position_and_repetition(given_runs: list[Run], settled: list[int], back: int) -> None:
    table = table_of(given_runs)
    for step in sorted(settled):
        table.settle(step)
    back = max([back, *settled])
    table.rewind(back)
    kept = rows([part for run in given_runs if (part := run.between(0, back))])
    for dropped in (False, True):
        times = Counter(row[2] for row in kept.elements() if row[3] == dropped)
        coverage = Coverage.of(table.spans(dropped=dropped))
        for depth in (1, 2):
            found = {at for start, end in listed(coverage.at_least(depth)) for at in range(start, end)}
            assert found == {at for at, count in times.items() if count >= depth}


@UNTIMED
@given(st.lists(runs_of_one_epoch, max_size=10), st.integers(0, 11))
def test_settling_returns_the_range_of_steps(given_runs: list[Run], step: int) -> None:
    steps = [row[0] for row in rows(given_runs) if row[0] < step]
    assert table_of(given_runs).settle(step) == ((min(steps), max(steps) + 1) if steps else None)


def test_consecutive_steps_of_several_reports_settle_as_one_row() -> None:
    table = table_of([Run(step, 0, step * 10, 5 + step % 2) for step in range(100)])
    table.add([Run(step, 0, step * 10 + 5 + step % 2, 5 - step % 2) for step in range(100)])
    assert len(table) == 200
    table.settle(100)
    assert listed(table.spans(dropped=False)) == [(0, 1000)]


def test_next_report_extends_the_last_row() -> None:
    table = table_of([Run(0, 0, 0, 4, 10)])
    table.add([Run(10, 0, 40, 4, 5)])
    assert len(table) == 1
    table.add([Run(15, 0, 60, 5, 5)])
    assert len(table) == 2
    assert listed(table.spans(dropped=False)) == [(0, 60), (60, 85)]


def test_columns_round_trip() -> None:
    table = table_of([Run(0, 0, 0, 4, 10), Run(3, 0, 50, 2, 1, dropped=True)])
    other = UsageTable()
    other.extend(table.columns())
    assert np.array_equal(other.columns(), table.columns())
    assert UsageTable().columns().shape == (5, 0)


@UNTIMED
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=8))
def test_coverage_counts_each_position(pairs: list[tuple[int, int]]) -> None:
    ranges = [(start, start + size) for start, size in pairs]
    coverage = Coverage.of(spans(*ranges))
    times = Counter(at for start, end in ranges for at in range(start, end))
    for depth in (1, 2, 3):
        found = listed(coverage.at_least(depth))
        assert {at for start, end in found for at in range(start, end)} == {
            at for at, count in times.items() if count >= depth
        }
        # As long as they go: no two of them touch.
        assert all(end < start for (_, end), (start, _) in pairwise(found))
    gaps = [at for start, end in listed(coverage.gaps(28)) for at in range(start, end)]
    assert gaps == [at for at in range(28) if not times[at]]


@pytest.mark.parametrize("change", [{"step": -1}, {"size": 0}, {"count": 0}, {"start": -1}, {"epoch": 2**63}])
def test_invalid_run_is_not_decoded(change: dict[str, int]) -> None:
    encoded = msgspec.msgpack.encode(msgspec.structs.replace(Run(0, 0, 0, 1), **change))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=Run)
