"""Rate limit and rate measurement of transfers.

Invariants:
- Time is an argument, in seconds.
- Over any period a throttle lets at most rate x period plus one burst pass. A caller that takes more than is available
  waits for the rest, and later callers wait behind it.
- A measured rate is bytes over time with old transfers fading; it is unknown before the first byte.
"""

from __future__ import annotations

import math
import threading

from forged.errors import ConfigError, Problem

RATE_BYTES_MIN = 1 << 20
"""A slower limit would look like a stalled transfer."""
BURST_S = 0.1
HALF_LIFE_S = 10.0
"""After so many seconds of transfers, earlier ones count half."""


class Throttle:
    """A token bucket; thread-safe."""

    def __init__(self, bytes_per_s: float | None) -> None:
        if bytes_per_s is not None and not RATE_BYTES_MIN <= bytes_per_s < math.inf:
            wanted = f"a finite number of at least {RATE_BYTES_MIN} bytes per second, or None"
            raise ConfigError(
                "rate_invalid",
                "rate_bytes_per_s is not valid",
                problems=[Problem("rate_bytes_per_s", bytes_per_s, wanted)],
            )
        self._rate = bytes_per_s
        self._tokens = 0.0
        self._at = -math.inf
        self._lock = threading.Lock()

    def take(self, count: int, now: float) -> float:
        """Take so many bytes; returns how many seconds to wait before they may pass."""
        if self._rate is None:
            return 0.0
        with self._lock:
            burst = self._rate * BURST_S
            self._tokens = min(burst, self._tokens + self._rate * max(0.0, now - self._at))
            self._at = max(self._at, now)
            self._tokens -= count
            return max(0.0, -self._tokens / self._rate)


class Bandwidth:
    """The measured rate of one transfer among its concurrent ones."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0

    def observe(self, count: int, seconds: float) -> None:
        """Record that a transfer moved `count` bytes in `seconds`."""
        if seconds > 0:
            fading = 0.5 ** (seconds / HALF_LIFE_S)
            self._bytes = self._bytes * fading + count
            self._seconds = self._seconds * fading + seconds

    @property
    def bytes_per_s(self) -> float | None:
        """None before the first byte."""
        return self._bytes / self._seconds if self._bytes > 0 and self._seconds > 0 else None
