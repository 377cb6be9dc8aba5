"""Audits whether each sample of an epoch was used exactly once.

Invariants:
- An epoch is complete when each position is used or deliberately dropped by a committed step, and none is used twice.
- A voided step has used nothing, and a repeated report does not count again.
- Usage that is reported too late or forgotten is missing.
- If two reports about a step differ, nothing is proven of its epoch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from forged.data.permutation import check_whole
from forged.data.sampling.usage import (
    SETTLED,
    WHOLE_MAX,
    Column,
    Coverage,
    Run,
    Spans,
    UsageTable,
    Whole,
    compressed,
    first_of_latest,
    per_step,
)
from forged.errors import PeerError, RequestRefused

STEP_MAX = WHOLE_MAX - 1
GENERATIONS_MAX = 4096
"""For so many generations and rollbacks the log knows how far they have reported; older reports are too late."""
RANGES_MAX = 1000
"""How many ranges of each kind a view lists; all positions are counted."""
CHUNK_BYTES_MAX = 512 << 10
ROWS_PER_PART = 2_000
PARTS_BYTES_MAX = 320 << 10
"""Leaves room for the head in a chunk."""

COMPARED_RANGES_MAX = 2_000
"""Of repeated reports the latest steps, with about so many ranges, are compared with the earlier reports."""
CONFLICTS_MAX = 20
"""How many conflicting steps of an epoch are listed."""
WORKER_CHARS_MAX = 100

_NO_ROWS: Column = np.empty((5, 0), np.int64)
_PART_BYTES = 64
_CONFLICT_BYTES = 16 + 4 * WORKER_CHARS_MAX
"""Upper bounds of a part without rows and conflicts, and of one conflict."""


@dataclass(frozen=True, slots=True)
class EpochAudit:
    """The audit of one epoch. `missing` and `repeated` list the first ranges; the totals count all positions.

    `used` and `dropped` count each position once. An epoch is `forgotten` if the training went back into it to before
    a settled step: the usage at its beginning is unknown and counts as missing.
    """

    epoch: int
    expected: int
    used: int
    dropped: int
    missing: list[range]
    missing_total: int
    repeated: list[range]
    repeated_total: int
    forgotten: bool
    conflicts: list[tuple[int, str]] = field(default_factory=list)
    """Step and worker of each report that differs from an earlier one."""

    @property
    def complete(self) -> bool:
        """Whether each sample was used once or deliberately dropped."""
        return not (self.missing_total or self.repeated_total or self.conflicts)


class UsageLog:
    """What the committed steps of a job have used, for a dataset of so many samples."""

    def __init__(self, samples: int) -> None:
        check_whole("usage_invalid", "samples", samples, 0, WHOLE_MAX)
        self.samples = samples
        self._epochs: dict[int, _Epoch] = {}
        self._told: dict[int, int] = {}
        """The step up to which each generation has reported."""
        self._floor = 0
        """Reports of generations below it are ignored."""
        self._returns: list[tuple[int, int]] = []
        """The generations that went back, and to which step. Both ascend: a longer rollback replaces earlier ones."""
        self._settled = 0
        self.revision = 0
        """Changes with every change of the log."""

    @property
    def epochs(self) -> list[int]:
        """The epochs with usage."""
        return sorted(self._epochs)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(len(epoch.table) for epoch in self._epochs.values())

    def told(self, generation: int) -> int:
        """The step up to which this generation's usage is known."""
        return self._told.get(generation, 0)

    def report(self, generation: int, runs: Sequence[Run], worker: str = "") -> None:
        """Take in what steps of the whole world have used, each step complete, but for what is void. What is here
        already is only compared."""
        _check("generation", generation)
        for run in runs:
            _check_run(run, self.samples)
        if generation < self._floor:
            return
        first, end = self.told(generation), self._void_behind(generation)
        self._compare(runs, min(first, end), worker)
        fresh = [part for run in runs if (part := run.between(first, end)) is not None]
        if fresh:
            self._add(fresh)
            self._told[generation] = max(run.end_step for run in fresh)
            self._forget_generations()

    def _add(self, runs: Iterable[Run]) -> None:
        by_epoch = defaultdict(list)
        for run in compressed(runs):
            by_epoch[run.epoch].append(run)
        for epoch, of_epoch in by_epoch.items():
            self._epochs.setdefault(epoch, _Epoch()).table.add(of_epoch)
        self.revision += 1

    def _compare(self, runs: Sequence[Run], told: int, worker: str) -> None:
        """Compare repeated steps with the earlier reports, and record conflicts."""
        latest = sorted(run.step for run in runs if run.step < told)[-COMPARED_RANGES_MAX:]
        if not latest:
            return
        rows: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for run in runs:
            if run.step < told and run.end_step > latest[0]:
                rows[run.epoch].append((run.step, run.start, run.size, run.count, run.dropped))
        again = {number: np.array(of_epoch, np.int64).T for number, of_epoch in rows.items()}
        end = min(told, max(int((steps + counts).max()) for steps, _, _, counts, _ in again.values()))
        first = max(self._settled, latest[0], first_of_latest(again.values(), end, COMPARED_RANGES_MAX))
        known = {
            number: epoch.table.rows_of_steps()
            for number, epoch in self._epochs.items()
            if number in again or epoch.table.reaches(first, end)
        }
        first = max(first, first_of_latest(known.values(), end, COMPARED_RANGES_MAX))
        for number, steps in _differing(known, again, first, end).items():
            self._epochs.setdefault(number, _Epoch()).contradict(steps, worker[:WORKER_CHARS_MAX])
            self.revision += 1

    def rewind(self, generation: int, step: int) -> None:
        """The training went back: `generation` begins at `step`, and earlier usage from there on is void."""
        _check("generation", generation)
        check_whole("usage_invalid", "step", step, 0, STEP_MAX)
        if any(other >= generation and behind <= step for other, behind in self._returns):
            return
        if any(other >= generation for other in (*self._told, *(other for other, _ in self._returns))):
            raise RequestRefused(
                "usage_invalid",
                f"generation {generation} or a later one has reported steps already",
                "report the return to an earlier step before the steps that follow it",
            )
        self._returns = [*(one for one in self._returns if one[1] < step), (generation, step)]
        self._settled = min(self._settled, step)
        for epoch in self._epochs.values():
            epoch.rewind(step)
        self._epochs = {number: epoch for number, epoch in self._epochs.items() if not epoch.is_blank}
        self._forget_generations()
        self.revision += 1

    def settle(self, step: int) -> None:
        """The training will not go back to before `step`, so rows before it need no steps."""
        check_whole("usage_invalid", "step", step, 0, STEP_MAX)
        if step > self._settled:
            self.revision += 1
            self._settled = step
            for epoch in self._epochs.values():
                epoch.settle(step)

    def forget_oldest(self) -> bool:
        """Forget the usage of the oldest known epoch; returns whether there was one."""
        number = min((number for number, epoch in self._epochs.items() if epoch.table), default=None)
        if number is None:
            return False
        self._epochs[number].forget()
        self.revision += 1
        return True

    def audit(self, epoch: int) -> EpochAudit:
        """Audit an epoch."""
        _check("epoch", epoch)
        held = self._epochs.get(epoch) or _Epoch()
        used, dropped = held.table.spans(dropped=False), held.table.spans(dropped=True)
        both = Coverage.of(used, dropped)
        missing, repeated = both.gaps(self.samples), both.at_least(2)
        return EpochAudit(
            epoch,
            self.samples,
            _total(Coverage.of(used).at_least(1)),
            _total(Coverage.of(dropped).at_least(1)),
            _listed(missing),
            _total(missing),
            _listed(repeated),
            _total(repeated),
            held.forgotten,
            list(held.conflicts),
        )

    def encode(self) -> list[bytes]:
        """The log, in chunks."""
        packed = list(_packed(self._parts()))
        head = _AuditHead(self.samples, self._told, self._floor, self._returns, self._settled, max(1, len(packed)))
        first, *others = packed or [[]]
        return [_encode((head, first)), *(_encode((number, parts)) for number, parts in enumerate(others, 1))]

    @classmethod
    def decode(cls, chunks: Sequence[bytes]) -> UsageLog:
        """The log of these chunks; an error unless `encode` made them."""
        try:
            head, parts = _decode_first(chunks[0])
            others = [_decode_other(chunk) for chunk in chunks[1:]]
            if head.chunks != len(chunks) or any(number != at for at, (number, _) in enumerate(others, 1)):
                raise ValueError(f"the chunks do not form one log of {head.chunks} chunks")
            return cls._of(head, [*parts, *(part for _, more in others for part in more)])
        except (msgspec.MsgspecError, IndexError, ValueError, OverflowError, RequestRefused) as error:
            raise PeerError("usage_invalid", f"the usage log cannot be decoded: {error}") from error

    @classmethod
    def _of(cls, head: _AuditHead, parts: Iterable[_Part]) -> UsageLog:
        log = cls(head.samples)
        log._told, log._floor, log._returns, log._settled = head.told, head.floor, head.returns, head.settled
        columns = defaultdict(list)
        for part in parts:
            known = _Epoch(part.first_settled, part.end_settled, part.forgotten, part.conflicts)
            log._epochs.setdefault(part.epoch, known)
            columns[part.epoch].append(_columns(part.rows))
        for epoch, of_epoch in columns.items():
            log._epochs[epoch].table.extend(_checked(np.concatenate(of_epoch, axis=1), head.samples))
        return log

    def _parts(self) -> Iterator[_Part]:
        for number in self.epochs:
            epoch = self._epochs[number]
            columns = epoch.table.columns().astype("<i8")
            for start in range(0, max(1, columns.shape[1]), ROWS_PER_PART):
                rows = columns[:, start : start + ROWS_PER_PART].tobytes()
                conflicts = [] if start else epoch.conflicts
                yield _Part(number, epoch.first_settled, epoch.end_settled, epoch.forgotten, rows, conflicts)

    def _void_behind(self, generation: int) -> int:
        """The first void step of a generation, because a later one began there."""
        later = bisect_right(self._returns, (generation, WHOLE_MAX))
        return self._returns[later][1] if later < len(self._returns) else WHOLE_MAX

    def _forget_generations(self) -> None:
        """Keep the latest generations; reports of older ones are ignored from now on."""
        for known in (self._told, [generation for generation, _ in self._returns]):
            if len(known) > GENERATIONS_MAX:
                self._floor = max(self._floor, sorted(known)[-GENERATIONS_MAX])
        if min(self._told, default=self._floor) < self._floor:
            self._told = {generation: step for generation, step in self._told.items() if generation >= self._floor}
        # A rollback voids steps of earlier generations.
        self._returns = [one for one in self._returns if one[0] > self._floor]


