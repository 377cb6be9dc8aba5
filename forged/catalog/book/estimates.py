"""How long a restore takes, from the restores that were measured.

A restore is compared with the measured ones of the same kind of storage that are nearest in size; those of the same job
come first. Before any measurement a bandwidth is assumed, and the estimate says so.

Invariants:
- An estimate names its source. `low_s <= expected_s <= high_s`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import log
from statistics import median
from typing import NamedTuple

from forged.catalog.messages import RestoreEstimate
from forged.phrases import counted

MEASURED_MAX = 32
"""So many restores of each job and kind of storage are kept."""
MEASURED_OF_ALL_MAX = 256
NEAREST_MAX = 7
BASE_S = 0.05
"""What a restore of few bytes takes."""
ASSUMED_BYTES_PER_S = {"local": 1e9}
ASSUMED_REMOTE_BYTES_PER_S = 200e6
SPREAD_ASSUMED = 5.0
SPREAD_FEW = 1.5
"""An interval is at least that wide, as a factor, while few restores were measured."""
FEW = 5


class MeasuredRestore(NamedTuple):
    """One restore: how many bytes were read, in how many seconds."""

    size_bytes: int
    seconds: float


class RestoreTimes:
    """The measured restores, by job and kind of storage."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, str], deque[MeasuredRestore]] = {}
        self._of_all: dict[str, deque[MeasuredRestore]] = {}
        """The last restores of all jobs, by kind of storage."""

    def clear(self) -> None:
        self._measured.clear()
        self._of_all.clear()

    def load(self, job: str, kind: str, measured: Iterable[MeasuredRestore]) -> None:
        for one in measured:
            self.add(job, kind, one)

    def add(self, job: str, kind: str, measured: MeasuredRestore) -> list[MeasuredRestore]:
        """Add a restore; returns all that are kept of its job and kind."""
        kept = self._measured.setdefault((job, kind), deque(maxlen=MEASURED_MAX))
        kept.append(measured)
        self._of_all.setdefault(kind, deque(maxlen=MEASURED_OF_ALL_MAX)).append(measured)
        return list(kept)

    def forget(self, job: str) -> list[str]:
        """Forget a job's restores; returns their kinds."""
        kinds = [kind for other, kind in self._measured if other == job]
        for kind in kinds:
            del self._measured[job, kind]
        return kinds

    def estimate(self, job: str, kind: str, size_bytes: int) -> RestoreEstimate:
        """How long it takes to read so many bytes."""
        own = self._measured.get((job, kind))
        if own:
            return _from_measured(own, size_bytes, f"of this job from {kind} storage")
        if kind in self._of_all:
            return _from_measured(self._of_all[kind], size_bytes, f"of other jobs from {kind} storage")
        rate = ASSUMED_BYTES_PER_S.get(kind, ASSUMED_REMOTE_BYTES_PER_S)
        seconds = BASE_S + size_bytes / rate
        source = f"assumed: {rate / 1e6:g} MB/s; no restore from {kind} storage was measured yet"
        return RestoreEstimate(seconds / SPREAD_ASSUMED, seconds, seconds * SPREAD_ASSUMED, source)


def _from_measured(measured: Iterable[MeasuredRestore], size_bytes: int, where: str) -> RestoreEstimate:
    nearest = sorted(measured, key=lambda one: abs(_distance(one, size_bytes)))[:NEAREST_MAX]
    seconds = sorted(_scaled(one, size_bytes) for one in nearest)
    expected = median(seconds)
    spread = SPREAD_FEW if len(seconds) < FEW else 1.0
    low, high = min(seconds[0], expected / spread), max(seconds[-1], expected * spread)
    return RestoreEstimate(low, expected, high, f"{counted(len(seconds), 'measured restore')} {where}")


def _distance(one: MeasuredRestore, size_bytes: int) -> float:
    return log((size_bytes + 1) / (one.size_bytes + 1))


def _scaled(one: MeasuredRestore, size_bytes: int) -> float:
    """The seconds for another size: what is above the base grows with the bytes."""
    base = min(BASE_S, one.seconds)
    return base + (one.seconds - base) * (size_bytes + 1) / (one.size_bytes + 1)


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
