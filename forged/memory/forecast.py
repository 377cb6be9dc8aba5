"""When a device runs out of memory: the rate at which its use grows, and thresholds of pressure.

Invariants:
- The rate is the median of the slopes between all samples, so that single peaks and releases do not turn it.
- A sample is the highest use of its interval: a device runs out of memory at its peaks, not at its averages.
- A crossed threshold is reported once, until the pressure has fallen below it by the hysteresis.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import combinations
from math import sqrt
from typing import NamedTuple

SAMPLES_MAX = 24
"""The window, in samples; the work of a forecast grows with its square."""
SAMPLES_MIN = 5
"""With fewer samples there is no forecast."""
SAMPLE_S = 2.5
"""So far apart samples are, so that the window is a minute."""
QUANTILE = 1.96
"""Of the normal distribution: the interval holds the true rate in 95 of 100 cases."""
THRESHOLDS = (0.8, 0.9, 0.97)
HYSTERESIS = 0.05
SECONDS_MAX = 1e9
"""A forecast beyond these seconds, about 30 years, is none."""


class Rate(NamedTuple):
    """How fast use grows, in bytes per second, with the interval that it lies in."""

    middle: float
    low: float
    high: float


class SecondsLeft(NamedTuple):
    """The time until no memory is left; None: never, at this rate."""

    middle: float | None
    low: float | None
    high: float | None


class UsageWindow:
    """The use of a device during the last minute."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=SAMPLES_MAX)
        self._rate: Rate | None = None
        self._is_rate_known = False
        """Whether the rate is that of the present samples: it takes 0.1 ms, and devices are listed more often."""

    def __len__(self) -> int:
        return len(self._samples)

    def observe(self, used: int, now: float) -> None:
        """Note the present use; within one interval only the highest counts."""
        samples = self._samples
        if samples and now < samples[-1][0] + SAMPLE_S:
            time, highest = samples[-1]
            if used <= highest:
                return
            samples[-1] = (time, used)
        else:
            samples.append((now, used))
        self._is_rate_known = False

    def rate(self) -> Rate | None:
        """How fast use grows; None: too few samples."""
        if not self._is_rate_known:
            self._rate, self._is_rate_known = self._estimated(), True
        return self._rate

    def _estimated(self) -> Rate | None:
        """Theil and Sen's estimate of the slope, with its interval by Kendall's variance."""
        count = len(self._samples)
        if count < SAMPLES_MIN:
            return None
        slopes = sorted((b - a) / (later - earlier) for (earlier, a), (later, b) in combinations(self._samples, 2))
        spread = QUANTILE * sqrt(count * (count - 1) * (2 * count + 5) / 18)
        last = len(slopes) - 1
        low = max(0, round((len(slopes) - spread) / 2))
        high = min(last, round((len(slopes) + spread) / 2))
        middle = (slopes[last // 2] + slopes[(last + 1) // 2]) / 2
        return Rate(middle, slopes[low], slopes[high])


def seconds_left(obtainable: int, rate: Rate) -> SecondsLeft:
    """Until so many bytes, the largest hole that eviction and compaction can open, are used up."""
    return SecondsLeft(
        _seconds(obtainable, rate.middle), _seconds(obtainable, rate.high), _seconds(obtainable, rate.low)
    )


def _seconds(bytes_left: int, rate: float) -> float | None:
    if rate <= 0 or bytes_left >= SECONDS_MAX * rate:
        return None
    return bytes_left / rate


class Crossing(NamedTuple):
    """A threshold that the pressure has crossed."""

    threshold: float
    is_rising: bool


class PressureLevel:
    """Which thresholds the pressure of a device is above."""

    def __init__(self) -> None:
        self._level = 0

    def crossed(self, pressure: float) -> Crossing | None:
        """The threshold that was crossed: the highest one upwards, the lowest one downwards."""
        risen = bisect_right(THRESHOLDS, pressure)
        if risen > self._level:
            self._level = risen
            return Crossing(THRESHOLDS[risen - 1], is_rising=True)
        fallen = bisect_right(THRESHOLDS, pressure + HYSTERESIS)
        if fallen < self._level:
            self._level = fallen
            return Crossing(THRESHOLDS[fallen], is_rising=False)
        return None
