"""How long a restore takes, from the restores that were measured.

The last restores of the job from the same kind of storage give a line, a base and a time for each byte; without any,
those of other jobs. The ones that are nearest in size say how far a restore may be from it. Before any measurement a
bandwidth is assumed, and the estimate says so.

Invariants:
- An estimate names its source. `low_s <= expected_s <= high_s`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from math import log
from statistics import median
from typing import NamedTuple

from forged.catalog.messages import RestoreEstimate
from forged.phrases import counted

MEASURED_MAX = 32
"""So many restores of each job and kind of storage are kept."""
NEAREST_MAX = 7
SIZES_DIFFER = 1.5
"""Two restores tell the time of a byte if one is so many times as large as the other."""
BASE_S = 0.05
"""What a restore of few bytes is assumed to take, at most half of a measured one."""
ASSUMED_BYTES_PER_S = {"local": 1e9}
ASSUMED_REMOTE_BYTES_PER_S = 200e6
SPREAD_ASSUMED = 5.0
SPREAD_FEW = 1.5
"""An interval is at least that wide, as a factor, while few restores were measured."""
FEW = 5
SECONDS_MIN = 1e-6


class MeasuredRestore(NamedTuple):
    """One restore: how many bytes were read, in how many seconds."""

    size_bytes: int
    seconds: float


class Line(NamedTuple):
    """The time of a restore as a base and a time for each byte."""

    base_s: float
    s_per_byte: float

    def seconds(self, size_bytes: float) -> float:
        return max(SECONDS_MIN, self.base_s + self.s_per_byte * size_bytes)


class RestoreTimes:
    """The measured restores, by job and kind of storage."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, str], deque[MeasuredRestore]] = {}
        self._of_all: dict[str, deque[MeasuredRestore]] = {}
        """The last restores of all jobs, by kind of storage."""
        self._lines: dict[tuple[str | None, str], Line] = {}
        """The lines that are known, by job, None for all jobs, and kind of storage."""

    def clear(self) -> None:
        self._measured.clear()
        self._of_all.clear()
        self._lines.clear()

    def load(self, job: str, kind: str, measured: Iterable[MeasuredRestore]) -> None:
        for one in measured:
            self.add(job, kind, one)

    def add(self, job: str, kind: str, measured: MeasuredRestore) -> list[MeasuredRestore]:
        """Add a restore; returns all that are kept of its job and kind."""
        kept = self._measured.setdefault((job, kind), deque(maxlen=MEASURED_MAX))
        kept.append(measured)
        self._of_all.setdefault(kind, deque(maxlen=MEASURED_MAX)).append(measured)
        self._lines.pop((job, kind), None)
        self._lines.pop((None, kind), None)
        return list(kept)

    def forget(self, job: str) -> list[str]:
        """Forget a job's restores; returns their kinds."""
        kinds = [kind for other, kind in self._measured if other == job]
        for kind in kinds:
            del self._measured[job, kind]
            self._lines.pop((job, kind), None)
        return kinds

    def estimate(self, job: str, kind: str, size_bytes: int) -> RestoreEstimate:
        """How long it takes to read so many bytes."""
        if measured := self._measured.get((job, kind)):
            return self._from_measured(job, kind, measured, size_bytes, f"of this job from {kind} storage")
        if measured := self._of_all.get(kind):
            return self._from_measured(None, kind, measured, size_bytes, f"of other jobs from {kind} storage")
        rate = ASSUMED_BYTES_PER_S.get(kind, ASSUMED_REMOTE_BYTES_PER_S)
        seconds = BASE_S + size_bytes / rate
        source = f"assumed: {rate / 1e6:g} MB/s; no restore from {kind} storage was measured yet"
        return RestoreEstimate(seconds / SPREAD_ASSUMED, seconds, seconds * SPREAD_ASSUMED, source)

    def _from_measured(
        self, job: str | None, kind: str, measured: Sequence[MeasuredRestore], size_bytes: int, where: str
    ) -> RestoreEstimate:
        line = self._lines.get((job, kind)) or self._lines.setdefault((job, kind), line_through(measured))
        nearest = sorted(measured, key=lambda one: abs(_distance(one.size_bytes, size_bytes)))[:NEAREST_MAX]
        spread = SPREAD_FEW if len(nearest) < FEW else 1.0
        ratios = [1 / spread, spread, *(one.seconds / line.seconds(one.size_bytes) for one in nearest)]
        expected_s = line.seconds(size_bytes)
        source = f"{counted(len(measured), 'measured restore')} {where}"
        return RestoreEstimate(expected_s * min(ratios), expected_s, expected_s * max(ratios), source)


def bytes_read(sizes: Iterable[int]) -> int:
    """The bytes that a restore reads, from the sizes of the checkpoints in its chain.

    Each chunk of the state is read once, from the checkpoint that has it: together as much as the full one has.
    """
    return max(sizes, default=0)


def line_through(measured: Sequence[MeasuredRestore]) -> Line:
    """The line that fits most restores: the median of the slopes between any two, and of the bases that follow.

    Some restores that were slow for other reasons do not move it.
    """
    slopes = [
        (after.seconds - before.seconds) / (after.size_bytes - before.size_bytes)
        for before, after in combinations(measured, 2)
        if abs(_distance(before.size_bytes, after.size_bytes)) > log(SIZES_DIFFER)
    ]
    slope = median(slopes) if slopes else 0.0
    if slope > 0.0:
        return Line(max(0.0, median(one.seconds - slope * one.size_bytes for one in measured)), slope)
    size_bytes, seconds = median(one.size_bytes for one in measured), median(one.seconds for one in measured)
    base_s = min(BASE_S, seconds / 2)
    return Line(base_s, (seconds - base_s) / (size_bytes + 1))


def _distance(one_bytes: int, other_bytes: int) -> float:
    return log((other_bytes + 1) / (one_bytes + 1))


def seconds_per_step(saves: Sequence[tuple[int, float]]) -> float:
    """The time of a step, from the steps and times of saves, oldest first; 0 if they do not tell.

    The median over neighbouring saves, so that a pause of the job does not count.
    """
    rates = [
        (after_s - before_s) / (after - before)
        for (before, before_s), (after, after_s) in pairwise(saves)
        if after > before and after_s > before_s
    ]
    return median(rates) if rates else 0.0
