"""Counters and latency histogram of one handler; per message one clock reading, one `frexp`, one addition."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import frexp

EXPONENT_MIN = -30
EXPONENT_MAX = 30
TINY_S = 1e-9


@dataclass(slots=True)
class Latency:
    """A histogram of durations with buckets that double.

    The bucket of a duration is its binary exponent: `counts[n]` counts durations from 2**(n-1) up to 2**n seconds.
    Negative exponents index from the end of the list, which makes counting cheap.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (EXPONENT_MAX - EXPONENT_MIN + 1))

    def observe(self, seconds: float) -> None:
        """Add one duration."""
        self.counts[frexp(seconds + TINY_S)[1]] += 1

    @property
    def count(self) -> int:
        """The number of durations."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """The upper bound in seconds of the bucket with this quantile; 0 without durations."""
        wanted = share * self.count
        seen = 0
        for exponent in range(EXPONENT_MIN, EXPONENT_MAX + 1):
            seen += self.counts[exponent]
            if self.counts[exponent] and seen >= wanted:
                return 2.0**exponent
        return 0.0


@dataclass(slots=True)
class HandlerStatistics:
    """The counters of one handler."""

    failed: int = 0
    dropped: int = 0
    coalesced: int = 0
    latency: Latency = field(default_factory=Latency)

    @property
    def handled(self) -> int:
        """The number of messages that the handler received, failures included."""
        return self.latency.count
