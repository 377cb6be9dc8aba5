"""How much of something may happen per second.

Law: what was not used is saved up to one burst and no further, so whoever was quiet may be loud for a moment, and
nobody for long. Time is an argument.
"""

from __future__ import annotations


class TokenBucket:
    """A bucket that fills at `per_s` and holds `burst`."""

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        self.per_s = per_s
        self.burst = burst
        self._left = burst
        self._filled_at = now

    def resize(self, per_s: float, burst: float) -> None:
        """Fill and hold more, or less, from now on."""
        self.per_s, self.burst = per_s, burst

    def take(self, amount: float, now: float) -> bool:
        """Use some of it, or nothing where that is more than there is."""
        self._left = min(self.burst, self._left + max(0.0, now - self._filled_at) * self.per_s)
        self._filled_at = max(self._filled_at, now)
        if amount > self._left:
            return False
        self._left -= amount
        return True
