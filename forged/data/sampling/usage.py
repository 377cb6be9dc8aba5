"""What steps have used, compressed into rows.

A step of the world uses a few ranges of positions in the order of an epoch. Consecutive steps that each continue where
the previous one ended, with the same size, are one row. A settled row no longer belongs to particular steps.

Invariants:
- Rows are equivalent to the steps that they were made of.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Self

import msgspec
import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64]
Spans = tuple[Column, Column]
"""The starts and the ends of ranges."""

WHOLE_MAX = (1 << 63) - 1
Whole = Annotated[int, msgspec.Meta(ge=0, le=WHOLE_MAX)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=WHOLE_MAX)]

SETTLED = -1
"""In place of a step, for settled rows."""


class Use(msgspec.Struct, frozen=True, array_like=True):
    """The positions of an epoch that a step used, or dropped: `start` up to `end`, exclusive."""

    epoch: Whole
    start: Whole
    end: Whole
    dropped: bool = False


class Run(msgspec.Struct, frozen=True, array_like=True):
    """`count` consecutive steps that each used `size` positions, each from the end of the previous one."""

    step: Whole
    epoch: Whole
    start: Whole
    size: Positive
    count: Positive = 1
    dropped: bool = False

    @property
    def end_step(self) -> int:
        """The step after the last one."""
        return self.step + self.count

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + self.count * self.size

    def between(self, first: int, end: int) -> Run | None:
        """The part in the steps from `first` up to `end`; None if there is none."""
        first, end = max(first, self.step), min(end, self.end_step)
        if first >= end:
            return None
        start = self.start + (first - self.step) * self.size
        return msgspec.structs.replace(self, step=first, start=start, count=end - first)


def runs_of(used: Iterable[tuple[int, Sequence[Use]]]) -> list[Run]:
    """The rows of these steps, which must be in order."""
    return compressed(
        Run(step, use.epoch, use.start, use.end - use.start, 1, use.dropped)
        for step, uses in used
        for use in uses
        if use.end > use.start
    )


def compressed(runs: Iterable[Run]) -> list[Run]:
    """Merge rows that continue each other."""
    found: list[Run] = []
    tips: dict[tuple[int, bool, int], int] = {}
    for _, of_step in groupby(sorted(runs, key=lambda run: run.step), key=lambda run: run.step):
        for run in _joined(of_step):
            number = tips.pop((run.epoch, run.dropped, run.start), None)
            if number is None or not _goes_on(found[number], run):
                number = len(found)
                found.append(run)
            else:
                found[number] = msgspec.structs.replace(found[number], count=found[number].count + run.count)
            tips[(run.epoch, run.dropped, run.end)] = number
    return found


def _goes_on(run: Run, other: Run) -> bool:
    return run.end_step == other.step and run.size == other.size


def _joined(of_step: Iterable[Run]) -> Iterator[Run]:
    """Merge adjacent ranges of one step, such as those of its ranks."""
    before: Run | None = None
    for run in sorted(of_step, key=lambda run: (run.epoch, run.dropped, run.count > 1, run.start)):
        if before is not None and _is_beside(before, run):
            before = msgspec.structs.replace(before, size=before.size + run.size)
            continue
        if before is not None:
            yield before
        before = run
    if before is not None:
        yield before


def _is_beside(run: Run, other: Run) -> bool:
    is_alike = (run.epoch, run.dropped) == (other.epoch, other.dropped)
    return is_alike and run.count == other.count == 1 and run.end == other.start


class UsageTable:
    """The rows of one epoch, by column."""

    def __init__(self) -> None:
        self._columns = tuple(array("q") for _ in range(5))
        """Step, start, size, count, and whether the positions were dropped."""
        self._tips: dict[tuple[int, bool], int] = {}
        """The rows that were added last, by where they end."""
        self._first_step, self._end_step = WHOLE_MAX, 0
        """The first and the last step of the rows that are not settled."""

    def __len__(self) -> int:
        return len(self._columns[0])

    def add(self, runs: Iterable[Run]) -> None:
        """Add rows that `compressed` has made."""
        tips: dict[tuple[int, bool], int] = {}
        rows: list[tuple[int, ...]] = []
        for run in runs:
            number = self._tips.get((run.start, run.dropped))
            if number is not None and self._goes_on(number, run):
                self._columns[3][number] += run.count
            else:
                number = len(self) + len(rows)
                rows.append((run.step, run.start, run.size, run.count, run.dropped))
            tips[(run.end, run.dropped)] = number
            self._first_step = min(self._first_step, run.step)
            self._end_step = max(self._end_step, run.end_step)
        for column, values in zip(self._columns, zip(*rows, strict=True), strict=False):
            column.extend(values)
        self._tips = tips

    def rewind(self, step: int) -> None:
        """Remove what was used from `step` on."""
        if self._end_step <= step:
            return
        steps, _, _, counts, _ = columns = self.columns()
        columns[3] = np.minimum(counts, step - steps)
        self._replace(columns[:, columns[3] > 0])

    def settle(self, step: int) -> tuple[int, int] | None:
        """Settle the rows before `step`; returns the range of their steps, if there were any."""
        if self._first_step >= step:
            return None
        columns = self.columns()
        steps, starts, sizes, counts, dropped = columns
        before = np.minimum(counts, step - steps)
        is_settled = before > 0
        found = self._first_step, int((steps + before)[is_settled & (steps != SETTLED)].max())
        ends = starts + before * sizes
        layers = [
            _settled_rows(Coverage.of((starts[chosen], ends[chosen])), is_dropped=flag)
            for flag in (False, True)
            if (chosen := is_settled & (dropped == flag)).any()
        ]
        is_open = before < counts
        rest = np.where(is_settled, [steps + before, ends, sizes, counts - before, dropped], columns)[:, is_open]
        self._replace(np.concatenate([*layers, rest], axis=1))
        return found

    def forget_settled(self) -> None:
        """Remove the settled rows."""
        self._replace(self.rows_of_steps())

    def spans(self, *, dropped: bool) -> Spans:
        """The ranges of positions that were used, or those that were dropped."""
        _, starts, sizes, counts, flags = self.columns()
        chosen = flags == dropped
        return starts[chosen], (starts + sizes * counts)[chosen]

    def rows_of_steps(self) -> Column:
        """The rows that are not settled, by column."""
        columns = self.columns()
        return columns[:, columns[0] != SETTLED]

    def reaches(self, first: int, end: int) -> bool:
        """Whether any of these steps has a row."""
        return self._first_step < end and self._end_step > first

    def columns(self) -> Column:
        """All rows, column by column."""
        return np.array([np.frombuffer(column, np.int64) for column in self._columns]).reshape(5, -1)

    def extend(self, columns: Column) -> None:
        """Add rows in the form of `columns`."""
        self._replace(np.concatenate([self.columns(), columns], axis=1))

    def _goes_on(self, number: int, run: Run) -> bool:
        step, start, size, count, _ = (column[number] for column in self._columns)
        return (step + count, start + size * count, size) == (run.step, run.start, run.size)

    def _replace(self, columns: Column) -> None:
        self._columns = tuple(array("q", column.tobytes()) for column in columns)
        self._tips = {}
        steps, _, _, counts, _ = self.rows_of_steps()
        self._first_step = int(steps.min(initial=WHOLE_MAX))
        self._end_step = int((steps + counts).max(initial=0))


def per_step(rows: Column, first: int, end: int) -> Column:
    """The merged ranges of each step from `first` up to `end`: step, whether dropped, start and end, sorted."""
    steps, starts, sizes, counts, dropped = rows
    skipped = np.maximum(first - steps, 0)
    counts = np.maximum(np.minimum(steps + counts, end) - steps - skipped, 0)
    nth = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(skipped, counts)
    steps, starts, sizes, dropped = (np.repeat(column, counts) for column in (steps, starts, sizes, dropped))
    starts = starts + nth * sizes
    found = np.array([steps + nth, dropped, starts, starts + sizes])
    found = found[:, np.lexsort(found[2::-1])]
    is_beside = np.all(found[:2, 1:] == found[:2, :-1], axis=0) & (found[2, 1:] == found[3, :-1])
    heads = np.flatnonzero(np.append(True, ~is_beside)[: found.shape[1]])
    tails = np.append(heads[1:], found.shape[1])[: heads.size] - 1
    return np.concatenate([found[:3, heads], found[3:, tails]])


def first_of_latest(rows: Iterable[Column], end: int, ranges_max: int) -> int:
    """The first of the last steps before `end` that used at most so many ranges together; at least one step."""
    steps, _, _, counts, _ = np.concatenate([np.empty((5, 0), np.int64), *rows], axis=1)
    ends = np.minimum(steps + counts, end)
    low, high = int(steps.min(initial=end - 1)), end - 1
    while low < high:
        middle = (low + high) // 2
        # The total may not fit into 64 bits.
        if np.maximum(ends - np.maximum(steps, middle), 0).sum(dtype=float) > ranges_max:
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class Coverage:
    """How often each position is covered by ranges: from each point on, as often as its depth."""

    points: Column
    depths: Column

    @classmethod
    def of(cls, *spans: Spans) -> Self:
        starts = np.concatenate([start for start, _ in spans])
        ends = np.concatenate([end for _, end in spans])
        points = np.concatenate([starts, ends])
        order = np.argsort(points, kind="stable")
        points = points[order]
        depths = np.cumsum(np.repeat(np.array([1, -1]), len(starts))[order])
        is_last = np.append(points[1:] != points[:-1], True)[: len(points)]
        return cls(points[is_last], depths[is_last])

    def at_least(self, depth: int) -> Spans:
        """The ranges that are covered at least so many times."""
        is_inside = np.concatenate([[False], self.depths >= depth])
        return self.points[is_inside[1:] & ~is_inside[:-1]], self.points[~is_inside[1:] & is_inside[:-1]]

    def gaps(self, total: int) -> Spans:
        """The ranges of the positions below `total` that are not covered."""
        starts, ends = self.at_least(1)
        befores, afters = np.append(0, ends), np.append(starts, total)
        is_gap = befores < afters
        return befores[is_gap], afters[is_gap]


def _settled_rows(coverage: Coverage, *, is_dropped: bool) -> Column:
    """The used ranges, and the ranges that were used more than once."""
    (starts, ends), (starts_twice, ends_twice) = coverage.at_least(1), coverage.at_least(2)
    start = np.concatenate([starts, starts_twice])
    size = np.concatenate([ends, ends_twice]) - start
    return np.array([np.full_like(start, SETTLED), start, size, np.ones_like(start), np.full_like(start, is_dropped)])
