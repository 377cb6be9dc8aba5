"""How fast bytes may travel, and how fast they do.

Law: time is an argument, in seconds. Over any stretch of time a throttle lets no more pass than its rate times that
time and one burst; whoever has taken what was not there yet waits for it, and those who come later wait longer. A
measured rate is bytes over the time they took, in which what was long ago counts less, and is unknown before the
first byte.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from forged.errors import ConfigError, Problem

RATE_BYTES_MIN = 1 << 20
"""A slower limit would look like a transfer that stands still."""
BURST_S = 0.1
HALF_LIFE_S = 10.0
"""After so many seconds of transfers, those before count half."""


class Throttle:
    """A token bucket; several threads take from it."""

    def __init__(self, bytes_per_s: float | None) -> None:
        if bytes_per_s is not None and not RATE_BYTES_MIN <= bytes_per_s < math.inf:
            wanted = f"at least {RATE_BYTES_MIN} bytes per second, or None"
            raise ConfigError(
                "rate_invalid",
                "the rate limit is not valid",
                problems=[Problem("rate_bytes_per_s", bytes_per_s, wanted)],
            )
        self._rate = bytes_per_s
        self._tokens = 0.0
        self._at = -math.inf
        self._lock = threading.Lock()

    def take(self, count: int, now: float) -> float:
        """Take so many bytes; returns how long to wait before they may pass."""
        if self._rate is None:
            return 0.0
        with self._lock:
            burst = self._rate * BURST_S
            self._tokens = min(burst, self._tokens + self._rate * max(0.0, now - self._at))
            self._at = max(self._at, now)
            self._tokens -= count
            return max(0.0, -self._tokens / self._rate)


@dataclass(slots=True)
class _Measured:
    bytes: float = 0.0
    seconds: float = 0.0

    def add(self, count: int, seconds: float) -> None:
        fading = 0.5 ** (seconds / HALF_LIFE_S)
        self.bytes = self.bytes * fading + count
        self.seconds = self.seconds * fading + seconds

    @property
    def rate(self) -> float | None:
        return self.bytes / self.seconds if self.bytes > 0 and self.seconds > 0 else None


class Bandwidth:
    """What one transfer gets, with as many beside it as there are, from each source and on the whole."""

    def __init__(self) -> None:
        self._all = _Measured()
        self._by_source: dict[Hashable, _Measured] = {}

    def observe(self, source: Hashable, count: int, seconds: float) -> None:
        """A transfer from the source has moved so many bytes in so many seconds."""
        if seconds > 0:
            self._all.add(count, seconds)
            self._by_source.setdefault(source, _Measured()).add(count, seconds)

    @property
    def overall_bytes_per_s(self) -> float | None:
        """The rate of one transfer from anywhere; None before the first."""
        return self._all.rate

    def bytes_per_s(self, source: Hashable) -> float | None:
        """The rate of one transfer from a source, or from anywhere when that one was not measured."""
        found = self._by_source.get(source)
        return self._all.rate if found is None or found.rate is None else found.rate

    def seconds_for(self, bytes_by_source: Mapping[Hashable, int], concurrency: int) -> float | None:
        """How long it takes to fetch so much from each, with so many transfers at once; None if nobody can know."""
        total = 0.0
        for source, count in bytes_by_source.items():
            rate = self.bytes_per_s(source)
            if rate is None:
                return None
            total += count / rate
        return total / concurrency