@dataclass(slots=True)
class _Epoch:
    """The rows of an epoch, and the range of its settled steps."""

    first_settled: int | None = None
    end_settled: int = 0
    forgotten: bool = False
    conflicts: list[tuple[int, str]] = field(default_factory=list)
    """The first conflicting steps, and the worker that reported differently."""
    table: UsageTable = field(default_factory=UsageTable)

    @property
    def is_blank(self) -> bool:
        return not (self.table or self.forgotten or self.conflicts)

    def contradict(self, steps: Iterable[int], worker: str) -> None:
        self.conflicts = sorted({*self.conflicts, *((step, worker) for step in steps)})[:CONFLICTS_MAX]

    def forget(self) -> None:
        self.table, self.forgotten = UsageTable(), True

    def settle(self, step: int) -> None:
        found = self.table.settle(step)
        if found is not None:
            first, end = found
            self.first_settled = first if self.first_settled is None else min(first, self.first_settled)
            self.end_settled = max(end, self.end_settled)

    def rewind(self, step: int) -> None:
        self.table.rewind(step)
        self.conflicts = [one for one in self.conflicts if one[0] < step]
        if self.first_settled is None or step >= self.end_settled:
            return
        # Some settled usage is void, and it is unknown which part.
        self.table.forget_settled()
        self.forgotten = step > self.first_settled
        self.first_settled, self.end_settled = (self.first_settled, step) if self.forgotten else (None, 0)


