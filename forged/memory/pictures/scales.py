"""Scales of axes: round steps, and where a value is in pixels."""

from __future__ import annotations

from dataclasses import dataclass

_DECIMAL_STEPS = (1, 2, 5)


def byte_ticks(end: int, most: int) -> list[int]:
    """The multiples of a power of two from 0 to the end, in at most so many steps."""
    step = 1 << (max(-(-end // most), 1) - 1).bit_length()
    return list(range(0, end + 1, step))


def ticks(first: int, last: int, most: int) -> list[int]:
    """At most so many numbers with few digits from the first to the last."""
    span = max(last - first, 1)
    power = 1
    while True:
        for factor in _DECIMAL_STEPS:
            step = power * factor
            if span // step < most:
                return list(range(-(-first // step) * step, last + 1, step))
        power *= 10


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps the values from `first` to `last` to the pixels from `begin` to `end`; exact for large integers."""

    first: int
    last: int
    begin: float
    end: float

    def __call__(self, value: int) -> float:
        return self.begin + (value - self.first) / max(self.last - self.first, 1) * (self.end - self.begin)
