"""What a handler has done so far, in numbers.

Law: counting costs less than what it counts: one clock reading, one exponent and one addition per message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import frexp

EXPONENT_MIN = -30
EXPONENT_MAX = 30
TINY_S = 1e-9


@dataclass(slots=True)
class Latency:
    """How long things took, in buckets that double.

    The bucket of a duration is its binary exponent: `counts[n]` holds those from 2**(n-1) up to 2**n seconds. Negative
    exponents index from the end of the list, which is what makes it cheap.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (EXPONENT_MAX - EXPONENT_MIN + 1))

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[frexp(seconds + TINY_S)[1]] += 1

    @property
    def count(self) -> int:
        """How many durations were counted."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """The upper bound in seconds of the bucket that holds this share of all durations; 0 before the first."""
        wanted = share * self.count
        seen = 0
        for exponent in range(EXPONENT_MIN, EXPONENT_MAX + 1):
            seen += self.counts[exponent]
            if self.counts[exponent] and seen >= wanted:
                return 2.0**exponent
        return 0.0


@dataclass(slots=True)
class HandlerStatistics:
    """The life of one handler."""

    failed: int = 0
    dropped: int = 0
    coalesced: int = 0
    latency: Latency = field(default_factory=Latency)

    @property
    def handled(self) -> int:
        """How many messages it was given, failures included."""
        return self.latency.count