class _AuditHead(msgspec.Struct, frozen=True, array_like=True):
    samples: Whole
    told: dict[Whole, Whole]
    floor: Whole
    returns: list[tuple[Whole, Whole]]
    settled: Whole
    chunks: Whole


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """Some of an epoch's rows."""

    epoch: Whole
    first_settled: Whole | None
    end_settled: Whole
    forgotten: bool
    rows: bytes
    conflicts: list[tuple[Whole, str]] = []


_encode = msgspec.msgpack.Encoder().encode
_decode_first = msgspec.msgpack.Decoder(tuple[_AuditHead, list[_Part]]).decode
_decode_other = msgspec.msgpack.Decoder(tuple[Whole, list[_Part]]).decode


def _packed(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Group parts into chunks."""
    packed: list[_Part] = []
    room_bytes = PARTS_BYTES_MAX
    for part in parts:
        part_bytes = len(part.rows) + _PART_BYTES + len(part.conflicts) * _CONFLICT_BYTES
        room_bytes -= part_bytes
        if packed and room_bytes < 0:
            yield packed
            packed, room_bytes = [], PARTS_BYTES_MAX - part_bytes
        packed.append(part)
    if packed:
        yield packed


def _columns(rows: bytes) -> Column:
    return np.frombuffer(rows, "<i8").astype(np.int64).reshape(5, -1)


def _checked(columns: Column, samples: int) -> Column:
    """Refuse rows that no log can contain."""
    steps, starts, sizes, counts, dropped = columns
    room = (samples - starts) // np.maximum(sizes, 1)
    is_right = (steps >= SETTLED) & (starts >= 0) & (sizes > 0) & (counts > 0) & (counts <= room)
    if not bool(np.all(is_right & (dropped >= 0) & (dropped <= 1))):
        raise ValueError("a row has a step, position, size or count outside its range")
    return columns


def _check(name: str, number: int) -> None:
    check_whole("usage_invalid", name, number, 0, WHOLE_MAX)


def _check_run(run: Run, samples: int) -> None:
    """Refuse rows outside an epoch."""
    numbers = (run.step, run.epoch, run.start, run.size, run.count)
    # Valid rows are checked in bulk; the problem is searched only if there is one.
    is_right = all(type(number) is int for number in numbers) and 0 <= min(numbers) <= max(numbers) <= WHOLE_MAX
    if not (is_right and run.size and run.count):
        for name, least in (("step", 0), ("epoch", 0), ("start", 0), ("size", 1), ("count", 1)):
            check_whole("usage_invalid", name, getattr(run, name), least, WHOLE_MAX)
    if run.end > samples or run.end_step > STEP_MAX:
        used = f"{run.start} to {run.end} (steps {run.step} to {run.end_step})"
        text = f"positions must be below {samples}, the samples of an epoch, got {used}"
        raise RequestRefused("usage_invalid", text)


def _differing(known: Mapping[int, Column], again: Mapping[int, Column], first: int, end: int) -> dict[int, list[int]]:
    """By epoch, the steps from `first` up to `end` that both report, differently."""
    told = {number: per_step(rows, first, end) for number, rows in again.items()}
    steps = np.unique(np.concatenate([ranges[0] for ranges in told.values()]))
    found = {}
    for number in {*known, *told}:
        before, now = (per_step(rows.get(number, _NO_ROWS), first, end) for rows in (known, again))
        if differing := np.intersect1d(_in_one_only(before, now), steps).tolist():
            found[number] = differing
    return found


def _in_one_only(ranges: Column, others: Column) -> Column:
    """The steps whose ranges differ."""
    if np.array_equal(ranges, others):
        return ranges[0, :0]
    both, times = np.unique(np.concatenate([ranges, others], axis=1), axis=1, return_counts=True)
    found: Column = both[0, times == 1]
    return found


def _total(spans: Spans) -> int:
    starts, ends = spans
    return int(np.sum(ends - starts))


def _listed(spans: Spans) -> list[range]:
    starts, ends = spans
    return [range(*span) for span in zip(starts[:RANGES_MAX].tolist(), ends[:RANGES_MAX].tolist(), strict=True)]
